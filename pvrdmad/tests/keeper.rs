//! A client passes descriptors whose `close(2)` does not return. This ends its own connection and affects no other.

use std::fs;
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

use crate::common::endless_close::EndlessClose;
use crate::common::process::{Daemon, children};
use crate::common::remote::probe;
use crate::common::{EINVAL, PATIENCE, Raw, irqs_body, map_body, memfd, send, take_signals};
use pvrdma_verbs::testing::skipped;
use pvrdma_vfio_user_server::message::{self, HEADER_SIZE, Header};
use pvrdmad::testing::{Pair, beside_traffic};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_pvrdmad");
const MAP: message::Command = message::Command::DMA_MAP;
const IRQS: message::Command = message::Command::DEVICE_SET_IRQS;

/// A daemon with the network `a` and the devices `a1` to `a3`. The last one has a network function.
struct Place {
    daemon: Daemon,
    folder: TempDir,
}

impl Place {
    fn start(arguments: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new(PROGRAM);
        // With `strict`, a system call outside the filter kills the process, and the test fails.
        command.args(["--sandbox", "strict", "--control"]).arg(folder.path().join("control")).args(arguments);
        command.args(["--network", "name=a"]);
        for number in 1..=3 {
            let path = |name: String| folder.path().join(name).display().to_string();
            let socket = path(format!("a{number}"));
            let nic = if number == 3 { format!(",nic-socket={}", path("nic".to_owned())) } else { String::new() };
            command.arg("--device").arg(format!(
                "name=a{number},network=a,socket={socket},mac=52:54:00:00:04:0{number},pin=off,seed={number}{nic}"
            ));
        }
        let log = std::env::var_os("KEEPER_LOG").map_or_else(Stdio::null, |_| Stdio::inherit());
        let daemon = Daemon::start(command.stderr(log));
        Self { daemon, folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn run(&self, words: &[&str]) -> String {
        let mut command = Command::new(PROGRAM);
        let output = command.args(words).arg("--control").arg(self.path("control")).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn status(&self) -> Value {
        serde_json::from_str(&self.run(&["status", "--json"])).unwrap()
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

    fn client(&self, socket: &str) -> Raw {
        let mut client = Raw::connect(&self.path(socket));
        client.negotiate();
        client
    }

    /// Returns the keeper processes with their devices.
    fn keepers(&self) -> Vec<(i32, String)> {
        let words = |pid: String| -> Option<(i32, String)> {
            let line = fs::read_to_string(format!("/proc/{pid}/cmdline")).ok()?;
            let words: Vec<_> = line.split('\0').collect();
            (words.get(1) == Some(&"keeper")).then(|| (pid.parse().unwrap(), words[3].to_owned()))
        };
        let mut found: Vec<_> = children(self.daemon.id()).into_iter().filter_map(words).collect();
        found.sort();
        found
    }
}

/// Maps memory and sets an interrupt, which both need valid descriptors.
#[track_caller]
fn works(client: &mut Raw) {
    client.map(0, 1 << 20, 0, 3, Some(&memfd("memory", 1 << 20))).ok();
    let event = crate::common::eventfd();
    client.set_irqs(2, 0x24, 0, 1, &[event.as_fd()]).ok();
    client.set_irqs(2, 0x21, 0, 1, &[]).ok();
    assert_eq!(take_signals(&event), 1);
    client.unmap(0, 1 << 20, 0).ok();
}

/// Each of the clients is disconnected. Other devices and the next client of the device are served, until four keepers
/// of the device are stuck.
#[test]
fn a_close_that_never_returns_ends_the_connection_of_its_client() {
    let mut files = match EndlessClose::mount() {
        Ok(files) => files,
        Err(reason) => return skipped(&reason),
    };
    let mut place = Place::start(&[]);
    let (file, event) = (files.open(), crate::common::eventfd());
    let worker = place.status()["networks"][0]["pid"].clone();
    let mut pair = Pair::new([1, 2].map(|number| probe(&place.path(&format!("a{number}")), 16 << 20)));
    let mut nic = place.client("nic");
    let two = [event.as_fd(), file.as_fd()];
    let cases: [(message::Command, Vec<u8>, &[BorrowedFd<'_>]); 4] = [
        (MAP, map_body(3, 0, 0, 1 << 20), &two[1..]),
        (IRQS, irqs_body(2, 0x24, 0, 2), &two),
        // Messages that are refused for other reasons, and one with more descriptors than the command takes.
        (MAP, vec![1], &two),
        (IRQS, Vec::new(), &two[1..]),
    ];
    for (done, (command, body, fds)) in cases.iter().enumerate() {
        let mut client = place.client("a3");
        works(&mut client);
        client.send(*command, 0, body, fds);
        let held = files.wait_held(done + 1)[done];
        beside_traffic(&mut pair, || client.wait_hang_up());
        let status = place.wait(|status| status["wedged"].as_array().unwrap().len() == done + 1);
        let (wedged, network) = (&status["wedged"][done], &status["networks"][0]);
        assert_eq!((&wedged["pid"], &wedged["device"]), (&held.into(), &"a3".into()), "{status:#}");
        assert_eq!((&network["pid"], &network["restarts"]), (&worker, &0.into()), "{status:#}");
        // The client of the device's other function continues with the next keeper, while another keeper is allowed.
        if done + 1 < cases.len() {
            works(&mut nic);
        }
    }
    let text = place.run(&["status"]);
    assert!(text.contains("the keeper of device a3") && text.contains("/sys/fs/fuse/connections"), "{text}");
    Raw::connect(&place.path("a3")).wait_hang_up();
    // The device stays without a keeper until one of the stuck keepers ends.
    files.release();
    place.wait(|status| status["wedged"] == serde_json::json!([]));
    works(&mut place.client("a3"));
    pair.exchange();
    assert_eq!(place.status()["networks"][0]["pid"], worker);
    place.daemon.stop();
}

#[test]
fn a_daemon_ends_although_a_keeper_does_not() {
    let files = match EndlessClose::mount() {
        Ok(files) => files,
        Err(reason) => return skipped(&reason),
    };
    let mut place = Place::start(&[]);
    let file = files.open();
    let mut clients = ["a1", "a2", "a3"].map(|name| place.client(name));
    for (count, client) in clients.iter_mut().enumerate() {
        client.send(MAP, 0, &map_body(3, 0, 0, 1 << 20), &[file.as_fd()]);
        files.wait_held(count + 1);
    }
    place.daemon.stop();
}

/// Descriptors that a message must not carry are not received at all, so the server need not close them.
#[test]
fn descriptors_where_none_belong_are_never_received() {
    let files = match EndlessClose::mount() {
        Ok(files) => files,
        Err(reason) => return skipped(&reason),
    };
    let mut place = Place::start(&[]);
    let file = files.open();
    let commands = (0..20).map(message::Command).filter(|&command| command != MAP && command != IRQS);
    let mut client = place.client("a3");
    for command in commands {
        assert!([EINVAL, 95].contains(&client.call(command, &[0; 32], &[file.as_fd()]).errno()), "{command:?}");
    }
    // A header in two parts, with a descriptor on each.
    let header = Header { id: 1, command: MAP, size: 48, flags: 0, error: 0 }.to_bytes();
    client.send_raw(&header[..7], &[file.as_fd()]);
    client.send_raw(&header[7..HEADER_SIZE], &[file.as_fd()]);
    client.send_raw(&map_body(3, 0, 0, 1 << 20), &[]);
    assert_eq!(client.receive().errno(), EINVAL);
    works(&mut client);
    // The same before the negotiation. After an invalid header the worker closes the connection while the last
    // descriptor is still queued. If the worker is faster, the write fails, so there are several attempts.
    for _ in 0..8 {
        let mut client = Raw::connect(&place.path("a2"));
        assert_eq!(client.call(message::Command::VERSION, &[0; 4], &[file.as_fd()]).errno(), EINVAL);
        client.send_raw(&[0xff; HEADER_SIZE], &[]);
        if let Err(error) = send(&client.stream, &[0], &[file.as_fd()]) {
            assert_eq!(error.kind(), ErrorKind::BrokenPipe);
        }
        client.wait_hang_up();
    }
    drop(file);
    works(&mut place.client("a2"));
    assert_eq!(files.wait_held(0), [0; 0]);
    place.daemon.stop();
}

#[test]
fn a_keeper_outlives_its_worker_and_is_replaced_when_it_ends() {
    let mut place = Place::start(&[]);
    // There is no keeper before the first client.
    assert_eq!(place.keepers(), []);
    let (mut client, mut nic) = (place.client("a3"), place.client("nic"));
    works(&mut client);
    let [(first, name)] = &place.keepers()[..] else { unreachable!("one keeper") };
    assert_eq!(name, "a3");
    let kill = |pid: i32| kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    kill(*first);
    // The keeper's descriptors are closed once the process is a zombie.
    let stat = || fs::read_to_string(format!("/proc/{first}/stat")).unwrap_or_default();
    let start = Instant::now();
    while !stat().is_empty() && !stat().contains(") Z ") {
        assert!(start.elapsed() < PATIENCE);
    }
    // Both clients continue.
    works(&mut nic);
    works(&mut client);
    let [(second, _)] = place.keepers()[..] else { unreachable!("one keeper") };
    assert_ne!(second, *first);
    kill(i32::try_from(place.status()["networks"][0]["pid"].as_i64().unwrap()).unwrap());
    place.wait(|status| {
        let network = &status["networks"][0];
        network["restarts"] == 1 && network["state"] == "running"
    });
    // It outlives its worker, and both clients continue.
    works(&mut client);
    works(&mut nic);
    let [(third, _)] = place.keepers()[..] else { unreachable!("one keeper") };
    assert_eq!(third, second);
    place.run(&["remove", "--device", "a3"]);
    let start = Instant::now();
    while !place.keepers().is_empty() {
        assert!(start.elapsed() < PATIENCE);
    }
    place.daemon.stop();
}
