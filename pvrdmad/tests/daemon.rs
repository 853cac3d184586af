//! The program from start to exit.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::common::daemon::{PROGRAM, Running, TestDaemon, named};
use rustix::fs::MemfdFlags;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use serde_json::Value;
use vfio_bindings::bindings::vfio::VFIO_REGION_INFO_FLAG_MMAP;
use vfio_user::Client;

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

/// Describes a daemon with two devices.
fn described() -> TestDaemon {
    TestDaemon::new().device("vm0", 1, "").device("vm1", 2, "roce=v1,pin=registered,version=19")
}

fn start() -> Running {
    let running = described().start();
    let [a, b] = ["vm0", "vm1"].map(|name| running.path(name).display().to_string());
    let lines = [
        format!("vm0: ready on {a} (mac 52:54:00:00:03:01, roce v2, pin off)"),
        format!("vm1: ready on {b} (mac 52:54:00:00:03:02, roce v1, pin registered)"),
    ];
    assert_eq!(running.ready, lines);
    running
}

/// Returns the sockets of [`described`].
fn sockets(daemon: &TestDaemon) -> [PathBuf; 3] {
    ["vm0", "vm1", "control"].map(|name| daemon.path(name))
}

/// Returns the supervisor and the worker of the network.
fn processes(running: &Running) -> [Process; 2] {
    let status = running.status();
    [&status["pid"], &status["networks"][0]["pid"]].map(|pid| Process(pid.as_u64().unwrap()))
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
    let running = start();
    let _client = Client::new(&running.path("vm0")).unwrap();
    let text = running.run("status --format openmetrics");
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
    let status = running.status();
    for (group, name) in [("counters", "vm0"), ("adapter", "vm1")] {
        for counter in named(&status["devices"], name)[group].as_object().unwrap().keys() {
            let total = if status["counters"][counter]["kind"] == "counter" { "_total" } else { "" };
            assert!(samples.contains_key(&*format!("pvrdma_{counter}{total}{}", device(name))), "{counter}");
        }
    }
    assert_eq!(types["pvrdma_kept_bytes"], "gauge");
}

#[test]
fn starts_serves_and_ends() {
    for signal in [Signal::TERM, Signal::INT] {
        let mut running = start();
        for socket in sockets(&running.setup) {
            assert_eq!(fs::symlink_metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600, "{socket:?}");
        }
        // A client is connected, and has not been told of the shutdown.
        let _client = Client::new(&running.path("vm0")).unwrap();
        running.signal(signal);
        assert_eq!(running.exit(), Some(0));
        assert!(running.output.as_mut().unwrap().next().is_none());
        for socket in sockets(&running.setup) {
            assert!(!socket.exists(), "{socket:?}");
        }
    }
}

#[test]
fn the_device_behind_the_socket() {
    let running = start();
    for (socket, version) in [("vm0", 20), ("vm1", 19)] {
        let mut client = Client::new(&running.path(socket)).unwrap();
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
    let mut running = TestDaemon::new().device("vm0", 1, "nic-socket=FOLDER/nic").start();
    let mut nic = Client::new(&running.path("nic")).unwrap();
    assert_eq!(word(&mut nic, 7, 0), 0x07b0_15ad);
    // QEMU sees by this flag that it must not post writes. The driver frees memory as soon as its RESET write returns.
    assert_eq!(nic.region(7).unwrap().flags & VFIO_REGION_INFO_FLAG_MMAP, VFIO_REGION_INFO_FLAG_MMAP);
    // The function is number 0 of a multi-function slot.
    assert_eq!(word(&mut nic, 7, 0xc) >> 16 & 0x80, 0x80);
    assert_eq!((word(&mut nic, 1, 0x28), word(&mut nic, 1, 0x30)), (0x0000_5452, 0x0103));
    assert_eq!(nic.get_irq_info(2).unwrap().count, 16);
    let report = running.report("vm0");
    assert_eq!((&report["nic"]["client"]["connected"], &report["client"]["connected"]), (&true.into(), &false.into()));
    assert_eq!((&report["nic"]["link"], &report["nic"]["active"]), (&"up".into(), &false.into()));
    assert!(report["network"]["counters"]["passed_out"].is_u64(), "{report}");
    let table = running.run("status");
    assert!(table.contains("network function") && table.contains("52:54:00:00:03:01"), "{table}");
    running.run("link down --device vm0");
    let report = running.report("vm0");
    assert_eq!((&report["nic"]["link"], &report["port"]), (&"down".into(), &"down".into()));
    running.signal(Signal::TERM);
    assert_eq!(running.exit(), Some(0));
    assert!(!running.path("nic").exists());
}

#[test]
fn status_shows_clients_and_their_memory() {
    let running = start();
    let status = running.status();
    assert_eq!((&status["backend"], &status["devices"][0]["name"]), (&Value::from("rxe"), &Value::from("vm0")));
    assert_eq!(status["devices"][1]["roce"], "v1");
    assert_eq!(status["devices"][1]["version"], 19);
    assert_eq!(status["devices"][0]["client"]["connected"], false);

    let mut client = Client::new(&running.path("vm0")).unwrap();
    let ram = fs::File::from(rustix::fs::memfd_create("ram", MemfdFlags::CLOEXEC).unwrap());
    ram.set_len(8 << 20).unwrap();
    client.dma_map(0, 0, 8 << 20, ram.as_raw_fd()).unwrap();
    let device = &running.status()["devices"][0];
    assert_eq!(device["client"]["connected"], true);
    assert_eq!(device["memory"]["mapped_bytes"], 8 << 20);
    assert_eq!(device["memory"]["pin"], "off");
    assert_eq!(device["phase"], "reset");
    assert_eq!(device["objects"]["qps"], 0);
    let table = running.run("status");
    for part in ["vm0", "vm1", "connected", "8 MiB", "client_messages", "backend rxe"] {
        assert!(table.contains(part), "{table}");
    }

    leave(&client);
    // The next client is accepted after the clean-up.
    let _next = Client::new(&running.path("vm0")).unwrap();
    let device = &running.status()["devices"][0];
    assert_eq!(device["memory"]["mapped_bytes"], 0);
    assert_eq!(device["counters"]["client_connections"], 2);
    assert_eq!(device["counters"]["client_messages_refused"], 0);
}

/// A client that is turned away only sees the end of its connection. Status and log name the process that has the
/// device.
#[test]
fn status_names_the_owner_of_a_socket() {
    let running = start();
    let holder = || running.status()["devices"][0]["client"]["process"].clone();
    assert_eq!(holder(), Value::Null);
    let client = Client::new(&running.path("vm0")).unwrap();
    assert_eq!(holder(), std::process::id());
    let whose = format!("vm0: process {} has {}", std::process::id(), running.path("vm0").display());
    let table = || running.run("status");
    assert!(!table().contains(&whose));
    let mut second = UnixStream::connect(running.path("vm0")).unwrap();
    assert_eq!(second.read(&mut [0; 8]).unwrap(), 0);
    assert!(table().contains(&format!("{whose}; turned away since the start: 1\n")), "{}", table());
    leave(&client);
}

#[test]
fn clients_leave_nothing_behind() {
    let running = start();
    let [supervisor, worker] = processes(&running);
    let visit = || {
        let mut client = Client::new(&running.path("vm0")).unwrap();
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
    let running = start();
    let _client = Client::new(&running.path("vm0")).unwrap();
    let processes = processes(&running);
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
    let mut running = start();
    running.kill();
    assert!(running.path("vm0").exists());
    running.again();

    let refused = running.setup.command().output().unwrap();
    assert_eq!(refused.status.code(), Some(1));
    let message = String::from_utf8(refused.stderr).unwrap();
    let who = format!("another process (PID {}) is listening", running.id());
    assert!(message.contains(&who), "{message}");
    // The running daemon was not disturbed.
    running.status();
    running.kill();

    for socket in sockets(&running.setup) {
        let _ = fs::remove_file(socket);
    }
    fs::write(running.path("vm1"), "precious").unwrap();
    let refused = running.setup.command().output().unwrap();
    let message = String::from_utf8(refused.stderr).unwrap();
    assert!(message.contains("not a socket") && message.contains("vm1"), "{message}");
    assert_eq!(fs::read_to_string(running.path("vm1")).unwrap(), "precious");
    // Sockets that had been created are removed again.
    assert!(!running.path("vm0").exists() && !running.path("control").exists());
}

#[test]
fn mistakes_are_explained() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("pvrdmad.toml");
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
    let text = "control = 'FOLDER/control'\n[[device]]\nname = 'f'\nsocket = 'FOLDER/f.sock'\n\
                mac = '52:54:00:00:00:01'\n[device.limits]\nmax_uar = 64\n";
    let running = TestDaemon::new().without_control().config(text, 1).arg("--device=name=f,pin=off").start();
    assert!(running.ready[0].ends_with("pin off)"));
    let client = Client::new(&running.path("f.sock")).unwrap();
    assert_eq!(client.region(2).unwrap().size, 64 * 4096);
    assert_eq!(running.report("f")["memory"]["pin"], "off");
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
    let running = start();
    let control = running.path("control");
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
    running.status();
}

#[test]
fn status_of_something_else() {
    let folder = tempfile::tempdir().unwrap();
    let control = folder.path().join("control");
    let listener = UnixListener::bind(&control).unwrap();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let _ = stream.read(&mut [0; 100]);
        let _ = stream.write_all(b"SSH-2.0-OpenSSH\n");
    });
    let output = Command::new(PROGRAM).args(["status", "--control"]).arg(control).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(message.contains("not understood"), "{message}");
}

/// A command that was stopped while it waits (by a terminal or a container) continues to wait afterwards.
#[test]
fn a_command_that_was_stopped_waits_on() {
    let folder = tempfile::tempdir().unwrap();
    let control = folder.path().join("control");
    let listener = UnixListener::bind(&control).unwrap();
    let mut command = Command::new(PROGRAM);
    command.args(["status", "--control"]).arg(control).stderr(Stdio::piped());
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
    let ibverbs = |device: &str| described().arg(&format!("--backend=ibverbs,device={device},port=1,gid-index=auto"));
    let without_library = |daemon: TestDaemon| {
        // A file that is not a library, found before an installed libibverbs. The process of a network would not see it
        // in its sandbox.
        fs::write(daemon.path("libibverbs.so.1"), "no library").unwrap();
        daemon.isolate("none").env("LD_LIBRARY_PATH", "FOLDER")
    };
    let refused = |daemon: &TestDaemon| {
        let output = daemon.command().output().unwrap();
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{message}");
        message
    };
    let daemon = without_library(ibverbs("mlx5_0"));
    let message = refused(&daemon);
    assert!(message.contains("cannot load libibverbs.so.1") && message.contains("rdma-core"), "{message}");
    assert!(sockets(&daemon).iter().all(|path| !path.exists()));
    // The same with the system's library, if there is one: it has no such device.
    let message = refused(&ibverbs("nosuchdevice"));
    assert!(message.contains("backend ibverbs"), "{message}");
    // The software adapter needs no library.
    without_library(described().arg("--backend=rxe")).start();
}
