//! TCP and ping between two guests: through the daemon's vNICs and switch, through QEMU's vmxnet3 over `-netdev
//! stream`, and through virtio-net over a bridge of the host. All three are in the same guests, in alternating runs, so
//! that a noisy machine disturbs them alike.

use std::net::Ipv4Addr;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::figure::Figure;
use crate::endpoints::listens;
use crate::image::GuestImage;
use crate::pair::{LinkKind, Pair, PairOptions};
use crate::vm::Card;

/// Duration of a stream in seconds.
const SECONDS: u32 = 5;
/// Packets of a ping.
const PINGS: u32 = 500;
const PORT: u16 = 5201;
const PATIENCE: Duration = Duration::from_secs(120);

/// Baselines: the name in a figure, and the title for the reader.
const OTHERS: [(&str, &str); 2] =
    [("stream", "QEMU's vmxnet3, -netdev stream"), ("bridge", "virtio-net, tap and bridge")];

/// A bridge of this machine with a tap device for each guest, removed on drop.
struct Bridge(u32);

impl Bridge {
    fn new() -> Result<Self> {
        let bridge = Self(std::process::id());
        ip(&format!("link add {bridge} type bridge"))?;
        ip(&format!("link set {bridge} up"))?;
        for end in [0, 1] {
            let tap = bridge.tap(end);
            ip(&format!("tuntap add {tap} mode tap"))?;
            ip(&format!("link set {tap} master {bridge} up"))?;
        }
        Ok(bridge)
    }

    fn tap(&self, end: usize) -> String {
        format!("t{end}-{}", self.0)
    }
}

impl std::fmt::Display for Bridge {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "br-{}", self.0)
    }
}

impl Drop for Bridge {
    fn drop(&mut self) {
        for name in [self.tap(0), self.tap(1), self.to_string()] {
            if let Err(error) = ip(&format!("link del {name}")) {
                log::debug!("{error:#}");
            }
        }
    }
}

fn ip(words: &str) -> Result<()> {
    let output = Command::new("ip").args(words.split(' ')).output().context("cannot run ip")?;
    if !output.status.success() {
        bail!("ip {words}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

/// Measures everything `runs` times.
pub(super) fn measure(runs: usize) -> Result<Vec<Figure>> {
    let image = GuestImage::build()?;
    let bridge = Bridge::new().context("a bridge of this machine needs root")?;
    let directory = tempfile::Builder::new().prefix("guest-tests-").tempdir().context("cannot create a directory")?;
    let cable = directory.path().join("stream");
    let more_cards = [0, 1].map(|end| {
        let role = if end == 0 { "server=on" } else { "server=off,reconnect-ms=100" };
        let stream = format!("stream,id=more0,{role},addr.type=unix,addr.path={}", cable.display());
        let tap = format!("tap,id=more1,ifname={},script=no,downscript=no", bridge.tap(end));
        [(stream, "vmxnet3"), (tap, "virtio-net-pci")].into_iter().zip(0..).map(move |((netdev, model), number)| Card {
            netdev,
            device: format!("{model},netdev=more{number},mac={},romfile=", mac(number, end)),
        })
    });
    let more_cards = more_cards.map(Iterator::collect);
    let pair = Pair::boot(&image, &PairOptions { rxe: false, more_cards, ..PairOptions::default() })?;
    for (end, vm) in pair.vms().iter().enumerate() {
        vm.run("modprobe virtio_net")?;
        for number in 0..2 {
            vm.run(&format!(
                "for path in /sys/class/net/*; do
                     [ $(cat $path/address) = {} ] && ip link set ${{path##*/}} up &&
                         ip address add {}/24 dev ${{path##*/}} && found=1
                 done; [ -n \"$found\" ]",
                mac(number, end),
                address(number, end)
            ))?;
        }
    }
    let ours = pair.link(LinkKind::Pvrdma)?.ip[1];
    let ways = [ours, address(0, 1), address(1, 1)];
    let (mut speeds, mut times) = (Vec::new(), Vec::new());
    for run in 0..runs {
        let mut speed = [0.0; 3];
        let mut time = [0.0; 3];
        for (way, address) in ways.into_iter().enumerate() {
            let again;
            (speed[way], again) = stream(&pair, address, "").with_context(|| pair.diagnosis())?;
            time[way] = ping(&pair, address)?;
            eprintln!(
                "{address}, run {}: {:.3} Gb/s, {again} segments retransmitted, ping {:.0} us",
                run + 1,
                speed[way],
                time[way]
            );
        }
        speeds.push(speed);
        times.push(time);
    }
    let mut figures = Vec::new();
    for (index, (key, other)) in OTHERS.into_iter().enumerate() {
        let against = |rounds: &[[f64; 3]]| rounds.iter().map(|round| [round[0], round[index + 1]]).collect::<Vec<_>>();
        let title = |what: &str| format!("between guests: {what}");
        let name = |what: &str| format!("card/{what}_{key}");
        figures.push(Figure::of_rounds(name("tcp"), title("one TCP stream"), "Gb/s", false, &against(&speeds), other));
        figures.push(Figure::of_rounds(name("ping"), title("ping"), "us", true, &against(&times), other));
    }
    Ok(figures)
}

fn mac(number: usize, end: usize) -> String {
    format!("52:54:00:00:1{number}:0{}", end + 1)
}

fn address(number: usize, end: usize) -> Ipv4Addr {
    let last = |number: usize| u8::try_from(number).unwrap_or(u8::MAX);
    Ipv4Addr::new(192, 168, 81 + last(number), 1 + last(end))
}

/// Returns the Gb/s from guest a to an address of guest b, and the number of retransmitted segments. The options are
/// those of `iperf3`.
pub(super) fn stream(pair: &Pair, address: Ipv4Addr, options: &str) -> Result<(f64, f64)> {
    let server = pair.b().spawn(&format!("iperf3 -s -1 -p {PORT}"))?;
    pair.b().wait_until(&listens(PORT), PATIENCE)?;
    let client = format!("iperf3 -c {address} -p {PORT} -t {SECONDS} -J {options}");
    let text = pair.a().spawn(&client)?.wait_success(PATIENCE)?;
    server.wait_success(PATIENCE)?;
    let report: serde_json::Value = serde_json::from_str(&text).with_context(|| format!("no JSON:\n{text}"))?;
    let number = |path: &str| {
        report.pointer(path).and_then(serde_json::Value::as_f64).with_context(|| format!("no {path}:\n{text}"))
    };
    Ok((number("/end/sum_received/bits_per_second")? / 1e9, number("/end/sum_sent/retransmits")?))
}

/// Returns the average round-trip time from guest a in microseconds.
fn ping(pair: &Pair, address: Ipv4Addr) -> Result<f64> {
    let text = pair.a().spawn(&format!("ping -n -q -c {PINGS} -i 0.002 {address}"))?.wait_success(PATIENCE)?;
    // rtt min/avg/max/mdev = 0.1/0.2/0.3/0.4 ms
    let average = text.lines().find_map(|line| line.strip_prefix("rtt ")?.split('/').nth(4)?.parse::<f64>().ok());
    Ok(average.with_context(|| format!("no round trip:\n{text}"))? * 1000.0)
}
