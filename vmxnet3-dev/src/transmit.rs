//! From the guest to the port.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::core::Core;
use crate::error::QueueError;
use crate::frame::{Checksum, Frame, PortOffloads, Sent};
use crate::offload::headers::Headers;
use crate::offload::segment;
use crate::session::{Session, Which};
use crate::tx::{Packet, TxQueue};

/// Work of one call, in bytes; each frame on a wire counts as [`FRAME_COST`] more.
const BUDGET: u64 = 32 << 20;
/// Bytes that could be copied in the time that a frame takes.
const FRAME_COST: u64 = 256;

/// Why a queue was left.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Left {
    /// There is nothing more, or somebody else takes care of it.
    Empty,
    /// There is more than one call may do.
    Budget,
    /// The port has no room.
    Full,
    /// The driver has ended the session.
    Over,
}

/// What became of a packet.
enum Outcome {
    /// It left as so many frames of so many bytes.
    Sent { frames: u64, bytes: u64 },
    /// It stays in the ring.
    Full,
}

/// Sends what is in a transmit queue.
pub(crate) fn run(core: &Core, index: usize) {
    let Some(session) = core.session().clone() else { return };
    let Some(queue) = session.tx(index) else { return };
    let mut queue = queue.lock();
    let left = drain(core, &session, index, &mut queue);
    core.port.flush();
    if left == Left::Budget {
        core.pending.fetch_or(1 << index, Ordering::AcqRel);
        core.port.transmit_pending();
    }
    if std::mem::take(&mut queue.completed) > 0 && left != Left::Over {
        core.during(&session, |_| core.interrupts.raise(queue.vector()));
    }
}

fn drain(core: &Core, session: &Arc<Session>, index: usize, queue: &mut TxQueue) -> Left {
    let mut cost = 0;
    for _ in 0..queue.entries() {
        let packet = core.during(session, |view| {
            queue.take(view).unwrap_or_else(|error| {
                core.fail(session, view, Which::Tx(index), &error);
                None
            })
        });
        let Some(packet) = packet else { return Left::Over };
        let Some(packet) = packet else { return Left::Empty };
        match send(core, index, queue, &packet) {
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
            queue.completed = 0;
            core.during(session, |_| core.interrupts.raise(queue.vector()));
        }
        if cost > BUDGET {
            break;
        }
    }
    // Whether the ring is empty by now is not known.
    Left::Budget
}

/// Hands a packet to the port, as the port takes it. No lock but that of the queue is held.
fn send(core: &Core, index: usize, queue: &mut TxQueue, packet: &Packet) -> Outcome {
    let nothing = Outcome::Sent { frames: 0, bytes: 0 };
    let Some(stats) = core.tx_stats.get(index) else { return nothing };
    let Some((frame, room)) = queue.frame(packet) else {
        stats.errors.increment();
        core.counters.vmxnet3_send_errors.increment();
        return nothing;
    };
    if !core.link_up.load(Ordering::Acquire) {
        stats.discarded.increment();
        core.counters.vmxnet3_send_discards.increment();
        return nothing;
    }
    let (frames, bytes) = on_wire(&frame);
    let destination = frame.destination();
    let (mut taken, mut taken_bytes) = (0, 0);
    if takes(core.port.offloads(), &frame) {
        if core.port.send(&frame) == Sent::Taken {
            (taken, taken_bytes) = (frames, bytes);
        }
    } else {
        frame.for_each_wire_frame(room, |part| {
            let is_taken = core.port.send(part) == Sent::Taken;
            if is_taken {
                taken += 1;
                taken_bytes += part.bytes().len() as u64;
            }
            is_taken
        });
    }
    if taken == 0 {
        return Outcome::Full;
    }
    // What was segmented here and only partly taken cannot be presented again.
    let lost = frames.saturating_sub(taken);
    stats.discarded.add(lost);
    core.counters.vmxnet3_send_discards.add(lost);
    stats.sent(destination, frame.mss().is_some(), taken, taken_bytes);
    core.counters.vmxnet3_sent_frames.add(taken);
    core.counters.vmxnet3_sent_bytes.add(taken_bytes);
    Outcome::Sent { frames, bytes }
}

fn takes(offloads: PortOffloads, frame: &Frame<'_>) -> bool {
    let partial = matches!(frame.checksum(), Checksum::Partial { .. });
    offloads.segmentation || (frame.mss().is_none() && (offloads.checksum || !partial))
}

/// Frames and bytes that a frame is on a wire.
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
