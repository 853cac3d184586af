//! What a service manager is told: systemd's protocol, which others speak as well.

use std::io;
use std::os::fd::OwnedFd;
use std::thread::JoinHandle;
use std::time::Duration;

use log::warn;
use pvrdma_verbs::threads::{self, ThreadKind};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use sd_notify::NotifyState;

use crate::daemon::Daemon;

/// All sockets listen, or a reload has come to its end. `state` is for people.
pub fn ready(state: &str) {
    tell(&[NotifyState::Ready, NotifyState::Status(&one_line(state))]);
}

/// The configuration is read again; [`ready`] follows.
pub fn reloading() {
    match NotifyState::monotonic_usec_now() {
        Ok(now) => tell(&[NotifyState::Reloading, now]),
        Err(error) => warn_untold(&error),
    }
}

/// The daemon ends.
pub fn stopping() {
    tell(&[NotifyState::Stopping]);
}

fn tell(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        warn_untold(&error);
    }
}

fn warn_untold(error: &io::Error) {
    // Log: at the start, at the end, and when an administrator asks for a reload.
    warn!("the service manager cannot be told (NOTIFY_SOCKET): {error}");
}

/// A message of the protocol is made of lines.
fn one_line(text: &str) -> String {
    text.replace(char::is_control, " ")
}

/// Tells the service manager that the daemon is alive, for as long as it is: it answers what `status` asks. Dropping it
/// ends that.
#[derive(Debug)]
pub struct Watchdog {
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Begins, if the service manager waits for it (`WATCHDOG_USEC`).
    ///
    /// # Errors
    /// The system has no room for another thread.
    pub fn start(daemon: &Daemon) -> io::Result<Option<Self>> {
        let Some(period) = sd_notify::watchdog_enabled() else { return Ok(None) };
        let stop = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?;
        let (stopped, alive) = (stop.try_clone()?, daemon.alive());
        let thread = threads::spawn(ThreadKind::Supervisor, "watchdog", move || {
            // What is late once is not dead.
            while !waited(&stopped, period / 3) {
                alive();
                if sd_notify::notify(&[NotifyState::Watchdog]).is_err() {
                    // It will restart us, and says so itself.
                    return;
                }
            }
        })?;
        Ok(Some(Self { stop, thread: Some(thread) }))
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        // A thread that panicked has said so.
        if rustix::io::write(&self.stop, &1u64.to_ne_bytes()).is_ok()
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
        }
    }
}

/// Waits for so long. Returns `true` if it is time to stop.
fn waited(stop: &OwnedFd, pause: Duration) -> bool {
    let pause = Timespec::try_from(pause).ok();
    match rustix::event::poll(&mut [PollFd::new(stop, PollFlags::IN)], pause.as_ref()) {
        Ok(0) | Err(Errno::INTR) => false,
        Ok(_) | Err(_) => true,
    }
}
