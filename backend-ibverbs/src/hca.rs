//! An adapter as the device sees it.

use std::sync::Arc;
use std::sync::Weak;

use pvrdma_verbs::{
    CompletionSink, Counter, Gid, GidType, Hca, HcaLimits, MrRequest, PortAttributes, QpInit, QpType, QueuePair,
    SrqInit, VerbsError,
};

use crate::adapter::Adapter;
use crate::cq::{Cq, IbvCq};
use crate::gsi::Gsi;
use crate::mr::IbvMr;
use crate::qp::{IbvQp, Qp};
use crate::srq::{IbvSrq, Srq};
use crate::sys::DEVICE_MEM_WINDOW_TYPE_2;
use crate::verbs::HostPd;

/// Most RDMA reads and atomics outstanding per QP that guests are told.
pub(crate) const MAX_RD_ATOMIC: u8 = 128;

/// Protection domain.
#[derive(Debug)]
pub struct IbvPd(pub(crate) Arc<HostPd>);

/// One adapter. Dropping it ends everything that it made.
#[derive(Debug)]
pub struct IbvHca(pub(crate) Arc<Adapter>);

impl Hca for IbvHca {
    type Pd = IbvPd;
    type Mr = IbvMr;
    type Cq = IbvCq;
    type Srq = IbvSrq;
    type Qp = IbvQp;

    fn limits(&self) -> HcaLimits {
        let attr = &self.0.attributes;
        let number = |value: i32| u32::try_from(value).unwrap_or(0);
        let rd_atomic = attr.max_qp_rd_atom.min(attr.max_qp_init_rd_atom).min(MAX_RD_ATOMIC.into());
        HcaLimits {
            max_qp: number(attr.max_qp),
            max_qp_wr: number(attr.max_qp_wr.min(attr.max_srq_wr)),
            max_sge: number(attr.max_sge.min(attr.max_srq_sge)),
            max_cq: number(attr.max_cq),
            max_cqe: number(attr.max_cqe),
            max_mr: number(attr.max_mr),
            max_mr_size: attr.max_mr_size,
            max_pd: number(attr.max_pd),
            max_srq: number(attr.max_srq),
            max_rd_atomic: u8::try_from(rd_atomic).unwrap_or(0),
            atomics: attr.atomic_cap != 0,
            memory_management: attr.device_cap_flags & DEVICE_MEM_WINDOW_TYPE_2 != 0,
        }
    }

    fn port(&self) -> PortAttributes {
        self.0.port()
    }

    fn bind_gid_in_vlan(&self, index: u8, gid: Gid, kind: GidType, vlan: Option<u16>) -> Result<(), VerbsError> {
        if gid.is_zero() {
            return Err(VerbsError::Invalid("GID"));
        }
        // A VLAN is that of the host's interface: the host's administrator chooses it with the GID.
        if vlan.is_some() {
            return Err(VerbsError::Unsupported("a VLAN chosen by the guest"));
        }
        self.0.bind_gid(index, gid, kind)
    }

    fn unbind_gid(&self, index: u8) {
        self.0.replace_gid(index, None);
    }

    fn create_pd(&self) -> Result<IbvPd, VerbsError> {
        Ok(IbvPd(Arc::new(HostPd::new(&self.0.device)?)))
    }

    fn register_mr(&self, pd: &IbvPd, request: MrRequest) -> Result<IbvMr, VerbsError> {
        IbvMr::register(&self.0, &pd.0, request)
    }

    fn create_cq(&self, sink: Arc<dyn CompletionSink>) -> Result<IbvCq, VerbsError> {
        Ok(IbvCq(Cq::create(&self.0, sink)?))
    }

    fn create_srq(&self, init: SrqInit<'_, Self>) -> Result<IbvSrq, VerbsError> {
        Ok(IbvSrq(Srq::create(&self.0, init)?))
    }

    fn create_qp(&self, init: QpInit<'_, Self>) -> Result<IbvQp, VerbsError> {
        match init.qp_type {
            QpType::Gsi => Ok(IbvQp::Gsi(Gsi::create(&self.0, init)?)),
            QpType::Rc | QpType::Ud => Ok(IbvQp::Host(Qp::create(&self.0, init)?)),
        }
    }

    fn counters(&self) -> Vec<Counter> {
        self.0.counter_list()
    }
}

impl Drop for IbvHca {
    fn drop(&mut self) {
        for index in 0..=u8::MAX {
            self.unbind_gid(index);
        }
        self.0.stop();
        let qps: Vec<_> = self.0.qps.read().values().filter_map(Weak::upgrade).collect();
        for qp in qps {
            IbvQp::Host(qp).destroy();
        }
        self.0.mrs.revoke(|_, _| true);
    }
}
