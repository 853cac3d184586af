//! Guest memory: ours, and the same as KVM has it.
#![expect(unsafe_code, reason = "KVM is told addresses of this process")]

use std::sync::Arc;

use anyhow::{Context, Result};
use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, MemoryRegionAddress};

/// Where memory below 4 GiB ends: behind it are BARs and interrupt controllers.
const LOW_END: u64 = 0xc000_0000;
/// Where it goes on.
const HIGH_START: u64 = 1 << 32;

/// The pieces of a memory of so many bytes.
pub(crate) fn layout(bytes: u64) -> Vec<(GuestAddress, u64)> {
    let low = bytes.min(LOW_END);
    let pieces = [(GuestAddress(0), low), (GuestAddress(HIGH_START), bytes - low)];
    pieces.into_iter().filter(|(_, len)| *len > 0).collect()
}

/// Memory of so many bytes, all zeros.
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

/// A processor of a VM, which keeps the memory that its guest writes to.
pub(crate) struct Vcpu {
    pub(crate) fd: VcpuFd,
    _memory: GuestMemoryMmap,
}

impl Vm {
    /// Makes a VM of this memory.
    pub(crate) fn new(kvm: &Kvm, memory: GuestMemoryMmap) -> Result<Self> {
        let fd = Arc::new(kvm.create_vm().context("cannot make a VM")?);
        for (slot, region) in (0..).zip(memory.iter()) {
            let region = kvm_userspace_memory_region {
                slot,
                flags: 0,
                guest_phys_addr: region.start_addr().0,
                memory_size: region.len(),
                userspace_addr: region.get_host_address(MemoryRegionAddress(0)).context("memory without an address")?
                    as u64,
            };
            // SAFETY: the guest's processors write there while they run, and only then. They are made by `vcpu` alone,
            // and each has its own share in the mappings. Nobody holds references to the bytes: `vm-memory` accesses
            // them as volatile.
            unsafe { fd.set_user_memory_region(region) }.context("KVM does not take the memory")?;
        }
        Ok(Self { fd, memory })
    }

    /// For everything but processors, see [`Self::vcpu`].
    pub(crate) const fn fd(&self) -> &Arc<VmFd> {
        &self.fd
    }

    /// Adds a processor.
    pub(crate) fn vcpu(&self, number: u8) -> Result<Vcpu> {
        let fd = self.fd.create_vcpu(number.into()).with_context(|| format!("cannot make processor {number}"))?;
        Ok(Vcpu { fd, _memory: self.memory.clone() })
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
