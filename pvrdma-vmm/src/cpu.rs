//! Virtual processors.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail, ensure};
use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, Msrs, kvm_cpuid_entry2, kvm_msr_entry};
use kvm_ioctls::{Cap, Kvm, VcpuExit};
use vm_device::bus::{MmioAddress, PioAddress};
use vm_device::device_manager::{IoManager, MmioManager, PioManager};
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

use crate::boot::Entry;
use crate::memory::Vcpu;

/// KVM modules that run unmodified kernels. Other modules provide the same device but do not.
const MODULES: [&str; 2] = ["/sys/module/kvm_intel", "/sys/module/kvm_amd"];
const API_VERSION: i32 = 12;
/// MSR with the default memory type: write-back, with the variable ranges enabled.
const MTRR_DEFAULT_TYPE: u32 = 0x2ff;
const MTRR_WRITE_BACK: u64 = 1 << 11 | 6;

/// Opens KVM and checks that it can run a guest's kernel.
pub(crate) fn open_kvm(path: &Path) -> Result<Kvm> {
    let name = path.display();
    let text = path.to_str().with_context(|| format!("{name} is no path for KVM"))?;
    let kvm =
        Kvm::new_with_path(std::ffi::CString::new(text)?).with_context(|| format!("no KVM: cannot open {name}"))?;
    let version = kvm.get_api_version();
    ensure!(version == API_VERSION, "no KVM: {name} has version {version} of the interface, not {API_VERSION}");
    if !MODULES.iter().any(|module| Path::new(module).exists()) {
        bail!("no KVM: {name} is neither that of kvm_intel nor that of kvm_amd, which run unmodified kernels");
    }
    for (cap, what) in [
        (Cap::Irqchip, "interrupt controllers"),
        (Cap::Irqfd, "irqfd"),
        (Cap::Ioeventfd, "ioeventfd"),
        (Cap::IoeventfdNoLength, "ioeventfd for writes of any length"),
        (Cap::UserMemory, "memory of a process"),
    ] {
        ensure!(kvm.check_extension(cap), "{name} has no {what}");
    }
    Ok(kvm)
}

/// Properties that all processors have in common.
pub(crate) struct Shape {
    cpuid: CpuId,
    cpus: u8,
    deadline_timer: bool,
}

impl Shape {
    /// Describes `cpus` processors with all features that KVM supports.
    pub(crate) fn new(kvm: &Kvm, cpus: u8) -> Result<Self> {
        let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).context("cannot ask KVM for processor features")?;
        Ok(Self { cpuid, cpus, deadline_timer: kvm.check_extension(Cap::TscDeadlineTimer) })
    }

    /// Describes processors with the features that a saved machine has found.
    pub(crate) fn with_features(self, features: &[kvm_cpuid_entry2]) -> Result<Self> {
        let cpuid = CpuId::from_entries(features).map_err(|error| anyhow::anyhow!("CPUID: {error:?}"))?;
        Ok(Self { cpuid, ..self })
    }

    /// Features that all processors have in common.
    pub(crate) fn features(&self) -> &[kvm_cpuid_entry2] {
        self.cpuid.as_slice()
    }

    /// Returns the CPUID leaves of one processor, with its number and the processor count filled in.
    fn cpuid(&self, number: u8) -> CpuId {
        let mut cpuid = self.cpuid.clone();
        let (id, cpus) = (u32::from(number), u32::from(self.cpus));
        for entry in cpuid.as_mut_slice() {
            match entry.function {
                1 => {
                    const HYPERVISOR: u32 = 1 << 31;
                    const DEADLINE_TIMER: u32 = 1 << 24;
                    const SEVERAL: u32 = 1 << 28;
                    entry.ebx = entry.ebx & 0xffff | cpus << 16 | id << 24;
                    entry.ecx |= HYPERVISOR | if self.deadline_timer { DEADLINE_TIMER } else { 0 };
                    entry.edx = entry.edx & !SEVERAL | if cpus > 1 { SEVERAL } else { 0 };
                }
                0xb | 0x1f => entry.edx = id,
                0x8000_0008 => entry.ecx = entry.ecx & !0xf0ff | cpus.saturating_sub(1),
                0x8000_001e => (entry.eax, entry.ebx) = (id, entry.ebx & !0xffff | id),
                _ => {}
            }
        }
        cpuid
    }

    /// Gives a processor its features.
    pub(crate) fn apply_features(&self, cpu: &Vcpu, number: u8) -> Result<()> {
        cpu.fd.set_cpuid2(&self.cpuid(number)).context("KVM does not take the processor's features")
    }

    /// Prepares a processor. The first one starts at `entry`; the others wait until the first one starts them.
    pub(crate) fn apply(&self, cpu: &Vcpu, number: u8, entry: Entry) -> Result<()> {
        self.apply_features(cpu, number)?;
        let msr = kvm_msr_entry { index: MTRR_DEFAULT_TYPE, data: MTRR_WRITE_BACK, ..Default::default() };
        let msrs = Msrs::from_entries(&[msr]).map_err(|error| anyhow::anyhow!("{error:?}"))?;
        ensure!(cpu.fd.set_msrs(&msrs)? == 1, "KVM does not take the default type of memory");
        if number == 0 {
            let at_reset = cpu.fd.get_sregs()?;
            cpu.fd.set_sregs(&entry.special_registers(at_reset))?;
            cpu.fd.set_regs(&entry.registers())?;
        }
        Ok(())
    }
}

/// The signal that makes a processor leave guest mode and check whether it must stop.
pub(crate) fn kick_signal() -> i32 {
    SIGRTMIN()
}

extern "C" fn kicked(_signal: i32, _info: *mut libc::siginfo_t, _context: *mut libc::c_void) {}

/// Installs a handler so that the signal interrupts a processor without other effects.
pub(crate) fn prepare_kick() -> Result<()> {
    register_signal_handler(kick_signal(), kicked).context("cannot set a signal's handler")
}

/// Reason why a processor left guest mode for good.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Left {
    /// A signal, or the end of an access that KVM was told to return after.
    Interrupted,
    /// A triple fault.
    Shutdown,
}

/// Runs a processor until it is told to stop or the machine is to be reset. After a stop it is between two
/// instructions, so that its state can be saved.
///
/// # Errors
/// It cannot continue.
pub(crate) fn run(cpu: &mut Vcpu, io: &IoManager, stop: &Arc<AtomicBool>) -> Result<()> {
    while !stop.load(Ordering::Acquire) {
        if enter(cpu, io)? == Some(Left::Shutdown) {
            // The machine ends as one that resets itself: this line tells the two apart.
            // Log: at most once for each boot of the machine and processor.
            log::warn!("a processor has shut down by a triple fault: the machine resets");
            return Ok(());
        }
    }
    // KVM completes the access that it has returned for only when it is entered again.
    cpu.fd.set_kvm_immediate_exit(1);
    let mut left = None;
    while left.is_none() {
        left = enter(cpu, io)?;
    }
    cpu.fd.set_kvm_immediate_exit(0);
    Ok(())
}

/// Enters the guest once, and carries out its access. Returns `None` after an access.
fn enter(cpu: &mut Vcpu, io: &IoManager) -> Result<Option<Left>> {
    // As on a real bus, reads from an address without a device return all ones and writes are lost.
    match cpu.fd.run() {
        Ok(VcpuExit::IoIn(port, data)) => {
            if io.pio_read(PioAddress(port), data).is_err() {
                data.fill(0xff);
            }
        }
        Ok(VcpuExit::IoOut(port, data)) => drop(io.pio_write(PioAddress(port), data)),
        Ok(VcpuExit::MmioRead(address, data)) => {
            if io.mmio_read(MmioAddress(address), data).is_err() {
                data.fill(0xff);
            }
        }
        Ok(VcpuExit::MmioWrite(address, data)) => drop(io.mmio_write(MmioAddress(address), data)),
        Ok(VcpuExit::Shutdown) => return Ok(Some(Left::Shutdown)),
        Ok(VcpuExit::Intr) => return Ok(Some(Left::Interrupted)),
        Ok(other) => bail!("the processor stops: {other:?}"),
        Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => return Ok(Some(Left::Interrupted)),
        Err(error) => return Err(error).context("the processor does not run"),
    }
    Ok(None)
}
