//! Threads that sleep on a descriptor, and threads that wait for room.

use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use loom::sync::{Arc, Mutex};
use loom::thread;
use pvrdma_handover::{Event, Notice, Pending, Room, WaitFlag, Waker};

use super::{Step, check, check_within, leave_out};

/// An eventfd: each call is one step, behind a lock of the kernel.
#[derive(Default)]
pub(super) struct Counter(Mutex<bool>);

impl Event for Counter {
    fn signal(&self) {
        *self.0.lock().unwrap() = true;
    }

    fn clear(&self) {
        *self.0.lock().unwrap() = false;
    }
}

impl Counter {
    pub(super) fn is_readable(&self) -> bool {
        *self.0.lock().unwrap()
    }
}

/// Two threads add work and wake a sleeping thread, which finds the work or is woken again. `clear_first`: the thread
/// clears wake-ups before it checks for work.
fn waker_of(clear_first: bool) {
    let shared = Arc::new((Waker::new(Counter::default()), [AtomicUsize::new(0), AtomicUsize::new(0)]));
    let bring = |which: usize| {
        let shared = Arc::clone(&shared);
        move || {
            shared.1[which].store(1, Ordering::Relaxed);
            shared.0.wake();
        }
    };
    let others = [thread::spawn(bring(0)), thread::spawn(bring(1))];
    let look = || shared.1.iter().map(|thing| thing.load(Ordering::Relaxed)).sum::<usize>();
    // Something else has woken it.
    let early = shared.0.sleep(|_| look());
    let mut found = if clear_first { look() } else { early };
    for other in others {
        other.join().unwrap();
    }
    // The thread sleeps now, until it is woken.
    if shared.0.sleep(Counter::is_readable) {
        found = look();
    }
    assert_eq!(found, 2, "work is left, and all threads sleep");
}

fn waker() {
    waker_of(true);
}

/// Two threads put items into a mailbox, and one takes them. In the end, the notice is raised exactly if items are
/// left. `locked`: the notice is changed under the lock of the mailbox.
fn notice_of(locked: bool) {
    let shared = Arc::new((Notice::new(Counter::default()), Mutex::new(0)));
    let put = || {
        let shared = Arc::clone(&shared);
        move || {
            let mut things = shared.1.lock().unwrap();
            *things += 1;
            if !locked {
                drop(things);
            }
            shared.0.raise();
        }
    };
    let take = || {
        if !shared.0.is_raised() {
            return 0;
        }
        let mut things = shared.1.lock().unwrap();
        let taken = std::mem::take(&mut *things);
        if !locked {
            drop(things);
        }
        shared.0.lower();
        taken
    };
    let others = [thread::spawn(put()), thread::spawn(put())];
    let mut taken = take();
    for other in others {
        other.join().unwrap();
    }
    while shared.0.event().is_readable() {
        let more = take();
        assert!(more > 0 || !locked, "the event is readable without an entry");
        taken += more;
    }
    assert_eq!(taken, 2, "work is left, and all threads sleep");
}

fn notice() {
    notice_of(true);
}

/// Steps of the thread that reads the link. Models leave some of them out.
#[derive(Clone, Copy)]
struct Reader {
    /// The reader checks the bits again after it has lowered the notice.
    looks_again: bool,
    /// The reader raises the notice for packets that it leaves.
    tells: bool,
}

/// One direction of a network function that is read as a link (`vmxnet3-dev/src/link/mod.rs`), packet by packet. A set
/// bit means that the ring may contain packets.
struct Outbox {
    notice: Notice<Counter>,
    /// The lock of the notice.
    lock: Mutex<()>,
    bits: AtomicUsize,
    /// Packets that were posted: guest memory.
    posted: AtomicUsize,
    /// Packets that were taken, by one reader at a time.
    taken: Mutex<usize>,
    reader: Reader,
}

impl Outbox {
    /// Posts packets and rings the doorbell. The doorbell's thread reads unless another thread does. If packets are
    /// left, it wakes the other thread.
    fn doorbell(&self, packets: usize) {
        self.posted.fetch_add(packets, Ordering::Relaxed);
        self.bits.fetch_or(1, Ordering::SeqCst);
        if self.bits.fetch_and(1, Ordering::SeqCst) == 0 {
            return;
        }
        if let Ok(mut taken) = self.taken.try_lock() {
            self.read(&mut taken);
        }
        if self.bits.load(Ordering::SeqCst) != 0 {
            self.raise();
        }
    }

    fn raise(&self) {
        let _lock = self.lock.lock().unwrap();
        self.notice.raise();
    }

    /// Takes at most one packet. It has no room for others, so it sets the bit again without looking at them.
    fn read(&self, taken: &mut usize) {
        let mut left = false;
        if self.bits.fetch_and(0, Ordering::SeqCst) != 0 {
            left = *taken < self.posted.load(Ordering::Relaxed);
            *taken += usize::from(left);
            self.bits.fetch_or(usize::from(left), Ordering::SeqCst);
        }
        if left {
            if self.reader.tells {
                self.raise();
            }
        } else if self.bits.load(Ordering::SeqCst) == 0 {
            {
                let _lock = self.lock.lock().unwrap();
                self.notice.lower();
            }
            if self.reader.looks_again && self.bits.load(Ordering::SeqCst) != 0 {
                self.raise();
            }
        }
    }
}

/// A guest rings a doorbell for each group of packets, while a reader runs for another reason. When the reader sleeps
/// without a pending wake-up, no packet is left.
fn outbox_of(doorbells: &'static [usize], reader: Reader) {
    let outbox = Arc::new(Outbox {
        notice: Notice::new(Counter::default()),
        lock: Mutex::new(()),
        bits: AtomicUsize::new(0),
        posted: AtomicUsize::new(0),
        taken: Mutex::new(0),
        reader,
    });
    let guest = Arc::clone(&outbox);
    let guest = thread::spawn(move || doorbells.iter().for_each(|&packets| guest.doorbell(packets)));
    let read = || outbox.read(&mut outbox.taken.lock().unwrap());
    read();
    guest.join().unwrap();
    while outbox.notice.event().is_readable() {
        read();
    }
    let taken = *outbox.taken.lock().unwrap();
    assert_eq!(taken, doorbells.iter().sum(), "work is left, and all threads sleep");
}

/// Deferred work for one thread, as bits. The first bit signals an eventfd (`crates/pci-slot/src/slot.rs`).
/// `event_first`: the thread clears the event before it takes the bits.
fn deferred_of(event_first: bool) {
    let shared = Arc::new((Pending::new(), Counter::default(), [AtomicUsize::new(0), AtomicUsize::new(0)]));
    let leave = |which: usize| {
        let shared = Arc::clone(&shared);
        move || {
            let (pending, event, work) = &*shared;
            work[which].store(1, Ordering::Relaxed);
            if pending.add(1 << which) {
                event.signal();
            }
        }
    };
    let done = Mutex::new([0; 2]);
    let run = || {
        let (pending, event, work) = &*shared;
        let bits = if event_first {
            event.clear();
            pending.take()
        } else {
            let bits = pending.take();
            event.clear();
            bits
        };
        for which in (0..2).filter(|which| bits >> which & 1 == 1) {
            done.lock().unwrap()[which] = work[which].load(Ordering::Relaxed);
        }
    };
    let others = [thread::spawn(leave(0)), thread::spawn(leave(1))];
    run();
    for other in others {
        other.join().unwrap();
    }
    while shared.1.is_readable() {
        run();
    }
    assert_eq!(*done.lock().unwrap(), [1, 1], "work is left, and all threads sleep");
}

/// The slot with deferred work (`crates/pci-slot/src/slot.rs`).
struct Deferring {
    pending: Pending,
    event: Counter,
    /// A subscriber does the work.
    left: AtomicBool,
    work: [AtomicUsize; 2],
    done: [AtomicUsize; 2],
}

impl Deferring {
    fn run_deferred(&self, which: usize) {
        self.done[which].fetch_max(self.work[which].load(Ordering::Relaxed), Ordering::Relaxed);
    }

    fn run_left(&self) {
        self.event.clear();
        let bits = self.pending.take();
        (0..2).filter(|which| bits >> which & 1 == 1).for_each(|which| self.run_deferred(which));
    }

    /// A write of a guest's processor, which defers work.
    fn write(&self, which: usize, look_again: bool) {
        self.work[which].store(1, Ordering::Relaxed);
        if !self.left.load(Ordering::Acquire) {
            return self.run_deferred(which);
        }
        if self.pending.add(1 << which) {
            self.event.signal();
            if look_again && !self.left.load(Ordering::Acquire) {
                self.run_left();
            }
        }
    }
}

/// Two threads defer work while its subscriber leaves. They do the work that it leaves undone. `look_again`: the thread
/// that set the first bit checks that the subscriber is still there. `comes_back`: another subscriber follows.
fn subscriber_of(look_again: bool, comes_back: bool) {
    let slot = Arc::new(Deferring {
        pending: Pending::new(),
        event: Counter::default(),
        left: AtomicBool::new(true),
        work: [AtomicUsize::new(0), AtomicUsize::new(0)],
        done: [AtomicUsize::new(0), AtomicUsize::new(0)],
    });
    let write = |which: usize| {
        let slot = Arc::clone(&slot);
        move || slot.write(which, look_again)
    };
    let others = [thread::spawn(write(0)), thread::spawn(write(1))];
    slot.left.store(false, Ordering::Release);
    slot.run_left();
    if comes_back {
        slot.left.store(true, Ordering::Release);
    }
    for other in others {
        other.join().unwrap();
    }
    while comes_back && slot.event.is_readable() {
        slot.run_left();
    }
    let done = slot.done.each_ref().map(|done| done.load(Ordering::Relaxed));
    assert_eq!(done, [1, 1], "work is left, and no thread does it");
}

/// A thread finds two queues in front of a link full and waits. Both get room again, and the thread is notified.
fn room() {
    let shared = Arc::new((Room::<usize>::default(), AtomicUsize::new(0)));
    shared.0.fill();
    let flush = |again: bool| {
        let shared = Arc::clone(&shared);
        move || {
            let (room, told) = &*shared;
            if again {
                room.fill();
            }
            if let Some(waiters) = room.open() {
                told.fetch_add(waiters, Ordering::Relaxed);
            }
        }
    };
    let others = [thread::spawn(flush(false)), thread::spawn(flush(true))];
    let waits = shared.0.wait(|waiters| *waiters += 1);
    for other in others {
        other.join().unwrap();
    }
    assert!(!shared.0.is_full());
    assert_eq!(shared.1.load(Ordering::Relaxed), usize::from(waits), "the waiter is not woken");
}

/// A thread sends as long as there is room, while another queue in front of the link fills up and gets room again
/// (`backend-rxe/src/path/wire/receive.rs`). Either nothing is left to send, or the thread is notified. `join`: it
/// registers as a waiter if it ran out of room.
fn sender_of(join: bool) {
    let shared = Arc::new((Room::<usize>::default(), AtomicUsize::new(0)));
    let other = Arc::clone(&shared);
    let other = thread::spawn(move || {
        other.0.fill();
        if let Some(waiters) = other.0.open() {
            other.1.fetch_add(waiters, Ordering::Relaxed);
        }
    });
    let room = &shared.0;
    // Each check stands for a packet that is sent if there is room.
    let left = room.is_full() || room.is_full();
    let waits = left && join && room.wait(|waiters| *waiters += 1);
    other.join().unwrap();
    let told = shared.1.load(Ordering::Relaxed);
    // A thread that finds room while it registers continues at once.
    assert!(!left || (join && !waits) || told == 1, "the waiter is not woken");
}

fn sender() {
    sender_of(true);
}

/// An event finds its ring full and waits for room, while a guest makes room and then causes an exit. The event is
/// posted, by its own thread or by the one that handles the exit (`pvrdma-dev/src/events/mod.rs`). `look_again`: the
/// thread checks for room again once it is registered as waiting.
fn events_of(look_again: bool) {
    let shared = Arc::new((WaitFlag::new(), AtomicUsize::new(0)));
    let device = Arc::clone(&shared);
    let device = thread::spawn(move || {
        let (waits, room) = &*device;
        let mut posted = room.load(Ordering::Relaxed) == 1;
        if !posted {
            waits.set();
            posted = look_again && room.load(Ordering::Relaxed) == 1;
        }
        posted
    });
    let (waits, room) = &*shared;
    room.store(1, Ordering::Relaxed);
    let heard = waits.is_set_when_heard();
    assert!(device.join().unwrap() || heard, "the waiter is not woken");
}

fn events() {
    events_of(true);
}

protocol!(room, without_the_second_look: Look => "the waiter is not woken");
protocol!(sender,);
protocol!(events, without_fences: Fence => "the waiter is not woken");
protocol!(waker,);
protocol!(notice,);

#[test]
#[should_panic(expected = "the waiter is not woken")]
fn a_sender_without_room_that_does_not_wait_is_forgotten() {
    check(|| sender_of(false));
}

#[test]
#[should_panic(expected = "all threads sleep")]
fn clearing_wake_ups_after_the_look_loses_one() {
    check(|| waker_of(false));
}

#[test]
#[should_panic(expected = "all threads sleep")]
fn a_notice_that_changes_without_the_lock_is_wrong() {
    check(|| notice_of(false));
}

const READER: Reader = Reader { looks_again: true, tells: true };

#[test]
fn a_doorbell_is_seen_by_the_reader_of_the_link() {
    check(|| outbox_of(&[2], READER));
    check(|| outbox_of(&[1, 1], READER));
    check(|| outbox_of(&[2, 1], READER));
}

#[test]
#[should_panic(expected = "all threads sleep")]
fn a_reader_that_lowers_a_notice_without_a_second_look_loses_a_doorbell() {
    check(|| outbox_of(&[1, 1], Reader { looks_again: false, ..READER }));
}

#[test]
#[should_panic(expected = "all threads sleep")]
fn a_reader_that_leaves_packets_silently_loses_them() {
    check(|| outbox_of(&[2], Reader { tells: false, ..READER }));
}

#[test]
fn deferred_work_is_done() {
    check(|| deferred_of(true));
}

#[test]
#[should_panic(expected = "all threads sleep")]
fn clearing_the_event_after_the_bits_loses_work() {
    check(|| deferred_of(false));
}

#[test]
fn deferred_work_is_done_when_the_subscriber_goes() {
    check(|| subscriber_of(true, false));
}

#[test]
fn deferred_work_is_done_when_another_subscriber_comes() {
    check_within(Some(4), || subscriber_of(true, true));
}

#[test]
#[should_panic(expected = "no thread does it")]
fn a_subscriber_that_leaves_without_a_second_look_loses_work() {
    check(|| subscriber_of(false, false));
}

#[test]
#[should_panic(expected = "the waiter is not woken")]
fn an_event_that_waits_without_a_second_look_is_forgotten() {
    check(|| events_of(false));
}
