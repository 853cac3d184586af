//! Requested faults of requests and receives: entries of queues are made invalid, and the usual checks find them.

use std::sync::Arc;

use pvrdma_guest_memory::DmaView;
use pvrdma_verbs_types::{NakReason, QpAttrs, SendOp, SendWr, Sge, WcStatus};

use super::Qp;
use super::responder::Responder;
use super::state::StateCell;
use crate::adapter::Adapter;
use crate::faults::{Fault, Site};

/// Makes a request invalid if a fault of the device says so. The checks that follow then find the error.
///
/// # Errors
/// The status that the request ends with.
#[cold]
pub(super) fn spoil_request(qp: &Qp, attrs: &QpAttrs, work: &mut SendWr) -> Result<(), WcStatus> {
    let Adapter { faults, engine, .. } = &*qp.adapter;
    let source = qp.source(attrs.av.sgid_index).map(|source| source.gid);
    match faults.at_request(qp.state.id(), source, engine.now()) {
        Some(Fault::LocalProtection) => spoil_keys(&mut work.sges),
        Some(Fault::LocalOperation) => work.op = SendOp::Malformed,
        Some(Fault::LocalLength) => return Err(WcStatus::LocalLength),
        Some(Fault::QpError) => return Err(WcStatus::Flushed),
        _ => {}
    }
    Ok(())
}

/// Replaces each key with an invalid one of the same table entry: an entry has one valid key.
fn spoil_keys(sges: &mut [Sge]) {
    for sge in sges {
        sge.lkey ^= 1;
    }
}

impl Responder {
    /// As [`Self::take_receive`], with the faults of the device.
    #[cold]
    pub(super) fn take_receive_with_faults(
        &mut self,
        qp: &Qp,
        view: &DmaView<'_>,
        waiter: Option<&Arc<StateCell>>,
    ) -> Result<(), NakReason> {
        if qp.fault(Site::Wanted).is_some() {
            return Err(NakReason::NotReady(self.attrs.min_rnr_timer));
        }
        self.take_next_receive(qp, view, waiter)?;
        match qp.fault(Site::Receive) {
            Some(Fault::ReceiveLength) => self.recv.sges.clear(),
            Some(Fault::ReceiveProtection) => spoil_keys(&mut self.recv.sges),
            Some(Fault::ReceiveMalformed) => {
                return Err(self.fail_receive(qp, view, WcStatus::LocalQpOperation, NakReason::RemoteOperation));
            }
            Some(Fault::ReceiveQueue) => {
                if let Some(srq) = &qp.srq {
                    srq.break_off(view);
                }
                return Err(self.broken_queue(qp, view, None));
            }
            _ => {}
        }
        Ok(())
    }
}
