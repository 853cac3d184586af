//! Two VMs of one `pvrdma-vmm`, under KVM: on this machine where it can, otherwise in a guest that plays the host,
//! whose processor emulates virtualisation.

use std::cell::OnceCell;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use tempfile::TempDir;

use crate::daemon;
use crate::endpoints::{Endpoints, bring_up, gid_index};
use crate::guest_with_daemon::{GuestWithDaemon, cable, datagrams};
use crate::image::{Disk, GuestImage};
use crate::kvm_host::{Exits, KvmHost, PATIENCE, TOOLS};
use crate::pair::PVRDMA_DEVICE;
use crate::process::BoundChild;
use crate::vm::{Job, Nic, NicModel, Prepared, Vm, VmBuilder, has_kvm};

const NAMES: [&str; 2] = ["a", "b"];
const MAC: [&str; 2] = ["52:54:00:00:04:01", "52:54:00:00:04:02"];
const IPV4: [Ipv4Addr; 2] = [Ipv4Addr::new(192, 168, 81, 1), Ipv4Addr::new(192, 168, 81, 2)];
/// Processors of each.
const CPUS: [u32; 2] = [2, 1];
/// Of a guest of a daemon, at the other end of the uplink.
const OUTSIDE_MAC: &str = "52:54:00:00:04:03";
const OUTSIDE: Ipv4Addr = Ipv4Addr::new(192, 168, 81, 3);
/// The playing host's card, which is the uplink.
const CARD_MAC: &str = "52:54:00:00:04:10";
const MTU: u32 = 1500;
const MEMORY_MIB: u32 = 512;
const COMMAND_LINE: &str =
    "console=ttyS0 panic=0 mitigations=off nokaslr net.ifnames=0 reboot=k i8042.noaux agent=/dev/ttyS1";

/// The VMs, and what runs them.
#[derive(Debug)]
pub(crate) struct VmmPair {
    // Declared in the order in which they must be dropped.
    vms: [Vm; 2],
    outside: OnceCell<GuestWithDaemon>,
    host: Host,
    booted: Duration,
    image: GuestImage,
    directory: TempDir,
}

/// What runs `pvrdma-vmm`.
#[derive(Debug)]
enum Host {
    /// This machine, with KVM of its processor.
    Machine(Arc<Mutex<BoundChild>>, PathBuf),
    /// A guest.
    Guest(Job, Box<KvmHost>),
}

/// Files as `pvrdma-vmm` finds them, where it runs.
struct Place<'a> {
    kernel: &'a Path,
    disk: &'a Path,
    /// Of each VM.
    initramfs: [PathBuf; 2],
    agent: [PathBuf; 2],
    console: [PathBuf; 2],
    /// The link to others, if there is one.
    uplink: Option<String>,
}

impl Place<'_> {
    fn arguments(&self) -> Vec<String> {
        let mut words =
            ["--kernel", &self.kernel.to_string_lossy(), "--append", COMMAND_LINE].map(str::to_owned).to_vec();
        words.extend(self.uplink.iter().flat_map(|uplink| ["--uplink".to_owned(), uplink.clone()]));
        for end in 0..2 {
            words.push("--vm".to_owned());
            words.push(format!(
                "name={},mac={},cpus={},memory={MEMORY_MIB}M,disk-ro={},initramfs={},serial={},console={}",
                NAMES[end],
                MAC[end],
                CPUS[end],
                self.disk.display(),
                self.initramfs[end].display(),
                self.agent[end].display(),
                self.console[end].display()
            ));
        }
        words
    }
}

impl VmmPair {
    /// Boots both, on a network with an uplink, and brings their devices up.
    pub(crate) fn boot(image: &GuestImage) -> Result<Self> {
        Self::boot_on(image, true)
    }

    /// The same on a network that ends in the VMM.
    pub(crate) fn boot_alone(image: &GuestImage) -> Result<Self> {
        Self::boot_on(image, false)
    }

    fn boot_on(image: &GuestImage, uplink: bool) -> Result<Self> {
        let directory =
            tempfile::Builder::new().prefix("guest-tests-").tempdir().context("cannot create a directory")?;
        let own = directory.path();
        let prepare = |name| VmBuilder::new(image, own).name(name).patience(PATIENCE).prepare();
        let prepared = [prepare(NAMES[0])?, prepare(NAMES[1])?];
        let (host, vms) = match has_kvm() {
            true => on_machine(image, own, prepared, uplink)?,
            false => in_guest(image, own, prepared, uplink)?,
        };
        let started = Instant::now();
        for vm in &vms {
            vm.wait_boot().with_context(|| host.diagnosis())?;
        }
        let (outside, booted) = (OnceCell::new(), started.elapsed());
        let pair = Self { vms, outside, host, booted, image: image.clone(), directory };
        for end in 0..2 {
            pair.bring_up(end).with_context(|| pair.diagnosis())?;
        }
        Ok(pair)
    }

    /// Loads drivers and sets addresses in a guest that has just booted.
    pub(crate) fn bring_up(&self, end: usize) -> Result<()> {
        let vm = &self.vms[end];
        bring_up(vm, &[IPV4[end].into()], MTU)?;
        gid_index(vm, PVRDMA_DEVICE, IPV4[end].into()).map(drop)
    }

    /// The guests.
    pub(crate) fn vms(&self) -> [&Vm; 2] {
        [&self.vms[0], &self.vms[1]]
    }

    /// Their addresses.
    pub(crate) const fn addresses(&self) -> [Ipv4Addr; 2] {
        IPV4
    }

    /// How programs in them reach each other.
    pub(crate) fn endpoints(&self) -> Result<Endpoints<'_>> {
        Self::between(self.vms(), IPV4)
    }

    /// The same for the first of them and a guest of a daemon, at the other end of the uplink.
    pub(crate) fn uplink_endpoints(&self) -> Result<Endpoints<'_>> {
        let outside = match self.outside.get() {
            Some(outside) => outside,
            None => {
                let started = self.start_outside()?;
                self.outside.get_or_init(|| started)
            }
        };
        Self::between([&self.vms[0], outside.vm()], [IPV4[0], OUTSIDE])
    }

    fn between<'a>(vms: [&'a Vm; 2], ip: [Ipv4Addr; 2]) -> Result<Endpoints<'a>> {
        Endpoints::new(vms, PVRDMA_DEVICE, ip, Duration::from_secs(60) * PATIENCE).with_gids(ip.map(IpAddr::V4))
    }

    fn start_outside(&self) -> Result<GuestWithDaemon> {
        let own = self.directory.path().join("outside");
        let [theirs, ours] = cable(self.directory.path());
        let uplink = format!("uplink={}", datagrams(&ours, &theirs));
        let outside = GuestWithDaemon::start(&self.image, &own, "outside", OUTSIDE_MAC, &uplink)?;
        outside.bring_up(&[OUTSIDE.into()], MTU)?;
        Ok(outside)
    }

    /// How many processors each has.
    pub(crate) const fn cpus(&self) -> [u32; 2] {
        CPUS
    }

    /// Waits for the end of the VMM, after that of its last VM, and returns what it said.
    pub(crate) fn ended(&self) -> Result<String> {
        match &self.host {
            Host::Machine(process, log) => {
                let mut process = process.lock().map_err(|_| anyhow!("somebody panicked"))?;
                let status = process.wait(Duration::from_secs(60)).context("the VMM does not end")?;
                ensure!(status.success(), "the VMM ended with {status}");
                std::fs::read_to_string(log).context("no log of the VMM")
            }
            Host::Guest(job, _) => job.wait_success(Duration::from_secs(60)),
        }
    }

    /// Which KVM runs them, and how long they took to boot.
    pub(crate) fn description(&self) -> String {
        let kvm = match &self.host {
            Host::Machine(..) => "KVM of this machine",
            Host::Guest(..) => "kvm_amd on emulated SVM, in a guest that plays the host",
        };
        format!("{kvm}; both up after {:.0} s", self.booted.as_secs_f64())
    }

    /// What the VMM and the guests' consoles say.
    pub(crate) fn diagnosis(&self) -> String {
        self.host.diagnosis()
    }

    /// Kills the VMM, and waits until it has gone.
    pub(crate) fn kill(&self) -> Result<()> {
        match &self.host {
            Host::Machine(process, _) => {
                process.lock().map_err(|_| anyhow!("somebody panicked"))?.kill();
                Ok(())
            }
            Host::Guest(job, _) => {
                job.kill()?;
                job.wait(Duration::from_secs(60)).map(drop)
            }
        }
    }

    /// The guest that runs the VMM, if one does.
    pub(crate) fn host(&self) -> Option<&KvmHost> {
        match &self.host {
            Host::Machine(..) => None,
            Host::Guest(_, host) => Some(host),
        }
    }

    /// How often the processors of each VM have left the guest.
    pub(crate) fn exits(&self) -> Result<Vec<Exits>> {
        Exits::parse(&self.host.shell(&Exits::script(&self.host.process_id()?))?)
    }

    /// Waits until the VMM has so many VMs.
    pub(crate) fn wait_for_vms(&self, count: usize) -> Result<()> {
        let list = format!("ls -d /sys/kernel/debug/kvm/{}-*", self.host.process_id()?);
        self.host.shell(&format!("until [ $({list} 2>/dev/null | wc -l) = {count} ]; do sleep 0.05; done")).map(drop)
    }
}

impl Host {
    /// Runs a script where the VMM runs.
    fn shell(&self, script: &str) -> Result<String> {
        match self {
            Self::Machine(..) => {
                let output = std::process::Command::new("sh").args(["-c", script]).output().context("cannot run sh")?;
                Ok(String::from_utf8_lossy(&output.stdout).into_owned())
            }
            Self::Guest(_, host) => host.vm().run(script),
        }
    }

    /// The VMM's.
    fn process_id(&self) -> Result<String> {
        match self {
            Self::Machine(process, _) => Ok(process.lock().map_err(|_| anyhow!("somebody panicked"))?.id().to_string()),
            Self::Guest(..) => Ok(self.shell("pidof pvrdma-vmm")?.trim().to_owned()),
        }
    }

    fn diagnosis(&self) -> String {
        match self {
            Self::Machine(_, log) => format!("--- pvrdma-vmm\n{}", std::fs::read_to_string(log).unwrap_or_default()),
            Self::Guest(job, host) => {
                let state = host.vm().exec(STATE, Duration::from_secs(60));
                let state = state.map_or_else(|error| error.to_string(), |output| output.text);
                format!("--- pvrdma-vmm\n{}\n{state}", job.output())
            }
        }
    }
}

/// What the threads of the VMM do, how often each VM has left the guest for what, and the ends of their consoles.
const STATE: &str = "
    for second in 0 1; do
        echo \"--- threads\"
        for task in /proc/$(pidof pvrdma-vmm)/task/*; do
            echo $(cat $task/comm) $(cut -d' ' -f3,14,15 $task/stat) in $(cat $task/wchan)
        done
        echo \"--- exits\"
        for vm in /sys/kernel/debug/kvm/*-*; do
            (cd $vm && echo ${vm##*/} $(grep . io_exits mmio_exits irq_exits halt_exits irq_injections 2>/dev/null))
        done
        sleep 1
    done
    tail -n 40 /run/a.console /run/b.console";

/// Runs the VMM on this machine.
fn on_machine(image: &GuestImage, directory: &Path, prepared: [Prepared; 2], uplink: bool) -> Result<(Host, [Vm; 2])> {
    let (kernel, disk, log) = (image.kernel(), image.root_disk(), directory.join("vmm.log"));
    let of = |path: fn(&Prepared) -> &Path| [0, 1].map(|end: usize| path(&prepared[end]).to_owned());
    let place = Place {
        kernel: &kernel,
        disk: &disk,
        initramfs: of(Prepared::initramfs),
        agent: of(Prepared::agent_socket),
        console: NAMES.map(|name| directory.join(format!("{name}.console"))),
        uplink: uplink.then(|| {
            let [ours, theirs] = cable(directory);
            datagrams(&ours, &theirs)
        }),
    };
    let program = daemon::vmm_program()?;
    let output = std::fs::File::create(&log).context("cannot create a log")?;
    let output = (output.try_clone().context("cannot share a log")?, output);
    let process = BoundChild::spawn("pvrdma-vmm", &program.to_string_lossy(), |command| {
        command.args(place.arguments()).stdin(std::process::Stdio::null());
        command.stdout(output.0).stderr(output.1);
    })?;
    let process = Arc::new(Mutex::new(process));
    let [a, b] = prepared;
    let vms = [a.accept(Arc::clone(&process))?, b.accept(Arc::clone(&process))?];
    Ok((Host::Machine(process, log), vms))
}

/// Boots a guest that plays the host, and runs the VMM there. The agents' lines go through it.
fn in_guest(image: &GuestImage, directory: &Path, prepared: [Prepared; 2], uplink: bool) -> Result<(Host, [Vm; 2])> {
    let disk = Disk::new(directory)?;
    disk.add(&daemon::vmm_program()?, "pvrdma-vmm")?;
    disk.add(&image.kernel(), "vmlinuz")?;
    // They are the same.
    disk.add(prepared[0].initramfs(), "initramfs")?;
    let names = NAMES.map(port);
    let ports = [0, 1].map(|end: usize| (names[end].as_str(), prepared[end].agent_socket()));
    let host = if uplink {
        let [local, remote] = cable(directory);
        let card = Nic { model: NicModel::Virtio, mac: CARD_MAC.to_owned(), local, remote };
        let host = KvmHost::boot_with(image, directory, disk, &ports, |builder| builder.nic(card))?;
        host.vm().run("modprobe virtio_net && modprobe af_packet && ip link set eth0 up")?;
        host
    } else {
        KvmHost::boot(image, directory, disk, &ports)?
    };
    let place = Place {
        kernel: &Path::new(TOOLS).join("vmlinuz"),
        disk: Path::new("/dev/vda"),
        initramfs: [(); 2].map(|()| Path::new(TOOLS).join("initramfs")),
        agent: [host.port(&names[0])?, host.port(&names[1])?],
        console: NAMES.map(|name| PathBuf::from(format!("/run/{name}.console"))),
        uplink: uplink.then(|| "af_packet:eth0".to_owned()),
    };
    let words: Vec<_> = place.arguments().into_iter().map(|word| format!("'{word}'")).collect();
    let job =
        host.vm().spawn(&format!("RUST_BACKTRACE=1 RUST_LOG=info exec {TOOLS}/pvrdma-vmm {}", words.join(" ")))?;
    let process = host.vm().process();
    let [a, b] = prepared;
    let vms = [a.accept(Arc::clone(&process))?, b.accept(process)?];
    Ok((Host::Guest(job, Box::new(host)), vms))
}

fn port(name: &str) -> String {
    format!("agent-{name}")
}
