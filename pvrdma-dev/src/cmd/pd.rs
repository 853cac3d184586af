//! CREATE_PD and DESTROY_PD (section 4.6).

use std::sync::Arc;

use pvrdma_verbs::{Hca, Object};

use super::response::{Created, Response};
use crate::abi::cmd::{CreatePd, CreatePdResp, DestroyPd};
use crate::core::Core;
use crate::dsr::Session;
use crate::error::CmdError;
use crate::objects::{KERNEL, Pd};

pub(super) fn create<H: Hca>(core: &Core<H>, _session: &Session, request: &CreatePd) -> Result<Response, CmdError> {
    let owner = owner(core, request.ctx_handle)?;
    let vacancy = core.objects.pds.room()?;
    let handle = vacancy.handle;
    let charge = core.charge(Object::Pd, &[])?;
    let verbs = core.hca.create_pd()?;
    core.objects.pds.insert(vacancy, Arc::new(Pd { handle, owner, verbs, _charge: charge }));
    Ok(Response::new(&CreatePdResp { pd_handle: handle }).created(Created::Pd(handle)))
}

/// Returns the owner that a command names: an existing context, or the kernel.
pub(crate) fn owner<H: Hca>(core: &Core<H>, context: u32) -> Result<u32, CmdError> {
    if context != KERNEL {
        core.objects.contexts.find(context)?;
    }
    Ok(context)
}

/// Destroys a protection domain, after all objects in it.
pub(super) fn destroy<H: Hca>(core: &Core<H>, _session: &Session, request: &DestroyPd) -> Result<Response, CmdError> {
    core.end_pd(request.pd_handle).map(|()| Response::header())
}
