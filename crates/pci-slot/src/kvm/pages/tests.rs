//! Tests with the KVM of this machine, if it has one. No guest runs: which processes reach a page is up to the kernel,
//! where a page is mapped is up to this crate.

use kvm_ioctls::Kvm;
use pvrdma_verbs::testing::skipped;

use super::*;

const HOLE: u64 = 0xc000_0000;

/// Returns pages of a VM whose memory slot 0 is taken, together with the VM; `None` without KVM.
fn pages() -> Option<(Arc<VmFd>, Arc<KvmPages>, GuestMemory)> {
    let Ok(kvm) = Kvm::new() else {
        skipped("this machine has no KVM");
        return None;
    };
    let vm = Arc::new(kvm.create_vm().unwrap());
    let memory = GuestMemory(MmapRegion::new(1 << 20).unwrap());
    let region = kvm_userspace_memory_region {
        slot: 0,
        flags: 0,
        guest_phys_addr: 0,
        memory_size: 1 << 20,
        userspace_addr: memory.0.as_ptr() as u64,
    };
    // SAFETY: no processor of this VM ever runs.
    unsafe { vm.set_user_memory_region(region) }.unwrap();
    let pages = KvmPages::new(Arc::clone(&vm), 8, 16).unwrap();
    Some((vm, pages, memory))
}

struct GuestMemory(MmapRegion);

impl KvmPages {
    /// Stores to all of a page, as a process of the guest does.
    fn store(&self, page: u32) {
        self.memory.get_slice(self.offset(page).unwrap(), PAGE).unwrap().write_slice(&[0x5e; PAGE], 0).unwrap();
    }
}

#[test]
fn pages_come_move_and_go() {
    let Some((_vm, pages, _memory)) = pages() else { return };
    for page in 0..16 {
        pages.map(page, HOLE + u64::from(page) * 4096).unwrap();
        // Moved: two pages are never at one address, nor one page at two.
        pages.map(page, HOLE + 0x10_0000 + u64::from(page) * 4096).unwrap();
    }
    assert!(pages.map(0, HOLE + 0x10_1000).is_err(), "page 1 is there");
    pages.map(0, HOLE).unwrap();
    for page in 0..16 {
        pages.unmap(page).unwrap();
        pages.unmap(page).unwrap();
    }
    // All addresses are free again.
    for page in 0..16 {
        pages.map(15 - page, HOLE + 0x10_0000 + u64::from(page) * 4096).unwrap();
    }
}

/// The data that a process has stored is gone before the page is mapped elsewhere, and no other page changes.
#[test]
fn stored_data_is_discarded() {
    let Some((_vm, pages, _memory)) = pages() else { return };
    for page in [3, 4] {
        pages.map(page, HOLE + u64::from(page) * 4096).unwrap();
        pages.store(page);
    }
    pages.unmap(3).unwrap();
    assert_eq!((pages.content(3), pages.content(4)), (vec![0; PAGE], vec![0x5e; PAGE]));
    pages.map(4, HOLE).unwrap();
    assert_eq!(pages.content(4), [0; PAGE], "a moved page is emptied");
}

/// Invalid requests of the guest are refused, and cost nothing.
#[test]
fn places_that_cannot_be() {
    let Some((vm, pages, _memory)) = pages() else { return };
    for (page, address) in [(1, 0x1000), (1, u64::MAX - 0xfff), (1, HOLE + 1), (16, HOLE), (u32::MAX, HOLE)] {
        assert!(pages.map(page, address).is_err(), "{page} at {address:#x}");
        pages.unmap(page).unwrap();
    }
    pages.map(1, HOLE).unwrap();
    assert!(KvmPages::new(Arc::clone(&vm), u32::MAX, 2).is_err());
    // Dropping the pages frees the addresses and the slots.
    drop(pages);
    let pages = KvmPages::new(vm, 8, 16).unwrap();
    pages.map(1, HOLE).unwrap();
}
