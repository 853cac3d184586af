//! Writing of a saved state.

use std::io::Write;
use std::sync::Arc;
use std::time::SystemTime;

use pvrdma_pages::{PageList, PageListBuilder};
use pvrdma_pci_function::{CONFIG_SIZE, ConfigSpace};
use pvrdma_saved_state::{DeviceKind, Header, Writer, pvrdma as saved};
use pvrdma_verbs::{MrRequest, QueuePair, RingPosition, SaveHca, SavedMr, SavedQp, SavedRing, SavedSrq, VerbsError};
use pvrdma_verbs_types::QpCaps;

use super::convert;
use super::error::SaveError;
use crate::abi::ring::Eqe;
use crate::control::{Control, State};
use crate::core::Core;
use crate::datapath::SavedCqRing;
use crate::dsr::Session;
use crate::events::{Cqne, SavedEventRing, SavedEventRings};
use crate::intr::SavedInterrupts;
use crate::objects::{Context, Cq, GidInspect, HandleTable, Mr, Objects, Pd, Qp, Srq, TablePosition};

/// Maximum number of runs in a record of pages: at most 15 bytes each.
const RUNS: usize = 4000;
/// Maximum number of bytes in a record of the adapter's part.
const PART: usize = 60_000;
/// Maximum number of events in a record: at most 10 bytes each.
const EVENTS: usize = 6000;

/// Writes the state of a paused device.
pub(super) fn device<H: SaveHca>(
    core: &Core<H>,
    control: &Control,
    pci: &ConfigSpace,
    to: &mut dyn Write,
) -> Result<(), SaveError> {
    // Not saved: the configuration, which the destination has; memory, which is the VMM's; state that follows from the
    // phase and from configuration space; doorbells, because resuming looks at all queues; counters.
    let Core {
        config,
        offer: _,
        wanted: _,
        memory,
        interrupts,
        hub,
        hca,
        objects,
        uar: _,
        pending_doorbells: _,
        watch: _,
        gate: _,
        paused: _,
        stats: _,
        budget,
        mac,
        log: _,
    } = core;
    let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let time = u64::try_from(since_1970.as_millis()).unwrap_or(u64::MAX);
    // A VMM that logs written pages copies memory beside a running guest: it moves the VM.
    let live = memory.has_dirty_log();
    let header = Header { name: config.name.clone(), time, live, ..Header::new(DeviceKind::Pvrdma, mac.0) };
    let mut writer = Writer::new(to, &header, budget.limit())?;
    let rings = match &control.state {
        State::Reset => None,
        State::Ready(_, rings) => Some(rings.save()),
        State::Active(_) => hub.save(),
    };
    writer.write(&registers(core, interrupts.save(), control, pci)?)?;
    if let Some(SavedEventRings { asynchronous, notifications }) = rings {
        event_ring(&mut writer, asynchronous, |Eqe { kind, info }| (Some(kind), info))?;
        event_ring(&mut writer, notifications, |Cqne(info)| (None, info))?;
    }
    part(&mut writer, &hca.save_tables()?)?;
    writer.write(&saved::AdapterTables {})?;
    Saver { writer: &mut writer, hca }.objects(objects)?;
    Ok(writer.finish()?)
}

/// Returns the message of the registers and of configuration space.
fn registers<H: SaveHca>(
    core: &Core<H>,
    interrupts: SavedInterrupts,
    control: &Control,
    pci: &ConfigSpace,
) -> Result<saved::Device, SaveError> {
    let Control { state, dsr_low, err, mac: [mac_low, mac_high], restored, twins: _, fails: _ } = control;
    if restored.is_some() {
        return Err(SaveError::Unfinished);
    }
    let mut config_space = vec![0; CONFIG_SIZE];
    pci.read(0, &mut config_space, false);
    let SavedInterrupts { mask: interrupt_mask, cause: interrupt_cause } = interrupts;
    let (phase, session) = match state {
        State::Reset => (saved::Phase::Reset, None),
        State::Ready(session, _) => (saved::Phase::Handshake, Some(session)),
        State::Active(session) => (saved::Phase::Active, Some(session)),
    };
    Ok(saved::Device {
        config_space,
        version: core.config.version,
        roce: convert::save_encapsulation(core.config.roce).into(),
        adapter: H::FORMAT.to_owned(),
        dsr_low: *dsr_low,
        err: *err,
        mac_low: *mac_low,
        mac_high: *mac_high,
        interrupt_mask,
        interrupt_cause,
        phase: phase.into(),
        session: session.map(session_message),
        limits: Some(convert::save_limits(&core.limits())),
    })
}

const fn session_message(session: &Session) -> saved::Session {
    let &Session { shared_region, command_slot, response_slot, uar_pfn, version } = session;
    saved::Session { command_slot, response_slot, uar_pfn, version, shared_region }
}

/// Writes a list of pages.
fn pages(writer: &mut Writer<'_>, list: &PageList) -> Result<(), SaveError> {
    for extents in list.extents().chunks(RUNS) {
        let addresses = extents.iter().map(|extent| extent.iova).collect();
        writer.write(&saved::Pages { addresses, counts: extents.iter().map(|extent| extent.pages()).collect() })?;
    }
    Ok(())
}

/// Writes a part of the adapter.
fn part(writer: &mut Writer<'_>, bytes: &[u8]) -> Result<(), SaveError> {
    for bytes in bytes.chunks(PART) {
        writer.write(&saved::AdapterPart { bytes: bytes.to_vec() })?;
    }
    Ok(())
}

/// Writes an event ring. `fields` returns the kind of an event, if its ring has several, and its subject.
fn event_ring<E: Copy>(
    writer: &mut Writer<'_>,
    ring: SavedEventRing<E>,
    fields: impl Fn(E) -> (Option<u32>, u32),
) -> Result<(), SaveError> {
    let SavedEventRing { pages: list, tail, waiting } = ring;
    pages(writer, &list)?;
    writer.write(&saved::EventRing { tail })?;
    for events in waiting.chunks(EVENTS) {
        let kinds = events.iter().filter_map(|&event| fields(event).0).collect();
        writer
            .write(&saved::WaitingEvents { kinds, subjects: events.iter().map(|&event| fields(event).1).collect() })?;
    }
    Ok(())
}

/// Writes a handle table and its objects.
fn table<T>(
    writer: &mut Writer<'_>,
    kind: saved::ObjectKind,
    table: &HandleTable<T>,
    mut object: impl FnMut(&mut Writer<'_>, u32, &T) -> Result<(), SaveError>,
) -> Result<(), SaveError> {
    let TablePosition { begin, next, rounds } = table.position();
    writer.write(&saved::Table { kind: kind.into(), begin, next, rounds })?;
    table.all().iter().try_for_each(|(handle, it)| object(writer, *handle, it))
}

/// Writes objects.
struct Saver<'a, 'w, H> {
    writer: &'a mut Writer<'w>,
    hca: &'a H,
}

impl<H: SaveHca> Saver<'_, '_, H> {
    /// Writes all objects, each after those that it names.
    fn objects(self, objects: &Objects<H>) -> Result<(), SaveError> {
        let Self { writer, hca } = self;
        let Objects { contexts, pds, mrs, cqs, srqs, qps, gids } = objects;
        table(writer, saved::ObjectKind::Context, contexts, context)?;
        table(writer, saved::ObjectKind::Pd, pds, pd)?;
        // Armings on a mapped page do not reach the device. The page tells, not the queue: the pause may have postponed
        // the inference for a queue whose page is mapped.
        let unheard = |owner| contexts.get(owner).is_some_and(|context| context.is_mapped());
        table(writer, saved::ObjectKind::Cq, cqs, |writer, handle, it| cq(writer, unheard(it.owner), handle, it))?;
        table(writer, saved::ObjectKind::Srq, srqs, |writer, handle, it| srq(writer, hca, handle, it))?;
        table(writer, saved::ObjectKind::Mr, mrs, |writer, handle, it| mr(writer, hca, handle, it))?;
        table(writer, saved::ObjectKind::Qp, qps, |writer, handle, it| qp(writer, (hca, objects), handle, it))?;
        for GidInspect { index, gid, kind: _, vlan } in gids.lock().entries() {
            let (index, gid, vlan) = (index.into(), gid.0.to_vec(), vlan.unwrap_or(0).into());
            writer.write(&saved::Gid { index, gid, vlan })?;
        }
        Ok(())
    }
}

fn context(writer: &mut Writer<'_>, handle: u32, it: &Context) -> Result<(), SaveError> {
    // The next owner of the pages knows which of them are mapped. Rings that are watched need no state, because all
    // rings are looked at when the device resumes.
    Ok(writer.write(&saved::Context { handle, uar_page: it.uar_page })?)
}

fn pd<H: SaveHca>(writer: &mut Writer<'_>, _handle: u32, it: &Pd<H>) -> Result<(), SaveError> {
    let &Pd { handle, owner, verbs: _, _charge: _ } = it;
    Ok(writer.write(&saved::Pd { handle, owner })?)
}

fn cq<H: SaveHca>(writer: &mut Writer<'_>, unheard: bool, handle: u32, it: &Cq<H>) -> Result<(), SaveError> {
    let Cq { owner, ring, verbs: _, _charge: _ } = it;
    // The pages are those of one list, so a list accepts them.
    let saved = ring.save(unheard).ok_or(VerbsError::Invalid("ring"))?;
    let SavedCqRing { entries, pages: list, tail, armed, unheard } = saved;
    pages(writer, &list)?;
    let armed = convert::save_armed(armed).into();
    Ok(writer.write(&saved::Cq {
        handle,
        owner: *owner,
        entries,
        tail,
        armed,
        unheard: unheard.map(convert::save_unheard),
    })?)
}

/// Returns the pages of an object whose page with the ring state is at this address.
fn with_state_page(state_page: u64, rings: &[&PageList]) -> Result<PageList, SaveError> {
    let mut list = PageListBuilder::default();
    let appended = list.push(state_page).and_then(|()| rings.iter().try_for_each(|ring| list.append(ring)));
    // The pages are those of one list, so a list accepts them.
    appended.map_err(|_| VerbsError::Invalid("ring"))?;
    Ok(list.finish())
}

fn srq<H: SaveHca>(writer: &mut Writer<'_>, hca: &H, handle: u32, it: &Srq<H>) -> Result<(), SaveError> {
    let Srq { handle: _, pd, verbs, words, progress: _, max_wr, max_sge, pending_doorbells: _, _charge: _ } = it;
    let SavedSrq { ring, limit, adapter } = hca.save_srq(verbs)?;
    let SavedRing { pages: elements, position } = ring;
    pages(writer, &with_state_page(words.state_page(), &[&elements])?)?;
    part(writer, &adapter)?;
    let ring = Some(convert::save_position(position));
    Ok(writer.write(&saved::Srq { handle, pd: pd.handle, max_wr: *max_wr, max_sge: *max_sge, limit, ring })?)
}

fn mr<H: SaveHca>(writer: &mut Writer<'_>, hca: &H, handle: u32, it: &Mr<H>) -> Result<(), SaveError> {
    let Mr { pd, verbs, _charge: _ } = it;
    let SavedMr { request, adapter } = hca.save_mr(verbs)?;
    let mut message = saved::Mr { handle, pd: pd.handle, ..saved::Mr::default() };
    match request {
        MrRequest::User { start, length, pages: list, access } => {
            pages(writer, &list)?;
            message.set_kind(saved::MrKind::User);
            (message.start, message.length, message.access) = (start, length, access.bits());
        }
        MrRequest::Dma { access } => {
            message.set_kind(saved::MrKind::Dma);
            message.access = access.bits();
        }
        MrRequest::FastRegister { max_pages } => {
            message.set_kind(saved::MrKind::FastRegister);
            message.max_pages = max_pages;
        }
    }
    part(writer, &adapter)?;
    Ok(writer.write(&message)?)
}

/// Returns the handle of an object that a QP uses. `None`: the guest has destroyed the object.
fn handle_of<T>(table: &HandleTable<T>, handle: u32, object: &Arc<T>) -> Option<u32> {
    table.get(handle).filter(|other| Arc::ptr_eq(other, object)).map(|_| handle)
}

fn qp<H: SaveHca>(
    writer: &mut Writer<'_>,
    (hca, objects): (&H, &Objects<H>),
    handle: u32,
    it: &Qp<H>,
) -> Result<(), SaveError> {
    let Qp {
        qp_type,
        pd,
        send_cq,
        recv_cq,
        srq,
        verbs,
        state_page,
        send_progress: _,
        recv_progress: _,
        caps: QpCaps { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge },
        pending_doorbells: _,
        _charge: _,
    } = it;
    let SavedQp { send, recv, signal_all, adapter } = hca.save_qp(verbs)?;
    let none = || SavedRing { pages: PageList::default(), position: RingPosition::default() };
    let (has_recv, recv) = (recv.is_some(), recv.unwrap_or_else(none));
    pages(writer, &with_state_page(*state_page, &[&send.pages, &recv.pages])?)?;
    part(writer, &adapter)?;
    Ok(writer.write(&saved::Qp {
        handle,
        qpn: verbs.qpn().get(),
        qp_type: convert::save_qp_type(*qp_type).into(),
        pd: pd.handle,
        send_cq: handle_of(&objects.cqs, send_cq.ring.handle(), send_cq),
        recv_cq: handle_of(&objects.cqs, recv_cq.ring.handle(), recv_cq),
        has_srq: srq.is_some(),
        srq: srq.as_ref().and_then(|srq| handle_of(&objects.srqs, srq.handle, srq)),
        max_send_wr: *max_send_wr,
        max_recv_wr: *max_recv_wr,
        max_send_sge: *max_send_sge,
        max_recv_sge: *max_recv_sge,
        signal_all,
        send_pages: send.pages.pages(),
        send_ring: Some(convert::save_position(send.position)),
        recv_ring: has_recv.then(|| convert::save_position(recv.position)),
    })?)
}
