//! Direct delivery: the thread that read the frames also runs the port's receive path for them.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use pvrdma_base::EndOnPanic;
use pvrdma_link::{Frames, LinkReceiver};

use super::arrivals::Arrival;
use super::classify::rdma_destination;
use super::{Port, RoceReceiver};

/// Bytes that queue pairs send on a thread that serves others, too. The port's own thread sends the rest.
const SEND_BYTES: u64 = 64 << 10;

impl Port {
    /// Lets a thread that has frames for the port deliver them itself.
    pub(super) fn take_at_once(self: &Arc<Self>) {
        // With several queues, packets wait in batches that the port owns, which these frames are not part of.
        if !self.queues.are_many() {
            let me = Arc::downgrade(self);
            self.uplink.link.set_receiver(me);
        }
    }

    /// Ends direct delivery. Once this has returned, no other thread is in the receive path.
    pub(super) fn take_no_more(&self) {
        self.uplink.link.set_receiver(Weak::<Self>::new());
    }

    fn take_frames(&self, frames: &Frames, list: &[usize]) -> usize {
        // The reading thread holds frames that arrived before these until they are in the queue. Delivering these now
        // would reorder them.
        let Some(_order) = self.reading.try_lock() else { return 0 };
        if self.is_link_down() || self.point.is_on() || !self.is_attached() {
            return 0;
        }
        let is_rdma = |index: &&usize| frames.get(**index).is_some_and(|it| rdma_destination(it, self.mac).is_some());
        let count = list.iter().take_while(is_rdma).count();
        if count == 0 {
            return 0;
        }
        let may = |receiver: &(dyn RoceReceiver + 'static)| !receiver.is_slow();
        let more = self.queues.only().take_at_once(may, |receiver, resumed| {
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

/// Direct delivery on the network's thread that reads the uplink: the packets are in its cache, and no other thread has
/// to be woken.
impl LinkReceiver for Port {
    fn take(&self, frames: &Frames, list: &[usize]) -> usize {
        let _guard = EndOnPanic::new("a port");
        let began = self.now();
        let taken = self.take_frames(frames, list);
        self.share.add_port_time(self.now().saturating_sub(began));
        taken
    }
}
