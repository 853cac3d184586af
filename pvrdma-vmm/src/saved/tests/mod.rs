//! Migrations between two ends in this process, over a proxy that can stop them at each frame.

mod hostile;
mod proxy;

use std::collections::VecDeque;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::Result;
use parking_lot::Mutex;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use self::proxy::{Action, Proxy};
use super::destination::Arrival;
use super::dirty::{Dirty, PAGE, WriteLog};
use super::frames::Kind;
use super::link::{Cancel, Link};
use super::machine::State;
use super::messages::Hello;
use super::source::{Round, STANDSTILL, Source};

const MEMORY: u64 = 8 << 20;
const LONG: Duration = Duration::from_secs(60);

fn hello() -> Hello {
    Hello { name: "a".to_owned(), memory: MEMORY, ..Hello::default() }
}

/// A guest that writes to these pages before each look at the log.
struct Guest {
    memory: GuestMemoryMmap,
    writes: Mutex<VecDeque<u64>>,
    /// Held as long as writes are logged.
    _logged: Arc<()>,
}

impl WriteLog for Guest {
    fn take(&self) -> Result<Dirty> {
        let (mut written, mut writes) = (Dirty::none_of(&self.memory), self.writes.lock());
        let pages = writes.pop_front().unwrap_or(0);
        for address in (0..pages).map(|page| page * PAGE as u64) {
            let before: u64 = self.memory.read_obj(GuestAddress(address))?;
            self.memory.write_obj(before.wrapping_add(pages), GuestAddress(address))?;
        }
        written.add_range(0, pages * PAGE as u64);
        Ok(written)
    }
}

/// Result at the source.
#[derive(Debug)]
enum AtSource {
    Stays(String),
    Moved,
    Unknown(String),
}

/// Moves a machine whose guest writes to these numbers of pages.
struct Move {
    writes: Vec<u64>,
    memory: GuestMemoryMmap,
    rounds: Arc<Mutex<Vec<Round>>>,
    logged: Arc<()>,
    cancel: Arc<Cancel>,
}

impl Move {
    fn new(writes: &[u64]) -> Self {
        let memory = crate::memory::allocate(MEMORY).unwrap();
        memory.write_obj(0x55_u8, GuestAddress(5 << 20)).unwrap();
        memory.write_obj(0xaa_u8, GuestAddress(0)).unwrap();
        let (rounds, logged, cancel) = (Arc::default(), Arc::default(), Arc::default());
        Self { writes: writes.to_vec(), memory, rounds, logged, cancel }
    }

    fn source(&self, link: Link) -> AtSource {
        let guest = Guest {
            memory: self.memory.clone(),
            writes: Mutex::new(self.writes.iter().copied().collect()),
            _logged: Arc::clone(&self.logged),
        };
        let rounds = Arc::clone(&self.rounds);
        let copied = Source::copy(link, &hello(), &self.memory, || Ok(guest), move |round| rounds.lock().push(round));
        match copied.and_then(|source| source.finish(&self.memory, &State::default())) {
            Err(error) => AtSource::Stays(format!("{error:#}")),
            Ok(committed) => match committed.wait() {
                Ok(()) => AtSource::Moved,
                Err(error) => AtSource::Unknown(format!("{error:#}")),
            },
        }
    }

    fn link(&self, stream: UnixStream) -> Link {
        self.cancel.begin();
        Link::new(stream, LONG, Arc::clone(&self.cancel)).unwrap()
    }

    /// Runs both ends with a proxy in between. Returns both results, and the frames that have passed.
    fn run(&self, action: Action) -> (AtSource, Result<GuestMemoryMmap>, Vec<Kind>) {
        let (proxy, source, destination) = Proxy::between(action, Arc::clone(&self.cancel));
        let arrived = thread::spawn(move || arrive(Link::new(destination, LONG, Arc::default()).unwrap()));
        let left = self.source(self.link(source));
        assert_eq!(Arc::strong_count(&self.logged), 1, "the log has ended");
        let arrived = arrived.join().unwrap();
        (left, arrived, proxy.frames())
    }
}

/// Receives a machine, and returns its memory when it runs.
fn arrive(link: Link) -> Result<GuestMemoryMmap> {
    let memory = crate::memory::allocate(MEMORY).unwrap();
    let mut arrival = Arrival::new(link)?;
    assert_eq!(arrival.hello(), &hello());
    let result = arrival.read(&memory).and_then(|_| arrival.wait_for_commit());
    match &result {
        Ok(()) => arrival.confirm(),
        Err(error) => arrival.refuse(error),
    }
    result.map(|()| memory)
}

fn is_equal(a: &GuestMemoryMmap, b: &GuestMemoryMmap) -> bool {
    let [a, b] = [a, b].map(|memory| {
        let mut bytes = vec![0; usize::try_from(MEMORY).unwrap()];
        memory.read_slice(&mut bytes, GuestAddress(0)).unwrap();
        bytes
    });
    a == b
}

#[test]
fn rounds_end_when_few_pages_are_left() {
    let test = Move::new(&[1500, 1100, 5, 3]);
    let (left, arrived, frames) = test.run(Action::Pass);
    assert!(matches!(left, AtSource::Moved), "{left:?}");
    assert!(is_equal(&test.memory, &arrived.unwrap()));
    let page = PAGE as u64;
    let round = |number, pages, all| Round { number, pages, bytes: all * page };
    assert_eq!(*test.rounds.lock(), [round(1, 2, 2), round(2, 1500, 1502), round(3, 1100, 2602), round(4, 5, 2607)]);
    let answers = [Kind::Accepted, Kind::Ready, Kind::Commit, Kind::Running];
    let talk: Vec<_> = frames.iter().copied().filter(|kind| answers.contains(kind)).collect();
    assert_eq!(talk, answers);
    assert_eq!((frames.first(), frames.last()), (Some(&Kind::Hello), Some(&Kind::Running)));
}

#[test]
fn a_guest_that_writes_all_the_time_is_moved_after_some_rounds() {
    let test = Move::new(&[1200; 100]);
    let (left, arrived, _) = test.run(Action::Pass);
    assert!(matches!(left, AtSource::Moved), "{left:?}");
    assert!(is_equal(&test.memory, &arrived.unwrap()));
    let rounds = test.rounds.lock();
    assert_eq!(rounds.iter().map(|round| round.number).collect::<Vec<_>>(), (1..=31).collect::<Vec<_>>());
    assert!(rounds[1..].iter().all(|round| round.pages == 1200), "{rounds:?}");
}

/// The machine does not stand still for as long as a migration may take.
#[test]
fn the_time_of_a_stopped_machine_is_limited() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let test = Move::new(&[]);
    let link = Link::new(ours, STANDSTILL * 1000, Arc::clone(&test.cancel)).unwrap();
    let destination = thread::spawn(move || {
        let mut arrival = Arrival::new(Link::new(theirs, LONG, Arc::default()).unwrap()).unwrap();
        arrival.read(&crate::memory::allocate(MEMORY).unwrap()).unwrap();
    });
    let left = test.source(link.clone());
    destination.join().unwrap();
    assert!(matches!(left, AtSource::Stays(_)), "{left:?}");
    assert!(link.left() <= STANDSTILL);
}

/// Frames of a migration, in their order.
fn all_frames() -> Vec<Kind> {
    Move::new(&[1500]).run(Action::Pass).2
}

/// The end of a process looks like the end of the connection to the other process.
#[test]
fn a_connection_that_ends_at_any_step_leaves_at_most_one_machine() {
    let frames = all_frames();
    for (index, kind) in frames.iter().enumerate() {
        let test = Move::new(&[1500]);
        let (left, arrived, passed) = test.run(Action::EndAt(index));
        assert_eq!(passed, frames[..index], "{kind:?}");
        match (kind, left, arrived) {
            (Kind::Commit, AtSource::Unknown(error), Err(_)) => assert!(error.contains("no answer"), "{error}"),
            (Kind::Running, AtSource::Unknown(_), Ok(memory)) => assert!(is_equal(&test.memory, &memory)),
            (kind, AtSource::Stays(_), Err(_)) if !matches!(kind, Kind::Commit | Kind::Running) => {}
            (kind, left, arrived) => panic!("{index}: {kind:?}: {left:?}, runs there: {}", arrived.is_ok()),
        }
    }
}

#[test]
fn a_migration_is_cancelled_at_any_step_before_the_commit() {
    let frames = all_frames();
    for (index, kind) in frames.iter().enumerate() {
        let test = Move::new(&[1500]);
        match (kind, test.run(Action::CancelAt(index))) {
            (Kind::Commit | Kind::Running, (AtSource::Moved, Ok(_), _)) => {}
            (kind, (AtSource::Stays(error), Err(_), _)) if !matches!(kind, Kind::Commit | Kind::Running) => {
                assert!(error.contains("cancelled"), "{kind:?}: {error}");
            }
            (kind, (left, arrived, _)) => panic!("{index}: {kind:?}: {left:?}, runs there: {}", arrived.is_ok()),
        }
        // The next attempt succeeds with the state that the failed one has left.
        assert!(matches!(test.run(Action::Pass), (AtSource::Moved, Ok(_), _)), "{kind:?}");
    }
}
