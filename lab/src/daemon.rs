//! The device daemon `pvrdmad`, started for the guests.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader, PipeReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::process::BoundChild;

/// One device of the daemon.
#[derive(Clone, Debug)]
pub struct DaemonDevice {
    /// Its name.
    pub name: String,
    /// Socket that QEMU connects to.
    pub socket: PathBuf,
    /// Ethernet address, the same as that of the machine's vmxnet3.
    pub mac: String,
    /// More options, each with its comma: `,pin=off`.
    pub options: String,
}

impl fmt::Display for DaemonDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, socket, mac, options } = self;
        write!(f, "name={name},socket={},mac={mac}{options}", socket.display())
    }
}

/// Start parameters of a daemon, apart from its devices.
#[derive(Clone, Copy, Debug, Default)]
pub struct Setup<'a> {
    /// Network namespace in which it runs.
    pub namespace: Option<&'a str>,
    /// Backend that moves the data.
    pub backend: Option<&'a str>,
    /// Networks, each with its keys.
    pub networks: &'a [String],
    /// Address at which metrics are served.
    pub metrics: Option<&'a str>,
    /// A different build of the daemon from the default one.
    pub program: Option<&'a Path>,
}

/// A running daemon; dropping it kills it.
#[derive(Debug)]
pub struct Daemon {
    process: BoundChild,
    program: PathBuf,
    /// Command line with which it was started, and its number of devices then.
    line: Vec<OsString>,
    devices: usize,
    control: PathBuf,
    log: PathBuf,
    /// The supervisor, and the initial process of each network.
    pids: BTreeSet<u64>,
}

/// Starts a daemon by its command line. Returns the process and its standard output; errors go to the log.
fn spawn(line: &[OsString], log: &Path) -> Result<(BoundChild, PipeReader)> {
    let (program, arguments) = line.split_first().context("an empty command line")?;
    let errors = File::options()
        .create(true)
        .append(true)
        .open(log)
        .with_context(|| format!("cannot create {}", log.display()))?;
    let (reader, writer) = std::io::pipe().context("cannot create a pipe")?;
    let process = BoundChild::spawn("pvrdmad", &program.to_string_lossy(), |command| {
        command.args(arguments).stdin(Stdio::null()).stdout(writer).stderr(errors);
        if std::env::var_os("RUST_LOG").is_none() {
            command.env("RUST_LOG", "info");
        }
    })?;
    Ok((process, reader))
}

impl Daemon {
    /// Starts the daemon with these devices and waits until all are ready.
    pub fn start(directory: &Path, devices: &[DaemonDevice]) -> Result<Self> {
        Self::launch(&Setup::default(), directory, devices)
    }

    /// Same as [`Self::start`], in a network namespace if one is named.
    pub fn start_in(namespace: Option<&str>, directory: &Path, devices: &[DaemonDevice]) -> Result<Self> {
        Self::launch(&Setup { namespace, ..Setup::default() }, directory, devices)
    }

    /// Same as [`Self::start`], on another backend.
    pub fn start_on(backend: &str, directory: &Path, devices: &[DaemonDevice]) -> Result<Self> {
        Self::launch(&Setup { backend: Some(backend), ..Setup::default() }, directory, devices)
    }

    /// Starts the daemon with all parameters given explicitly.
    pub fn launch(setup: &Setup<'_>, directory: &Path, devices: &[DaemonDevice]) -> Result<Self> {
        let Setup { namespace, backend, networks, metrics, program: named } = *setup;
        let program = match named {
            Some(path) => path.to_owned(),
            None => program()?,
        };
        let control = directory.join("control");
        let log = directory.join("pvrdmad.log");
        // `ip` execs the daemon, so the process id is the daemon's.
        let mut line: Vec<OsString> = match namespace {
            Some(namespace) => ["ip", "netns", "exec", namespace].map(OsString::from).to_vec(),
            None => Vec::new(),
        };
        line.push(program.clone().into());
        let mut add = |option: &str, value: &OsStr| line.extend([option.into(), value.to_owned()]);
        networks.iter().for_each(|network| add("--network", network.as_ref()));
        devices.iter().for_each(|device| add("--device", device.to_string().as_ref()));
        backend.into_iter().for_each(|backend| add("--backend", backend.as_ref()));
        metrics.into_iter().for_each(|metrics| add("--metrics", metrics.as_ref()));
        // A system call that the filters do not allow ends a worker, so tests detect a filter that is too strict.
        add("--sandbox", "strict".as_ref());
        add("--control", control.as_ref());
        let (process, output) = spawn(&line, &log)?;
        let pids = BTreeSet::from([process.id().into()]);
        let mut daemon = Self { process, program, line, devices: devices.len(), control, log, pids };
        daemon.wait_ready(output)?;
        Ok(daemon)
    }

    /// Replaces the whole daemon, under running guests, by a new one of the same program.
    pub fn take_over(&mut self) -> Result<()> {
        self.line.push("--take-over".into());
        let spawned = spawn(&self.line, &self.log);
        self.line.pop();
        let (process, output) = spawned?;
        self.pids.insert(process.id().into());
        let mut before = std::mem::replace(&mut self.process, process);
        self.wait_ready(output)?;
        let ended = before.wait(Duration::from_secs(10)).is_some_and(|status| status.success());
        ensure!(ended, "the daemon that was replaced has not ended\n{}", self.log_tail());
        Ok(())
    }

    /// Waits until all devices are ready, which the new process says on its output.
    fn wait_ready(&mut self, reader: PipeReader) -> Result<()> {
        let count = self.devices;
        let (sender, lines) = channel();
        let log = self.log.clone();
        // The thread reads for as long as the daemon lives, so the daemon never blocks on its output.
        std::thread::spawn(move || {
            let mut copy = File::options().append(true).open(log).ok();
            for line in BufReader::new(reader).lines().map_while(Result::ok) {
                if let Some(copy) = &mut copy {
                    use std::io::Write;
                    let _ = writeln!(copy, "{line}");
                }
                // The receiver is gone once the devices are ready.
                let _ = sender.send(line);
            }
        });
        let deadline = Instant::now() + Duration::from_secs(20);
        let mut ready = 0;
        while ready < count {
            match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    log::debug!("pvrdmad: {line}");
                    ready += 1;
                }
                Err(RecvTimeoutError::Timeout) => {
                    bail!("pvrdmad: {ready} of {count} devices ready after 20 s\n{}", self.log_tail());
                }
                Err(RecvTimeoutError::Disconnected) => {
                    let status = self.process.terminate(Duration::from_secs(2));
                    bail!("pvrdmad ended at its start ({status:?})\n{}", self.log_tail());
                }
            }
        }
        let status = self.status()?;
        let networks = status["networks"].as_array().into_iter().flatten();
        self.pids.extend(networks.filter_map(|network| network["pid"].as_u64()));
        Ok(())
    }

    /// Returns the output of `pvrdmad status --json`.
    pub fn status(&self) -> Result<serde_json::Value> {
        serde_json::from_slice(&self.ask(&["status", "--json"])?).context("pvrdmad status: not JSON")
    }

    /// Returns the output of `pvrdmad show OBJECT --json` for a device.
    pub fn show(&self, device: &str, object: &str) -> Result<serde_json::Value> {
        let said = self.ask(&["show", object, "--device", device, "--json"])?;
        serde_json::from_slice(&said).context("pvrdmad show: not JSON")
    }

    /// Adds a device.
    pub fn add(&self, device: &DaemonDevice) -> Result<()> {
        self.ask(&["add", &device.to_string()]).map(drop)
    }

    /// Sets the faults of devices that a file lists.
    ///
    /// # Errors
    /// The file is invalid, or the daemon refuses.
    pub fn set_faults(&self, file: &Path) -> Result<()> {
        self.ask(&["fault", "--file", &file.to_string_lossy()]).map(drop)
    }

    /// Ends the faults of a device.
    ///
    /// # Errors
    /// The daemon refuses.
    pub fn end_faults(&self, device: &str) -> Result<()> {
        self.ask(&["fault", "--device", device, "off"]).map(drop)
    }

    /// Takes the link of a device up or down.
    pub fn set_link(&self, device: &str, up: bool) -> Result<()> {
        self.ask(&["link", if up { "up" } else { "down" }, "--device", device]).map(drop)
    }

    /// Replaces the processes of all networks, under running guests. Returns the longest time in milliseconds during
    /// which guests were not served.
    pub fn upgrade(&self) -> Result<u64> {
        let said: serde_json::Value =
            serde_json::from_slice(&self.ask(&["upgrade", "--json"])?).context("pvrdmad upgrade: not JSON")?;
        let networks = said.as_array().into_iter().flatten();
        networks.filter_map(|network| network["millis"].as_u64()).max().context("no network was upgraded")
    }

    /// Runs a command of `pvrdmad` and returns its output.
    fn ask(&self, arguments: &[&str]) -> Result<Vec<u8>> {
        let words = arguments.join(" ");
        let output = Command::new(&self.program)
            .args(arguments)
            .arg("--control")
            .arg(&self.control)
            .output()
            .with_context(|| format!("cannot run pvrdmad {words}"))?;
        if !output.status.success() {
            bail!("pvrdmad {words}: {}: {}", output.status, String::from_utf8_lossy(&output.stderr));
        }
        Ok(output.stdout)
    }

    /// Captures the traffic of a device to a file until stopped.
    pub fn capture(&self, device: &str, path: &Path) -> Result<Capture> {
        let (mut reader, writer) = std::io::pipe().context("cannot create a pipe")?;
        let mut process = BoundChild::spawn("pvrdmad capture", &self.program.to_string_lossy(), |command| {
            command.args(["capture", "--device", device, "--control"]).arg(&self.control).arg("-w").arg(path);
            command.stdin(Stdio::null()).stderr(writer);
        })?;
        // The capture has begun when the file has its header.
        let deadline = Instant::now() + Duration::from_secs(10);
        while std::fs::metadata(path).map_or(0, |file| file.len()) == 0 {
            if process.exited().is_some() || Instant::now() > deadline {
                process.kill();
                let mut said = String::new();
                std::io::Read::read_to_string(&mut reader, &mut said)?;
                bail!("pvrdmad capture does not begin: {said}");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(Capture { process, said: reader })
    }

    /// Polls the queue pairs of a device once a second until the returned child is dropped.
    pub fn top(&self, device: &str) -> Result<BoundChild> {
        BoundChild::spawn("pvrdmad top", &self.program.to_string_lossy(), |command| {
            command.args(["top", "--device", device, "--control"]).arg(&self.control);
            command.stdin(Stdio::null()).stdout(Stdio::null());
        })
    }

    /// Returns the memory of the daemon in KiB: the resident memory of all its processes without the guests' shared
    /// memory.
    pub fn memory_kib(&self) -> Result<u64> {
        self.sum("status", |text| {
            let rest = text.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
            rest.split_whitespace().next()?.parse().ok()
        })
    }

    /// Returns the number of descriptors of its processes, and of mappings of files without a name, such as guest
    /// memory.
    pub fn open_things(&self) -> Result<(usize, usize)> {
        let (mut descriptors, mut mappings) = (0, 0);
        for pid in &self.pids {
            let folder = PathBuf::from(format!("/proc/{pid}"));
            let look = || -> std::io::Result<_> {
                let maps = std::fs::read_to_string(folder.join("maps"))?;
                Ok((std::fs::read_dir(folder.join("fd"))?.count(), maps.matches("/memfd:").count()))
            };
            let (fds, maps) = look().with_context(|| format!("cannot look at {}", folder.display()))?;
            descriptors += fds;
            mappings += maps;
        }
        Ok((descriptors, mappings))
    }

    /// Reads `/proc/PID/file` of each process, and returns the sum of the values that `number` extracts.
    fn sum(&self, file: &str, number: impl Fn(&str) -> Option<u64>) -> Result<u64> {
        let numbers = self.pids.iter().map(|pid| {
            let path = format!("/proc/{pid}/{file}");
            let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
            number(&text).with_context(|| format!("{path} is malformed"))
        });
        numbers.sum()
    }

    /// Asks the daemon to end; returns `true` if it ended with success and in time.
    pub fn terminate(&mut self) -> bool {
        self.process.terminate(Duration::from_secs(10)).is_some_and(|status| status.success())
    }

    /// Returns the ids of its processes.
    pub fn processes(&self) -> impl Iterator<Item = u32> {
        self.pids.iter().filter_map(|&pid| u32::try_from(pid).ok())
    }

    /// Returns the processor time used by its processes so far, in clock ticks.
    pub fn processor_ticks(&self) -> Result<u64> {
        self.sum("stat", |text| {
            // Fields 14 and 15, counted from 1; the second field is in brackets and may contain blanks.
            let (_, rest) = text.rsplit_once(')')?;
            Some(rest.split_whitespace().skip(11).take(2).filter_map(|word| word.parse::<u64>().ok()).sum())
        })
    }

    /// Path of its log.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Returns the end of its log.
    pub fn log_tail(&self) -> String {
        let text = std::fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(40)..].join("\n")
    }
}

/// A capture in progress.
#[derive(Debug)]
pub struct Capture {
    process: BoundChild,
    said: PipeReader,
}

impl Capture {
    /// Stops it as Ctrl-C does, and returns its report.
    pub fn stop(mut self) -> Result<String> {
        let status = self.process.terminate(Duration::from_secs(10));
        let mut said = String::new();
        std::io::Read::read_to_string(&mut self.said, &mut said)?;
        match status {
            Some(status) if status.success() => Ok(said.trim().to_owned()),
            status => bail!("pvrdmad capture ended with {status:?}: {said}"),
        }
    }
}

/// The daemon's program and the VMM's, once they are known.
static DAEMON: OnceLock<PathBuf> = OnceLock::new();
static VMM: OnceLock<PathBuf> = OnceLock::new();

/// Sets the daemon's program for all calls of [`program`], unless an earlier one has determined it.
pub fn set_program(path: PathBuf) {
    let _ = DAEMON.set(path);
}

/// Returns the daemon's program. The path is determined once, so that all tests of a run use the same one.
pub fn program() -> Result<PathBuf> {
    find_once(&DAEMON, "pvrdmad")
}

/// Returns the VMM's program in the same way.
pub fn vmm_program() -> Result<PathBuf> {
    find_once(&VMM, "pvrdma-vmm")
}

fn find_once(found: &OnceLock<PathBuf>, package: &str) -> Result<PathBuf> {
    if let Some(program) = found.get() {
        return Ok(program.clone());
    }
    let program = program_of(package)?;
    Ok(found.get_or_init(|| program).clone())
}

/// Returns the program of a package, beside this program. If cargo is available, the program is built first, from the
/// workspace that it belongs to: as a release if this program is one, and otherwise in the profile of the workspace's
/// tests, with assertions and overflow checks.
pub fn program_of(package: &str) -> Result<PathBuf> {
    let own = std::env::current_exe().context("cannot find this program")?;
    let program = own.with_file_name(package);
    let folder = own.parent().context("this program lies nowhere")?;
    let profile = if folder.ends_with("release") { "release" } else { "test" };
    // With these arguments Cargo resolves the same features as for `cargo test --workspace`, so that the tests compile
    // no crate twice.
    let packages: &[&str] = match profile {
        "release" => &["-p", package],
        _ => &["--workspace", "--bin", package, "--test", "log_target"],
    };
    if let Some(manifest) = workspace_manifest() {
        let target = folder.parent().context("this program lies in no target directory")?;
        // The first build takes minutes: cargo shows its progress on standard error.
        let status = Command::new(cargo())
            .args(["build", "--profile", profile])
            .args(packages)
            .arg("--manifest-path")
            .arg(manifest)
            .arg("--target-dir")
            .arg(target)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .status();
        match status {
            Ok(status) if !status.success() => bail!("cannot build {package}: cargo ended with {status}"),
            Ok(_) if program.exists() => return Ok(program),
            Ok(_) => {}
            Err(error) => log::debug!("no cargo, taking {package} as it is: {error}"),
        }
    }
    if !program.exists() {
        bail!("there is no {}: build it with 'cargo build --profile {profile} -p {package}'", program.display());
    }
    Ok(program)
}

/// Returns the cargo program to call.
pub fn cargo() -> PathBuf {
    std::env::var_os("CARGO").map_or_else(|| PathBuf::from("cargo"), PathBuf::from)
}

/// Returns the manifest of the workspace that this program was built from, if it still exists.
pub fn workspace_manifest() -> Option<PathBuf> {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).parent()?.join("Cargo.toml");
    manifest.exists().then_some(manifest)
}
