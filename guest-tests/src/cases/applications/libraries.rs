//! Libraries and tools for RDMA, each with its own test program.

use std::rc::Rc;

use anyhow::{Result, ensure};

use super::mpi::ucx;
use super::pair::ApplicationsPair;
use crate::cases::case::Case;
use crate::cases::exchange::Ready;
use crate::cases::shared::Shared;

/// Preloads the library that implements the socket calls over RDMA.
pub(in crate::cases) const RSOCKETS: &str = "LD_PRELOAD=/usr/lib/x86_64-linux-gnu/rsocket/librspreload.so";

/// Tests of `ucx_perftest` above the transports.
const UCX_TESTS: [&str; 15] = [
    "tag_lat",
    "tag_bw",
    "tag_sync_lat",
    "tag_sync_bw",
    "stream_lat",
    "stream_bw",
    "ucp_am_lat",
    "ucp_am_bw",
    "ucp_put_lat",
    "ucp_put_bw",
    "ucp_get",
    "ucp_add",
    "ucp_fadd",
    "ucp_swap",
    "ucp_cswap",
];

/// Tests of qperf with connections; those that begin with `ver` verify the results of atomics. Its datagram tests are
/// left out: it creates address handles without a GRH, which RoCE does not allow on any adapter.
const QPERF_TESTS: &str = "rc_lat rc_bw rc_bi_bw rc_rdma_read_lat rc_rdma_read_bw rc_rdma_write_lat \
    rc_rdma_write_poll_lat rc_rdma_write_bw rc_compare_swap_mr rc_fetch_add_mr ver_rc_compare_swap ver_rc_fetch_add";

pub(super) fn cases(shared: &Rc<Shared<ApplicationsPair>>) -> Vec<Case> {
    let mut cases = Vec::new();
    for transport in ["rc_verbs", "ud_verbs"] {
        cases.push(shared.case(format!("applications/ucx/{transport}"), move |pair| ucx_perftest(pair, transport)));
    }
    for (name, options) in [("verbs", "-p verbs -e msg"), ("verbs-ofi_rxm", "-p 'verbs;ofi_rxm' -e rdm")] {
        cases.push(shared.case(format!("applications/libfabric/{name}"), move |pair| fi_pingpong(pair, options)));
    }
    cases.push(shared.case("applications/qperf", qperf));
    cases.push(shared.case("applications/rsockets", rsockets));
    cases
}

fn ucx_perftest(pair: &ApplicationsPair, transport: &str) -> Result<String> {
    let environment = ucx(pair, transport)?.map(|(name, value)| format!("{name}={value}")).join(" ");
    for test in UCX_TESTS {
        for size in if is_atomic(test) { [8, 8] } else { [8, 100_000] } {
            let program = format!("env {environment} ucx_perftest -P 0 -t {test} -s {size} -n 100 -w 10 -f");
            pair.run(&program, Ready::Tcp(13337), &format!("{program} b"))?;
        }
    }
    Ok(format!("{} tests", UCX_TESTS.len()))
}

fn is_atomic(test: &str) -> bool {
    ["ucp_add", "ucp_fadd", "ucp_swap", "ucp_cswap"].contains(&test)
}

/// Runs `fi_pingpong` with all sizes; it compares the received data (`-c`).
fn fi_pingpong(pair: &ApplicationsPair, options: &str) -> Result<String> {
    let program = format!("fi_pingpong {options} -c -I 50 -S all");
    let exchange = pair.run(&program, Ready::Tcp(47592), &format!("{program} 192.168.77.2"))?;
    let sizes = exchange.client.lines().filter(|line| line.contains('=')).count();
    Ok(format!("{sizes} sizes"))
}

fn qperf(pair: &ApplicationsPair) -> Result<String> {
    let client = format!("qperf b -cm 1 -t 1 {QPERF_TESTS}; code=$?; qperf b quit; exit $code");
    let exchange = pair.run("qperf", Ready::Tcp(19765), &client)?;
    let done = QPERF_TESTS.split_whitespace().filter(|test| exchange.client.contains(&format!("{test}:"))).count();
    ensure!(done == QPERF_TESTS.split_whitespace().count(), "not all of its tests:\n{}", exchange.client);
    Ok(format!("{done} tests"))
}

/// Runs a program that uses the C library's sockets, and compares the received data.
fn rsockets(pair: &ApplicationsPair) -> Result<String> {
    let program = format!("{RSOCKETS} rstream -T s -T v -I 20 -C 20 -S 65536");
    let [server, client] = ["-b", "-s"].map(|side| format!("{program} {side} 192.168.77.2"));
    pair.run(&server, Ready::ConnectionManager, &client)?;
    Ok("26 MB each way".to_owned())
}
