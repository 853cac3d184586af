//! A hostile VMM: clients of the sockets of both functions of a device. They send anything, with hostile memory,
//! interrupts and guests.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;

use pvrdma_dev::{ObjectCounts, PvrdmaDevice};
use pvrdma_guest_memory::{DmaSpace, PinPolicy};
use pvrdma_pci_function::PciFunction;
use pvrdma_rxe::RxeHca;
use pvrdma_verbs::testing::mac;
use pvrdma_vfio_user_server::{Endpoint, IrqTable};
use pvrdma_vmxnet3::{NicLink, Vmxnet3Config};
use pvrdmad::testing::{Behind, Dice, HostileClient};
use rustix::net::sockopt::{set_socket_recv_buffer_size, set_socket_send_buffer_size};

use crate::network::{Network, VMM};

/// Bytes that fit into a socket without a reader. Linux counts more than the payload.
const SOCKET_BUFFER: usize = 200 << 10;

/// The VMM's network function, before the network exists.
pub(crate) struct HostileCard {
    pub(crate) link: Arc<NicLink>,
    endpoint: Endpoint,
}

impl HostileCard {
    pub(crate) fn new() -> Self {
        let (irqs, memory) = (Arc::new(IrqTable::default()), DmaSpace::new(PinPolicy::Off));
        let config = Vmxnet3Config::new("hostile card", mac(VMM));
        let link = NicLink::with_device(config, Arc::clone(&memory), Arc::clone(&irqs) as _).unwrap();
        let endpoint = endpoint(Arc::clone(link.device()) as _, memory, irqs);
        Self { link: Arc::new(link), endpoint }
    }
}

pub(crate) struct Vmm {
    card: HostileCard,
    endpoint: Endpoint,
    pub(crate) device: Arc<PvrdmaDevice<RxeHca>>,
    /// The VMM truncates memory while the device uses it, which needs another thread.
    truncates: bool,
    dice: Dice,
    /// Bytes charged to the device before it had a client: the buffers of its port.
    idle_bytes: u64,
}

impl Vmm {
    pub(crate) fn new(network: &Network, card: HostileCard, seed: u64, truncates: bool) -> Self {
        let (irqs, memory) = (Arc::new(IrqTable::default()), DmaSpace::new(PinPolicy::Off));
        let config = Network::config(VMM, seed);
        let device =
            PvrdmaDevice::new(config, Arc::clone(&memory), Arc::clone(&irqs) as _, &network.station(VMM)).unwrap();
        let endpoint = endpoint(Arc::clone(&device) as _, memory, irqs);
        let idle_bytes = device.status().kept.used_bytes;
        Self { card, endpoint, device, truncates, dice: Dice::new(seed, 4), idle_bytes }
    }

    /// Runs one client of one function, from its first message to its last.
    pub(crate) fn step(&mut self) {
        let (server, client) = UnixStream::pair().unwrap();
        for stream in [&server, &client] {
            set_socket_send_buffer_size(stream, SOCKET_BUFFER).unwrap();
            set_socket_recv_buffer_size(stream, SOCKET_BUFFER).unwrap();
        }
        let (endpoint, behind) =
            self.dice.pick(&[(&self.endpoint, Behind::Rdma), (&self.card.endpoint, Behind::Network(mac(VMM)))]);
        let hostile = HostileClient::new(&mut self.dice);
        // All messages are in the socket before the server reads.
        hostile.talk(&client, &mut self.dice, behind);
        // A reply that does not fit into the socket ends the connection.
        server.set_nonblocking(true).unwrap();
        let truncate = self.truncates && self.dice.one_in(3);
        thread::scope(|scope| {
            if truncate {
                scope.spawn(|| hostile.truncate());
            }
            endpoint.serve(&server);
        });
        assert_eq!(endpoint.memory.mapped_bytes(), 0);
        assert!(!self.card.link.device().status().active, "its client has left");
        assert_eq!(self.objects(), ObjectCounts::default());
    }

    /// Returns the counts of objects once the device is not locked otherwise.
    fn objects(&self) -> ObjectCounts {
        loop {
            let objects = self.device.status().objects;
            if objects.gids.is_some() {
                return objects;
            }
            thread::yield_now();
        }
    }

    /// Checks that no resources remain.
    pub(crate) fn end(&self) {
        assert_eq!(self.device.status().kept.used_bytes, self.idle_bytes);
    }
}

fn endpoint(function: Arc<dyn PciFunction>, memory: Arc<DmaSpace>, irqs: Arc<IrqTable>) -> Endpoint {
    Endpoint::new("hostile", function, memory, irqs)
}
