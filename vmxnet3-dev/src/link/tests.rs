use pvrdma_verbs::MacAddr;
use rustix::event::{PollFd, PollFlags, Timespec};

use super::*;
use crate::testing::frames::{Flow, GUEST_MAC, checksums_are_right, pattern};
use crate::testing::{Driver, DriverConfig, Guest, RxLayout, TxOffload, TxPacket, feature};

/// A guest, and what its device is connected to.
fn linked() -> (Guest, NicLink) {
    let outbox = Arc::new(Outbox::new().unwrap());
    let config = Vmxnet3Config::new("vm1", MacAddr(GUEST_MAC));
    let guest = Guest::new(config, 16 << 20, Arc::clone(&outbox) as _);
    let device = Arc::clone(&guest.device);
    (guest, NicLink { device, outbox })
}

/// Whether there is something to read, and room to write.
fn ready(link: &NicLink) -> [bool; 2] {
    let Readiness { readable, writable, .. } = link.readiness();
    let (readable, writable) = (readable.unwrap(), writable.unwrap());
    let mut fds = [PollFd::new(&*readable, PollFlags::IN), PollFd::new(&*writable, PollFlags::OUT)];
    rustix::event::poll(&mut fds, Some(&Timespec::default())).unwrap();
    fds.map(|fd| !fd.revents().is_empty())
}

fn read(link: &NicLink, most: usize) -> Vec<Vec<u8>> {
    let mut frames = Frames::default();
    link.receive(&mut frames, most);
    frames.iter().map(<[u8]>::to_vec).collect()
}

#[test]
fn what_the_guest_sends_is_read() {
    let (guest, link) = linked();
    let mut driver = Driver::up(&guest, DriverConfig::default());
    assert_eq!((ready(&link), read(&link, 9).len()), ([false, true], 0));
    let sent: Vec<_> = (0..5).map(|number| Flow::TO_PEER.udp(&pattern(100 + number))).collect();
    for frame in &sent {
        driver.send(0, &TxPacket::in_parts(frame, 4096, TxOffload::None));
    }
    assert_eq!(ready(&link), [true, true]);
    assert_eq!(read(&link, 2), sent[..2]);
    assert_eq!(ready(&link), [true, true]);
    assert_eq!(read(&link, 9), sent[2..]);
    assert_eq!(ready(&link), [false, true]);
    assert_eq!(driver.reap(0), 5);
}

/// What finds no room stays in the guest's ring, and comes when there is room.
#[test]
fn nothing_is_lost_on_the_way_out() {
    let (guest, link) = linked();
    let mut driver = Driver::up(&guest, DriverConfig::default());
    let header = u16::try_from(Flow::TO_PEER.transport_at() + 20).unwrap();
    let open = Flow::TO_PEER.left_open(Flow::TO_PEER.tcp(1, 0x18, 0, &pattern(60_000)), 16, true);
    let long = TxPacket::in_parts(&open, 4096, TxOffload::Segment { header, mss: 1448 });
    let (mut posted, mut completed) = (0, 0);
    // Until it holds back.
    while !link.outbox.full.load(Ordering::Relaxed) {
        driver.send(0, &long);
        posted += 1;
        completed += driver.reap(0);
    }
    assert!(completed < posted);
    let mut count = 0;
    while ready(&link)[0] {
        let frames = read(&link, 64);
        assert!(frames.iter().map(Vec::len).sum::<usize>() < BATCH + long_frame_len());
        count += frames.len();
    }
    assert_eq!((count, completed + driver.reap(0)), (posted, posted));
}

/// Bytes of a frame with 60,000 bytes of data.
fn long_frame_len() -> usize {
    Flow::TO_PEER.transport_at() + 20 + 60_000
}

/// What one guest sends as one frame the other gets as one, or in the segments that the first would have sent.
#[test]
fn long_frames_stay_whole_from_guest_to_guest() {
    for (ipv6, lro) in [(false, true), (false, false), (true, true), (true, false)] {
        let flow = Flow { ipv6, to: GUEST_MAC, ..Flow::TO_PEER };
        let ((from, source), (to, sink)) = (linked(), linked());
        let mut sender = Driver::up(&from, DriverConfig::default());
        let features = if lro { feature::LRO | feature::RXCSUM } else { feature::RXCSUM };
        let mut receiver = Driver::up(&to, DriverConfig { features, ..DriverConfig::default() });
        let header = u16::try_from(flow.transport_at() + 20).unwrap();
        let (data, mss) = (pattern(20_000), if ipv6 { 1428 } else { 1448 });
        let count = data.len().div_ceil(mss.into());
        let open = flow.left_open(flow.tcp(1, 0x18, 0, &data), 16, true);
        sender.send(0, &TxPacket::in_parts(&open, 4096, TxOffload::Segment { header, mss }));
        let mut frames = Frames::default();
        source.receive(&mut frames, 64);
        assert_eq!((frames.len(), frames.offload(0).mss().map(u16::from)), (1, Some(mss)));
        assert!(sink.takes(frames.get(0).unwrap(), frames.offload(0)));
        assert_eq!(sink.send(&frames, 0), 1);
        let got = receiver.poll(0);
        assert_eq!(got.len(), if lro { 1 } else { count });
        assert_eq!(got[0].segments, lro.then(|| (u8::try_from(count).unwrap(), mss)));
        let header = usize::from(header);
        assert!(got.iter().flat_map(|packet| packet.bytes[header..].to_vec()).eq(data));
        assert!(lro || got.iter().all(|packet| checksums_are_right(&packet.bytes)));
    }
}

/// What others cannot cut is cut here: headers that only a card knows.
#[test]
fn what_nobody_else_can_cut_is_cut_at_once() {
    let (guest, link) = linked();
    let mut driver = Driver::up(&guest, DriverConfig::default());
    let flow = Flow { ipv6: true, ..Flow::TO_PEER };
    let mut open = flow.left_open(flow.tcp(1, 0x18, 0, &pattern(5000)), 16, true);
    // A header of destination options.
    open[20] = 60;
    open.splice(54..54, [6, 0, 1, 4, 0, 0, 0, 0]);
    let header = u16::try_from(flow.transport_at() + 8 + 20).unwrap();
    driver.send(0, &TxPacket::in_parts(&open, 4096, TxOffload::Segment { header, mss: 1448 }));
    let mut frames = Frames::default();
    link.receive(&mut frames, 64);
    assert_eq!((frames.len(), frames.has_offloads()), (4, false));
}

/// A checksum that the sender leaves open stays open, and the receiver believes it.
#[test]
fn checksums_between_guests_are_not_calculated() {
    let ((from, source), (to, sink)) = (linked(), linked());
    let (mut sender, mut receiver) =
        (Driver::up(&from, DriverConfig::default()), Driver::up(&to, DriverConfig::default()));
    let open = Flow::TO_GUEST.left_open(Flow::TO_GUEST.udp(&pattern(300)), 6, false);
    let [start, at] = [34, 40];
    sender.send(0, &TxPacket::in_parts(&open, 4096, TxOffload::Checksum { start, at }));
    let mut frames = Frames::default();
    source.receive(&mut frames, 64);
    assert_eq!((frames.get(0), frames.offload(0)), (Some(&open[..]), Offload::checksum(34, 40)));
    assert_eq!(sink.send(&frames, 0), 1);
    let got = receiver.poll(0);
    assert!(got[0].checksum_verified && got[0].bytes == open);
}

#[test]
fn what_is_written_waits_for_the_guests_buffers() {
    let (guest, link) = linked();
    let mut driver = Driver::up(&guest, DriverConfig { rx: RxLayout::SMALL, ..DriverConfig::default() });
    let mut frames = Frames::default();
    for number in 0..200 {
        frames.push(&Flow::TO_GUEST.udp(&pattern(64 + number)));
    }
    let mut from = link.send(&frames, 0);
    assert!(from > 0 && from < 200 && !ready(&link)[1], "{from}");
    assert_eq!(link.send(&frames, from), 0);
    let mut got = Vec::new();
    while from < 200 {
        got.extend(driver.poll(0));
        assert!(ready(&link)[1], "the guest has given buffers");
        from += link.send(&frames, from);
    }
    got.extend(driver.poll(0));
    assert!(got.iter().map(|packet| &packet.bytes[..]).eq(frames.iter()));
    assert!(ready(&link)[1]);
}

#[test]
fn what_is_no_frame_or_finds_no_driver_is_lost() {
    let (guest, link) = linked();
    let mut frames = Frames::default();
    frames.push(&Flow::TO_GUEST.udp(&pattern(64)));
    assert_eq!((link.send(&frames, 0), ready(&link)), (1, [false, true]));
    let mut driver = Driver::up(&guest, DriverConfig::default());
    frames.push(b"short");
    frames.push(&Flow::TO_GUEST.udp(&pattern(65)));
    assert_eq!((link.send(&frames, 0), driver.poll(0).len()), (3, 2));
    let shown = link.inspect();
    assert_eq!((shown.kind, shown.up), ("vmxnet3", Snapshot::Taken(true)));
}
