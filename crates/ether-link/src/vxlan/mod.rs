//! VXLAN (RFC 7348) over plain UDP sockets, which need no privileges. The other end may be another link of this kind, a
//! Linux vxlan device, or Open vSwitch.
//!
//! A datagram contains one frame. It is sent to the remote behind which the destination was last seen. If that is
//! unknown, or the destination is a group, it is sent to all configured remotes. Source ports differ by flow, so that
//! networks can spread the load.
//!
//! # Trust
//!
//! VXLAN has no authentication. Datagrams are accepted only from the addresses of configured remotes, and addresses are
//! learned only from those. But an attacker that can forge source addresses on the network between the remotes can
//! inject frames into the tunnel. Use it where that is impossible, or inside IPsec or WireGuard. Each remote has a
//! share of the table, so none can displace the addresses of another.
//!
//! With [`VxlanConfig::open`], datagrams from any sender are accepted, and the sender becomes a remote for the
//! addresses seen behind it, as with a Linux vxlan device that learns. Up to [`MAX_REMOTES`] are known, and they age.
//! Frames are never flooded to learned remotes: otherwise a forged address would turn this link into an amplifier.

mod config;
mod counters;
mod ecn;
mod header;
mod inner;
mod input;
mod output;
mod remotes;
mod shared_port;
mod sockets;
mod table;
#[cfg(test)]
mod tests;

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use parking_lot::Mutex;
use pvrdma_base::{Count, Counter, LogLimit, Snapshot};
use pvrdma_link::{Clock, Frames, Link, LinkInspect, Readiness};

pub(crate) use self::counters::all_counters;
use self::counters::{VxlanCounters, vxlan_stations, vxlan_trains_sent};
use self::header::{NoFrame, decapsulate};
use self::inner::Inner;
use self::input::{Arrived, Input};
use self::output::{Datagram, Outcome, Output};
use self::remotes::{Remotes, Target, is_group};
use self::table::Learned;

pub use config::{MAX_NETWORKS, TunnelAddress, VXLAN_PORT, VxlanConfig, VxlanError};
pub use header::Vni;
pub use shared_port::{VxlanPort, VxlanPorts, VxlanSockets};
pub use sockets::sockets;
pub use table::{AGE, MAX_REMOTES, MAX_STATIONS};

/// Bytes that a tunnel over IPv4 adds to an IP packet: the inner Ethernet header, VXLAN, UDP and IP.
pub const IPV4_OVERHEAD: u32 = 14 + 8 + 8 + 20;
/// Bytes that a tunnel over IPv6 adds.
pub const IPV6_OVERHEAD: u32 = 14 + 8 + 8 + 40;

/// One end of a tunnel, with its sockets.
#[derive(Debug)]
pub struct VxlanLink {
    local: SocketAddr,
    /// Remotes as configured, for descriptions.
    remotes: Vec<SocketAddr>,
    vni: Vni,
    socket: Arc<OwnedFd>,
    input: Mutex<Input>,
    output: Output,
    table: Mutex<Remotes>,
    clock: Arc<dyn Clock>,
    counters: VxlanCounters,
    /// Number of frames that could not be sent.
    lost: Count,
    log: LogLimit,
}

impl VxlanLink {
    /// Creates the sockets and the link. Learned addresses age by `clock`.
    ///
    /// # Errors
    /// The configuration is inconsistent, or the address is in use or not local.
    pub fn bind(config: &VxlanConfig, clock: Arc<dyn Clock>) -> Result<Self, VxlanError> {
        Self::from_sockets(config, sockets(config)?, clock)
    }

    /// Uses [`sockets`] that were created for the same configuration.
    ///
    /// # Errors
    /// The configuration is inconsistent, or the sockets do not match it.
    pub fn from_sockets(
        config: &VxlanConfig,
        sockets: Vec<OwnedFd>,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, VxlanError> {
        config.check()?;
        let mut sockets = sockets.into_iter().map(Arc::new);
        let failed = |source| VxlanError::Io { local: config.local, source };
        let socket = sockets.next().ok_or_else(|| failed(io::ErrorKind::InvalidInput.into()))?;
        let mut local = config.local;
        if local.port() == 0 {
            // The system chose one.
            local.set_port(sockets::port(&socket).map_err(failed)?);
        }
        let output = Output::new(sockets.collect(), local.is_ipv6(), config.vni.header()).map_err(failed)?;
        Ok(Self {
            local,
            remotes: config.remotes.clone(),
            vni: config.vni,
            socket,
            input: Mutex::default(),
            output,
            table: Mutex::new(Remotes::new(&config.remotes, config.open, local.port())),
            clock,
            counters: VxlanCounters::default(),
            lost: Count::default(),
            log: LogLimit::new(),
        })
    }

    /// Counts an event and logs it.
    fn note(&self, counter: &Count, what: std::fmt::Arguments<'_>) {
        counter.increment();
        self.log.log(module_path!(), log::Level::Info, "vxlan", what);
    }

    /// Counts and logs the reason for dropping a datagram.
    fn refuse<T>(&self, counter: &Count, why: std::fmt::Arguments<'_>) -> Option<T> {
        self.note(counter, why);
        None
    }

    /// Returns the frame of a datagram if it is for this link, and learns the addresses of its sender.
    fn accept<'a>(&self, arrived: Arrived<'a>) -> Option<&'a [u8]> {
        let Arrived { from, class, payload } = arrived;
        let counters = &self.counters;
        let now = self.clock.now();
        let mut table = self.table.lock();
        if !table.accepts(from) {
            return self.refuse(&counters.vxlan_dropped_sender, format_args!("{from} is not a remote"));
        }
        let frame = match decapsulate(payload, self.vni) {
            Ok(frame) => frame,
            Err(NoFrame::Malformed) => {
                return self.refuse(&counters.vxlan_dropped_malformed, format_args!("no VXLAN header from {from}"));
            }
            Err(NoFrame::OtherNetwork(vni)) => {
                return self.refuse(&counters.vxlan_dropped_vni, format_args!("{from} sends to VNI {vni}"));
            }
        };
        let Some(inner) = Inner::of(frame).filter(|inner| !is_group(inner.source)) else {
            return self
                .refuse(&counters.vxlan_dropped_malformed, format_args!("no frame, or one from a group, from {from}"));
        };
        if !ecn::decapsulate(class, frame) {
            return self.refuse(&counters.vxlan_dropped_congested, format_args!("congestion on the way from {from}"));
        }
        // Only a frame of this network makes its sender a remote.
        let Some(remote) = table.sender(from, now) else {
            return self.refuse(&counters.vxlan_dropped_sender, format_args!("{from} is one remote too many"));
        };
        match table.learn(&inner, remote, now) {
            Learned::Known | Learned::New => {}
            Learned::Moved => {
                self.note(&counters.vxlan_moved, format_args!("{} is behind {from} now", inner.source));
            }
            Learned::Refused => {
                self.note(&counters.vxlan_not_learned, format_args!("too many stations behind {from}"));
            }
        }
        Some(frame)
    }

    /// Returns the datagrams that carry the frames from index `from` on.
    fn datagrams<'a>(&self, frames: &'a Frames, from: usize) -> Vec<Datagram<'a>> {
        let now = self.clock.now();
        let table = self.table.lock();
        let mut datagrams = Vec::with_capacity(frames.len().saturating_sub(from));
        for (index, frame) in (from..).zip(frames.iter_from(from)) {
            let Some(inner) = Inner::of(frame) else {
                self.note(&self.lost, format_args!("a frame without an Ethernet header"));
                continue;
            };
            let datagram = |to| Datagram { frame, index, to, flow: inner.flow, class: inner.class };
            match table.target(&inner, now) {
                Target::One(to) => datagrams.push(datagram(to)),
                Target::All => datagrams.extend(table.configured().map(datagram)),
            }
        }
        datagrams
    }
}

impl Link for VxlanLink {
    fn receive(&self, frames: &mut Frames, most: usize) {
        let mut input = self.input.lock();
        for _ in 0..most {
            let Some(arrived) = input.next(&self.socket) else { return };
            if let Some(frame) = self.accept(arrived) {
                frames.push(frame);
            }
        }
    }

    fn send(&self, frames: &Frames, from: usize) -> usize {
        let all = frames.len().saturating_sub(from);
        let datagrams = self.datagrams(frames, from);
        let mut next = 0;
        while let Some(rest) = datagrams.get(next..).filter(|rest| !rest.is_empty()) {
            match self.output.send(rest) {
                Outcome::Sent(count) => next = next.saturating_add(count),
                Outcome::Lost(lost) => {
                    self.lost.add(lost as u64);
                    next = next.saturating_add(lost);
                }
                Outcome::Full => {
                    let Some(index) = rest.first().map(|datagram| datagram.index) else { break };
                    let begun = datagrams.get(..next).and_then(<[_]>::last).is_some_and(|sent| sent.index == index);
                    if !begun {
                        return index.saturating_sub(from);
                    }
                    // Some remotes have already received this frame. It must not be sent to them again, so the other
                    // copies are lost.
                    let copies = rest.iter().take_while(|datagram| datagram.index == index).count();
                    self.lost.add(copies as u64);
                    next = next.saturating_add(copies);
                }
            }
        }
        all
    }

    fn readiness(&self) -> Readiness {
        let held = self.input.try_lock().is_none_or(|input| !input.is_empty());
        Readiness {
            readable: Some(Arc::clone(&self.socket)),
            writable: self.output.writable(),
            wait: held.then_some(std::time::Duration::ZERO),
            ..Readiness::default()
        }
    }

    fn inspect(&self) -> LinkInspect {
        let peers = self.remotes.iter().map(SocketAddr::to_string).collect();
        let name = format!("{} VNI {}", self.local, self.vni);
        LinkInspect { kind: "vxlan", name, peers, up: Snapshot::Taken(true) }
    }

    fn lost(&self) -> u64 {
        self.lost.get()
    }

    fn counters(&self) -> Vec<Counter> {
        let mut list = self.counters.list();
        list.push(vxlan_stations(self.table.lock().stations()));
        list.push(vxlan_trains_sent(self.output.trains.get()));
        list
    }
}
