use pvrdma_guest_memory::PageListBuilder;
use pvrdma_verbs::Random;

use super::*;

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
    assert!(distinct.iter().any(|keys| keys[0] & 0xff != keys[1] & 0xff), "bytes are drawn for each");
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
fn as_many_regions_come_and_go_as_somebody_likes() {
    let table = MrTables::new(Random::Seed(0)).unwrap();
    for _ in 0..=crate::limits::MAX_MR {
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
fn who_looks_does_not_wait_for_a_change() {
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
            assert!(under_way.lookup(keys[gone], 0, 0x1000, 1, Access::empty()).is_some(), "a copy goes on");
            assert!(!removed.is_finished());
            drop(under_way);
            assert_eq!(Arc::strong_count(&removed.join().unwrap().unwrap()), 1, "nobody else has it");
        });
    }
}
