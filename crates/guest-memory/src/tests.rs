use std::sync::Arc;
use std::sync::atomic::Ordering;

use vm_memory::mmap::MmapRegion;

use super::*;

fn backing(size: usize) -> Backing {
    Backing { mapping: Arc::new(MmapRegion::new(size).unwrap()), offset: 0 }
}

fn range(iova: u64, len: u64) -> DmaRange {
    DmaRange { iova, len, writable: true, backing: Some(backing(usize::try_from(len).unwrap())) }
}

#[test]
fn copies_cross_from_one_range_to_the_next_but_not_into_a_hole() {
    let space = DmaSpace::new(PinPolicy::Off);
    space.map(range(0x1000, 0x1000)).unwrap();
    space.map(range(0x2000, 0x1000)).unwrap();
    let data: Vec<u8> = (0..200).collect();
    let view = space.view();
    view.write(0x1fa0, &data).unwrap();
    let mut back = vec![0; 200];
    view.read(0x1fa0, &mut back).unwrap();
    assert_eq!(back, data);
    assert_eq!(view.write(0x2fff, &[1, 2]), Err(DmaError::Unmapped { addr: 0x3000, len: 1 }));
    assert!(view.slice(0x1fff, 2, Direction::Read).is_err());
    assert!(view.read(u64::MAX, &mut back).is_err());
}

#[test]
fn overlapping_and_invalid_ranges_are_refused() {
    let space = DmaSpace::new(PinPolicy::Off);
    space.map(range(0x1000, 0x2000)).unwrap();
    for (iova, len) in [(0x1000, 0x1000), (0x0, 0x1001), (0x2fff, 0x1000), (0x0, 0x10000)] {
        assert!(matches!(space.map(range(iova, len)), Err(MapError::Overlap { .. })), "{iova:#x}");
    }
    assert!(matches!(
        space.map(DmaRange { iova: 0x8000, len: 0, writable: true, backing: None }),
        Err(MapError::Invalid { .. })
    ));
    assert!(matches!(
        space.map(DmaRange { iova: u64::MAX, len: 2, writable: true, backing: None }),
        Err(MapError::Invalid { .. })
    ));
    assert!(matches!(
        space.map(DmaRange { iova: 0x8000, len: 0x2000, writable: true, backing: Some(backing(0x1000)) }),
        Err(MapError::Invalid { .. })
    ));
}

#[test]
fn unmap_takes_whole_ranges_only() {
    let space = DmaSpace::new(PinPolicy::Off);
    for i in 1..5 {
        space.map(range(i * 0x1000, 0x1000)).unwrap();
    }
    assert!(space.unmap(0x1800, 0x800).is_err());
    assert!(space.unmap(0x1000, 0x1800).is_err());
    assert!(space.unmap(0x9000, 0x1000).is_err());
    space.unmap(0x2000, 0x2000).unwrap();
    assert!(space.view().read(0x2000, &mut [0]).is_err());
    assert!(space.view().read(0x4000, &mut [0]).is_ok());
    space.unmap(0, u64::MAX).unwrap();
    assert_eq!(space.mapped_bytes(), 0);
}

#[test]
fn access_modes() {
    let space = DmaSpace::new(PinPolicy::Off);
    space.map(DmaRange { writable: false, ..range(0x1000, 0x1000) }).unwrap();
    space.map(DmaRange { iova: 0x2000, len: 0x1000, writable: true, backing: None }).unwrap();
    let view = space.view();
    assert!(view.read(0x1000, &mut [0]).is_ok());
    assert_eq!(view.write(0x1000, &[0]), Err(DmaError::Denied { addr: 0x1000 }));
    assert_eq!(view.read(0x2000, &mut [0]), Err(DmaError::Denied { addr: 0x2000 }));
    assert_eq!(view.load_u32(0x1002, Ordering::Acquire), Err(DmaError::Misaligned { addr: 0x1002 }));
}

#[test]
fn atomic_update() {
    let space = DmaSpace::new(PinPolicy::Off);
    space.map(range(0x1000, 0x1000)).unwrap();
    let view = space.view();
    assert_eq!(view.update_u64(0x1008, |v| Some(v + 5)), Ok(0));
    assert_eq!(view.update_u64(0x1008, |v| (v == 4).then_some(9)), Ok(5));
    assert_eq!(view.update_u64(0x1008, |v| (v == 5).then_some(9)), Ok(5));
    assert_eq!(view.update_u64(0x1008, Some), Ok(9));
    assert!(view.update_u64(0x1004, Some).is_err());
}

#[test]
fn a_disabled_space_resolves_nothing() {
    let space = DmaSpace::new(PinPolicy::Off);
    space.map(range(0x1000, 0x1000)).unwrap();
    space.set_enabled(false);
    assert!(!space.is_enabled());
    assert_eq!(space.view().write(0x1000, &[1]), Err(DmaError::Denied { addr: 0x1000 }));
    assert_eq!(space.view().read(0x1000, &mut [0]), Err(DmaError::Denied { addr: 0x1000 }));
    space.map(range(0x2000, 0x1000)).unwrap();
    space.set_enabled(true);
    assert!(space.view().write(0x2000, &[1]).is_ok());
}

#[test]
fn unmap_waits_for_views() {
    let space = DmaSpace::new(PinPolicy::Off);
    space.map(range(0x1000, 0x1000)).unwrap();
    let view = space.view();
    let (done, wait) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let other = &space;
        scope.spawn(move || {
            other.unmap(0x1000, 0x1000).unwrap();
            done.send(()).unwrap();
        });
        assert!(wait.try_recv().is_err());
        view.write(0x1000, &[1]).unwrap();
        drop(view);
        wait.recv().unwrap();
    });
    assert_eq!(space.mapped_bytes(), 0);
}
