//! A link whose frames can be captured.

use std::io;
use std::sync::{Arc, Weak};

use pvrdma_base::Counter;
use pvrdma_link::{Frames, Link, LinkInspect, LinkReceiver, Offload, Readiness};
use pvrdma_packet::MacAddr;

use super::point::Point;
use super::seen::Direction;

/// Link wrapper that shows frames to the captures of a device.
#[derive(Debug)]
pub(crate) struct CaptureLink {
    inner: Arc<dyn Link>,
    point: Arc<Point>,
}

impl CaptureLink {
    pub(crate) const fn new(inner: Arc<dyn Link>, point: Arc<Point>) -> Self {
        Self { inner, point }
    }
}

impl Link for CaptureLink {
    fn receive(&self, frames: &mut Frames, most: usize) {
        let before = frames.len();
        self.inner.receive(frames, most);
        if self.point.is_on() {
            self.point.record_batch(Direction::Inbound, frames, before, frames.len());
        }
    }

    fn send(&self, frames: &Frames, from: usize) -> usize {
        let taken = self.inner.send(frames, from);
        if self.point.is_on() {
            self.point.record_batch(Direction::Outbound, frames, from, taken);
        }
        taken
    }

    fn takes(&self, frame: &[u8], offload: Offload) -> bool {
        self.inner.takes(frame, offload)
    }

    fn unsent(&self) -> bool {
        self.inner.unsent()
    }

    fn readiness(&self) -> Readiness {
        self.inner.readiness()
    }

    /// Forwards the receiver, which shows the frames that it handles to captures itself.
    fn set_receiver(&self, receiver: Weak<dyn LinkReceiver>) {
        self.inner.set_receiver(receiver);
    }

    fn set_addresses(&self, addresses: &[MacAddr]) -> io::Result<()> {
        self.inner.set_addresses(addresses)
    }

    fn leaves_process(&self) -> bool {
        self.inner.leaves_process()
    }

    fn inspect(&self) -> LinkInspect {
        self.inner.inspect()
    }

    fn lost(&self) -> u64 {
        self.inner.lost()
    }

    fn counters(&self) -> Vec<Counter> {
        self.inner.counters()
    }

    fn detach(&self) {
        self.inner.detach();
    }
}
