//! Lookups beside changes of the same table.

use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use loom::sync::{Arc, Mutex, RwLock};
use loom::thread;
use pvrdma_handover::{Generation, Pending, State, TwoCopies};

use super::{Step, check, leave_out};

/// A region is removed from a table while other threads copy from it. After the removal, no thread uses it.
fn two_copies() {
    // The table with the region, and a mark that its memory was returned to the guest.
    let shared = Arc::new((TwoCopies::new(1, 1), AtomicBool::new(false)));
    let copies = || {
        let shared = Arc::clone(&shared);
        move || {
            let (table, freed) = &*shared;
            let held = table.read();
            if *held == 1 {
                assert!(!freed.load(Ordering::Relaxed), "memory is used that is free");
            }
        }
    };
    let others = [thread::spawn(copies()), thread::spawn(copies())];
    let (table, freed) = &*shared;
    assert_eq!(table.change(std::mem::take), 1);
    freed.store(true, Ordering::Relaxed);
    assert_eq!(*table.read(), 0);
    for other in others {
        other.join().unwrap();
    }
}

/// Consecutive changes beside a reader. The holder of a key always finds its region.
fn two_changes() {
    let shared = Arc::new(TwoCopies::new(0, 0));
    let other = Arc::clone(&shared);
    // While a change is in progress, a reader may see it and then not see it.
    let other = thread::spawn(move || {
        for _ in 0..2 {
            assert!(*other.read() <= 2);
        }
    });
    for value in [1, 2] {
        shared.change(|region| *region = value);
        assert_eq!(*shared.read(), value, "the holder of a key does not find its region");
    }
    other.join().unwrap();
}

/// Numbers of queue pair states, as far as the model needs them.
const RTS: u8 = 3;
const SQD: u8 = 4;
const ERROR: u8 = 6;

/// A command changes a queue pair's state while its responder ends it and schedules it. The queue pair stays ended, and
/// is flushed.
fn state() {
    let shared = Arc::new((State::new(RTS), Pending::new(), AtomicUsize::new(0)));
    let responder = Arc::clone(&shared);
    let responder = thread::spawn(move || {
        let (state, scheduled, queued) = &*responder;
        assert!(state.step(|_| Some(ERROR)));
        if scheduled.add(1) {
            queued.fetch_add(1, Ordering::Relaxed);
        }
    });
    let (state, scheduled, queued) = &*shared;
    // The queue pair runs because it was scheduled before. It clears the mark before it reads the state.
    scheduled.take();
    let mut flushed = state.get() == ERROR;
    state.step(|state| (state == RTS).then_some(SQD));
    responder.join().unwrap();
    assert_eq!(state.get(), ERROR, "a queue pair in ERROR continues");
    if queued.load(Ordering::Relaxed) > 0 {
        scheduled.take();
        flushed |= state.get() == ERROR;
    }
    assert!(flushed, "no thread flushes it");
}

/// Steps of the sender, and of the thread that removes the address. Models leave some of them out.
#[derive(Clone, Copy)]
struct Has {
    /// The sender reads the generation before it looks up the address.
    before: bool,
    /// The sender reads the generation again while it holds the memory.
    again: bool,
    /// The thread that removes the address waits once for the memory.
    wait: bool,
}

/// A sender looks up an address and delivers to its owner, while the address is removed from the owner. After the
/// removal, nothing is delivered to the former owner.
fn generation_of(has: Has) {
    struct World {
        generation: Generation,
        /// The address is bound.
        bound: Mutex<bool>,
        memory: RwLock<()>,
        gone: AtomicBool,
    }
    let (generation, bound, memory) = (Generation::new(), Mutex::new(true), RwLock::new(()));
    let world = Arc::new(World { generation, bound, memory, gone: AtomicBool::new(false) });
    let sender = Arc::clone(&world);
    let sender = thread::spawn(move || {
        let World { generation, bound, memory, gone } = &*sender;
        let mut known = generation.get();
        let found = *bound.lock().unwrap();
        if !has.before {
            known = generation.get();
        }
        let _view = memory.read().unwrap();
        if found && (!has.again || known == generation.get()) {
            assert!(!gone.load(Ordering::Relaxed), "delivered to a former owner of the address");
        }
    });
    *world.bound.lock().unwrap() = false;
    world.generation.end();
    if has.wait {
        drop(world.memory.write().unwrap());
    }
    world.gone.store(true, Ordering::Relaxed);
    sender.join().unwrap();
}

const ALL: Has = Has { before: true, again: true, wait: true };

fn generation() {
    generation_of(ALL);
}

protocol!(two_copies, without_the_wait: Wait => "memory is used that is free");
protocol!(two_changes,);
protocol!(state, without_swaps: Swap => "a queue pair in ERROR continues");
protocol!(generation,);

#[test]
#[should_panic(expected = "delivered to a former owner of the address")]
fn a_generation_that_is_asked_for_late_hides_a_change() {
    check(|| generation_of(Has { before: false, ..ALL }));
}

#[test]
#[should_panic(expected = "delivered to a former owner of the address")]
fn a_route_that_is_not_looked_at_again_is_old() {
    check(|| generation_of(Has { again: false, ..ALL }));
}

#[test]
#[should_panic(expected = "delivered to a former owner of the address")]
fn without_a_wait_an_address_is_taken_away_early() {
    check(|| generation_of(Has { wait: false, ..ALL }));
}
