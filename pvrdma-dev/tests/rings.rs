//! Rings through the whole device, with a mock backend that the test controls.
#![expect(clippy::unwrap_used, reason = "a panic fails the test")]

mod common;

use common::{Process, mock_device, mock_device_with};
use pvrdma_dev::{
    DeviceConfig, Limits,
    testing::{
        Driver, GuestMemory, Placement, QpAttr, QpInit, RecvWr, Request, SendWr, access, command_id, opcode, state,
    },
};
use pvrdma_verbs::{AsyncEvent, QpEvent};
use pvrdma_verbs_types::{Completion, SendOp, Sge, WcOpcode, WcStatus};

fn sges(seed: u32, count: u32) -> Vec<Sge> {
    (0..count).map(|i| Sge { addr: u64::from(seed) << 32 | u64::from(i), length: i + 1, lkey: seed ^ i }).collect()
}

fn success(qp: u32, wr_id: u64) -> Completion {
    Completion::new(qp, wr_id, WcOpcode::Send, WcStatus::Success)
}

/// Conformance 38, 61: send, receive, shared receive and completion rings with 1, 2 and the maximum number of entries,
/// through several wraps, on scattered pages.
#[test]
fn indices_wrap() {
    let (test, mock) = mock_device();
    let driver = test.driver();
    for entries in [1, 2, 64, driver.cap_u32(80)] {
        let mut process = Process::new(&driver, true, entries);
        let init = QpInit {
            max_send_wr: entries,
            max_recv_wr: entries,
            max_send_sge: 1,
            max_recv_sge: 1,
            ..QpInit::rc(&process.pd, &process.cq)
        };
        let mut qp = driver.create_qp(&init).unwrap();
        let mut srq = driver.create_srq(&process.pd, entries.min(driver.cap_u32(180)), 1, 0).unwrap();
        qp.to_init(access::ALL).unwrap();
        let batch = u64::from(entries / 2).clamp(1, 100);
        let mut id = 0;
        while id < 5 * u64::from(entries) {
            let ids = id..id + batch;
            let sends: Vec<_> = ids.clone().map(|i| SendWr::write(i, &sges(7, 1), i, 9)).collect();
            let recvs: Vec<_> = ids.clone().map(|i| RecvWr::new(i, &sges(8, 1))).collect();
            qp.post_send(&sends).unwrap();
            qp.post_recv(&recvs).unwrap();
            srq.post(&recvs).unwrap();
            for i in ids {
                let work = mock.pop_send(qp.handle).unwrap().unwrap();
                assert_eq!((work.wr_id, work.sges), (i, sges(7, 1)));
                assert_eq!(mock.pop_recv(qp.handle).unwrap().unwrap().wr_id, i);
                assert_eq!(mock.pop_shared(srq.handle).unwrap().unwrap().wr_id, i);
                mock.retire(qp.handle);
                mock.complete_send(qp.handle, &success(qp.handle, i)).unwrap();
                let cqe = process.cq.poll().unwrap();
                assert_eq!((cqe.wr_id, cqe.qp), (i, u64::from(qp.handle)));
            }
            assert_eq!(mock.pop_send(qp.handle).unwrap(), None);
            assert!(process.cq.poll().is_none());
            id += batch;
        }
        qp.destroy().unwrap();
        srq.destroy().unwrap();
        process.cq.destroy().unwrap();
    }
}

/// Conformance 38: a full ring holds exactly its number of entries. A slot is free again when its request is complete,
/// not before.
#[test]
fn full_rings() {
    let (test, mock) = mock_device();
    let process = Process::new(&test.driver(), false, 8);
    let mut qp = process.driver.create_qp(&QpInit { max_send_wr: 4, ..QpInit::rc(&process.pd, &process.cq) }).unwrap();
    let request = SendWr::send(1, &[]);
    qp.post_send(&vec![request.clone(); 4]).unwrap();
    assert!(qp.post_send(std::slice::from_ref(&request)).is_err());
    while mock.pop_send(qp.handle).unwrap().is_some() {}
    assert!(qp.post_send(std::slice::from_ref(&request)).is_err(), "the ring is full until requests complete");
    mock.retire(qp.handle);
    qp.post_send(std::slice::from_ref(&request)).unwrap();
    assert!(qp.post_send(&[request]).is_err());
}

/// Conformance 39: strides of both value styles for 1 to 128 SGEs, checked by the places of the elements.
#[test]
fn strides() {
    let limits = Limits::default().with_verbs(Limits::default().verbs.with_max_sge(128));
    let config = DeviceConfig::new("sge").with_limits(limits);
    let (test, mock) = mock_device_with(config, GuestMemory::new(64 << 20));
    let driver = test.driver();
    assert_eq!(driver.cap_u32(88), 128);
    for user in [true, false] {
        let process = Process::new(&driver, user, 8);
        for count in 1..=128 {
            let init = QpInit {
                max_send_wr: 4,
                max_recv_wr: 4,
                max_send_sge: count,
                max_recv_sge: count,
                ..QpInit::rc(&process.pd, &process.cq)
            };
            let mut qp = driver.create_qp(&init).unwrap();
            qp.to_init(0).unwrap();
            for i in 0..4 {
                qp.post_send(&[SendWr::write(i.into(), &sges(i, count), 1, 2)]).unwrap();
                qp.post_recv(&[RecvWr::new(i.into(), &sges(i + 9, count))]).unwrap();
            }
            for i in 0..4 {
                let work = mock.pop_send(qp.handle).unwrap().unwrap();
                assert_eq!((work.wr_id, work.sges), (i.into(), sges(i, count)));
                let work = mock.pop_recv(qp.handle).unwrap().unwrap();
                assert_eq!((work.wr_id, work.sges), (i.into(), sges(i + 9, count)));
            }
            qp.destroy().unwrap();
        }
    }
}

fn event(info: u32) -> AsyncEvent {
    AsyncEvent::Qp(QpEvent::CommunicationEstablished, info)
}

/// Conformance 42: 2000 events with a consumer that uses the driver's arithmetic.
#[test]
fn async_ring() {
    let (test, mock) = mock_device();
    let driver = test.driver();
    let mut seen = Vec::new();
    for i in 0..2000 {
        let before = driver.async_ring().prod_tail();
        assert!(before < 0x400);
        mock.event(event(i));
        assert_eq!(test.memory.load(driver.async_ring().slot(before & 0x1ff) + 4), i);
        if i % 3 == 0 {
            seen.extend(driver.async_events().iter().map(|e| e.info));
        }
    }
    seen.extend(driver.async_events().iter().map(|e| e.info));
    assert_eq!(seen, (0..2000).collect::<Vec<_>>());
    assert_eq!(test.irqs.count(1), 2000);
}

/// Conformance 43, 67: 5000 notifications.
#[test]
fn notification_ring() {
    let (test, mock) = mock_device();
    let driver = test.driver();
    let mut process = Process::new(&driver, true, 16);
    let qp = process.rc();
    for i in 0..5000 {
        let before = driver.notification_ring().prod_tail();
        assert!(before < 0x800);
        process.cq.arm();
        mock.complete_send(qp.handle, &success(qp.handle, i)).unwrap();
        assert_eq!(test.memory.load(driver.notification_ring().slot(before & 0x3ff)), process.cq.handle);
        process.cq.poll().unwrap();
        if i % 11 == 0 {
            driver.notifications();
        }
    }
    assert_eq!(test.irqs.count(2), 5000);
}

/// Conformance 44: event rings that the driver does not consume. Nothing is overwritten; when the driver continues, all
/// events arrive in order.
#[test]
fn event_rings_full() {
    let (test, mock) = mock_device();
    let driver = test.driver();
    let count = 1500;
    let mut processes: Vec<Process> = (0..count).map(|_| Process::new(&driver, false, 1)).collect();
    let handles: Vec<u32> = processes.iter().map(|process| process.cq.handle).collect();
    for (i, process) in (0..).zip(&processes) {
        let qp = process.rc();
        process.cq.arm();
        mock.complete_send(qp.handle, &success(qp.handle, 1)).unwrap();
        mock.event(event(i));
        // A pending event is not added a second time.
        (i >= 1000).then(|| mock.event(event(i)));
        qp.destroy().unwrap();
    }
    assert_eq!((test.irqs.count(1), test.irqs.count(2)), (512, 1024));
    let (mut events, mut notified) = (Vec::new(), Vec::new());
    for _ in 0..4 {
        events.extend(driver.async_events().iter().map(|e| e.info));
        notified.extend(driver.notifications());
        // Any doorbell shows that the driver continues.
        processes[0].cq.ring_poll();
    }
    assert_eq!(events, (0..count).collect::<Vec<_>>());
    assert_eq!(notified, handles);
    assert!(processes[7].cq.poll().is_some());
}

/// A guest that writes an invalid index to an event ring gets no events until it resets the device; nothing else
/// happens.
#[test]
fn event_ring_with_an_invalid_index() {
    let (test, mock) = mock_device();
    let driver = test.driver();
    for i in 0..512 {
        mock.event(event(i));
    }
    driver.async_ring().set_cons_head(0x1234_5678);
    mock.event(event(512));
    driver.async_ring().set_cons_head(512);
    mock.event(event(513));
    driver.query_port().unwrap();
    assert_eq!((driver.async_ring().prod_tail(), test.irqs.count(1)), (512, 512));
    driver.remove();
    let driver = test.driver();
    mock.event(event(1));
    assert_eq!(driver.async_events().len(), 1);
}

/// Parameters for creating an object whose pages are not zero.
struct Poisoned {
    pages: Vec<u64>,
    directory: u64,
}

impl Poisoned {
    fn new(driver: &Driver, pages: usize) -> Self {
        let pages = driver.memory().alloc(pages, Placement::Scattered);
        for &page in &pages {
            driver.memory().write(page, &[0xaa; 4096]);
        }
        // The guest zeroes the indices.
        driver.memory().write(pages[0], &[0; 16]);
        let directory = driver.memory().directory(&pages).addr;
        Self { pages, directory }
    }

    fn content(&self, driver: &Driver) -> Vec<u8> {
        self.pages.iter().flat_map(|&page| driver.memory().read_vec(page, 4096)).collect()
    }
}

/// Conformance 45: creating objects writes nothing to their pages. Using them writes only elements and the device's own
/// indices (spec §13 B10).
#[test]
fn pages_are_not_ours() {
    let (test, mock) = mock_device();
    let driver = test.driver();
    let context = driver.open().unwrap();
    let pd = driver.create_pd(Some(&context)).unwrap();
    let [cq, qp, srq] = [3, 4, 3].map(|pages| Poisoned::new(&driver, pages));
    let before = [&cq, &qp, &srq].map(|object| object.content(&driver));

    let request = Request::new(command_id::CREATE_CQ).u64(16, cq.directory).u32(24, context.handle);
    let cq_handle = driver.execute(&request.u32(28, 64).u32(32, 3)).unwrap().u32(16);
    let request = Request::new(command_id::CREATE_SRQ).u64(16, srq.directory).u32(24, pd.handle).u32(28, 3);
    let srq_handle = driver.execute(&request.u32(32, 64).u32(36, 1)).unwrap().u32(16);
    let request = Request::new(command_id::CREATE_QP).u64(16, qp.directory).u32(24, pd.handle).u32(28, cq_handle);
    let request = request.u32(32, cq_handle).u32(40, 32).u32(44, 64).u32(48, 1).u32(52, 1);
    let qp_handle = driver.execute(&request.u16(68, 4).u16(70, 1).u8(75, 2)).unwrap().u32(20);
    assert_eq!([&cq, &qp, &srq].map(|object| object.content(&driver)), before);

    for attr in [QpAttr::to_state(state::INIT).port().access(0), QpAttr::to_state(state::ERR)] {
        let request = Request::new(command_id::MODIFY_QP).u32(16, qp_handle).u32(20, attr.mask).set(24, &attr.bytes);
        driver.execute(&request).unwrap();
    }
    let memory = driver.memory();
    memory.store(qp.pages[0], 3);
    memory.store(qp.pages[0] + 8, 2);
    memory.store(srq.pages[0] + 8, 5);
    for _ in 0..3 {
        mock.pop_send(qp_handle).unwrap().unwrap();
        mock.retire(qp_handle);
    }
    mock.pop_recv(qp_handle).unwrap().unwrap();
    mock.pop_shared(srq_handle).unwrap().unwrap();
    mock.complete_send(qp_handle, &success(qp_handle, 1)).unwrap();
    let mut after = [&cq, &qp, &srq].map(|object| object.content(&driver));
    let words = |content: &[u8]| [0, 4, 8, 12].map(|at| u32::from_le_bytes(content[at..at + 4].try_into().unwrap()));
    assert_eq!(after.each_ref().map(|content| words(content)), [[0, 0, 1, 0], [3, 3, 2, 1], [0, 0, 5, 1]]);
    for (content, before) in after.iter_mut().zip(&before) {
        content[..16].copy_from_slice(&before[..16]);
    }
    assert_eq!(after[0][4096..4104], 1_u64.to_le_bytes());
    after[0][4096..4160].fill(0xaa);
    assert!(after == before, "the device wrote to other memory");
}

/// Conformance 46: a request is rewritten after it was taken. If the device read it again, it would see a changed
/// request each time.
#[test]
fn requests_are_copied_once() {
    let (test, mock) = mock_device();
    let process = Process::new(&test.driver(), true, 16);
    let mut qp = process.rc();
    let good = SendWr::write(1, &sges(5, 2), 0x1000, 7);
    let evil = SendWr { num_sge: Some(u32::MAX), ..SendWr::read(2, &sges(6, 4), 0, 0) };
    let [good_bytes, evil_bytes] = [&good, &evil].map(|request| request.encode(true));
    for round in 0..200_u32 {
        qp.publish_send(std::slice::from_ref(&good)).unwrap();
        let slot = qp.send_ring().slot(round % 64);
        let memory = test.memory.clone();
        let work = std::thread::scope(|scope| {
            let (stop, stopped) = std::sync::mpsc::channel::<()>();
            let (memory, good_bytes, evil_bytes) = (&memory, &good_bytes, &evil_bytes);
            scope.spawn(move || {
                while stopped.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
                    memory.write(slot, evil_bytes);
                    memory.write(slot, good_bytes);
                }
            });
            let work = mock.pop_send(qp.handle).unwrap().unwrap();
            drop(stop);
            work
        });
        mock.retire(qp.handle);
        match work.op {
            SendOp::Malformed => assert!(work.sges.is_empty()),
            // Whatever mixture was copied, the SGE count was checked on the copy from which the list was read.
            SendOp::Write { .. } | SendOp::Read { .. } => assert_eq!(work.sges.len(), 2),
            other => panic!("{other:?}"),
        }
    }
    let work = {
        qp.publish_send(std::slice::from_ref(&good)).unwrap();
        let work = mock.pop_send(qp.handle).unwrap().unwrap();
        test.memory.write(qp.send_ring().slot(200 % 64), &[0xff; 256]);
        work
    };
    assert_eq!((work.wr_id, work.sges), (1, sges(5, 2)));
}

/// Conformance 47: RESET restarts the rings at index 0, whatever was outstanding.
#[test]
fn reset_starts_over() {
    let (test, mock) = mock_device();
    let process = Process::new(&test.driver(), true, 16);
    let mut qp = process.rc();
    for round in 0..5 {
        qp.to_init(0).unwrap();
        qp.post_send(&[SendWr::send(round, &[]), SendWr::send(round + 100, &[])]).unwrap();
        qp.post_recv(&[RecvWr::new(round, &[])]).unwrap();
        assert_eq!(mock.pop_send(qp.handle).unwrap().unwrap().wr_id, round);
        assert_eq!(mock.pop_recv(qp.handle).unwrap().unwrap().wr_id, round);
        if round % 2 == 0 {
            mock.retire(qp.handle);
        }
        qp.to_reset().unwrap();
        assert_eq!((qp.send_ring().len(), qp.recv_ring().len()), (0, 0));
    }
    qp.to_init(0).unwrap();
    assert_eq!(mock.pop_send(qp.handle).unwrap(), None);
    assert_eq!(mock.pop_recv(qp.handle).unwrap(), None);
}

/// Elements with operations that a process does not have are passed on as invalid.
#[test]
fn user_operations() {
    let (test, mock) = mock_device();
    let process = Process::new(&test.driver(), true, 16);
    let mut qp = process.rc();
    for number in [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, u32::MAX] {
        qp.publish_send(&[SendWr::new(1, number, &[])]).unwrap();
        let work = mock.pop_send(qp.handle).unwrap().unwrap();
        assert_eq!(work.op, SendOp::Unsupported { opcode: number });
    }
    qp.publish_send(&[SendWr::new(1, opcode::SEND, &[])]).unwrap();
    assert!(matches!(mock.pop_send(qp.handle).unwrap().unwrap().op, SendOp::Send { .. }));
}
