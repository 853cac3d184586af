//! Loom models: every order of the steps of a protocol, with two or three threads.
//!
//! Each model runs with all steps, as in the product. It also runs once without each step on which the protocol
//! depends, and must fail then.

#![cfg(loom)]
#![expect(clippy::unwrap_used, reason = "a test may fail")]

/// Tests of a protocol, complete and without some of its steps.
macro_rules! protocol {
    ($model:ident, $($without:ident: $step:ident => $lost:literal),*) => {
        mod $model {
            #[test]
            fn as_built() {
                super::check(super::$model);
            }

            $(#[test]
            #[should_panic(expected = $lost)]
            fn $without() {
                super::leave_out(super::Step::$step);
                super::check(super::$model);
            })*
        }
    };
}

mod direct;
mod dirty;
mod events;
mod forgiven;
mod lookups;
mod pages;
mod pause;
mod ports;
mod regions;

use std::sync::atomic::{AtomicUsize as StdUsize, Ordering as StdOrdering};

use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::sync::{Arc, Mutex};
use loom::thread;
use pvrdma_handover::sync::{FairMutex, Step, leave_out};
use pvrdma_handover::{Combiner, Level, Pending, SeqLock, Turn, WaitFlag};

/// Two threads add work and run the pending work. No work is left when both have returned.
fn combiner() {
    let shared = Arc::new((Combiner::new(), FairMutex::new(0), [AtomicUsize::new(0), AtomicUsize::new(0)]));
    let bring = |which: usize| {
        let shared = Arc::clone(&shared);
        move || {
            let (combiner, lock, work) = &*shared;
            work[which].store(1, Ordering::Relaxed);
            combiner.run(lock, |done| {
                *done = work.iter().map(|work| work.load(Ordering::Relaxed)).sum::<usize>();
                false
            });
        }
    };
    let other = thread::spawn(bring(1));
    bring(0)();
    other.join().unwrap();
    assert_eq!(*shared.1.lock(), 2, "work is left");
}

/// One thread acts once while another adds work. Either the work is done, or the first thread is told of it. `act`
/// reads the work, and returns `true` if it was told.
fn beside(act: impl FnOnce(&Combiner, &FairMutex<usize>, &AtomicUsize) -> bool) {
    let shared = Arc::new((Combiner::new(), FairMutex::new(0), AtomicUsize::new(0)));
    let other = Arc::clone(&shared);
    let other = thread::spawn(move || {
        let (combiner, lock, work) = &*other;
        work.store(1, Ordering::Relaxed);
        combiner.run(lock, |done| {
            *done = work.load(Ordering::Relaxed);
            false
        });
    });
    let (combiner, lock, work) = &*shared;
    let told = act(combiner, lock, work);
    other.join().unwrap();
    assert!(told || *lock.lock() == 1, "no thread does the work");
}

/// The thread acts only if the lock is free.
fn once() {
    beside(|combiner, lock, work| combiner.once(lock, |_| work.load(Ordering::Relaxed)).is_some_and(|(_, left)| left));
}

/// The thread waits for the lock, like one that delivers a response to a requester.
fn hold() {
    beside(|combiner, lock, work| combiner.hold(lock, |_| work.load(Ordering::Relaxed)).1);
}

/// A doorbell: the ring is written, then the bit is set. The thread that takes the bit reads the ring, and sees the
/// last write.
fn pending() {
    let shared = Arc::new((Pending::new(), AtomicUsize::new(0), AtomicUsize::new(0)));
    let queued = Arc::new(AtomicUsize::new(0));
    let ring = |index: usize| {
        let (shared, queued) = (Arc::clone(&shared), Arc::clone(&queued));
        move || {
            shared.1.store(index, Ordering::Relaxed);
            if shared.0.add(1) {
                queued.fetch_add(1, Ordering::AcqRel);
            }
        }
    };
    // The queue pair is already on the ready queue.
    ring(1)();
    let take = || {
        if queued.fetch_update(Ordering::AcqRel, Ordering::Acquire, |count| count.checked_sub(1)).is_ok() {
            shared.0.take();
            shared.2.store(shared.1.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    };
    let guest = thread::spawn(ring(2));
    take();
    guest.join().unwrap();
    // This takes the work that was scheduled while the first was taken.
    take();
    assert_eq!(shared.2.load(Ordering::Relaxed), 2, "the second doorbell is lost");
}

/// A thread finds nothing and waits while work is added. It sees the work, or is woken.
fn wait_flag() {
    let shared = Arc::new((WaitFlag::new(), AtomicUsize::new(0)));
    let waiter = Arc::clone(&shared);
    let waiter = thread::spawn(move || {
        waiter.0.set();
        waiter.1.load(Ordering::Relaxed) == 1
    });
    shared.1.store(1, Ordering::Relaxed);
    let woken = shared.0.take();
    assert!(waiter.join().unwrap() || woken, "the waiter is not woken");
}

/// Two permits are in use, which is the maximum, and a thread waits for one. A thread that returns its permit wakes it,
/// or it sees that there is room.
fn level() {
    let shared = Arc::new((Level::new(), Mutex::new(0), AtomicUsize::new(0)));
    shared.0.change(2);
    /// Wakes waiters, as far as there is room.
    fn admit(level: &Level, waiting: &mut usize, woken: &AtomicUsize) {
        if level.get() < 2 && *waiting > 0 {
            *waiting -= 1;
            level.change(1);
            woken.fetch_add(1, Ordering::Relaxed);
        }
        if *waiting == 0 {
            level.nobody_waits();
        }
    }
    let bring_back = || {
        let shared = Arc::clone(&shared);
        move || {
            let (level, waiting, woken) = &*shared;
            level.change(-1);
            if level.is_awaited() {
                admit(level, &mut waiting.lock().unwrap(), woken);
            }
        }
    };
    let others = [thread::spawn(bring_back()), thread::spawn(bring_back())];
    let (level, waiting, woken) = &*shared;
    {
        let mut waiting = waiting.lock().unwrap();
        *waiting += 1;
        level.wait();
        admit(level, &mut waiting, woken);
    }
    for other in others {
        other.join().unwrap();
    }
    assert_eq!(woken.load(Ordering::Relaxed), 1, "the waiter is not woken");
    assert_eq!((level.get(), level.is_awaited()), (1, false));
}

/// The queue of a window (`crates/pacing/src/peer_window/mod.rs`), with one waiter.
struct Window {
    level: Level,
    /// The waiter is queued.
    queue: Mutex<bool>,
    turn: Turn,
    scheduled: AtomicUsize,
}

impl Window {
    /// A window whose only permit is in use by another connection.
    fn full() -> Arc<Self> {
        let (level, scheduled) = (Level::new(), AtomicUsize::new(0));
        level.change(1);
        Arc::new(Self { level, queue: Mutex::new(false), turn: Turn::new(), scheduled })
    }

    fn bring_back(&self) {
        self.level.change(-1);
        if self.level.is_awaited() {
            self.admit(&mut self.queue.lock().unwrap());
        }
    }

    fn admit(&self, queue: &mut bool) {
        if self.level.get() < 1 && std::mem::take(queue) {
            self.level.change(1);
            self.turn.grant();
            self.scheduled.fetch_add(1, Ordering::Relaxed);
        }
        if !*queue {
            self.level.nobody_waits();
        }
    }

    fn begin_turn(&self) -> bool {
        let granted = self.turn.begin();
        if granted {
            self.level.change(-1);
        }
        granted
    }

    /// `look`: before it waits, the thread checks if it has already been granted a turn.
    fn may_send(&self, look: bool) -> bool {
        if self.begin_turn() || !(self.turn.is_queued() || self.level.get() >= 1 || self.level.is_awaited()) {
            return true;
        }
        let mut queue = self.queue.lock().unwrap();
        if look && self.turn.is_granted() {
            return self.begin_turn();
        }
        if !self.turn.is_queued() {
            self.turn.queue();
            *queue = true;
            self.level.wait();
        }
        self.admit(&mut queue);
        false
    }

    /// `withdraw`: a leaving connection removes itself from the queue.
    fn leave(&self, withdraw: bool) {
        if withdraw {
            let mut queue = self.queue.lock().unwrap();
            if self.turn.is_queued() {
                *queue = false;
                self.level.nobody_waits();
                self.turn.withdraw();
            }
        }
        self.begin_turn();
    }
}

/// A connection asks repeatedly, because its task also runs for other reasons, while another connection returns its
/// permit. The first one gets its turn, and all permits are returned when it has left.
fn turns_of(asks: usize, look: bool, withdraw: bool) {
    let window = Window::full();
    let other = Arc::clone(&window);
    let other = thread::spawn(move || other.bring_back());
    let mut sent = (0..asks).any(|_| window.may_send(look));
    let leaves = asks == 1;
    if leaves {
        window.leave(withdraw);
    }
    other.join().unwrap();
    // The engine runs the connection once more if it was scheduled.
    if !leaves && window.scheduled.load(Ordering::Relaxed) > 0 {
        sent |= window.may_send(look);
    }
    assert!(leaves || sent, "the waiter is not woken");
    if !leaves {
        window.leave(withdraw);
    }
    assert_eq!((window.level.get(), window.level.is_awaited()), (0, false), "a turn is lost");
}

fn turns() {
    turns_of(3, true, true);
}

fn leaving() {
    turns_of(1, true, true);
}

/// A reader beside a writer that clears the words and writes others gets words of one write, or none. So a signal
/// handler that reads a slot while it is freed and reused for another mapping gets no mixture.
fn seq_lock() {
    let lock = Arc::new(SeqLock::<2>::empty());
    assert_eq!(lock.read(), None);
    lock.write(Some([1, 1]));
    let writer = Arc::clone(&lock);
    let writer = thread::spawn(move || {
        writer.write(None);
        writer.write(Some([2, 2]));
    });
    if let Some([first, second]) = lock.read() {
        assert_eq!(first, second, "words of two writes");
        assert_ne!(first, 0, "words of no write");
    }
    writer.join().unwrap();
    assert_eq!(lock.read(), Some([2, 2]));
}

/// Tries every order, and prints their number.
fn check(model: fn()) {
    check_within(None, model);
}

/// Tries the orders with at most this number of preemptions.
fn check_within(preemptions: Option<usize>, model: fn()) {
    let orders = std::sync::Arc::new(StdUsize::new(0));
    let counted = std::sync::Arc::clone(&orders);
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.check(move || {
        counted.fetch_add(1, StdOrdering::Relaxed);
        model();
    });
    println!("{} orders", orders.load(StdOrdering::Relaxed));
}

protocol!(combiner, without_fences: Fence => "work is left", without_swaps: Swap => "work is left");
protocol!(once, without_fences: Fence => "no thread does the work");
protocol!(hold, without_fences: Fence => "no thread does the work");
protocol!(pending, without_swaps: Swap => "the second doorbell is lost");
protocol!(wait_flag, without_fences: Fence => "the waiter is not woken");
protocol!(seq_lock, without_fences: Fence => "words of two writes");
protocol!(level, without_order: Fence => "the waiter is not woken");
protocol!(turns, without_order: Fence => "the waiter is not woken");
protocol!(leaving,);

#[test]
#[should_panic(expected = "the waiter is not woken")]
fn waiting_without_a_look_loses_a_turn() {
    check(|| turns_of(3, false, true));
}

#[test]
#[should_panic(expected = "a turn is lost")]
fn leaving_silently_loses_a_turn() {
    check(|| turns_of(1, true, false));
}
