//! Hostile guests: random register accesses, commands and configuration, from many processors at once.
#![expect(clippy::unwrap_used, reason = "a panic fails the test")]

mod common;

use std::sync::atomic::{AtomicBool, Ordering};

use common::{Process, mock_device_with};
use proptest::prelude::*;
use pvrdma_dev::{
    DeviceStatus, ObjectCounts,
    testing::{
        Driver, GuestMemory, MEMORY_BASE, MockBackend, Placement, Request, Stop, TestDevice, access, command_id as id,
        register,
    },
};
use pvrdma_pci_function::PciFunction;

/// Bytes of a page.
const PAGE: u64 = 4096;

/// One action of a random guest.
#[derive(Clone, Debug)]
enum Step {
    Command(Box<Request>),
    Register(u64, u32),
    Doorbell(u64, u32),
    Config(usize, Vec<u8>),
    /// A store to the shared region, a slot, or an event ring.
    Memory(usize, u64, u64),
    Deferred,
    BringUp,
}

/// A device with 4 MiB of guest memory. The first pages are page directories, so that random commands often name one.
fn device() -> (TestDevice<MockBackend>, Driver) {
    let memory = GuestMemory::new(4 << 20);
    let directories: Vec<u64> = memory.alloc(4, Placement::Contiguous);
    let pages: Vec<u8> = memory.alloc(40, Placement::Scattered).iter().flat_map(|page| page.to_le_bytes()).collect();
    for pair in directories.chunks(2) {
        memory.write(pair[0], &pair[1].to_le_bytes());
        memory.write(pair[1], &pages);
    }
    assert_eq!(directories[0], MEMORY_BASE);
    let (test, _) = mock_device_with(TestDevice::<MockBackend>::config(1), memory);
    let driver = test.driver();
    (test, driver)
}

fn page(index: u64) -> u64 {
    MEMORY_BASE + index * PAGE
}

/// Values for fields of commands: small numbers, sizes near limits, valid addresses, random numbers.
fn word() -> impl Strategy<Value = u32> {
    prop_oneof![
        4 => 0u32..8,
        1 => (0u32..32).prop_map(|bit| 1 << bit),
        1 => (0u32..32).prop_map(|bit| (1 << bit) - 1),
        1 => (0u64..64).prop_map(|index| u32::try_from(page(index)).unwrap()),
        1 => any::<u32>(),
    ]
}

fn command() -> impl Strategy<Value = Step> {
    (0u32..24, proptest::collection::vec(word(), 42), any::<bool>()).prop_map(|(id, words, context)| {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let request = Request::new(id).set(16, &bytes);
        // A doorbell page that exists.
        let pfn = (0x80_0000_0000 >> 12) + u64::from(words[0] % 16);
        let request = if id == id::CREATE_UC && context { request.u64(16, pfn) } else { request };
        Step::Command(Box::new(request))
    })
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        10 => command(),
        2 => ((0u64..12).prop_map(|i| i * 4), word()).prop_map(|(at, value)| Step::Register(at, value)),
        4 => ((0u64..0x4_0000).prop_map(|at| at & !3), any::<u32>(), 0u32..8)
            .prop_map(|(at, flags, handle)| Step::Doorbell(at & 0x3_f00c, flags & 0xff00_0000 | handle)),
        1 => (0usize..260, proptest::collection::vec(any::<u8>(), 1..9)).prop_map(|(at, data)| Step::Config(at, data)),
        2 => (0usize..5, 0u64..512, (0u64..64).prop_map(page)).prop_map(|(p, at, value)| Step::Memory(p, at * 8, value)),
        1 => Just(Step::Deferred),
        1 => Just(Step::BringUp),
    ]
}

/// Brings the device up like a driver's probe. The shared region is written again, because the guest may have
/// overwritten it.
fn bring_up(driver: &Driver, region: &[u8]) {
    let pci = driver.pci();
    pci.set_bus_master(false);
    pci.set_bus_master(true);
    pci.set_msix(true);
    driver.memory().write(driver.dsr(), region);
    driver.write_dsr_address();
    pci.set_register(register::IMR, 0);
    pci.set_register(register::CTL, 0);
    assert_eq!(pci.register(register::ERR), 0);
}

fn held(status: &DeviceStatus) -> (ObjectCounts, u64) {
    (status.objects, status.kept.used_bytes)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Nothing panics, and everything can be destroyed in the end.
    #[test]
    fn random_guests(steps in proptest::collection::vec(step(), 1..60)) {
        let (test, driver) = device();
        let region = driver.dsr_bytes()[..72].to_vec();
        let [command, response] = driver.slots();
        let rings = [driver.async_ring().prod_tail_address() & !0xfff, driver.notification_ring().slot(0)];
        let targets = [driver.dsr(), command, response, rings[0], rings[1]];
        for step in steps {
            match step {
                Step::Command(request) => {
                    driver.submit(request.bytes());
                }
                Step::Register(at, value) => {
                    driver.pci().set_register(at, value);
                    driver.pci().register(at);
                }
                Step::Doorbell(at, value) => {
                    let _ = test.device.bar_write(2, at, &value.to_le_bytes());
                }
                Step::Config(at, data) => test.device.config_write(at, &data),
                Step::Memory(target, at, value) => driver.memory().write(targets[target] + at, &value.to_le_bytes()),
                Step::Deferred => test.device.run_deferred(),
                Step::BringUp => bring_up(&driver, &region),
            }
        }
        bring_up(&driver, &region);
        driver.create_pd(None).unwrap();
        test.device.reset();
        prop_assert_eq!(held(&test.device.status()), (ObjectCounts::default(), 0));
    }
}

/// Conformance 21: a hundred thousand refused commands leave no resources allocated.
#[test]
fn refusals_do_not_leak() {
    let (test, driver) = device();
    let process = Process::new(&driver, false, 64);
    let before = test.device.status();
    let directory = |pages: usize| {
        let pages = driver.memory().alloc(pages, Placement::Scattered);
        driver.memory().directory(&pages).addr
    };
    let (pd, cq) = (process.pd.handle, process.cq.handle);
    let qp = Request::new(id::CREATE_QP).u64(16, directory(6)).u32(24, pd).u32(28, cq).u32(32, cq).u8(75, 2);
    let qp = qp.u32(40, 128).u32(44, 128).u32(48, 1).u32(52, 1).u16(68, 6).u16(70, 4);
    let mr = Request::new(id::CREATE_MR).u64(16, 0x7f00_0000_0800).u64(24, 4096).u64(32, directory(2));
    let mr = mr.u32(40, pd).u32(44, access::ALL).u32(52, 2);
    let empty = driver.memory().alloc_page();
    let requests = [
        qp.clone().u16(68, 5),
        qp.u32(48, 4),
        Request::new(id::CREATE_CQ).u64(16, directory(2)).u32(28, 128).u32(32, 2),
        mr.clone().u64(32, empty),
        mr.u32(48, 9),
    ];
    for request in requests.iter().cycle().take(100_000) {
        assert_ne!(driver.submit(request.bytes()), 0, "{request:?}");
    }
    assert_eq!(held(&test.device.status()), held(&before));
    process.pd.destroy().unwrap();
}

/// Threads ring and read doorbells while another one creates, destroys, resets and switches bus mastering. No thread
/// waits forever, and no resource remains after the last reset.
#[test]
fn doorbells_during_commands_and_resets() {
    let (test, driver) = device();
    let region = driver.dsr_bytes()[..72].to_vec();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 0..3u32 {
            let (device, stop) = (&test.device, &stop);
            scope.spawn(move || {
                let mut value = thread;
                while !stop.load(Ordering::Relaxed) {
                    value = value.wrapping_mul(0x0019_660d).wrapping_add(0x3c6e_f35f);
                    let at = u64::from(value >> 8) % 3 * PAGE + u64::from(value >> 16) % 3 * 4;
                    device.bar_write(2, at, &(value & 0xe000_0003).to_le_bytes()).run(&**device);
                    device.bar_read(1, register::ERR, &mut [0; 4]);
                }
            });
        }
        let _stop = Stop(&stop);
        for round in 0..200 {
            bring_up(&driver, &region);
            let process = Process::new(&driver, true, 64);
            let qp = process.rc();
            let srq = driver.create_srq(&process.pd, 16, 1, 0).unwrap();
            let (buffer, _) = driver.registered_buffer(&process.pd, 8192, access::ALL).unwrap();
            match round % 3 {
                0 => driver.pci().set_register(register::CTL, 2),
                1 => driver.pci().set_bus_master(false),
                _ => test.device.reset(),
            }
            // Everything is destroyed by the reset; the driver still frees its pages and its doorbell page.
            let Process { cq, context, .. } = process;
            assert!(qp.destroy().is_err() && srq.destroy().is_err() && cq.destroy().is_err());
            assert!(context.unwrap().close().is_err());
            buffer.free();
        }
    });
    test.device.reset();
    test.device.run_deferred();
    assert_eq!(held(&test.device.status()), (ObjectCounts::default(), 0));
}
