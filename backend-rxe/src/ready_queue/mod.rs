//! The ready queue: tasks that are ready, served fairly by device and then by task, and timers of waiting tasks.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::budget::RUN_COST;
use crate::share::{Contention, MAX_DEBT, Share};
use crate::timer::{TimerKey, Timers};

/// Tags above this value are rebased. It corresponds to a year of work at the minimum weight.
const REBASE: u64 = 1 << 62;

/// A task in the queue.
pub(crate) trait Scheduled {
    /// Returns the share of the device that the task belongs to.
    fn share(&self) -> &Arc<Share>;

    /// Returns `true` if the task still has something to run.
    fn is_alive(&self) -> bool;
}

/// The tasks of a device.
#[derive(Debug)]
struct Flow<T> {
    share: Arc<Share>,
    ready: VecDeque<Arc<T>>,
    /// Number of its tasks that run.
    running: usize,
    /// Time until which the rate limit of the device delays it.
    throttled: Option<Duration>,
}

impl<T> Flow<T> {
    fn is_busy(&self) -> bool {
        self.running > 0 || !self.ready.is_empty()
    }
}

/// A task that was taken from the queue, and the cost that was charged for it.
#[derive(Debug)]
pub(crate) struct Taken<T> {
    pub(crate) task: Arc<T>,
    charged: u64,
    /// Tag of its device, or the smallest tag if the device was chosen for another reason.
    start: u64,
}

/// The part of a [`ReadyQueue`] under its lock.
#[derive(Debug)]
pub(crate) struct Queue<T> {
    flows: Vec<Flow<T>>,
    /// Number of ready tasks of all flows.
    ready: usize,
    pub(crate) timers: Timers<Arc<T>>,
    /// Number of waiting workers.
    pub(crate) idle: usize,
    pub(crate) stopping: bool,
    contention: Arc<Contention>,
}

impl<T: Scheduled> Queue<T> {
    /// Returns `true` if nothing is ready and no timer is armed.
    pub(crate) fn is_empty(&self) -> bool {
        self.ready == 0 && self.timers.first().is_none()
    }

    /// Returns the next time at which [`Self::take`] may return a task without another push: the next timer, or the end
    /// of a rate limit's delay.
    pub(crate) fn next_deadline(&self) -> Option<Duration> {
        let throttled = self.flows.iter().filter(|flow| !flow.ready.is_empty()).filter_map(|flow| flow.throttled);
        self.timers.first().into_iter().chain(throttled).min()
    }

    fn virtual_time(&self) -> u64 {
        self.contention.virtual_time.load(Ordering::Relaxed)
    }

    /// Returns the slot of a device.
    fn slot(&mut self, share: &Arc<Share>) -> usize {
        let slot = share.slot.load(Ordering::Relaxed);
        if self.flows.get(slot).is_some_and(|flow| Arc::ptr_eq(&flow.share, share)) {
            return slot;
        }
        // Slots of devices that no longer exist are reused.
        let dead = |flow: &Flow<T>| !flow.is_busy() && Arc::strong_count(&flow.share) == 1;
        let flow = Flow { share: Arc::clone(share), ready: VecDeque::new(), running: 0, throttled: None };
        let slot = self.flows.iter().position(dead).unwrap_or(self.flows.len());
        match self.flows.get_mut(slot) {
            Some(dead) => *dead = flow,
            None => self.flows.push(flow),
        }
        share.slot.store(slot, Ordering::Relaxed);
        slot
    }

    fn push(&mut self, task: Arc<T>) {
        let now = self.virtual_time();
        let slot = self.slot(task.share());
        let Some(flow) = self.flows.get_mut(slot) else { return };
        if !flow.is_busy() {
            // Idle time of a device is not credited.
            let share = &flow.share;
            let most = now.saturating_add(share.scaled(MAX_DEBT));
            share.set_finish(share.finish().saturating_add(share.take_elsewhere()).clamp(now, most));
            share.busy.store(true, Ordering::Relaxed);
            self.contention.busy.fetch_add(1, Ordering::Relaxed);
        }
        flow.ready.push_back(task);
        self.ready += 1;
    }

    /// Moves due timers to the ready queue and takes the next task of the next device. `charge` is the maximum cost of
    /// the run.
    pub(crate) fn take(&mut self, now: Duration, charge: u64) -> Option<Taken<T>> {
        while let Some(task) = self.timers.pop_due(now) {
            self.push(task);
        }
        while let Some((slot, least)) = self.next(now) {
            let flow = self.flows.get_mut(slot)?;
            let task = flow.ready.pop_front()?;
            self.ready = self.ready.saturating_sub(1);
            flow.running += 1;
            let (charged, finish) = (flow.share.scaled(charge), flow.share.finish());
            flow.share.set_finish(finish.saturating_add(charged));
            let taken = Taken { task, charged, start: least };
            if taken.task.is_alive() {
                return Some(taken);
            }
            self.finish(taken, 0, false);
        }
        None
    }

    /// Returns the next device, and the smallest tag of those that are ready.
    fn next(&mut self, now: Duration) -> Option<(usize, u64)> {
        let (mut best, mut least) = (None, None);
        for (slot, flow) in self.flows.iter_mut().enumerate().filter(|(_, flow)| !flow.ready.is_empty()) {
            let throttled = flow.share.throttled_until(|| now);
            if throttled.is_some() && flow.throttled.is_none() {
                flow.share.count_throttled();
            }
            flow.throttled = throttled;
            if throttled.is_some() {
                continue;
            }
            let finish = flow.share.finish();
            least = Some(least.map_or(finish, |least: u64| least.min(finish)));
            let key = (!flow.share.is_owed(now), finish);
            if best.is_none_or(|(other, _)| key < other) {
                best = Some((key, slot));
            }
        }
        best.map(|(_, slot)| slot).zip(least)
    }

    /// Advances the virtual time to the tag of the work that began last.
    fn advance(&mut self, start: u64) {
        let time = self.virtual_time().max(start);
        if time < REBASE {
            self.contention.virtual_time.store(time, Ordering::Relaxed);
            return;
        }
        for flow in &self.flows {
            flow.share.set_finish(flow.share.finish().saturating_sub(time));
        }
        self.contention.virtual_time.store(0, Ordering::Relaxed);
    }

    /// Records the end of a run with its cost. `more`: the task is marked as scheduled, and is queued again.
    pub(crate) fn finish(&mut self, taken: Taken<T>, cost: u64, more: bool) {
        let Taken { task, charged, start } = taken;
        // A task that found nothing to do, for example because a link is full, must not take turns away from others.
        self.advance(if cost > RUN_COST { start } else { start.saturating_sub(MAX_DEBT) });
        let slot = self.slot(task.share());
        let Some(flow) = self.flows.get_mut(slot) else { return };
        let share = &flow.share;
        let used = share.scaled(cost).saturating_add(share.take_elsewhere());
        share.set_finish(share.finish().saturating_sub(charged).saturating_add(used));
        flow.running = flow.running.saturating_sub(1);
        if more {
            flow.ready.push_back(task);
            self.ready += 1;
        } else if !flow.is_busy() {
            share.busy.store(false, Ordering::Relaxed);
            self.contention.busy.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Tasks that are ready, and timers of waiting tasks.
#[derive(Debug)]
pub(crate) struct ReadyQueue<T> {
    pub(crate) queue: Mutex<Queue<T>>,
    /// Notified when an idle worker has something to do.
    pub(crate) work: Condvar,
    /// Load state, for threads that do not hold the queue.
    pub(crate) contention: Arc<Contention>,
}

impl<T> Default for ReadyQueue<T> {
    fn default() -> Self {
        let contention = Arc::<Contention>::default();
        let queue = Queue {
            flows: Vec::new(),
            ready: 0,
            timers: Timers::default(),
            idle: 0,
            stopping: false,
            contention: Arc::clone(&contention),
        };
        Self { queue: Mutex::new(queue), work: Condvar::new(), contention }
    }
}

impl<T: Scheduled> ReadyQueue<T> {
    pub(crate) fn push(&self, task: Arc<T>) {
        let mut queue = self.queue.lock();
        queue.push(task);
        if queue.idle > 0 {
            self.work.notify_one();
        }
    }

    /// Wakes a worker after a limit that delays devices has changed.
    pub(crate) fn look_again(&self) {
        // Taking the lock ensures that the wake-up is not lost: a worker that is about to sleep either waits already,
        // or checks the queue again afterwards.
        let _queue = self.queue.lock();
        self.work.notify_one();
    }

    /// Schedules a task for `deadline`, in place of an older timer of the task.
    pub(crate) fn arm(&self, task: &Arc<T>, deadline: Duration, old: Option<TimerKey>) -> TimerKey {
        let mut queue = self.queue.lock();
        if let Some(old) = old {
            queue.timers.remove(old);
        }
        let first = queue.timers.first().is_none_or(|first| deadline < first);
        let key = queue.timers.insert(deadline, Arc::clone(task));
        if first && queue.idle > 0 {
            self.work.notify_one();
        }
        key
    }
}

#[cfg(test)]
mod tests;
