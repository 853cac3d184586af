//! The destination of a migration. [`source`](super::source) lists the steps.

use std::io::BufReader;

use anyhow::{Context, Error, Result, bail};
use vm_memory::GuestMemoryMmap;

use super::frames::{Kind, Receiver, Sender};
use super::link::Link;
use super::machine::State;
use super::messages::Hello;

/// A machine that arrives.
#[derive(Debug)]
pub(crate) struct Arrival {
    hello: Hello,
    sender: Sender<Link>,
    receiver: Receiver<BufReader<Link>>,
}

impl Arrival {
    /// Reads the description of the machine.
    pub(crate) fn new(link: Link) -> Result<Self> {
        let sender = Sender::new(link.clone())?;
        let mut receiver = Receiver::new(BufReader::new(link))?;
        Ok(Self { hello: receiver.expect(Kind::Hello)?, sender, receiver })
    }

    /// The description.
    pub(crate) const fn hello(&self) -> &Hello {
        &self.hello
    }

    /// Accepts the machine, and reads memory and state.
    pub(crate) fn read(&mut self, memory: &GuestMemoryMmap) -> Result<State> {
        self.sender.last(Kind::Accepted)?;
        State::receive(&self.hello, &mut self.receiver, memory)
    }

    /// Waits for the commit of the source, after which the machine runs only here.
    ///
    /// # Errors
    /// The source has not committed: the machine must not run here.
    pub(crate) fn wait_for_commit(&mut self) -> Result<()> {
        self.sender.last(Kind::Ready)?;
        match self.receiver.next().context("the source has not committed")? {
            (Kind::Commit, _) => Ok(()),
            (other, _) => bail!("the source sends {other:?} in place of a commit"),
        }
    }

    /// Tells the source that the machine runs.
    pub(crate) fn confirm(mut self) {
        // The machine runs, whether or not the source still listens.
        if let Err(error) = self.sender.last(Kind::Running) {
            eprintln!("{}: the source does not know that the machine runs here: {error:#}", self.hello.name);
        }
    }

    /// Tells the source why the machine does not continue here.
    pub(crate) fn refuse(mut self, error: &Error) {
        let reason = format!("{error:#}");
        // The source may be gone, which may be the reason.
        let _ = self.sender.frame(Kind::Refused, &[reason.as_bytes()]);
    }
}
