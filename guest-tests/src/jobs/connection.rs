//! Programs that connect through the connection manager, that is over QP1.

use std::time::Duration;

use anyhow::{Result, bail};

use super::case::Case;
use super::exchange::{Programs, Ready};
use crate::pair::{Link, Pair};

/// `rping` with verification, `ucmatose` and `udaddy`, both ways.
pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (server, way) in [(1, "a-to-b"), (0, "b-to-a")] {
        cases.push(Case::new(format!("cm/rping/{way}"), move |pair, link| rping(pair, link, server)));
        cases.push(Case::new(format!("cm/ucmatose/{way}"), move |pair, link| {
            address_pair(pair, link, server, "ucmatose")
        }));
        cases.push(Case::new(format!("cm/udaddy/{way}"), move |pair, link| address_pair(pair, link, server, "udaddy")));
    }
    cases
}

fn rping(pair: &Pair, link: &Link, server: usize) -> Result<String> {
    let ip = link.ip[server];
    let exchange = Programs {
        server_vm: &pair.vms()[server],
        server: format!("rping -s -a {ip} -C 50 -V -S 4096"),
        ready: Ready::ConnectionManager,
        client_vm: &pair.vms()[1 - server],
        client: format!("rping -c -a {ip} -C 50 -V -v -S 4096"),
        timeout: Duration::from_secs(60),
    }
    .run()?;
    // The client prints what came back; a mismatch is a failure of its own, a short run must be one too.
    let pings = exchange.client.lines().filter(|line| line.contains("ping data")).count();
    if pings != 50 {
        bail!("{pings} of 50 pings came back:\n{}", exchange.client);
    }
    Ok(format!("{pings} pings verified"))
}

fn address_pair(pair: &Pair, link: &Link, server: usize, program: &str) -> Result<String> {
    let exchange = Programs {
        server_vm: &pair.vms()[server],
        server: format!("{program} -b {}", link.ip[server]),
        ready: Ready::ConnectionManager,
        client_vm: &pair.vms()[1 - server],
        client: format!("{program} -s {} -b {}", link.ip[server], link.ip[1 - server]),
        timeout: Duration::from_secs(60),
    }
    .run()?;
    if !exchange.client.contains("data transfers complete") {
        bail!("no transfer:\n{}", exchange.client);
    }
    Ok(String::new())
}
