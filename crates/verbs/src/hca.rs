//! The verbs: what an adapter does for a device.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::VerbsError;
use crate::progress::SendProgress;
use crate::queue::{CompletionSink, EventSink, RecvSource, SendSource};
use crate::rules::Rules;
use pvrdma_base::{Counter, DeviceLog, Random};
use pvrdma_guest_memory::{DmaSpace, MemoryBudget, PAGE_SIZE, PageList};
use pvrdma_verbs_types::{Access, Gid, GidType, MacAddr, Mtu, PortState, QpAttrMask, QpAttrs, QpCaps, QpType, Qpn};

/// What a device brings when it asks a backend for an adapter.
#[derive(Clone)]
pub struct DeviceContext {
    /// Name of the device in logs and configuration.
    pub name: String,
    /// Its Ethernet address, shared with the paired network function.
    pub mac: MacAddr,
    /// The encapsulation its GIDs use.
    pub roce: GidType,
    /// Its guest's memory.
    pub memory: Arc<DmaSpace>,
    /// Where its asynchronous events go.
    pub events: Arc<dyn EventSink>,
    /// Where an adapter says what its guest or its peers have caused.
    pub log: Arc<DeviceLog>,
    /// Where its keys begin.
    pub random: Random,
    /// Its addresses and peers.
    pub rules: Rules,
    /// What its guest and its peers may make this process keep. Objects are charged by the device
    /// ([`Hca::bytes_of`]), everything else by the adapter.
    pub budget: Arc<MemoryBudget>,
}

impl std::fmt::Debug for DeviceContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeviceContext").field("name", &self.name).field("mac", &self.mac).finish_non_exhaustive()
    }
}

/// A source of adapters: one for each device.
pub trait Backend: Send + Sync {
    /// The adapters it makes.
    type Hca: Hca;

    /// Makes an adapter for one device.
    ///
    /// # Errors
    /// The backend cannot serve another device.
    fn attach(&self, context: DeviceContext) -> Result<Self::Hca, VerbsError>;
}

/// Upper limits of an adapter. The device advertises the smaller of these and its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
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
    /// Whether atomics work.
    pub atomics: bool,
    /// Whether fast registration and invalidation work.
    pub memory_management: bool,
}

impl HcaLimits {
    /// The smaller of each.
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

/// The port as it is now.
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

/// An object that is to be made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Object {
    /// A protection domain.
    Pd,
    /// A memory region.
    Mr,
    /// A completion queue.
    Cq,
    /// A shared receive queue of so many requests.
    Srq(u32),
    /// A queue pair of this size.
    Qp(QpCaps),
}

/// What to register.
#[derive(Debug)]
pub enum MrRequest {
    /// Memory of a guest process.
    User {
        /// Virtual address of the first byte; its page offset is that of the first page of `pages`.
        start: u64,
        /// Bytes.
        length: u64,
        /// The pages it spans.
        pages: PageList,
        /// Rights.
        access: Access,
    },
    /// The guest kernel's key for bus addresses: all guest memory, local use only.
    Dma {
        /// Rights.
        access: Access,
    },
    /// A region that work requests fill in later.
    FastRegister {
        /// Most pages it will ever hold.
        max_pages: u32,
    },
}

/// What a memory region covers. Its keys are not shown.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum MrShape {
    /// Memory of a process.
    User {
        /// Virtual address of the first byte.
        start: u64,
        /// Bytes.
        length: u64,
        /// Rights.
        access: Access,
    },
    /// All bus addresses, for the guest's kernel.
    Dma {
        /// Rights.
        access: Access,
    },
    /// A region that work requests fill in.
    FastRegister {
        /// Bytes that it can cover at most.
        max_bytes: u64,
    },
}

impl MrShape {
    /// A region that work requests fill in with so many pages at most.
    pub fn fast_register(max_pages: u32) -> Self {
        Self::FastRegister { max_bytes: u64::from(max_pages).saturating_mul(PAGE_SIZE) }
    }
}

/// How to make a shared receive queue.
#[expect(missing_debug_implementations, reason = "holds a trait object of the device")]
pub struct SrqInit<'a, H: Hca + ?Sized> {
    /// Names the SRQ in events.
    pub cookie: u32,
    /// Its protection domain.
    pub pd: &'a H::Pd,
    /// The ring.
    pub queue: Box<dyn RecvSource>,
    /// Initial limit; 0 is disarmed.
    pub limit: u32,
    /// Size of the ring in requests.
    pub max_wr: u32,
    /// SGEs per request.
    pub max_sge: u32,
}

/// How to make a queue pair.
#[expect(missing_debug_implementations, reason = "holds trait objects of the device")]
pub struct QpInit<'a, H: Hca + ?Sized> {
    /// Names the QP in completions and events.
    pub cookie: u32,
    /// The number it should get. Adapters that choose their own numbers ignore it, except [`Qpn::GSI`].
    pub qpn: Qpn,
    /// Transport service.
    pub qp_type: QpType,
    /// Its protection domain.
    pub pd: &'a H::Pd,
    /// Where completions of sends go.
    pub send_cq: &'a H::Cq,
    /// Where completions of receives go.
    pub recv_cq: &'a H::Cq,
    /// Shared receive queue, instead of `recv_queue`.
    pub srq: Option<&'a H::Srq>,
    /// Send ring.
    pub send_queue: Box<dyn SendSource>,
    /// Receive ring.
    pub recv_queue: Option<Box<dyn RecvSource>>,
    /// Sizes of the rings, for queries.
    pub caps: QpCaps,
    /// Every send completes with an entry, signaled or not.
    pub signal_all: bool,
}

/// One adapter with one port, as one device sees it.
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

    /// What the adapter can hold.
    fn limits(&self) -> HcaLimits;

    /// The port as it is now. Must be cheap.
    fn port(&self) -> PortAttributes;

    /// Takes the device's link up or down. While it is down so is the port, and nothing leaves the device or enters it,
    /// whichever way; when this returns nothing does any more. Returns `true` if that changed anything.
    ///
    /// # Errors
    /// The link is not the device's alone.
    fn set_link(&self, _up: bool) -> Result<bool, VerbsError> {
        Err(VerbsError::Unsupported("a link of the device's own"))
    }

    /// From now on the way to other hosts carries IP packets of so many bytes only, or what the port was made for. The
    /// path MTU of the port follows, for what is asked of it from here on: connections that there are stay as they
    /// are, and their packets that are too long are lost. Returns `true` if it changed.
    fn set_carried(&self, _bytes: Option<u32>) -> bool {
        false
    }

    /// Binds a GID to a table index, replacing what was there. `vlan` is the IEEE 802.1Q VLAN, 1 to 4094, whose tag its
    /// packets carry and have to carry. The same GID in another VLAN is another address.
    ///
    /// # Errors
    /// The GID belongs to another device ([`VerbsError::InUse`]) or the index is out of range.
    fn bind_gid_in_vlan(&self, index: u8, gid: Gid, kind: GidType, vlan: Option<u16>) -> Result<(), VerbsError>;

    /// Binds a GID whose packets carry no tag.
    ///
    /// # Errors
    /// As for [`Self::bind_gid_in_vlan`].
    fn bind_gid(&self, index: u8, gid: Gid, kind: GidType) -> Result<(), VerbsError> {
        self.bind_gid_in_vlan(index, gid, kind, None)
    }

    /// Empties a table index. Nothing is sent from or delivered to that GID afterwards.
    fn unbind_gid(&self, index: u8);

    /// Makes a protection domain.
    ///
    /// # Errors
    /// There are too many.
    fn create_pd(&self) -> Result<Self::Pd, VerbsError>;

    /// Registers memory.
    ///
    /// # Errors
    /// There are too many regions, or the memory cannot be pinned.
    fn register_mr(&self, pd: &Self::Pd, request: MrRequest) -> Result<Self::Mr, VerbsError>;

    /// Makes a completion queue that publishes to `sink`.
    ///
    /// # Errors
    /// There are too many.
    fn create_cq(&self, sink: Arc<dyn CompletionSink>) -> Result<Self::Cq, VerbsError>;

    /// Makes a shared receive queue.
    ///
    /// # Errors
    /// There are too many.
    fn create_srq(&self, init: SrqInit<'_, Self>) -> Result<Self::Srq, VerbsError>;

    /// Makes a queue pair in state RESET.
    ///
    /// # Errors
    /// There are too many, or the QPN is taken.
    fn create_qp(&self, init: QpInit<'_, Self>) -> Result<Self::Qp, VerbsError>;

    /// Bytes of this process that the adapter keeps for such an object until it is destroyed, without page lists and
    /// queues that the device brings: with all that it needs to go on when nothing more is to be had.
    fn bytes_of(&self, object: Object) -> u64;

    /// What the adapter counts, in a fixed order. The names are unique in the process.
    fn counters(&self) -> Vec<Counter>;

    /// What the adapter shows of itself: its links, its routes, its timers. [`QueuePair::inspect`] has the rules.
    fn inspect(&self) -> Value {
        Value::Null
    }
}

/// A completion queue.
pub trait CompletionQueue: Send + Sync + 'static {
    /// The guest looked at its queue and found nothing: a chance to publish what waits in the hardware. Runs a bounded
    /// amount of work on the calling thread, which holds no view.
    fn notify_poll(&self) {}

    /// The guest asked to be told of the next completion, and will not look before, or nobody hears from now on when it
    /// looks: completions are published as they come. Runs a bounded amount of work on the calling thread, which holds
    /// no view.
    fn notify_arm(&self) {}

    /// What the adapter shows of the queue. [`QueuePair::inspect`] has the rules.
    fn inspect(&self) -> Value {
        Value::Null
    }
}

/// A registered memory region.
pub trait MemoryRegion: Send + Sync + 'static {
    /// Key for local use.
    fn lkey(&self) -> u32;

    /// Key for peers.
    fn rkey(&self) -> u32;

    /// What it was made for. `None` once it is destroyed, or if that would have to wait.
    fn shape(&self) -> Option<MrShape>;

    /// What the adapter shows of the region. [`QueuePair::inspect`] has the rules.
    fn inspect(&self) -> Value {
        Value::Null
    }

    /// Ends the registration. When this returns no access through the keys is in progress and none will start.
    fn destroy(&self);
}

/// A shared receive queue.
pub trait SharedReceiveQueue: Send + Sync + 'static {
    /// Arms the limit event, or disarms it with 0.
    fn set_limit(&self, limit: u32);

    /// The armed limit, 0 after it fired.
    fn limit(&self) -> u32;

    /// There may be new receives.
    fn notify_recv(&self);

    /// What the adapter shows of the queue. [`QueuePair::inspect`] has the rules.
    fn inspect(&self) -> Value {
        Value::Null
    }

    /// Ends it. When this returns the ring is no longer touched.
    fn destroy(&self);
}

/// A queue pair.
pub trait QueuePair: Send + Sync + 'static {
    /// Its number on the wire.
    fn qpn(&self) -> Qpn;

    /// Changes state and attributes. After a return from a change to RESET no completion of this QP will be published
    /// and its rings start over at index 0.
    ///
    /// # Errors
    /// The transition is not allowed ([`crate::qp_state`]) or an attribute is out of range; nothing has changed then.
    fn modify(&self, attrs: &QpAttrs, mask: QpAttrMask) -> Result<(), VerbsError>;

    /// True state and attributes.
    fn query(&self) -> QpAttrs;

    /// As [`Self::query`], but `None` if that would have to wait.
    fn try_query(&self) -> Option<QpAttrs> {
        Some(self.query())
    }

    /// There may be send requests. Runs a bounded amount of work on the calling thread; more is done elsewhere.
    fn notify_send(&self);

    /// There may be receives.
    fn notify_recv(&self);

    /// What the adapter shows of the queue pair: both halves, the path to the peer, timers. `null` if there is nothing.
    ///
    /// It may be called at any time from any thread. It waits for no lock that is held while requests are processed or
    /// while guest memory is waited for: what cannot be had at once is the string `"busy"`. It shows no payload and no
    /// keys that give access to memory or queue pairs.
    fn inspect(&self) -> Value {
        Value::Null
    }

    /// How far its send requests have come. The rules of [`Self::inspect`] hold. `None`: it is busy, or nobody counts.
    fn progress(&self) -> Option<SendProgress> {
        None
    }

    /// Ends it. When this returns its rings and the memory of its requests are no longer touched and no completion of
    /// it will be published.
    fn destroy(&self);
}
