//! States of earlier releases, which are never changed. `KEEP_STATES=FOLDER` writes one of this release.

use std::fs;
use std::path::{Path, PathBuf};

use super::busy::Busy;
use super::records;

#[test]
fn kept_states_are_restored() {
    let busy = Busy::get();
    if let Some(folder) = std::env::var_os("KEEP_STATES") {
        fs::write(Path::new(&folder).join("busy.state"), &busy.state).unwrap();
    }
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/saved");
    let states: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(!states.is_empty());
    for path in states {
        let state = fs::read(&path).unwrap();
        let (guest, _port) = busy.fresh();
        guest.device.restore_state(&mut &state[..]).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let mut again = Vec::new();
        pvrdma_pci_function::Migratable::save(&*guest.device, &mut again).unwrap();
        assert_eq!(records(&again), records(&state), "{}", path.display());
        guest.device.resume_state().unwrap();
    }
}
