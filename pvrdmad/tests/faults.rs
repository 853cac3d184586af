//! Faults on request in a network without an uplink, as guests and `status` see them.

use std::fs;

use crate::common::daemon::{Running, TestDaemon};
use crate::common::patient::PatientVmm;
use crate::common::traffic::{Guest, gid, mac, transfer};
use pvrdma_dev::testing::{AsyncEntry, Buffer, Cq, Mr, Path, Pd, Qp, QpInit, RecvWr, SendWr, access, status};
use serde_json::Value;

/// Starts a daemon with `vm1` and `vm2` in one network without an uplink.
fn start() -> Running {
    let daemon = TestDaemon::new().network("red", "");
    daemon.device("vm1", 1, "network=red,address=any").device("vm2", 2, "network=red,address=any").start()
}

/// Returns the rules of a device, each with the numbers of times and of faults.
fn faults(host: &Running, device: &str) -> Vec<(String, u64, u64)> {
    let faults = host.report(device)["faults"].as_array().cloned().unwrap_or_default();
    let count = |fault: &Value, name: &str| fault[name].as_u64().unwrap();
    let row =
        |fault: &Value| (fault["rule"].as_str().unwrap().to_owned(), count(fault, "seen"), count(fault, "happened"));
    faults.iter().map(row).collect()
}

/// A connection from one guest to another, with memory at both ends.
struct Connection {
    left: Qp,
    right: Qp,
    scq: Cq,
    rcq: Cq,
    mine: (Buffer, Mr),
    theirs: (Buffer, Mr),
    _pds: [Pd; 2],
}

impl Connection {
    fn new(from: &Guest, to: &Guest) -> Self {
        let [(pd, scq), (peer_pd, rcq)] =
            [from, to].map(|guest| (guest.driver.create_pd(None).unwrap(), guest.driver.create_cq(None, 64).unwrap()));
        let mut left = from.driver.create_qp(&QpInit::rc(&pd, &scq)).unwrap();
        let mut right = to.driver.create_qp(&QpInit::rc(&peer_pd, &rcq)).unwrap();
        let quick = Path { timeout: 8, retry_cnt: 1, ..Path::to(gid(to.number), right.qpn) };
        left.connect(&Path { dmac: mac(to.number), ..quick }).unwrap();
        right.connect(&Path { dmac: mac(from.number), ..Path::to(gid(from.number), left.qpn) }).unwrap();
        let mine = from.driver.registered_buffer(&pd, 64, access::ALL).unwrap();
        let theirs = to.driver.registered_buffer(&peer_pd, 64, access::ALL).unwrap();
        Self { left, right, scq, rcq, mine, theirs, _pds: [pd, peer_pd] }
    }

    /// Sends messages until one fails. Returns the statuses at the sender and at the receiver.
    fn send(&mut self, count: u64) -> [Vec<u32>; 2] {
        let mut statuses = [Vec::new(), Vec::new()];
        for wr_id in 0..count {
            self.right.post_recv(&[RecvWr::new(wr_id, &[self.theirs.0.sge(&self.theirs.1, 0, 64)])]).unwrap();
            self.left.post_send(&[SendWr::send(wr_id, &[self.mine.0.sge(&self.mine.1, 0, 64)])]).unwrap();
            let status = self.scq.wait().status;
            statuses[0].push(status);
            if status != status::RETRY_EXC {
                statuses[1].push(self.rcq.wait().status);
            }
            if status != status::SUCCESS {
                break;
            }
        }
        statuses
    }

    /// Returns address and key of the memory at the right end.
    fn target(&self) -> (u64, u32) {
        (self.theirs.0.sge(&self.theirs.1, 0, 64).addr, self.theirs.1.rkey)
    }

    /// Writes to memory of the right guest until that fails. Returns the statuses.
    fn write(&mut self, (address, key): (u64, u32), count: u64) -> Vec<u32> {
        let mut statuses = Vec::new();
        for wr_id in 0..count {
            let from = self.mine.0.sge(&self.mine.1, 0, 64);
            self.left.post_send(&[SendWr::write(wr_id, &[from], address, key)]).unwrap();
            statuses.push(self.scq.wait().status);
            if statuses.last() != Some(&status::SUCCESS) {
                break;
            }
        }
        statuses
    }
}

fn send(from: &Guest, to: &Guest, count: u64) -> [Vec<u32>; 2] {
    Connection::new(from, to).send(count)
}

#[test]
fn guests_see_requested_faults_without_an_uplink() {
    let host = start();
    let (a, b) = (host.guest("vm1", 1), host.guest("vm2", 2));
    let good = status::SUCCESS;
    host.run("fault --device vm2 receive-length/nth:3");
    assert_eq!(send(&a, &b, 4), [vec![good, good, status::REM_INV_REQ], vec![good, good, status::LOC_LEN]]);
    assert_eq!(faults(&host, "vm2"), [("receive-length/nth:3/times:1".to_owned(), 3, 1)]);
    let shown = host.run("status");
    assert!(shown.contains("vm2: fault receive-length/nth:3/times:1 (happened 1 times in 3)"), "{shown}");
    // New rules replace the old ones and their counts.
    host.run("fault --device vm2 loss/times:always rnr/every:1000");
    assert_eq!(send(&a, &b, 1)[0], [status::RETRY_EXC]);
    assert_eq!(faults(&host, "vm2").len(), 2);
    // The other device has none, and they outlive the process of the network.
    assert!(faults(&host, "vm1").is_empty());
    host.run("upgrade --network red");
    assert_eq!(faults(&host, "vm2")[0], ("loss/nth:1/times:always".to_owned(), 0, 0));
    assert_eq!(send(&a, &b, 1)[0], [status::RETRY_EXC]);
    host.run("fault --device vm2 off");
    assert!(faults(&host, "vm2").is_empty());
    transfer(&a, &b, 5);
}

#[test]
fn a_file_sets_the_faults_of_several_devices() {
    let host = start();
    let file = host.path("faults");
    let path = file.display().to_string();
    fs::write(&file, "vm1 local-protection/nth:2 # a bad key\nvm2 rnr/times:3\nvm2 remote-access\n").unwrap();
    host.run(&format!("fault --file {path}"));
    assert_eq!(["vm1", "vm2"].map(|device| faults(&host, device).len()), [1, 2]);
    // All devices are checked before the first one changes.
    let too_many = format!("vm1 rnr\n{}", "vm2 rnr\n".repeat(65));
    for (text, words) in [
        ("vm1 lost", "line 1"),
        ("vm1 rnr\nvm9 rnr", "there is no device 'vm9'"),
        (&too_many, "device vm2: a device has at most 64 faults"),
    ] {
        fs::write(&file, text).unwrap();
        let problem = host.try_run(&format!("fault --file {path}")).unwrap_err();
        assert!(problem.contains(words), "{problem}");
        assert_eq!(faults(&host, "vm1")[0].0, "local-protection/nth:2/times:1", "{text}");
    }
    for wrong in ["--network red rnr", "--device vm1 loss:0.1", "--device vm9 rnr"] {
        assert!(host.try_run(&format!("fault {wrong}")).is_err(), "{wrong}");
    }
    let many = format!("fault --device vm1{}", " rnr".repeat(65));
    assert!(host.try_run(&many).unwrap_err().contains("at most 64"));
    assert_eq!(faults(&host, "vm2").len(), 2);
}

/// Asynchronous events of the port.
const PORT_ACTIVE: AsyncEntry = AsyncEntry { kind: 9, info: 1 };
const PORT_ERR: AsyncEntry = AsyncEntry { kind: 10, info: 1 };
const GID_CHANGE: AsyncEntry = AsyncEntry { kind: 18, info: 1 };
/// DEVICE_FATAL.
const FATAL: AsyncEntry = AsyncEntry { kind: 8, info: 0 };

/// The guest is told that its link or its GID goes and returns, and its connections fail meanwhile.
#[test]
fn links_and_addresses_go_and_return() {
    let host = start();
    let (a, b) = (host.guest("vm1", 1), host.guest("vm2", 2));
    let good = status::SUCCESS;
    let port = || host.report("vm1")["port"].as_str().unwrap().to_owned();
    for (rule, gone, [down, up], word) in [
        ("link-down/nth:2", PORT_ERR, [PORT_ERR, PORT_ACTIVE], "down"),
        ("gid-removed/nth:2", GID_CHANGE, [GID_CHANGE, GID_CHANGE], "active"),
    ] {
        host.run(&format!("fault --device vm1 {rule}"));
        assert_eq!(send(&a, &b, 3), [vec![good, status::RETRY_EXC], vec![good]], "{rule}");
        assert_eq!((a.driver.wait_async_event(), port()), (vec![gone], word.to_owned()), "{rule}");
        assert_eq!((send(&a, &b, 1)[0].clone(), down), (vec![status::RETRY_EXC], gone));
        host.run("fault --device vm1 off");
        assert_eq!((a.driver.wait_async_event(), port()), (vec![up], "active".to_owned()), "{rule}");
        transfer(&a, &b, 5);
    }
    // By time, without a request.
    host.run("fault --device vm1 link-down/after:10ms/for:10ms");
    let mut events = a.driver.wait_async_event();
    while events.len() < 2 {
        events.extend(a.driver.wait_async_event());
    }
    assert_eq!(events, [PORT_ERR, PORT_ACTIVE]);
    assert!(b.driver.async_events().is_empty());
    transfer(&a, &b, 5);
}

#[test]
fn a_device_fails_and_its_driver_starts_it_again() {
    let host = start();
    let vm = PatientVmm::connect(&host.path("vm1"), 16 << 20);
    let load = || {
        let driver = vm.load().unwrap();
        driver.bind_gid(0, gid(1)).unwrap();
        Guest { number: 1, driver }
    };
    let (a, b) = (load(), host.guest("vm2", 2));
    let good = status::SUCCESS;
    host.run("fault --device vm1 device-fatal/nth:3");
    let mut connection = Connection::new(&a, &b);
    assert_eq!(connection.send(2), [[good, good], [good, good]]);
    connection.left.post_send(&[SendWr::send(3, &[connection.mine.0.sge(&connection.mine.1, 0, 64)])]).unwrap();
    assert_eq!(a.driver.wait_async_event(), [FATAL]);
    // The driver's commands fail, and the peer gets no response.
    assert!(a.driver.query_port().is_err());
    connection.right.post_send(&[SendWr::send(4, &[connection.theirs.0.sge(&connection.theirs.1, 0, 64)])]).unwrap();
    assert_eq!(connection.rcq.wait().status, status::RETRY_EXC);
    assert_eq!(host.report("vm1")["recovery"], serde_json::json!({"told": true, "problem": null}));
    drop(connection);
    a.driver.remove();
    transfer(&load(), &b, 5);
    assert_eq!(faults(&host, "vm1")[0].2, 1);
}

/// The files of `docs/incidents/` have the effects that `docs/faults.md` describes.
#[test]
fn public_incidents_are_replayed() {
    let good = status::SUCCESS;
    for (name, first, again) in [
        // Statuses of the WRITEs of a connection, and of a new connection to its own memory.
        ("mooncake-3299", status::REM_INV_REQ, status::REM_INV_REQ),
        ("spdk-1387", status::REM_ACCESS, good),
        ("ucx-7416", status::RETRY_EXC, status::RETRY_EXC),
    ] {
        let host = start();
        let (a, b) = (host.guest("vm1", 1), host.guest("vm2", 2));
        let file = format!("{}/../docs/incidents/{name}.txt", env!("CARGO_MANIFEST_DIR"));
        host.run(&format!("fault --file {file}"));
        let mut old = Connection::new(&a, &b);
        assert_eq!(old.write(old.target(), 9), [good, good, first], "{name}");
        let mut new = Connection::new(&a, &b);
        assert_eq!(new.write(new.target(), 1), [again], "{name}");
        host.run("fault --device vm2 off");
        let mut new = Connection::new(&a, &b);
        assert_eq!(new.write(new.target(), 9), [good; 9], "{name}");
    }
}
