//! Notifications to the service manager, by systemd's protocol, which others implement as well.

use std::io;
use std::os::fd::OwnedFd;
use std::thread::JoinHandle;
use std::time::Duration;

use pvrdma_base::threads::{self, ThreadKind};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use sd_notify::NotifyState;

use crate::daemon::Daemon;
use crate::notify::{tell, warn_untold};

/// Reports that all sockets listen, or that a reload is complete. `state` is text for administrators.
pub fn ready(state: &str) {
    tell(&[NotifyState::Ready, NotifyState::Status(&one_line(state))]);
}

/// Reports that the configuration is being read again; [`ready`] follows.
pub fn reloading() {
    match NotifyState::monotonic_usec_now() {
        Ok(now) => tell(&[NotifyState::Reloading, now]),
        Err(error) => warn_untold(&error),
    }
}

/// Reports that the daemon ends.
pub fn stopping() {
    tell(&[NotifyState::Stopping]);
}

/// Removes line breaks, because messages of the protocol consist of lines.
fn one_line(text: &str) -> String {
    text.replace(char::is_control, " ")
}

/// Reports to the service manager periodically that the daemon is alive, as long as it answers status requests.
/// Dropping this stops the reports.
#[derive(Debug)]
pub struct Watchdog {
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Starts the reports, if the service manager expects them (`WATCHDOG_USEC`).
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(daemon: &Daemon) -> io::Result<Option<Self>> {
        let Some(period) = sd_notify::watchdog_enabled() else { return Ok(None) };
        let stop = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?;
        let (stopped, alive) = (stop.try_clone()?, daemon.alive());
        let thread = threads::spawn(ThreadKind::Supervisor, "watchdog", move || {
            // Three reports per period, so that a single late one is tolerated.
            while !waited(&stopped, period / 3) {
                alive();
                if sd_notify::notify(&[NotifyState::Watchdog]).is_err() {
                    // The service manager restarts the daemon and logs the reason.
                    return;
                }
            }
        })?;
        Ok(Some(Self { stop, thread: Some(thread) }))
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        // If the thread panicked, it has already logged that.
        if rustix::io::write(&self.stop, &1u64.to_ne_bytes()).is_ok()
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
        }
    }
}

/// Waits for `pause`. Returns `true` if the thread has to stop.
fn waited(stop: &OwnedFd, pause: Duration) -> bool {
    let pause = Timespec::try_from(pause).ok();
    match rustix::event::poll(&mut [PollFd::new(stop, PollFlags::IN)], pause.as_ref()) {
        Ok(0) | Err(Errno::INTR) => false,
        Ok(_) | Err(_) => true,
    }
}
