//! Receive queues (conformance 38, 40, 45, ring level).

use proptest::prelude::*;
use pvrdma_verbs::Sge;

use super::*;
use crate::testing::bed::RingBed;

const ENTRIES: u32 = 4;

fn ring(max_sge: u32) -> (RingBed, RecvRing) {
    let page_count = (ENTRIES * recv_stride(max_sge).unwrap()).div_ceil(4096);
    let bed = RingBed::new(1 + page_count as usize);
    let ring = RecvRing::new(bed.list(), 1, page_count, ENTRIES, max_sge).unwrap();
    (bed, ring)
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

/// The slot goes back with the copy, lists of every length are complete, too long ones are marked.
#[test]
fn receives() {
    for max_sge in [0, 1, 2, 3, 16, 128, 255] {
        let stride = recv_stride(max_sge).unwrap();
        let (bed, mut ring) = ring(max_sge);
        let view = bed.memory.space().view();
        let mut work = RecvWr::default();
        assert!(!ring.pop(&view, &mut work).unwrap());
        for i in 0..4 * ENTRIES {
            let count = (i * 37) % (max_sge + 2);
            let sges: Vec<Sge> =
                (0..count.min(max_sge)).map(|s| Sge { addr: u64::from(s), length: i, lkey: s ^ 0xff }).collect();
            bed.memory.write(bed.slot(i, ENTRIES, stride), &wqe(u64::from(i) << 40, count, &sges));
            bed.memory.store(bed.state() + 8, (i + 1) % (2 * ENTRIES));
            assert_eq!(ring.posted(&view), Ok(1));
            assert!(ring.pop(&view, &mut work).unwrap());
            assert_eq!(bed.memory.load(bed.state() + 12), (i + 1) % (2 * ENTRIES));
            assert_eq!((work.wr_id, work.malformed), (u64::from(i) << 40, count > max_sge));
            assert_eq!(work.sges, if work.malformed { Vec::new() } else { sges });
        }
        assert_eq!(bed.memory.read_vec(bed.state(), 8), [0; 8]);
    }
}

/// Conformance 40: an invalid index is an error and the queue stays broken.
#[test]
fn invalid_index() {
    let (bed, mut ring) = ring(1);
    let view = bed.memory.space().view();
    bed.memory.store(bed.state() + 8, ENTRIES + 1);
    let mut work = RecvWr::default();
    assert!(ring.posted(&view).is_err());
    bed.memory.store(bed.state() + 8, 1);
    assert!(ring.pop(&view, &mut work).is_err());
    ring.reset();
    assert_eq!(ring.pop(&view, &mut work), Ok(true));
}

proptest! {
    /// Random bytes decode to something bounded.
    #[test]
    fn random_elements(bytes in proptest::collection::vec(any::<u8>(), 64), count in prop_oneof![0u32..5, any::<u32>()]) {
        let (bed, mut ring) = ring(3);
        let mut wqe = bytes;
        wqe[8..12].copy_from_slice(&count.to_le_bytes());
        bed.memory.write(bed.slot(0, ENTRIES, 64), &wqe);
        bed.memory.store(bed.state() + 8, 1);
        let view = bed.memory.space().view();
        let mut work = RecvWr::default();
        prop_assert_eq!(ring.pop(&view, &mut work), Ok(true));
        prop_assert_eq!(work.malformed, count > 3);
        prop_assert!(work.sges.len() <= 3);
    }
}
