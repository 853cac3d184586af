//! States that no stream carries.

use super::busy::Busy;
use super::records;
use crate::{SaveError, Vmxnet3State};

#[test]
fn a_state_is_restored_from_a_value() {
    let busy = Busy::get();
    let (guest, _port) = busy.fresh();
    let is_running = || matches!(guest.device.state(), Err(SaveError::NotPaused));
    assert!(is_running());
    let (function, multicast) = records(&busy.state);
    let multicast = multicast.into_iter().flat_map(|list| list.addresses).collect();
    let mut state = Vmxnet3State { function, multicast };
    guest.device.set_state(state.clone()).unwrap();
    assert!(guest.device.state().unwrap() == state);
    guest.device.resume_state().unwrap();
    assert!(is_running());
    state.function.revision = 4;
    assert_eq!(guest.device.set_state(state).unwrap_err().to_string(), "invalid revision: 0x4");
    assert!(is_running());
}
