//! States of the host's queue pair.

use pvrdma_verbs_types::QpState;

use crate::adapter::Adapter;
use crate::convert;
use crate::sys::QpAttr;
use crate::verbs::HostQp;

/// `IBV_QP_STATE`: mask for a change of the state.
pub(super) const STATE: i32 = 1;

/// Returns attributes that change the state to `state`, with the mask [`STATE`].
pub(super) fn to(state: QpState) -> QpAttr {
    QpAttr { qp_state: i32::from(state as u8), ..QpAttr::default() }
}

/// Moves a QP of the host to its error state, where it flushes. A QP in RESET has nothing to flush, and some adapters
/// leave it there.
pub(super) fn to_error(adapter: &Adapter, host: &HostQp) {
    if host.query(STATE).is_ok_and(|attr| convert::state(attr.qp_state) == QpState::Reset) {
        return;
    }
    if let Err(error) = host.modify(&to(QpState::Error), STATE) {
        adapter.log.warn(module_path!(), format_args!("the host's QP {} does not stop: {error}", host.number()));
    }
}
