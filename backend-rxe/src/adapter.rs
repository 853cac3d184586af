//! An adapter: the state that the objects of one device share. It depends neither on queue pairs nor on paths to peers.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pvrdma_base::DeviceLog;
use pvrdma_guest_memory::{DmaSpace, DmaView, MemoryBudget, PinGuard};
use pvrdma_pages::PageList;
use pvrdma_roce::{EgressMarking, IcrcRule, Origin};
use pvrdma_verbs::{DeviceContext, EventSink, Rules, VerbsError};
use pvrdma_verbs_types::{Gid, GidType};

use crate::capture::{Captures, Point};
use crate::counters::Counters;
use crate::engine::Engine;
use crate::failures::FailureObserver;
use crate::faults::FaultPoint;
use crate::flows::FlowTable;
use crate::gid::{BoundGid, GidTable};
use crate::iwarp::meeting::Meeting;
use crate::mr::MrTables;
use crate::own_thread::OwnThread;
use crate::paused::Paused;
use crate::place::Place;
use crate::port::kept::PacketBudget;
use crate::port::rules::PacketRules;
use crate::share::Share;

/// State that the objects of one device share.
pub(crate) struct Adapter {
    /// Order in which the region tables of two adapters are locked.
    pub(crate) id: u64,
    pub(crate) name: String,
    /// Log for messages that the guest or a peer causes.
    pub(crate) log: Arc<DeviceLog>,
    pub(crate) memory: Arc<DmaSpace>,
    pub(crate) events: Arc<dyn EventSink>,
    pub(crate) engine: Arc<Engine>,
    /// The thread that uses the memory while it is slow.
    pub(crate) own_thread: OwnThread,
    /// Share of the device in common resources.
    pub(crate) share: Arc<Share>,
    pub(crate) captures: Arc<Captures>,
    /// Capture point of the device.
    pub(crate) point: Arc<Point>,
    /// Marking of its packets.
    marking: EgressMarking,
    /// Use of the ICRC by its connections.
    icrc: IcrcRule,
    /// Rules for its addresses and peers.
    pub(crate) rules: Rules,
    /// Set while the link is up. Changed only by the directory, together with its generation.
    pub(crate) link_up: AtomicBool,
    /// Pause state of the adapter. Changed only by the directory, together with its generation.
    pub(crate) paused: Paused,
    pub(crate) mrs: MrTables,
    pub(crate) gids: GidTable,
    /// Budget for memory that the guest and its peers can make this process allocate.
    pub(crate) budget: Arc<MemoryBudget>,
    /// The part of the budget for packets of peers.
    pub(crate) packets: Arc<PacketBudget>,
    pub(crate) counters: Counters,
    /// Traffic of the device, by peer.
    pub(crate) flows: Arc<FlowTable>,
    /// Observer of failed queue pairs.
    pub(crate) failures: Arc<FailureObserver>,
    /// Faults on request.
    pub(crate) faults: Arc<FaultPoint>,
    /// Meeting point of the connections to iWARP peers, if the device has any.
    pub(crate) iwarp: Option<Arc<Meeting>>,
}

impl fmt::Debug for Adapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Adapter").field("id", &self.id).field("name", &self.name).finish_non_exhaustive()
    }
}

impl Adapter {
    /// Creates the adapter of a device.
    ///
    /// # Errors
    /// The kernel cannot provide random numbers, or a descriptor.
    pub(crate) fn new(
        id: u64,
        context: DeviceContext,
        place: &Place,
        engine: Arc<Engine>,
        captures: Arc<Captures>,
        PacketRules { marks: marking, icrc }: PacketRules,
    ) -> io::Result<Self> {
        Ok(Self {
            id,
            name: context.name,
            log: context.log,
            memory: context.memory,
            events: context.events,
            engine,
            own_thread: OwnThread::default(),
            share: Arc::clone(&place.share),
            point: Arc::clone(&place.point),
            captures,
            marking,
            icrc,
            rules: context.rules,
            mrs: MrTables::new(context.random)?,
            link_up: AtomicBool::new(true),
            paused: Paused::default(),
            gids: GidTable::default(),
            packets: PacketBudget::new(&context.budget),
            budget: context.budget,
            counters: Counters::default(),
            flows: Arc::clone(&place.flows),
            failures: Arc::clone(&place.failures),
            faults: Arc::clone(&place.faults),
            iwarp: place.iwarp().map(Meeting::new).transpose()?,
        })
    }

    /// Returns `true` if the link is up. The result is valid until the generation of the directory changes.
    pub(crate) fn is_link_up(&self) -> bool {
        self.link_up.load(Ordering::Acquire)
    }

    /// Returns `true` if a peer is reached by iWARP, unless it is reached by local delivery.
    #[inline]
    pub(crate) fn is_iwarp_peer(&self, peer: Gid) -> bool {
        self.iwarp.as_ref().is_some_and(|iwarp| iwarp.reaches(peer))
    }

    /// Returns `true` if the two devices have separate memory and one of them is slow. The memory of both must not be
    /// held at the same time: an access to slow memory can block, and the other device would then block as well.
    #[inline]
    pub(crate) fn is_apart_from(&self, peer: &Self) -> bool {
        (self.memory.is_slow() || peer.memory.is_slow()) && self.memory.id() != peer.memory.id()
    }

    /// Returns the source fields of frames that the device sends from a GID.
    pub(crate) fn origin(&self, source: BoundGid) -> Origin {
        let BoundGid { gid, kind, vlan } = source;
        Origin { mac: self.point.mac, gid, kind, vlan, marks: self.marking, icrc: self.icrc }
    }

    /// Returns an address with this GID for a peer of any kind: RoCE v2 without a VLAN.
    pub(crate) const fn any_address(&self, gid: Gid) -> BoundGid {
        BoundGid { gid, kind: GidType::RoceV2, vlan: None }
    }

    /// Pins pages as the policy of the device requires, without a view of its memory.
    ///
    /// # Errors
    /// They cannot be pinned; the reason was logged.
    pub(crate) fn pin_alone(&self, pages: &PageList) -> Result<PinGuard, VerbsError> {
        self.memory.pin_pages(&self.budget, pages).map_err(|error| {
            self.log.warn(module_path!(), format_args!("{error}"));
            VerbsError::Exhausted("locked memory")
        })
    }

    /// Pins pages as the policy of the device requires. Logs an error. `view` is a view of this adapter's memory.
    pub(crate) fn pin(&self, view: &DmaView<'_>, pages: &PageList) -> Option<PinGuard> {
        let refused = |error| self.log.warn(module_path!(), format_args!("{error}"));
        self.memory.pin_pages_of(view, &self.budget, pages).map_err(refused).ok()
    }
}
