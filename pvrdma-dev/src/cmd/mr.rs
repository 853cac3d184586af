//! CREATE_MR and DESTROY_MR (section 4.6).

use std::sync::Arc;

use pvrdma_guest_memory::{Charge, Direction};
use pvrdma_pages::{Extent, PAGE_SIZE, PageList};
use pvrdma_verbs::{Hca, MemoryRegion, MrRequest, Object};
use pvrdma_verbs_types::Access;

use super::response::{Created, Response};
use crate::abi::cmd::{CreateMr, CreateMrResp, DestroyMr, mr_flags};
use crate::config::MAX_FAST_REGISTER_PAGES;
use crate::core::Core;
use crate::dsr::Session;
use crate::error::CmdError;
use crate::objects::{KERNEL, Mr, Pd};
use crate::page_dir::{check_mapped, read_page_directory};

pub(super) fn create<H: Hca>(core: &Core<H>, _session: &Session, request: &CreateMr) -> Result<Response, CmdError> {
    let vacancy = core.objects.mrs.room()?;
    let (pd, registration, charge) = checked(core, request, || {
        let view = core.memory.view();
        let pages = read_page_directory(&view, request.pdir_dma, request.nchunks)?;
        check_mapped(&view, &pages, Direction::Read)?;
        Ok(pages)
    })?;
    let verbs = core.hca.register_mr(&pd.verbs, registration)?;
    let handle = vacancy.handle;
    let response = CreateMrResp { mr_handle: handle, lkey: verbs.lkey(), rkey: verbs.rkey() };
    core.objects.mrs.insert(vacancy, Arc::new(Mr { pd, verbs, _charge: charge }));
    Ok(Response::new(&response).created(Created::Mr(handle)))
}

/// Checks a request for a memory region and charges it. `pages` returns the pages of a process's memory, as many as the
/// request says.
pub(crate) fn checked<H: Hca>(
    core: &Core<H>,
    request: &CreateMr,
    pages: impl FnOnce() -> Result<PageList, CmdError>,
) -> Result<(Arc<Pd<H>>, MrRequest, Charge), CmdError> {
    let pd = core.objects.pds.find(request.pd_handle)?;
    let (registration, charge) = match request.flags {
        0 => user(core, request, pages)?,
        mr_flags::DMA => dma(core, &pd, request)?,
        mr_flags::FAST_REGISTER => fast_register(core, &pd, request)?,
        other => return Err(CmdError::Invalid("memory region flags", other.into())),
    };
    Ok((pd, registration, charge))
}

/// Returns the known access rights. The driver passes on all bits that the application set.
const fn access(request: &CreateMr) -> Access {
    Access::from_bits_truncate(request.access_flags)
}

/// Registers memory of a process. Address, length and number of pages must be consistent, computed in 64 bits.
fn user<H: Hca>(
    core: &Core<H>,
    request: &CreateMr,
    pages: impl FnOnce() -> Result<PageList, CmdError>,
) -> Result<(MrRequest, Charge), CmdError> {
    let &CreateMr { start, length, nchunks, .. } = request;
    if length == 0 || length > core.limits().verbs.max_mr_size || start.checked_add(length).is_none() {
        return Err(CmdError::Invalid("memory region length", length));
    }
    let span = (start % PAGE_SIZE).saturating_add(length).div_ceil(PAGE_SIZE);
    if span != u64::from(nchunks) {
        return Err(CmdError::Invalid("number of pages", nchunks.into()));
    }
    let pages = pages()?;
    let charge = core.charge(Object::Mr, &[&pages])?;
    Ok((MrRequest::User { start, length, pages, access: access(request) }, charge))
}

/// Creates the kernel's key for bus addresses. A process must not get one, because it reaches all of the guest's
/// memory.
fn dma<H: Hca>(core: &Core<H>, pd: &Pd<H>, request: &CreateMr) -> Result<(MrRequest, Charge), CmdError> {
    if pd.owner != KERNEL {
        return Err(CmdError::Foreign("a region of bus addresses"));
    }
    let access = access(request) & Access::LOCAL_WRITE;
    Ok((MrRequest::Dma { access }, core.charge(Object::Mr, &[])?))
}

/// Creates a region whose contents the kernel's work requests set. All pages that it may hold later are charged now.
fn fast_register<H: Hca>(core: &Core<H>, pd: &Pd<H>, request: &CreateMr) -> Result<(MrRequest, Charge), CmdError> {
    if pd.owner != KERNEL {
        return Err(CmdError::Foreign("a fast-registered region"));
    }
    if !core.hca.limits().memory_management {
        return Err(CmdError::Invalid("memory region flags", request.flags.into()));
    }
    let max_pages = request.nchunks;
    if max_pages == 0 || max_pages > MAX_FAST_REGISTER_PAGES {
        return Err(CmdError::Invalid("number of pages", max_pages.into()));
    }
    let lists = u64::from(max_pages).saturating_mul(size_of::<Extent>() as u64);
    Ok((MrRequest::FastRegister { max_pages }, core.charge_bytes(Object::Mr, lists)?))
}

/// Destroys a memory region. When this returns, nothing accesses its pages.
pub(super) fn destroy<H: Hca>(core: &Core<H>, _session: &Session, request: &DestroyMr) -> Result<Response, CmdError> {
    core.end_mr(request.mr_handle).map(|()| Response::header())
}
