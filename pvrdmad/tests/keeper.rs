//! A client passes descriptors whose `close(2)` does not return. This ends its own connection and affects no other.

use std::fs;
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use crate::common::daemon::{Running, TestDaemon};
use crate::common::endless_close::EndlessClose;
use crate::common::process::children;
use crate::common::{EINVAL, PATIENCE, Raw, irqs_body, map_body, memfd, send, take_signals};
use pvrdma_verbs::testing::skipped;
use pvrdma_vfio_user_server::message::{self, HEADER_SIZE, Header};
use pvrdmad::testing::beside_traffic;
use rustix::process::{Pid, Signal, kill_process};

const MAP: message::Command = message::Command::DMA_MAP;
const IRQS: message::Command = message::Command::DEVICE_SET_IRQS;

/// Starts a daemon with the network `a` and the devices `a1` to `a3`. The last one has a network function.
fn start() -> Running {
    let daemon = TestDaemon::new().network("a", "");
    let daemon = daemon.device("a1", 1, "network=a,seed=1").device("a2", 2, "network=a,seed=2");
    daemon.device("a3", 3, "network=a,seed=3,nic-socket=FOLDER/nic").start()
}

/// Returns the keeper processes with their devices.
fn keepers(daemon: &Running) -> Vec<(i32, String)> {
    let words = |pid: String| -> Option<(i32, String)> {
        let line = fs::read_to_string(format!("/proc/{pid}/cmdline")).ok()?;
        let words: Vec<_> = line.split('\0').collect();
        (words.get(1) == Some(&"keeper")).then(|| (pid.parse().unwrap(), words[3].to_owned()))
    };
    let mut found: Vec<_> = children(daemon.id()).into_iter().filter_map(words).collect();
    found.sort();
    found
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
    let files = match EndlessClose::mount() {
        Ok(files) => files,
        Err(reason) => return skipped(&reason),
    };
    let mut place = start();
    let (file, event) = (files.open(), crate::common::eventfd());
    let worker = place.status()["networks"][0]["pid"].clone();
    let mut pair = place.pair(["a1", "a2"]);
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
    let text = place.run("status");
    assert!(text.contains("the keeper of device a3") && text.contains("/sys/fs/fuse/connections"), "{text}");
    Raw::connect(&place.path("a3")).wait_hang_up();
    // The device stays without a keeper until one of the stuck keepers ends.
    files.release();
    place.wait(|status| status["wedged"] == serde_json::json!([]));
    works(&mut place.client("a3"));
    pair.exchange();
    assert_eq!(place.status()["networks"][0]["pid"], worker);
    place.stop();
}

#[test]
fn a_daemon_ends_although_a_keeper_does_not() {
    let files = match EndlessClose::mount() {
        Ok(files) => files,
        Err(reason) => return skipped(&reason),
    };
    let mut place = start();
    let file = files.open();
    let mut clients = ["a1", "a2", "a3"].map(|name| place.client(name));
    for (count, client) in clients.iter_mut().enumerate() {
        client.send(MAP, 0, &map_body(3, 0, 0, 1 << 20), &[file.as_fd()]);
        files.wait_held(count + 1);
    }
    place.stop();
}

/// Descriptors that a message must not carry are not received at all, so the server need not close them.
#[test]
fn descriptors_where_none_belong_are_never_received() {
    let files = match EndlessClose::mount() {
        Ok(files) => files,
        Err(reason) => return skipped(&reason),
    };
    let mut place = start();
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
    place.stop();
}

#[test]
fn a_keeper_outlives_its_worker_and_is_replaced_when_it_ends() {
    let mut place = start();
    // There is no keeper before the first client.
    assert_eq!(keepers(&place), []);
    let (mut client, mut nic) = (place.client("a3"), place.client("nic"));
    works(&mut client);
    let [(first, name)] = &keepers(&place)[..] else { unreachable!("one keeper") };
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
    let [(second, _)] = keepers(&place)[..] else { unreachable!("one keeper") };
    assert_ne!(second, *first);
    kill(i32::try_from(place.status()["networks"][0]["pid"].as_i64().unwrap()).unwrap());
    place.wait(|status| {
        let network = &status["networks"][0];
        network["restarts"] == 1 && network["state"] == "running"
    });
    // It outlives its worker, and both clients continue.
    works(&mut client);
    works(&mut nic);
    let [(third, _)] = keepers(&place)[..] else { unreachable!("one keeper") };
    assert_eq!(third, second);
    place.run("remove --device a3");
    let start = Instant::now();
    while !keepers(&place).is_empty() {
        assert!(start.elapsed() < PATIENCE);
    }
    place.stop();
}
