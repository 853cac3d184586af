//! A VMM passes a descriptor whose `close(2)` does not return. Only that VMM's connection hangs.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{ChildStderr, Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::endless_close::EndlessClose;
use crate::common::process::Daemon;
use crate::common::remote::probe;
use crate::common::traffic::{Guest, transfer};
use crate::common::{PATIENCE, Raw, map_body};
use pvrdma_verbs::testing::skipped;
use pvrdma_vfio_user_server::message;
use pvrdmad::testing::{Pair, beside_traffic};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_pvrdmad");

/// A daemon with the networks `a` (devices `a1` to `a3`) and `b` (`b1` to `b3`), and a client of `a3` that has sent a
/// descriptor which the worker cannot finish closing.
struct Place {
    // Declared before the file system, so that it is dropped first: the end of the file system completes blocked calls.
    daemon: Daemon,
    log: BufReader<ChildStderr>,
    client: Raw,
    files: EndlessClose,
    folder: TempDir,
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
        let folder = tempfile::tempdir().unwrap();
        configure(&folder, devices);
        let mut command = Command::new(PROGRAM);
        // With `strict`, a system call outside the filter kills the process, and the test fails.
        command.args(["--sandbox", "strict", "--config"]).arg(folder.path().join("config.toml"));
        // A keeper process would receive the descriptor instead of the worker.
        command.env("PVRDMAD_WITHOUT_KEEPERS", "1");
        let mut daemon = Daemon::start(command.env("RUST_LOG", "info").stderr(Stdio::piped()));
        let log = BufReader::new(daemon.errors());
        let client = wedge(&files, &folder.path().join(devices[2]));
        let worker = i32::try_from(files.wait_held(1)[0]).unwrap();
        let place = Self { daemon, log, client, files, folder, worker: Pid::from_raw(worker).unwrap() };
        assert_eq!(place.network(&devices[2][..1])["pid"], worker);
        Some(place)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn try_run(&self, words: &[&str]) -> Result<String, String> {
        let mut command = Command::new(PROGRAM);
        let output = command.args(words).arg("--control").arg(self.path("control")).output().unwrap();
        let said = if output.status.success() { Ok(output.stdout) } else { Err(output.stderr) };
        said.map(|text| String::from_utf8(text).unwrap()).map_err(|text| String::from_utf8(text).unwrap())
    }

    #[track_caller]
    fn run(&self, words: &[&str]) -> String {
        self.try_run(words).unwrap()
    }

    /// Adds `a3` again.
    fn add(&self) -> Result<(), String> {
        let socket = self.path("a3");
        let device = format!("name=a3,network=a,socket={},mac=52:54:00:00:03:03,pin=off", socket.display());
        self.try_run(&["add", &device]).map(drop)
    }

    fn status(&self) -> Value {
        serde_json::from_str(&self.run(&["status", "--json"])).unwrap()
    }

    fn network(&self, name: &str) -> Value {
        let status = self.status();
        status["networks"].as_array().unwrap().iter().find(|network| network["name"] == name).unwrap().clone()
    }

    /// Waits until `is` accepts the status.
    #[track_caller]
    fn wait(&self, is: impl Fn(&Value) -> bool) -> Value {
        let start = Instant::now();
        loop {
            let status = self.status();
            if is(&status) {
                return status;
            }
            assert!(start.elapsed() < PATIENCE, "{status:#}");
        }
    }

    /// Returns the events from now on.
    fn events(&self) -> impl Iterator<Item = Value> + use<> {
        let mut stream = UnixStream::connect(self.path("control")).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"events\"}\n").unwrap();
        let mut lines = BufReader::new(stream).lines();
        lines.next().unwrap().unwrap();
        lines.map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap()["params"].take())
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

/// Sends a device a file whose `close(2)` does not return.
fn wedge(files: &EndlessClose, socket: &Path) -> Raw {
    let mut client = Raw::connect(socket);
    client.negotiate();
    let file = files.open();
    client.send(message::Command::DMA_MAP, 0, &map_body(3, 0, 0, 1 << 20), &[file.as_fd()]);
    client
}

/// Writes the configuration of these devices. A device's name begins with the name of its network; `c` and `d` are
/// connected by a tunnel.
fn configure(folder: &TempDir, devices: &[&str]) {
    let path = |name: &str| folder.path().join(name).display().to_string();
    let mut text = format!("control = '{}'\n", path("control"));
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
            path(name)
        );
    }
    fs::write(path("config.toml"), text).unwrap();
}

fn named<'a>(list: &'a Value, name: &str) -> &'a Value {
    list.as_array().unwrap().iter().find(|entry| entry["name"] == name).expect(name)
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
        let status = place.wait(|status| named(&status["networks"], "a")["stuck_clients"] == serde_json::json!(["a3"]));
        assert!(serves(&status, place.worker, false), "{status:#}");
        assert_eq!(named(&status["networks"], "a")["devices"], serde_json::json!(["a1", "a2"]));
        a.exchange();
    });
    // New clients of the other devices are served, and so is a new device with the same addresses.
    drop(a);
    place.pair("a").exchange();
    place.add().unwrap();
    probe(&place.path("a3"), 4 << 20).remove();
    place.wait_log("a3: the thread of its client does not come back");
    assert!(place.run(&["status"]).contains("a3"), "the status names it");
    // The thread ends when the call returns.
    let Place { files, .. } = &mut place;
    files.release();
    place.wait(|status| named(&status["networks"], "a")["stuck_clients"] == serde_json::json!([]));
    b.exchange();
}

#[test]
fn a_device_with_a_wedged_connection_is_removed() {
    let Some(place) = Place::start() else { return };
    removed_beside_traffic(place, |place| drop(place.run(&["remove", "--device", "a3"])));
}

#[test]
fn a_reload_removes_a_device_with_a_wedged_connection() {
    let Some(place) = Place::start() else { return };
    removed_beside_traffic(place, |place| {
        configure(&place.folder, &["a1", "a2", "b1", "b2", "b3"]);
        place.daemon.signal(Signal::HUP);
        place.wait(|status| named(&status["networks"], "a")["devices"] == serde_json::json!(["a1", "a2"]));
    });
}

/// A killed worker may not end, because one of its threads hangs in the kernel. It serves no device then, and the
/// supervisor replaces it without waiting for it.
#[test]
fn a_worker_that_cannot_be_killed_is_replaced() {
    let Some(mut place) = Place::start() else { return };
    let mut events = place.events();
    let mut b = place.pair("b");
    beside_traffic(&mut b, || {
        kill_process(place.worker, Signal::KILL).unwrap();
        place.wait(|status| serves(status, place.worker, true));
        place.pair("a").exchange();
    });
    let status = place.status();
    let wedged = status["wedged"].as_array().unwrap();
    assert_eq!(wedged.len(), 1, "{status:#}");
    assert_eq!(wedged[0]["pid"], place.worker.as_raw_nonzero().get());
    assert_eq!(wedged[0]["network"], "a");
    assert_eq!(wedged[0]["threads"], serde_json::json!(["a3"]));
    let text = place.run(&["status"]);
    assert!(text.contains("/sys/fs/fuse/connections/"), "{text}");
    assert!(text.lines().any(|line| line.contains("network a") && line.contains("does not end")), "{text}");
    let network = named(&status["networks"], "b");
    assert_eq!((&network["restarts"], &network["state"]), (&0.into(), &"running".into()), "{network:#}");
    let counted = |place: &Place| -> f64 {
        let metrics = place.run(&["status", "--format", "openmetrics"]);
        let sample = metrics.lines().find(|line| line.starts_with("pvrdma_wedged_processes")).unwrap_or(&metrics);
        sample.rsplit(' ').next().unwrap().parse().unwrap()
    };
    assert!(counted(&place) > 0.5);
    place.wait_log("does not end");
    let pid = place.worker.as_raw_nonzero().get();
    let is = |event: &Value, name: &str| {
        (&event["event"], &event["network"], &event["pid"]) == (&name.into(), &"a".into(), &pid.into())
    };
    assert!(events.any(|event| is(&event, "process-wedged")));
    place.files.release();
    place.wait(|status| status["wedged"] == serde_json::json!([]));
    assert!(counted(&place) < 0.5);
    assert!(events.any(|event| is(&event, "process-gone")));
    place.wait_log("has ended");
    place.pair("a").exchange();
    b.exchange();
}

#[test]
fn the_daemon_ends_beside_a_worker_that_cannot_be_killed() {
    for kill_first in [false, true] {
        let Some(mut place) = Place::start() else { return };
        if kill_first {
            kill_process(place.worker, Signal::KILL).unwrap();
            place.wait(|status| serves(status, place.worker, true));
        }
        let start = Instant::now();
        place.daemon.signal(Signal::TERM);
        assert_eq!(place.daemon.wait(), Some(0));
        // The bound that SECURITY.md states. A daemon that waits for the process would wait forever.
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
        assert!(!place.path("a1").exists() && !place.path("control").exists());
    }
}

/// The remaining process also has the tunnel's socket, but does not read from it.
#[test]
fn a_tunnel_is_served_on_beside_a_worker_that_cannot_be_killed() {
    let Some(place) = Place::with(&["c1", "d2", "c3"]) else { return };
    kill_process(place.worker, Signal::KILL).unwrap();
    place.wait(|status| status["wedged"].as_array().unwrap().len() == 1);
    let near = Guest::new(1, &place.path("c1"));
    let far = Guest::new(2, &place.path("d2"));
    transfer(&near, &far, 3);
    transfer(&far, &near, 3);
}

/// A device must not get a new client before the last client's thread has ended, because that thread would reset it.
#[test]
fn the_next_client_of_a_device_is_turned_away_until_the_call_returns() {
    let Some(mut place) = Place::start() else { return };
    let socket = place.path("a3");
    place.client.stream.shutdown(Shutdown::Both).unwrap();
    Raw::connect(&socket).wait_hang_up();
    place.wait_log("a client was turned away");
    assert!(place.network("a")["state"] == "running");
    place.files.release();
    probe(&socket, 4 << 20).remove();
}

/// Each blocked thread keeps the resources of its device, so their number is bounded.
#[test]
fn a_worker_survives_a_bounded_number_of_stuck_clients() {
    let Some(mut place) = Place::start() else { return };
    let mut clients = Vec::new();
    loop {
        place.run(&["remove", "--device", "a3"]);
        if let Err(problem) = place.add() {
            assert!(problem.contains("do not end"), "{problem}");
            break;
        }
        clients.push(wedge(&place.files, &place.path("a3")));
        place.files.wait_held(clients.len() + 1);
    }
    assert_eq!(clients.len(), 7);
    let network = place.network("a");
    assert_eq!(network["stuck_clients"], serde_json::json!(vec!["a3"; 8]));
    assert_eq!(network["pid"], place.worker.as_raw_nonzero().get());
    place.pair("a").exchange();
    place.files.release();
    place.wait(|status| named(&status["networks"], "a")["stuck_clients"] == serde_json::json!([]));
    place.add().unwrap();
    probe(&place.path("a3"), 4 << 20).remove();
}
