//! CREATE_PD (section 4.6).

use std::sync::Arc;

use pvrdma_verbs::Hca;

use super::{Answer, Created};
use crate::abi::cmd::{CreatePd, CreatePdResp};
use crate::adapter::Adapter;
use crate::error::CmdError;
use crate::objects::{KERNEL, Pd};

pub(super) fn create<H: Hca>(adapter: &Adapter<H>, request: &CreatePd) -> Result<Answer, CmdError> {
    let owner = owner(adapter, request.ctx_handle)?;
    let vacancy = adapter.objects.pds.room()?;
    let handle = vacancy.handle;
    let verbs = adapter.hca.create_pd()?;
    adapter.objects.pds.insert(vacancy, Arc::new(Pd { handle, owner, verbs }));
    Ok(Answer::new(&CreatePdResp { pd_handle: handle }).of(Created::Pd(handle)))
}

/// The context that a command names: a live one, or the kernel.
pub(super) fn owner<H: Hca>(adapter: &Adapter<H>, context: u32) -> Result<u32, CmdError> {
    if context != KERNEL {
        adapter.objects.contexts.find(context)?;
    }
    Ok(context)
}
