//! One of two processes with a device each, connected by an interface of the host (hidden command `wire-peer`).
//!
//! It prints its address information, reads that of the other process, and connects. After a line on its standard
//! input, the sending side works for a while. Both report when they are told to end.

mod latency;

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use clap::Args;
use pvrdma_dev::{
    DeviceConfig, PvrdmaDevice,
    testing::{
        Buffer, Context, Cq, Driver, Encoded, GuestMemory, Irqs, Mr, Path, Pd, Placement, Qp, QpInit, RecvWr, SendWr,
        access,
    },
};
use pvrdma_ether_link::af_packet::AfPacketLink;
use pvrdma_link::{
    Link,
    fault::{FaultLink, Faults},
};
use pvrdma_packet::MacAddr;
use pvrdma_roce::Congestion;
use pvrdma_rxe::{PortConfig, PortRules, Rxe, RxeConfig, RxeStation};
use pvrdma_verbs::{AddressRule, Rules};
use pvrdma_verbs_types::Gid;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::network::MTU;
use crate::namespaces::INTERFACE;

/// Interrupt vector of completions.
const COMPLETIONS: usize = 2;

/// Task of the process.
#[derive(Clone, Debug, Args)]
pub(crate) struct PeerOptions {
    /// 0 or 1; 0 sends.
    #[arg(long)]
    pub(crate) side: u8,
    /// Bytes of a message.
    #[arg(long)]
    pub(crate) size: usize,
    /// Messages in flight on each QP.
    #[arg(long)]
    pub(crate) depth: u32,
    /// Connections.
    #[arg(long)]
    pub(crate) qps: usize,
    /// SEND rather than RDMA WRITE.
    #[arg(long)]
    pub(crate) send: bool,
    /// RDMA READ rather than RDMA WRITE.
    #[arg(long)]
    pub(crate) read: bool,
    /// Frames that are lost on the way to this side, in hundredths of a percent.
    #[arg(long)]
    pub(crate) loss: u16,
    /// Frames that are overtaken by up to 16 others on the way to this side, in hundredths of a percent.
    #[arg(long)]
    pub(crate) reorder: u16,
    /// Times writes of 8 bytes on the first connection, while the other connections send.
    #[arg(long)]
    pub(crate) latency: bool,
    /// Permits packets without an ICRC.
    #[arg(long)]
    pub(crate) without_icrc: bool,
    /// Uses UDP datagrams without any protocol, and no device.
    #[arg(long)]
    pub(crate) udp: bool,
    /// Time to send, in seconds.
    #[arg(long)]
    pub(crate) seconds: f64,
}

impl PeerOptions {
    /// Large writes on one connection.
    pub(super) const BULK: Self = Self {
        side: 0,
        size: 1 << 20,
        depth: 4,
        qps: 1,
        send: false,
        read: false,
        loss: 0,
        reorder: 0,
        latency: false,
        without_icrc: false,
        udp: false,
        seconds: 2.0,
    };
    /// Small sends on one connection.
    pub(super) const SMALL: Self = Self { size: 64, depth: 256, send: true, ..Self::BULK };

    /// Returns the command line arguments for one side of this measurement.
    pub(crate) fn arguments(&self, side: usize) -> Vec<String> {
        let mut arguments = vec!["wire-peer".to_owned()];
        for (name, value) in [
            ("side", side.to_string()),
            ("size", self.size.to_string()),
            ("depth", self.depth.to_string()),
            ("qps", self.qps.to_string()),
            ("loss", self.loss.to_string()),
            ("reorder", self.reorder.to_string()),
            ("seconds", self.seconds.to_string()),
        ] {
            arguments.extend([format!("--{name}"), value]);
        }
        for (name, given) in [
            ("--send", self.send),
            ("--read", self.read),
            ("--latency", self.latency),
            ("--without-icrc", self.without_icrc),
            ("--udp", self.udp),
        ] {
            arguments.extend(given.then(|| name.to_owned()));
        }
        arguments
    }
}

/// Address information of a side.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Place {
    pub(super) qpns: Vec<u32>,
    address: u64,
    rkey: u32,
}

/// Result of a side.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Outcome {
    /// Messages sent and acknowledged.
    pub(crate) messages: u64,
    /// Duration in seconds.
    pub(crate) seconds: f64,
    /// Processor time of the process during that time.
    pub(crate) processor: f64,
    /// 99th percentile of the timed writes in microseconds, if any were timed.
    pub(crate) p99_us: Option<f64>,
    /// Non-zero counters of the wire.
    pub(crate) counters: serde_json::Value,
}

impl Outcome {
    /// Returns the number of bytes sent, if each message has this size.
    #[expect(clippy::cast_precision_loss, reason = "figures have three digits")]
    pub(super) fn bytes(&self, size: usize) -> f64 {
        self.messages as f64 * size as f64
    }

    /// Returns the same in Gb/s.
    pub(super) fn gigabits(&self, size: usize) -> f64 {
        self.bytes(size) * 8.0 / self.seconds / 1e9
    }

    /// Returns millions of messages per second.
    #[expect(clippy::cast_precision_loss, reason = "figures have three digits")]
    pub(super) fn million_messages(&self) -> f64 {
        self.messages as f64 / self.seconds / 1e6
    }
}

/// Placement of a device, and its congestion settings.
#[derive(Clone, Debug)]
pub(super) struct Host {
    pub(super) interface: String,
    pub(super) mac: MacAddr,
    pub(super) gid: Gid,
    /// The IP MTU of the interface.
    pub(super) mtu: u32,
    pub(super) congestion: Option<Congestion>,
}

pub(super) struct Peer {
    memory: Arc<GuestMemory>,
    irqs: Arc<Irqs>,
    driver: Driver,
    cq: Cq,
    qps: Vec<Qp>,
    buffer: Buffer,
    mr: Mr,
    station: RxeStation,
    _pd: Pd,
    _context: Context,
}

fn mac(side: u8) -> MacAddr {
    MacAddr([0x52, 0x54, 0, 0x77, 0, side + 1])
}

fn gid(side: u8) -> Gid {
    Gid::from(IpAddr::from([10, 77, 0, side + 1]))
}

pub(super) fn next_line() -> Result<String> {
    let mut line = String::new();
    let read = std::io::stdin().read_line(&mut line).context("cannot read standard input")?;
    anyhow::ensure!(read > 0, "the other side is gone");
    Ok(line)
}

/// Runs one side until standard input ends.
pub(crate) fn run(options: &PeerOptions) -> Result<()> {
    let mut peer = Peer::new(options)?;
    println!("{}", serde_json::to_string(&peer.place())?);
    let remote: Place = serde_json::from_str(&next_line()?).context("the other side's place")?;
    for (qp, &qpn) in peer.qps.iter_mut().zip(&remote.qpns) {
        // Longest acknowledgement timeout of a switched network: 67 ms.
        let path = Path { mtu: 5, dmac: mac(1 - options.side).0, timeout: 14, ..Path::to(gid(1 - options.side), qpn) };
        qp.connect(&path)?;
    }
    let (start, cpu) = (Instant::now(), processor_time());
    let messages = match (options.side, options.send) {
        (0, _) => {
            println!("ready");
            next_line()?;
            let (start, cpu) = (Instant::now(), processor_time());
            if options.latency {
                let times = peer.time_small(options, &remote)?;
                return peer.report(times.len() as u64, p99(times), (start, cpu));
            }
            let messages = peer.produce(options, &remote)?;
            return peer.report(messages, None, (start, cpu));
        }
        (_, true) => peer.consume(options)?,
        (_, false) => {
            println!("ready");
            next_line()?;
            0
        }
    };
    peer.report(messages, None, (start, cpu))
}

impl Peer {
    fn new(options: &PeerOptions) -> Result<Self> {
        let side = options.side;
        let host = Host { interface: INTERFACE.into(), mac: mac(side), gid: gid(side), mtu: MTU, congestion: None };
        Self::on(&host, options)
    }

    /// Same as [`Peer::new`], at another place in another network.
    pub(super) fn on(host: &Host, options: &PeerOptions) -> Result<Self> {
        let depth = options.depth.max(1);
        let bytes = options.size * if options.size < 4096 { depth as usize } else { 1 };
        let backend = Rxe::new(RxeConfig::default())?;
        let address = host.mac;
        let link = AfPacketLink::open(&host.interface, address)?;
        let link: Arc<dyn Link> = if options.loss == 0 && options.reorder == 0 {
            Arc::new(link)
        } else {
            let faults = Faults { loss: options.loss, reorder: options.reorder, ..Faults::default() };
            Arc::new(FaultLink::new(link, faults, options.side.into()))
        };
        // The same rules as in the daemon.
        let rules = PortRules::default().with_negotiate(true).with_multipath(true).with_congestion(host.congestion);
        let rules = rules.with_omit_icrc(options.without_icrc);
        let station = backend.station(address);
        station.plug(PortConfig::new(link, host.mtu).with_rules(rules))?;
        let ring = 64 << 10;
        let (memory, irqs) = (GuestMemory::new(bytes + (32 << 20) + options.qps * 2 * ring), Irqs::new());
        let reserved = memory.alloc(bytes.div_ceil(4096), Placement::Contiguous);
        // A probe for the address on the uplink would take the first second of the measurement.
        let rules = Rules::default().with_addresses(AddressRule::ANY);
        let config = DeviceConfig::new("wire").with_rules(rules);
        let device = PvrdmaDevice::new(config, Arc::clone(memory.space()), irqs.clone(), &station)?;
        let driver = Driver::probe(device, &memory, &irqs)?;
        driver.bind_gid(0, host.gid)?;
        let context = driver.open()?;
        let pd = driver.create_pd(Some(&context))?;
        let entries = u32::try_from(options.qps)?.saturating_mul(2 * depth).clamp(16, 65_536).next_power_of_two();
        let cq = driver.create_cq(Some(&context), entries)?;
        let qps = (0..options.qps)
            .map(|_| driver.create_qp(&QpInit { max_send_wr: depth, max_recv_wr: depth, ..QpInit::rc(&pd, &cq) }))
            .collect::<Result<_, _>>()?;
        memory.free(&reserved);
        let buffer = driver.buffer(bytes, 0, Placement::Contiguous);
        buffer.fill_pattern(options.side.into());
        let mr = driver.reg_mr(&pd, &buffer, access::ALL)?;
        Ok(Self { memory, irqs, driver, cq, qps, buffer, mr, station, _pd: pd, _context: context })
    }

    pub(super) fn place(&self) -> Place {
        Place { qpns: self.qps.iter().map(|qp| qp.qpn).collect(), address: self.buffer.va(), rkey: self.mr.rkey }
    }

    pub(super) fn connect(&mut self, qp: usize, path: &Path) -> Result<()> {
        Ok(self.qps.get_mut(qp).context("no such QP")?.connect(path)?)
    }

    /// Posts `count` of these on the first QP. Returns the number for which there was room.
    pub(super) fn post(&mut self, requests: &[Encoded], count: u32) -> u32 {
        self.qps.first_mut().map_or(0, |qp| qp.post_encoded(requests, count))
    }

    /// Keeps all connections busy for a while and waits for the posted requests. Returns the number of messages.
    fn produce(&mut self, options: &PeerOptions, remote: &Place) -> Result<u64> {
        let elements = self.requests(options, remote);
        let batch = (options.depth / 4).max(1);
        let end = Instant::now() + Duration::from_secs_f64(options.seconds);
        // Each QP gets as many batches as it has completed. A completion does not identify its QP, so the QPs take
        // turns.
        let (mut next, mut under_way, mut done) = (0_usize, 0_u64, 0_u64);
        let most = u64::from(options.depth) * options.qps as u64;
        while Instant::now() < end || under_way > 0 {
            while under_way + u64::from(batch) <= most && Instant::now() < end {
                let Some(qp) = self.qps.get_mut(next % options.qps) else { break };
                let posted = qp.post_encoded(&elements, batch);
                next += 1;
                under_way += u64::from(posted);
                if posted < batch {
                    break;
                }
            }
            let taken = u64::from(self.completions()?);
            under_way -= taken;
            done += taken;
        }
        Ok(done)
    }

    pub(super) fn requests(&self, options: &PeerOptions, remote: &Place) -> Vec<Encoded> {
        let Some(qp) = self.qps.first() else { return Vec::new() };
        let slots = self.buffer.len() / options.size;
        (0..(options.depth as usize).max(slots))
            .map(|index| {
                let offset = index % slots * options.size;
                let list = [self.buffer.sge(&self.mr, offset, options.size)];
                if options.send {
                    qp.encode(&SendWr::send(0, &list))
                } else if options.read {
                    qp.encode(&SendWr::read(0, &list, remote.address + offset as u64, remote.rkey))
                } else {
                    qp.encode(&SendWr::write(0, &list, remote.address + offset as u64, remote.rkey))
                }
            })
            .collect()
    }

    /// Posts receives as they are consumed, until a line arrives.
    fn consume(&mut self, options: &PeerOptions) -> Result<u64> {
        let element = RecvWr::new(0, &[self.buffer.sge(&self.mr, 0, options.size)]).encode();
        for qp in &mut self.qps {
            let posted = qp.post_encoded_recv(std::slice::from_ref(&element), options.depth);
            anyhow::ensure!(posted == options.depth, "the receive ring is full");
        }
        println!("ready");
        let (irqs, told) = (Arc::clone(&self.irqs), Arc::new(AtomicBool::new(false)));
        let tell = Arc::clone(&told);
        std::thread::spawn(move || {
            let line = next_line();
            tell.store(true, Ordering::Release);
            // Wakes the thread that waits for completions.
            pvrdma_pci_function::InterruptSink::msix(&*irqs, 2);
            line
        });
        let (mut done, mut owed) = (0_u64, 0);
        while !told.load(Ordering::Acquire) {
            let taken = self.completions()?;
            done += u64::from(taken);
            owed += taken;
            let batch = (options.depth / 4).max(1);
            while owed >= batch {
                let Some(qp) = self.qps.first_mut() else { break };
                owed -= qp.post_encoded_recv(std::slice::from_ref(&element), batch);
            }
        }
        Ok(done)
    }

    /// Takes completions; waits for the interrupt if there are none.
    pub(super) fn completions(&mut self) -> Result<u32> {
        let mut seen = None;
        loop {
            let (done, failed) = self.cq.reap(u32::MAX);
            if failed > 0 {
                anyhow::bail!("{failed} requests failed; {}", self.counters());
            }
            match seen {
                _ if done > 0 => return Ok(done),
                // A completion between the last poll and the arming causes no interrupt, so the queue is polled once
                // more.
                None => {
                    seen = Some(self.irqs.count(COMPLETIONS));
                    self.cq.arm();
                }
                Some(count) => {
                    self.irqs.wait_beyond(COMPLETIONS, count);
                    let _ = self.driver.notifications();
                    if self.cq.ring().has_data().is_none() {
                        return Ok(0);
                    }
                    seen = None;
                }
            }
        }
    }

    pub(super) fn counters(&self) -> serde_json::Value {
        self.station
            .port_counters()
            .into_iter()
            .filter(|counter| counter.value > 0)
            .map(|counter| (counter.name.to_owned(), json!(counter.value)))
            .collect()
    }

    fn report(&self, messages: u64, p99_us: Option<f64>, (start, cpu): (Instant, f64)) -> Result<()> {
        let outcome = Outcome {
            messages,
            seconds: start.elapsed().as_secs_f64(),
            processor: processor_time() - cpu,
            p99_us,
            counters: self.counters(),
        };
        println!("{}", serde_json::to_string(&outcome)?);
        let _ = &self.memory;
        Ok(())
    }
}

/// Returns the processor time of this process so far.
#[expect(clippy::cast_precision_loss, reason = "seconds")]
pub(crate) fn processor_time() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Returns the 99th percentile.
fn p99(mut times: Vec<f64>) -> Option<f64> {
    times.sort_by(f64::total_cmp);
    times.get(times.len() * 99 / 100).copied()
}
