//! Text of `--help` about keys, generated from their definitions.

use std::fmt::Write;

use pvrdma_ether_link::link_spec::LINKS;

use super::backend::BACKENDS;
use super::control::ControlKeys;
use super::fault::FaultKeys;
use super::keys::{Key, Keys};
use super::metrics::MetricsKeys;
use super::spec::{DeviceSpec, NetworkSpec};

/// Column at which explanations begin.
const COLUMN: usize = 24;

/// Log levels, paths, signals and exit statuses.
pub(crate) const AFTER: &str = "\
Environment:
  RUST_LOG             Log level: error, warn, info, debug or trace [default: info]
  RUNTIME_DIRECTORY    Default control socket: RUNTIME_DIRECTORY/control
  XDG_RUNTIME_DIR      Otherwise: XDG_RUNTIME_DIR/pvrdmad/control

Signals:
  SIGTERM, SIGINT      Disconnect clients, remove sockets and exit; a second one exits at once
  SIGHUP               Reload the configuration: devices are added and removed
  SIGUSR1, SIGUSR2     Ignored

Exit status:
  0                    Success
  1                    Failure, for example of a socket, a device, an interface or a running daemon
  2                    Invalid command line or configuration";

/// Returns the text about `--device`.
pub(crate) fn device() -> String {
    let mut text = "A device. Values replace those of a device of the same name in the file.\n\n\
                    Keys:\n"
        .to_owned();
    table(&mut text, DeviceSpec::KEYS, '=');
    text += "\nLINK is one of:\n";
    for (link, what) in LINKS {
        row(&mut text, link, what, "");
    }
    text += "\nFAULT:RATE is one of these, with '/' before the next. RATE is a fraction of frames:\n";
    table(&mut text, FaultKeys::KEYS, ':');
    text.trim_end().to_owned()
}

/// Returns the text about `--network`.
pub(crate) fn network() -> String {
    let mut text = "A network. A device reaches only devices of its own network.\n\
                    Values replace those of a network of the same name in the file.\n\n\
                    Keys:\n"
        .to_owned();
    table(&mut text, NetworkSpec::KEYS, '=');
    text.trim_end().to_owned()
}

/// Returns the text about `--control`.
pub(crate) fn control() -> String {
    let mut text = "Control socket: PATH or PATH,KEY=VALUE,...\n\nKeys:\n".to_owned();
    for key in ControlKeys::KEYS.iter().filter(|key| key.name != "path") {
        row(&mut text, &format!("{}={}", key.name, key.value), key.summary(), &key.note());
    }
    text.trim_end().to_owned()
}

/// Returns the text about `--metrics`.
pub(crate) fn metrics() -> String {
    let mut text = "Address of metrics over HTTP (GET /metrics): unix:PATH, or ADDRESS:PORT, which any\n\
                    host that reaches it can read; then KEY=VALUE,...\n\nKeys:\n"
        .to_owned();
    for key in MetricsKeys::KEYS.iter().filter(|key| key.name != "address") {
        row(&mut text, &format!("{}={}", key.name, key.value), key.summary(), &key.note());
    }
    text.trim_end().to_owned()
}

/// Returns the text about `--backend`.
pub(crate) fn backend() -> String {
    let mut text = "Data path.\n\n".to_owned();
    for kind in BACKENDS.iter().map(|kind| &kind.about) {
        let [keys, more] = if kind.keys.is_empty() { ["", ""] } else { [",KEY=VALUE,...", " Keys:"] };
        // Writing to a string does not fail.
        let _ = writeln!(text, "{}{keys}: {}.{more}", kind.name, kind.help);
        table(&mut text, kind.keys, '=');
    }
    text.trim_end().to_owned()
}

fn table(text: &mut String, keys: &[Key], assign: char) {
    for key in keys.iter().filter(|key| !key.file_only) {
        row(text, &format!("{}{assign}{}", key.name, key.value), key.summary(), &key.note());
    }
}

fn row(text: &mut String, word: &str, what: &str, note: &str) {
    let what = what.trim_end_matches('.');
    // Writing to a string does not fail.
    let _ = writeln!(text, "  {word:<COLUMN$} {what}{note}");
}
