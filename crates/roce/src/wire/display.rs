//! Display of packets as one line of text.

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
    /// Writes a leading space unless there are no headers.
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
        if self.omits_icrc() {
            f.write_str(" (no ICRC)")?;
        }
        match self.verify_unless_omitted() {
            Ok(()) => Ok(()),
            Err(damage) => write!(f, " ({damage})"),
        }
    }
}

#[cfg(test)]
mod tests {
    use pvrdma_packet::{Ethernet, Vlan};
    use pvrdma_verbs_types::{Gid, Psn, Qpn};

    use super::super::agreement::REQUEST_WITHOUT_ICRC;
    use super::super::bth::Bth;
    use super::super::frame::build;
    use super::super::{
        Aeth, AtomicAckEth, AtomicEth, Deth, Feth, Grh, Ieth, ImmDt, Ipv4, NakCode, Opcode, Reth, Syndrome, Udp,
    };
    use super::*;

    #[test]
    fn a_packet_is_a_line() {
        let ip = Ipv4 { source: [10, 0, 0, 1], destination: [10, 0, 0, 2], ..Ipv4::default() };
        let mut header = Header {
            ethernet: Ethernet::default(),
            network: Network::V2Ipv4(ip, Udp { source_port: 0xc001, checksum: 0 }),
            bth: Bth::new(Opcode::send(super::super::Position::Only), Qpn::new(0x11), Psn::new(0xabc)),
            extension: Extension::None,
        };
        let plain = "::ffff:10.0.0.1 > ::ffff:10.0.0.2 v2 sport 49153: Rc SEND_ONLY qp 0x000011 psn 0x000abc";
        assert_eq!(header.to_string(), plain);
        let mut frame = build(&header, b"abc").unwrap();
        assert_eq!(Packet::parse(&frame).unwrap().to_string(), format!("{plain} len 3"));
        *frame.last_mut().unwrap() ^= 1;
        assert_eq!(Packet::parse(&frame).unwrap().to_string(), format!("{plain} len 3 (bad ICRC)"));
        // Zeros in place of the ICRC are damage, except with the bits of the agreement.
        for (reserved7, shown) in [(0, " (bad ICRC)"), (REQUEST_WITHOUT_ICRC, " (no ICRC)")] {
            header.bth.reserved7 = reserved7;
            let mut frame = build(&header, b"abc").unwrap();
            frame.last_chunk_mut::<4>().unwrap().fill(0);
            assert_eq!(Packet::parse(&frame).unwrap().to_string(), format!("{plain} len 3{shown}"));
        }
        header.bth.reserved7 = 0;
        // Optional parts are shown only if they are present.
        header.ethernet.vlan = Some(Vlan { pcp: 3, dei: false, vid: 42 });
        header.network = Network::V1(Grh { traffic_class: 0x1a, source: Gid([0; 16]), ..Grh::default() });
        let bth = &mut header.bth;
        (bth.ack_request, bth.solicited, bth.migration, bth.fecn, bth.becn) = (true, true, true, true, true);
        let all = ":: > :: v1 vlan 42 pcp 3 tc 0x1a: Rc SEND_ONLY qp 0x000011 psn 0x000abc A SE M F B";
        assert_eq!(header.to_string(), all);
        header.extension = Extension::Ieth(Ieth { rkey: 7 });
        assert_eq!(header.to_string(), format!("{all} invalidate 0x00000007"));
    }

    #[test]
    fn extension_headers_have_words() {
        let reth = Reth { address: 0x1000, rkey: 2, length: 3 };
        let aeth = |syndrome| Aeth { syndrome, msn: 9 };
        let deth = Deth { qkey: 0x8001_0000, source: Qpn::new(0x21) };
        let atomic = AtomicEth { address: 0x10, rkey: 1, swap_or_add: 0x2, compare: 0x3 };
        let immediate = ImmDt([0, 0, 1, 2]);
        for (extension, words) in [
            (Extension::None, ""),
            (Extension::ImmDt(immediate), " imm 0x00000102"),
            (Extension::Reth(reth), " va 0x1000 rkey 0x00000002 dmalen 3"),
            (Extension::AtomicEth(atomic), " va 0x10 rkey 0x00000001 swap/add 0x2 compare 0x3"),
            (Extension::AtomicAckEth(aeth(Syndrome::ACK), AtomicAckEth { original: 0x5 }), " ACK msn 9 original 0x5"),
            (Extension::Aeth(aeth(Syndrome::Ack { credits: 4 })), " ACK credits 4 msn 9"),
            (Extension::Aeth(aeth(Syndrome::RnrNak { timer: 1 })), " RNR NAK 10µs msn 9"),
            (Extension::Aeth(aeth(Syndrome::Nak(NakCode::SequenceError))), " NAK SequenceError msn 9"),
            (Extension::Aeth(aeth(Syndrome::Reserved(0x40))), " syndrome 0x40 msn 9"),
            (Extension::DethImmDt(deth, immediate), " qkey 0x80010000 from 0x000021 imm 0x00000102"),
            (
                Extension::FethReth(Feth { placement: 1, selectivity: 2 }, reth),
                " va 0x1000 rkey 0x00000002 dmalen 3 placement 1 selectivity 2",
            ),
        ] {
            assert_eq!(extension.to_string(), words);
        }
    }
}
