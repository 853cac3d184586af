//! The same measurements inside a guest, whose kernel has an adapter of the same kind: `rdma_rxe`. Both run on the same
//! (emulated) processors, over a pair of interfaces with the same MTU.

use std::time::Duration;

use anyhow::{Context, Result};

use super::network::{MTU, Network};
use super::peer::{Outcome, PeerOptions};
use super::session;
use crate::bench::figure::Figure;
use crate::cases::perftest;
use crate::endpoints::{gid_index, listens};
use crate::image::GuestImage;
use crate::vm::{Vm, VmBuilder};

/// Duration, longer because emulated processors are slow.
const SECONDS: f64 = 6.0;
const TIMEOUT: Duration = Duration::from_secs(180);
/// Messages in a round of `rdma_rxe`, which take several seconds.
const MESSAGES: u64 = 40;
const LOSS: &str = "1%";
/// The addresses of the two `rdma_rxe` devices.
const RXE_IP: [&str; 2] = ["10.79.0.1", "10.79.0.2"];

/// Measures both in a guest.
pub(crate) fn measure(runs: usize) -> Result<Vec<Figure>> {
    let image = GuestImage::build()?;
    let directory = tempfile::Builder::new().prefix("guest-tests-").tempdir().context("cannot create a directory")?;
    let vm = VmBuilder::new(&image, directory.path()).name("wire").cpus(2).boot()?;
    measure_in(&vm, runs).with_context(|| vm.diagnosis())
}

fn measure_in(vm: &Vm, runs: usize) -> Result<Vec<Figure>> {
    let rxe = RxePair::new(vm)?;
    let (mut whole, mut lossy) = (Vec::new(), Vec::new());
    for _ in 0..runs {
        whole.push([engine(vm, 0)?, rxe.write()?]);
        lossy.push([engine(vm, 100)?, rxe.write_with_loss()?]);
    }
    let title = "RDMA write of 1 MiB, engine in a guest";
    let base = "rdma_rxe there, over such a wire";
    Ok(vec![
        Figure::of_rounds("wire/guest", format!("wire: {title}"), "Gb/s", false, &whole, base),
        Figure::of_rounds(
            "wire/guest-loss",
            format!("wire: {title}, {LOSS} of all packets lost"),
            "Gb/s",
            false,
            &lossy,
            base,
        ),
    ])
}

/// Measures the engine on both sides of a pair of interfaces, in Gb/s.
fn engine(vm: &Vm, loss: u16) -> Result<f64> {
    let output = vm.spawn(&format!("/run/guest-tests wire-in-guest --loss {loss}"))?.wait_success(TIMEOUT)?;
    let line =
        output.lines().rev().find(|line| line.starts_with('{')).context("no result of the engine in the guest")?;
    let outcome: Outcome = serde_json::from_str(line)?;
    log::info!("{outcome:?}");
    Ok(outcome.gigabits(PeerOptions::BULK.size))
}

/// Runs in the guest and prints the sender's result.
pub(crate) fn run_inside(loss: u16) -> Result<()> {
    let network = Network::new()?;
    let [sent, _] = session::run(&network, &PeerOptions { loss, seconds: SECONDS, ..PeerOptions::BULK })?;
    println!("{}", serde_json::to_string(&sent)?);
    Ok(())
}

/// Two `rdma_rxe` devices, on both ends of a pair of interfaces.
///
/// `rdma_rxe` has its sockets in the first network namespace only, so both ends are there, and the kernel would deliver
/// packets from one address to the other without any interface. Rules in front of the table of local addresses send
/// them over the wire instead.
struct RxePair<'a> {
    vm: &'a Vm,
    gid_index: [u32; 2],
}

impl<'a> RxePair<'a> {
    fn new(vm: &'a Vm) -> Result<Self> {
        let [a, b] = RXE_IP;
        vm.run(&format!(
            "set -e
             modprobe veth; modprobe sch_netem; modprobe ib_uverbs; modprobe rdma_rxe
             ip link set lo up
             ip link add rxe-a mtu {MTU} type veth peer name rxe-b mtu {MTU}
             for name in all rxe-a rxe-b; do
                 echo 1 > /proc/sys/net/ipv4/conf/$name/accept_local
                 echo 0 > /proc/sys/net/ipv4/conf/$name/rp_filter
             done
             ip address add {a}/24 dev rxe-a
             ip address add {b}/24 dev rxe-b
             ip link set rxe-a up
             ip link set rxe-b up
             ip neighbour replace {b} lladdr $(cat /sys/class/net/rxe-b/address) dev rxe-a nud permanent
             ip neighbour replace {a} lladdr $(cat /sys/class/net/rxe-a/address) dev rxe-b nud permanent
             ip route add {b} dev rxe-a table 100
             ip route add {a} dev rxe-b table 101
             ip rule add pref 10 iif lo from {a} to {b} lookup 100
             ip rule add pref 11 iif lo from {b} to {a} lookup 101
             ip rule add pref 1000 lookup local
             ip rule del pref 0
             rdma link add rxe_a type rxe netdev rxe-a
             rdma link add rxe_b type rxe netdev rxe-b"
        ))?;
        let index = |device: &str, ip: &str| gid_index(vm, device, ip.parse().context("an address")?);
        Ok(Self { vm, gid_index: [index("rxe_a", a)?, index("rxe_b", b)?] })
    }

    /// Measures RDMA writes from one to the other, in Gb/s.
    fn write(&self) -> Result<f64> {
        let before = self.crossed()?;
        let options = format!("-F --report_gbits -s {} -n {MESSAGES}", PeerOptions::BULK.size);
        let [client, server] = self.gid_index;
        // The programs exchange their parameters over the loopback interface.
        let output = self
            .vm
            .spawn(&format!(
                "ib_write_bw -d rxe_b -x {server} {options} > /tmp/server 2>&1 &
                 until {}; do sleep 0.1; done
                 ib_write_bw -d rxe_a -x {client} {options} 127.0.0.1; code=$?
                 wait; exit $code",
                listens(18515)
            ))?
            .wait_success(TIMEOUT)?;
        let crossed = self.crossed()?.saturating_sub(before);
        anyhow::ensure!(
            crossed >= MESSAGES * PeerOptions::BULK.size as u64,
            "only {crossed} bytes crossed the wire:\n{output}"
        );
        perftest::single(&perftest::parse(&output), perftest::Row::gigabits)
    }

    /// Measures RDMA writes while each interface loses packets, in Gb/s.
    fn write_with_loss(&self) -> Result<f64> {
        let on_both = |verb: &str| {
            self.vm.run(&format!(
                "for name in rxe-a rxe-b; do tc qdisc {verb} dev $name root netem loss {LOSS} || exit; done"
            ))
        };
        on_both("add")?;
        let written = self.write();
        on_both("del")?;
        written
    }

    /// Returns the number of bytes that have arrived at the far end.
    fn crossed(&self) -> Result<u64> {
        let text = self.vm.run("cat /sys/class/net/rxe-b/statistics/rx_bytes")?;
        text.trim().parse().with_context(|| format!("no number of bytes: {text}"))
    }
}
