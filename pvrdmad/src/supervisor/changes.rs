//! Changes of a network while it runs.
//!
//! The plan is authoritative: every new worker is started from it. A device is planned only once the current
//! worker has accepted it, so that a device cannot make the start of a later worker fail. Removals and other changes
//! are written to the plan first. A worker that does not confirm a change either applies it when it resumes, or is
//! replaced by a worker that starts from the plan.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use pvrdma_dev::LimitStatus;
use pvrdma_rxe::faults::{DeviceFaults, FaultRule};

use super::connection::{CallError, Connection, reply_by};
use super::hand_over::check_request;
use super::hand_over_order::HandOverResult;
use super::network::Network;
use super::plan::Planned;
use super::process::Process;
use super::runs::Runs;
use super::sockets::Sources;
use super::stand_in::StandIns;
use crate::config::{Device, FaultSpec, FaultWord, Feature, LinkState, change_share};
use crate::logging::LogFilter;
use crate::protocol::{Reply, Request};

/// Outcome of a device's removal from the plan.
pub(super) enum Removed {
    /// The device has ended completely.
    Ended,
    /// The worker has not confirmed the removal. Its part of the device ends when the worker resumes, or when it exits.
    Open(String),
}

impl Network {
    /// Serves an additional device.
    ///
    /// # Errors
    /// Its resources are unavailable, or the worker does not accept it in time. Nothing is left behind in that case.
    pub(super) fn add(&self, device: Device, sources: &Sources) -> Result<(), String> {
        let deadline = self.call_deadline();
        let _turn = self.turn(deadline)?;
        self.plan.admits(&device)?;
        self.plan.can_promise(&device.config.name, device.share)?;
        let doorbells = sources.doorbells.decide(&device, &self.plan.setup.backend);
        let planned =
            doorbells.and_then(|doorbells| Planned::new(device, self.plan.setup.network.vlan, doorbells, sources));
        let planned = Arc::new(planned.map_err(|error| format!("{error:#}"))?);
        // The services and the uplink know the device before the worker has it: the worker may then send, receive and
        // ask for the device's links at once.
        self.plan.services.add(planned.name(), planned.connector());
        let wired = self.plan.wire(Some(planned.device.mac)).map_err(|error| format!("uplink: {error}"));
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

    /// Makes the running worker accept a device, and plans it.
    fn add_to_process(&self, process: &Process, planned: &Arc<Planned>, deadline: Instant) -> Result<(), String> {
        // A worker that ends during the request was most likely about to end anyway. If the next worker ends as well,
        // the device is the likely cause, so the request is not tried again.
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
            // The worker may have ended since, and the next one may have started without the device.
            if process.while_serving(&connection, || self.plan.push(Arc::clone(planned))) {
                return Ok(());
            }
        }
    }

    /// Removes a device: it is no longer planned and its sockets are closed.
    ///
    /// # Errors
    /// There is no such device, or another change does not finish in time.
    pub(super) fn remove(&self, device: &str) -> Result<Removed, String> {
        let deadline = self.call_deadline();
        let _turn = self.turn(deadline)?;
        let Some(planned) = self.plan.take(device) else { return Err(format!("there is no device '{device}'")) };
        let told = self.tell(Request::RemoveDevice { device: device.to_owned() }, deadline);
        self.forget(&planned);
        Ok(told.map_or_else(Removed::Open, |()| Removed::Ended))
    }

    /// Sets the link of a device up or down.
    ///
    /// # Errors
    /// There is no such device, its link cannot be set separately, or its worker does not confirm the change in time.
    pub(super) fn link(&self, device: &str, state: LinkState) -> Result<(), String> {
        let deadline = self.call_deadline();
        let _turn = self.turn(deadline)?;
        self.plan.setup.backend.settings().has(Feature::Links)?;
        self.plan.replace(device, |planned| Ok(planned.with_link(state)))?;
        self.follow(Request::Link { device: device.to_owned(), state }, deadline)
    }

    /// Sets limits of a device and returns all of its limits.
    ///
    /// # Errors
    /// There is no such device or limit, a value is out of range, or the worker does not report the limits in time. In
    /// the last case they are set nevertheless.
    pub(super) fn limits(&self, device: &str, set: BTreeMap<String, u64>) -> Result<Vec<LimitStatus>, String> {
        let deadline = self.call_deadline();
        let _turn = self.turn(deadline)?;
        if !set.is_empty() {
            self.plan.replace(device, |planned| planned.with_limits(&set).map_err(|error| error.to_string()))?;
        }
        match self.runs.ask(Request::Limits { device: device.to_owned(), set }, deadline) {
            Ok(Reply::Limits(limits)) => Ok(limits),
            Ok(Reply::Error(problem)) => Err(problem),
            Ok(_) => Err("its worker's reply is not understood".to_owned()),
            Err(error) => Err(format!("{}: the limits are set, and it follows", self.failure(error))),
        }
    }

    /// Sets a device's share of common resources and returns the resulting share.
    ///
    /// # Errors
    /// There is no such device or key, the values contradict each other or exceed the capacity of the network, or the
    /// worker does not report the share in time. In the last case it is set nevertheless.
    pub(super) fn share(
        &self,
        device: &str,
        set: BTreeMap<String, String>,
    ) -> Result<BTreeMap<String, String>, String> {
        let deadline = self.call_deadline();
        let _turn = self.turn(deadline)?;
        self.plan.setup.backend.settings().has(Feature::Shares)?;
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

    /// Hands the network over to a new worker.
    ///
    /// # Errors
    /// The network has no process of its own, or the hand-over was refused. The guests are served as before.
    pub(super) fn hand_over(&self) -> HandOverResult {
        let Runs::Process(process) = &*self.runs else {
            return Err("it has no process of its own (isolate=none)".to_owned());
        };
        // Longer than the wait for a new worker that hangs, so that the caller gets its result and not a timeout.
        let deadline = Instant::now() + self.plan.timing.start.saturating_mul(2);
        let _turn = self.turn(deadline)?;
        process.hand_over(deadline)
    }

    /// Returns the obstacles to a hand-over, if there are any.
    pub(super) fn obstacles(&self, deadline: Instant) -> Option<String> {
        let Runs::Process(_) = &*self.runs else {
            return Some("it has no process of its own (isolate=none)".to_owned());
        };
        match self.runs.ask(check_request(), deadline) {
            Ok(Reply::Obstacles(obstacles)) if obstacles.is_empty() => None,
            Ok(Reply::Obstacles(obstacles)) => Some(obstacles.join("; ")),
            Ok(Reply::Error(problem)) => Some(problem),
            Ok(_) => Some("its worker's reply is not understood".to_owned()),
            Err(error) => Some(error.to_string()),
        }
    }

    /// Injects faults into the uplink, or stops injecting them.
    ///
    /// # Errors
    /// There is no uplink, the faults damage packets that may have no ICRC, or its worker does not confirm the change
    /// in time.
    pub(super) fn fault(&self, fault: FaultWord) -> Result<(), String> {
        let deadline = self.call_deadline();
        let _turn = self.turn(deadline)?;
        if self.plan.setup.network.uplink.is_none() {
            return Err(format!("network {} has no uplink", self.name()));
        }
        FaultSpec::check(fault.0.as_ref(), self.plan.setup.network.omit_icrc)?;
        self.plan.set(|settings| settings.fault = fault.0);
        self.follow(Request::Fault { network: self.name().to_owned(), fault }, deadline)
    }

    /// Checks that a device may have these faults.
    ///
    /// # Errors
    /// Its adapter has no faults, or there are too many.
    pub(super) fn can_have_faults(&self, faults: &[FaultRule]) -> Result<(), String> {
        self.plan.setup.backend.settings().has(Feature::Faults)?;
        if faults.len() > DeviceFaults::MAX_RULES {
            return Err(format!("a device has at most {} faults", DeviceFaults::MAX_RULES));
        }
        Ok(())
    }

    /// Sets the faults of a device, which replace those before. They were checked by [`Self::can_have_faults`].
    ///
    /// # Errors
    /// There is no such device, or its worker does not confirm the change in time.
    pub(super) fn device_faults(&self, device: &str, faults: Vec<FaultRule>) -> Result<(), String> {
        let deadline = self.call_deadline();
        let _turn = self.turn(deadline)?;
        self.plan.replace(device, |planned| Ok(planned.with_faults(faults.clone())))?;
        self.follow(Request::DeviceFaults { faults: BTreeMap::from([(device.to_owned(), faults)]) }, deadline)
    }

    /// Sets the log filter of its workers.
    ///
    /// # Errors
    /// Its worker does not confirm the change in time.
    pub(super) fn log_level(&self, level: &LogFilter, deadline: Instant) -> Result<(), String> {
        let _turn = self.turn(deadline)?;
        self.plan.set(|settings| settings.log = Some(level.clone()));
        self.follow(Request::LogLevel { level: level.clone() }, deadline)
    }

    /// Sends the worker a change that is already planned.
    fn follow(&self, request: Request, deadline: Instant) -> Result<(), String> {
        self.tell(request, deadline)
            .map_err(|problem| format!("{problem}: it follows when it goes on, and so does the next one"))
    }

    /// Releases the resources of a device that is not planned.
    fn forget(&self, planned: &Planned) {
        planned.close();
        self.plan.services.remove(planned.name());
        if let Err(error) = self.plan.wire(None) {
            // Log: caused only by clients of the control socket.
            log::warn!("network {}: frames for {} are still read: {error}", self.name(), planned.name());
        }
    }

    /// Sends the worker a change that it has to apply. Without a worker there is nothing to send: the next one starts
    /// from the plan.
    fn tell(&self, request: Request, deadline: Instant) -> Result<(), String> {
        match self.runs.ask(request, deadline) {
            Ok(reply) => done(reply),
            Err(CallError::Gone | CallError::Ended) => Ok(()),
            Err(error @ CallError::Unresponsive) => Err(self.failure(error)),
        }
    }

    /// Waits for exclusive permission to change the network, and for the end of a hand-over whose caller has given up:
    /// neither of its two workers would learn of a change of the plan.
    pub(super) fn turn(&self, deadline: Instant) -> Result<impl Drop + '_, String> {
        let open = |change: &str| format!("network {}: {change} has not come to its end", self.name());
        let turn = self.changing.try_lock_until(deadline).ok_or_else(|| open("another change"))?;
        match &*self.runs {
            Runs::Process(process) if !process.wait_handed_over(deadline) => Err(open("a hand-over")),
            _ => Ok(turn),
        }
    }

    fn call_deadline(&self) -> Instant {
        Instant::now() + self.plan.timing.call
    }

    fn failure(&self, error: CallError) -> String {
        format!("network {}: {error}", self.name())
    }
}

/// Returns the request that makes a worker serve a device, and its descriptors. Fails if the device was removed.
fn descriptors(planned: &Planned, stand_ins: &StandIns) -> Result<(Request, Vec<OwnedFd>), String> {
    let request = planned.request(stand_ins).map_err(|error| error.to_string())?;
    request.ok_or_else(|| "the device was removed".to_owned())
}

/// Withdraws a device from a worker that may have received it but did not confirm it: the worker ends the device as
/// soon as it resumes.
fn take_back(process: &Process, connection: &Connection, device: &str) {
    let request = Request::RemoveDevice { device: device.to_owned() };
    if process.ask_one(connection, request, &[]).is_err() {
        // The request cannot be sent, so the worker has to end. Its successor starts from the plan, which lacks the
        // device.
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
