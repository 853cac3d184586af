//! A guest that acts as a host with KVM: its processor emulates virtualisation (SVM), and `kvm_amd` runs on it.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::image::{Disk, GuestImage};
use crate::vm::{Nic, Vm, VmBuilder};

/// Directory of the files passed to the host.
pub(crate) const TOOLS: &str = "/run/tools";
/// Terminal of the host, in raw mode.
pub(crate) const TERMINAL: &str = "/dev/hvc0";
/// Memory in MiB: enough for two machines and the programs that run them.
const MEMORY_MIB: u32 = 2560;
/// Factor by which everything in its machines takes longer than usual: virtualisation is emulated, instruction by
/// instruction.
pub(crate) const PATIENCE: u32 = 6;

/// The guest, booted and with `/dev/kvm`.
#[derive(Debug)]
pub(crate) struct KvmHost(Vm);

impl KvmHost {
    /// Boots the host. The files on `tools` appear in [`TOOLS`]; each port, a name and a listening socket, becomes a
    /// device there, see [`Self::port`]; the terminal, likewise, is [`TERMINAL`].
    pub(crate) fn boot(
        image: &GuestImage,
        directory: &Path,
        tools: Disk,
        ports: &[(&str, &Path)],
        terminal: (&str, &Path),
        card: Nic,
    ) -> Result<Self> {
        let disk = tools.build()?;
        let builder = VmBuilder::new(image, directory).name("host").cpus(2).memory_mib(MEMORY_MIB).disk(&disk);
        // The end of the host is reported at once to all waiters.
        //
        // While they run a guest, emulated processors sometimes forget a pending interrupt: it stays pending in the
        // APIC, and the guest continues for minutes. The next interrupt delivers it. With one-shot timers, which each
        // interrupt arms again, there would be no next interrupt, so the host uses periodic ticks.
        let builder = builder.ends_with_guest().ticks();
        let builder = builder.nic(card).terminal(terminal.0, terminal.1);
        let builder = ports.iter().fold(builder, |builder, (name, socket)| builder.port(name, socket));
        let vm = builder.boot()?;
        vm.run(&format!("mkdir {TOOLS} && mount -o ro /dev/vdb {TOOLS} && modprobe kvm_amd && [ -c /dev/kvm ]"))
            .with_context(|| format!("no KVM in the guest\n{}", vm.diagnosis()))?;
        // The kernel forgets the mode of a terminal when the last process closes it.
        vm.run(&format!(
            "exec 3< {TERMINAL} && stty -F {TERMINAL} raw -echo && {{ sleep infinity > /dev/null 2>&1 & }}"
        ))?;
        Ok(Self(vm))
    }

    /// Returns the guest itself.
    pub(crate) const fn vm(&self) -> &Vm {
        &self.0
    }

    /// Returns the device of a port.
    pub(crate) fn port(&self, name: &str) -> Result<PathBuf> {
        // The driver creates the device a moment after it is loaded.
        let found = self
            .0
            .run(&format!("dirname $(until grep -lx {name} /sys/class/virtio-ports/*/name; do sleep 0.05; done)"))?;
        match Path::new(found.trim()).file_name() {
            Some(device) => Ok(Path::new("/dev").join(device)),
            None => bail!("there is no port {name}"),
        }
    }
}

/// Number of VM exits of a VM's processors, as counted by KVM since the VM was created.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Exits {
    /// Exits for any reason.
    pub(crate) all: u64,
    /// Exits for MMIO accesses that the VMM emulates.
    pub(crate) mmio: u64,
}

impl Exits {
    /// Returns a shell script that prints the exits of all VMs of a process. `process` is the process id, or a shell
    /// word that expands to it. KVM's names begin with the id of the thread that created the VM.
    pub(crate) fn script(process: &str) -> String {
        format!(
            "for thread in /proc/{process}/task/*; do \
                 for vm in /sys/kernel/debug/kvm/${{thread##*/}}-*; do \
                     [ -d $vm ] && echo $(cat $vm/exits $vm/mmio_exits); \
                 done; \
             done; true"
        )
    }

    /// Returns a shell script that prints the exits of each VM of a process, for [`Self::parse_each`].
    pub(crate) fn script_for_each(process: &str) -> String {
        format!(
            "for thread in /proc/{process}/task/*; do \
                 for vm in /sys/kernel/debug/kvm/${{thread##*/}}-*; do \
                     [ -d $vm ] && echo ${{vm##*-}} $(cat $vm/exits $vm/mmio_exits); \
                 done; \
             done; true"
        )
    }

    /// Parses the output of that script, in the order in which the VMs were created: KVM's names end with their
    /// descriptors.
    pub(crate) fn parse_each(text: &str) -> Result<Vec<Self>> {
        let line = |line: &str| {
            let (descriptor, counts) = line.split_once(' ').context("no descriptor")?;
            Ok((descriptor.parse::<u32>().context("no descriptor")?, Self::parse(counts)?))
        };
        let mut lines = text.lines().map(line).collect::<Result<Vec<_>>>().with_context(|| text.to_owned())?;
        lines.sort_unstable_by_key(|(descriptor, _)| *descriptor);
        Ok(lines.into_iter().map(|(_, exits)| exits).collect())
    }

    /// Parses the output of the script as a sum: after a reset the counts can no longer be assigned to VMs.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let mut sum = Self { all: 0, mmio: 0 };
        for line in text.lines() {
            let mut numbers = line.split_whitespace().map(str::parse::<u64>);
            let (Some(Ok(all)), Some(Ok(mmio))) = (numbers.next(), numbers.next()) else {
                bail!("no counts of KVM: {text}");
            };
            sum = Self { all: sum.all + all, mmio: sum.mmio + mmio };
        }
        ensure!(sum.all > 0, "KVM counts for no VM: {text}");
        Ok(sum)
    }
}

/// Runs a script on this machine, whose own KVM runs the VMs.
pub(crate) fn on_machine(script: &str) -> Result<String> {
    let output = Command::new("sh").args(["-c", script]).output().context("cannot run sh")?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_read() {
        assert_eq!(Exits::parse("100 7\n2000 30\n").unwrap(), Exits { all: 2100, mmio: 37 });
        assert!(Exits::parse("").is_err());
        let each = [Exits { all: 2000, mmio: 30 }, Exits { all: 100, mmio: 7 }];
        assert_eq!(Exits::parse_each("100 100 7\n22 2000 30\n").unwrap(), each);
        assert!(Exits::parse_each("100 7\n").is_err());
        assert!(Exits::parse("100\n").is_err());
        assert!(Exits::parse("cat: no such file\n").is_err());
    }
}
