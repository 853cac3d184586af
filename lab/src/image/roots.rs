//! The root directories: a minimal Debian 13, and from it the builder system (QEMU, compiler) and the guest's system.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use super::apt;
use super::guest_image::GuestImage;
use super::log_command::{StepLog, output_in};

/// The release of Debian in the guests; its backports have a QEMU with a vfio-user client.
pub(crate) const SUITE: &str = "trixie";
/// Newer versions of some of its packages.
pub const BACKPORTS: &str = "trixie-backports";

/// Programs needed on this machine, as `program:package`.
pub(crate) const TOOLS: [&str; 5] =
    ["debootstrap:debootstrap", "mke2fs:e2fsprogs", "setpriv:util-linux", "xz:xz-utils", "cp:coreutils"];

/// Packages of the builder system besides the kernel headers.
pub(crate) const BUILDER_PACKAGES: [&str; 10] = [
    "qemu-system-x86",
    "gcc",
    "libc6-dev",
    "make",
    "xz-utils",
    "kmod",
    "libibverbs-dev",
    "tshark",
    "iperf3",
    // For the container image of the lab.
    "e2fsprogs",
];

/// Packages of the guest's system.
pub(crate) const GUEST_PACKAGES: [&str; 17] = [
    "rdma-core",
    "ibverbs-utils",
    "ibverbs-providers",
    "rdmacm-utils",
    "perftest",
    "infiniband-diags",
    "iproute2",
    "iputils-ping",
    "kmod",
    "pciutils",
    "nvme-cli",
    "fio",
    "procps",
    "ethtool",
    "tcpdump",
    "iperf3",
    "wireguard-tools",
];

/// Checks that the tools of this machine are installed, and installs missing ones with apt-get.
pub(crate) fn install_tools(log: &StepLog) -> Result<()> {
    if !rustix::process::getuid().is_root() {
        bail!(
            "building the guest image needs root (debootstrap and chroot); run it once as root with the same \
             PVRDMA_BED_DIR, after that the image can be used without"
        );
    }
    let missing: Vec<&str> = TOOLS
        .iter()
        .filter_map(|tool| tool.split_once(':'))
        .filter(|(program, _)| !is_installed(program))
        .map(|(_, package)| package)
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    if !is_installed("apt-get") {
        bail!("these packages are missing and there is no apt-get: {}", missing.join(" "));
    }
    log.shell("apt-get update -q")?;
    log.run(
        Command::new("apt-get")
            .args(["install", "-y", "-q", "--no-install-recommends"])
            .args(missing)
            .env("DEBIAN_FRONTEND", "noninteractive"),
    )
}

/// Returns the dependencies of the base system.
pub(crate) fn base_key() -> Result<String> {
    Ok(format!("{SUITE} {} {DPKG_CONFIG} {APT_CONFIG}", apt::mirror()?))
}

/// Builds a minimal Debian, from which the others are copied.
pub(crate) fn base(image: &GuestImage, log: &StepLog) -> Result<()> {
    let root = image.base_root();
    remove_tree(&root)?;
    let mirror = apt::mirror()?;
    write(&root.join("etc/dpkg/dpkg.cfg.d/bed"), DPKG_CONFIG)?;
    log.run(Command::new("debootstrap").args(["--variant=minbase", SUITE]).arg(&root).arg(&mirror))?;
    write(&root.join("etc/apt/apt.conf.d/90bed"), APT_CONFIG)?;
    write(&root.join("etc/apt/sources.list"), &format!("deb {mirror} {SUITE} main\ndeb {mirror} {BACKPORTS} main\n"))?;
    std::fs::copy("/etc/resolv.conf", root.join("etc/resolv.conf")).context("cannot copy /etc/resolv.conf")?;
    log.shell_in(&root, "apt-get update -q")
}

/// Builds a minimal Debian of any release. Packages come from `suites`, of which the first is that release.
pub(super) fn debootstrap(root: &Path, suites: &[&str], log: &StepLog) -> Result<()> {
    let release = suites.first().context("no release")?;
    let mirror = apt::mirror()?;
    write(&root.join("etc/dpkg/dpkg.cfg.d/bed"), DPKG_CONFIG)?;
    // A debootstrap older than the release has no script of that name; all scripts for Debian are the same.
    let scripts = Path::new("/usr/share/debootstrap/scripts");
    let named = scripts.join(release);
    let script = if named.exists() { named } else { scripts.join("sid") };
    let mut debootstrap = Command::new("debootstrap");
    log.run(debootstrap.args(["--variant=minbase", release]).arg(root).arg(&mirror).arg(script))?;
    write(&root.join("etc/apt/apt.conf.d/90bed"), APT_CONFIG)?;
    let source = |suite| format!("deb [check-valid-until=no] {mirror} {suite} main\n");
    write(&root.join("etc/apt/sources.list"), &suites.iter().map(source).collect::<String>())?;
    std::fs::copy("/etc/resolv.conf", root.join("etc/resolv.conf")).context("cannot copy /etc/resolv.conf")?;
    Ok(())
}

/// Builds the builder system: QEMU, kernel headers, a compiler and Wireshark without its GUI.
pub(crate) fn builder(image: &GuestImage, log: &StepLog) -> Result<()> {
    let root = image.builder_root();
    copy_tree(log, &image.base_root(), &root)?;
    // This takes the kernel of the release, which the driver's source package matches; the backports have a newer one.
    let version =
        output_in(&root, "apt-cache madison linux-image-amd64 | grep -w trixie/main | head -n 1 | cut -d '|' -f 2")?;
    let release = output_in(
        &root,
        &format!("apt-cache show linux-image-amd64={version} | sed -n 's/^Depends:.*linux-image-\\([^ ,]*\\).*/\\1/p'"),
    )?;
    if release.is_empty() {
        bail!("cannot find the kernel of {SUITE} in the mirror's package list");
    }
    log.shell_in(
        &root,
        &format!("apt-get install -y -q -t {BACKPORTS} {} linux-headers-{release}", BUILDER_PACKAGES.join(" ")),
    )?;
    write(&image.dir.join("kernel-release"), &release)
}

/// Builds the userland of the guests.
pub(crate) fn guest(image: &GuestImage, log: &StepLog) -> Result<()> {
    let root = image.guest_root();
    copy_tree(log, &image.base_root(), &root)?;
    log.shell_in(
        &root,
        &format!("apt-get install -y -q {}; apt-get clean; rm -rf /var/lib/apt/lists/*", GUEST_PACKAGES.join(" ")),
    )
}

/// Removes a directory with everything in it.
pub(crate) fn remove_tree(path: &Path) -> Result<()> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// Writes a file and creates the directories above it.
pub(crate) fn write(path: &Path, text: &str) -> Result<()> {
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
    }
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// Writes a program and creates the directories above it.
///
/// Another process writes the file, because a file that is open for writing cannot be executed. If this process wrote
/// it, a child that another thread starts meanwhile could inherit the open descriptor.
pub fn executable(path: &Path, text: &str) -> Result<()> {
    let mut install = Command::new("install");
    install.args(["-D", "-m", "755", "/dev/stdin"]).arg(path).stdin(Stdio::piped());
    let mut install = install.spawn().context("cannot run install")?;
    let written = install.stdin.take().context("install has no input")?.write_all(text.as_bytes());
    let status = install.wait().context("cannot wait for install")?;
    written.with_context(|| format!("cannot write {}", path.display()))?;
    ensure!(status.success(), "install of {} ended with {status}", path.display());
    Ok(())
}

/// Copies a directory with everything in it.
pub(crate) fn copy_tree(log: &StepLog, from: &Path, to: &Path) -> Result<()> {
    remove_tree(to)?;
    log.run(Command::new("cp").arg("-a").arg(from).arg(to))
}

/// Creates a file system from a directory, for guests that mount it read-only.
pub(crate) fn file_system(log: &StepLog, root: &Path, disk: &Path, size: &str) -> Result<()> {
    log.shell(&format!("rm -f '{}'", disk.display()))?;
    log.run(
        Command::new("mke2fs")
            .args(["-q", "-t", "ext4", "-O", "^has_journal", "-m", "0", "-d"])
            .arg(root)
            .arg(disk)
            .arg(size),
    )
}

fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .any(|directory| directory.join(program).exists())
}

/// dpkg settings. The image can be rebuilt, so fsync is switched off. Manuals are left out because they are not used;
/// copyright files are kept for those who redistribute the image.
pub(super) const DPKG_CONFIG: &str = "force-unsafe-io\npath-exclude=/usr/share/doc/*\n\
                           path-include=/usr/share/doc/*/copyright\npath-exclude=/usr/share/man/*\n\
                           path-exclude=/usr/share/locale/*\n";

pub(super) const APT_CONFIG: &str = "APT::Install-Recommends \"false\";\nAPT::Sandbox::User \"root\";\nAcquire::Languages \"none\";\n\
                          Acquire::Retries \"3\";\nDpkg::Use-Pty \"false\";\n";
