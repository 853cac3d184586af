//! Transmit path: from the guest to the port.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use pvrdma_guest_memory::DmaView;

use crate::core::Core;
use crate::error::QueueError;
use crate::frame::{Checksum, Frame, FramePort, PortOffloads, Sent};
use crate::offload::headers::Headers;
use crate::offload::segment;
use crate::session::{Session, Which};
use crate::tx::{Packet, TxQueue};

/// Budget of one call, in bytes; each frame on the wire costs [`FRAME_COST`] more.
const BUDGET: u64 = 32 << 20;
/// Cost of a frame, in the number of bytes that could be copied in the same time.
const FRAME_COST: u64 = 256;
/// Maximum number of completions that wait for the next interrupt. The limit lets a socket that may have only few
/// packets in flight continue soon.
#[cfg(feature = "link")]
const MAX_WAITING: u32 = 16;

/// Reason the processing of a queue ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Left {
    /// The queue is empty, or another thread is processing it.
    Empty,
    /// The budget of one call is used up, or the device is about to be paused.
    Budget,
    /// The port has no room.
    Full,
    /// The driver has ended the session.
    Over,
}

/// Result of sending a packet.
enum Outcome {
    /// Sent, as this number of frames and bytes on the wire.
    Sent { frames: u64, bytes: u64 },
    /// The packet stays in the ring.
    Full,
}

/// Result of passing a packet to an outlet.
pub(crate) enum Passed {
    /// The packet is not a valid frame.
    Nonsense,
    /// The link is down.
    LinkDown,
    /// The outlet has no room.
    Full,
    /// The frame was accepted.
    Taken(Taken),
}

/// A frame that was accepted completely or in part.
pub(crate) struct Taken {
    destination: [u8; 6],
    segmented: bool,
    /// Frames and bytes on the wire.
    on_wire: (u64, u64),
    /// Frames and bytes that were accepted.
    taken: (u64, u64),
}

impl Taken {
    /// Creates the result for a frame that was accepted completely.
    pub(crate) fn whole(frame: &Frame<'_>) -> Self {
        let on_wire = on_wire(frame);
        Self { destination: frame.destination(), segmented: frame.mss().is_some(), on_wire, taken: on_wire }
    }
}

/// Destination of the packets of a transmit queue.
pub(crate) trait Outlet {
    /// Returns `true` if the outlet can accept another packet.
    fn has_room(&self) -> bool;

    /// Returns a buffer for a packet of `len` bytes.
    fn room(&mut self, len: usize) -> &mut [u8];

    /// Passes on the packet whose bytes are in the buffer of [`Self::room`].
    fn pass(&mut self, packet: &Packet, link_up: bool) -> Passed;
}

/// Passes frames to the port one by one.
struct OneByOne<'a> {
    port: &'a dyn FramePort,
    bytes: Vec<u8>,
    used: usize,
    segment: Vec<u8>,
}

impl Outlet for OneByOne<'_> {
    fn has_room(&self) -> bool {
        true
    }

    fn room(&mut self, len: usize) -> &mut [u8] {
        if self.bytes.len() < len {
            self.bytes.resize(len, 0);
        }
        self.used = len;
        self.bytes.get_mut(..len).unwrap_or_default()
    }

    fn pass(&mut self, packet: &Packet, link_up: bool) -> Passed {
        let Self { port, bytes, used, segment } = self;
        let Some(frame) = bytes.get_mut(..*used).and_then(|bytes| packet.frame(bytes)) else { return Passed::Nonsense };
        if !link_up {
            return Passed::LinkDown;
        }
        let whole = Taken::whole(&frame);
        if takes(port.offloads(), &frame) {
            return if port.send(&frame) == Sent::Taken { Passed::Taken(whole) } else { Passed::Full };
        }
        let mut taken = (0, 0);
        frame.for_each_wire_frame(segment, |part| {
            let is_taken = port.send(part) == Sent::Taken;
            if is_taken {
                taken = (taken.0 + 1, taken.1 + part.bytes().len() as u64);
            }
            is_taken
        });
        if taken.0 == 0 { Passed::Full } else { Passed::Taken(Taken { taken, ..whole }) }
    }
}

/// Sends the packets of a transmit queue to the port.
pub(crate) fn run(core: &Core, index: usize) {
    let Some(session) = core.session().clone() else { return };
    let Some(queue) = session.tx(index) else { return };
    let queue = &mut *queue.lock();
    let (bytes, segment) = (std::mem::take(&mut queue.bytes), std::mem::take(&mut queue.room));
    let mut outlet = OneByOne { port: &*core.port, bytes, used: 0, segment };
    let left = drain(core, &session, index, queue, &mut outlet);
    (queue.bytes, queue.room) = (outlet.bytes, outlet.segment);
    core.port.flush();
    if left == Left::Budget {
        core.pending.fetch_or(1 << index, Ordering::AcqRel);
        core.port.transmit_pending();
    }
    interrupt(core, &session, queue, left);
}

/// Moves the packets of a transmit queue to an outlet. Returns `true` if there may be more.
///
/// Completions may wait until [`announce`] is called: a packet is often answered soon, and one interrupt then reports
/// the completion and the answer.
#[cfg(feature = "link")]
pub(crate) fn run_into(core: &Core, index: usize, outlet: &mut dyn Outlet) -> bool {
    let Some(session) = core.session().clone() else { return false };
    let Some(queue) = session.tx(index) else { return false };
    let queue = &mut *queue.lock();
    if core.tx_vectors.load(Ordering::Acquire) >> queue.vector() & 1 == 0 {
        // The driver has been interrupted for earlier completions.
        queue.forget_completed();
    }
    let left = drain(core, &session, index, queue, outlet);
    if queue.completed > 0 && core.depths.tx_waits() && queue.may_wait(MAX_WAITING) {
        core.during(&session, |_| core.tx_vectors.fetch_or(1 << queue.vector(), Ordering::AcqRel));
    } else {
        interrupt(core, &session, queue, left);
    }
    matches!(left, Left::Budget | Left::Full)
}

/// Interrupts the driver for completions that wait for an interrupt.
#[cfg(feature = "link")]
pub(crate) fn announce(core: &Core) {
    let Some(session) = core.session().clone() else { return };
    core.during(&session, |_| {
        let vectors = core.tx_vectors.swap(0, Ordering::AcqRel);
        for vector in (0..32).filter(|vector| vectors >> vector & 1 == 1) {
            core.raise(vector);
        }
    });
}

/// Interrupts the driver for sent packets.
fn interrupt(core: &Core, session: &Arc<Session>, queue: &mut TxQueue, left: Left) {
    if queue.forget_completed() > 0 && left != Left::Over {
        core.during(session, |_| core.raise(queue.vector()));
    }
}

fn drain(core: &Core, session: &Arc<Session>, index: usize, queue: &mut TxQueue, outlet: &mut dyn Outlet) -> Left {
    let mut cost = 0;
    for _ in 0..queue.entries() {
        if !outlet.has_room() {
            return Left::Full;
        }
        if core.is_pausing() {
            return Left::Budget;
        }
        let packet = core.during(session, |view| {
            next(queue, view, outlet).unwrap_or_else(|error| {
                core.fail(session, view, Which::Tx(index), &error);
                None
            })
        });
        let Some(packet) = packet else { return Left::Over };
        let Some(packet) = packet else { return Left::Empty };
        match send(core, index, &packet, outlet) {
            Outcome::Sent { frames, bytes } => cost += frames * FRAME_COST + bytes,
            Outcome::Full => return Left::Full,
        }
        let done = core.during(session, |view| {
            let result = queue.complete(view, &packet);
            result.inspect_err(|error: &QueueError| core.fail(session, view, Which::Tx(index), error)).is_ok()
        });
        match done {
            None => return Left::Over,
            Some(false) => return Left::Empty,
            Some(true) => {}
        }
        if queue.completed >= core.depths.tx.load(Ordering::Relaxed) {
            queue.forget_completed();
            core.during(session, |_| core.raise(queue.vector()));
        }
        if cost > BUDGET {
            break;
        }
    }
    // The loop ended without another look at the ring, so the queue may or may not be empty.
    Left::Budget
}

/// Copies the next packet, if there is one, to the outlet's buffer.
fn next(queue: &mut TxQueue, view: &DmaView<'_>, outlet: &mut dyn Outlet) -> Result<Option<Packet>, QueueError> {
    let Some(packet) = queue.peek(view)? else { return Ok(None) };
    if let Some(len) = packet.len {
        queue.copy(view, &packet, outlet.room(len))?;
    }
    Ok(Some(packet))
}

/// Passes a packet on, and updates the statistics. Only the lock of the queue is held.
fn send(core: &Core, index: usize, packet: &Packet, outlet: &mut dyn Outlet) -> Outcome {
    let nothing = Outcome::Sent { frames: 0, bytes: 0 };
    let Some(stats) = core.tx_stats.get(index) else { return nothing };
    let link_up = core.link_up.load(Ordering::Acquire);
    let passed = if packet.len.is_some() { outlet.pass(packet, link_up) } else { Passed::Nonsense };
    let Taken { destination, segmented, on_wire: (frames, bytes), taken: (taken, taken_bytes) } = match passed {
        Passed::Nonsense => {
            stats.errors.increment();
            core.counters.vmxnet3_send_errors.increment();
            return nothing;
        }
        Passed::LinkDown => {
            stats.discarded.increment();
            core.counters.vmxnet3_send_discards.increment();
            return nothing;
        }
        Passed::Full => return Outcome::Full,
        Passed::Taken(taken) => taken,
    };
    // These are the lost segments: a frame that was segmented here and accepted only in part cannot be passed again.
    let lost = frames.saturating_sub(taken);
    stats.discarded.add(lost);
    core.counters.vmxnet3_send_discards.add(lost);
    stats.sent(destination, segmented, taken, taken_bytes);
    core.counters.vmxnet3_sent_frames.add(taken);
    core.counters.vmxnet3_sent_bytes.add(taken_bytes);
    Outcome::Sent { frames, bytes }
}

fn takes(offloads: PortOffloads, frame: &Frame<'_>) -> bool {
    let partial = matches!(frame.checksum(), Checksum::Partial { .. });
    offloads.segmentation || (frame.mss().is_none() && (offloads.checksum || !partial))
}

/// Returns the number of frames and bytes that a frame makes on the wire.
pub(crate) fn on_wire(frame: &Frame<'_>) -> (u64, u64) {
    let len = frame.bytes().len() as u64;
    match frame.mss().zip(segment::split(&Headers::parse(frame.bytes())).filter(|_| frame.mss().is_some())) {
        None => (1, len),
        Some((mss, (header, data))) => {
            let count = segment::count(data, mss) as u64;
            (count, len + (count - 1) * header as u64)
        }
    }
}
