//! Networks in separate processes: a fault in one network does not affect another.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::process::Stdio;
use std::time::Instant;

use crate::common::daemon::{Running, TestDaemon, named};
use crate::common::remote::probe;
use crate::common::{PATIENCE, Raw, memfd};
use pvrdma_vfio_user_server::message::{Command, Header};
use pvrdmad::testing::{Pair, beside_traffic, gid};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, Resource, Rlimit, Signal, getrlimit, kill_process, pidfd_open, prlimit};
use serde_json::Value;

/// Describes a daemon with the networks `a` (devices `a1` to `a3`) and `b` (`b1` to `b3`), with the same addresses in
/// both.
fn described() -> TestDaemon {
    let mut daemon = TestDaemon::new().env("RUST_LOG", "info").read_log();
    for network in ["a", "b"] {
        daemon = daemon.network(network, "");
        for number in [1, 2, 3] {
            daemon = daemon.device(&format!("{network}{number}"), number, &format!("network={network},seed={number}"));
        }
    }
    daemon
}

fn start() -> Running {
    described().start()
}

/// Connects the guests of the first two devices of a network.
fn pair(place: &Running, network: &str) -> Pair {
    let devices = [1, 2].map(|number| format!("{network}{number}"));
    place.pair(devices.each_ref().map(String::as_str))
}

fn worker(place: &Running, network: &str) -> Process {
    Process::new(place.worker(network))
}

fn is_running(network: &Value) -> bool {
    network["state"] == "running"
}

/// A process that is not a child of the test.
struct Process {
    pid: Pid,
    fd: OwnedFd,
}

impl Process {
    fn new(pid: Pid) -> Self {
        Self { pid, fd: pidfd_open(pid, PidfdFlags::empty()).unwrap() }
    }

    fn signal(&self, signal: Signal) {
        kill_process(self.pid, signal).unwrap();
    }

    fn wait_end(&self) {
        let patience = Timespec::try_from(PATIENCE).unwrap();
        let mut poll = [PollFd::new(&self.fd, PollFlags::IN)];
        assert_eq!(rustix::event::poll(&mut poll, Some(&patience)), Ok(1), "{:?} does not end", self.pid);
    }

    fn proc(&self, what: &str) -> String {
        fs::read_to_string(format!("/proc/{}/{what}", self.pid.as_raw_nonzero())).unwrap()
    }

    /// Limits a resource of the process. Returns a function that restores the old limit.
    fn limit(&self, resource: Resource, limit: u64) -> impl FnOnce() {
        let pid = self.pid;
        let Rlimit { maximum, .. } = getrlimit(resource);
        let before = prlimit(Some(pid), resource, Rlimit { current: Some(limit), maximum }).unwrap();
        move || {
            prlimit(Some(pid), resource, before).unwrap();
        }
    }
}

/// Checks that the network still serves its connected pair, and new clients.
fn assert_untouched(place: &Running, name: &str) {
    let status = place.status();
    let network = named(&status["networks"], name);
    assert_eq!((&network["state"], &network["restarts"]), (&"running".into(), &0.into()), "{network:#}");
    for device in ["1", "2"].map(|number| format!("{name}{number}")) {
        let device = named(&status["devices"], &device);
        assert_eq!((&device["phase"], &device["client"]["connected"]), (&"active".into(), &true.into()), "{device:#}");
        assert_eq!(device["network"]["name"], name);
    }
    // A new client is served from its first message.
    let driver = probe(&place.path(&format!("{name}3")), 4 << 20);
    driver.bind_gid(0, gid(3)).unwrap();
    driver.remove();
}

#[test]
fn equal_addresses_in_two_networks_do_not_meet() {
    for isolate in ["network", "none"] {
        let place = described().isolate(isolate).start();
        let (mut a, mut b) = (pair(&place, "a"), pair(&place, "b"));
        assert_eq!(a.numbers(), b.numbers());
        for _ in 0..10 {
            a.exchange();
            b.exchange();
        }
        let pids = ["a", "b"].map(|name| place.network(name)["pid"].as_u64().unwrap());
        let own = u64::from(place.id());
        let separate = pids[0] != pids[1] && !pids.contains(&own);
        assert!(if isolate == "network" { separate } else { pids == [own; 2] }, "{isolate}: {pids:?}");
        // Once its owner in one network has gone, the address still has an owner in the other network.
        drop(b);
        a.exchange();
    }
}

#[test]
fn a_worker_that_is_killed_takes_only_its_network() {
    let mut place = start();
    let (a, mut b) = (pair(&place, "a"), pair(&place, "b"));
    let worker = worker(&place, "a");
    beside_traffic(&mut b, || {
        worker.signal(Signal::KILL);
        worker.wait_end();
        let network = place.wait_network("a", |network| is_running(network) && network["restarts"] == 1);
        assert_eq!(network["lost_vms"], serde_json::json!([]));
        assert!(network["last_end"].as_str().unwrap().contains("SIGKILL"), "{network:#}");
        assert_untouched(&place, "b");
        // A new client finds a freshly reset device at the same socket.
        drop(a);
        let mut again = pair(&place, "a");
        again.exchange();
    });
    b.exchange();
    let line = place.wait_log("keep their VMs");
    assert!(line.contains("network a") && line.contains("a1, a2"), "{line}");
    let table = place.run("status");
    assert!(table.contains("running") && table.contains("SIGKILL"), "{table}");
    assert!(table.lines().all(|line| line.chars().count() <= 80), "{table}");
}

#[test]
fn a_stopped_worker_delays_no_other() {
    let place = start();
    let (mut a, mut b) = (pair(&place, "a"), pair(&place, "b"));
    let worker = worker(&place, "a");
    let show = |device: &str| {
        let mut command = place.command(&format!("show qp --device {device}"));
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    beside_traffic(&mut b, || {
        worker.signal(Signal::STOP);
        let status = place.status();
        assert_eq!(named(&status["networks"], "a")["state"], "unresponsive", "{status:#}");
        // One request waits for the stopped worker; requests for another network do not.
        let waiting = show("a1").spawn().unwrap();
        assert!(show("b1").output().unwrap().status.success());
        assert_untouched(&place, "b");
        worker.signal(Signal::CONT);
        // The request still gets its reply.
        let output = waiting.wait_with_output().unwrap();
        assert!(output.status.success(), "{output:?}");
    });
    let network = place.wait_network("a", is_running);
    assert_eq!((&network["restarts"], &network["lost_vms"]), (&0.into(), &serde_json::json!([])));
    a.exchange();
    b.exchange();
}

#[test]
fn a_worker_without_descriptors_serves_its_clients_and_spares_others() {
    let place = start();
    let (mut a, mut b) = (pair(&place, "a"), pair(&place, "b"));
    let worker = worker(&place, "a");
    beside_traffic(&mut b, || {
        // The limit is below the number of open descriptors, so the process cannot get another one.
        let unlimit = worker.limit(Resource::Nofile, 8);
        a.exchange();
        // The new client cannot even be turned away, so it waits.
        let mut client = Raw::connect(&place.path("a1"));
        client.send(Command::VERSION, 0, &[0; 4], &[]);
        a.exchange();
        assert_untouched(&place, "b");
        unlimit();
        client.wait_hang_up();
    });
    a.exchange();
    b.exchange();
}

/// A client can cause this, here with more memory than the device may lock. The thread that logs it must not violate
/// its filter.
#[test]
fn memory_that_cannot_be_locked_ends_no_worker() {
    let place = start();
    place.add("locked", 9, "network=a,pin=all,max-locked=4096").unwrap();
    let pid = place.worker("a");
    // A privileged supervisor would lift the limit.
    let limit = Rlimit { current: Some(1 << 20), maximum: Some(1 << 20) };
    prlimit(Some(pid), Resource::Memlock, limit).unwrap();
    let mut client = place.client("locked");
    client.map(0, 1 << 20, 0, 3, Some(&memfd("guest", 1 << 20))).ok();
    let start = Instant::now();
    loop {
        assert_eq!(place.network("a")["restarts"], 0, "the worker ended");
        let status = place.status();
        let error = &named(&status["devices"], "locked")["memory"]["pin_error"];
        if error.as_str().is_some_and(|error| error.contains("limit of locked memory is 4096 bytes")) {
            break;
        }
        assert!(start.elapsed() < PATIENCE, "{status:#}");
    }
    client.call(Command::DEVICE_GET_INFO, &[16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[]).ok();
    assert_eq!(place.worker("a"), pid);
}

#[test]
fn a_worker_without_memory_or_mappings_spares_others() {
    let place = start();
    let mut b = pair(&place, "b");
    let worker = worker(&place, "a");
    beside_traffic(&mut b, || {
        let mut client = place.client("a1");
        // The worker can create no mapping and get no memory from the kernel.
        let _for_ever = worker.limit(Resource::As, 1 << 20);
        client.map(0, 1 << 20, 0, 3, Some(&memfd("guest", 1 << 20))).errno();
        // The worker may or may not survive this message. In both cases the other network is not affected.
        let size = 1 << 20;
        let header = Header { id: 7, command: Command::VERSION, size, flags: 0, error: 0 };
        let _ = crate::common::send(&client.stream, &[&header.to_bytes()[..], &vec![0; 1 << 20]].concat(), &[]);
        assert_untouched(&place, "b");
        drop(client);
        let ended = worker.fd.try_clone().unwrap();
        if rustix::event::poll(&mut [PollFd::new(&ended, PollFlags::IN)], Some(&Timespec::default())) == Ok(0) {
            worker.signal(Signal::KILL);
        }
        place.wait_network("a", |network| is_running(network) && network["restarts"].as_u64() >= Some(1));
    });
    pair(&place, "a").exchange();
    b.exchange();
}

/// The worker cannot connect. The supervisor connects for it, as often as necessary.
#[test]
fn a_link_gets_its_connections_from_the_supervisor() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("network");
    let listener = UnixListener::bind(&path).unwrap();
    let daemon = described().network("c", &format!("uplink=unix-connect:{}", path.display()));
    let place = daemon.device("c1", 1, "network=c").start();
    let accept = || {
        let patience = Timespec::try_from(PATIENCE).unwrap();
        assert_eq!(rustix::event::poll(&mut [PollFd::new(&listener, PollFlags::IN)], Some(&patience)), Ok(1));
        listener.accept().unwrap().0
    };
    let first = accept();
    assert_eq!(
        rustix::net::sockopt::socket_peercred(&first).unwrap().pid.as_raw_nonzero().get().unsigned_abs(),
        place.id()
    );
    drop(first);
    drop(accept());
    worker(&place, "c").signal(Signal::KILL);
    accept();
}

#[test]
fn workers_end_with_their_supervisor() {
    for signal in [Signal::KILL, Signal::TERM, Signal::INT] {
        let mut place = start();
        let workers = ["a", "b"].map(|name| worker(&place, name));
        // A stopped worker, which cannot end by itself.
        workers[1].signal(Signal::STOP);
        place.signal(signal);
        let status = place.exit();
        workers.iter().for_each(Process::wait_end);
        if signal != Signal::KILL {
            assert_eq!(status, Some(0));
            assert!(!place.path("a1").exists() && !place.path("control").exists());
        }
    }
}

#[test]
fn a_worker_ignores_the_signals_that_end_a_daemon() {
    let place = start();
    let mut a = pair(&place, "a");
    let worker = worker(&place, "a");
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        worker.signal(signal);
    }
    a.exchange();
    assert_eq!(place.network("a")["restarts"], 0);
}

#[test]
fn the_cost_of_an_idle_network_is_bounded() {
    let place = start();
    let worker = worker(&place, "a");
    let rollup = worker.proc("smaps_rollup");
    let line = rollup.lines().find(|line| line.starts_with("Private_Dirty:")).unwrap();
    let kib: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    let status = worker.proc("status");
    let threads = status.lines().find(|line| line.starts_with("Threads:")).unwrap();
    println!("Private_Dirty {kib} KiB, {threads}");
    assert!(kib < 3 << 10, "{kib} KiB");
}

/// The kernel shows each thread of a worker that serves clients as confined, without capabilities.
#[test]
fn every_thread_of_a_worker_is_confined() {
    let place = start();
    let mut pair = pair(&place, "a");
    pair.exchange();
    let network = place.network("a");
    let sandbox = &network["sandbox"];
    assert_eq!((&sandbox["no_new_privs"], &sandbox["seccomp"]), (&true.into(), &true.into()), "{sandbox}");
    // The only capability that may stay. It is needed to lock guest memory where the limit cannot be raised.
    const IPC_LOCK: u64 = 1 << 14;
    let kept = if sandbox["capabilities"].as_array().unwrap().is_empty() { 0 } else { IPC_LOCK };
    let worker = worker(&place, "a");
    let mut threads = 0;
    for thread in fs::read_dir(format!("/proc/{}/task", worker.pid.as_raw_nonzero())).unwrap() {
        let status = fs::read_to_string(thread.unwrap().path().join("status")).unwrap();
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(":\t"));
        assert_eq!((field("Seccomp"), field("NoNewPrivs")), (Some("2"), Some("1")), "{status}");
        for set in ["CapInh", "CapAmb"] {
            assert_eq!(field(set), Some("0000000000000000"), "{status}");
        }
        for set in ["CapPrm", "CapEff", "CapBnd"] {
            let rights = u64::from_str_radix(field(set).unwrap(), 16).unwrap();
            assert_eq!(rights & !kept, 0, "{set}: {status}");
        }
        threads += 1;
    }
    // The main thread, the launcher, an engine, and one thread for each of the two clients.
    assert!(threads >= 5, "{threads}");
}
