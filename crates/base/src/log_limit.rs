//! Rate limit for log lines that a guest, a VMM or the network can provoke.

use std::fmt::Arguments;
use std::sync::Arc;
use std::time::{Duration, Instant};

use log::Level;

use crate::locks::Mutex;

/// Number of lines per [`PERIOD`].
const BURST: u32 = 10;

/// Time after which another burst may be logged.
const PERIOD: Duration = Duration::from_secs(5);

/// Rate limiter for log lines: passes a number of lines in each period. The first line of the next burst reports how
/// many were suppressed.
#[derive(Debug)]
pub struct LogLimit(Mutex<State>);

#[derive(Debug)]
struct State {
    /// Start of the current period. `None` until the first line.
    since: Option<Instant>,
    lines: u32,
    suppressed: u64,
}

impl LogLimit {
    /// Creates a limit whose whole burst is available.
    pub const fn new() -> Self {
        Self(Mutex::new(State { since: None, lines: 0, suppressed: 0 }))
    }

    /// Logs an error about `subject` unless the limit is reached. `target`, by which lines are filtered, is the
    /// caller's `module_path!()`.
    pub fn error(&self, target: &'static str, subject: &str, message: Arguments<'_>) {
        self.log(target, Level::Error, subject, message);
    }

    /// Logs a warning about `subject` unless the limit is reached.
    pub fn warn(&self, target: &'static str, subject: &str, message: Arguments<'_>) {
        self.log(target, Level::Warn, subject, message);
    }

    /// Logs a message about `subject` unless the limit is reached.
    pub fn log(&self, target: &'static str, level: Level, subject: &str, message: Arguments<'_>) {
        // A line that the filter suppresses anyway must not use up the limit for lines of other targets.
        if log::log_enabled!(target: target, level) {
            self.log_or_not(target, level, subject, message);
        }
    }

    /// As [`Self::log`]. Returns `false` if the limit suppressed the line.
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

    /// Counts a line. If it may be logged, returns the number of lines suppressed since the last one that was logged.
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

/// Log of one device. Lines begin with its name; all lines that its guest and its peers can cause share one limit.
#[derive(Debug)]
pub struct DeviceLog {
    name: String,
    limit: LogLimit,
}

impl DeviceLog {
    /// Creates the log of the device named `name`.
    pub fn new(name: impl Into<String>) -> Arc<Self> {
        Arc::new(Self { name: name.into(), limit: LogLimit::new() })
    }

    /// Name of the device.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Logs an error unless the limit is reached. `target` is the caller's `module_path!()`.
    pub fn error(&self, target: &'static str, message: Arguments<'_>) {
        self.limit.error(target, &self.name, message);
    }

    /// Logs a warning unless the limit is reached.
    pub fn warn(&self, target: &'static str, message: Arguments<'_>) {
        self.limit.warn(target, &self.name, message);
    }

    /// As [`Self::warn`]. Returns `false` if the limit suppressed the line.
    pub fn warn_or_not(&self, target: &'static str, message: Arguments<'_>) -> bool {
        self.limit.log_or_not(target, Level::Warn, &self.name, message)
    }

    /// Logs an informational message unless the limit is reached.
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
