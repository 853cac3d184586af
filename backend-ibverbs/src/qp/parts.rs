//! Components of a queue pair.

use std::sync::Arc;

use pvrdma_verbs::{RecvSource, SendSource};
use pvrdma_verbs_types::{QpCaps, QpType};

use crate::cq::Cq;
use crate::srq::Srq;
use crate::verbs::HostPd;

/// Like [`QpInit`](pvrdma_verbs::QpInit), with the backend's objects.
pub(crate) struct QpParts {
    pub(crate) cookie: u32,
    pub(crate) qp_type: QpType,
    pub(crate) pd: Arc<HostPd>,
    pub(crate) send_cq: Arc<Cq>,
    pub(crate) recv_cq: Arc<Cq>,
    pub(crate) srq: Option<Arc<Srq>>,
    pub(crate) send_queue: Box<dyn SendSource>,
    pub(crate) recv_queue: Option<Box<dyn RecvSource>>,
    pub(crate) caps: QpCaps,
    pub(crate) signal_all: bool,
}
