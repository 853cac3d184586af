//! A worker that sends random data, reproducible from a seed. Meanwhile guests of another network transfer data, of
//! which every byte is compared, and a client uses the control socket.
//!
//! Longer run: `SEED=1 SECONDS=600 cargo test -p pvrdmad --lib -- --ignored --nocapture one_supervisor`.

use std::fs::{self, File, OpenOptions};
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::process::Command;

use pvrdma_dev::testing::{Driver, GuestMemory};
use pvrdma_rxe::FailureCause;
use rustix::fs::MemfdFlags;
use rustix::process::{Signal, getpid, kill_process};

use super::*;
use crate::config::SandboxMode;
use crate::sandbox::Profile;
use crate::testing::{Dice, Pair, RemoteFunction, beside_traffic};
use crate::worker;

/// Requests to the supervisor in a run.
const STEPS: usize = 60;
/// Bytes by which the process may grow between some runs and many runs: memory that the allocator keeps.
const ROOM: u64 = 4 << 20;

/// Time limits of `real`. Its worker always replies, but a busy machine may delay the reply.
fn patient() -> Timing {
    Timing { call: PATIENCE, hung: PATIENCE, ..timing() }
}

/// Time limits of `liar`: short, so that a silent worker does not delay the test. The supervisor waits longer for a
/// status, but stops waiting for a worker that has ended.
fn impatient() -> Timing {
    Timing {
        call: Duration::from_millis(500),
        hung: Duration::from_millis(300),
        start: Duration::from_secs(5),
        longest_pause: Duration::from_millis(5),
        ..timing()
    }
}

/// The network `real` with two guests, and the network `liar`. The folder counts the processes of `liar`.
struct Place {
    folder: TempDir,
    supervisor: Supervisor,
}

impl Place {
    fn new(seed: u64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let network = |name: &str| format!("name={name}").parse().unwrap();
        let device = |name: &str, network: &str| Self::device(folder.path(), name, network).parse().unwrap();
        let real = ConfigSpec {
            networks: vec![network("real")],
            devices: vec![device("real1", "real"), device("real2", "real")],
            ..ConfigSpec::default()
        };
        let mut both = real.clone();
        both.networks.push(network("liar"));
        both.devices.push(device("liar1", "liar"));
        let mut arguments = own_test("hostile::any_worker");
        arguments.extend([folder.path().display().to_string(), seed.to_string()]);
        let program = Program {
            path: std::env::current_exe().unwrap(),
            installed: None,
            arguments,
            keeper: own_test("real_keeper"),
        };
        let [real, both] = [real, both].map(|spec| Config::load(None, spec).unwrap());
        let mut supervisor = Supervisor::with_timing(&real, Some(&program), Inherited::default(), patient()).unwrap();
        // A network keeps the time limits with which it was created.
        supervisor.timing = impatient();
        supervisor.reload(&both).unwrap();
        supervisor.timing = patient();
        Self { folder, supervisor }
    }

    fn device(folder: &Path, name: &str, network: &str) -> String {
        let number = u32::from(name.ends_with('2')) + 2 * u32::from(network == "liar");
        let number = if name == "more" { 9 } else { number };
        let socket = folder.join(name);
        format!("name={name},network={network},socket={},mac=52:54:00:00:00:0{number},pin=off", socket.display())
    }

    fn driver(&self, name: &str) -> Driver {
        let file = File::from(rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC).unwrap());
        file.set_len(16 << 20).unwrap();
        let (function, irqs) = RemoteFunction::connect(&self.folder.path().join(name), &file).unwrap();
        Driver::probe(function, &GuestMemory::in_file(file), &irqs).unwrap()
    }

    /// Uses the control socket, and the devices of the other network.
    fn step(&self, dice: &mut Dice) {
        let supervisor = &self.supervisor;
        let device = dice.pick(&["liar1", "liar1", "more", "real1"]);
        let answered = match dice.below(8) {
            0 => supervisor.add(&Self::device(self.folder.path(), "more", "liar"), None),
            1 => supervisor.remove("more"),
            2 => supervisor.show(device, ObjectKind::Pd).map(drop),
            3 => supervisor.limits(device, BTreeMap::new()).map(drop),
            4 => supervisor.share(device, BTreeMap::new()).map(drop),
            5 => supervisor.link("liar1", dice.pick(&[LinkState::Up, LinkState::Down])),
            6 => {
                let (ours, theirs) = UnixStream::pair().unwrap();
                let _ = supervisor.capture("liar1", None, Some(json!(1)), theirs.into());
                drop(ours);
                Ok(())
            }
            _ => {
                supervisor.status(dice.one_in(2));
                Ok(())
            }
        };
        if device == "real1" && answered.is_err() {
            // The reply may be the one to another kind of request.
            supervisor.show(device, ObjectKind::Pd).unwrap();
        }
        let status = supervisor.status(false);
        let honest = &status.networks[0];
        let (state, lost) = (honest.state, &honest.lost_vms);
        assert_eq!((state, honest.restarts, lost.len()), (NetworkState::Running, 0, 0), "{honest:?}");
        let connected = status.devices.iter().filter(|device| device.network.name == "real" && device.client.connected);
        assert_eq!(connected.map(DeviceReport::name).collect::<Vec<_>>(), ["real1", "real2"]);
    }

    /// Returns the process IDs of all workers that `liar` has had.
    fn lives(&self) -> Vec<String> {
        fs::read_to_string(self.folder.path().join("lives")).unwrap().lines().map(str::to_owned).collect()
    }

    /// Makes the worker behave from now on. Checks that each process was counted and that all but the last have ended.
    fn end(self) -> usize {
        File::create(self.folder.path().join("calm")).unwrap();
        let start = Instant::now();
        loop {
            let status = self.supervisor.status(false);
            let (liar, lives) = (&status.networks[1], self.lives());
            let is_served = status.devices.iter().any(|device| device.name() == "liar1");
            let counted = liar.restarts + 1 == lives.len() as u64;
            if liar.state == NetworkState::Running && is_served && counted {
                let (_, over) = lives.split_last().unwrap();
                assert!(over.iter().all(|pid| !is_ours(pid)), "a worker that was given up is still there");
                return lives.len();
            }
            assert!(start.elapsed() < PATIENCE, "{liar:?}, {} lives", lives.len());
        }
    }
}

/// Returns `true` if this process exists, running or as a zombie, and is a child of the test.
fn is_ours(pid: &str) -> bool {
    let status = fs::read_to_string(PathBuf::from("/proc").join(pid).join("status")).unwrap_or_default();
    status.lines().any(|line| line.split_whitespace().eq(["PPid:", &std::process::id().to_string()]))
}

fn descriptors() -> Vec<String> {
    let links = fs::read_dir("/proc/self/fd").unwrap().map(|entry| fs::read_link(entry.unwrap().path()));
    links.filter_map(|link| Some(link.ok()?.display().to_string())).collect()
}

/// Returns the anonymous memory of the process in bytes.
fn anonymous() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// Runs the test with a seed. Returns the number of worker processes of `liar`.
fn run(seed: u64) -> usize {
    let before = descriptors();
    let place = Place::new(seed);
    let mut pair = Pair::new(["real1", "real2"].map(|name| place.driver(name)));
    let mut dice = Dice::new(seed, 0);
    beside_traffic(&mut pair, || (0..STEPS).for_each(|_| place.step(&mut dice)));
    let lives = place.end();
    drop(pair);
    let after = descriptors();
    assert_eq!(after.len(), before.len(), "seed {seed}: {after:?}");
    lives
}

/// Reads a number from the environment.
fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap())
}

/// Runs alone in its process, because it counts the descriptors of the process.
#[test]
fn a_worker_sends_anything() {
    let test = "supervisor::tests::hostile::one_supervisor";
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "--ignored", "--nocapture", test]).env("SEED", "3").env("SECONDS", "2");
    let output = command.output().unwrap();
    let said = [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned());
    assert!(output.status.success(), "{}", said.concat());
    assert!(said[0].contains(" lives"), "nothing ran: {}", said.concat());
}

#[test]
#[ignore = "run by name, with SEED and SECONDS: docs/dev/proof.md"]
fn one_supervisor() {
    let (first, seconds) = (number("SEED").unwrap_or(1), Duration::from_secs(number("SECONDS").unwrap_or(0)));
    let (start, mut lives, mut memory) = (Instant::now(), 0, 0);
    for (count, seed) in (first..).enumerate() {
        lives += run(seed);
        match count {
            0..4 => memory = anonymous(),
            _ => assert!(anonymous() < memory + ROOM, "seed {seed}: {} bytes, {memory} at first", anonymous()),
        }
        if start.elapsed() >= seconds {
            println!("{} seeds from {first}, {lives} lives of a worker", count + 1);
            return;
        }
    }
}

// ---- the workers, in processes of their own

/// Worker process: a genuine worker for the network `real`, a lying one for `liar`.
#[test]
#[ignore = "a process that the other tests of this file start"]
fn any_worker() {
    let arguments: Vec<String> = std::env::args().collect();
    let [.., folder, seed, _mode, _profile, network] = &arguments[..] else { panic!("{arguments:?}") };
    if network == "real" {
        return worker::process::run(SandboxMode::Off, Profile::Rxe).unwrap();
    }
    let folder = PathBuf::from(folder);
    let lives = OpenOptions::new().create(true).append(true).open(folder.join("lives")).unwrap();
    writeln!(&lives, "{}", std::process::id()).unwrap();
    let life = fs::read_to_string(folder.join("lives")).unwrap().lines().count() as u64;
    let stream = UnixStream::from(io::stdin().as_fd().try_clone_to_owned().unwrap());
    let dice = Dice::new(seed.parse::<u64>().unwrap() << 32, life);
    // Without honest replies at the first start the network would not be created at all.
    Liar { stream, upcalls: None, dice, honest_for: if life == 1 { 3 } else { 0 }, calm: folder.join("calm") }.serve();
}

struct Liar {
    stream: UnixStream,
    upcalls: Option<UnixStream>,
    dice: Dice,
    /// Number of requests that it still answers honestly.
    honest_for: usize,
    /// While this file exists, the worker answers honestly.
    calm: PathBuf,
}

impl Liar {
    fn serve(&mut self) {
        let mut reader = FrameReader::with_descriptors();
        while let Ok(Received::Frame(frame)) = reader.receive(&self.stream, 1 << 20) {
            let request: Incoming<'_> = serde_json::from_slice(&frame.body).unwrap();
            let (id, asked): (u64, Request) = (request.id, serde_json::from_str(request.body.get()).unwrap());
            if matches!(asked, Request::Hello { .. }) {
                self.upcalls = frame.fds.into_iter().next().map(UnixStream::from);
            }
            let honest = match &asked {
                Request::Status { .. } => {
                    json!({"ok": {"lost_mappings": 0, "devices": [device_report("liar1", "/s")]}})
                }
                Request::Show { .. } => json!({"objects": []}),
                Request::StartCapture { .. } => json!({"capturing": {}}),
                Request::Limits { .. } => json!({"limits": []}),
                Request::Share { .. } => json!({"share": {}}),
                _ => json!({"done": {}}),
            };
            let is_start = matches!(asked, Request::Hello { .. } | Request::Serve { .. });
            let is_honest = self.honest_for > 0 || self.calm.exists() || self.dice.below(3) != 0;
            self.honest_for = self.honest_for.saturating_sub(1);
            if is_honest { self.say(id, &honest) } else { self.lie(id, &honest, is_start) }
        }
    }

    fn say(&self, id: u64, body: &Value) {
        self.put(&encode(&Outgoing { id, body }).unwrap());
    }

    /// Writes to the supervisor, which may have closed the connection.
    fn put(&self, bytes: &[u8]) {
        let _ = (&self.stream).write_all(bytes);
    }

    fn lie(&mut self, id: u64, honest: &Value, is_start: bool) {
        let frame = encode(&Outgoing { id, body: honest }).unwrap();
        let number = self.dice.number();
        let lie = self.dice.below(20);
        match lie {
            // Silence at the start would make the caller wait for the longer limit, so it is rare there.
            11 | 12 | 15 if is_start && !self.dice.one_in(16) => self.put(&[0xff; 8]),
            0 => {
                let len = self.dice.below(5000);
                let bytes = self.dice.bytes(len);
                self.put(&bytes);
            }
            1 => self.put(&number.to_le_bytes()),
            2 => self.say(id.wrapping_add(number.into()), honest),
            3 => (0..2).for_each(|_| self.say(id, honest)),
            4..7 => {
                let value = self.value(4);
                self.say(id, &value);
            }
            7 => self.say(id, &json!({"error": "x".repeat(1 << (number % 22))})),
            8 => {
                let fds: Vec<BorrowedFd<'_>> = vec![self.stream.as_fd(); 1 + self.dice.below(30)];
                let _ = send(&self.stream, &frame, &fds);
            }
            9 => {
                let mut frame = frame;
                let at = self.dice.below(frame.len());
                frame[at] ^= 1 << self.dice.below(8);
                self.put(&frame);
            }
            10 => frame.chunks(1).for_each(|byte| self.put(byte)),
            11 => {
                // The rest of the frame is never sent.
                let len = self.dice.below(frame.len());
                self.put(&frame[..len]);
            }
            12 => {}
            13 => drop(self.stream.shutdown(std::net::Shutdown::Both)),
            14 => std::process::exit(self.dice.byte().into()),
            15 => {
                let signal = self.dice.pick(&[Signal::KILL, Signal::STOP, Signal::SEGV]);
                kill_process(getpid(), signal).unwrap();
            }
            16 => {
                let len = 1 << self.dice.below(18);
                let _ = io::stderr().write_all(&self.dice.bytes(len));
                self.say(id, honest);
            }
            _ => {
                self.ask_too_much();
                self.say(id, honest);
            }
        }
    }

    /// Sends upcalls.
    fn ask_too_much(&mut self) {
        let Some(stream) = self.upcalls.as_ref().and_then(|stream| stream.try_clone().ok()) else { return };
        for _ in 0..1 << self.dice.below(8) {
            let frame = match self.dice.below(16) {
                0 => self.dice.number().to_le_bytes().to_vec(),
                1 => self.dice.bytes(40),
                _ => encode(&Outgoing { id: self.dice.long(), body: &self.upcall() }).unwrap(),
            };
            let fds = vec![stream.as_fd(); if self.dice.one_in(64) { 2 } else { 0 }];
            if send(&stream, &frame, &fds).is_err() {
                return;
            }
        }
    }

    fn upcall(&mut self) -> HostRequest {
        let device = if self.dice.one_in(8) { self.text() } else { self.dice.pick(&["real1", "liar1", "more"]).into() };
        let address = [10, 0, 0, self.dice.byte()].into();
        match self.dice.below(8) {
            0 => HostRequest::ClientConnected { device },
            1 => HostRequest::ClientGone { device },
            2 => {
                let (qpn, history) = (self.dice.number(), self.text());
                let cause = self.dice.pick(&FailureCause::ALL);
                HostRequest::QueuePairFailed { device, qpn, peer: address, cause, history }
            }
            3 => HostRequest::Connect { device: self.dice.one_in(2).then_some(device), interface: 0 },
            4 => HostRequest::AddAddress { address },
            5 => HostRequest::Keeper { device },
            6 => HostRequest::AddressConflict { device, address, vlan: None, kept: self.dice.one_in(2) },
            _ => HostRequest::RemoveAddress { address },
        }
    }

    /// Returns a text with terminal control sequences.
    fn text(&mut self) -> String {
        let len = 1 << self.dice.below(11);
        (0..len).map(|_| self.dice.pick(&['a', '\u{1b}', '\n', '"', '\\', '\0', '\u{202e}', 'ß'])).collect()
    }

    /// Returns a random value, with members that replies have.
    fn value(&mut self, depth: usize) -> Value {
        match self.dice.below(if depth == 0 { 4 } else { 8 }) {
            0 => Value::Null,
            1 => self.dice.one_in(2).into(),
            2 => self.dice.long().into(),
            3 => self.text().into(),
            4 => (0..self.dice.below(20)).map(|_| self.value(depth - 1)).collect(),
            _ => {
                let names = ["ok", "done", "error", "devices", "limits", "share", "objects", "name", "lost_mappings"];
                let members =
                    (0..self.dice.below(4)).map(|_| (self.dice.pick(&names).to_owned(), self.value(depth - 1)));
                Value::Object(members.collect())
            }
        }
    }
}
