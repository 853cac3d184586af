//! CREATE_CQ, RESIZE_CQ and DESTROY_CQ (section 4.6), and the page counts of rings.

use std::sync::Arc;

use pvrdma_guest_memory::{Charge, Direction};
use pvrdma_pages::{PAGE_SIZE, PageList};
use pvrdma_verbs::{CompletionSink, Hca, Object};

use super::pd::owner;
use super::response::{Created, Response};
use crate::abi::cmd::{CreateCq, CreateCqResp, DestroyCq, Opcode, ResizeCq};
use crate::abi::wqe::CQE_SIZE;
use crate::core::Core;
use crate::datapath::CqRing;
use crate::dsr::Session;
use crate::error::CmdError;
use crate::objects::{Cq, KERNEL};
use crate::page_dir::{check_mapped, read_page_directory};

pub(super) fn create<H: Hca>(core: &Core<H>, _session: &Session, request: &CreateCq) -> Result<Response, CmdError> {
    let &CreateCq { pdir_dma, ctx_handle, cqe, nchunks } = request;
    let vacancy = core.objects.cqs.room()?;
    let pages = |needed| ring_pages(core, pdir_dma, nchunks, needed);
    let (owner, pages, charge) = checked(core, ctx_handle, cqe, pages)?;
    let handle = vacancy.handle;
    let ring = CqRing::new(handle, cqe, pages, owner != KERNEL, Arc::clone(&core.hub))?;
    let verbs = core.hca.create_cq(Arc::<CqRing>::clone(&ring) as Arc<dyn CompletionSink>)?;
    let cq = Arc::new(Cq { owner, ring, verbs, _charge: charge });
    core.objects.cqs.insert(vacancy, Arc::clone(&cq));
    core.watch_new_cq(&cq);
    Ok(Response::new(&CreateCqResp { cq_handle: handle, cqe }).created(Created::Cq(handle)))
}

/// Checks the parameters of a completion queue and charges it. `pages` returns its pages, given their number. Returns
/// its owner, pages and charge.
pub(crate) fn checked<H: Hca>(
    core: &Core<H>,
    ctx_handle: u32,
    cqe: u32,
    pages: impl FnOnce(u64) -> Result<PageList, CmdError>,
) -> Result<(u32, PageList, Charge), CmdError> {
    let owner = owner(core, ctx_handle)?;
    if !cqe.is_power_of_two() || cqe > core.limits().verbs.max_cqe {
        return Err(CmdError::Invalid("number of CQ entries", cqe.into()));
    }
    let pages = pages(ring_pages_of(cqe, CQE_SIZE as u64))?;
    let charge = core.charge(Object::Cq, &[&pages])?;
    Ok((owner, pages, charge))
}

/// Returns the number of pages of a ring, including its state page.
pub(super) const fn ring_pages_of(entries: u32, stride: u64) -> u64 {
    // The product cannot saturate: both factors are far below 2^32.
    (entries as u64).saturating_mul(stride).div_ceil(PAGE_SIZE).saturating_add(1)
}

/// Returns the first `needed` of the `offered` pages of a ring. Libraries may offer more than a ring needs, never less.
pub(super) fn ring_pages<H: Hca>(
    core: &Core<H>,
    pdir_dma: u64,
    offered: u32,
    needed: u64,
) -> Result<PageList, CmdError> {
    let too_few = CmdError::Invalid("number of pages", offered.into());
    let Some(needed) = u32::try_from(needed).ok().filter(|&needed| needed <= offered) else { return Err(too_few) };
    let view = core.memory.view();
    let pages = read_page_directory(&view, pdir_dma, needed)?;
    check_mapped(&view, &pages, Direction::Write)?;
    Ok(pages)
}

/// Destroys a CQ. This does not fail if QPs still use it: they go to their error state.
pub(super) fn destroy<H: Hca>(core: &Core<H>, _session: &Session, request: &DestroyCq) -> Result<Response, CmdError> {
    core.end_cq(request.cq_handle).map(|()| Response::header())
}

/// Refuses the command as unknown: no driver sends it (section 4.1).
pub(super) fn resize<H: Hca>(_core: &Core<H>, _session: &Session, _request: &ResizeCq) -> Result<Response, CmdError> {
    Err(CmdError::Unknown(Opcode::RESIZE_CQ))
}
