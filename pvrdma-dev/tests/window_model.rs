//! A loom model of a doorbell page that alternates between memory and trapping, of a guest that posts, arms and sleeps,
//! and of the watcher that changes the page. In every order of their steps, every post is noticed, and the guest does
//! not sleep while a completion waits.

#![expect(clippy::unwrap_used, reason = "a panic fails the test")]

use loom::sync::atomic::{AtomicU32, Ordering};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

/// Steps that the watcher omits when it returns a page to trapping.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mistake {
    None,
    NoLook,
    NothingArmed,
    NothingAnnounced,
}

/// A completion queue as the device sees it.
#[derive(Default)]
struct Queue {
    published: u32,
    armed: bool,
}

/// The events for which the guest sleeps.
struct Events {
    count: u32,
    /// Threads that may still wake the guest. Without any, a sleeping guest would sleep forever.
    others: u32,
}

/// The state that all threads share.
struct World {
    /// The producer's index in guest memory, and the number of requests that the device has executed.
    tail: AtomicU32,
    taken: Mutex<u32>,
    /// The page is memory. The kernel's lock makes each change, and each store, a single step.
    memory: Mutex<bool>,
    queue: Mutex<Queue>,
    /// Number of completions that the guest has consumed.
    consumed: AtomicU32,
    events: Mutex<Events>,
    wakes: Condvar,
    mistake: Mistake,
}

impl World {
    fn new(mistake: Mistake, others: u32) -> Arc<Self> {
        Arc::new(Self {
            tail: AtomicU32::new(0),
            taken: Mutex::new(0),
            memory: Mutex::new(false),
            queue: Mutex::default(),
            consumed: AtomicU32::new(0),
            events: Mutex::new(Events { count: 0, others }),
            wakes: Condvar::new(),
            mistake,
        })
    }

    fn notify(&self) {
        self.events.lock().unwrap().count += 1;
        self.wakes.notify_one();
    }

    fn complete(&self) {
        let mut queue = self.queue.lock().unwrap();
        queue.published += 1;
        if std::mem::take(&mut queue.armed) {
            self.notify();
        }
    }

    /// The device executes posted requests, which complete.
    fn take(&self) {
        let mut taken = self.taken.lock().unwrap();
        while *taken != self.tail.load(Ordering::Acquire) {
            *taken += 1;
            self.complete();
        }
    }

    /// The guest stores a doorbell. The device hears it unless the page is memory.
    fn store(&self, heard: impl FnOnce()) {
        if !*self.memory.lock().unwrap() {
            heard();
        }
    }

    fn post(&self) {
        self.tail.fetch_add(1, Ordering::Release);
        self.store(|| self.take());
    }

    /// The guest waits for a number of completions as programs do: it arms, polls and sleeps.
    fn wait(&self, completions: u32) {
        loop {
            self.store(|| self.queue.lock().unwrap().armed = true);
            let published = self.queue.lock().unwrap().published;
            self.consumed.store(published, Ordering::Release);
            if published >= completions {
                return;
            }
            let mut events = self.events.lock().unwrap();
            while events.count == 0 {
                assert_ne!(events.others, 0, "it sleeps forever");
                events = self.wakes.wait(events).unwrap();
            }
            events.count -= 1;
        }
    }

    /// The watcher makes a trapping page memory and back. It neither polls nor announces in between, which would only
    /// be earlier.
    fn flip(&self) {
        *self.memory.lock().unwrap() = true;
        *self.memory.lock().unwrap() = false;
        if self.mistake != Mistake::NoLook {
            self.take();
        }
        let mut queue = self.queue.lock().unwrap();
        if queue.published != self.consumed.load(Ordering::Acquire) {
            queue.armed = false;
            if self.mistake != Mistake::NothingAnnounced {
                self.notify();
            }
        } else if self.mistake != Mistake::NothingArmed {
            queue.armed = true;
        }
    }
}

/// Starts a thread that runs only this action.
fn spawn(world: &Arc<World>, act: fn(&World)) {
    let world = Arc::clone(world);
    thread::spawn(move || {
        act(&world);
        world.events.lock().unwrap().others -= 1;
        world.wakes.notify_one();
    });
}

/// A guest that posts this many times, and waits each time.
fn posts(posts: u32, mistake: Mistake) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(4);
    builder.check(move || {
        let world = World::new(mistake, 1);
        spawn(&world, World::flip);
        for post in 1..=posts {
            world.post();
            world.wait(post);
        }
    });
}

/// A guest that waits for a message of a peer.
fn receives(mistake: Mistake) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let world = World::new(mistake, 2);
        spawn(&world, World::flip);
        spawn(&world, World::complete);
        world.wait(1);
    });
}

#[test]
fn no_posted_request_is_missed() {
    posts(2, Mistake::None);
}

#[test]
fn no_received_request_is_missed() {
    receives(Mistake::None);
}

/// Each omitted step makes the model fail as expected.
#[test]
#[should_panic(expected = "it sleeps forever")]
fn without_the_look_a_post_is_lost() {
    posts(1, Mistake::NoLook);
}

#[test]
#[should_panic(expected = "it sleeps forever")]
fn without_arming_a_request_to_arm_is_lost() {
    receives(Mistake::NothingArmed);
}

#[test]
#[should_panic(expected = "it sleeps forever")]
fn without_announcing_a_request_to_arm_is_lost() {
    receives(Mistake::NothingAnnounced);
}
