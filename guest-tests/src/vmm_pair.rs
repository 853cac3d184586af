//! Two VMs of one `pvrdma-vmm`, under KVM: on this machine where it can, otherwise in a guest that plays the host,
//! whose processor emulates virtualisation.

use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use tempfile::TempDir;

use crate::daemon;
use crate::endpoints::{Endpoints, gid_index, network_script};
use crate::image::{Disk, GuestImage};
use crate::kvm_host::{Exits, KvmHost, PATIENCE, TOOLS};
use crate::pair::PVRDMA_DEVICE;
use crate::process::BoundChild;
use crate::vm::{Job, Prepared, Vm, VmBuilder, has_kvm};

const NAMES: [&str; 2] = ["a", "b"];
const MAC: [&str; 2] = ["52:54:00:00:04:01", "52:54:00:00:04:02"];
const IPV4: [Ipv4Addr; 2] = [Ipv4Addr::new(192, 168, 81, 1), Ipv4Addr::new(192, 168, 81, 2)];
const MTU: u32 = 1500;
const MEMORY_MIB: u32 = 512;
const COMMAND_LINE: &str =
    "console=ttyS0 panic=0 mitigations=off nokaslr net.ifnames=0 reboot=k i8042.noaux agent=/dev/ttyS1";

/// The VMs, and what runs them.
#[derive(Debug)]
pub(crate) struct VmmPair {
    // Declared in the order in which they must be dropped.
    vms: [Vm; 2],
    host: Host,
    booted: Duration,
    _directory: TempDir,
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
}

impl Place<'_> {
    fn arguments(&self) -> Vec<String> {
        let mut words =
            ["--kernel", &self.kernel.to_string_lossy(), "--append", COMMAND_LINE].map(str::to_owned).to_vec();
        for end in 0..2 {
            words.push("--vm".to_owned());
            words.push(format!(
                "name={},mac={},memory={MEMORY_MIB}M,disk-ro={},initramfs={},serial={},console={}",
                NAMES[end],
                MAC[end],
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
    /// Boots both and brings their devices up.
    pub(crate) fn boot(image: &GuestImage) -> Result<Self> {
        let directory =
            tempfile::Builder::new().prefix("guest-tests-").tempdir().context("cannot create a directory")?;
        let own = directory.path();
        let prepare = |name| VmBuilder::new(image, own).name(name).patience(PATIENCE).prepare();
        let prepared = [prepare(NAMES[0])?, prepare(NAMES[1])?];
        let (host, vms) = match has_kvm() {
            true => on_machine(image, own, prepared)?,
            false => in_guest(image, own, prepared)?,
        };
        let started = Instant::now();
        for vm in &vms {
            vm.wait_boot().with_context(|| host.diagnosis())?;
        }
        let pair = Self { vms, host, booted: started.elapsed(), _directory: directory };
        for end in 0..2 {
            pair.bring_up(end).with_context(|| pair.diagnosis())?;
        }
        Ok(pair)
    }

    /// Loads drivers and sets addresses in a guest that has just booted.
    pub(crate) fn bring_up(&self, end: usize) -> Result<()> {
        let vm = &self.vms[end];
        vm.run(&network_script("vmxnet3", &[IPV4[end].into()], MTU))?;
        vm.run("modprobe ib_uverbs && modprobe rdma_ucm && modprobe vmw_pvrdma")?;
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
        let ip = IPV4.map(IpAddr::V4);
        let endpoints = Endpoints {
            vms: self.vms(),
            device: [PVRDMA_DEVICE; 2],
            gid_index: [0; 2],
            ip,
            interface: ["eth0"; 2],
            tcp: IPV4,
            path_mtu: None,
            patience: Duration::from_secs(60) * PATIENCE,
        };
        endpoints.with_gids(ip)
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
        match &self.host {
            Host::Machine(process, _) => {
                let id = process.lock().map_err(|_| anyhow!("somebody panicked"))?.id();
                let output = std::process::Command::new("sh").args(["-c", &Exits::script(&id.to_string())]).output();
                Exits::parse(&String::from_utf8_lossy(&output.context("cannot run sh")?.stdout))
            }
            Host::Guest(_, host) => Exits::parse(&host.vm().run(&Exits::script("$(pidof pvrdma-vmm)"))?),
        }
    }
}

impl Host {
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
fn on_machine(image: &GuestImage, directory: &Path, prepared: [Prepared; 2]) -> Result<(Host, [Vm; 2])> {
    let (kernel, disk, log) = (image.kernel(), image.root_disk(), directory.join("vmm.log"));
    let of = |path: fn(&Prepared) -> &Path| [0, 1].map(|end: usize| path(&prepared[end]).to_owned());
    let place = Place {
        kernel: &kernel,
        disk: &disk,
        initramfs: of(Prepared::initramfs),
        agent: of(Prepared::agent_socket),
        console: NAMES.map(|name| directory.join(format!("{name}.console"))),
    };
    let program = daemon::vmm_program()?;
    let output = std::fs::File::create(&log).context("cannot create a log")?;
    let process = BoundChild::spawn("pvrdma-vmm", &program.to_string_lossy(), |command| {
        command.args(place.arguments()).stdin(std::process::Stdio::null()).stderr(output);
    })?;
    let process = Arc::new(Mutex::new(process));
    let [a, b] = prepared;
    let vms = [a.accept(Arc::clone(&process))?, b.accept(Arc::clone(&process))?];
    Ok((Host::Machine(process, log), vms))
}

/// Boots a guest that plays the host, and runs the VMM there. The agents' lines go through it.
fn in_guest(image: &GuestImage, directory: &Path, prepared: [Prepared; 2]) -> Result<(Host, [Vm; 2])> {
    let disk = Disk::new(directory)?;
    disk.add(&daemon::vmm_program()?, "pvrdma-vmm")?;
    disk.add(&image.kernel(), "vmlinuz")?;
    // They are the same.
    disk.add(prepared[0].initramfs(), "initramfs")?;
    let names = NAMES.map(port);
    let ports = [0, 1].map(|end: usize| (names[end].as_str(), prepared[end].agent_socket()));
    let host = KvmHost::boot(image, directory, disk, &ports)?;
    let place = Place {
        kernel: &Path::new(TOOLS).join("vmlinuz"),
        disk: Path::new("/dev/vda"),
        initramfs: [(); 2].map(|()| Path::new(TOOLS).join("initramfs")),
        agent: [host.port(&names[0])?, host.port(&names[1])?],
        console: NAMES.map(|name| PathBuf::from(format!("/run/{name}.console"))),
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
