//! Limits how much a guest can make us log.

use std::fmt::Arguments;
use std::time::{Duration, Instant};

use log::Level;
use parking_lot::Mutex;

/// Lines per [`PERIOD`].
const BURST: u32 = 10;

/// Time after which a new burst may be logged.
const PERIOD: Duration = Duration::from_secs(5);

/// Lets through a number of lines per period and counts the rest.
#[derive(Debug)]
pub(crate) struct LogLimit(Mutex<State>);

#[derive(Debug)]
struct State {
    since: Instant,
    lines: u32,
    dropped: u64,
}

impl LogLimit {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(State { since: Instant::now(), lines: 0, dropped: 0 }))
    }

    /// Whether one more line may be logged now; if so, how many were held back since the last one.
    pub(crate) fn admit(&self) -> Option<u64> {
        let mut state = self.0.lock();
        if state.since.elapsed() >= PERIOD {
            state.since = Instant::now();
            state.lines = 0;
        }
        if state.lines >= BURST {
            state.dropped = state.dropped.saturating_add(1);
            return None;
        }
        state.lines += 1;
        Some(std::mem::take(&mut state.dropped))
    }

    /// Logs a warning about a device, if it may.
    pub(crate) fn warn(&self, device: &str, message: Arguments<'_>) {
        self.log(Level::Warn, device, message);
    }

    /// Logs a message about a device, if it may.
    pub(crate) fn log(&self, level: Level, device: &str, message: Arguments<'_>) {
        match self.admit() {
            None => {}
            Some(0) => log::log!(level, "{device}: {message}"),
            Some(dropped) => log::log!(level, "{device}: {message} ({dropped} messages before this were not logged)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_cut_and_counted() {
        let limit = LogLimit::new();
        let admitted = (0..1000).filter(|_| limit.admit().is_some()).count();
        assert_eq!(admitted, BURST as usize);
        limit.0.lock().lines = 0;
        assert_eq!(limit.admit(), Some(990));
    }
}
