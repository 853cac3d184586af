//! CREATE_CQ (section 4.6).

use std::sync::Arc;

use pvrdma_guest_memory::{Direction, PAGE_SIZE, PageList};
use pvrdma_verbs::{CompletionSink, Hca};

use super::pd::owner;
use super::{Answer, Created};
use crate::abi::cmd::{CreateCq, CreateCqResp};
use crate::abi::wqe::CQE_SIZE;
use crate::adapter::Adapter;
use crate::datapath::CqRing;
use crate::error::CmdError;
use crate::objects::{Cq, KERNEL};
use crate::page_dir::{check_mapped, read_page_directory};

pub(super) fn create<H: Hca>(adapter: &Adapter<H>, request: &CreateCq) -> Result<Answer, CmdError> {
    let &CreateCq { pdir_dma, ctx_handle, cqe, nchunks } = request;
    let owner = owner(adapter, ctx_handle)?;
    if !cqe.is_power_of_two() || cqe > adapter.limits.max_cqe {
        return Err(CmdError::Invalid("number of CQ entries", cqe.into()));
    }
    let vacancy = adapter.objects.cqs.room()?;
    let pages = ring_pages(adapter, pdir_dma, nchunks, ring_pages_of(cqe, CQE_SIZE as u64))?;
    let charge = adapter.objects.budget.charge_pages(&pages, 1)?;
    let handle = vacancy.handle;
    let ring = CqRing::new(handle, cqe, pages, owner != KERNEL, Arc::clone(&adapter.hub))?;
    let verbs = adapter.hca.create_cq(Arc::<CqRing>::clone(&ring) as Arc<dyn CompletionSink>)?;
    adapter.objects.cqs.insert(vacancy, Arc::new(Cq { owner, ring, verbs, _charge: charge }));
    Ok(Answer::new(&CreateCqResp { cq_handle: handle, cqe }).of(Created::Cq(handle)))
}

/// Pages of a ring with its state page.
pub(super) const fn ring_pages_of(entries: u32, stride: u64) -> u64 {
    // Both factors are far below 2^32.
    (entries as u64).saturating_mul(stride).div_ceil(PAGE_SIZE).saturating_add(1)
}

/// The first `needed` of the `offered` pages of a ring. Libraries may offer more than a ring takes, never less.
pub(super) fn ring_pages<H: Hca>(
    adapter: &Adapter<H>,
    pdir_dma: u64,
    offered: u32,
    needed: u64,
) -> Result<PageList, CmdError> {
    let too_few = CmdError::Invalid("number of pages", offered.into());
    let Some(needed) = u32::try_from(needed).ok().filter(|&needed| needed <= offered) else { return Err(too_few) };
    let view = adapter.memory.view();
    let pages = read_page_directory(&view, pdir_dma, needed)?;
    check_mapped(&view, &pages, Direction::Write)?;
    Ok(pages)
}
