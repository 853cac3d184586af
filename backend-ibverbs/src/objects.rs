//! Objects of one device.

use std::sync::Arc;

use crate::adapter::Adapter;
use crate::cq::Cq;
use crate::directory::Directory;
use crate::mr::MrTable;
use crate::qp::Qp;
use crate::srq::Srq;

/// Objects of a device, by the key that the host uses for them.
#[derive(Debug)]
pub(crate) struct Objects {
    pub(crate) adapter: Arc<Adapter>,
    pub(crate) mrs: Arc<MrTable>,
    /// By the address of the host's object.
    pub(crate) cqs: Arc<Directory<usize, Cq>>,
    /// By the address of the host's object.
    pub(crate) srqs: Arc<Directory<usize, Srq>>,
    /// By QPN on the wire.
    pub(crate) qps: Arc<Directory<u32, Qp>>,
}

impl Objects {
    pub(crate) fn new(adapter: Adapter) -> Self {
        let adapter = Arc::new(adapter);
        let mrs = MrTable::new(&adapter);
        Self { adapter, mrs, cqs: Arc::default(), srqs: Arc::default(), qps: Arc::default() }
    }
}
