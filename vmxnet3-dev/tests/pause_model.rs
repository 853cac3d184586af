//! A model of a pause beside threads that transmit and receive (`Core::pause`): in no order of their steps is a packet
//! sent and not completed when the state is saved, memory written after the pause has begun, or a frame delivered whose
//! interrupt is forgotten.

#![expect(clippy::unwrap_used, reason = "an error ends the test")]

use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use loom::sync::{Arc, Mutex, RwLock};
use loom::thread;

/// Parts of the protocol, which a model may leave out.
#[derive(Clone, Copy)]
struct Has {
    /// The pause waits for the transmit queue.
    queue_lock: bool,
    /// A thread that locks the queue after that takes no packet.
    flag: bool,
    /// The pause waits for threads that use the session. Otherwise it only sets a flag.
    barrier: bool,
    /// The pause takes the vectors of the batch after that.
    vectors_last: bool,
}

const ALL: Has = Has { queue_lock: true, flag: true, barrier: true, vectors_last: true };
/// Packets in the ring.
const PACKETS: usize = 2;

/// State that the threads share.
struct World {
    /// A session is active: `Core::session`.
    session: RwLock<bool>,
    /// The same as a flag, for a pause that does not wait.
    active: AtomicBool,
    /// `Core::pausing`.
    pausing: AtomicBool,
    /// Position in the transmit ring.
    queue: Mutex<usize>,
    sent: AtomicUsize,
    /// `Core::rx_vectors`.
    vectors: AtomicUsize,
    /// The pause has begun: the state may be saved.
    saved: AtomicBool,
    interrupts: AtomicUsize,
    has: Has,
}

impl World {
    fn new(has: Has) -> Arc<Self> {
        Arc::new(Self {
            session: RwLock::new(true),
            active: AtomicBool::new(true),
            pausing: AtomicBool::new(false),
            queue: Mutex::new(0),
            sent: AtomicUsize::new(0),
            vectors: AtomicUsize::new(0),
            saved: AtomicBool::new(false),
            interrupts: AtomicUsize::new(0),
            has,
        })
    }

    /// `Core::during`.
    fn during<T>(&self, run: impl FnOnce() -> T) -> Option<T> {
        let session = self.session.read().unwrap();
        (*session && self.active.load(Ordering::Acquire)).then(run)
    }

    fn access_memory(&self) {
        assert!(!self.saved.load(Ordering::Acquire), "memory is accessed during a pause");
    }

    /// `transmit::run`.
    fn transmit(&self) {
        let mut next = self.queue.lock().unwrap();
        while !self.pausing.load(Ordering::Relaxed) && self.during(|| *next < PACKETS) == Some(true) {
            self.sent.fetch_add(1, Ordering::AcqRel);
            if self.during(|| self.access_memory()).is_none() {
                return;
            }
            *next += 1;
        }
    }

    /// `receive::receive` and `receive::flush`. Returns `true` if the frame was delivered.
    fn receive(&self) -> bool {
        let deliver = || {
            self.access_memory();
            self.vectors.store(1, Ordering::Release);
        };
        let delivered = self.during(deliver).is_some();
        self.during(|| self.interrupts.fetch_add(self.vectors.swap(0, Ordering::AcqRel), Ordering::AcqRel));
        delivered
    }

    /// `Core::pause`. Returns the position of the transmit queue, and the vectors that are pending.
    fn pause(&self) -> (usize, usize) {
        self.pausing.store(self.has.flag, Ordering::Relaxed);
        if self.has.queue_lock {
            drop(self.queue.lock().unwrap());
        }
        let early = if self.has.vectors_last { 0 } else { self.vectors.swap(0, Ordering::AcqRel) };
        if self.has.barrier {
            *self.session.write().unwrap() = false;
        } else {
            self.active.store(false, Ordering::Release);
        }
        let vectors = if self.has.vectors_last { self.vectors.swap(0, Ordering::AcqRel) } else { early };
        self.saved.store(true, Ordering::Release);
        (*self.queue.lock().unwrap(), vectors)
    }
}

/// A pause while one thread transmits.
fn transmits(has: Has) {
    loom::model(move || {
        let world = World::new(has);
        let other = Arc::clone(&world);
        let other = thread::spawn(move || other.transmit());
        let (position, _) = world.pause();
        other.join().unwrap();
        assert_eq!(position, world.sent.load(Ordering::Acquire), "a packet is sent twice or not at all");
    });
}

/// A pause while one thread writes a frame to memory.
fn writes(has: Has) {
    loom::model(move || {
        let world = World::new(has);
        let other = Arc::clone(&world);
        let other = thread::spawn(move || other.receive());
        world.pause();
        other.join().unwrap();
    });
}

/// A pause while one thread receives.
fn receives(has: Has) {
    loom::model(move || {
        let world = World::new(has);
        let other = Arc::clone(&world);
        let other = thread::spawn(move || other.receive());
        let (_, pending) = world.pause();
        let delivered = other.join().unwrap();
        let interrupts = world.interrupts.load(Ordering::Acquire);
        assert_eq!(usize::from(delivered), pending + interrupts, "an interrupt is forgotten");
    });
}

#[test]
fn a_pause_leaves_no_packet_between_port_and_ring() {
    transmits(ALL);
}

#[test]
fn a_pause_forgets_no_interrupt() {
    receives(ALL);
}

#[test]
#[should_panic(expected = "a packet is sent twice")]
fn without_the_lock_of_the_queue_a_packet_is_sent_twice() {
    transmits(Has { queue_lock: false, ..ALL });
}

#[test]
#[should_panic(expected = "a packet is sent twice")]
fn without_the_flag_a_packet_is_sent_twice() {
    transmits(Has { flag: false, ..ALL });
}

#[test]
#[should_panic(expected = "memory is accessed")]
fn without_the_barrier_memory_is_accessed_during_a_pause() {
    writes(Has { barrier: false, ..ALL });
}

#[test]
#[should_panic(expected = "an interrupt is forgotten")]
fn vectors_that_are_taken_before_the_barrier_are_forgotten() {
    receives(Has { vectors_last: false, ..ALL });
}
