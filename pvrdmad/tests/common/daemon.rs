//! The daemon, as tests start it.
#![allow(
    clippy::allow_attributes,
    dead_code,
    unreachable_pub,
    missing_debug_implementations,
    clippy::unwrap_used,
    clippy::panic,
    reason = "each test uses a part"
)]

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Lines, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{ChildStderr, ChildStdout, Command, Stdio};
use std::time::Instant;

use pvrdma_dev::testing::Driver;
use pvrdmad::testing::Pair;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::process::Daemon;
use super::remote::probe;
use super::traffic::{Guest, mac};
use super::{PATIENCE, Raw};

pub const PROGRAM: &str = env!("CARGO_BIN_EXE_pvrdmad");

/// Memory of a guest in bytes.
const MEMORY: u64 = 16 << 20;

/// A daemon that has not been started yet, with a folder for its sockets and files.
///
/// `FOLDER` in keys, arguments and variables stands for the path of the folder.
pub struct TestDaemon {
    folder: TempDir,
    /// The program, and words before it.
    program: Vec<String>,
    sandbox: &'static str,
    /// Keys of the control socket, each with its comma. `None`: its path is not on the command line.
    control: Option<String>,
    arguments: Vec<String>,
    variables: Vec<(&'static str, String)>,
    removed: Vec<&'static str>,
    /// Number of devices.
    devices: usize,
    log: Log,
    /// Standard input, or `/dev/null`.
    input: Option<OwnedFd>,
    /// Destination of standard output; `None` is a pipe, which shows when the daemon is ready.
    output: Option<fn() -> Stdio>,
    own_program: bool,
}

/// Destination of the daemon's standard error.
enum Log {
    /// A file that [`Running::log`] reads.
    File,
    /// A pipe that [`Running::wait_log`] reads.
    Pipe,
    To(fn() -> Stdio),
}

impl TestDaemon {
    /// A daemon without devices.
    ///
    /// A system call outside the filters kills its processes (`--sandbox strict`), and the test fails. With
    /// `DAEMON_LOG` in the environment, the daemon logs to the standard error of the test.
    pub fn new() -> Self {
        Self {
            folder: tempfile::tempdir().unwrap(),
            program: vec![PROGRAM.to_owned()],
            sandbox: "strict",
            control: Some(String::new()),
            arguments: Vec::new(),
            variables: Vec::new(),
            removed: vec!["RUST_LOG"],
            devices: 0,
            log: if std::env::var_os("DAEMON_LOG").is_some() { Log::To(Stdio::inherit) } else { Log::File },
            input: None,
            output: None,
            own_program: false,
        }
    }

    /// Returns the path of a file in the folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Sets the confinement of processes.
    pub fn sandbox(mut self, mode: &'static str) -> Self {
        self.sandbox = mode;
        self
    }

    /// Sets keys of the control socket, each with its comma.
    pub fn control(mut self, keys: &str) -> Self {
        self.control = Some(keys.to_owned());
        self
    }

    /// Leaves the control socket to the configuration file and the environment.
    pub fn without_control(mut self) -> Self {
        self.control = None;
        self
    }

    /// Sets the units that get a process of their own.
    pub fn isolate(self, mode: &str) -> Self {
        self.arg(&format!("--isolate={mode}"))
    }

    /// Adds a network with these further keys.
    pub fn network(self, name: &str, keys: &str) -> Self {
        self.arg(&format!("--network={}", with_keys(&format!("name={name}"), keys)))
    }

    /// Adds a device, see [`describe`].
    pub fn device(mut self, name: &str, number: u8, keys: &str) -> Self {
        self.devices += 1;
        let device = describe(self.folder.path(), name, number, keys);
        self.arg(&format!("--device={device}"))
    }

    /// Adds an argument.
    pub fn arg(mut self, argument: &str) -> Self {
        self.arguments.push(in_folder(argument, self.folder.path()));
        self
    }

    /// Sets an environment variable.
    pub fn env(mut self, name: &'static str, value: &str) -> Self {
        self.variables.push((name, in_folder(value, self.folder.path())));
        self
    }

    /// Removes an environment variable.
    pub fn without(mut self, name: &'static str) -> Self {
        self.removed.push(name);
        self
    }

    /// Starts the daemon in a network namespace.
    pub fn inside(self, namespace: &str) -> Self {
        self.through(&["ip", "netns", "exec", namespace])
    }

    /// Starts the daemon by another program, which executes the words that follow.
    pub fn through(mut self, words: &[&str]) -> Self {
        self.program.splice(..0, words.iter().map(|&word| word.to_owned()));
        self
    }

    /// Starts a copy of the program, which [`Running::install`] replaces.
    pub fn own_program(mut self) -> Self {
        let program = self.path("pvrdmad");
        put_program(Path::new(PROGRAM), &program);
        self.program = vec![program.display().to_string()];
        self.own_program = true;
        self
    }

    /// Lets [`Running::wait_log`] read the log.
    pub fn read_log(mut self) -> Self {
        self.log = Log::Pipe;
        self
    }

    /// Redirects standard error.
    pub fn stderr(mut self, to: fn() -> Stdio) -> Self {
        self.log = Log::To(to);
        self
    }

    /// Sets standard input.
    pub fn stdin(mut self, input: OwnedFd) -> Self {
        self.input = Some(input);
        self
    }

    /// Redirects standard output, so that [`Self::start`] does not wait until the devices are ready.
    pub fn stdout(mut self, to: fn() -> Stdio) -> Self {
        self.output = Some(to);
        self
    }

    /// Writes the configuration file, and passes it to the daemon. `devices` is the number of its devices.
    pub fn config(mut self, text: &str, devices: usize) -> Self {
        fs::write(self.path("config.toml"), in_folder(text, self.folder.path())).unwrap();
        self.devices += devices;
        self.arg("--config=FOLDER/config.toml")
    }

    /// Sets an environment variable of a daemon that is started again.
    pub fn set(&mut self, name: &'static str, value: &str) {
        self.variables.push((name, value.to_owned()));
    }

    /// Removes a device of a daemon that is started again.
    pub fn remove(&mut self, device: &str) {
        self.arguments.retain(|argument| !argument.starts_with(&format!("--device=name={device},")));
        self.devices -= 1;
    }

    /// Returns the command that starts the daemon.
    pub fn command(&self) -> Command {
        let (program, before) = self.program.split_last().unwrap();
        let mut words = before.iter().chain([program]);
        let mut command = Command::new(words.next().unwrap());
        command.args(words).arg("--sandbox").arg(self.sandbox);
        if let Some(keys) = &self.control {
            command.arg(format!("--control={}{keys}", self.path("control").display()));
        }
        self.removed.iter().for_each(|name| _ = command.env_remove(name));
        command.args(&self.arguments).envs(self.variables.iter().map(|(name, value)| (name, value)));
        command.stdin(self.input.as_ref().map_or_else(Stdio::null, |input| input.try_clone().unwrap().into()));
        command
    }

    /// Starts the daemon, and waits until all of its devices are ready, unless standard output is redirected.
    ///
    /// # Panics
    /// The daemon exits before it is ready; the message has its log.
    #[track_caller]
    pub fn start(self) -> Running {
        let (daemon, log) = self.spawn();
        let mut running = Running { daemon, ready: Vec::new(), output: None, lines: None, log, setup: self };
        running.wait_ready();
        running
    }

    /// Starts the daemon. Returns its log as well, if that is a file.
    fn spawn(&self) -> (Daemon, Option<File>) {
        let mut command = self.command();
        let mut log = None;
        command.stdout(self.output.map_or_else(Stdio::piped, |output| output())).stderr(match self.log {
            Log::File => {
                let file = tempfile::tempfile().unwrap();
                log = Some(file.try_clone().unwrap());
                file.into()
            }
            Log::Pipe => Stdio::piped(),
            Log::To(stderr) => stderr(),
        });
        (Daemon::spawn(&mut command), log)
    }
}

/// Returns the description of a device: its socket is a file of its name, and its MAC address follows from its number.
pub fn describe(folder: &Path, name: &str, number: u8, keys: &str) -> String {
    let mac = mac(number).map(|byte| format!("{byte:02x}")).join(":");
    let pin = if keys.contains("pin=") { "" } else { ",pin=off" };
    let device = format!("name={name},socket={},mac={mac}{pin}", folder.join(name).display());
    in_folder(&with_keys(&device, keys), folder)
}

fn with_keys(first: &str, keys: &str) -> String {
    if keys.is_empty() { first.to_owned() } else { format!("{first},{keys}") }
}

fn in_folder(text: &str, folder: &Path) -> String {
    text.replace("FOLDER", &folder.display().to_string())
}

/// Returns the process of a network, from its part of the status.
fn process(network: &Value) -> Pid {
    Pid::from_raw(i32::try_from(network["pid"].as_i64().unwrap()).unwrap()).unwrap()
}

/// Returns the entry of a list that has this name.
#[track_caller]
pub fn named<'a>(list: &'a Value, name: &str) -> &'a Value {
    list.as_array().unwrap().iter().find(|entry| entry["name"] == name).expect(name)
}

/// A daemon that runs, killed when dropped.
pub struct Running {
    // Declared in the order in which they must be dropped.
    daemon: Daemon,
    /// Lines about devices that are ready.
    pub ready: Vec<String>,
    /// The rest of its standard output.
    pub output: Option<Lines<BufReader<ChildStdout>>>,
    lines: Option<BufReader<ChildStderr>>,
    log: Option<File>,
    /// Its command line and environment.
    pub setup: TestDaemon,
}

impl Running {
    /// Starts a daemon that has ended again.
    #[track_caller]
    pub fn again(&mut self) {
        (self.daemon, self.log) = self.setup.spawn();
        self.wait_ready();
    }

    #[track_caller]
    fn wait_ready(&mut self) {
        self.lines = self.daemon.errors().map(BufReader::new);
        self.output = self.daemon.output().map(|output| BufReader::new(output).lines());
        let Some(output) = &mut self.output else { return };
        let devices = self.setup.devices.max(1);
        self.ready = output.take(devices).map_while(Result::ok).collect();
        if self.ready.iter().filter(|line| line.contains("ready")).count() < devices {
            let said = self.lines.take().map(|lines| std::io::read_to_string(lines).unwrap());
            panic!("{:?} ended at its start: {}", self.setup.command(), said.unwrap_or_else(|| self.log()));
        }
    }

    pub fn folder(&self) -> &Path {
        self.setup.folder.path()
    }

    /// Returns the path of a file in the folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.setup.path(name)
    }

    /// Returns a command of the program for this daemon: the words of a line.
    pub fn command(&self, line: &str) -> Command {
        let mut command = Command::new(PROGRAM);
        command.args(line.split_whitespace()).arg("--control").arg(self.path("control"));
        command
    }

    /// Runs a command of the program. Returns its output, followed by its errors if it fails.
    pub fn try_run(&self, line: &str) -> Result<String, String> {
        let output = self.command(line).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        if output.status.success() {
            Ok(text(output.stdout))
        } else {
            Err(text([output.stdout, output.stderr].concat()))
        }
    }

    /// Runs a command of the program, which must succeed. Returns its output.
    #[track_caller]
    pub fn run(&self, line: &str) -> String {
        self.try_run(line).unwrap()
    }

    #[track_caller]
    pub fn status(&self) -> Value {
        serde_json::from_str(&self.run("status --json")).unwrap()
    }

    /// Returns a network's part of the status.
    #[track_caller]
    pub fn network(&self, name: &str) -> Value {
        named(&self.status()["networks"], name).clone()
    }

    /// Returns a device's part of the status.
    #[track_caller]
    pub fn report(&self, device: &str) -> Value {
        named(&self.status()["devices"], device).clone()
    }

    /// Waits until `is` accepts the status.
    #[track_caller]
    pub fn wait(&self, is: impl Fn(&Value) -> bool) -> Value {
        let start = Instant::now();
        loop {
            let status = self.status();
            if is(&status) {
                return status;
            }
            assert!(start.elapsed() < PATIENCE, "{status:#}");
        }
    }

    /// Waits until `is` accepts a network's part of the status.
    #[track_caller]
    pub fn wait_network(&self, name: &str, is: impl Fn(&Value) -> bool) -> Value {
        let status = self.wait(|status| is(named(&status["networks"], name)));
        named(&status["networks"], name).clone()
    }

    /// Waits until a network is served. Returns its process.
    #[track_caller]
    pub fn worker(&self, network: &str) -> Pid {
        process(&self.wait_network(network, |network| network["state"] == "running"))
    }

    /// Kills the process of a network, and waits for the next one.
    #[track_caller]
    pub fn crash(&self, network: &str) -> Value {
        let before = self.wait_network(network, |network| network["state"] == "running");
        let restarts = before["restarts"].as_u64().unwrap();
        kill_process(process(&before), Signal::KILL).unwrap();
        let next = |network: &Value| network["state"] == "running" && network["restarts"] == restarts + 1;
        self.wait(|status| next(named(&status["networks"], network)))
    }

    /// Adds a device, see [`describe`].
    pub fn add(&self, name: &str, number: u8, keys: &str) -> Result<(), String> {
        self.try_run(&format!("add {}", describe(self.folder(), name, number, keys))).map(drop)
    }

    pub fn remove(&self, device: &str) -> Result<(), String> {
        self.try_run(&format!("remove --device {device}")).map(drop)
    }

    /// Loads the driver of a device.
    pub fn probe(&self, device: &str) -> Driver {
        probe(&self.path(device), MEMORY)
    }

    /// Loads the driver of a device, and binds the address of this number.
    pub fn guest(&self, device: &str, number: u8) -> Guest {
        Guest::new(number, &self.path(device))
    }

    /// Loads the drivers of two devices with the numbers 1 and 2, and connects them.
    pub fn pair(&self, devices: [&str; 2]) -> Pair {
        Pair::with_macs(devices.map(|device| self.probe(device)), [1, 2].map(mac))
    }

    /// Connects to a socket, and negotiates the version.
    pub fn client(&self, socket: &str) -> Raw {
        let mut client = Raw::connect(&self.path(socket));
        client.negotiate();
        client
    }

    /// Connects to the control socket.
    pub fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(self.path("control")).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// Sends a line to the control socket. Returns the line of the reply.
    pub fn say(&self, line: &str) -> Value {
        let mut stream = self.connect();
        stream.write_all(format!("{line}\n").as_bytes()).unwrap();
        let mut answer = String::new();
        BufReader::new(stream).read_line(&mut answer).unwrap();
        serde_json::from_str(&answer).unwrap()
    }

    /// Calls a method of the control socket. Returns the response.
    pub fn call(&self, method: &str, params: &Value) -> Value {
        self.say(&json!({"jsonrpc": "2.0", "id": 7, "method": method, "params": params}).to_string())
    }

    /// Returns the events from now on.
    pub fn events(&self) -> impl Iterator<Item = Value> + use<> {
        let mut stream = self.connect();
        stream.write_all(b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"events\"}\n").unwrap();
        let mut lines =
            BufReader::new(stream).lines().map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap());
        assert_eq!(lines.next().unwrap()["result"], json!({}));
        lines.map(|mut line| line["params"].take())
    }

    /// Returns the log so far.
    pub fn log(&self) -> String {
        let Some(file) = &self.log else { return String::new() };
        let mut bytes = vec![0; usize::try_from(file.metadata().unwrap().len()).unwrap()];
        file.read_exact_at(&mut bytes, 0).unwrap();
        String::from_utf8(bytes).unwrap()
    }

    /// Waits for a line of the log, see [`TestDaemon::read_log`].
    #[track_caller]
    pub fn wait_log(&mut self, part: &str) -> String {
        let lines = self.lines.as_mut().unwrap();
        let mut line = String::new();
        while !line.contains(part) {
            line.clear();
            assert_ne!(lines.read_line(&mut line).unwrap(), 0, "the log ended without '{part}'");
        }
        line
    }

    pub fn id(&self) -> u32 {
        self.daemon.id()
    }

    pub fn signal(&self, signal: Signal) {
        self.daemon.signal(signal);
    }

    /// Waits for the daemon's exit. Returns its status.
    pub fn exit(&mut self) -> Option<i32> {
        self.daemon.wait()
    }

    /// Asks the daemon to end, and waits for its exit.
    #[track_caller]
    pub fn stop(&mut self) {
        self.daemon.stop();
    }

    pub fn kill(&mut self) {
        self.daemon.kill();
    }

    /// Installs a shell script as the program of new processes. `REAL` in it is the path of the real one.
    pub fn install(&self, script: &str) {
        assert!(self.setup.own_program);
        let text = self.path("script");
        fs::write(&text, script.replace("REAL", PROGRAM)).unwrap();
        put_program(&text, &self.path("pvrdmad"));
    }

    /// Replaces the daemon. A busy machine may need several attempts; each refused one leaves everything as it was.
    pub fn replace_daemon(&self) -> String {
        for _ in 0..20 {
            match self.try_run("upgrade --daemon") {
                Ok(said) => return said,
                Err(said) => assert!(said.contains("not ready within"), "{said}"),
            }
        }
        panic!("too slow")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.setup.own_program {
            return;
        }
        // A daemon that replaced the first one is no child of this process.
        let Ok(status) = self.try_run("status --json") else { return };
        let status: Value = serde_json::from_str(&status).unwrap_or_default();
        let pid = status["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
        if let Some(pid) = pid {
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

/// Copies a program in a process of its own. A program that this process had open for writing could not be executed
/// while a child that another test has just forked still holds the descriptor (`ETXTBSY`).
fn put_program(from: &Path, to: &Path) {
    let status = Command::new("install").arg("--mode=755").args([from, to]).status().unwrap();
    assert!(status.success(), "cannot install {}: {status}", to.display());
}
