//! A loom model of a driver that starts and ends while a port's thread delivers frames (`src/core.rs`). In every order
//! of their steps, no frame stays in the guest's ring without an interrupt, and none waits for buffers of a driver that
//! has ended.

#![expect(clippy::unwrap_used, reason = "a panic fails the test")]

use std::sync::atomic::{AtomicUsize as StdUsize, Ordering as StdOrdering};

use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use loom::sync::{Arc, Mutex, RwLock};
use loom::thread;

/// A variant of the model, by the steps that it has.
#[derive(Clone, Copy)]
struct Has {
    /// The last session's bits are cleared under the lock, before there is a next session.
    locked: bool,
    /// The thread that keeps a frame is notified of the end of a session.
    told: bool,
}

const ALL: Has = Has { locked: true, told: true };

/// State that device, driver and sending thread share.
struct World {
    /// Number of the session; 0 without one.
    session: RwLock<usize>,
    /// Buffers of the guest, in any session.
    buffers: AtomicUsize,
    /// `Core::rx_vectors`; the same holds for `Core::tx_vectors`.
    vectors: AtomicUsize,
    pending: AtomicUsize,
    starved: AtomicBool,
    /// The sending thread waits until it is notified.
    blocked: Mutex<bool>,
    interrupts: AtomicUsize,
    has: Has,
}

impl World {
    fn new(session: usize, buffers: usize, has: Has) -> Arc<Self> {
        Arc::new(Self {
            session: RwLock::new(session),
            buffers: AtomicUsize::new(buffers),
            vectors: AtomicUsize::new(0),
            pending: AtomicUsize::new(0),
            starved: AtomicBool::new(false),
            blocked: Mutex::new(false),
            interrupts: AtomicUsize::new(0),
            has,
        })
    }

    /// `Core::set_session`.
    fn set_session(&self, session: usize) {
        let mut current = self.session.write().unwrap();
        *current = session;
        let current = self.has.locked.then_some(current);
        self.vectors.swap(0, Ordering::Release);
        if !self.has.told {
            self.starved.swap(false, Ordering::SeqCst);
        }
        drop(current);
        self.pending.fetch_or(usize::from(self.has.told), Ordering::AcqRel);
    }

    /// Work after a register write: `receive::buffers_may_be_there`.
    fn run_deferred(&self) {
        if self.pending.swap(0, Ordering::SeqCst) == 0 {
            return;
        }
        fence(Ordering::SeqCst);
        if self.starved.load(Ordering::SeqCst) && self.starved.swap(false, Ordering::SeqCst) {
            *self.blocked.lock().unwrap() = false;
        }
    }

    /// `receive::receive`. Returns `None` if there is no buffer, otherwise whether there is a driver.
    fn receive(&self) -> Option<bool> {
        let session = self.session.read().unwrap();
        if *session == 0 {
            return Some(false);
        }
        if self.buffers.load(Ordering::Relaxed) == 0 {
            self.starved.swap(true, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            return None;
        }
        self.vectors.fetch_or(1, Ordering::AcqRel);
        Some(true)
    }

    /// `receive::flush`.
    fn flush(&self) {
        let session = self.session.read().unwrap();
        if *session != 0 && self.vectors.swap(0, Ordering::AcqRel) == 1 {
            self.interrupts.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// `NicLink::deliver`.
    fn deliver(&self) -> Option<bool> {
        let block = |blocked| *self.blocked.lock().unwrap() = blocked;
        self.receive().or_else(|| {
            block(true);
            let received = self.receive();
            if received.is_some() {
                block(false);
            }
            received
        })
    }
}

/// Tries every order.
fn model(run: impl Fn() + Send + Sync + 'static) {
    let orders = std::sync::Arc::new(StdUsize::new(0));
    let counted = std::sync::Arc::clone(&orders);
    loom::model(move || {
        counted.fetch_add(1, StdOrdering::Relaxed);
        run();
    });
    println!("{} orders", orders.load(StdOrdering::Relaxed));
}

/// A driver starts while a frame arrives that finds a buffer.
fn start(has: Has) {
    model(move || {
        let world = World::new(0, 1, has);
        let driver = Arc::clone(&world);
        let driver = thread::spawn(move || driver.set_session(1));
        let delivered = world.deliver() == Some(true);
        world.flush();
        driver.join().unwrap();
        assert_eq!(usize::from(delivered), world.interrupts.load(Ordering::Relaxed), "the driver is not told");
    });
}

/// A driver ends, and another one starts, while a frame arrives that finds no buffer.
fn end(next: Option<usize>, has: Has) {
    model(move || {
        let world = World::new(1, 0, has);
        let driver = Arc::clone(&world);
        let driver = thread::spawn(move || {
            driver.set_session(0);
            next.into_iter().for_each(|next| driver.set_session(next));
            driver.run_deferred();
        });
        world.deliver();
        driver.join().unwrap();
        let waits_for_driver = *world.session.read().unwrap() != 0 && world.starved.load(Ordering::SeqCst);
        assert!(!*world.blocked.lock().unwrap() || waits_for_driver, "a frame waits for a driver that has gone");
    });
}

#[test]
fn frames_that_arrive_while_a_driver_starts_are_announced() {
    start(ALL);
}

#[test]
fn no_frame_waits_for_a_driver_that_has_ended() {
    end(None, ALL);
    end(Some(2), ALL);
}

/// Each omitted step makes the model fail as expected.
#[test]
#[should_panic(expected = "the driver is not told")]
fn without_the_lock_the_next_session_loses_a_bit() {
    start(Has { locked: false, ..ALL });
}

#[test]
#[should_panic(expected = "a frame waits")]
fn without_notice_of_the_end_a_frame_waits() {
    end(None, Has { told: false, ..ALL });
}

#[test]
#[should_panic(expected = "a frame waits")]
fn without_notice_of_the_end_a_frame_waits_beside_the_next_driver() {
    end(Some(2), Has { told: false, ..ALL });
}
