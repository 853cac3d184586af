//! Every order in which the steps of a protocol can happen, with two and three threads.
//!
//! Each model runs as the product has it, and without the steps that the protocol depends on, which it must notice.

#![cfg(loom)]
#![expect(clippy::unwrap_used, reason = "a test may fail")]

use std::sync::atomic::{AtomicUsize as StdUsize, Ordering as StdOrdering};

use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;
use pvrdma_handover::sync::{FairMutex, Step, leave_out};
use pvrdma_handover::{Combiner, Pending, SeqLock, WaitFlag};

/// Two threads bring work and run what there is. None of it is left when both are through.
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

/// Somebody looks while somebody else brings work: the work is done, or the one who looked is told.
fn look() {
    let shared = Arc::new((Combiner::new(), FairMutex::new(0), AtomicUsize::new(0)));
    let bring = || {
        let shared = Arc::clone(&shared);
        move || {
            let (combiner, lock, work) = &*shared;
            work.store(1, Ordering::Relaxed);
            combiner.run(lock, |done| {
                *done = work.load(Ordering::Relaxed);
                false
            });
        }
    };
    let other = thread::spawn(bring());
    let told = shared.0.look(&shared.1, |_| shared.2.load(Ordering::Relaxed)).is_some_and(|(_, left)| left);
    other.join().unwrap();
    assert!(told || *shared.1.lock() == 1, "the work is done by nobody");
}

/// A doorbell: its ring is written, then its bit is set; who takes the bit looks at the ring. The last write is seen.
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
    // It is on the queue already.
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
    // Whatever was queued while the first was taken.
    take();
    assert_eq!(shared.2.load(Ordering::Relaxed), 2, "the second doorbell is lost");
}

/// Somebody finds nothing and waits, while something is brought: it sees it, or is woken.
fn wait_flag() {
    let shared = Arc::new((WaitFlag::new(), AtomicUsize::new(0)));
    let waiter = Arc::clone(&shared);
    let waiter = thread::spawn(move || {
        waiter.0.set();
        waiter.1.load(Ordering::Relaxed) == 1
    });
    shared.1.store(1, Ordering::Relaxed);
    let woken = shared.0.take();
    assert!(waiter.join().unwrap() || woken, "nobody tells who waits");
}

/// A reader beside a writer that takes the words away and writes others gets words that were written together, or
/// nothing: a slot that is freed and taken by another mapping while a signal handler reads it (S6) gives no mixture.
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

/// Tries every order, and says how many there are.
fn check(model: fn()) {
    let orders = std::sync::Arc::new(StdUsize::new(0));
    let counted = std::sync::Arc::clone(&orders);
    loom::model(move || {
        counted.fetch_add(1, StdOrdering::Relaxed);
        model();
    });
    println!("{} orders", orders.load(StdOrdering::Relaxed));
}

/// A protocol as it is built, and without some of its steps.
macro_rules! protocol {
    ($model:ident, $($without:ident: $step:ident => $lost:literal),+) => {
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
            })+
        }
    };
}

protocol!(combiner, without_fences: Fence => "work is left", without_swaps: Swap => "work is left");
protocol!(look, without_fences: Fence => "the work is done by nobody");
protocol!(pending, without_swaps: Swap => "the second doorbell is lost");
protocol!(wait_flag, without_fences: Fence => "nobody tells who waits");
protocol!(seq_lock, without_fences: Fence => "words of two writes");
