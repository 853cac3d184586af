//! Threads that empty a port's receive queue, and threads that run its queue pairs.

use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use loom::sync::{Arc, Mutex};
use loom::thread;
use pvrdma_handover::{Pending, WaitFlag, Waker};

use super::events::Counter;
use super::{Step, check, leave_out};

const RUN: u8 = 1;

/// A responder without a receive (`backend-rxe/src/path/wire/hooks.rs`).
struct Waiting {
    /// The responder waits for the next run of its queue pair.
    held: AtomicBool,
    wait: WaitFlag,
    posted: AtomicUsize,
    scheduled: Pending,
    runs: AtomicUsize,
    resumed: AtomicBool,
}

impl Waiting {
    /// Runs the queue pair if it is scheduled.
    fn run(&self) {
        if self.runs.swap(0, Ordering::AcqRel) > 0 {
            self.scheduled.take();
            if self.held.load(Ordering::Relaxed) && self.held.swap(false, Ordering::SeqCst) {
                self.resumed.store(true, Ordering::Relaxed);
            }
        }
    }
}

/// A responder finds no receive while a guest posts one and a worker runs the queue pair. The responder finds the
/// receive, or is resumed. `first`: it is marked as held before it waits.
fn held_of(first: bool) {
    let shared = Arc::new(Waiting {
        held: AtomicBool::new(false),
        wait: WaitFlag::new(),
        posted: AtomicUsize::new(0),
        scheduled: Pending::new(),
        runs: AtomicUsize::new(0),
        resumed: AtomicBool::new(false),
    });
    let guest = Arc::clone(&shared);
    let guest = thread::spawn(move || {
        guest.posted.store(1, Ordering::Relaxed);
        if guest.wait.take() && guest.scheduled.add(RUN) {
            guest.runs.fetch_add(1, Ordering::AcqRel);
        }
    });
    let worker = Arc::clone(&shared);
    let worker = thread::spawn(move || worker.run());
    let hold = || shared.held.store(true, Ordering::SeqCst);
    if first {
        hold();
    }
    shared.wait.set();
    let found = shared.posted.load(Ordering::Relaxed) == 1;
    if !first {
        hold();
    }
    guest.join().unwrap();
    worker.join().unwrap();
    shared.run();
    assert!(found || shared.resumed.load(Ordering::Relaxed), "a responder waits forever");
}

fn held() {
    held_of(true);
}

/// A port that may send READ data only in its turn (`backend-rxe/src/port/mod.rs`, `may_send_data` and `run`).
struct Turns {
    may: AtomicBool,
    receiver: Mutex<()>,
    scheduled: Pending,
    runs: AtomicUsize,
    waker: Waker<Counter>,
    sent: AtomicBool,
}

impl Turns {
    /// The port's task runs, which gives the port its turn. `wake`: its thread is woken.
    fn run(&self, wake: bool) {
        if self.runs.swap(0, Ordering::AcqRel) == 0 {
            return;
        }
        self.scheduled.take();
        match self.receiver.try_lock() {
            Ok(_receiver) => self.sent.store(true, Ordering::Relaxed),
            // The thread that holds the receive queue is about to check for a turn.
            Err(_) => self.may.store(true, Ordering::Release),
        }
        if wake {
            self.waker.wake();
        }
    }

    /// The port's thread sends, or requests a turn.
    fn look(&self) {
        let _receiver = self.receiver.lock().unwrap();
        if self.may.load(Ordering::Acquire) && self.may.swap(false, Ordering::AcqRel) {
            self.sent.store(true, Ordering::Relaxed);
        } else if !self.sent.load(Ordering::Relaxed) && self.scheduled.add(RUN) {
            self.runs.fetch_add(1, Ordering::AcqRel);
        }
        // A step between the request and the release of the queue, for other work with the queue.
        self.sent.load(Ordering::Relaxed);
    }
}

/// The port's thread requests a turn, which comes while it still has the receive queue, or later. The data is sent.
fn turn_of_port_of(wake: bool) {
    let shared = Arc::new(Turns {
        may: AtomicBool::new(false),
        receiver: Mutex::new(()),
        scheduled: Pending::new(),
        runs: AtomicUsize::new(0),
        waker: Waker::new(Counter::default()),
        sent: AtomicBool::new(false),
    });
    let worker = Arc::clone(&shared);
    let worker = thread::spawn(move || worker.run(wake));
    shared.look();
    worker.join().unwrap();
    // Workers run scheduled tasks; the port's thread sleeps until it is woken.
    for _ in 0..2 {
        shared.run(wake);
        if shared.waker.sleep(Counter::is_readable) {
            shared.look();
        }
    }
    assert!(shared.sent.load(Ordering::Relaxed), "a port waits for its turn forever");
}

fn turn_of_port() {
    turn_of_port_of(true);
}

protocol!(held, without_fences: Fence => "a responder waits forever");
protocol!(turn_of_port,);

#[test]
#[should_panic(expected = "a responder waits forever")]
fn a_responder_that_waits_before_it_is_held_is_forgotten() {
    check(|| held_of(false));
}

#[test]
#[should_panic(expected = "a port waits for its turn forever")]
fn a_port_that_is_not_woken_for_its_turn_sleeps_on() {
    check(|| turn_of_port_of(false));
}
