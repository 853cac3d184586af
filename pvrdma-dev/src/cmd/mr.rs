//! CREATE_MR (section 4.6).

use std::sync::Arc;

use pvrdma_guest_memory::{Direction, PAGE_SIZE};
use pvrdma_verbs::{Access, Hca, MemoryRegion, MrRequest};

use super::{Answer, Created};
use crate::abi::cmd::{CreateMr, CreateMrResp, mr_flags};
use crate::adapter::Adapter;
use crate::config::MAX_FAST_REGISTER_PAGES;
use crate::error::CmdError;
use crate::objects::{Charge, KERNEL, Mr, Pd};
use crate::page_dir::{check_mapped, read_page_directory};

pub(super) fn create<H: Hca>(adapter: &Adapter<H>, request: &CreateMr) -> Result<Answer, CmdError> {
    let pd = adapter.objects.pds.find(request.pd_handle)?;
    let vacancy = adapter.objects.mrs.room()?;
    let (registration, charge) = match request.flags {
        0 => user(adapter, request)?,
        mr_flags::DMA => dma(adapter, &pd, request)?,
        mr_flags::FAST_REGISTER => fast_register(adapter, &pd, request)?,
        other => return Err(CmdError::Invalid("memory region flags", other.into())),
    };
    let verbs = adapter.hca.register_mr(&pd.verbs, registration)?;
    let handle = vacancy.handle;
    let response = CreateMrResp { mr_handle: handle, lkey: verbs.lkey(), rkey: verbs.rkey() };
    adapter.objects.mrs.insert(vacancy, Arc::new(Mr { pd, verbs, _charge: charge }));
    Ok(Answer::new(&response).of(Created::Mr(handle)))
}

/// The rights we know. The driver passes on whatever the application asked for.
const fn access(request: &CreateMr) -> Access {
    Access::from_bits_truncate(request.access_flags)
}

/// Memory of a process. Address, length and number of pages must agree, computed in 64 bits.
fn user<H: Hca>(adapter: &Adapter<H>, request: &CreateMr) -> Result<(MrRequest, Charge), CmdError> {
    let &CreateMr { start, length, nchunks, pdir_dma, .. } = request;
    if length == 0 || length > adapter.limits.max_mr_size || start.checked_add(length).is_none() {
        return Err(CmdError::Invalid("memory region length", length));
    }
    let span = (start % PAGE_SIZE).saturating_add(length).div_ceil(PAGE_SIZE);
    if span != u64::from(nchunks) {
        return Err(CmdError::Invalid("number of pages", nchunks.into()));
    }
    let pages = {
        let view = adapter.memory.view();
        let pages = read_page_directory(&view, pdir_dma, nchunks)?;
        check_mapped(&view, &pages, Direction::Read)?;
        pages
    };
    let charge = adapter.objects.budget.charge_pages(&pages, 1)?;
    Ok((MrRequest::User { start, length, pages, access: access(request) }, charge))
}

/// The kernel's key for bus addresses. No process may have one: it would reach all of the guest's memory.
fn dma<H: Hca>(adapter: &Adapter<H>, pd: &Pd<H>, request: &CreateMr) -> Result<(MrRequest, Charge), CmdError> {
    if pd.owner != KERNEL {
        return Err(CmdError::Foreign("a region of bus addresses"));
    }
    let access = access(request) & Access::LOCAL_WRITE;
    Ok((MrRequest::Dma { access }, adapter.objects.budget.charge(0)?))
}

/// A region that the kernel's work requests fill in. The pages that it may come to hold are paid for now.
fn fast_register<H: Hca>(
    adapter: &Adapter<H>,
    pd: &Pd<H>,
    request: &CreateMr,
) -> Result<(MrRequest, Charge), CmdError> {
    if pd.owner != KERNEL {
        return Err(CmdError::Foreign("a fast-registered region"));
    }
    if !adapter.hca.limits().memory_management {
        return Err(CmdError::Invalid("memory region flags", request.flags.into()));
    }
    let max_pages = request.nchunks;
    if max_pages == 0 || max_pages > MAX_FAST_REGISTER_PAGES {
        return Err(CmdError::Invalid("number of pages", max_pages.into()));
    }
    Ok((MrRequest::FastRegister { max_pages }, adapter.objects.budget.charge(max_pages.into())?))
}
