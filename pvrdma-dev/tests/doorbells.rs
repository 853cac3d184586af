//! Doorbells, arming and notifications, with a mock backend that the test controls.
#![expect(clippy::unwrap_used, reason = "a panic fails the test")]

mod common;

use common::{Process, mock_device, mock_device_with};
use pvrdma_dev::{
    DeviceConfig, PvrdmaDevice,
    testing::{Cq, GuestMemory, MockDevice, QpInit, RecvWr, SendWr, TestDevice},
};
use pvrdma_pci_function::{InterruptSink, PciFunction};
use pvrdma_verbs::Backend;
use pvrdma_verbs_types::{Completion, WcOpcode, WcStatus};

fn success(qp: u32, opcode: WcOpcode) -> Completion {
    Completion::new(qp, 1, opcode, WcStatus::Success)
}

/// Conformance 48: a process's page acts only on objects of its context, the kernel's page on all.
#[test]
fn pages_are_isolated() {
    let (test, mock) = mock_device();
    let driver = test.driver();
    let (mine, other) = (Process::new(&driver, true, 16), Process::new(&driver, true, 16));
    let qp = mine.rc();
    let srq = driver.create_srq(&mine.pd, 16, 1, 0).unwrap();
    let ring = |page: u32| {
        driver.pci().doorbell(page, 0, qp.handle | 3 << 30);
        driver.pci().doorbell(page, 8, srq.handle | 1 << 30);
        driver.pci().doorbell(page, 4, mine.cq.handle | 1 << 30);
    };
    ring(other.pd.uar);
    ring(other.pd.uar + 1);
    assert_eq!((mock.notified(qp.handle), mock.srq_notified(srq.handle)), ((0, 0), 0));
    mock.complete_send(qp.handle, &success(qp.handle, WcOpcode::Send)).unwrap();
    assert!(driver.notifications().is_empty(), "a process cannot arm a queue of another process");
    for (times, page) in [(1, mine.pd.uar), (2, 0)] {
        ring(page);
        assert_eq!((mock.notified(qp.handle), mock.srq_notified(srq.handle)), ((times, times), times));
        mock.complete_send(qp.handle, &success(qp.handle, WcOpcode::Send)).unwrap();
        assert_eq!(driver.notifications(), [mine.cq.handle]);
    }
    let (uar, context) = (mine.pd.uar, mine.context.as_ref().unwrap().clone());
    context.close().unwrap();
    driver.pci().doorbell(uar, 4, other.cq.handle | 1 << 30);
    assert_eq!(driver.notification_ring().len(), 0);
    // The next context gets the same page, and other objects.
    assert_eq!(driver.open().unwrap().uar, uar);
    ring(uar);
    assert_eq!((mock.notified(qp.handle), mock.srq_notified(srq.handle)), ((2, 2), 2));
}

/// Repeated doorbells of a queue are passed on once. Those of a destroyed queue are not.
#[test]
fn doorbells_of_one_queue_collapse() {
    let (test, mock) = mock_device();
    let process = Process::new(&test.driver(), false, 16);
    let (first, second) = (process.rc(), process.rc());
    let ring = |handle: u32, bits: u32| {
        let _ = test.device.bar_write(2, 0, &(handle | bits).to_le_bytes());
    };
    let (send, recv) = (1 << 30, 1 << 31);
    for _ in 0..1000 {
        ring(first.handle, send);
        ring(second.handle, send);
        ring(first.handle, recv);
    }
    for _ in 0..2 {
        test.device.run_deferred();
        assert_eq!((mock.notified(first.handle), mock.notified(second.handle)), ((1, 1), (1, 0)));
    }
    ring(first.handle, send);
    let handle = first.handle;
    first.destroy().unwrap();
    test.device.run_deferred();
    assert_eq!(mock.notified(handle), (1, 1), "the pending doorbell was dropped with the object");
}

/// Conformance 4, 49: reads return a constant and have no effect, whatever their size.
#[test]
fn reads() {
    let (test, _) = mock_device();
    let driver = test.driver();
    for offset in [0, 4, 8, 12, 0x1000, 0x1004, 4096 * 1024 - 4, u64::MAX - 8] {
        for size in [0, 1, 2, 4, 8] {
            let mut data = vec![0x5a; size];
            driver.pci().0.bar_read(2, offset, &mut data);
            assert_eq!(data, vec![0; size]);
        }
    }
}

/// Conformance 50: doorbells without new work, for unknown objects, and invalid ones.
#[test]
fn spurious() {
    let (test, mock) = mock_device();
    let driver = test.driver();
    let process = Process::new(&driver, true, 16);
    let qp = process.rc();
    let events = (driver.async_ring().prod_tail(), driver.notification_ring().prod_tail());
    for page in [0, process.pd.uar, 1023, 5000] {
        for offset in (0..32).chain([0xffc, 0xfff]) {
            for value in [0, qp.handle, qp.handle + 1, 0x00ff_ffff, 0x4000_ffff, 0xc0ff_ffff, 0xe000_0000, u32::MAX] {
                driver.pci().doorbell(page, offset, value);
            }
            for size in [1, 2, 3, 8, 64] {
                let _ = driver.pci().0.bar_write(2, u64::from(page) * 4096 + offset, &vec![0xff; size]);
            }
        }
    }
    for _ in 0..100 {
        qp.ring_send();
        qp.ring_recv();
        process.cq.ring_poll();
    }
    assert_eq!(mock.pop_send(qp.handle).unwrap(), None);
    assert_eq!(events, (driver.async_ring().prod_tail(), driver.notification_ring().prod_tail()));
    driver.query_port().unwrap();
}

/// Conformance 51: requests that were published without a doorbell are executed with the next doorbell.
#[test]
fn late_doorbell() {
    let (test, mock) = mock_device();
    let process = Process::new(&test.driver(), false, 16);
    let mut qp = process.rc();
    qp.to_init(0).unwrap();
    qp.publish_send(&[SendWr::send(1, &[]), SendWr::send(2, &[])]).unwrap();
    qp.publish_recv(&[RecvWr::new(1, &[])]).unwrap();
    assert_eq!(mock.notified(qp.handle), (0, 0));
    qp.post_send(&[SendWr::send(3, &[])]).unwrap();
    qp.post_recv(&[RecvWr::new(2, &[])]).unwrap();
    assert_eq!(mock.notified(qp.handle), (1, 1));
    let sends: Vec<u64> = std::iter::from_fn(|| mock.pop_send(qp.handle).unwrap()).map(|w| w.wr_id).collect();
    let recvs: Vec<u64> = std::iter::from_fn(|| mock.pop_recv(qp.handle).unwrap()).map(|w| w.wr_id).collect();
    assert_eq!((sends, recvs), (vec![1, 2, 3], vec![1, 2]));
}

/// Conformance 67: one notification for each arming, none without.
#[test]
fn arm() {
    let (test, mock) = mock_device();
    let driver = test.driver();
    for user in [false, true] {
        let mut process = Process::new(&driver, user, 64);
        let qp = process.rc();
        let complete = || mock.complete_send(qp.handle, &success(qp.handle, WcOpcode::Send)).unwrap();
        complete();
        assert_eq!(driver.notification_ring().len(), 0);
        for _ in 0..3 {
            let raised = test.irqs.count(2);
            process.cq.arm();
            assert_eq!(driver.notification_ring().len(), 0, "arming announces nothing by itself");
            complete();
            complete();
            assert_eq!(driver.notifications(), [process.cq.handle]);
            assert_eq!(test.irqs.count(2), raised + 1);
        }
        while process.cq.poll().is_some() {}
        process.cq.arm();
        process.cq.arm();
        complete();
        complete();
        assert_eq!(driver.notifications(), [process.cq.handle]);
    }
}

/// Conformance 68: solicited receives and errors. ARM is stronger than ARM_SOL, in either order.
#[test]
fn arm_solicited() {
    let (test, mock) = mock_device();
    let driver = test.driver();
    let process = Process::new(&driver, true, 64);
    let qp = process.rc();
    let solicited = Completion { solicited: true, ..success(qp.handle, WcOpcode::Recv) };
    let error = Completion::new(qp.handle, 1, WcOpcode::RdmaWrite, WcStatus::RemoteAccess);
    let quiet = [success(qp.handle, WcOpcode::Send), success(qp.handle, WcOpcode::Recv)];
    let run = |arm: &dyn Fn(&Cq), completions: &[Completion], mock: &MockDevice| {
        arm(&process.cq);
        for completion in completions {
            mock.complete_recv(qp.handle, completion).unwrap();
        }
        driver.notifications().len()
    };
    assert_eq!(run(&Cq::arm_solicited, &quiet, &mock), 0);
    assert_eq!(run(&|_| {}, &[solicited, solicited], &mock), 1);
    assert_eq!(run(&Cq::arm_solicited, &[quiet[0], error, solicited], &mock), 1);
    assert_eq!(run(&|cq| (cq.arm(), cq.arm_solicited()).0, &quiet, &mock), 1);
    assert_eq!(run(&|cq| (cq.arm_solicited(), cq.arm()).0, &quiet, &mock), 1);
    assert_eq!(run(&|_| {}, &[solicited, error], &mock), 0, "unarmed");
}

/// Conformance 69: a device whose doorbells arrive late checks for completions that arrived before.
#[test]
fn late_arm() {
    let config = DeviceConfig::new("posted").with_posted_doorbells(true);
    let (test, mock) = mock_device_with(config, GuestMemory::new(64 << 20));
    let driver = test.driver();
    let mut process = Process::new(&driver, true, 64);
    let qp = process.rc();
    mock.complete_send(qp.handle, &success(qp.handle, WcOpcode::Send)).unwrap();
    process.cq.arm();
    assert_eq!(driver.notifications(), [process.cq.handle]);
    process.cq.poll().unwrap();
    process.cq.arm();
    assert!(driver.notifications().is_empty());
    mock.complete_send(qp.handle, &success(qp.handle, WcOpcode::Send)).unwrap();
    assert_eq!(driver.notifications(), [process.cq.handle]);
}

/// Conformance 69: the loop of an event-driven application, with completions from another thread. It is always woken.
#[test]
fn no_lost_wake_up() {
    let (test, mock) = mock_device();
    let driver = test.driver();
    let mut process = Process::new(&driver, true, 1024);
    let qp = process.rc();
    let total = 20_000;
    std::thread::scope(|scope| {
        let (mock, handle) = (&mock, qp.handle);
        let (credit, credits) = std::sync::mpsc::sync_channel::<()>(512);
        scope.spawn(move || {
            for id in 0..total {
                credit.send(()).unwrap();
                mock.complete_send(handle, &Completion { wr_id: id, ..success(handle, WcOpcode::Send) }).unwrap();
            }
        });
        let mut next = 0;
        while next < total {
            let raised = test.irqs.count(2);
            process.cq.arm();
            let mut polled = false;
            while let Some(cqe) = process.cq.poll() {
                assert_eq!(cqe.wr_id, next);
                next += 1;
                polled = true;
                credits.recv().unwrap();
            }
            if !polled && next < total {
                assert!(test.irqs.wait_beyond(2, raised) || !driver.notification_ring().is_empty(), "slept forever");
            }
            driver.notifications();
        }
    });
}

/// Conformance 70: completion, indices and notification are in memory when the interrupt is raised.
#[test]
fn memory_before_interrupt() {
    use pvrdma_dev::testing::{Driver, DriverRing, Irqs, MockBackend};
    use std::sync::{Arc, Mutex, OnceLock};

    #[derive(Default)]
    struct Look {
        irqs: Arc<Irqs>,
        rings: OnceLock<(DriverRing, DriverRing)>,
        seen: Mutex<Vec<(u32, u32)>>,
    }
    impl InterruptSink for Look {
        fn msix(&self, vector: u16) {
            if let (2, Some((cq, notifications))) = (vector, self.rings.get()) {
                self.seen.lock().unwrap().push((cq.len(), notifications.len()));
            }
            self.irqs.msix(vector);
        }

        fn intx(&self, _asserted: bool) {}
    }

    let (memory, look, backend) = (GuestMemory::new(16 << 20), Arc::new(Look::default()), MockBackend::new());
    let (config, station) = (DeviceConfig::new("order"), backend.station(TestDevice::<MockBackend>::mac(1)).unwrap());
    let device = PvrdmaDevice::new(config, memory.space().clone(), look.clone(), &station).unwrap();
    let driver = Driver::probe(device, &memory, &look.irqs).unwrap();
    let process = Process::new(&driver, true, 16);
    let qp = driver.create_qp(&QpInit::rc(&process.pd, &process.cq)).unwrap();
    assert!(look.rings.set((process.cq.ring().clone(), driver.notification_ring().clone())).is_ok());
    for _ in 0..5 {
        process.cq.arm();
        backend.device().complete_send(qp.handle, &success(qp.handle, WcOpcode::Send)).unwrap();
    }
    assert_eq!(*look.seen.lock().unwrap(), [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5)]);
}
