//! CREATE_UC and DESTROY_UC (section 4.6).

use std::sync::Arc;

use pvrdma_verbs::Hca;

use super::response::{Created, Response};
use crate::abi::cmd::{CreateUc, CreateUcResp, DestroyUc};
use crate::core::Core;
use crate::dsr::Session;
use crate::error::CmdError;
use crate::objects::Context;

pub(super) fn create<H: Hca>(core: &Core<H>, session: &Session, request: &CreateUc) -> Result<Response, CmdError> {
    let invalid = CmdError::Invalid("doorbell page", request.pfn64);
    // The shared region contains the guest's page number of BAR 2, for which the device has no other source.
    let Some(page) = request.pfn64.checked_sub(session.uar_pfn).and_then(|page| u32::try_from(page).ok()) else {
        return Err(invalid);
    };
    let vacancy = core.objects.contexts.room()?;
    // This refuses page 0, pages beyond the BAR and pages that are already bound.
    if !core.uar.bind(page, vacancy.handle) {
        return Err(invalid);
    }
    // The content that the page's previous process left must be gone before the new one can read it.
    core.renew_page(page);
    core.objects.contexts.insert(vacancy, Arc::new(Context::new(page)));
    let handle = vacancy.handle;
    Ok(Response::new(&CreateUcResp { ctx_handle: handle }).created(Created::Context(handle)))
}

/// Destroys a context, with all objects that it still owns.
pub(super) fn destroy<H: Hca>(core: &Core<H>, _session: &Session, request: &DestroyUc) -> Result<Response, CmdError> {
    core.end_context(request.ctx_handle).map(|()| Response::header())
}
