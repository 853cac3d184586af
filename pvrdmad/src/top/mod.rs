//! `pvrdmad top`: shows rates of the devices of a running daemon, updated periodically.
//!
//! Two samples and the time between them give rates. A frame is text with a limited number of columns and lines,
//! independent of the terminal.

mod devices;
mod queue_pairs;
mod rates;

use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::cli::TopArgs;
use crate::control;
use crate::status::{DaemonStatus, QueuePairTraffic};

/// Most columns of a frame.
const COLUMNS: usize = 80;

/// Lines of a terminal whose size is unknown.
const LINES: usize = 24;

/// Moves the cursor to the upper left corner, and clears the rest of the screen.
const HOME: &str = "\x1b[H\x1b[J";

/// A sample of the daemon's state.
#[derive(Debug)]
struct Look {
    at: Instant,
    status: DaemonStatus,
    /// Queue pairs of the selected device, if there is one.
    queue_pairs: Vec<QueuePairTraffic>,
}

impl Look {
    fn take(control: &Path, device: Option<&str>) -> Result<Self> {
        let status = control::ask_status(control, false)?;
        let queue_pairs = match device {
            Some(device) => control::ask_traffic(control, device)?,
            None => Vec::new(),
        };
        Ok(Self { at: Instant::now(), status, queue_pairs })
    }
}

/// Shows the requested number of frames, or frames without end.
///
/// # Errors
/// The daemon does not answer, there is no such device, or the output is closed.
pub fn run(args: &TopArgs) -> Result<()> {
    let control = args.daemon.control()?;
    let device = args.device.as_deref();
    let pause = Duration::from_secs(args.interval);
    let mut out = io::stdout();
    let mut before = Look::take(&control, device)?;
    let mut shown = 0;
    while args.count.is_none_or(|count| shown < count) {
        thread::sleep(pause);
        let now = Look::take(&control, device)?;
        let lines = screen_lines(&out);
        let text = frame(&before, &now, device, lines.unwrap_or(usize::MAX));
        // In a file or a pipe frames follow each other.
        let head = if lines.is_some() { HOME } else { "" };
        let written = write!(out, "{head}{text}").and_then(|()| out.flush());
        match written {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
            written => written?,
        }
        (before, shown) = (now, shown + 1);
    }
    Ok(())
}

/// Returns the lines of the terminal, if the output is one.
fn screen_lines(out: &io::Stdout) -> Option<usize> {
    if !out.is_terminal() {
        return None;
    }
    let said = rustix::termios::tcgetwinsize(out).map_or(0, |size| usize::from(size.ws_row));
    Some(if said == 0 { LINES } else { said })
}

/// Renders a frame of at most `lines` lines. If lines were left out, the last one says how many.
fn frame(before: &Look, now: &Look, device: Option<&str>, lines: usize) -> String {
    let between = now.at.saturating_duration_since(before.at);
    let mut all = vec![head(&now.status)];
    match device {
        None => all.extend(devices::lines(&before.status, &now.status, between)),
        Some(name) => {
            all.extend(devices::detail(&before.status, &now.status, name, between));
            all.extend(queue_pairs::lines(&before.queue_pairs, &now.queue_pairs, between));
        }
    }
    // The cursor takes the line after the last one.
    let most = lines.saturating_sub(1).max(1);
    if all.len() > most {
        let left_out = all.len() - (most - 1);
        all.truncate(most - 1);
        all.push(format!("… and {left_out} more lines"));
    }
    all.iter().map(|line| line.chars().take(COLUMNS).collect::<String>() + "\n").collect()
}

fn head(status: &DaemonStatus) -> String {
    let not_running = status.networks.iter().filter(|network| network.state.word() != "running").count();
    let trouble = if not_running == 0 { String::new() } else { format!(", {not_running} of them not running") };
    let (devices, networks) = (status.devices.len(), status.networks.len());
    format!(
        "pvrdmad {}, up {} s, backend {}: {devices} devices, {networks} networks{trouble}",
        status.version, status.uptime_s, status.backend
    )
}

#[cfg(test)]
mod tests;
