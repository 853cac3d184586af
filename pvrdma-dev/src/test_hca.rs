//! Stand-ins for unit tests.

use parking_lot::Mutex;
use rdma_backend::HcaLimits;

use crate::pci_function::InterruptSink;

/// Limits of an adapter that can do everything.
pub(crate) const LIMITS: HcaLimits = HcaLimits {
    max_qp: 65_536,
    max_qp_wr: 32_768,
    max_sge: 32,
    max_cq: 65_536,
    max_cqe: 1 << 22,
    max_mr: 1 << 20,
    max_mr_size: 1 << 40,
    max_pd: 1 << 20,
    max_srq: 65_536,
    max_rd_atomic: 16,
    atomics: true,
    memory_management: true,
};

/// Writes down what it is told.
#[derive(Debug, Default)]
pub(crate) struct RecordingSink(Mutex<Vec<String>>);

impl RecordingSink {
    /// What it was told since the last call.
    pub(crate) fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock())
    }
}

impl InterruptSink for RecordingSink {
    fn msix(&self, vector: u16) {
        self.0.lock().push(format!("msix {vector}"));
    }

    fn intx(&self, asserted: bool) {
        self.0.lock().push(format!("intx {asserted}"));
    }
}
