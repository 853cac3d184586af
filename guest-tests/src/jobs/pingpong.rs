//! The ping-pong programs that come with libibverbs.

use anyhow::{Context, Result};

use super::case::{Case, WAYS};
use super::exchange::{Programs, Ready};
use crate::ends::Ends;

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
        for (server, way) in WAYS {
            cases.push(Case::new(format!("pingpong/{name}/{way}"), move |pair, link| {
                pingpong(&pair.ends(link), server, program, options)
            }));
        }
    }
    cases
}

/// Runs one program with its server in guest `server`; returns the speed it reports.
pub(crate) fn pingpong(ends: &Ends<'_>, server: usize, program: &str, options: &str) -> Result<String> {
    let client = 1 - server;
    // Datagrams have no path MTU.
    let mtu = ends.path_mtu.filter(|_| !program.contains("_ud_")).map(|mtu| format!("-m {mtu}")).unwrap_or_default();
    let command = |end: usize| format!("{program} -d {} -g {} {mtu} {options}", ends.device[end], ends.gid_index[end]);
    let exchange = Programs {
        server_vm: ends.vms[server],
        server: command(server),
        ready: Ready::Tcp(18515),
        client_vm: ends.vms[client],
        client: format!("{} {}", command(client), ends.tcp[server]),
        timeout: ends.patience,
    }
    .run()?;
    let line = exchange
        .client
        .lines()
        .rfind(|line| line.contains("usec/iter"))
        .with_context(|| format!("no result in the client's output:\n{}", exchange.client))?;
    Ok(line.rsplit('=').next().unwrap_or(line).trim().to_owned())
}
