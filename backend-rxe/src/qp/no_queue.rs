//! Null queue, used once a QP has been destroyed.

use pvrdma_guest_memory::DmaView;
use pvrdma_verbs::{QueueError, SendSource};
use pvrdma_verbs_types::SendWr;

/// Queue of a destroyed QP, in place of its ring.
#[derive(Debug)]
pub(super) struct NoQueue;

impl SendSource for NoQueue {
    fn pop(&mut self, _view: &DmaView<'_>, _work: &mut SendWr) -> Result<bool, QueueError> {
        Ok(false)
    }

    fn retire(&mut self, _view: &DmaView<'_>) {}

    fn reset(&mut self) {}
}
