//! What is logged, which can change while the daemon runs.

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

use env_filter::Filter;
use log::{LevelFilter, Log, Metadata, Record};
use parking_lot::RwLock;
use serde::{Deserialize, Deserializer, Serialize};

/// What is logged if nobody says so.
const DEFAULT: &str = "info";
/// Bytes of a filter.
const MAX_FILTER: usize = 256;

static LOGGER: OnceLock<Logger> = OnceLock::new();

/// Which lines are logged, in the words of `RUST_LOG`: a level, or levels of modules with commas between them.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct LogFilter(String);

impl FromStr for LogFilter {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.len() > MAX_FILTER {
            return Err(format!("a filter has at most {MAX_FILTER} bytes"));
        }
        let directive = |directive: &str| {
            let (module, level) = directive.split_once('=').unwrap_or(("", directive));
            let is_module = module.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b':'));
            is_module && level.parse::<LevelFilter>().is_ok()
        };
        match text.split(',').all(directive) {
            true => Ok(Self(text.to_owned())),
            false => Err(format!("'{text}' is not one of off, error, warn, info, debug, trace, or MODULE=LEVEL,...")),
        }
    }
}

impl<'de> Deserialize<'de> for LogFilter {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

impl fmt::Display for LogFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Writes what passes the filter to standard error.
struct Logger {
    filter: RwLock<Filter>,
    out: env_logger::Logger,
}

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        self.filter.read().enabled(metadata)
    }

    fn log(&self, record: &Record<'_>) {
        if self.filter.read().matches(record) {
            self.out.log(record);
        }
    }

    fn flush(&self) {
        self.out.flush();
    }
}

/// Logs to standard error from now on, what `RUST_LOG` says.
pub fn start() {
    let words = std::env::var("RUST_LOG").unwrap_or_else(|_| DEFAULT.to_owned());
    // As it always was: what it does not understand is left out, with a word on standard error.
    let filter = env_filter::Builder::new().parse(&words).build();
    let level = filter.filter();
    let out = env_logger::Builder::new().filter_level(LevelFilter::Trace).build();
    let logger = LOGGER.get_or_init(|| Logger { filter: RwLock::new(filter), out });
    if log::set_logger(logger).is_ok() {
        log::set_max_level(level);
    }
}

/// Logs by this filter from now on. Does nothing in a program that has another logger.
pub(crate) fn set(filter: &LogFilter) {
    let Some(logger) = LOGGER.get() else { return };
    let filter = env_filter::Builder::new().parse(&filter.0).build();
    let level = filter.filter();
    // Nobody misses a line that passes both.
    log::set_max_level(LevelFilter::Trace);
    *logger.filter.write() = filter;
    log::set_max_level(level);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_in_words() {
        for words in ["off", "debug", "WARN", "info,pvrdma_rxe=trace", "pvrdmad::supervisor=debug"] {
            assert_eq!(words.parse::<LogFilter>().unwrap().to_string(), words);
        }
        let long = format!("{}info", "info,".repeat(60));
        for wrong in ["", "loud", "info,", "=", "a b=info", "pvrdma_rxe=loud", "info/regex", "\u{1b}[31m=info", &long] {
            assert!(wrong.parse::<LogFilter>().is_err(), "{wrong}");
        }
    }
}
