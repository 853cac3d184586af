//! Compares every byte of a large number of mixed operations.

use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::case::Case;
use super::exchange::{Programs, Ready};
use crate::pair::{Link, LinkKind, Pair};

/// One run in each direction.
pub(crate) fn cases() -> Vec<Case> {
    vec![
        Case::new("integrity/a-to-b", |pair, link| integrity(pair, link, 1, 1)),
        Case::new("integrity/b-to-a", |pair, link| integrity(pair, link, 0, 2)),
    ]
}

/// Moves half a gibibyte in each direction; much less if software in the guests does the work.
fn integrity(pair: &Pair, link: &Link, server: usize, seed: u64) -> Result<String> {
    compare(pair, link, server, if link.kind == LinkKind::Rxe { 16 } else { 512 }, seed)
}

/// Returns the programs that compare each byte of this amount in each direction, with the server in this guest.
pub(super) fn programs<'a>(pair: &'a Pair, link: &Link, server: usize, mebibytes: u32, seed: u64) -> Programs<'a> {
    let command = |vm: usize| format!("integrity {} {} {mebibytes} {seed}", link.device, link.gid_index[vm]);
    Programs {
        server_vm: &pair.vms()[server],
        server: command(server),
        ready: Ready::Tcp(18600),
        client_vm: &pair.vms()[1 - server],
        client: format!("{} {}", command(1 - server), link.ip[server]),
        timeout: Duration::from_secs(300),
    }
}

/// Compares this amount in each direction.
pub(crate) fn compare(pair: &Pair, link: &Link, server: usize, mebibytes: u32, seed: u64) -> Result<String> {
    let exchange = programs(pair, link, server, mebibytes, seed).run()?;
    let result = |output: &str| output.lines().find(|line| line.starts_with("compared")).map(str::to_owned);
    let client =
        result(&exchange.client).with_context(|| format!("no result in the client's output:\n{}", exchange.client))?;
    if result(&exchange.server).as_ref() != Some(&client) {
        bail!("the two sides counted differently:\n{client}\n{}", exchange.server);
    }
    Ok(client)
}
