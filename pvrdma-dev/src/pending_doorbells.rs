//! Doorbells of the guest that were not passed on to the adapter yet.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use pvrdma_handover::Pending;
use pvrdma_verbs::Hca;

use crate::objects::{Qp, Srq};

/// Bit of a queue's pending doorbells: sends were posted.
pub(crate) const SEND: u8 = 1;
/// Bit of a queue's pending doorbells: receives were posted.
pub(crate) const RECV: u8 = 2;

/// A queue with a doorbell to pass on.
pub(crate) enum PendingDoorbell<H: Hca> {
    Qp(Arc<Qp<H>>),
    Srq(Arc<Srq<H>>),
}

/// Queues with a pending doorbell, in order. Each is in here at most once, because it enters when its bits leave 0.
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

    /// Removes the doorbells of a QP that was destroyed.
    pub(crate) fn remove_qp(&self, qp: &Arc<Qp<H>>) {
        if !qp.pending_doorbells.is_empty() {
            self.0.lock().retain(|entry| !matches!(entry, PendingDoorbell::Qp(other) if Arc::ptr_eq(other, qp)));
        }
    }

    /// Removes the doorbell of an SRQ that was destroyed.
    pub(crate) fn remove_srq(&self, srq: &Arc<Srq<H>>) {
        if !srq.pending_doorbells.is_empty() {
            self.0.lock().retain(|entry| !matches!(entry, PendingDoorbell::Srq(other) if Arc::ptr_eq(other, srq)));
        }
    }

    /// Removes all doorbells.
    pub(crate) fn clear(&self) {
        *self.0.lock() = VecDeque::new();
    }

    /// How many queues have a pending doorbell.
    pub(crate) fn len(&self) -> usize {
        self.0.lock().len()
    }

    /// Takes the queue whose doorbell has been pending longest. Its bits stay set until the caller clears them.
    pub(crate) fn pop(&self) -> Option<PendingDoorbell<H>> {
        self.0.lock().pop_front()
    }
}
