//! Frames that whoever has read them for the port has it take on his own thread.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use pvrdma_link::{Frames, LinkReceiver};
use pvrdma_verbs::EndOnPanic;

use super::Port;
use super::arrivals::Arrival;
use super::classify::rdma_destination;

/// Bytes that queue pairs send on a thread that has others to work for. The port's own goes on with the rest.
const SEND_BYTES: u64 = 64 << 10;

impl Port {
    /// From now on, whoever has frames for the port may have it take them.
    pub(super) fn take_at_once(self: &Arc<Self>) {
        // With several queues packets wait in their batches, which are the port's.
        if !self.queues.are_many() {
            let me = Arc::downgrade(self);
            self.uplink.link.set_receiver(me);
        }
    }

    /// When this returns nobody else's thread is in here any more.
    pub(super) fn take_no_more(&self) {
        self.uplink.link.set_receiver(Weak::<Self>::new());
    }

    fn take_frames(&self, frames: &Frames, list: &[usize]) -> usize {
        // Whoever reads has frames that came before these, until they are in the queue.
        let Some(_order) = self.reading.try_lock() else { return 0 };
        if self.is_link_down() || self.point.is_on() || !self.is_attached() {
            return 0;
        }
        let is_rdma = |index: &&usize| frames.get(**index).is_some_and(|it| rdma_destination(it, self.mac).is_some());
        let count = list.iter().take_while(is_rdma).count();
        if count == 0 {
            return 0;
        }
        let more = self.queues.only().take_at_once(|receiver, resumed| {
            let taken = list.iter().take(count).filter_map(|&index| frames.get(index)).map(Arrival::alone);
            receiver.receive(self, &mut { taken });
            receiver.respond(self, resumed, SEND_BYTES)
        });
        let Some(more) = more else { return 0 };
        self.batches.fetch_add(1, Ordering::Relaxed);
        if more {
            self.wake();
        }
        count
    }
}

/// A network's thread that reads the uplink has packets taken, if it can: they are in its cache, and nobody is woken.
impl LinkReceiver for Port {
    fn take(&self, frames: &Frames, list: &[usize]) -> usize {
        let _guard = EndOnPanic::new("a port");
        let began = self.now();
        let taken = self.take_frames(frames, list);
        self.share.add_port_time(self.now().saturating_sub(began));
        taken
    }
}
