//! QEMU's command line.

use std::path::Path;

use anyhow::{Result, bail};
use serde_json::json;

use super::builder::{EMPTY_SLOT, FOLDER_TAG, Folder, MemoryKind, Nic, NicModel, Port, VmBuilder};
use crate::agent::PORT_NAME;

/// Returns `true` if the processor's own virtualisation can be used. The presence of `/dev/kvm` is not enough, because
/// some KVM variants cannot run an unmodified kernel.
pub fn has_kvm() -> bool {
    ["kvm_intel", "kvm_amd"].iter().any(|module| Path::new("/sys/module").join(module).exists())
        && std::fs::File::options().read(true).write(true).open("/dev/kvm").is_ok()
}

/// Options with their values for QEMU's command line.
#[derive(Default)]
struct Arguments(Vec<String>);

impl Arguments {
    fn add(&mut self, option: &str, value: impl Into<String>) {
        self.0.extend([format!("-{option}"), value.into()]);
    }
}

/// Returns the arguments that describe the machine's hardware.
pub(super) fn machine_arguments(vm: &VmBuilder) -> Result<Vec<String>> {
    let mut arguments = Arguments::default();
    arguments.add("name", format!("guest-tests-{}", vm.name));
    let (accelerator, cpu) = match (vm.virtual_time, vm.kvm) {
        (true, _) => ("tcg,thread=single", EMULATED),
        (false, true) => KVM,
        (false, false) => processor(),
    };
    arguments.add("accel", accelerator);
    if vm.virtual_time {
        arguments.add("icount", "shift=0,sleep=off");
    }
    arguments.add("cpu", cpu);
    arguments.add("smp", vm.cpus.to_string());
    let room = match vm.more_memory_mib {
        0 => String::new(),
        more => format!(",slots=1,maxmem={}M", vm.memory_mib.saturating_add(more)),
    };
    arguments.add("m", format!("{}M{room}", vm.memory_mib));
    let split = if vm.iommu && accelerator == KVM.0 { ",kernel-irqchip=split" } else { "" };
    arguments.add("machine", format!("q35,memory-backend=mem0{split}"));
    arguments.add("object", memory_object(vm));
    if vm.iommu {
        arguments.add("device", "intel-iommu,caching-mode=on");
    }
    for (index, nic) in vm.nics.iter().enumerate() {
        arguments.add("netdev", netdev(index, nic));
        arguments.add("device", nic_device(&format!("net{index}"), nic.model, &nic.mac));
    }
    for card in &vm.more_cards {
        arguments.add("netdev", &card.netdev);
        arguments.add("device", &card.device);
    }
    if vm.empty_slot {
        arguments.add("device", format!("pcie-root-port,id={EMPTY_SLOT},chassis=1,mem-reserve=16M"));
    }
    if let Some(mac) = &vm.user_network {
        arguments.add("netdev", "user,id=user,ipv6=off");
        arguments.add("device", nic_device("user", NicModel::Vmxnet3, mac));
    }
    if let Some(socket) = &vm.nic_socket {
        arguments.add("device", network_function(socket));
    }
    if let Some(socket) = &vm.pvrdma_socket {
        let served = vm.nic_socket.is_some() || vm.user_network.is_some();
        if !served && !vm.nics.iter().any(|nic| nic.model == NicModel::Vmxnet3) {
            bail!("{}: the device needs a vmxnet3 at function 0 of its slot", vm.name);
        }
        arguments.add("device", vfio_user_device(vm, socket));
    }
    Ok(arguments.0)
}

/// Connection to the agent.
#[derive(Clone, Copy, Debug)]
pub(super) enum Line<'a> {
    /// A listening socket.
    Socket(&'a Path),
    /// A character device.
    Device(&'a Path),
}

impl Line<'_> {
    /// Formats it as an option of `-chardev`.
    fn backend(self) -> String {
        match self {
            Self::Socket(path) => format!("socket,id=agent,path={}", path.display()),
            // QEMU opens the path once, for both directions.
            Self::Device(path) => format!("pipe,id=agent,path={}", path.display()),
        }
    }
}

/// Returns the arguments that boot the image on any machine and connect the agent.
pub(super) fn boot_arguments(vm: &VmBuilder, initramfs: &Path, agent: Line<'_>, console: &Path) -> Vec<String> {
    let mut arguments = Arguments(vec!["-nodefaults".to_owned(), "-no-user-config".to_owned()]);
    arguments.add("display", "none");
    if vm.ends_with_guest {
        arguments.add("action", "reboot=shutdown");
    }
    if let Some(socket) = &vm.incoming {
        arguments.add("incoming", format!("unix:{}", socket.display()));
    }
    arguments.add("kernel", vm.image.kernel().display().to_string());
    arguments.add("initrd", initramfs.display().to_string());
    arguments.add("append", kernel_command_line(vm));
    arguments.add("chardev", format!("file,id=console,path={}", console.display()));
    arguments.add("serial", "chardev:console");
    let disk = vm.root_disk.clone().unwrap_or_else(|| vm.image.root_disk());
    arguments.add("drive", format!("if=none,id=root,format=raw,readonly=on,cache=unsafe,file={}", disk.display()));
    arguments.add("device", "virtio-blk-pci,drive=root");
    if let Some(disk) = &vm.disk {
        arguments.add("drive", format!("if=none,id=disk,format=raw,readonly=on,file={}", disk.display()));
        arguments.add("device", "virtio-blk-pci,drive=disk");
    }
    if let Some(folder) = &vm.folder {
        arguments.add("fsdev", shared_folder(folder));
        arguments.add("device", format!("virtio-9p-pci,fsdev=folder,mount_tag={FOLDER_TAG}"));
    }
    arguments.add("device", "virtio-rng-pci");
    arguments.add("chardev", agent.backend());
    arguments.add("device", "virtio-serial-pci");
    arguments.add("device", format!("virtserialport,chardev=agent,name={PORT_NAME}"));
    for Port { device, name, socket } in &vm.ports {
        arguments.add("chardev", format!("socket,id={name},path={},reconnect-ms=50", socket.display()));
        arguments.add("device", format!("{device},chardev={name},name={name}"));
    }
    arguments.0
}

/// Shares a folder by 9p. QEMU opens its files as its own user, which therefore owns the files that the guest creates.
fn shared_folder(folder: &Folder) -> String {
    let read_only = if folder.read_only { ",readonly=on" } else { "" };
    // QEMU's syntax doubles a comma in a value.
    let path = folder.path.to_string_lossy().replace(',', ",,");
    format!("local,id=folder,security_model=none,multidevs=remap{read_only},path={path}")
}

/// The processor's own virtualisation.
const KVM: (&str, &str) = ("kvm", "host");

/// Returns the accelerator, and the processor model that the guest sees.
pub fn processor() -> (&'static str, &'static str) {
    if has_kvm() {
        return KVM;
    }
    ("tcg,thread=multi", EMULATED)
}

/// Features that are switched off. With them, the guest copies with `rep movsb`, which the emulator executes byte by
/// byte; without them, it uses 64-bit or vector moves.
const EMULATED: &str = "max,la57=off,erms=off,fsrm=off";

fn memory_object(vm: &VmBuilder) -> String {
    let kind = match vm.memory_kind {
        MemoryKind::Shared => "share=on",
        MemoryKind::Hugetlb => "share=on,hugetlb=on,hugetlbsize=2M",
        MemoryKind::Private => "share=off",
    };
    format!("memory-backend-memfd,id=mem0,size={}M,{kind}", vm.memory_mib)
}

fn kernel_command_line(vm: &VmBuilder) -> String {
    let iommu = if vm.iommu { " intel_iommu=on iommu.strict=1" } else { "" };
    // Mitigations cost emulated time and protect nothing here. After a panic the guest halts, so that its console can
    // be read; the host side searches it for the message. With `ends_with_guest` it resets the machine at once, see
    // `boot_arguments`.
    let panic = if vm.ends_with_guest { -1 } else { 0 };
    let tick = if vm.ticks { " highres=off nohz=off" } else { "" };
    let watchdog = watchdog(vm.patience);
    let more = if vm.kernel_parameters.is_empty() { "" } else { " " };
    let parameters = &vm.kernel_parameters;
    format!(
        "console=ttyS0 panic={panic} mitigations=off nokaslr net.ifnames=0{iommu}{tick}{watchdog}{more}{parameters}"
    )
}

/// Returns kernel parameters that scale the watchdogs to the patience of the tests. The kernel reports a processor as
/// stuck that runs one task for 20 seconds, or passes no quiescent state of RCU for 21 seconds. On a slow machine, such
/// a processor is only slow.
pub fn watchdog(patience: u32) -> String {
    if patience <= 1 {
        return String::new();
    }
    // Limited to the maximum that the kernel accepts.
    let [thread, rcu] = [(10, 60), (21, 300)].map(|(usual, most): (u32, u32)| usual.saturating_mul(patience).min(most));
    format!(" watchdog_thresh={thread} rcupdate.rcu_cpu_stall_timeout={rcu}")
}

fn netdev(index: usize, nic: &Nic) -> String {
    format!(
        "dgram,id=net{index},local.type=unix,local.path={},remote.type=unix,remote.path={}",
        nic.local.display(),
        nic.remote.display()
    )
}

fn nic_device(netdev: &str, model: NicModel, mac: &str) -> String {
    match model {
        NicModel::Vmxnet3 => {
            format!("vmxnet3,netdev={netdev},mac={mac},bus=pcie.0,addr=10.0,multifunction=on,romfile=")
        }
        NicModel::Virtio => format!("virtio-net-pci,netdev={netdev},mac={mac},romfile="),
    }
}

/// The network function is served in the same way as the RDMA function.
fn network_function(socket: &Path) -> String {
    let device = json!({
        "driver": "vfio-user-pci",
        "bus": "pcie.0",
        "addr": "10.0",
        "multifunction": true,
        "socket": { "path": socket, "type": "unix" },
    });
    device.to_string()
}

fn vfio_user_device(vm: &VmBuilder, socket: &Path) -> String {
    let mut device = json!({
        "driver": "vfio-user-pci",
        "bus": "pcie.0",
        "addr": "10.1",
        "socket": { "path": socket, "type": "unix" },
    });
    for (name, value) in &vm.vfio_user_options {
        device[name] = value.clone();
    }
    device.to_string()
}
