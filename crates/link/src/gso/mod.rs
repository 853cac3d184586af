//! Generic segmentation offload: performs pending offloads for a link that cannot.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use pvrdma_base::Counter;
use pvrdma_packet::MacAddr;

use crate::{Frames, Link, LinkInspect, LinkReader, LinkReceiver, Readiness};

/// Bytes that are prepared for a link at a time. The last frame's segments may exceed it.
const BATCH: usize = 256 << 10;

/// A link that accepts every [`Offload`](crate::Offload), in front of a link that accepts some or none.
///
/// Frames without an offload, and frames that the inner link accepts unfinished, pass unchanged. If the inner link has
/// no room for all segments of a frame, the remaining ones are kept here and sent before any other frame.
#[derive(Debug)]
pub struct GsoLink {
    inner: Arc<dyn Link>,
    rest: Mutex<Rest>,
    /// `true` while `rest` contains frames. Written under its lock, but read without it, so that plain batches need no
    /// lock.
    holding: AtomicBool,
}

/// Prepared frames, in the form in which the inner link gets them.
#[derive(Debug, Default)]
struct Rest {
    frames: Frames,
    /// Number of frames that the inner link has taken.
    from: usize,
    /// Buffer for one segment.
    segment: Vec<u8>,
}

impl Rest {
    /// Sends the prepared frames. Returns `true` if none is left.
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

    /// Prepares frames from index `from` on until the batch is full. Returns the number of frames consumed.
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
                // A frame whose headers do not match its offload is lost, as on a cable.
                offload.finish(frame, segment, |part| ready.push(part));
            }
        }
        count
    }
}

impl GsoLink {
    /// Wraps a link.
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

    fn leaves_process(&self) -> bool {
        self.inner.leaves_process()
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

    fn detach(&self) {
        self.inner.detach();
    }
}

#[cfg(test)]
mod tests;
