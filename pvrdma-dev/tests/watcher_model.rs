//! A model of a guest that posts to a page which may be memory, of the thread that is told of stores to absent pages,
//! and of the watcher that goes to sleep: in no order of their steps is something posted and everybody asleep.

#![expect(clippy::unwrap_used, reason = "what goes wrong ends the test")]

use loom::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

/// What the three share.
struct World {
    /// The producer's index in guest memory.
    tail: AtomicU32,
    /// Whether the kernel has the page: a store to it is silent. The kernel's lock of the page makes taking it away and
    /// bringing it back one step each.
    page: Mutex<bool>,
    /// Whether the watcher knows that it is there.
    marked: AtomicBool,
    /// Held while a page is taken away.
    taking: Mutex<()>,
    /// What the watcher sleeps for.
    event: Mutex<Event>,
    wakes: Condvar,
}

/// What the watcher sleeps for.
#[derive(Default)]
struct Event {
    /// Stores that were noticed and not told to the watcher yet.
    touches: u32,
    /// The guest does nothing any more: who sleeps now sleeps for ever. Nothing tells a real watcher.
    over: bool,
}

impl World {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            tail: AtomicU32::new(0),
            page: Mutex::new(true),
            marked: AtomicBool::new(true),
            taking: Mutex::new(()),
            event: Mutex::new(Event::default()),
            wakes: Condvar::new(),
        })
    }

    /// The guest: the index, then the doorbell.
    fn post(&self) {
        self.tail.fetch_add(1, Ordering::Release);
        let mut present = self.page.lock().unwrap();
        if !*present {
            // The fault is answered only after it was marked and told.
            self.marked.store(true, Ordering::SeqCst);
            self.event.lock().unwrap().touches += 1;
            self.wakes.notify_one();
            *present = true;
        }
    }

    fn arm(&self, lock: bool) {
        let _taking = lock.then(|| self.taking.lock().unwrap());
        // Cleared first: a fault that races marks it again.
        if self.marked.load(Ordering::SeqCst) {
            self.marked.store(false, Ordering::SeqCst);
            *self.page.lock().unwrap() = false;
        }
    }

    /// Looks at the ring, and takes what is there.
    fn scan(&self, taken: &mut u32) -> bool {
        let tail = self.tail.load(Ordering::Acquire);
        let found = tail != *taken;
        *taken = tail;
        found
    }

    /// The watcher, until it has taken `posts`. What it `has` is what the model is about.
    fn watch(&self, posts: u32, has: Has) {
        let mut taken = 0;
        while taken < posts {
            if self.scan(&mut taken) {
                continue;
            }
            self.arm(has.lock);
            if has.scan_after_arm && self.scan(&mut taken) {
                continue;
            }
            let mut event = self.event.lock().unwrap();
            while event.touches == 0 && !event.over {
                event = self.wakes.wait(event).unwrap();
            }
            let asleep_for_ever = event.touches == 0;
            event.touches = 0;
            drop(event);
            assert!(!asleep_for_ever, "something is posted, and everybody sleeps");
        }
    }
}

/// What a model has, or leaves out.
#[derive(Clone, Copy)]
struct Has {
    scan_after_arm: bool,
    /// Pages are taken away by one thread at a time.
    lock: bool,
    /// Somebody else takes the page away, too, as who gives it to another process does.
    renewer: bool,
}

const ALL: Has = Has { scan_after_arm: true, lock: true, renewer: false };

fn model(posts: u32, has: Has) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(4);
    builder.check(move || {
        let world = World::new();
        let guest = {
            let world = Arc::clone(&world);
            thread::spawn(move || {
                (0..posts).for_each(|_| world.post());
                world.event.lock().unwrap().over = true;
                world.wakes.notify_one();
            })
        };
        let renewer = has.renewer.then(|| {
            let world = Arc::clone(&world);
            thread::spawn(move || world.arm(has.lock))
        });
        world.watch(posts, has);
        guest.join().unwrap();
        if let Some(renewer) = renewer {
            renewer.join().unwrap();
        }
    });
}

#[test]
fn nobody_sleeps_while_something_is_posted() {
    model(1, ALL);
}

#[test]
fn nobody_sleeps_while_more_is_posted() {
    model(2, ALL);
}

/// The model sees the mistake that it is there for.
#[test]
#[should_panic(expected = "everybody sleeps")]
fn without_the_scan_after_arming_a_doorbell_is_lost() {
    model(1, Has { scan_after_arm: false, ..ALL });
}

#[test]
fn nobody_sleeps_while_two_take_the_page_away() {
    model(1, Has { renewer: true, ..ALL });
}

/// One that has begun looks like one that has ended: the watcher sleeps, and a store in between is silent.
#[test]
#[should_panic(expected = "everybody sleeps")]
fn without_the_lock_of_who_takes_a_page_away_a_doorbell_is_lost() {
    model(1, Has { lock: false, renewer: true, ..ALL });
}
