//! Captured frames that wait for their reader.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use pvrdma_link::Frames;
use rustix::event::EventfdFlags;

use super::seen::{CaptureConfig, Direction, Interface};

/// Metadata of a captured frame; its bytes are stored separately.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Captured {
    /// Time of capture since 1970.
    pub time: Duration,
    /// Place of capture.
    pub interface: Interface,
    /// Direction of the frame.
    pub direction: Direction,
    /// Length of the whole frame in bytes.
    pub length: usize,
}

/// Captured frames in the order of capture.
#[derive(Debug, Default)]
pub struct Batch {
    seen: Vec<Captured>,
    frames: Frames,
}

impl Batch {
    /// Returns the number of frames.
    pub const fn len(&self) -> usize {
        self.seen.len()
    }

    /// Returns `true` if there are no frames.
    pub const fn is_empty(&self) -> bool {
        self.seen.is_empty()
    }

    /// Iterates over all frames, with as many bytes as the capture keeps.
    pub fn iter(&self) -> impl Iterator<Item = (&Captured, &[u8])> {
        self.seen.iter().zip(self.frames.iter())
    }

    fn clear(&mut self) {
        self.seen.clear();
        self.frames.clear();
    }

    /// Returns the memory in use, in bytes.
    fn size(&self) -> usize {
        self.frames.bytes().saturating_add(self.seen.len().saturating_mul(size_of::<Captured>()))
    }
}

/// Counters of one interface.
#[derive(Debug, Default)]
struct Counts {
    seen: AtomicU64,
    dropped: AtomicU64,
}

/// A bounded queue of frames.
#[derive(Debug)]
pub(super) struct Buffer {
    config: CaptureConfig,
    batch: Mutex<Batch>,
    readable: OwnedFd,
    uplink: Counts,
    local: Counts,
}

impl Buffer {
    pub(super) fn new(config: CaptureConfig) -> io::Result<Self> {
        let readable = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { config, batch: Mutex::default(), readable, uplink: Counts::default(), local: Counts::default() })
    }

    const fn of(&self, interface: Interface) -> &Counts {
        match interface {
            Interface::Uplink => &self.uplink,
            Interface::Local => &self.local,
        }
    }

    /// Stores a frame. Returns `false` if there is no room.
    pub(super) fn put(&self, interface: Interface, direction: Direction, frame: &[u8]) -> bool {
        let counts = self.of(interface);
        counts.seen.fetch_add(1, Ordering::Relaxed);
        let kept = frame.get(..self.config.snaplen).unwrap_or(frame);
        let mut batch = self.batch.lock();
        if batch.size().saturating_add(kept.len()).saturating_add(size_of::<Captured>()) > self.config.buffer {
            drop(batch);
            counts.dropped.fetch_add(1, Ordering::Relaxed);
            return false;
        }
        // The clock is read under the lock, so that times are in ascending order.
        let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let first = batch.is_empty();
        batch.seen.push(Captured { time, interface, direction, length: frame.len() });
        batch.frames.push(kept);
        drop(batch);
        if first {
            // The write fails only when the counter is full, and the reader is woken in that case already.
            let _ = rustix::io::write(&self.readable, &1_u64.to_ne_bytes());
        }
        true
    }

    pub(super) fn take(&self, batch: &mut Batch) {
        batch.clear();
        // The event counter is reset before the frames are taken: a frame that arrives in between sets it again.
        let _ = rustix::io::read(&self.readable, &mut [0_u8; 8]);
        std::mem::swap(&mut *self.batch.lock(), batch);
    }

    pub(super) const fn readable(&self) -> &OwnedFd {
        &self.readable
    }

    pub(super) fn counts(&self, interface: Interface) -> (u64, u64) {
        let counts = self.of(interface);
        (counts.seen.load(Ordering::Relaxed), counts.dropped.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_cut_and_dropped_and_counted() {
        let room = 100 + 3 * size_of::<Captured>();
        let buffer = Buffer::new(CaptureConfig { snaplen: 40, buffer: room }).unwrap();
        let put = |len: usize| buffer.put(Interface::Local, Direction::Outbound, &vec![7; len]);
        let is_readable = || {
            let mut poll = [rustix::event::PollFd::new(buffer.readable(), rustix::event::PollFlags::IN)];
            rustix::event::poll(&mut poll, Some(&rustix::event::Timespec::default())).unwrap() == 1
        };
        assert!(!is_readable());
        assert!(put(100) && put(40) && is_readable());
        assert!(!put(21) && put(20));
        assert_eq!((buffer.counts(Interface::Local), buffer.counts(Interface::Uplink)), ((4, 1), (0, 0)));
        let mut batch = Batch::default();
        buffer.take(&mut batch);
        assert!(!is_readable());
        let lengths: Vec<_> = batch.iter().map(|(seen, frame)| (seen.length, frame.len())).collect();
        assert_eq!((lengths, batch.len()), (vec![(100, 40), (40, 40), (20, 20)], 3));
        // The memory of the reader's batch is reused, and is empty.
        assert!(put(40) && is_readable());
        buffer.take(&mut batch);
        assert_eq!(batch.len(), 1);
        buffer.take(&mut batch);
        assert!(batch.is_empty());
    }
}
