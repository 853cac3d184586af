//! What changes in a network while it runs.
//!
//! The plan is what counts: every worker to come gets what is planned. A device is planned once the worker that serves
//! has taken it, so that no worker fails at its start because of it. What ends or changes does so in the plan first; a
//! worker that does not say that it has followed, follows when it goes on, or is replaced by one that has.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use pvrdma_dev::LimitStatus;

use super::connection::{CallError, Connection, reply_by};
use super::network::{Network, Runs};
use super::plan::Planned;
use super::process::Process;
use super::sockets::Sources;
use super::stand_in::StandIns;
use crate::config::{BackendSpec, Device, FaultWord, LinkState, change_share};
use crate::logging::LogFilter;
use crate::protocol::{Reply, Request};

/// What became of a device that is not planned any more.
pub(super) enum Removed {
    /// Nothing of it is left.
    Ended,
    /// Its worker has not said that. What it has of it ends when it goes on, or ends itself.
    Open(String),
}

impl Network {
    /// Serves one more device.
    ///
    /// # Errors
    /// It cannot be had, or its worker does not take it in time. Nothing is left behind then.
    pub(super) fn add(&self, device: Device, sources: &Sources) -> Result<(), String> {
        let deadline = self.call_deadline();
        let _turn = self.turn(deadline)?;
        self.plan.admits(&device)?;
        self.plan.can_promise(&device.config.name, device.share)?;
        let doorbells = sources.doorbells.decide(&device, &self.plan.setup.backend);
        let planned =
            doorbells.and_then(|doorbells| Planned::new(device, self.plan.setup.network.vlan, doorbells, sources));
        let planned = Arc::new(planned.map_err(|error| format!("{error:#}"))?);
        // Both before the worker has it, and may send, receive and ask for its links.
        self.plan.services.add(planned.name(), planned.connector());
        let wired = self.plan.wire(Some(planned.device.config.mac)).map_err(|error| format!("uplink: {error}"));
        let added = wired.and_then(|()| match &*self.runs {
            Runs::Here(worker) => {
                let (request, fds) = descriptors(&planned, &self.plan.stand_ins)?;
                done(worker.handle(request, fds))?;
                self.plan.push(Arc::clone(&planned));
                Ok(())
            }
            Runs::Process(process) => self.add_to_process(process, &planned, deadline),
        });
        if added.is_err() {
            self.forget(&planned);
        }
        added
    }

    /// Has the worker that serves take a device, and plans it.
    fn add_to_process(&self, process: &Process, planned: &Arc<Planned>, deadline: Instant) -> Result<(), String> {
        // A worker that ends with the request was at its end already, most likely. If the next one does as well, it is
        // the device.
        let mut lost = None;
        loop {
            let connection = process.wait_serving(lost.as_ref(), deadline).map_err(|error| self.failure(error))?;
            let (request, fds) = descriptors(planned, &self.plan.stand_ins)?;
            let asked = process.ask_one(&connection, request, &fds);
            drop(fds);
            match asked.and_then(|reply| reply_by(&reply, deadline)) {
                Ok(reply) => done(reply)?,
                Err(CallError::Gone | CallError::Ended) if lost.is_none() => {
                    lost = Some(connection);
                    continue;
                }
                Err(CallError::Unresponsive) => {
                    take_back(process, &connection, planned.name());
                    return Err(self.failure(CallError::Unresponsive));
                }
                Err(error @ (CallError::Gone | CallError::Ended)) => return Err(self.failure(error)),
            }
            // It may have ended since, and the next one started without the device.
            if process.while_serving(&connection, || self.plan.push(Arc::clone(planned))) {
                return Ok(());
            }
        }
    }

    /// Ends a device: from now on it is not planned any more, and its sockets are gone.
    ///
    /// # Errors
    /// There is no such device, or another change does not come to its end.
    pub(super) fn remove(&self, device: &str) -> Result<Removed, String> {
        let deadline = self.call_deadline();
        let _turn = self.turn(deadline)?;
        let Some(planned) = self.plan.take(device) else { return Err(format!("there is no device '{device}'")) };
        let told = self.tell(Request::RemoveDevice { device: device.to_owned() }, deadline);
        self.forget(&planned);
        Ok(told.map_or_else(Removed::Open, |()| Removed::Ended))
    }

    /// Takes the link of a device up or down.
    ///
    /// # Errors
    /// There is no such device, its link is not its own, or its worker does not say in time that it has followed.
    pub(super) fn link(&self, device: &str, state: LinkState) -> Result<(), String> {
        let deadline = self.call_deadline();
        let _turn = self.turn(deadline)?;
        if self.plan.setup.backend != BackendSpec::Rxe {
            return Err("the link is that of the host's adapter, which other devices use as well".to_owned());
        }
        self.plan.replace(device, |planned| Ok(planned.with_link(state)))?;
        self.follow(Request::Link { device: device.to_owned(), state }, deadline)
    }

    /// Sets limits of a device, and says what they are.
    ///
    /// # Errors
    /// There is no such device or limit, a limit cannot have its value, or the worker does not say in time what they
    /// are. In the last case they are set all the same.
    pub(super) fn limits(&self, device: &str, set: BTreeMap<String, u64>) -> Result<Vec<LimitStatus>, String> {
        let deadline = self.call_deadline();
        let _turn = self.turn(deadline)?;
        if !set.is_empty() {
            self.plan.replace(device, |planned| planned.with_limits(&set))?;
        }
        match self.runs.ask(Request::Limits { device: device.to_owned(), set }, deadline) {
            Ok(Reply::Limits(limits)) => Ok(limits),
            Ok(Reply::Error(problem)) => Err(problem),
            Ok(_) => Err("its worker's reply is not understood".to_owned()),
            Err(error) => Err(format!("{}: the limits are set, and it follows", self.failure(error))),
        }
    }

    /// Sets what a device may use of what it shares with others, and says what that is.
    ///
    /// # Errors
    /// There is no such device or key, the values do not go together or are more than the network carries, or the
    /// worker does not say in time what they are. In the last case they are set all the same.
    pub(super) fn share(
        &self,
        device: &str,
        set: BTreeMap<String, String>,
    ) -> Result<BTreeMap<String, String>, String> {
        let deadline = self.call_deadline();
        let _turn = self.turn(deadline)?;
        if self.plan.setup.backend != BackendSpec::Rxe {
            return Err("the host's adapter shares itself out".to_owned());
        }
        if !set.is_empty() {
            let share = self.plan.share(device).and_then(|share| change_share(share, &set))?;
            self.plan.can_promise(device, share)?;
            self.plan.replace(device, |planned| Ok(planned.with_share(share)))?;
        }
        match self.runs.ask(Request::Share { device: device.to_owned(), set }, deadline) {
            Ok(Reply::Share(words)) => Ok(words),
            Ok(Reply::Error(problem)) => Err(problem),
            Ok(_) => Err("its worker's reply is not understood".to_owned()),
            Err(error) => Err(format!("{}: it is set, and follows", self.failure(error))),
        }
    }

    /// Has the uplink suffer faults, or none any more.
    ///
    /// # Errors
    /// There is no uplink, or its worker does not say in time that it has followed.
    pub(super) fn fault(&self, fault: FaultWord) -> Result<(), String> {
        let deadline = self.call_deadline();
        let _turn = self.turn(deadline)?;
        if self.plan.setup.network.uplink.is_none() {
            return Err(format!("network {} has no uplink", self.name()));
        }
        self.plan.set(|settings| settings.fault = fault.0);
        self.follow(Request::Fault { network: self.name().to_owned(), fault }, deadline)
    }

    /// Sets what its workers log.
    ///
    /// # Errors
    /// Its worker does not say in time that it has followed.
    pub(super) fn log_level(&self, level: &LogFilter, deadline: Instant) -> Result<(), String> {
        let _turn = self.turn(deadline)?;
        self.plan.set(|settings| settings.log = Some(level.clone()));
        self.follow(Request::LogLevel { level: level.clone() }, deadline)
    }

    /// Tells the worker of what is planned.
    fn follow(&self, request: Request, deadline: Instant) -> Result<(), String> {
        self.tell(request, deadline)
            .map_err(|problem| format!("{problem}: it follows when it goes on, and so does the next one"))
    }

    /// Closes what there is of a device that is not planned, or not any more.
    fn forget(&self, planned: &Planned) {
        planned.close();
        self.plan.services.remove(planned.name());
        if let Err(error) = self.plan.wire(None) {
            // Log: whoever may use the control socket causes it.
            log::warn!("network {}: frames for {} are still read: {error}", self.name(), planned.name());
        }
    }

    /// Tells the worker what it has to follow. If there is none now, there is nothing to tell: the next one begins with
    /// it.
    fn tell(&self, request: Request, deadline: Instant) -> Result<(), String> {
        match self.runs.ask(request, deadline) {
            Ok(reply) => done(reply),
            Err(CallError::Gone | CallError::Ended) => Ok(()),
            Err(error @ CallError::Unresponsive) => Err(self.failure(error)),
        }
    }

    /// Waits until nobody else changes anything here.
    fn turn(&self, deadline: Instant) -> Result<impl Drop + '_, String> {
        let turn = self.changing.try_lock_until(deadline);
        turn.ok_or_else(|| format!("network {}: another change has not come to its end", self.name()))
    }

    fn call_deadline(&self) -> Instant {
        Instant::now() + self.plan.timing.call
    }

    fn failure(&self, error: CallError) -> String {
        format!("network {}: {error}", self.name())
    }
}

/// What has a worker serve a device that nobody has removed.
fn descriptors(planned: &Planned, stand_ins: &StandIns) -> Result<(Request, Vec<OwnedFd>), String> {
    let request = planned.request(stand_ins).map_err(|error| error.to_string())?;
    request.ok_or_else(|| "the device was removed".to_owned())
}

/// A worker that may have got a device, and has not said so, ends it as soon as it goes on.
fn take_back(process: &Process, connection: &Connection, device: &str) {
    let request = Request::RemoveDevice { device: device.to_owned() };
    if process.ask_one(connection, request, &[]).is_err() {
        // It cannot be told any more: the next one does not know the device.
        connection.hang_up();
    }
}

fn done(reply: Reply) -> Result<(), String> {
    match reply {
        Reply::Done {} => Ok(()),
        Reply::Error(problem) => Err(problem),
        _ => Err("its worker's reply is not understood".to_owned()),
    }
}
