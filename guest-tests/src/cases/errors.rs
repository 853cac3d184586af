//! Errors that one guest provokes at the other, and the error codes that the programs on both sides get.

use std::time::Duration;

use anyhow::{Context, Result};

use super::case::Case;
use super::exchange::{Programs, Ready};
use crate::pair::{Link, Pair};

/// One run in each direction.
pub(crate) fn cases() -> Vec<Case> {
    vec![
        Case::new("errors/a-to-b", |pair, link| errors(pair, link, 1)),
        Case::new("errors/b-to-a", |pair, link| errors(pair, link, 0)),
    ]
}

/// The programs compare the codes; the table of provoked errors is in `guest/errors.c`.
fn errors(pair: &Pair, link: &Link, server: usize) -> Result<String> {
    let command = |vm: usize| format!("errors {} {}", link.device, link.gid_index[vm]);
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
