//! Tests of the reaction of the thread to interface states, and of its read rate.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc::{Receiver, Sender, channel};

use parking_lot::Mutex;

use super::super::timing::Rate;
use super::*;

const PATIENCE: Duration = Duration::from_secs(20);
const UP: InterfaceState = InterfaceState::Up { mtu: 1500 };
const CUT: InterfaceState = InterfaceState::NoCarrier { mtu: 1500 };

/// A fake interface whose state the test sets.
struct Fake {
    hints: OwnedFd,
    seen: Arc<Mutex<VecDeque<io::Result<InterfaceState>>>>,
    looks: Sender<()>,
}

impl Watched for Fake {
    type Seen = InterfaceState;

    fn hints(&self) -> BorrowedFd<'_> {
        self.hints.as_fd()
    }

    fn look(&mut self) -> io::Result<InterfaceState> {
        // The hint is cleared first: a hint that the test sends after it was told of this read is meant for another
        // read.
        rustix::io::read(&self.hints, &mut [0_u8; 8]).unwrap_or_default();
        let state = self.seen.lock().pop_front().unwrap_or(Ok(UP));
        let _ = self.looks.send(());
        state
    }
}

/// A receiver that records reports and refuses a given number of them.
struct Heard {
    told: Sender<Result<InterfaceState, String>>,
    refuse: Mutex<u32>,
}

impl Tell for Heard {
    type Seen = InterfaceState;

    fn tell(&self, state: InterfaceState) -> bool {
        let _ = self.told.send(Ok(state));
        let mut refuse = self.refuse.lock();
        let takes = *refuse == 0;
        *refuse = refuse.saturating_sub(1);
        takes
    }

    fn blind(&self, error: &io::Error) {
        let _ = self.told.send(Err(error.to_string()));
    }
}

struct Bench {
    hint: OwnedFd,
    seen: Arc<Mutex<VecDeque<io::Result<InterfaceState>>>>,
    looks: Receiver<()>,
    told: Receiver<Result<InterfaceState, String>>,
    follower: Follower,
}

impl Bench {
    /// Starts a thread that knows of an interface that is up.
    fn start(rate: Rate, refuse: u32) -> Self {
        let hints = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let hint = hints.try_clone().unwrap();
        let seen = Arc::<Mutex<VecDeque<_>>>::default();
        let ((looked, looks), (tell, told)) = (channel(), channel());
        let fake = Fake { hints, seen: Arc::clone(&seen), looks: looked };
        let heard = Heard { told: tell, refuse: Mutex::new(refuse) };
        let looks_left = Budget::new(rate, Instant::now());
        let follower = Follower::spawn("n", fake, looks_left, Some(UP), heard).unwrap();
        Self { hint, seen, looks, told, follower }
    }

    fn hint(&self) {
        rustix::io::write(&self.hint, &1u64.to_ne_bytes()).unwrap();
    }

    /// Sets the states that the next reads return, and sends one hint.
    fn see(&self, states: impl IntoIterator<Item = io::Result<InterfaceState>>) {
        self.seen.lock().extend(states);
        self.hint();
        self.looks.recv_timeout(PATIENCE).unwrap();
    }

    fn told(&self) -> Result<InterfaceState, String> {
        self.told.recv_timeout(PATIENCE).unwrap()
    }
}

fn unlimited() -> Rate {
    Rate { burst: 1000, each: Duration::from_nanos(1) }
}

#[test]
fn only_changes_are_reported() {
    let bench = Bench::start(unlimited(), 0);
    for state in [UP, UP, CUT, CUT, InterfaceState::Absent, UP, UP] {
        bench.see([Ok(state)]);
    }
    assert_eq!([(); 3].map(|()| bench.told()), [Ok(CUT), Ok(InterfaceState::Absent), Ok(UP)]);
    // Once the thread has ended, there was no other report.
    drop(bench.follower);
    assert!(bench.told.recv().is_err());
}

/// A report that the worker refuses, and an interface that cannot be read for a while, are tried again without a hint.
#[test]
fn failures_are_retried() {
    let bench = Bench::start(unlimited(), 1);
    bench.see([Ok(CUT), Ok(CUT)]);
    assert_eq!([(); 2].map(|()| bench.told()), [Ok(CUT), Ok(CUT)]);
    let failure = || Err(io::Error::other("no"));
    // In between the interface came back unchanged, so no report is needed.
    bench.see([failure(), failure(), Ok(UP)]);
    assert_eq!([(); 2].map(|()| bench.told()), [Err("no".to_owned()), Ok(UP)], "once is enough");
}

/// A worker that got a state and did not confirm it may have applied it: the earlier state is reported again when the
/// interface returns to it.
#[test]
fn a_state_without_a_confirmation_is_reported_again() {
    let bench = Bench::start(unlimited(), 1);
    bench.see([Ok(CUT), Ok(UP)]);
    assert_eq!([(); 2].map(|()| bench.told()), [Ok(CUT), Ok(UP)]);
}

/// Attack: this interface, or another one of the host, changes its state without end.
#[test]
fn the_rate_of_carrier_checks_is_limited() {
    let forever = Duration::from_secs(100_000);
    let bench = Bench::start(Rate { burst: 3, each: forever }, 0);
    for state in [CUT, UP, CUT] {
        bench.see([Ok(state)]);
    }
    bench.seen.lock().push_back(Ok(UP));
    for _ in 0..1000 {
        bench.hint();
    }
    // The thread ends at once nevertheless, and has not read the state again.
    drop(bench.follower);
    assert!(bench.looks.recv().is_err());
    assert_eq!(bench.told.iter().collect::<Vec<_>>(), [Ok(CUT), Ok(UP), Ok(CUT)]);
}
