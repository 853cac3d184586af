//! Parameters of a fabric and of the transport of its hosts.

use std::time::Duration;

use pvrdma_roce::{Congestion, MEGABIT};
use pvrdma_verbs_types::Mtu;

/// A leaf-spine fabric. All lines are full duplex and have their own output queue at each end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Plan {
    /// Switches with hosts.
    pub leaves: usize,
    /// Hosts at each leaf.
    pub hosts: usize,
    /// Switches that connect the leaves: each has one line to each leaf.
    pub spines: usize,
    /// Rate of the line of a host, in bytes per second.
    pub host_rate: u64,
    /// Rate of a line between a leaf and a spine.
    pub spine_rate: u64,
    /// Delay of each line.
    pub delay: Duration,
    /// Bytes that may wait in front of a host's line. In front of faster lines more may wait, in proportion.
    pub buffer: u64,
    /// Bytes in front of a host's line from which on switches mark, in the same proportion. `None`: they do not.
    pub mark: Option<u64>,
    /// Time from the arrival of a frame at an idle host until the host handles it, with all others that have arrived.
    pub reaction: Duration,
    /// Maximum random delay in addition.
    pub jitter: Duration,
}

impl Plan {
    /// Creates a fabric of 256 hosts with lines of 10 Gb/s, whose leaves have lines for all that their hosts send.
    /// Buffers are those of switches that hold 16 MB for 64 such lines.
    pub fn full() -> Self {
        Self {
            leaves: 16,
            hosts: 16,
            spines: 8,
            host_rate: 10_000 * MEGABIT,
            spine_rate: 20_000 * MEGABIT,
            delay: Duration::from_micros(1),
            buffer: 256 << 10,
            mark: Some(64 << 10),
            reaction: Duration::from_micros(5),
            jitter: Duration::from_micros(2),
        }
    }

    /// Returns the same fabric with ideal load balancing: the lines from a leaf to the spines are one line with the sum
    /// of their rates.
    #[must_use]
    pub const fn balanced(self) -> Self {
        Self { spines: 1, spine_rate: self.spine_rate * self.spines as u64, ..self }
    }

    /// Returns the same fabric with switches that do not mark.
    #[must_use]
    pub const fn without_marks(self) -> Self {
        Self { mark: None, ..self }
    }

    /// Number of hosts.
    pub const fn all_hosts(&self) -> usize {
        self.leaves * self.hosts
    }

    /// Parameters of congestion control. `None`: without marks, hosts do not take part.
    pub(crate) fn congestion(&self) -> Option<Congestion> {
        let config = Congestion { line_rate: self.host_rate, ..Congestion::default() };
        self.mark.map(|_| config)
    }

    /// Returns the time that a message takes on an idle fabric, if each of `sharers` senders has the same share of the
    /// receiver's line.
    pub fn ideal(&self, bytes: u64, sharers: u64) -> Duration {
        let packets = bytes.div_ceil(MTU.bytes().into()).max(1);
        let wire = bytes + packets * OVERHEAD;
        let nanos = |bytes: u64, rate: u64| bytes.saturating_mul(1_000_000_000) / rate.max(1);
        let packet = wire / packets;
        // A packet is received completely before it is sent on.
        let hops = nanos(packet, self.host_rate) + 2 * nanos(packet, self.spine_rate) + 4 * nanos(90, self.host_rate);
        let line = Duration::from_nanos(nanos(wire * sharers, self.host_rate) + hops);
        line + self.delay * 8 + (self.reaction + self.jitter / 2) * 2
    }
}

/// MTU of all connections.
pub(crate) const MTU: Mtu = Mtu::M4096;
/// Bytes on the wire beside the payload: Ethernet with preamble and gap, IPv4, UDP, BTH, ICRC; RETH in few packets.
const OVERHEAD: u64 = 24 + 14 + 20 + 8 + 12 + 4;

/// Transport of all connections.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Transport {
    /// RoCE as adapters speak it: the responder keeps nothing behind a missing packet.
    Plain,
    /// Negotiated selective acknowledgements, on the connection's own path.
    Selective,
    /// The same with a choice among paths.
    Multipath,
}

impl Transport {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Plain, Self::Selective, Self::Multipath];

    /// Name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Selective => "selective",
            Self::Multipath => "multipath",
        }
    }
}
