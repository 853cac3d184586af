//! Log lines of this process, for tests of the log's rate limits.

use std::time::{Duration, Instant};

use log::{LevelFilter, Log, Metadata, Record};
use parking_lot::Mutex;

/// Maximum number of lines that a limit passes in a period of [`LIMIT_PERIOD`].
const LIMIT_LINES: u128 = 10;
const LIMIT_PERIOD: Duration = Duration::from_secs(5);

static RECORDER: Recorder = Recorder(Mutex::new(Vec::new()));

struct Recorder(Mutex<Vec<Line>>);

struct Line {
    target: String,
    text: String,
}

impl Log for Recorder {
    fn enabled(&self, _metadata: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        self.0.lock().push(Line { target: record.target().to_owned(), text: record.args().to_string() });
    }

    fn flush(&self) {}
}

/// Lines that this process has logged since a moment, at level info or more severe.
#[derive(Debug)]
pub struct LogLines {
    since: Instant,
    seen: usize,
}

impl LogLines {
    /// Starts to record. No other code of the process may set a logger.
    pub fn watch() -> Self {
        // Another test of the same process may have set it already.
        let _ = log::set_logger(&RECORDER);
        log::set_max_level(LevelFilter::Info);
        Self { since: Instant::now(), seen: RECORDER.0.lock().len() }
    }

    /// Returns the lines that contain `text`.
    pub fn with(&self, text: &str) -> Vec<String> {
        let lines = RECORDER.0.lock();
        lines.iter().skip(self.seen).map(|line| &line.text).filter(|line| line.contains(text)).cloned().collect()
    }

    /// Returns the targets of the lines that contain `text`. Filters select lines by target.
    pub fn targets(&self, text: &str) -> Vec<String> {
        let lines = RECORDER.0.lock();
        let lines = lines.iter().skip(self.seen).filter(|line| line.text.contains(text));
        lines.map(|line| line.target.clone()).collect()
    }

    /// Fails unless a line with `text` was logged, or if there were more than one limit passes in the time.
    #[track_caller]
    pub fn assert_limited(&self, text: &str) {
        let lines = self.with(text);
        let periods = self.since.elapsed().as_nanos() / LIMIT_PERIOD.as_nanos() + 2;
        assert!(!lines.is_empty(), "nothing was logged of {text:?}");
        assert!(lines.len() as u128 <= LIMIT_LINES * periods, "{} lines, as {:?}", lines.len(), lines.last());
    }
}
