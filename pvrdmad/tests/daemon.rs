//! The program from start to exit.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::Duration;

use rustix::fs::MemfdFlags;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use serde_json::Value;
use tempfile::TempDir;
use vfio_bindings::bindings::vfio::VFIO_REGION_INFO_FLAG_MMAP;
use vfio_user::Client;

const PROGRAM: &str = env!("CARGO_BIN_EXE_pvrdmad");

/// A running daemon, killed when the test ends.
struct Running {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Running {
    fn start(arguments: &[String]) -> Self {
        // With `strict`, a system call outside the filter kills the process, and the test fails.
        let mut child = Command::new(PROGRAM)
            .args(["--sandbox", "strict"])
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    fn line(&mut self) -> String {
        self.lines.next().unwrap().unwrap()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }
}

/// A process as seen in `/proc`.
struct Process(u64);

impl Process {
    fn proc(&self, what: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{what}", self.0))
    }

    fn descriptors(&self) -> usize {
        fs::read_dir(self.proc("fd")).unwrap().count()
    }

    /// Returns the CPU time of all threads in nanoseconds.
    fn run_time(&self) -> u64 {
        let times = fs::read_dir(self.proc("task")).unwrap().map(|task| {
            let text = fs::read_to_string(task.unwrap().path().join("schedstat")).unwrap();
            text.split(' ').next().unwrap().parse::<u64>().unwrap()
        });
        times.sum()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A folder for sockets, and the arguments for two devices in it.
struct Place(TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn arguments(&self) -> Vec<String> {
        let path = |name| self.path(name).display().to_string();
        let (a, b, control) = (path("a.sock"), path("b.sock"), path("control"));
        vec![
            "--device".to_owned(),
            format!("name=vm0,socket={a},mac=52:54:00:00:00:01,pin=off"),
            "--device".to_owned(),
            format!("name=vm1,socket={b},mac=52:54:00:00:00:02,roce=v1,pin=registered,version=19"),
            "--backend".to_owned(),
            "rxe".to_owned(),
            "--control".to_owned(),
            control,
        ]
    }

    fn start(&self) -> Running {
        let mut running = Running::start(&self.arguments());
        let a = self.path("a.sock").display().to_string();
        let b = self.path("b.sock").display().to_string();
        assert_eq!(running.line(), format!("vm0: ready on {a} (mac 52:54:00:00:00:01, roce v2, pin off)"));
        assert_eq!(running.line(), format!("vm1: ready on {b} (mac 52:54:00:00:00:02, roce v1, pin registered)"));
        running
    }

    fn sockets(&self) -> [PathBuf; 3] {
        ["a.sock", "b.sock", "control"].map(|name| self.path(name))
    }

    fn status(&self) -> Value {
        let output = self.ask(&["--json"]);
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Returns the supervisor and the worker of the network.
    fn processes(&self) -> [Process; 2] {
        let status = self.status();
        [&status["pid"], &status["networks"][0]["pid"]].map(|pid| Process(pid.as_u64().unwrap()))
    }

    fn ask(&self, arguments: &[&str]) -> Output {
        Command::new(PROGRAM).args(["status", "--control"]).arg(self.path("control")).args(arguments).output().unwrap()
    }
}

fn word(client: &mut Client, region: u32, offset: u64) -> u32 {
    let mut word = [0; 4];
    client.region_read(region, offset, &mut word).unwrap();
    u32::from_le_bytes(word)
}

/// Disconnects a client. Closing the descriptor does not suffice: a child that another test is starting has a copy of
/// it until it executes its program, and the device would stay occupied until then.
fn leave(client: &Client) {
    client.shutdown().unwrap();
}

/// The metrics follow the OpenMetrics text format. Types and units fit the names, and the values are those of the JSON
/// status.
#[test]
fn metrics_are_openmetrics() {
    let place = Place::new();
    let _running = place.start();
    let _client = Client::new(&place.path("a.sock")).unwrap();
    let output = place.ask(&["--format", "openmetrics"]);
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let mut lines: Vec<_> = text.strip_suffix("# EOF\n").unwrap().lines().collect();
    let (mut types, mut samples) = (BTreeMap::new(), BTreeMap::new());
    let mut family = "";
    for line in lines.drain(..) {
        let words: Vec<_> = line.splitn(4, ' ').collect();
        match *words {
            ["#", "HELP", name, help] => {
                assert!(name.starts_with("pvrdma_") && help.ends_with('.'), "{line}");
                family = name;
            }
            ["#", "TYPE", name, kind] => {
                assert_eq!((name, types.insert(name, kind)), (family, None), "{line}");
                assert!(["counter", "gauge"].contains(&kind), "{line}");
            }
            ["#", "UNIT", name, unit] => {
                assert!(name == family && name.ends_with(&format!("_{unit}")), "{line}");
            }
            _ => {
                let (sample, value) = line.rsplit_once(' ').unwrap();
                let (name, labels) = sample.split_once('{').unwrap_or((sample, "}"));
                assert_eq!(
                    name,
                    if types[family] == "counter" { format!("{family}_total") } else { family.to_owned() }
                );
                assert!(labels.ends_with('}'), "{line}");
                assert!(samples.insert(sample, value.parse::<f64>().unwrap()).is_none(), "{line}");
            }
        }
    }
    let device = |name| format!("{{network=\"default\",device=\"{name}\",function=\"rdma\"}}");
    assert_eq!(samples[&*format!("pvrdma_client_connected{}", device("vm0"))], 1.0);
    assert_eq!(samples[&*format!("pvrdma_client_connected{}", device("vm1"))], 0.0);
    assert_eq!(samples["pvrdma_network_running{network=\"default\"}"], 1.0);
    // Each counter of the JSON status appears, with its description.
    let status = place.status();
    for (group, name) in [("counters", "vm0"), ("adapter", "vm1")] {
        let found = status["devices"].as_array().unwrap().iter().find(|device| device["name"] == name).unwrap();
        for counter in found[group].as_object().unwrap().keys() {
            let total = if status["counters"][counter]["kind"] == "counter" { "_total" } else { "" };
            assert!(samples.contains_key(&*format!("pvrdma_{counter}{total}{}", device(name))), "{counter}");
        }
    }
    assert_eq!(types["pvrdma_kept_bytes"], "gauge");
}

#[test]
fn starts_serves_and_ends() {
    for signal in [Signal::TERM, Signal::INT] {
        let place = Place::new();
        let mut running = place.start();
        for socket in place.sockets() {
            assert_eq!(fs::symlink_metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600, "{socket:?}");
        }
        // A client is connected, and has not been told of the shutdown.
        let _client = Client::new(&place.path("a.sock")).unwrap();
        running.signal(signal);
        assert!(running.child.wait().unwrap().success());
        assert!(running.lines.next().is_none());
        for socket in place.sockets() {
            assert!(!socket.exists(), "{socket:?}");
        }
    }
}

#[test]
fn the_device_behind_the_socket() {
    let place = Place::new();
    let _running = place.start();
    for (socket, version) in [("a.sock", 20), ("b.sock", 19)] {
        let mut client = Client::new(&place.path(socket)).unwrap();
        assert_eq!(word(&mut client, 7, 0), 0x0820_15ad);
        assert_eq!(word(&mut client, 1, 0), version);
        // The capability list contains MSI-X, with its table in BAR 0.
        let mut next = word(&mut client, 7, 0x34) & 0xff;
        let mut capabilities = 0;
        while word(&mut client, 7, u64::from(next)) & 0xff != 0x11 {
            next = word(&mut client, 7, u64::from(next)) >> 8 & 0xff;
            capabilities += 1;
            assert!(next != 0 && capabilities < 48);
        }
        assert_eq!(word(&mut client, 7, u64::from(next) + 4) & 7, 0);
        assert_eq!(client.get_irq_info(2).unwrap().count, 3);
        // Writing all ones gives the sizes of the regions, for the six BARs and the absent ROM.
        let mut bar = 0x10;
        while bar < 0x28 {
            let index = u32::try_from((bar - 0x10) / 4).unwrap();
            client.region_write(7, bar, &[0xff; 4]).unwrap();
            let low = word(&mut client, 7, bar);
            let mut size = u64::from((low & !0xf).wrapping_neg());
            if low & 6 == 4 {
                client.region_write(7, bar + 4, &[0xff; 4]).unwrap();
                let high = word(&mut client, 7, bar + 4);
                size = (u64::from(high) << 32 | u64::from(low & !0xf)).wrapping_neg();
                bar += 4;
            }
            assert_eq!(client.region(index).unwrap().size, size, "BAR {index}");
            bar += 4;
        }
        client.region_write(7, 0x30, &[0xff; 4]).unwrap();
        assert_eq!(word(&mut client, 7, 0x30), 0);
    }
}

#[test]
fn the_network_function_beside_the_device() {
    let place = Place::new();
    let path = |name: &str| place.path(name).display().to_string();
    let device = format!("name=vm0,socket={},nic-socket={},mac=52:54:00:00:00:01", path("a.sock"), path("nic.sock"));
    let mut running = Running::start(&["--device".to_owned(), device, "--control".to_owned(), path("control")]);
    running.line();
    let mut nic = Client::new(&place.path("nic.sock")).unwrap();
    assert_eq!(word(&mut nic, 7, 0), 0x07b0_15ad);
    // QEMU sees by this flag that it must not post writes. The driver frees memory as soon as its RESET write returns.
    assert_eq!(nic.region(7).unwrap().flags & VFIO_REGION_INFO_FLAG_MMAP, VFIO_REGION_INFO_FLAG_MMAP);
    // The function is number 0 of a multi-function slot.
    assert_eq!(word(&mut nic, 7, 0xc) >> 16 & 0x80, 0x80);
    assert_eq!((word(&mut nic, 1, 0x28), word(&mut nic, 1, 0x30)), (0x0000_5452, 0x0100));
    assert_eq!(nic.get_irq_info(2).unwrap().count, 16);
    let report = &place.status()["devices"][0];
    assert_eq!((&report["nic"]["client"]["connected"], &report["client"]["connected"]), (&true.into(), &false.into()));
    assert_eq!((&report["nic"]["link"], &report["nic"]["active"]), (&"up".into(), &false.into()));
    assert!(report["network"]["counters"]["passed_out"].is_u64(), "{report}");
    let table = String::from_utf8(place.ask(&[]).stdout).unwrap();
    assert!(table.contains("network function") && table.contains("52:54:00:00:00:01"), "{table}");
    let control = place.path("control");
    let link = Command::new(PROGRAM).args(["link", "down", "--device", "vm0", "--control"]).arg(control).output();
    assert!(link.unwrap().status.success());
    let report = &place.status()["devices"][0];
    assert_eq!((&report["nic"]["link"], &report["port"]), (&"down".into(), &"down".into()));
    running.signal(Signal::TERM);
    assert!(running.child.wait().unwrap().success());
    assert!(!place.path("nic.sock").exists());
}

#[test]
fn status_shows_clients_and_their_memory() {
    let place = Place::new();
    let _running = place.start();
    let status = place.status();
    assert_eq!((&status["backend"], &status["devices"][0]["name"]), (&Value::from("rxe"), &Value::from("vm0")));
    assert_eq!(status["devices"][1]["roce"], "v1");
    assert_eq!(status["devices"][1]["version"], 19);
    assert_eq!(status["devices"][0]["client"]["connected"], false);

    let mut client = Client::new(&place.path("a.sock")).unwrap();
    let ram = fs::File::from(rustix::fs::memfd_create("ram", MemfdFlags::CLOEXEC).unwrap());
    ram.set_len(8 << 20).unwrap();
    client.dma_map(0, 0, 8 << 20, ram.as_raw_fd()).unwrap();
    let device = &place.status()["devices"][0];
    assert_eq!(device["client"]["connected"], true);
    assert_eq!(device["memory"]["mapped_bytes"], 8 << 20);
    assert_eq!(device["memory"]["pin"], "off");
    assert_eq!(device["phase"], "reset");
    assert_eq!(device["objects"]["qps"], 0);
    let table = String::from_utf8(place.ask(&[]).stdout).unwrap();
    for part in ["vm0", "vm1", "connected", "8 MiB", "client_messages", "backend rxe"] {
        assert!(table.contains(part), "{table}");
    }

    leave(&client);
    // The next client is accepted after the clean-up.
    let _next = Client::new(&place.path("a.sock")).unwrap();
    let device = &place.status()["devices"][0];
    assert_eq!(device["memory"]["mapped_bytes"], 0);
    assert_eq!(device["counters"]["client_connections"], 2);
    assert_eq!(device["counters"]["client_messages_refused"], 0);
}

/// A client that is turned away only sees the end of its connection. Status and log name the process that has the
/// device.
#[test]
fn status_names_the_owner_of_a_socket() {
    let place = Place::new();
    let _running = place.start();
    let holder = || place.status()["devices"][0]["client"]["process"].clone();
    assert_eq!(holder(), Value::Null);
    let client = Client::new(&place.path("a.sock")).unwrap();
    assert_eq!(holder(), std::process::id());
    let whose = format!("vm0: process {} has {}", std::process::id(), place.path("a.sock").display());
    let table = || String::from_utf8(place.ask(&[]).stdout).unwrap();
    assert!(!table().contains(&whose));
    let mut second = UnixStream::connect(place.path("a.sock")).unwrap();
    assert_eq!(second.read(&mut [0; 8]).unwrap(), 0);
    assert!(table().contains(&format!("{whose}; turned away since the start: 1\n")), "{}", table());
    leave(&client);
}

#[test]
fn clients_leave_nothing_behind() {
    let place = Place::new();
    let _running = place.start();
    let [supervisor, worker] = place.processes();
    let visit = || {
        let mut client = Client::new(&place.path("a.sock")).unwrap();
        let ram = fs::File::from(rustix::fs::memfd_create("ram", MemfdFlags::CLOEXEC).unwrap());
        ram.set_len(1 << 20).unwrap();
        client.dma_map(0, 0, 1 << 20, ram.as_raw_fd()).unwrap();
        client.region_write(1, 0, &[0; 4]).unwrap();
        client
    };
    let client = visit();
    let descriptors = worker.descriptors();
    leave(&client);
    let mut last = visit();
    for _ in 0..20 {
        leave(&last);
        last = visit();
    }
    assert_eq!(worker.descriptors(), descriptors);
    // Only the worker maps guest memory.
    for (process, count) in [(worker, 1), (supervisor, 0)] {
        let maps = fs::read_to_string(process.proc("maps")).unwrap();
        assert_eq!(maps.lines().filter(|line| line.contains("/memfd:ram")).count(), count);
    }
}

#[test]
fn an_idle_daemon_does_not_run() {
    let place = Place::new();
    let _running = place.start();
    let _client = Client::new(&place.path("a.sock")).unwrap();
    let processes = place.processes();
    let run_time = || processes.iter().map(Process::run_time).sum::<u64>();
    // The control thread may not be asleep yet, and the supervisor checks its workers every few seconds. So one quiet
    // window out of several is required; a daemon that polls or spins has none.
    let quiet = (0..20).any(|_| {
        let before = run_time();
        // The test waits for time itself, because idleness causes no event.
        std::thread::sleep(Duration::from_millis(400));
        run_time() == before
    });
    assert!(quiet);
}

#[test]
fn sockets_of_the_dead_the_living_and_others() {
    let place = Place::new();
    let mut killed = place.start();
    killed.child.kill().unwrap();
    killed.child.wait().unwrap();
    assert!(place.path("a.sock").exists());
    let running = place.start();

    let refused = Command::new(PROGRAM).args(place.arguments()).output().unwrap();
    assert_eq!(refused.status.code(), Some(1));
    let message = String::from_utf8(refused.stderr).unwrap();
    let who = format!("another process (PID {}) is listening", running.child.id());
    assert!(message.contains(&who), "{message}");
    // The running daemon was not disturbed.
    place.status();
    drop(running);

    for socket in place.sockets() {
        let _ = fs::remove_file(socket);
    }
    fs::write(place.path("b.sock"), "precious").unwrap();
    let refused = Command::new(PROGRAM).args(place.arguments()).output().unwrap();
    let message = String::from_utf8(refused.stderr).unwrap();
    assert!(message.contains("not a socket") && message.contains("vm1"), "{message}");
    assert_eq!(fs::read_to_string(place.path("b.sock")).unwrap(), "precious");
    // Sockets that had been created are removed again.
    assert!(!place.path("a.sock").exists() && !place.path("control").exists());
}

#[test]
fn mistakes_are_explained() {
    let place = Place::new();
    let file = place.path("pvrdmad.toml");
    fs::write(&file, "[[device]]\nname = \"a\"\nsocket = \"/nonexistent/a\"\nmac = \"52:54:00:00:00:01\"\nspeed = 9\n")
        .unwrap();
    let file = file.display().to_string();
    for (arguments, part) in [
        (vec!["--device", "name=a,speed=9"], "unknown key 'speed'"),
        (vec!["--config", &file], "speed"),
        (vec!["--device", "name=a,socket=/nonexistent/a,mac=52:54:00:00:00:01"], "/nonexistent/a"),
        (vec![], "no device"),
        (vec!["status", "--control", "/nonexistent/c"], "no daemon answers"),
    ] {
        let output = Command::new(PROGRAM).args(&arguments).output().unwrap();
        assert!(!output.status.success());
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(message.contains(part), "{arguments:?}: {message}");
    }
}

#[test]
fn a_configuration_file() {
    let place = Place::new();
    let file = place.path("pvrdmad.toml");
    let socket = place.path("f.sock");
    let control = place.path("control");
    fs::write(
        &file,
        format!(
            "control = {control:?}\n[[device]]\nname = \"f\"\nsocket = {socket:?}\nmac = \"52:54:00:00:00:01\"\n\
             [device.limits]\nmax_uar = 64\n"
        ),
    )
    .unwrap();
    let mut running = Running::start(&[
        "--config".to_owned(),
        file.display().to_string(),
        "--device".to_owned(),
        "name=f,pin=off".to_owned(),
    ]);
    assert!(running.line().ends_with("pin off)"));
    let client = Client::new(&socket).unwrap();
    assert_eq!(client.region(2).unwrap().size, 64 * 4096);
    assert_eq!(place.status()["devices"][0]["memory"]["pin"], "off");
}

fn control_says(control: &Path, question: &[u8]) -> String {
    let stream = UnixStream::connect(control).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let _ = (&stream).write_all(question);
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let mut answer = String::new();
    let _ = (&stream).read_to_string(&mut answer);
    answer
}

#[test]
fn the_control_socket_survives_invalid_calls() {
    let place = Place::new();
    let _running = place.start();
    let control = place.path("control");
    let status = b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"status\"}\n";
    let two = control_says(&control, &status.repeat(2));
    assert_eq!(two.lines().filter(|line| line.starts_with("{\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{")).count(), 2);
    for invalid in [
        &b"\n"[..],
        b"{}\n",
        b"[1,2\n",
        b"{\"request\":\"status\"}\n",
        b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"stop\"}\n",
        b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"status\",\"params\":{\"x\":1}}\n",
        b"\xff\xfe\n",
    ] {
        let answer = control_says(&control, invalid);
        assert!(answer.contains("\"error\":{"), "{answer}");
    }
    let notification = b"{\"jsonrpc\":\"2.0\",\"method\":\"status\"}\n";
    assert_eq!(control_says(&control, notification), "");
    assert_eq!(control_says(&control, b""), "");
    assert_eq!(control_says(&control, b"{\"jsonrpc\""), "");
    let answer = control_says(&control, &[b'x'; 100_000]);
    assert!(answer.is_empty() || answer.contains("at most"), "{answer}");
    // A connection that sends nothing delays other requests but does not block them.
    let _silent = UnixStream::connect(&control).unwrap();
    place.status();
}

#[test]
fn status_of_something_else() {
    let place = Place::new();
    let listener = UnixListener::bind(place.path("control")).unwrap();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let _ = stream.read(&mut [0; 100]);
        let _ = stream.write_all(b"SSH-2.0-OpenSSH\n");
    });
    let output = place.ask(&[]);
    assert_eq!(output.status.code(), Some(1));
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(message.contains("not understood"), "{message}");
}

/// A command that was stopped while it waits (by a terminal or a container) continues to wait afterwards.
#[test]
fn a_command_that_was_stopped_waits_on() {
    let place = Place::new();
    let listener = UnixListener::bind(place.path("control")).unwrap();
    let mut command = Command::new(PROGRAM);
    command.args(["status", "--control"]).arg(place.path("control")).stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    let (mut stream, _) = listener.accept().unwrap();
    BufReader::new(&stream).read_line(&mut String::new()).unwrap();
    // The request was sent, and the process sleeps until the reply arrives.
    let stat = Process(child.id().into()).proc("stat");
    while !fs::read_to_string(&stat).unwrap().contains(") S ") {
        std::thread::yield_now();
    }
    let pid = Pid::from_child(&child);
    kill_process(pid, Signal::STOP).unwrap();
    waitpid(Some(pid), WaitOptions::UNTRACED).unwrap();
    kill_process(pid, Signal::CONT).unwrap();
    stream.write_all(b"no-such-device\n").unwrap();
    let message = String::from_utf8(child.wait_with_output().unwrap().stderr).unwrap();
    assert!(message.contains("not understood"), "{message}");
}

/// The host's adapter is opened only if a device is configured for it. The error names the missing part.
#[test]
fn the_hosts_adapter_is_not_there() {
    let place = Place::new();
    // A file that is not a library, found before an installed libibverbs.
    fs::write(place.path("libibverbs.so.1"), "no library").unwrap();
    let start = |arguments: &[String]| {
        let mut command = Command::new(PROGRAM);
        command.args(arguments).env("LD_LIBRARY_PATH", place.0.path()).stdin(Stdio::null());
        command
    };
    let ibverbs = |device: &str| {
        let mut arguments = place.arguments();
        let at = arguments.iter().position(|word| word == "rxe").unwrap();
        arguments[at] = format!("ibverbs,device={device},port=1,gid-index=auto");
        arguments
    };
    let output = start(&ibverbs("mlx5_0")).output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.contains("cannot load libibverbs.so.1") && message.contains("rdma-core"), "{message}");
    assert!(place.sockets().iter().all(|path| !path.exists()));
    // The same with the system's library, if there is one: it has no such device.
    let output = Command::new(PROGRAM).args(ibverbs("nosuchdevice")).stdin(Stdio::null()).output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.contains("backend ibverbs"), "{message}");
    // The software adapter needs no library.
    let mut child = start(&place.arguments()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.next().unwrap().unwrap().starts_with("vm0: ready"));
    child.kill().unwrap();
    child.wait().unwrap();
}
