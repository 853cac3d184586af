//! Pages of this process that are temporarily guest memory.
#![expect(unsafe_code, reason = "KVM is told addresses of this process")]

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::sync::Arc;

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use log::error;
use parking_lot::Mutex;
use vm_memory::{Bytes, MmapRegion, VolatileMemory};

use crate::slot_window::PageMapper;

const PAGE: usize = 4096;

/// Pages for doorbells. Each takes a memory slot of the VM while it is mapped.
pub struct KvmPages {
    vm: Arc<VmFd>,
    /// First of the VM's memory slots that are reserved for these pages, one for each page.
    first_slot: u32,
    pages: u32,
    /// Behind an [`Arc`], so that it can be left to the VM forever.
    memory: Arc<MmapRegion>,
    mapped: Mutex<BTreeSet<u32>>,
}

impl fmt::Debug for KvmPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvmPages").field("first_slot", &self.first_slot).finish_non_exhaustive()
    }
}

impl KvmPages {
    /// Creates `pages` pages, none of them mapped. They take memory when they are mapped for the first time, and memory
    /// slots of the VM from number `first_slot` on, which must have no other user.
    ///
    /// # Errors
    /// There is no address space left.
    pub fn new(vm: Arc<VmFd>, first_slot: u32, pages: u32) -> io::Result<Arc<Self>> {
        first_slot.checked_add(pages).ok_or_else(|| io::Error::other("no VM has that number of memory slots"))?;
        let bytes = usize::try_from(pages).ok().and_then(|pages| pages.max(1).checked_mul(PAGE));
        let bytes = bytes.ok_or_else(|| io::Error::other("too many pages"))?;
        let memory = Arc::new(MmapRegion::new(bytes).map_err(io::Error::other)?);
        Ok(Arc::new(Self { vm, first_slot, pages, memory, mapped: Mutex::default() }))
    }

    /// Offset of a page in the mapping.
    fn offset(&self, page: u32) -> io::Result<usize> {
        let offset = usize::try_from(page).ok().filter(|_| page < self.pages).and_then(|page| page.checked_mul(PAGE));
        offset.ok_or_else(|| io::Error::other("there is no such page"))
    }

    /// Sets a page's memory slot to this address, or removes it if `bytes` is 0.
    fn set(&self, page: u32, address: u64, bytes: usize) -> io::Result<()> {
        let offset = self.offset(page)?;
        let region = kvm_userspace_memory_region {
            slot: self.first_slot.saturating_add(page),
            flags: 0,
            guest_phys_addr: address,
            memory_size: bytes as u64,
            // The sum is inside the mapping, because the offset is that of a whole page of it.
            userspace_addr: (self.memory.as_ptr() as u64).saturating_add(offset as u64),
        };
        // SAFETY: the guest's processors write to this page of our mapping while the slot is there. It is taken away
        // before the mapping goes (`drop`; if that fails the mapping stays forever), and no code holds references to
        // its bytes: `vm-memory` accesses them as volatile. Nothing else of this process is in the mapping.
        Ok(unsafe { self.vm.set_user_memory_region(region) }?)
    }

    fn remove(&self, mapped: &mut BTreeSet<u32>, page: u32) -> io::Result<()> {
        if mapped.contains(&page) {
            self.set(page, 0, 0)?;
            mapped.remove(&page);
            let page = self.memory.get_slice(self.offset(page)?, PAGE).map_err(io::Error::other)?;
            page.write_slice(&[0; PAGE], 0).map_err(io::Error::other)?;
        }
        Ok(())
    }

    /// Contents of a page.
    #[cfg(test)]
    fn content(&self, page: u32) -> Vec<u8> {
        let mut bytes = vec![0xff; PAGE];
        self.memory.get_slice(self.offset(page).unwrap(), PAGE).unwrap().read_slice(&mut bytes, 0).unwrap();
        bytes
    }
}

impl PageMapper for KvmPages {
    fn map(&self, page: u32, address: u64) -> io::Result<()> {
        let mut mapped = self.mapped.lock();
        self.remove(&mut mapped, page)?;
        self.set(page, address, PAGE)?;
        mapped.insert(page);
        Ok(())
    }

    fn unmap(&self, page: u32) -> io::Result<()> {
        self.remove(&mut self.mapped.lock(), page)
    }
}

impl Drop for KvmPages {
    fn drop(&mut self) {
        let mut mapped = self.mapped.lock();
        for page in mapped.clone() {
            if let Err(error) = self.remove(&mut mapped, page) {
                // Log: only if the system is out of memory, once in the life of a machine.
                error!("doorbell page {page} stays with the VM: {error}");
            }
        }
        if !mapped.is_empty() {
            std::mem::forget(Arc::clone(&self.memory));
        }
    }
}

#[cfg(test)]
mod tests;
