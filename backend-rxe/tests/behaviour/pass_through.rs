//! The daemon between a network function and its network: RoCE for the device is delivered to the device, everything
//! else passes.

use std::fmt;
use std::slice;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak, mpsc};
use std::time::Duration;

use parking_lot::Mutex;
use pvrdma_base::Snapshot;
use pvrdma_link::{
    Bell, Frames, Link, LinkInspect, LinkReader, MonotonicClock, Readiness,
    memory::{self, MemoryLink},
};
use pvrdma_rxe::{PortConfig, RxeStation};
use pvrdma_verbs_types::{QpType, WcStatus};
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::world::*;

/// A device. The test has the far ends of its uplink and its network function.
struct Between {
    world: World,
    network: MemoryLink,
    function: MemoryLink,
    _station: RxeStation,
}

impl Between {
    /// `room`: number of frames that the link to the network function holds.
    fn new(room: usize) -> Self {
        let world = World::new();
        let (uplink, network) = memory::pair(10_000).unwrap();
        let (nic, function) = memory::pair(room).unwrap();
        let config = PortConfig::new(Arc::new(uplink), 4500).with_nic(Some(Arc::new(nic)));
        let station = plug_in(&world.rxe, 1, config);
        Self { world, network, function, _station: station }
    }

    fn give(&self, link: &MemoryLink, list: &[Vec<u8>]) {
        let mut frames = Frames::default();
        list.iter().for_each(|frame| frames.push(frame));
        assert_eq!(link.send(&frames, 0), list.len());
        self.world.rxe.run_ready();
    }
}

/// A frame with this destination, type and content.
fn frame(to: [u8; 6], kind: u16, content: &[u8]) -> Vec<u8> {
    [&to[..], &mac(2).0, &kind.to_be_bytes(), content].concat()
}

#[test]
fn roce_is_for_the_device_and_the_rest_passes_both_ways() {
    let between = Between::new(1000);
    let roce = request();
    // Without a driver of the device, the frames may be for software in the guest, so they pass.
    between.give(&between.network, slice::from_ref(&roce));
    assert_eq!(taken(&between.function), slice::from_ref(&roce));

    let node = between.world.node(1);
    let end = node.qp(QpType::Rc);
    connect_to_test(&end);
    end.recv(1, &[]);
    let mut others = roce.clone();
    others[..6].copy_from_slice(&mac(3).0);
    let passing = [
        frame([0xff; 6], 0x88b5, b"who has"),
        others,
        frame(mac(1).0, 0x0800, &[0x45; 40]),
        frame(mac(1).0, 0x86dd, &[0x60; 60]),
        vec![1, 2, 3],
    ];
    let (first, second) = passing.split_at(2);
    between.give(&between.network, &[first, &[roce], second].concat());
    assert_eq!(taken(&between.function), passing, "as they were and in their order");
    assert_eq!((end.rcq.one().status, end.rcq.poll().len()), (WcStatus::Success, 0));
    let answers = taken(&between.network);
    assert!(answers.len() == 1 && answers[0][..6] == mac(2).0, "the device acknowledges, {answers:?}");

    let mut own = passing.to_vec();
    own.pop();
    own.iter_mut().for_each(|frame| frame[6..12].copy_from_slice(&mac(1).0));
    between.give(&between.function, &own);
    // Only queue pairs send RoCE.
    own.remove(1);
    assert_eq!(taken(&between.network), own);
    assert_eq!(node.counter("passed_dropped_roce"), 1);
    assert!(taken(&between.function).is_empty(), "no frame is returned to the function");
    let counts = ["passed_in", "passed_out", "passed_dropped", "wire_frames_received", "wire_frames_sent"];
    assert_eq!(counts.map(|name| node.counter(name)), [6, 3, 0, 1, 1]);

    // The driver ends, and the device has no user any more.
    drop((end, node));
    between.give(&between.network, &[request()]);
    assert_eq!(taken(&between.function).len(), 1);
}

#[test]
fn a_function_that_does_not_take_its_frames_delays_no_other() {
    let between = Between::new(1);
    let node = between.world.node(1);
    let end = node.qp(QpType::Rc);
    connect_to_test(&end);
    end.recv(1, &[]);
    let numbered: Vec<_> = (0..1000_u32)
        .map(|number| frame(mac(1).0, 0x0800, &[&number.to_be_bytes()[..], &[0; 9000]].concat()))
        .collect();
    between.give(&between.network, &numbered);
    between.give(&between.network, &[request()]);
    assert_eq!(end.rcq.one().status, WcStatus::Success, "RDMA goes on");
    let dropped = usize::try_from(node.counter("passed_dropped")).unwrap();
    assert!((400..600).contains(&dropped), "{dropped} of 1000 frames of 9 KB, of which 4 MiB wait");
    // Waiting frames follow in order as soon as there is room.
    let mut got = Vec::new();
    loop {
        let more = taken(&between.function);
        if more.is_empty() {
            break;
        }
        got.extend(more);
        between.world.rxe.run_ready();
    }
    assert!(got == numbered[..1000 - dropped]);
}

/// A network function whose doorbells the test rings.
struct Function {
    reader: Mutex<Option<Weak<dyn LinkReader>>>,
    frames: Mutex<Vec<Vec<u8>>>,
    /// Readable while frames are left that the doorbell's thread has not passed, because the port's thread was reading.
    left: Bell,
}

impl fmt::Debug for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Function").finish_non_exhaustive()
    }
}

impl Link for Function {
    fn receive(&self, frames: &mut Frames, most: usize) {
        let mut own = self.frames.lock();
        let count = own.len().min(most);
        own.drain(..count).for_each(|frame| frames.push(&frame));
        if own.is_empty() {
            self.left.clear();
        }
    }

    fn send(&self, frames: &Frames, from: usize) -> usize {
        frames.len() - from
    }

    fn readiness(&self) -> Readiness {
        Readiness { readable: Some(self.left.descriptor()), ..Readiness::default() }
    }

    fn set_reader(&self, reader: Weak<dyn LinkReader>) {
        *self.reader.lock() = Some(reader);
    }

    fn lost(&self) -> u64 {
        0
    }

    fn inspect(&self) -> LinkInspect {
        LinkInspect { kind: "function", name: String::new(), peers: Vec::new(), up: Snapshot::Taken(true) }
    }
}

/// Longer than any step takes; a test that waits for this long has failed.
const PATIENCE: Duration = Duration::from_secs(20);

/// A world with real threads and real time.
fn threaded() -> World {
    World::with(|config| {
        config.workers = 1;
        config.clock = Arc::new(MonotonicClock::default());
    })
}

/// A frame of the network function.
fn own_frame() -> Vec<u8> {
    let mut frame = frame([0xff; 6], 0x88b5, b"who has");
    frame[6..12].copy_from_slice(&mac(1).0);
    frame
}

impl Function {
    fn new() -> Arc<Self> {
        Arc::new(Self { reader: Mutex::default(), frames: Mutex::default(), left: Bell::new().unwrap() })
    }

    /// Its doorbell is rung for these frames.
    fn ring(&self, frames: &[Vec<u8>]) {
        *self.frames.lock() = frames.to_vec();
        self.reader.lock().as_ref().and_then(Weak::upgrade).unwrap().read();
        let frames = self.frames.lock();
        if !frames.is_empty() {
            self.left.ring();
        }
    }
}

/// A doorbell's thread finds the uplink full while the port's thread sleeps, and leaves the waiting to that thread.
#[test]
fn an_uplink_that_a_doorbell_has_filled_is_waited_for() {
    let world = threaded();
    let (uplink, network) = memory::pair(1).unwrap();
    let function = Function::new();
    let nic = Some(Arc::clone(&function) as _);
    let config = PortConfig::new(Arc::new(uplink), 4500).with_nic(nic);
    let _station = plug_in(&world.rxe, 1, config);
    for _ in 0..100 {
        function.ring(&[own_frame(), own_frame(), own_frame()]);
        let mut came = 0;
        while came < 3 {
            let readable = network.readiness().readable.unwrap();
            let mut fds = [PollFd::new(&*readable, PollFlags::IN)];
            let patience = Timespec::try_from(PATIENCE).unwrap();
            assert_eq!(rustix::event::poll(&mut fds, Some(&patience)).unwrap(), 1, "no sender waits for room");
            came += taken(&network).len();
        }
    }
}

/// A link that went down while it was full: it has no descriptor to wait for, and loses later frames.
#[derive(Debug)]
struct Gone {
    refusals: AtomicUsize,
    lost: mpsc::Sender<usize>,
}

impl Link for Gone {
    fn receive(&self, _frames: &mut Frames, _most: usize) {}

    fn send(&self, frames: &Frames, from: usize) -> usize {
        if self.refusals.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok() {
            return 0;
        }
        let all = frames.len() - from;
        self.lost.send(all).unwrap();
        all
    }

    fn readiness(&self) -> Readiness {
        Readiness::default()
    }

    fn lost(&self) -> u64 {
        0
    }

    fn inspect(&self) -> LinkInspect {
        LinkInspect { kind: "gone", name: String::new(), peers: Vec::new(), up: Snapshot::Taken(false) }
    }
}

#[test]
fn frames_do_not_wait_forever_for_a_link_that_is_gone() {
    let world = threaded();
    let function = Function::new();
    let (lost, told) = mpsc::channel();
    let uplink = Arc::new(Gone { refusals: AtomicUsize::new(5), lost });
    let config = PortConfig::new(uplink, 4500).with_nic(Some(Arc::clone(&function) as _));
    let _station = plug_in(&world.rxe, 1, config);
    function.ring(&[own_frame()]);
    assert_eq!(told.recv_timeout(PATIENCE), Ok(1));
}
