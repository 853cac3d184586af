//! Queue of frames that wait for a port.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Mutex, MutexGuard};
use pvrdma_base::Snapshot;
use pvrdma_handover::Notice;
use pvrdma_packet::MacAddr;

use super::counters::SwitchCounters;
use super::direct::{Direct, Round};
use crate::{Bell, Clock, Frames, Offload};

/// Choice of a port about frames to addresses that no port has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum UnknownUnicast {
    /// The port does not get them: the host behind it has one address.
    #[default]
    Drop,
    /// The port gets them, as each port of a Linux bridge does: there is a bridge behind it.
    Flood,
}

/// Maximum cost in bytes of the frames in a queue. A single sender can use half of it.
pub(super) const CAPACITY: usize = 8 << 20;
/// Bytes that a frame costs in addition to its length.
pub(super) const FRAME_COST: usize = 64;
/// Limits of frames and, approximately, of bytes in one chunk. The receiver takes whole chunks.
const CHUNK_FRAMES: usize = 64;
const CHUNK_BYTES: usize = 256 << 10;
/// Number of buffers that are kept for reuse.
const SPARE: usize = 4;

/// Sender of a frame: the number of a port. A switch never reuses numbers.
pub(super) type Source = u64;
/// Source number of the uplink.
pub(super) const UPLINK: Source = 0;

/// Frames that the receiver takes together.
#[derive(Debug, Default)]
struct Chunk {
    frames: Frames,
    /// Number of frames that have been taken.
    from: usize,
    /// Sender of each frame.
    sources: Vec<Source>,
}

#[derive(Debug, Default)]
struct Queue {
    /// Chunks in order; none of them is empty.
    chunks: VecDeque<Chunk>,
    spare: Vec<Frames>,
    frames: usize,
    /// Cost of all frames in the queue, and the share of each source in it.
    cost: usize,
    shares: HashMap<Source, usize>,
}

const fn cost_of(frame: &[u8]) -> usize {
    frame.len().saturating_add(FRAME_COST)
}

impl Queue {
    /// Appends a frame if there is room for its source. The cost of a source must not exceed the free room, so that
    /// room remains for sources that send little, however much one source sends.
    fn push(&mut self, source: Source, frame: &[u8], offload: Offload) -> bool {
        let cost = cost_of(frame);
        let share = self.shares.get(&source).map_or(cost, |share| share.saturating_add(cost));
        if share > CAPACITY.saturating_sub(self.cost) {
            return false;
        }
        self.shares.insert(source, share);
        self.cost = self.cost.saturating_add(cost);
        self.frames = self.frames.saturating_add(1);
        let full = |chunk: &Chunk| chunk.frames.len() >= CHUNK_FRAMES || chunk.frames.bytes() >= CHUNK_BYTES;
        if self.chunks.back().is_none_or(full) {
            let frames = self.spare.pop().unwrap_or_default();
            self.chunks.push_back(Chunk { frames, ..Chunk::default() });
        }
        if let Some(chunk) = self.chunks.back_mut() {
            chunk.frames.push_with_offload(frame, offload);
            chunk.sources.push(source);
        }
        true
    }

    /// Releases the cost of a frame.
    fn settle(&mut self, source: Source, cost: usize) {
        self.cost = self.cost.saturating_sub(cost);
        self.frames = self.frames.saturating_sub(1);
        if let Some(share) = self.shares.get_mut(&source) {
            *share = share.saturating_sub(cost);
            if *share == 0 {
                self.shares.remove(&source);
            }
        }
    }

    /// Appends the first frames to `out`, at most `most`. Returns the number taken.
    fn take(&mut self, out: &mut Frames, most: usize) -> usize {
        let Some(mut chunk) = self.chunks.pop_front() else { return 0 };
        let whole = chunk.from == 0 && chunk.frames.len() <= most && out.is_empty();
        let count = chunk.frames.len().saturating_sub(chunk.from).min(most);
        let sources = chunk.sources.iter().skip(chunk.from).copied();
        for (source, (frame, offload)) in sources.zip(chunk.frames.iter_with_offloads(chunk.from)).take(count) {
            self.settle(source, cost_of(frame));
            if !whole {
                out.push_with_offload(frame, offload);
            }
        }
        if whole {
            std::mem::swap(out, &mut chunk.frames);
        }
        chunk.from = chunk.from.saturating_add(count);
        if !whole && chunk.from < chunk.frames.len() {
            self.chunks.push_front(chunk);
        } else if self.spare.len() < SPARE {
            chunk.frames.clear();
            self.spare.push(chunk.frames);
        }
        count
    }
}

/// Queue of a port, and the descriptor that signals its state.
#[derive(Debug)]
pub(super) struct Mailbox {
    pub(super) id: Source,
    pub(super) mac: MacAddr,
    pub(super) unknown: UnknownUnicast,
    queue: Mutex<Queue>,
    /// Raised when the port has to look at its queue or its readiness. Changes under the lock of the queue.
    notice: Notice<Bell>,
    /// Inline delivery of frames from the uplink.
    pub(super) direct: Direct,
    /// The uplink has refused frames of this port, and has not accepted all of them since.
    pub(super) refused: AtomicBool,
    /// The port has sent no frame since its station was said to be elsewhere. The flag orders nothing: a frame that
    /// races with its change goes one way or the other.
    silent: AtomicBool,
    pub(super) counters: SwitchCounters,
}

impl Mailbox {
    pub(super) fn new(id: Source, mac: MacAddr, unknown: UnknownUnicast) -> io::Result<Self> {
        let (queue, notice) = (Mutex::default(), Notice::new(Bell::new()?));
        let (direct, refused, counters) = (Direct::default(), AtomicBool::new(false), SwitchCounters::default());
        let silent = AtomicBool::new(false);
        Ok(Self { id, mac, unknown, queue, notice, direct, refused, silent, counters })
    }

    /// Returns `true` if the station of the port may be beyond the uplink.
    pub(super) fn is_silent(&self) -> bool {
        self.silent.load(Ordering::Relaxed)
    }

    /// Records that the port sends a frame.
    pub(super) fn speaks(&self) {
        // The line of the flag stays shared while nothing changes.
        if self.is_silent() {
            self.silent.store(false, Ordering::Relaxed);
        }
    }

    /// Records that the station of the port may be beyond the uplink.
    pub(super) fn falls_silent(&self) {
        self.silent.store(true, Ordering::Relaxed);
    }

    /// Returns the descriptor that is readable while the notice is raised.
    pub(super) fn event(&self) -> Arc<OwnedFd> {
        self.notice.event().descriptor()
    }

    /// Locks the queue to append frames of a source.
    pub(super) fn open(&self, source: Source) -> Delivery<'_> {
        Delivery { mailbox: self, queue: self.queue.lock(), source, delivered: 0, dropped: 0 }
    }

    /// Delivers frames from the uplink: inline if the queue is empty. Otherwise, and for frames that the receiver
    /// leaves, through the queue.
    pub(super) fn bring(&self, frames: &Frames, list: &[usize], round: &mut Round, clock: &dyn Clock) {
        // This keeps the order: a thread that is taking the last frames out holds the lock that the receiver acquires
        // before it takes any frame.
        let waiting = self.notice.is_raised();
        let taken = if waiting { 0 } else { self.direct.take(frames, list, round, clock) };
        let rest = list.get(taken..).unwrap_or_default();
        if !rest.is_empty() {
            let mut delivery = self.open(UPLINK);
            for &index in rest {
                delivery.push(frames.get(index).unwrap_or_default(), frames.offload(index));
            }
        }
    }

    /// Makes the port check its queue and its readiness again.
    pub(super) fn signal(&self) {
        let _queue = self.queue.lock();
        self.notice.raise();
    }

    /// Appends frames, at most `most`. Returns `true` if it appended any.
    pub(super) fn take(&self, frames: &mut Frames, most: usize) -> bool {
        if !self.notice.is_raised() {
            return false;
        }
        let mut queue = self.queue.lock();
        let count = queue.take(frames, most);
        if queue.frames == 0 {
            self.notice.lower();
        }
        count > 0
    }

    /// Returns the number of queued frames, and their cost in bytes.
    pub(super) fn load(&self) -> Snapshot<(usize, usize)> {
        self.queue.try_lock().map(|queue| (queue.frames, queue.cost)).into()
    }
}

/// Frames of one source that are being appended to a mailbox.
#[derive(Debug)]
pub(super) struct Delivery<'m> {
    mailbox: &'m Mailbox,
    queue: MutexGuard<'m, Queue>,
    source: Source,
    delivered: u64,
    dropped: u64,
}

impl Delivery<'_> {
    pub(super) fn push(&mut self, frame: &[u8], offload: Offload) {
        if self.queue.push(self.source, frame, offload) {
            self.delivered += 1;
        } else {
            self.dropped += 1;
        }
    }
}

impl Drop for Delivery<'_> {
    fn drop(&mut self) {
        let counters = &self.mailbox.counters;
        if self.delivered > 0 {
            self.mailbox.notice.raise();
        }
        if self.delivered > 0 && self.source != UPLINK {
            counters.switch_frames_received.add(self.delivered);
        }
        if self.dropped > 0 {
            counters.switch_dropped_full.add(self.dropped);
        }
    }
}
