//! Tests of which thread signals and closes a client's eventfds, with calls of any duration.

use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, ThreadId};

use pvrdma_link::ManualClock;
use rustix::event::EventfdFlags;

use super::*;

/// Timeout of the tests, longer than any step takes.
const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Call {
    Signal,
    Close,
}

/// Eventfds whose calls take `duration` on the test's clock and are reported with their thread.
struct Slow {
    may_block: bool,
    clock: Arc<ManualClock>,
    duration: Mutex<Duration>,
    calls: Sender<(Call, ThreadId)>,
    /// A signal waits while the test holds this lock, like a signal that blocks.
    gate: Mutex<()>,
    /// Signals fail.
    fails: AtomicBool,
}

impl Eventfds for Slow {
    fn never_block(&self) -> bool {
        !self.may_block
    }

    fn is_one(&self, _: BorrowedFd<'_>) -> bool {
        true
    }

    fn signal(&self, _: BorrowedFd<'_>) -> bool {
        self.clock.advance(*self.duration.lock());
        self.calls.send((Call::Signal, thread::current().id())).unwrap();
        drop(self.gate.lock());
        !self.fails.load(Ordering::Relaxed)
    }

    fn close(&self, _: OwnedFd) {
        // The device's thread may close the last descriptor after the test has ended.
        let _ = self.calls.send((Call::Close, thread::current().id()));
    }
}

struct Bench {
    clock: Arc<ManualClock>,
    slow: Arc<Slow>,
    irqs: IrqTable,
    calls: Receiver<(Call, ThreadId)>,
}

impl Bench {
    fn new(may_block: bool) -> Self {
        let clock = Arc::new(ManualClock::default());
        let (calls, received) = channel();
        let slow = Slow {
            may_block,
            clock: Arc::clone(&clock),
            duration: Mutex::default(),
            calls,
            gate: Mutex::default(),
            fails: AtomicBool::default(),
        };
        let slow = Arc::new(slow);
        let irqs = IrqTable::with(Arc::<Slow>::clone(&slow), Arc::<ManualClock>::clone(&clock));
        Self { clock, slow, irqs, calls: received }
    }

    /// Sets eventfds for the first `count` of three vectors.
    fn assign(&self, count: usize) {
        let eventfd = |_| rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        self.irqs.assign(VFIO_PCI_MSIX_IRQ_INDEX, 0, count, 3, (0..count).map(eventfd).collect()).unwrap();
    }

    fn signals_take(&self, duration: Duration) {
        *self.slow.duration.lock() = duration;
    }

    /// Returns the thread of the next call.
    fn next(&self, call: Call) -> ThreadId {
        let (called, thread) = self.calls.recv_timeout(PATIENCE).unwrap();
        assert_eq!(called, call);
        if thread != here() {
            self.irqs.thread.settle();
        }
        thread
    }

    fn nothing(&self) {
        assert!(self.calls.try_recv().is_err());
    }
}

/// A line that cannot be signalled is not masked: the client would never unmask it.
#[test]
fn a_line_whose_signal_fails_is_signalled_later() {
    let bench = Bench::new(false);
    let eventfd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    bench.irqs.assign(VFIO_PCI_INTX_IRQ_INDEX, 0, 1, 1, vec![eventfd]).unwrap();
    bench.slow.fails.store(true, Ordering::Relaxed);
    bench.irqs.intx(true);
    bench.next(Call::Signal);
    bench.slow.fails.store(false, Ordering::Relaxed);
    bench.irqs.intx(true);
    bench.next(Call::Signal);
    // It is masked now.
    bench.irqs.intx(true);
    bench.nothing();
}

fn here() -> ThreadId {
    thread::current().id()
}

/// The client determines the duration of a signal by the number of waiters of its eventfd.
#[test]
fn after_a_slow_signal_only_the_devices_own_thread_signals() {
    let bench = Bench::new(false);
    bench.assign(3);
    bench.irqs.msix(0);
    assert_eq!(bench.next(Call::Signal), here());

    bench.signals_take(Duration::from_millis(20));
    bench.irqs.msix(0);
    // The first slow signal is not foreseen.
    assert_eq!(bench.next(Call::Signal), here());
    assert_eq!(bench.irqs.counters.interrupts_slow.get(), 1);
    for vector in [0, 1, 2, 0] {
        bench.irqs.msix(vector);
        assert_ne!(bench.next(Call::Signal), here());
    }

    // Signals are short again, but other threads stay away for a minute.
    bench.signals_take(Duration::ZERO);
    let slow = bench.irqs.counters.interrupts_slow.get();
    bench.clock.advance(Duration::from_secs(59));
    bench.irqs.msix(1);
    assert_ne!(bench.next(Call::Signal), here());
    bench.clock.advance(Duration::from_secs(2));
    bench.irqs.msix(1);
    assert_eq!(bench.next(Call::Signal), here());
    assert_eq!(bench.irqs.counters.interrupts_slow.get(), slow);
    assert_eq!(bench.irqs.counters.interrupts_dropped.get(), 0);
}

/// A thread that is preempted in the middle of a signal costs the device little.
#[test]
fn the_absence_is_in_proportion_to_the_signal() {
    let bench = Bench::new(false);
    bench.assign(1);
    bench.signals_take(Duration::from_micros(100));
    bench.irqs.msix(0);
    assert_eq!(bench.next(Call::Signal), here());
    bench.signals_take(Duration::ZERO);
    bench.clock.advance(Duration::from_micros(100) * ABSENCE);
    bench.irqs.msix(0);
    assert_eq!(bench.next(Call::Signal), here());

    bench.signals_take(LONGEST_ABSENCE);
    bench.irqs.msix(0);
    assert_eq!(bench.next(Call::Signal), here());
    bench.clock.advance(LONGEST_ABSENCE);
    bench.signals_take(Duration::ZERO);
    bench.irqs.msix(0);
    assert_eq!(bench.next(Call::Signal), here());
}

#[test]
fn without_asynchronous_operations_only_the_devices_own_thread_signals() {
    let bench = Bench::new(true);
    bench.assign(3);
    for vector in [0, 1, 2] {
        bench.irqs.msix(vector);
        assert_ne!(bench.next(Call::Signal), here());
    }
}

/// A write to an eventfd can wait for the client.
#[test]
fn a_signal_that_blocks_delays_only_the_devices_own_thread() {
    let bench = Bench::new(true);
    bench.assign(3);
    let gate = bench.slow.gate.lock();
    bench.irqs.msix(0);
    let blocked = bench.calls.recv_timeout(PATIENCE).unwrap();
    assert!(blocked.0 == Call::Signal && blocked.1 != here());
    for vector in [1, 2, 1, 2, 1, 2] {
        bench.irqs.msix(vector);
    }
    // Replacing the descriptors does not wait for the signal; the one in use is closed on the thread that uses it.
    bench.assign(3);
    assert_eq!([bench.next(Call::Close), bench.next(Call::Close)], [here(); 2]);
    bench.nothing();
    drop(gate);
    let rest = [bench.next(Call::Close), bench.next(Call::Signal), bench.next(Call::Signal)];
    assert!(rest.iter().all(|&thread| thread != here()));
    assert_eq!(bench.irqs.counters.interrupts_dropped.get(), 0);
}

/// Threads of other devices raise interrupts while the client replaces and removes its descriptors.
#[test]
fn descriptors_are_closed_on_the_devices_own_threads() {
    for may_block in [false, true] {
        let bench = Bench::new(may_block);
        let stop = AtomicBool::new(false);
        let foreign = thread::scope(|scope| {
            let raise = || {
                while !stop.load(Ordering::Relaxed) {
                    (0..3).for_each(|vector| bench.irqs.msix(vector));
                }
            };
            let threads = [scope.spawn(raise), scope.spawn(raise)];
            for round in 0..300 {
                bench.assign(3);
                match round % 3 {
                    0 => bench.irqs.disable(VFIO_PCI_MSIX_IRQ_INDEX),
                    1 => bench.irqs.clear(),
                    _ => {}
                }
            }
            stop.store(true, Ordering::Relaxed);
            threads.map(|thread| thread.thread().id())
        });
        bench.irqs.clear();
        bench.irqs.thread.settle();
        let closed: Vec<_> = bench.calls.try_iter().filter(|(call, _)| *call == Call::Close).collect();
        assert_eq!(closed.len(), 900);
        assert!(closed.iter().all(|(_, thread)| !foreign.contains(thread)));
    }
}

/// Closing a descriptor may block, so no lock is held that a thread needs to raise an interrupt.
#[test]
fn interrupts_are_raised_while_a_descriptor_is_closed() {
    struct Closing(Mutex<Option<Arc<IrqTable>>>);

    impl Eventfds for Closing {
        fn never_block(&self) -> bool {
            true
        }

        fn is_one(&self, _: BorrowedFd<'_>) -> bool {
            true
        }

        fn signal(&self, _: BorrowedFd<'_>) -> bool {
            true
        }

        fn close(&self, _: OwnedFd) {
            let Some(irqs) = self.0.lock().clone() else { return };
            let (done, raised) = channel();
            thread::spawn(move || {
                irqs.msix(0);
                irqs.intx(true);
                done.send(()).unwrap();
            });
            raised.recv_timeout(PATIENCE).unwrap();
        }
    }

    let closing = Arc::new(Closing(Mutex::default()));
    let irqs = Arc::new(IrqTable::with(Arc::<Closing>::clone(&closing), Arc::new(ManualClock::default())));
    *closing.0.lock() = Some(Arc::clone(&irqs));
    let eventfd = || rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    for index in [VFIO_PCI_MSIX_IRQ_INDEX, VFIO_PCI_ERR_IRQ_INDEX, VFIO_PCI_INTX_IRQ_INDEX] {
        let assign = || irqs.assign(index, 0, 1, 1, vec![eventfd()]).unwrap();
        // Replace, remove and clear.
        assign();
        assign();
        irqs.disable(index);
        assign();
        irqs.clear();
    }
    *closing.0.lock() = None;
}

/// A process that hands its client over ends without delivering what is left to a thread.
#[test]
fn interrupts_that_are_left_to_the_thread_can_be_waited_for() {
    let bench = Bench::new(true);
    bench.assign(2);
    assert!(bench.irqs.drain(Duration::ZERO), "there are none");
    let gate = bench.slow.gate.lock();
    bench.irqs.msix(0);
    assert_eq!(bench.calls.recv_timeout(PATIENCE).unwrap().0, Call::Signal);
    assert!(!bench.irqs.drain(Duration::ZERO), "the first is being signalled");
    bench.irqs.msix(1);
    drop(gate);
    assert!(bench.irqs.drain(PATIENCE));
    assert_eq!(bench.calls.try_recv().unwrap().0, Call::Signal);
    bench.nothing();
}
