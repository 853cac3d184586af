//! States of earlier releases are read. The folder `tests/data/saved` has some of each release that changed the format;
//! they are made by `KEEP_STATES=FOLDER cargo test -p pvrdma-dev --test moves`, and never changed.
#![expect(clippy::unwrap_used, reason = "a panic fails the test")]

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use pvrdma_dev::{
    ObjectKind,
    testing::{GuestMemory, TestDevice},
};
use pvrdma_link::{Link, ManualClock, memory};
use pvrdma_pci_function::PciFunction;
use pvrdma_rxe::{PortConfig, Rxe, RxeConfig, RxeStation};
use pvrdma_saved_state::testing::split;

/// Returns the kept states with their names.
fn states() -> Vec<(String, Vec<u8>)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/saved");
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut states: Vec<_> =
        entries.map(|path| (path.file_stem().unwrap().display().to_string(), fs::read(&path).unwrap())).collect();
    states.sort();
    states
}

/// Creates the device of the saved one, at a cable that leads nowhere.
fn device() -> (TestDevice<Rxe>, Rxe, RxeStation) {
    let clock = Arc::new(ManualClock::default());
    let rxe = Rxe::new(RxeConfig::default().with_workers(0).with_clock(clock)).unwrap();
    let uplink: Arc<dyn Link> = Arc::new(memory::pair(1000).unwrap().0);
    let station = rxe.station(TestDevice::<Rxe>::mac(1));
    station.plug(PortConfig::new(uplink, 4500)).unwrap();
    (TestDevice::new(&rxe, TestDevice::<Rxe>::config(1), GuestMemory::new(16 << 20)), rxe, station)
}

#[test]
fn kept_states_are_restored() {
    let states = states();
    assert!(states.len() >= 8, "{}", states.len());
    for (name, state) in &states {
        let (test, _rxe, _uplink) = device();
        let used = test.device.status().kept.used_bytes;
        test.device.restore(&mut &state[..]).unwrap_or_else(|error| panic!("{name}: {error}"));
        test.device.finish_restore().unwrap_or_else(|error| panic!("{name}: {error}"));
        let qps = test.device.inspect_objects(ObjectKind::Qp);
        assert!(!qps.as_array().unwrap().is_empty(), "{name}");
        // A state of this release is the same stream again.
        let (header, before) = split(state).unwrap();
        if header.product == env!("CARGO_PKG_VERSION") {
            let mut again = Vec::new();
            test.device.save(&mut again).unwrap();
            assert!(before == split(&again).unwrap().1, "{name}");
        }
        test.device.reset();
        assert_eq!(test.device.status().kept.used_bytes, used, "{name}");
    }
}

/// Alone, as a snapshot: connections end, and the guest works with the rest.
#[test]
fn kept_states_are_restored_alone() {
    for (name, state) in states() {
        let (test, rxe, _uplink) = device();
        let used = test.device.status().kept.used_bytes;
        test.device.restore_alone(&mut &state[..]).unwrap_or_else(|error| panic!("{name}: {error}"));
        test.device.finish_restore().unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(test.device.resume(), "{name}");
        while rxe.run_some(64) > 0 {}
        test.device.reset();
        assert_eq!(test.device.status().kept.used_bytes, used, "{name}");
    }
}
