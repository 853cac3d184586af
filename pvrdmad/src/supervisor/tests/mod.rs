//! Tests with workers that violate the protocol. The fake worker is this test program again: see [`fake_worker`].

mod hostile;

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::{Duration, Instant};

use pvrdma_ether_link::InterfaceState;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::plan::uplink_watch::UplinkState;
use super::runs::Runs;
use super::*;
use crate::config::{ConfigSpec, SandboxMode};
use crate::protocol::frame::{encode, send};
use crate::protocol::{FrameReader, HostRequest, Incoming, Outgoing, Received};
use crate::socket::Inherited;
use crate::status::NetworkState;

impl Supervisor {
    fn with_timing(config: &Config, program: Option<&Program>, inherited: Inherited, timing: Timing) -> Result<Self> {
        let sources = Sources { inherited, doorbells: DoorbellHost::new(program.cloned()), ..Sources::default() };
        Self::with(config, program, sources, timing)
    }
}

/// Longer than any step takes; a test that waits for this long has failed.
const PATIENCE: Duration = Duration::from_secs(20);

/// Short time limits where a test waits for a worker that never replies.
fn timing() -> Timing {
    Timing {
        // Long, because the end of the worker answers the status request before.
        status: PATIENCE,
        call: Duration::from_secs(2),
        hung: Duration::from_secs(3),
        first_pause: Duration::from_millis(1),
        ..Timing::default()
    }
}

fn fake() -> Program {
    let [arguments, keeper] = ["fake_worker", "real_keeper"].map(own_test);
    Program { path: std::env::current_exe().unwrap(), installed: None, arguments, keeper }
}

/// Returns the arguments that make this test program run one of its parts.
fn own_test(name: &str) -> Vec<String> {
    let test = format!("supervisor::tests::{name}");
    ["--exact", "--ignored", "--nocapture", &test].map(str::to_owned).to_vec()
}

/// A keeper in its own process.
#[test]
#[ignore = "a process that the other tests of this module start"]
fn real_keeper() {
    crate::keeper::run(SandboxMode::Off).unwrap();
}

/// Starts a supervisor of two networks: `true`, whose worker behaves, and one whose worker lies as its name says.
fn start(lie: &str) -> (TempDir, Result<Supervisor>) {
    let folder = tempfile::tempdir().unwrap();
    let device = |name: &str, network: &str, mac: &str| {
        let socket = folder.path().join(name);
        format!("name={name},network={network},socket={},mac={mac},pin=off", socket.display()).parse().unwrap()
    };
    let network = |name: &str| format!("name={name}").parse().unwrap();
    let spec = ConfigSpec {
        networks: vec![network("true"), network(lie)],
        devices: vec![device("vm1", "true", "52:54:00:00:00:01"), device("vm2", lie, "52:54:00:00:00:02")],
        ..ConfigSpec::default()
    };
    let config = Config::load(None, spec).unwrap();
    let supervisor = Supervisor::with_timing(&config, Some(&fake()), Inherited::default(), timing());
    (folder, supervisor)
}

/// Sends requests until the lying worker has been replaced. Returns the reason of its end.
#[track_caller]
fn caught(lie: &str) -> String {
    let (_folder, supervisor) = start(lie);
    let supervisor = supervisor.unwrap();
    let start = Instant::now();
    loop {
        let status = supervisor.status(false);
        let [honest, liar] = &status.networks[..] else { panic!("{status:?}") };
        assert_eq!((honest.state, honest.restarts), (NetworkState::Running, 0), "{lie}");
        assert_eq!(status.devices.first().map(DeviceReport::name), Some("vm1"), "{lie}");
        if liar.restarts > 0 {
            return liar.last_end.clone().unwrap();
        }
        assert!(start.elapsed() < PATIENCE, "{lie}: {liar:?}");
    }
}

#[test]
fn lies_end_only_their_worker() {
    for (lie, word) in [
        ("garbage", "not to be trusted"),
        ("oversize", "at most"),
        ("unasked", "which is not open"),
        ("twice", "not to be trusted"),
        ("wrong-kind", "not one to the request"),
        ("long", "bytes"),
        ("descriptors", "descriptors"),
        ("upcall-garbage", "a request"),
        ("upcall-oversize", "at most"),
        ("hangs-up", "closed its socket"),
        ("late", "has not replied"),
        ("dies", "exit status: 7"),
    ] {
        let end = caught(lie);
        assert!(end.contains(word), "{lie}: {end}");
    }
}

#[test]
fn a_worker_that_does_not_start_is_the_end_of_the_start() {
    for (lie, word) in [("refuses", "no\u{fffd} way"), ("dies-first", "exit status: 7"), ("garbage-first", "trusted")] {
        let (folder, supervisor) = start(lie);
        let error = format!("{:#}", supervisor.unwrap_err());
        assert!(error.contains(word) && error.contains(&format!("network {lie}")), "{error}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "sockets are left");
    }
}

/// However a worker fails to take a device that is added at run time, the device does not exist afterwards and nothing
/// of it is left.
#[test]
fn a_device_that_a_worker_does_not_take() {
    for (lie, word, restarts) in [
        ("refuses-more", "no\u{fffd} way", 0),
        ("dies-of-more", "is being restarted", 2),
        // This worker is asked to remove the device as well, and is soon killed.
        ("mute-of-more", "does not respond", 1),
    ] {
        let (folder, supervisor) = start(lie);
        let supervisor = supervisor.unwrap();
        let files = || std::fs::read_dir(folder.path()).unwrap().count();
        assert_eq!(files(), 2);
        let socket = folder.path().join("more");
        let device = |mac| format!("name=more,network={lie},socket={},mac={mac},pin=off", socket.display());
        let error = supervisor.add(&device("52:54:00:00:00:03"), None).unwrap_err();
        assert!(error.contains(word) && error.contains("device more") && !error.contains('\u{1b}'), "{lie}: {error}");
        assert_eq!(files(), 2, "{lie}: a socket is left");
        let start = Instant::now();
        loop {
            let status = supervisor.status(false);
            let [honest, liar] = &status.networks[..] else { panic!("{status:?}") };
            assert_eq!((honest.state, honest.restarts), (NetworkState::Running, 0), "{lie}");
            assert_eq!(liar.devices, ["vm2"], "{lie}");
            if liar.restarts >= restarts && liar.state == NetworkState::Running {
                assert_eq!(liar.restarts, restarts, "{lie}: {liar:?}");
                break;
            }
            assert!(start.elapsed() < PATIENCE, "{lie}: {liar:?}");
        }
        // Its name and its addresses are free.
        let elsewhere = device("52:54:00:00:00:03").replace(lie, "true");
        supervisor.add(&elsewhere, None).unwrap();
        supervisor.remove("more").unwrap();
        assert_eq!(files(), 2, "{lie}");
    }
}

/// Reports of a worker about devices of other networks, and control characters in its reports, are not passed on.
#[test]
fn a_worker_reports_only_its_own_devices() {
    let (_folder, supervisor) = start("impostor");
    let status = supervisor.unwrap().status(false);
    let names: Vec<_> = status.devices.iter().map(DeviceReport::name).collect();
    assert_eq!(names, ["vm1", "vm2"]);
    assert_eq!(status.devices.last().unwrap().socket, "\u{fffd}[31mred");
}

/// The supervisor stays responsive while it discards excess data.
#[test]
fn a_flood_of_requests_is_taken_in_turns() {
    let (_folder, supervisor) = start("upcall-flood");
    let supervisor = supervisor.unwrap();
    for _ in 0..20 {
        let status = supervisor.status(false);
        assert_eq!(status.networks[0].state, NetworkState::Running);
        assert_eq!((status.networks[1].restarts, &status.networks[1].lost_vms[..]), (0, &[][..]));
    }
}

/// The gate at which the worker of a hand-over waits. `pid`: the process with the tests.
fn gate(pid: u32, network: &str) -> SocketAddr {
    SocketAddr::from_abstract_name(format!("pvrdmad-test-gate-{pid}-{network}")).unwrap()
}

/// Regression: a worker that kept its devices, and one that had been prepared to take them, did not learn of it.
#[test]
fn a_change_of_the_carrier_during_a_hand_over_reaches_the_worker() {
    let (_folder, supervisor) = start("stays");
    let supervisor = supervisor.unwrap();
    let networks = supervisor.all();
    let network = networks.iter().find(|network| network.name() == "stays").unwrap();
    let gate = UnixListener::bind_addr(&gate(std::process::id(), "stays")).unwrap();
    std::thread::scope(|scope| {
        let upgraded = scope.spawn(|| network.hand_over());
        let (waiting, _) = gate.accept().unwrap();
        let down = UplinkState::of(InterfaceState::Down { mtu: 1500 });
        network.plan.set(|settings| settings.interface = Some(down));
        drop(waiting);
        assert!(upgraded.join().unwrap().unwrap_err().contains("it stays"));
    });
    let start = Instant::now();
    while !supervisor.status(false).devices.iter().any(|device| device.socket == "Down") {
        assert!(start.elapsed() < PATIENCE);
    }
}

/// Regression: the worker that served afterwards never learnt of such a change.
#[test]
fn a_change_waits_for_a_hand_over_that_takes_too_long() {
    let (_folder, supervisor) = start("stays-long");
    let supervisor = supervisor.unwrap();
    let networks = supervisor.all();
    let network = networks.iter().find(|network| network.name() == "stays-long").unwrap();
    let gate = UnixListener::bind_addr(&gate(std::process::id(), "stays-long")).unwrap();
    let Runs::Process(process) = &*network.runs else { panic!("no process") };
    assert!(process.hand_over(Instant::now()).unwrap_err().contains("goes on"));
    let (waiting, _) = gate.accept().unwrap();
    let refused = network.turn(Instant::now()).err().unwrap();
    assert_eq!(refused, "network stays-long: a hand-over has not come to its end");
    drop(waiting);
    network.link("vm2", LinkState::Down).unwrap();
    assert_eq!(supervisor.status(false).devices.last().unwrap().socket, "Down");
}

/// Only requests that match the configuration are performed: this network has no links and no addresses.
#[test]
fn requests_beyond_the_configuration_are_refused() {
    let (_folder, supervisor) = start("asks-too-much");
    let status = supervisor.unwrap().status(false);
    assert_eq!(status.networks[1].state, NetworkState::Running, "{:?}", status.networks);
}

// ---- the fake worker, in its own process

/// The other end of a supervisor. The last argument is the network's name, which selects the misbehaviour.
#[test]
#[ignore = "a process that the other tests of this module start"]
fn fake_worker() {
    let lie = std::env::args().next_back().unwrap();
    let stream = UnixStream::from(io::stdin().as_fd().try_clone_to_owned().unwrap());
    let mut reader = FrameReader::with_descriptors();
    let (mut upcalls, mut carrier) = (None, "/s".to_owned());
    while let Received::Frame(frame) = reader.receive(&stream, 1 << 20).unwrap() {
        let request: Incoming<'_> = serde_json::from_slice(&frame.body).unwrap();
        let id = request.id;
        match serde_json::from_str(request.body.get()).unwrap() {
            Request::Hello { .. } => {
                upcalls = frame.fds.into_iter().next().map(UnixStream::from);
                hello(&stream, &lie, id);
            }
            Request::Serve { device, .. } if device.config.name == "more" => match lie.as_str() {
                "refuses-more" => say(&stream, id, &json!({"error": "no\u{1b} way"})),
                "dies-of-more" => std::process::exit(7),
                "mute-of-more" => {}
                _ => say(&stream, id, &json!({"done": {}})),
            },
            Request::Serve { .. } | Request::RemoveDevice { .. } => say(&stream, id, &json!({"done": {}})),
            Request::CheckHandOver { .. } => {
                let mut gate = UnixStream::connect_addr(&gate(std::os::unix::process::parent_id(), &lie)).unwrap();
                let _ = gate.read(&mut [0]);
                say(&stream, id, &json!({"obstacles": ["it stays"]}));
            }
            Request::Carrier { carrier: now } => {
                carrier = format!("{:?}", now.state);
                say(&stream, id, &json!({"done": {}}));
            }
            Request::Link { state, .. } => {
                carrier = format!("{state:?}");
                say(&stream, id, &json!({"done": {}}));
            }
            Request::Status { .. } => status(&stream, upcalls.as_ref().unwrap(), (&lie, &carrier), id),
            other => panic!("{other:?}"),
        }
    }
}

fn say(stream: &UnixStream, id: u64, body: &Value) {
    send(stream, &encode(&Outgoing { id, body }).unwrap(), &[]).unwrap();
}

fn hello(stream: &UnixStream, lie: &str, id: u64) {
    match lie {
        "refuses" => say(stream, id, &json!({"error": "no\u{1b} way"})),
        "dies-first" => std::process::exit(7),
        "garbage-first" => drop((&*stream).write_all(&[0xff; 100])),
        _ => say(stream, id, &json!({"done": {}})),
    }
}

/// Returns a worker's report about a device.
fn device_report(name: &str, socket: &str) -> Value {
    json!({
        "name": name, "socket": socket, "port": "active", "mtu": 1024, "client": {"connected": false},
        "memory": {"pin": "off", "mapped_bytes": 0, "pinned_bytes": 0, "pin_error": null, "files": "any",
            "max_mapped_bytes": 0, "max_locked_bytes": 0, "open_files": 0, "mappings": 0},
        "addresses": {"rule": "own", "listed": [], "guarded": false}, "peers": [[], []],
        "doorbells": {"mode": "trapped"},
        "network": {"name": "n", "mtu": 1500, "counters": {}}, "capture": {"active": 0, "frames": 0, "dropped": 0},
    })
}

fn status(stream: &UnixStream, upcalls: &UnixStream, (lie, socket): (&str, &str), id: u64) {
    let own = if lie == "true" { "vm1" } else { "vm2" };
    let good = json!({"ok": {"lost_mappings": 0, "devices": [device_report(own, socket)]}});
    let send_up = |request: HostRequest| {
        send(upcalls, &encode(&Outgoing { id: 1, body: &request }).unwrap(), &[]).unwrap();
    };
    match lie {
        "garbage" => drop((&*stream).write_all(&[0xff; 100])),
        "oversize" => drop((&*stream).write_all(&(1_u32 << 30).to_le_bytes())),
        "unasked" => say(stream, id + 1000, &good),
        "twice" => (0..2).for_each(|_| say(stream, id, &good)),
        "wrong-kind" => say(stream, id, &json!({"objects": []})),
        "long" => say(stream, id, &json!({"error": "x".repeat(200 << 10)})),
        "descriptors" => {
            let frame = encode(&Outgoing { id, body: &good }).unwrap();
            send(stream, &frame, &[stream.as_fd(); 3]).unwrap();
        }
        "upcall-garbage" => drop((&*upcalls).write_all(b"\x04\0\0\0abcd")),
        "upcall-oversize" => drop((&*upcalls).write_all(&100_000_u32.to_le_bytes())),
        "upcall-flood" => {
            // Fills the socket, again with each status request.
            upcalls.set_nonblocking(true).unwrap();
            let frame = encode(&Outgoing { id: 0, body: &HostRequest::ClientConnected { device: "vm1".to_owned() } });
            let frame = frame.unwrap();
            while send(upcalls, &frame, &[]).is_ok() {}
            say(stream, id, &good);
        }
        "asks-too-much" => {
            let mut replies = FrameReader::with_descriptors();
            for request in [
                HostRequest::Connect { device: None, interface: 0 },
                HostRequest::Connect { device: Some("vm1".to_owned()), interface: 0 },
                HostRequest::Keeper { device: "vm1".to_owned() },
                HostRequest::AddAddress { address: [10, 0, 0, 1].into() },
                HostRequest::RemoveAddress { address: [10, 0, 0, 1].into() },
            ] {
                send_up(request);
                let Received::Frame(reply) = replies.receive(upcalls, 4096).unwrap() else { panic!() };
                assert!(reply.fds.is_empty() && String::from_utf8(reply.body).unwrap().contains("refused"));
            }
            say(stream, id, &good);
        }
        "impostor" => {
            let devices =
                [device_report("vm1", "/false"), device_report("vm2", "\u{1b}[31mred"), device_report("vm2", "/again")];
            say(stream, id, &json!({"ok": {"lost_mappings": 0, "devices": devices}}));
        }
        "hangs-up" => {
            stream.shutdown(std::net::Shutdown::Both).unwrap();
            wait_for_the_end();
        }
        "late" => {}
        "dies" => std::process::exit(7),
        _ => say(stream, id, &good),
    }
}

/// A process that does not exit when it should.
fn wait_for_the_end() {
    let (mine, _others): (UnixStream, UnixStream) = UnixStream::pair().unwrap();
    let mut poll = [rustix::event::PollFd::new(&mine, rustix::event::PollFlags::IN)];
    let _ = rustix::event::poll(&mut poll, None);
    let _: OwnedFd = mine.into();
}
