//! Errors that one guest provokes at the other, and the codes and events that the programs on both sides get.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result};

use super::case::Case;
use super::exchange::{Programs, Ready};
use super::kernel_log::take_warnings;
use super::lifecycle::reload;
use crate::pair::{Link, Pair};

/// The faults that the programs expect with `-f`.
pub(super) const FAULTS: &str = include_str!("../../../lab/guest/faults.txt");

/// One run in each direction, and one with faults on request.
pub(crate) fn cases() -> Vec<Case> {
    vec![
        Case::new("errors/a-to-b", |pair, link| errors(pair, link, "errors", 1)),
        Case::new("errors/b-to-a", |pair, link| errors(pair, link, "errors", 0)),
        // The driver complains about the device that fails.
        Case::new("errors/on-request", |pair, link| on_request(pair, link)).ignore_kernel_log(),
    ]
}

/// Every completion status and asynchronous event of `docs/faults.md` that a device can raise, the last one being that
/// the device of guest a fails.
fn on_request(pair: &Pair, link: &Link) -> Result<String> {
    let daemon = pair.daemon().context("there is no daemon")?;
    let file = pair.directory().join("faults.txt");
    fs::write(&file, FAULTS).context("cannot write the faults")?;
    daemon.set_faults(&file)?;
    let result = errors(pair, link, "errors -f", 1);
    ["vm0", "vm1"].iter().try_for_each(|device| daemon.end_faults(device))?;
    reload(pair, 0)?;
    // Otherwise the next case would find the driver's warnings about the failed device.
    pair.vms().iter().try_for_each(|vm| take_warnings(vm).map(drop))?;
    result
}

/// The programs compare the codes; the tables of provoked errors are in `guest/errors.c`.
fn errors(pair: &Pair, link: &Link, program: &str, server: usize) -> Result<String> {
    let command = |vm: usize| format!("{program} {} {}", link.device, link.gid_index[vm]);
    let exchange = Programs {
        server_vm: &pair.vms()[server],
        server: command(server),
        ready: Ready::Tcp(18601),
        client_vm: &pair.vms()[1 - server],
        client: format!("{} {}", command(1 - server), link.ip[server]),
        timeout: Duration::from_secs(60),
    }
    .run()?;
    let result = exchange.client.lines().find(|line| line.starts_with("provoked")).map(str::to_owned);
    result.with_context(|| format!("no result in the client's output:\n{}", exchange.client))
}
