//! The ping-pong programs that come with libibverbs.

use anyhow::{Context, Result};

use super::case::{Case, WAYS};
use super::exchange::{Programs, Ready};
use crate::endpoints::Endpoints;

/// `(name, program, options)`.
const VARIANTS: [(&str, &str, &str); 6] = [
    ("rc", "ibv_rc_pingpong", ""),
    ("rc-events", "ibv_rc_pingpong", "-e"),
    ("rc-1M", "ibv_rc_pingpong", "-s 1048576 -n 100"),
    ("rc-check", "ibv_rc_pingpong", "-c"),
    ("ud", "ibv_ud_pingpong", "-s 1024"),
    ("srq", "ibv_srq_pingpong", ""),
];

/// Each variant in both directions.
pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (name, program, options) in VARIANTS {
        for (server, way) in WAYS {
            cases.push(Case::new(format!("pingpong/{name}/{way}"), move |pair, link| {
                pingpong(&pair.endpoints(link), server, program, options)
            }));
        }
    }
    cases
}

/// Runs one program with its server in guest `server`; returns the speed it reports.
pub(crate) fn pingpong(endpoints: &Endpoints<'_>, server: usize, program: &str, options: &str) -> Result<String> {
    let client = 1 - server;
    // Datagrams have no path MTU.
    let mtu =
        endpoints.path_mtu.filter(|_| !program.contains("_ud_")).map(|mtu| format!("-m {mtu}")).unwrap_or_default();
    let command =
        |end: usize| format!("{program} -d {} -g {} {mtu} {options}", endpoints.device[end], endpoints.gid_index[end]);
    let exchange = Programs {
        server_vm: endpoints.vms[server],
        server: command(server),
        ready: Ready::Tcp(18515),
        client_vm: endpoints.vms[client],
        client: format!("{} {}", command(client), endpoints.tcp[server]),
        timeout: endpoints.patience,
    }
    .run()?;
    let line = exchange
        .client
        .lines()
        .rfind(|line| line.contains("usec/iter"))
        .with_context(|| format!("no result in the client's output:\n{}", exchange.client))?;
    Ok(line.rsplit('=').next().unwrap_or(line).trim().to_owned())
}
