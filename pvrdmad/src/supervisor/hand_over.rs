//! Hand-over of a network from its worker to a new one, as the supervisor sees it.
//!
//! The two workers exchange the devices by themselves ([`crate::worker`]). The supervisor starts the new worker,
//! connects the two, and decides from their replies which of them serves the network from now on.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Instant;

use log::info;

use super::connection::CallError;
use super::hand_over_order::{Arrival, Gift, HandOverError, HandedOver};
use super::process::Keeper;
use super::session::{End, Session};
use crate::events::Event;
use crate::protocol::{Reply, Request};
use crate::rlimits;

/// Returns the request for the obstacles to a hand-over. A new worker has the limits of this process.
pub(super) fn check_request() -> Request {
    Request::CheckHandOver { lockable: rlimits::lockable() }
}

impl Keeper {
    /// Starts a worker and makes it serve. Returns its session, and the reason if it does not serve.
    pub(super) fn begin(&mut self) -> Result<(Session, Result<(), End>), End> {
        if let Some(arrival) = self.arrival.take() {
            return self.arrive(&arrival);
        }
        let (mut session, upcalls) = self.start(&self.program.path)?;
        let begun = self.set_up(&mut session, upcalls);
        Ok((session, begun))
    }

    /// Hands the network over to a new worker, whose session replaces `session`.
    pub(super) fn hand_over(&self, session: &mut Session) -> Result<HandedOver, HandOverError> {
        self.check(session)?;
        let program = self.program.installed.as_deref().unwrap_or(&self.program.path);
        let mut next = self.prepare(program).map_err(|end| HandOverError::Refused(format!("the new worker {end}")))?;
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
        let keepers = &self.plan.services.keepers;
        keepers.begin_hand_over();
        let taken = self.call(&mut next, Request::TakeOver {}, &[taker.into()]);
        let given = session.wait(&given, &self.stop, self.plan.timing.hung);
        // If the taker has nothing and the giver has not reported that it gave its devices, the clients are still at
        // the keepers of the giver.
        keepers.end_hand_over(taken.is_ok() || matches!(given, Ok(Some(Reply::Given { .. }))));
        match (given, taken) {
            (given, Ok(())) => {
                let done = HandedOver { blackout: began.elapsed(), ended: given.map(ended).unwrap_or_default() };
                let pid = next.pid();
                let giver = std::mem::replace(session, next);
                giver.end(self.plan.timing.stop, self.plan.timing.kill);
                // Log: caused only by clients of the control socket.
                info!("network {}: process {pid} has taken it over", self.plan.name());
                let (network, millis) = (self.plan.name().to_owned(), done.millis());
                self.plan.services.events.tell(&Event::NetworkHandedOver { network, millis });
                Ok(done)
            }
            // The giver's reply says more than the end of its connection to the taker.
            (Ok(Some(Reply::Error(problem))), Err(End::Refused(refused))) => {
                let problem = if problem.contains(&refused) { problem } else { format!("{problem} ({refused})") };
                Err(HandOverError::Refused(problem))
            }
            (Ok(Some(Reply::Error(problem))), Err(end)) => {
                Err(HandOverError::Refused(format!("the new worker {end}: {problem}")))
            }
            // Neither the giver nor the taker serves now.
            (Ok(Some(_)), Err(end)) => Err(HandOverError::Ended(end)),
            (Ok(None), Err(_)) => Err(HandOverError::Ended(End::Stopped)),
            (Err(end), Err(_)) => Err(HandOverError::Ended(end)),
        }
    }

    /// Gives the devices to the worker of another supervisor, once that is permitted.
    pub(super) fn give_to(&self, session: &mut Session, gift: &Gift) -> Result<HandedOver, HandOverError> {
        let began = Instant::now();
        let fds = [gift.to.as_fd(), gift.permit.as_fd()];
        let given = match session.connection().ask(Request::HandOver {}, &fds, 0) {
            Ok(given) => given,
            Err(error @ CallError::Unresponsive) => return Err(HandOverError::Refused(error.to_string())),
            // `run` finds out how it ended.
            Err(CallError::Gone | CallError::Ended) => return Err(HandOverError::Refused("it ended".to_owned())),
        };
        match session.wait(&given, &self.stop, self.plan.timing.hung) {
            Ok(Some(Reply::Error(problem))) => Err(HandOverError::Refused(problem)),
            Ok(given @ Some(_)) => Ok(HandedOver { blackout: began.elapsed(), ended: ended(given) }),
            Ok(None) => Err(HandOverError::Ended(End::Stopped)),
            Err(end) => Err(HandOverError::Ended(end)),
        }
    }

    /// Checks that nothing known prevents a hand-over.
    fn check(&self, session: &mut Session) -> Result<(), HandOverError> {
        let asked = session.connection().ask(check_request(), &[], 0);
        let asked = asked.map_err(|error| HandOverError::Refused(error.to_string()))?;
        match session.wait(&asked, &self.stop, self.plan.timing.hung) {
            Ok(Some(Reply::Obstacles(obstacles))) if obstacles.is_empty() => Ok(()),
            Ok(Some(Reply::Obstacles(obstacles))) => Err(HandOverError::Refused(obstacles.join("; "))),
            Ok(Some(Reply::Error(problem))) => Err(HandOverError::Refused(problem)),
            Ok(Some(_)) => Err(HandOverError::Refused("its worker's reply is not understood".to_owned())),
            Ok(None) => Err(HandOverError::Ended(End::Stopped)),
            Err(end) => Err(HandOverError::Ended(end)),
        }
    }

    /// Starts a worker that takes the devices from the worker of another supervisor. Returns its session, and the
    /// reason if it has not got them.
    pub(super) fn arrive(&self, arrival: &Arrival) -> Result<(Session, Result<(), End>), End> {
        let prepared = self.prepare(&self.program.path);
        let told = prepared.as_ref().map(|_| ()).map_err(|end| match end {
            End::Refused(problem) => problem.clone(),
            end => format!("the new worker {end}"),
        });
        let _ = arrival.prepared.try_send(told);
        let mut session = prepared?;
        // The sender is dropped if the other supervisor keeps the network.
        let Ok(from) = arrival.from.recv() else { return Ok((session, Err(End::Stopped))) };
        let taken = self.call(&mut session, Request::TakeOver {}, &[from]);
        if taken.is_ok() {
            self.plan.stand_ins.adopted();
            self.serves(&session);
        }
        Ok((session, taken))
    }

    /// Starts a worker of this program and describes the network and its devices to it.
    fn prepare(&self, program: &Path) -> Result<Session, End> {
        let (mut next, upcalls) = self.start(program)?;
        let mut set = self.greet(&mut next, upcalls)?;
        self.give_settings(&mut next, &mut set)?;
        for planned in self.plan.devices() {
            // Removed meanwhile.
            let Some((request, fds)) = planned.expectation()? else { continue };
            self.give_device(&mut next, planned.name(), request, &fds)?;
        }
        Ok(next)
    }
}

/// Returns the parts of a worker's work that end with it, from its reply to a hand-over. Workers of older versions do
/// not name them.
fn ended(given: Option<Reply>) -> Vec<String> {
    match given {
        Some(Reply::Given { ended }) => ended,
        _ => Vec::new(),
    }
}
