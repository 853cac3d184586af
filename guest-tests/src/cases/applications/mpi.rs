//! MPI: a program that compares every byte, one rank in each guest.

use std::rc::Rc;

use anyhow::{Result, ensure};

use super::pair::ApplicationsPair;
use crate::cases::case::Case;
use crate::cases::shared::Shared;

/// Each library over each of its transports to the device.
pub(super) fn cases(shared: &Rc<Shared<ApplicationsPair>>) -> Vec<Case> {
    let open_mpi = |transport: &'static str| {
        shared.case(format!("applications/openmpi/ucx-{transport}"), move |pair| {
            let ucx = ucx(pair, transport)?.map(|(name, value)| format!("-x {name}={value}")).join(" ");
            compared(&pair.command(&format!(
                "mpirun.openmpi --allow-run-as-root --host a,b -np 2 --mca pml ucx --mca osc ucx \
                 --mca opal_common_ucx_devices any --mca opal_common_ucx_tls any \
                 --mca btl_tcp_if_include eth0 --mca oob_tcp_if_include eth0 {ucx} mpi_exchange.openmpi 2>&1"
            ))?)
        })
    };
    let mpich = |transport: &'static str| {
        shared.case(format!("applications/mpich/ucx-{transport}"), move |pair| {
            let ucx = ucx(pair, transport)?.map(|(name, value)| format!("-genv {name} {value}")).join(" ");
            compared(&pair.command(&format!("mpirun.mpich -hosts a,b -n 2 {ucx} mpi_exchange.mpich 2>&1"))?)
        })
    };
    vec![open_mpi("rc_verbs"), open_mpi("ud_verbs"), mpich("rc_verbs"), mpich("ud_verbs")]
}

/// Returns the environment variables that UCX needs.
pub(super) fn ucx(pair: &ApplicationsPair, transport: &str) -> Result<[(&'static str, String); 4]> {
    let endpoints = pair.endpoints()?;
    let [index, _] = endpoints.gid_index;
    Ok([
        // Connections are negotiated with datagrams.
        ("UCX_TLS", if transport == "ud_verbs" { transport.to_owned() } else { format!("{transport},ud_verbs:aux") }),
        ("UCX_NET_DEVICES", format!("{}:1", endpoints.device[0])),
        ("UCX_IB_GID_INDEX", index.to_string()),
        // Before 1.19 UCX takes the service level of a completion for the packet type, and drops all IPv4 packets.
        ("UCX_UD_VERBS_ETH_DGID_CHECK", "n".to_owned()),
    ])
}

/// Checks that both ranks report the amount that they have compared.
fn compared(output: &str) -> Result<String> {
    let mut ranks: Vec<&str> = output.lines().filter(|line| line.ends_with(" bytes compared")).collect();
    ranks.sort_unstable();
    ranks.dedup();
    ensure!(ranks.len() == 2 && ranks[0].starts_with("rank 0: "), "not the output of two ranks:\n{output}");
    Ok(ranks.join(", "))
}
