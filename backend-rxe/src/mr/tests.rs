use std::sync::Arc;

use pvrdma_base::{Random, Snapshot};
use pvrdma_guest_memory::PinGuard;
use pvrdma_pages::{PageList, PageListBuilder};
use pvrdma_verbs::MrShape;
use pvrdma_verbs_types::{Access, FastRegister};

use super::table::Body;
use super::*;
use crate::limits::MAX_MR;

fn pages(list: &[u64]) -> PageList {
    let mut builder = PageListBuilder::default();
    for &page in list {
        builder.push(page).unwrap();
    }
    builder.finish()
}

fn user(pd: u64, start: u64, length: u64, access: Access) -> Mr {
    Mr::fixed(pd, Region::paged(start, length, access, pages(&[0x5000, 0x9000])).unwrap(), PinGuard::none())
}

#[test]
fn checks_of_a_key() {
    let table = MrTables::new(Random::Seed(0)).unwrap();
    let key = table.insert(user(3, 0x7_0100, 0x1800, Access::LOCAL_WRITE)).unwrap();
    let ok = |key, pd, addr, len, need| table.read().lookup(key, pd, addr, len, need).is_some();
    assert!(ok(key, 3, 0x7_0100, 0x1800, Access::LOCAL_WRITE));
    assert!(ok(key, 3, 0x7_18ff, 1, Access::empty()));
    assert!(!ok(key, 3, 0x7_0100, 0x1801, Access::empty()));
    assert!(!ok(key, 3, 0x7_00ff, 1, Access::empty()));
    assert!(!ok(key, 3, u64::MAX, 2, Access::empty()));
    assert!(!ok(key, 4, 0x7_0100, 1, Access::empty()));
    assert!(!ok(key, 3, 0x7_0100, 1, Access::REMOTE_WRITE));
    assert!(!ok(key ^ 1, 3, 0x7_0100, 1, Access::empty()));
    assert!(!ok(key + 256, 3, 0x7_0100, 1, Access::empty()));
    assert!(!ok(0, 3, 0x7_0100, 1, Access::empty()));
    let held = table.read();
    let region = held.lookup(key, 3, 0x7_0100, 1, Access::empty()).unwrap();
    assert_eq!(region.locate(0x7_0100), Some((0x5100, 0xf00)));
    assert_eq!(region.locate(0x7_1000), Some((0x9000, 0x1000)));
}

/// Checks every key around those of a small table, with every right and ranges at all boundaries: lookups succeed
/// exactly when a list of the regions allows it.
#[test]
fn every_key_of_a_small_table() {
    const START: u64 = 0x7_0100;
    const LENGTH: u64 = 0x1800;
    let rights = || (0..=Access::all().bits()).map(Access::from_bits_truncate);
    let table = MrTables::new(Random::Seed(7)).unwrap();
    let granted = [(1, Access::empty()), (1, Access::LOCAL_WRITE), (2, Access::all()), (3, Access::all())];
    let keys = granted.map(|(pd, access)| table.insert(user(pd, START, LENGTH, access)).unwrap());
    table.remove(keys[3]).unwrap();
    let regions = || keys.into_iter().zip(granted).take(3);
    let ranges = [START - 1, START, START + 1, START + LENGTH - 1, START + LENGTH, START + LENGTH + 1, u64::MAX];
    let lengths = [0, 1, 2, LENGTH - 1, LENGTH, LENGTH + 1, u64::MAX];
    let inside = |addr: u64, len: u64| addr >= START && u128::from(addr) + u128::from(len) <= (START + LENGTH).into();
    for key in keys[0] - (2 << 8)..keys[0] + (7 << 8) {
        for (pd, need) in (0..4).flat_map(|pd| rights().map(move |need| (pd, need))) {
            let allowed = regions().any(|(own, (owner, access))| key == own && pd == owner && access.contains(need));
            assert_eq!(
                table.read().lookup(key, pd, START, 1, need).is_some(),
                allowed,
                "{key:#x} of {pd} for {need:?}"
            );
            if allowed {
                for (addr, len) in ranges.into_iter().flat_map(|addr| lengths.map(|len| (addr, len))) {
                    let lent = table.read().lookup(key, pd, addr, len, need).is_some();
                    assert_eq!(lent, inside(addr, len), "{addr:#x}+{len:#x}");
                }
            }
        }
    }
}

/// Regression: the first key of each device was 0x101.
#[test]
fn keys_begin_at_a_random_number() {
    let keys = |random| {
        let table = MrTables::new(random).unwrap();
        let keys = [(); 3].map(|()| table.insert(user(0, 0x1000, 16, Access::empty())).unwrap());
        assert!(keys.iter().all(|key| table.read().lookup(*key, 0, 0x1000, 1, Access::empty()).is_some()));
        assert!(table.read().lookup(0, 0, 0x1000, 1, Access::empty()).is_none());
        assert!(table.read().lookup(!0, 0, 0x1000, 1, Access::empty()).is_none());
        keys
    };
    let seeds = (1..100).map(|seed| keys(Random::Seed(seed)));
    let distinct: std::collections::HashSet<_> = seeds.collect();
    assert_eq!(distinct.len(), 99);
    assert!(distinct.iter().any(|keys| keys[0] & 0xff != keys[1] & 0xff), "key bytes are drawn for each key");
    let [a, b] = [keys(Random::System), keys(Random::System)];
    assert_ne!(a, b);
}

#[test]
fn stale_keys_stay_stale() {
    let table = MrTables::new(Random::Seed(0)).unwrap();
    let mut seen = std::collections::HashSet::new();
    for _ in 0..2000 {
        let key = table.insert(user(0, 0x1000, 16, Access::empty())).unwrap();
        assert!(seen.insert(key), "{key:#x} was used before");
        table.remove(key).unwrap();
        assert!(table.read().lookup(key, 0, 0x1000, 1, Access::empty()).is_none());
    }
    // 256 slots stay free, and one is in use at a time.
    assert_eq!(table.slots(), 257);
}

/// Regions that were removed no longer count against the limit of the device.
#[test]
fn removed_regions_do_not_count_against_the_limit() {
    let table = MrTables::new(Random::Seed(0)).unwrap();
    for _ in 0..=MAX_MR {
        let key = table.insert(user(0, 0x1000, 16, Access::empty())).unwrap();
        assert!(table.remove(key).is_some());
    }
}

#[test]
fn all_bus_addresses_are_for_local_use() {
    let table = MrTables::new(Random::Seed(0)).unwrap();
    let insert = |access| table.insert(Mr::fixed(1, Region::dma(access), PinGuard::none())).unwrap();
    let (all, none) = (insert(Access::all()), insert(Access::empty()));
    let held = table.read();
    for need in (0..=Access::all().bits()).map(Access::from_bits_truncate) {
        let local = need == Access::empty() || need == Access::LOCAL_WRITE;
        assert_eq!(held.lookup(all, 1, 5, u64::MAX - 5, need).is_some(), local, "{need:?}");
        assert_eq!(held.lookup(none, 1, 5, 1, need).is_some(), need == Access::empty(), "{need:?}");
    }
    let region = held.lookup(all, 1, 5, 1, Access::LOCAL_WRITE).unwrap();
    assert_eq!(region.locate(5), Some((5, u64::MAX - 5)));
    assert_eq!(held.shape(all), Some(MrShape::Dma { access: Access::LOCAL_WRITE }));
    assert_eq!(held.shape(all + (1 << 16)), None);
}

#[test]
fn an_inspection_does_not_wait_for_a_change() {
    let table = MrTables::new(Random::Seed(0)).unwrap();
    assert!(table.try_read().is_some());
    let _change = table.block();
    assert!(table.try_read().is_none());
}

/// Keys have 32 bits, so that they are reused. The number of the domain is not, and lookups check both.
#[test]
fn a_key_that_came_back_is_not_the_right_of_its_first_owner() {
    let table = MrTables::new(Random::Seed(0)).unwrap();
    let (first, second) = (7, (1 << 32) + 7);
    let key = table.insert(user(first, 0x1000, 16, Access::LOCAL_WRITE)).unwrap();
    table.remove(key).unwrap();
    let again = loop {
        let again = table.insert(user(second, 0x1000, 16, Access::LOCAL_WRITE)).unwrap();
        if again == key {
            break again;
        }
        table.remove(again).unwrap();
    };
    assert!(table.read().lookup(again, second, 0x1000, 16, Access::LOCAL_WRITE).is_some());
    assert!(table.read().lookup(again, first, 0x1000, 16, Access::LOCAL_WRITE).is_none());
}

#[test]
fn regions_that_their_pages_do_not_cover_are_refused() {
    assert!(Region::paged(0x100, 0x1f00, Access::empty(), pages(&[0x1000, 0x2000])).is_some());
    assert!(Region::paged(0x100, 0x1f01, Access::empty(), pages(&[0x1000, 0x2000])).is_none());
    assert!(Region::paged(u64::MAX, 2, Access::empty(), pages(&[0x1000, 0x2000])).is_none());
}

fn resident(_: &PageList) -> Option<PinGuard> {
    Some(PinGuard::none())
}

#[test]
fn fast_registration() {
    let table = MrTables::new(Random::Seed(0)).unwrap();
    let key = table.insert(Mr::fast(1, 2)).unwrap();
    assert!(table.read().lookup(key, 1, 0, 0, Access::empty()).is_none());
    let request = FastRegister {
        key: key & !0xff | 0x77,
        iova: 0x4_0010,
        length: 0x1000,
        access: Access::REMOTE_READ,
        pages: Some(pages(&[0x3000, 0x8000])),
    };
    assert!(!table.read().fast_register(&mut request.clone(), 2, resident), "another PD");
    assert!(!table.read().fast_register(&mut FastRegister { pages: None, ..request.clone() }, 1, resident));
    assert!(!table.read().fast_register(&mut FastRegister { length: 0x2000, ..request.clone() }, 1, resident));
    let three = Some(pages(&[0x3000, 0x8000, 0x9000]));
    assert!(!table.read().fast_register(&mut FastRegister { pages: three, ..request.clone() }, 1, resident));
    assert!(!table.read().fast_register(&mut request.clone(), 1, |_| None), "its pages cannot be kept");
    assert!(table.read().fast_register(&mut request.clone(), 1, resident));
    assert!(!table.read().fast_register(&mut request.clone(), 1, resident), "it is valid already");
    assert!(table.read().lookup(key, 1, 0x4_0010, 1, Access::empty()).is_none(), "the old key byte");
    let held = table.read();
    let region = held.lookup(request.key, 1, 0x4_0010, 0x1000, Access::REMOTE_READ).unwrap();
    assert_eq!(region.locate(0x4_0fff), Some((0x3fff, 1)));
    drop(region);
    let shown = serde_json::to_value(table.read().inspect(key)).unwrap();
    assert_eq!(shown["range"]["start"], 0x4_0010, "{shown}");
    assert_eq!((&shown["range"]["pages"], &shown["max_pages"]), (&2.into(), &2.into()), "{shown}");
    let Body::Fast(fast) = &held.get(key).unwrap().body else { unreachable!() };
    let changing = fast.region.write();
    assert_eq!(table.read().inspect(key).unwrap().range, Snapshot::Busy);
    drop(changing);
    drop(held);
    assert!(!table.read().invalidate(key, 1));
    assert!(!table.read().invalidate(request.key, 2));
    assert!(table.read().invalidate(request.key, 1));
    assert!(!table.read().invalidate(request.key, 1));
    assert!(table.read().lookup(request.key, 1, 0x4_0010, 1, Access::empty()).is_none());
    assert!(table.remove(key).is_some());
}

/// Regression: a new copy waited behind a registration that waited for the copies in progress.
#[test]
fn a_change_waits_for_copies_and_delays_none() {
    let tables = MrTables::new(Random::Seed(0)).unwrap();
    let keys = [(); 2].map(|()| tables.insert(user(0, 0x1000, 16, Access::empty())).unwrap());
    let has = |key| tables.read().lookup(key, 0, 0x1000, 1, Access::empty()).is_some();
    for (gone, stays) in [(0, 1), (1, 0)] {
        let under_way = tables.read();
        std::thread::scope(|scope| {
            let removed = scope.spawn(|| tables.remove(keys[gone]));
            while has(keys[gone]) {
                std::thread::yield_now();
            }
            // The removal is in progress, and all other lookups continue.
            assert_eq!(has(keys[stays]), gone == 0);
            assert!(
                under_way.lookup(keys[gone], 0, 0x1000, 1, Access::empty()).is_some(),
                "a copy in progress continues"
            );
            assert!(!removed.is_finished());
            drop(under_way);
            assert_eq!(Arc::strong_count(&removed.join().unwrap().unwrap()), 1, "no other owner is left");
        });
    }
}

/// Saves the keys and regions of a table, and restores them in another one.
fn moved(table: &MrTables, keys: &[(u32, u64)]) -> MrTables {
    let other = MrTables::new(Random::Seed(99)).unwrap();
    other.restore(table.save()).unwrap();
    for &(key, pd) in keys {
        let (request, region) = table.read().save(key).unwrap();
        assert_eq!(other.insert_restored(Mr::restore(pd, request, region).unwrap()).unwrap(), key);
    }
    other
}

#[test]
fn restored_regions_have_their_keys_and_later_ones_are_as_before() {
    let table = MrTables::new(Random::Seed(7)).unwrap();
    let first = table.insert(user(3, 0x7_0100, 0x1800, Access::LOCAL_WRITE)).unwrap();
    let gone = table.insert(user(3, 0x7_0100, 0x1800, Access::empty())).unwrap();
    let dma = table.insert(Mr::fixed(4, Region::dma(Access::LOCAL_WRITE), PinGuard::none())).unwrap();
    let fast = table.insert(Mr::fast(3, 4)).unwrap();
    table.remove(gone).unwrap();
    let key = fast & !0xff | 0x5a;
    let mut request = FastRegister {
        key,
        iova: 0x8_0010,
        length: 0x1ff0,
        access: Access::REMOTE_READ,
        pages: Some(pages(&[0x1000, 0x7000])),
    };
    assert!(table.read().fast_register(&mut request, 3, |_| Some(PinGuard::none())));

    let other = moved(&table, &[(first, 3), (dma, 4), (key, 3)]);
    assert_eq!(other.save(), table.save());
    let lookup = |table: &MrTables, key, pd, addr, len, need| table.read().lookup(key, pd, addr, len, need).is_some();
    for table in [&table, &other] {
        assert!(lookup(table, first, 3, 0x7_0100, 0x1800, Access::LOCAL_WRITE));
        assert!(lookup(table, dma, 4, 0, 1 << 40, Access::LOCAL_WRITE));
        assert!(lookup(table, key, 3, 0x8_0010, 0x1ff0, Access::REMOTE_READ));
        assert!(!lookup(table, gone, 3, 0x7_0100, 1, Access::empty()), "a stale key");
        assert!(!lookup(table, fast, 3, 0x8_0010, 1, Access::empty()), "the key before the registration");
        let held = table.read();
        let region = held.lookup(key, 3, 0x8_1000, 1, Access::empty()).unwrap();
        assert_eq!(region.locate(0x8_1000), Some((0x7000, 0x1000)));
    }
    // The region can be invalidated, and slots are reused in the same order and with the same bytes.
    for table in [&table, &other] {
        assert!(table.read().invalidate(key, 3));
        assert!(!table.read().invalidate(key, 3));
        table.remove(fast).unwrap();
    }
    let next = |table: &MrTables| {
        let keys: Vec<_> = (0..300).map(|_| table.insert(Mr::fast(3, 1)).unwrap()).collect();
        keys.iter().for_each(|&key| drop(table.remove(key).unwrap()));
        (0..60).map(|_| table.insert(Mr::fast(3, 1)).unwrap()).collect::<Vec<_>>()
    };
    // Bytes of new slots are random.
    let indices = |keys: Vec<u32>| keys.into_iter().map(|key| key >> 8).collect::<Vec<_>>();
    assert_eq!(indices(next(&other)), indices(next(&table)));
}

#[test]
fn a_fast_registration_without_a_valid_key_stays_empty() {
    let table = MrTables::new(Random::Seed(7)).unwrap();
    let fast = table.insert(Mr::fast(3, 4)).unwrap();
    let (request, region) = table.read().save(fast).unwrap();
    assert_eq!((region.filled.is_none(), region.key), (true, fast));
    assert!(matches!(request, pvrdma_verbs::MrRequest::FastRegister { max_pages: 4 }));
    let other = moved(&table, &[(fast, 3)]);
    assert!(!other.read().invalidate(fast, 3));
}

#[test]
fn forged_tables_and_regions_are_refused() {
    use pvrdma_saved_state::{pages::PageList as SavedPages, rxe as saved};
    use pvrdma_verbs::MrRequest;

    let table = MrTables::new(Random::Seed(7)).unwrap();
    let state = |base, slots, free: &[u32]| saved::AdapterTables {
        base,
        keys: vec![9; slots],
        free: free.to_vec(),
        ..saved::AdapterTables::default()
    };
    let refused = |state| table.restore(state).is_err();
    let most = MAX_MR as usize;
    assert!(refused(state(0, 2, &[])) && refused(state((1 << 24) - MAX_MR, 2, &[])));
    assert!(refused(state(5, most + 1, &[])) && refused(state(5, 2, &[2])) && refused(state(5, 2, &[1, 1])));
    table.restore(state((1 << 24) - 1 - MAX_MR, most, &[])).unwrap();
    table.restore(state(5, 3, &[2])).unwrap();

    let mr = |key| Mr::restore(3, MrRequest::Dma { access: Access::empty() }, saved::Region { key, filled: None });
    let insert = |key| table.insert_restored(mr(key).unwrap());
    // A free slot, one that does not exist, one before the first, another byte, and one that is taken.
    for key in [7 << 8 | 9, 8 << 8 | 9, 4 << 8 | 9, 5 << 8 | 8] {
        assert!(insert(key).is_err(), "{key:#x}");
    }
    insert(5 << 8 | 9).unwrap();
    assert!(insert(5 << 8 | 9).is_err());
    assert!(refused(state(5, 3, &[2])), "there are regions");

    let filled = |length, access, first: &[u64], max_pages| {
        let pages = Some(SavedPages { first: first.to_vec(), count: vec![1; first.len()] });
        let filled = Some(saved::Filled { start: 0x1000, length, access, pages });
        Mr::restore(3, MrRequest::FastRegister { max_pages }, saved::Region { key: 1, filled })
    };
    assert!(filled(4096, 1, &[1], 1).is_ok());
    assert!(filled(4097, 1, &[1], 1).is_err() && filled(1, 16, &[1], 1).is_err());
    assert!(filled(1, 1, &[1, 2], 1).is_err() && filled(1, 1, &[0], 1).is_err());
    let content = Some(saved::Filled::default());
    let region = saved::Region { key: 1, filled: content };
    assert!(Mr::restore(3, MrRequest::Dma { access: Access::empty() }, region).is_err());

    // A slot whose region never came is used like a free one.
    drop(table.remove(5 << 8 | 9).unwrap());
    table.restore(state(5, most, &[])).unwrap();
    assert_eq!(table.insert(Mr::fast(3, 1)).unwrap(), 5 << 8 | 10);
}
