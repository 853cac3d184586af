//! Renders failed queue pairs as text.

use std::collections::BTreeSet;
use std::fmt::Write;

use pvrdma_rxe::faults::FaultStatus;

use super::report::DaemonStatus;
use super::table::short;
use crate::failures::{FailedQueuePair, Failures};

impl DaemonStatus {
    /// Requested faults of devices.
    pub(super) fn render_faults(&self) -> String {
        let mut text = String::new();
        for device in &self.devices {
            for FaultStatus { rule, seen, happened } in &device.faults {
                let _ = writeln!(text, "{}: fault {rule} (happened {happened} times in {seen})", short(device.name()));
            }
        }
        text
    }

    /// Queue pairs that failed, by device and cause.
    pub(super) fn render_failed(&self) -> String {
        let mut text = String::new();
        for device in &self.devices {
            let failed = device.failed.iter().filter(|&(_, &count)| count > 0);
            let words: Vec<_> = failed.map(|(cause, count)| format!("{count} {}", cause.word())).collect();
            if !words.is_empty() {
                let _ = writeln!(text, "{}: queue pairs failed: {}", short(device.name()), words.join(", "));
            }
        }
        if !text.is_empty() {
            text += "  pvrdmad show failures tells when and why\n";
        }
        text
    }
}

/// Renders failed queue pairs: a line each with its cause, then its history, and at the end the sections about the
/// causes.
pub fn render_failures(all: &Failures) -> String {
    let mut text = String::new();
    for failed in &all.failures {
        let FailedQueuePair { time, network: _, device, qpn, peer, cause, history, help: _ } = failed;
        let _ = writeln!(text, "{time} {device}: QP {qpn:#x} to {peer}: {}", cause.word());
        for event in history.split("; ") {
            let _ = writeln!(text, "  {event}");
        }
    }
    for network in &all.silent {
        let _ = writeln!(text, "network {network}: its process does not answer");
    }
    let pages: BTreeSet<_> = all.failures.iter().map(|failed| &failed.help).collect();
    for page in pages {
        let _ = writeln!(text, "see {page}");
    }
    if text.is_empty() { "no failed queue pairs\n".to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use pvrdma_rxe::FailureCause;

    use super::*;

    #[test]
    fn failures_as_text() {
        assert_eq!(render_failures(&Failures::default()), "no failed queue pairs\n");
        let failed = FailedQueuePair {
            time: "2027-01-31T08:00:00.000Z".to_owned(),
            network: "red".to_owned(),
            device: "vm0".to_owned(),
            qpn: 0x12,
            peer: [10, 0, 0, 2].into(),
            cause: FailureCause::RetryExceeded,
            history: "its requester; -8.000 ms timeout".to_owned(),
            help: "docs/troubleshooting.md#retry-exceeded".to_owned(),
        };
        let all = Failures { failures: vec![failed.clone(), failed], silent: vec!["blue".to_owned()] };
        let one =
            "2027-01-31T08:00:00.000Z vm0: QP 0x12 to 10.0.0.2: retry-exceeded\n  its requester\n  -8.000 ms timeout\n";
        assert_eq!(
            render_failures(&all),
            format!(
                "{one}{one}network blue: its process does not answer\nsee docs/troubleshooting.md#retry-exceeded\n"
            )
        );
    }
}
