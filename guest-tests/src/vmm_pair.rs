//! Two VMs of one `pvrdma-vmm`, under KVM: on this machine if it can, otherwise in a guest that acts as the host, whose
//! processor emulates virtualisation.

use std::cell::OnceCell;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use tempfile::TempDir;

use crate::daemon;
use crate::endpoints::{Endpoints, bring_up, gid_index};
use crate::guest_with_daemon::{GuestWithDaemon, HostOptions, cable, datagrams};
use crate::image::GuestImage;
use crate::kvm_bed::{CARD, DOORBELL_GUESTS, KvmBed, KvmBeds, VMM_GUESTS};
use crate::kvm_host::{self, Exits, PATIENCE, TOOLS};
use crate::pair::PVRDMA_DEVICE;
use crate::process::BoundChild;
use crate::vm::{Job, Prepared, Vm, VmBuilder, has_kvm, watchdog};

const MAC: [&str; 2] = ["52:54:00:00:04:01", "52:54:00:00:04:02"];
const IPV4: [Ipv4Addr; 2] = [Ipv4Addr::new(192, 168, 81, 1), Ipv4Addr::new(192, 168, 81, 2)];
/// Number of processors of each VM.
const CPUS: [u32; 2] = [2, 1];
/// Ethernet address of a daemon's guest at the other end of the uplink.
const OUTSIDE_MAC: &str = "52:54:00:00:04:03";
const OUTSIDE: Ipv4Addr = Ipv4Addr::new(192, 168, 81, 3);
const MTU: u32 = 1500;
const MEMORY_MIB: u32 = 512;
/// Kernel command line of the guests, without the parameters of the watchdog.
pub(crate) const COMMAND_LINE: &str =
    "console=ttyS0 panic=0 mitigations=off nokaslr net.ifnames=0 reboot=k i8042.noaux agent=/dev/ttyS1";

/// The VMs and their VMM.
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

/// Machine that runs `pvrdma-vmm`.
#[derive(Debug)]
enum Host {
    /// This machine, with the KVM of its processor.
    Machine(Arc<Mutex<BoundChild>>, PathBuf),
    /// A guest that acts as the host.
    Guest(Job, Rc<KvmBed>),
}

/// Kind of the pair.
#[derive(Clone, Copy)]
struct Kind {
    names: [&'static str; 2],
    /// The network has an uplink.
    uplink: bool,
    /// Doorbell mode of each VM.
    doorbells: [&'static str; 2],
}

/// Paths as `pvrdma-vmm` finds them on the machine that it runs on.
struct Place<'a> {
    kind: Kind,
    kernel: &'a Path,
    disk: &'a Path,
    /// Factor by which everything takes longer than usual.
    patience: u32,
    /// Initramfs of each VM.
    initramfs: [PathBuf; 2],
    agent: [PathBuf; 2],
    console: [PathBuf; 2],
    /// The uplink, if there is one.
    uplink: Option<String>,
}

impl Place<'_> {
    fn arguments(&self) -> Vec<String> {
        let line = format!("{COMMAND_LINE}{}", watchdog(self.patience));
        let mut words = ["--kernel", &self.kernel.to_string_lossy(), "--append", &line].map(str::to_owned).to_vec();
        words.extend(self.uplink.iter().flat_map(|uplink| ["--uplink".to_owned(), uplink.clone()]));
        for end in 0..2 {
            words.push("--vm".to_owned());
            words.push(format!(
                "name={},mac={},cpus={},memory={MEMORY_MIB}M,doorbells={},disk-ro={},initramfs={},serial={},console={}",
                self.kind.names[end],
                MAC[end],
                CPUS[end],
                self.kind.doorbells[end],
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
    /// Boots both VMs on a network with an uplink, and brings their devices up.
    pub(crate) fn boot(image: &GuestImage, beds: &KvmBeds) -> Result<Self> {
        Self::boot_on(image, beds, Kind { names: VMM_GUESTS, uplink: true, doorbells: ["trapped"; 2] })
    }

    /// Same as [`boot`](Self::boot), on a network that ends in the VMM.
    pub(crate) fn boot_alone(image: &GuestImage, beds: &KvmBeds) -> Result<Self> {
        Self::boot_on(image, beds, Kind { names: VMM_GUESTS, uplink: false, doorbells: ["trapped"; 2] })
    }

    /// Same as [`boot_alone`](Self::boot_alone), but with trapped doorbells in the first VM, and doorbells that are
    /// memory while a program polls in the second. A processor is reserved for the polling thread.
    pub(crate) fn boot_with_doorbells(image: &GuestImage, beds: &KvmBeds) -> Result<Self> {
        let doorbells = ["trapped", "mapped"];
        let pair = Self::boot_on(image, beds, Kind { names: DOORBELL_GUESTS, uplink: false, doorbells })?;
        pair.spare_a_processor().with_context(|| pair.diagnosis())?;
        Ok(pair)
    }

    fn boot_on(image: &GuestImage, beds: &KvmBeds, kind: Kind) -> Result<Self> {
        match has_kvm() {
            true => Self::boot_where(image, kind, on_machine),
            false => beds.start(image, |bed| {
                Self::boot_where(image, kind, |image, _, kind| in_guest(image, Rc::clone(&bed), kind))
            }),
        }
    }

    fn boot_where(
        image: &GuestImage,
        kind: Kind,
        start: impl FnOnce(&GuestImage, &Path, Kind) -> Result<(Host, [Vm; 2])>,
    ) -> Result<Self> {
        let directory =
            tempfile::Builder::new().prefix("guest-tests-").tempdir().context("cannot create a directory")?;
        let (host, vms) = start(image, directory.path(), kind)?;
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

    /// Returns the addresses of the guests.
    pub(crate) const fn addresses(&self) -> [Ipv4Addr; 2] {
        IPV4
    }

    /// Returns the endpoints by which programs in the guests reach each other.
    pub(crate) fn endpoints(&self) -> Result<Endpoints<'_>> {
        Self::between(self.vms(), IPV4)
    }

    /// Returns the endpoints of the first VM and of a daemon's guest at the other end of the uplink.
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
        let [ours, theirs] = match &self.host {
            Host::Machine(..) => reversed(cable(self.directory.path())),
            Host::Guest(_, bed) => bed.cable(),
        };
        let options = HostOptions::new(format!("uplink={}", datagrams(&ours, &theirs)));
        let outside = GuestWithDaemon::start(&self.image, &own, "outside", OUTSIDE_MAC, &options)?;
        outside.bring_up(&[OUTSIDE.into()], MTU)?;
        Ok(outside)
    }

    /// Returns the number of processors of each VM.
    pub(crate) const fn cpus(&self) -> [u32; 2] {
        CPUS
    }

    /// Waits for the end of the VMM, which follows the end of its last VM, and returns its output.
    pub(crate) fn ended(&self) -> Result<String> {
        match &self.host {
            Host::Machine(process, log) => {
                let mut process = process.lock().map_err(|_| anyhow!("a thread panicked"))?;
                let status = process.wait(Duration::from_secs(60)).context("the VMM does not end")?;
                ensure!(status.success(), "the VMM ended with {status}");
                std::fs::read_to_string(log).context("no log of the VMM")
            }
            Host::Guest(job, _) => job.wait_success(Duration::from_secs(60)),
        }
    }

    /// Describes the KVM in use and the boot time.
    pub(crate) fn description(&self) -> String {
        let kvm = match &self.host {
            Host::Machine(..) => "KVM of this machine",
            Host::Guest(..) => "kvm_amd on emulated SVM, in a guest that plays the host",
        };
        format!("{kvm}; both up after {:.0} s", self.booted.as_secs_f64())
    }

    /// Returns the output of the VMM and the guests' consoles.
    pub(crate) fn diagnosis(&self) -> String {
        self.host.diagnosis()
    }

    /// Kills the VMM, and waits for its end.
    pub(crate) fn kill(&self) -> Result<()> {
        match &self.host {
            Host::Machine(process, _) => {
                process.lock().map_err(|_| anyhow!("a thread panicked"))?.kill();
                Ok(())
            }
            Host::Guest(job, _) => {
                job.kill()?;
                job.wait(Duration::from_secs(60)).map(drop)
            }
        }
    }

    /// Returns the guest that runs the VMM, if there is one.
    pub(crate) fn host(&self) -> Option<&Vm> {
        match &self.host {
            Host::Machine(..) => None,
            Host::Guest(_, bed) => Some(bed.vm()),
        }
    }

    /// Lets the guests run on all processors of a host that is itself a guest, see [`KvmBed::ON_ONE_PROCESSOR`].
    pub(crate) fn spread(&self) -> Result<()> {
        match &self.host {
            Host::Machine(..) => Ok(()),
            Host::Guest(_, bed) => bed.spread("pidof pvrdma-vmm"),
        }
    }

    /// Returns the number of VM exits of both VMs.
    pub(crate) fn exits(&self) -> Result<Exits> {
        Exits::parse(&self.host.shell(&Exits::script(&self.host.process_id()?))?)
    }

    /// Returns the number of VM exits of each VM.
    pub(crate) fn exits_of_each(&self) -> Result<[Exits; 2]> {
        let text = self.host.shell(&Exits::script_for_each(&self.host.process_id()?))?;
        Exits::parse_each(&text)?.try_into().map_err(|_| anyhow!("not two VMs: {text}"))
    }

    /// If the host is a guest, gives the threads that poll rings the processor that the guests do not run on.
    fn spare_a_processor(&self) -> Result<()> {
        let Host::Guest(_, bed) = &self.host else { return Ok(()) };
        let script = "moved=0
             for task in /proc/$(pidof pvrdma-vmm)/task/*; do
                 [ $(cat $task/comm) = doorbells ] && taskset -p 2 ${task##*/} && moved=$((moved + 1))
             done
             [ $moved = 1 ]";
        bed.vm().run(script).map(drop).context("no thread watches doorbells")
    }

    /// Waits until the VMM has `count` VMs.
    pub(crate) fn wait_for_vms(&self, count: usize) -> Result<()> {
        let list = Exits::script(&self.host.process_id()?);
        self.host
            .shell(&format!("until [ $({{ {list}; }} 2>/dev/null | wc -l) = {count} ]; do sleep 0.05; done"))
            .map(drop)
    }
}

impl Host {
    /// Runs a script on the machine that runs the VMM.
    fn shell(&self, script: &str) -> Result<String> {
        match self {
            Self::Machine(..) => kvm_host::on_machine(script),
            Self::Guest(_, bed) => bed.vm().run(script),
        }
    }

    /// Returns the process id of the VMM.
    fn process_id(&self) -> Result<String> {
        match self {
            Self::Machine(process, _) => Ok(process.lock().map_err(|_| anyhow!("a thread panicked"))?.id().to_string()),
            Self::Guest(..) => Ok(self.shell("pidof pvrdma-vmm")?.trim().to_owned()),
        }
    }

    fn diagnosis(&self) -> String {
        match self {
            Self::Machine(_, log) => format!("--- pvrdma-vmm\n{}", std::fs::read_to_string(log).unwrap_or_default()),
            Self::Guest(job, bed) => {
                let state = bed.vm().exec(STATE, Duration::from_secs(60));
                let state = state.map_or_else(|error| error.to_string(), |output| output.text);
                format!("--- pvrdma-vmm\n{}\n{state}", job.output())
            }
        }
    }
}

/// Script that prints the state of the VMM's threads, the number of VM exits of each VM by reason, and the ends of
/// their consoles.
pub(crate) const STATE: &str = "
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
    tail -n 40 /run/?.console";

/// Runs the VMM on this machine.
fn on_machine(image: &GuestImage, directory: &Path, kind: Kind) -> Result<(Host, [Vm; 2])> {
    let prepare = |name| VmBuilder::new(image, directory).name(name).prepare();
    let prepared = [prepare(kind.names[0])?, prepare(kind.names[1])?];
    let (kernel, disk, log) = (image.kernel(), image.root_disk(), directory.join("vmm.log"));
    let of = |path: fn(&Prepared) -> &Path| [0, 1].map(|end: usize| path(&prepared[end]).to_owned());
    let place = Place {
        kind,
        kernel: &kernel,
        disk: &disk,
        patience: 1,
        initramfs: of(Prepared::initramfs),
        agent: of(Prepared::agent_socket),
        console: kind.names.map(|name| directory.join(format!("{name}.console"))),
        uplink: kind.uplink.then(|| {
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

/// Runs the VMM in a guest that acts as the host. The agents' lines go through it.
fn in_guest(image: &GuestImage, bed: Rc<KvmBed>, kind: Kind) -> Result<(Host, [Vm; 2])> {
    // Left over from a pair that was replaced.
    bed.clear("pvrdma-vmm")?;
    let prepared = [bed.prepare(image, kind.names[0])?, bed.prepare(image, kind.names[1])?];
    let place = Place {
        kind,
        kernel: &bed.image().kernel(),
        disk: Path::new("/dev/vda"),
        patience: PATIENCE,
        initramfs: [(); 2].map(|()| bed.initramfs()),
        agent: [bed.line(kind.names[0])?, bed.line(kind.names[1])?],
        console: kind.names.map(|name| PathBuf::from(format!("/run/{name}.console"))),
        uplink: kind.uplink.then(|| format!("af_packet:{CARD}")),
    };
    let words: Vec<_> = place.arguments().into_iter().map(|word| format!("'{word}'")).collect();
    let job = bed.vm().spawn(&format!(
        "RUST_BACKTRACE=1 RUST_LOG=info exec {} {TOOLS}/pvrdma-vmm {}",
        KvmBed::ON_ONE_PROCESSOR,
        words.join(" ")
    ))?;
    let [a, b] = prepared;
    let vms = [a.accept(bed.vm().process())?, b.accept(bed.vm().process())?];
    Ok((Host::Guest(job, bed), vms))
}

fn reversed([a, b]: [PathBuf; 2]) -> [PathBuf; 2] {
    [b, a]
}
