//! The source of a migration: copies memory beside the running machine, then the rest of the stopped one.
//!
//! | step | sent | answered by |
//! | --- | --- | --- |
//! | 1 | hello | `Accepted`, or `Refused` with the reason |
//! | 2 | all memory, then in rounds the pages that were written meanwhile | |
//! | 3 | the machine has stopped: the last pages, its state, `End` | `Ready` |
//! | 4 | `Commit` | `Running` |
//!
//! The machine runs here until step 4, and continues here after an error before it. It runs at the destination only
//! after a commit. So it never runs twice: if the commit or the answer to it is lost, it may run nowhere.

use std::io::{self, ErrorKind};
use std::time::Duration;

use anyhow::{Context, Error, Result, anyhow, bail};
use vm_memory::GuestMemoryMmap;

use super::dirty::{Dirty, PAGE, WriteLog};
use super::frames::{Kind, Receiver, Sender};
use super::link::Link;
use super::machine::State;
use super::messages::Hello;
use super::pages;

/// Maximum number of pages that are left for the time in which the machine stands still, unless [`MAX_ROUNDS`] is
/// reached first.
const FEW: u64 = 1024;
/// Maximum number of rounds beside the running machine. A guest may write faster than pages are copied.
const MAX_ROUNDS: u32 = 30;
/// Maximum time to send the rest of a stopped machine, and again for the answer to its commit. Peers keep connections
/// of the guest for a minute.
pub(super) const STANDSTILL: Duration = Duration::from_secs(30);

/// Progress of a migration.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Round {
    pub(crate) number: u32,
    /// Pages sent in this round.
    pub(crate) pages: u64,
    /// Bytes of pages sent in all rounds.
    pub(crate) bytes: u64,
}

/// A migration whose destination has most of the memory of a running machine.
pub(crate) struct Source<L> {
    talk: Talk,
    log: L,
    /// Pages that were written after they had been sent.
    left: Dirty,
    progress: Progress,
}

/// A source that has given its machine up.
#[derive(Debug)]
pub(crate) struct Committed(Talk);

/// Both directions of the connection.
#[derive(Debug)]
struct Talk {
    link: Link,
    sender: Sender<Link>,
    receiver: Receiver<Link>,
}

impl Talk {
    /// Introduces the machine, and waits until the destination expects its memory.
    fn begin(link: Link, hello: &Hello) -> Result<Self> {
        let mut sender = Sender::new(link.clone())?;
        sender.message(Kind::Hello, hello)?;
        let mut talk = Self { receiver: Receiver::new(link.clone())?, sender, link };
        talk.expect(Kind::Accepted)?;
        Ok(talk)
    }

    /// Waits for an answer.
    fn expect(&mut self, expected: Kind) -> Result<()> {
        match self.receiver.next().context("no answer of the destination")? {
            (kind, _) if kind == expected => Ok(()),
            (Kind::Refused, reason) => bail!("the destination refuses: {}", readable(reason)),
            (other, _) => bail!("the destination answers {other:?} in place of {expected:?}"),
        }
    }

    /// Sends a part. If the destination has closed the connection, its reason is the error.
    fn send<T>(&mut self, part: impl FnOnce(&mut Sender<Link>) -> Result<T>) -> Result<T> {
        let closed = match part(&mut self.sender) {
            Err(error) if is_closed(&error) => error,
            result => return result,
        };
        match self.receiver.next() {
            Ok((Kind::Refused, reason)) => Err(anyhow!("the destination refuses: {}", readable(reason))),
            _ => Err(closed),
        }
    }
}

/// Returns a reason without control characters, of bounded length.
fn readable(reason: &[u8]) -> String {
    let text = String::from_utf8_lossy(reason);
    text.chars().filter(|letter| !letter.is_control()).take(500).collect()
}

fn is_closed(error: &Error) -> bool {
    let io = error.chain().find_map(|cause| cause.downcast_ref::<io::Error>());
    io.is_some_and(|error| matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset))
}

/// Counts the pages that were sent, and reports each round.
struct Progress {
    last: Round,
    report: Box<dyn FnMut(Round) + Send>,
}

impl Progress {
    fn sent(&mut self, pages: u64) {
        let Round { number, bytes, .. } = self.last;
        let bytes = bytes.saturating_add(pages.saturating_mul(PAGE as u64));
        self.last = Round { number: number.saturating_add(1), pages, bytes };
        (self.report)(self.last);
    }
}

impl<L: WriteLog> Source<L> {
    /// Sends memory beside the running machine, until few pages are left or there were many rounds. `start` starts the
    /// log of written pages, which ends when it is dropped.
    ///
    /// # Errors
    /// The destination refuses the machine or is gone, or the migration was cancelled or took too long. The machine has
    /// not noticed anything.
    pub(crate) fn copy(
        link: Link,
        hello: &Hello,
        memory: &GuestMemoryMmap,
        start: impl FnOnce() -> Result<L>,
        report: impl FnMut(Round) + Send + 'static,
    ) -> Result<Self> {
        let mut talk = Talk::begin(link, hello)?;
        let log = start()?;
        let last = Round { number: 0, pages: 0, bytes: 0 };
        let mut progress = Progress { last, report: Box::new(report) };
        progress.sent(talk.send(|to| pages::send_all(memory, to))?);
        loop {
            let left = log.take()?;
            if left.pages() <= FEW || progress.last.number >= MAX_ROUNDS {
                return Ok(Self { talk, log, left, progress });
            }
            progress.sent(talk.send(|to| pages::send_written(memory, &left, to))?);
        }
    }

    /// Sends the rest of a machine that has stopped, and commits.
    ///
    /// # Errors
    /// The machine has not moved, and can continue here.
    pub(crate) fn finish(mut self, memory: &GuestMemoryMmap, state: &State) -> Result<Committed> {
        let Self { talk, log, left, progress } = &mut self;
        talk.link.limit(STANDSTILL);
        left.add(&log.take()?);
        progress.sent(talk.send(|to| pages::send_written(memory, left, to))?);
        talk.send(|to| {
            state.send(to)?;
            to.last(Kind::End)
        })?;
        talk.expect(Kind::Ready)?;
        talk.link.commit(STANDSTILL)?;
        // The link has no buffer: these few bytes are written now or, after an error, never.
        talk.sender.last(Kind::Commit)?;
        Ok(Committed(self.talk))
    }
}

impl Committed {
    /// Waits until the machine runs at the destination.
    ///
    /// # Errors
    /// It is not known whether it does.
    pub(crate) fn wait(mut self) -> Result<()> {
        self.0.expect(Kind::Running)
    }
}
