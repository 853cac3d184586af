//! Open vSwitch as the fabric between two hosts: two network namespaces that run the commands of the document.

use std::cell::RefCell;
use std::fs::{self, File};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use tempfile::TempDir;

use super::case::{Case, skip};
use super::recipe::recipe;
use crate::daemon;
use crate::device_pair::{Side, connected_across};
use crate::image::{GuestImage, HostRoot};
use crate::namespaces::{INTERFACE, Namespaces};
use crate::process::BoundChild;

/// Document and marker of the commands.
pub(super) const RECIPE: (&str, &str) = ("docs/links.md", "open-vswitch");
/// Addresses of the hosts in the recipe, which is written for the first one.
const HOSTS: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 0, 0, 2)];
/// Ethernet address of the device in the recipe.
const MAC: &str = "52:54:00:00:00:01";

const PROGRAMS: [&str; 5] = [
    "usr/bin/ovs-vsctl",
    "usr/bin/ovs-ofctl",
    "usr/bin/ovsdb-tool",
    "usr/sbin/ovsdb-server",
    // Target of `usr/sbin/ovs-vswitchd`, which is an absolute link.
    "usr/lib/openvswitch-switch/ovs-vswitchd",
];
const SCHEMA: &str = "usr/share/openvswitch/vswitch.ovsschema";

/// Bytes that are written and read back.
const BYTES: usize = 1 << 20;
/// Time limit of each wait.
const PATIENCE: Duration = Duration::from_secs(60);

/// The only test.
pub(crate) fn cases() -> Vec<Case> {
    vec![Case::alone("open-vswitch/two-hosts", two_hosts)]
}

/// A device on each host reaches the other one through both bridges and the tunnel between them.
fn two_hosts(image: &GuestImage) -> Result<String> {
    if let Some(obstacle) = Namespaces::obstacle() {
        return Err(skip(obstacle));
    }
    if !Path::new("/dev/net/tun").exists() {
        return Err(skip("the switch needs /dev/net/tun"));
    }
    let switch = HostRoot::build(image, "open-vswitch", &["openvswitch-switch"])
        .map_err(|error| skip(format!("there is no Open vSwitch: {error:#}")))?;
    let network = Namespaces::new("ovs", 1500, HOSTS.map(Into::into)).map_err(|error| skip(format!("{error:#}")))?;
    let hosts = [Host::start(&switch, &network, 0)?, Host::start(&switch, &network, 1)?];
    let moved = hosts
        .iter()
        .try_for_each(Host::run_recipe)
        .and_then(|()| transfer(&mut connected_across(&hosts.each_ref().map(Host::socket), BYTES)?));
    moved.with_context(|| hosts.each_ref().map(Host::diagnosis).join("\n"))?;
    // The switch updates its counters only from time to time.
    for host in &hosts {
        host.wait_for("a packet in the tunnel", || Ok(host.tunnelled()? > 0))?;
    }
    Ok(format!("{} KiB written and read through the tunnel", BYTES >> 10))
}

/// Writes the whole buffer of the first side to the second, and reads it back into zeroed memory.
pub(super) fn transfer([a, b]: &mut [Side; 2]) -> Result<()> {
    let idle = |_: &mut _| std::thread::yield_now();
    let (bytes, size) = (a.buffer.len(), 64 << 10);
    let sent = a.buffer.read(0, bytes);
    ensure!(sent != b.buffer.read(0, bytes), "both sides begin with the same bytes");
    let count = u32::try_from(bytes / size)?;
    let writes: Vec<_> = a.writes(b, size).collect();
    a.post_and_reap(&writes, count, 8, idle).context("writing")?;
    ensure!(b.buffer.read(0, bytes) == sent, "the data in the peer's memory differs from the written data");
    a.buffer.fill(0);
    let reads: Vec<_> = a.reads(b, size).collect();
    a.post_and_reap(&reads, count, 4, idle).context("reading")?;
    ensure!(a.buffer.read(0, bytes) == sent, "the data that was read differs from the written data");
    Ok(())
}

/// A host: a network namespace, a switch, and the processes that the recipe starts.
struct Host<'a> {
    // Fields are dropped in this order.
    lines: RefCell<Option<BoundChild>>,
    _switch: Option<BoundChild>,
    _database: BoundChild,
    namespace: &'a str,
    number: usize,
    directory: TempDir,
}

impl<'a> Host<'a> {
    /// Starts the switch in the state after its installation.
    fn start(root: &HostRoot, network: &'a Namespaces, number: usize) -> Result<Self> {
        let directory =
            tempfile::Builder::new().prefix("guest-tests-").tempdir().context("cannot create a directory")?;
        let bin = directory.path().join("bin");
        fs::create_dir(&bin).with_context(|| format!("cannot create {}", bin.display()))?;
        PROGRAMS.iter().try_for_each(|program| root.name_in(&bin, program))?;
        std::os::unix::fs::symlink(daemon::program()?, bin.join("pvrdmad")).context("cannot name the daemon")?;
        let namespace = network.name(number);
        let database = directory.path().join("database");
        run(command(directory.path(), "ovsdb-tool").arg("create").arg(&database).arg(root.path(SCHEMA)))?;
        let server = ["--remote=punix:db.sock", "--unixctl=database.ctl", "database"];
        let database = spawn(directory.path(), namespace, "ovsdb-server", &server)?;
        let mut host = Self { lines: None.into(), _switch: None, _database: database, namespace, number, directory };
        host.wait_for("the switch's database", || Ok(host.path("db.sock").exists()))?;
        run(command(host.directory.path(), "ovs-vsctl").args(["--no-wait", "init"]))?;
        let arguments = ["unix:db.sock", "--unixctl=switch.ctl"];
        host._switch = Some(spawn(host.directory.path(), namespace, "ovs-vswitchd", &arguments)?);
        Ok(host)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Path of the device's socket in the recipe.
    fn socket(&self) -> PathBuf {
        self.path("vm0.sock")
    }

    /// Runs the commands, the last of which is the daemon's, until the device is ready.
    fn run_recipe(&self) -> Result<()> {
        let lines = self.lines()?;
        let child = spawn(self.directory.path(), self.namespace, "bash", &["-euxc", &lines])?;
        self.lines.replace(Some(child));
        self.wait_for("the device", || {
            let said = self.said("bash");
            if self.lines.borrow_mut().as_mut().is_some_and(|lines| lines.exited().is_some()) {
                bail!("a line of {} failed", RECIPE.0);
            }
            Ok(said.contains("vm0: ready on"))
        })
    }

    /// Returns the commands with the document's values replaced by those of this host.
    fn lines(&self) -> Result<String> {
        let (document, name) = RECIPE;
        let mut lines = recipe(document, name)?;
        for word in ["eth1", "/run/pvrdmad", MAC] {
            ensure!(lines.contains(word), "the recipe of {document} says nothing of {word}");
        }
        lines = lines.replace("eth1", INTERFACE).replace("/run/pvrdmad", &self.directory.path().to_string_lossy());
        let [own, peer] = HOSTS.map(|address| address.to_string());
        if self.number == 1 {
            // The other host runs the same commands with the addresses exchanged and another MAC.
            lines = lines.replace(&own, "OWN").replace(&peer, &own).replace("OWN", &peer);
            lines = lines.replace(MAC, "52:54:00:00:00:02");
        }
        Ok(lines)
    }

    fn wait_for(&self, what: &str, done: impl Fn() -> Result<bool>) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while !done()? {
            ensure!(Instant::now() < deadline, "{what} is not there after {} s", PATIENCE.as_secs());
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Returns the number of packets that this end of the tunnel has sent.
    fn tunnelled(&self) -> Result<u64> {
        let said = run(command(self.directory.path(), "ovs-ofctl").args(["dump-ports", "br-rdma", "vx7"]))?;
        let count = said.split_once("tx pkts=").and_then(|(_, rest)| rest.split(',').next());
        count.and_then(|count| count.parse().ok()).with_context(|| format!("no number of packets: {said}"))
    }

    fn said(&self, program: &str) -> String {
        let bytes = fs::read(self.path(&format!("{program}.log"))).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn diagnosis(&self) -> String {
        let said = ["ovsdb-server", "ovs-vswitchd", "bash"].map(|program| self.said(program));
        format!("host {}:\n{}", self.number, said.join("\n"))
    }
}

/// Returns a command for a program of the switch.
fn command(directory: &Path, program: &str) -> Command {
    let mut command = Command::new(program);
    enter(&mut command, directory);
    command
}

/// Sets the environment in which a command finds the switch's programs, and these their files, which are all in one
/// folder.
fn enter(command: &mut Command, directory: &Path) {
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{}:{path}:/usr/sbin:/sbin", directory.join("bin").display()));
    command.current_dir(directory).stdin(Stdio::null());
    for what in ["RUNDIR", "DBDIR", "LOGDIR", "SYSCONFDIR", "PKGDATADIR"] {
        command.env(format!("OVS_{what}"), directory);
    }
}

/// Starts a program in a network namespace. Its output goes to a file named after it.
fn spawn(directory: &Path, namespace: &str, program: &str, arguments: &[&str]) -> Result<BoundChild> {
    let log = File::create(directory.join(format!("{program}.log"))).context("cannot create a log")?;
    let errors = log.try_clone().context("cannot share a log")?;
    BoundChild::spawn(program, "ip", |command| {
        enter(command, directory);
        command.args(["netns", "exec", namespace, program]).args(arguments).stdout(log).stderr(errors);
    })
}

/// Runs a command that must succeed and returns its output.
fn run(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot run {:?}", command.get_program()))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{:?} ended with {}: {said}", command.get_program(), output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
