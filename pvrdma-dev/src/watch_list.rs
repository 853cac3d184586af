//! Rings that are watched because their doorbells do not trap.
//!
//! A doorbell tells only which queue has new elements; the producer's index in guest memory tells the same. Polling the
//! index therefore replaces the doorbell, and a ring whose index has moved is processed like one whose doorbell was
//! written ([`crate::pending_doorbells`]).

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;
use pvrdma_guest_memory::DmaView;
use pvrdma_verbs::Hca;

use crate::objects::{Qp, Srq};
use crate::pending_doorbells::{PendingDoorbells, RECV, SEND};
use crate::ring::{Progress, RingWords, Seen};
use crate::watcher::Depth;

/// Time for which a ring stays hot after it moved, in nanoseconds.
const HOT: u64 = 1_000_000;
/// Number of rings that are looked at in one pass although they are not hot.
const COLD_LOOKS: usize = 64;
/// Number of rings looked at under one view of guest memory.
pub(crate) const CHUNK: usize = 1024;

/// Queue to which a ring belongs.
enum Queue<H: Hca> {
    Send(Arc<Qp<H>>),
    Recv(Arc<Qp<H>>),
    Srq(Arc<Srq<H>>),
}

impl<H: Hca> Queue<H> {
    /// Identifies an entry of the list by the address of its object. A handle would not be unique: a late watcher may
    /// list a destroyed object beside the next one with the same handle. The list keeps its objects alive, so addresses
    /// are not reused.
    fn key(&self) -> (u8, usize) {
        match self {
            Self::Send(qp) => (0, Arc::as_ptr(qp).addr()),
            Self::Recv(qp) => (1, Arc::as_ptr(qp).addr()),
            Self::Srq(srq) => (2, Arc::as_ptr(srq).addr()),
        }
    }

    /// Returns the handle of the context that owns the queue.
    fn owner(&self) -> u32 {
        match self {
            Self::Send(qp) | Self::Recv(qp) => qp.pd.owner,
            Self::Srq(srq) => srq.pd.owner,
        }
    }

    fn ring_doorbell(&self, pending: &PendingDoorbells<H>) {
        match self {
            Self::Send(qp) => pending.push_qp(qp, SEND),
            Self::Recv(qp) => pending.push_qp(qp, RECV),
            Self::Srq(srq) => pending.push_srq(srq),
        }
    }

    /// Returns `true` if only the consumer of the ring loads its index. The index of a receive queue is also loaded to
    /// count posted requests, so a loaded index does not mean that the waiting QP knows of those requests.
    const fn is_send(&self) -> bool {
        matches!(self, Self::Send(_))
    }
}

/// State of a ring when its doorbell was last forwarded.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Passed {
    tail: u32,
    looks: u32,
}

/// Change of a ring since the last look.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Motion {
    None,
    /// The consumer looked at the ring, possibly just before a request was posted.
    Consumer,
    /// Something was posted.
    Producer,
}

/// Decides if a doorbell is due.
///
/// The index alone is not enough, because it may have wrapped around once. It cannot have wrapped without a look of the
/// consumer, so the number of looks is compared as well.
fn motion(tail: u32, seen: Seen, passed: Passed, is_send: bool) -> Motion {
    if is_send && tail == seen.tail {
        Motion::None
    } else if tail != passed.tail {
        Motion::Producer
    } else if seen.looks != passed.looks {
        if is_send { Motion::Producer } else { Motion::Consumer }
    } else {
        Motion::None
    }
}

/// A ring that is watched.
struct Watched<H: Hca> {
    queue: Queue<H>,
    key: (u8, usize),
    words: RingWords,
    progress: Progress,
    passed: Passed,
    /// Looked at in each pass until then.
    hot_until: u64,
}

impl<H: Hca> Watched<H> {
    fn new(queue: Queue<H>, words: RingWords, progress: Progress) -> Self {
        let key = queue.key();
        Self { queue, key, words, progress, passed: Passed::default(), hot_until: 0 }
    }

    /// Rings its doorbell if that is due. Returns `true` if something was posted.
    fn look(&mut self, view: &DmaView<'_>, now: u64, pending: &PendingDoorbells<H>) -> bool {
        // A ring whose memory has gone has no doorbell.
        let Ok(tail) = self.words.producer_index(view) else { return false };
        let seen = self.progress.seen();
        let motion = motion(tail, seen, self.passed, self.queue.is_send());
        if motion == Motion::None {
            return false;
        }
        self.passed = Passed { tail, looks: seen.looks };
        self.queue.ring_doorbell(pending);
        if motion == Motion::Producer {
            self.hot_until = now.saturating_add(HOT);
        }
        motion == Motion::Producer
    }
}

/// Returns the next chunk of at most `most` of `len` elements, below an index. Chunks go from the end to the front: the
/// removal of an element between two chunks moves others down, but none past the index, so none is skipped.
fn chunk(below: usize, len: usize, most: usize) -> Range<usize> {
    let end = below.min(len);
    end.saturating_sub(most)..end
}

/// List of all watched rings.
pub(crate) struct WatchList<H: Hca>(Mutex<Rings<H>>);

struct Rings<H: Hca> {
    all: Vec<Watched<H>>,
    keys: HashSet<(u8, usize)>,
    /// Indices of the hot rings.
    hot: Vec<usize>,
    /// Index of the next ring that is looked at although it is not hot.
    next: usize,
}

impl<H: Hca> WatchList<H> {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(Rings { all: Vec::new(), keys: HashSet::new(), hot: Vec::new(), next: 0 }))
    }

    /// Starts to watch the rings of a QP.
    pub(crate) fn add_qp(&self, qp: &Arc<Qp<H>>) {
        let mut rings = self.0.lock();
        if let Some(progress) = &qp.send_progress {
            rings.add(Watched::new(Queue::Send(Arc::clone(qp)), qp.send_words(), progress.clone()));
        }
        if let (Some(words), Some(progress)) = (qp.recv_words(), &qp.recv_progress) {
            rings.add(Watched::new(Queue::Recv(Arc::clone(qp)), words, progress.clone()));
        }
    }

    /// Starts to watch the ring of an SRQ.
    pub(crate) fn add_srq(&self, srq: &Arc<Srq<H>>) {
        if let Some(progress) = &srq.progress {
            self.0.lock().add(Watched::new(Queue::Srq(Arc::clone(srq)), srq.words, progress.clone()));
        }
    }

    /// Stops watching the rings of a QP.
    pub(crate) fn remove_qp(&self, qp: &Arc<Qp<H>>) {
        self.0.lock().retain(|queue| match queue {
            Queue::Send(other) | Queue::Recv(other) => !Arc::ptr_eq(other, qp),
            Queue::Srq(_) => true,
        });
    }

    /// Stops watching the ring of an SRQ.
    pub(crate) fn remove_srq(&self, srq: &Arc<Srq<H>>) {
        self.0.lock().retain(|queue| !matches!(queue, Queue::Srq(other) if Arc::ptr_eq(other, srq)));
    }

    /// Stops watching the rings of a context.
    pub(crate) fn remove_owner(&self, owner: u32) {
        self.0.lock().retain(|queue| queue.owner() != owner);
    }

    /// Stops watching all rings.
    pub(crate) fn clear(&self) {
        self.0.lock().retain(|_| false);
    }

    /// Returns `true` if nothing is watched.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.lock().all.is_empty()
    }

    /// Looks at rings and marks the doorbells that are due as pending. For [`Depth::All`], looks at rings below an
    /// index. Returns the number of rings to which requests were posted, and the index below which to continue, because
    /// a pass over all rings takes several views of memory.
    pub(crate) fn look(
        &self,
        view: &DmaView<'_>,
        now: u64,
        depth: Depth,
        below: usize,
        pending: &PendingDoorbells<H>,
    ) -> (u32, Option<usize>) {
        let mut rings = self.0.lock();
        match depth {
            Depth::Hot | Depth::Rest => (rings.look_hot(view, now, pending), None),
            Depth::All => {
                let chunk = chunk(below, rings.all.len(), CHUNK);
                let moved = chunk.clone().map(|index| rings.look_at(index, view, now, pending)).sum();
                (moved, (chunk.start > 0).then_some(chunk.start))
            }
        }
    }
}

impl<H: Hca> Rings<H> {
    fn add(&mut self, watched: Watched<H>) {
        if self.keys.insert(watched.key) {
            self.all.push(watched);
        }
    }

    fn retain(&mut self, keep: impl Fn(&Queue<H>) -> bool) {
        if self.all.is_empty() {
            return;
        }
        let keys = &mut self.keys;
        self.all.retain(|watched| {
            let keep = keep(&watched.queue);
            if !keep {
                keys.remove(&watched.key);
            }
            keep
        });
        // Removals have changed the indices. Rings that are still hot are recognized by their time.
        self.hot = (0..).zip(&self.all).filter(|(_, watched)| watched.hot_until > 0).map(|(index, _)| index).collect();
    }

    fn look_at(&mut self, index: usize, view: &DmaView<'_>, now: u64, pending: &PendingDoorbells<H>) -> u32 {
        let Some(watched) = self.all.get_mut(index) else { return 0 };
        let was_hot = watched.hot_until > 0;
        let moved = watched.look(view, now, pending);
        if moved && !was_hot {
            self.hot.push(index);
        }
        u32::from(moved)
    }

    fn look_hot(&mut self, view: &DmaView<'_>, now: u64, pending: &PendingDoorbells<H>) -> u32 {
        let mut moved = 0;
        let Self { all, hot, .. } = self;
        hot.retain(|&index| {
            let Some(watched) = all.get_mut(index) else { return false };
            moved += u32::from(watched.look(view, now, pending));
            let stays = watched.hot_until > now;
            if !stays {
                watched.hot_until = 0;
            }
            stays
        });
        for _ in 0..COLD_LOOKS.min(self.all.len()) {
            self.next = if self.next < self.all.len() { self.next } else { 0 };
            moved += self.look_at(self.next, view, now, pending);
            self.next += 1;
        }
        moved
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_that_comes_around_is_motion() {
        let passed = Passed { tail: 2, looks: 1 };
        assert_eq!(
            motion(2, Seen { tail: 1, looks: 5 }, passed, true),
            Motion::Producer,
            "the producer went around the ring once and one element further"
        );
        assert_eq!(
            motion(2, Seen { tail: 2, looks: 5 }, passed, true),
            Motion::None,
            "the consumer has seen the element"
        );
        assert_eq!(
            motion(2, Seen { tail: 2, looks: 5 }, passed, false),
            Motion::Consumer,
            "a waiting guest may not have it"
        );
        assert_eq!(
            motion(2, Seen { tail: 1, looks: 1 }, passed, true),
            Motion::None,
            "passed on, and not looked at yet"
        );
        assert_eq!(motion(3, Seen { tail: 1, looks: 1 }, passed, false), Motion::Producer);
    }

    /// If any ring is removed between two chunks, all others are looked at nevertheless.
    #[test]
    fn a_pass_in_chunks_leaves_none_out() {
        for len in 1..7_usize {
            for (when, removed) in (0..4).flat_map(|when| (0..len).map(move |removed| (when, removed))) {
                let mut all: Vec<usize> = (0..len).collect();
                let mut seen = HashSet::from([removed]);
                let mut below = usize::MAX;
                for round in 0.. {
                    let range = chunk(below, all.len(), 2);
                    seen.extend(&all[range.clone()]);
                    if range.start == 0 {
                        break;
                    }
                    below = range.start;
                    if round == when {
                        all.retain(|&ring| ring != removed);
                    }
                }
                assert_eq!(seen.len(), len, "{len} rings, {removed} goes after chunk {when}");
            }
        }
    }

    /// Explores a ring of `size` elements with a consumer, a guest that posts, and a watcher: in every order of up to
    /// `steps` steps, all posted requests are taken after one more look.
    fn explore(size: u32, steps: u32, is_send: bool) {
        #[derive(Clone, Copy)]
        struct World {
            tail: u32,
            head: u32,
            seen: Seen,
            passed: Passed,
        }
        impl World {
            /// The consumer takes the elements it knows of, and loads the index again if those were all.
            fn consume(&mut self, again: bool) {
                self.head = self.seen.tail;
                if again {
                    self.seen = Seen { tail: self.tail, looks: self.seen.looks + 1 };
                    self.head = self.tail;
                }
            }
            fn look(&mut self, is_send: bool, size: u32) {
                let mask = 2 * size - 1;
                let seen = Seen { tail: self.seen.tail & mask, ..self.seen };
                if motion(self.tail & mask, seen, self.passed, is_send) != Motion::None {
                    self.passed = Passed { tail: self.tail & mask, looks: self.seen.looks };
                    self.consume(true);
                }
            }
        }
        let mut worlds = vec![(World { tail: 0, head: 0, seen: Seen::default(), passed: Passed::default() }, 0)];
        while let Some((world, depth)) = worlds.pop() {
            let mut end = world;
            end.look(is_send, size);
            assert_eq!(end.head, end.tail, "{size} elements: a posted element goes unnoticed");
            if depth == steps {
                continue;
            }
            for step in 0..4 {
                let mut next = world;
                match step {
                    0 if world.tail - world.head < size => next.tail += 1,
                    1 => next.consume(false),
                    2 => next.consume(true),
                    3 => next.look(is_send, size),
                    _ => continue,
                }
                worlds.push((next, depth + 1));
            }
        }
    }

    #[test]
    fn in_every_order_posted_elements_are_taken() {
        for size in [1, 2, 4] {
            explore(size, 9, true);
            explore(size, 9, false);
        }
    }
}
