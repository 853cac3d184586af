//! Doorbells, as the device acts on them.

use crate::abi::cmd::{DestroyQp, DestroyUc, Opcode};
use crate::pci_function::PciFunction;
use crate::test_rig::Rig;

const SEND: u32 = 1 << 30;
const RECV: u32 = 1 << 31;
const ARM: u32 = 1 << 30;

/// Conformance 48, 50.
#[test]
fn a_page_rings_for_its_own_context_only() {
    let rig = Rig::up();
    let (one, other) = (rig.open(1), rig.open(2));
    let pd = rig.create_pd(one);
    let cq = rig.create_cq(one);
    let (qp, _) = rig.create_qp(pd, cq);
    let srq = rig.create_srq(pd);
    rig.books.take();
    for page in [2, 3, 1023, 1024] {
        rig.ring(page, 0, qp | SEND | RECV);
        rig.ring(page, 8, srq | SEND);
        rig.ring(page, 4, cq | ARM);
    }
    for unknown in [0, 1, qp + 1, 0x00ff_fffe] {
        rig.ring(0, 0, unknown | SEND);
        rig.ring(0, 8, (unknown + 1) | SEND);
        rig.ring(0, 4, (unknown + 1) | ARM);
    }
    rig.device.run_deferred();
    assert!(rig.books.take().is_empty());
    rig.ring(1, 0, qp | SEND);
    rig.ring(1, 8, srq | SEND);
    rig.device.run_deferred();
    assert_eq!(rig.books.take(), ["QP 2 send", "SRQ 0 recv"]);
    rig.ring(0, 0, qp | SEND);
    rig.device.run_deferred();
    assert_eq!(rig.books.take(), ["QP 2 send"]);

    // A page is dead from the end of its context until the next one, which has other objects.
    rig.run(Opcode::DESTROY_UC, &DestroyUc { ctx_handle: other }).unwrap();
    rig.run(Opcode::DESTROY_UC, &DestroyUc { ctx_handle: one }).unwrap();
    rig.books.take();
    rig.open(1);
    rig.ring(1, 0, qp | SEND);
    rig.device.run_deferred();
    assert!(rig.books.take().is_empty());
}

#[test]
fn doorbells_of_one_queue_collapse_until_they_are_passed_on() {
    let rig = Rig::up();
    let pd = rig.create_pd(0);
    let cq = rig.create_cq(0);
    let (qp, _) = rig.create_qp(pd, cq);
    let (second, _) = rig.create_qp(pd, cq);
    rig.books.take();
    for _ in 0..1000 {
        rig.ring(0, 0, qp | SEND);
        rig.ring(0, 0, second | SEND);
        rig.ring(0, 0, qp | RECV);
    }
    rig.device.run_deferred();
    assert_eq!(rig.books.take(), ["QP 2 recv", "QP 2 send", "QP 3 send"]);
    rig.device.run_deferred();
    assert!(rig.books.take().is_empty());
    rig.ring(0, 0, qp | SEND);
    rig.run(Opcode::DESTROY_QP, &DestroyQp { qp_handle: qp }).unwrap();
    rig.device.run_deferred();
    assert_eq!(rig.books.take(), ["destroy QP 2"], "its note went with it");
}
