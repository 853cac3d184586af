//! Bounds the number of log lines that a guest can cause. This test runs alone in its process, because it counts them.
#![expect(clippy::unwrap_used, reason = "a panic fails the test")]

mod common;

use common::{Process, connect, rxe_pair};
use pvrdma_dev::testing::{SendWr, state, wait_for};
use pvrdma_verbs::testing::LogLines;

/// A process may break and repair its rings any number of times: the number of log lines stays bounded.
#[test]
fn over_and_over() {
    let [(_test_a, driver_a), (_test_b, driver_b)] = rxe_pair();
    let (a, b) = (Process::new(&driver_a, true, 1024), Process::new(&driver_b, true, 1024));
    let log = LogLines::watch();
    let (mut qp, mut peer) = (a.rc(), b.rc());
    for round in 0..3000 {
        connect(&mut qp, 1, &mut peer, 2);
        if round % 2 == 0 {
            qp.send_ring().set_prod_tail(u32::MAX);
            qp.ring_send();
        } else {
            qp.recv_ring().set_prod_tail(u32::MAX);
            qp.ring_recv();
            peer.post_send(&[SendWr::send(1, &[])]).unwrap();
        }
        wait_for("QP in ERR", || (qp.query().unwrap().get_state() == state::ERR).then_some(()));
        qp.to_reset().unwrap();
        peer.to_reset().unwrap();
    }
    log.assert_limited(" queue of QP ");
}
