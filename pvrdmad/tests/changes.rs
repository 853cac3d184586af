//! Devices are added and removed while the daemon runs and other devices exchange data.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::ops::Deref;
use std::thread;
use std::time::Instant;

use crate::common::PATIENCE;
use crate::common::daemon::{Running, TestDaemon, describe};
use crate::common::traffic::{Guest, gid, transfer};
use pvrdma_dev::testing::{Path, QpInit, SendWr, status};
use pvrdmad::testing::{Pair, beside_traffic};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

/// Values of `--isolate`.
const ISOLATION: [&str; 2] = ["network", "none"];

/// A daemon with two networks: `red` with the devices `vm1` and `vm2`, and `blue` without devices.
struct Host(Running);

impl Deref for Host {
    type Target = Running;

    fn deref(&self) -> &Running {
        &self.0
    }
}

impl Host {
    fn start(isolate: &str) -> Self {
        // With several arenas, the connections' threads would use more and more of them, and the heap would grow
        // without a leak.
        let daemon = TestDaemon::new().env("MALLOC_ARENA_MAX", "1").isolate(isolate);
        let daemon = daemon.network("red", "").network("blue", "");
        Self(daemon.device("vm1", 1, "network=red").device("vm2", 2, "network=red").start())
    }

    /// Connects the guests of `vm1` and `vm2`.
    fn pair(&self) -> Pair {
        self.0.pair(["vm1", "vm2"])
    }

    /// Waits until the worker of `red` is another process than `worker`.
    fn wait_other(&self, worker: Pid) {
        self.wait_network("red", |network| {
            network["state"] == "running" && network["pid"] != worker.as_raw_nonzero().get()
        });
    }

    /// Names of files in the folder.
    fn files(&self) -> BTreeSet<String> {
        fs::read_dir(self.folder()).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap()).collect()
    }

    /// Descriptors and threads of the supervisor and of the worker of `red`.
    ///
    /// Threads for slow interrupts are left out: the devices that stay start and end them as their traffic goes.
    fn costs(&self) -> [usize; 4] {
        let descriptors = |pid: u32| fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
        let threads = |pid: u32| thread_names(pid).iter().filter(|name| *name != "interrupts").count();
        let worker = self.worker("red").as_raw_nonzero().get().unsigned_abs();
        let own = self.id();
        // The thread that answered the last command closes its connection when it ends.
        let start = Instant::now();
        while thread_names(own).iter().any(|name| name == "control client") {
            assert!(start.elapsed() < PATIENCE);
        }
        [descriptors(own), threads(own), descriptors(worker), threads(worker)]
    }

    /// Returns the number of guests whose memory the worker of `red` has mapped.
    fn mapped(&self) -> usize {
        let maps = fs::read_to_string(format!("/proc/{}/maps", self.worker("red").as_raw_nonzero())).unwrap();
        maps.lines().filter(|line| line.contains("memfd:guest")).count()
    }

    /// Waits until the costs are `before` again. Threads of removed devices end a moment after the command.
    fn wait_costs(&self, before: [usize; 4]) {
        let start = Instant::now();
        loop {
            let now = self.costs();
            if now == before {
                return;
            }
            assert!(start.elapsed() < PATIENCE, "{now:?}, before {before:?}");
        }
    }
}

/// Returns the name of each thread of a process, without those that end meanwhile.
fn thread_names(pid: u32) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let names = tasks.filter_map(|task| fs::read_to_string(task.unwrap().path().join("comm")).ok());
    names.map(|name| name.trim().to_owned()).collect()
}

/// Sends a request to a peer that no longer exists. Returns the status of its completion.
fn knock(from: &Guest, to_number: u8, to_qpn: u32) -> u32 {
    let driver = &from.driver;
    let (pd, mut cq) = (driver.create_pd(None).unwrap(), driver.create_cq(None, 4).unwrap());
    let mut qp = driver.create_qp(&QpInit::rc(&pd, &cq)).unwrap();
    qp.connect(&Path { timeout: 10, retry_cnt: 1, ..Path::to(gid(to_number), to_qpn) }).unwrap();
    qp.post_send(&[SendWr::send(1, &[])]).unwrap();
    cq.wait().status
}

#[test]
fn devices_come_and_go_beside_traffic() {
    for isolate in ISOLATION {
        let host = Host::start(isolate);
        let mut pair = host.pair();
        // Those of the keepers are there since a client is connected.
        let files = host.files();
        beside_traffic(&mut pair, || {
            for _ in 0..2 {
                host.add("vm3", 3, "network=red").unwrap();
                host.add("vm4", 4, "network=red").unwrap();
                assert_eq!(host.network("red")["devices"], json!(["vm1", "vm2", "vm3", "vm4"]));
                let (left, right) = (host.guest("vm3", 3), host.guest("vm4", 4));
                let [qpn, _] = transfer(&left, &right, 5);
                transfer(&right, &left, 5);
                // The device is removed while it has a VM and a connection.
                let mapped = host.mapped();
                host.remove("vm3").unwrap();
                assert!(left.driver.query_port().is_err(), "{isolate}: still there");
                assert_eq!(host.mapped(), mapped - 1, "{isolate}: its memory is still mapped");
                assert_eq!(knock(&right, 3, qpn), status::RETRY_EXC, "{isolate}");
                assert!(host.remove("vm3").unwrap_err().contains("there is no device 'vm3'"));
                // The remaining device has the same address. Another device gets the name and that address.
                host.add("vm3", 3, "network=red").unwrap();
                transfer(&host.guest("vm3", 3), &right, 5);
                host.remove("vm4").unwrap();
                host.remove("vm3").unwrap();
            }
        });
        assert_eq!(host.files(), files, "{isolate}");
        let network = host.network("red");
        assert_eq!((&network["restarts"], &network["lost_vms"]), (&0.into(), &json!([])), "{network:#}");
    }
}

/// Adding a device with its network creates the network, as does a device of `default`. It ends with its last device.
#[test]
fn a_network_is_created_and_ends_with_its_devices() {
    for isolate in ISOLATION {
        let host = Host::start(isolate);
        let mut pair = host.pair();
        let before = host.costs();
        let wire = host.path("wire");
        let uplink = format!("name=wired,uplink=unix-dgram:{}:{}", wire.display(), host.path("other").display());
        let add = |name: &str, number, network: &str| {
            let device = describe(host.folder(), name, number, "network=wired,address=any");
            host.try_run(&format!("add --network {network} {device}")).map(drop)
        };
        for _ in 0..2 {
            beside_traffic(&mut pair, || {
                // The two networks have equal addresses. The test does not depend on an address list; a probe of the
                // wire would only delay the transfer.
                add("one", 1, &uplink).unwrap();
                add("two", 2, &uplink).unwrap();
                host.add("three", 1, "roce=v2").unwrap();
                // Path MTU that fits packets of 1500 bytes.
                transfer(&host.guest("one", 1), &host.guest("two", 2), 3);
                assert_eq!(host.network("wired")["devices"], json!(["one", "two"]));
                assert_eq!(host.network("default")["devices"], json!(["three"]));
                let error = add("four", 4, &format!("{uplink},mtu=9000")).unwrap_err();
                assert!(error.contains("network wired: it exists and is described differently"), "{error}");
                host.remove("one").unwrap();
                assert!(wire.exists());
                for name in ["two", "three"] {
                    host.remove(name).unwrap();
                }
                assert!(!wire.exists());
            });
            let networks: Vec<_> = host.status()["networks"].as_array().unwrap().clone();
            assert_eq!(networks.iter().map(|network| &network["name"]).collect::<Vec<_>>(), ["red", "blue"]);
        }
        host.wait_costs(before);
    }
}

/// Each invalid device is refused with an error that names the fault, and leaves nothing behind.
#[test]
fn an_invalid_device_leaves_nothing_behind() {
    for isolate in ISOLATION {
        let host = Host::start(isolate);
        fs::write(host.path("file"), "kept").unwrap();
        let (files, before) = (host.files(), host.costs());
        let folder = host.folder().display().to_string();
        let long = "x".repeat(120);
        let mac = "mac=52:54:00:00:03:03";
        for (device, word) in [
            (format!("name=vm1,socket={folder}/new,{mac},network=red"), "vm1: the name is taken"),
            (format!("name=new,socket={folder}/new,mac=52:54:00:00:03:01,network=red"), "device vm1 of the same"),
            (format!("name=new,socket={folder}/new,{mac},network=green"), "there is no network 'green'"),
            (format!("name=new,socket={folder}/new,{mac},network=reed"), "did you mean 'red'?"),
            (format!("name=new,socket={folder}/new,{mac},network=red,mtu=9000"), "'mtu' is a key of a network"),
            (format!("name=new,socket={folder}/vm1,{mac},network=red"), "also the socket of device vm1"),
            (format!("name=new,socket={folder}/control,{mac},network=red"), "also the control socket"),
            (format!("name=new,socket={folder}/file,{mac},network=red"), "exists and is not a socket"),
            (format!("name=new,socket={folder}/no/where,{mac},network=red"), "does not exist"),
            (format!("name=new,socket={folder}/{long},{mac},network=red"), "too long for a socket"),
            (format!("name=new,socket=here,{mac},network=red"), "here does not begin with /"),
            (format!("name=../x,socket={folder}/new,{mac},network=red"), "a name has 1 to 32 letters"),
            (format!("name=new\u{1b}[31m,socket={folder}/new,{mac},network=red"), "a name has 1 to 32 letters"),
            (format!("name=new,socket={folder}/new,{mac},network=red,nic=unix:{folder}/n"), "nic needs an uplink"),
            (format!("name=new,socket={folder}/new,{mac},network=red,owner=no-such-user"), "owner"),
            (format!("name=new,socket={folder}/new,{mac},network=red,mode=999"), "octal"),
            (format!("name=new,socket={folder}/new,network=red"), "needs a MAC address"),
            ("name=new".to_owned(), "needs a socket"),
            (String::new(), "KEY=VALUE"),
        ] {
            // Sent directly to the control socket, because the command line would not send some of these.
            let answer = host.call("add-device", &json!({"device": device}));
            let error = answer["error"]["message"].as_str();
            assert!(error.is_some_and(|error| error.contains(word)), "{device}: {answer}");
            assert_eq!(host.files(), files, "{device}");
        }
        for (network, word) in [
            ("name=new,uplink=unix:there", "there does not begin with /"),
            ("name=new,uplink=tap:no/such", "name of a network interface"),
            ("name=new,uplink=af_packet:no-such-if", "no-such-if"),
            ("name=other", "it is not in the network that is described with it"),
        ] {
            let device = format!("name=new,socket={folder}/new,{mac},network=new");
            let answer = host.call("add-device", &json!({"device": device, "network": network}));
            let error = answer["error"]["message"].as_str();
            assert!(error.is_some_and(|error| error.contains(word)), "{network}: {answer}");
            assert_eq!(host.files(), files, "{network}");
        }
        for (method, params) in [
            ("add-device", json!({})),
            ("add-device", json!({"device": {"name": "new"}})),
            ("add-device", json!({"device": "", "also": 1})),
            ("add-device", json!({"device": "x".repeat(5000)})),
            ("remove-device", json!({"device": 7})),
            ("remove-device", json!({"device": "\u{1b}[31m"})),
            ("serve", json!({"device": "vm1"})),
            ("start-capture", json!({"device": "vm1", "snaplen": null, "id": 1})),
            ("hello", json!({"version": 3})),
        ] {
            assert!(host.call(method, &params)["error"].is_object(), "{method} {params}");
        }
        assert_eq!(host.network("red")["devices"], json!(["vm1", "vm2"]));
        host.wait_costs(before);
        assert_eq!(fs::read_to_string(host.path("file")).unwrap(), "kept");
        // A device that was refused can be added afterwards if its description is valid.
        host.add("new", 3, "network=red").unwrap();
    }
}

#[test]
fn a_hundred_comings_and_goings_leave_nothing_behind() {
    for isolate in ISOLATION {
        let host = Host::start(isolate);
        let left = host.guest("vm1", 1);
        let cycle = |serve: bool| {
            host.add("vm3", 3, "network=red").unwrap();
            if serve {
                // The device's VM is connected when the device is removed.
                let right = host.guest("vm3", 3);
                transfer(&left, &right, 5);
            }
            host.remove("vm3").unwrap();
        };
        // Allocates everything that is allocated only once.
        cycle(true);
        let (costs, mapped) = (host.costs(), host.mapped());
        for number in 0..100 {
            cycle(number % 10 == 0);
        }
        host.wait_costs(costs);
        assert_eq!(host.mapped(), mapped, "{isolate}");
    }
}

/// Runs without isolation, so that leaks are visible in this process. The traffic beside it is compared in each round.
#[test]
fn a_thousand_devices_come_and_go_beside_traffic() {
    let host = Host::start("none");
    let mut pair = host.pair();
    let added = json!({"device": describe(host.folder(), "vm3", 3, "network=red")});
    let removed = json!({"device": "vm3"});
    let cycles = |count: usize| {
        for _ in 0..count {
            assert_eq!(host.call("add-device", &added)["result"], json!({}));
            assert_eq!(host.call("remove-device", &removed)["result"], json!({}));
        }
    };
    // Heap of the daemon, in KiB.
    let memory = || -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", host.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        line.split_whitespace().next().unwrap().parse().unwrap()
    };
    let (mut costs, mut before, mut after) = ([0; 4], 0, 0);
    beside_traffic(&mut pair, || {
        // Allocates everything that is allocated only once, and fills the record of past events.
        cycles(600);
        (costs, before) = (host.costs(), memory());
        cycles(800);
        after = memory();
    });
    host.wait_costs(costs);
    let grown = after.saturating_sub(before);
    println!("{before} KiB, {grown} more behind 800 devices");
    // Growth per device is zero in practice; a leak of 128 bytes per device would fail here.
    assert!(grown < 100, "{before} KiB, {grown} more");
    assert_eq!(host.network("red")["devices"], json!(["vm1", "vm2"]));
}

/// Returns the next line of the event stream.
fn next(lines: &mut impl Iterator<Item = std::io::Result<String>>) -> Value {
    serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap()
}

#[test]
fn calls_are_answered_and_subscribers_notified() {
    for isolate in ISOLATION {
        let host = Host::start(isolate);
        let call = |method: &str, params: Value| {
            let mut response = host.call(method, &params);
            assert_eq!((response["jsonrpc"].take(), response["id"].take()), (json!("2.0"), json!(7)), "{response}");
            response
        };
        let stream = host.connect();
        (&stream).write_all(b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"events\"}\n").unwrap();
        let mut events = BufReader::new(stream).lines();
        assert_eq!(next(&mut events), json!({"jsonrpc": "2.0", "id": 1, "result": {}}));
        let mut number = None;
        let mut event = || {
            let mut told = next(&mut events);
            assert_eq!((&told["jsonrpc"], &told["method"]), (&json!("2.0"), &json!("event")), "{told}");
            let event = told["params"].as_object_mut().unwrap();
            // Events without a gap have numbers without a gap.
            let this = event.remove("number").unwrap().as_u64().unwrap();
            assert!(number.replace(this).is_none_or(|last| this == last + 1), "{this}");
            assert!(event.remove("time").unwrap().as_str().unwrap().ends_with('Z'));
            told["params"].take()
        };

        let greeting = call("hello", json!({}))["result"].take();
        assert_eq!((&greeting["daemon"], &greeting["protocol"]), (&json!("pvrdmad"), &json!(5)), "{greeting}");
        assert!(greeting["methods"].as_array().unwrap().contains(&json!("add-device")), "{greeting}");
        let device = describe(host.folder(), "vm3", 3, "network=red");
        assert_eq!(call("add-device", json!({"device": device}))["result"], json!({}), "{isolate}");
        assert_eq!(event(), json!({"event": "device-added", "device": "vm3", "network": "red"}));
        let again = call("add-device", json!({"device": device}));
        assert_eq!(again["error"]["code"], -32000, "{again}");
        assert!(again["error"]["message"].as_str().unwrap().contains("the name is taken"), "{again}");

        let guest = host.guest("vm3", 3);
        let client =
            |connected: bool| json!({"event": "client", "device": "vm3", "network": "red", "connected": connected});
        assert_eq!(event(), client(true));
        assert_eq!(call("link", json!({"device": "vm3", "state": "down"}))["result"], json!({}));
        assert_eq!(event(), json!({"event": "link", "device": "vm3", "state": "down"}));
        assert!(call("status", json!({}))["result"]["devices"].is_array());
        assert!(call("show", json!({"device": "vm3", "object": "gid"}))["result"].is_array());
        assert!(call("limits", json!({"device": "vm3"}))["result"].is_array());
        assert_eq!(call("remove", json!({}))["error"]["code"], -32601);
        drop(guest);
        assert_eq!(event(), client(false));
        assert_eq!(call("remove-device", json!({"device": "vm3"}))["result"], json!({}));
        assert_eq!(event(), json!({"event": "device-removed", "device": "vm3", "network": "red"}));
        if isolate == "network" {
            let kept = host.guest("vm1", 1);
            assert_eq!(event()["device"], "vm1");
            kill_process(host.worker("red"), Signal::KILL).unwrap();
            let ended = event();
            assert_eq!((&ended["event"], &ended["lost_vms"]), (&json!("network-ended"), &json!([])), "{ended}");
            let recovered = event();
            assert_eq!((&recovered["device"], &recovered["event"]), (&json!("vm1"), &json!("client-recovered")));
            drop(kept);
        }
    }
}

/// After a worker was replaced, added devices still exist, and removed devices do not return.
#[test]
fn changes_survive_a_worker() {
    let host = Host::start("network");
    host.add("vm3", 3, "network=red").unwrap();
    host.remove("vm2").unwrap();
    for _ in 0..2 {
        host.crash("red");
        assert_eq!(host.network("red")["devices"], json!(["vm1", "vm3"]));
        assert!(!host.path("vm2").exists());
        transfer(&host.guest("vm1", 1), &host.guest("vm3", 3), 5);
    }
}

/// An addition waits for the next worker; a removal need not.
#[test]
fn changes_while_a_worker_is_replaced() {
    let host = Host::start("network");
    // The next worker comes later in each round.
    for round in 0..2 {
        kill_process(host.worker("red"), Signal::KILL).unwrap();
        host.add("vm3", 3, "network=red").unwrap();
        transfer(&host.guest("vm1", 1), &host.guest("vm3", 3), 5);
        kill_process(host.worker("red"), Signal::KILL).unwrap();
        host.remove("vm3").unwrap();
        assert_eq!(host.network("red")["devices"], json!(["vm1", "vm2"]), "{round}");
        assert!(!host.path("vm3").exists());
    }
    host.worker("red");
    transfer(&host.guest("vm1", 1), &host.guest("vm2", 2), 5);
}

/// A stopped worker delays only changes of its own network, until their timeout. When it continues, it applies them.
#[test]
fn changes_while_a_worker_stands_still() {
    let host = Host::start("network");
    let client = host.guest("vm2", 2);
    let worker = host.worker("red");
    kill_process(worker, Signal::STOP).unwrap();
    // The removal fails after the usual timeout of a request to a worker.
    thread::scope(|scope| {
        let removed = scope.spawn(|| host.remove("vm2"));
        // Meanwhile a device is added to another network.
        host.add("other", 1, "network=blue").unwrap();
        let other = host.guest("other", 1);
        transfer(&other, &other, 5);
        let error = removed.join().unwrap().unwrap_err();
        assert!(error.contains("network red") && error.contains("does not respond"), "{error}");
    });
    assert!(!host.path("vm2").exists());
    assert_eq!(host.network("red")["devices"], json!(["vm1"]));
    kill_process(worker, Signal::CONT).unwrap();
    // The worker handles the requests in their order.
    host.add("vm2", 2, "network=red").unwrap();
    assert!(client.driver.query_port().is_err());
    transfer(&host.guest("vm1", 1), &host.guest("vm2", 2), 5);
    assert_eq!(host.network("red")["restarts"], 0);
}

/// Returns `true` if the guest's driver sees an active port.
fn is_active(guest: &Guest) -> bool {
    const ACTIVE: u8 = 4;
    guest.driver.query_port().unwrap()[0] == ACTIVE
}

/// Numbers of asynchronous events (interface specification, section 10).
const PORT_ACTIVE: u32 = 9;
const PORT_ERR: u32 = 10;

/// While a link is down, its guest has got an event, its port says so, and no traffic passes, neither inside the
/// network nor over the wire.
#[test]
fn a_link_goes_down_and_up() {
    for isolate in ISOLATION {
        let host = Host::start(isolate);
        let [wire, other] = ["wire", "other"].map(|name| host.path(name).display().to_string());
        for (name, number, own, peer) in [("near", 3, &wire, &other), ("far", 4, &other, &wire)] {
            let network = format!("name={name},uplink=unix-dgram:{own}:{peer}");
            let device = describe(host.folder(), name, number, &format!("network={name}"));
            host.run(&format!("add --network {network} {device}"));
        }
        let port = |name: &str| host.report(name)["port"].as_str().unwrap().to_owned();
        for (peer, number, device, own) in [("vm2", 2, "vm1", 1), ("far", 4, "near", 3)] {
            let (from, to) = (host.guest(peer, number), host.guest(device, own));
            let [_, qpn] = transfer(&from, &to, 3);
            host.run(&format!("link down --device {device}"));
            let events: Vec<_> = to.driver.wait_async_event().iter().map(|event| (event.kind, event.info)).collect();
            assert_eq!(events, [(PORT_ERR, 1)], "{isolate}");
            assert!(!is_active(&to) && is_active(&from));
            assert_eq!((port(device), port(peer)), ("down".to_owned(), "active".to_owned()));
            // A repeated command changes nothing.
            host.run(&format!("link down --device {device}"));
            assert!(to.driver.async_events().is_empty());
            assert_eq!(knock(&from, own, qpn), status::RETRY_EXC, "{isolate}: to {device}");
            assert_eq!(knock(&to, number, 77), status::RETRY_EXC, "{isolate}: from {device}");
            // A driver that starts while the link is down learns that from the port's state, without an event.
            drop(to);
            let to = host.guest(device, own);
            assert!(!is_active(&to) && to.driver.async_events().is_empty());
            host.run(&format!("link up --device {device}"));
            let events: Vec<_> = to.driver.wait_async_event().iter().map(|event| event.kind).collect();
            assert_eq!(events, [PORT_ACTIVE], "{isolate}");
            assert!(is_active(&to));
            transfer(&from, &to, 3);
            transfer(&to, &from, 3);
        }
        let error = host.try_run("link down --device vm9").unwrap_err();
        assert!(error.contains("there is no device 'vm9'"), "{error}");
    }
}

/// A connection survives a link that comes back before the retries are used up.
#[test]
fn a_connection_continues_when_the_link_is_back() {
    let host = Host::start("network");
    let mut pair = host.pair();
    for _ in 0..2 {
        host.run("link down --device vm2");
        pair.post();
        host.run("link up --device vm2");
        pair.complete();
        pair.exchange();
    }
}

#[test]
fn a_link_stays_down_over_a_worker() {
    let host = Host::start("network");
    host.run("link down --device vm2");
    let worker = host.worker("red");
    kill_process(worker, Signal::KILL).unwrap();
    // The command may reach the supervisor before the next worker exists, or after. The result is the same.
    host.run("link down --device vm1");
    host.wait_other(worker);
    let (one, two) = (host.guest("vm1", 1), host.guest("vm2", 2));
    assert!(!is_active(&one) && !is_active(&two));
    for device in ["vm1", "vm2"] {
        host.run(&format!("link up --device {device}"));
    }
    transfer(&one, &two, 5);
}

/// Returns a limit of a device: the value in force, and the value for the next driver.
fn limit(limits: &str, name: &str) -> [u64; 2] {
    let limits: Value = serde_json::from_str(limits).unwrap();
    let limit = limits.as_array().unwrap().iter().find(|limit| limit["name"] == name).unwrap();
    ["value", "next"].map(|member| limit[member].as_u64().unwrap())
}

/// A limit that the driver has read stays until the driver starts again. Other limits change at once.
#[test]
fn limits_are_set_while_a_guest_runs() {
    /// Offset of the maximum number of queue pairs in the capabilities.
    const MAX_QP: u64 = 76;
    for isolate in ISOLATION {
        let host = Host::start(isolate);
        let limits = |words: &str| host.try_run(&format!("limits --json --device vm1 {words}"));
        let guest = host.guest("vm1", 1);
        let driver = &guest.driver;
        let (pd, cq) = (driver.create_pd(None).unwrap(), driver.create_cq(None, 4).unwrap());
        let [told, next] = limit(&limits("").unwrap(), "max_qp");
        assert_eq!((u64::from(driver.cap_u32(MAX_QP)), told, next), (told, 16_384, 16_384));
        assert_eq!(limit(&limits("max_qp=5 max_cq=9").unwrap(), "max_qp"), [told, 5]);
        let many: Vec<_> = (0..8).map(|_| driver.create_qp(&QpInit::rc(&pd, &cq)).unwrap()).collect();
        // No further objects are allowed; existing ones continue to work.
        assert_eq!(limit(&limits("max_memory=0").unwrap(), "max_memory"), [0, 0]);
        assert!(driver.create_cq(None, 4).is_err(), "{isolate}");
        drop(many);
        assert_eq!(limit(&limits("max_memory=268435456").unwrap(), "max_memory"), [268_435_456; 2]);
        driver.create_cq(None, 4).unwrap();
        for (words, problem) in [
            ("max_uar=4", "size of a BAR"),
            ("max_qp=2", "max_qp must be 3..=65535"),
            ("gid_table=257", "gid_table must be"),
            ("max_qps=7", "there is no limit 'max_qps'"),
            ("max_pd=7 max_qp=2", "max_qp must be"),
            ("max_qp", "LIMIT=NUMBER"),
            ("max_qp=-1", "is not a number"),
        ] {
            let error = limits(words).unwrap_err();
            assert!(error.contains(problem), "{words:?}: {error}");
        }
        for (set, problem) in [("max_uar", "size of a BAR"), ("", "there is no limit"), ("max_sge", "max_sge must be")]
        {
            let answer = host.call("limits", &json!({"device": "vm1", "set": {set: 0, "max_pd": 7}}));
            assert!(answer["error"]["message"].as_str().is_some_and(|error| error.contains(problem)), "{answer}");
        }
        assert_eq!(limit(&limits("").unwrap(), "max_pd"), [16_384; 2]);
        drop((cq, pd));
        // The new limit holds when the driver starts again, also with the next worker.
        drop(guest);
        if isolate == "network" {
            let worker = host.worker("red");
            kill_process(worker, Signal::KILL).unwrap();
            host.wait_other(worker);
        }
        let guest = host.guest("vm1", 1);
        let driver = &guest.driver;
        assert_eq!((driver.cap_u32(MAX_QP), limit(&limits("").unwrap(), "max_qp")), (5, [5; 2]), "{isolate}");
        let (pd, cq) = (driver.create_pd(None).unwrap(), driver.create_cq(None, 4).unwrap());
        let many: Vec<_> = (0..8).map_while(|_| driver.create_qp(&QpInit::rc(&pd, &cq)).ok()).collect();
        assert!((1..5).contains(&many.len()), "{}", many.len());
        let table = host.run("limits --device vm1");
        assert!(table.contains("driver start") && table.lines().all(|line| line.chars().count() <= 80), "{table}");
    }
}
