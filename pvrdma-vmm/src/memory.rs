//! Guest memory, as a mapping of this process and as KVM memory slots.
#![expect(unsafe_code, reason = "KVM is told addresses of this process")]

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use kvm_bindings::{KVM_MEM_LOG_DIRTY_PAGES, kvm_userspace_memory_region, kvm_xsave};
use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, MemoryRegionAddress};

/// End of the memory below 4 GiB. The range above it holds BARs and interrupt controllers.
const LOW_END: u64 = 0xc000_0000;
/// Start of the memory above 4 GiB.
const HIGH_START: u64 = 1 << 32;

/// Returns the ranges of a guest memory of `bytes` bytes.
pub(crate) fn layout(bytes: u64) -> Vec<(GuestAddress, u64)> {
    let low = bytes.min(LOW_END);
    let pieces = [(GuestAddress(0), low), (GuestAddress(HIGH_START), bytes - low)];
    pieces.into_iter().filter(|(_, len)| *len > 0).collect()
}

/// Allocates zeroed guest memory of `bytes` bytes.
pub(crate) fn allocate(bytes: u64) -> Result<GuestMemoryMmap> {
    let pieces = layout(bytes).into_iter().map(|(start, len)| Ok((start, usize::try_from(len)?)));
    let pieces = pieces.collect::<Result<Vec<_>>>()?;
    GuestMemoryMmap::from_ranges(&pieces).with_context(|| format!("cannot have {} MiB of memory", bytes >> 20))
}

/// A VM with its memory.
pub(crate) struct Vm {
    fd: Arc<VmFd>,
    memory: GuestMemoryMmap,
}

/// A processor of a VM. It keeps the memory mapped that its guest writes to.
pub(crate) struct Vcpu {
    pub(crate) fd: VcpuFd,
    _memory: GuestMemoryMmap,
    /// Bytes of the extended registers in KVM's format.
    xsave_size: i32,
}

impl Vcpu {
    /// Reads the extended registers.
    ///
    /// # Errors
    /// They do not fit in `kvm_xsave`.
    pub(crate) fn xsave(&self) -> Result<kvm_xsave> {
        self.check_xsave()?;
        Ok(self.fd.get_xsave()?)
    }

    /// Sets the extended registers.
    ///
    /// # Errors
    /// They do not fit in `kvm_xsave`, or KVM refuses them.
    pub(crate) fn set_xsave(&self, xsave: &kvm_xsave) -> Result<()> {
        self.check_xsave()?;
        // SAFETY: KVM reads no more bytes than the structure has, which was just checked. They are more only with
        // features that a process has to request, and this one requests none.
        Ok(unsafe { self.fd.set_xsave(xsave) }?)
    }

    fn check_xsave(&self) -> Result<()> {
        let fits = usize::try_from(self.xsave_size).is_ok_and(|size| size <= size_of::<kvm_xsave>());
        ensure!(fits, "extended registers of {} bytes are not supported", self.xsave_size);
        Ok(())
    }
}

impl Vm {
    /// Creates a VM with this memory.
    pub(crate) fn new(kvm: &Kvm, memory: GuestMemoryMmap) -> Result<Self> {
        let fd = Arc::new(kvm.create_vm().context("cannot make a VM")?);
        let vm = Self { fd, memory };
        vm.set_regions(0)?;
        Ok(vm)
    }

    /// Sets the memory slots, or the flags of those that KVM knows.
    fn set_regions(&self, flags: u32) -> Result<()> {
        for (slot, region) in (0..).zip(self.memory.iter()) {
            let region = kvm_userspace_memory_region {
                slot,
                flags,
                guest_phys_addr: region.start_addr().0,
                memory_size: region.len(),
                userspace_addr: region.get_host_address(MemoryRegionAddress(0)).context("memory without an address")?
                    as u64,
            };
            // SAFETY: only the guest's processors write to this memory, and only while they run. `vcpu` is the only
            // function that makes processors, and each of them holds its own share in the mappings. There are no
            // references to the bytes: `vm-memory` accesses them as volatile.
            unsafe { self.fd.set_user_memory_region(region) }.context("KVM does not take the memory")?;
        }
        Ok(())
    }

    /// Starts or ends KVM's log of pages that processors write.
    pub(crate) fn log_writes(&self, on: bool) -> Result<()> {
        self.set_regions(if on { KVM_MEM_LOG_DIRTY_PAGES } else { 0 })
    }

    /// Returns the pages of a memory slot that processors have written since the log started or since the last call, a
    /// bit for each.
    pub(crate) fn take_written(&self, slot: u32, bytes: u64) -> Result<Vec<u64>> {
        self.fd.get_dirty_log(slot, usize::try_from(bytes)?).context("KVM's log of written pages")
    }

    /// The memory.
    pub(crate) const fn memory(&self) -> &GuestMemoryMmap {
        &self.memory
    }

    /// The descriptor for everything except processors, see [`Self::vcpu`].
    pub(crate) const fn fd(&self) -> &Arc<VmFd> {
        &self.fd
    }

    /// Adds a processor.
    pub(crate) fn vcpu(&self, number: u8) -> Result<Vcpu> {
        let fd = self.fd.create_vcpu(number.into()).with_context(|| format!("cannot make processor {number}"))?;
        Ok(Vcpu { fd, _memory: self.memory.clone(), xsave_size: self.fd.check_extension_int(Cap::Xsave2) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_leaves_a_hole_below_four_gibibytes() {
        assert_eq!(layout(512 << 20), [(GuestAddress(0), 512 << 20)]);
        assert_eq!(layout(3 << 30), [(GuestAddress(0), 3 << 30)]);
        assert_eq!(layout(5 << 30), [(GuestAddress(0), 3 << 30), (GuestAddress(1 << 32), 2 << 30)]);
    }
}
