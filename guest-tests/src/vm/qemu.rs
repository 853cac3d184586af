//! QEMU's command line.

use std::path::Path;

use anyhow::{Result, bail};
use serde_json::json;

use super::builder::{MemoryKind, Nic, NicModel, VmBuilder};
use crate::agent::PORT_NAME;

/// Whether the processor's own virtualisation can be used. `/dev/kvm` alone does not say: there are KVM variants that
/// cannot run an unmodified kernel.
pub(crate) fn has_kvm() -> bool {
    ["kvm_intel", "kvm_amd"].iter().any(|module| Path::new("/sys/module").join(module).exists())
        && std::fs::File::options().read(true).write(true).open("/dev/kvm").is_ok()
}

/// The arguments for a machine.
pub(super) fn arguments(vm: &VmBuilder, initramfs: &Path, agent_socket: &Path, console: &Path) -> Result<Vec<String>> {
    let mut arguments = Vec::new();
    let mut add = |option: &str, value: String| {
        arguments.push(format!("-{option}"));
        if !value.is_empty() {
            arguments.push(value);
        }
    };
    add("name", format!("guest-tests-{}", vm.name));
    let (accelerator, cpu) = processor();
    add("accel", accelerator.to_owned());
    add("cpu", cpu.to_owned());
    for option in ["nodefaults", "no-user-config"] {
        add(option, String::new());
    }
    add("display", "none".to_owned());
    add("smp", vm.cpus.to_string());
    add("m", format!("{}M", vm.memory_mib));
    let split = if vm.iommu && has_kvm() { ",kernel-irqchip=split" } else { "" };
    add("machine", format!("q35,memory-backend=mem0{split}"));
    add("object", memory_object(vm));
    if vm.iommu {
        add("device", "intel-iommu,caching-mode=on".to_owned());
    }
    add("kernel", vm.image.kernel().display().to_string());
    add("initrd", initramfs.display().to_string());
    add("append", kernel_command_line(vm));
    add("chardev", format!("file,id=console,path={}", console.display()));
    add("serial", "chardev:console".to_owned());
    let disk = vm.image.root_disk();
    add("drive", format!("if=none,id=root,format=raw,readonly=on,cache=unsafe,file={}", disk.display()));
    add("device", "virtio-blk-pci,drive=root".to_owned());
    if let Some(disk) = &vm.disk {
        add("drive", format!("if=none,id=disk,format=raw,readonly=on,file={}", disk.display()));
        add("device", "virtio-blk-pci,drive=disk".to_owned());
    }
    add("device", "virtio-rng-pci".to_owned());
    add("chardev", format!("socket,id=agent,path={}", agent_socket.display()));
    add("device", "virtio-serial-pci".to_owned());
    add("device", format!("virtserialport,chardev=agent,name={PORT_NAME}"));
    for (index, nic) in vm.nics.iter().enumerate() {
        add("netdev", netdev(index, nic));
        add("device", nic_device(&format!("net{index}"), nic.model, &nic.mac));
    }
    if let Some(mac) = &vm.user_network {
        add("netdev", "user,id=user,ipv6=off".to_owned());
        add("device", nic_device("user", NicModel::Vmxnet3, mac));
    }
    if let Some(socket) = &vm.pvrdma_socket {
        if vm.user_network.is_none() && !vm.nics.iter().any(|nic| nic.model == NicModel::Vmxnet3) {
            bail!("{}: the device needs a vmxnet3 at function 0 of its slot", vm.name);
        }
        add("device", vfio_user_device(vm, socket));
    }
    Ok(arguments)
}

/// What runs the guest's code, and the processor that the guest sees.
fn processor() -> (&'static str, &'static str) {
    if has_kvm() {
        return ("kvm", "host");
    }
    // Without these the guest's copies use 64-bit or vector moves; the emulator does `rep movsb` byte by byte.
    ("tcg,thread=multi", "max,la57=off,erms=off,fsrm=off")
}

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
    // Mitigations cost emulated time and protect nothing here. After a panic the guest stands still,
    // so that its console can be read; we look for the message.
    format!("console=ttyS0 panic=0 mitigations=off nokaslr net.ifnames=0{iommu}")
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
