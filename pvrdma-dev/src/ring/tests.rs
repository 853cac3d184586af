//! Ring indices (conformance 38, 39, 40, 45).

use proptest::prelude::*;
use pvrdma_pages::PageListBuilder;
use vm_memory::Bytes;

use super::*;
use crate::testing::ring_memory::RingMemory;

fn shape(guest: &RingMemory, entries: u32, stride: u32, words: StateWords) -> RingShape {
    let pages = guest.list();
    RingShape { first_page: 1, page_count: pages.pages() - 1, pages, entries, stride, words }
}

/// Conformance 38: indices run to twice the size, then restart at 0, for n = 1, 2 and more; elements are at the right
/// places of scattered pages; only the device's own index is written.
#[test]
fn consumer_wraps() {
    for (entries, stride) in [(1_u32, 128_u32), (2, 64), (64, 256), (8, 4096)] {
        let guest = RingMemory::new(1 + usize::try_from(entries * stride).unwrap().div_ceil(4096));
        let state = guest.pages[0];
        guest.memory.write(state, &[0xaa; 64]);
        guest.memory.store(state, 0);
        let view = guest.memory.space().view();
        let mut ring = ConsumerRing::new(shape(&guest, entries, stride, StateWords::Tx)).unwrap();
        assert!(ring.peek(&view).unwrap().is_none());
        let mut tail = 0;
        for i in 0..5 * entries {
            guest.memory.write(guest.slot(i, entries, stride), &i.to_le_bytes());
            tail = (tail + 1) % (2 * entries);
            guest.memory.store(state, tail);
            let element = ring.peek(&view).unwrap().unwrap();
            assert_eq!(element.load::<u32>(0, Ordering::Relaxed).unwrap(), i);
            ring.take();
            assert!(ring.peek(&view).unwrap().is_none());
            ring.retire(&view);
            assert_eq!(guest.memory.load(state + 4), tail);
            ring.retire(&view);
            assert_eq!(guest.memory.load(state + 4), tail, "nothing is left to retire");
        }
        assert_eq!(guest.memory.read_vec(state + 8, 56), [0xaa; 56]);
        ring.reset();
        guest.memory.store(state, 0);
        assert!(ring.peek(&view).unwrap().is_none());
    }
}

/// Every index that a guest can store, in every state of rings of up to 8 elements (conformance 45): it is accepted
/// exactly if a number of steps leads to it from the current index, none of which undoes one or exceeds the ring.
#[test]
fn every_index_of_small_rings() {
    for entries in [1_u32, 2, 4, 8] {
        let guest = RingMemory::new(2);
        let ring = Ring::new(shape(&guest, entries, 64, StateWords::Rx)).unwrap();
        let turn = 2 * entries;
        for at in 0..turn {
            assert_eq!(ring.next(at), (at + 1) % turn);
            for index in (0..2 * turn + 2).chain([u32::MAX, u32::MAX - 1, 1 << 31, u32::MAX - turn]) {
                for taken in 0..=entries {
                    let valid = (taken..=entries).any(|steps| (at + steps) % turn == index);
                    assert_eq!(ring.check_producer_index(index, at, taken).is_ok(), valid, "{at} {taken}: {index}");
                }
                let valid = (0..=entries).any(|steps| (index.wrapping_add(steps)) % turn == at && index < turn);
                assert_eq!(ring.check_consumer_index(index, at).is_ok(), valid, "{at}: {index}");
            }
        }
    }
}

/// Conformance 38, 41: the producer's side, with a consumer that sometimes empties the ring.
#[test]
fn producer_wraps_and_fills() {
    for entries in [1_u32, 2, 64] {
        let guest = RingMemory::new(2);
        let state = guest.pages[0];
        guest.memory.write(state, &[0xaa; 64]);
        guest.memory.store(state + 12, 0);
        let view = guest.memory.space().view();
        let mut ring = ProducerRing::new(shape(&guest, entries, 64, StateWords::Rx)).unwrap();
        let mut index = 0;
        for round in 0..7 {
            for i in 0..entries {
                assert!(ring.push(&view, &[round; 64]).unwrap());
                assert_eq!(guest.memory.read_vec(guest.slot(index + i, entries, 64), 64), [round; 64]);
            }
            assert!(!ring.push(&view, &[0xff; 64]).unwrap(), "full");
            assert_eq!(guest.memory.read_vec(guest.slot(index, entries, 64), 64), [round; 64], "not overwritten");
            assert!(!ring.is_empty(&view).unwrap());
            index = (index + entries) % (2 * entries);
            assert_eq!(guest.memory.load(state + 8), index);
            guest.memory.store(state + 12, index);
            assert!(ring.is_empty(&view).unwrap());
        }
        assert_eq!(guest.memory.read_vec(state, 8), [0xaa; 8]);
        assert_eq!(guest.memory.read_vec(state + 16, 48), [0xaa; 48]);
    }
}

/// Conformance 39: strides of spec §6.3.
#[test]
fn strides() {
    for (sge, bytes) in [
        (1, 128),
        (3, 128),
        (4, 256),
        (7, 256),
        (8, 256),
        (11, 256),
        (12, 512),
        (15, 512),
        (16, 512),
        (27, 512),
        (28, 1024),
        (32, 1024),
        (64, 2048),
        (128, 4096),
    ] {
        assert_eq!(send_stride(sge), Some(bytes), "{sge} send SGEs");
    }
    for (sge, bytes) in [
        (1, 32),
        (2, 64),
        (3, 64),
        (4, 128),
        (7, 128),
        (8, 256),
        (15, 256),
        (16, 512),
        (31, 512),
        (32, 1024),
        (64, 2048),
    ] {
        assert_eq!(recv_stride(sge), Some(bytes), "{sge} receive SGEs");
    }
    assert_eq!(send_stride(251), Some(4096));
    assert_eq!(recv_stride(255), Some(4096));
    for too_many in [256, 1 << 27, u32::MAX] {
        assert_eq!(send_stride(too_many), None);
        assert_eq!(recv_stride(too_many), None);
    }
    assert_eq!(send_stride(252), None);
}

#[test]
fn bad_shapes() {
    let guest = RingMemory::new(3);
    let make = |first_page, page_count, entries, stride| {
        let shape = RingShape { pages: guest.list(), first_page, page_count, entries, stride, words: StateWords::Rx };
        ConsumerRing::new(shape).map(|_| ())
    };
    assert_eq!(make(1, 2, 128, 64), Ok(()));
    assert_eq!(make(1, 2, 256, 64), Err(RingShapeError::TooFewPages { needed: 16384, pages: 2 }));
    assert_eq!(make(1, 2, 0, 64), Err(RingShapeError::Entries(0)));
    assert_eq!(make(1, 2, 96, 64), Err(RingShapeError::Entries(96)));
    assert_eq!(make(1, 2, 1 << 31, 64), Err(RingShapeError::Entries(1 << 31)));
    assert!(make(1, 2, 1 << 30, 4096).is_err());
    assert!(make(0, 2, 64, 64).is_err());
    assert!(make(1, 3, 64, 64).is_err());
    assert!(make(u32::MAX, 1, 64, 64).is_err());
    assert!(make(1, u32::MAX, 64, 64).is_err());
}

/// Conformance 40: a producer index that is invalid for the ring, too far ahead, or behind elements taken already. The
/// ring then stays broken until it is reset, whatever the guest writes.
#[test]
fn invalid_producer_index() {
    let (out, ahead, behind) = (
        |index| IndexError::OutOfRange { index, capacity: 8 },
        |index| IndexError::TooFarAhead { index, capacity: 8 },
        |index| IndexError::BehindTaken { index, capacity: 8 },
    );
    for (taken, bad, error) in [
        (0_u32, 16_u32, out(16)),
        (0, u32::MAX, out(u32::MAX)),
        (0, 9, ahead(9)),
        (0, 15, ahead(15)),
        (4, 3, behind(3)),
        (4, 0, behind(0)),
        (4, 13, ahead(13)),
        (4, 0x8000_0004, out(0x8000_0004)),
    ] {
        let guest = RingMemory::new(2);
        let state = guest.pages[0];
        let view = guest.memory.space().view();
        let mut ring = ConsumerRing::new(shape(&guest, 8, 128, StateWords::Tx)).unwrap();
        guest.memory.store(state, taken);
        for _ in 0..taken {
            assert!(ring.peek(&view).unwrap().is_some());
            ring.take();
        }
        // Taken elements are returned only below, so the index counts from 0.
        guest.memory.store(state, bad);
        let error = QueueError::BadIndex(error);
        assert_eq!(ring.peek(&view).map(|element| element.is_some()), Err(error), "{taken} {bad}");
        guest.memory.store(state, taken);
        assert_eq!(ring.peek(&view).map(|element| element.is_some()), Err(error));
        assert_eq!(ring.posted(&view), Err(error));
        for n in 1..=taken {
            ring.retire(&view);
            assert_eq!(guest.memory.load(state + 4), n, "a taken element can still be retired");
        }
        ring.reset();
        guest.memory.store(state, 1);
        assert!(ring.peek(&view).unwrap().is_some());
    }
}

/// Conformance 41: a consumer index that is invalid for the ring, or ahead of the producer.
#[test]
fn invalid_consumer_index() {
    let guest = RingMemory::new(2);
    let view = guest.memory.space().view();
    let mut ring = ProducerRing::new(shape(&guest, 8, 64, StateWords::Rx)).unwrap();
    assert_eq!(ring.push(&view, &[1_u8; 64]), Ok(true));
    for (bad, error) in [
        (16, IndexError::OutOfRange { index: 16, capacity: 8 }),
        (u32::MAX, IndexError::OutOfRange { index: u32::MAX, capacity: 8 }),
        (2, IndexError::TooFarAhead { index: 2, capacity: 8 }),
        (8, IndexError::TooFarAhead { index: 8, capacity: 8 }),
    ] {
        guest.memory.store(guest.state() + 12, bad);
        assert_eq!(ring.is_empty(&view), Err(QueueError::BadIndex(error)), "{bad}");
    }
    guest.memory.store(guest.state() + 12, 9);
    assert_eq!(ring.is_empty(&view), Ok(false), "one element of a whole round is left");
}

/// All values of the two words of a small ring, for an observer: it returns a number of elements exactly if some number
/// of steps, at most a ring, leads from the consumer to the producer.
#[test]
fn every_look_at_a_small_ring() {
    for (words, offset) in [(StateWords::Tx, 0), (StateWords::Rx, 8)] {
        for entries in [1_u32, 2, 4] {
            let guest = RingMemory::new(2);
            let ring = Ring::new(shape(&guest, entries, 64, words)).unwrap();
            let state = guest.state();
            for looked_at in [ring.words(), RingWords::at(state, words, entries)] {
                assert_eq!(looked_at.state_page(), state);
                let turn = 2 * entries;
                for (head, tail) in (0..turn + 2).flat_map(|head| (0..turn + 2).map(move |tail| (head, tail))) {
                    guest.memory.store(state + offset, tail);
                    guest.memory.store(state + offset + 4, head);
                    assert_eq!(looked_at.producer_index(&guest.memory.space().view()), Ok(tail));
                    let valid = head < turn && tail < turn;
                    let used = (0..=entries).find(|steps| valid && (head + steps) % turn == tail);
                    let inspect = RingInspect { size: entries, head: Some(head), tail: Some(tail), used };
                    assert_eq!(looked_at.inspect(guest.memory.space()), inspect);
                }
            }
        }
    }
}

/// The device's own check of how much the guest has consumed, for every index.
#[test]
fn every_consumer_index_of_a_small_ring() {
    let (entries, turn) = (4_u32, 8);
    let guest = RingMemory::new(2);
    let (view, state) = (guest.memory.space().view(), guest.state());
    let mut ring = ProducerRing::new(shape(&guest, entries, 64, StateWords::Rx)).unwrap();
    for produced in 1..=2 * turn {
        guest.memory.store(state + 12, (produced - 1) % turn);
        assert_eq!(ring.push(&view, &[1_u64; 8]), Ok(true));
        for head in 0..turn + 2 {
            guest.memory.store(state + 12, head);
            let left = (0..=entries).find(|left| head < turn && (head + left) % turn == produced % turn);
            assert_eq!(ring.unconsumed(&view).ok(), left.map(|left| (head, left)), "{produced} {head}");
            assert_eq!(ring.is_empty(&view).ok(), left.map(|left| left == 0), "{produced} {head}");
        }
    }
}

/// An element that could not be published is not written: the next element takes its slot.
#[test]
fn an_element_that_cannot_be_published_is_taken_back() {
    let guest = RingMemory::new(2);
    let mut pages = PageListBuilder::default();
    // The state page is not mapped.
    for page in [0xffff_f000, guest.pages[1]] {
        pages.push(page).unwrap();
    }
    let pages = pages.finish();
    let shape = RingShape { pages, first_page: 1, page_count: 1, entries: 4, stride: 64, words: StateWords::Rx };
    let mut ring = ProducerRing::new(shape).unwrap();
    for tail in 0..4 {
        (ring.tail, ring.head) = (tail, tail);
        assert!(ring.push(&guest.memory.space().view(), &[1_u64; 8]).is_err());
        assert_eq!(ring.tail, tail);
    }
    (ring.tail, ring.head) = (7, 7);
    assert!(ring.push(&guest.memory.space().view(), &[1_u64; 8]).is_err());
    assert_eq!(ring.tail, 7, "before the wrap");
}

/// A watcher of a ring is informed of each load of the index, and of nothing else.
#[test]
fn a_watched_ring_counts_its_looks() {
    let guest = RingMemory::new(2);
    let (view, state) = (guest.memory.space().view(), guest.state());
    let mut ring = ConsumerRing::new(shape(&guest, 4, 64, StateWords::Rx)).unwrap();
    guest.memory.store(state + 8, 1);
    assert_eq!(ring.posted(&view), Ok(1), "before the ring is watched");
    let progress = ring.watch();
    assert_eq!(progress.seen(), Seen { tail: 0, looks: 0 });
    guest.memory.store(state + 8, 3);
    assert_eq!(ring.posted(&view), Ok(3));
    assert_eq!(progress.seen(), Seen { tail: 3, looks: 1 });
    assert!(ring.peek(&view).unwrap().is_some());
    ring.take();
    assert_eq!(progress.seen(), Seen { tail: 3, looks: 1 }, "taking a known element counts as no look");
    assert_eq!(ring.posted(&view), Ok(2));
    assert_eq!(ring.watch().seen(), Seen { tail: 3, looks: 2 }, "a second watch shares the progress");
    guest.memory.store(state + 8, 99);
    assert!(ring.posted(&view).is_err());
    assert_eq!(progress.seen(), Seen { tail: 3, looks: 2 });
    ring.reset();
    assert_eq!(progress.seen(), Seen { tail: 0, looks: 3 });
    let last = u64::from(u32::MAX) << 32 | 7;
    assert_eq!(Seen::from(last), Seen { tail: 7, looks: u32::MAX });
}

proptest! {
    /// Conformance 40, 45: whatever the guest stores, at most n elements are taken per load of the index, every
    /// published index is valid, and an invalid index leads to a permanent `broken` state.
    #[test]
    fn consumer_with_a_hostile_guest(
        log in 0u32..5,
        steps in proptest::collection::vec((0u8..5, prop_oneof![0u32..64, any::<u32>()]), 1..200),
    ) {
        let entries = 1 << log;
        let guest = RingMemory::new(2);
        let state = guest.pages[0];
        let view = guest.memory.space().view();
        let mut ring = ConsumerRing::new(shape(&guest, entries, 64, StateWords::Rx)).unwrap();
        for (step, value) in steps {
            match step {
                0 => guest.memory.store(state + 8, value),
                1 => guest.memory.store(state + 8, value % (2 * entries)),
                2 => guest.memory.store(state + 12, value),
                3 => {
                    let mut count = 0;
                    while let Ok(Some(_)) = ring.peek(&view) {
                        ring.take();
                        count += 1;
                        prop_assert!(count <= entries);
                    }
                    if let Ok(posted) = ring.posted(&view) {
                        prop_assert!(posted <= entries);
                    }
                }
                _ => {
                    let before = guest.memory.load(state + 12);
                    ring.retire(&view);
                    let after = guest.memory.load(state + 12);
                    prop_assert!(after == before || after < 2 * entries);
                }
            }
        }
    }

    /// As above, for the producer.
    #[test]
    fn producer_with_a_hostile_guest(
        log in 0u32..5,
        steps in proptest::collection::vec((0u8..4, prop_oneof![0u32..64, any::<u32>()]), 1..200),
    ) {
        let entries = 1 << log;
        let guest = RingMemory::new(2);
        let state = guest.pages[0];
        let view = guest.memory.space().view();
        let mut ring = ProducerRing::new(shape(&guest, entries, 64, StateWords::Rx)).unwrap();
        let mut published = 0;
        for (step, value) in steps {
            match step {
                0 => guest.memory.store(state + 12, value),
                1 => guest.memory.store(state + 12, value % (2 * entries)),
                2 => guest.memory.store(state + 8, value),
                _ => {
                    if ring.push(&view, &[1; 64]) == Ok(true) {
                        published = (published + 1) % (2 * entries);
                        prop_assert_eq!(guest.memory.load(state + 8), published);
                    }
                }
            }
        }
    }
}
