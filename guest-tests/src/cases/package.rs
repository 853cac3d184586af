//! The Debian package, from its build to its purge, in a guest whose first process is systemd.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use super::case::{Case, skip};
use crate::image::{GuestImage, SystemdDisk};
use crate::vm::{FOLDER_TAG, Folder, Job, SHORT, Vm, VmBuilder};

/// Time limit of long steps: two programs with traffic, and the watchdog's half a minute.
const LONG: Duration = Duration::from_secs(240);

/// The tests.
pub(crate) fn cases() -> Vec<Case> {
    vec![Case::alone("slow/package", package).slow("builds a package; runs when asked for: --only slow/package")]
}

/// Installed, configured, used by another user, killed by its watchdog, stopped, purged.
fn package(image: &GuestImage) -> Result<String> {
    if !rustix::process::geteuid().is_root() {
        return Err(skip("lintian in a root directory of its own needs root"));
    }
    let directory = tempfile::Builder::new().prefix("guest-tests-").tempdir().context("cannot create a directory")?;
    let folder = directory.path().join("package");
    let package = build(&folder, "1")?;
    let newer = build(&folder, "2")?;
    let driver = build_driver(&folder)?;
    let system = SystemdDisk::build(image)?;
    for package in [&package, &driver] {
        lintian(system.root(), package)?;
    }
    let vm = VmBuilder::new(image, directory.path())
        .root_disk(system.disk())
        .folder(Folder { path: folder, read_only: true })
        .patience(3)
        .start()?;
    let names = [file_name(&package)?, file_name(&newer)?];
    let run = || -> Result<String> {
        vm.wait_boot()?;
        vm.run(&format!(
            "modprobe 9p && modprobe 9pnet_virtio && mount -t 9p -o trans=virtio,ro {FOLDER_TAG} /mnt && \
             until systemctl is-system-running | grep -q -e running -e degraded; do sleep 0.2; done"
        ))?;
        life(&vm, &names)
    };
    run().with_context(|| vm.diagnosis())
}

fn file_name(path: &Path) -> Result<String> {
    Ok(path.file_name().context("a path without a name")?.to_string_lossy().into_owned())
}

/// Returns the file that a command creates in `folder`, which may contain others.
fn made_in(folder: &Path, command: &mut Command) -> Result<PathBuf> {
    std::fs::create_dir_all(folder).context("cannot create a folder")?;
    let files = || -> Result<BTreeSet<PathBuf>> {
        std::fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()
    };
    let before = files()?;
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot run {command:?}"))?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    let mut made: Vec<_> = files()?.difference(&before).cloned().collect();
    ensure!(made.len() == 1, "{command:?} made {made:?}");
    made.pop().context("no package was built")
}

/// Builds the package of the guests' driver.
fn build_driver(folder: &Path) -> Result<PathBuf> {
    made_in(folder, Command::new(packaging().join("dkms/build")).arg(folder))
}

fn packaging() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../pvrdmad/packaging")
}

/// Builds a revision of the package below `folder` as the document says, because another profile would build another
/// program.
fn build(folder: &Path, revision: &str) -> Result<PathBuf> {
    let quiet = |command: &mut Command| command.stdin(Stdio::null()).output();
    for (tool, version) in [("deb", "3.8.0"), ("auditable", "0.7.7")] {
        if !quiet(Command::new("cargo").args([tool, "--version"])).is_ok_and(|output| output.status.success()) {
            return Err(skip(format!("needs cargo-{tool}: cargo install --locked cargo-{tool}@{version}")));
        }
    }
    let own = std::env::current_exe().context("cannot find this program")?;
    let programs = own.parent().context("this program is nowhere")?;
    let mut command = Command::new(packaging().join("build"));
    command.arg(folder).args(["--deb-revision", revision]).env_remove("PROFILE").env("PARTS", "deb");
    command.env("CARGO_TARGET_DIR", programs.parent().context("this program lies in no target directory")?);
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot run {command:?}"))?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    let mut files = std::fs::read_dir(folder).context("no folder was made")?;
    let is_package = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("pvrdmad_") && name.contains(&format!("-{revision}_")) && name.ends_with(".deb")
    };
    files.find_map(|entry| entry.ok().map(|entry| entry.path()).filter(is_package)).context("no package was built")
}

/// Checks the package with Debian's lintian.
fn lintian(root: &Path, package: &Path) -> Result<()> {
    let folder = package.parent().context("a package without a folder")?;
    let script = format!(
        "mount -t proc proc '{root}/proc'; mount --bind '{}' '{root}/mnt'
         exec chroot '{root}' lintian --allow-root --fail-on error '/mnt/{}'",
        folder.display(),
        package.file_name().unwrap_or_default().to_string_lossy(),
        root = root.display(),
    );
    let output = Command::new("unshare")
        .args(["--mount", "sh", "-ec", &script])
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .output()
        .context("cannot run unshare")?;
    let said = [output.stdout, output.stderr].concat();
    ensure!(output.status.success(), "lintian: {}", String::from_utf8_lossy(&said));
    Ok(())
}

/// Life of the package from installation to purge.
fn life(vm: &Vm, [name, newer]: &[String; 2]) -> Result<String> {
    // The users exist before, because the files that `adduser` leaves do not belong to the package.
    vm.run(
        "groupadd vmm && useradd --no-create-home tenant && adduser tenant vmm && useradd --no-create-home stranger",
    )?;
    vm.run(&format!("{SNAPSHOT} > /tmp/before"))?;
    vm.run(&format!("apt-get install -y -q --no-install-recommends /mnt/{name}"))?;
    is(vm, "systemctl is-enabled pvrdmad", "disabled")?;
    is(vm, "systemctl is-active pvrdmad", "inactive")?;
    vm.run("systemd-analyze verify --man=no pvrdmad.service && adduser pvrdmad vmm")?;
    let config = "/etc/pvrdmad/pvrdmad.toml";
    vm.run(&format!("sed -i 's/^# group = .*/group = \"vmm\"/' {config} && echo 'group = \"vmm\"' >> {config}"))?;
    vm.run(&format!("setpriv --reuid pvrdmad --regid pvrdmad --init-groups pvrdmad check --config {config}"))?;
    vm.run("systemctl start pvrdmad")?;
    vm.run("pvrdmad status")?;
    used_by_another(vm)?;
    reloaded(vm, config)?;
    let seconds = killed_by_its_watchdog(vm)?;
    used_by_another(vm)?;
    upgraded(vm, newer, config)?;
    used_by_another(vm)?;

    vm.run("systemctl stop pvrdmad")?;
    is(vm, "systemctl is-active pvrdmad", "inactive")?;
    is(vm, "pgrep -u pvrdmad; find /run/pvrdmad -mindepth 1", "")?;

    // Removal stops the service, and keeps files that the package did not create.
    let drop_in = "/etc/systemd/system/pvrdmad.service.d";
    vm.run(&format!("mkdir {drop_in} && echo '# mine' > {drop_in}/mine.conf"))?;
    vm.run("systemctl start pvrdmad && apt-get purge -y -q pvrdmad")?;
    is(vm, &format!("cat {drop_in}/mine.conf && rm -r {drop_in}"), "# mine")?;
    is(vm, "pgrep -x pvrdmad", "")?;
    is(vm, "systemctl list-unit-files --no-legend 'pvrdmad*'", "")?;
    vm.run(&format!("{SNAPSHOT} > /tmp/after"))?;
    is(vm, "diff /tmp/before /tmp/after", "")?;
    Ok(format!("restarted by its watchdog after {seconds} s"))
}

/// Command of a user that uses two devices.
fn client(user: &str, options: &str) -> String {
    format!(
        "setpriv --reuid {user} --regid {user} --init-groups /run/guest-tests hca sockets {options} \
         /run/pvrdmad/vm0.sock /run/pvrdmad/vm1.sock"
    )
}

/// A user of the named group can use two devices, another user none.
fn used_by_another(vm: &Vm) -> Result<()> {
    vm.exec(&client("tenant", ""), LONG).and_then(|output| {
        ensure!(output.code == 0, "a user of the group: {}", output.text);
        Ok(())
    })?;
    let refused = vm.exec(&client("stranger", ""), SHORT)?;
    ensure!(refused.code != 0 && refused.text.contains("ermission denied"), "a stranger: {}", refused.text);
    Ok(())
}

/// A reload adds a device, and another reload that fails changes nothing.
fn reloaded(vm: &Vm, config: &str) -> Result<()> {
    let device = |name: &str, number: u8| {
        format!(
            "[[device]]\nname = \"{name}\"\nsocket = \"/run/pvrdmad/{name}.sock\"\nmac = \"52:54:00:00:00:{number:02x}\"\npin = \"registered\"\n"
        )
    };
    vm.write_file("/tmp/vm2", 0o644, device("vm2", 3).as_bytes())?;
    vm.run(&format!("cp {config} /tmp/kept && cat /tmp/vm2 >> {config} && systemctl reload pvrdmad"))?;
    vm.wait_until("test -S /run/pvrdmad/vm2.sock", SHORT)?;
    vm.run(&format!("cat /tmp/vm2 >> {config} && systemctl reload pvrdmad"))?;
    vm.wait_until("systemctl status pvrdmad | grep -q 'the last reload failed'", SHORT)?;
    vm.run("pvrdmad status --json | grep -c '\"name\":\"vm2\"' || pvrdmad status | grep vm2")?;
    vm.run(&format!("cp /tmp/kept {config} && systemctl reload pvrdmad"))?;
    vm.wait_until("! test -e /run/pvrdmad/vm2.sock", SHORT)
}

/// Upgrades the package under traffic of two devices: the new program is the main process of the same service, the
/// connection continues, and the configuration is kept.
fn upgraded(vm: &Vm, newer: &str, config: &str) -> Result<()> {
    let program = "readlink /proc/$(systemctl show -p MainPID --value pvrdmad)/exe";
    let own = "systemctl show -p MainPID --value pvrdmad";
    // The watchdog has restarted the service before.
    let state = "systemctl show -p ActiveState,NRestarts --value pvrdmad | xargs";
    let (before, file, active) = (vm.run(own)?, vm.run(&format!("sha256sum {config}"))?, vm.run(state)?);
    let traffic = vm.spawn(&format!("exec {}", client("tenant", "--hold")))?;
    traffic.wait_for_output("traffic", LONG)?;
    vm.run(&format!("apt-get install -y -q --no-install-recommends /mnt/{newer}"))?;
    ensure!(vm.run(own)? != before, "the old program is still the main process");
    continues(&traffic)?;
    is(vm, program, "/usr/bin/pvrdmad")?;
    is(vm, state, active.trim())?;
    // The shell of this command has spaces in front of the text.
    is(vm, "pgrep -x -f '[^ ]*pvrdmad --config.*' | wc -l", "1")?;
    is(vm, &format!("sha256sum {config}"), file.trim())?;
    traffic.kill()?;
    traffic.wait(SHORT)?;
    used_by_another(vm)?;
    vm.run("systemctl restart pvrdmad")?;
    is(vm, program, "/usr/bin/pvrdmad")?;
    is(vm, "dpkg-query -W -f '${Version}' pvrdmad | sed 's/.*-//'", "2")
}

/// Waits for traffic from now on.
fn continues(traffic: &Job) -> Result<()> {
    traffic.take(Duration::ZERO);
    let (output, ended) = traffic.take(LONG);
    ensure!(ended.is_none() && output.contains("traffic"), "a client of the old daemon: {output} ({ended:?})");
    Ok(())
}

/// The daemon hangs, and is restarted by the watchdog. Returns the seconds that this took.
fn killed_by_its_watchdog(vm: &Vm) -> Result<u64> {
    let restarts = "systemctl show -p NRestarts --value pvrdmad";
    is(vm, restarts, "0")?;
    let started = std::time::Instant::now();
    vm.run("kill -STOP $(systemctl show -p MainPID --value pvrdmad)")?;
    vm.wait_until(&format!("test \"$({restarts})\" = 1 && systemctl is-active -q pvrdmad"), LONG)?;
    vm.run("journalctl -u pvrdmad | grep -i 'watchdog timeout'")?;
    Ok(started.elapsed().as_secs())
}

/// Checks the output of a command, whatever its exit status.
fn is(vm: &Vm, command: &str, wanted: &str) -> Result<()> {
    let output = vm.exec(command, SHORT)?.text;
    if output.trim() != wanted {
        bail!("{command}: '{}' rather than '{wanted}'", output.trim());
    }
    Ok(())
}

/// Lists everything that a package could leave behind: files, users, groups, except those of the journal, of dpkg, or
/// of no package.
const SNAPSHOT: &str = "(find / /run -xdev \\( -path /proc -o -path /sys -o -path /dev -o -path /tmp -o -path /mnt \
    -o -path /var/log -o -path /var/lib/dpkg -o -path /var/cache -o -path /var/lib/apt -o -path /run/systemd -o -path /run/log \
    -o -path /run/user -o -path /run/udev -o -path /var/tmp -o -path /var/lib/systemd/timers -o -path '/etc/*-' \\) -prune -o -print; \
    cut -d: -f1 /etc/passwd /etc/shadow /etc/gshadow; cut -d: -f1,4 /etc/group) | sort";
