use std::time::Duration;

use pvrdma_packet::MacAddr;
use pvrdma_pci_function::{Migratable, PciFunction};
use rustix::event::{PollFd, PollFlags, Timespec};

use super::*;
use crate::testing::frames::{Flow, GUEST_MAC, PEER_MAC, checksums_are_right, ethernet, pattern};
use crate::testing::{Driver, DriverConfig, Guest, Irqs, Memory, RxLayout, TxOffload, TxPacket, command, feature};

/// Returns a guest and the link of its device.
fn linked() -> (Guest, NicLink) {
    linked_with(Memory::new(16 << 20), Arc::default())
}

/// Returns a guest that exists already, and the link of its device.
fn linked_with(memory: Arc<Memory>, irqs: Arc<Irqs>) -> (Guest, NicLink) {
    let outbox = Arc::new(Outbox::new().unwrap());
    let config = Vmxnet3Config::new("vm1", MacAddr(GUEST_MAC));
    let guest = Guest::with_memory(config, memory, irqs, Arc::clone(&outbox) as _);
    let device = Arc::clone(&guest.device);
    // The deadline is far away, so that no test depends on time.
    let deadline = Deadline::new(Duration::from_secs(3600)).unwrap();
    (guest, NicLink { device, outbox, reader: Mutex::default(), deadline })
}

/// Returns whether the link is readable, and whether it is writable.
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
fn frames_of_the_guest_are_read() {
    let (guest, link) = linked();
    let mut driver = Driver::up(&guest, DriverConfig::default());
    assert_eq!(read(&link, 9).len(), 0, "the driver may have filled its rings before it started");
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

/// Another link continues where a paused one was: it has the unread packets, and the driver is interrupted for those
/// that were read.
#[test]
fn a_link_continues_another_one() {
    let (guest, link) = linked();
    let mut driver = Driver::up(&guest, DriverConfig::default());
    let sent: Vec<_> = (0..5).map(|number| Flow::TO_PEER.udp(&pattern(100 + number))).collect();
    for frame in &sent {
        driver.send(0, &TxPacket::in_parts(frame, 4096, TxOffload::None));
    }
    assert_eq!((read(&link, 2), guest.irqs.take(0)), (sent[..2].to_vec(), 0), "the interrupt waits");
    guest.device.pause();
    let mut state = Vec::new();
    guest.device.save(&mut state).unwrap();
    assert_eq!(read(&link, 9).len(), 0);
    let (next, link) = linked_with(guest.memory.of_another_device(), Arc::clone(&guest.irqs));
    next.device.restore(&mut &state[..]).unwrap();
    assert_eq!((read(&link, 9).len(), guest.irqs.take(0)), (0, 0));
    next.device.resume().unwrap();
    assert_eq!((ready(&link), guest.irqs.take(0)), ([true, true], 1));
    let mut driver = driver.detach().attach(&next);
    assert_eq!((driver.reap(0), read(&link, 9), driver.reap(0)), (2, sent[2..].to_vec(), 3));
}

/// Unread packets stay in the guest's ring, and arrive in order once they are read.
#[test]
fn unread_packets_stay_in_the_ring() {
    let (guest, link) = linked();
    let mut driver = Driver::up(&guest, DriverConfig { tx_queues: 2, tx_ring: 256, ..DriverConfig::default() });
    let header = u16::try_from(Flow::TO_PEER.transport_at() + 20).unwrap();
    // 16 packets of 15 descriptors in each queue.
    for sequence in 0..32 {
        let open = Flow::TO_PEER.left_open(Flow::TO_PEER.tcp(sequence, 0x18, 0, &pattern(60_000)), 16, true);
        let queue = usize::try_from(sequence / 16).unwrap();
        driver.send(queue, &TxPacket::in_parts(&open, 4096, TxOffload::Segment { header, mss: 1448 }));
    }
    assert_eq!((driver.reap(0), driver.reap(1)), (0, 0));
    let (mut got, mut first) = ([Vec::new(), Vec::new()], None);
    while ready(&link)[0] {
        let frames = read(&link, 64);
        assert!(frames.iter().map(Vec::len).sum::<usize>() < BATCH + long_frame_len());
        for frame in frames {
            let sequence = u32::from_be_bytes(frame[38..42].try_into().unwrap());
            let queue = usize::try_from(sequence / 16).unwrap();
            first = first.or_else(|| (queue == 1).then_some(got[0].len()));
            got[queue].push(sequence);
        }
    }
    assert_eq!(got, [(0..16).collect::<Vec<_>>(), (16..32).collect()]);
    assert_eq!((driver.reap(0), driver.reap(1)), (16, 16));
    assert!(first.unwrap() < 16, "a queue does not wait until the other is empty");
}

/// The reader sleeps until the link is readable, and the driver's thread signals it without waiting. If a doorbell were
/// lost between the two, this test would not end.
#[test]
fn no_doorbell_is_forgotten() {
    const PACKETS: u32 = 10_000;
    let (guest, link) = linked();
    let mut driver = Driver::up(&guest, DriverConfig::default());
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let readable = link.readiness().readable.unwrap();
            let (mut frames, mut next) = (Frames::default(), 0);
            while next < PACKETS {
                rustix::event::poll(&mut [PollFd::new(&*readable, PollFlags::IN)], None).unwrap();
                frames.clear();
                link.receive(&mut frames, 7);
                for frame in frames.iter() {
                    assert_eq!(u32::from_le_bytes(frame[14..18].try_into().unwrap()), next);
                    next += 1;
                }
            }
        });
        let mut waiting = 0;
        for number in 0..PACKETS {
            let body = [&number.to_le_bytes()[..], &[0; 42]].concat();
            driver.send(0, &TxPacket::plain(&ethernet(PEER_MAC, GUEST_MAC, 0x88b5, &body)));
            waiting += 1;
            // Vary the load, so that the reader finds the ring empty on some iterations only.
            let most = if number % 3 == 0 { 0 } else { 20 };
            while waiting > most && !reader.is_finished() {
                waiting -= driver.reap(0);
                std::thread::yield_now();
            }
        }
    });
}

/// A packet that is too short for its tag is dropped; otherwise it would show bytes of another frame in front.
#[test]
fn an_invalid_frame_takes_no_room() {
    let (guest, link) = linked();
    let mut driver = Driver::up(&guest, DriverConfig::default());
    let frame = Flow::TO_PEER.udp(&pattern(100));
    let short = TxPacket { tag: Some(5), ..TxPacket::in_parts(&frame[..13], 4096, TxOffload::None) };
    driver.send_all(0, &[short, TxPacket::in_parts(&[1; 70_000], 16_384, TxOffload::None), TxPacket::plain(&frame)]);
    let mut frames = Frames::default();
    link.receive(&mut frames, 64);
    assert_eq!(frames.iter().collect::<Vec<_>>(), [&frame[..]]);
    assert_eq!(frames.reserved(), frame.len());
    assert_eq!((driver.reap(0), driver.stats(0)[8]), (3, 2));
    // Invalid packets count against the budget like frames do.
    let invalid = TxPacket::in_parts(&pattern(60_000), 16_384, TxOffload::Segment { header: 54, mss: 1448 });
    driver.send_all(0, &vec![invalid; 15]);
    assert_eq!((read(&link, 64).len(), driver.reap(0)), (0, BATCH.div_ceil(60_000)));
    while ready(&link)[0] {
        assert_eq!(read(&link, 64).len(), 0);
    }
    assert_eq!((driver.reap(0), driver.stats(0)[8]), (15 - BATCH.div_ceil(60_000), 17));
    driver.send(0, &TxPacket::plain(&frame));
    guest.device.set_link(false);
    link.receive(&mut frames, 64);
    assert_eq!((frames.len(), driver.reap(0), driver.stats(0)[9]), (1, 1, 1));
}

/// A doorbell rings while another thread reads its packet: the doorbell's thread finds nothing to do and wakes no
/// reader. The reader must therefore signal the remaining packets. Regression: both sides slept.
#[test]
fn a_reader_signals_the_remaining_packets() {
    let (guest, link) = linked();
    let mut driver = Driver::up(&guest, DriverConfig::default());
    assert_eq!((read(&link, 64).len(), ready(&link)[0]), (0, false));
    guest.device.set_link(false);
    for _ in 0..15 {
        driver.tx[0].post(&guest.memory, &TxPacket::in_parts(&pattern(60_000), 16_384, TxOffload::None));
    }
    let _ = guest.device.bar_write(0, 0x600, &driver.tx[0].next_fill().to_le_bytes());
    assert_eq!((read(&link, 64).len(), driver.reap(0)), (0, BATCH.div_ceil(60_000)));
    assert!(ready(&link)[0], "packets are left, and all threads sleep");
    while ready(&link)[0] {
        assert_eq!(read(&link, 64).len(), 0);
    }
    assert_eq!(driver.reap(0), 15 - BATCH.div_ceil(60_000));
}

/// Returns the number of interrupts of the guest for its first queues.
fn interrupts(driver: &Driver<'_>) -> u64 {
    driver.guest.irqs.take(driver.vector(0))
}

/// When a packet of the guest is answered, one interrupt reports both the completion and the answer.
#[test]
fn an_answer_brings_the_interrupt_for_a_sent_packet() {
    let (guest, link) = linked();
    let mut driver = Driver::up(&guest, DriverConfig::default());
    let frame = TxPacket::plain(&Flow::TO_PEER.udp(&pattern(100)));
    let mut answer = Frames::default();
    answer.push(&Flow::TO_GUEST.udp(&pattern(100)));
    for _ in 0..20 {
        driver.send(0, &frame);
        assert_eq!(read(&link, 9).len(), 1);
        assert_eq!((driver.reap(0), interrupts(&driver)), (1, 0));
        assert!(guest.device.has_unannounced());
        assert_eq!((link.send(&answer, 0), interrupts(&driver)), (1, 1));
        assert_eq!((driver.poll(0).len(), guest.device.has_unannounced()), (1, false));
        driver.unmask(driver.vector(0));
        assert_eq!(interrupts(&driver), 0);
    }
}

/// Completions are reported at the deadline if no other interrupt follows.
#[test]
fn sent_packets_are_completed_without_an_answer() {
    let (guest, link) = linked();
    let link = NicLink { deadline: Deadline::new(LATEST).unwrap(), ..link };
    let mut driver = Driver::up(&guest, DriverConfig { tx_queues: 2, rx_queues: 2, ..DriverConfig::default() });
    let frame = TxPacket::plain(&Flow::TO_PEER.udp(&pattern(100)));
    let changed = link.readiness().changed.unwrap();
    for _ in 0..2 {
        driver.send(0, &frame);
        driver.send(1, &frame);
        let mut sent = read(&link, 9).len();
        while guest.device.has_unannounced() {
            rustix::event::poll(&mut [PollFd::new(&*changed, PollFlags::IN)], None).unwrap();
            sent += read(&link, 9).len();
        }
        assert_eq!((sent, guest.irqs.take(0), guest.irqs.take(1)), (2, 1, 1));
        driver.unmask(0);
        driver.unmask(1);
    }
    let mut fds = [PollFd::new(&*changed, PollFlags::IN)];
    assert_eq!(rustix::event::poll(&mut fds, Some(&Timespec::default())).unwrap(), 0, "the timer has stopped");
}

/// A driver with few packets in flight, or with a small ring, does not stall.
#[test]
fn many_sent_packets_are_announced_at_once() {
    let (guest, link) = linked();
    let mut driver = Driver::up(&guest, DriverConfig { tx_ring: 64, ..DriverConfig::default() });
    let frame = Flow::TO_PEER.udp(&pattern(1000));
    let small = TxPacket::plain(&frame);
    for number in 1..=32 {
        driver.send(0, &small);
        assert_eq!((read(&link, 9).len(), driver.reap(0)), (1, 1));
        assert_eq!(interrupts(&driver), u64::from(number % 16 == 0), "packet {number}");
        driver.unmask(driver.vector(0));
    }
    // Eight descriptors per packet, in a ring of 64.
    let long = TxPacket::in_parts(&frame, frame.len().div_ceil(8), TxOffload::None);
    for number in 1..=8 {
        driver.send(0, &long);
        assert_eq!((read(&link, 9).len(), driver.reap(0)), (1, 1));
        assert_eq!(interrupts(&driver), u64::from(number % 2 == 0), "packet {number}");
        driver.unmask(driver.vector(0));
    }
}

/// A driver that disables coalescing gets an interrupt at once, and waiting completions are discarded with the session.
#[test]
fn nothing_waits_without_coalescing_or_behind_the_session() {
    let (guest, link) = linked();
    let mut driver = Driver::up(&guest, DriverConfig::default());
    let frame = TxPacket::plain(&Flow::TO_PEER.udp(&pattern(100)));
    driver.send(0, &frame);
    assert_eq!((read(&link, 9).len(), interrupts(&driver)), (1, 0));
    assert_eq!(guest.command(command::QUIESCE), 0);
    assert!(!guest.device.has_unannounced());
    let mut driver = Driver::up(&guest, DriverConfig::default());
    assert_eq!(driver.set_coalesce([0; 4]), 0);
    driver.send(0, &frame);
    assert_eq!((read(&link, 9).len(), interrupts(&driver), guest.device.has_unannounced()), (1, 1, false));
}

/// Returns the length of a frame with 60,000 bytes of data.
fn long_frame_len() -> usize {
    Flow::TO_PEER.transport_at() + 20 + 60_000
}

/// A long frame sent by one guest reaches the other guest whole, or in the segments that the sender would have made.
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
        assert!(got.iter().all(|packet| checksums_are_right(&packet.bytes) && packet.checksum_verified));
    }
}

/// Frames that other links cannot segment are segmented here: only the vNIC parses these headers.
#[test]
fn segments_that_no_link_can_cut_are_cut_at_once() {
    let (guest, link) = linked();
    let mut driver = Driver::up(&guest, DriverConfig::default());
    let flow = Flow { ipv6: true, ..Flow::TO_PEER };
    let mut open = flow.left_open(flow.tcp(1, 0x18, 0, &pattern(5000)), 16, true);
    // A destination options header.
    open[20] = 60;
    open.splice(54..54, [6, 0, 1, 4, 0, 0, 0, 0]);
    let header = u16::try_from(flow.transport_at() + 8 + 20).unwrap();
    driver.send(0, &TxPacket::in_parts(&open, 4096, TxOffload::Segment { header, mss: 1448 }));
    let mut frames = Frames::default();
    link.receive(&mut frames, 64);
    assert_eq!((frames.len(), frames.has_offloads()), (4, false));
}

/// A checksum that the sender leaves open is calculated while the frame is copied to the receiver, which may forward it
/// or pass it to a raw socket.
#[test]
fn checksums_between_guests_are_calculated() {
    let ((from, source), (to, sink)) = (linked(), linked());
    let (mut sender, mut receiver) =
        (Driver::up(&from, DriverConfig::default()), Driver::up(&to, DriverConfig::default()));
    let whole = Flow::TO_GUEST.udp(&pattern(300));
    let open = Flow::TO_GUEST.left_open(whole.clone(), 6, false);
    let [start, at] = [34, 40];
    sender.send(0, &TxPacket::in_parts(&open, 4096, TxOffload::Checksum { start, at }));
    let mut frames = Frames::default();
    source.receive(&mut frames, 64);
    assert_eq!((frames.get(0), frames.offload(0)), (Some(&open[..]), Offload::checksum(&open, 34, 40).unwrap()));
    assert_eq!(sink.send(&frames, 0), 1);
    let got = receiver.poll(0);
    assert!(got[0].checksum_verified && got[0].bytes == whole);
}

#[test]
fn written_frames_wait_for_the_guests_buffers() {
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
        assert!(ready(&link)[1], "the link is writable once the guest has posted buffers");
        from += link.send(&frames, from);
    }
    got.extend(driver.poll(0));
    assert!(got.iter().map(|packet| &packet.bytes[..]).eq(frames.iter()));
    assert!(ready(&link)[1]);
}

/// A frame waits for buffers of a driver that ends or is replaced. Regression: the next driver got no frames.
#[test]
fn frames_do_not_wait_for_buffers_of_a_driver_that_has_gone() {
    let (guest, link) = linked();
    let layout = DriverConfig { rx: RxLayout::SMALL, ..DriverConfig::default() };
    let mut frames = Frames::default();
    (0..200).for_each(|number| frames.push(&Flow::TO_GUEST.udp(&pattern(64 + number))));
    for end in [command::QUIESCE, command::RESET, command::ACTIVATE] {
        let _driver = Driver::up(&guest, layout);
        let from = link.send(&frames, 0);
        assert!(from < 200 && !ready(&link)[1], "{from}");
        guest.command(end);
        assert!(ready(&link)[1], "the waiter is not woken");
    }
    let _driver = Driver::up(&guest, layout);
    assert!(link.send(&frames, 0) < 200 && !ready(&link)[1]);
    guest.device.reset();
    let mut driver = Driver::up(&guest, layout);
    assert!(ready(&link)[1], "the waiter is not woken");
    assert!(link.send(&frames, 0) > 0 && !driver.poll(0).is_empty());
}

#[test]
fn invalid_frames_and_frames_without_a_driver_are_lost() {
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

/// Reads on the calling thread, unless another thread is reading.
#[derive(Debug, Default)]
struct Reads {
    link: Mutex<Option<Arc<NicLink>>>,
    frames: Mutex<Frames>,
    at_most: usize,
}

impl LinkReader for Reads {
    fn read(&self) {
        if let Some(link) = self.link.try_lock().as_ref().and_then(|link| link.as_ref()) {
            link.receive(&mut self.frames.lock(), self.at_most);
        }
    }
}

/// The doorbell's thread reads the frames, and the link is readable only if frames are left.
#[test]
fn frames_are_read_on_the_thread_of_the_doorbell() {
    let (guest, link) = linked();
    let link = Arc::new(link);
    let mut driver = Driver::up(&guest, DriverConfig::default());
    assert_eq!(read(&link, 9).len(), 0, "the driver may have filled its rings before it started");
    let reads = Arc::new(Reads { at_most: 2, ..Reads::default() });
    let reader: Arc<dyn LinkReader> = Arc::clone(&reads) as _;
    link.set_reader(Arc::downgrade(&reader));
    *reads.link.lock() = Some(Arc::clone(&link));
    let frame = TxPacket::plain(&Flow::TO_PEER.udp(&pattern(100)));
    driver.send(0, &frame);
    assert_eq!((reads.frames.lock().len(), ready(&link)[0]), (1, false));
    driver.send_all(0, &[frame.clone(), frame.clone(), frame.clone()]);
    assert_eq!((reads.frames.lock().len(), ready(&link)[0]), (3, true));
    assert_eq!((read(&link, 9).len(), ready(&link)[0]), (1, false));
    // Another thread is reading.
    let busy = reads.link.lock();
    driver.send(0, &frame);
    assert_eq!((reads.frames.lock().len(), ready(&link)[0]), (3, true));
    drop(busy);
    assert_eq!(read(&link, 9).len(), 1);
    // The reader is gone.
    *reads.link.lock() = None;
    drop((reads, reader));
    driver.send(0, &frame);
    assert!(ready(&link)[0]);
}
