//! A VMM that attacks other VMMs of its process. Whatever it truncates, holds or blocks affects only itself.

#![expect(clippy::unwrap_used, reason = "a test")]

mod common;

use std::fs;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use common::frozen::Frozen;
use common::{PATIENCE, Served, memfd, take_signals};
use pvrdma_guest_memory::{DmaSpace, MemoryLimits, PinPolicy, StallMeter};
use pvrdma_pci_function::InterruptSink;
use pvrdma_verbs::testing::{LogLines, skipped};
use pvrdma_vfio_user_server::FileRules;
use rustix::event::EventfdFlags;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const RW: u32 = 3;
const NO_SPACE: u32 = 28;
const PAGE: u64 = 4096;

/// Returns the number of mappings of this process.
fn mappings() -> usize {
    fs::read_to_string("/proc/self/maps").unwrap().lines().count()
}

/// Returns the number of mappings of a memfd with this name.
fn mappings_of(name: &str) -> usize {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains(&format!("/memfd:{name} "))).count()
}

fn raise_descriptors() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
}

/// C1: replacing each lost page by a separate mapping would exhaust the mappings of the process.
#[test]
fn a_client_that_truncates_its_memory_is_evicted_alone() {
    let (attacked, neighbour) = (Served::new(), Served::new());
    let log = LogLines::watch();
    let mut client = attacked.client();
    let pages = 80_000;
    let file = memfd("short", pages * PAGE);
    client.map(0, pages * PAGE, 0, RW, Some(&file)).ok();
    let mut other = neighbour.client();
    let memory = memfd("other", 16 * PAGE);
    other.map(0, 16 * PAGE, 0, RW, Some(&memory)).ok();
    neighbour.memory.view().write(0, b"kept").unwrap();

    let before = mappings();
    file.set_len(0).unwrap();
    for page in (0..pages).step_by(2) {
        let mut data = [1; 4];
        // Lost memory reads as zero until it is unmapped.
        match attacked.memory.view().read(page * PAGE, &mut data) {
            Ok(()) => assert_eq!(data, [0; 4]),
            Err(_) => break,
        }
    }
    assert!(mappings() < before + 100, "{}", mappings());
    // The client is disconnected without any further message or client.
    client.wait_hang_up();
    while attacked.memory.mapped_bytes() != 0 {
        thread::yield_now();
    }
    attacked.function.wait_reset();

    let mut data = [0; 4];
    neighbour.memory.view().read(0, &mut data).unwrap();
    assert_eq!(&data, b"kept");
    assert_eq!(other.read(3, 0, 4), [0; 4]);
    assert_eq!(attacked.client().read(3, 0, 4), [0; 4]);
    assert_eq!(log.with("took guest memory away").len(), 1);
}

/// A stall meter that finds 60 ms of waiting in each access, as with memory whose owner keeps punching holes into it.
#[derive(Debug, Default)]
struct Asleep(AtomicU64);

impl StallMeter for Asleep {
    fn now(&self) -> Duration {
        Duration::from_millis(60 * self.0.fetch_add(1, Ordering::Relaxed) + 1)
    }

    fn sleeps(&self) -> u64 {
        self.0.fetch_add(1, Ordering::Relaxed)
    }
}

/// N6: threads that serve other devices would wait for this client's memory again and again.
#[test]
fn a_client_whose_memory_stalls_is_disconnected_alone() {
    let memory = DmaSpace::with_meter(PinPolicy::Off, MemoryLimits::default(), Box::new(Asleep::default()));
    let (attacked, neighbour) = (Served::with_space(memory), Served::new());
    let log = LogLines::watch();
    for round in 1..=2 {
        let mut client = attacked.client();
        let file = memfd("slow", 16 * PAGE);
        client.map(0, 16 * PAGE, 0, RW, Some(&file)).ok();
        while attacked.memory.view().read(0, &mut [0; 4]).is_ok() {}
        // The client is disconnected without any further message or client.
        client.wait_hang_up();
        while attacked.memory.mapped_bytes() != 0 {
            thread::yield_now();
        }
        attacked.function.wait_reset();
        // The stalls that were attributed to the first client stay counted, so the second client's first stall is the
        // fourth.
        let counters = &attacked.stats.counters;
        assert_eq!((counters.client_memory_slow.get(), counters.client_memory_stalls.get()), (round, round + 2));
        assert_eq!(counters.client_memory_lost.get(), 0);
    }
    assert_eq!(log.with("accesses to guest memory waited for the client 3 times").len(), 2);
    assert_eq!(neighbour.client().read(3, 0, 4), [0; 4]);
}

/// C5: two threads signal a blocking eventfd that has room for one signal.
#[test]
fn an_eventfd_that_blocks_stops_no_thread() {
    const ROUNDS: usize = 5000;
    let served = Served::new();
    let mut client = served.client();
    let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    client.set_irqs(2, 4 | 32, 0, 1, &[event.as_fd()]).ok();
    let barrier = Arc::new(Barrier::new(3));
    let (done, signalled) = mpsc::channel();
    for _ in 0..2 {
        let (irqs, barrier, done) = (Arc::clone(&served.irqs), Arc::clone(&barrier), done.clone());
        // Not joined, because a blocked thread does not end.
        thread::spawn(move || {
            for _ in 0..ROUNDS {
                barrier.wait();
                irqs.msix(0);
                done.send(()).unwrap();
            }
        });
    }
    for round in 0..ROUNDS {
        // One below the maximum, which a write cannot reach.
        rustix::io::write(&event, &(u64::MAX - 2).to_ne_bytes()).unwrap();
        barrier.wait();
        for _ in 0..2 {
            assert_eq!(signalled.recv_timeout(PATIENCE), Ok(()), "a thread blocks since round {round}");
        }
        assert!(take_signals(&event) > u64::MAX - 2);
    }
}

/// C6: mapping the whole file for a range of one page would use up the address space of the process.
#[test]
fn ranges_are_mapped_and_not_files() {
    let (attacked, neighbour) = (Served::new(), Served::new());
    let mut client = attacked.client();
    // Files that together cover the whole address space.
    let sizes = std::iter::repeat_n(3_u64 << 40, 42).chain((28..=41).rev().map(|shift| 1_u64 << shift));
    let files: Vec<_> = sizes.map(|size| memfd("huge", size)).collect();
    for (number, file) in (0..).zip(&files) {
        client.map(number * PAGE, PAGE, 1 << 20, RW, Some(file));
    }
    let memory = memfd("other", 1 << 30);
    neighbour.client().map(0, 1 << 30, 0, RW, Some(&memory)).ok();
    attacked.memory.view().write(0, b"here").unwrap();
}

/// C6: the limits of guarded mappings and of descriptors are per device, not shared by all clients.
#[test]
fn files_have_a_limit_for_each_device() {
    raise_descriptors();
    let (attacked, neighbour) = (Served::new(), Served::new());
    let mut client = attacked.client();
    let mut files = Vec::new();
    let refused = (0..1100).find_map(|number| {
        let file = memfd("many", PAGE);
        let answer = client.map(number * PAGE, PAGE, 0, RW, Some(&file));
        files.push(file);
        (answer.header.error != 0).then_some((number, answer.header.error))
    });
    assert_eq!(refused, Some((64, NO_SPACE)));
    let memory = memfd("other", PAGE);
    neighbour.client().map(0, PAGE, 0, RW, Some(&memory)).ok();
    // Unmapping an unused file makes room.
    client.unmap(0, PAGE, 0).ok();
    client.read(3, 0, 4);
    client.map(0, PAGE, 0, RW, Some(&memory)).ok();
}

/// C4: a file whose content never arrives would block every thread that waits for one of its pages.
#[test]
fn memory_that_never_arrives_is_refused() {
    let Some(frozen) = Frozen::mount() else {
        skipped("this process cannot mount a file system here");
        return;
    };
    let served = Served::new();
    let mut client = served.client();
    let file = fs::File::options().read(true).write(true).open(frozen.memory()).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 2 << 20);
    assert_eq!(client.map(0, 2 << 20, 0, RW, Some(&file)).errno(), common::EINVAL);
    assert_eq!(served.memory.mapped_bytes(), 0);
    assert_eq!(client.read(3, 0, 4), [0; 4]);
}

/// C4: only files of file systems that cannot block are accepted as memory.
#[test]
fn memory_is_a_file_that_cannot_block() {
    let served = Served::new();
    let mut client = served.client();
    let log = LogLines::watch();
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("memory");
    fs::write(&path, vec![0; 0x2000]).unwrap();
    let file = fs::File::options().read(true).write(true).open(&path).unwrap();
    assert_eq!(client.map(0, 0x2000, 0, RW, Some(&file)).errno(), common::EINVAL);
    let said = log.with("tmpfs");
    assert_eq!(said.iter().filter(|line| line.contains(&format!("{}:", served.name))).count(), 1, "{said:?}");
    client.map(0, 0x2000, 0, RW, Some(&memfd("memory", 0x2000))).ok();
}

/// `memory=sealed` refuses a file that can shrink, and accepts one that cannot.
#[test]
fn sealed_memory_cannot_shrink() {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

    let served = Served::with_files(FileRules::default().with_sealed(true));
    let mut client = served.client();
    let file = fs::File::from(memfd_create("sealed", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap());
    file.set_len(4 * PAGE).unwrap();
    assert_eq!(client.map(0, PAGE, 0, RW, Some(&file)).errno(), 1);
    fcntl_add_seals(&file, SealFlags::GROW).unwrap();
    assert_eq!(client.map(0, PAGE, 0, RW, Some(&file)).errno(), 1);
    fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
    client.map(0, PAGE, 0, RW, Some(&file)).ok();
    assert_eq!(served.stats.counters.client_memory_refused.get(), 2);
}

/// Limits of mapped bytes and of ranges leave room for a guest behind a vIOMMU, which maps many single pages.
#[test]
fn sixty_thousand_single_pages_take_few_mappings() {
    let served = Served::with_files(FileRules::default().with_mapped_bytes(20 << 30));
    let mut client = served.client();
    let ram = memfd("viommu", 16 << 30);
    // The stride has no common factor with the number of pages, so consecutive pages are far apart.
    for number in 0..65_536_u64 {
        let page = number * 40_503 % (4 << 20);
        client.map((1 << 40) + number * PAGE, PAGE, page * PAGE, RW, Some(&ram)).ok();
    }
    assert_eq!(client.map(0, PAGE, 0, RW, Some(&ram)).errno(), NO_SPACE);
    // The kernel may merge windows that happen to be adjacent.
    assert!((1..=16 + 16).contains(&mappings_of("viommu")), "{}", mappings_of("viommu"));
    served.memory.view().write((1 << 40) + 65_535 * PAGE, b"last").unwrap();
    client.unmap(0, 0, 2).ok();
    client.read(3, 0, 4);
    assert_eq!(mappings_of("viommu"), 0);

    // Ranges beyond the limits are refused; unmapping makes room again.
    client.map(0, 20 << 30, 0, RW, Some(&memfd("large", 32 << 30))).ok();
    assert_eq!(client.map(1 << 40, PAGE, 0, RW, Some(&ram)).errno(), NO_SPACE);
    client.unmap(0, 20 << 30, 0).ok();
    client.map(1 << 40, PAGE, 0, RW, Some(&ram)).ok();
}
