//! Handles of a device's objects, as held by the device. Dropping a handle destroys its object.

use std::sync::Arc;

use pvrdma_verbs::{CompletionQueue, MemoryRegion, MrShape, QueuePair, SharedReceiveQueue};
use pvrdma_verbs_types::{QpAttrMask, QpAttrs, Qpn};
use serde_json::Value;

use crate::cq::Cq;
use crate::gsi::Gsi;
use crate::mr::{Mr, MrTable};
use crate::objects::Objects;
use crate::qp::Qp;
use crate::reap;
use crate::srq::Srq;
use crate::verbs::HostPd;

/// A protection domain.
#[derive(Debug)]
pub struct IbvPd(pub(crate) Arc<HostPd>);

/// A registered memory region. Dropping it ends the registration.
#[derive(Debug)]
pub struct IbvMr {
    pub(crate) table: Arc<MrTable>,
    pub(crate) mr: Arc<Mr>,
}

impl MemoryRegion for IbvMr {
    fn lkey(&self) -> u32 {
        self.mr.lkey()
    }

    fn rkey(&self) -> u32 {
        self.mr.rkey()
    }

    fn shape(&self) -> Option<MrShape> {
        Some(self.mr.shape())
    }

    fn inspect(&self) -> Value {
        serde_json::to_value(self.mr.inspect()).unwrap_or_default()
    }

    fn destroy(&self) {
        self.table.destroy(&self.mr);
    }
}

impl Drop for IbvMr {
    fn drop(&mut self) {
        self.destroy();
    }
}

/// A completion queue.
#[derive(Debug)]
pub struct IbvCq {
    pub(crate) cq: Arc<Cq>,
    pub(crate) objects: Arc<Objects>,
}

impl CompletionQueue for IbvCq {
    fn notify_poll(&self) {
        self.cq.guest_polled();
        reap::try_drain(&self.cq, &self.objects.adapter, &self.objects.qps);
    }

    fn notify_arm(&self) {
        if !self.cq.rely_on_event() {
            reap::arm_and_drain(&self.cq, &self.objects.adapter, &self.objects.qps);
        }
    }

    fn inspect(&self) -> Value {
        serde_json::to_value(self.cq.inspect()).unwrap_or_default()
    }
}

/// A shared receive queue. Dropping it destroys it.
#[derive(Debug)]
pub struct IbvSrq(pub(crate) Arc<Srq>);

impl SharedReceiveQueue for IbvSrq {
    fn set_limit(&self, limit: u32) {
        self.0.set_limit(limit);
    }

    fn limit(&self) -> u32 {
        self.0.limit()
    }

    fn notify_recv(&self) {
        self.0.run();
    }

    fn inspect(&self) -> Value {
        serde_json::to_value(self.0.inspect()).unwrap_or_default()
    }

    fn destroy(&self) {
        self.0.destroy();
    }
}

impl Drop for IbvSrq {
    fn drop(&mut self) {
        self.0.destroy();
    }
}

/// A queue pair. Dropping it destroys it.
#[derive(Debug)]
pub enum IbvQp {
    /// A queue pair of the host.
    #[doc(hidden)]
    Host(#[expect(private_interfaces, reason = "opaque")] Arc<Qp>),
    /// The connection manager's queue pair, which the host does not give to user space.
    #[doc(hidden)]
    Gsi(#[expect(private_interfaces, reason = "opaque")] Arc<Gsi>),
}

impl QueuePair for IbvQp {
    fn qpn(&self) -> Qpn {
        match self {
            Self::Host(qp) => qp.qpn(),
            Self::Gsi(_) => Qpn::GSI,
        }
    }

    fn modify(&self, attrs: &QpAttrs, mask: QpAttrMask) -> Result<(), pvrdma_verbs::VerbsError> {
        match self {
            Self::Host(qp) => qp.modify(attrs, mask),
            Self::Gsi(qp) => qp.modify(attrs, mask),
        }
    }

    fn query(&self) -> QpAttrs {
        match self {
            Self::Host(qp) => qp.query(),
            Self::Gsi(qp) => qp.query(),
        }
    }

    fn try_query(&self) -> Option<QpAttrs> {
        match self {
            Self::Host(qp) => qp.try_query(),
            Self::Gsi(qp) => qp.try_query(),
        }
    }

    fn inspect(&self) -> Value {
        let shown = match self {
            Self::Host(qp) => serde_json::to_value(qp.inspect()),
            Self::Gsi(qp) => serde_json::to_value(qp.inspect()),
        };
        shown.unwrap_or_default()
    }

    fn notify_send(&self) {
        match self {
            Self::Host(qp) => qp.continue_sending(),
            Self::Gsi(qp) => qp.run_send(),
        }
    }

    fn notify_recv(&self) {
        match self {
            Self::Host(qp) => qp.run_recv(),
            Self::Gsi(_) => {}
        }
    }

    fn destroy(&self) {
        match self {
            Self::Host(qp) => qp.destroy(),
            Self::Gsi(qp) => qp.destroy(),
        }
    }
}

impl Drop for IbvQp {
    fn drop(&mut self) {
        self.destroy();
    }
}
