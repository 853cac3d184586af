//! Messages to the service manager, by systemd's protocol, which others implement as well.

use std::io;

use log::warn;
use sd_notify::NotifyState;

/// Reports that another process is the main process of the service from now on.
pub(crate) fn replaced_by(pid: u32) {
    tell(&[NotifyState::MainPid(pid)]);
}

/// Sends a message, if there is a service manager.
pub(crate) fn tell(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        warn_untold(&error);
    }
}

/// Logs that a message was not sent.
pub(crate) fn warn_untold(error: &io::Error) {
    // Log: at the start, at the end, and when an administrator asks for a reload.
    warn!("the service manager cannot be told (NOTIFY_SOCKET): {error}");
}
