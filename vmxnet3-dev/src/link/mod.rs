//! The network function as a [`Link`], for callers that move frames of many devices in batches.

mod deadline;

use std::fmt;
use std::num::NonZeroU16;
use std::ops::Range;
use std::sync::{Arc, Weak};

use pvrdma_base::Snapshot;
use pvrdma_base::locks::Mutex;
use pvrdma_guest_memory::DmaSpace;
use pvrdma_handover::Notice;
use pvrdma_link::{Bell, Frames, Link, LinkInspect, LinkReader, Offload, Readiness};
use pvrdma_pci_function::InterruptSink;
use rustix::io::Errno;

use crate::config::Vmxnet3Config;
use crate::device::Vmxnet3Device;
use crate::error::ConfigError;
use crate::frame::{Checksum, Frame, FrameError, FramePort, PortOffloads, Sent};
use crate::receive::Received;
use crate::transmit::{Outlet, Passed, Taken};
use crate::tx::Packet;
use deadline::{Deadline, LATEST};

/// Number of bytes read at a time. The rest of a long frame may exceed it.
const BATCH: usize = 256 << 10;

/// The link's end of a cable whose other end is the driver: frames sent by the guest are read from the link, and frames
/// sent to the link are received by the guest.
///
/// Frames stay in the guest's rings until they are read, and are copied once, to the reader's buffer.
///
/// Frames for which there is no receive buffer stay with the caller, as the trait requires. The driver may never post
/// buffers again, so a caller that keeps such frames needs a limit.
#[derive(Debug)]
pub struct NicLink {
    device: Arc<Vmxnet3Device>,
    outbox: Arc<Outbox>,
    reader: Mutex<Reader>,
    deadline: Deadline,
}

/// State of the reading side.
#[derive(Debug, Default)]
struct Reader {
    /// Transmit queue to start with.
    first: u32,
    /// Buffer for a segment.
    segment: Vec<u8>,
}

impl NicLink {
    /// Creates a device like [`Vmxnet3Device::new`], and its link.
    ///
    /// # Errors
    /// The configuration is invalid, or the process or system is out of file descriptors.
    pub fn with_device(
        config: Vmxnet3Config,
        memory: Arc<DmaSpace>,
        interrupts: Arc<dyn InterruptSink>,
    ) -> Result<Self, ConfigError> {
        let outbox = Arc::new(Outbox::new().map_err(ConfigError::Descriptors)?);
        let device = Vmxnet3Device::new(config, memory, interrupts, Arc::clone(&outbox) as _)?;
        let deadline = Deadline::new(LATEST).map_err(ConfigError::Descriptors)?;
        Ok(Self { device, outbox, reader: Mutex::default(), deadline })
    }

    /// Returns the device.
    pub const fn device(&self) -> &Arc<Vmxnet3Device> {
        &self.device
    }

    /// Delivers a frame to the guest. Returns `false` if the frame must wait for a buffer.
    fn deliver(&self, bytes: &[u8], offload: Offload) -> bool {
        // Invalid frames are lost, as on a cable.
        let Ok(frame) = frame(bytes, offload) else { return true };
        if self.device.receive(&frame) != Received::NoBuffers {
            return true;
        }
        // The link is blocked first, then delivery is tried again: buffers that are posted from here on make the link
        // writable again.
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
        let Reader { first, segment } = &mut *self.reader.lock();
        let most = frames.len().saturating_add(most);
        let waited = self.device.has_unannounced();
        let mut batch = Batch { frames, most, span: None, copied: 0, segment };
        let (next, left) = self.device.transmit_into(*first, &mut batch);
        *first = next;
        if left {
            self.outbox.filled.lock().raise();
        } else if !self.device.may_transmit() {
            // The notice is lowered first, then the rings are checked again: a driver that posts packets from here on
            // rings again.
            self.outbox.filled.lock().lower();
            if self.device.may_transmit() {
                self.outbox.filled.lock().raise();
            }
        }
        let waits = self.device.has_unannounced();
        if waits && !waited {
            self.deadline.begin();
        }
        if self.deadline.is_over(waits) {
            self.device.announce_completions();
        }
    }

    fn send(&self, frames: &Frames, from: usize) -> usize {
        let all = frames.iter_with_offloads(from);
        let taken = all.take_while(|(frame, offload)| self.deliver(frame, *offload)).count();
        self.device.flush();
        taken
    }

    /// Accepts every frame: a guest with LRO gets long frames whole, for other guests they are segmented here.
    fn takes(&self, _frame: &[u8], _offload: Offload) -> bool {
        true
    }

    fn readiness(&self) -> Readiness {
        let (readable, writable) = (self.outbox.filled.lock().event().descriptor(), self.outbox.room.descriptor());
        let changed = Some(self.deadline.descriptor());
        Readiness { readable: Some(readable), writable: Some(writable), changed, wait: None }
    }

    fn set_reader(&self, reader: Weak<dyn LinkReader>) {
        *self.outbox.reader.lock() = Some(reader);
    }

    /// Always 0: the device counts the frames that it loses.
    fn lost(&self) -> u64 {
        0
    }

    fn inspect(&self) -> LinkInspect {
        let status = self.device.status();
        let up = Snapshot::Taken(status.active && status.link_up);
        LinkInspect { kind: "vmxnet3", name: status.name, peers: Vec::new(), up }
    }
}

/// Notifies the thread that moves frames of the device.
struct Outbox {
    /// Readable if the guest's rings may hold packets.
    filled: Mutex<Notice<Bell>>,
    /// Writable unless a frame waits for the guest's buffers.
    room: Bell,
    /// Callback that may read on the notifying thread.
    reader: Mutex<Option<Weak<dyn LinkReader>>>,
}

/// A batch of frames being read.
struct Batch<'a> {
    frames: &'a mut Frames,
    /// Maximum number of frames in `frames`.
    most: usize,
    /// Buffer reserved for the next frame.
    span: Option<Range<usize>>,
    /// Number of bytes copied, including those of packets that were dropped.
    copied: usize,
    segment: &'a mut Vec<u8>,
}

impl Outlet for Batch<'_> {
    fn has_room(&self) -> bool {
        self.frames.len() < self.most && self.frames.bytes().max(self.copied) < BATCH
    }

    fn room(&mut self, len: usize) -> &mut [u8] {
        // A leftover span belongs to a packet that was not passed on.
        if let Some(span) = self.span.take() {
            self.frames.release(span);
        }
        self.copied = self.copied.saturating_add(len);
        let span = self.frames.reserve(len);
        self.span = Some(span.clone());
        self.frames.room(span)
    }

    fn pass(&mut self, packet: &Packet, link_up: bool) -> Passed {
        let Some(span) = self.span.take() else { return Passed::Nonsense };
        let frame = packet.frame(self.frames.room(span.clone()));
        let Some((taken, offload, mss)) = frame.map(|frame| (Taken::whole(&frame), offload(&frame), frame.mss()))
        else {
            self.frames.release(span);
            return Passed::Nonsense;
        };
        match offload {
            _ if !link_up => {
                self.frames.release(span);
                return Passed::LinkDown;
            }
            Some(offload) => {
                self.frames.mark(span);
                self.frames.leave(offload);
            }
            None => self.cut(span, mss),
        }
        Passed::Taken(taken)
    }
}

impl Batch<'_> {
    /// Segments the frame in `span` here, because its receivers cannot.
    fn cut(&mut self, span: Range<usize>, mss: Option<NonZeroU16>) {
        let whole = self.frames.room(span.clone()).to_vec();
        self.frames.release(span);
        let Some(frame) = mss.and_then(|mss| Frame::to_be_segmented(&whole, mss.get()).ok()) else { return };
        frame.for_each_wire_frame(self.segment, |part| {
            self.frames.push(part.bytes());
            true
        });
    }
}

/// Creates a frame with its pending offload.
fn frame(bytes: &[u8], offload: Offload) -> Result<Frame<'_>, FrameError> {
    if let Some(mss) = offload.mss() {
        return Frame::to_be_segmented(bytes, mss.get());
    }
    if offload.is_none() {
        return Frame::new(bytes, false);
    }
    let (start, at) = offload.missing_checksum(bytes).unwrap_or_default();
    Frame::with_partial_checksum(bytes, start, at)
}

/// Describes a frame's pending offload for other links. Returns `None` if they cannot perform it.
fn offload(frame: &Frame<'_>) -> Option<Offload> {
    match (frame.checksum(), frame.mss()) {
        (Checksum::Partial { start, at }, None) => Offload::checksum(frame.bytes(), start, at),
        (_, Some(mss)) => Offload::segmentation(frame.bytes(), mss),
        (Checksum::Unknown | Checksum::Verified, None) => Some(Offload::NONE),
    }
}

impl fmt::Debug for Outbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outbox").field("filled", &self.filled).finish_non_exhaustive()
    }
}

impl Outbox {
    fn new() -> Result<Self, Errno> {
        let filled = Mutex::new(Notice::new(Bell::new()?));
        Ok(Self { filled, room: Bell::new()?, reader: Mutex::default() })
    }
}

impl FramePort for Outbox {
    /// Accepts all offloads. Frames stay whole until they are read, because the reader can keep segments for later: if
    /// the device segmented a frame, segments without room would be lost.
    fn offloads(&self) -> PortOffloads {
        PortOffloads { checksum: true, segmentation: true }
    }

    /// Never called, because frames are pulled.
    fn send(&self, _frame: &Frame<'_>) -> Sent {
        Sent::Full
    }

    fn pulls(&self) -> bool {
        true
    }

    fn pull(&self) {
        let reader = self.reader.lock().as_ref().and_then(Weak::upgrade);
        if let Some(reader) = reader {
            reader.read();
        }
    }

    fn transmit_pending(&self) {
        self.filled.lock().raise();
    }

    fn receive_ready(&self) {
        self.room.clear();
    }
}

#[cfg(test)]
mod tests;
