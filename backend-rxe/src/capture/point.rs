//! Capture points of devices, and the captures that read from them.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use parking_lot::RwLock;
use pvrdma_link::Frames;
use pvrdma_packet::MacAddr;
use pvrdma_verbs::VerbsError;

use super::buffer::{Batch, Buffer};
use super::seen::{CaptureConfig, Direction, Interface};

/// Maximum number of captures of one device at a time.
const MAX_CAPTURES: usize = 4;

/// Statistics of a device's captures, over its lifetime.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CaptureCounts {
    /// Number of captures in progress.
    pub active: usize,
    /// Number of frames kept for a reader.
    pub captured: u64,
    /// Number of frames dropped because a reader did not keep up.
    pub dropped: u64,
}

/// All capture points of a backend.
#[derive(Debug, Default)]
pub(crate) struct Captures {
    /// Number of captures in progress.
    active: AtomicUsize,
}

impl Captures {
    /// Returns `true` if there is a capture of any device.
    #[inline]
    pub(crate) fn is_active(&self) -> bool {
        self.active.load(Ordering::Relaxed) != 0
    }

    /// Starts a capture of a device.
    pub(crate) fn start(self: &Arc<Self>, point: &Arc<Point>, config: CaptureConfig) -> Result<Capture, VerbsError> {
        let (point, buffer) = (Arc::clone(point), Arc::new(Buffer::new(config)?));
        {
            let mut buffers = point.buffers.write();
            if buffers.len() >= MAX_CAPTURES {
                return Err(VerbsError::Exhausted("captures of this device"));
            }
            buffers.push(Arc::clone(&buffer));
            point.on.store(true, Ordering::Relaxed);
        }
        self.active.fetch_add(1, Ordering::Relaxed);
        Ok(Capture { captures: Arc::clone(self), point, buffer })
    }
}

/// Capture point of a device.
#[derive(Debug, Default)]
pub(crate) struct Point {
    pub(crate) mac: MacAddr,
    on: AtomicBool,
    buffers: RwLock<Vec<Arc<Buffer>>>,
    captured: AtomicU64,
    dropped: AtomicU64,
}

impl Point {
    pub(crate) fn new(mac: MacAddr) -> Self {
        Self { mac, ..Self::default() }
    }

    /// Returns `true` if there is a capture of this device.
    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// Shows a frame to all captures.
    pub(crate) fn record(&self, interface: Interface, direction: Direction, frame: &[u8]) {
        for buffer in self.buffers.read().iter() {
            let counter = if buffer.put(interface, direction, frame) { &self.captured } else { &self.dropped };
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn record_batch(&self, direction: Direction, frames: &Frames, from: usize, count: usize) {
        for frame in frames.iter_from(from).take(count) {
            self.record(Interface::Uplink, direction, frame);
        }
    }

    /// Returns the statistics of this point.
    pub(crate) fn counts(&self) -> CaptureCounts {
        CaptureCounts {
            active: self.buffers.read().len(),
            captured: self.captured.load(Ordering::Relaxed),
            dropped: self.dropped.load(Ordering::Relaxed),
        }
    }
}

/// A capture of a device, which ends on drop. See [`crate::Rxe::capture`].
#[derive(Debug)]
pub struct Capture {
    captures: Arc<Captures>,
    point: Arc<Point>,
    buffer: Arc<Buffer>,
}

impl Capture {
    /// Exchanges the frames since the last call for `batch`, whose memory is reused.
    pub fn take(&self, batch: &mut Batch) {
        self.buffer.take(batch);
    }

    /// Returns a descriptor that is readable while there are frames that were not taken.
    pub fn readable(&self) -> &OwnedFd {
        self.buffer.readable()
    }

    /// Returns the number of frames that were seen on an interface, and the number of those that were dropped because
    /// they were not taken in time.
    pub fn counts(&self, interface: Interface) -> (u64, u64) {
        self.buffer.counts(interface)
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        let mut buffers = self.point.buffers.write();
        buffers.retain(|buffer| !Arc::ptr_eq(buffer, &self.buffer));
        self.point.on.store(!buffers.is_empty(), Ordering::Relaxed);
        self.captures.active.fetch_sub(1, Ordering::Relaxed);
    }
}
