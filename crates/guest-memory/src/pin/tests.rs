use std::fs::{self, File};
use std::io::Write as _;
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};

use pvrdma_pages::{PAGE_SIZE, PageListBuilder};
use rustix::fs::MemfdFlags;
use vm_memory::FileOffset;

use super::*;
use crate::{Backing, DmaSpace, Kept, MemoryBudget};

fn space_with(policy: PinPolicy, pages: u64) -> Arc<DmaSpace> {
    limited(policy, pages, MemoryLimits::default()).0
}

fn limited(policy: PinPolicy, pages: u64, limits: MemoryLimits) -> (Arc<DmaSpace>, Range<usize>) {
    let space = DmaSpace::with_limits(policy, limits);
    let mapping = shared(pages);
    let addresses = mapping.as_ptr() as usize..mapping.as_ptr() as usize + mapping.size();
    space
        .map(DmaRange {
            iova: 0x10_0000,
            len: pages * PAGE_SIZE,
            writable: true,
            backing: Some(Backing { mapping, offset: 0 }),
        })
        .unwrap();
    (space, addresses)
}

/// Creates a mapping of its own file, which the kernel does not merge with others.
fn shared(pages: u64) -> Arc<MmapRegion> {
    let file = File::from(rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(pages * PAGE_SIZE).unwrap();
    Arc::new(MmapRegion::from_file(FileOffset::new(file, 0), usize::try_from(pages * PAGE_SIZE).unwrap()).unwrap())
}

/// Uses pages as the VMM would, so that the file has them from then on.
fn fill(mapping: &MmapRegion, pages: Range<u64>) {
    let file = mapping.file_offset().unwrap().file();
    pages.for_each(|page| file.write_all_at(&[1; 4096], page * PAGE_SIZE).unwrap());
}

/// As [`fill`], for the mapping of a space.
fn fill_space(space: &DmaSpace, pages: Range<u64>) {
    let pieces = space.view().all_pieces();
    fill(&pieces[0].1.mapping, pages);
}

/// Returns the number of pages that the file of a mapping has.
fn pages_of(mapping: &MmapRegion) -> u64 {
    mapping.file_offset().unwrap().file().metadata().unwrap().blocks() * 512 / PAGE_SIZE
}

/// Returns the kernel's state of a range of this process: the number of its mappings, the resident bytes, and the
/// locked ones.
fn kernel_view(addresses: &Range<usize>) -> (usize, u64, u64) {
    let (mut mappings, mut resident, mut locked, mut inside) = (0, 0, 0, false);
    for line in fs::read_to_string("/proc/self/smaps").unwrap().lines() {
        let mut words = line.split_whitespace();
        let (name, value) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        if let Some((start, end)) = name.split_once('-') {
            let (start, end) = (usize::from_str_radix(start, 16).unwrap(), usize::from_str_radix(end, 16).unwrap());
            inside = start < addresses.end && end > addresses.start;
            mappings += usize::from(inside);
        }
        match name {
            "Rss:" if inside => resident += value.parse::<u64>().unwrap() << 10,
            "Locked:" if inside => locked += value.parse::<u64>().unwrap() << 10,
            _ => {}
        }
    }
    (mappings, resident, locked)
}

/// Returns a budget without a limit.
fn unlimited() -> Arc<MemoryBudget> {
    MemoryBudget::new(u64::MAX)
}

/// Returns pages with a gap behind each.
fn scattered(first: u64, count: u64) -> pvrdma_pages::PageList {
    let mut builder = PageListBuilder::default();
    (first..first + count).for_each(|page| builder.push(0x10_0000 + 2 * page * PAGE_SIZE).unwrap());
    builder.finish()
}

fn list(first: u64, count: u64) -> pvrdma_pages::PageList {
    let mut builder = PageListBuilder::default();
    for page in first..first + count {
        builder.push(0x10_0000 + page * PAGE_SIZE).unwrap();
    }
    builder.finish()
}

#[test]
fn all_is_locked_when_mapped() {
    let space = space_with(PinPolicy::All, 4);
    space.finish_pinning().unwrap();
    assert_eq!(space.pinned_bytes(), 4 * PAGE_SIZE);
    space.unmap_all();
    assert_eq!(space.pinned_bytes(), 0);
}

#[test]
fn locking_continues_in_steps_and_ends_with_the_range() {
    let space = space_with(PinPolicy::All, 4);
    assert_eq!(space.pinned_bytes(), 0);
    assert!(space.with_pins(|pins| pins.pin_step(PAGE_SIZE)));
    assert_eq!(space.pinned_bytes(), PAGE_SIZE);
    space.unmap_all();
    assert_eq!(space.pinned_bytes(), 0);
    assert!(!space.pin_step());
    space.finish_pinning().unwrap();
}

/// A guest's driver waits for the locking; with large memory no thread may have to wait for the populating.
#[test]
fn memory_is_locked_before_it_is_populated() {
    let (space, addresses) = limited(PinPolicy::All, 1 << 20, MemoryLimits::default());
    space.lock_all().unwrap();
    assert_eq!((space.pinned_bytes(), kernel_view(&addresses).1), (0, 0));
    fill_space(&space, 0..2);
    assert!(space.with_pins(|pins| pins.pin_step(PAGE_SIZE)));
    let (_, resident, locked) = kernel_view(&addresses);
    assert_eq!((space.pinned_bytes(), resident, locked), (PAGE_SIZE, PAGE_SIZE, PAGE_SIZE));
}

#[test]
fn overlapping_registrations_keep_their_pages() {
    let space = space_with(PinPolicy::Registered, 8);
    assert_eq!(space.pinned_bytes(), 0);
    let a = space.pin_pages(&unlimited(), &list(0, 4)).unwrap();
    let b = space.pin_pages(&unlimited(), &list(2, 4)).unwrap();
    assert_eq!(space.pinned_bytes(), 6 * PAGE_SIZE);
    drop(a);
    assert_eq!(space.pinned_bytes(), 4 * PAGE_SIZE);
    drop(b);
    assert_eq!(space.pinned_bytes(), 0);
}

#[test]
fn off_locks_nothing() {
    let space = space_with(PinPolicy::Off, 4);
    let _guard = space.pin_pages(&unlimited(), &list(0, 4)).unwrap();
    assert_eq!(space.pinned_bytes(), 0);
}

#[test]
fn the_error_names_need_and_limit() {
    let mut table = PinTable::default();
    table.failed.insert(0x1000, (0x2000, PinRefusal::Kernel("Cannot allocate memory".to_owned())));
    table.failed_bytes = 0x2000;
    let text = table.status().unwrap_err().to_string();
    assert!(text.contains("8192 bytes") && text.contains("RLIMIT_MEMLOCK"), "{text}");
}

/// C6: a client makes the daemon populate memory without limit.
#[test]
fn no_page_is_populated_before_the_limit_is_checked() {
    let limits = MemoryLimits { locked_bytes: 8 * PAGE_SIZE, ..MemoryLimits::default() };
    // 16 GiB, none of which is allocated yet.
    let (space, addresses) = limited(PinPolicy::All, 4 << 20, limits);
    let text = space.lock_all().unwrap_err().to_string();
    assert!(text.contains("17179869184 bytes") && text.contains("limit of locked memory is 32768 bytes"), "{text}");
    assert_eq!(kernel_view(&addresses).1, 0);
    assert_eq!(space.pin_error().unwrap_err().to_string(), text);
    space.unmap_all();
    space.pin_error().unwrap();

    let (space, addresses) = limited(PinPolicy::Registered, 4096, limits);
    fill_space(&space, 0..200);
    let guard = space.pin_pages(&unlimited(), &list(0, 8)).unwrap();
    assert!(space.pin_pages(&unlimited(), &list(0, 9)).is_err());
    assert!(space.pin_pages(&unlimited(), &list(100, 1)).is_err());
    let (_, resident, locked) = kernel_view(&addresses);
    assert_eq!((resident, locked), (8 * PAGE_SIZE, 8 * PAGE_SIZE));
    drop(guard);
    drop(space.pin_pages(&unlimited(), &list(100, 8)).unwrap());
    assert_eq!(kernel_view(&addresses).2, 0);
}

/// Any number of ranges that share a mapping count once against the limit.
#[test]
fn ranges_that_share_a_mapping_share_its_lock() {
    let limits = MemoryLimits { locked_bytes: 64 * PAGE_SIZE, ..MemoryLimits::default() };
    let space = DmaSpace::with_limits(PinPolicy::All, limits);
    let mapping = shared(64);
    let addresses = mapping.as_ptr() as usize..mapping.as_ptr() as usize + mapping.size();
    let range = |page: u64| DmaRange {
        iova: page * PAGE_SIZE,
        len: PAGE_SIZE,
        writable: true,
        backing: Some(Backing { mapping: Arc::clone(&mapping), offset: usize::try_from(page * PAGE_SIZE).unwrap() }),
    };
    (0..64).step_by(2).for_each(|page| space.map(range(page)).unwrap());
    fill(&mapping, 0..64);
    space.finish_pinning().unwrap();
    assert_eq!(space.pinned_bytes(), 32 * PAGE_SIZE);
    assert_eq!(kernel_view(&addresses), (1, 32 * PAGE_SIZE, 32 * PAGE_SIZE));
    space.unmap(0, PAGE_SIZE).unwrap();
    assert_eq!(space.pinned_bytes(), 31 * PAGE_SIZE);
}

/// Measures the start of a large guest, for the documentation.
#[test]
#[ignore = "takes 16 GiB of memory: run by name"]
fn a_guest_of_16_gib_is_locked() {
    let (space, addresses) = limited(PinPolicy::All, 4 << 20, MemoryLimits::default());
    fill_space(&space, 0..4 << 20);
    let start = std::time::Instant::now();
    space.finish_pinning().unwrap();
    println!("16 GiB are populated and locked after {:?}", start.elapsed());
    assert_eq!((space.pinned_bytes(), kernel_view(&addresses).2), (16 << 30, 16 << 30));
}

/// C8: registrations with gaps between them use up the mappings of the process.
#[test]
fn scattered_registrations_leave_mappings_to_others() {
    let (space, addresses) = limited(PinPolicy::Registered, 70_000, MemoryLimits::default());
    // The guest has used the registered pages, and none between them.
    let mapping = Arc::clone(&space.view().all_pieces()[0].1.mapping);
    (0..68 * 512).for_each(|page| fill(&mapping, 2 * page..2 * page + 1));
    let guards: Vec<_> = (0..68).map(|i| space.pin_pages(&unlimited(), &scattered(i * 512, 512)).unwrap()).collect();
    let (mappings, _, locked) = kernel_view(&addresses);
    assert!(mappings <= 2 * 1024 + 3, "{mappings}");
    // Registered pages are resident and locked; none of the pages between them was populated.
    assert_eq!(locked, 68 * 512 * PAGE_SIZE);
    // The other way to get scattered locks is to release parts of a large one.
    let large = space.pin_pages(&unlimited(), &list(0, 70_000)).unwrap();
    assert_eq!(space.pinned_bytes(), 70_000 * PAGE_SIZE);
    drop(large);
    assert!(kernel_view(&addresses).0 <= 2 * 1024 + 3);
    drop(guards);
    assert_eq!(space.pinned_bytes(), 0);
    assert_eq!(kernel_view(&addresses).2, 0);
    assert!(kernel_view(&addresses).0 <= 2);
}

/// C8: if the gaps must not be locked, the share of mappings is the limit, and the error says so.
#[test]
fn the_share_of_mappings_is_refused_by_name() {
    let limits = MemoryLimits { locked_bytes: 32 * PAGE_SIZE, lock_runs: 4, ..MemoryLimits::default() };
    let (space, _) = limited(PinPolicy::Registered, 64, limits);
    let guards: Vec<_> = (0..4).map(|i| space.pin_pages(&unlimited(), &list(4 * i, 1)).unwrap()).collect();
    let text = space.pin_pages(&unlimited(), &list(60, 1)).unwrap_err().to_string();
    assert!(text.contains("limit of locked memory"), "{text}");
    // A page adjacent to a run needs no further run.
    drop(space.pin_pages(&unlimited(), &list(1, 3)).unwrap());
    drop(guards);
    drop(space.pin_pages(&unlimited(), &list(60, 1)).unwrap());

    let space = DmaSpace::with_limits(PinPolicy::Registered, MemoryLimits { lock_runs: 1, ..MemoryLimits::default() });
    for i in 0..2 {
        let mapping = Arc::new(MmapRegion::new(4 << 12).unwrap());
        let backing = Some(Backing { mapping, offset: 0 });
        space.map(DmaRange { iova: 0x10_0000 + i * 0x1_0000, len: 4 << 12, writable: true, backing }).unwrap();
    }
    let _first = space.pin_pages(&unlimited(), &list(0, 1)).unwrap();
    let text = space.pin_pages(&unlimited(), &list(16, 1)).unwrap_err().to_string();
    assert!(text.contains("share of 1 locked pieces"), "{text}");
}

/// Regression: the bookkeeping of registrations was not charged to the device's budget.
#[test]
fn the_record_of_pins_is_charged() {
    let (space, _) = limited(PinPolicy::Registered, 4096, MemoryLimits::default());
    let budget = MemoryBudget::new(16 << 10);
    let pages = scattered(0, 8);
    let mut guards: Vec<_> = (0..1000).map_while(|_| space.pin_pages(&budget, &pages).ok()).collect();
    let each = budget.used() / guards.len() as u64;
    assert!((8 * 24..3000).contains(&each) && guards.len() > 5, "{each} bytes each");
    assert_eq!((budget.used_for(Kept::Pins), budget.refused(Kept::Pins)), (budget.used(), 1));
    let text = space.pin_pages(&budget, &pages).unwrap_err().to_string();
    assert!(text.contains("max_memory"), "{text}");
    // When one registration ends, there is room for one more. Refused registrations lock nothing.
    guards.pop();
    drop(space.pin_pages(&budget, &pages).unwrap());
    guards.clear();
    assert_eq!((budget.used(), space.pinned_bytes()), (0, 0));
    let poor = MemoryBudget::new(10);
    assert!(space.pin_pages(&poor, &list(0, 1)).is_err());
    assert_eq!(space.pinned_bytes(), 0);
    // Other policies keep no bookkeeping of registrations.
    let (space, _) = limited(PinPolicy::All, 16, MemoryLimits::default());
    drop(space.pin_pages(&poor, &list(0, 1)).unwrap());
}

/// S9: the bookkeeping of registered memory grows with the number of its pieces, not of its pages, and has a limit.
#[test]
fn the_record_of_registered_memory_is_small() {
    let limits = MemoryLimits { pinned_parts: 100, ..MemoryLimits::default() };
    let (space, _) = limited(PinPolicy::Registered, 4096, limits);
    let guards: Vec<_> = (0..100).map(|_| space.pin_pages(&unlimited(), &list(0, 4096)).unwrap()).collect();
    let text = space.pin_pages(&unlimited(), &list(0, 1)).unwrap_err().to_string();
    assert!(text.contains("limit of 100 registered pieces"), "{text}");
    drop(guards);
    drop(space.pin_pages(&unlimited(), &list(0, 1)).unwrap());
    assert_eq!(space.pinned_bytes(), 0);
}

/// N11: pages that a VMM has not used would be charged to this process.
#[test]
fn pages_that_the_vmm_has_not_used_stay_unused() {
    for policy in [PinPolicy::All, PinPolicy::Registered] {
        let space = DmaSpace::new(policy);
        let mapping = shared(20_000);
        let addresses = mapping.as_ptr() as usize..mapping.as_ptr() as usize + mapping.size();
        let backing = Some(Backing { mapping: Arc::clone(&mapping), offset: 0 });
        space.map(DmaRange { iova: 0x10_0000, len: 20_000 * PAGE_SIZE, writable: true, backing }).unwrap();
        fill(&mapping, 3..5);
        fill(&mapping, 9_000..9_001);
        fill(&mapping, 19_999..20_000);
        space.finish_pinning().unwrap();
        let guard = space.pin_pages(&unlimited(), &list(0, 20_000)).unwrap();
        // Resident pages are locked, the limits were checked for all pages, and a page that becomes resident later is
        // locked, too.
        assert_eq!((pages_of(&mapping), space.pinned_bytes()), (4, 20_000 * PAGE_SIZE), "{policy:?}");
        assert_eq!(kernel_view(&addresses), (1, 4 * PAGE_SIZE, 4 * PAGE_SIZE), "{policy:?}");
        space.view().write(0x10_0000 + 7 * PAGE_SIZE, b"new").unwrap();
        assert_eq!(kernel_view(&addresses), (1, 5 * PAGE_SIZE, 5 * PAGE_SIZE), "{policy:?}");
        drop(guard);
    }
}

/// A part that is a small share of its file is searched page by page for pages that the VMM has used.
#[test]
fn a_small_part_of_a_large_file_is_populated_where_it_is_used() {
    let (space, addresses) = limited(PinPolicy::Registered, 20_000, MemoryLimits::default());
    for used in [0..1, 3..5, 99..101] {
        fill_space(&space, used);
    }
    let _guard = space.pin_pages(&unlimited(), &list(0, 100)).unwrap();
    assert_eq!(kernel_view(&addresses).1, 4 * PAGE_SIZE);
    let _end = space.pin_pages(&unlimited(), &list(19_990, 10)).unwrap();
    assert_eq!(kernel_view(&addresses).1, 4 * PAGE_SIZE);
}

/// Each page of a registration may be anywhere. Pages that touch are locked by one call: locked one by one, they would
/// split the process's mappings until the share of the device is used up, and take seconds.
#[test]
fn pages_that_touch_are_one_run_in_any_order() {
    let limits = MemoryLimits { lock_runs: 1, locked_bytes: 600 * PAGE_SIZE, ..MemoryLimits::default() };
    let (space, addresses) = limited(PinPolicy::Registered, 2048, limits);
    fill_space(&space, 0..2048);
    let mut shuffled = PageListBuilder::default();
    (0..512).for_each(|i| shuffled.push(0x10_0000 + (i * 37 % 512) * PAGE_SIZE).unwrap());
    let pages = shuffled.finish();
    let first = space.pin_pages(&unlimited(), &pages).unwrap();
    let second = space.pin_pages(&unlimited(), &pages).unwrap();
    let behind = space.pin_pages(&unlimited(), &list(512, 1)).unwrap();
    assert_eq!((space.pinned_bytes(), kernel_view(&addresses).2), (513 * PAGE_SIZE, 513 * PAGE_SIZE));
    drop(first);
    assert_eq!(kernel_view(&addresses).2, 513 * PAGE_SIZE);
    drop(second);
    assert_eq!((space.pinned_bytes(), kernel_view(&addresses).2), (PAGE_SIZE, PAGE_SIZE));
    drop(behind);
    assert_eq!((space.pinned_bytes(), kernel_view(&addresses)), (0, (1, 513 * PAGE_SIZE, 0)));
}

/// A page that cannot be faulted in is an error, and nothing of the registration stays locked.
#[test]
fn pages_that_cannot_be_populated_are_not_locked() {
    let mapping = shared(8);
    let file = mapping.file_offset().unwrap().file().try_clone().unwrap();
    let addresses = mapping.as_ptr() as usize..mapping.as_ptr() as usize + mapping.size();
    let space = DmaSpace::new(PinPolicy::Registered);
    let backing = Some(Backing { mapping, offset: 0 });
    space.map(DmaRange { iova: 0x10_0000, len: 8 << 12, writable: true, backing }).unwrap();
    file.set_len(4 << 12).unwrap();
    assert!(space.pin_pages(&unlimited(), &list(0, 8)).is_err());
    assert_eq!((space.pinned_bytes(), kernel_view(&addresses).2), (0, 0));
    drop(space.pin_pages(&unlimited(), &list(0, 4)).unwrap());
}

/// Huge pages are resident anyway; pieces of them are pinned and released like others.
#[test]
fn pieces_of_huge_pages_are_pinned() {
    let file = rustix::fs::memfd_create("huge", MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB).map(File::from);
    let file = file.and_then(|file| rustix::fs::ftruncate(&file, 4 << 20).map(|()| file));
    let pages = fs::read_to_string("/proc/sys/vm/nr_hugepages").unwrap_or_default();
    let Some(file) = file.ok().filter(|_| pages.trim().parse::<u32>().is_ok_and(|pages| pages >= 2)) else {
        // Written directly to standard output, because libtest suppresses the output of passing tests.
        let _ =
            writeln!(std::io::stdout(), "skipped: no huge pages on this host (vm.nr_hugepages is {})", pages.trim());
        return;
    };
    let mapping = Arc::new(MmapRegion::from_file(FileOffset::new(file, 0), 4 << 20).unwrap());
    let addresses = mapping.as_ptr() as usize..mapping.as_ptr() as usize + mapping.size();
    for policy in [PinPolicy::Registered, PinPolicy::All] {
        let space = DmaSpace::new(policy);
        let backing = Some(Backing { mapping: Arc::clone(&mapping), offset: 0x3000 });
        space.map(DmaRange { iova: 0x10_0000, len: 3 << 20, writable: true, backing }).unwrap();
        space.finish_pinning().unwrap();
        let guards: Vec<_> = [3, 511, 600].map(|page| space.pin_pages(&unlimited(), &list(page, 3)).unwrap()).into();
        assert!(space.pinned_bytes() > 0);
        drop(guards);
        assert_eq!(kernel_view(&addresses).0, 1);
        space.view().write(0x10_0000, b"huge").unwrap();
    }
}
