//! The same inside a guest, where the kernel has an adapter of the same kind: `rdma_rxe`. Both run on the same (emulated)
//! processors.
//!
//! `rdma_rxe` has its sockets in the first network namespace only, so it cannot be at both ends of a pair of interfaces in
//! one guest. It is measured with itself, which needs no network at all and is therefore more than fair to it, and between two
//! guests, where each side has a processor of its own.

use std::time::Duration;

use anyhow::{Context, Result};

use super::network::Network;
use super::peer::Outcome;
use super::{BULK, PeerOptions, figure, gigabits, session};
use crate::bed::Bed;
use crate::bench::Figure;
use crate::jobs::perftest;
use crate::pair::{LinkKind, Pair, PairOptions};

/// Emulated processors are slow.
const SECONDS: f64 = 6.0;
const TIMEOUT: Duration = Duration::from_secs(120);
/// Enough for seconds at what `rdma_rxe` reaches.
const WRITE: &str = "-s 1048576 -n 20";
const LOSS: &str = "1%";

/// Measures both in guests.
pub(crate) fn measure(runs: usize) -> Result<Vec<Figure>> {
    let bed = Bed::build()?;
    let pair = Pair::boot(&bed, &PairOptions { pvrdma: false, ..PairOptions::default() })?;
    let [mut alone, mut wire, mut loss] = [const { Vec::new() }; 3];
    for _ in 0..runs {
        let ours = [engine(&pair, 0)?, engine(&pair, 100)?];
        let theirs = [between_guests(&pair, false)?, between_guests(&pair, true)?];
        alone.push([ours[0], rxe_with_itself(&pair)?]);
        wire.push([ours[0], theirs[0]]);
        loss.push([ours[1], theirs[1]]);
    }
    let (title, base) = ("RDMA write of 1 MiB, engine in a guest", "rdma_rxe between guests");
    Ok(vec![
        figure("guest-alone", title.into(), "Gb/s", false, &alone, "rdma_rxe with itself there"),
        figure("guest-wire", title.into(), "Gb/s", false, &wire, base),
        figure("guest-loss", format!("{title}, {LOSS} lost"), "Gb/s", false, &loss, base),
    ])
}

/// The engine on both sides of a pair of interfaces in the first guest, in Gb/s.
fn engine(pair: &Pair, loss: u16) -> Result<f64> {
    let output = pair.a().spawn(&format!("/run/guest-tests wire-in-guest --loss {loss}"))?.wait_success(TIMEOUT)?;
    let line =
        output.lines().rev().find(|line| line.starts_with('{')).context("no result of the engine in the guest")?;
    let outcome: Outcome = serde_json::from_str(line)?;
    log::info!("{outcome:?}");
    Ok(gigabits(&BULK, &outcome))
}

/// Runs in the guest and prints what the sender did.
pub(crate) fn run_inside(loss: u16) -> Result<()> {
    let network = Network::new()?;
    let [sent, _] = session::devices(&network, &PeerOptions { loss, seconds: SECONDS, ..BULK })?;
    println!("{}", serde_json::to_string(&sent)?);
    Ok(())
}

fn rxe_with_itself(pair: &Pair) -> Result<f64> {
    let link = pair.link(LinkKind::Rxe)?;
    let program = format!("ib_write_bw -F -d {} -x {} --report_gbits {WRITE}", link.device, link.gid_index[0]);
    let script = format!(
        "{program} > /tmp/server 2>&1 & \
         until grep -q :4853 /proc/net/tcp /proc/net/tcp6; do sleep 0.1; done; {program} {}; wait",
        link.ip[0]
    );
    let output = pair.a().spawn(&script)?.wait_success(TIMEOUT)?;
    perftest::single(&perftest::parse(&output), perftest::Row::gigabits)
}

fn between_guests(pair: &Pair, loss: bool) -> Result<f64> {
    let link = pair.link(LinkKind::Rxe)?;
    let netem = |verb: &str| -> Result<()> {
        for vm in pair.vms() {
            vm.run(&format!(
                "modprobe sch_netem; tc qdisc {verb} dev $(cat /run/nic-virtio_net) root netem loss {LOSS}"
            ))?;
        }
        Ok(())
    };
    if loss {
        netem("add")?;
    }
    let rows = perftest::run(&pair.ends(&link), 1, "ib_write_bw", WRITE);
    if loss {
        netem("del")?;
    }
    perftest::single(&rows?, perftest::Row::gigabits)
}
