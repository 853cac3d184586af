//! The command line.

use std::num::NonZero;
use std::path::PathBuf;
use std::thread::available_parallelism;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use pvrdma_dev::{DoorbellMode, Processors, WindowPolicy};
use pvrdma_ether_link::{
    link_spec::LinkSpec,
    vxlan::{TunnelAddress, Vni},
};
use pvrdma_guest_memory::PinPolicy;
use pvrdma_packet::MacAddr;

use crate::saved::requests::Target;

/// Boots VMs that reach each other by RDMA, in this process.
#[derive(Clone, Debug, Parser)]
#[command(version)]
pub(crate) struct Options {
    /// A VM, given once for each: name=NAME,mac=MAC[,kernel=FILE][,initramfs=FILE][,disk=FILE][,disk-ro=FILE]...
    /// [,memory=512M][,cpus=1][,console=FILE][,serial=SOCKET][,pin=all|registered|off]
    /// [,doorbells=auto|trapped|mapped]
    ///
    /// Disks are /dev/vda, /dev/vdb and so on, in their order. The console is written to standard output if it has no
    /// file. A second serial port (ttyS1) is connected to a listening Unix socket, or to a character device.
    #[arg(long = "vm", value_name = "VM", required = true)]
    vm: Vec<String>,
    /// Kernel of VMs that name none: a Linux image in bzImage format.
    #[arg(long, value_name = "FILE")]
    kernel: Option<PathBuf>,
    /// Initramfs of VMs that name none.
    #[arg(long, value_name = "FILE")]
    initramfs: Option<PathBuf>,
    /// Command line of all kernels.
    #[arg(long, value_name = "TEXT", default_value = "console=ttyS0 reboot=k panic=-1")]
    append: String,
    /// Link of the VMs' network to others, in the words of `pvrdmad`: af_packet:INTERFACE, vxlan:ADDRESS[:PORT],
    /// tap:NAME, unix:PATH, unix-connect:PATH or unix-dgram:LOCAL:REMOTE.
    #[arg(long, value_name = "LINK", value_parser = link)]
    uplink: Option<LinkSpec>,
    /// Other end of a vxlan uplink; repeatable.
    #[arg(long = "remote", value_name = "ADDRESS[:PORT]")]
    remotes: Vec<TunnelAddress>,
    /// VXLAN network identifier of the uplink [default: 0].
    #[arg(long)]
    vni: Option<Vni>,
    /// Bytes of an IP packet that the VMs' network carries.
    #[arg(long, default_value_t = 1500, value_parser = clap::value_parser!(u32).range(1280..=9000))]
    pub(crate) mtu: u32,
    /// Save the VM to this file, and end, when the program receives SIGUSR1. There must be one VM.
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
    /// Continue the VM from this file instead of booting a kernel. Its options must be those with which it was saved.
    #[arg(long, value_name = "FILE")]
    pub(crate) restore: Option<PathBuf>,
    /// Move the running VM to the program that listens on this Unix socket, and end, when the program receives
    /// SIGUSR1. SIGUSR2 cancels this. There must be one VM.
    #[arg(long, value_name = "SOCKET", conflicts_with = "save")]
    migrate: Option<PathBuf>,
    /// Wait on this Unix socket for a VM, instead of booting a kernel. Its options must be those at the source.
    #[arg(long, value_name = "SOCKET", conflicts_with = "restore")]
    pub(crate) incoming: Option<PathBuf>,
    /// Maximum time for a migration in seconds, from its connection on.
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..=86400))]
    migrate_timeout: u32,
    /// The device of KVM.
    #[arg(long, value_name = "PATH", default_value = "/dev/kvm")]
    pub(crate) kvm: PathBuf,
}

/// A disk.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct DiskOptions {
    pub(crate) path: PathBuf,
    pub(crate) writable: bool,
}

/// A VM.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct VmOptions {
    pub(crate) name: String,
    pub(crate) mac: MacAddr,
    pub(crate) kernel: PathBuf,
    pub(crate) initramfs: Option<PathBuf>,
    pub(crate) append: String,
    pub(crate) disks: Vec<DiskOptions>,
    /// Memory size in bytes.
    pub(crate) memory: u64,
    pub(crate) cpus: u8,
    pub(crate) console: Option<PathBuf>,
    pub(crate) serial: Option<PathBuf>,
    pub(crate) pin: PinPolicy,
    /// Policy for mapping its doorbell pages as memory; `None` if they always trap.
    pub(crate) doorbells: Option<WindowPolicy>,
}

/// Minimum memory size that holds a kernel and its initramfs.
const LEAST_MEMORY: u64 = 128 << 20;
/// Maximum number of processors for which the MP table has room.
pub(crate) const MAX_CPUS: u8 = 16;
/// Maximum number of disks; the guest does not scan further slots.
const MAX_DISKS: usize = 8;

impl Options {
    /// Returns the options of all VMs, after a check that no two of them conflict.
    pub(crate) fn vms(&self) -> Result<Vec<VmOptions>> {
        self.vms_on(available_parallelism().map_or(1, NonZero::get))
    }

    /// Same as [`Self::vms`], for a host with `processors` processors.
    fn vms_on(&self, processors: usize) -> Result<Vec<VmOptions>> {
        let mut vms: Vec<(VmOptions, DoorbellMode)> = Vec::new();
        for text in &self.vm {
            let (vm, mode) = self.parse_vm(text).with_context(|| format!("--vm {text}"))?;
            if let Some((other, _)) = vms.iter().find(|(other, _)| other.name == vm.name || other.mac == vm.mac) {
                bail!("--vm {text}: name or MAC address of {}", other.name);
            }
            vms.push((vm, mode));
        }
        self.check_saved(&mut vms)?;
        let processors = Processors {
            available: processors,
            virtual_processors: vms.iter().map(|(vm, _)| usize::from(vm.cpus)).sum(),
            watchers: vms.iter().filter(|(_, mode)| *mode != DoorbellMode::Trapped).count(),
        };
        let choose = |(vm, mode)| VmOptions { doorbells: WindowPolicy::choose(mode, processors), ..vm };
        Ok(vms.into_iter().map(choose).collect())
    }

    /// Returns the place that the VM leaves to when this is requested.
    pub(crate) fn target(&self) -> Option<Target> {
        let socket = |path: &PathBuf| Target::Socket(path.clone(), self.limit());
        self.save.clone().map(Target::File).or_else(|| self.migrate.as_ref().map(socket))
    }

    /// Returns the maximum time for a migration.
    pub(crate) fn limit(&self) -> Duration {
        Duration::from_secs(self.migrate_timeout.into())
    }

    /// Checks the requirements of a VM that is saved or moved. Its doorbells trap, because no test saves a VM whose
    /// pages are memory.
    fn check_saved(&self, vms: &mut [(VmOptions, DoorbellMode)]) -> Result<()> {
        let options = [
            ("--save", &self.save),
            ("--restore", &self.restore),
            ("--migrate", &self.migrate),
            ("--incoming", &self.incoming),
        ];
        let Some((option, _)) = options.into_iter().find(|(_, path)| path.is_some()) else { return Ok(()) };
        let [(vm, mode)] = vms else { bail!("{option} is for one --vm, there are {}", vms.len()) };
        ensure!(*mode != DoorbellMode::Mapped, "{}: {option} excludes doorbells=mapped", vm.name);
        *mode = DoorbellMode::Trapped;
        Ok(())
    }

    /// Returns the uplink; a tunnel includes its remote addresses.
    pub(crate) fn uplink(&self) -> Result<Option<LinkSpec>> {
        let Some(LinkSpec::Vxlan(tunnel)) = &self.uplink else {
            ensure!(self.remotes.is_empty() && self.vni.is_none(), "--remote and --vni are for --uplink vxlan:ADDRESS");
            return Ok(self.uplink.clone());
        };
        let tunnel = tunnel
            .clone()
            .with_remotes(self.remotes.iter().map(|TunnelAddress(remote)| *remote).collect())
            .with_vni(self.vni.unwrap_or_default());
        // Packets from any other source address are discarded.
        ensure!(!tunnel.remotes.is_empty(), "vxlan needs a --remote");
        tunnel.check().context("--uplink")?;
        Ok(Some(LinkSpec::Vxlan(tunnel)))
    }

    fn parse_vm(&self, text: &str) -> Result<(VmOptions, DoorbellMode)> {
        let (mut name, mut mac) = (None, None);
        let (mut kernel, mut initramfs) = (self.kernel.clone(), self.initramfs.clone());
        let (mut disks, mut memory, mut cpus) = (Vec::new(), 512 << 20, 1);
        let (mut console, mut serial, mut pin, mut mode) = (None, None, PinPolicy::All, DoorbellMode::Auto);
        for pair in text.split(',') {
            let (key, value) = pair.split_once('=').with_context(|| format!("'{pair}' is no KEY=VALUE"))?;
            ensure!(!value.is_empty(), "{key} has no value");
            match key {
                "name" => name = Some(value.to_owned()),
                "mac" => mac = Some(value.parse().map_err(|_| anyhow::anyhow!("'{value}' is no MAC address"))?),
                "kernel" => kernel = Some(value.into()),
                "initramfs" => initramfs = Some(value.into()),
                "disk" => disks.push(DiskOptions { path: value.into(), writable: true }),
                "disk-ro" => disks.push(DiskOptions { path: value.into(), writable: false }),
                "memory" => memory = bytes(value)?,
                "cpus" => cpus = value.parse().with_context(|| format!("'{value}' is no number of processors"))?,
                "console" => console = Some(value.into()),
                "serial" => serial = Some(value.into()),
                "pin" => pin = pin_policy(value)?,
                "doorbells" => mode = value.parse()?,
                other => bail!("there is no key '{other}'"),
            }
        }
        ensure!((1..=MAX_CPUS).contains(&cpus), "1 to {MAX_CPUS} processors, not {cpus}");
        ensure!(memory >= LEAST_MEMORY, "at least {} MiB of memory", LEAST_MEMORY >> 20);
        ensure!(disks.len() <= MAX_DISKS, "at most {MAX_DISKS} disks");
        let vm = VmOptions {
            name: name.context("name is missing")?,
            mac: mac.context("mac is missing")?,
            kernel: kernel.context("kernel is missing")?,
            initramfs,
            append: self.append.clone(),
            disks,
            memory,
            cpus,
            console,
            serial,
            pin,
            doorbells: None,
        };
        Ok((vm, mode))
    }
}

/// Parses a link. This program has no options for the keys of a TLS link.
fn link(text: &str) -> Result<LinkSpec, String> {
    if matches!(text.split_once(':'), Some(("tls" | "tls-connect", _))) {
        return Err("pvrdmad alone has TLS links".to_owned());
    }
    text.parse()
}

/// Parses a number of bytes, with suffix M or G for MiB or GiB; it must be a multiple of the page size.
fn bytes(text: &str) -> Result<u64> {
    let wrong = || format!("'{text}' is no size, as 512M or 2G");
    let (number, shift) = match text.strip_suffix('G') {
        Some(number) => (number, 30),
        None => (text.strip_suffix('M').with_context(wrong)?, 20),
    };
    let number: u64 = number.parse().ok().with_context(wrong)?;
    number.checked_mul(1 << shift).filter(|bytes| *bytes <= 1 << 40).with_context(wrong)
}

fn pin_policy(text: &str) -> Result<PinPolicy> {
    match text {
        "all" => Ok(PinPolicy::All),
        "registered" => Ok(PinPolicy::Registered),
        "off" => Ok(PinPolicy::Off),
        other => bail!("pin is all, registered or off, not '{other}'"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(vm: &[&str]) -> Result<Vec<VmOptions>> {
        let words = vm.iter().flat_map(|vm| ["--vm", vm]);
        Options::parse_from(["pvrdma-vmm", "--kernel", "/k"].into_iter().chain(words)).vms()
    }

    #[test]
    fn a_vm_has_defaults() {
        let vms = parse(&["name=a,mac=52:54:00:00:00:01,disk=/d,disk-ro=/e,memory=2G,cpus=2"]).unwrap();
        let [vm] = &vms[..] else { panic!("{vms:?}") };
        assert_eq!((vm.memory, vm.cpus, vm.pin, &vm.kernel), (2 << 30, 2, PinPolicy::All, &PathBuf::from("/k")));
        assert_eq!(vm.disks.iter().map(|disk| disk.writable).collect::<Vec<_>>(), [true, false]);
        assert_eq!((&vm.initramfs, &vm.console), (&None, &None));
    }

    /// The choice depends on the number of host processors, and can only be made when all VMs are known.
    #[test]
    fn doorbells_are_memory_where_there_are_processors() {
        let vms = |modes: &[&str], processors: usize| -> Vec<bool> {
            let vms = (1..).zip(modes).map(|(n, mode)| format!("name=v{n},mac=52:54:00:00:00:0{n},cpus=2{mode}"));
            let words: Vec<_> = vms.flat_map(|vm| ["--vm".to_owned(), vm]).collect();
            let words = ["pvrdma-vmm", "--kernel", "/k"].map(str::to_owned).into_iter().chain(words);
            Options::parse_from(words).vms_on(processors).unwrap().iter().map(|vm| vm.doorbells.is_some()).collect()
        };
        assert_eq!((vms(&[""], 2), vms(&[""], 3)), (vec![false], vec![true]));
        assert_eq!((vms(&["", ",doorbells=auto"], 5), vms(&["", ""], 6)), (vec![false; 2], vec![true; 2]));
        assert_eq!(vms(&["", ",doorbells=trapped"], 5), [true, false], "only one VM needs a watcher");
        assert_eq!(vms(&[",doorbells=mapped", ",doorbells=trapped", ""], 1), [true, false, false]);
    }

    #[test]
    fn a_saved_vm_is_alone_and_its_doorbells_trap() {
        let parse = |words: &[&str]| {
            let vm = ["pvrdma-vmm", "--kernel", "/k", "--vm", "name=a,mac=52:54:00:00:00:01"];
            Options::parse_from(vm.iter().chain(words)).vms_on(16)
        };
        assert!(parse(&[]).unwrap()[0].doorbells.is_some());
        for option in ["--save", "--restore", "--migrate", "--incoming"] {
            assert!(parse(&[option, "/f"]).unwrap()[0].doorbells.is_none());
            let two = parse(&[option, "/f", "--vm", "name=b,mac=52:54:00:00:00:02"]).unwrap_err();
            assert!(two.to_string().contains("for one --vm, there are 2"), "{two}");
        }
        let mapped = ["pvrdma-vmm", "--kernel", "/k", "--save", "/f", "--vm"];
        let mapped = Options::parse_from(mapped.iter().chain(&["name=a,mac=52:54:00:00:00:01,doorbells=mapped"]));
        assert!(mapped.vms_on(16).unwrap_err().to_string().contains("doorbells=mapped"));
    }

    #[test]
    fn a_vm_leaves_to_one_place_and_comes_from_one() {
        let parse = |words: &[&str]| {
            let vm = ["pvrdma-vmm", "--kernel", "/k", "--vm", "name=a,mac=52:54:00:00:00:01"];
            Options::try_parse_from(vm.iter().chain(words))
        };
        assert_eq!(parse(&["--incoming", "/a"]).unwrap().target(), None);
        assert_eq!(parse(&["--save", "/f", "--incoming", "/a"]).unwrap().target(), Some(Target::File("/f".into())));
        for (words, seconds) in [(&[][..], 300), (&["--migrate-timeout", "7"], 7)] {
            let options = parse(&[&["--migrate", "/b", "--restore", "/f"], words].concat()).unwrap();
            assert_eq!(options.target(), Some(Target::Socket("/b".into(), Duration::from_secs(seconds))));
        }
        assert!(parse(&["--save", "/f", "--migrate", "/b"]).is_err());
        assert!(parse(&["--restore", "/f", "--incoming", "/a"]).is_err());
        assert!(parse(&["--migrate", "/b", "--migrate-timeout", "0"]).is_err());
    }

    #[test]
    fn an_uplink_has_the_syntax_of_the_daemon() {
        let vm = "name=a,mac=52:54:00:00:00:01,kernel=/k";
        let uplink = |words: &[&str]| Options::try_parse_from(["pvrdma-vmm", "--vm", vm].iter().chain(words))?.uplink();
        assert_eq!(uplink(&[]).unwrap(), None);
        assert_eq!(uplink(&["--uplink", "tap:tap0"]).unwrap(), Some(LinkSpec::Tap("tap0".parse().unwrap())));
        let tunnel = ["--uplink", "vxlan:10.0.0.1", "--remote", "10.0.0.2", "--remote", "10.0.0.3:8472", "--vni", "7"];
        let Some(LinkSpec::Vxlan(tunnel)) = uplink(&tunnel).unwrap() else { panic!("no tunnel") };
        assert_eq!((tunnel.local.to_string(), tunnel.vni.get()), ("10.0.0.1:4789".to_owned(), 7));
        assert_eq!(tunnel.remotes, ["10.0.0.2:4789".parse().unwrap(), "10.0.0.3:8472".parse().unwrap()]);
        for (words, what) in [
            (&["--uplink", "wire:eth0"][..], "af_packet:INTERFACE"),
            (&["--uplink", "tls:10.0.0.1:7"], "pvrdmad alone"),
            (&["--remote", "10.0.0.2"], "vxlan"),
            (&["--uplink", "tap:tap0", "--vni", "1"], "vxlan"),
            (&["--uplink", "vxlan:10.0.0.1"], "--remote"),
            (&["--uplink", "vxlan:10.0.0.1", "--remote", "fd00::1"], "IPv6"),
            (&["--uplink", "vxlan:10.0.0.1", "--remote", "10.0.0.2", "--vni", "16777216"], "VNI"),
        ] {
            let error = format!("{:#}", uplink(words).unwrap_err());
            assert!(error.contains(what), "{words:?}: {error}");
        }
    }

    #[test]
    fn invalid_options_are_named() {
        let mac = "mac=52:54:00:00:00:01";
        for (vm, what) in [
            ("name=a", "mac is missing"),
            (mac, "name is missing"),
            ("name=a,mac=1", "no MAC address"),
            ("name=a,mac=52:54:00:00:00:01,cpus=0", "processors"),
            ("name=a,mac=52:54:00:00:00:01,cpus=17", "processors"),
            ("name=a,mac=52:54:00:00:00:01,memory=64M", "at least"),
            ("name=a,mac=52:54:00:00:00:01,memory=64", "no size"),
            ("name=a,mac=52:54:00:00:00:01,memory=99999999999999G", "no size"),
            ("name=a,mac=52:54:00:00:00:01,pin=no", "pin is"),
            ("name=a,mac=52:54:00:00:00:01,doorbells=off", "doorbells are auto, trapped or mapped"),
            ("name=a,mac=52:54:00:00:00:01,colour=red", "colour"),
            ("name=a,mac=52:54:00:00:00:01,disk=", "disk has no value"),
            ("name=a,what", "no KEY=VALUE"),
        ] {
            let error = format!("{:#}", parse(&[vm]).unwrap_err());
            assert!(error.contains(what), "{vm}: {error}");
        }
        let twice = parse(&["name=a,mac=52:54:00:00:00:01", "name=b,mac=52:54:00:00:00:01"]).unwrap_err();
        assert!(format!("{twice:#}").contains("MAC address of a"));
    }
}
