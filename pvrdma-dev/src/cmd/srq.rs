//! CREATE_SRQ, MODIFY_SRQ and QUERY_SRQ (section 4.6).

use std::sync::Arc;
use std::sync::atomic::AtomicU8;

use pvrdma_verbs::{Hca, SharedReceiveQueue, SrqInit};

use super::cq::{ring_pages, ring_pages_of};
use super::{Answer, Created};
use crate::abi::cmd::{CreateSrq, CreateSrqResp, ModifySrq, QuerySrq, QuerySrqResp, SRQ_LIMIT, SrqAttr};
use crate::adapter::Adapter;
use crate::datapath::RecvRing;
use crate::error::CmdError;
use crate::objects::Srq;
use crate::ring::recv_stride;

/// `srq_type` of the only kind there is.
const BASIC: u8 = 0;

pub(super) fn create<H: Hca>(adapter: &Adapter<H>, request: &CreateSrq) -> Result<Answer, CmdError> {
    let &CreateSrq { pdir_dma, pd_handle, nchunks, attrs: SrqAttr { max_wr, max_sge, srq_limit }, srq_type } = request;
    let pd = adapter.objects.pds.find(pd_handle)?;
    if srq_type != BASIC {
        return Err(CmdError::Invalid("SRQ type", srq_type.into()));
    }
    if !max_wr.is_power_of_two() || max_wr > adapter.limits.max_srq_wr {
        return Err(CmdError::Invalid("number of SRQ requests", max_wr.into()));
    }
    if max_sge > adapter.limits.max_sge {
        return Err(CmdError::Invalid("number of SGEs", max_sge.into()));
    }
    if srq_limit > max_wr {
        return Err(CmdError::Invalid("SRQ limit", srq_limit.into()));
    }
    let vacancy = adapter.objects.srqs.room()?;
    let stride = recv_stride(max_sge).ok_or_else(|| CmdError::Invalid("number of SGEs", max_sge.into()))?;
    let needed = ring_pages_of(max_wr, stride.into());
    let pages = ring_pages(adapter, pdir_dma, nchunks, needed)?;
    let charge = adapter.objects.budget.charge_pages(&pages, 1)?;
    let element_pages = pages.pages().saturating_sub(1);
    let queue = Box::new(RecvRing::new(pages, 1, element_pages, max_wr, max_sge)?);
    let handle = vacancy.handle;
    let init = SrqInit { cookie: handle, pd: &pd.verbs, queue, limit: srq_limit, max_wr, max_sge };
    let verbs = adapter.hca.create_srq(init)?;
    let srq = Srq { pd, verbs, max_wr, max_sge, rung: AtomicU8::new(0), _charge: charge };
    adapter.objects.srqs.insert(vacancy, Arc::new(srq));
    Ok(Answer::new(&CreateSrqResp { srqn: handle }).of(Created::Srq(handle)))
}

/// Sets the limit. The driver may pass the bit for the size too, with nothing in it.
pub(super) fn modify<H: Hca>(adapter: &Adapter<H>, request: &ModifySrq) -> Result<Answer, CmdError> {
    let srq = adapter.objects.srqs.find(request.srq_handle)?;
    if request.attr_mask & SRQ_LIMIT == 0 {
        return Err(CmdError::Invalid("SRQ attribute mask", request.attr_mask.into()));
    }
    let limit = request.attrs.srq_limit;
    if limit > srq.max_wr {
        return Err(CmdError::Invalid("SRQ limit", limit.into()));
    }
    srq.verbs.set_limit(limit);
    Ok(Answer::header())
}

pub(super) fn query<H: Hca>(adapter: &Adapter<H>, request: &QuerySrq) -> Result<Answer, CmdError> {
    let srq = adapter.objects.srqs.find(request.srq_handle)?;
    let attrs = SrqAttr { max_wr: srq.max_wr, max_sge: srq.max_sge, srq_limit: srq.verbs.limit() };
    Ok(Answer::new(&QuerySrqResp { attrs }))
}
