//! Inspection: descriptions of a device and its objects as data, for people and for tools.
//!
//! Each kind of object has its own type, which is serialized with serde. The adapter's part is under `adapter`
//! ([`QueuePair::inspect`] and its siblings). A description contains no payload and no keys. It is no saved state
//! either ([`crate::PvrdmaDevice::save`]).
//!
//! Inspection blocks no other thread. The objects are described one after the other, and no lock is held between them.
//! So each description is consistent, but they are of different moments.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use pvrdma_base::Snapshot;
use pvrdma_guest_memory::DmaSpace;
use pvrdma_verbs::{CompletionQueue, Hca, MemoryRegion, MrShape, QueuePair, SendProgress, SharedReceiveQueue};
use pvrdma_verbs_types::{Gid, QpAttrs, QpCaps, QpState, QpType, Qpn};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::core::Core;
use crate::device::PvrdmaDevice;
use crate::limits::Limits;
use crate::objects::{Context, Cq, Mr, Qp, Srq};
use crate::ring::RingInspect;
use crate::stats::DeviceStatus;

/// Kind of object that can be inspected.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ObjectKind {
    /// The device: [`DeviceInspect`].
    Device,
    /// Processes that opened the device, with their doorbell pages.
    Context,
    /// Protection domains.
    Pd,
    /// Memory regions.
    Mr,
    /// Completion queues.
    Cq,
    /// Shared receive queues.
    Srq,
    /// Queue pairs.
    Qp,
    /// Traffic of queue pairs: [`QpTraffic`].
    Traffic,
    /// The GID table.
    Gid,
    /// The rings for asynchronous events and CQ notifications.
    Ring,
    /// Reasons why the device cannot move to another host now. All of them are the adapter's
    /// ([`Migratable::blockers`](pvrdma_pci_function::Migratable::blockers)), so the list of the device is empty.
    Migratable,
}

impl ObjectKind {
    /// All kinds.
    pub const ALL: [Self; 11] = [
        Self::Device,
        Self::Context,
        Self::Pd,
        Self::Mr,
        Self::Cq,
        Self::Srq,
        Self::Qp,
        Self::Traffic,
        Self::Gid,
        Self::Ring,
        Self::Migratable,
    ];

    /// Returns its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Context => "context",
            Self::Pd => "pd",
            Self::Mr => "mr",
            Self::Cq => "cq",
            Self::Srq => "srq",
            Self::Qp => "qp",
            Self::Traffic => "traffic",
            Self::Gid => "gid",
            Self::Ring => "ring",
            Self::Migratable => "migratable",
        }
    }
}

impl fmt::Display for ObjectKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for ObjectKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|kind| kind.name() == text)
            .ok_or_else(|| format!("'{text}' is not one of {}", Self::ALL.map(Self::name).join(", ")))
    }
}

/// A device.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct DeviceInspect {
    /// Status.
    #[serde(flatten)]
    pub status: DeviceStatus,
    /// Limits in force: the minimum of the configuration's and the adapter's.
    pub limits: Limits,
    /// Description by the adapter.
    #[serde(skip_serializing_if = "Value::is_null")]
    pub backend: Value,
}

/// A process that opened the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct ContextInspect {
    /// Handle.
    pub handle: u32,
    /// Index of its doorbell page in BAR 2.
    pub uar_page: u32,
    /// `trapped`, or `mapped` if its page is memory and its rings are watched.
    pub doorbells: &'static str,
}

/// A protection domain.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct PdInspect {
    /// Handle.
    pub handle: u32,
    /// Handle of the context that owns it, 0 for the guest's kernel.
    pub context: u32,
}

/// A memory region.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct MrInspect {
    /// Handle.
    pub handle: u32,
    /// Handle of its protection domain.
    pub pd: u32,
    /// Memory that it covers. `None` while the adapter changes its regions.
    #[serde(flatten)]
    pub shape: Option<MrShape>,
    /// Description by the adapter.
    #[serde(skip_serializing_if = "Value::is_null")]
    pub adapter: Value,
}

/// A completion queue.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct CqInspect {
    /// Handle.
    pub handle: u32,
    /// Handle of the context that owns it, 0 for the guest's kernel.
    pub context: u32,
    /// `armed`, `armed for solicited`, `not armed`, `inferred` if it cannot be armed and notifications are inferred
    /// from consumption, `dead` after an overrun or an invalid index, or `busy`.
    pub state: &'static str,
    /// Ring. The device produces, the guest consumes.
    pub ring: RingInspect,
    /// Description by the adapter.
    #[serde(skip_serializing_if = "Value::is_null")]
    pub adapter: Value,
}

/// A shared receive queue.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct SrqInspect {
    /// Handle.
    pub handle: u32,
    /// Handle of its protection domain.
    pub pd: u32,
    /// SGEs per request.
    pub max_sge: u32,
    /// Number of requests below which the guest gets an event, 0 if disarmed.
    pub limit: u32,
    /// Ring. The guest produces, the device consumes.
    pub ring: RingInspect,
    /// Description by the adapter.
    #[serde(skip_serializing_if = "Value::is_null")]
    pub adapter: Value,
}

/// A queue pair with both halves.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct QpInspect {
    /// Handle.
    pub handle: u32,
    /// QPN on the wire.
    pub qpn: Qpn,
    /// Transport service.
    #[serde(rename = "type")]
    pub qp_type: QpType,
    /// Handle of its protection domain.
    pub pd: u32,
    /// Handle of the completion queue for sends.
    pub send_cq: u32,
    /// Handle of the completion queue for receives.
    pub recv_cq: u32,
    /// Handle of its shared receive queue.
    pub srq: Option<u32>,
    /// Sizes at creation.
    pub caps: QpCaps,
    /// State, attributes and path to the peer.
    pub attrs: Snapshot<QpAttrs>,
    /// Send ring. The guest produces, the device consumes.
    pub send_ring: RingInspect,
    /// Receive ring, unless it has a shared receive queue.
    pub recv_ring: Option<RingInspect>,
    /// Description of both halves by the adapter.
    #[serde(skip_serializing_if = "Value::is_null")]
    pub adapter: Value,
}

/// Traffic of a queue pair: a short form of [`QpInspect`] for tools that read all queue pairs repeatedly.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct QpTraffic {
    /// QPN on the wire.
    pub qpn: Qpn,
    /// Transport service.
    #[serde(rename = "type")]
    pub qp_type: QpType,
    /// State. `None` while its attributes change.
    pub state: Option<QpState>,
    /// Peer of a connection.
    pub peer: Option<QpPeer>,
    /// Number of send requests in its ring that are not complete. `None`: see [`RingInspect::used`].
    pub send_ring_used: Option<u32>,
    /// Number of elements of its send ring.
    pub send_ring_size: u32,
    /// Progress. `None` if the QP is busy, or the adapter does not count.
    pub progress: Option<SendProgress>,
}

/// Peer of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct QpPeer {
    /// QPN of the peer.
    pub qpn: Qpn,
    /// GID of the peer.
    pub gid: Gid,
}

impl<H: Hca> Mr<H> {
    fn inspect(&self, handle: u32) -> MrInspect {
        MrInspect { handle, pd: self.pd.handle, shape: self.verbs.shape(), adapter: self.verbs.inspect() }
    }
}

impl<H: Hca> Cq<H> {
    fn inspect(&self, handle: u32, memory: &DmaSpace) -> CqInspect {
        let Self { owner, ring, verbs, _charge } = self;
        CqInspect {
            handle,
            context: *owner,
            state: ring.state_word(),
            ring: ring.words().inspect(memory),
            adapter: verbs.inspect(),
        }
    }
}

impl<H: Hca> Srq<H> {
    fn inspect(&self, memory: &DmaSpace) -> SrqInspect {
        SrqInspect {
            handle: self.handle,
            pd: self.pd.handle,
            max_sge: self.max_sge,
            limit: self.verbs.limit(),
            ring: self.words.inspect(memory),
            adapter: self.verbs.inspect(),
        }
    }
}

impl<H: Hca> Qp<H> {
    fn inspect(&self, handle: u32, memory: &DmaSpace) -> QpInspect {
        QpInspect {
            handle,
            qpn: self.verbs.qpn(),
            qp_type: self.qp_type,
            pd: self.pd.handle,
            send_cq: self.send_cq.ring.handle(),
            recv_cq: self.recv_cq.ring.handle(),
            srq: self.srq.as_ref().map(|srq| srq.handle),
            caps: self.caps,
            attrs: self.verbs.try_query().into(),
            send_ring: self.send_words().inspect(memory),
            recv_ring: self.recv_words().map(|words| words.inspect(memory)),
            adapter: self.verbs.inspect(),
        }
    }
}

impl<H: Hca> Qp<H> {
    fn traffic(&self, memory: &DmaSpace) -> QpTraffic {
        let attrs = self.verbs.try_query();
        let connected = attrs.filter(|attrs| self.qp_type == QpType::Rc && attrs.dest_qpn != Qpn::default());
        let ring = self.send_words().inspect(memory);
        QpTraffic {
            qpn: self.verbs.qpn(),
            qp_type: self.qp_type,
            state: attrs.map(|attrs| attrs.state),
            peer: connected.map(|attrs| QpPeer { qpn: attrs.dest_qpn, gid: attrs.av.dgid }),
            send_ring_used: ring.used,
            send_ring_size: ring.size,
            progress: self.verbs.progress(),
        }
    }
}

impl<H: Hca> Core<H> {
    fn contexts(&self) -> Vec<ContextInspect> {
        let contexts = self.objects.contexts.all().into_iter();
        let inspect = |(handle, context): (u32, Arc<Context>)| {
            let doorbells = if context.is_mapped() { "mapped" } else { "trapped" };
            ContextInspect { handle, uar_page: context.uar_page, doorbells }
        };
        contexts.map(inspect).collect()
    }

    fn pds(&self) -> Vec<PdInspect> {
        let pds = self.objects.pds.all().into_iter();
        pds.map(|(handle, pd)| PdInspect { handle, context: pd.owner }).collect()
    }

    fn mrs(&self) -> Vec<MrInspect> {
        self.objects.mrs.all().into_iter().map(|(handle, mr)| mr.inspect(handle)).collect()
    }

    fn cqs(&self) -> Vec<CqInspect> {
        self.objects.cqs.all().into_iter().map(|(handle, cq)| cq.inspect(handle, &self.memory)).collect()
    }

    fn srqs(&self) -> Vec<SrqInspect> {
        self.objects.srqs.all().into_iter().map(|(_, srq)| srq.inspect(&self.memory)).collect()
    }

    fn qps(&self) -> Vec<QpInspect> {
        self.objects.qps.all().into_iter().map(|(handle, qp)| qp.inspect(handle, &self.memory)).collect()
    }

    fn traffic(&self) -> Vec<QpTraffic> {
        self.objects.qps.all().into_iter().map(|(_, qp)| qp.traffic(&self.memory)).collect()
    }
}

impl<H: Hca> PvrdmaDevice<H> {
    /// Describes the device.
    pub fn inspect(&self) -> DeviceInspect {
        let core = self.core();
        DeviceInspect { status: self.status(), limits: core.limits(), backend: core.hca.inspect() }
    }

    /// Describes its objects of a kind as one value: a list, or a [`DeviceInspect`].
    ///
    /// Does not wait for a lock that is held while requests are processed or guest memory is accessed: parts that are
    /// not available immediately are the string `"busy"`.
    pub fn inspect_objects(&self, kind: ObjectKind) -> Value {
        let core = self.core();
        let value = match kind {
            ObjectKind::Device => serde_json::to_value(self.inspect()),
            ObjectKind::Context => serde_json::to_value(core.contexts()),
            ObjectKind::Pd => serde_json::to_value(core.pds()),
            ObjectKind::Mr => serde_json::to_value(core.mrs()),
            ObjectKind::Cq => serde_json::to_value(core.cqs()),
            ObjectKind::Srq => serde_json::to_value(core.srqs()),
            ObjectKind::Qp => serde_json::to_value(core.qps()),
            ObjectKind::Traffic => serde_json::to_value(core.traffic()),
            ObjectKind::Gid => {
                let gids = core.objects.gids.try_lock().map(|gids| gids.entries());
                serde_json::to_value(Snapshot::from(gids))
            }
            ObjectKind::Ring => serde_json::to_value(core.hub.inspect(&core.memory)),
            ObjectKind::Migratable => Ok(Value::Array(Vec::new())),
        };
        // Serialization can fail only for maps whose keys are not strings, and there are none.
        value.unwrap_or_default()
    }
}
