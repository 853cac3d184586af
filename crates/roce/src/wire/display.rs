//! Packets as one line of text.

use std::fmt;

use super::extension::Extension;
use super::packet::{Header, Network, Packet};

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} > {}", self.network.source(), self.network.destination())?;
        match &self.network {
            Network::V1(_) => f.write_str(" v1")?,
            Network::V2Ipv4(_, udp) | Network::V2Ipv6(_, udp) => write!(f, " v2 sport {}", udp.source_port)?,
        }
        if let Some(vlan) = self.ethernet.vlan {
            write!(f, " vlan {} pcp {}", vlan.vid, vlan.pcp)?;
        }
        if self.network.traffic_class() != 0 {
            write!(f, " tc {:#04x}", self.network.traffic_class())?;
        }
        let bth = &self.bth;
        write!(f, ": {} qp {} psn {:#08x}", bth.opcode, bth.destination, bth.psn.get())?;
        for (set, name) in
            [(bth.ack_request, " A"), (bth.solicited, " SE"), (bth.migration, " M"), (bth.fecn, " F"), (bth.becn, " B")]
        {
            if set {
                f.write_str(name)?;
            }
        }
        self.extension.fmt(f)
    }
}

impl fmt::Display for Extension {
    /// Starts with a space unless there is nothing.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(deth) = self.deth() {
            write!(f, " qkey {:#010x} from {}", deth.qkey, deth.source)?;
        }
        if let Some(reth) = self.reth() {
            write!(f, " va {:#x} rkey {:#010x} dmalen {}", reth.address, reth.rkey, reth.length)?;
        }
        if let Some(aeth) = self.aeth() {
            write!(f, " {} msn {}", aeth.syndrome, aeth.msn)?;
        }
        match self {
            Self::AtomicEth(a) => {
                let (swap_or_add, compare) = (a.swap_or_add, a.compare);
                write!(f, " va {:#x} rkey {:#010x} swap/add {swap_or_add:#x} compare {compare:#x}", a.address, a.rkey)?;
            }
            Self::AtomicAckEth(_, ack) => write!(f, " original {:#x}", ack.original)?,
            Self::Ieth(ieth) => write!(f, " invalidate {:#010x}", ieth.rkey)?,
            Self::FethReth(feth, _) => write!(f, " placement {} selectivity {}", feth.placement, feth.selectivity)?,
            _ => {}
        }
        if let Some(immediate) = self.immediate() {
            write!(f, " imm {:#010x}", u32::from_be_bytes(immediate))?;
        }
        Ok(())
    }
}

impl fmt::Display for Packet<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} len {}", self.header, self.payload.len())?;
        match self.verify() {
            Ok(()) => Ok(()),
            Err(damage) => write!(f, " ({damage})"),
        }
    }
}
