//! Orders for a hand-over, and their results.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, SyncSender};
use std::time::Duration;

use super::session::End;
use crate::protocol::Upgraded;

/// Result of a hand-over, or the reason why the network was not handed over.
pub(super) type HandOverResult = Result<HandedOver, String>;

/// Result of a hand-over.
#[derive(Debug)]
pub(super) struct HandedOver {
    /// Time during which the guests were not served.
    pub(super) blackout: Duration,
    /// Parts of the old worker's work that have ended with it.
    pub(super) ended: Vec<String>,
}

impl HandedOver {
    /// Returns the result for clients.
    pub(super) fn of(self, network: &str) -> Upgraded {
        let millis = Some(self.millis());
        Upgraded { network: network.to_owned(), millis, ended: self.ended, problem: None }
    }

    /// Milliseconds during which the guests were not served.
    pub(super) fn millis(&self) -> u64 {
        u64::try_from(self.blackout.as_millis()).unwrap_or(u64::MAX)
    }
}

/// Ends of the two sockets with which a worker gives its devices to the worker of another supervisor.
#[derive(Debug)]
pub(super) struct Gift {
    /// Leads to the other worker.
    pub(super) to: OwnedFd,
    /// Carries the permit ([`Request::HandOver`]).
    pub(super) permit: OwnedFd,
}

/// A hand-over that another thread wants.
#[derive(Debug)]
pub(super) enum Wanted {
    /// To a new worker of this supervisor.
    Renew(SyncSender<HandOverResult>),
    /// To a worker of another supervisor.
    Give(Gift, SyncSender<HandOverResult>),
}

impl Wanted {
    /// Tells the other thread that there is no hand-over.
    pub(super) fn refuse(self, problem: &str) {
        let (Self::Renew(done) | Self::Give(_, done)) = self;
        let _ = done.try_send(Err(problem.to_owned()));
    }
}

/// Result of the first start.
pub(super) type FirstStart = Result<(), String>;

/// The ends of the channels of an [`Adopting`](super::process::Adopting) that belong to the thread of the network.
#[derive(Debug)]
pub(super) struct Arrival {
    pub(super) prepared: SyncSender<FirstStart>,
    pub(super) from: Receiver<OwnedFd>,
}

/// Reason why a network was not handed over.
#[derive(Debug)]
pub(super) enum HandOverError {
    /// The worker serves it as before.
    Refused(String),
    /// Its worker has ended.
    Ended(End),
}

impl From<io::Error> for HandOverError {
    fn from(error: io::Error) -> Self {
        Self::Refused(error.to_string())
    }
}
