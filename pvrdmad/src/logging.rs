//! Log output, and a log filter that can change while the daemon runs.
//!
//! Worker processes write to a pipe that the daemon reads. With a structured log format, they write a line of JSON for
//! each record, and the daemon logs it as its own with the name of the network.

use std::borrow::Cow;
use std::fmt;
use std::io::{self, Write};
use std::os::unix::net::UnixDatagram;
use std::panic;
use std::str::FromStr;
use std::sync::OnceLock;

use clap::ValueEnum;
use env_filter::Filter;
use jiff::Timestamp;
use log::kv::{Key, ToValue, Value, VisitSource};
use log::{Level, LevelFilter, Log, Metadata, Record};
use parking_lot::RwLock;
use serde::{Deserialize, Deserializer, Serialize};
use systemd_journal_logger::JournalLog;

use crate::text::printable_text;

/// Default filter.
const DEFAULT: &str = "info";
/// Most bytes of a filter.
const MAX_FILTER: usize = 256;
/// Environment variable with the filter.
const FILTER: &str = "RUST_LOG";
/// Environment variable that makes worker processes write JSON.
const STRUCTURED: &str = "PVRDMAD_LOG_JSON";

/// Socket of the journal.
const JOURNAL: &str = "/run/systemd/journal/socket";

static LOGGER: OnceLock<Logger> = OnceLock::new();

/// Format of lines.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum LogFormat {
    /// For people, to standard error.
    #[default]
    Text,
    /// An object in a line, to standard error.
    Json,
    /// Fields, to systemd's journal.
    Journald,
}

/// A log filter in the syntax of `RUST_LOG`: a level, or levels of modules separated by commas.
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

/// A record as a JSON object in a line.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Line<'a> {
    time: Cow<'a, str>,
    level: Cow<'a, str>,
    /// Module that logged it.
    target: Cow<'a, str>,
    /// Network whose process logged it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    network: Option<Cow<'a, str>>,
    /// Object that it is about, usually a device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    subject: Option<Cow<'a, str>>,
    message: Cow<'a, str>,
}

impl Line<'_> {
    fn of(record: &Record<'_>) -> Self {
        let mut subject = Subject(None);
        // The visitor returns no errors.
        let _ = record.key_values().visit(&mut subject);
        Self {
            time: now().into(),
            level: record.level().as_str().to_lowercase().into(),
            target: record.target().to_owned().into(),
            network: None,
            subject: subject.0.map(Cow::Owned),
            message: record.args().to_string().into(),
        }
    }

    /// Parses a line of a worker process. A line that is not a record, such as the last output of a process that
    /// panics, becomes an error.
    fn relayed(network: &str, text: &str) -> Line<'static> {
        let plain = |text: &str| Cow::Owned(printable_text(text));
        let own = Some(plain(network));
        match serde_json::from_str::<Line<'_>>(text) {
            Ok(line) => Line {
                time: plain(&line.time),
                level: plain(&line.level),
                target: plain(&line.target),
                network: own,
                subject: line.subject.as_deref().map(plain),
                message: plain(&line.message),
            },
            Err(_) => Line {
                time: now().into(),
                level: "error".into(),
                target: "stderr".into(),
                network: own,
                subject: None,
                message: plain(text),
            },
        }
    }

    /// Writes the record, and ignores failures.
    fn write(&self) {
        let Ok(mut text) = serde_json::to_vec(self) else { return };
        text.push(b'\n');
        let _ = io::stderr().write_all(&text);
    }

    fn send(&self, journal: &JournalLog) {
        let fields = [("network", self.network.as_deref()), ("subject", self.subject.as_deref())];
        let fields: Vec<_> = fields.iter().filter_map(|(key, value)| Some((*key, (*value)?))).collect();
        let level = self.level.parse().unwrap_or(Level::Error);
        // The failure of the journal itself can be reported nowhere else.
        let _ = journal.journal_send(
            &Record::builder()
                .level(level)
                .target(&self.target)
                .key_values(&fields.as_slice())
                .args(format_args!("{}", self.message))
                .build(),
        );
    }
}

fn now() -> String {
    format!("{:.3}", Timestamp::now())
}

/// Extracts the subject of a record.
struct Subject(Option<String>);

impl<'kvs> VisitSource<'kvs> for Subject {
    fn visit_pair(&mut self, key: Key<'kvs>, value: Value<'kvs>) -> Result<(), log::kv::Error> {
        if key.as_str() == "subject" {
            self.0 = Some(value.to_value().to_string());
        }
        Ok(())
    }
}

/// Destination of lines.
enum Sink {
    Text(Box<env_logger::Logger>),
    Json,
    Journal(Box<JournalLog>),
}

/// Writes records that pass the filter.
struct Logger {
    filter: RwLock<Filter>,
    /// The filter of the command line, which has precedence over `RUST_LOG` in worker processes, too.
    given: Option<String>,
    sink: Sink,
}

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        self.filter.read().enabled(metadata)
    }

    fn log(&self, record: &Record<'_>) {
        if !self.filter.read().matches(record) {
            return;
        }
        match &self.sink {
            Sink::Text(out) => out.log(record),
            Sink::Json => Line::of(record).write(),
            Sink::Journal(journal) => Line::of(record).send(journal),
        }
    }

    fn flush(&self) {}
}

/// Starts logging with a filter, by default the one in `RUST_LOG`.
///
/// # Errors
/// There is no journal to log to.
pub fn start(format: LogFormat, filter: Option<&LogFilter>) -> io::Result<()> {
    let given = filter.map(ToString::to_string);
    let words = given.clone().or_else(|| std::env::var(FILTER).ok()).unwrap_or_else(|| DEFAULT.to_owned());
    // The usual behaviour of `RUST_LOG`: invalid parts are ignored, with a message on standard error.
    let filter = env_filter::Builder::new().parse(&words).build();
    let level = filter.filter();
    let sink = match format {
        LogFormat::Text if std::env::var_os(STRUCTURED).is_none() => {
            Sink::Text(Box::new(env_logger::Builder::new().filter_level(LevelFilter::Trace).build()))
        }
        LogFormat::Text | LogFormat::Json => Sink::Json,
        LogFormat::Journald => {
            // This is checked here because a missing journal would make all later records disappear silently.
            UnixDatagram::unbound()?.connect(JOURNAL)?;
            Sink::Journal(Box::new(JournalLog::new()?))
        }
    };
    if !matches!(sink, Sink::Text(_)) {
        // Log: once, the last message of a thread.
        panic::set_hook(Box::new(|panicked| log::error!("{panicked}")));
    }
    let logger = LOGGER.get_or_init(|| Logger { filter: RwLock::new(filter), given, sink });
    if log::set_logger(logger).is_ok() {
        log::set_max_level(level);
    }
    Ok(())
}

/// Returns a warning if `RUST_LOG` looks wrong. Any word is accepted as the name of a module, and then nothing else is
/// logged.
pub fn doubt() -> Option<String> {
    doubt_of(&std::env::var(FILTER).ok()?)
}

fn doubt_of(words: &str) -> Option<String> {
    let (directives, _) = words.split_once('/').unwrap_or((words, ""));
    let known = |word: &str| word.is_empty() || word.contains(['=', ':']) || word.starts_with("pvrdma");
    let mut words = directives.split(',').map(str::trim);
    let odd = words.find(|word| !known(word) && word.parse::<LevelFilter>().is_err())?;
    Some(format!("RUST_LOG: '{odd}' is no level (off, error, warn, info, debug, trace): it names a module"))
}

/// Returns environment variables for worker processes.
pub(crate) fn environment() -> impl Iterator<Item = (&'static str, &'static str)> {
    let logger = LOGGER.get();
    let structured = logger.filter(|logger| !matches!(logger.sink, Sink::Text(_))).map(|_| (STRUCTURED, "1"));
    let filter = logger.and_then(|logger| logger.given.as_deref()).map(|given| (FILTER, given));
    structured.into_iter().chain(filter)
}

/// Logs a line of a worker process. Returns `false` if the caller must write the line unchanged.
pub(crate) fn relay(network: &str, text: &str) -> bool {
    match LOGGER.get().map(|logger| &logger.sink) {
        None | Some(Sink::Text(_)) => return false,
        Some(Sink::Json) => Line::relayed(network, text).write(),
        Some(Sink::Journal(journal)) => Line::relayed(network, text).send(journal),
    }
    true
}

/// Sets the log filter. Does nothing in a program that has another logger.
pub(crate) fn set(filter: &LogFilter) {
    let Some(logger) = LOGGER.get() else { return };
    let filter = env_filter::Builder::new().parse(&filter.0).build();
    let level = filter.filter();
    // The logger does the filtering, so the limit of the log crate must not drop anything.
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

    #[test]
    fn a_level_that_is_none() {
        for words in ["", "off", "Debug", "info,pvrdma_rxe=trace", "pvrdmad", "a::b", "mio=warn", "info/loud", "warn, "]
        {
            assert_eq!(doubt_of(words), None, "{words}");
        }
        for words in ["loud", "info,loud", "loud/x", "pvrdmad=info, loud"] {
            assert!(doubt_of(words).unwrap().starts_with("RUST_LOG: 'loud' is no level (off, "), "{words}");
        }
    }

    #[test]
    fn a_record_is_an_object() {
        let fields: &[(&str, &str)] = &[("subject", "vm0"), ("other", "x")];
        let line = Line::of(
            &Record::builder()
                .level(Level::Warn)
                .target("pvrdma_rxe")
                .key_values(&fields)
                .args(format_args!("a \"word\""))
                .build(),
        );
        let text = serde_json::to_string(&line).unwrap();
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&value["level"], &value["subject"]), (&"warn".into(), &"vm0".into()));
        assert_eq!((&value["message"], value.get("network")), (&"a \"word\"".into(), None));
        value["time"].as_str().unwrap().parse::<Timestamp>().unwrap();
        let relayed = Line::relayed("red", &text);
        assert_eq!(relayed, Line { network: Some("red".into()), ..line });
    }

    /// Attack: a compromised worker writes control characters, or text that is not a record.
    #[test]
    fn a_worker_logs_no_control_characters() {
        let text = r#"{"time":"\u001b[2J","level":"x\u0007","target":"\n","network":"blue","message":"\u001b[31m"}"#;
        let line = Line::relayed("red", text);
        assert_eq!(line.network.as_deref(), Some("red"), "a line has the network of its process");
        let parts = [&line.time, &line.level, &line.target, &line.message];
        assert!(parts.iter().all(|part| part.chars().all(|c| !c.is_control())), "{line:?}");
        let line = Line::relayed("red", "thread 'main' panicked \u{1b}[0m");
        assert_eq!((&*line.level, line.message.contains('\u{1b}')), ("error", false));
    }
}
