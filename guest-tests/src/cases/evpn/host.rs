//! A host: processes that share a network namespace, a file system and process numbers.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use tempfile::TempDir;

use crate::cases::recipe::recipe;
use crate::daemon;
use crate::fabric::{Fabric, address};
use crate::image::HostRoot;
use crate::process::BoundChild;

/// Document and marker of the commands that set a host up.
pub(in crate::cases) const RECIPE: (&str, &str) = ("docs/links.md", "evpn");
/// Document and marker of the commands that undo that.
const TEARDOWN: (&str, &str) = ("docs/links.md", "evpn-teardown");

/// Time limit of each wait. A lost host is noticed after nine seconds (`frr_profile=datacenter`).
const PATIENCE: Duration = Duration::from_secs(60);

/// Turns into the first process of the host, in the file system of `ROOT` with changes of its own. It reaps processes
/// whose parents have ended, as those of FRR do.
const BOOT: &str = r#"
set -eu
mount --make-rprivate /
mkdir "$PLACE"/{upper,work,root}
mount -t overlay overlay -o "lowerdir=$ROOT,upperdir=$PLACE/upper,workdir=$PLACE/work" "$PLACE/root"
cd "$PLACE/root"
mount --rbind /dev dev
mount --rbind /sys sys
mount -t proc proc proc
mount -t tmpfs tmpfs run
mkdir -p run/pvrdmad before
mount --bind "$PLACE/run" run/pvrdmad
touch usr/local/bin/pvrdmad
mount --bind "$DAEMON" usr/local/bin/pvrdmad
# There is no service manager.
printf '#!/bin/sh\nexec /usr/lib/frr/frrinit.sh "$1"\n' >usr/local/bin/systemctl
chmod +x usr/local/bin/systemctl
pivot_root . before
umount --lazy /before
touch /run/pvrdmad/booted
exec bash -c 'while :; do sleep 3600 & wait $!; done'
"#;

/// A running host. Dropping it ends its processes.
#[derive(Debug)]
pub(super) struct Host {
    // Fields are dropped in this order.
    recipe: Option<BoundChild>,
    first: BoundChild,
    number: usize,
    namespace: String,
    directory: TempDir,
}

impl Host {
    /// Starts the first process.
    pub(super) fn boot(root: &HostRoot, fabric: &Fabric, number: usize) -> Result<Self> {
        let directory =
            tempfile::Builder::new().prefix("guest-tests-").tempdir().context("cannot create a directory")?;
        let namespace = fabric.host(number).to_owned();
        fs::create_dir(directory.path().join("run")).context("cannot create a directory")?;
        let log = File::create(directory.path().join("boot.log")).context("cannot create a log")?;
        let program = daemon::program()?;
        let first = BoundChild::spawn("the first process of a host", "ip", |command| {
            command.args(["netns", "exec", &namespace, "unshare", "--mount", "--pid", "--fork", "--kill-child"]);
            command.args(["bash", "-c", BOOT]).env("ROOT", root.path("")).env("PLACE", directory.path());
            command.env("DAEMON", program).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        })?;
        let mut host = Self { recipe: None, first, number, namespace, directory };
        host.until("its first process", |host| {
            ensure!(
                host.first.exited().is_none(),
                "the first process of host {number} has ended: {}",
                host.diagnosis()
            );
            Ok(host.path("run/booted").exists())
        })?;
        Ok(host)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Path of the socket of a device.
    pub(super) fn socket(&self, device: &str) -> PathBuf {
        self.path(&format!("run/{device}.sock"))
    }

    /// Returns a command that runs these lines in the host.
    fn command(&self, command: &mut Command, lines: &str) {
        let first = self.first.id();
        command.arg(format!("--net=/run/netns/{}", self.namespace));
        command.args([format!("--mount=/proc/{first}/ns/mnt"), format!("--pid=/proc/{first}/ns/pid_for_children")]);
        command.args(["bash", "-euxc", lines]).current_dir("/").stdin(Stdio::null());
        command.env_clear().env("PATH", "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin").env("RUST_LOG", "info");
    }

    /// Runs lines that must succeed, and returns their output.
    pub(super) fn run(&self, lines: &str) -> Result<String> {
        let mut command = Command::new("nsenter");
        self.command(&mut command, lines);
        // Daemons that the lines start keep the descriptors, so the output goes to a file.
        let (output, errors) = (self.path("output"), self.path("errors"));
        command.stdout(File::create(&output)?).stderr(File::create(&errors)?);
        let status = command.status().context("cannot run nsenter")?;
        let said = |path| fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        ensure!(status.success(), "host {}: {lines} ended with {status}:\n{}", self.number, said(&errors)?);
        Ok(said(&output)?)
    }

    /// Runs the lines of the document, the last of which starts the daemon, until the devices are ready. `more` is
    /// appended to that line.
    pub(super) fn run_recipe(&mut self, more: &str) -> Result<()> {
        let lines = format!("{}{more}", self.lines(RECIPE)?.trim_end());
        let log = File::create(self.path("recipe.log")).context("cannot create a log")?;
        let errors = log.try_clone().context("cannot share a log")?;
        let child = BoundChild::spawn("the recipe", "nsenter", |command| {
            self.command(command, &lines);
            command.stdout(log).stderr(errors);
        })?;
        self.recipe = Some(child);
        let devices = lines.matches("--device").count();
        self.until("its devices", |host| {
            if host.recipe.as_mut().is_some_and(|recipe| recipe.exited().is_some()) {
                bail!("a line of {} failed on host {}:\n{}", RECIPE.0, host.number, host.diagnosis());
            }
            Ok(host.said("recipe.log").matches(": ready on").count() == devices)
        })
    }

    /// Runs the lines of the document that configure and start FRR, with an error in the configuration.
    pub(super) fn start_frr_with_an_error(&self) -> Result<()> {
        let lines = self.lines(RECIPE)?;
        let (lines, _) = lines.split_once("\nfor ").context("the recipe has no interfaces after FRR")?;
        let broken = lines.replace("router bgp 65000", "router bgpp 65000");
        ensure!(broken != lines, "the recipe has no line of that kind");
        self.run(&broken).map(drop)
    }

    /// Ends all processes at once.
    pub(super) fn power_off(&mut self) {
        self.recipe = None;
        self.first.kill();
    }

    /// Ends the daemon and runs the lines of the document that undo the others.
    pub(super) fn tear_down(&mut self) -> Result<()> {
        self.recipe = None;
        self.run(&self.lines(TEARDOWN)?).map(drop)
    }

    /// Returns lines of the document, which are written for the first host, with the values of this one.
    fn lines(&self, (document, name): (&str, &str)) -> Result<String> {
        let lines = recipe(document, name)?;
        let (first, own) = (address(0), address(self.number));
        let lines = lines.replace(&first, "FIRST").replace(&own, &first).replace("FIRST", &own);
        Ok(lines.replace("52:54:00:00:00:01", &format!("52:54:00:00:00:{:02}", self.number + 1)))
    }

    /// Waits until the tunnels of both tenants flood to exactly these hosts.
    pub(super) fn wait_for_peers(&mut self, peers: &[usize]) -> Result<()> {
        let mut expected: Vec<_> = peers.iter().map(|peer| address(*peer)).collect();
        expected.sort();
        self.until(&format!("exactly {peers:?} in its tunnels"), |host| {
            let mut found = [host.places("vx7", "00:00:00:00:00:00")?, host.places("vx8", "00:00:00:00:00:00")?];
            found.iter_mut().for_each(|found| found.sort());
            Ok(found.iter().all(|found| *found == expected))
        })
    }

    /// Waits until a tunnel sends frames for a MAC address to this host.
    pub(super) fn wait_for_place(&mut self, tunnel: &str, mac: &str, place: usize) -> Result<()> {
        self.until(&format!("{mac} behind host {place}"), |host| Ok(host.places(tunnel, mac)? == [address(place)]))
    }

    /// Returns the remote addresses to which a tunnel sends frames for a MAC address.
    fn places(&self, tunnel: &str, mac: &str) -> Result<Vec<String>> {
        let entries = self.run(&format!("bridge fdb show dev {tunnel}"))?;
        let of_mac = entries.lines().filter(|entry| entry.starts_with(mac));
        Ok(of_mac.filter_map(|entry| entry.split_once("dst ")?.1.split(' ').next().map(str::to_owned)).collect())
    }

    fn until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> Result<bool>) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while !done(self)? {
            if Instant::now() > deadline {
                let waited = PATIENCE.as_secs();
                bail!("host {} has not got {what} after {waited} s:\n{}", self.number, self.diagnosis());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    fn said(&self, file: &str) -> String {
        String::from_utf8_lossy(&fs::read(self.path(file)).unwrap_or_default()).into_owned()
    }

    /// Returns the output of the host's processes, and the state of its control plane.
    pub(super) fn diagnosis(&self) -> String {
        let state = "bridge fdb show; for what in summary 'l2vpn evpn vni' 'l2vpn evpn route'; do vtysh -c \"show bgp $what\"; done";
        let state = self.run(state).unwrap_or_else(|error| format!("{error:#}"));
        format!("host {}:\n{}{}{state}", self.number, self.said("boot.log"), self.said("recipe.log"))
    }
}
