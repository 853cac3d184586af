//! Failed queue pairs of a network: the last ones with cause and history, and how many failed for each cause.
//!
//! A guest destroys a failed queue pair within milliseconds, so the network keeps the record. Guests cause entries at
//! will: entries are bounded in number and bytes, and a device with many entries displaces its own ones first.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;

use jiff::Timestamp;
use parking_lot::Mutex;
use pvrdma_rxe::{FailureCause, QpFailure};
use serde::{Deserialize, Serialize};

/// Most entries of a network.
const MAX_ENTRIES: usize = 1000;

/// Most bytes that the entries of a network occupy.
const MAX_BYTES: usize = 1 << 20;

/// Most bytes of a history. The longest one that the adapter produces is shorter.
const MAX_HISTORY: usize = 4 << 10;

/// Page that describes the causes, each under a heading of its name.
const PAGE: &str = "docs/troubleshooting.md";

/// A failed queue pair.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FailedQueuePair {
    /// Time of the failure, UTC, as RFC 3339 has it.
    pub time: String,
    /// Name of the network.
    pub network: String,
    /// Name of its device.
    pub device: String,
    /// Its number.
    pub qpn: u32,
    /// Address of its peer.
    pub peer: IpAddr,
    /// Cause.
    pub cause: FailureCause,
    /// The half that failed and preceding events, as text.
    pub history: String,
    /// Page and section of the documents about the cause.
    pub help: String,
}

/// Failed queue pairs of one network, or of all.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Failures {
    /// The failed queue pairs, oldest first.
    pub failures: Vec<FailedQueuePair>,
    /// Networks whose process does not answer, so their failures are missing.
    #[serde(default)]
    pub silent: Vec<String>,
}

/// Returns the page and section of the documents about a cause.
pub(crate) fn help(cause: FailureCause) -> String {
    format!("{PAGE}#{}", cause.word())
}

/// Number of failed queue pairs of a device by cause.
#[derive(Debug, Default)]
pub(crate) struct FailureCounts(Mutex<BTreeMap<FailureCause, u64>>);

impl FailureCounts {
    fn count(&self, cause: FailureCause) {
        let mut counts = self.0.lock();
        let count = counts.entry(cause).or_default();
        *count = count.saturating_add(1);
    }

    /// Returns the number for each cause, including those that have not occurred.
    pub(crate) fn by_cause(&self) -> BTreeMap<FailureCause, u64> {
        let counts = self.0.lock();
        FailureCause::ALL.map(|cause| (cause, counts.get(&cause).copied().unwrap_or(0))).into()
    }
}

/// An entry of a device's list.
#[derive(Debug)]
struct Entry {
    time: Timestamp,
    qpn: u32,
    peer: IpAddr,
    cause: FailureCause,
    history: Box<str>,
}

impl Entry {
    fn bytes(&self) -> usize {
        size_of::<Self>().saturating_add(self.history.len())
    }
}

/// The last failed queue pairs of a network.
#[derive(Debug, Default)]
pub(crate) struct FailureLog(Mutex<Lists>);

#[derive(Debug, Default)]
struct Lists {
    /// Lists that are not empty. A device that was removed keeps its list.
    devices: BTreeMap<String, List>,
    count: usize,
    bytes: usize,
}

/// Entries of a device, oldest first.
#[derive(Debug, Default)]
struct List {
    entries: VecDeque<Entry>,
    bytes: usize,
}

impl FailureLog {
    /// Counts and keeps a failure of the device.
    pub(crate) fn add(&self, device: &str, counts: &FailureCounts, failure: &QpFailure) {
        counts.count(failure.cause);
        let entry = Entry {
            time: Timestamp::now(),
            qpn: failure.qpn.get(),
            peer: IpAddr::from(failure.peer.0).to_canonical(),
            cause: failure.cause,
            history: cut(&failure.history).into(),
        };
        self.0.lock().push(device, entry);
    }

    /// Returns the failures of all devices, or of one, from a time on, in milliseconds since 1970. Oldest first.
    pub(crate) fn list(&self, network: &str, device: Option<&str>, since: Option<i64>) -> Vec<FailedQueuePair> {
        let lists = self.0.lock();
        let asked = lists.devices.iter().filter(|(name, _)| device.is_none_or(|device| device == *name));
        let entries = asked.flat_map(|(name, list)| list.entries.iter().map(move |entry| (name, entry)));
        let mut entries: Vec<_> =
            entries.filter(|(_, entry)| since.is_none_or(|since| entry.time.as_millisecond() >= since)).collect();
        entries.sort_by_key(|(_, entry)| entry.time);
        entries
            .into_iter()
            .map(|(name, entry)| FailedQueuePair {
                time: format!("{:.3}", entry.time),
                network: network.to_owned(),
                device: name.clone(),
                qpn: entry.qpn,
                peer: entry.peer,
                cause: entry.cause,
                history: entry.history.to_string(),
                help: help(entry.cause),
            })
            .collect()
    }
}

impl Lists {
    fn push(&mut self, device: &str, entry: Entry) {
        let bytes = entry.bytes();
        let list = self.devices.entry(device.to_owned()).or_default();
        list.entries.push_back(entry);
        list.bytes = list.bytes.saturating_add(bytes);
        self.count = self.count.saturating_add(1);
        self.bytes = self.bytes.saturating_add(bytes);
        while self.count > MAX_ENTRIES || self.bytes > MAX_BYTES {
            let Some(longest) = self.devices.values_mut().max_by_key(|list| list.bytes) else { return };
            let bytes = longest.entries.pop_front().map_or(0, |dropped| dropped.bytes());
            longest.bytes = longest.bytes.saturating_sub(bytes);
            self.count = self.count.saturating_sub(1);
            self.bytes = self.bytes.saturating_sub(bytes);
            if longest.entries.is_empty() {
                self.devices.retain(|_, list| !list.entries.is_empty());
            }
        }
    }
}

/// Shortens a history that is too long.
fn cut(history: &str) -> &str {
    let end = (0..=MAX_HISTORY.min(history.len())).rev().find(|&at| history.is_char_boundary(at)).unwrap_or(0);
    history.get(..end).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use pvrdma_verbs_types::{Gid, Qpn};

    use super::*;

    fn failure(qpn: u32, history: &str) -> QpFailure {
        let (peer, cause) = (Gid([0; 16]), FailureCause::RemoteAccess);
        QpFailure { qpn: Qpn::new(qpn), peer, cause, history: history.to_owned(), logged: false }
    }

    #[test]
    fn each_cause_has_its_section() {
        let page = include_str!("../../docs/troubleshooting.md");
        for cause in FailureCause::ALL {
            let heading = format!("### {}", cause.word());
            assert!(page.lines().any(|line| line == heading), "{heading}");
        }
        let schema: serde_json::Value = serde_json::from_str(include_str!("../packaging/control.schema.json")).unwrap();
        let described = &schema["$defs"]["event"]["properties"]["cause"]["enum"];
        assert_eq!(*described, serde_json::json!(FailureCause::ALL));
    }

    fn numbers(log: &FailureLog, device: &str) -> Vec<u32> {
        log.list("a", Some(device), None).iter().map(|failed| failed.qpn).collect()
    }

    #[test]
    fn failures_are_kept_by_device_and_time() {
        let (log, counts) = (FailureLog::default(), FailureCounts::default());
        for (device, qpn) in [("vm0", 1), ("vm1", 2), ("vm0", 3)] {
            log.add(device, &counts, &failure(qpn, "its requester"));
        }
        let all = log.list("a", None, None);
        assert_eq!(all.iter().map(|failed| failed.qpn).collect::<Vec<_>>(), [1, 2, 3]);
        assert_eq!((&*all[0].network, &*all[0].help), ("a", "docs/troubleshooting.md#remote-access"));
        assert_eq!(numbers(&log, "vm0"), [1, 3]);
        let time: Timestamp = all[1].time.parse().unwrap();
        assert_eq!(log.list("a", None, Some(time.as_millisecond() + 3_600_000)), []);
        assert_eq!(log.list("a", None, Some(time.as_millisecond() - 3_600_000)).len(), 3);
        let counted = counts.by_cause();
        assert_eq!((counted[&FailureCause::RemoteAccess], counted[&FailureCause::CqOverrun]), (3, 0));
        assert_eq!(counted.len(), FailureCause::ALL.len());
    }

    /// Attack: a guest makes its queue pairs fail without end. The record is bounded in entries and bytes, and those of
    /// the other device stay.
    #[test]
    fn a_guest_displaces_only_its_own_failures() {
        let (log, counts) = (FailureLog::default(), FailureCounts::default());
        log.add("quiet", &counts, &failure(7, "its responder"));
        let last = u32::try_from(2 * MAX_ENTRIES).unwrap();
        for number in 1..=last {
            log.add("loud", &counts, &failure(number, "x"));
        }
        assert_eq!((numbers(&log, "quiet"), numbers(&log, "loud").len()), (vec![7], MAX_ENTRIES - 1));
        assert_eq!(numbers(&log, "loud").last(), Some(&last));
        for _ in 0..MAX_ENTRIES {
            log.add("loud", &counts, &failure(1, &"ß".repeat(100_000)));
        }
        let lists = log.0.lock();
        let held: usize = lists.devices.values().flat_map(|list| &list.entries).map(Entry::bytes).sum();
        assert_eq!(held, lists.bytes);
        assert!(held <= MAX_BYTES && lists.devices.contains_key("quiet"), "{held} bytes");
    }
}
