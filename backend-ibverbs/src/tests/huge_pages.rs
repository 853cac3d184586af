//! Guest memory in the host's huge pages.

use std::fs::{self, File};
use std::sync::Arc;

use pvrdma_guest_memory::{Backing, DmaRange, DmaSpace, PinPolicy};
use pvrdma_pages::PAGE_SIZE;
use pvrdma_verbs::{
    Hca, MemoryRegion, MrRequest, VerbsError,
    testing::{ALL, Node, SEND, page_list},
};
use pvrdma_verbs_types::{Access, FastRegister, QpCaps, QpType, SendOp, Sge, WcStatus};
use rustix::fs::{FallocateFlags, FlockOperation, MemfdFlags};
use vm_memory::FileOffset;
use vm_memory::mmap::MmapRegion;

use super::{SUCCESS, counter, qpn};
use crate::fake::FakeBackend;
use crate::hca::IbvHca;
use crate::sys;

/// Number of huge pages that the host reserves.
const COUNT: &str = "/proc/sys/vm/nr_hugepages";
/// Size of a huge page, in bytes.
pub(crate) const HUGE: usize = 2 << 20;
/// First bus address of the guest's memory.
const BASE: u64 = 0x1000_0000;

/// Huge pages reserved for a test. One test at a time changes their number.
struct Kept {
    _alone: File,
    before: u64,
}

impl Kept {
    fn new(pages: usize) -> Option<Self> {
        let alone = File::open(COUNT).ok()?;
        rustix::fs::flock(&alone, FlockOperation::LockExclusive).unwrap();
        let before = fs::read_to_string(COUNT).unwrap().trim().parse().unwrap();
        let kept = Self { _alone: alone, before };
        // Without permission to change the number, there may still be enough pages.
        fs::write(COUNT, (before + pages as u64).to_string()).ok();
        Some(kept)
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        fs::write(COUNT, self.before.to_string()).ok();
    }
}

/// Memory in huge pages.
pub(crate) struct HugeMemory {
    pub(crate) mapping: Arc<MmapRegion>,
    _kept: Kept,
}

impl HugeMemory {
    /// Allocates memory of `pages` huge pages. If there are none, the test is skipped, and its output says so.
    pub(crate) fn new(pages: usize) -> Option<Self> {
        let memory = Kept::new(pages).and_then(|kept| {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
            let file = File::from(rustix::fs::memfd_create("huge", flags).ok()?);
            let bytes = pages * HUGE;
            rustix::fs::ftruncate(&file, bytes as u64).unwrap();
            // Without this, the first access to a page that the host does not have would raise a signal.
            rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes as u64).ok()?;
            let mapping = Arc::new(MmapRegion::from_file(FileOffset::new(file, 0), bytes).unwrap());
            Some(Self { mapping, _kept: kept })
        });
        if memory.is_none() {
            println!(
                "SKIPPED: the host has no {pages} free huge pages of 2 MiB (vm.nr_hugepages), and this is not root"
            );
        }
        memory
    }
}

/// A device whose guest has three huge pages of memory.
struct Guest {
    backend: FakeBackend,
    node: Node<IbvHca>,
    memory: HugeMemory,
}

impl Guest {
    fn new() -> Option<Self> {
        let memory = HugeMemory::new(3)?;
        let space = DmaSpace::new(PinPolicy::Off);
        let len = memory.mapping.size() as u64;
        let backing = Some(Backing { mapping: Arc::clone(&memory.mapping), offset: 0 });
        space.map(DmaRange { iova: BASE, len, writable: true, backing }).unwrap();
        let backend = FakeBackend::new();
        let node = Node::on(&backend, 1, space, BASE..BASE + len);
        Some(Self { backend, node, memory })
    }

    fn register(
        &self,
        start: u64,
        length: u64,
        pages: &[u64],
        access: Access,
    ) -> Result<<IbvHca as Hca>::Mr, VerbsError> {
        let request = MrRequest::User { start, length, pages: page_list(pages), access };
        self.node.hca.register_mr(&self.node.pd, request)
    }

    /// Returns the offset in the guest's memory that an SGE of the host's adapter refers to.
    fn find(&self, sge: &sys::Sge) -> Option<u64> {
        let region = self.backend.host.region(sge)?;
        let into = usize::try_from(sge.addr - region.iova).unwrap();
        Some((region.start + into - self.memory.mapping.as_ptr().addr()) as u64)
    }

    /// Returns the offsets of all SGEs of a request, with their lengths.
    fn find_all(&self, sges: &[sys::Sge]) -> Vec<(u64, u32)> {
        sges.iter().map(|sge| (self.find(sge).unwrap(), sge.length)).collect()
    }
}

/// Returns the bus addresses of pages with these numbers.
fn pages(numbers: impl IntoIterator<Item = u64>) -> Vec<u64> {
    numbers.into_iter().map(|number| BASE + number * PAGE_SIZE).collect()
}

/// Page numbers scattered over three huge pages.
const SCATTERED: [u64; 4] = [700, 3, 1535, 4];
/// Virtual address in the process, inside a page.
const START: u64 = 0x7f00_0000_0100;

/// Regression test: such memory could not be registered, because a part of a huge page cannot be mapped elsewhere.
#[test]
fn memory_that_is_scattered_over_huge_pages_is_its_owners() {
    let Some(guest) = Guest::new() else { return };
    let (host, node) = (&guest.backend.host, &guest.node);
    let end = node.qp_with(QpType::Rc, None, |init| {
        init.caps = QpCaps { max_send_sge: 1, max_recv_sge: 2, ..init.caps };
    });
    end.connect(&end, |_| {});
    // One SGE of the guest may become as many as the adapter supports.
    assert_eq!(host.max_sges(), [[4, 4]]);
    let before = host.regions();
    let length = 4 * PAGE_SIZE - 0x200;
    let mr = guest.register(START, length, &pages(SCATTERED), Access::LOCAL_WRITE).unwrap();
    // One registration for the key, and one for each piece; none is accessible to peers.
    assert_eq!((host.regions() - before, counter(node, "registered_bytes")), (5, 4 * PAGE_SIZE));
    let all = Sge { addr: START, length: u32::try_from(length).unwrap(), lkey: mr.lkey() };
    let expected =
        [(700 * 4096 + 0x100, 4096 - 0x100), (3 * 4096, 4096), (1535 * 4096, 4096), (4 * 4096, 4096 - 0x100)];
    end.submit(1, SEND, &[all]);
    assert_eq!(guest.find_all(&host.sends(qpn(&end))[0].sges), expected);
    end.recv(2, &[Sge { addr: START + 4096, length: 8192, ..all }]);
    let expected = [(3 * 4096 + 0x100, 4096 - 0x100), (1535 * 4096, 4096), (4 * 4096, 0x100)];
    assert_eq!(guest.find_all(&host.receives(qpn(&end))[0].sges), expected);
    let peers = host.sends(qpn(&end))[0].sges.iter().any(|sge| host.region(sge).unwrap().access & 0xe != 0);
    assert!(!peers, "a peer may not use the key of a piece");
    // The region's own key gives no access on the host.
    assert!(guest.find(&sys::Sge { addr: START, length: 1, lkey: mr.lkey() }).is_none());
    // Once the region is destroyed, the adapter cannot access its memory, whatever is in flight.
    let posted = host.sends(qpn(&end))[0].sges.clone();
    mr.destroy();
    assert!(posted.iter().all(|sge| guest.find(sge).is_none()));
    assert_eq!((host.regions(), counter(node, "registered_bytes")), (before + 1, 0), "the key is not reused yet");
    host.complete_send(qpn(&end), SUCCESS);
    end.submit(3, SEND, &[all]);
    assert_eq!(end.scq.statuses(2), [(1, WcStatus::Success), (3, WcStatus::LocalProtection)]);
    drop(mr);
    assert_eq!(host.regions(), before);
}

#[test]
fn a_request_reaches_as_many_pieces_of_huge_pages_as_the_adapter_has_sges() {
    let Some(guest) = Guest::new() else { return };
    let (host, node) = (&guest.backend.host, &guest.node);
    let end = node.qp(QpType::Rc);
    end.connect(&end, |_| {});
    let five = pages([700, 3, 1535, 9, 4]);
    let mr = guest.register(START, 4 * PAGE_SIZE + 1, &five, Access::LOCAL_WRITE).unwrap();
    let part = |at: u64, length| Sge { addr: START + at, length, lkey: mr.lkey() };
    end.recv(1, &[part(0, 4 * 4096), part(4 * 4096, 1)]);
    // An SGE that the adapter refuses when it is used.
    assert_eq!(host.receives(qpn(&end))[0].lkey(), 0);
    end.submit(2, SEND, &[part(0x1000, 4 * 4096 - 0xfff)]);
    assert_eq!(guest.find_all(&host.sends(qpn(&end))[0].sges).len(), 4);
    host.complete_send(qpn(&end), SUCCESS);
    end.submit(3, SEND, &[part(0, 4 * 4096 + 1)]);
    assert_eq!(end.scq.statuses(2), [(2, WcStatus::Success), (3, WcStatus::LocalProtection)]);
    // Removing the memory ends the registration.
    assert!(host.regions() > 1);
    node.memory.unmap(BASE, 3 * HUGE as u64).unwrap();
    assert_eq!(counter(node, "registered_bytes"), 0);
}

/// A peer names one key and reaches the adapter directly, so such memory cannot be registered for peers.
#[test]
fn memory_for_peers_is_not_scattered_over_huge_pages() {
    let Some(guest) = Guest::new() else { return };
    let before = guest.backend.host.regions();
    for right in [Access::REMOTE_READ, Access::REMOTE_WRITE, Access::REMOTE_ATOMIC] {
        let access = Access::LOCAL_WRITE | right;
        let refused = guest.register(START, 4 * PAGE_SIZE - 0x200, &pages(SCATTERED), access).unwrap_err();
        assert!(matches!(refused, VerbsError::Unsupported(_)), "{refused}");
    }
    assert_eq!((guest.backend.host.regions(), counter(&guest.node, "registered_bytes")), (before, 0));
    // The same applies to registrations of a guest's kernel.
    let end = guest.node.qp(QpType::Rc);
    end.connect(&end, |_| {});
    let mr = guest.node.hca.register_mr(&guest.node.pd, MrRequest::FastRegister { max_pages: 4 }).unwrap();
    let (key, list) = (mr.rkey() | 1, Some(page_list(&pages(SCATTERED))));
    let request = FastRegister { key, iova: START, length: PAGE_SIZE, access: ALL, pages: list };
    end.submit(1, SendOp::FastRegister(Box::new(request)), &[]);
    assert_eq!(end.scq.statuses(1), [(1, WcStatus::LocalQpOperation)]);
}

/// Memory in one piece, and whole huge pages, are registered as one region, for peers as well.
#[test]
fn whole_huge_pages_are_registered_for_peers_as_well() {
    let Some(guest) = Guest::new() else { return };
    let before = guest.backend.host.regions();
    // From inside the third huge page to its end, the first huge page, and the beginning of the second.
    let whole = (1024 + 100..1536).chain(0..512).chain(512..600);
    // The second huge page between parts of the others.
    let swapped = (1024 + 511..1536).chain(512..1024).chain(0..7);
    for (numbers, mappings) in [(vec![3], 0), ((3..900).collect(), 0), (whole.collect(), 2), (swapped.collect(), 3)] {
        let length = numbers.len() as u64 * PAGE_SIZE - 0x200;
        let mr = guest.register(START, length, &pages(numbers.iter().copied()), ALL).unwrap();
        assert_eq!(guest.backend.host.regions() - before, 1, "{mappings} mappings");
        let sge = |addr, length| sys::Sge { addr, length, lkey: mr.lkey() };
        assert!(guest.backend.host.region(&sge(START, u32::try_from(length).unwrap())).is_some());
        if mappings == 0 {
            assert_eq!(guest.find(&sge(START, 1)), Some(numbers[0] * PAGE_SIZE + 0x100));
        }
        drop(mr);
    }
    assert_eq!(guest.backend.host.regions(), before);
}
