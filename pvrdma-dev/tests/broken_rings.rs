//! Rings with invalid indices, over the software adapter.
#![expect(clippy::unwrap_used, reason = "a panic fails the test")]

mod common;

use common::{Process, connect, rxe_pair};
use pvrdma_dev::testing::{Driver, Qp, QpInit, RecvWr, SendWr, access, state, status, wait_for};

fn broken(entries: u32) -> [u32; 6] {
    [entries + 1, 2 * entries - 1, 2 * entries, u32::MAX, 0x8000_0000, 0x1234_5678]
}

fn wait_event(driver: &Driver, kind: u32, info: u32) {
    wait_for("the event", || {
        driver.async_events().iter().any(|event| (event.kind, event.info) == (kind, info)).then_some(())
    });
}

/// Conformance 40: an invalid send or receive index ends its QP with QP_FATAL at once, and affects no other QP.
#[test]
fn queue_pair() {
    let [(_test_a, driver_a), (_test_b, driver_b)] = rxe_pair();
    let (mut a, b) = (Process::new(&driver_a, true, 1024), Process::new(&driver_b, true, 1024));
    let (mut good, mut good_peer) = (a.rc(), b.rc());
    connect(&mut good, 1, &mut good_peer, 2);
    for send in [true, false] {
        for index in broken(64) {
            let (mut qp, mut peer) = (a.rc(), b.rc());
            connect(&mut qp, 1, &mut peer, 2);
            if send {
                qp.send_ring().set_prod_tail(index);
                qp.ring_send();
            } else {
                qp.recv_ring().set_prod_tail(index);
                qp.ring_recv();
                // The device reads the ring when a message needs a receive.
                peer.post_send(&[SendWr::send(1, &[])]).unwrap();
            }
            wait_event(&driver_a, 1, qp.handle);
            assert_eq!(qp.query().unwrap().get_state(), state::ERR, "{index:#x}");
            for _ in 0..10 {
                qp.ring_send();
                qp.ring_recv();
            }
            qp.to_reset().unwrap();
            let mut peer = b.rc();
            connect(&mut qp, 1, &mut peer, 2);
            qp.post_send(&[SendWr::write(1, &[], 0, 0)]).unwrap();
            assert_eq!(a.cq.wait().status, status::SUCCESS, "RESET heals");
            qp.destroy().unwrap();
        }
    }
    good.post_send(&[SendWr::write(1, &[], 0, 0)]).unwrap();
    assert_eq!(a.cq.wait().status, status::SUCCESS);
}

/// Conformance 40: an invalid index in a shared receive queue causes SRQ_ERR, and the queue is no longer used.
#[test]
fn shared_queue() {
    let [(_test_a, driver_a), (_test_b, driver_b)] = rxe_pair();
    let (a, b) = (Process::new(&driver_a, true, 64), Process::new(&driver_b, true, 64));
    for index in broken(16) {
        let srq = driver_b.create_srq(&b.pd, 16, 1, 0).unwrap();
        let mut receiver = driver_b.create_qp(&QpInit { srq: Some(&srq), ..QpInit::rc(&b.pd, &b.cq) }).unwrap();
        let mut sender = a.rc();
        connect(&mut sender, 1, &mut receiver, 2);
        srq.ring().set_prod_tail(index);
        srq.ring_recv();
        sender.post_send(&[SendWr::send(1, &[])]).unwrap();
        wait_event(&driver_b, 14, srq.handle);
        srq.ring().set_prod_tail(1);
        srq.ring_recv();
        assert_eq!(srq.ring().cons_head(), 0);
        receiver.destroy().unwrap();
        srq.destroy().unwrap();
        sender.destroy().unwrap();
    }
}

fn overrun(a: &mut Process, qp: &mut Qp, driver: &Driver) {
    let before = driver.memory().read_vec(a.cq.pages()[1], 1024);
    wait_event(driver, 0, a.cq.handle);
    wait_for("QP in ERR", || (qp.query().unwrap().get_state() == state::ERR).then_some(()));
    for _ in 0..3 {
        qp.ring_send();
        a.cq.ring_poll();
        a.cq.arm();
    }
    assert!(driver.notifications().is_empty());
    assert_eq!(driver.memory().read_vec(a.cq.pages()[1], 1024), before);
    assert_eq!(driver.async_events(), [], "one event");
}

/// Conformance 41: more completions than entries. None is overwritten, CQ_ERR is raised once, and the QP ends in ERR.
#[test]
fn completion_queue() {
    let [(_test_a, driver_a), (_test_b, driver_b)] = rxe_pair();
    let b = Process::new(&driver_b, true, 1024);
    for posted in [17_u64, 18, 40, 64] {
        let mut a = Process::new(&driver_a, true, 16);
        let (mut qp, mut peer) = (a.rc(), b.rc());
        connect(&mut qp, 1, &mut peer, 2);
        driver_a.async_events();
        let requests: Vec<_> = (0..posted).map(|i| SendWr::write(i, &[], 0, 0)).collect();
        qp.post_send(&requests).unwrap();
        overrun(&mut a, &mut qp, &driver_a);
        assert_eq!(a.cq.wait_many(16).iter().map(|cqe| cqe.wr_id).collect::<Vec<_>>(), (0..16).collect::<Vec<_>>());
        assert!(a.cq.poll().is_none());
        qp.destroy().unwrap();
        a.cq.destroy().unwrap();
    }
    // An invalid index, which is detected when the queue seems full.
    let mut a = Process::new(&driver_a, true, 16);
    let (mut qp, mut peer) = (a.rc(), b.rc());
    connect(&mut qp, 1, &mut peer, 2);
    driver_a.async_events();
    a.cq.ring().set_cons_head(0xffff_0000);
    let requests: Vec<_> = (0..40).map(|i| SendWr::write(i, &[], 0, 0)).collect();
    qp.post_send(&requests).unwrap();
    overrun(&mut a, &mut qp, &driver_a);
}

/// Conformance 46: elements are rewritten at full speed while the device executes them. Each gets one completion, and
/// only the two legitimate targets are written.
#[test]
fn rewritten_under_way() {
    let [(_test_a, driver_a), (_test_b, driver_b)] = rxe_pair();
    let (mut a, b) = (Process::new(&driver_a, true, 1024), Process::new(&driver_b, true, 64));
    let (source, lkey) = driver_a.registered_buffer(&a.pd, 4096, access::ALL).unwrap();
    let (target, rkey) = driver_b.registered_buffer(&b.pd, 3 * 4096, access::ALL).unwrap();
    source.fill(0x77);
    let one = SendWr::write(1, &[source.sge(&lkey, 0, 64)], target.va(), rkey.rkey);
    let two = SendWr::write(1, &[source.sge(&lkey, 64, 64); 3], target.va() + 8192, rkey.rkey);
    let bad = SendWr { num_sge: Some(1 << 30), ..two.clone() };
    let variants = [&one, &two, &bad].map(|request| request.encode(true));
    for _ in 0..100 {
        let (mut qp, mut peer) = (a.rc(), b.rc());
        connect(&mut qp, 1, &mut peer, 2);
        let slots: Vec<u64> = (0..64).map(|slot| qp.send_ring().slot(slot)).collect();
        std::thread::scope(|scope| {
            let (stop, stopped) = std::sync::mpsc::channel::<()>();
            let (memory, variants, slots) = (driver_a.memory(), &variants, &slots);
            scope.spawn(move || {
                while stopped.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
                    for variant in variants.iter() {
                        slots.iter().for_each(|&slot| memory.write(slot, variant));
                    }
                }
            });
            qp.post_send(&vec![one.clone(); 64]).unwrap();
            a.cq.wait_many(64);
            drop(stop);
        });
        assert!(a.cq.poll().is_none(), "one completion each");
        qp.destroy().unwrap();
    }
    assert_eq!(target.read(4096, 4096), [0; 4096]);
    assert_eq!(target.read(64, 4032), [0; 4032]);
    assert_eq!(target.read(8192 + 192, 3000), [0; 3000]);
}

/// With more SGEs than the queue allows, the request or the message fails, and the device does not read beyond the
/// element.
#[test]
fn too_many_sges() {
    let [(_test_a, driver_a), (_test_b, driver_b)] = rxe_pair();
    let (mut a, mut b) = (Process::new(&driver_a, true, 64), Process::new(&driver_b, true, 64));
    for count in [5, 6, 100, 1 << 28, u32::MAX] {
        let (mut qp, mut peer) = (a.rc(), b.rc());
        connect(&mut qp, 1, &mut peer, 2);
        qp.post_send(&[SendWr { num_sge: Some(count), ..SendWr::send(1, &[]) }]).unwrap();
        assert_eq!(a.cq.wait().status, status::LOC_QP_OP);

        let (mut qp, mut peer) = (a.rc(), b.rc());
        connect(&mut qp, 1, &mut peer, 2);
        peer.post_recv(&[RecvWr { num_sge: Some(count), ..RecvWr::new(3, &[]) }]).unwrap();
        qp.post_send(&[SendWr::send(2, &[])]).unwrap();
        assert_eq!(b.cq.wait().status, status::LOC_QP_OP);
        assert_eq!(a.cq.wait().status, status::REM_OP);
        assert_eq!(peer.query().unwrap().get_state(), state::ERR);
    }
}
