//! Inline delivery on the thread that reads the uplink, which is the test's own thread unless stated otherwise.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, mpsc};
use std::thread;

use pvrdma_packet::MacAddr;

use super::super::{Switch, SwitchPort, UnknownUnicast};
use super::*;
use crate::memory::{self, MemoryLink};
use crate::{Link, ManualClock, Readiness};

const MS: Duration = Duration::from_millis(1);
const ALL: MacAddr = MacAddr([0xff; 6]);

fn mac(number: u8) -> MacAddr {
    MacAddr([2, 0, 0, 0, 0, number])
}

/// Returns a frame that contains a number.
fn frame(to: MacAddr, number: u32) -> Vec<u8> {
    let mut frame = [&to.0[..], &mac(9).0, &[0x88, 0xb5], &number.to_be_bytes()].concat();
    frame.resize(60, 0);
    frame
}

fn frames(list: &[(MacAddr, u32)]) -> Frames {
    let mut frames = Frames::default();
    list.iter().for_each(|&(to, number)| frames.push(&frame(to, number)));
    frames
}

fn number(frame: &[u8]) -> u32 {
    u32::from_be_bytes(*frame[14..].first_chunk().unwrap())
}

/// Returns the numbers of the frames that came through the queue of a port.
fn received(port: &SwitchPort) -> Vec<u32> {
    let mut frames = Frames::default();
    port.receive(&mut frames, usize::MAX);
    frames.iter().map(number).collect()
}

fn readable(port: &SwitchPort) -> bool {
    let readable = port.readiness().readable.unwrap();
    let mut fds = [rustix::event::PollFd::new(&readable, rustix::event::PollFlags::IN)];
    rustix::event::poll(&mut fds, Some(&rustix::event::Timespec::default())).unwrap() > 0
}

/// Receiver behind a port.
struct Taker {
    got: Mutex<Vec<u32>>,
    /// Highest number of frames that it takes in one call.
    most: AtomicUsize,
    /// Time that one call takes.
    time: Mutex<Duration>,
    clock: Arc<ManualClock>,
    /// Port through which it answers each frame, if any.
    answers: Option<Arc<SwitchPort>>,
}

impl LinkReceiver for Taker {
    fn take(&self, brought: &Frames, list: &[usize]) -> usize {
        let count = list.len().min(self.most.load(Ordering::SeqCst));
        self.got.lock().extend(list.iter().take(count).map(|&index| number(brought.get(index).unwrap())));
        if count > 0 {
            self.clock.advance(*self.time.lock());
        }
        if let Some(port) = &self.answers {
            assert_eq!(port.send(&frames(&[(mac(9), 0)]), 0), 1);
        }
        count
    }
}

impl Taker {
    fn taken(&self) -> Vec<u32> {
        std::mem::take(&mut self.got.lock())
    }
}

/// A switch that the test drives by hand, and its clock.
struct Bench {
    switch: Switch,
    outside: MemoryLink,
    clock: Arc<ManualClock>,
}

impl Bench {
    fn new() -> Self {
        let (ours, outside) = memory::pair(10_000).unwrap();
        let clock = Arc::new(ManualClock::default());
        let switch = Switch::without_thread(Some(Arc::new(ours)), 1500, Arc::clone(&clock) as _).unwrap();
        Self { switch, outside, clock }
    }

    /// Adds ports with these numbers, which have already noticed each other.
    fn ports<const N: usize>(&self, numbers: [u8; N]) -> [(Arc<SwitchPort>, Arc<Taker>); N] {
        let ports = numbers.map(|number| self.port(number));
        ports.iter().for_each(|(port, _)| assert!(received(port).is_empty()));
        ports
    }

    fn port(&self, number: u8) -> (Arc<SwitchPort>, Arc<Taker>) {
        let port = self.switch.port(mac(number), UnknownUnicast::Drop).unwrap();
        let taker = Arc::new(Taker {
            got: Mutex::default(),
            most: AtomicUsize::new(usize::MAX),
            time: Mutex::default(),
            clock: Arc::clone(&self.clock),
            answers: None,
        });
        let weak = Arc::downgrade(&taker);
        port.set_receiver(weak);
        (port, taker)
    }

    /// Delivers these frames from the uplink.
    fn bring(&self, list: &[(MacAddr, u32)]) {
        assert_eq!(self.outside.send(&frames(list), 0), list.len());
        while self.switch.service() {}
    }
}

#[test]
fn frames_are_taken_where_they_are_read() {
    let bench = Bench::new();
    let [(one, first), (two, second), (flood, _)] = bench.ports([1, 2, 3]);
    flood.set_receiver(Weak::<Taker>::new());
    bench.bring(&[(mac(1), 1), (mac(2), 2), (mac(1), 3), (mac(3), 4), (mac(2), 5)]);
    assert_eq!((first.taken(), second.taken()), (vec![1, 3], vec![2, 5]));
    assert!(!readable(&one) && !readable(&two), "no port is woken");
    assert_eq!(received(&flood), [4], "a port without a receiver gets frames through its queue");
    // A frame to all ports comes through the queue, and so does the frame behind it.
    bench.bring(&[(mac(1), 1), (ALL, 2), (mac(1), 3), (mac(2), 4)]);
    assert_eq!((first.taken(), received(&one)), (vec![1], vec![2, 3]));
    assert_eq!((second.taken(), received(&two)), (vec![], vec![2, 4]));
    bench.bring(&[(mac(1), 5)]);
    assert_eq!(first.taken(), [5]);
}

#[test]
fn no_frame_overtakes_a_waiting_one() {
    let bench = Bench::new();
    let [(one, first), (two, _)] = bench.ports([1, 2]);
    // The frames that it does not take wait in the queue, and so do all that arrive until then.
    first.most.store(2, Ordering::SeqCst);
    bench.bring(&[(mac(1), 1), (mac(1), 2), (mac(1), 3), (mac(1), 4)]);
    assert_eq!(first.taken(), [1, 2]);
    assert!(readable(&one));
    bench.bring(&[(mac(1), 5)]);
    assert_eq!((first.taken(), received(&one)), (vec![], vec![3, 4, 5]));
    bench.bring(&[(mac(1), 6)]);
    assert_eq!(first.taken(), [6]);
    // The same holds behind frames that another port has sent.
    assert_eq!(two.send(&frames(&[(mac(1), 7)]), 0), 1);
    bench.bring(&[(mac(1), 8)]);
    assert_eq!((first.taken(), received(&one)), (vec![], vec![7, 8]));
}

#[test]
fn a_receiver_may_send() {
    let bench = Bench::new();
    let [(one, _), (two, _)] = bench.ports([1, 2]);
    let answering = Arc::new(Taker {
        got: Mutex::default(),
        most: AtomicUsize::new(usize::MAX),
        time: Mutex::default(),
        clock: Arc::clone(&bench.clock),
        answers: Some(Arc::clone(&one)),
    });
    let weak = Arc::downgrade(&answering);
    two.set_receiver(weak);
    bench.bring(&[(mac(2), 1), (mac(2), 2)]);
    let mut answers = Frames::default();
    bench.outside.receive(&mut answers, usize::MAX);
    assert_eq!((answering.taken(), answers.len()), (vec![1, 2], 1));
}

/// Attack: devices get more frames than they can take, so that the thread has no time left for other devices.
#[test]
fn a_device_that_takes_long_leaves_time_for_others() {
    let bench = Bench::new();
    let [first, second, third, (modest, taker)] = bench.ports([1, 2, 3, 4]);
    let greedy = [first, second, third];
    for (_, taker) in &greedy {
        *taker.time.lock() = MS / 10;
    }
    let mut direct = BTreeMap::new();
    for _ in 0..10 {
        let began = bench.clock.now();
        // Frames of one round: ten times as many as fit into it.
        for _ in 0..200 {
            for (index, (port, taker)) in greedy.iter().enumerate() {
                bench.bring(&[(mac(u8::try_from(index).unwrap() + 1), 1)]);
                *direct.entry(index).or_insert(0) += taker.taken().len();
                received(port);
            }
        }
        let used = bench.clock.now() - began;
        assert!(used < ROUND * 4 / 5 + MS / 10 * 3, "{used:?} of {ROUND:?}: nothing is left");
        bench.bring(&[(mac(4), 7)]);
        assert_eq!(taker.taken(), [7], "the port with few frames has its turn");
        bench.clock.advance(ROUND);
    }
    assert!(received(&modest).is_empty());
    let each: Vec<_> = direct.values().copied().collect();
    // Each gets a quarter of ten rounds, and a frame takes a tenth of a millisecond.
    assert!(each.iter().all(|count| (50..=60).contains(count)), "{each:?}");
}

/// Attack: a device whose memory makes the thread wait, again and again.
#[test]
fn a_device_that_was_slow_delays_others_no_more() {
    let bench = Bench::new();
    let [(one, first), (_two, second)] = bench.ports([1, 2]);
    *first.time.lock() = 100 * MS;
    let (mut waited, began) = (Duration::ZERO, bench.clock.now());
    while bench.clock.now() - began < 20_000 * MS {
        let before = bench.clock.now();
        bench.bring(&[(mac(1), 1), (mac(2), 2)]);
        waited += bench.clock.now() - before;
        received(&one);
        assert_eq!(second.taken(), [2]);
        bench.clock.advance(MS);
    }
    assert!(!first.taken().is_empty());
    assert!(waited <= 400 * MS, "other ports waited for {waited:?} of 20 s");
    // A receiver that is no longer slow gets inline delivery again.
    *first.time.lock() = Duration::ZERO;
    bench.clock.advance(100 * MS * REST);
    bench.bring(&[(mac(1), 3)]);
    assert_eq!(first.taken(), [3]);
}

/// A receiver that stays in `take` until the test releases it.
struct Held {
    reached: mpsc::Sender<()>,
    leave: Mutex<mpsc::Receiver<()>>,
    inside: AtomicBool,
}

impl LinkReceiver for Held {
    fn take(&self, _frames: &Frames, list: &[usize]) -> usize {
        self.inside.store(true, Ordering::SeqCst);
        self.reached.send(()).unwrap();
        self.leave.lock().recv().unwrap();
        self.inside.store(false, Ordering::SeqCst);
        list.len()
    }
}

#[test]
fn a_receiver_that_leaves_is_not_called_again() {
    let bench = Bench::new();
    let [(one, _), (_two, _)] = bench.ports([1, 2]);
    let ((reached, wait_reached), (leave, wait_leave)) = (mpsc::channel(), mpsc::channel());
    let held = Arc::new(Held { reached, leave: Mutex::new(wait_leave), inside: AtomicBool::new(false) });
    let weak = Arc::downgrade(&held);
    one.set_receiver(weak);
    bench.outside.send(&frames(&[(mac(1), 1)]), 0);
    thread::scope(|scope| {
        scope.spawn(|| bench.switch.service());
        wait_reached.recv().unwrap();
        let gone = scope.spawn(|| {
            one.set_receiver(Weak::<Held>::new());
            assert!(!held.inside.load(Ordering::SeqCst), "the removed receiver is still called");
        });
        leave.send(()).unwrap();
        gone.join().unwrap();
    });
    bench.bring(&[(mac(1), 2)]);
    assert_eq!((received(&one), Arc::strong_count(&held)), (vec![2], 1));
}

/// A device: one thread that waits for its port, and a receiver for inline delivery.
struct Station {
    port: Arc<SwitchPort>,
    reading: Mutex<()>,
    got: Mutex<Vec<u32>>,
    count: AtomicU64,
    direct: AtomicU64,
    stop: crate::Bell,
    stopping: AtomicBool,
}

impl LinkReceiver for Station {
    fn take(&self, frames: &Frames, list: &[usize]) -> usize {
        let Some(_order) = self.reading.try_lock() else { return 0 };
        self.keep(list.iter().map(|&index| frames.get(index).unwrap()));
        self.direct.fetch_add(list.len() as u64, Ordering::SeqCst);
        list.len()
    }
}

impl Station {
    fn keep<'f>(&self, frames: impl ExactSizeIterator<Item = &'f [u8]>) {
        let count = frames.len();
        self.got.lock().extend(frames.map(number));
        self.count.fetch_add(count as u64, Ordering::Release);
    }

    fn read(&self) -> bool {
        let _order = self.reading.lock();
        let mut frames = Frames::default();
        self.port.receive(&mut frames, 64);
        self.keep(frames.iter().collect::<Vec<_>>().into_iter());
        !frames.is_empty()
    }

    /// Has no timeout: if a wake-up is lost, the test does not end.
    fn work(&self) {
        while !self.stopping.load(Ordering::Acquire) {
            if !self.read() {
                let Readiness { readable, changed, .. } = self.port.readiness();
                let mut fds = vec![rustix::event::PollFd::new(&self.stop, rustix::event::PollFlags::IN)];
                for fd in [&readable, &changed].into_iter().flatten() {
                    fds.push(rustix::event::PollFd::new(fd, rustix::event::PollFlags::IN));
                }
                rustix::event::poll(&mut fds, None).unwrap();
            }
        }
    }

    fn expect(&self, count: u64) {
        while self.count.load(Ordering::Acquire) < count {
            thread::yield_now();
        }
    }
}

/// Frames reach a device on both paths, while another port is added and removed, so that the device has the uplink to
/// itself at times.
#[test]
fn order_is_kept_whichever_way_frames_take() {
    const FRAMES: u32 = 100_000;
    let (ours, outside) = memory::pair(256).unwrap();
    let switch = Switch::new(Some(Arc::new(ours)), 1500).unwrap();
    let port = switch.port(mac(1), UnknownUnicast::Drop).unwrap();
    let station = Arc::new(Station {
        port,
        reading: Mutex::default(),
        got: Mutex::default(),
        count: AtomicU64::new(0),
        direct: AtomicU64::new(0),
        stop: crate::Bell::new().unwrap(),
        stopping: AtomicBool::new(false),
    });
    let weak = Arc::downgrade(&station);
    station.port.set_receiver(weak);
    let (start, done) = (Barrier::new(2), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| station.work());
        scope.spawn(|| {
            start.wait();
            while !done.load(Ordering::Acquire) {
                let port = switch.port(mac(2), UnknownUnicast::Drop).unwrap();
                let there = station.direct.load(Ordering::SeqCst);
                // Runs until enough frames were delivered inline, or until all have arrived.
                while !done.load(Ordering::Acquire) && station.direct.load(Ordering::SeqCst) < there + 100 {
                    thread::yield_now();
                }
                drop(port);
                thread::yield_now();
            }
        });
        start.wait();
        let mut number = 0;
        while number < FRAMES {
            let list: Vec<_> = (number..(number + 32).min(FRAMES)).map(|n| (mac(1), n)).collect();
            let (batch, mut from) = (frames(&list), 0);
            while from < batch.len() {
                from += outside.send(&batch, from);
                thread::yield_now();
            }
            number += 32;
            station.expect(u64::from(number).saturating_sub(10_000));
        }
        station.expect(FRAMES.into());
        done.store(true, Ordering::Release);
        station.stopping.store(true, Ordering::Release);
        station.stop.ring();
    });
    assert!(station.got.lock().iter().copied().eq(0..FRAMES), "each once, in order");
    assert!(station.direct.load(Ordering::SeqCst) > 0);
}
