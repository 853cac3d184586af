//! Properties of the wire format: no input panics, and what was built is what is parsed.

#![expect(clippy::unwrap_used, reason = "a test may fail")]

use proptest::collection::vec;
use proptest::prelude::*;
use pvrdma_packet::{Ethernet, MacAddr, Vlan};
use pvrdma_roce::wire::{
    Aeth, AtomicAckEth, AtomicEth, Bth, Deth, Extension, Feth, Grh, Header, Ieth, ImmDt, Ipv4, Ipv6, MAX_FRAME,
    MAX_HEADER, MAX_PAYLOAD, Network, Opcode, Packet, Reth, Shape, Syndrome, Udp, build,
};
use pvrdma_verbs_types::{Gid, Psn, Qpn};

fn ethernet() -> impl Strategy<Value = Ethernet> {
    let vlan = (0..8_u8, any::<bool>(), 0..4096_u16).prop_map(|(pcp, dei, vid)| Vlan { pcp, dei, vid });
    (any::<[u8; 6]>(), any::<[u8; 6]>(), proptest::option::of(vlan)).prop_map(|(destination, source, vlan)| Ethernet {
        destination: MacAddr(destination),
        source: MacAddr(source),
        vlan,
    })
}

fn network() -> impl Strategy<Value = Network> {
    let v6 = (any::<u8>(), 0..1_u32 << 20, any::<u8>(), any::<[u8; 16]>(), any::<[u8; 16]>());
    let v4 = (any::<u8>(), any::<u16>(), any::<bool>(), any::<u8>(), any::<[u8; 4]>(), any::<[u8; 4]>());
    let udp = any::<u16>().prop_map(|source_port| Udp { source_port, checksum: 0 });
    prop_oneof![
        v6.clone().prop_map(|(traffic_class, flow_label, hop_limit, source, destination)| Network::V1(Grh {
            traffic_class,
            flow_label,
            hop_limit,
            source: Gid(source),
            destination: Gid(destination),
        })),
        (v4, udp.clone()).prop_map(
            |((traffic_class, identification, dont_fragment, hop_limit, source, destination), udp)| {
                Network::V2Ipv4(
                    Ipv4 { traffic_class, identification, dont_fragment, hop_limit, source, destination },
                    udp,
                )
            }
        ),
        (v6, udp).prop_map(|((traffic_class, flow_label, hop_limit, source, destination), udp)| Network::V2Ipv6(
            Ipv6 { traffic_class, flow_label, hop_limit, source: Gid(source), destination: Gid(destination) },
            udp,
        )),
    ]
}

prop_compose! {
    fn bth()(
        opcode in any::<u8>(),
        (solicited, migration, fecn, becn, ack_request) in any::<(bool, bool, bool, bool, bool)>(),
        (version, reserved6, reserved7) in (0..16_u8, 0..64_u8, 0..128_u8),
        pkey in any::<u16>(),
        (destination, psn) in any::<(u32, u32)>(),
    ) -> Bth {
        Bth {
            opcode: Opcode(opcode), solicited, migration, pad: 0, version, pkey, fecn, becn, reserved6,
            destination: Qpn::new(destination), ack_request, reserved7, psn: Psn::new(psn),
        }
    }
}

/// Generates the extension headers that an opcode needs.
fn extension(opcode: Opcode) -> BoxedStrategy<Extension> {
    let reth = any::<(u64, u32, u32)>().prop_map(|(address, rkey, length)| Reth { address, rkey, length });
    let aeth = (any::<u8>(), 0..1_u32 << 24).prop_map(|(byte, msn)| Aeth { syndrome: Syndrome::from_byte(byte), msn });
    let deth = any::<(u32, u32)>().prop_map(|(qkey, source)| Deth { qkey, source: Qpn::new(source) });
    let immediate = any::<[u8; 4]>().prop_map(ImmDt);
    match opcode.info().map_or(Shape::None, |info| info.shape) {
        Shape::None => Just(Extension::None).boxed(),
        Shape::ImmDt => immediate.prop_map(Extension::ImmDt).boxed(),
        Shape::Ieth => any::<u32>().prop_map(|rkey| Extension::Ieth(Ieth { rkey })).boxed(),
        Shape::Reth => reth.prop_map(Extension::Reth).boxed(),
        Shape::RethImmDt => (reth, immediate).prop_map(|(r, i)| Extension::RethImmDt(r, i)).boxed(),
        Shape::Aeth => aeth.prop_map(Extension::Aeth).boxed(),
        Shape::AtomicAckEth => {
            (aeth, any::<u64>()).prop_map(|(a, original)| Extension::AtomicAckEth(a, AtomicAckEth { original })).boxed()
        }
        Shape::AtomicEth => any::<(u64, u32, u64, u64)>()
            .prop_map(|(address, rkey, swap_or_add, compare)| {
                Extension::AtomicEth(AtomicEth { address, rkey, swap_or_add, compare })
            })
            .boxed(),
        Shape::Deth => deth.prop_map(Extension::Deth).boxed(),
        Shape::DethImmDt => (deth, immediate).prop_map(|(d, i)| Extension::DethImmDt(d, i)).boxed(),
        Shape::FethReth => (0..16_u8, 0..4_u8, reth)
            .prop_map(|(placement, selectivity, r)| Extension::FethReth(Feth { placement, selectivity }, r))
            .boxed(),
    }
}

fn header() -> impl Strategy<Value = Header> {
    (ethernet(), network(), bth()).prop_flat_map(|(ethernet, network, bth)| {
        extension(bth.opcode).prop_map(move |extension| Header { ethernet, network, bth, extension })
    })
}

/// Calls what can be called on a parsed packet.
fn exercise(frame: &[u8]) {
    if let Ok(packet) = Packet::parse(frame) {
        let _ = (packet.verify(), packet.pad_is_right(), packet.grh_area(), packet.to_string());
        build(&packet.header, packet.payload).unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn built_packets_parse(header in header(), payload in vec(any::<u8>(), 0..600), tail in vec(any::<u8>(), 0..8)) {
        let mut frame = build(&header, &payload).unwrap();
        let length = frame.len();
        // Ethernet padding, or a frame check sequence that was left on.
        frame.extend(tail);
        let packet = Packet::parse(&frame).unwrap();
        let mut expected = header;
        expected.bth.pad = u8::try_from((4 - payload.len() % 4) % 4).unwrap();
        prop_assert_eq!(packet.header, expected);
        prop_assert_eq!(packet.payload, &payload[..]);
        prop_assert_eq!(packet.verify(), Ok(()));
        prop_assert!(packet.pad_is_right());
        prop_assert_eq!(length, header.len() + payload.len() + usize::from(expected.bth.pad) + 4);
        for cut in 0..length {
            prop_assert!(Packet::parse(&frame[..cut]).is_err(), "{}", cut);
        }
    }

    #[test]
    fn random_bytes_never_panic(frame in vec(any::<u8>(), 0..200)) {
        exercise(&frame);
    }

    /// Random bytes behind a plausible beginning get further into the parser than entirely random ones.
    #[test]
    fn damaged_packets_never_panic(
        header in header(),
        payload in vec(any::<u8>(), 0..100),
        damage in vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut frame = build(&header, &payload).unwrap();
        for (at, byte) in damage {
            let at = at.index(frame.len());
            frame[at] = byte;
        }
        exercise(&frame);
    }

    #[test]
    fn small_buffers_are_refused(header in header(), payload_len in 0..MAX_PAYLOAD, room in 0..MAX_FRAME) {
        prop_assert!(header.len() <= MAX_HEADER);
        let mut out = vec![0; room];
        let needed = header.len() + payload_len.next_multiple_of(4) + 4;
        let writer = pvrdma_roce::wire::FrameWriter::new(&header, payload_len, &mut out);
        prop_assert_eq!(writer.is_ok(), needed <= room);
        if let Ok(writer) = writer {
            prop_assert_eq!(writer.finish(), needed);
        }
    }
}
