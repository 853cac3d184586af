//! Transmission: offloads, tags, batches, ports without room.

#![allow(missing_docs, clippy::unwrap_used)]

use std::net::Ipv4Addr;

use pvrdma_link::testing::{Attack, attacks};
use pvrdma_vmxnet3::Checksum;
use pvrdma_vmxnet3::testing::frames::{
    Flow, GUEST_MAC, PEER_MAC, checksums_are_right, ethernet, pattern, reference_checksum, tagged,
};
use pvrdma_vmxnet3::testing::{Driver, DriverConfig, Guest, TxOffload, TxPacket};

fn super_frame(flow: Flow, len: usize) -> TxPacket {
    let header = u16::try_from(flow.transport_at() + 20).unwrap();
    let open = flow.left_open(flow.tcp(1000, 0x18, 0, &pattern(len)), 16, true);
    TxPacket::in_parts(&open, 4096, TxOffload::Segment { header, mss: 1448 })
}

/// A port that accepts long frames gets them whole, with all information for a receiver.
#[test]
fn super_frames_stay_whole() {
    let (guest, port) = Guest::recording();
    port.set_offloads(true, true);
    let mut driver = Driver::up(&guest, DriverConfig::default());
    for ipv6 in [false, true] {
        let flow = Flow { ipv6, ..Flow::TO_PEER };
        driver.send(0, &super_frame(flow, 60_000));
        let sent = port.take();
        let start = u16::try_from(flow.transport_at()).unwrap();
        assert_eq!((sent.len(), sent[0].mss), (1, Some(1448)));
        assert_eq!(sent[0].checksum, Checksum::Partial { start, at: start + 16 });
        assert_eq!(driver.reap(0), 1);
    }
    // 42 segments each, of which all but the last are full.
    let [packets, bytes, unicast, unicast_bytes, ..] = driver.stats(0);
    assert_eq!((packets, unicast), (84, 84));
    assert_eq!((bytes, unicast_bytes), (120_000 + 42 * (54 + 74), 120_000 + 42 * (54 + 74)));
}

/// A port that accepts no long frames gets segments with all their checksums.
#[test]
fn super_frames_are_cut_for_others() {
    let (guest, port) = Guest::recording();
    let mut driver = Driver::up(&guest, DriverConfig::default());
    for (ipv6, checksum) in [(false, false), (true, false), (false, true)] {
        port.set_offloads(checksum, false);
        let flow = Flow { ipv6, ..Flow::TO_PEER };
        driver.send(0, &super_frame(flow, 30_000));
        let sent = port.take();
        assert_eq!(sent.len(), 30_000_usize.div_ceil(1448));
        assert!(sent.iter().all(|frame| checksums_are_right(&frame.bytes) && frame.mss.is_none()));
        let data: Vec<u8> = sent.iter().flat_map(|frame| frame.bytes[flow.transport_at() + 20..].to_vec()).collect();
        assert!(data == pattern(30_000));
        assert_eq!(driver.reap(0), 1, "one completion");
    }
}

#[test]
fn checksums_are_left_to_the_port_or_put_in() {
    let (guest, port) = Guest::recording();
    let mut driver = Driver::up(&guest, DriverConfig::default());
    let whole = Flow::TO_PEER.udp(&pattern(500));
    let open = Flow::TO_PEER.left_open(whole.clone(), 6, false);
    for tag in [None, Some(0x2005)] {
        let packet = TxPacket { tag, ..TxPacket::in_parts(&open, 100, TxOffload::Checksum { start: 34, at: 40 }) };
        port.set_offloads(true, false);
        driver.send(0, &packet);
        let shift = if tag.is_some() { 4 } else { 0 };
        assert_eq!(port.take()[0].checksum, Checksum::Partial { start: 34 + shift, at: 40 + shift });
        port.set_offloads(false, false);
        driver.send(0, &packet);
        let expected = tag.map_or_else(|| whole.clone(), |tag| tagged(&whole, tag));
        assert_eq!(port.take()[0].bytes, expected);
        assert_eq!(driver.reap(0), 2);
    }
}

/// Descriptors may place a checksum at any byte. In a VLAN tag, an ethertype, a port or an address it would change a
/// frame after its rules were checked, so a frame is lost unless the place is the checksum field of TCP or UDP.
#[test]
fn a_checksum_is_stored_only_in_tcp_or_udp() {
    let (guest, port) = Guest::recording();
    port.set_offloads(true, true);
    let mut driver = Driver::up(&guest, DriverConfig::default());
    let mut errors = 0;
    let addresses = [5, 1].map(|number| Ipv4Addr::new(10, 0, 0, number));
    for Attack { name, frame, start, at, .. } in attacks(PEER_MAC, GUEST_MAC, &[], addresses) {
        driver.send(0, &TxPacket::in_parts(&frame, 4096, TxOffload::Checksum { start, at }));
        errors += 1;
        assert_eq!((port.take().len(), driver.reap(0)), (0, 1), "{name}");
        assert_eq!(driver.stats(0)[8], errors, "{name}");
    }
    let udp = Flow::TO_PEER.left_open(Flow::TO_PEER.udp(b"data"), 6, false);
    for at in 0..u16::try_from(udp.len()).unwrap() {
        driver.send(0, &TxPacket::in_parts(&udp, 4096, TxOffload::Checksum { start: 34, at }));
        assert_eq!((port.take().len(), driver.reap(0)), (usize::from(at == 40), 1), "byte {at}");
    }
    for start in 0..60 {
        driver.send(0, &TxPacket::in_parts(&udp, 4096, TxOffload::Checksum { start, at: 40 }));
        assert_eq!((port.take().len(), driver.reap(0)), (usize::from(start == 34), 1), "from byte {start}");
    }
}

/// Linux leaves the checksum of GRE (`ip link add type gre csum`) to a device that can calculate any. It is calculated
/// before the port inspects the frame.
#[test]
fn the_checksum_of_gre_is_there_before_the_port_has_the_frame() {
    let (guest, port) = Guest::recording();
    port.set_offloads(true, true);
    let mut driver = Driver::up(&guest, DriverConfig::default());
    for ipv6 in [false, true] {
        let flow = Flow { ipv6, ..Flow::TO_PEER };
        // UDP of the same length, turned into GRE with a checksum.
        let (mut frame, start) = (flow.udp(b"a packet in the tunnel"), flow.transport_at());
        frame[if ipv6 { 20 } else { 23 }] = 47;
        frame[start..start + 8].copy_from_slice(&[0x80, 0, 8, 0, 0, 0, 0, 0]);
        let offsets = |at: usize| [start, start + at].map(|offset| u16::try_from(offset).unwrap());
        let mut sends = |frame: &[u8], [start, at]: [u16; 2]| {
            driver.send(0, &TxPacket::in_parts(frame, 4096, TxOffload::Checksum { start, at }));
            port.take().into_iter().next()
        };
        let sent = sends(&frame, offsets(4)).unwrap();
        assert_eq!((sent.checksum, reference_checksum(&sent.bytes[start..])), (Checksum::Unknown, 0));
        assert!((0..20).all(|at| at == 4 || sends(&frame, offsets(at)).is_none()));
        frame[start] = 0;
        assert!(sends(&frame, offsets(4)).is_none(), "a header without a checksum");
    }
}

/// Invalid packets are counted, completed and dropped; the queue continues.
#[test]
fn invalid_packets_are_lost() {
    let (guest, port) = Guest::recording();
    let mut driver = Driver::up(&guest, DriverConfig::default());
    let udp = Flow::TO_PEER.udp(&pattern(500));
    let invalid = [
        TxPacket::plain(&udp[..13]),
        TxPacket::plain(&pattern(9023)),
        TxPacket::in_parts(&udp, 100, TxOffload::Checksum { start: 34, at: 541 }),
        TxPacket::in_parts(&udp, 100, TxOffload::Checksum { start: 2, at: 40 }),
        TxPacket::in_parts(&udp, 100, TxOffload::Segment { header: 42, mss: 100 }),
        TxPacket::in_parts(
            &Flow::TO_PEER.tcp(1, 0, 0, &pattern(3000)),
            3000,
            TxOffload::Segment { header: 54, mss: 0 },
        ),
        TxPacket::in_parts(
            &Flow::TO_PEER.tcp(1, 0, 0, &pattern(3000)),
            3000,
            TxOffload::Segment { header: 54, mss: 1 },
        ),
        TxPacket { parts: vec![pattern(16_000); 16], ..TxPacket::default() },
    ];
    for packet in &invalid {
        driver.send(0, packet);
        assert_eq!((port.take(), driver.reap(0)), (vec![], 1));
    }
    assert_eq!(driver.stats(0)[8], invalid.len() as u64);
    driver.send(0, &TxPacket::plain(&udp));
    assert_eq!((port.take().len(), driver.reap(0), driver.queue_error(0)), (1, 1, 0));
}

/// Packets for which a port has no room stay in the ring, in order, and none is lost.
#[test]
fn a_port_without_room_holds_the_ring() {
    let (guest, port) = Guest::recording();
    let mut driver = Driver::up(&guest, DriverConfig::default());
    let frames: Vec<_> = (0..20).map(|i| ethernet(PEER_MAC, [2; 6], 0x88b5, &[i; 50])).collect();
    port.set_room(Some(7));
    driver.send_all(0, &frames.iter().map(|bytes| TxPacket::plain(bytes)).collect::<Vec<_>>());
    let mut got: Vec<_> = port.take().into_iter().map(|frame| frame.bytes).collect();
    assert_eq!((got.len(), driver.reap(0)), (7, 7));
    port.set_room(Some(0));
    guest.device.resume_transmit();
    assert_eq!(driver.reap(0), 0);
    port.set_room(None);
    guest.device.resume_transmit();
    got.extend(port.take().into_iter().map(|frame| frame.bytes));
    assert_eq!((got, driver.reap(0), guest.device.has_deferred()), (frames, 13, false));
}

/// Segments for which the port has no room are lost, as on a wire, and counted. Segments that it took are not presented
/// again.
#[test]
fn a_port_that_fills_up_in_the_middle_loses_the_rest() {
    let (guest, port) = Guest::recording();
    let mut driver = Driver::up(&guest, DriverConfig::default());
    port.set_room(Some(3));
    driver.send(0, &super_frame(Flow::TO_PEER, 14_480));
    assert_eq!((port.take().len(), driver.reap(0)), (3, 1));
    port.set_room(None);
    guest.device.resume_transmit();
    assert_eq!(port.take(), vec![]);
    assert_eq!(driver.stats(0), [3, 3 * 1502, 3, 3 * 1502, 0, 0, 0, 0, 0, 7]);
}

#[test]
fn a_batch_is_one_interrupt_and_coalescing_bounds_it() {
    let (guest, port) = Guest::recording();
    let mut driver = Driver::up(&guest, DriverConfig::default());
    let batch = vec![TxPacket::plain(&ethernet(PEER_MAC, [2; 6], 0x88b5, &[0; 50])); 12];
    let mut interrupts = |scheme: Option<[u32; 4]>| {
        if let Some(scheme) = scheme {
            assert_eq!(driver.set_coalesce(scheme), 0);
        }
        driver.send_all(0, &batch);
        assert_eq!(driver.reap(0), 12);
        guest.irqs.take(0)
    };
    assert_eq!(interrupts(None), 1);
    assert_eq!(port.flushes(), 2, "one at ACTIVATE, when the rings are looked at, and one for the batch");
    assert_eq!(interrupts(Some([0; 4])), 12, "disabled");
    assert_eq!(interrupts(Some([1, 0, 0, 0])), 1, "adaptive");
    assert_eq!(interrupts(Some([2, 0, 5, 0])), 3, "after 5, 10 and at the end");
    assert_eq!(interrupts(Some([3, 1000, 0, 0])), 1, "by rate");
}

/// While the link is down, frames are discarded, and the ring continues.
#[test]
fn without_a_link_frames_are_discarded() {
    let (guest, port) = Guest::recording();
    let mut driver = Driver::up(&guest, DriverConfig::default());
    guest.device.set_link(false);
    driver.send(0, &TxPacket::plain(&Flow::TO_PEER.udp(b"x")));
    assert_eq!((port.take(), driver.reap(0), driver.stats(0)[9]), (vec![], 1, 1));
    guest.device.set_link(true);
    driver.send(0, &TxPacket::plain(&Flow { to: [0xff; 6], ..Flow::TO_PEER }.udp(b"x")));
    driver.send(0, &TxPacket::plain(&Flow { to: [1, 0, 0, 0, 0, 1], ..Flow::TO_PEER }.udp(b"x")));
    assert_eq!((port.take().len(), driver.reap(0)), (2, 2));
    assert_eq!(driver.stats(0), [0, 0, 0, 0, 1, 43, 1, 43, 0, 1]);
}
