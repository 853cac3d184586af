//! The hosts at both ends of the dumbbell (hidden command `dumbbell-hosts`): all senders in one process, and the
//! receiver in another. Each host is an adapter of its own.

use std::net::IpAddr;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;
use pvrdma_dev::testing::Path;
use pvrdma_packet::MacAddr;
use pvrdma_roce::Congestion;
use pvrdma_verbs_types::Gid;
use serde::{Deserialize, Serialize};

use super::super::peer::{Host, Peer, PeerOptions, Place, next_line};
use super::line;
use crate::namespaces::INTERFACE;

/// Bytes of a message.
pub(super) const MESSAGE: usize = 16 << 10;
/// Messages that a host keeps in flight.
const DEPTH: u64 = 16;
/// Number of intervals per second in which completions are counted.
pub(super) const PARTS: u32 = 10;

/// Task of the hosts.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct HostsOptions {
    /// The one that receives.
    #[arg(long)]
    pub(crate) receives: bool,
    /// Hosts that send.
    #[arg(long)]
    pub(crate) senders: u8,
    /// Time for which they send.
    #[arg(long)]
    pub(crate) seconds: u32,
    /// Seconds after the start of the first host at which the others start.
    #[arg(long)]
    pub(crate) joins: u32,
    /// Number of messages that each host writes at the start of every second, followed by a pause. 0: without pauses.
    #[arg(long)]
    pub(crate) burst: u32,
    /// Parameters of congestion control for a rack of 10 Gb/s.
    #[arg(long)]
    pub(crate) rack: bool,
}

impl HostsOptions {
    /// Formats the options as arguments.
    pub(super) fn arguments(&self) -> Vec<String> {
        let numbers = [
            ("--senders", self.senders.into()),
            ("--seconds", self.seconds),
            ("--joins", self.joins),
            ("--burst", self.burst),
        ];
        let mut words = vec!["dumbbell-hosts".to_owned()];
        words.extend(numbers.into_iter().flat_map(|(name, value)| [name.to_owned(), value.to_string()]));
        words.extend(self.rack.then(|| "--rack".to_owned()));
        words.extend(self.receives.then(|| "--receives".to_owned()));
        words
    }

    fn congestion(&self) -> Congestion {
        if self.rack { Congestion::default() } else { Congestion::slow_line() }
    }

    fn peer(&self, host: Host, qps: u8, number: u8) -> Result<Peer> {
        let depth = self.burst.max(u32::try_from(DEPTH)?);
        let options = PeerOptions { side: number, size: MESSAGE, depth, qps: qps.into(), ..PeerOptions::BULK };
        Peer::on(&host, &options)
    }

    fn requests(&self) -> PeerOptions {
        let depth = self.burst.max(16);
        PeerOptions { size: MESSAGE, depth, ..PeerOptions::BULK }
    }
}

/// Results of the senders.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Sent {
    /// Completions of each host, by interval.
    pub(super) hosts: Vec<Vec<u64>>,
    /// Counters of each host's wire.
    pub(super) counters: Vec<serde_json::Value>,
}

const RECEIVER: u8 = 0xff;

fn mac(host: u8) -> MacAddr {
    MacAddr([0x52, 0x54, 0, 0x77, 1, host])
}

fn gid(host: u8) -> Gid {
    Gid::from(IpAddr::from([10, 77, 1, host]))
}

fn host(number: u8, options: &HostsOptions) -> Host {
    let interface = if number == RECEIVER { INTERFACE.to_owned() } else { line::interface(number.into()) };
    let congestion = Some(options.congestion());
    Host { interface, mac: mac(number), gid: gid(number), mtu: line::MTU, congestion }
}

fn path(to: u8, qpn: u32) -> Path {
    Path { mtu: 3, dmac: mac(to).0, timeout: 16, ..Path::to(gid(to), qpn) }
}

/// Runs the hosts until standard input signals the end.
pub(crate) fn run(options: &HostsOptions) -> Result<()> {
    if options.receives { receive(options) } else { send(options) }
}

fn receive(options: &HostsOptions) -> Result<()> {
    let mut peer = options.peer(host(RECEIVER, options), options.senders, 1)?;
    println!("{}", serde_json::to_string(&peer.place())?);
    let qpns: Vec<u32> = serde_json::from_str(&next_line()?).context("the senders' places")?;
    for (number, qpn) in (0_u8..).zip(qpns) {
        peer.connect(number.into(), &path(number, qpn))?;
    }
    println!("ready");
    next_line()?;
    println!("{}", peer.counters());
    Ok(())
}

fn send(options: &HostsOptions) -> Result<()> {
    let mut peers =
        (0..options.senders).map(|number| options.peer(host(number, options), 1, 0)).collect::<Result<Vec<_>>>()?;
    let qpns: Vec<u32> = peers.iter().flat_map(|peer| peer.place().qpns).collect();
    println!("{}", serde_json::to_string(&qpns)?);
    let remote: Place = serde_json::from_str(&next_line()?).context("the receiver's place")?;
    for (peer, &qpn) in peers.iter_mut().zip(&remote.qpns) {
        peer.connect(0, &path(RECEIVER, qpn))?;
    }
    println!("ready");
    next_line()?;
    let (began, remote) = (Instant::now(), &remote);
    let done: Vec<_> = thread::scope(|scope| {
        let all: Vec<_> = peers
            .iter_mut()
            .enumerate()
            .map(|(number, peer)| scope.spawn(move || produce(peer, options, remote, number, began)))
            .collect();
        all.into_iter().map(|one| one.join().unwrap_or_else(|_| anyhow::bail!("a host panicked"))).collect()
    });
    let hosts = done.into_iter().collect::<Result<Vec<_>>>()?;
    let sent = Sent { hosts, counters: peers.iter().map(Peer::counters).collect() };
    println!("{}", serde_json::to_string(&sent)?);
    Ok(())
}

/// Runs one host. Returns its completions by interval.
fn produce(peer: &mut Peer, options: &HostsOptions, remote: &Place, number: usize, began: Instant) -> Result<Vec<u64>> {
    let requests = peer.requests(&options.requests(), remote);
    let mut counts = vec![0; usize::try_from(options.seconds * PARTS)?];
    let second = |number: u64| began + Duration::from_secs(number);
    let end = second(options.seconds.into());
    if number > 0 {
        thread::sleep(second(options.joins.into()).saturating_duration_since(Instant::now()));
    }
    let (mut posted, mut done) = (0_u64, 0_u64);
    while Instant::now() < end {
        let seconds = began.elapsed().as_secs();
        let due = match u64::from(options.burst) {
            0 => done + DEPTH - posted,
            burst => (burst * (1 + seconds) - posted).min(burst - (posted - done)),
        };
        posted += u64::from(peer.post(&requests, u32::try_from(due)?));
        if posted == done {
            thread::sleep(second(seconds + 1).min(end).saturating_duration_since(Instant::now()));
            continue;
        }
        done += taken(peer, began, &mut counts)?;
    }
    while done < posted {
        done += taken(peer, began, &mut counts)?;
    }
    Ok(counts)
}

fn taken(peer: &mut Peer, began: Instant, counts: &mut [u64]) -> Result<u64> {
    let taken = u64::from(peer.completions()?);
    let part = began.elapsed().as_millis() * u128::from(PARTS) / 1000;
    if let Some(count) = usize::try_from(part).ok().and_then(|part| counts.get_mut(part)) {
        *count += taken;
    }
    Ok(taken)
}
