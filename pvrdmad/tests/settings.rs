//! Settings that can be changed while a daemon runs: shares, faults of an uplink, log levels. All of them also hold for
//! the next worker.

use std::fs::File;
use std::ops::Deref;
use std::process::{Command, Stdio};
use std::time::Instant;

use crate::common::PATIENCE;
use crate::common::daemon::{PROGRAM, Running, TestDaemon};
use crate::common::traffic::{Guest, gid, mac, transfer};
use pvrdma_dev::testing::{Path, QpInit, SendWr, status};
use serde_json::{Value, json};
use tempfile::TempDir;

/// A daemon with the network `red` and one device there.
struct Host {
    daemon: Running,
    number: u8,
}

impl Deref for Host {
    type Target = Running;

    fn deref(&self) -> &Running {
        &self.daemon
    }
}

impl Host {
    /// Starts a daemon. `network` holds further keys of the network.
    fn start(number: u8, isolate: &str, network: &str) -> Self {
        Self::start_as(TestDaemon::new().isolate(isolate), number, network)
    }

    fn start_as(daemon: TestDaemon, number: u8, network: &str) -> Self {
        Self { daemon: daemon.network("red", network).device("vm", number, "network=red").start(), number }
    }

    /// Starts two daemons whose uplinks are connected to each other.
    fn start_pair(isolate: &str) -> (TempDir, [Self; 2]) {
        Self::start_pair_with(isolate, ["", ""])
    }

    /// The same with further keys of both networks.
    fn start_pair_with(isolate: &str, keys: [&str; 2]) -> (TempDir, [Self; 2]) {
        let wires = tempfile::tempdir().unwrap();
        let [a, b] = ["a", "b"].map(|end| wires.path().join(end).display().to_string());
        let near = Self::start(1, isolate, &format!("uplink=unix-dgram:{a}:{b},mtu=9000{}", keys[0]));
        let far = Self::start(2, isolate, &format!("uplink=unix-dgram:{b}:{a},mtu=9000{}", keys[1]));
        (wires, [near, far])
    }

    fn guest(&self) -> Guest {
        self.daemon.guest("vm", self.number)
    }

    fn share(&self, words: &str) -> Result<Value, String> {
        self.try_run(&format!("share --device vm --json {words}")).map(|text| serde_json::from_str(&text).unwrap())
    }

    /// Returns the numbers of packets that the device sent and received without an ICRC.
    fn without_icrc(&self) -> [u64; 2] {
        let counters = self.status()["devices"][0]["adapter"].clone();
        ["wire_sent_without_icrc", "wire_received_without_icrc"].map(|name| counters[name].as_u64().unwrap())
    }

    /// Kills the worker, and waits for the next one.
    fn next_worker(&self) {
        self.crash("red");
    }
}

#[test]
fn a_share_changes_while_the_device_runs() {
    for isolate in ["network", "none"] {
        let host = Host::start(1, isolate, "link-rate=10G");
        let guest = host.guest();
        let share = |weight: &str, max: &str, min: &str| json!({"weight": weight, "max-rate": max, "min-rate": min, "qp-max-rate": "off", "burst": "off"});
        assert_eq!(host.share(""), Ok(share("100", "off", "off")), "{isolate}");
        assert_eq!(host.share("weight=300 max-rate=9500M min-rate=1G"), Ok(share("300", "9500M", "1G")));
        transfer(&guest, &guest, 3);
        let report = host.status()["devices"][0]["share"].clone();
        assert_eq!((&report["weight"], &report["max_rate"]), (&json!(300), &json!(9_500_000_000_u64)));
        for (words, problem) in [
            ("weight=0", "1 to 1000"),
            ("min-rate=9600M", "min-rate 9600Mbit/s is above max-rate 9500Mbit/s"),
            ("max-rate=off min-rate=11G", "it carries 10Gbit/s"),
            ("wait=1", "unknown key 'wait'"),
        ] {
            let error = host.share(words).unwrap_err();
            assert!(error.contains(problem), "{words}: {error}");
        }
        if isolate == "network" {
            host.next_worker();
        }
        assert_eq!(host.share(""), Ok(share("300", "9500M", "1G")), "{isolate}");
        assert_eq!(host.share("max-rate=off min-rate=off weight=100"), Ok(share("100", "off", "off")));
        assert!(host.try_run("share --device vm9 weight=1").unwrap_err().contains("there is no device 'vm9'"));
    }
}

/// Sends a request to a peer. Returns the status of its completion.
fn knock(from: &Guest, to: &Guest) -> u32 {
    let [(pd, mut cq), (far_pd, far_cq)] = [from, to].map(|guest| {
        let driver = &guest.driver;
        (driver.create_pd(None).unwrap(), driver.create_cq(None, 4).unwrap())
    });
    let mut qp = from.driver.create_qp(&QpInit::rc(&pd, &cq)).unwrap();
    let mut far = to.driver.create_qp(&QpInit::rc(&far_pd, &far_cq)).unwrap();
    let path =
        |to: &Guest, qpn| Path { timeout: 8, retry_cnt: 2, dmac: mac(to.number), ..Path::to(gid(to.number), qpn) };
    qp.connect(&path(to, far.qpn)).unwrap();
    far.connect(&path(from, qp.qpn)).unwrap();
    qp.post_send(&[SendWr::write(1, &[], 0, 0)]).unwrap();
    cq.wait().status
}

#[test]
fn faults_come_and_go_while_the_daemon_runs() {
    for isolate in ["network", "none"] {
        let (_wires, [near, far]) = Host::start_pair(isolate);
        let ends = [near.guest(), far.guest()];
        transfer(&ends[0], &ends[1], 5);
        assert_eq!(near.status()["networks"][0]["fault"], Value::Null);
        near.run("fault --network red loss:1");
        assert_eq!(near.status()["networks"][0]["fault"], "loss:1/seed:1");
        assert_eq!(knock(&ends[0], &ends[1]), status::RETRY_EXC, "{isolate}");
        assert_eq!(knock(&ends[1], &ends[0]), status::RETRY_EXC, "{isolate}");
        // All kinds of faults, some of which hold frames back, and then none.
        near.run("fault --network red delay:0.5/reorder:0.2/duplicate:0.2/corrupt:0.05/seed:3");
        near.run("fault --network red off");
        transfer(&ends[0], &ends[1], 5);
        transfer(&ends[1], &ends[0], 5);
        if isolate == "network" {
            near.run("fault --network red loss:1");
            drop(ends);
            near.next_worker();
            let ends = [near.guest(), far.guest()];
            assert_eq!(knock(&ends[0], &ends[1]), status::RETRY_EXC);
            near.run("fault --network red off");
            transfer(&ends[0], &ends[1], 5);
        }
        assert!(
            near.try_run("fault loss:1").unwrap_err().contains("there is no network 'default' (the networks are red)")
        );
    }
    let alone = Host::start(1, "network", "");
    assert!(alone.try_run("fault --network red loss:1").unwrap_err().contains("network red has no uplink"));
}

/// Both administrators decide if packets have no ICRC. Faults that damage packets are then refused, because the guests
/// would get wrong data; the next worker gets none of them either.
#[test]
fn packets_without_an_icrc_are_not_damaged() {
    for isolate in ["network", "none"] {
        let (_wires, [near, far]) = Host::start_pair_with(isolate, [",icrc=agreed", ",icrc=agreed"]);
        let ends = [near.guest(), far.guest()];
        transfer(&ends[0], &ends[1], 5);
        let [one, other] = [near.without_icrc(), far.without_icrc()];
        assert!(one[0] > 0 && one[1] > 0 && one == [other[1], other[0]], "{isolate}: {one:?} {other:?}");
        for fault in ["corrupt:0.0001", "loss:0.1/corrupt:1/seed:3"] {
            let error = near.try_run(&format!("fault --network red {fault}")).unwrap_err();
            assert!(error.contains("set icrc=always for the network"), "{error}");
            assert_eq!(near.status()["networks"][0]["fault"], Value::Null);
        }
        near.run("fault --network red loss:0.05/duplicate:0.05/reorder:0.05/seed:3");
        transfer(&ends[0], &ends[1], 5);
        near.run("fault --network red off");
        if isolate == "network" {
            drop(ends);
            near.next_worker();
            let ends = [near.guest(), far.guest()];
            transfer(&ends[0], &ends[1], 5);
            assert!(near.without_icrc()[0] > 0);
        }
    }
    let (_wires, [near, far]) = Host::start_pair_with("none", [",icrc=agreed", ""]);
    let ends = [near.guest(), far.guest()];
    transfer(&ends[0], &ends[1], 5);
    transfer(&ends[1], &ends[0], 5);
    assert_eq!([near.without_icrc(), far.without_icrc()], [[0; 2]; 2]);
    far.run("fault --network red corrupt:0.05/seed:3");
    far.run("fault --network red off");
}

/// A queue pair that fails reports its history to the log and to subscribers. A queue pair that its guest ends reports
/// nothing.
#[test]
fn a_failed_queue_pair_reports_its_history() {
    for isolate in ["network", "none"] {
        let (_wires, [near, far]) = Host::start_pair(isolate);
        let ends = [near.guest(), far.guest()];
        transfer(&ends[0], &ends[1], 5);
        let mut events = near.events();
        near.run("fault --network red loss:1");
        assert_eq!(knock(&ends[0], &ends[1]), status::RETRY_EXC, "{isolate}");
        let event = events.next().unwrap();
        assert_eq!((&event["event"], &event["device"]), (&json!("queue-pair-failed"), &json!("vm")), "{event}");
        assert_eq!((&event["network"], &event["peer"]), (&json!("red"), &json!("10.33.0.2")), "{event}");
        let history = event["history"].as_str().unwrap();
        for words in ["its requester; ", " ms timeout", "packets retransmitted", "request ended: RetryExceeded"] {
            assert!(history.contains(words), "{words}: {history}");
        }
        // The log line arrives independently of the event.
        let start = Instant::now();
        while !near.log().contains("failed (retry-exceeded) by its requester; ") {
            assert!(start.elapsed() < PATIENCE, "{}", near.log());
        }
        assert_eq!(near.log().matches(" failed (").count(), 1, "{}", near.log());
        assert_eq!(far.log().matches(" failed (").count(), 0, "{}", far.log());
    }
}

/// With JSON logs, each line of each process is an object; lines of a network's process contain its name.
#[test]
fn the_log_as_json() {
    let mut host = Host::start_as(TestDaemon::new().arg("--log-format=json"), 1, "");
    host.run("log-level info,pvrdmad::worker=debug");
    host.run("link down --device vm");
    host.next_worker();
    host.daemon.stop();
    let log = host.log();
    let lines: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    let find = |words: &str| {
        let found = lines.iter().find(|line| line["message"].as_str().unwrap().contains(words));
        found.unwrap_or_else(|| panic!("{words}: {log}"))
    };
    let line = find("its link goes Down");
    assert_eq!((&line["level"], &line["target"]), (&json!("info"), &json!("pvrdmad::supervisor")));
    assert_eq!(line.get("network"), None);
    let line = find("the supervisor has closed its end");
    assert_eq!((&line["level"], &line["network"]), (&json!("debug"), &json!("red")));
    assert!(find("the next one starts in")["time"].as_str().unwrap().ends_with('Z'));
}

/// The daemon serves even if its log cannot be written.
#[test]
fn a_daemon_that_cannot_log_serves() {
    let full: fn() -> Stdio = || File::options().write(true).open("/dev/full").unwrap().into();
    let closed: fn() -> Stdio = || std::io::pipe().unwrap().1.into();
    for format in ["text", "json"] {
        for silent in [full, closed] {
            let daemon = TestDaemon::new().arg(&format!("--log-format={format}")).stderr(silent);
            let host = Host::start_as(daemon, 1, "");
            let guest = host.guest();
            transfer(&guest, &guest, 3);
            host.run("link down --device vm");
            drop(guest);
            host.next_worker();
            host.run("link up --device vm");
            let guest = host.guest();
            transfer(&guest, &guest, 3);
        }
    }
    // A daemon that cannot start exits with its status even if the error cannot be printed.
    for silent in [full, closed] {
        let status = Command::new(PROGRAM).arg("--config=/no/such").stderr(silent()).status().unwrap();
        assert_eq!(status.code(), Some(2));
    }
}

#[test]
fn the_log_level_changes_while_the_daemon_runs() {
    let mut host = Host::start(1, "network", "");
    host.run("link down --device vm");
    host.run("log-level off");
    host.run("link up --device vm");
    // The last messages of a killed worker: at this level there are none.
    host.next_worker();
    let quiet = host.log();
    assert!(quiet.contains("its link goes Down") && !quiet.contains("its link goes Up"), "{quiet}");
    assert!(!quiet.contains("serves (process"), "{quiet}");
    host.run("log-level warn,pvrdmad::worker=debug");
    host.next_worker();
    host.run("link down --device vm");
    host.daemon.stop();
    let log = host.log();
    assert!(log.contains("the next one starts in"), "{log}");
    assert!(!log[quiet.len()..].contains("its link goes"), "{log}");
    // This line is from the new worker.
    assert!(log.contains("the supervisor has closed its end"), "{log}");
}
