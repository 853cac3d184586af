use pvrdma_verbs::MacAddr;
use rustix::event::{PollFd, PollFlags, Timespec};

use super::*;
use crate::testing::frames::{Flow, GUEST_MAC, pattern};
use crate::testing::{Driver, DriverConfig, Guest, RxLayout, TxOffload, TxPacket};

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
    let (each, mut posted, mut completed) = (60_000_usize.div_ceil(1448), 0, 0);
    // Until it holds back.
    while !link.outbox.full.load(Ordering::Relaxed) {
        driver.send(0, &long);
        posted += 1;
        completed += driver.reap(0);
    }
    assert!(completed < posted);
    let mut count = 0;
    while ready(&link)[0] {
        count += read(&link, 64).len();
    }
    assert_eq!((count, completed + driver.reap(0)), (posted * each, posted));
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
