//! A loom model of a frame that finds no receive buffer while the driver adds one. In every order of their steps, the
//! thread that keeps the frame is notified of the buffer (`src/receive.rs`, `src/link/mod.rs`).

#![expect(clippy::unwrap_used, reason = "a panic fails the test")]

use std::sync::atomic::{AtomicUsize as StdUsize, Ordering as StdOrdering};

use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use loom::sync::{Arc, Mutex};
use loom::thread;

/// A variant of the model: the situation, and the steps that it has.
#[derive(Clone, Copy)]
struct Has {
    /// The driver is in a polling round: at its end it unmasks its vector, and does not check for a doorbell request.
    /// Otherwise it polls, and rings a doorbell if the device requested one.
    round: bool,
    /// The device checks the ring once more after everything that makes the driver notify it.
    second_look: bool,
    /// A fence between the two.
    fence: bool,
    /// The thread that keeps the frame announces that it waits, and offers the frame once more. Otherwise it must have
    /// been notified since its first offer began.
    second_offer: bool,
    /// The doorbell request is withdrawn before the announcement that a frame waits.
    request_first: bool,
    /// Number of frames and of buffers. With two, a thread has waited before.
    frames: usize,
}

const ROUND: Has =
    Has { round: true, second_look: true, fence: true, second_offer: false, request_first: true, frames: 1 };
const POLLS: Has = Has { round: false, ..ROUND };
const LINK: Has = Has { second_offer: true, ..ROUND };

/// State that device, driver and sending thread share.
struct World {
    /// Guest memory: number of buffers added so far, and the request for a doorbell.
    given: AtomicUsize,
    request: AtomicBool,
    /// `Session::doorbell_requests`.
    asked: AtomicBool,
    starved: AtomicBool,
    /// The receive queue: number of buffers used so far.
    queue: Mutex<usize>,
    /// The driver is in a round. Protected by the lock of the interrupts.
    round: Mutex<bool>,
    /// The sending thread waits until it is notified.
    blocked: Mutex<bool>,
    has: Has,
}

impl World {
    fn new(has: Has) -> Arc<Self> {
        Arc::new(Self {
            given: AtomicUsize::new(0),
            request: AtomicBool::new(has.frames > 1),
            asked: AtomicBool::new(has.frames > 1),
            starved: AtomicBool::new(has.frames > 1),
            queue: Mutex::new(0),
            round: Mutex::new(has.round),
            blocked: Mutex::new(false),
            has,
        })
    }

    /// `receive::receive`. Returns `true` if there was a buffer.
    fn receive(&self) -> bool {
        let mut used = self.queue.lock().unwrap();
        let mut take = || {
            let found = self.given.load(Ordering::Acquire) > *used;
            *used += usize::from(found);
            found
        };
        if take() {
            return true;
        }
        // `Context::await_buffers`.
        self.starved.swap(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if !*self.round.lock().unwrap() {
            self.asked.swap(true, Ordering::Release);
            self.request.store(true, Ordering::Relaxed);
        }
        if self.has.fence {
            fence(Ordering::SeqCst);
        }
        self.has.second_look && take()
    }

    /// `NicLink::deliver`, with a second offer.
    fn deliver(&self) -> bool {
        let block = || *self.blocked.lock().unwrap() = true;
        if !self.has.second_offer {
            block();
        }
        if self.receive() {
            return true;
        }
        if !self.has.second_offer {
            return false;
        }
        block();
        let received = self.receive();
        if received {
            *self.blocked.lock().unwrap() = false;
        }
        received
    }

    /// `Session::forgo_doorbells`.
    fn forgo_doorbells(&self) {
        if self.asked.load(Ordering::Acquire) {
            let _queue = self.queue.lock().unwrap();
            if self.asked.swap(false, Ordering::AcqRel) {
                self.request.store(false, Ordering::Relaxed);
            }
        }
    }

    /// `receive::buffers_may_be_there`.
    fn buffers_may_be_there(&self, rang: bool) {
        fence(Ordering::SeqCst);
        if !rang && !self.starved.load(Ordering::SeqCst) {
            return;
        }
        let tell = || {
            if self.starved.swap(false, Ordering::SeqCst) {
                *self.blocked.lock().unwrap() = false;
            }
        };
        if !self.has.request_first {
            tell();
        }
        if !*self.round.lock().unwrap() {
            self.forgo_doorbells();
        }
        if self.has.request_first {
            tell();
        }
    }

    /// The driver gives a buffer.
    fn give(&self) {
        self.given.fetch_add(1, Ordering::Release);
        if self.has.round {
            self.forgo_doorbells();
            *self.round.lock().unwrap() = false;
            self.buffers_may_be_there(false);
        } else {
            // The interface requires this fence of drivers; a driver without it may miss the request.
            fence(Ordering::SeqCst);
            if self.request.load(Ordering::Relaxed) {
                self.buffers_may_be_there(true);
            }
        }
    }
}

fn model(has: Has) {
    let orders = std::sync::Arc::new(StdUsize::new(0));
    let counted = std::sync::Arc::clone(&orders);
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = (has.frames > 1).then_some(3);
    builder.check(move || {
        counted.fetch_add(1, StdOrdering::Relaxed);
        let world = World::new(has);
        let driver = Arc::clone(&world);
        let driver = thread::spawn(move || (0..has.frames).for_each(|_| driver.give()));
        let delivered = (0..has.frames).all(|_| world.deliver());
        driver.join().unwrap();
        assert!(delivered || !*world.blocked.lock().unwrap(), "a frame waits beside a buffer");
    });
    println!("{} orders", orders.load(StdOrdering::Relaxed));
}

#[test]
fn a_frame_does_not_wait_beside_a_buffer_of_a_round() {
    model(ROUND);
}

#[test]
fn a_frame_does_not_wait_beside_a_buffer_of_a_driver_that_polls() {
    model(POLLS);
    model(Has { frames: 2, ..POLLS });
}

#[test]
fn no_frame_of_a_link_waits_beside_a_buffer() {
    model(LINK);
    model(Has { round: false, ..LINK });
}

/// Each omitted step makes the model fail as expected.
#[test]
#[should_panic(expected = "a frame waits")]
fn without_a_second_look_at_the_ring_it_waits() {
    model(Has { second_look: false, ..ROUND });
}

#[test]
#[should_panic(expected = "a frame waits")]
fn without_the_fence_before_that_look_it_waits() {
    model(Has { fence: false, ..POLLS });
}

#[test]
#[should_panic(expected = "a frame waits")]
fn with_the_request_withdrawn_last_a_frame_waits() {
    model(Has { request_first: false, frames: 2, ..POLLS });
}
