//! The device daemon `pvrdmad`, started for the guests.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::process::BoundChild;

/// One device of the daemon.
#[derive(Clone, Debug)]
pub(crate) struct DaemonDevice {
    /// Its name.
    pub(crate) name: String,
    /// Where QEMU connects.
    pub(crate) socket: PathBuf,
    /// The hardware address, the same as that of the machine's vmxnet3.
    pub(crate) mac: String,
    /// More options, each with its comma: `,pin=off`.
    pub(crate) options: String,
}

impl fmt::Display for DaemonDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, socket, mac, options } = self;
        write!(f, "name={name},socket={},mac={mac}{options}", socket.display())
    }
}

/// What a daemon is started with beside its devices.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Setup<'a> {
    /// The network namespace in which it runs.
    pub(crate) namespace: Option<&'a str>,
    /// What moves the data.
    pub(crate) backend: Option<&'a str>,
    /// Networks, each with its keys.
    pub(crate) networks: &'a [String],
    /// Where metrics can be fetched.
    pub(crate) metrics: Option<&'a str>,
    /// Another build of it than the one that all others use.
    pub(crate) program: Option<&'a Path>,
}

/// A running daemon; dropping it kills it.
#[derive(Debug)]
pub(crate) struct Daemon {
    process: BoundChild,
    program: PathBuf,
    control: PathBuf,
    log: PathBuf,
    /// The supervisor, and the process of each network as it was at the start.
    pids: BTreeSet<u64>,
}

impl Daemon {
    /// Starts the daemon with these devices and waits until all are ready.
    pub(crate) fn start(directory: &Path, devices: &[DaemonDevice]) -> Result<Self> {
        Self::launch(&Setup::default(), directory, devices)
    }

    /// The same in a network namespace, if one is named.
    pub(crate) fn start_in(namespace: Option<&str>, directory: &Path, devices: &[DaemonDevice]) -> Result<Self> {
        Self::launch(&Setup { namespace, ..Setup::default() }, directory, devices)
    }

    /// The same on another backend.
    pub(crate) fn start_on(backend: &str, directory: &Path, devices: &[DaemonDevice]) -> Result<Self> {
        Self::launch(&Setup { backend: Some(backend), ..Setup::default() }, directory, devices)
    }

    /// The same with all that there is to say.
    pub(crate) fn launch(setup: &Setup<'_>, directory: &Path, devices: &[DaemonDevice]) -> Result<Self> {
        let Setup { namespace, backend, networks, metrics, program: named } = *setup;
        let program = match named {
            Some(path) => path.to_owned(),
            None => program()?,
        };
        let control = directory.join("control");
        let log = directory.join("pvrdmad.log");
        let errors = File::options()
            .create(true)
            .append(true)
            .open(&log)
            .with_context(|| format!("cannot create {}", log.display()))?;
        let (reader, writer) = std::io::pipe().context("cannot create a pipe")?;
        let path = program.to_string_lossy();
        let process = BoundChild::spawn("pvrdmad", if namespace.is_some() { "ip" } else { &path }, |command| {
            if let Some(namespace) = namespace {
                // `ip` becomes the daemon.
                command.args(["netns", "exec", namespace, &path]);
            }
            for network in networks {
                command.args(["--network", network]);
            }
            for device in devices {
                command.arg("--device").arg(device.to_string());
            }
            if let Some(backend) = backend {
                command.args(["--backend", backend]);
            }
            if let Some(metrics) = metrics {
                command.args(["--metrics", metrics]);
            }
            // A system call that its filters do not know ends a worker, so that no test passes without it.
            command.args(["--sandbox", "strict"]).arg("--control").arg(&control);
            command.stdin(Stdio::null()).stdout(writer).stderr(errors);
            if std::env::var_os("RUST_LOG").is_none() {
                command.env("RUST_LOG", "info");
            }
        })?;
        let pids = BTreeSet::from([process.id().into()]);
        let daemon = Self { process, program, control, log, pids };
        daemon.wait_ready(reader, devices.len())
    }

    fn wait_ready(mut self, reader: std::io::PipeReader, count: usize) -> Result<Self> {
        let (sender, lines) = channel();
        let log = self.log.clone();
        // Goes on reading for as long as the daemon lives, so that it never blocks on its output.
        std::thread::spawn(move || {
            let mut copy = File::options().append(true).open(log).ok();
            for line in BufReader::new(reader).lines().map_while(Result::ok) {
                if let Some(copy) = &mut copy {
                    use std::io::Write;
                    let _ = writeln!(copy, "{line}");
                }
                // Nobody listens any more once the devices are ready.
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
        Ok(self)
    }

    /// What `pvrdmad status --json` reports.
    pub(crate) fn status(&self) -> Result<serde_json::Value> {
        serde_json::from_slice(&self.ask(&["status", "--json"])?).context("pvrdmad status: not JSON")
    }

    /// What `pvrdmad show OBJECT --json` says of a device.
    pub(crate) fn show(&self, device: &str, object: &str) -> Result<serde_json::Value> {
        let said = self.ask(&["show", object, "--device", device, "--json"])?;
        serde_json::from_slice(&said).context("pvrdmad show: not JSON")
    }

    /// Adds a device.
    pub(crate) fn add(&self, device: &DaemonDevice) -> Result<()> {
        self.ask(&["add", &device.to_string()]).map(drop)
    }

    /// Takes the link of a device up or down.
    pub(crate) fn set_link(&self, device: &str, up: bool) -> Result<()> {
        self.ask(&["link", if up { "up" } else { "down" }, "--device", device]).map(drop)
    }

    /// What a command of `pvrdmad` prints.
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

    /// Captures what a device does, to a file, until told to end.
    pub(crate) fn capture(&self, device: &str, path: &Path) -> Result<Capture> {
        let (mut reader, writer) = std::io::pipe().context("cannot create a pipe")?;
        let mut process = BoundChild::spawn("pvrdmad capture", &self.program.to_string_lossy(), |command| {
            command.args(["capture", "--device", device, "--control"]).arg(&self.control).arg("-w").arg(path);
            command.stdin(Stdio::null()).stderr(writer);
        })?;
        // It has begun when the file has its header.
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

    /// Looks at the queue pairs of a device once a second, until it is dropped.
    pub(crate) fn top(&self, device: &str) -> Result<BoundChild> {
        BoundChild::spawn("pvrdmad top", &self.program.to_string_lossy(), |command| {
            command.args(["top", "--device", device, "--control"]).arg(&self.control);
            command.stdin(Stdio::null()).stdout(Stdio::null());
        })
    }

    /// Memory of the daemon itself in KiB: what is resident in all its processes without the guests' shared memory.
    pub(crate) fn memory_kib(&self) -> Result<u64> {
        self.sum("status", |text| {
            let rest = text.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
            rest.split_whitespace().next()?.parse().ok()
        })
    }

    /// How many descriptors its processes have, and how many mappings of files without a name, as guests' memory is.
    pub(crate) fn open_things(&self) -> Result<(usize, usize)> {
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

    /// Adds up what `number` finds in a file that each process has in `/proc`.
    fn sum(&self, file: &str, number: impl Fn(&str) -> Option<u64>) -> Result<u64> {
        let numbers = self.pids.iter().map(|pid| {
            let path = format!("/proc/{pid}/{file}");
            let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
            number(&text).with_context(|| format!("{path} is malformed"))
        });
        numbers.sum()
    }

    /// Asks the daemon to end; whether it did, with success and in time.
    pub(crate) fn terminate(&mut self) -> bool {
        self.process.terminate(Duration::from_secs(10)).is_some_and(|status| status.success())
    }

    /// Its processes.
    pub(crate) fn processes(&self) -> impl Iterator<Item = u32> {
        self.pids.iter().filter_map(|&pid| u32::try_from(pid).ok())
    }

    /// Processor time that its processes have used so far, in clock ticks.
    pub(crate) fn processor_ticks(&self) -> Result<u64> {
        self.sum("stat", |text| {
            // Fields 14 and 15, counted from 1; the second field is in brackets and may contain blanks.
            let (_, rest) = text.rsplit_once(')')?;
            Some(rest.split_whitespace().skip(11).take(2).filter_map(|word| word.parse::<u64>().ok()).sum())
        })
    }

    /// Where its log is.
    pub(crate) fn log(&self) -> &Path {
        &self.log
    }

    /// The end of its log.
    pub(crate) fn log_tail(&self) -> String {
        let text = std::fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(40)..].join("\n")
    }
}

/// A capture in progress.
#[derive(Debug)]
pub(crate) struct Capture {
    process: BoundChild,
    said: std::io::PipeReader,
}

impl Capture {
    /// Endpoints it as Ctrl-C does, and gives what it says about itself.
    pub(crate) fn stop(mut self) -> Result<String> {
        let status = self.process.terminate(Duration::from_secs(10));
        let mut said = String::new();
        std::io::Read::read_to_string(&mut self.said, &mut said)?;
        match status {
            Some(status) if status.success() => Ok(said.trim().to_owned()),
            status => bail!("pvrdmad capture ended with {status:?}: {said}"),
        }
    }
}

/// The daemon, looked for once: all tests of a run use the same.
pub(crate) fn program() -> Result<PathBuf> {
    static FOUND: OnceLock<PathBuf> = OnceLock::new();
    if let Some(program) = FOUND.get() {
        return Ok(program.clone());
    }
    let found = find_program()?;
    Ok(FOUND.get_or_init(|| found).clone())
}

fn find_program() -> Result<PathBuf> {
    find("pvrdmad")
}

/// The VMM, likewise.
pub(crate) fn vmm_program() -> Result<PathBuf> {
    static FOUND: OnceLock<PathBuf> = OnceLock::new();
    if let Some(program) = FOUND.get() {
        return Ok(program.clone());
    }
    let found = find("pvrdma-vmm")?;
    Ok(FOUND.get_or_init(|| found).clone())
}

/// The program of a package, beside this one, built from the workspace it belongs to when cargo is there: as a release
/// if this one is, and otherwise as the workspace's tests build it, with assertions and overflow checks.
fn find(package: &str) -> Result<PathBuf> {
    let own = std::env::current_exe().context("cannot find this program")?;
    let program = own.with_file_name(package);
    let folder = own.parent().context("this program lies nowhere")?;
    let profile = if folder.ends_with("release") { "release" } else { "test" };
    if let Some(manifest) = workspace_manifest() {
        let target = folder.parent().context("this program lies in no target directory")?;
        // With link-time optimisation it takes minutes the first time, so it is not silent.
        eprintln!("{package}: built if it is not up to date");
        let output = Command::new(cargo())
            .args(["build", "--quiet", "--profile", profile, "-p", package, "--manifest-path"])
            .arg(manifest)
            .arg("--target-dir")
            .arg(target)
            .output();
        match output {
            Ok(output) if !output.status.success() => {
                bail!("cannot build {package}:\n{}", String::from_utf8_lossy(&output.stderr));
            }
            Ok(_) => {
                if program.exists() {
                    return Ok(program);
                }
            }
            Err(error) => log::debug!("no cargo, taking {package} as it is: {error}"),
        }
    }
    if !program.exists() {
        bail!("there is no {}: build it with 'cargo build --profile {profile} -p {package}'", program.display());
    }
    Ok(program)
}

/// The cargo to call.
pub(crate) fn cargo() -> PathBuf {
    std::env::var_os("CARGO").map_or_else(|| PathBuf::from("cargo"), PathBuf::from)
}

/// The workspace this program was built from, when it is still there.
pub(crate) fn workspace_manifest() -> Option<PathBuf> {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).parent()?.join("Cargo.toml");
    manifest.exists().then_some(manifest)
}
