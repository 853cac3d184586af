//! Networks in separate processes: a fault in one network does not affect another.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::{self, Child, ChildStderr, Stdio};
use std::time::Instant;

use crate::common::remote::probe;
use crate::common::{PATIENCE, Raw, memfd};
use pvrdma_vfio_user_server::message::{Command, Header};
use pvrdmad::testing::{Pair, beside_traffic, gid};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, Resource, Rlimit, Signal, getrlimit, kill_process, pidfd_open, prlimit};
use serde_json::Value;
use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_pvrdmad");

/// A daemon with the networks `a` (devices `a1` to `a3`) and `b` (`b1` to `b3`), with the same addresses in both.
struct Place {
    folder: TempDir,
    daemon: Child,
    log: BufReader<ChildStderr>,
}

impl Place {
    fn start(arguments: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut command = process::Command::new(PROGRAM);
        // With `strict`, a system call outside the filter kills the process, and the test fails.
        command.args(["--sandbox", "strict"]);
        command.arg("--control").arg(folder.path().join("control")).args([
            "--network",
            "name=a",
            "--network",
            "name=b",
        ]);
        for network in ["a", "b"] {
            for number in [1, 2, 3] {
                let socket = folder.path().join(format!("{network}{number}"));
                let socket = socket.display();
                command.arg("--device").arg(format!(
                    "name={network}{number},network={network},socket={socket},mac=52:54:00:00:04:0{number},pin=off,seed={number}"
                ));
            }
        }
        command.args(arguments).env("RUST_LOG", "info").stdin(Stdio::null());
        let mut daemon = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let ready: Vec<_> = BufReader::new(daemon.stdout.take().unwrap()).lines().take(6).collect();
        let log = BufReader::new(daemon.stderr.take().unwrap());
        assert_eq!(ready.len(), 6, "the daemon ended at its start");
        Self { folder, daemon, log }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn status(&self) -> Value {
        let mut command = process::Command::new(PROGRAM);
        let output = command.args(["status", "--json", "--control"]).arg(self.path("control")).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    fn network(&self, name: &str) -> Value {
        find(&self.status()["networks"], name)
    }

    fn worker(&self, name: &str) -> Process {
        Process::new(i32::try_from(self.network(name)["pid"].as_i64().unwrap()).unwrap())
    }

    /// Waits until `is` accepts a network's status.
    fn wait_network(&self, name: &str, is: impl Fn(&Value) -> bool) -> Value {
        let start = Instant::now();
        loop {
            let network = self.network(name);
            if is(&network) {
                return network;
            }
            assert!(start.elapsed() < PATIENCE, "{network:#}");
        }
    }

    /// Waits for a line of the log.
    fn wait_log(&mut self, part: &str) -> String {
        let mut line = String::new();
        while !line.contains(part) {
            line.clear();
            assert_ne!(self.log.read_line(&mut line).unwrap(), 0, "the log ended without '{part}'");
        }
        line
    }

    fn pair(&self, network: &str) -> Pair {
        Pair::new([1, 2].map(|number| probe(&self.path(&format!("{network}{number}")), 16 << 20)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

fn find(list: &Value, name: &str) -> Value {
    list.as_array().unwrap().iter().find(|entry| entry["name"] == name).expect(name).clone()
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
    fn new(pid: i32) -> Self {
        let pid = Pid::from_raw(pid).unwrap();
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
fn assert_untouched(place: &Place, name: &str) {
    let status = place.status();
    let network = find(&status["networks"], name);
    assert_eq!((&network["state"], &network["restarts"]), (&"running".into(), &0.into()), "{network:#}");
    for device in ["1", "2"].map(|number| format!("{name}{number}")) {
        let device = find(&status["devices"], &device);
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
        let place = Place::start(&["--isolate", isolate]);
        let (mut a, mut b) = (place.pair("a"), place.pair("b"));
        assert_eq!(a.numbers(), b.numbers());
        for _ in 0..10 {
            a.exchange();
            b.exchange();
        }
        let pids = ["a", "b"].map(|name| place.network(name)["pid"].as_u64().unwrap());
        let own = u64::from(place.daemon.id());
        let separate = pids[0] != pids[1] && !pids.contains(&own);
        assert!(if isolate == "network" { separate } else { pids == [own; 2] }, "{isolate}: {pids:?}");
        // Once its owner in one network has gone, the address still has an owner in the other network.
        drop(b);
        a.exchange();
    }
}

#[test]
fn a_worker_that_is_killed_takes_only_its_network() {
    let mut place = Place::start(&[]);
    let (a, mut b) = (place.pair("a"), place.pair("b"));
    let worker = place.worker("a");
    beside_traffic(&mut b, || {
        worker.signal(Signal::KILL);
        worker.wait_end();
        let network = place.wait_network("a", |network| is_running(network) && network["restarts"] == 1);
        assert_eq!(network["lost_vms"], serde_json::json!([]));
        assert!(network["last_end"].as_str().unwrap().contains("SIGKILL"), "{network:#}");
        assert_untouched(&place, "b");
        // A new client finds a freshly reset device at the same socket.
        drop(a);
        let mut again = place.pair("a");
        again.exchange();
    });
    b.exchange();
    let line = place.wait_log("keep their VMs");
    assert!(line.contains("network a") && line.contains("a1, a2"), "{line}");
    let table =
        process::Command::new(PROGRAM).args(["status", "--control"]).arg(place.path("control")).output().unwrap();
    let table = String::from_utf8(table.stdout).unwrap();
    assert!(table.contains("running") && table.contains("SIGKILL"), "{table}");
    assert!(table.lines().all(|line| line.chars().count() <= 80), "{table}");
}

#[test]
fn a_stopped_worker_delays_no_other() {
    let place = Place::start(&[]);
    let (mut a, mut b) = (place.pair("a"), place.pair("b"));
    let worker = place.worker("a");
    let show = |device: &str| {
        let mut command = process::Command::new(PROGRAM);
        command.args(["show", "qp", "--device", device, "--control"]).arg(place.path("control"));
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    beside_traffic(&mut b, || {
        worker.signal(Signal::STOP);
        let status = place.status();
        assert_eq!(find(&status["networks"], "a")["state"], "unresponsive", "{status:#}");
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
    let place = Place::start(&[]);
    let (mut a, mut b) = (place.pair("a"), place.pair("b"));
    let worker = place.worker("a");
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
    let place = Place::start(&[]);
    let socket = place.path("locked");
    let device =
        format!("name=locked,network=a,socket={},mac=52:54:00:00:04:09,pin=all,max-locked=4096", socket.display());
    let mut add = process::Command::new(PROGRAM);
    let output = add.args(["add", &device, "--control"]).arg(place.path("control")).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let pid = i32::try_from(place.network("a")["pid"].as_i64().unwrap()).unwrap();
    // A privileged supervisor would lift the limit.
    let limit = Rlimit { current: Some(1 << 20), maximum: Some(1 << 20) };
    prlimit(Pid::from_raw(pid), Resource::Memlock, limit).unwrap();
    let mut client = Raw::connect(&socket);
    client.negotiate();
    client.map(0, 1 << 20, 0, 3, Some(&memfd("guest", 1 << 20))).ok();
    let start = Instant::now();
    loop {
        assert_eq!(place.network("a")["restarts"], 0, "the worker ended");
        let status = place.status();
        let error = &find(&status["devices"], "locked")["memory"]["pin_error"];
        if error.as_str().is_some_and(|error| error.contains("limit of locked memory is 4096 bytes")) {
            break;
        }
        assert!(start.elapsed() < PATIENCE, "{status:#}");
    }
    client.call(Command::DEVICE_GET_INFO, &[16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[]).ok();
    assert_eq!(place.network("a")["pid"], pid);
}

#[test]
fn a_worker_without_memory_or_mappings_spares_others() {
    let place = Place::start(&[]);
    let mut b = place.pair("b");
    let worker = place.worker("a");
    beside_traffic(&mut b, || {
        let mut client = Raw::connect(&place.path("a1"));
        client.negotiate();
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
    place.pair("a").exchange();
    b.exchange();
}

/// The worker cannot connect. The supervisor connects for it, as often as necessary.
#[test]
fn a_link_gets_its_connections_from_the_supervisor() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("network");
    let listener = UnixListener::bind(&path).unwrap();
    let network = format!("name=c,uplink=unix-connect:{}", path.display());
    let device = format!("name=c1,network=c,socket={},mac=52:54:00:00:04:01", folder.path().join("c1").display());
    let place = Place::start(&["--network", &network, "--device", &device]);
    let accept = || {
        let patience = Timespec::try_from(PATIENCE).unwrap();
        assert_eq!(rustix::event::poll(&mut [PollFd::new(&listener, PollFlags::IN)], Some(&patience)), Ok(1));
        listener.accept().unwrap().0
    };
    let first = accept();
    assert_eq!(rustix::net::sockopt::socket_peercred(&first).unwrap().pid, Pid::from_child(&place.daemon));
    drop(first);
    drop(accept());
    place.worker("c").signal(Signal::KILL);
    accept();
}

#[test]
fn workers_end_with_their_supervisor() {
    for signal in [Signal::KILL, Signal::TERM, Signal::INT] {
        let mut place = Place::start(&[]);
        let workers = ["a", "b"].map(|name| place.worker(name));
        // A stopped worker, which cannot end by itself.
        workers[1].signal(Signal::STOP);
        kill_process(Pid::from_child(&place.daemon), signal).unwrap();
        let status = place.daemon.wait().unwrap();
        workers.iter().for_each(Process::wait_end);
        if signal != Signal::KILL {
            assert!(status.success(), "{status}");
            assert!(!place.path("a1").exists() && !place.path("control").exists());
        }
    }
}

#[test]
fn a_worker_ignores_the_signals_that_end_a_daemon() {
    let place = Place::start(&[]);
    let mut a = place.pair("a");
    let worker = place.worker("a");
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        worker.signal(signal);
    }
    a.exchange();
    assert_eq!(place.network("a")["restarts"], 0);
}

#[test]
fn the_cost_of_an_idle_network_is_bounded() {
    let place = Place::start(&[]);
    let worker = place.worker("a");
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
    let place = Place::start(&[]);
    let mut pair = place.pair("a");
    pair.exchange();
    let network = place.network("a");
    let sandbox = &network["sandbox"];
    assert_eq!((&sandbox["no_new_privs"], &sandbox["seccomp"]), (&true.into(), &true.into()), "{sandbox}");
    // The only capability that may stay. It is needed to lock guest memory where the limit cannot be raised.
    const IPC_LOCK: u64 = 1 << 14;
    let kept = if sandbox["capabilities"].as_array().unwrap().is_empty() { 0 } else { IPC_LOCK };
    let worker = place.worker("a");
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
