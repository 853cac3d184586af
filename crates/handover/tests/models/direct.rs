//! Inline delivery of frames to a port on the thread that read them, while other frames wait for the port's own thread
//! (`crates/link/src/switch/mailbox.rs`, `backend-rxe/src/port/at_once.rs`).

use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::sync::{Arc, Mutex};
use loom::thread;
use pvrdma_handover::sync::FairMutex;
use pvrdma_handover::{Combiner, Notice};

use super::check;
use super::events::Counter;

/// Checks of the delivering thread around an inline delivery. Models leave some of them out.
#[derive(Clone, Copy)]
struct Looks {
    /// Checks if the port's thread is reading earlier frames.
    reading: bool,
    /// Checks if earlier frames wait in the receive queue.
    waiting: bool,
    /// Checks afterwards if the port's thread has left work because the queue was in use.
    left: bool,
}

/// State of a port, and of the frames on their way to it.
struct Way {
    notice: Notice<Counter>,
    mailbox: Mutex<Vec<usize>>,
    /// Held by the thread that takes frames out of the mailbox until they are in the queue.
    reading: FairMutex<()>,
    /// Frames that wait, as digits.
    queue: AtomicUsize,
    /// A responder whose turn has come; 0 is none.
    resumed: AtomicUsize,
    /// A step before the unlock. Loom does not treat the unlock itself as one.
    passes: AtomicUsize,
    combiner: Combiner,
    /// The frames that the port has processed.
    got: FairMutex<Vec<usize>>,
}

impl Way {
    /// Delivers a frame of the uplink. Returns `true` if the port's thread must be woken.
    fn bring(&self, frame: usize, looks: Looks) -> bool {
        let empty = !self.notice.is_raised();
        let order = if empty { self.reading.try_lock() } else { None };
        let free = empty && (order.is_some() || !looks.reading);
        let once = free.then(|| {
            self.combiner.once(&self.got, |got| {
                let first = !looks.waiting || self.queue.load(Ordering::Acquire) == 0;
                if first {
                    got.push(frame);
                    self.resume(got);
                }
                first
            })
        });
        drop(order);
        match once.flatten() {
            Some((true, left)) => left && looks.left,
            _ => {
                let mut mailbox = self.mailbox.lock().unwrap();
                mailbox.push(frame);
                self.notice.raise();
                false
            }
        }
    }

    fn resume(&self, got: &mut Vec<usize>) {
        got.extend(Some(self.resumed.swap(0, Ordering::AcqRel)).filter(|&responder| responder > 0));
        self.passes.fetch_add(1, Ordering::Relaxed);
    }

    /// Work of the port's thread after it was woken.
    fn service(&self) {
        if let Some(_order) = self.reading.try_lock()
            && self.notice.is_raised()
        {
            let mut mailbox = self.mailbox.lock().unwrap();
            let frames = std::mem::take(&mut *mailbox);
            self.notice.lower();
            drop(mailbox);
            for frame in frames {
                let put = |waiting: usize| Some(waiting * 10 + frame);
                self.queue.fetch_update(Ordering::AcqRel, Ordering::Acquire, put).unwrap();
            }
        }
        self.combiner.run(&self.got, |got| {
            let waiting = self.queue.swap(0, Ordering::AcqRel);
            got.extend([waiting / 10, waiting % 10].iter().filter(|&&frame| frame > 0));
            self.resume(got);
            false
        });
    }
}

/// A frame waits while another one arrives. Then a responder's turn comes, for which the port's thread is awake.
/// Everything is processed, and the frames keep their order.
fn direct_of(looks: Looks) {
    let way = Arc::new(Way {
        notice: Notice::new(Counter::default()),
        mailbox: Mutex::new(vec![1]),
        reading: FairMutex::new(()),
        queue: AtomicUsize::new(0),
        resumed: AtomicUsize::new(0),
        passes: AtomicUsize::new(0),
        combiner: Combiner::new(),
        got: FairMutex::new(Vec::new()),
    });
    way.notice.raise();
    let uplink = Arc::clone(&way);
    let uplink = thread::spawn(move || uplink.bring(2, looks));
    way.service();
    // This is a swap because loom orders read-modify-write operations among each other, but not plain stores.
    way.resumed.swap(3, Ordering::Release);
    way.service();
    let woken = uplink.join().unwrap();
    // The thread sleeps until it is woken, or until the mailbox contains something.
    if woken || way.notice.event().is_readable() {
        way.service();
    }
    let mut got = way.got.lock().clone();
    assert!(got.iter().filter(|&&frame| frame < 3).is_sorted(), "one overtakes another");
    got.sort_unstable();
    assert_eq!(got, [1, 2, 3], "a frame is left");
}

const ALL: Looks = Looks { reading: true, waiting: true, left: true };

#[test]
fn frames_come_in_order_whichever_way_they_take() {
    check(|| direct_of(ALL));
}

#[test]
#[should_panic(expected = "one overtakes another")]
fn without_a_look_at_the_reader_a_frame_overtakes() {
    check(|| direct_of(Looks { reading: false, ..ALL }));
}

#[test]
#[should_panic(expected = "one overtakes another")]
fn without_a_look_at_the_queue_a_frame_overtakes() {
    check(|| direct_of(Looks { waiting: false, ..ALL }));
}

#[test]
#[should_panic(expected = "a frame is left")]
fn without_a_wake_up_work_is_left() {
    check(|| direct_of(Looks { left: false, ..ALL }));
}
