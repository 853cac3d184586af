//! Mapped doorbell pages, and the watcher that polls rings in their place (`pvrdmad/src/doorbells/`).

use std::io;

use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::sync::{Arc, Mutex};
use loom::thread;
use pvrdma_handover::{PresentPages, Waker};

use super::events::Counter;
use super::{Step, check_within, leave_out};

/// A page, its ring, and the event on which the watcher sleeps.
struct World {
    pages: PresentPages,
    /// The kernel has the page, so a store to it causes no fault. The kernel's lock of the page is held while it is
    /// inserted and while it is removed.
    cached: Mutex<bool>,
    /// The producer's index in guest memory.
    tail: AtomicUsize,
    waker: Waker<Counter>,
}

impl World {
    /// The guest writes the index, then the doorbell.
    fn post(&self, index: usize) {
        self.tail.store(index, Ordering::Release);
        let mut cached = self.cached.lock().unwrap();
        if !*cached {
            self.pages.mark(0);
            self.waker.wake();
            *cached = true;
        }
    }

    #[expect(clippy::unnecessary_wraps, reason = "as the kernel has it")]
    fn remove(&self) -> io::Result<()> {
        *self.cached.lock().unwrap() = false;
        Ok(())
    }
}

/// The polling thread (`watcher.rs`).
struct Watcher {
    world: Arc<World>,
    /// The ring is polled, because its page was touched.
    watches: bool,
    events: u64,
    /// Number of posts that it has seen.
    taken: usize,
    /// The watcher polls once more after it has revoked the pages.
    looks_again: bool,
}

impl Watcher {
    fn take_touched(&mut self) {
        let events = self.world.pages.events();
        if events != self.events {
            self.events = events;
            self.world.pages.take_touched(|_| self.watches = true);
        }
    }

    /// Returns `true` if there was something.
    fn look(&mut self) -> bool {
        let tail = if self.watches { self.world.tail.load(Ordering::Acquire) } else { self.taken };
        std::mem::replace(&mut self.taken, tail) != tail
    }

    /// Revokes the pages. Returns `true` if the watcher may sleep.
    fn arm(&mut self) -> bool {
        let world = Arc::clone(&self.world);
        let before = world.pages.events();
        world.pages.for_present(|_| self.watches = true);
        world.pages.take_all(|_| world.remove());
        self.take_touched();
        !(self.looks_again && self.look()) && world.pages.events() == before
    }

    /// Sleeps, and is woken by whatever.
    fn block(&mut self) {
        self.world.waker.sleep(Counter::is_readable);
        self.take_touched();
        self.look();
    }
}

/// A guest posts several times while a watcher goes to sleep as many times. `renewed`: another thread revokes the page
/// meanwhile, as for its next process. `present`: the page is mapped and watched at first. No post is left while the
/// watcher sleeps. `looks_again`: see [`Watcher`].
fn doorbells(present: bool, posts: usize, renewed: bool, looks_again: bool) {
    let (pages, waker) = (PresentPages::new(1), Waker::new(Counter::default()));
    if present {
        pages.mark(0);
        pages.take_touched(|_| ());
    }
    let world = Arc::new(World { pages, cached: Mutex::new(present), tail: AtomicUsize::new(0), waker });
    let events = world.pages.events();
    let mut watcher = Watcher { world: Arc::clone(&world), watches: present, events, taken: 0, looks_again };
    let guest = Arc::clone(&world);
    let guest = thread::spawn(move || (1..=posts).for_each(|index| guest.post(index)));
    let renewer = renewed.then(|| {
        let world = Arc::clone(&world);
        thread::spawn(move || world.pages.take_away(0, || world.remove()).unwrap())
    });
    for _ in 1..posts {
        if watcher.arm() {
            watcher.block();
        }
    }
    let asleep = watcher.arm();
    guest.join().unwrap();
    if let Some(renewer) = renewer {
        renewer.join().unwrap();
    }
    // It sleeps until it is woken.
    if !asleep || world.waker.sleep(Counter::is_readable) {
        watcher.take_touched();
        watcher.look();
    }
    assert_eq!(watcher.taken, posts, "a request is posted, and all threads sleep");
}

fn first_touch() {
    doorbells(false, 1, false, true);
}

fn going_to_sleep() {
    doorbells(true, 2, false, true);
}

fn taken_by_two() {
    doorbells(true, 1, true, true);
}

/// Without a bound, the longest model has a million orders. All of them pass, within a minute.
fn check(model: fn()) {
    check_within(Some(4), model);
}

protocol!(first_touch,);
protocol!(going_to_sleep, without_order: Order => "a request is posted, and all threads sleep");
protocol!(taken_by_two, without_lock: Lock => "a request is posted, and all threads sleep");

#[test]
#[should_panic(expected = "a request is posted, and all threads sleep")]
fn without_a_second_look_a_doorbell_is_lost() {
    check(|| doorbells(true, 1, false, false));
}
