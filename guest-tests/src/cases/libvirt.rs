//! Two VMs of libvirt: the commands of the document add a device to each and start it.
//!
//! libvirt runs in a root directory of its own, visible only to it and to the commands: mounts, processes and saved
//! state are gone with the test.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::case::{Case, skip};
use super::pingpong::pingpong;
use super::recipe::recipe;
use crate::agent::PORT_NAME;
use crate::daemon::{self, Daemon, DaemonDevice};
use crate::endpoints::{Endpoints, bring_up};
use crate::guest_with_daemon::{IPV4, MAC, addresses};
use crate::image::{BACKPORTS, GuestImage, HostRoot};
use crate::pair::PVRDMA_DEVICE;
use crate::process::BoundChild;
use crate::vm::{Prepared, Vm, VmBuilder};

/// Document and marker of the commands.
pub(super) const RECIPE: (&str, &str) = ("docs/two-vms.md", "libvirt");
/// Names of the VMs in the commands.
const NAMES: [&str; 2] = ["vm0", "vm1"];
/// Packages. QEMU is that of the backports, which supports vfio-user.
const PACKAGES: [&str; 6] =
    ["-t", BACKPORTS, "libvirt-daemon", "libvirt-daemon-driver-qemu", "libvirt-clients", "qemu-system-x86"];
/// Settings without access control, which is not needed in a separate root directory without systemd.
const SETTINGS: &str = "\
user = \"root\"
group = \"root\"
security_driver = \"none\"
cgroup_controllers = []
namespaces = []
remember_owner = 0
stdio_handler = \"file\"
";
/// Time limit of each wait.
const PATIENCE: Duration = Duration::from_secs(180);

/// The only test.
pub(crate) fn cases() -> Vec<Case> {
    vec![Case::alone("slow/libvirt", two_vms).slow("installs libvirt; runs when asked for: --only slow/libvirt")]
}

fn two_vms(image: &GuestImage) -> Result<String> {
    if !rustix::process::geteuid().is_root() {
        return Err(skip("libvirt in a root directory of its own needs root"));
    }
    let root = HostRoot::build(image, "libvirt", &PACKAGES)
        .map_err(|error| skip(format!("there is no libvirt: {error:#}")))?;
    let directory = tempfile::Builder::new().prefix("guest-tests-").tempdir().context("cannot create a directory")?;
    let path = |name: &str| directory.path().join(name);
    // This is the path at which the `pvrdmad` of the commands looks for its daemon.
    let run = path("pvrdmad");
    fs::create_dir(&run).context("cannot create a directory")?;
    let device = |index: usize| DaemonDevice {
        name: NAMES[index].to_owned(),
        socket: run.join(format!("{}.sock", NAMES[index])),
        mac: MAC[index].to_owned(),
        options: format!(",nic-socket={}", run.join(format!("{}.nic", NAMES[index])).display()),
    };
    let daemon = Daemon::start(&run, &[device(0), device(1)])?;
    let prepare = |name: &str| VmBuilder::new(image, directory.path()).name(name).memory_mib(768).patience(3).prepare();
    let prepared: [Prepared; 2] = [prepare(NAMES[0])?, prepare(NAMES[1])?];
    for (prepared, name) in prepared.iter().zip(NAMES) {
        let write = fs::write(path(&format!("{name}-before.xml")), domain(prepared, image, name, &path(name))?);
        write.context("cannot describe a VM")?;
    }
    let lines = start(image, &root, directory.path())?;
    let said = || fs::read_to_string(path("log")).unwrap_or_default();
    let started = started(&lines, said);
    let result = started.and_then(|()| {
        let [a, b] = prepared;
        between(&[a.accept(Arc::clone(&lines))?, b.accept(Arc::clone(&lines))?])
    });
    result.with_context(|| format!("output:\n{}\n{}", said(), daemon.log_tail()))
}

/// Waits until the commands are finished.
fn started(lines: &Mutex<BoundChild>, said: impl Fn() -> String) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !said().lines().any(|line| line == DONE) {
        let ended = lines.lock().unwrap_or_else(std::sync::PoisonError::into_inner).exited();
        ensure!(ended.is_none(), "a line of {} failed", RECIPE.0);
        ensure!(Instant::now() < deadline, "the VMs are not started after {} s", PATIENCE.as_secs());
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Brings both guests up and runs a ping-pong between them.
fn between(vms: &[Vm; 2]) -> Result<String> {
    let play = || {
        for (end, vm) in vms.iter().enumerate() {
            vm.wait_boot()?;
            bring_up(vm, &addresses(end), 1500)?;
        }
        let [a, b] = vms;
        let endpoints = Endpoints::new([a, b], PVRDMA_DEVICE, IPV4, Duration::from_secs(120));
        let endpoints = endpoints.with_gids(IPV4.map(Into::into))?;
        Ok([pingpong(&endpoints, 1, "ibv_rc_pingpong", "")?, pingpong(&endpoints, 0, "ibv_rc_pingpong", "-c")?])
    };
    let result: Result<_> = play();
    Ok(result.with_context(|| format!("{}\n{}", vms[0].diagnosis(), vms[1].diagnosis()))?.join(", "))
}

/// Returns a VM definition before RDMA is added: it boots the image.
fn domain(prepared: &Prepared, image: &GuestImage, name: &str, console: &Path) -> Result<String> {
    let arguments = prepared.boot_arguments();
    let kernel_line = arguments.iter().skip_while(|argument| *argument != "-append").nth(1);
    Ok(format!(
        "<domain type='qemu'>
  <name>{name}</name>
  <memory unit='MiB'>768</memory>
  <os>
    <type arch='x86_64' machine='q35'>hvm</type>
    <kernel>{kernel}</kernel>
    <initrd>{initrd}</initrd>
    <cmdline>{line}</cmdline>
  </os>
  <features><acpi/></features>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <disk type='file'>
      <driver name='qemu' type='raw'/>
      <source file='{disk}'/>
      <target dev='vda' bus='virtio'/>
      <readonly/>
    </disk>
    <rng model='virtio'><backend model='random'>/dev/urandom</backend></rng>
    <serial type='file'><source path='{console}'/></serial>
    <channel type='unix'>
      <source mode='connect' path='{agent}'/>
      <target type='virtio' name='{PORT_NAME}'/>
    </channel>
  </devices>
</domain>
",
        kernel = image.kernel().display(),
        initrd = prepared.initramfs().display(),
        line = kernel_line.context("QEMU gets no command line for the kernel")?,
        disk = image.root_disk().display(),
        console = console.with_extension("console").display(),
        agent = prepared.agent_socket().display(),
    ))
}

/// Checks that the domains report the warning, and have the device exactly once.
const WARNED: &str = r"
for vm in vm0 vm1; do
    virsh dumpxml --inactive $vm > $vm.after.xml
    grep -q 'do not migrate' $vm.after.xml
    test $(grep -c vfio-user-pci $vm.after.xml) = 2
    test $(grep -c '<memoryBacking>' $vm.after.xml) = 1
done
";

/// Text that is printed when both VMs run.
const DONE: &str = "both are started";

/// Starts libvirt, defines both VMs, then runs the document's commands.
fn start(image: &GuestImage, root: &HostRoot, directory: &Path) -> Result<Arc<Mutex<BoundChild>>> {
    let (document, name) = RECIPE;
    let lines = recipe(document, name)?;
    let bin = directory.join("bin");
    fs::create_dir(&bin).context("cannot create a directory")?;
    std::os::unix::fs::symlink(daemon::program()?, bin.join("pvrdmad")).context("cannot name the daemon")?;
    root.enter_in(&bin, "usr/bin/virsh")?;
    fs::write(directory.join("qemu.conf"), SETTINGS).context("cannot write libvirt's settings")?;
    let words: Vec<PathBuf> = vec![root.path(""), directory.to_owned(), image.directory().to_owned()];
    // The commands run twice. The second time they change nothing, and the warning is still present.
    let script = format!("{PLACE}\n{lines}\n{lines}\n{WARNED}\necho '{DONE}'\nwait\n");
    let log = File::create(directory.join("log")).context("cannot create a log")?;
    let errors = log.try_clone().context("cannot share a log")?;
    let path = format!("{}:{}:/usr/sbin:/sbin", bin.display(), std::env::var("PATH").unwrap_or_default());
    let process = BoundChild::spawn("libvirt", "unshare", |command| {
        command.args(["--mount", "--pid", "--fork", "--kill-child", "bash", "-euc", &script, "libvirt"]).args(words);
        command.stdin(Stdio::null()).stdout(log).stderr(errors).current_dir(directory);
        command.env("PATH", path).env("XDG_RUNTIME_DIR", directory).env_remove("RUNTIME_DIRECTORY");
    })?;
    Ok(Arc::new(Mutex::new(process)))
}

/// Enters the root directory with this machine's devices and the files of the test and of the image; nothing persists.
const PLACE: &str = r#"
root=${1%/} directory=$2 image=$3
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
for kept in run etc/libvirt/qemu var/lib/libvirt var/cache/libvirt var/log/libvirt; do
    mkdir -p "$root/$kept"
    mount -t tmpfs tmpfs "$root/$kept"
done
mkdir -p "$root/run/lock"
mount --bind qemu.conf "$root/etc/libvirt/qemu.conf"
mount -t tmpfs tmpfs "$root/mnt"
for seen in "$directory" "$image"; do
    mkdir -p "$root$seen"
    mount --bind "$seen" "$root$seen"
done
chroot "$root" /usr/sbin/libvirtd >libvirtd.log 2>&1 &
until virsh list >/dev/null 2>virsh.log; do sleep 0.1; done
virsh define vm0-before.xml
virsh define vm1-before.xml
"#;
