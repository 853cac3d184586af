//! Regression tests for the bugs of QEMU's device in section 14.3 of the interface specification. Each test repeats the
//! guest's actions.
#![expect(clippy::unwrap_used, reason = "a panic fails the test")]

mod common;

use std::sync::Arc;

use common::{Process, connect, gid, rxe_device, rxe_device_with, rxe_pair};
use pvrdma_dev::{
    DeviceConfig, DeviceStatus, Limits, Phase, PvrdmaDevice,
    testing::{
        Driver, GuestMemory, Irqs, MEMORY_BASE, Path, Placement, QpInit, REQUEST_SIZE, RecvWr, Request, SendWr,
        TestDevice, access, command_id as id, register, state, status, wait_for,
    },
};
use pvrdma_packet::MacAddr;
use pvrdma_rxe::{Rxe, RxeConfig};
use pvrdma_verbs_types::{GidType, Sge};

const MAC: MacAddr = MacAddr([0x52, 0x54, 0, 0, 0, 1]);

/// The objects and memory that a device holds for its guest.
fn held(status: &DeviceStatus) -> impl PartialEq + std::fmt::Debug + use<> {
    (status.objects, status.kept.used_bytes)
}

/// A directory that names these pages.
fn directory(driver: &Driver, pages: &[u64]) -> u64 {
    driver.memory().directory(pages).addr
}

/// A CREATE_QP of a kernel: six pages, for 128 requests in each direction.
fn create_qp(pd: u32, cq: u32, directory: u64) -> Request {
    let request = Request::new(id::CREATE_QP).u64(16, directory).u32(24, pd).u32(28, cq).u32(32, cq);
    request.u32(40, 128).u32(44, 128).u32(48, 1).u32(52, 1).u16(68, 6).u16(70, 4).u8(75, 2)
}

/// A CREATE_CQ of a kernel: 64 entries.
fn create_cq(directory: u64) -> Request {
    Request::new(id::CREATE_CQ).u64(16, directory).u32(28, 64).u32(32, 2)
}

/// QEMU CVE-2018-20123: a device whose creation failed leaked everything created before the failure. Here no reference
/// to guest memory, interrupts or the adapter remains, and the next attempt works.
#[test]
fn a_device_that_cannot_be_made() {
    let (memory, irqs) = (GuestMemory::new(1 << 20), Irqs::new());
    let backend = Rxe::new(RxeConfig::default()).unwrap();
    let station = backend.station(MAC);
    let references = || (Arc::strong_count(memory.space()), Arc::strong_count(&irqs));
    let before = references();
    let good = DeviceConfig::new("test");
    let bad = [
        good.clone().with_version(16),
        good.clone().with_version(17).with_roce(GidType::RoceV2),
        good.clone().with_limits(Limits::default().with_verbs(Limits::default().verbs.with_max_qp_wr(0))),
        good.clone().with_limits(Limits::default().with_max_uar(1)),
    ];
    for config in bad.iter().cycle().take(100) {
        assert!(PvrdmaDevice::new(config.clone(), memory.space().clone(), irqs.clone(), &station).is_err());
        assert_eq!(references(), before);
    }
    let device = PvrdmaDevice::new(good, memory.space().clone(), irqs.clone(), &station).unwrap();
    Driver::probe(device, &memory, &irqs).unwrap().query_port().unwrap();
}

/// QEMU CVE-2018-20124: the guest's `num_sge` was used beyond a list of four. Here the request fails, and the valid
/// SGEs beyond the queue's limit are not used.
#[test]
fn more_sges_than_the_queue_has() {
    let [(_test_a, driver_a), (_test_b, driver_b)] = rxe_pair();
    let (mut a, b) = (Process::new(&driver_a, true, 64), Process::new(&driver_b, true, 64));
    let (source, lkey) = driver_a.registered_buffer(&a.pd, 4096, access::ALL).unwrap();
    let (target, rkey) = driver_b.registered_buffer(&b.pd, 4096, access::ALL).unwrap();
    source.fill(0x77);
    for count in [5, 6, 11, 1 << 16, 1 << 28, (1 << 28) + 1, u32::MAX] {
        let (mut qp, mut peer) = (a.rc(), b.rc());
        connect(&mut qp, 1, &mut peer, 2);
        // The slot of an element of four has room for eleven SGEs, all of which are valid.
        let sges = vec![source.sge(&lkey, 0, 16); 4];
        let request = SendWr { num_sge: Some(count), ..SendWr::write(1, &sges, target.va(), rkey.rkey) };
        qp.post_send(&[request]).unwrap();
        assert_eq!(a.cq.wait().status, status::LOC_QP_OP, "{count:#x}");
        assert_eq!(target.read(0, 4096), [0; 4096]);
        qp.destroy().unwrap();
        peer.destroy().unwrap();
    }
}

/// QEMU CVE-2018-20125: page counts of CREATE_CQ and CREATE_QP that do not match the sizes, or are enormous, led to
/// huge allocations or a NULL table. Here they are refused, and nothing is allocated.
#[test]
fn page_counts_of_queues() {
    let test = rxe_device();
    let driver = test.driver();
    let process = Process::new(&driver, false, 64);
    let (pd, cq) = (process.pd.handle, process.cq.handle);
    let pages = driver.memory().alloc(6, Placement::Scattered);
    let dir = directory(&driver, &pages);
    let before = held(&test.device.status());
    let refused = |request: Request| assert!(driver.execute(&request).is_err(), "{request:?}");
    for nchunks in [0, 1] {
        refused(create_cq(dir).u32(32, nchunks));
    }
    // Page counts up to the largest number, for queues that would need that number of pages.
    for (cqe, nchunks) in [(1 << 17, 2), (1 << 17, u32::MAX), (1 << 31, u32::MAX), (1 << 31, 1), (u32::MAX, u32::MAX)] {
        refused(create_cq(dir).u32(28, cqe).u32(32, nchunks));
    }
    for (total, send) in [(0, 0), (0, 1), (1, 0), (1, 1), (5, 4), (4, 4), (6, 6), (6, 5), (6, 3), (0, u16::MAX)] {
        refused(create_qp(pd, cq, dir).u16(68, total).u16(70, send));
    }
    for (total, send) in [(u16::MAX, u16::MAX), (u16::MAX, u16::MAX - 3)] {
        refused(create_qp(pd, cq, dir).u16(68, total).u16(70, send).u32(40, 1 << 14));
        refused(create_qp(pd, cq, dir).u16(68, total).u16(70, send).u32(44, 1 << 14));
    }
    for dir in [0, 8, dir + 8, 0xfebd_0000, !0xfff, u64::MAX] {
        refused(create_cq(dir));
        refused(create_qp(pd, cq, dir));
    }
    assert_eq!(held(&test.device.status()), before);
    driver.execute(&create_cq(dir)).unwrap();
    driver.execute(&create_qp(pd, cq, dir)).unwrap();
}

/// QEMU CVE-2018-20126: CREATE_CQ and CREATE_QP leaked rings and mappings when a late step failed. Here ten thousand
/// failures, at the last page and at the response, leave nothing.
#[test]
fn queues_whose_creation_fails_late() {
    // The last part of memory, which contains the response slot, can be removed.
    let memory = GuestMemory::in_parts(8 << 20, 4);
    let test = TestDevice::new(&Rxe::new(RxeConfig::default()).unwrap(), DeviceConfig::new("test"), memory);
    let driver = test.driver();
    let process = Process::new(&driver, false, 64);
    let (pd, cq) = (process.pd.handle, process.cq.handle);
    let mut pages = driver.memory().alloc(6, Placement::Scattered);
    let good = directory(&driver, &pages);
    pages[5] = 0xfebd_0000;
    let short = directory(&driver, &[pages[0], 0xfebd_0000]);
    let long = directory(&driver, &pages);
    let before = held(&test.device.status());
    for _ in 0..5000 {
        assert!(driver.execute(&create_cq(short)).is_err());
        assert!(driver.execute(&create_qp(pd, cq, long)).is_err());
    }
    assert_eq!(held(&test.device.status()), before);
    // The response cannot be written. The driver then frees the pages, so the device must not keep them.
    let (_, part) = test.memory.part(0);
    let slot = driver.slots()[1];
    let gone = usize::try_from((slot - MEMORY_BASE) / part).unwrap();
    test.memory.unplug(gone);
    for request in [create_cq(good), create_qp(pd, cq, good)] {
        assert!(driver.execute(&request).is_err());
    }
    test.memory.plug(gone);
    assert_eq!(held(&test.device.status()), before);
    driver.execute(&create_qp(pd, cq, good)).unwrap();
}

/// QEMU CVE-2018-20191: reading a doorbell page called a NULL pointer. Here it reads as zero, at any size and offset,
/// whether or not the page belongs to a context.
#[test]
fn reads_of_doorbell_pages() {
    let test = rxe_device();
    let driver = test.driver();
    let context = driver.open().unwrap();
    for page in [0, context.uar, context.uar + 1, 1023, 1024, 1 << 30] {
        for offset in [0, 1, 4, 8, 12, 4088, 4092, 4095] {
            for size in [1, 2, 4, 8, 16] {
                let mut data = vec![0xa5; size];
                driver.pci().0.bar_read(2, u64::from(page) * 4096 + offset, &mut data);
                assert_eq!(data, vec![0; size]);
            }
        }
    }
}

/// QEMU CVE-2018-20216: the ring helpers returned −1 for an invalid index, and their callers looped forever. Here, for
/// each ring and each kind of invalid index, the doorbell returns and the owner gets an event.
#[test]
fn invalid_indices_end_the_loop() {
    let [(_test_a, driver_a), (_test_b, driver_b)] = rxe_pair();
    let (a, b) = (Process::new(&driver_a, true, 64), Process::new(&driver_b, true, 64));
    for index in [65, 127, 128, 129, 0x7fff_ffff, 0x8000_0000, u32::MAX] {
        let srq = driver_b.create_srq(&b.pd, 64, 1, 0).unwrap();
        let mut shared = driver_b.create_qp(&QpInit { srq: Some(&srq), ..QpInit::rc(&b.pd, &b.cq) }).unwrap();
        let (mut sender, mut other, mut receiver) = (a.rc(), a.rc(), b.rc());
        connect(&mut sender, 1, &mut shared, 2);
        connect(&mut other, 1, &mut receiver, 2);
        srq.ring().set_prod_tail(index);
        srq.ring_recv();
        sender.post_send(&[SendWr::send(1, &[])]).unwrap();
        wait_for("SRQ_ERR", || {
            driver_b.async_events().iter().any(|e| (e.kind, e.info) == (14, srq.handle)).then_some(())
        });
        receiver.recv_ring().set_prod_tail(index);
        receiver.ring_recv();
        other.post_send(&[SendWr::send(1, &[])]).unwrap();
        let fatal = |driver: &Driver, qp: u32| {
            wait_for("QP_FATAL", || driver.async_events().iter().any(|e| (e.kind, e.info) == (1, qp)).then_some(()));
        };
        fatal(&driver_b, receiver.handle);
        let mut qp = a.rc();
        let mut peer = b.rc();
        connect(&mut qp, 1, &mut peer, 2);
        qp.send_ring().set_prod_tail(index);
        qp.ring_send();
        fatal(&driver_a, qp.handle);
        for qp in [sender, other, qp, shared, receiver, peer] {
            qp.destroy().unwrap();
        }
        srq.destroy().unwrap();
    }
    // The consumer index of a CQ of four.
    let a = Process::new(&driver_a, true, 4);
    let (mut qp, mut peer) = (a.rc(), b.rc());
    connect(&mut qp, 1, &mut peer, 2);
    a.cq.ring().set_cons_head(0xffff_ff00);
    qp.post_send(&vec![SendWr::write(1, &[], 0, 0); 16]).unwrap();
    wait_for("CQ_ERR", || driver_a.async_events().iter().any(|e| (e.kind, e.info) == (0, a.cq.handle)).then_some(()));
    driver_a.query_port().unwrap();
}

/// QEMU CVE-2021-3582: length and page count of CREATE_MR were not compared, and pages were mapped beyond the reserved
/// range. Here a region has exactly the pages for its bytes.
#[test]
fn length_and_pages_of_a_region() {
    let test = rxe_device();
    let driver = test.driver();
    let process = Process::new(&driver, true, 4);
    let before = held(&test.device.status());
    let pages = driver.memory().alloc(600, Placement::Scattered);
    for (start, length, count) in [
        (0x1000, 4096, 2),
        (0x1000, 4096, 600),
        (0x1000, 4097, 1),
        (0x1fff, 2, 1),
        (0x1fff, 1, 2),
        (0x1000, 599 * 4096 + 1, 599),
        (0x1000, 1, 0),
        (0x1000, 0, 1),
        (0x1000, u64::MAX, 1),
        (u64::MAX, 4096, 2),
    ] {
        let result = driver.reg_mr_pages(&process.pd, start, length, &pages[..count], access::ALL);
        assert!(result.is_err(), "{start:#x} {length:#x} {count}");
    }
    assert_eq!(held(&test.device.status()), before);
    driver.reg_mr_pages(&process.pd, 0x1fff, 2, &pages[..2], access::ALL).unwrap();
}

/// Registers the shared region again, with other page counts for its two rings. Returns `true` if it was accepted.
fn show_rings<B: pvrdma_verbs::Backend<Hca: 'static>>(
    test: &TestDevice<B>,
    driver: &Driver,
    rings: [(u32, u64); 2],
) -> bool {
    for (at, (pages, directory)) in [32, 48].into_iter().zip(rings) {
        driver.memory().write(driver.dsr() + at, &pages.to_le_bytes());
        driver.memory().write(driver.dsr() + at + 8, &directory.to_le_bytes());
    }
    driver.memory().write(driver.dsr() + 72, &[0; 208]);
    driver.write_dsr_address();
    driver.pci().set_register(register::IMR, 0);
    let accepted = test.device.status().phase == Phase::Handshake;
    assert_eq!(driver.gid_type() != 0, accepted, "capabilities come with acceptance");
    driver.pci().set_register(register::CTL, 0);
    assert_eq!(driver.pci().register(register::ERR) == 0, accepted);
    accepted
}

/// QEMU CVE-2021-3607: an event ring without pages led to a huge allocation. Here the shared region is refused, and so
/// are rings of one page, which have no entries.
#[test]
fn event_rings_without_pages() {
    let test = rxe_device();
    let driver = test.driver();
    let ring = (4, directory(&driver, &driver.memory().alloc(4, Placement::Scattered)));
    for count in [0, 1] {
        assert!(!show_rings(&test, &driver, [(count, ring.1), ring]));
        assert!(!show_rings(&test, &driver, [ring, (count, ring.1)]));
        assert!(!show_rings(&test, &driver, [(count, 0), (count, 0)]));
    }
    assert!(show_rings(&test, &driver, [ring, ring]));
    driver.query_port().unwrap();
}

/// QEMU CVE-2021-3608: when a page of an event ring could not be mapped, all pages were unmapped, including those not
/// mapped yet. Here an invalid page at any position causes a refusal that leaves nothing, a thousand times, and a valid
/// region is accepted afterwards.
#[test]
fn event_rings_with_a_bad_page() {
    let test = rxe_device();
    let driver = test.driver();
    let pages = driver.memory().alloc(4, Placement::Scattered);
    let good = (4, directory(&driver, &pages));
    for round in 0..1000 {
        let bad = [0, 8, 0xfebd_0000, u64::MAX][round / 4 % 4];
        let mut list = pages.clone();
        list[round % 4] = bad;
        let table = driver.memory().directory(&list);
        let ring = (4, table.addr);
        assert!(!show_rings(&test, &driver, if round % 2 == 0 { [ring, good] } else { [good, ring] }), "{list:x?}");
        driver.memory().free_directory(&table);
    }
    for &page in &pages {
        assert_eq!(driver.memory().read_vec(page, 4096), [0; 4096]);
    }
    assert!(show_rings(&test, &driver, [good, good]));
    driver.query_port().unwrap();
}

/// QEMU CVE-2022-1050: a command was executed with slots that did not exist yet or any more. Here commands before a
/// handshake, after a refused one and after a reset are refused, and the old slots are not accessed.
#[test]
fn commands_without_slots() {
    let test = rxe_device();
    let driver = test.driver();
    let [command, response] = driver.slots();
    let submit = || {
        let query = Request::new(id::QUERY_PORT).u8(16, 1);
        driver.memory().write(command, query.bytes());
        driver.memory().write(response, &[0xcc; 256]);
        let raised = test.irqs.counts();
        let error = driver.submit(query.bytes());
        let touched = driver.memory().read_vec(response, 256) != [0xcc; 256] || test.irqs.counts() != raised;
        (error == 0, touched)
    };
    assert_eq!(submit(), (true, true));
    for reset in [
        &(|| driver.pci().set_register(register::CTL, 2)) as &dyn Fn(),
        &|| driver.pci().set_register(register::DSRHIGH, 0xffff_ffff),
        &|| {
            driver.pci().set_register(register::DSRLOW, 0);
            driver.pci().set_register(register::DSRHIGH, 0);
        },
        // Accepted, and not activated.
        &|| driver.write_dsr_address(),
        &|| driver.pci().set_bus_master(false),
        &|| pvrdma_pci_function::PciFunction::reset(&*test.device),
    ] {
        reset();
        assert_eq!(submit(), (false, false));
        driver.pci().set_bus_master(true);
        driver.pci().set_msix(true);
        driver.write_dsr_address();
        driver.pci().set_register(register::IMR, 0);
        driver.pci().set_register(register::CTL, 0);
        assert_eq!(submit(), (true, true));
    }
}

/// QEMU CVE-2023-1544: an event ring with more pages than one table names was read out of bounds. Here 512 is the
/// maximum.
#[test]
fn event_rings_of_more_than_a_table() {
    let test = rxe_device();
    let driver = test.driver();
    let pages = driver.memory().alloc(600, Placement::Scattered);
    let ring = (4, directory(&driver, &pages[..4]));
    let large = directory(&driver, &pages);
    for count in [513, 514, 600, 1024, 262_144, 0x8000_0000, u32::MAX] {
        assert!(!show_rings(&test, &driver, [(count, large), ring]), "{count:#x}");
        assert!(!show_rings(&test, &driver, [ring, (count, large)]), "{count:#x}");
    }
    assert!(show_rings(&test, &driver, [(512, large), ring]));
}

/// QEMU defect 1: the sizes of CREATE_MR were compared in 32 bits, so that 0x100001 pages passed as one.
#[test]
fn region_sizes_that_agree_in_32_bits() {
    let test = rxe_device();
    let driver = test.driver();
    let process = Process::new(&driver, true, 4);
    let dir = directory(&driver, &driver.memory().alloc(2, Placement::Scattered));
    let before = held(&test.device.status());
    for (length, nchunks) in
        [(0x1000, 0x10_0001), (0x1000, 0x8010_0001), (1 << 32 | 0x1000, 1), (1 << 44 | 0x1000, 1), (0x1000, u32::MAX)]
    {
        let request = Request::new(id::CREATE_MR).u64(16, 0x1000).u64(24, length).u64(32, dir);
        let request = request.u32(40, process.pd.handle).u32(44, 15).u32(52, nchunks);
        assert!(driver.execute(&request).is_err(), "{length:#x} {nchunks:#x}");
    }
    assert_eq!(held(&test.device.status()), before);
}

/// QEMU defect 2: an element in error was read again forever. Here, in each kind of queue, it is consumed with one
/// completion, and later elements are flushed.
#[test]
fn elements_in_error_are_consumed() {
    let [(_test_a, driver_a), (_test_b, driver_b)] = rxe_pair();
    let (mut a, mut b) = (Process::new(&driver_a, true, 64), Process::new(&driver_b, true, 64));
    let bad_key = Sge { addr: 0x1000, length: 8, lkey: 0xdead_be00 };
    let bad_sends = [
        SendWr { num_sge: Some(9), ..SendWr::send(1, &[]) },
        SendWr::send(1, &[bad_key]),
        SendWr::new(1, 99, &[]),
        SendWr::write(1, &[bad_key], 0, 0),
    ];
    for bad in bad_sends {
        let (mut qp, mut peer) = (a.rc(), b.rc());
        connect(&mut qp, 1, &mut peer, 2);
        qp.post_send(&[bad, SendWr::send(2, &[])]).unwrap();
        assert_eq!([a.cq.wait(), a.cq.wait()].map(|cqe| cqe.wr_id), [1, 2]);
        for _ in 0..3 {
            qp.ring_send();
        }
        assert!(a.cq.poll().is_none());
        assert_eq!((qp.send_ring().cons_head(), qp.query().unwrap().get_state()), (2, state::ERR));
    }
    for bad in [RecvWr { num_sge: Some(9), ..RecvWr::new(3, &[]) }, RecvWr::new(3, &[bad_key])] {
        for shared in [false, true] {
            let mut srq = driver_b.create_srq(&b.pd, 16, 4, 0).unwrap();
            let init = QpInit { srq: shared.then_some(&srq), ..QpInit::rc(&b.pd, &b.cq) };
            let (mut qp, mut receiver) = (a.rc(), driver_b.create_qp(&init).unwrap());
            connect(&mut qp, 1, &mut receiver, 2);
            if shared {
                srq.post(std::slice::from_ref(&bad)).unwrap();
            } else {
                receiver.post_recv(std::slice::from_ref(&bad)).unwrap();
            }
            let data = driver_a.registered_buffer(&a.pd, 8, 0).unwrap();
            qp.post_send(&[SendWr::send(4, &[data.0.sge(&data.1, 0, 8)])]).unwrap();
            assert_eq!(b.cq.wait().wr_id, 3);
            assert_eq!(a.cq.wait().status, status::REM_OP);
            let ring = if shared { srq.ring() } else { receiver.recv_ring() };
            assert_eq!(ring.cons_head(), 1);
            srq.ring_recv();
            if !shared {
                receiver.ring_recv();
            }
            assert!(b.cq.poll().is_none());
        }
    }
}

/// QEMU defect 3: a full table accepted one object more than it had room for. Here the additional object of any kind is
/// refused, and destroying one makes room for one.
#[test]
fn tables_that_are_full() {
    let limits = Limits::default()
        .with_verbs(Limits::default().verbs.with_max_qp(6).with_max_cq(4).with_max_mr(4).with_max_pd(4).with_max_srq(4))
        .with_max_uar(4)
        .with_gid_table(4);
    let test = rxe_device_with(DeviceConfig::new("small").with_limits(limits));
    let driver = test.driver();
    let pages = driver.memory().alloc(6, Placement::Scattered);
    let dir = directory(&driver, &pages);
    let run = |request: Request| driver.execute(&request).map(|response| [16, 20].map(|at| response.u32(at)));
    // Creates objects until one is refused. After one is destroyed, exactly one can be created.
    let fill = |create: &dyn Fn(u32) -> Request, destroy: u32, room: u32, handle: usize, end: u32| {
        let handles: Vec<u32> = (0..room).map(|i| run(create(i)).unwrap()[handle]).collect();
        assert!(handles.iter().all(|&handle| handle < end), "{handles:?}");
        for _ in 0..3 {
            assert!(run(create(room)).is_err());
        }
        run(Request::new(destroy).u32(16, handles[1])).unwrap();
        assert_eq!(run(create(1)).unwrap()[handle], handles[1]);
        assert!(run(create(room)).is_err());
        handles
    };
    let pfn = driver.uar_base() >> 12;
    fill(&|i| Request::new(id::CREATE_UC).u64(16, pfn + 1 + u64::from(i)), id::DESTROY_UC, 3, 0, 4);
    let pds = fill(&|_| Request::new(id::CREATE_PD), id::DESTROY_PD, 4, 0, 4);
    let cqs = fill(&|_| create_cq(dir), id::DESTROY_CQ, 4, 0, 4);
    let mr = |_| Request::new(id::CREATE_MR).u32(40, pds[0]).u32(48, 1);
    fill(&mr, id::DESTROY_MR, 4, 0, 4);
    let srq = |_| Request::new(id::CREATE_SRQ).u64(16, dir).u32(24, pds[0]).u32(28, 2).u32(32, 4).u32(36, 1);
    fill(&srq, id::DESTROY_SRQ, 4, 0, 4);
    // Handles 0 and 1 are reserved.
    fill(&|_| create_qp(pds[0], cqs[0], dir), id::DESTROY_QP, 4, 1, 6);
    for index in [4, 5, 255, 256, u32::MAX] {
        assert!(run(Request::new(id::CREATE_BIND).u32(24, index).set(28, &gid(1).0).u8(44, 2)).is_err());
    }
}

/// QEMU defect 4: the receive doorbell of a QP with a shared queue accessed a ring that did not exist. Here it has no
/// effect.
#[test]
fn receive_doorbell_with_a_shared_queue() {
    let [(_test_a, driver_a), (_test_b, driver_b)] = rxe_pair();
    let (mut a, mut b) = (Process::new(&driver_a, true, 64), Process::new(&driver_b, true, 64));
    let mut srq = driver_b.create_srq(&b.pd, 16, 1, 0).unwrap();
    let mut receiver = driver_b.create_qp(&QpInit { srq: Some(&srq), ..QpInit::rc(&b.pd, &b.cq) }).unwrap();
    receiver.ring_recv();
    let mut sender = a.rc();
    connect(&mut sender, 1, &mut receiver, 2);
    // The indices of a receive ring, which such a QP does not have.
    driver_b.memory().write(receiver.pages()[0] + 8, &[5, 0, 0, 0, 0, 0, 0, 0]);
    for _ in 0..10 {
        receiver.ring_recv();
    }
    srq.post(&[RecvWr::new(1, &[])]).unwrap();
    sender.post_send(&[SendWr::send(2, &[])]).unwrap();
    assert_eq!((a.cq.wait().status, b.cq.wait().wr_id), (status::SUCCESS, 1));
    assert_eq!(driver_b.memory().read_vec(receiver.pages()[0] + 8, 8), [5, 0, 0, 0, 0, 0, 0, 0]);
    receiver.to_error().unwrap();
    receiver.ring_recv();
    assert!(b.cq.poll().is_none(), "there is no receive of its own to flush");
}

/// QEMU defect 5: protection domains, CQs and SRQs could be destroyed while queue pairs used them, and a completion
/// then used a freed ring. Here they may be destroyed as well, because the driver frees their memory in any case, and
/// the queue pairs stop.
#[test]
fn objects_are_destroyed_before_their_queue_pairs() {
    let [(_test_a, driver_a), (test_b, driver_b)] = rxe_pair();
    let mut a = Process::new(&driver_a, true, 1024);
    for victim in ["PD", "CQ", "SRQ"] {
        for _ in 0..20 {
            let b = Process::new(&driver_b, true, 64);
            let mut srq = driver_b.create_srq(&b.pd, 64, 1, 0).unwrap();
            let srq_of_qp = (victim != "CQ").then_some(&srq);
            let mut receiver = driver_b.create_qp(&QpInit { srq: srq_of_qp, ..QpInit::rc(&b.pd, &b.cq) }).unwrap();
            let mut sender = a.rc();
            let path = Path { timeout: 1, retry_cnt: 1, rnr_retry: 1, ..Path::to(gid(2), receiver.qpn) };
            sender.connect(&path).unwrap();
            receiver.connect(&Path::to(gid(1), sender.qpn)).unwrap();
            let receives = vec![RecvWr::new(1, &[]); 63];
            if victim == "CQ" { receiver.post_recv(&receives) } else { srq.post(&receives) }.unwrap();
            sender.post_send(&vec![SendWr::send(1, &[]); 32]).unwrap();
            let pages = match victim {
                "PD" => [srq.pages(), receiver.pages()].concat(),
                "CQ" => b.cq.pages().to_vec(),
                _ => srq.pages().to_vec(),
            };
            let (pd, qp) = (b.pd.handle, receiver.handle);
            match victim {
                "PD" => driver_b.execute(&Request::new(id::DESTROY_PD).u32(16, pd)).map(drop).unwrap(),
                "CQ" => b.cq.destroy().unwrap(),
                _ => srq.destroy().unwrap(),
            }
            pages.iter().for_each(|&page| driver_b.memory().write(page, &[0xc3; 4096]));
            if victim == "CQ" {
                // Requests of a QP whose queue was destroyed; their completions have no queue.
                receiver.post_recv(&[RecvWr::new(3, &[])]).unwrap();
                receiver.post_send(&[SendWr::send(4, &[])]).unwrap();
            }
            sender.post_send(&vec![SendWr::send(2, &[]); 32]).unwrap();
            let last = a.cq.wait_many(64).pop().unwrap();
            assert_ne!(last.status, status::SUCCESS, "{victim}");
            for &page in &pages {
                assert_eq!(driver_b.memory().read_vec(page, 4096), [0xc3; 4096], "{victim}");
            }
            match (victim, driver_b.execute(&Request::new(id::QUERY_QP).u32(16, qp))) {
                ("PD", result) => assert!(result.is_err(), "it went with its domain"),
                (_, result) => assert_eq!(result.unwrap().u32(16), state::ERR),
            }
            sender.destroy().unwrap();
            // The remaining objects can be destroyed, or have been.
            for (id, handle) in [(id::DESTROY_QP, qp), (id::DESTROY_PD, pd)] {
                let _ = driver_b.execute(&Request::new(id).u32(16, handle));
            }
            b.context.unwrap().close().unwrap();
        }
    }
    assert_eq!((test_b.device.status().objects.qps, test_b.device.status().kept.used_bytes), (0, 0));
}

/// QEMU defect 6: `num_sge` was checked and then read again. Here a guest changes it as fast as it can: a request with
/// the large number is never executed as one with the small number.
#[test]
fn num_sge_changes_after_the_check() {
    let [(_test_a, driver_a), (_test_b, driver_b)] = rxe_pair();
    let (mut a, b) = (Process::new(&driver_a, true, 256), Process::new(&driver_b, true, 64));
    let (source, lkey) = driver_a.registered_buffer(&a.pd, 4096, access::ALL).unwrap();
    let (target, rkey) = driver_b.registered_buffer(&b.pd, 4096, access::ALL).unwrap();
    source.fill(0x77);
    let mut outcomes = [0_u32; 2];
    for _ in 0..300 {
        let (mut qp, mut peer) = (a.rc(), b.rc());
        connect(&mut qp, 1, &mut peer, 2);
        let memory = driver_a.memory();
        let request = SendWr::write(1, &[source.sge(&lkey, 0, 16)], target.va(), rkey.rkey);
        let words: Vec<u64> = (0..64).map(|slot| qp.send_ring().slot(slot) + 8).collect();
        qp.publish_send(&vec![request; 64]).unwrap();
        std::thread::scope(|scope| {
            let (stop, stopped) = std::sync::mpsc::channel::<()>();
            let words = &words;
            scope.spawn(move || {
                while stopped.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
                    for count in [0x1000_0001, 1] {
                        words.iter().for_each(|&word| memory.store(word, count));
                    }
                }
            });
            qp.ring_send();
            for cqe in a.cq.wait_many(64) {
                match cqe.status {
                    status::SUCCESS => outcomes[0] += 1,
                    status::LOC_QP_OP => outcomes[1] += 1,
                    other => assert_eq!(other, status::WR_FLUSH),
                }
            }
            drop(stop);
        });
        qp.destroy().unwrap();
        peer.destroy().unwrap();
    }
    assert_eq!(target.read(16, 4080), [0; 4080], "more than one entry was used");
    assert!(outcomes[0] + outcomes[1] > 0);
}

/// QEMU defect 7: the host's port attributes were written over a smaller structure. Here QUERY_PORT responds with 64
/// bytes, and QUERY_QP with the size of its structure.
#[test]
fn responses_have_their_size() {
    let test = rxe_device();
    let driver = test.driver();
    let process = Process::new(&driver, false, 4);
    let qp = process.rc();
    let response = driver.slots()[1];
    for (request, size) in [
        (Request::new(id::QUERY_PORT).u8(16, 1), 64),
        (Request::new(id::QUERY_QP).u32(16, qp.handle).u32(20, u32::MAX), 176),
    ] {
        driver.memory().write(response, &[0xcc; 4096]);
        let bytes: &[u8; REQUEST_SIZE] = request.bytes();
        assert_eq!(driver.submit(bytes), 0);
        let slot = driver.memory().read_vec(response, 4096);
        assert!(slot[size..].iter().all(|&byte| byte == 0xcc));
    }
    let port = driver.query_port().unwrap();
    let word = |at: usize| u32::from_le_bytes(port[at..at + 4].try_into().unwrap());
    assert_eq!((word(0), word(12) > 0), (4, true), "ACTIVE, with a GID table");
}
