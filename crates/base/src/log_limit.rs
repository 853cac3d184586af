//! Log lines that somebody else can provoke (a guest, a VMM, the network), kept from filling the log.

use std::fmt::Arguments;
use std::sync::Arc;
use std::time::{Duration, Instant};

use log::Level;
use parking_lot::Mutex;

/// Lines in each [`PERIOD`].
const BURST: u32 = 10;

/// Time after which a new burst may be logged.
const PERIOD: Duration = Duration::from_secs(5);

/// Lets through a number of lines in each period. The next line that is let through tells how many were not.
#[derive(Debug)]
pub struct LogLimit(Mutex<State>);

#[derive(Debug)]
struct State {
    /// Start of the period. `None` until the first line.
    since: Option<Instant>,
    lines: u32,
    suppressed: u64,
}

impl LogLimit {
    /// A limit that nothing was logged under.
    pub const fn new() -> Self {
        Self(Mutex::new(State { since: None, lines: 0, suppressed: 0 }))
    }

    /// Logs an error about `subject`, if it may. The `target`, by which lines are filtered, is the caller's
    /// `module_path!()`.
    pub fn error(&self, target: &'static str, subject: &str, message: Arguments<'_>) {
        self.log(target, Level::Error, subject, message);
    }

    /// Logs a warning about `subject`, if it may.
    pub fn warn(&self, target: &'static str, subject: &str, message: Arguments<'_>) {
        self.log(target, Level::Warn, subject, message);
    }

    /// Logs a message about `subject`, if it may.
    pub fn log(&self, target: &'static str, level: Level, subject: &str, message: Arguments<'_>) {
        // A line that no filter lets through takes nothing from those of other targets.
        if log::log_enabled!(target: target, level) {
            self.log_or_not(target, level, subject, message);
        }
    }

    /// The same. Returns `false` if there were too many.
    fn log_or_not(&self, target: &'static str, level: Level, subject: &str, message: Arguments<'_>) -> bool {
        let Some(suppressed) = self.admit(Instant::now()) else { return false };
        match suppressed {
            0 => log::log!(target: target, level, subject; "{subject}: {message}"),
            count => log::log!(
                target: target, level, subject;
                "{subject}: {message} ({count} messages before this were not logged)"
            ),
        }
        true
    }

    /// Counts a line. If it may be logged, returns how many were suppressed since the last one that was.
    fn admit(&self, now: Instant) -> Option<u64> {
        let mut state = self.0.lock();
        if state.since.is_none_or(|since| now.saturating_duration_since(since) >= PERIOD) {
            state.since = Some(now);
            state.lines = 0;
        }
        if state.lines >= BURST {
            state.suppressed = state.suppressed.saturating_add(1);
            return None;
        }
        state.lines = state.lines.saturating_add(1);
        Some(std::mem::take(&mut state.suppressed))
    }
}

/// The log of one device: lines begin with its name, and all that its guest and its peers can cause are under one
/// limit.
#[derive(Debug)]
pub struct DeviceLog {
    name: String,
    limit: LogLimit,
}

impl DeviceLog {
    /// The log of a device of this name.
    pub fn new(name: impl Into<String>) -> Arc<Self> {
        Arc::new(Self { name: name.into(), limit: LogLimit::new() })
    }

    /// The name of the device.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Logs an error, if it may. The `target` is the caller's `module_path!()`.
    pub fn error(&self, target: &'static str, message: Arguments<'_>) {
        self.limit.error(target, &self.name, message);
    }

    /// Logs a warning, if it may.
    pub fn warn(&self, target: &'static str, message: Arguments<'_>) {
        self.limit.warn(target, &self.name, message);
    }

    /// The same. Returns `false` if there were too many.
    pub fn warn_or_not(&self, target: &'static str, message: Arguments<'_>) -> bool {
        self.limit.log_or_not(target, Level::Warn, &self.name, message)
    }

    /// Logs something of interest, if it may.
    pub fn info(&self, target: &'static str, message: Arguments<'_>) {
        self.limit.log(target, Level::Info, &self.name, message);
    }
}

impl Default for LogLimit {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_cut_and_counted() {
        let (limit, start) = (LogLimit::new(), Instant::now());
        let admitted = (0..1000).filter(|_| limit.admit(start).is_some()).count();
        assert_eq!(admitted, BURST as usize);
        assert_eq!(limit.admit(start + PERIOD), Some(990));
        assert_eq!(limit.admit(start + PERIOD), Some(0));
    }
}
