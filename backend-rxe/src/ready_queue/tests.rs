use std::sync::mpsc;
use std::thread;

use pvrdma_verbs::testing::DEADLINE;

use super::*;
use crate::budget::Budget;
use crate::share::ShareConfig;
use crate::task::{Runnable, Task};

const MS: Duration = Duration::from_millis(1);
/// Cost of a run that does something.
const COST: u64 = 10_000;

struct Nothing;

impl Runnable for Nothing {
    fn run(&self, _budget: &mut Budget) -> bool {
        false
    }
}

/// Devices on a ready queue, with a task each.
struct World {
    queue: Arc<ReadyQueue<Task>>,
    tasks: Vec<Arc<Task>>,
    alive: Vec<Arc<Nothing>>,
}

impl World {
    fn new(shares: &[ShareConfig]) -> Self {
        let queue = Arc::<ReadyQueue<Task>>::default();
        let alive: Vec<_> = shares.iter().map(|_| Arc::new(Nothing)).collect();
        let task = |(config, runnable): (&ShareConfig, &Arc<Nothing>)| {
            let runnable = Arc::downgrade(runnable);
            Task::new(&queue, &Arc::new(Share::new(*config)), runnable as _)
        };
        let tasks = shares.iter().zip(&alive).map(task).collect();
        Self { queue, tasks, alive }
    }

    fn take(&self, now: Duration) -> Option<Taken<Task>> {
        self.queue.queue.lock().take(now, COST)
    }

    /// Returns the device of a task.
    fn of(&self, taken: &Taken<Task>) -> usize {
        self.tasks.iter().position(|task| Arc::ptr_eq(task, &taken.task)).unwrap()
    }

    /// Runs the next task, which stays ready. Returns its device.
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

/// The actual cost of a run counts, not the maximum.
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

/// A device that did much on its own threads waits for the others, but only up to a bound.
#[test]
fn work_on_own_threads_counts_up_to_a_bound() {
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
    // The task is on the queue only once.
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
        // Both are marked as scheduled.
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
fn a_device_waits_for_its_rate_without_delaying_others() {
    let slow = ShareConfig { max_rate: Some(1_000_000), burst: Some(1000), ..ShareConfig::default() };
    let world = World::new(&[slow, weight(100)]);
    world.tasks[0].schedule();
    world.tasks[0].share().spend(1000, 1000);
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
    assert_eq!(world.runs(10, 1), 10, "the promised rate is unused, so its device comes first");
    world.tasks[1].share().spend(1 << 20, 1 << 20);
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

/// A task that finds nothing to do does not advance the virtual time for later tasks.
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

/// The same holds at the largest tag, which is above the limit.
#[test]
fn the_largest_tag_begins_anew() {
    let world = World::new(&[weight(100)]);
    world.tasks[0].schedule();
    world.tasks[0].share().set_finish(REBASE);
    assert_eq!((world.run(Duration::ZERO, 100), world.virtual_time()), (Some(0), 0));
}

/// Makes a worker sleep, and returns `true` if `act` wakes it.
fn wakes(world: &World, act: impl FnOnce()) -> bool {
    let (asleep, is_asleep) = mpsc::channel();
    let ready = &world.queue;
    thread::scope(|scope| {
        let worker = scope.spawn(move || {
            let mut queue = ready.queue.lock();
            queue.idle += 1;
            // The waking thread takes the lock first, which this one holds until it sleeps.
            asleep.send(()).unwrap();
            let woken = !ready.work.wait_for(&mut queue, DEADLINE).timed_out();
            queue.idle -= 1;
            woken
        });
        is_asleep.recv().unwrap();
        act();
        worker.join().unwrap()
    })
}

#[test]
fn a_worker_that_sleeps_is_woken() {
    let world = World::new(&[weight(100), weight(100)]);
    assert!(wakes(&world, || world.queue.look_again()), "the reason for which devices wait has changed");
    assert!(wakes(&world, || world.tasks[0].schedule()), "a task is ready");
    assert!(wakes(&world, || _ = world.queue.arm(&world.tasks[0], 5 * MS, None)), "there is a timer");
    assert!(wakes(&world, || _ = world.queue.arm(&world.tasks[1], 3 * MS, None)), "there is one before it");
}
