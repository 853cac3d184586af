//! Verbs: the operations that an adapter offers to a device.

use std::sync::Arc;

use pvrdma_base::Counter;
use pvrdma_packet::MacAddr;
use pvrdma_pages::{PAGE_SIZE, PageList};
use pvrdma_verbs_types::{Access, Gid, GidType, Mtu, PortState, QpAttrMask, QpAttrs, QpCaps, QpType, Qpn};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::context::DeviceContext;
use crate::error::VerbsError;
use crate::progress::SendProgress;
use crate::queue::{CompletionSink, RecvSource, SendSource};

/// Backend of a process, at which each device has a station.
pub trait Backend: Send + Sync {
    /// Type of the adapters.
    type Hca: Hca;
    /// Type of the stations.
    type Station: Station<Hca = Self::Hca>;

    /// Returns the station of the device with this MAC address, which the paired network function shares.
    ///
    /// # Errors
    /// The backend cannot serve another device.
    fn station(&self, mac: MacAddr) -> Result<Self::Station, VerbsError>;
}

/// Place of one device at a backend: everything about the device that does not depend on its guest. The device has the
/// MAC address of its station.
pub trait Station: Send + Sync {
    /// Type of the adapter.
    type Hca: Hca;

    /// Returns the MAC address.
    fn mac(&self) -> MacAddr;

    /// Creates the adapter of the device.
    ///
    /// # Errors
    /// The backend cannot serve another device.
    fn attach(&self, context: DeviceContext) -> Result<Self::Hca, VerbsError>;
}

/// Upper limits of an adapter. The device advertises the smaller of these and its own. An adapter sets its limits from
/// [`HcaLimits::NONE`], so one that does not know a limit supports nothing of its kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct HcaLimits {
    /// Queue pairs.
    pub max_qp: u32,
    /// Requests per queue.
    pub max_qp_wr: u32,
    /// SGEs per request.
    pub max_sge: u32,
    /// Completion queues.
    pub max_cq: u32,
    /// Entries per completion queue.
    pub max_cqe: u32,
    /// Memory regions.
    pub max_mr: u32,
    /// Bytes per memory region.
    pub max_mr_size: u64,
    /// Protection domains.
    pub max_pd: u32,
    /// Shared receive queues.
    pub max_srq: u32,
    /// RDMA reads and atomics outstanding per QP.
    pub max_rd_atomic: u8,
    /// `true` if atomics are supported.
    pub atomics: bool,
    /// `true` if fast registration and invalidation are supported.
    pub memory_management: bool,
}

impl HcaLimits {
    /// Limits of an adapter that supports nothing.
    pub const NONE: Self = Self {
        max_qp: 0,
        max_qp_wr: 0,
        max_sge: 0,
        max_cq: 0,
        max_cqe: 0,
        max_mr: 0,
        max_mr_size: 0,
        max_pd: 0,
        max_srq: 0,
        max_rd_atomic: 0,
        atomics: false,
        memory_management: false,
    };

    /// Returns the minimum of each limit.
    #[must_use]
    pub fn bounded_by(&self, other: &Self) -> Self {
        Self {
            max_qp: self.max_qp.min(other.max_qp),
            max_qp_wr: self.max_qp_wr.min(other.max_qp_wr),
            max_sge: self.max_sge.min(other.max_sge),
            max_cq: self.max_cq.min(other.max_cq),
            max_cqe: self.max_cqe.min(other.max_cqe),
            max_mr: self.max_mr.min(other.max_mr),
            max_mr_size: self.max_mr_size.min(other.max_mr_size),
            max_pd: self.max_pd.min(other.max_pd),
            max_srq: self.max_srq.min(other.max_srq),
            max_rd_atomic: self.max_rd_atomic.min(other.max_rd_atomic),
            atomics: self.atomics && other.atomics,
            memory_management: self.memory_management && other.memory_management,
        }
    }
}

pvrdma_base::setters!(const HcaLimits {
    with_max_qp => max_qp: u32,
    with_max_qp_wr => max_qp_wr: u32,
    with_max_sge => max_sge: u32,
    with_max_cq => max_cq: u32,
    with_max_cqe => max_cqe: u32,
    with_max_mr => max_mr: u32,
    with_max_mr_size => max_mr_size: u64,
    with_max_pd => max_pd: u32,
    with_max_srq => max_srq: u32,
    with_max_rd_atomic => max_rd_atomic: u8,
    with_atomics => atomics: bool,
    with_memory_management => memory_management: bool,
});

/// Current attributes of the port.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct PortAttributes {
    /// Logical state.
    pub state: PortState,
    /// Largest path MTU of the port.
    pub max_mtu: Mtu,
    /// Largest path MTU of the link.
    pub active_mtu: Mtu,
    /// Largest message in bytes.
    pub max_message: u32,
}

/// Type and size of an object to be created.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Object {
    /// A protection domain.
    Pd,
    /// A memory region.
    Mr,
    /// A completion queue.
    Cq,
    /// A shared receive queue of this number of requests.
    Srq(u32),
    /// A queue pair of this size.
    Qp(QpCaps),
}

/// Memory to register.
#[derive(Debug)]
pub enum MrRequest {
    /// Memory of a guest process.
    User {
        /// Virtual address of the first byte; its page offset is that of the first page of `pages`.
        start: u64,
        /// Bytes.
        length: u64,
        /// Pages that contain the memory.
        pages: PageList,
        /// Access rights.
        access: Access,
    },
    /// The guest kernel's key for bus addresses: all guest memory, local use only.
    Dma {
        /// Access rights.
        access: Access,
    },
    /// A region whose contents are set later by work requests.
    FastRegister {
        /// Maximum number of pages.
        max_pages: u32,
    },
}

/// Memory that a region covers. Its keys are not displayed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum MrShape {
    /// Memory of a process.
    User {
        /// Virtual address of the first byte.
        start: u64,
        /// Bytes.
        length: u64,
        /// Access rights.
        access: Access,
    },
    /// All bus addresses, for the guest's kernel.
    Dma {
        /// Access rights.
        access: Access,
    },
    /// A region whose contents are set by work requests.
    FastRegister {
        /// Maximum number of bytes.
        max_bytes: u64,
    },
}

impl MrShape {
    /// Returns the shape of a region whose contents are set by work requests, with at most `max_pages` pages.
    pub fn fast_register(max_pages: u32) -> Self {
        Self::FastRegister { max_bytes: u64::from(max_pages).saturating_mul(PAGE_SIZE) }
    }
}

/// Parameters of a shared receive queue.
#[expect(missing_debug_implementations, reason = "holds a trait object of the device")]
pub struct SrqInit<'a, H: Hca + ?Sized> {
    /// Identifier of the SRQ in events.
    pub cookie: u32,
    /// Protection domain.
    pub pd: &'a H::Pd,
    /// The ring.
    pub queue: Box<dyn RecvSource>,
    /// Initial limit; 0 means disarmed.
    pub limit: u32,
    /// Size of the ring in requests.
    pub max_wr: u32,
    /// SGEs per request.
    pub max_sge: u32,
}

/// Parameters of a queue pair.
#[expect(missing_debug_implementations, reason = "holds trait objects of the device")]
pub struct QpInit<'a, H: Hca + ?Sized> {
    /// Identifier of the QP in completions and events.
    pub cookie: u32,
    /// Requested QPN. Adapters that choose their own numbers ignore it, except for [`Qpn::GSI`].
    pub qpn: Qpn,
    /// Transport service.
    pub qp_type: QpType,
    /// Protection domain.
    pub pd: &'a H::Pd,
    /// Completion queue of sends.
    pub send_cq: &'a H::Cq,
    /// Completion queue of receives.
    pub recv_cq: &'a H::Cq,
    /// Shared receive queue, instead of `recv_queue`.
    pub srq: Option<&'a H::Srq>,
    /// Send ring.
    pub send_queue: Box<dyn SendSource>,
    /// Receive ring.
    pub recv_queue: Option<Box<dyn RecvSource>>,
    /// Sizes of the rings, for queries.
    pub caps: QpCaps,
    /// `true` if every send generates a completion, signaled or not.
    pub signal_all: bool,
}

/// An adapter with one port, as used by one device.
pub trait Hca: Send + Sync + 'static {
    /// Protection domain.
    type Pd: Send + Sync + 'static;
    /// Memory region.
    type Mr: MemoryRegion;
    /// Completion queue.
    type Cq: CompletionQueue;
    /// Shared receive queue.
    type Srq: SharedReceiveQueue;
    /// Queue pair.
    type Qp: QueuePair;

    /// Returns the limits of the adapter.
    fn limits(&self) -> HcaLimits;

    /// Returns the current attributes of the port. Must be cheap.
    fn port(&self) -> PortAttributes;

    /// Sets the device's link up or down. While it is down, the port is down and no packet leaves or enters the device
    /// by any route; that is ensured when this returns. Returns `true` if the state changed.
    ///
    /// # Errors
    /// The device has no link of its own, because other devices share it.
    fn set_link(&self, _up: bool) -> Result<bool, VerbsError> {
        Err(VerbsError::Unsupported("a link of the device's own"))
    }

    /// Sets the MTU of the uplink: the largest IP packet, in bytes, that reaches other hosts. `None` restores the
    /// configured MTU. The path MTU of the port follows, for queries from now on. Existing connections keep their path
    /// MTU, and those of their packets that exceed the MTU are lost. Returns `true` if the MTU changed.
    fn set_uplink_mtu(&self, _bytes: Option<u32>) -> bool {
        false
    }

    /// Binds a GID to a table index, replacing the previous one. `vlan` is the IEEE 802.1Q VLAN, 1 to 4094, with which
    /// its packets are tagged and must be tagged. The same GID in another VLAN is another address.
    ///
    /// # Errors
    /// The GID belongs to another device ([`VerbsError::InUse`]) or the index is out of range.
    fn bind_gid_in_vlan(&self, index: u8, gid: Gid, kind: GidType, vlan: Option<u16>) -> Result<(), VerbsError>;

    /// Binds a GID whose packets are untagged.
    ///
    /// # Errors
    /// As for [`Self::bind_gid_in_vlan`].
    fn bind_gid(&self, index: u8, gid: Gid, kind: GidType) -> Result<(), VerbsError> {
        self.bind_gid_in_vlan(index, gid, kind, None)
    }

    /// Removes the GID at a table index. Afterwards nothing is sent from that GID or delivered to it.
    fn unbind_gid(&self, index: u8);

    /// Creates a protection domain.
    ///
    /// # Errors
    /// The maximum number is reached.
    fn create_pd(&self) -> Result<Self::Pd, VerbsError>;

    /// Registers memory.
    ///
    /// # Errors
    /// The maximum number of regions is reached, or the memory cannot be pinned.
    fn register_mr(&self, pd: &Self::Pd, request: MrRequest) -> Result<Self::Mr, VerbsError>;

    /// Creates a completion queue that publishes to `sink`.
    ///
    /// # Errors
    /// The maximum number is reached.
    fn create_cq(&self, sink: Arc<dyn CompletionSink>) -> Result<Self::Cq, VerbsError>;

    /// Creates a shared receive queue.
    ///
    /// # Errors
    /// The maximum number is reached.
    fn create_srq(&self, init: SrqInit<'_, Self>) -> Result<Self::Srq, VerbsError>;

    /// Creates a queue pair in state RESET.
    ///
    /// # Errors
    /// The maximum number is reached, or the QPN is in use.
    fn create_qp(&self, init: QpInit<'_, Self>) -> Result<Self::Qp, VerbsError>;

    /// Returns the memory in bytes that the adapter allocates for such an object until it is destroyed, without page
    /// lists and queues that the device provides. It includes the minimum that the object needs to make progress when
    /// no more memory is available.
    fn bytes_of(&self, object: Object) -> u64;

    /// Returns the adapter's counters in a fixed order. Their names are unique in the process.
    fn counters(&self) -> Vec<Counter>;

    /// Describes the adapter's state: its links, its routes, its timers. The rules of [`QueuePair::inspect`] apply.
    fn inspect(&self) -> Value {
        Value::Null
    }
}

/// Completion queue.
pub trait CompletionQueue: Send + Sync + 'static {
    /// The guest polled its queue and found it empty: a chance to publish completions that wait in the hardware. Does a
    /// bounded amount of work on the calling thread, which holds no view.
    fn notify_poll(&self) {}

    /// The guest requested notification of the next completion and will not poll before it, or its polls are not
    /// reported from now on: completions must be published as they arrive. Does a bounded amount of work on the calling
    /// thread, which holds no view.
    fn notify_arm(&self) {}

    /// Describes the state of the queue. The rules of [`QueuePair::inspect`] apply.
    fn inspect(&self) -> Value {
        Value::Null
    }
}

/// Registered memory region.
pub trait MemoryRegion: Send + Sync + 'static {
    /// Returns the key for local use.
    fn lkey(&self) -> u32;

    /// Returns the key for peers.
    fn rkey(&self) -> u32;

    /// Returns the memory for which the region was created. `None` if it is destroyed, or if the call would have to
    /// wait.
    fn shape(&self) -> Option<MrShape>;

    /// Describes the state of the region. The rules of [`QueuePair::inspect`] apply.
    fn inspect(&self) -> Value {
        Value::Null
    }

    /// Deregisters the region. When this returns, no access through its keys is in progress and none will start.
    fn destroy(&self);
}

/// Shared receive queue.
pub trait SharedReceiveQueue: Send + Sync + 'static {
    /// Arms the limit event, or disarms it with 0.
    fn set_limit(&self, limit: u32);

    /// Returns the armed limit, 0 after it fired.
    fn limit(&self) -> u32;

    /// Notifies the adapter that there may be new receives.
    fn notify_recv(&self);

    /// Describes the state of the queue. The rules of [`QueuePair::inspect`] apply.
    fn inspect(&self) -> Value {
        Value::Null
    }

    /// Destroys the queue. When this returns, the adapter no longer accesses the ring.
    fn destroy(&self);
}

/// Queue pair.
pub trait QueuePair: Send + Sync + 'static {
    /// Returns its number on the wire.
    fn qpn(&self) -> Qpn;

    /// Changes state and attributes. After a change to RESET returns, no more completions of this QP are published and
    /// its rings start over at index 0.
    ///
    /// # Errors
    /// The transition is not allowed ([`pvrdma_verbs_types::qp_state`]) or an attribute is out of range; nothing has
    /// changed then.
    fn modify(&self, attrs: &QpAttrs, mask: QpAttrMask) -> Result<(), VerbsError>;

    /// Returns the current state and attributes.
    fn query(&self) -> QpAttrs;

    /// As [`Self::query`], but returns `None` if it would have to wait.
    fn try_query(&self) -> Option<QpAttrs> {
        Some(self.query())
    }

    /// Notifies the adapter that there may be send requests. Does a bounded amount of work on the calling thread; the
    /// adapter does the rest on other threads.
    fn notify_send(&self);

    /// Notifies the adapter that there may be receives.
    fn notify_recv(&self);

    /// Describes the state of the queue pair: both halves, the path to the peer, timers. `null` if there is nothing to
    /// show.
    ///
    /// It may be called at any time from any thread. It must not wait for a lock that is held while requests are
    /// processed or while guest memory is accessed: parts that are not available immediately are the string `"busy"`.
    /// It reveals no payload and no keys that give access to memory or queue pairs.
    fn inspect(&self) -> Value {
        Value::Null
    }

    /// Returns the progress of its send requests. The rules of [`Self::inspect`] apply. `None` if the QP is busy or the
    /// adapter does not count.
    fn progress(&self) -> Option<SendProgress> {
        None
    }

    /// Destroys the queue pair. When this returns, the adapter no longer accesses its rings or the memory of its
    /// requests, and no more of its completions are published.
    fn destroy(&self);
}
