//! Log lines that another process can provoke, kept from filling the log.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Lets a few lines through in each interval.
#[derive(Debug)]
pub(crate) struct LogLimit {
    state: Mutex<Option<(Instant, u32)>>,
}

impl LogLimit {
    const LINES: u32 = 10;
    const INTERVAL: Duration = Duration::from_secs(10);

    /// Nothing logged yet.
    pub(crate) const fn new() -> Self {
        Self { state: Mutex::new(None) }
    }

    /// Whether to log this line.
    pub(crate) fn allow(&self) -> bool {
        let now = Instant::now();
        let mut state = self.state.lock();
        match &mut *state {
            Some((since, lines)) if now.duration_since(*since) < Self::INTERVAL => {
                *lines = lines.saturating_add(1);
                *lines <= Self::LINES
            }
            other => {
                *other = Some((now, 1));
                true
            }
        }
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
    fn a_flood_is_cut() {
        let limit = LogLimit::new();
        assert_eq!((0..1000).filter(|_| limit.allow()).count(), 10);
    }
}
