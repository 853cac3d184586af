//! Places where packets were lost: at interfaces, in their queues, and in the backlog of a processor.

use std::collections::BTreeMap;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

/// Places with the number of packets lost there.
pub(crate) type Losses = BTreeMap<String, u64>;

/// The namespaces.
const NAMESPACES: [&str; 4] = ["senders", "switch", "cable", "receiver"];

#[derive(Debug, Deserialize)]
struct Interface {
    ifname: String,
    stats64: Directions,
}

#[derive(Debug, Deserialize)]
struct Directions {
    rx: Dropped,
    tx: Dropped,
}

#[derive(Debug, Deserialize)]
struct Dropped {
    dropped: u64,
}

#[derive(Debug, Deserialize)]
struct Qdisc {
    kind: String,
    dev: String,
    #[serde(default)]
    drops: u64,
}

/// Returns the losses since the guest booted; those of queues since their creation.
fn all() -> Result<Losses> {
    let mut losses = Losses::from([("backlog".to_owned(), backlog()?)]);
    let mut add = |place: String, count: u64| *losses.entry(place).or_default() += count;
    for namespace in NAMESPACES {
        let links: Vec<Interface> = answer("ip", &["-n", namespace, "-j", "-s", "link"])?;
        for Interface { ifname, stats64 } in links {
            add(format!("{namespace} {ifname} rx"), stats64.rx.dropped);
            add(format!("{namespace} {ifname} tx"), stats64.tx.dropped);
        }
        let queues: Vec<Qdisc> = answer("tc", &["-n", namespace, "-j", "-s", "qdisc"])?;
        for Qdisc { kind, dev, drops } in queues {
            add(format!("{namespace} {dev} {kind}"), drops);
        }
    }
    Ok(losses)
}

fn answer<T: for<'de> Deserialize<'de>>(program: &str, arguments: &[&str]) -> Result<T> {
    let output = Command::new(program).args(arguments).output().with_context(|| format!("cannot start {program}"))?;
    ensure!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).with_context(|| format!("the output of {program} {arguments:?}"))
}

/// Returns the packets that all processors have dropped: the second column of the file (Linux,
/// `net/core/net-procfs.c`).
fn backlog() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/net/softnet_stat").context("the processors' backlogs")?;
    let dropped = |line: &str| {
        let column = line.split(' ').nth(1).context("no second column")?;
        u64::from_str_radix(column, 16).context("no number")
    };
    text.lines().map(dropped).sum()
}

/// Counts losses from its creation on.
#[derive(Debug)]
pub(super) struct Watch(Losses);

impl Watch {
    pub(super) fn new() -> Result<Self> {
        all().map(Self)
    }

    /// Returns the losses since then.
    pub(super) fn losses(self) -> Result<Losses> {
        let since = |(place, count): (String, u64)| {
            let lost = count.saturating_sub(self.0.get(&place).copied().unwrap_or(0));
            (lost > 0).then_some((place, lost))
        };
        Ok(all()?.into_iter().filter_map(since).collect())
    }
}
