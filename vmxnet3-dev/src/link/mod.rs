//! The function as a [`Link`]: for who moves frames of many devices in batches.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use pvrdma_ether_link::{Bell, Frames, Link, LinkInspect, Offload, Readiness};
use pvrdma_guest_memory::DmaSpace;
use pvrdma_pci_function::{InterruptSink, PciFunction};
use pvrdma_verbs::Snapshot;
use rustix::io::Errno;

use crate::config::Vmxnet3Config;
use crate::device::Vmxnet3Device;
use crate::error::ConfigError;
use crate::frame::{Checksum, Frame, FrameError, FramePort, PortOffloads, Sent};
use crate::receive::Received;

/// Bytes that wait to be read, but for the rest of a long frame, before the guest's frames stay in its rings.
const ROOM: usize = 1 << 20;
/// Bytes that are read at a time, but for the rest of a long frame.
const BATCH: usize = 256 << 10;

/// The guest's end is the driver, the other one is this. What the guest sends is read from it; what is sent to it is
/// received by the guest.
///
/// Frames that find no receive buffer stay with the caller, as the trait wants it. The driver may never give buffers
/// again, so whoever keeps them needs a limit.
#[derive(Debug)]
pub struct NicLink {
    device: Arc<Vmxnet3Device>,
    outbox: Arc<Outbox>,
}

impl NicLink {
    /// Makes a device as [`Vmxnet3Device::new`] does, and its link.
    ///
    /// # Errors
    /// The configuration makes no sense, or there are no descriptors left.
    pub fn with_device(
        config: Vmxnet3Config,
        memory: Arc<DmaSpace>,
        interrupts: Arc<dyn InterruptSink>,
    ) -> Result<Self, ConfigError> {
        let outbox = Arc::new(Outbox::new().map_err(ConfigError::Descriptors)?);
        let device = Vmxnet3Device::new(config, memory, interrupts, Arc::clone(&outbox) as _)?;
        Ok(Self { device, outbox })
    }

    /// The device.
    pub const fn device(&self) -> &Arc<Vmxnet3Device> {
        &self.device
    }

    /// Gives the guest a frame. Returns `false` if it waits for a buffer.
    fn deliver(&self, bytes: &[u8], offload: Offload) -> bool {
        // What is no frame is lost, as on a cable.
        let Ok(frame) = frame(bytes, offload) else { return true };
        if self.device.receive(&frame) != Received::NoBuffers {
            return true;
        }
        // First not writable, then a second look: buffers that come from here on make it writable again.
        self.outbox.room.block();
        if self.device.receive(&frame) == Received::NoBuffers {
            return false;
        }
        self.outbox.room.clear();
        true
    }
}

impl Link for NicLink {
    fn receive(&self, frames: &mut Frames, most: usize) {
        if self.outbox.take(frames, most) {
            self.device.resume_transmit();
        } else if self.device.has_deferred() {
            self.device.run_deferred();
        }
    }

    fn send(&self, frames: &Frames, from: usize) -> usize {
        let all = frames.iter_with_offloads(from);
        let taken = all.take_while(|(frame, offload)| self.deliver(frame, *offload)).count();
        self.device.flush();
        taken
    }

    /// The guest gets long frames whole, if it wants them so, and they are cut here otherwise.
    fn takes(&self, _frame: &[u8], _offload: Offload) -> bool {
        true
    }

    fn readiness(&self) -> Readiness {
        let (readable, writable) = (self.outbox.filled.descriptor(), self.outbox.room.descriptor());
        Readiness { readable: Some(readable), writable: Some(writable), ..Readiness::default() }
    }

    /// The device counts what gets lost in it.
    fn lost(&self) -> u64 {
        0
    }

    fn inspect(&self) -> LinkInspect {
        let status = self.device.status();
        let up = Snapshot::Taken(status.active && status.link_up);
        LinkInspect { kind: "vmxnet3", name: status.name, peers: Vec::new(), up }
    }
}

/// What the guest has sent and nobody has read.
struct Outbox {
    queue: Mutex<Queue>,
    /// Readable while there are frames, or more in the guest's rings.
    filled: Bell,
    /// Writable unless a frame waits for the guest's buffers.
    room: Bell,
    /// Frames stay in the guest's rings.
    full: AtomicBool,
}

#[derive(Default)]
struct Queue {
    frames: Frames,
    /// Frames before this were read.
    from: usize,
    /// Room for one that is cut.
    segment: Vec<u8>,
}

/// A frame with what is still to be done to it.
fn frame(bytes: &[u8], offload: Offload) -> Result<Frame<'_>, FrameError> {
    match (offload.mss(), offload.missing_checksum()) {
        (Some(mss), _) => Frame::to_be_segmented(bytes, mss.get()),
        (None, Some((start, at))) => Frame::with_partial_checksum(bytes, start, at),
        (None, None) => Frame::new(bytes, false),
    }
}

/// What others are told of it. `None`: they cannot do it.
fn offload(frame: &Frame<'_>) -> Option<Offload> {
    match (frame.checksum(), frame.mss()) {
        (Checksum::Partial { start, at }, None) => Some(Offload::checksum(start, at)),
        (Checksum::Partial { start, at }, Some(mss)) if Offload::can_segment(frame.bytes()) => {
            Some(Offload::segmentation(start, at, mss))
        }
        (_, Some(_)) => None,
        (Checksum::Unknown | Checksum::Verified, None) => Some(Offload::NONE),
    }
}

impl fmt::Debug for Outbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outbox").field("full", &self.full).finish_non_exhaustive()
    }
}

impl Outbox {
    fn new() -> Result<Self, Errno> {
        Ok(Self { queue: Mutex::default(), filled: Bell::new()?, room: Bell::new()?, full: AtomicBool::new(false) })
    }

    /// Moves at most `most` frames. Returns `true` if the guest may go on, who had to hold back.
    fn take(&self, frames: &mut Frames, most: usize) -> bool {
        let Queue { frames: waiting, from, .. } = &mut *self.queue.lock();
        let before = frames.len();
        for (frame, offload) in waiting.iter_with_offloads(*from).take(most) {
            if frames.bytes() >= BATCH {
                break;
            }
            frames.push_with_offload(frame, offload);
        }
        *from = from.saturating_add(frames.len().saturating_sub(before));
        if *from < waiting.len() {
            return false;
        }
        waiting.clear();
        *from = 0;
        // Under the lock: who finds it empty rings again.
        self.filled.clear();
        self.full.swap(false, Ordering::AcqRel)
    }
}

impl FramePort for Outbox {
    /// Frames stay whole until somebody cuts them who can keep the rest: of what the device cuts it would be lost.
    fn offloads(&self) -> PortOffloads {
        PortOffloads { checksum: true, segmentation: true }
    }

    fn send(&self, frame: &Frame<'_>) -> Sent {
        let queue = &mut *self.queue.lock();
        if queue.frames.bytes() >= ROOM {
            self.full.store(true, Ordering::Release);
            return Sent::Full;
        }
        let Queue { frames, segment, .. } = queue;
        let first = frames.is_empty();
        match offload(frame) {
            Some(offload) => frames.push_with_offload(frame.bytes(), offload),
            None => {
                frame.for_each_wire_frame(segment, |part| {
                    frames.push(part.bytes());
                    true
                });
            }
        }
        if first {
            self.filled.ring();
        }
        Sent::Taken
    }

    fn transmit_pending(&self) {
        self.filled.ring();
    }

    fn receive_ready(&self) {
        self.room.clear();
    }
}

#[cfg(test)]
mod tests;
