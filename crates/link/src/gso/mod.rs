//! Generic segmentation offload: what senders left to be done to their frames and a link does not do.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use pvrdma_base::Counter;
use pvrdma_packet::MacAddr;

use crate::{Frames, Link, LinkInspect, LinkReader, LinkReceiver, Readiness};

/// Bytes that are put together for a link at a time, but for the rest of a long frame.
const BATCH: usize = 256 << 10;

/// A link that takes every [`Offload`](crate::Offload), in front of one that takes what it likes.
///
/// Frames that need nothing, and those that the link takes as they are, pass untouched. Of a frame that was cut the
/// rest may find no room: it waits here, and goes first.
#[derive(Debug)]
pub struct GsoLink {
    inner: Arc<dyn Link>,
    rest: Mutex<Rest>,
    /// Something waits in `rest`. Changes with it.
    holding: AtomicBool,
}

/// Frames as the link gets them.
#[derive(Debug, Default)]
struct Rest {
    frames: Frames,
    /// Frames before this have left.
    from: usize,
    /// Room for one that is cut.
    segment: Vec<u8>,
}

impl Rest {
    /// Returns `true` if nothing waits any more.
    fn flush(&mut self, link: &dyn Link) -> bool {
        if self.from < self.frames.len() {
            self.from = self.from.saturating_add(link.send(&self.frames, self.from));
        }
        let left = self.from >= self.frames.len();
        if left {
            self.frames.clear();
            self.from = 0;
        }
        left
    }

    /// Appends frames from index `from` on, as the link gets them, until there are enough. Returns how many.
    fn fill(&mut self, link: &dyn Link, frames: &Frames, from: usize) -> usize {
        let Self { frames: ready, segment, .. } = self;
        let mut count = 0;
        for (frame, offload) in frames.iter_with_offloads(from) {
            if ready.bytes() >= BATCH {
                break;
            }
            count += 1;
            if offload.is_none() || link.takes(frame, offload) {
                ready.push_with_offload(frame, offload);
            } else {
                // What is no such frame is lost, as on a cable.
                offload.finish(frame, segment, |part| ready.push(part));
            }
        }
        count
    }
}

impl GsoLink {
    /// Stands in front of a link.
    pub fn new(inner: Arc<dyn Link>) -> Self {
        Self { inner, rest: Mutex::default(), holding: AtomicBool::new(false) }
    }
}

impl Link for GsoLink {
    fn receive(&self, frames: &mut Frames, most: usize) {
        self.inner.receive(frames, most);
    }

    fn send(&self, frames: &Frames, from: usize) -> usize {
        let link = &*self.inner;
        let mut all = frames.iter_with_offloads(from);
        let plain =
            !frames.has_offloads() || all.all(|(frame, offload)| offload.is_none() || link.takes(frame, offload));
        if plain && !self.holding.load(Ordering::Acquire) {
            return link.send(frames, from);
        }
        let rest = &mut *self.rest.lock();
        let (mut taken, mut left) = (0, rest.flush(link));
        while left && from.saturating_add(taken) < frames.len() {
            taken = taken.saturating_add(rest.fill(link, frames, from.saturating_add(taken)));
            left = rest.flush(link);
        }
        self.holding.store(!left, Ordering::Release);
        taken
    }

    fn takes(&self, _frame: &[u8], _offload: crate::Offload) -> bool {
        true
    }

    fn unsent(&self) -> bool {
        self.holding.load(Ordering::Acquire) || self.inner.unsent()
    }

    fn set_reader(&self, reader: Weak<dyn LinkReader>) {
        self.inner.set_reader(reader);
    }

    fn set_receiver(&self, receiver: Weak<dyn LinkReceiver>) {
        self.inner.set_receiver(receiver);
    }

    fn readiness(&self) -> Readiness {
        self.inner.readiness()
    }

    fn set_addresses(&self, addresses: &[MacAddr]) -> io::Result<()> {
        self.inner.set_addresses(addresses)
    }

    fn lost(&self) -> u64 {
        self.inner.lost()
    }

    fn inspect(&self) -> LinkInspect {
        self.inner.inspect()
    }

    fn counters(&self) -> Vec<Counter> {
        self.inner.counters()
    }
}

#[cfg(test)]
mod tests;
