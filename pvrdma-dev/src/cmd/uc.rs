//! CREATE_UC (section 4.6). Its end is in [`crate::objects`].

use std::sync::Arc;

use pvrdma_verbs::Hca;

use super::{Answer, Created};
use crate::abi::cmd::{CreateUc, CreateUcResp};
use crate::adapter::Adapter;
use crate::dsr::Session;
use crate::error::CmdError;
use crate::objects::Context;

pub(super) fn create<H: Hca>(adapter: &Adapter<H>, session: &Session, request: &CreateUc) -> Result<Answer, CmdError> {
    let invalid = CmdError::Invalid("doorbell page", request.pfn64);
    // The shared region says where BAR 2 is: nobody else who knows the guest's addresses tells us.
    let Some(page) = request.pfn64.checked_sub(session.uar_pfn).and_then(|page| u32::try_from(page).ok()) else {
        return Err(invalid);
    };
    let vacancy = adapter.objects.contexts.room()?;
    // Refuses page 0, pages beyond the BAR and pages that are taken.
    if !adapter.uar.bind(page, vacancy.handle) {
        return Err(invalid);
    }
    adapter.objects.contexts.insert(vacancy, Arc::new(Context { uar_page: page }));
    let handle = vacancy.handle;
    Ok(Answer::new(&CreateUcResp { ctx_handle: handle }).of(Created::Context(handle)))
}
