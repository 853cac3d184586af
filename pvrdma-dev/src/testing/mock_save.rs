//! Saving of the mock adapter: of its objects, it saves keys and states.

use std::sync::atomic::Ordering;

use pvrdma_verbs::{
    Hca, MrRequest, QpInit, SaveHca, SavedMr, SavedQp, SavedSrq, SharedReceiveQueue, SrqInit, VerbsError,
};
use pvrdma_verbs_types::{QpAttrs, QpState};

use super::{MockHca, MockMr, MockQp, MockSrq};

fn word(bytes: &[u8]) -> Result<u32, VerbsError> {
    bytes.try_into().map(u32::from_le_bytes).map_err(|_| VerbsError::Invalid("part of the adapter"))
}

impl SaveHca for MockHca {
    const FORMAT: &'static str = "mock";

    fn save_tables(&self) -> Result<Vec<u8>, VerbsError> {
        self.0.create("saved state")?;
        Ok(self.0.next_key.load(Ordering::Relaxed).to_le_bytes().to_vec())
    }

    fn restore_tables(&self, saved: &[u8]) -> Result<(), VerbsError> {
        self.0.next_key.store(word(saved)?, Ordering::Relaxed);
        Ok(())
    }

    fn save_mr(&self, mr: &MockMr) -> Result<SavedMr, VerbsError> {
        let request = match mr.saved {
            MrRequest::User { start, length, ref pages, access } => {
                MrRequest::User { start, length, pages: pages.clone(), access }
            }
            MrRequest::Dma { access } => MrRequest::Dma { access },
            MrRequest::FastRegister { max_pages } => MrRequest::FastRegister { max_pages },
        };
        Ok(SavedMr { request, adapter: mr.key.to_le_bytes().to_vec() })
    }

    fn restore_mr(&self, pd: &(), saved: SavedMr) -> Result<MockMr, VerbsError> {
        let SavedMr { request, adapter } = saved;
        let (key, next_key) = (word(&adapter)?, self.0.next_key.load(Ordering::Relaxed));
        let mut mr = self.register_mr(pd, request)?;
        self.0.next_key.store(next_key, Ordering::Relaxed);
        mr.key = key;
        Ok(mr)
    }

    fn map_mr(&self, _mr: &MockMr) -> Result<(), VerbsError> {
        self.0.create("memory")
    }

    fn save_srq(&self, srq: &MockSrq) -> Result<SavedSrq, VerbsError> {
        let ring = srq.shared.recv.lock().as_ref().and_then(|ring| ring.save()).ok_or(VerbsError::Gone)?;
        Ok(SavedSrq { ring, limit: srq.limit(), adapter: Vec::new() })
    }

    fn restore_srq(&self, init: SrqInit<'_, Self>, _adapter: &[u8]) -> Result<MockSrq, VerbsError> {
        self.create_srq(init)
    }

    fn save_qp(&self, qp: &MockQp) -> Result<SavedQp, VerbsError> {
        let send = qp.shared.send.lock().as_ref().and_then(|ring| ring.save()).ok_or(VerbsError::Gone)?;
        let recv = qp.shared.recv.lock().as_ref().and_then(|ring| ring.save());
        let adapter = (qp.shared.attrs.lock().state as u32).to_le_bytes().to_vec();
        Ok(SavedQp { send, recv, signal_all: qp.shared.signal_all, adapter })
    }

    fn restore_qp(&self, init: QpInit<'_, Self>, adapter: &[u8]) -> Result<MockQp, VerbsError> {
        let state = QpState::try_from(word(adapter)?).map_err(|_| VerbsError::Invalid("state of a queue pair"))?;
        let qp = self.create_qp(init)?;
        *qp.shared.attrs.lock() = QpAttrs { state, ..QpAttrs::default() };
        Ok(qp)
    }
}
