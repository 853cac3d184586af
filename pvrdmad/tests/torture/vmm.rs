//! A hostile VMM: clients of a device's socket that say anything, with memory, interrupts and a guest that is as bad.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;

use pvrdma_dev::{ObjectCounts, PvrdmaDevice};
use pvrdma_guest_memory::{DmaSpace, PinPolicy};
use pvrdma_rxe::Rxe;
use pvrdmad::testing::{Behind, Dice, HostileClient};
use pvrdmad::vfio_user::{ConnectionStats, Endpoint, FileRules, IrqTable, REPLY_DEADLINE};
use rustix::net::sockopt::{set_socket_recv_buffer_size, set_socket_send_buffer_size};

use crate::network::{Network, VMM};

/// Bytes that a socket takes without a reader. Linux counts more than the payload.
const SOCKET_BUFFER: usize = 200 << 10;

pub(crate) struct Vmm {
    endpoint: Endpoint,
    device: Arc<PvrdmaDevice<Rxe>>,
    /// It takes memory away while it is used, which needs a thread.
    truncates: bool,
    dice: Dice,
}

impl Vmm {
    pub(crate) fn new(network: &Network, seed: u64, truncates: bool) -> Self {
        let (irqs, memory) = (Arc::new(IrqTable::default()), DmaSpace::new(PinPolicy::Off));
        let config = Network::config(VMM, seed);
        let device = PvrdmaDevice::new(config, Arc::clone(&memory), Arc::clone(&irqs) as _, network.rxe(VMM)).unwrap();
        let endpoint = Endpoint {
            name: "hostile".to_owned(),
            function: Arc::clone(&device) as _,
            memory,
            files: FileRules::default(),
            irqs,
            stats: Arc::new(ConnectionStats::default()),
            mappable: None,
            intx: false,
            reply_deadline: REPLY_DEADLINE,
        };
        Self { endpoint, device, truncates, dice: Dice::new(seed, 4) }
    }

    /// A client from its first message to its last.
    pub(crate) fn step(&mut self) {
        let (server, client) = UnixStream::pair().unwrap();
        for stream in [&server, &client] {
            set_socket_send_buffer_size(stream, SOCKET_BUFFER).unwrap();
            set_socket_recv_buffer_size(stream, SOCKET_BUFFER).unwrap();
        }
        let hostile = HostileClient::new(&mut self.dice);
        // All messages are in the socket before the server looks.
        hostile.talk(&client, &mut self.dice, Behind::Rdma);
        // A reply that finds no room ends the connection.
        server.set_nonblocking(true).unwrap();
        let truncate = self.truncates && self.dice.one_in(3);
        thread::scope(|scope| {
            if truncate {
                scope.spawn(|| hostile.truncate());
            }
            self.endpoint.serve(&server);
        });
        let status = self.device.status();
        assert_eq!((status.objects, status.kept.used_bytes), (ObjectCounts::default(), 0));
        assert_eq!(self.endpoint.memory.mapped_bytes(), 0);
    }
}
