//! A guest that plays a host with KVM: its processor emulates virtualisation (SVM), and `kvm_amd` runs on it.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::image::{Disk, GuestImage};
use crate::vm::{Vm, VmBuilder};

/// Where it finds the files that it was given.
pub(crate) const TOOLS: &str = "/run/tools";
/// Room for two machines, and for what runs them.
const MEMORY_MIB: u32 = 2560;
/// How many times longer than usual everything takes in its machines: virtualisation is emulated, instruction by
/// instruction.
pub(crate) const PATIENCE: u32 = 6;

/// The guest, up and with `/dev/kvm`.
#[derive(Debug)]
pub(crate) struct KvmHost(Vm);

impl KvmHost {
    /// Boots it. What is on `tools` is in [`TOOLS`]; each port, a name and a socket where somebody listens, is a device
    /// there, see [`Self::port`].
    pub(crate) fn boot(image: &GuestImage, directory: &Path, tools: Disk, ports: &[(&str, &Path)]) -> Result<Self> {
        Self::boot_with(image, directory, tools, ports, |builder| builder)
    }

    /// The same with what else the machine is to have.
    pub(crate) fn boot_with(
        image: &GuestImage,
        directory: &Path,
        tools: Disk,
        ports: &[(&str, &Path)],
        more: impl FnOnce(VmBuilder) -> VmBuilder,
    ) -> Result<Self> {
        let disk = tools.build()?;
        let mut builder = VmBuilder::new(image, directory).name("host").cpus(2).memory_mib(MEMORY_MIB).disk(&disk);
        for (name, socket) in ports {
            builder = builder.port(name, socket);
        }
        let vm = more(builder).boot()?;
        vm.run(&format!("mkdir {TOOLS} && mount -o ro /dev/vdb {TOOLS} && modprobe kvm_amd && [ -c /dev/kvm ]"))
            .with_context(|| format!("no KVM in the guest\n{}", vm.diagnosis()))?;
        Ok(Self(vm))
    }

    /// The guest itself.
    pub(crate) const fn vm(&self) -> &Vm {
        &self.0
    }

    /// The device of a port.
    pub(crate) fn port(&self, name: &str) -> Result<PathBuf> {
        // The driver makes it a moment after it is loaded.
        let found = self
            .0
            .run(&format!("dirname $(until grep -lx {name} /sys/class/virtio-ports/*/name; do sleep 0.05; done)"))?;
        match Path::new(found.trim()).file_name() {
            Some(device) => Ok(Path::new("/dev").join(device)),
            None => bail!("there is no port {name}"),
        }
    }
}

/// How often the processors of a VM have left the guest, as KVM counts it since the VM was made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Exits {
    /// For whatever reason.
    pub(crate) all: u64,
    /// For an access to memory space that the VMM answers.
    pub(crate) mmio: u64,
}

impl Exits {
    /// A shell script that prints those of all VMs of a process, in the order in which it made them. `process` is the
    /// process's id, or a word of the shell that becomes it.
    pub(crate) fn script(process: &str) -> String {
        format!(
            "for vm in $(ls -d /sys/kernel/debug/kvm/{process}-* | sort -V); do \
                 echo $(cat $vm/exits $vm/mmio_exits); \
             done"
        )
    }

    /// What the script printed.
    pub(crate) fn parse(text: &str) -> Result<Vec<Self>> {
        let line = |line: &str| {
            let mut numbers = line.split_whitespace().map(str::parse);
            match (numbers.next(), numbers.next()) {
                (Some(Ok(all)), Some(Ok(mmio))) => Ok(Self { all, mmio }),
                _ => bail!("no counts of KVM: {text}"),
            }
        };
        text.lines().map(line).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_read() {
        let counts = Exits::parse("100 7\n2000 30\n").unwrap();
        assert_eq!(counts, [Exits { all: 100, mmio: 7 }, Exits { all: 2000, mmio: 30 }]);
        assert!(Exits::parse("100\n").is_err());
        assert!(Exits::parse("cat: no such file\n").is_err());
    }
}
