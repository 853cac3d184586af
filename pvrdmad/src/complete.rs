//! Completions that depend on more than the definition of the command line: configuration keys and their values, and
//! the names of devices and networks of the running daemon.
//!
//! The completion scripts ask the hidden command `complete` first. If it prints nothing, they use the words that were
//! generated from the definition.

use std::path::PathBuf;
use std::time::Duration;

use pvrdma_dev::Limits;
use pvrdma_rxe::ShareConfig;

use crate::config::{BACKENDS, ControlKeys, DeviceSpec, Key, Keys, NetworkSpec, share_words};
use crate::{control, control_path};

/// Names that a running daemon has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Names {
    Devices,
    Networks,
}

/// A key and its values, separated by `|` if they are words.
type Entry = (String, &'static str);

/// Returns the completions of the last word. The words are those after the name of the program, the last one up to the
/// cursor. Without a daemon, there are no names.
pub fn complete(words: &[String]) -> Vec<String> {
    let control = words.iter().position(|word| word == "--control").and_then(|at| words.get(at.checked_add(1)?));
    let control = control.filter(|path| !path.is_empty()).map(PathBuf::from);
    candidates(words, &|names| ask(control.clone(), names))
}

/// Time for which a completion waits for the daemon.
const PATIENCE: Duration = Duration::from_secs(1);

/// Asks the daemon. A daemon that does not answer has no names: an error would disturb the command line.
fn ask(path: Option<PathBuf>, names: Names) -> Vec<String> {
    let status = control_path::for_client(path).and_then(|path| control::ask_status_within(&path, PATIENCE));
    let Ok(status) = status else { return Vec::new() };
    match names {
        Names::Devices => status.devices.iter().map(|device| device.name().to_owned()).collect(),
        Names::Networks => status.networks.iter().map(|network| network.name.clone()).collect(),
    }
}

fn candidates(words: &[String], ask: &dyn Fn(Names) -> Vec<String>) -> Vec<String> {
    let Some((current, before)) = words.split_last() else { return Vec::new() };
    let command = before.first().map(String::as_str).filter(|word| !word.starts_with('-')).unwrap_or_default();
    let option = before.last().map(String::as_str).filter(|word| word.starts_with("--"));
    let serves = matches!(command, "" | "check");
    let starting = |names: Vec<String>| names.into_iter().filter(|name| name.starts_with(current.as_str())).collect();
    match (command, option) {
        (_, Some("--device")) if serves => keyed(current, ',', &entries(DeviceSpec::KEYS), ask),
        (_, Some("--network")) if serves || command == "add" => keyed(current, ',', &entries(NetworkSpec::KEYS), ask),
        (_, Some("--backend")) if serves => match current.split_once(',') {
            Some((name, rest)) => {
                let kind = BACKENDS.iter().map(|kind| &kind.about).find(|kind| kind.name == name);
                let keys = kind.map_or_else(Vec::new, |kind| entries(kind.keys));
                prefixed(&format!("{name},"), keyed(rest, ',', &keys, ask))
            }
            None => starting(backends()),
        },
        (_, Some("--control")) if serves => match current.split_once(',') {
            Some((path, rest)) => prefixed(&format!("{path},"), keyed(rest, ',', &entries(ControlKeys::KEYS), ask)),
            None => Vec::new(),
        },
        (_, Some("--device")) => starting(ask(Names::Devices)),
        (_, Some("--network")) => starting(ask(Names::Networks)),
        (_, Some(option)) if !FLAGS.contains(&option) => Vec::new(),
        ("add", _) => keyed(current, ',', &entries(DeviceSpec::KEYS), ask),
        ("limits", _) => keyed(current, ' ', &limits(), ask),
        ("share", _) => keyed(current, ' ', &share(), ask),
        _ => Vec::new(),
    }
}

/// Options of `add`, `limits` and `share` without a value.
const FLAGS: [&str; 1] = ["--json"];

/// Keys of the command line.
fn entries(keys: &[Key]) -> Vec<Entry> {
    let keys = keys.iter().filter(|key| !key.file_only && key.name != "path");
    keys.map(|key| (key.name.to_owned(), key.value)).collect()
}

/// Words for backends. A comma precedes keys.
fn backends() -> Vec<String> {
    let kinds = BACKENDS.iter().map(|kind| &kind.about);
    kinds.map(|kind| kind.name.to_owned() + if kind.keys.is_empty() { "" } else { "," }).collect()
}

fn limits() -> Vec<Entry> {
    Limits::keys().into_iter().map(|key| (key.name.to_owned(), "NUMBER")).collect()
}

fn share() -> Vec<Entry> {
    share_words(&ShareConfig::default()).into_keys().map(|key| (key, "VALUE")).collect()
}

/// Completes the last of several `key=value` pairs: a key that is not there yet, or a value that is a word.
fn keyed(text: &str, separator: char, keys: &[Entry], ask: &dyn Fn(Names) -> Vec<String>) -> Vec<String> {
    // An option may follow instead.
    if text.starts_with('-') {
        return Vec::new();
    }
    let (done, last) = match text.rfind(separator).and_then(|at| text.split_at_checked(at.saturating_add(1))) {
        Some(parts) => parts,
        None => ("", text),
    };
    let Some((key, value)) = last.split_once('=') else {
        let used: Vec<_> = done.split(separator).filter_map(|pair| pair.split('=').next()).collect();
        let open = keys.iter().filter(|(name, _)| name.starts_with(last) && !used.contains(&name.as_str()));
        return open.map(|(name, _)| format!("{done}{name}=")).collect();
    };
    let Some((_, form)) = keys.iter().find(|(name, _)| name == key) else { return Vec::new() };
    let values = if key == "network" { ask(Names::Networks) } else { values(form) };
    values.iter().filter(|word| word.starts_with(value)).map(|word| format!("{done}{key}={word}")).collect()
}

/// Returns the words among the alternatives of a value. Placeholders are in capitals, and ranges have digits.
fn values(form: &str) -> Vec<String> {
    let words = form.split('|').filter(|word| word.starts_with(|c: char| c.is_ascii_lowercase()));
    words.filter(|word| !word.contains(|c: char| c.is_ascii_uppercase())).map(str::to_owned).collect()
}

fn prefixed(prefix: &str, candidates: Vec<String>) -> Vec<String> {
    candidates.into_iter().map(|candidate| format!("{prefix}{candidate}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Completes a command line whose last word may be empty.
    fn completed(line: &str) -> Vec<String> {
        let words: Vec<_> = line.split(' ').map(str::to_owned).collect();
        candidates(&words, &|names| match names {
            Names::Devices => vec!["vm0".to_owned(), "vm1".to_owned(), "db".to_owned()],
            Names::Networks => vec!["red".to_owned(), "blue".to_owned()],
        })
    }

    #[test]
    fn names_of_the_daemon() {
        assert_eq!(completed("show qp --device "), ["vm0", "vm1", "db"]);
        assert_eq!(completed("capture --control /c --device vm"), ["vm0", "vm1"]);
        assert_eq!(completed("upgrade --network r"), ["red"]);
        assert_eq!(completed("add name=a,network="), ["name=a,network=red", "name=a,network=blue"]);
    }

    #[test]
    fn keys_and_values() {
        assert_eq!(completed("--device name=a,soc"), ["name=a,socket="]);
        assert_eq!(completed("check --network upl"), ["uplink="]);
        assert_eq!(completed("add --network name=a,upl"), ["name=a,uplink="]);
        assert_eq!(completed("add --network name=a,vlan=trunk na"), ["name="]);
        assert_eq!(completed("add name=a,int"), ["name=a,intx="]);
        assert_eq!(completed("add name=a,intx="), ["name=a,intx=on", "name=a,intx=off"]);
        assert_eq!(completed("add socket=f"), Vec::<String>::new(), "a path is no word");
        assert_eq!(completed("--device name=a,na"), Vec::<String>::new(), "each key once");
        assert_eq!(completed("--backend ib"), ["ibverbs,"]);
        assert_eq!(completed("--backend ibverbs,dev"), ["ibverbs,device="]);
        assert_eq!(completed("--control /c,gr"), ["/c,group="]);
        assert_eq!(completed("share --device vm0 wei"), ["weight="]);
        assert_eq!(completed("limits --device vm0 --json max_qp_"), ["max_qp_wr="]);
    }

    /// Keys of the file alone are not offered, and other words are left to the generated completions.
    #[test]
    fn the_rest_is_generated() {
        let keys = completed("add ");
        assert!(keys.contains(&"mac=".to_owned()) && !keys.contains(&"limits=".to_owned()), "{keys:?}");
        for line in ["", "sta", "add --", "show ", "capture --device vm0 -w ", "--config ", "limits --control "] {
            assert_eq!(completed(line), Vec::<String>::new(), "{line}");
        }
    }
}
