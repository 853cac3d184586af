//! A VMM passes a descriptor whose `close(2)` does not return. Only that VMM's connection hangs.

use std::collections::BTreeSet;
use std::fs;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::common::daemon::{Running, TestDaemon, named};
use crate::common::endless_close::EndlessClose;
use crate::common::remote::probe;
use crate::common::traffic::transfer;
use crate::common::{Raw, map_body};
use pvrdma_verbs::testing::skipped;
use pvrdma_vfio_user_server::message;
use pvrdmad::testing::{Pair, beside_traffic};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// A daemon with the networks `a` (devices `a1` to `a3`) and `b` (`b1` to `b3`), and a client of `a3` that has sent a
/// descriptor which the worker cannot finish closing.
struct Place {
    // Declared before the file system, so that it is dropped first: the end of the file system completes blocked calls.
    daemon: Running,
    client: Raw,
    files: EndlessClose,
    /// The worker of `a`.
    worker: Pid,
}

impl Place {
    /// Returns `None` where such a file cannot be created.
    fn start() -> Option<Self> {
        Self::with(&["a1", "a2", "a3", "b1", "b2", "b3"])
    }

    /// Same, with these devices. The third one's client sends the file.
    fn with(devices: &[&str]) -> Option<Self> {
        let files = EndlessClose::mount().inspect_err(skipped).ok()?;
        let daemon = TestDaemon::new().env("RUST_LOG", "info").read_log();
        let text = configuration(daemon.folder(), devices);
        // A keeper process would receive the descriptor instead of the worker.
        let daemon = daemon.env("PVRDMAD_WITHOUT_KEEPERS", "1").config(&text, devices.len()).start();
        let client = wedge(&files, &daemon.path(devices[2]));
        let worker = Pid::from_raw(i32::try_from(files.wait_held(1)[0]).unwrap()).unwrap();
        assert_eq!(daemon.worker(&devices[2][..1]), worker);
        Some(Self { daemon, client, files, worker })
    }

    /// Adds `a3` again.
    fn add(&self) -> Result<(), String> {
        self.daemon.add("a3", 3, "network=a")
    }

    fn pair(&self, network: &str) -> Pair {
        let devices = [1, 2].map(|number| format!("{network}{number}"));
        self.daemon.pair(devices.each_ref().map(String::as_str))
    }
}

/// Sends a device a file whose `close(2)` does not return.
fn wedge(files: &EndlessClose, socket: &Path) -> Raw {
    let mut client = Raw::connect(socket);
    client.negotiate();
    let file = files.open();
    client.send(message::Command::DMA_MAP, 0, &map_body(3, 0, 0, 1 << 20), &[file.as_fd()]);
    client
}

/// Returns the configuration of these devices. A device's name begins with the name of its network; `c` and `d` are
/// connected by a tunnel.
fn configuration(folder: &Path, devices: &[&str]) -> String {
    let mut text = String::new();
    let networks: BTreeSet<_> = devices.iter().map(|device| &device[..1]).collect();
    for network in networks {
        text += &format!("[[network]]\nname = '{network}'\n");
        if let Some((ours, theirs)) =
            [("c", (31, 32)), ("d", (32, 31))].iter().find(|(name, _)| *name == network).map(|(_, ends)| *ends)
        {
            // Addresses that no other process has.
            let [.., high, low] = std::process::id().to_be_bytes();
            let end = |number: u8| format!("127.{}.{low}.{number}", 64 | high & 0x3f);
            text += &format!("uplink = 'vxlan:{}'\nremote = ['{}']\n", end(ours), end(theirs));
        }
    }
    for name in devices {
        let (network, number) = name.split_at(1);
        text += &format!(
            "[[device]]\nname = '{name}'\nnetwork = '{network}'\nsocket = '{}'\nmac = '52:54:00:00:03:0{number}'\n\
             pin = 'off'\nseed = {number}\n",
            folder.join(name).display()
        );
    }
    text
}

/// Returns `true` if network `a` is served: by a new process if `replaced`, otherwise by the first one.
fn serves(status: &Value, worker: Pid, replaced: bool) -> bool {
    let network = named(&status["networks"], "a");
    network["state"] == "running" && (network["pid"] != worker.as_raw_nonzero().get()) == replaced
}

/// After the removal of the device, the other devices of the network keep their worker and their traffic.
fn removed_beside_traffic(mut place: Place, remove: impl FnOnce(&Place)) {
    let (mut a, mut b) = (place.pair("a"), place.pair("b"));
    beside_traffic(&mut b, || {
        remove(&place);
        let status =
            place.daemon.wait(|status| named(&status["networks"], "a")["stuck_clients"] == serde_json::json!(["a3"]));
        assert!(serves(&status, place.worker, false), "{status:#}");
        assert_eq!(named(&status["networks"], "a")["devices"], serde_json::json!(["a1", "a2"]));
        a.exchange();
    });
    // New clients of the other devices are served, and so is a new device with the same addresses.
    drop(a);
    place.pair("a").exchange();
    place.add().unwrap();
    probe(&place.daemon.path("a3"), 4 << 20).remove();
    place.daemon.wait_log("a3: the thread of its client does not come back");
    assert!(place.daemon.run("status").contains("a3"), "the status names it");
    // The thread ends when the call returns.
    place.files.release();
    place.daemon.wait(|status| named(&status["networks"], "a")["stuck_clients"] == serde_json::json!([]));
    b.exchange();
}

#[test]
fn a_device_with_a_wedged_connection_is_removed() {
    let Some(place) = Place::start() else { return };
    removed_beside_traffic(place, |place| drop(place.daemon.run("remove --device a3")));
}

#[test]
fn a_reload_removes_a_device_with_a_wedged_connection() {
    let Some(place) = Place::start() else { return };
    removed_beside_traffic(place, |place| {
        let text = configuration(place.daemon.folder(), &["a1", "a2", "b1", "b2", "b3"]);
        fs::write(place.daemon.path("config.toml"), text).unwrap();
        place.daemon.signal(Signal::HUP);
        place.daemon.wait(|status| named(&status["networks"], "a")["devices"] == serde_json::json!(["a1", "a2"]));
    });
}

/// A killed worker may not end, because one of its threads hangs in the kernel. It serves no device then, and the
/// supervisor replaces it without waiting for it.
#[test]
fn a_worker_that_cannot_be_killed_is_replaced() {
    let Some(mut place) = Place::start() else { return };
    let mut events = place.daemon.events();
    let mut b = place.pair("b");
    beside_traffic(&mut b, || {
        kill_process(place.worker, Signal::KILL).unwrap();
        place.daemon.wait(|status| serves(status, place.worker, true));
        place.pair("a").exchange();
    });
    let status = place.daemon.status();
    let wedged = status["wedged"].as_array().unwrap();
    assert_eq!(wedged.len(), 1, "{status:#}");
    assert_eq!(wedged[0]["pid"], place.worker.as_raw_nonzero().get());
    assert_eq!(wedged[0]["network"], "a");
    assert_eq!(wedged[0]["threads"], serde_json::json!(["a3"]));
    let text = place.daemon.run("status");
    assert!(text.contains("/sys/fs/fuse/connections/"), "{text}");
    assert!(text.lines().any(|line| line.contains("network a") && line.contains("does not end")), "{text}");
    let network = named(&status["networks"], "b");
    assert_eq!((&network["restarts"], &network["state"]), (&0.into(), &"running".into()), "{network:#}");
    let counted = |place: &Place| -> f64 {
        let metrics = place.daemon.run("status --format openmetrics");
        let sample = metrics.lines().find(|line| line.starts_with("pvrdma_wedged_processes")).unwrap_or(&metrics);
        sample.rsplit(' ').next().unwrap().parse().unwrap()
    };
    assert!(counted(&place) > 0.5);
    place.daemon.wait_log("does not end");
    let pid = place.worker.as_raw_nonzero().get();
    let is = |event: &Value, name: &str| {
        (&event["event"], &event["network"], &event["pid"]) == (&name.into(), &"a".into(), &pid.into())
    };
    assert!(events.any(|event| is(&event, "process-wedged")));
    place.files.release();
    place.daemon.wait(|status| status["wedged"] == serde_json::json!([]));
    assert!(counted(&place) < 0.5);
    assert!(events.any(|event| is(&event, "process-gone")));
    place.daemon.wait_log("has ended");
    place.pair("a").exchange();
    b.exchange();
}

#[test]
fn the_daemon_ends_beside_a_worker_that_cannot_be_killed() {
    for kill_first in [false, true] {
        let Some(mut place) = Place::start() else { return };
        if kill_first {
            kill_process(place.worker, Signal::KILL).unwrap();
            place.daemon.wait(|status| serves(status, place.worker, true));
        }
        let start = Instant::now();
        place.daemon.signal(Signal::TERM);
        assert_eq!(place.daemon.exit(), Some(0));
        // The bound that SECURITY.md states. A daemon that waits for the process would wait forever.
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
        assert!(!place.daemon.path("a1").exists() && !place.daemon.path("control").exists());
    }
}

/// The remaining process also has the tunnel's socket, but does not read from it.
#[test]
fn a_tunnel_is_served_on_beside_a_worker_that_cannot_be_killed() {
    let Some(place) = Place::with(&["c1", "d2", "c3"]) else { return };
    kill_process(place.worker, Signal::KILL).unwrap();
    place.daemon.wait(|status| status["wedged"].as_array().unwrap().len() == 1);
    let (near, far) = (place.daemon.guest("c1", 1), place.daemon.guest("d2", 2));
    transfer(&near, &far, 3);
    transfer(&far, &near, 3);
}

/// A device must not get a new client before the last client's thread has ended, because that thread would reset it.
#[test]
fn the_next_client_of_a_device_is_turned_away_until_the_call_returns() {
    let Some(mut place) = Place::start() else { return };
    let socket = place.daemon.path("a3");
    place.client.stream.shutdown(Shutdown::Both).unwrap();
    Raw::connect(&socket).wait_hang_up();
    place.daemon.wait_log("a client was turned away");
    assert!(place.daemon.network("a")["state"] == "running");
    place.files.release();
    probe(&socket, 4 << 20).remove();
}

/// Each blocked thread keeps the resources of its device, so their number is bounded.
#[test]
fn a_worker_survives_a_bounded_number_of_stuck_clients() {
    let Some(place) = Place::start() else { return };
    let mut clients = Vec::new();
    loop {
        place.daemon.run("remove --device a3");
        if let Err(problem) = place.add() {
            assert!(problem.contains("do not end"), "{problem}");
            break;
        }
        clients.push(wedge(&place.files, &place.daemon.path("a3")));
        place.files.wait_held(clients.len() + 1);
    }
    assert_eq!(clients.len(), 7);
    let network = place.daemon.network("a");
    assert_eq!(network["stuck_clients"], serde_json::json!(vec!["a3"; 8]));
    assert_eq!(network["pid"], place.worker.as_raw_nonzero().get());
    place.pair("a").exchange();
    place.files.release();
    place.daemon.wait(|status| named(&status["networks"], "a")["stuck_clients"] == serde_json::json!([]));
    place.add().unwrap();
    probe(&place.daemon.path("a3"), 4 << 20).remove();
}
