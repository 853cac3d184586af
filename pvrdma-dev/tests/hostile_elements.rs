//! Elements of random bytes and random indices, on queues of every kind, over the software adapter.
#![expect(clippy::unwrap_used, reason = "a panic fails the test")]

mod common;

use common::{Process, connect, gid, rxe_pair};
use proptest::prelude::*;
use pvrdma_dev::testing::{AddressHandle, Driver, Qp, RecvWr, SendWr, access, state, status, wait_for};

/// An action of a guest on one QP.
#[derive(Clone, Debug)]
enum Step {
    /// Writes an element of these bytes, with some fields made plausible, and publishes it.
    Send { bytes: Vec<u8>, opcode: u32, sges: u32, good_keys: bool },
    /// The same for a receive.
    Receive { bytes: Vec<u8>, sges: u32 },
    /// Overwrites an index.
    Index { word: u64, value: u32 },
    /// Rings both doorbells.
    Ring,
}

fn number() -> impl Strategy<Value = u32> {
    prop_oneof![4 => 0u32..17, 1 => any::<u32>()]
}

fn step() -> impl Strategy<Value = Step> {
    let bytes = || proptest::collection::vec(any::<u8>(), 144);
    prop_oneof![
        6 => (bytes(), number(), number(), any::<bool>())
            .prop_map(|(bytes, opcode, sges, good_keys)| Step::Send { bytes, opcode, sges: sges % 7, good_keys }),
        2 => (bytes(), number()).prop_map(|(bytes, sges)| Step::Receive { bytes, sges }),
        1 => (0u64..4, number()).prop_map(|(word, value)| Step::Index { word: word * 4, value }),
        3 => Just(Step::Ring),
    ]
}

fn run(driver: &Driver, qp: &mut Qp, process: &Process, keys: (u64, u32), steps: &[Step]) {
    let memory = driver.memory();
    for step in steps {
        match step {
            Step::Send { bytes, opcode, sges, good_keys } => {
                let mut bytes = bytes.clone();
                bytes[8..12].copy_from_slice(&sges.to_le_bytes());
                bytes[16..20].copy_from_slice(&opcode.to_le_bytes());
                if *good_keys {
                    for at in (80..144).step_by(16) {
                        bytes[at..at + 8].copy_from_slice(&keys.0.to_le_bytes());
                        bytes[at + 9..at + 12].fill(0);
                        bytes[at + 12..at + 16].copy_from_slice(&keys.1.to_le_bytes());
                    }
                    bytes[40..44].copy_from_slice(&(process.pd.handle | 1 << 24).to_le_bytes());
                }
                let ring = qp.send_ring();
                let tail = ring.prod_tail();
                memory.write(ring.slot(tail % ring.entries()), &bytes);
                ring.set_prod_tail(ring.next(tail));
            }
            Step::Receive { bytes, sges } => {
                let ring = qp.recv_ring();
                let tail = ring.prod_tail();
                let mut bytes = bytes[..64].to_vec();
                bytes[8..12].copy_from_slice(&sges.to_le_bytes());
                memory.write(ring.slot(tail % ring.entries()), &bytes);
                ring.set_prod_tail(ring.next(tail));
            }
            Step::Index { word, value } => memory.store(qp.pages()[0] + word, *value),
            Step::Ring => {
                qp.ring_send();
                qp.ring_recv();
            }
        }
    }
    qp.ring_send();
    qp.ring_recv();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// Conformance 40, 54, 55: whatever is posted, the device continues: drivers understand every completion, other QPs
    /// work, the QP reaches ERR, and everything can be destroyed.
    #[test]
    fn any_bytes(steps in proptest::collection::vec(step(), 1..60), user: bool, datagrams: bool) {
        let [(_test_a, driver_a), (_test_b, driver_b)] = rxe_pair();
        let (mut a, b) = (Process::new(&driver_a, user, 1024), Process::new(&driver_b, user, 1024));
        let (buffer, mr) = driver_a.registered_buffer(&a.pd, 8192, access::ALL).unwrap();
        let (mut good, mut good_peer) = (a.rc(), b.rc());
        connect(&mut good, 1, &mut good_peer, 2);
        let (mut qp, mut peer) = if datagrams { (a.ud(), b.ud()) } else { (a.rc(), b.rc()) };
        if datagrams {
            qp.start_datagrams(1).unwrap();
            peer.start_datagrams(1).unwrap();
        } else {
            connect(&mut qp, 1, &mut peer, 2);
        }
        peer.post_recv(&vec![RecvWr::new(1, &[]); 8]).unwrap();
        run(&driver_a, &mut qp, &a, (buffer.va(), mr.lkey), &steps);
        if datagrams {
            let to = AddressHandle::new(b.pd.handle, gid(1));
            peer.post_send(&[SendWr::datagram(1, &[], &to, qp.qpn, 1)]).unwrap();
        } else {
            peer.post_send(&[SendWr::send(1, &[])]).unwrap();
        }
        good.post_send(&[SendWr::write(0xfeed, &[], 0, 0)]).unwrap();
        let completion = wait_for("the good QP", || a.cq.poll().filter(|cqe| cqe.qp == u64::from(good.handle)));
        prop_assert_eq!((completion.wr_id, completion.status), (0xfeed, status::SUCCESS));
        qp.to_error().unwrap();
        prop_assert_eq!(qp.query().unwrap().get_state(), state::ERR);
        let (handle, memory) = (qp.handle, driver_a.memory().clone());
        qp.destroy().unwrap();
        a.cq.remove_qp(handle);
        prop_assert!(a.cq.poll().is_none());
        driver_a.async_events();
        drop(memory);
        driver_a.remove();
        driver_b.remove();
    }
}
