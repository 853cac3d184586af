//! Receive queues (conformance 38, 40, 45, ring level).

use proptest::prelude::*;
use pvrdma_verbs_types::Sge;

use super::*;
use crate::testing::ring_memory::RingMemory;

const ENTRIES: u32 = 4;

fn ring(max_sge: u32) -> (RingMemory, RecvRing) {
    let page_count = (ENTRIES * recv_stride(max_sge).unwrap()).div_ceil(4096);
    let guest = RingMemory::new(1 + page_count as usize);
    let ring = RecvRing::new(guest.list(), 1, page_count, ENTRIES, max_sge).unwrap();
    (guest, ring)
}

fn wqe(wr_id: u64, count: u32, sges: &[Sge]) -> Vec<u8> {
    let mut wqe = wr_id.to_le_bytes().to_vec();
    wqe.extend(count.to_le_bytes());
    wqe.extend([0xee; 4]);
    for sge in sges {
        wqe.extend(sge.addr.to_le_bytes());
        wqe.extend(sge.length.to_le_bytes());
        wqe.extend(sge.lkey.to_le_bytes());
    }
    wqe
}

/// The slot is returned with the copy, lists of every length are complete, and lists that are too long are marked.
#[test]
fn receives() {
    for max_sge in [0, 1, 2, 3, 16, 128, 255] {
        let stride = recv_stride(max_sge).unwrap();
        let (guest, mut ring) = ring(max_sge);
        let view = guest.memory.space().view();
        let mut work = RecvWr::default();
        assert!(!ring.pop(&view, &mut work).unwrap());
        for i in 0..4 * ENTRIES {
            let count = (i * 37) % (max_sge + 2);
            let sges: Vec<Sge> =
                (0..count.min(max_sge)).map(|s| Sge { addr: u64::from(s), length: i, lkey: s ^ 0xff }).collect();
            guest.memory.write(guest.slot(i, ENTRIES, stride), &wqe(u64::from(i) << 40, count, &sges));
            guest.memory.store(guest.state() + 8, (i + 1) % (2 * ENTRIES));
            assert_eq!(ring.posted(&view), Ok(1));
            assert!(ring.pop(&view, &mut work).unwrap());
            assert_eq!(guest.memory.load(guest.state() + 12), (i + 1) % (2 * ENTRIES));
            assert_eq!((work.wr_id, work.malformed), (u64::from(i) << 40, count > max_sge));
            assert_eq!(work.sges, if work.malformed { Vec::new() } else { sges });
        }
        assert_eq!(guest.memory.read_vec(guest.state(), 8), [0; 8]);
    }
}

/// Conformance 40: an invalid index is an error, and the queue stays broken.
#[test]
fn invalid_index() {
    let (guest, mut ring) = ring(1);
    let view = guest.memory.space().view();
    guest.memory.store(guest.state() + 8, ENTRIES + 1);
    let mut work = RecvWr::default();
    assert!(ring.posted(&view).is_err());
    guest.memory.store(guest.state() + 8, 1);
    assert!(ring.pop(&view, &mut work).is_err());
    ring.reset();
    assert_eq!(ring.pop(&view, &mut work), Ok(true));
}

proptest! {
    /// Random bytes decode to a request of bounded size.
    #[test]
    fn random_elements(bytes in proptest::collection::vec(any::<u8>(), 64), count in prop_oneof![0u32..5, any::<u32>()]) {
        let (guest, mut ring) = ring(3);
        let mut wqe = bytes;
        wqe[8..12].copy_from_slice(&count.to_le_bytes());
        guest.memory.write(guest.slot(0, ENTRIES, 64), &wqe);
        guest.memory.store(guest.state() + 8, 1);
        let view = guest.memory.space().view();
        let mut work = RecvWr::default();
        prop_assert_eq!(ring.pop(&view, &mut work), Ok(true));
        prop_assert_eq!(work.malformed, count > 3);
        prop_assert!(work.sges.len() <= 3);
    }
}
