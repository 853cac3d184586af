//! Hand-over of a network from its worker to a new one, as the supervisor sees it.
//!
//! The two workers exchange the devices by themselves ([`crate::worker`]). The supervisor starts the new worker,
//! connects the two, and decides from their replies which of them serves the network from now on.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use log::info;

use super::connection::CallError;
use super::process::Keeper;
use super::session::{End, Session};
use crate::events::Event;
use crate::protocol::{Reply, Request};

/// Time during which the guests were not served, or the reason why the network was not handed over.
pub(super) type HandOverResult = Result<Duration, String>;

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

impl Keeper {
    /// Hands the network over to a new worker, whose session replaces `session`. Returns how long the guests were not
    /// served.
    pub(super) fn hand_over(&self, session: &mut Session) -> Result<Duration, HandOverError> {
        let mut next = self.prepare().map_err(|end| HandOverError::Refused(format!("the new worker {end}")))?;
        self.plan.services.keepers.renew_budgets();
        let began = Instant::now();
        let (giver, taker) = UnixStream::pair()?;
        let given = match session.connection().ask(Request::HandOver {}, &[giver.as_fd()], 0) {
            Ok(given) => given,
            Err(error @ CallError::Unresponsive) => return Err(HandOverError::Refused(error.to_string())),
            // `run` finds out how it ended.
            Err(CallError::Gone | CallError::Ended) => return Err(HandOverError::Refused("it ended".to_owned())),
        };
        drop(giver);
        let taken = self.call(&mut next, Request::TakeOver {}, &[taker.into()]);
        let given = session.wait(&given, &self.stop, self.plan.timing.hung);
        match (given, taken) {
            (_, Ok(())) => {
                let blackout = began.elapsed();
                let pid = next.pid();
                let giver = std::mem::replace(session, next);
                giver.end(self.plan.timing.stop, self.plan.timing.kill);
                // Log: caused only by clients of the control socket.
                info!("network {}: process {pid} has taken it over", self.plan.name());
                let (network, millis) = (self.plan.name().to_owned(), blackout.as_millis());
                let millis = u64::try_from(millis).unwrap_or(u64::MAX);
                self.plan.services.events.tell(&Event::NetworkHandedOver { network, millis });
                Ok(blackout)
            }
            // The giver's reply says more than the end of its connection to the taker.
            (Ok(Some(Reply::Error(problem))), Err(End::Refused(refused))) => {
                let problem = if problem.contains(&refused) { problem } else { format!("{problem} ({refused})") };
                Err(HandOverError::Refused(problem))
            }
            (Ok(Some(Reply::Error(problem))), Err(end)) => {
                Err(HandOverError::Refused(format!("the new worker {end}: {problem}")))
            }
            // The giver serves nothing any more, and the taker serves nothing either.
            (Ok(Some(_)), Err(end)) => Err(HandOverError::Ended(end)),
            (Ok(None), Err(_)) => Err(HandOverError::Ended(End::Stopped)),
            (Err(end), Err(_)) => Err(HandOverError::Ended(end)),
        }
    }

    /// Starts a worker of the installed program and describes the network and its devices to it.
    fn prepare(&self) -> Result<Session, End> {
        let program = self.program.installed.as_deref().unwrap_or(&self.program.path);
        let (mut next, upcalls) = self.start(program)?;
        let mut set = self.greet(&mut next, upcalls)?;
        self.give_settings(&mut next, &mut set)?;
        self.give(&mut next, &mut Vec::new(), |request| match request {
            Request::Serve { device, link, doorbells, kept: _ } => Request::Expect { device, link, doorbells },
            request => request,
        })?;
        Ok(next)
    }
}
