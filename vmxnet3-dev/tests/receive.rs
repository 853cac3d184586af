//! Reception: long frames, queues, filters, lack of buffers.

#![allow(missing_docs, clippy::unwrap_used)]

use pvrdma_pci_function::PciFunction as _;
use pvrdma_vmxnet3::testing::frames::{Flow, GUEST_MAC, PEER_MAC, checksums_are_right, ethernet, pattern, tagged};
use pvrdma_vmxnet3::testing::{
    Driver, DriverConfig, Guest, RxKind, RxLayout, TxOffload, TxPacket, command, feature, rx_mode,
};
use pvrdma_vmxnet3::{Frame, Received};

fn deliver(guest: &Guest, bytes: &[u8]) -> Received {
    let received = guest.device.receive(&Frame::new(bytes, false).unwrap());
    guest.device.flush();
    received
}

/// A long TCP frame as a device passes it to a port that accepts such frames.
fn super_frame(flow: Flow, len: usize) -> Vec<u8> {
    let mut bytes = flow.left_open(flow.tcp(5, 0x18, 0, &pattern(len)), 16, false);
    if flow.ipv6 {
        bytes[18..20].copy_from_slice(&u16::try_from(len + 20).unwrap().to_be_bytes());
    }
    bytes
}

/// A guest with LRO gets a long frame as a whole, in HEAD and BODY buffers of both rings, with the number of segments.
#[test]
fn long_frames_come_whole_with_lro() {
    for (rx, mtu) in [(RxLayout::SMALL, 1500), (RxLayout::JUMBO, 9000)] {
        let (guest, _port) = Guest::recording();
        let features = feature::LRO | feature::RXCSUM;
        let mut driver = Driver::up(&guest, DriverConfig { rx, mtu, features, ..DriverConfig::default() });
        for ipv6 in [false, true] {
            for len in [2000, 20_000, 65_000] {
                let bytes = super_frame(Flow { ipv6, ..Flow::TO_GUEST }, len);
                let frame = Frame::to_be_segmented(&bytes, 1448).unwrap();
                assert_eq!(guest.device.receive(&frame), Received::Delivered);
                let packets = driver.poll(0);
                assert_eq!(packets.len(), 1);
                // The checksum that the sender left open is filled in.
                let whole = Flow { ipv6, ..Flow::TO_GUEST }.tcp(5, 0x18, 0, &pattern(len));
                assert!(packets[0].bytes == whole && packets[0].checksum_verified);
                let count = u8::try_from(len.div_ceil(1448)).unwrap();
                assert_eq!(packets[0].segments, Some((count, 1448)));
            }
        }
    }
}

/// The checksum does not depend on the buffers: odd lengths, the data ring, and a stripped tag.
#[test]
fn open_checksums_are_summed_over_any_buffers() {
    let odd = RxLayout { first: 64, second: 64, head: 131, body: 77, bodies: 1, data_slot: 0 };
    for rx in [odd, RxLayout { head: 129, body: 4099, ..odd }, RxLayout { data_slot: 512, ..RxLayout::SMALL }] {
        for strip in [false, true] {
            let (guest, _port) = Guest::recording();
            let features = feature::RXCSUM | if strip { feature::RXVLAN } else { 0 };
            let mut driver = Driver::up(&guest, DriverConfig { rx, features, ..DriverConfig::default() });
            if strip {
                driver.set_vlan(5, true);
            }
            for len in (0..40).chain([200, 301, 700, 1001]) {
                for flow in [Flow::TO_GUEST, Flow { ipv6: true, ..Flow::TO_GUEST }] {
                    for (whole, at) in [(flow.udp(&pattern(len)), 6), (flow.tcp(1, 0x10, 12, &pattern(len)), 16)] {
                        let mut sent = flow.left_open(whole.clone(), at, false);
                        let mut start = u16::try_from(flow.transport_at()).unwrap();
                        if strip {
                            (sent, start) = (tagged(&sent, 5), start + 4);
                        }
                        // Padding behind the packet is not part of the checksum.
                        sent.extend([0xff; 3]);
                        let frame = Frame::with_partial_checksum(&sent, start, start + u16::try_from(at).unwrap());
                        assert_eq!(guest.device.receive(&frame.unwrap()), Received::Delivered);
                        let packet = driver.poll(0).remove(0);
                        assert!(packet.checksum_verified && packet.tag == strip.then_some(5));
                        assert_eq!(packet.bytes[..whole.len()], whole, "{len} bytes: {rx:?}");
                    }
                }
            }
        }
    }
}

/// A frame whose sender left no pseudo-header sum cannot get a correct checksum, and is not reported as verified.
#[test]
fn an_incorrect_checksum_is_not_reported_as_verified() {
    let (guest, _port) = Guest::recording();
    let mut driver =
        Driver::up(&guest, DriverConfig { features: feature::RXCSUM | feature::LRO, ..DriverConfig::default() });
    let mut bytes = super_frame(Flow::TO_GUEST, 3000);
    bytes[50] ^= 1;
    assert_eq!(guest.device.receive(&Frame::to_be_segmented(&bytes, 1448).unwrap()), Received::Delivered);
    let packet = driver.poll(0).remove(0);
    assert!(!packet.checksum_verified && !checksums_are_right(&packet.bytes));
}

/// Older versions of Linux panic on a frame that is reported as TCP without IP directly behind its header or a single
/// tag.
#[test]
fn a_frame_with_two_tags_is_not_reported_as_tcp() {
    for features in [feature::RXCSUM, feature::RXCSUM | feature::LRO, feature::RXCSUM | feature::RXVLAN, 0] {
        let (guest, _port) = Guest::recording();
        let mut driver = Driver::up(&guest, DriverConfig { features, ..DriverConfig::default() });
        driver.set_mode(rx_mode::PROMISC);
        for flow in [Flow::TO_GUEST, Flow { ipv6: true, ..Flow::TO_GUEST }] {
            let tcp = flow.tcp(1, 0x10, 0, b"data");
            let service = |frame: &[u8]| {
                let mut frame = tagged(frame, 6);
                frame[12..14].copy_from_slice(&[0x88, 0xa8]);
                frame
            };
            for tags in
                [tagged(&tagged(&tcp, 5), 0), service(&tagged(&tcp, 5)), tagged(&service(&tcp), 0), service(&tcp)]
            {
                assert_eq!(deliver(&guest, &tags), Received::Delivered);
                assert_eq!(driver.poll(0).remove(0).kind, RxKind::default(), "{tags:x?}");
            }
            assert_eq!(deliver(&guest, &tagged(&tcp, 0)), Received::Delivered);
            let expected = RxKind { ipv4: !flow.ipv6, ipv6: flow.ipv6, tcp: true, udp: false };
            assert_eq!(driver.poll(0).remove(0).kind, expected);
            // A long frame arrives in segments, because the driver could not separate its headers from its data.
            let open = super_frame(flow, 20_000);
            let open = tagged(&tagged(&open, 5), 0);
            assert_eq!(guest.device.receive(&Frame::to_be_segmented(&open, 1400).unwrap()), Received::Delivered);
            let packets = driver.poll(0);
            assert!(packets.len() == 15 && packets.iter().all(|packet| packet.segments.is_none()));
        }
    }
}

/// Without LRO, in revision 1, or for a guest that verifies checksums itself, only segments are delivered.
#[test]
fn long_frames_come_in_segments_without_lro() {
    for (features, revision) in [
        (feature::RXCSUM, 3),
        (feature::LRO | feature::RXCSUM, 1),
        (feature::LRO, 3),
        (feature::RXCSUM | feature::RXVLAN, 2),
    ] {
        let (guest, _port) = Guest::recording();
        let mut driver = Driver::up(&guest, DriverConfig { features, revision, ..DriverConfig::default() });
        let bytes = super_frame(Flow::TO_GUEST, 20_000);
        let vlan = features & feature::RXVLAN != 0;
        let on_link = if vlan { tagged(&bytes, 0) } else { bytes };
        assert_eq!(guest.device.receive(&Frame::to_be_segmented(&on_link, 1448).unwrap()), Received::Delivered);
        let packets = driver.poll(0);
        assert_eq!(packets.len(), 14);
        for packet in &packets {
            assert!(checksums_are_right(&packet.bytes));
            assert_eq!((packet.segments, packet.tag.is_some()), (None, vlan));
            assert_eq!(packet.checksum_verified, features & feature::RXCSUM != 0);
        }
        assert!(packets.iter().flat_map(|it| it.bytes[54..].to_vec()).collect::<Vec<_>>() == pattern(20_000));
        assert_eq!(
            driver.stats(1)[..4],
            [14, 20_000 + 14 * 54 + if vlan { 56 } else { 0 }, 14, 20_000 + 14 * 54 + if vlan { 56 } else { 0 }]
        );
    }
}

/// Rings that can never hold a long frame get it in segments.
#[test]
fn long_frames_that_never_fit_come_in_segments() {
    let (guest, _port) = Guest::recording();
    let rx = RxLayout { second: 0, ..RxLayout::SMALL };
    let features = feature::LRO | feature::RXCSUM;
    let mut driver = Driver::up(&guest, DriverConfig { rx, features, ..DriverConfig::default() });
    let bytes = super_frame(Flow::TO_GUEST, 20_000);
    assert_eq!(guest.device.receive(&Frame::to_be_segmented(&bytes, 1448).unwrap()), Received::Delivered);
    assert_eq!(driver.poll(0).len(), 14);
}

#[test]
fn frames_longer_than_the_mtu_are_dropped() {
    for (rx, mtu) in [(RxLayout::SMALL, 1500), (RxLayout::JUMBO, 9000)] {
        let (guest, _port) = Guest::recording();
        let mtu_config = DriverConfig { rx, mtu, features: feature::LRO, ..DriverConfig::default() };
        let mut driver = Driver::up(&guest, mtu_config);
        let frame = |len| ethernet(GUEST_MAC, PEER_MAC, 0x88b5, &pattern(len));
        let mtu = usize::try_from(mtu).unwrap();
        assert_eq!(deliver(&guest, &frame(mtu)), Received::Delivered);
        assert_eq!(deliver(&guest, &tagged(&frame(mtu), 0)), Received::Delivered, "a tag does not count");
        assert_eq!(deliver(&guest, &frame(mtu + 1)), Received::Filtered);
        assert_eq!(driver.poll(0).len(), 2);
    }
}

/// The hash and the queue follow the configuration, for each kind of packet.
#[test]
fn hashes_have_the_type_of_their_input() {
    let (guest, _port) = Guest::recording();
    let config = DriverConfig { tx_queues: 8, rx_queues: 8, features: feature::RSS, ..DriverConfig::default() };
    let mut driver = Driver::prepare(&guest, config);
    driver.write_rss(&std::array::from_fn(|i| u8::try_from(i * 6 + 1).unwrap()), &(0..8).rev().collect::<Vec<_>>());
    assert_eq!(driver.activate(), 0);
    driver.finish();
    for (ipv6, tcp, kind) in [(false, false, 1), (false, true, 2), (true, false, 3), (true, true, 4)] {
        let mut queues = Vec::new();
        for from in 0..32 {
            let flow = Flow { ipv6, ports: [from, 80], ..Flow::TO_GUEST };
            let bytes = if tcp { flow.tcp(1, 0, 0, b"x") } else { flow.udp(b"x") };
            deliver(&guest, &bytes);
            let (queue, packet) =
                (0..8).flat_map(|queue| driver.poll(queue).into_iter().map(move |it| (queue, it))).next().unwrap();
            let (got, hash) = packet.hash.unwrap();
            assert_eq!((got, queue), (kind, 7 - usize::try_from(hash % 8).unwrap()));
            queues.push(queue);
        }
        queues.sort_unstable();
        queues.dedup();
        // UDP ports are not hashed, so that fragments of a datagram stay in one queue.
        assert_eq!(queues.len() > 3, tcp);
    }
    deliver(&guest, &ethernet(GUEST_MAC, PEER_MAC, 0x88b5, &[0; 50]));
    assert_eq!(driver.poll(0)[0].hash, None, "no IP");
}

#[test]
fn the_filter_follows_the_driver() {
    let (guest, _port) = Guest::recording();
    let driver = Driver::up(&guest, DriverConfig::default());
    let to = |to| deliver(&guest, &Flow { to, ..Flow::TO_GUEST }.udp(b"x"));
    let (group, other) = ([1, 0, 0x5e, 0, 0, 7], [2, 0, 0, 0, 0, 9]);
    assert_eq!(
        (to(GUEST_MAC), to(other), to([0xff; 6])),
        (Received::Delivered, Received::Filtered, Received::Delivered)
    );
    assert_eq!(to(group), Received::Filtered);
    assert_eq!(driver.set_multicast(&[group]), 0);
    assert_eq!(to(group), Received::Delivered);
    guest.memory.store_u64(driver.shared + 128, 1 << 40);
    assert_ne!(guest.command(command::UPDATE_MAC_FILTERS), 0, "a table that is not there");
    assert_eq!(to(group), Received::Delivered, "the previous filter stays in force");
    driver.set_mode(rx_mode::UCAST);
    assert_eq!((to(group), to([0xff; 6])), (Received::Filtered, Received::Filtered));
    driver.set_mode(rx_mode::ALL_MULTI);
    assert_eq!((to(group), to(GUEST_MAC)), (Received::Delivered, Received::Filtered));
    driver.set_mode(rx_mode::PROMISC);
    assert_eq!(to(other), Received::Delivered);
    // Another address.
    driver.set_mode(rx_mode::UCAST);
    guest.write(1, 0x28, u32::from_le_bytes([2, 0, 0, 0]));
    guest.write(1, 0x30, u32::from_le_bytes([0, 9, 0, 0]));
    assert_eq!((to(GUEST_MAC), to(other)), (Received::Filtered, Received::Delivered));
    assert_eq!((guest.read(1, 0x28), guest.read(1, 0x30)), (2, 0x900));
}

/// When buffers run out, the device requests doorbells, and the port is notified of the first.
#[test]
fn a_guest_without_buffers_rings_when_it_has_some() {
    let (guest, port) = Guest::recording();
    let mut driver = Driver::up(&guest, DriverConfig::default());
    let bytes = ethernet(GUEST_MAC, PEER_MAC, 0x88b5, &[1; 50]);
    let mut count = 0;
    while deliver(&guest, &bytes) == Received::Delivered {
        count += 1;
    }
    assert_eq!((count, deliver(&guest, &bytes)), (63, Received::NoBuffers));
    assert!(driver.rx[0].doorbell_wanted(&guest.memory));
    assert_eq!(port.ready(), 0);
    // As in the kernel, the buffer of the last completion stays with the driver: two completions return one buffer.
    assert_eq!(driver.poll_some(0, 2).len(), 2);
    assert_eq!(port.ready(), 1);
    assert!(!driver.rx[0].doorbell_wanted(&guest.memory));
    assert_eq!((deliver(&guest, &bytes), deliver(&guest, &bytes)), (Received::Delivered, Received::NoBuffers));
    assert_eq!(driver.stats(1)[8], 3);
    // A driver that has not seen the request unmasks its vector at the end of its round.
    guest.memory.write(driver.rx_desc(0), &[0]);
    assert_eq!((driver.poll(0).len(), port.ready()), (62, 1));
    driver.unmask(0);
    assert_eq!((port.ready(), deliver(&guest, &bytes)), (2, Received::Delivered));
}

#[test]
fn interrupts_come_at_the_end_of_a_batch() {
    let (guest, _port) = Guest::recording();
    let driver = Driver::up(&guest, DriverConfig::default());
    let bytes = ethernet(GUEST_MAC, PEER_MAC, 0x88b5, &[1; 50]);
    let batch = || {
        for _ in 0..10 {
            guest.device.receive(&Frame::new(&bytes, false).unwrap());
        }
        guest.device.flush();
        guest.device.flush();
        guest.irqs.take(0)
    };
    assert_eq!(batch(), 1);
    for (scheme, expected) in [([0; 4], 10), ([2, 0, 0, 4], 3), ([1, 0, 0, 0], 1)] {
        assert_eq!(driver.set_coalesce(scheme), 0);
        assert_eq!(batch(), expected, "{scheme:?}");
    }
    assert_ne!(driver.set_coalesce([9, 0, 0, 0]), 0);
}

/// Linux's driver passes packets to GRO while doorbells are requested, and directly to the stack otherwise. If a
/// request ended within a round, later packets would overtake those held by GRO, and TCP would retransmit without a
/// loss.
#[test]
fn the_request_for_doorbells_ends_with_a_round() {
    let (guest, port) = Guest::recording();
    let mut driver = Driver::up(&guest, DriverConfig { auto_mask: true, ..DriverConfig::default() });
    let bytes = ethernet(GUEST_MAC, PEER_MAC, 0x88b5, &[1; 50]);
    let frame = Frame::new(&bytes, false).unwrap();
    while guest.device.receive(&frame) == Received::Delivered {}
    guest.device.flush();
    driver.unmask(0);
    assert_eq!((guest.irqs.take(0), guest.device.receive(&frame)), (1, Received::NoBuffers));
    assert!(driver.rx[0].doorbell_wanted(&guest.memory), "outside of a round a doorbell is requested");
    driver.send(0, &TxPacket::in_parts(&Flow::TO_PEER.udp(b"x"), 4096, TxOffload::None));
    assert_eq!(guest.irqs.take(0), 1, "the completion raises an interrupt, which begins a round");
    let ready = port.ready();
    assert_eq!((driver.poll_some(0, 40).len(), port.ready()), (40, ready + 1));
    assert!(driver.rx[0].doorbell_wanted(&guest.memory), "in the middle of a round");
    assert_eq!(deliver(&guest, &bytes), Received::Delivered);
    assert_eq!(driver.poll(0).len(), 24);
    assert!(driver.rx[0].doorbell_wanted(&guest.memory), "still in the round");
    // The request is withdrawn before the interrupt of the next round.
    let _ = guest.device.bar_write(0, 0, &0_u32.to_le_bytes());
    assert!(!driver.rx[0].doorbell_wanted(&guest.memory));
    assert_eq!(guest.irqs.take(0), 1);
}

/// A driver in a round need not ring doorbells, because the end of its round notifies the device.
#[test]
fn a_driver_in_a_round_is_not_asked_for_doorbells() {
    let (guest, port) = Guest::recording();
    let mut driver = Driver::up(&guest, DriverConfig { auto_mask: true, ..DriverConfig::default() });
    let bytes = ethernet(GUEST_MAC, PEER_MAC, 0x88b5, &[1; 50]);
    while deliver(&guest, &bytes) == Received::Delivered {}
    assert!(!driver.rx[0].doorbell_wanted(&guest.memory));
    assert_eq!((driver.poll(0).len(), port.ready()), (63, 0));
    driver.unmask(0);
    assert_eq!((port.ready(), deliver(&guest, &bytes)), (1, Received::Delivered));
    // A driver that masks its vector itself may not return, so a doorbell is requested.
    guest.write(0, 0, 1);
    while deliver(&guest, &bytes) == Received::Delivered {}
    assert!(driver.rx[0].doorbell_wanted(&guest.memory));
    driver.poll(0);
    assert_eq!((port.ready(), driver.rx[0].doorbell_wanted(&guest.memory)), (2, false));
}

/// When ring 2 runs out, a long frame waits for buffers instead of being segmented into ring 1.
#[test]
fn a_long_frame_waits_for_buffers_instead_of_being_segmented() {
    let (guest, port) = Guest::recording();
    let features = feature::LRO | feature::RXCSUM;
    let mut driver = Driver::up(&guest, DriverConfig { features, auto_mask: true, ..DriverConfig::default() });
    let bytes = super_frame(Flow::TO_GUEST, 20_000);
    let frame = Frame::to_be_segmented(&bytes, 1448).unwrap();
    for _ in 0..3 {
        // Each frame uses five of the 31 buffers of ring 2; the last one finds too few.
        let mut count = 0;
        while guest.device.receive(&frame) == Received::Delivered {
            count += 1;
        }
        assert_eq!(count, 6);
        guest.device.flush();
        assert_eq!(guest.device.receive(&frame), Received::NoBuffers, "the driver is in a round");
        assert!(!driver.rx[0].doorbell_wanted(&guest.memory));
        let packets = driver.poll(0);
        assert!(packets.len() == 6 && packets.iter().all(|packet| packet.segments == Some((14, 1448))));
        let ready = port.ready();
        driver.unmask(0);
        assert_eq!(port.ready(), ready + 1);
    }
}

/// A long frame does not wait longer than one round of the driver for buffers.
#[test]
fn a_long_frame_waits_for_one_round() {
    let (guest, _port) = Guest::recording();
    let features = feature::LRO | feature::RXCSUM;
    let rx = RxLayout { body: 512, ..RxLayout::SMALL };
    let config = DriverConfig { features, auto_mask: true, rx, ..DriverConfig::default() };
    let mut driver = Driver::prepare(&guest, config);
    // More buffers than ring 2 has.
    guest.memory.write(driver.shared + 60, &60_u16.to_le_bytes());
    assert_eq!(driver.activate(), 0);
    driver.finish();
    let bytes = super_frame(Flow::TO_GUEST, 20_000);
    let frame = Frame::to_be_segmented(&bytes, 1448).unwrap();
    assert_eq!(deliver(&guest, &ethernet(GUEST_MAC, PEER_MAC, 0x88b5, &[1; 50])), Received::Delivered);
    assert_eq!(guest.device.receive(&frame), Received::NoBuffers, "the driver is in a round");
    assert_eq!(driver.poll(0).len(), 1);
    driver.unmask(0);
    assert_eq!(guest.device.receive(&frame), Received::Delivered);
    assert_eq!(driver.poll(0).len(), 14);
    // The frame does not wait either if the driver is not in a round at all.
    guest.device.flush();
    driver.unmask(0);
    assert_eq!(guest.device.receive(&frame), Received::Delivered);
}
