//! Doorbells of the guest that are not yet forwarded to the adapter.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use pvrdma_handover::Pending;
use pvrdma_verbs::Hca;

use crate::objects::{Qp, Srq};

/// Bit of a queue's pending doorbells: send requests were posted.
pub(crate) const SEND: u8 = 1;
/// Bit of a queue's pending doorbells: receive requests were posted.
pub(crate) const RECV: u8 = 2;

/// Queue with a pending doorbell.
pub(crate) enum PendingDoorbell<H: Hca> {
    Qp(Arc<Qp<H>>),
    Srq(Arc<Srq<H>>),
}

/// Queues with a pending doorbell, in order. Each queue is listed at most once, because it is added only when its bits
/// were 0 before.
pub(crate) struct PendingDoorbells<H: Hca>(Mutex<VecDeque<PendingDoorbell<H>>>);

impl<H: Hca> PendingDoorbells<H> {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(VecDeque::new()))
    }

    /// Adds the doorbells `bits` of a QP.
    pub(crate) fn push_qp(&self, qp: &Arc<Qp<H>>, bits: u8) {
        self.push(&qp.pending_doorbells, bits, || PendingDoorbell::Qp(Arc::clone(qp)));
    }

    /// Adds the doorbell of an SRQ.
    pub(crate) fn push_srq(&self, srq: &Arc<Srq<H>>) {
        self.push(&srq.pending_doorbells, RECV, || PendingDoorbell::Srq(Arc::clone(srq)));
    }

    fn push(&self, pending: &Pending, bits: u8, queue: impl FnOnce() -> PendingDoorbell<H>) {
        if pending.add(bits) {
            self.0.lock().push_back(queue());
        }
    }

    /// Removes the doorbells of a destroyed QP.
    pub(crate) fn remove_qp(&self, qp: &Arc<Qp<H>>) {
        if !qp.pending_doorbells.is_empty() {
            self.0.lock().retain(|entry| !matches!(entry, PendingDoorbell::Qp(other) if Arc::ptr_eq(other, qp)));
        }
    }

    /// Removes the doorbell of a destroyed SRQ.
    pub(crate) fn remove_srq(&self, srq: &Arc<Srq<H>>) {
        if !srq.pending_doorbells.is_empty() {
            self.0.lock().retain(|entry| !matches!(entry, PendingDoorbell::Srq(other) if Arc::ptr_eq(other, srq)));
        }
    }

    /// Removes all doorbells.
    pub(crate) fn clear(&self) {
        *self.0.lock() = VecDeque::new();
    }

    /// Returns the number of queues with a pending doorbell.
    pub(crate) fn len(&self) -> usize {
        self.0.lock().len()
    }

    /// Removes and returns the queue whose doorbell has been pending longest. Its bits stay set until the caller clears
    /// them.
    pub(crate) fn pop(&self) -> Option<PendingDoorbell<H>> {
        self.0.lock().pop_front()
    }
}
