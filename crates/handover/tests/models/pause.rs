//! A device is paused while other threads run its queue pair, receive its packets, and deliver to it
//! (`backend-rxe/src/pause.rs`).

use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use loom::sync::{Arc, Mutex, RwLock};
use loom::thread;
use pvrdma_handover::sync::FairMutex;
use pvrdma_handover::{Combiner, Generation, Pending, Room};

use super::{check, check_within};

/// Steps of a pause, and of the threads beside it. Models leave one out to check that they notice.
#[derive(Clone, Copy)]
struct Has {
    /// The pause waits for the views of the memory.
    barrier: bool,
    /// The pause waits for the thread that runs the queue pair.
    run: bool,
    /// The pause waits for the thread of the port.
    receiver: bool,
    /// The generation ends.
    generation: bool,
    /// The end of a pause rings the doorbells that were missed.
    ring: bool,
    /// The end of a pause wakes the requesters that wait.
    wake: bool,
}

const ALL: Has = Has { barrier: true, run: true, receiver: true, generation: true, ring: true, wake: true };

const RUN: u8 = 1;

/// A task on a ready queue.
struct Task {
    scheduled: Pending,
    queued: AtomicUsize,
}

impl Task {
    fn new() -> Self {
        Self { scheduled: Pending::new(), queued: AtomicUsize::new(0) }
    }

    fn schedule(&self) {
        if self.scheduled.add(RUN) {
            self.queued.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Takes the task from the queue, if it is there.
    fn take(&self) -> bool {
        let taken = self.queued.swap(0, Ordering::AcqRel) > 0;
        if taken {
            self.scheduled.take();
        }
        taken
    }
}

/// A device with a queue pair, and a connected queue pair of another device.
struct World {
    paused: Room<Vec<()>>,
    generation: Generation,
    /// The map of the device's memory. Views lock it for reading.
    memory: RwLock<()>,
    /// `true` while a pause is complete.
    complete: AtomicBool,
    /// The requester of the device, as the number of its executed requests.
    requester: FairMutex<usize>,
    combiner: Combiner,
    task: Task,
    /// Requests in the send ring of the device.
    posted: AtomicUsize,
    /// The receive queue of the port.
    receiver: Mutex<()>,
    /// The requester of the other device: `true` once its request was delivered.
    peer: Mutex<bool>,
    peer_task: Task,
}

impl World {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            paused: Room::default(),
            generation: Generation::new(),
            memory: RwLock::new(()),
            complete: AtomicBool::new(false),
            requester: FairMutex::new(0),
            combiner: Combiner::new(),
            task: Task::new(),
            posted: AtomicUsize::new(0),
            receiver: Mutex::new(()),
            peer: Mutex::new(false),
            peer_task: Task::new(),
        })
    }

    /// Accesses the memory or the queue pair of the device.
    fn touch(&self) {
        assert!(!self.complete.load(Ordering::Relaxed), "a paused device is used");
    }

    fn pause(&self, has: Has) {
        self.paused.fill();
        if has.generation {
            self.generation.end();
        }
        if has.receiver {
            drop(self.receiver.lock().unwrap());
        }
        if has.run {
            drop(self.requester.lock());
        }
        if has.barrier {
            drop(self.memory.write().unwrap());
        }
        self.complete.store(true, Ordering::Relaxed);
    }

    fn resume(&self, has: Has) {
        self.complete.store(false, Ordering::Relaxed);
        let waiters = self.paused.open().unwrap_or_default();
        self.generation.end();
        if has.ring {
            self.task.schedule();
        }
        if has.wake && !waiters.is_empty() {
            self.peer_task.schedule();
        }
    }

    /// Runs the queue pair of the device, on a thread of the engine or that of a doorbell.
    fn run(&self) {
        self.combiner.run(&self.requester, |done| {
            if !self.paused.is_full() {
                {
                    let _view = self.memory.read().unwrap();
                    self.touch();
                    *done = self.posted.load(Ordering::Relaxed);
                }
                // Timers and counters follow without a view.
                self.touch();
            }
            false
        });
    }

    /// A guest posts a request and rings.
    fn doorbell(&self) {
        self.posted.store(1, Ordering::Relaxed);
        self.run();
    }

    /// A thread of the engine runs scheduled tasks.
    fn engine(&self) {
        if self.task.take() {
            self.run();
        }
        if self.peer_task.take() {
            self.deliver();
        }
    }

    /// The thread of the port handles a packet.
    fn receive(&self) {
        let _receiver = self.receiver.lock().unwrap();
        if !self.paused.is_full() {
            drop(self.memory.read().unwrap());
            self.touch();
        }
    }

    /// Runs the queue pair of the other device, which delivers to this one or waits for the end of the pause.
    fn deliver(&self) {
        let mut delivered = self.peer.lock().unwrap();
        while !*delivered {
            let generation = self.generation.get();
            if self.paused.is_full() {
                if self.paused.wait(|waiters| waiters.push(())) {
                    return;
                }
                continue;
            }
            let _view = self.memory.read().unwrap();
            if generation == self.generation.get() {
                self.touch();
                *delivered = true;
            }
        }
    }
}

/// Pauses and resumes a device beside other threads. Afterwards all work is done, at the latest by the engine.
fn beside<const N: usize>(has: Has, others: [fn(&World); N]) {
    let world = World::new();
    let others = others.map(|other| {
        let world = Arc::clone(&world);
        thread::spawn(move || other(&world))
    });
    world.pause(has);
    world.resume(has);
    for other in others {
        other.join().unwrap();
    }
    world.engine();
    let done = *world.requester.lock();
    assert_eq!(done, world.posted.load(Ordering::Relaxed), "a doorbell in a pause is lost");
}

/// A guest rings.
fn doorbell_of(has: Has) {
    beside(has, [World::doorbell]);
}

/// The engine runs the queue pair, which was scheduled before.
fn engine_of(has: Has) {
    beside(
        has,
        [|world| {
            world.task.schedule();
            world.engine();
        }],
    );
}

/// A packet arrives.
fn port_of(has: Has) {
    beside(has, [World::receive]);
}

/// A requester of another device delivers to the device.
fn client_of(has: Has) {
    let world = World::new();
    let other = Arc::clone(&world);
    let other = thread::spawn(move || other.deliver());
    world.pause(has);
    world.resume(has);
    other.join().unwrap();
    world.engine();
    assert!(*world.peer.lock().unwrap(), "a request waits for a device that is not paused any more");
}

#[test]
fn a_doorbell() {
    check(|| doorbell_of(ALL));
}

#[test]
fn a_thread_of_the_engine() {
    check(|| engine_of(ALL));
}

#[test]
fn the_thread_of_the_port() {
    check(|| port_of(ALL));
}

#[test]
fn a_requester_of_another_device() {
    check(|| client_of(ALL));
}

/// A doorbell and a delivery at once.
#[test]
fn several_threads() {
    check_within(Some(2), || beside(ALL, [World::doorbell, World::deliver]));
}

#[test]
#[should_panic(expected = "a paused device is used")]
fn a_pause_without_a_barrier_is_early() {
    check(|| client_of(Has { barrier: false, ..ALL }));
}

#[test]
#[should_panic(expected = "a paused device is used")]
fn a_pause_without_a_generation_is_overlooked() {
    check(|| client_of(Has { generation: false, ..ALL }));
}

#[test]
#[should_panic(expected = "a paused device is used")]
fn a_pause_that_does_not_wait_for_a_run_is_early() {
    check(|| doorbell_of(Has { run: false, ..ALL }));
}

#[test]
#[should_panic(expected = "a paused device is used")]
fn a_pause_that_does_not_wait_for_the_port_is_early() {
    check(|| port_of(Has { receiver: false, ..ALL }));
}

#[test]
#[should_panic(expected = "a doorbell in a pause is lost")]
fn a_pause_that_ends_without_a_ring_loses_doorbells() {
    check(|| doorbell_of(Has { ring: false, ..ALL }));
}

#[test]
#[should_panic(expected = "a request waits for a device that is not paused any more")]
fn a_pause_that_ends_silently_leaves_peers_waiting() {
    check(|| client_of(Has { wake: false, ..ALL }));
}
