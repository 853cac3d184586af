//! Makes the links of a network's devices follow the interface of its uplink: one thread for each network with an
//! interface to follow.
//!
//! Notifications of the kernel are only hints; after one, the thread reads the current state of the interface. Changes
//! between two reads therefore cost nothing. Reads are rate-limited: an interface that flaps, or other interfaces that
//! come and go, cause only a few reads per second. A new state is written to the plan first, as every change is, and
//! then sent to the worker. A worker that does not reply delays only this thread.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use log::{Level, error};
use pvrdma_base::LogLimit;
use pvrdma_ether_link::InterfaceState;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use super::connection::CallError;
use super::joining::Joinable;
use super::plan::Plan;
use super::plan::uplink_watch::{UplinkState, UplinkWatch, Watched, mtu_words};
use super::runs::Runs;
use super::timing::Budget;
use crate::config::LinkState;
use crate::events::Event;
use crate::protocol::{Reply, Request};

/// Delay before a failed attempt is repeated.
const AGAIN: Duration = Duration::from_secs(1);

/// Time in which the thread must end. Its requests to a worker fail at once when the worker is stopped.
const END: Duration = Duration::from_secs(2);

/// Handle of the thread. Dropping it ends the thread.
#[derive(Debug)]
pub(super) struct Follower {
    stop: OwnedFd,
    thread: Option<Joinable>,
}

impl Follower {
    /// Follows interfaces whose state in the plan is the state at the time when `watch` was opened, or a later one.
    ///
    /// # Errors
    /// No thread or descriptor is available.
    pub(super) fn start(watch: UplinkWatch, plan: &Arc<Plan>, runs: &Arc<Runs>) -> Result<Self> {
        let teller = Teller {
            interface: plan.interface().map(|report| report.name).unwrap_or_default(),
            plan: Arc::clone(plan),
            runs: Arc::clone(runs),
            log: LogLimit::new(),
        };
        let told = plan.settings().interface;
        Self::spawn(plan.name(), watch, Budget::new(plan.timing.looks, Instant::now()), told, teller)
    }

    fn spawn<W: Watched>(
        network: &str,
        watched: W,
        looks: Budget,
        told: Option<W::Seen>,
        teller: impl Tell<Seen = W::Seen>,
    ) -> Result<Self> {
        let stop = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?;
        let follow = Follow { watched, stop: stop.try_clone()?, looks, told, blind: false, teller };
        let run = move || follow.run();
        let thread = Joinable::spawn(format!("link {network}"), run).context("a thread")?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        if let Err(error) = rustix::io::write(&self.stop, &1u64.to_ne_bytes()) {
            // Log: once for a network.
            error!("a thread that follows an interface cannot be stopped: {error}");
            return;
        }
        if let Some(thread) = self.thread.take() {
            thread.join_within(END);
        }
    }
}

/// Receiver of interface states.
trait Tell: Send + 'static {
    /// State of the interfaces.
    type Seen;

    /// Reports the current state. Returns `false` if the report has to be repeated.
    fn tell(&self, state: Self::Seen) -> bool;

    /// Reports that the interface cannot be read: its links keep their state.
    fn blind(&self, error: &io::Error);
}

/// State of the thread.
struct Follow<W: Watched, T> {
    watched: W,
    stop: OwnedFd,
    looks: Budget,
    /// State that the receiver has confirmed. `None` if that is uncertain.
    told: Option<W::Seen>,
    /// The receiver was told that the interface cannot be read.
    blind: bool,
    teller: T,
}

impl<W: Watched, T: Tell<Seen = W::Seen>> Follow<W, T> {
    fn run(mut self) {
        while self.wait(None) {
            // Hints that arrive while the thread waits are merged: only the latest state is read.
            while let Some(wait) = self.looks.wait(Instant::now()) {
                if !self.pause(wait) {
                    return;
                }
            }
            self.looks.take(Instant::now());
            while !self.follow() {
                if !self.pause(AGAIN) {
                    return;
                }
            }
        }
    }

    /// Reads the state and reports a change. Returns `false` if that failed.
    fn follow(&mut self) -> bool {
        match self.watched.look() {
            Ok(state) => {
                self.blind = false;
                if self.told != Some(state) {
                    if !self.teller.tell(state) {
                        // The receiver may or may not have applied the state, so the next one is reported even if it is
                        // equal to the state before.
                        self.told = None;
                        return false;
                    }
                    self.told = Some(state);
                }
                true
            }
            Err(error) => {
                if !std::mem::replace(&mut self.blind, true) {
                    self.teller.blind(&error);
                }
                false
            }
        }
    }

    /// Waits for `time`. Returns `false` if the thread has to stop.
    fn pause(&self, time: Duration) -> bool {
        self.wait(Some(Instant::now() + time))
    }

    /// Waits for a hint, or until `until` regardless of hints. Returns `false` if the thread has to stop.
    fn wait(&self, until: Option<Instant>) -> bool {
        loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            let hints = self.watched.hints();
            let mut poll = [PollFd::new(&self.stop, PollFlags::IN), PollFd::from_borrowed_fd(hints, PollFlags::IN)];
            let polled = poll.get_mut(..if until.is_some() { 1 } else { 2 }).unwrap_or_default();
            match rustix::event::poll(polled, left.as_ref()) {
                Err(Errno::INTR) => {}
                Ok(_) => return polled.first().is_some_and(|stop| stop.revents().is_empty()),
                Err(errno) => {
                    self.teller.blind(&errno.into());
                    return false;
                }
            }
        }
    }
}

/// Reports to the plan, the worker, the log and the subscribers of events.
struct Teller {
    /// Names of the interfaces, as in the configuration.
    interface: String,
    plan: Arc<Plan>,
    runs: Arc<Runs>,
    log: LogLimit,
}

impl Teller {
    /// Writes a change to the log and to the subscribers of events.
    fn announce(&self, before: Option<InterfaceState>, state: InterfaceState) {
        let (network, interface) = (self.plan.name().to_owned(), self.interface.clone());
        let subject = format!("network {network}");
        if before.map(|before| before.to_string()) != Some(state.to_string()) {
            let (level, links) = match self.plan.settings().carrier().state {
                LinkState::Up => (Level::Info, "up"),
                LinkState::Down => (Level::Warn, "down"),
            };
            self.log.log(
                module_path!(),
                level,
                &subject,
                format_args!("{interface} is {state}: links of its devices are {links}"),
            );
        }
        let (mtu, wanted) = (state.mtu(), self.plan.setup.network.mtu);
        // An interface that was absent is expected to carry the wanted MTU, so only a smaller one causes a message.
        let carried = before.and_then(InterfaceState::mtu).unwrap_or_else(|| wanted.max(mtu.unwrap_or_default()));
        if let Some(mtu) = mtu.filter(|mtu| *mtu != carried) {
            let (level, so) = match mtu < wanted {
                true => (Level::Warn, "path MTUs are shorter"),
                false => (Level::Info, "path MTUs are those of the network"),
            };
            let told =
                format_args!("{interface} carries packets of {mtu} bytes, the network is to carry {wanted}: {so}");
            self.log.log(module_path!(), level, &subject, told);
        }
        self.plan.services.events.tell(&Event::Carrier { network, interface, state: state.to_string(), mtu });
    }

    /// Writes a change of the active interface to the log and to the subscribers of events.
    fn fail_over(&self) {
        let subject = format!("network {}", self.plan.name());
        let (network, interface) = (self.plan.name().to_owned(), self.plan.active().unwrap_or_default());
        self.log.warn(module_path!(), &subject, format_args!("{interface} of {} is active now", self.interface));
        self.plan.services.events.tell(&Event::Failover { network, interface });
    }
}

impl Tell for Teller {
    type Seen = UplinkState;

    fn tell(&self, state: UplinkState) -> bool {
        let before = self.plan.settings().interface;
        if before != Some(state) {
            self.plan.set(|settings| settings.interface = Some(state));
            if before.is_some_and(|before| before.active != state.active) {
                self.fail_over();
            }
            let former = before.map(UplinkState::state);
            if former != Some(state.state()) {
                self.announce(former, state.state());
            }
            if let Some(mtus) = state.different_mtus()
                && before.and_then(UplinkState::different_mtus) != Some(mtus)
            {
                let subject = format!("network {}", self.plan.name());
                self.log.warn(module_path!(), &subject, format_args!("{}", mtu_words(&self.interface, mtus)));
            }
        }
        // The sockets are changed before the worker uses them. If an earlier change failed, it is repeated.
        if let Err(error) = self.plan.select(state.active) {
            let subject = format!("network {}", self.plan.name());
            self.log.warn(module_path!(), &subject, format_args!("{}: {error}", self.interface));
            return false;
        }
        let request = Request::Carrier { carrier: self.plan.settings().carrier() };
        let problem = match self.runs.ask(request, Instant::now() + self.plan.timing.call) {
            Ok(Reply::Done {}) => return true,
            // The next worker starts from the plan.
            Err(CallError::Gone | CallError::Ended) => return true,
            Ok(Reply::Error(problem)) => problem,
            Ok(_) => "its worker's reply is not understood".to_owned(),
            Err(error @ CallError::Unresponsive) => error.to_string(),
        };
        let subject = format!("network {}", self.plan.name());
        self.log.warn(
            module_path!(),
            &subject,
            format_args!("links of its devices do not follow {}: {problem}", self.interface),
        );
        false
    }

    fn blind(&self, error: &io::Error) {
        let subject = format!("network {}", self.plan.name());
        self.log.warn(
            module_path!(),
            &subject,
            format_args!("{} cannot be seen: links stay as they are: {error}", self.interface),
        );
    }
}

#[cfg(test)]
mod tests;
