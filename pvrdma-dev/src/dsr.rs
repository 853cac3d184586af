//! Handshake: reads and checks the device shared region, and writes the capabilities (section 2.2).

use std::sync::Arc;

use pvrdma_guest_memory::{Direction, DmaError, DmaView};
use pvrdma_pages::PageList;

use crate::abi::cmd::{REQUEST_SIZE, RESPONSE_SIZE};
use crate::abi::dsr::{CAPS_OFFSET, Caps, RingPages, SharedRegion};
use crate::abi::layout::GuestLayout;
use crate::error::HandshakeError;
use crate::events::EventRings;
use crate::intr::Interrupts;
use crate::page_dir::{check_mapped, read_page_directory};

/// Maximum number of pages of an event ring: one table.
const MAX_RING_PAGES: u32 = 512;

/// Required alignment of the region and the slots; in practice they are page aligned.
const ALIGNMENT: u64 = 8;

/// Result of a handshake that the device keeps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Session {
    /// Bus address of the shared region.
    pub(crate) shared_region: u64,
    /// Bus address of the command slot.
    pub(crate) command_slot: u64,
    /// Bus address of the response slot.
    pub(crate) response_slot: u64,
    /// Guest page number of BAR 2.
    pub(crate) uar_pfn: u64,
    /// Version used by both sides (section 2.3).
    pub(crate) version: u32,
}

/// Reads the region at `address`, checks all its fields and, if they are valid, writes the capabilities. Nothing else
/// in the region is ever written. A failure changes nothing.
pub(crate) fn handshake(
    view: &DmaView<'_>,
    address: u64,
    version: u32,
    caps: &Caps,
    interrupts: &Arc<Interrupts>,
) -> Result<(Session, EventRings), HandshakeError> {
    let memory = |what| move |error: DmaError| HandshakeError::Memory(what, error);
    let region = read_region(view, address)?;
    if region.driver_version == 0 && region.cmd_slot_dma == 0 && region.resp_slot_dma == 0 {
        return Err(HandshakeError::PrivateMemory);
    }
    aligned("command slot", region.cmd_slot_dma)?;
    aligned("response slot", region.resp_slot_dma)?;
    view.slice(region.cmd_slot_dma, REQUEST_SIZE, Direction::Read).map_err(memory("command slot"))?;
    view.slice(region.resp_slot_dma, RESPONSE_SIZE, Direction::Write).map_err(memory("response slot"))?;
    let events = ring_pages(view, "asynchronous event ring", region.async_ring_pages)?;
    let notifications = ring_pages(view, "CQ notification ring", region.cq_ring_pages)?;
    let rings = EventRings::new(events, notifications, Arc::clone(interrupts))?;
    let mut response = [0; Caps::SIZE];
    caps.encode(&mut response);
    // The sum cannot overflow, because the region was readable to its end. The capabilities are written in one piece,
    // because a failure could otherwise leave half of them.
    let at = address.wrapping_add(CAPS_OFFSET);
    view.slice(at, Caps::SIZE, Direction::Write).map_err(memory("capabilities"))?.copy_from(&response);
    let session = Session {
        shared_region: address,
        command_slot: region.cmd_slot_dma,
        response_slot: region.resp_slot_dma,
        uar_pfn: region.uar_pfn64,
        version: version.min(region.driver_version),
    };
    Ok((session, rings))
}

fn read_region(view: &DmaView<'_>, address: u64) -> Result<SharedRegion, HandshakeError> {
    aligned("shared region", address)?;
    let mut bytes = [0; SharedRegion::SIZE];
    view.read(address, &mut bytes).map_err(|error| HandshakeError::Memory("shared region", error))?;
    Ok(SharedRegion::decode(&bytes))
}

/// Reads the pages of the asynchronous event ring of the driver whose shared region is at `address`. Writes nothing.
pub(crate) fn asynchronous_pages(view: &DmaView<'_>, address: u64) -> Result<PageList, HandshakeError> {
    ring_pages(view, "asynchronous event ring", read_region(view, address)?.async_ring_pages)
}

/// Returns `true` if the region or a slot can be at this address.
pub(crate) const fn is_aligned(address: u64) -> bool {
    address != 0 && address.is_multiple_of(ALIGNMENT)
}

const fn aligned(what: &'static str, address: u64) -> Result<(), HandshakeError> {
    if !is_aligned(address) {
        return Err(HandshakeError::Misaligned(what, address));
    }
    Ok(())
}

/// Returns `true` if an event ring can have this number of pages.
pub(crate) fn is_ring_size(pages: u32) -> bool {
    (2..=MAX_RING_PAGES).contains(&pages)
}

fn ring_pages(view: &DmaView<'_>, what: &'static str, ring: RingPages) -> Result<PageList, HandshakeError> {
    if !is_ring_size(ring.num_pages) {
        return Err(HandshakeError::RingPages(what, ring.num_pages));
    }
    let pages =
        read_page_directory(view, ring.pdir_dma, ring.num_pages).map_err(|e| HandshakeError::Memory(what, e))?;
    check_mapped(view, &pages, Direction::Write).map_err(|e| HandshakeError::Memory(what, e))?;
    Ok(pages)
}
