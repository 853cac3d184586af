//! An adapter: what the objects of one device share. It knows neither its queue pairs nor the ways to their peers.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pvrdma_guest_memory::{DmaSpace, DmaView, MemoryBudget, PageList, PinGuard};
use pvrdma_roce::{EgressMarking, Origin};
use pvrdma_verbs::{DeviceContext, DeviceLog, EventSink, Rules};

use crate::capture::{Captures, Point};
use crate::counters::Counters;
use crate::engine::Engine;
use crate::failures::FailureObserver;
use crate::flows::FlowTable;
use crate::gid::{BoundGid, GidTable};
use crate::mr::MrTables;
use crate::port::kept::PacketBudget;
use crate::share::Share;

/// What the objects of one device share.
pub(crate) struct Adapter {
    /// Order in which region tables of two adapters are locked.
    pub(crate) id: u64,
    pub(crate) name: String,
    /// What the guest or a peer has caused.
    pub(crate) log: Arc<DeviceLog>,
    pub(crate) memory: Arc<DmaSpace>,
    pub(crate) events: Arc<dyn EventSink>,
    pub(crate) engine: Arc<Engine>,
    /// What the device may use.
    pub(crate) share: Arc<Share>,
    pub(crate) captures: Arc<Captures>,
    /// Where the device is watched.
    pub(crate) point: Arc<Point>,
    /// How its packets are marked.
    marking: EgressMarking,
    /// Its addresses and peers.
    pub(crate) rules: Rules,
    /// Its link is up. Changed by the directory alone, with a new generation.
    pub(crate) link_up: AtomicBool,
    pub(crate) mrs: MrTables,
    pub(crate) gids: GidTable,
    /// What the guest and its peers may make this process keep.
    pub(crate) budget: Arc<MemoryBudget>,
    /// The part of it that is for packets of peers.
    pub(crate) packets: Arc<PacketBudget>,
    pub(crate) counters: Counters,
    /// What it moved, by peer.
    pub(crate) flows: Arc<FlowTable>,
    /// Who is told of queue pairs that fail.
    pub(crate) failures: Arc<FailureObserver>,
}

impl fmt::Debug for Adapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Adapter").field("id", &self.id).field("name", &self.name).finish_non_exhaustive()
    }
}

impl Adapter {
    /// The adapter of a device.
    ///
    /// # Errors
    /// The kernel has no random numbers.
    pub(crate) fn new(
        id: u64,
        context: DeviceContext,
        engine: Arc<Engine>,
        share: Arc<Share>,
        captures: Arc<Captures>,
        (flows, failures): (Arc<FlowTable>, Arc<FailureObserver>),
        marking: EgressMarking,
    ) -> io::Result<Self> {
        Ok(Self {
            id,
            name: context.name,
            log: context.log,
            memory: context.memory,
            events: context.events,
            engine,
            share,
            point: captures.point(context.mac),
            captures,
            marking,
            rules: context.rules,
            mrs: MrTables::new(context.random)?,
            link_up: AtomicBool::new(true),
            gids: GidTable::default(),
            packets: PacketBudget::new(&context.budget),
            budget: context.budget,
            counters: Counters::default(),
            flows,
            failures,
        })
    }

    /// Returns `true` if its link is up. To be asked again when the directory has another generation.
    pub(crate) fn is_link_up(&self) -> bool {
        self.link_up.load(Ordering::Acquire)
    }

    /// Returns `true` if the memory of one of two devices is slow, so that it must not be used while that of the other
    /// is held, which waits as long then.
    #[inline]
    pub(crate) fn is_apart_from(&self, peer: &Self) -> bool {
        (self.memory.is_slow() || peer.memory.is_slow()) && self.memory.id() != peer.memory.id()
    }

    /// What stands in the frames that the device sends from a GID.
    pub(crate) fn origin(&self, source: BoundGid) -> Origin {
        let BoundGid { gid, kind, vlan } = source;
        Origin { mac: self.point.mac, gid, kind, vlan, marks: self.marking }
    }

    /// Keeps pages resident as the device's policy says. The refusal is in the log. `view` is of this adapter's memory.
    pub(crate) fn pin(&self, view: &DmaView<'_>, pages: &PageList) -> Option<PinGuard> {
        let refused = |error| self.log.warn(module_path!(), format_args!("{error}"));
        self.memory.pin_pages_of(view, &self.budget, pages).map_err(refused).ok()
    }
}
