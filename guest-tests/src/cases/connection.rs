//! Programs that connect through the connection manager, which uses QP1.

use anyhow::{Result, bail};

use super::case::{Case, WAYS};
use super::exchange::{Programs, Ready};
use crate::endpoints::Endpoints;

/// `rping` with verification, `ucmatose` and `udaddy`, both ways.
pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (server, way) in WAYS {
        cases.push(Case::new(format!("cm/rping/{way}"), move |pair, link| rping(&pair.endpoints(link), server)));
        for program in ["ucmatose", "udaddy"] {
            cases.push(Case::new(format!("cm/{program}/{way}"), move |pair, link| {
                address_pair(&pair.endpoints(link), server, program)
            }));
        }
    }
    cases
}

/// Fifty pings, every byte compared.
pub(crate) fn rping(endpoints: &Endpoints<'_>, server: usize) -> Result<String> {
    let client = 1 - server;
    let exchange = Programs {
        server_vm: endpoints.vms[server],
        server: format!("rping -s -a {} -C 50 -V -S 4096", endpoints.address_of(server, server)),
        ready: Ready::ConnectionManager,
        client_vm: endpoints.vms[client],
        // The first characters of its lines suffice: complete lines take a minute where the guest is reached over a
        // serial port.
        client: format!(
            "rping -c -a {} -C 50 -V -v -S 4096 > /tmp/pings; code=$?; cut -c1-40 /tmp/pings; exit $code",
            endpoints.address_of(server, client)
        ),
        timeout: endpoints.patience,
    }
    .run()?;
    // The client prints the returned data. A mismatch fails by itself; this detects a run that is too short.
    let pings = exchange.client.lines().filter(|line| line.contains("ping data")).count();
    if pings != 50 {
        bail!("{pings} of 50 pings came back:\n{}", exchange.client);
    }
    Ok(format!("{pings} pings verified"))
}

/// Runs `ucmatose` or `udaddy`, which take the same options.
pub(crate) fn address_pair(endpoints: &Endpoints<'_>, server: usize, program: &str) -> Result<String> {
    let client = 1 - server;
    let exchange = Programs {
        server_vm: endpoints.vms[server],
        server: format!("{program} -b {}", endpoints.address_of(server, server)),
        ready: Ready::ConnectionManager,
        client_vm: endpoints.vms[client],
        client: format!(
            "{program} -s {} -b {}",
            endpoints.address_of(server, client),
            endpoints.address_of(client, client)
        ),
        timeout: endpoints.patience,
    }
    .run()?;
    if !exchange.client.contains("data transfers complete") {
        bail!("no transfer:\n{}", exchange.client);
    }
    Ok(String::new())
}
