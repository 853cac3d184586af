//! A completion queue that blocks the thread that writes to it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};

use parking_lot::Mutex;
use pvrdma_guest_memory::DmaView;
use pvrdma_verbs::{CompletionSink, CqOverrun};
use pvrdma_verbs_types::Completion;

/// The first entry waits for permission, while its whole batch is held.
pub(crate) struct Gate {
    reached: mpsc::Sender<()>,
    leave: Mutex<mpsc::Receiver<()>>,
    open: AtomicBool,
}

impl Gate {
    /// Creates the queue. The receiver signals that the first entry has arrived; the sender lets it pass.
    pub(crate) fn new() -> (Arc<Self>, mpsc::Receiver<()>, mpsc::Sender<()>) {
        let ((reached, wait_reached), (leave, wait_leave)) = (mpsc::channel(), mpsc::channel());
        let gate = Self { reached, leave: Mutex::new(wait_leave), open: AtomicBool::new(false) };
        (Arc::new(gate), wait_reached, leave)
    }
}

impl CompletionSink for Gate {
    fn complete(&self, _view: &DmaView<'_>, _completion: &Completion) -> Result<(), CqOverrun> {
        if !self.open.swap(true, Ordering::SeqCst) {
            self.reached.send(()).unwrap();
            self.leave.lock().recv().unwrap();
        }
        Ok(())
    }
}
