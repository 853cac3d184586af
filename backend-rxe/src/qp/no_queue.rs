//! The end of a QP's rings.

use pvrdma_guest_memory::DmaView;
use pvrdma_verbs::{QueueError, SendSource, SendWr};

/// What a QP holds in place of a ring after its end.
#[derive(Debug)]
pub(super) struct NoQueue;

impl SendSource for NoQueue {
    fn pop(&mut self, _view: &DmaView<'_>, _work: &mut SendWr) -> Result<bool, QueueError> {
        Ok(false)
    }

    fn retire(&mut self, _view: &DmaView<'_>) {}

    fn reset(&mut self) {}
}
