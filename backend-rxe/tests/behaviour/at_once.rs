//! Direct delivery: the thread that read packets for a port also processes them. Here the test is that thread.

use std::sync::{Arc, Weak};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use pvrdma_link::{
    Frames, Link, LinkInspect, LinkReceiver, MonotonicClock, Readiness,
    memory::{self, MemoryLink},
};
use pvrdma_rxe::{
    PortRules, RxeStation,
    capture::{Batch, CaptureConfig},
};
use pvrdma_verbs::Hca;
use pvrdma_verbs_types::{GidType, QpType, RemoteAddress, SendOp, WcStatus};

use crate::gate::Gate;
use crate::world::*;

/// A link that records its receiver, and the threads that send with their numbers of bytes.
#[derive(Debug)]
struct Handing {
    inner: MemoryLink,
    receiver: Mutex<Receiver>,
    /// Each thread that sent, with the number of bytes.
    senders: Mutex<Vec<(ThreadId, usize)>>,
}

struct Receiver(Option<Weak<dyn LinkReceiver>>);

impl std::fmt::Debug for Receiver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Receiver")
    }
}

impl Link for Handing {
    fn receive(&self, frames: &mut Frames, most: usize) {
        self.inner.receive(frames, most);
    }

    fn send(&self, frames: &Frames, from: usize) -> usize {
        let bytes = frames.iter_from(from).map(<[u8]>::len).sum();
        self.senders.lock().push((thread::current().id(), bytes));
        self.inner.send(frames, from)
    }

    fn set_receiver(&self, receiver: Weak<dyn LinkReceiver>) {
        self.receiver.lock().0 = Some(receiver);
    }

    fn readiness(&self) -> Readiness {
        self.inner.readiness()
    }

    fn lost(&self) -> u64 {
        0
    }

    fn inspect(&self) -> LinkInspect {
        self.inner.inspect()
    }
}

impl Handing {
    fn receiver(&self) -> Option<Arc<dyn LinkReceiver>> {
        self.receiver.lock().0.as_ref()?.upgrade()
    }

    /// Offers these frames to the port for direct delivery. Returns the number that it took.
    fn hand(&self, list: &[&[u8]]) -> usize {
        let mut frames = Frames::default();
        list.iter().for_each(|frame| frames.push(frame));
        let list: Vec<_> = (0..frames.len()).collect();
        self.receiver().unwrap().take(&frames, &list)
    }

    /// Same as `hand`, repeated until the port's thread, which was just started or woken, has become idle.
    fn hand_patiently(&self, list: &[&[u8]]) -> usize {
        let start = Instant::now();
        loop {
            match self.hand(list) {
                0 => assert!(start.elapsed() < Duration::from_secs(60), "nothing is taken"),
                taken => return taken,
            }
            thread::yield_now();
        }
    }
}

/// Creates device 1, which has threads, on such a link. The test has the other end.
fn handing(port_threads: usize) -> (World, Node, Arc<Handing>, MemoryLink, RxeStation) {
    let world = World::with(|config| {
        (config.workers, config.port_threads) = (1, port_threads);
        config.clock = Arc::new(MonotonicClock::default());
    });
    let (inner, cable) = memory::pair(1000).unwrap();
    let link = Arc::new(Handing { inner, receiver: Mutex::new(Receiver(None)), senders: Mutex::default() });
    let station = plug(&world.rxe, 1, Arc::clone(&link), PortRules::default());
    let node = world.node(1);
    (world, node, link, cable, station)
}

fn arp() -> Vec<u8> {
    [&mac(1).0[..], &mac(2).0, &[0x88, 0xb5], &[7; 46]].concat()
}

#[test]
fn a_packet_is_taken_and_answered_on_the_thread_that_has_it() {
    let (_world, node, link, cable, _station) = handing(1);
    let end = node.qp(QpType::Rc);
    connect_to_test(&end);
    end.recv(1, &[]);
    let frame = request();
    assert_eq!(
        link.hand_patiently(&[&frame, &arp(), &frame]),
        1,
        "only RDMA frames in front of other frames are taken"
    );
    assert_eq!(end.rcq.one().status, WcStatus::Success);
    assert_eq!((taken(&cable).len(), node.counter("wire_frames_received")), (1, 1));
    assert!(link.senders.lock().iter().all(|(thread, _)| *thread == thread::current().id()));
    assert_eq!(link.hand(&[&arp()]), 0);
}

#[test]
fn frames_that_are_not_taken_inline_arrive_through_the_queue() {
    let (world, node, link, _cable, station) = handing(1);
    let end = node.qp(QpType::Rc);
    connect_to_test(&end);
    end.recv(1, &[]);
    let frame = request();
    // A capture must see all frames, so there is no direct delivery while one runs.
    let capture = world.station(1).capture(CaptureConfig::new(10_000, 1 << 20)).unwrap();
    assert_eq!(link.hand(&[&frame]), 0);
    capture.take(&mut Batch::default());
    drop(capture);
    node.hca.set_link(false).unwrap();
    assert_eq!(link.hand(&[&frame]), 0);
    node.hca.set_link(true).unwrap();
    assert_eq!(link.hand_patiently(&[&frame]), 1);
    // Only threads of the device access slow memory.
    node.memory.note_stall(Duration::from_secs(1));
    assert_eq!(link.hand(&[&frame]), 0);
    drop((end, node));
    assert_eq!(link.hand(&[&frame]), 0, "there is no device");
    station.unplug();
    assert!(link.receiver().is_none());
    // A port with several threads distributes packets in batches, and offers no direct delivery.
    let (.., link, _cable, _station) = handing(2);
    assert!(link.receiver().is_none());
}

/// Returns the frames of a READ that a correct peer sends at first, and the number of bytes that they request.
fn read_requests(remote: RemoteAddress, len: u64) -> (Vec<Vec<u8>>, u64) {
    let (world, far, cable, _station) = exposed(100);
    far.hca.bind_gid(0, gid(2), GidType::RoceV2).unwrap();
    let end = far.qp(QpType::Rc);
    end.connect(&end, |a| (a.av.dgid, a.av.dmac) = (gid(1), mac(1)));
    end.submit(1, SendOp::Read { remote }, &[far.buffer(len).all()]);
    world.rxe.run_ready();
    let frames = taken(&cable);
    // The length is the last field of the RETH, in front of the ICRC.
    let len = |frame: &Vec<u8>| u64::from(u32::from_be_bytes(*frame[frame.len() - 8..].first_chunk().unwrap()));
    let asked = frames.iter().map(len).sum();
    (frames, asked)
}

/// Attack: a peer that reads makes the delivering thread send all responses, while others wait for that thread.
#[test]
fn work_for_a_device_on_another_devices_thread_is_bounded() {
    let (_world, node, link, cable, _station) = handing(1);
    let end = node.qp(QpType::Rc);
    connect_to_test(&end);
    let buffer = node.buffer(1 << 20);
    let (frames, len) = read_requests(buffer.remote(0), 1 << 20);
    assert!(len >= 160 << 10, "{len}");
    let frames: Vec<_> = frames.iter().map(Vec::as_slice).collect();
    assert_eq!(link.hand_patiently(&frames), frames.len());
    let (mut come, start) = (0, Instant::now());
    while come < len {
        // Headers are counted as well.
        come += taken(&cable).iter().map(|frame| frame.len() as u64).sum::<u64>();
        assert!(start.elapsed() < Duration::from_secs(60), "{come} bytes came");
        thread::yield_now();
    }
    let senders = link.senders.lock();
    let here: usize = senders.iter().filter(|(thread, _)| *thread == thread::current().id()).map(|(_, it)| it).sum();
    assert!(here < 80 << 10, "{here} bytes were sent here");
}

/// Attack: a device's own thread is stuck in a received packet. A thread that delivers frames to this device and others
/// does not wait for it.
#[test]
fn no_device_waits_for_one_that_is_busy() {
    let (_world, node, link, cable, _station) = handing(1);
    let (gate, reached, leave) = Gate::new();
    let cq = node.hca.create_cq(gate).unwrap();
    let end = node.qp_on(QpType::Rc, None, [None, Some(&cq)], |_| {}).unwrap();
    connect_to_test(&end);
    end.recv(1, &[]);
    let frame = request();
    give(&cable, &frame);
    reached.recv().unwrap();
    // A test that waits does not end.
    assert_eq!(link.hand(&[&frame]), 0);
    leave.send(()).unwrap();
    assert_eq!(link.hand_patiently(&[&frame]), 1);
}
