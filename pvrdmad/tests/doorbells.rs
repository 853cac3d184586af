//! A sandboxed daemon that exports doorbell pages: processes of guests post, poll and arm without vfio-user messages.
//! Where the kernel or the test's privileges do not allow it, the tests print the reason and end.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use crate::common::daemon::{PROGRAM, Running, TestDaemon, describe};
use crate::common::place::one_network;
use crate::common::remote::{probe, probe_mapped};
use crate::common::traffic::{gid, mac};
use crate::common::{Raw, region_info_body, words};
use pvrdma_dev::testing::{Buffer, Cq, Driver, Mr, Path, Qp, QpInit, RecvWr, SendWr, Stop, access, status, wait_for};
use pvrdma_verbs::testing::skipped;
use pvrdma_vfio_user_server::message::Command as Message;
use pvrdmad::doorbells::{HostFacts, PageFile, stand_in::entrust};
use rustix::event::{PollFd, PollFlags};
use rustix::process::{Signal, kill_process};
use serde_json::Value;
use vm_memory::mmap::MmapRegion;
use vm_memory::{Bytes, FileOffset, VolatileMemory};

/// Starts a daemon with two devices on one network, with these doorbell modes. Returns `None`, and prints the reason,
/// where pages cannot be exported.
fn start(doorbells: [&str; 2]) -> Option<Running> {
    PageFile::make(1).inspect_err(skipped).ok()?;
    let [first, second] = doorbells.map(|mode| format!("doorbells={mode}"));
    Some(TestDaemon::new().device("vm1", 1, &first).device("vm2", 2, &second).start())
}

fn report(daemon: &Running, number: u8) -> Value {
    daemon.report(&format!("vm{number}"))
}

fn count(daemon: &Running, number: u8, counter: &str) -> u64 {
    report(daemon, number)["counters"][counter].as_u64().unwrap()
}

fn client(daemon: &Running, number: u8) -> Raw {
    daemon.client(&format!("vm{number}"))
}

/// A process of a guest, with a queue pair and a buffer.
struct Process {
    number: u8,
    driver: Driver,
    cq: Cq,
    qp: Qp,
    buffer: Buffer,
    mr: Mr,
}

impl Process {
    fn new(number: u8, driver: &Driver) -> Self {
        let context = driver.open().unwrap();
        let pd = driver.create_pd(Some(&context)).unwrap();
        let cq = driver.create_cq(Some(&context), 64).unwrap();
        let qp = driver.create_qp(&QpInit::rc(&pd, &cq)).unwrap();
        let (buffer, mr) = driver.registered_buffer(&pd, 8192, access::ALL).unwrap();
        Self { number, driver: driver.clone(), cq, qp, buffer, mr }
    }

    fn connect(&mut self, to: u8, qpn: u32) {
        self.qp.connect(&Path { dmac: mac(to), ..Path::to(gid(to), qpn) }).unwrap();
    }

    fn recv(&mut self, id: u64) {
        self.qp.post_recv(&[RecvWr::new(id, &[self.buffer.sge(&self.mr, 4096, 64)])]).unwrap();
    }

    fn send(&mut self, id: u64) {
        self.qp.post_send(&[SendWr::send(id, &[self.buffer.sge(&self.mr, 0, 64)])]).unwrap();
    }
}

fn guests(daemon: &Running, probe: fn(&std::path::Path, u64) -> Driver) -> [Driver; 2] {
    [1, 2].map(|number| {
        let driver = probe(&daemon.path(&format!("vm{number}")), 16 << 20);
        driver.bind_gid(0, gid(number)).unwrap();
        driver
    })
}

/// Sends messages in both directions. Every other round arms the completion queue and waits for an interrupt.
fn exchange(pair: &mut [Process; 2], rounds: u64) {
    connect(pair);
    (0..rounds).for_each(|round| send(pair, round));
}

fn connect([a, b]: &mut [Process; 2]) {
    let numbers = [a.qp.qpn, b.qp.qpn];
    a.connect(b.number, numbers[1]);
    b.connect(a.number, numbers[0]);
}

/// Sends a message. In odd rounds, arms the completion queue and waits for an interrupt.
fn send([a, b]: &mut [Process; 2], round: u64) {
    a.buffer.fill_pattern(round);
    b.recv(round);
    if round % 2 == 1 {
        b.cq.arm();
    }
    a.send(round);
    if round % 2 == 1 {
        while !b.driver.wait_notification().contains(&b.cq.handle) {}
    }
    for end in [&mut *a, &mut *b] {
        let cqe = end.cq.wait();
        assert_eq!((cqe.wr_id, cqe.status), (round, status::SUCCESS));
    }
    assert!(a.buffer.read(0, 64) == b.buffer.read(4096, 64), "round {round}");
}

/// Posting, polling and arming cause no messages. They cause one page fault for each process, and one for each time
/// that a page was taken away.
#[test]
fn processes_ring_without_a_message() {
    let Some(daemon) = start(["mapped", "mapped"]) else { return };
    let drivers = guests(&daemon, probe_mapped);
    // Two processes run one after the other. The second one gets the page of the first.
    for process in 1..=2_u64 {
        let [a, b] = &drivers;
        let mut ends = [Process::new(1, a), Process::new(2, b)];
        exchange(&mut ends, 200);
        for number in [1, 2] {
            let [faults, arms] = ["doorbell_faults", "doorbell_arms"].map(|name| count(&daemon, number, name));
            assert_eq!(count(&daemon, number, "doorbells_of_processes"), 0, "vm{number}");
            assert_eq!(count(&daemon, number, "doorbells_mapped"), process, "vm{number}");
            assert!((1..=arms + process).contains(&faults), "vm{number}: {faults} faults, {arms} arms");
            assert!(count(&daemon, number, "doorbells_found") > 0, "vm{number}");
        }
    }
    // A watcher without work sleeps.
    let cold = || (report(&daemon, 1)["doorbells"]["watcher"] == "cold").then_some(());
    wait_for("sleep", cold);
    let report = report(&daemon, 1);
    assert_eq!((&report["doorbells"]["mode"], &report["doorbells"]["reason"]), (&"mapped".into(), &Value::Null));
    assert!(daemon.run("status").contains("vm1: doorbells: mapped ("));
}

/// A client that does not map the pages has trapped doorbells, whether or not the device exports pages.
#[test]
fn a_client_that_maps_nothing_sends_messages() {
    let Some(daemon) = start(["mapped", "trapped"]) else { return };
    let [a, b] = &guests(&daemon, probe);
    exchange(&mut [Process::new(1, a), Process::new(2, b)], 100);
    for number in [1, 2] {
        let counts = ["doorbell_faults", "doorbells_mapped"].map(|name| count(&daemon, number, name));
        assert_eq!(counts, [0, 0], "vm{number}");
        assert!(count(&daemon, number, "doorbells_of_processes") >= 100, "vm{number}");
    }
    assert_eq!(report(&daemon, 2)["doorbells"]["mode"], "trapped");
    assert!(!daemon.run("status").contains("vm2: doorbells"));
}

/// With `auto`, status gives the reason for the chosen mode. A client of a device without pages is not offered a file.
#[test]
fn auto_reports_why_doorbells_trap() {
    let Some(daemon) = start(["auto", "trapped"]) else { return };
    let report = report(&daemon, 1);
    assert_eq!(report["doorbells"]["mode"], "trapped");
    let reason = report["doorbells"]["reason"].as_str().unwrap();
    assert!(daemon.run("status").contains(&format!("vm1: doorbells: trapped ({reason})")));
    for number in [1, 2] {
        let mut client = client(&daemon, number);
        let info = client.call(Message::DEVICE_GET_REGION_INFO, &region_info_body(2, 4096), &[]).ok();
        assert_eq!(info[..16], words(&[32, 3, 2, 0]));
    }
}

/// Conformance 2: exporting pages does not change the BARs. Replies about BAR 2 carry the file, whatever their size,
/// and no other replies do. A reply is no longer than the client allows.
#[test]
fn the_file_comes_with_the_region() {
    let Some(daemon) = start(["mapped", "trapped"]) else { return };
    let mut vmm = client(&daemon, 1);
    for (index, room, length, file) in
        [(2, 32, 32, true), (2, 64, 64, true), (2, 63, 32, true), (2, u32::MAX, 64, true), (0, 64, 32, false)]
    {
        let (answer, fds) = vmm.call_for_files(Message::DEVICE_GET_REGION_INFO, &region_info_body(index, room));
        assert_eq!((answer.ok().len(), fds.len()), (length, usize::from(file)), "{index} {room}");
    }
    let mut other = client(&daemon, 2);
    for index in 0..3 {
        let size = |vmm: &mut Raw| {
            let (answer, _) = vmm.call_for_files(Message::DEVICE_GET_REGION_INFO, &region_info_body(index, 32));
            answer.ok()[16..24].to_vec()
        };
        assert_eq!(size(&mut vmm), size(&mut other), "BAR {index}");
    }
    for short in [0, 31] {
        let (answer, fds) = vmm.call_for_files(Message::DEVICE_GET_REGION_INFO, &region_info_body(2, short));
        assert_eq!((answer.errno(), fds.len()), (crate::common::EINVAL, 0), "{short}");
    }
    // A thousand requests leave no descriptors open in the server or in the test.
    for _ in 0..1000 {
        let (_, fds) = vmm.call_for_files(Message::DEVICE_GET_REGION_INFO, &region_info_body(2, 64));
        assert_eq!(fds.len(), 1);
    }
}

/// An impossible configuration is refused when the daemon starts, with an explanation.
#[test]
fn pages_that_cannot_be_lent_are_refused() {
    let Some(daemon) = start(["trapped", "trapped"]) else { return };
    let device = describe(daemon.folder(), "vm3", 3, "doorbells=perhaps");
    let mut wrong = Command::new(PROGRAM);
    wrong.args(["--device", &device]).stdin(Stdio::null()).stderr(Stdio::piped());
    let mut wrong = wrong.spawn().unwrap();
    let mut said = String::new();
    wrong.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(!wrong.wait().unwrap().success() && said.contains("auto, trapped, mapped"), "{said}");
}

/// A mapping of the doorbell file, as a VMM has it.
struct Mapping(MmapRegion);

impl Mapping {
    fn new(file: &OwnedFd, pages: usize) -> Self {
        let file = FileOffset::new(File::from(file.try_clone().unwrap()), 0);
        let access = libc::PROT_READ | libc::PROT_WRITE;
        Self(MmapRegion::build(Some(file), pages * 4096, access, libc::MAP_SHARED).unwrap())
    }

    fn store(&self, page: usize) {
        self.0.as_volatile_slice().store(1_u32, page * 4096, Ordering::SeqCst).unwrap();
    }
}

/// Waits for a thread that touches a page. Without an answer the thread hangs; a wrong answer kills this process by a
/// signal.
fn finish(touching: thread::JoinHandle<Mapping>) -> Mapping {
    wait_for("an answer about a page", || touching.is_finished().then_some(()));
    touching.join().unwrap()
}

/// The fallback server answers the request that its process left unanswered, and later ones. It exits when the file is
/// no longer open or mapped.
#[test]
fn a_touch_that_was_not_answered_is_answered_by_the_stand_in() {
    answered_by_the_stand_in(|(_supervisor, alive)| drop(alive));
}

/// A thread of a worker that waits for the kernel keeps the worker's descriptors open after the end of the daemon.
#[test]
fn a_touch_is_answered_after_the_end_of_the_daemon() {
    let mut kept = None;
    answered_by_the_stand_in(|(supervisor, alive)| {
        drop(supervisor);
        kept = Some(alive);
    });
}

/// `end`: ends the process that serves the pages, which has a connection to the fallback server and a pipe.
fn answered_by_the_stand_in(end: impl FnOnce((UnixStream, std::io::PipeWriter))) {
    let Ok(PageFile { device, file }) = PageFile::make(8).inspect_err(skipped) else {
        return;
    };
    if let Some(reason) = HostFacts::look().without_stand_in {
        skipped(&reason);
        return;
    }
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut stand_in = Command::new(PROGRAM);
    stand_in.args(["stand-in", "strict", "net"]).stdin(OwnedFd::from(theirs)).stdout(Stdio::null());
    let mut stand_in = stand_in.spawn().unwrap();
    drop(stand_in.stdin.take());
    let (life, alive) = std::io::pipe().unwrap();
    entrust(&ours, 8, device.as_fd(), life.as_fd()).unwrap();
    drop(life);

    let mapping = Mapping::new(&file, 8);
    drop(file);
    let touching = thread::spawn(move || {
        mapping.store(3);
        mapping
    });
    // The serving process has read the request, and ends before it answers.
    rustix::event::poll(&mut [PollFd::new(&device, PollFlags::IN)], None).unwrap();
    let mut request = [0; 64 << 10];
    let length = rustix::io::read(&device, &mut request).unwrap();
    assert!(length > 40 && request[4] == 15, "a READ: {:?}", &request[..length]);
    assert!(!touching.is_finished());
    drop(device);
    end((ours, alive));
    let mapping = finish(touching);
    (0..8).for_each(|page| mapping.store(page));
    assert_eq!(stand_in.try_wait().unwrap(), None);
    drop(mapping);
    assert!(stand_in.wait().unwrap().success());
}

/// Processes post, poll, arm and sleep without a message, while their network is handed over to new workers, kept by a
/// worker whose successor fails, and handed over to another daemon.
#[test]
fn mapped_doorbells_survive_hand_overs() {
    if PageFile::make(1).inspect_err(skipped).is_err() {
        return;
    }
    let mut place = one_network(",doorbells=mapped").start();
    let drivers = [1, 2].map(|number| {
        let driver = probe_mapped(&place.path(&format!("a{number}")), 16 << 20);
        driver.bind_gid(0, gid(number)).unwrap();
        driver
    });
    let mut pair = [1, 2].map(|number| Process::new(number, &drivers[usize::from(number) - 1]));
    connect(&mut pair);
    let count = |counter: &str| -> u64 {
        let status = place.status();
        status["devices"].as_array().unwrap().iter().map(|device| device["counters"][counter].as_u64().unwrap()).sum()
    };
    let (rounds, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    thread::scope(|scope| {
        let _stop = Stop(&stop);
        let traffic = scope.spawn({
            let (pair, rounds, stop) = (&mut pair, &rounds, &stop);
            move || {
                while !stop.load(Ordering::SeqCst) {
                    send(pair, rounds.fetch_add(1, Ordering::SeqCst));
                }
            }
        });
        let go_on = || {
            let until = rounds.load(Ordering::SeqCst) + 20;
            wait_for("traffic", || (traffic.is_finished() || rounds.load(Ordering::SeqCst) > until).then_some(()));
            assert!(!traffic.is_finished());
        };
        let upgrade = || {
            place.run("upgrade");
            go_on();
        };
        go_on();
        (0..10).for_each(|_| upgrade());
        for step in ["client", "ready"] {
            place.install(&format!("#!/bin/sh\nPVRDMAD_FAULT=worker-{step}:die exec REAL \"$@\"\n"));
            place.try_run("upgrade").unwrap_err();
            go_on();
        }
        place.install("#!/bin/sh\nexec REAL \"$@\"\n");
        place.replace_daemon();
        go_on();
        upgrade();
    });
    assert_eq!(count("doorbells_of_processes"), 0, "a doorbell was a message");
    assert!(count("doorbell_faults") > 2, "the pages were taken away");
    drop(pair);
    place.exit();
}

/// A VMM survives the worker process of its network at any moment: its page touches are still answered. The same holds
/// for a worker that has taken the network over.
#[test]
fn a_vmm_outlives_the_process_of_its_network() {
    let Some(daemon) = start(["mapped", "trapped"]) else { return };
    if let Some(reason) = report(&daemon, 1)["doorbells"]["unguarded"].as_str() {
        skipped(reason);
        return;
    }
    let mut vmm = client(&daemon, 1);
    let (_, files) = vmm.call_for_files(Message::DEVICE_GET_REGION_INFO, &region_info_body(2, 64));
    let mapping = Mapping::new(&files[0], 1024);
    drop(files);
    mapping.store(1);
    daemon.run("upgrade");
    mapping.store(1);
    let first = daemon.worker("default");
    let signal = |signal| kill_process(first, signal).unwrap();
    signal(Signal::STOP);
    let touching = thread::spawn(move || {
        mapping.store(2);
        mapping
    });
    signal(Signal::KILL);
    let mapping = finish(touching);
    let next = |network: &Value| network["state"] == "running" && network["pid"] != first.as_raw_nonzero().get();
    daemon.wait_network("default", next);
    (1..1024).for_each(|page| mapping.store(page));
    // The next worker exports other pages.
    let mut vmm = client(&daemon, 1);
    let (_, files) = vmm.call_for_files(Message::DEVICE_GET_REGION_INFO, &region_info_body(2, 64));
    let next = Mapping::new(&files[0], 1024);
    drop(files);
    next.store(1);
    wait_for("a fault", || (count(&daemon, 1, "doorbell_faults") == 1).then_some(()));
    // Finally the daemon itself ends.
    drop(daemon);
    for mapping in [&mapping, &next] {
        (1..1024).for_each(|page| mapping.store(page));
    }
}
