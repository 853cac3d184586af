use proptest::prelude::*;
use pvrdma_guest_memory::Direction;

use super::*;
use crate::testing::{MEMORY_BASE, Memory};

proptest! {
    /// A position agrees with a counter that never wraps about index and generation.
    #[test]
    fn positions_are_a_counter(blocks in 1_u32..128, steps in 0_u32..20_000) {
        let entries = blocks * 32;
        let shape = RingShape::new("ring", 0, entries, 4096).unwrap();
        let at = (0..steps).fold(Position::START, |at, _| at.next(shape));
        prop_assert_eq!((at.index, at.generation), (steps % entries, (steps / entries).is_multiple_of(2)));
        let further = steps % entries;
        prop_assert_eq!(at.ahead(shape, further), (0..further).fold(at, |at, _| at.next(shape)));
    }

    /// Every shape is either refused, or all addresses of its descriptors do not wrap.
    #[test]
    fn shapes_do_not_wrap(base in prop_oneof![any::<u64>(), (0_u64..1 << 20).prop_map(|back| u64::MAX - back)],
        align in any::<bool>(), entries in prop_oneof![any::<u32>(), (0_u32..300).prop_map(|n| n * 32)]) {
        let base = if align { base & !511 } else { base };
        if let Ok(shape) = RingShape::new("ring", base, entries, 8192) {
            prop_assert!(shape.entries() <= 8192 && shape.entries() % 32 == 0 && shape.entries() > 0);
            prop_assert!(shape.address(shape.entries() - 1) >= base);
            prop_assert!(shape.address(shape.entries() - 1).checked_add(15).is_some());
        }
    }

    /// A reader that checks the generation bit sees each completion once, in order, whatever the ring held before.
    #[test]
    fn completions_are_seen_once(values in prop::collection::vec(any::<[u32; 4]>(), 1..200)) {
        let memory = Memory::new(4096);
        let shape = RingShape::new("ring", MEMORY_BASE, 32, 4096).unwrap();
        let mut ring = CompletionRing::new(shape);
        let (mut index, mut generation) = (0, 1);
        for value in &values {
            let at = MEMORY_BASE + index * 16;
            prop_assert_ne!(memory.load(at + 12) >> 31, generation, "seen too early");
            ring.push(&memory.space().view(), *value).unwrap();
            prop_assert_eq!(memory.load(at + 12), value[3] & !(1 << 31) | generation << 31);
            prop_assert_eq!([memory.load(at), memory.load(at + 4), memory.load(at + 8)], [value[0], value[1], value[2]]);
            index += 1;
            if index == 32 {
                (index, generation) = (0, 1 - generation);
            }
        }
    }
}

#[test]
fn rings_must_be_reachable() {
    let memory = Memory::new(4096);
    let check = |base, entries| {
        RingShape::new("ring", base, entries, 4096).unwrap().check(&memory.space().view(), Direction::Write).is_ok()
    };
    assert!(check(MEMORY_BASE, 256));
    assert!(!check(MEMORY_BASE, 288) && !check(MEMORY_BASE - 512, 32) && !check(MEMORY_BASE + 4096, 32));
}
