//! Reading of a saved state.

use std::collections::HashSet;
use std::hash::Hash;
use std::io::Read;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use pvrdma_guest_memory::{Charge, Kept};
use pvrdma_pages::{PageList, PageListBuilder};
use pvrdma_saved_state::{DeviceKind, RawRecord, Reader, Record, pvrdma as saved};
use pvrdma_verbs::SaveHca;

use super::convert;
use super::error::RestoreError;
use crate::abi::cmd::{REQUEST_SIZE, RESPONSE_SIZE};
use crate::abi::ring::{Eqe, MAX_PAGES, eqe};
use crate::control::{Connections, Control, Restored};
use crate::core::Core;
use crate::device::PvrdmaDevice;
use crate::dsr::{Session, is_aligned, is_ring_size};
use crate::events::{Cqne, EventRings, SavedEventRing, SavedEventRings};
use crate::intr::SavedInterrupts;
use crate::objects::{GSI_HANDLE, TablePosition};

/// Maximum age of a state whose connections continue. Their peers give up sooner than that.
const LIVE: Duration = Duration::from_secs(60);

/// Number of handle tables.
const TABLES: usize = 6;

/// Number of the port in events.
const PORT: u32 = 1;

/// Reads a state into a device in power-on state, whose adapter is paused. After an error, the device must be reset.
pub(super) fn device<H: SaveHca>(
    device: &PvrdmaDevice<H>,
    control: &mut Control,
    from: &mut dyn Read,
    connections: Connections,
) -> Result<(), RestoreError> {
    let core = device.core();
    let mut reader = Reader::new(from, core.budget.limit())?;
    if reader.header().device != DeviceKind::Pvrdma {
        return Err(RestoreError::Differs("kind"));
    }
    if reader.header().mac != core.mac.0 {
        return Err(RestoreError::Differs("MAC address"));
    }
    let moves = reader.header().live && is_recent(reader.header().time);
    let (session, interrupts) = restore_registers(device, control, reader.expect()?, connections)?;
    let mut restorer = Restorer::new(core, session.filter(|&(_, active)| active).map(|(session, _)| session));
    while let Some(record) = reader.next()? {
        restorer.record(record)?;
    }
    let (event_rings, rings) = restorer.end()?;
    match connections {
        Connections::Keep => {}
        Connections::MoveOrEnd if moves => core.hca.move_connections().map_err(RestoreError::Adapter)?,
        Connections::MoveOrEnd => {
            let ended = core.hca.end_connections();
            if ended > 0 {
                core.stats.counts.connections_not_restored.add(ended as u64);
                core.log.warn(
                    module_path!(),
                    format_args!("{ended} connections of a snapshot end: their peers have gone on without the VM"),
                );
            }
        }
    }
    let session = match (session, event_rings) {
        (Some((session, active)), Some(rings)) => Some((session, rings, active)),
        (None, None) => None,
        _ => return Err(RestoreError::Misplaced("an event ring")),
    };
    control.restored = Some(Box::new(Restored { session, interrupts, rings }));
    Ok(())
}

/// Returns `true` if a state was saved less than a minute before or after now, as the clocks of two hosts tell.
fn is_recent(millis: u64) -> bool {
    let saved = SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(millis));
    saved.is_some_and(|saved| match SystemTime::now().duration_since(saved) {
        Ok(age) => age <= LIVE,
        Err(early) => early.duration() <= LIVE,
    })
}

/// Restores registers, configuration space and the limits in force. Returns the session, its active state, and the
/// interrupts.
fn restore_registers<H: SaveHca>(
    device: &PvrdmaDevice<H>,
    control: &mut Control,
    message: saved::Device,
    connections: Connections,
) -> Result<(Option<(Session, bool)>, SavedInterrupts), RestoreError> {
    let core = device.core();
    let saved::Device {
        config_space,
        version,
        roce,
        adapter,
        dsr_low,
        err,
        mac_low,
        mac_high,
        interrupt_mask: mask,
        interrupt_cause: cause,
        phase,
        session,
        limits,
    } = message;
    if version > core.config.version {
        return Err(RestoreError::Differs("interface version"));
    }
    if convert::number::<saved::Encapsulation>("GID type", roce)? != convert::save_encapsulation(core.config.roce) {
        return Err(RestoreError::Differs("GID type"));
    }
    if adapter != H::FORMAT {
        return Err(RestoreError::Differs("adapter"));
    }
    let limits = limits.ok_or(RestoreError::Misplaced("the list of limits"))?;
    let limits = convert::restore_limits(&limits, core.wanted_limits().max_memory)?;
    core.restore_offer(limits).map_err(RestoreError::Limits)?;
    // Within one daemon, the limits in force may exceed the configured ones, which may have been lowered since the
    // driver started.
    if connections == Connections::MoveOrEnd {
        let here = core.configured_limits().map_err(RestoreError::Limits)?;
        if let Some((limit, saved, here)) = limits.first_above(here) {
            return Err(RestoreError::AboveConfigured { limit, saved, here });
        }
    }
    let switches = device.load_config_space(&config_space).ok_or(RestoreError::Differs("configuration space"))?;
    let phase = convert::number::<saved::Phase>("phase", phase)?;
    let session = session.map(|session| restore_session(&session, version)).transpose()?;
    // A handshake reads guest memory, and the end of bus mastering ends the session.
    if session.is_some() != (phase != saved::Phase::Reset) || session.is_some() && !switches.bus_master {
        return Err(RestoreError::Invalid { what: "phase", value: phase as u64 });
    }
    (control.dsr_low, control.err, control.mac) = (dsr_low, err, [mac_low, mac_high]);
    Ok((session.map(|session| (session, phase == saved::Phase::Active)), SavedInterrupts { mask, cause }))
}

fn restore_session(session: &saved::Session, device_version: u32) -> Result<Session, RestoreError> {
    let &saved::Session { command_slot, response_slot, uar_pfn, version, shared_region } = session;
    let invalid = |what, value| Err(RestoreError::Invalid { what, value });
    for (slot, size) in [(command_slot, REQUEST_SIZE), (response_slot, RESPONSE_SIZE)] {
        if !is_aligned(slot) || slot.checked_add(size as u64).is_none() {
            return invalid("address of a slot", slot);
        }
    }
    if version > device_version {
        return invalid("interface version", version.into());
    }
    // `shared_region` is not checked here, because only a recovery uses it, and checks it then.
    Ok(Session { shared_region, command_slot, response_slot, uar_pfn, version })
}

/// An event ring that was read.
struct ReadRing<E> {
    saved: SavedEventRing<E>,
    /// The events that wait: each waits at most once.
    seen: HashSet<E>,
}

impl<E: Copy + Eq + Hash> ReadRing<E> {
    fn new(saved: SavedEventRing<E>) -> Self {
        Self { saved, seen: HashSet::new() }
    }

    /// Adds events that wait. `event` returns an event with this kind and subject, if there can be one.
    fn wait(
        &mut self,
        events: impl Iterator<Item = (Option<u32>, u32)>,
        event: impl Fn(Option<u32>, u32) -> Option<E>,
    ) -> Result<(), RestoreError> {
        for (kind, subject) in events {
            let event = event(kind, subject).filter(|&event| self.seen.insert(event));
            let event = event.ok_or(RestoreError::Invalid { what: "event", value: subject.into() })?;
            self.saved.waiting.push(event);
        }
        Ok(())
    }
}

/// Restores objects, record by record.
pub(super) struct Restorer<'a, H: SaveHca> {
    pub(super) core: &'a Core<H>,
    /// The session, if commands are served.
    pub(super) session: Option<Session>,
    /// Pages of the next object.
    pages: PageListBuilder,
    /// The adapter's part of the next object.
    part: Vec<u8>,
    /// Charges for both.
    charges: Vec<Charge>,
    asynchronous: Option<ReadRing<Eqe>>,
    notifications: Option<ReadRing<Cqne>>,
    has_tables: bool,
    /// Kinds of the handle tables so far.
    tables: Vec<saved::ObjectKind>,
    /// Pages of all rings so far. At most as many as the rings themselves hold, and only until the restore is finished.
    pub(super) rings: Vec<PageList>,
}

impl<'a, H: SaveHca> Restorer<'a, H> {
    fn new(core: &'a Core<H>, session: Option<Session>) -> Self {
        Self {
            core,
            session,
            pages: PageListBuilder::default(),
            part: Vec::new(),
            charges: Vec::new(),
            asynchronous: None,
            notifications: None,
            has_tables: false,
            tables: Vec::new(),
            rings: Vec::new(),
        }
    }

    fn record(&mut self, record: RawRecord<'_>) -> Result<(), RestoreError> {
        match record.kind {
            saved::Pages::KIND => self.add_pages(&record.decode()?),
            saved::AdapterPart::KIND => self.add_part(&record.decode()?),
            saved::EventRing::KIND => self.event_ring(&record.decode()?),
            saved::WaitingEvents::KIND => self.waiting_events(record.decode()?),
            saved::Table::KIND => self.table(&record.decode()?),
            saved::AdapterTables::KIND => {
                let saved::AdapterTables {} = record.decode()?;
                let part = self.take_part();
                self.has_tables = true;
                self.core.hca.restore_tables(&part).map_err(RestoreError::Adapter)
            }
            saved::Context::KIND => self.context(&record.decode()?),
            saved::Pd::KIND => self.pd(&record.decode()?),
            saved::Cq::KIND => self.cq(&record.decode()?),
            saved::Srq::KIND => self.srq(record.decode()?),
            saved::Mr::KIND => self.mr(&record.decode()?),
            saved::Qp::KIND => self.qp(record.decode()?),
            saved::Gid::KIND => self.gid(record.decode()?),
            saved::Device::KIND => Err(RestoreError::Misplaced("a second device")),
            // A record of a later release, or of another function.
            _ => Ok(()),
        }?;
        let is_part_of_next = matches!(record.kind, saved::Pages::KIND | saved::AdapterPart::KIND);
        if !is_part_of_next && (self.pages.pages() > 0 || !self.part.is_empty()) {
            return Err(RestoreError::Misplaced("the object of a list of pages"));
        }
        Ok(())
    }

    /// Ends the restore of objects. Returns the event rings, and the pages of all rings.
    fn end(self) -> Result<(Option<EventRings>, Vec<PageList>), RestoreError> {
        if self.pages.pages() > 0 || !self.part.is_empty() {
            return Err(RestoreError::Misplaced("the object of a list of pages"));
        }
        if !self.has_tables {
            return Err(RestoreError::Misplaced("the state of the adapter"));
        }
        if self.tables.len() != TABLES {
            return Err(RestoreError::Misplaced("a handle table"));
        }
        let (asynchronous, notifications) = match (self.asynchronous, self.notifications) {
            (None, None) => return Ok((None, self.rings)),
            (Some(asynchronous), Some(notifications)) => (asynchronous.saved, notifications.saved),
            _ => return Err(RestoreError::Misplaced("an event ring")),
        };
        let saved = SavedEventRings { asynchronous, notifications };
        let rings = EventRings::restore(saved, Arc::clone(&self.core.interrupts));
        Ok((Some(rings.map_err(|error| RestoreError::EventRings(error.into()))?), self.rings))
    }

    /// Returns an asynchronous event, if there can be such an event.
    fn event(core: &Core<H>, kind: u32, info: u32) -> Option<Eqe> {
        let objects = &core.objects;
        let can_be = match eqe::subject(kind)? {
            eqe::Subject::Cq => objects.cqs.has_handle(info),
            // The handle of the GSI QP is below those that the table assigns.
            eqe::Subject::Qp => objects.qps.has_handle(info) || info == GSI_HANDLE,
            eqe::Subject::Srq => objects.srqs.has_handle(info),
            eqe::Subject::Port => info == PORT,
        };
        can_be.then_some(Eqe { kind, info })
    }

    fn charge(&mut self, bytes: usize) -> Result<(), RestoreError> {
        self.charges.push(self.core.budget.charge(Kept::Objects, bytes as u64)?);
        Ok(())
    }

    fn add_pages(&mut self, message: &saved::Pages) -> Result<(), RestoreError> {
        let saved::Pages { addresses, counts } = message;
        if addresses.len() != counts.len() {
            return Err(RestoreError::Invalid { what: "list of pages", value: counts.len() as u64 });
        }
        let before = self.pages.heap_bytes();
        for (&address, &count) in addresses.iter().zip(counts) {
            let invalid = RestoreError::Invalid { what: "run of pages", value: address };
            if self.pages.push_run(address, count).is_err() || self.pages.pages() > MAX_PAGES {
                return Err(invalid);
            }
        }
        self.charge(self.pages.heap_bytes().saturating_sub(before))
    }

    fn add_part(&mut self, message: &saved::AdapterPart) -> Result<(), RestoreError> {
        let saved::AdapterPart { bytes } = message;
        self.charge(bytes.len())?;
        self.part.extend_from_slice(bytes);
        Ok(())
    }

    /// Takes the pages of an object.
    pub(super) fn take_pages(&mut self) -> PageList {
        self.charges.clear();
        std::mem::take(&mut self.pages).finish()
    }

    /// Takes the adapter's part of an object.
    pub(super) fn take_part(&mut self) -> Vec<u8> {
        self.charges.clear();
        std::mem::take(&mut self.part)
    }

    fn event_ring(&mut self, message: &saved::EventRing) -> Result<(), RestoreError> {
        let &saved::EventRing { tail } = message;
        if self.notifications.is_some() {
            return Err(RestoreError::Misplaced("an event ring"));
        }
        let pages = self.take_pages();
        if tail.is_some() && !is_ring_size(pages.pages()) {
            let (what, value) = ("number of pages of an event ring", pages.pages().into());
            return Err(RestoreError::Invalid { what, value });
        }
        self.rings.push(pages.clone());
        if self.asynchronous.is_none() {
            self.asynchronous = Some(ReadRing::new(SavedEventRing { pages, tail, waiting: Vec::new() }));
        } else {
            self.notifications = Some(ReadRing::new(SavedEventRing { pages, tail, waiting: Vec::new() }));
        }
        Ok(())
    }

    fn waiting_events(&mut self, message: saved::WaitingEvents) -> Result<(), RestoreError> {
        let saved::WaitingEvents { kinds, subjects } = message;
        if !kinds.is_empty() && kinds.len() != subjects.len() {
            return Err(RestoreError::Invalid { what: "list of events", value: kinds.len() as u64 });
        }
        let kinds = kinds.into_iter().map(Some).chain(std::iter::repeat(None));
        let (core, events) = (self.core, kinds.zip(subjects));
        match (&mut self.asynchronous, &mut self.notifications) {
            (_, Some(ring)) => ring.wait(events, |kind, subject| {
                (kind.is_none() && core.objects.cqs.has_handle(subject)).then_some(Cqne(subject))
            }),
            (Some(ring), None) => ring.wait(events, |kind, subject| Self::event(core, kind?, subject)),
            (None, None) => Err(RestoreError::Misplaced("an event ring")),
        }
    }

    fn table(&mut self, message: &saved::Table) -> Result<(), RestoreError> {
        let &saved::Table { kind, begin, next, rounds } = message;
        let (objects, position) = (&self.core.objects, TablePosition { begin, next, rounds });
        let kind = convert::number::<saved::ObjectKind>("kind of a table", kind)?;
        if self.tables.contains(&kind) {
            return Err(RestoreError::Misplaced("a second handle table"));
        }
        self.tables.push(kind);
        match kind {
            saved::ObjectKind::Context => objects.contexts.set_position(position),
            saved::ObjectKind::Pd => objects.pds.set_position(position),
            saved::ObjectKind::Mr => objects.mrs.set_position(position),
            saved::ObjectKind::Cq => objects.cqs.set_position(position),
            saved::ObjectKind::Srq => objects.srqs.set_position(position),
            saved::ObjectKind::Qp => objects.qps.set_position(position),
            saved::ObjectKind::None => return Err(RestoreError::Invalid { what: "kind of a table", value: 0 }),
        }
        Ok(())
    }
}
