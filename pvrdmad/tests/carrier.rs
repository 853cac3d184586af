//! The links of devices follow the state of their network's uplink interface.

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use crate::common::PATIENCE;
use crate::common::daemon::{Running, TestDaemon};
use crate::common::traffic::{Guest, gid, transfer};
use pvrdma_dev::testing::{Path, QpInit};
use pvrdma_verbs::testing::skipped;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

/// Numbers of asynchronous events (interface specification, section 10).
const PORT_ACTIVE: u32 = 9;
const PORT_ERR: u32 = 10;
/// The cable.
const ADD_WIRE: &str = "link add wire mtu 4500 type veth peer name far mtu 4500";

/// A daemon in its own network namespace. The network `near` is at one end of a cable and `far` at the other; `stays`
/// is on the first end but does not follow it. Each network has one device, with the network's name.
struct Host {
    // Declared before the namespace, so that it is dropped first.
    daemon: Running,
    namespace: Namespace,
}

/// A network namespace, deleted when dropped.
struct Namespace(String);

impl Host {
    /// Returns `None`, and prints the reason, if no namespace can be created.
    fn start(isolate: &str) -> Option<Self> {
        let namespace = Namespace::new()?;
        namespace.plug_in();
        let mut daemon = TestDaemon::new().inside(&namespace.0).isolate(isolate);
        for (number, name, keys) in [
            (1, "near", "uplink=af_packet:wire"),
            (2, "far", "uplink=af_packet:far"),
            (3, "stays", "uplink=af_packet:wire,vlan=5,follow-carrier=off"),
        ] {
            daemon = daemon.network(name, &format!("mtu=4500,{keys}"));
            daemon = daemon.device(name, number, &format!("network={name}"));
        }
        Some(Self { daemon: daemon.start(), namespace })
    }

    /// Returns the text form of the status.
    fn words(&self) -> String {
        self.daemon.run("status")
    }

    /// Returns a function that waits for the next report of a given state or MTU of `near`'s interface. It skips other
    /// reports.
    fn carrier(&self) -> impl FnMut(&str) {
        let mut events = self.daemon.events();
        let about = json!({"event": "carrier", "network": "near", "interface": "wire"});
        let is_about = move |event: &Value| about.as_object().unwrap().iter().all(|(key, value)| event[key] == *value);
        move |wanted| {
            loop {
                let event = events.next().unwrap();
                let carries = |mtu: u64| mtu.to_string() == wanted;
                if is_about(&event) && (event["state"] == wanted || event["mtu"].as_u64().is_some_and(carries)) {
                    break;
                }
            }
        }
    }
}

impl Namespace {
    /// Returns `None`, and prints the reason, if it cannot be created.
    fn new() -> Option<Self> {
        // Tests run in parallel, so each namespace has its own name; a test whose name is taken would be skipped.
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("pvrdmad-carrier-{}-{number}", std::process::id());
        let made = Command::new("ip").args(["netns", "add", &name]).output();
        if made.is_ok_and(|output| output.status.success()) {
            return Some(Self(name));
        }
        skipped("network namespaces need root");
        None
    }

    fn ip(&self, arguments: &str) {
        let status = Command::new("ip").args(["-n", &self.0]).args(arguments.split(' ')).status().unwrap();
        assert!(status.success(), "ip {arguments}");
    }

    /// Connects the two ends.
    fn plug_in(&self) {
        for arguments in [ADD_WIRE, "link set wire up", "link set far up"] {
            self.ip(arguments);
        }
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "delete", &self.0]).status();
    }
}

/// Waits until a guest's port has reported the event, and checks that its state agrees.
#[track_caller]
fn hears(guest: &Guest, event: u32) {
    let events: Vec<_> = guest.driver.wait_async_event().iter().map(|event| (event.kind, event.info)).collect();
    assert_eq!(events, [(event, 1)]);
    assert_eq!(is_active(guest), event == PORT_ACTIVE);
}

/// Returns `true` if the guest's driver sees an active port.
fn is_active(guest: &Guest) -> bool {
    const ACTIVE: u8 = 4;
    guest.driver.query_port().unwrap()[0] == ACTIVE
}

/// Returns the largest path MTU that the guest's driver sees.
fn path_mtu(guest: &Guest) -> u8 {
    guest.driver.query_port().unwrap()[8]
}

/// Waits for the event at both ends, because the kernel reports the ends in any order.
fn both_hear(near: &Guest, far: &Guest, event: u32) {
    hears(near, event);
    hears(far, event);
}

#[test]
fn ports_follow_the_cable() {
    for isolate in ["network", "none"] {
        let Some(host) = Host::start(isolate) else { return };
        let mut carrier = host.carrier();
        let (near, far, stays) =
            (host.daemon.guest("near", 1), host.daemon.guest("far", 2), host.daemon.guest("stays", 3));
        transfer(&near, &far, 5);

        // The far end of the cable goes down, so the near end loses its carrier.
        host.namespace.ip("link set far down");
        both_hear(&near, &far, PORT_ERR);
        carrier("no carrier");
        assert_eq!(
            host.daemon.network("near")["interface"],
            json!({"name": "wire", "state": "no carrier", "up": false, "mtu": 4500, "wanted": 4500})
        );
        assert_eq!(host.daemon.network("far")["interface"]["state"], "down");
        let words = host.words();
        assert!(words.contains("network near: ports are down: interface wire is no carrier"), "{words}");
        host.namespace.ip("link set far up");
        both_hear(&near, &far, PORT_ACTIVE);
        carrier("up");
        transfer(&near, &far, 5);

        // The interface is deleted and created again, so another interface has the same name.
        host.namespace.ip("link delete wire");
        both_hear(&near, &far, PORT_ERR);
        carrier("absent");
        host.namespace.plug_in();
        both_hear(&near, &far, PORT_ACTIVE);
        // The uplink notices the new interface within half a second.
        let start = Instant::now();
        while ["near", "far"].iter().any(|name| host.daemon.network(name)["uplink"]["up"] != true) {
            assert!(start.elapsed() < PATIENCE, "{:#}", host.daemon.status());
        }
        transfer(&far, &near, 5);
        assert!(is_active(&stays) && stays.driver.async_events().is_empty());
        assert_eq!(host.daemon.network("stays")["interface"], Value::Null);
    }
}

/// A port is up only if both the interface and the operator say so.
#[test]
fn the_administrator_and_the_cable() {
    for isolate in ["network", "none"] {
        let Some(host) = Host::start(isolate) else { return };
        let mut carrier = host.carrier();
        let near = host.daemon.guest("near", 1);
        host.daemon.run("link down --device near");
        hears(&near, PORT_ERR);
        assert!(host.words().contains("device near: its port is down by the administrator"), "{}", host.words());
        // While the operator has the link down, the guest gets no events about the cable.
        host.namespace.ip("link set wire down");
        carrier("down");
        host.namespace.ip("link set wire up");
        carrier("up");
        let settled = |state: &str| {
            let start = Instant::now();
            while host.daemon.network("near")["interface"]["state"] != state {
                assert!(start.elapsed() < PATIENCE);
            }
        };
        settled("up");
        assert!(!is_active(&near) && near.driver.async_events().is_empty());
        // While the cable is down, the guest gets no events about the operator's link state either.
        host.namespace.ip("link set wire down");
        carrier("down");
        host.daemon.run("link up --device near");
        assert!(!is_active(&near) && near.driver.async_events().is_empty());
        host.namespace.ip("link set wire up");
        hears(&near, PORT_ACTIVE);
    }
}

/// A replaced worker starts with the current state of the cable.
#[test]
fn the_next_worker_follows_as_well() {
    let Some(host) = Host::start("network") else { return };
    let mut carrier = host.carrier();
    host.namespace.ip("link set far down");
    carrier("no carrier");
    host.namespace.ip("link set wire mtu 1500");
    carrier("1500");
    let kill = || {
        let process = host.daemon.network("near")["pid"].as_i64().unwrap();
        kill_process(Pid::from_raw(i32::try_from(process).unwrap()).unwrap(), Signal::KILL).unwrap();
        process
    };
    let wait_other = |process: i64| {
        let start = Instant::now();
        while host.daemon.network("near")["pid"].as_i64().is_none_or(|other| other == process) {
            assert!(start.elapsed() < PATIENCE);
        }
    };
    wait_other(kill());
    let near = host.daemon.guest("near", 1);
    assert_eq!((is_active(&near), path_mtu(&near)), (false, 3));
    host.namespace.ip("link set far up");
    hears(&near, PORT_ACTIVE);
    carrier("up");
    drop(near);
    // The cable may change before the next worker starts, during its start, or after it.
    for (interface, active) in [("down", false), ("up", true), ("down", false), ("up", true)] {
        let killed = kill();
        host.namespace.ip(&format!("link set wire {interface}"));
        carrier(interface);
        wait_other(killed);
        let near = host.daemon.guest("near", 1);
        let start = Instant::now();
        while is_active(&near) != active {
            assert!(start.elapsed() < PATIENCE);
        }
    }
}

/// Path MTUs follow the MTU of the interface.
#[test]
fn path_mtus_follow_the_interface() {
    for isolate in ["network", "none"] {
        let Some(host) = Host::start(isolate) else { return };
        let mut carrier = host.carrier();
        let (near, far) = (host.daemon.guest("near", 1), host.daemon.guest("far", 2));
        transfer(&near, &far, 5);

        host.namespace.ip("link set wire mtu 1500");
        hears(&near, PORT_ACTIVE);
        carrier("1500");
        assert_eq!((path_mtu(&near), path_mtu(&far)), (3, 5));
        let status = host.daemon.network("near");
        assert_eq!((&status["interface"]["mtu"], &status["interface"]["up"]), (&json!(1500), &json!(true)));
        let words = host.words();
        assert!(words.contains("network near: interface wire carries packets of 1500 bytes, not of 4500"), "{words}");
        // New connections must fit the smaller MTU. Programs use the smaller active MTU of both ends, here 3 (1024
        // bytes).
        assert!(refuses(&near, 4) && !refuses(&near, 3));
        transfer(&near, &far, 3);

        // An interface MTU above the MTU of the network changes nothing.
        host.namespace.ip("link set wire mtu 9000");
        hears(&near, PORT_ACTIVE);
        carrier("9000");
        assert_eq!(path_mtu(&near), 5);
        assert!(!host.words().contains("interface wire carries"), "{}", host.words());
        transfer(&near, &far, 5);
    }
}

/// Returns `true` if a queue pair of the guest is refused this path MTU.
fn refuses(guest: &Guest, mtu: u32) -> bool {
    let driver = &guest.driver;
    let (pd, cq) = (driver.create_pd(None).unwrap(), driver.create_cq(None, 4).unwrap());
    let mut qp = driver.create_qp(&QpInit::rc(&pd, &cq)).unwrap();
    let path = Path { mtu, ..Path::to(gid(guest.number), qp.qpn) };
    qp.connect(&path).is_err()
}
