//! CREATE_SRQ, MODIFY_SRQ, QUERY_SRQ and DESTROY_SRQ (section 4.6).

use std::sync::Arc;

use pvrdma_handover::Pending;
use pvrdma_pages::PageList;
use pvrdma_verbs::{Hca, Object, SharedReceiveQueue, SrqInit, VerbsError};

use super::cq::{ring_pages, ring_pages_of};
use super::response::{Created, Response};
use crate::abi::cmd::{CreateSrq, CreateSrqResp, DestroySrq, ModifySrq, QuerySrq, QuerySrqResp, SRQ_LIMIT, SrqAttr};
use crate::core::Core;
use crate::datapath::RecvRing;
use crate::dsr::Session;
use crate::error::CmdError;
use crate::objects::Srq;
use crate::ring::{RingShapeError, recv_stride};

/// Value of `srq_type` of the only supported kind.
const BASIC: u8 = 0;

pub(super) fn create<H: Hca>(core: &Core<H>, _session: &Session, request: &CreateSrq) -> Result<Response, CmdError> {
    let &CreateSrq { pdir_dma, pd_handle, nchunks, attrs: SrqAttr { max_wr, max_sge, srq_limit }, srq_type } = request;
    if srq_type != BASIC {
        return Err(CmdError::Invalid("SRQ type", srq_type.into()));
    }
    let vacancy = core.objects.srqs.room()?;
    let (handle, attrs) = (vacancy.handle, SrqAttr { max_wr, max_sge, srq_limit });
    let pages = |needed| ring_pages(core, pdir_dma, nchunks, needed);
    let srq = build(core, (handle, pd_handle), attrs, pages, Ok, |init| core.hca.create_srq(init))?;
    core.objects.srqs.insert(vacancy, Arc::clone(&srq));
    core.watch_new_srq(&srq);
    Ok(Response::new(&CreateSrqResp { srqn: handle }).created(Created::Srq(handle)))
}

/// Checks the parameters of an SRQ, charges it and creates it. `pages` returns its pages, given their number. `place`
/// moves its ring to its position; `make` creates the object of the adapter.
pub(crate) fn build<H: Hca>(
    core: &Core<H>,
    (handle, pd_handle): (u32, u32),
    SrqAttr { max_wr, max_sge, srq_limit }: SrqAttr,
    pages: impl FnOnce(u64) -> Result<PageList, CmdError>,
    place: impl FnOnce(RecvRing) -> Result<RecvRing, RingShapeError>,
    make: impl FnOnce(SrqInit<'_, H>) -> Result<H::Srq, VerbsError>,
) -> Result<Arc<Srq<H>>, CmdError> {
    let pd = core.objects.pds.find(pd_handle)?;
    if !max_wr.is_power_of_two() || max_wr > core.limits().max_srq_wr {
        return Err(CmdError::Invalid("number of SRQ requests", max_wr.into()));
    }
    if max_sge > core.limits().verbs.max_sge {
        return Err(CmdError::Invalid("number of SGEs", max_sge.into()));
    }
    if srq_limit > max_wr {
        return Err(CmdError::Invalid("SRQ limit", srq_limit.into()));
    }
    let stride = recv_stride(max_sge).ok_or_else(|| CmdError::Invalid("number of SGEs", max_sge.into()))?;
    let pages = pages(ring_pages_of(max_wr, stride.into()))?;
    let charge = core.charge(Object::Srq(max_wr), &[&pages])?;
    let element_pages = pages.pages().saturating_sub(1);
    let mut queue = Box::new(place(RecvRing::new(pages, 1, element_pages, max_wr, max_sge)?)?);
    let (words, progress) = (queue.words(), core.may_watch(pd.owner).then(|| queue.watch()));
    let verbs = make(SrqInit { cookie: handle, pd: &pd.verbs, queue, limit: srq_limit, max_wr, max_sge })?;
    let pending_doorbells = Pending::new();
    Ok(Arc::new(Srq { handle, pd, verbs, words, progress, max_wr, max_sge, pending_doorbells, _charge: charge }))
}

/// Sets the limit. The driver may also set the mask bit of the size, without a value.
pub(super) fn modify<H: Hca>(core: &Core<H>, _session: &Session, request: &ModifySrq) -> Result<Response, CmdError> {
    let srq = core.objects.srqs.find(request.srq_handle)?;
    if request.attr_mask & SRQ_LIMIT == 0 {
        return Err(CmdError::Invalid("SRQ attribute mask", request.attr_mask.into()));
    }
    let limit = request.attrs.srq_limit;
    if limit > srq.max_wr {
        return Err(CmdError::Invalid("SRQ limit", limit.into()));
    }
    srq.verbs.set_limit(limit);
    Ok(Response::header())
}

pub(super) fn query<H: Hca>(core: &Core<H>, _session: &Session, request: &QuerySrq) -> Result<Response, CmdError> {
    let srq = core.objects.srqs.find(request.srq_handle)?;
    let attrs = SrqAttr { max_wr: srq.max_wr, max_sge: srq.max_sge, srq_limit: srq.verbs.limit() };
    Ok(Response::new(&QuerySrqResp { attrs }))
}

/// Destroys an SRQ. This does not fail if QPs still use it: they go to their error state.
pub(super) fn destroy<H: Hca>(core: &Core<H>, _session: &Session, request: &DestroySrq) -> Result<Response, CmdError> {
    core.end_srq(request.srq_handle).map(|()| Response::header())
}
