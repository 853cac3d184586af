//! VMMs under load that are killed after any number of bytes. The process keeps nothing of them, and their peers get
//! errors.

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path as FilePath;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use crate::common::daemon::{Running, TestDaemon};
use crate::common::remote::probe;
use crate::common::traffic::{gid, mac};
use crate::common::{Raw, access as access_body, eventfd, irqs_body, map_body, memfd, take_signals, write_body};
use pvrdma_dev::testing::{Cq, Driver, GuestMemory, Irqs, MEMORY_BASE, Path, QpInit, SendWr, access, status};
use pvrdma_pci_function::{Bar, Deferred, InterruptSink, MsixPlace, PciFunction};
use pvrdma_vfio_user_server::message::{Command, HEADER_SIZE, Header};
use rustix::event::{PollFd, PollFlags};
use rustix::process::Pid;

const ROUNDS: u64 = 200;
const MEMORY: u64 = 2 << 20;
const LENGTH: usize = 40_000;
const WRITES: u64 = 30;

/// Panic payload that ends the client's thread at the point where the client is killed.
struct Killed;

/// A function behind a socket, whose client is killed once it has sent a given number of bytes.
struct Mortal {
    said: Mutex<Said>,
}

struct Said {
    client: Option<Raw>,
    left: usize,
}

impl Mortal {
    fn new(socket: &FilePath, left: usize) -> Self {
        Self { said: Mutex::new(Said { client: Some(Raw::connect(socket)), left }) }
    }

    /// Sends a message. Returns the reply.
    fn call(&self, command: Command, body: &[u8], fds: &[BorrowedFd<'_>]) -> Vec<u8> {
        let mut guard = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        let said = &mut *guard;
        let size = u32::try_from(HEADER_SIZE + body.len()).unwrap();
        let header = Header { id: 5, command, size, flags: 0, error: 0 };
        let message = [&header.to_bytes()[..], body].concat();
        let Some(client) = &mut said.client else { resume_unwind(Box::new(Killed)) };
        if said_all(client, &message, fds, &mut said.left) {
            return client.receive().ok();
        }
        said.client = None;
        drop(guard);
        resume_unwind(Box::new(Killed))
    }
}

fn said_all(client: &Raw, message: &[u8], fds: &[BorrowedFd<'_>], left: &mut usize) -> bool {
    let now = message.len().min(*left);
    if now > 0 {
        client.send_raw(&message[..now], fds);
    }
    *left -= now;
    now == message.len()
}

impl PciFunction for Mortal {
    fn bars(&self) -> [Option<Bar>; 6] {
        [None; 6]
    }

    fn config_size(&self) -> usize {
        256
    }

    fn config_read(&self, offset: usize, data: &mut [u8]) {
        let count = u32::try_from(data.len()).unwrap();
        data.copy_from_slice(&self.call(Command::REGION_READ, &access_body(7, offset as u64, count), &[])[16..]);
    }

    fn config_write(&self, offset: usize, data: &[u8]) {
        self.call(Command::REGION_WRITE, &write_body(7, offset as u64, data), &[]);
    }

    fn bar_read(&self, bar: usize, offset: u64, data: &mut [u8]) {
        let (bar, count) = (u32::try_from(bar).unwrap(), u32::try_from(data.len()).unwrap());
        data.copy_from_slice(&self.call(Command::REGION_READ, &access_body(bar, offset, count), &[])[16..]);
    }

    fn bar_write(&self, bar: usize, offset: u64, data: &[u8]) -> Deferred {
        self.call(Command::REGION_WRITE, &write_body(u32::try_from(bar).unwrap(), offset, data), &[]);
        Deferred::Nothing
    }

    fn run_deferred(&self) {}

    fn msix(&self) -> Option<MsixPlace> {
        Some(MsixPlace { capability: 0x40, vectors: 3, bar: 0, table: 0, pending: 0x2000 })
    }

    fn reset(&self) {
        self.call(Command::DEVICE_RESET, &[], &[]);
    }
}

/// A queue pair and its buffer.
#[derive(Clone, Copy)]
struct Place {
    qpn: u32,
    addr: u64,
    rkey: u32,
}

/// Runs a client from its connection to its end. `left`: number of bytes that it sends before it is killed.
fn live(socket: &FilePath, left: usize, to_peer: &mpsc::Sender<Place>, from_peer: &mpsc::Receiver<Place>) {
    let function = Arc::new(Mortal::new(socket, left));
    let file = memfd("victim", MEMORY);
    let events: [OwnedFd; 3] = [eventfd(), eventfd(), eventfd()];
    let irqs = Irqs::new();
    let stop = eventfd();
    thread::scope(|scope| {
        scope.spawn(|| forward(&events, &stop, &irqs));
        let ended = catch_unwind(AssertUnwindSafe(|| {
            function.call(Command::VERSION, b"\0\0\0\0", &[]);
            function.call(Command::DMA_MAP, &map_body(3, 0, MEMORY_BASE, MEMORY), &[file.as_fd()]);
            let fds = events.each_ref().map(AsFd::as_fd);
            function.call(Command::DEVICE_SET_IRQS, &irqs_body(2, 4 | 32, 0, 3), &fds);
            let memory = GuestMemory::in_file(file.try_clone().unwrap());
            load(&Driver::probe(Arc::clone(&function) as _, &memory, &irqs).unwrap(), to_peer, from_peer);
        }));
        rustix::io::write(&stop, &1_u64.to_ne_bytes()).unwrap();
        if let Err(panic) = ended
            && !panic.is::<Killed>()
        {
            resume_unwind(panic);
        }
    });
}

/// Forwards the device's interrupts to the driver until `stop` is signalled.
fn forward(events: &[OwnedFd; 3], stop: &OwnedFd, irqs: &Irqs) {
    loop {
        let mut ready: Vec<_> = events.iter().chain([stop]).map(|event| PollFd::new(event, PollFlags::IN)).collect();
        rustix::event::poll(&mut ready, None).unwrap();
        if !ready[3].revents().is_empty() {
            return;
        }
        for (vector, event) in (0..).zip(events) {
            (0..take_signals(event)).for_each(|_| irqs.msix(vector));
        }
    }
}

/// Registers memory, connects, and writes to the peer, which also writes to this guest.
fn load(driver: &Driver, to_peer: &mpsc::Sender<Place>, from_peer: &mpsc::Receiver<Place>) {
    driver.bind_gid(0, gid(1)).unwrap();
    let (pd, mut cq) = (driver.create_pd(None).unwrap(), driver.create_cq(None, 64).unwrap());
    let mut qp = driver.create_qp(&QpInit::rc(&pd, &cq)).unwrap();
    let all = access::LOCAL_WRITE | access::REMOTE_WRITE;
    let (buffer, mr) = driver.registered_buffer(&pd, LENGTH, all).unwrap();
    let sge = buffer.sge(&mr, 0, LENGTH);
    let mine = Place { qpn: qp.qpn, addr: sge.addr, rkey: mr.rkey };
    to_peer.send(mine).unwrap();
    let peer = from_peer.recv().unwrap();
    qp.connect(&Path { dmac: mac(2), ..Path::to(gid(2), peer.qpn) }).unwrap();
    to_peer.send(mine).unwrap();
    for number in 0..WRITES {
        qp.post_send(&[SendWr::write(number, &[sge], peer.addr, peer.rkey)]).unwrap();
        assert_eq!(cq.wait().status, status::SUCCESS);
    }
    // A peer that is slow may not have written yet.
    let _ = from_peer.recv();
}

/// A guest that survives.
struct Peer {
    driver: Driver,
    cq: Cq,
}

impl Peer {
    /// Writes to the victim until it no longer responds, and reports the first completion to it. Returns the number of
    /// completed writes.
    fn serve(&mut self, victim: &mpsc::Receiver<Place>, to_victim: mpsc::Sender<Place>) -> u64 {
        let driver = &self.driver;
        let Ok(theirs) = victim.recv() else { return 0 };
        let pd = driver.create_pd(None).unwrap();
        let mut qp = driver.create_qp(&QpInit::rc(&pd, &self.cq)).unwrap();
        let all = access::LOCAL_WRITE | access::REMOTE_WRITE;
        let (buffer, mr) = driver.registered_buffer(&pd, LENGTH, all).unwrap();
        let sge = buffer.sge(&mr, 0, LENGTH);
        let path = Path { dmac: mac(1), timeout: 10, retry_cnt: 2, ..Path::to(gid(1), theirs.qpn) };
        qp.connect(&path).unwrap();
        let mine = Place { qpn: qp.qpn, addr: sge.addr, rkey: mr.rkey };
        to_victim.send(mine).unwrap_or_default();
        // The victim may be killed before it is ready to receive.
        let _ = victim.recv();
        let mut answered = 0;
        loop {
            qp.post_send(&[SendWr::write(answered, &[sge], theirs.addr, theirs.rkey)]).unwrap();
            let cqe = self.cq.wait();
            if cqe.status != status::SUCCESS {
                assert_eq!((cqe.wr_id, cqe.status), (answered, status::RETRY_EXC));
                break;
            }
            if answered == 0 {
                to_victim.send(mine).unwrap_or_default();
            }
            answered += 1;
        }
        qp.destroy().unwrap();
        mr.destroy().unwrap();
        buffer.free();
        pd.destroy().unwrap();
        answered
    }
}

fn start() -> Running {
    TestDaemon::new().device("victim", 1, "pin=registered").device("peer", 2, "").start()
}

/// Returns the resources of the process while a client has only negotiated. By then the previous client's resources are
/// released.
fn holdings(daemon: &Running, worker: Pid) -> Holdings {
    let _client = daemon.client("victim");
    let proc = |what: &str| format!("/proc/{}/{what}", worker.as_raw_nonzero());
    let descriptors = fs::read_dir(proc("fd")).unwrap().map(|entry| {
        let target = fs::read_link(entry.unwrap().path()).unwrap().display().to_string();
        target.split([':', ' ']).next().unwrap_or_default().to_owned()
    });
    let mut kinds = BTreeMap::new();
    for kind in descriptors {
        *kinds.entry(kind).or_default() += 1;
    }
    let maps = fs::read_to_string(proc("maps")).unwrap();
    let text = fs::read_to_string(proc("status")).unwrap();
    let number = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.split_whitespace().next().unwrap().parse::<u64>().unwrap()
    };
    Holdings {
        descriptors: kinds,
        guest_mappings: maps.lines().filter(|line| line.contains("memfd:victim")).count(),
        mappings: maps.lines().count(),
        threads: number("Threads:"),
        locked_kib: number("VmLck:"),
        anonymous_kib: number("RssAnon:"),
    }
}

#[derive(Debug)]
struct Holdings {
    descriptors: BTreeMap<String, usize>,
    guest_mappings: usize,
    mappings: usize,
    threads: u64,
    locked_kib: u64,
    anonymous_kib: u64,
}

/// Returns a pseudo-random number for each step of `state` (splitmix64).
fn splitmix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = *state;
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}

/// `KILL_SEED` selects other points.
#[test]
fn a_client_killed_anywhere_leaves_nothing_behind() {
    let seed = std::env::var("KILL_SEED").map_or(7, |seed| seed.parse().unwrap());
    let daemon = start();
    let worker = daemon.worker("default");
    let socket = daemon.path("victim");
    let driver = probe(&daemon.path("peer"), 4 << 20);
    driver.bind_gid(0, gid(2)).unwrap();
    let cq = driver.create_cq(None, 64).unwrap();
    let mut peer = Peer { driver, cq };

    let mut round = |left: usize| {
        let ((to_peer, from_victim), (to_victim, from_peer)) = (mpsc::channel(), mpsc::channel());
        thread::scope(|scope| {
            let socket = &socket;
            scope.spawn(move || live(socket, left, &to_peer, &from_peer));
            peer.serve(&from_victim, to_victim)
        })
    };
    // The first client lives to the end and so is the longest. The next ones make the process do its one-time
    // allocations.
    assert!(round(usize::MAX) > 0);
    for left in [100, 1000, 4000, 8000] {
        round(left);
    }
    let before = holdings(&daemon, worker);
    let (mut state, mut connected) = (seed, 0);
    for number in 0..ROUNDS {
        // The later messages are sent under load.
        let left = usize::try_from(splitmix(&mut state) % 9000).unwrap();
        let answered = round(left);
        connected += u64::from(answered > 0);
        assert_eq!(daemon.worker("default"), worker, "seed {seed}, round {number}, after {left} bytes");
    }
    assert!(connected > ROUNDS / 10, "{connected} of {ROUNDS} were killed under load");
    // A thread that delivers the peer's interrupts ends after a second without one.
    let mut after = holdings(&daemon, worker);
    for _ in 0..200 {
        if after.threads <= before.threads {
            break;
        }
        thread::sleep(Duration::from_millis(50));
        after = holdings(&daemon, worker);
    }
    assert_eq!(after.descriptors, before.descriptors, "seed {seed}");
    assert_eq!((after.guest_mappings, after.locked_kib), (0, 0), "seed {seed}");
    assert!(after.threads <= before.threads, "seed {seed}: {before:?} {after:?}");
    assert!(after.mappings <= before.mappings + 16, "seed {seed}: {before:?} {after:?}");
    assert!(after.anonymous_kib <= before.anonymous_kib + 3000, "seed {seed}: {before:?} {after:?}");
}
