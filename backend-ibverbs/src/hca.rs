//! The adapter of one device, as seen by the device.

use std::sync::{Arc, Weak};

use pvrdma_base::Counter;
use pvrdma_guest_memory::MemoryWatcher;
use pvrdma_packet::MacAddr;
use pvrdma_verbs::{
    CompletionSink, DeviceContext, Hca, HcaLimits, MrRequest, Object, PortAttributes, QpInit, SrqInit, VerbsError,
};
use pvrdma_verbs_types::{Gid, GidType, QpType};
use serde::Serialize;
use serde_json::Value;

use crate::adapter::Adapter;
use crate::counters::bump;
use crate::cq::Cq;
use crate::gsi::Gsi;
use crate::handles::{IbvCq, IbvMr, IbvPd, IbvQp, IbvSrq};
use crate::objects::Objects;
use crate::poller;
use crate::qp::{Qp, QpParts};
use crate::shared::Shared;
use crate::srq::{Srq, SrqParts};
use crate::transport::Transport;
use crate::verbs::{HostDevice, HostPd};
use crate::worker::Worker;

/// An adapter. Dropping it destroys all objects created with it.
#[derive(Debug)]
pub struct IbvHca {
    objects: Arc<Objects>,
    poller: Option<Worker>,
}

/// Snapshot of an adapter.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
struct HcaInspect {
    /// Name of the host's device, as in `/sys/class/infiniband`.
    host_device: String,
    /// Port number on the host.
    host_port: u8,
    /// Bytes of guest memory that are registered with the host.
    registered_bytes: u64,
    /// Maximum of `registered_bytes`.
    max_registered_bytes: u64,
    /// The guest's connection manager can reach peers outside this process.
    cm_leads_out: bool,
    /// Protocol of the port.
    transport: Transport,
    /// No test has run with such a port.
    untested: bool,
}

/// Memory of a request in flight, in bytes.
const BYTES_IN_FLIGHT: u64 = 64;
const _: () = assert!(size_of::<crate::inflight::SendEntry>() as u64 <= BYTES_IN_FLIGHT);

impl IbvHca {
    /// Creates an adapter on an open device of the host, and starts its thread.
    ///
    /// # Errors
    /// The host's device refuses a request, or the thread cannot be started.
    pub(crate) fn start(
        device: HostDevice,
        mac: MacAddr,
        context: DeviceContext,
        shared: Arc<Shared>,
    ) -> Result<Self, VerbsError> {
        let objects = Arc::new(Objects::new(Adapter::new(Arc::new(device), mac, context, shared)?));
        let mrs = Arc::downgrade(&objects.mrs);
        let watcher: Weak<dyn MemoryWatcher> = mrs;
        objects.adapter.memory.watch(watcher);
        let poller = Some(poller::start(&objects)?);
        Ok(Self { objects, poller })
    }

    #[cfg(any(test, feature = "testing"))]
    pub(crate) const fn objects(&self) -> &Arc<Objects> {
        &self.objects
    }
}

impl QpParts {
    fn new(init: QpInit<'_, IbvHca>) -> Self {
        Self {
            cookie: init.cookie,
            qp_type: init.qp_type,
            pd: Arc::clone(&init.pd.0),
            send_cq: Arc::clone(&init.send_cq.cq),
            recv_cq: Arc::clone(&init.recv_cq.cq),
            srq: init.srq.map(|srq| Arc::clone(&srq.0)),
            send_queue: init.send_queue,
            recv_queue: init.recv_queue,
            caps: init.caps,
            signal_all: init.signal_all,
        }
    }
}

impl Hca for IbvHca {
    type Pd = IbvPd;
    type Mr = IbvMr;
    type Cq = IbvCq;
    type Srq = IbvSrq;
    type Qp = IbvQp;

    fn limits(&self) -> HcaLimits {
        self.objects.adapter.limits
    }

    fn port(&self) -> PortAttributes {
        self.objects.adapter.port()
    }

    fn bind_gid_in_vlan(&self, index: u8, gid: Gid, kind: GidType, vlan: Option<u16>) -> Result<(), VerbsError> {
        if gid.is_zero() {
            return Err(VerbsError::Invalid("GID"));
        }
        // The VLAN is that of the host's interface: the host's administrator chooses it together with the GID.
        if vlan.is_some() {
            return Err(VerbsError::Unsupported("a VLAN chosen by the guest"));
        }
        let Adapter { gids, cm_paths, .. } = &*self.objects.adapter;
        gids.bind(index, gid, kind)?;
        cm_paths.addresses_changed();
        Ok(())
    }

    fn unbind_gid(&self, index: u8) {
        let Adapter { gids, cm_paths, .. } = &*self.objects.adapter;
        gids.unbind(index);
        cm_paths.addresses_changed();
    }

    fn create_pd(&self) -> Result<IbvPd, VerbsError> {
        Ok(IbvPd(Arc::new(HostPd::new(&self.objects.adapter.device)?)))
    }

    fn register_mr(&self, pd: &IbvPd, request: MrRequest) -> Result<IbvMr, VerbsError> {
        let table = Arc::clone(&self.objects.mrs);
        Ok(IbvMr { mr: table.register(&pd.0, request)?, table })
    }

    fn create_cq(&self, sink: Arc<dyn CompletionSink>) -> Result<IbvCq, VerbsError> {
        let objects = Arc::clone(&self.objects);
        Ok(IbvCq { cq: Cq::create(&objects.adapter, &objects.cqs, sink)?, objects })
    }

    fn create_srq(&self, init: SrqInit<'_, Self>) -> Result<IbvSrq, VerbsError> {
        let SrqInit { cookie, pd, queue, limit, max_wr, max_sge } = init;
        let parts = SrqParts { cookie, pd: Arc::clone(&pd.0), queue, limit, max_wr, max_sge };
        let Objects { adapter, mrs, srqs, .. } = &*self.objects;
        Ok(IbvSrq(Srq::create(adapter, mrs, srqs, parts)?))
    }

    fn create_qp(&self, init: QpInit<'_, Self>) -> Result<IbvQp, VerbsError> {
        let Objects { adapter, mrs, qps, .. } = &*self.objects;
        let parts = QpParts::new(init);
        match parts.qp_type {
            QpType::Gsi => Ok(IbvQp::Gsi(Gsi::create(adapter, mrs, parts)?)),
            // The adapter accepts datagrams from every peer, and they are in the guest's memory before the backend can
            // check them.
            QpType::Ud if adapter.member.rules.limit_peers() => {
                bump(&adapter.counters.peers_refused);
                Err(VerbsError::Unsupported("a datagram queue pair of a device with peers"))
            }
            QpType::Ud if !adapter.shared.transport.has_ip_gids() => {
                Err(VerbsError::Unsupported("a datagram queue pair on an adapter that does not speak RoCE"))
            }
            QpType::Rc | QpType::Ud => Ok(IbvQp::Host(Qp::create(adapter, mrs, qps, parts)?)),
        }
    }

    fn bytes_of(&self, object: Object) -> u64 {
        // Estimated memory of the backend's and of the host library's objects.
        match object {
            Object::Pd => 256,
            Object::Mr => 512,
            Object::Cq => 1024,
            Object::Srq(requests) => 1024 + BYTES_IN_FLIGHT.saturating_mul(u64::from(requests)),
            Object::Qp(caps) => {
                let requests = u64::from(caps.max_send_wr).saturating_add(caps.max_recv_wr.into());
                4096 + BYTES_IN_FLIGHT.saturating_mul(requests)
            }
        }
    }

    fn counters(&self) -> Vec<Counter> {
        self.objects.adapter.counter_list()
    }

    fn inspect(&self) -> Value {
        let Adapter { shared, pinned, .. } = &*self.objects.adapter;
        let shown = HcaInspect {
            host_device: shared.config.device.clone(),
            host_port: shared.config.port,
            registered_bytes: pinned.used(),
            max_registered_bytes: shared.config.max_pinned,
            cm_leads_out: shared.manager.is_some() || shared.host_cm.is_some(),
            transport: shared.transport,
            untested: shared.transport == Transport::InfiniBand,
        };
        serde_json::to_value(shown).unwrap_or_default()
    }
}

impl Drop for IbvHca {
    fn drop(&mut self) {
        let Objects { adapter, mrs, qps, .. } = &*self.objects;
        adapter.gids.clear();
        // Ends the thread. This call may run on that thread.
        drop(self.poller.take());
        for qp in qps.all() {
            qp.destroy();
        }
        mrs.revoke(|_, _| true);
    }
}
