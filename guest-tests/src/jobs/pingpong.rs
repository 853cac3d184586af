//! The ping-pong programs that come with libibverbs.

use std::time::Duration;

use anyhow::{Context, Result};

use super::case::Case;
use super::exchange::{Programs, Ready};
use crate::pair::{Link, Pair};

/// `(name, program, options)`.
const VARIANTS: [(&str, &str, &str); 6] = [
    ("rc", "ibv_rc_pingpong", ""),
    ("rc-events", "ibv_rc_pingpong", "-e"),
    ("rc-1M", "ibv_rc_pingpong", "-s 1048576 -n 100"),
    ("rc-check", "ibv_rc_pingpong", "-c"),
    ("ud", "ibv_ud_pingpong", "-s 1024"),
    ("srq", "ibv_srq_pingpong", ""),
];

/// Each variant both ways.
pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (name, program, options) in VARIANTS {
        for (server, way) in [(1, "a-to-b"), (0, "b-to-a")] {
            cases.push(Case::new(format!("pingpong/{name}/{way}"), move |pair, link| {
                pingpong(pair, link, server, program, options)
            }));
        }
    }
    cases
}

/// Runs one program with its server in guest `server`; returns the speed it reports.
pub(crate) fn pingpong(pair: &Pair, link: &Link, server: usize, program: &str, options: &str) -> Result<String> {
    let client = 1 - server;
    let command = |vm: usize| format!("{program} -d {} -g {} {options}", link.device, link.gid_index[vm]);
    let exchange = Programs {
        server_vm: &pair.vms()[server],
        server: command(server),
        ready: Ready::Tcp(18515),
        client_vm: &pair.vms()[client],
        client: format!("{} {}", command(client), link.ip[server]),
        timeout: Duration::from_secs(120),
    }
    .run()?;
    let line = exchange
        .client
        .lines()
        .rfind(|line| line.contains("usec/iter"))
        .with_context(|| format!("no result in the client's output:\n{}", exchange.client))?;
    Ok(line.rsplit('=').next().unwrap_or(line).trim().to_owned())
}
