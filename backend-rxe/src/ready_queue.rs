//! The ready queue: tasks that are ready, fairly by device and then by task, and timers of those that wait.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::budget::RUN_COST;
use crate::share::{Contention, MAX_DEBT, Share};
use crate::task::Task;
use crate::timer::{TimerKey, Timers};

/// Tags are moved back when they are larger than this: a year of bytes at the least weight.
const REBASE: u64 = 1 << 62;

/// The tasks of a device.
#[derive(Debug)]
struct Flow {
    share: Arc<Share>,
    ready: VecDeque<Arc<Task>>,
    /// Tasks of it that run.
    running: usize,
    /// The device's rate has it wait until then.
    throttled: Option<Duration>,
}

impl Flow {
    fn is_busy(&self) -> bool {
        self.running > 0 || !self.ready.is_empty()
    }
}

/// A task that was taken, and what was charged for it.
#[derive(Debug)]
pub(crate) struct Taken {
    pub(crate) task: Arc<Task>,
    charged: u64,
    /// The tag that its device had, or the smallest one if it came first for another reason.
    start: u64,
}

/// What is inside a [`ReadyQueue`].
#[derive(Debug, Default)]
pub(crate) struct Queue {
    flows: Vec<Flow>,
    /// Tasks of all flows.
    ready: usize,
    pub(crate) timers: Timers<Arc<Task>>,
    /// Workers that wait.
    pub(crate) idle: usize,
    pub(crate) stopping: bool,
    contention: Arc<Contention>,
}

impl Queue {
    /// Returns `true` if nothing is ready and no timer is armed.
    pub(crate) fn is_empty(&self) -> bool {
        self.ready == 0 && self.timers.first().is_none()
    }

    /// When [`Self::take`] is worth another call, if nothing is pushed: the next timer, and the end of what rates of
    /// devices have wait.
    pub(crate) fn next_deadline(&self) -> Option<Duration> {
        let throttled = self.flows.iter().filter(|flow| !flow.ready.is_empty()).filter_map(|flow| flow.throttled);
        self.timers.first().into_iter().chain(throttled).min()
    }

    fn virtual_time(&self) -> u64 {
        self.contention.virtual_time.load(Ordering::Relaxed)
    }

    /// Where the tasks of a device are.
    fn slot(&mut self, share: &Arc<Share>) -> usize {
        let slot = share.slot.load(Ordering::Relaxed);
        if self.flows.get(slot).is_some_and(|flow| Arc::ptr_eq(&flow.share, share)) {
            return slot;
        }
        // Devices that are gone make room for new ones.
        let dead = |flow: &Flow| !flow.is_busy() && Arc::strong_count(&flow.share) == 1;
        let flow = Flow { share: Arc::clone(share), ready: VecDeque::new(), running: 0, throttled: None };
        let slot = self.flows.iter().position(dead).unwrap_or(self.flows.len());
        match self.flows.get_mut(slot) {
            Some(dead) => *dead = flow,
            None => self.flows.push(flow),
        }
        share.slot.store(slot, Ordering::Relaxed);
        slot
    }

    fn push(&mut self, task: Arc<Task>) {
        let now = self.virtual_time();
        let slot = self.slot(task.share());
        let Some(flow) = self.flows.get_mut(slot) else { return };
        if !flow.is_busy() {
            // Nothing is saved up while a device is idle.
            let share = &flow.share;
            let most = now.saturating_add(share.scaled(MAX_DEBT));
            share.set_finish(share.finish().saturating_add(share.take_elsewhere()).clamp(now, most));
            share.busy.store(true, Ordering::Relaxed);
            self.contention.busy.fetch_add(1, Ordering::Relaxed);
        }
        flow.ready.push_back(task);
        self.ready += 1;
    }

    /// Moves due timers to the ready queue, and takes the next task of the device whose turn it is. `charge` is what
    /// the run costs at most.
    pub(crate) fn take(&mut self, now: Duration, charge: u64) -> Option<Taken> {
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

    /// The device whose turn it is, and the smallest tag of those that are ready.
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

    /// The virtual time is the tag with which work was last begun.
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

    /// A task was run, for so much. `more`: it is marked as scheduled, and comes back.
    pub(crate) fn finish(&mut self, taken: Taken, cost: u64, more: bool) {
        let Taken { task, charged, start } = taken;
        // Who found nothing to do, as when a link is full, does not take the others' turns away by that.
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

/// Tasks that are ready, and timers of those that wait.
#[derive(Debug)]
pub(crate) struct ReadyQueue {
    pub(crate) queue: Mutex<Queue>,
    /// Notified when an idle worker has something to do.
    pub(crate) work: Condvar,
    /// Who is busy, for those that do not have the queue.
    pub(crate) contention: Arc<Contention>,
}

impl Default for ReadyQueue {
    fn default() -> Self {
        let contention = Arc::<Contention>::default();
        let queue = Queue { contention: Arc::clone(&contention), ..Queue::default() };
        Self { queue: Mutex::new(queue), work: Condvar::new(), contention }
    }
}

impl ReadyQueue {
    pub(crate) fn push(&self, task: Arc<Task>) {
        let mut queue = self.queue.lock();
        queue.push(task);
        if queue.idle > 0 {
            self.work.notify_one();
        }
    }

    /// What has devices wait has changed.
    pub(crate) fn look_again(&self) {
        // With the lock: a worker that is about to sleep has looked before, or does so afterwards.
        let _queue = self.queue.lock();
        self.work.notify_one();
    }

    /// Schedules a task for `deadline`, in place of an older timer of it.
    pub(crate) fn arm(&self, task: &Arc<Task>, deadline: Duration, old: Option<TimerKey>) -> TimerKey {
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
mod tests {
    use super::*;
    use crate::budget::Budget;
    use crate::share::ShareConfig;
    use crate::task::Runnable;

    const MS: Duration = Duration::from_millis(1);
    /// What a run costs that does something.
    const COST: u64 = 10_000;

    struct Nothing;

    impl Runnable for Nothing {
        fn run(&self, _budget: &mut Budget) -> bool {
            false
        }
    }

    /// Devices on a ready queue, with a task each.
    struct World {
        queue: Arc<ReadyQueue>,
        tasks: Vec<Arc<Task>>,
        alive: Vec<Arc<Nothing>>,
    }

    impl World {
        fn new(shares: &[ShareConfig]) -> Self {
            let queue = Arc::<ReadyQueue>::default();
            let alive: Vec<_> = shares.iter().map(|_| Arc::new(Nothing)).collect();
            let task = |(config, runnable): (&ShareConfig, &Arc<Nothing>)| {
                let runnable = Arc::downgrade(runnable);
                Task::new(&queue, &Arc::new(Share::new(*config)), runnable as _)
            };
            let tasks = shares.iter().zip(&alive).map(task).collect();
            Self { queue, tasks, alive }
        }

        fn take(&self, now: Duration) -> Option<Taken> {
            self.queue.queue.lock().take(now, COST)
        }

        /// Which device's task it is.
        fn of(&self, taken: &Taken) -> usize {
            self.tasks.iter().position(|task| Arc::ptr_eq(task, &taken.task)).unwrap()
        }

        /// Runs what is next, which goes on. Returns whose it was.
        fn run(&self, now: Duration, cost: u64) -> Option<usize> {
            let taken = self.take(now)?;
            let which = self.of(&taken);
            self.queue.queue.lock().finish(taken, cost, true);
            Some(which)
        }

        fn runs(&self, count: usize, of: usize) -> usize {
            (0..count).filter(|_| self.run(Duration::ZERO, COST) == Some(of)).count()
        }

        fn busy(&self) -> usize {
            self.queue.contention.busy.load(Ordering::Relaxed)
        }

        fn virtual_time(&self) -> u64 {
            self.queue.queue.lock().virtual_time()
        }
    }

    fn weight(weight: u32) -> ShareConfig {
        ShareConfig { weight, ..ShareConfig::default() }
    }

    #[test]
    fn devices_have_turns_by_weight() {
        let world = World::new(&[weight(300), weight(100)]);
        world.tasks.iter().for_each(Task::schedule);
        assert_eq!(world.runs(400, 0), 300);
        assert_eq!((world.busy(), world.queue.queue.lock().is_empty()), (2, false));
    }

    /// What a run cost counts, not what it might have.
    #[test]
    fn a_run_that_did_little_is_charged_little() {
        let world = World::new(&[weight(100), weight(100)]);
        world.tasks.iter().for_each(Task::schedule);
        let mut runs = [0, 0];
        for _ in 0..600 {
            let taken = world.take(Duration::ZERO).unwrap();
            let which = world.of(&taken);
            runs[which] += 1;
            world.queue.queue.lock().finish(taken, COST / [2, 1][which], true);
        }
        assert!((399..=401).contains(&runs[0]), "{runs:?}");
    }

    #[test]
    fn nothing_is_saved_up_while_a_device_is_idle() {
        let world = World::new(&[weight(100), weight(100)]);
        world.tasks[0].schedule();
        assert_eq!(world.runs(100, 0), 100);
        world.tasks[1].schedule();
        assert_eq!(world.runs(100, 1), 50);
    }

    /// A device that did much on threads of its own waits for the others, but not for more than so much.
    #[test]
    fn what_was_done_elsewhere_counts_up_to_a_bound() {
        let world = World::new(&[weight(100), weight(100)]);
        world.tasks[0].schedule();
        world.tasks[1].share().ran_elsewhere(&world.queue.contention, 100 * MAX_DEBT, false);
        world.tasks[1].schedule();
        let alone = usize::try_from(MAX_DEBT / COST).unwrap();
        assert_eq!(world.runs(alone, 0), alone);
        assert!(world.runs(100, 1) >= 50);
    }

    #[test]
    fn a_task_that_is_done_leaves_nothing() {
        let world = World::new(&[weight(100)]);
        world.tasks[0].schedule();
        // It is there once.
        world.tasks[0].schedule();
        assert_eq!((world.busy(), world.queue.queue.lock().is_empty()), (1, false));
        let taken = world.take(Duration::ZERO).unwrap();
        assert_eq!((world.busy(), world.queue.queue.lock().is_empty()), (1, true));
        world.queue.queue.lock().finish(taken, COST, false);
        assert_eq!((world.busy(), world.queue.queue.lock().ready), (0, 0));
        assert!(world.take(Duration::ZERO).is_none());
    }

    /// A device is busy as long as one of its tasks is ready or runs, and counts once.
    #[test]
    fn a_device_with_two_tasks_is_busy_until_both_are_done() {
        let world = World::new(&[weight(100)]);
        let other = Task::new(&world.queue, world.tasks[0].share(), Arc::downgrade(&world.alive[0]) as _);
        let take = || world.take(Duration::ZERO).unwrap();
        let done = |taken| world.queue.queue.lock().finish(taken, COST, false);
        for both_run in [false, true] {
            world.tasks[0].schedule();
            other.schedule();
            assert_eq!(world.busy(), 1);
            let first = take();
            let second = both_run.then(take);
            assert_eq!(world.busy(), 1);
            done(first);
            assert_eq!((world.busy(), world.tasks[0].share().busy.load(Ordering::Relaxed)), (1, true));
            done(second.unwrap_or_else(take));
            assert_eq!((world.busy(), world.tasks[0].share().busy.load(Ordering::Relaxed)), (0, false));
            // Both are marked as being there.
            for task in [&world.tasks[0], &other] {
                assert!(!task.run_scheduled(&mut Budget::new(1, 1)));
            }
        }
    }

    #[test]
    fn a_device_that_is_idle_keeps_its_place() {
        let world = World::new(&[weight(100), weight(100)]);
        for task in &world.tasks {
            task.schedule();
            let taken = world.take(Duration::ZERO).unwrap();
            world.queue.queue.lock().finish(taken, COST, false);
        }
        assert_eq!(world.queue.queue.lock().flows.len(), 2);
    }

    #[test]
    fn a_task_that_is_gone_is_not_run() {
        let mut world = World::new(&[weight(100), weight(100)]);
        world.tasks.iter().for_each(Task::schedule);
        world.alive.remove(0);
        assert_eq!(world.run(Duration::ZERO, COST), Some(1));
        assert_eq!((world.busy(), world.queue.queue.lock().ready), (1, 1));
        assert_eq!(world.tasks[0].share().finish(), 0, "nothing is charged");
    }

    #[test]
    fn a_device_waits_for_its_rate_and_nobody_for_it() {
        let slow = ShareConfig { max_rate: Some(1_000_000), burst: Some(1000), ..ShareConfig::default() };
        let world = World::new(&[slow, weight(100)]);
        world.tasks[0].schedule();
        world.tasks[0].share().spend(1000);
        assert_eq!((world.run(Duration::ZERO, COST), world.run(Duration::ZERO, COST)), (None, None));
        let until = world.queue.queue.lock().next_deadline();
        assert_eq!(until.map(|until| until.as_millis()), Some(1));
        assert_eq!(world.tasks[0].share().usage().throttled, 1, "once for both looks");
        world.tasks[1].schedule();
        assert_eq!(world.runs(10, 1), 10);
        assert_eq!(world.run(2 * MS, COST), Some(0));
    }

    #[test]
    fn a_promised_rate_comes_first() {
        let promised = ShareConfig { min_rate: Some(1_000_000), ..ShareConfig::default() };
        let world = World::new(&[weight(100), promised]);
        world.tasks.iter().for_each(Task::schedule);
        world.tasks[1].share().set_finish(1 << 40);
        assert_eq!(world.runs(10, 1), 10, "nothing of it is used");
        world.tasks[1].share().spend(1 << 20);
        assert_eq!(world.runs(10, 0), 10);
    }

    #[test]
    fn timers_put_tasks_on_the_queue() {
        let world = World::new(&[weight(100), weight(100)]);
        let first = world.queue.arm(&world.tasks[0], 5 * MS, None);
        world.queue.arm(&world.tasks[0], 3 * MS, Some(first));
        world.queue.arm(&world.tasks[1], 4 * MS, None);
        let next = || world.queue.queue.lock().next_deadline();
        assert_eq!((next(), world.queue.queue.lock().is_empty()), (Some(3 * MS), false));
        assert!(world.take(2 * MS).is_none());
        let taken = world.take(3 * MS).unwrap();
        assert_eq!((world.of(&taken), next()), (0, Some(4 * MS)));
        assert_eq!(world.take(5 * MS).map(|taken| world.of(&taken)), Some(1));
        assert!(world.queue.queue.lock().is_empty() && next().is_none());
    }

    #[test]
    fn devices_that_are_gone_make_room() {
        let world = World::new(&[weight(100)]);
        world.tasks[0].schedule();
        for _ in 0..10 {
            let other = World::new(&[weight(100)]);
            let task = Arc::clone(&other.tasks[0]);
            drop(other.tasks);
            world.queue.push(task);
            while world.queue.queue.lock().ready > 1 {
                let taken = world.take(Duration::ZERO).unwrap();
                let more = Arc::ptr_eq(&taken.task, &world.tasks[0]);
                world.queue.queue.lock().finish(taken, COST, more);
            }
        }
        assert_eq!((world.queue.queue.lock().flows.len(), world.busy()), (2, 1));
    }

    /// Who finds nothing to do does not move the time on for who comes then.
    #[test]
    fn runs_that_do_nothing_take_no_turns_away() {
        let world = World::new(&[weight(100)]);
        world.tasks[0].schedule();
        assert_eq!(world.runs(100, 0), 100);
        let before = world.virtual_time();
        assert_eq!(before, 99 * COST);
        (0..100).for_each(|_| _ = world.run(Duration::ZERO, RUN_COST));
        assert_eq!(world.virtual_time(), before);
        world.run(Duration::ZERO, RUN_COST + 1);
        assert_eq!(world.virtual_time(), 100 * COST + 100 * RUN_COST);
    }

    #[test]
    fn tags_that_are_too_large_begin_anew() {
        let world = World::new(&[weight(100), weight(100)]);
        world.tasks.iter().for_each(Task::schedule);
        let shares = [0, 1].map(|at| Arc::clone(world.tasks[at].share()));
        shares[0].set_finish(REBASE - 1);
        shares[1].set_finish(REBASE + 2);
        assert_eq!((world.run(Duration::ZERO, 100), world.virtual_time()), (Some(0), REBASE - 1));
        assert_eq!((world.run(Duration::ZERO, 100), world.virtual_time()), (Some(1), 0));
        assert_eq!(shares.map(|share| share.finish()), [97, 100]);
    }
}
