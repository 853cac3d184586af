//! Receive queues: packets of a subset of a device's queue pairs, in the order of arrival. All packets of a queue pair
//! are in the same queue, which only one thread at a time empties. With several queues, several threads work in
//! parallel.

use std::iter;
use std::ops::Range;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use parking_lot::{FairMutex, FairMutexGuard, Mutex};
use pvrdma_handover::Combiner;
use pvrdma_verbs_types::Qpn;

use super::arrivals::{Arrival, Batch};

/// Maximum number of batches that wait in a queue. Later frames wait in the link.
pub(super) const MAX_WAITING: usize = 4;

/// The receive queues of a port, at least one.
#[derive(Debug)]
pub(super) struct ReceiveQueues<R: ?Sized> {
    first: ReceiveQueue<R>,
    more: Box<[ReceiveQueue<R>]>,
    /// Number of turns so far.
    turns: AtomicUsize,
}

impl<R: ?Sized> ReceiveQueues<R> {
    pub(super) fn new(count: usize) -> Self {
        let more = (1..count).map(|_| ReceiveQueue::default()).collect();
        Self { first: ReceiveQueue::default(), more, turns: AtomicUsize::new(0) }
    }

    /// Returns the queue for packets of a queue pair.
    pub(super) fn of(&self, qpn: Qpn) -> &ReceiveQueue<R> {
        let index = qpn.get() as usize % self.len();
        index.checked_sub(1).and_then(|index| self.more.get(index)).unwrap_or(&self.first)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &ReceiveQueue<R>> {
        iter::once(&self.first).chain(&self.more)
    }

    /// Iterates over all queues, starting with another one each time, for work whose budget does not reach all of them.
    pub(super) fn in_turns(&self) -> impl Iterator<Item = &ReceiveQueue<R>> {
        let first = self.turns.fetch_add(1, Ordering::Relaxed) % self.len();
        self.iter().skip(first).chain(self.iter().take(first))
    }

    /// Returns the first queue, which is that of all queue pairs if there is only one.
    pub(super) const fn only(&self) -> &ReceiveQueue<R> {
        &self.first
    }

    pub(super) fn len(&self) -> usize {
        self.more.len().saturating_add(1)
    }

    /// Returns `true` if there is more than one queue.
    pub(super) fn are_many(&self) -> bool {
        !self.more.is_empty()
    }
}

/// Consecutive packets of a batch that are for the same queue.
#[derive(Debug)]
pub(super) struct Part {
    batch: Arc<Batch>,
    frames: Range<usize>,
}

impl Part {
    pub(super) fn len(&self) -> usize {
        self.frames.len()
    }

    pub(super) fn arrivals(&self) -> impl Iterator<Item = Arrival<'_>> {
        self.frames.clone().map(|index| Arrival::new(&self.batch, index))
    }
}

/// Packets that wait in a queue.
#[derive(Debug, Default)]
struct Waiting {
    parts: Vec<Part>,
    /// Number of batches that the parts belong to.
    batches: usize,
}

impl Waiting {
    fn push(&mut self, batch: &Arc<Batch>, frames: Range<usize>) {
        if self.parts.last().is_none_or(|part| !Arc::ptr_eq(&part.batch, batch)) {
            self.batches = self.batches.saturating_add(1);
        }
        self.parts.push(Part { batch: Arc::clone(batch), frames });
    }
}

/// Distributes the packets of a batch to their queues, one run of consecutive packets at a time.
#[derive(Debug)]
pub(super) struct Distribution<'a, R: ?Sized> {
    batch: &'a Arc<Batch>,
    run: Option<(&'a ReceiveQueue<R>, Range<usize>)>,
}

impl<'a, R: ?Sized> Distribution<'a, R> {
    pub(super) const fn of(batch: &'a Arc<Batch>) -> Self {
        Self { batch, run: None }
    }

    /// Adds the packet at this index of the batch to a queue.
    pub(super) fn add(&mut self, queue: &'a ReceiveQueue<R>, index: usize) {
        match &mut self.run {
            Some((last, frames)) if ptr::eq(*last, queue) && frames.end == index => frames.end = index + 1,
            run => {
                if let Some((queue, frames)) = run.replace((queue, index..index + 1)) {
                    queue.waiting.lock().push(self.batch, frames);
                }
            }
        }
    }

    /// Puts the last run into its queue. The caller [empties](ReceiveQueue::empty) the queues afterwards.
    pub(super) fn finish(self) {
        if let Some((queue, frames)) = self.run {
            queue.waiting.lock().push(self.batch, frames);
        }
    }
}

/// A receive queue with its receiver.
#[derive(Debug)]
pub(super) struct ReceiveQueue<R: ?Sized> {
    waiting: Mutex<Waiting>,
    /// Held by the thread that empties the queue.
    receiver: FairMutex<Option<Box<R>>>,
    /// Replaces `receiver` before the next packet.
    next_receiver: Mutex<Option<Box<R>>>,
    /// Responders that can continue to send, after their rate made them wait.
    resumed: Mutex<Vec<Qpn>>,
    /// A thread that finds the queue busy leaves its work to the thread that holds it.
    combiner: Combiner,
    /// Number of times that the queue was emptied.
    passes: AtomicU64,
}

impl<R: ?Sized> Default for ReceiveQueue<R> {
    fn default() -> Self {
        Self {
            waiting: Mutex::default(),
            receiver: FairMutex::default(),
            next_receiver: Mutex::default(),
            resumed: Mutex::default(),
            combiner: Combiner::default(),
            passes: AtomicU64::new(0),
        }
    }
}

impl<R: ?Sized> ReceiveQueue<R> {
    pub(super) fn attach(&self, receiver: Box<R>) {
        *self.next_receiver.lock() = Some(receiver);
    }

    pub(super) fn resume(&self, qpn: Qpn) {
        self.resumed.lock().push(qpn);
    }

    /// Passes the waiting packets to the receiver and does the work that is due. If another thread is doing so, it
    /// takes over this work as well. Returns `true` if there is more to do at once, as `run` reports.
    pub(super) fn empty(&self, mut run: impl FnMut(&mut R, &[Part], Vec<Qpn>) -> bool) -> bool {
        self.combiner.run(&self.receiver, |receiver| {
            let waiting = std::mem::take(&mut *self.waiting.lock());
            // A new receiver is installed only after the waiting packets were taken, so it gets only later ones. A peer
            // may send as soon as the device is attached.
            if let Some(next) = self.next_receiver.lock().take() {
                *receiver = Some(next);
            }
            let resumed = std::mem::take(&mut *self.resumed.lock());
            let more = receiver.as_mut().is_some_and(|receiver| run(receiver, &waiting.parts, resumed));
            self.passes.fetch_add(1, Ordering::Relaxed);
            more
        })
    }

    /// Passes packets that have just arrived to the receiver, unless another thread holds it or older packets wait.
    /// Returns `true` if there is more to do, which `run` reports or other threads have left. The caller ensures that
    /// the queue is [emptied](Self::empty) then.
    pub(super) fn take_at_once(
        &self,
        may: impl FnOnce(&R) -> bool,
        run: impl FnOnce(&mut R, Vec<Qpn>) -> bool,
    ) -> Option<bool> {
        let once = self.combiner.once(&self.receiver, |receiver| {
            if !self.waiting.lock().parts.is_empty() || self.next_receiver.lock().is_some() {
                return None;
            }
            let receiver = receiver.as_mut().filter(|receiver| may(receiver))?;
            let more = run(receiver, std::mem::take(&mut *self.resumed.lock()));
            self.passes.fetch_add(1, Ordering::Relaxed);
            Some(more)
        });
        once.and_then(|(more, left)| more.map(|more| more | left))
    }

    /// Returns the receiver, unless another thread holds it.
    pub(super) fn try_receiver(&self) -> Option<FairMutexGuard<'_, Option<Box<R>>>> {
        self.receiver.try_lock()
    }

    /// Waits until the thread that empties the queue has finished.
    pub(super) fn wait(&self) {
        drop(self.receiver.lock());
    }

    /// Returns how often the queue was emptied.
    pub(super) fn passes(&self) -> u64 {
        self.passes.load(Ordering::Relaxed)
    }

    pub(super) fn is_full(&self) -> bool {
        self.waiting.lock().batches >= MAX_WAITING
    }

    /// Returns `true` if the queue has packets that no queue pair has got yet.
    pub(super) fn is_in_use(&self) -> bool {
        // The order matters: a thread that takes packets out already holds the receiver, so packets are seen in one of
        // the two places.
        !self.waiting.lock().parts.is_empty() || self.receiver.is_locked()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the contents of each queue: numbers of batches, with the packets of each.
    fn waiting(queues: &ReceiveQueues<()>, batches: &[Arc<Batch>]) -> Vec<Vec<(usize, Range<usize>)>> {
        let number = |of: &Arc<Batch>| batches.iter().position(|batch| Arc::ptr_eq(batch, of)).unwrap();
        let parts = |queue: &ReceiveQueue<()>| {
            let waiting = queue.waiting.lock();
            waiting.parts.iter().map(|part| (number(&part.batch), part.frames.clone())).collect()
        };
        queues.iter().map(parts).collect()
    }

    #[test]
    fn packets_of_a_queue_pair_are_in_one_queue_in_order() {
        let queues = ReceiveQueues::<()>::new(3);
        let batches = [Arc::<Batch>::default(), Arc::default()];
        for (batch, packets) in batches.iter().zip([&[(0, 6), (1, 6), (2, 9), (4, 7), (5, 6)][..], &[(0, 7), (1, 7)]]) {
            let mut distribution = Distribution::of(batch);
            for &(index, qpn) in packets {
                distribution.add(queues.of(Qpn::new(qpn)), index);
            }
            distribution.finish();
        }
        // 6 and 9 are in the same queue. Packet 3 of the first batch is not for this device.
        assert_eq!(waiting(&queues, &batches), [vec![(0, 0..3), (0, 5..6)], vec![(0, 4..5), (1, 0..2)], vec![]]);
    }

    #[test]
    fn batches_fill_a_queue_however_many_their_packets() {
        let queues = ReceiveQueues::<()>::new(2);
        for count in 0..MAX_WAITING {
            assert!(!queues.iter().any(ReceiveQueue::is_full), "after {count}");
            let batch = Arc::default();
            let mut distribution = Distribution::of(&batch);
            (0..100).for_each(|index| distribution.add(queues.of(Qpn::new(u32::from(index % 4 == 3))), index));
            distribution.finish();
        }
        assert!(queues.iter().all(ReceiveQueue::is_full));
    }

    #[test]
    fn each_queue_is_first_in_its_turn() {
        let queues = ReceiveQueues::<()>::new(3);
        let number = |of: &ReceiveQueue<()>| queues.iter().position(|queue| ptr::eq(queue, of)).unwrap();
        for turn in [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2]] {
            assert!(queues.in_turns().map(number).eq(turn));
        }
    }

    #[test]
    fn there_is_always_a_queue() {
        for (count, len) in [(0, 1), (1, 1), (4, 4)] {
            let queues = ReceiveQueues::<()>::new(count);
            assert_eq!((queues.len(), queues.iter().count(), queues.are_many()), (len, len, len > 1));
            let of = |qpn| queues.iter().position(|queue| ptr::eq(queue, queues.of(Qpn::new(qpn))));
            assert!((0..20).all(|qpn| of(qpn) == Some(qpn as usize % len)));
        }
    }
}
