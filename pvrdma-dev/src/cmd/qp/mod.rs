//! CREATE_QP, MODIFY_QP, QUERY_QP and DESTROY_QP (sections 4.6 and 11).

use std::sync::Arc;

use pvrdma_handover::Pending;
use pvrdma_pages::PageList;
use pvrdma_verbs::{Hca, Object, QpInit, QueuePair, RecvSource, VerbsError};
use pvrdma_verbs_types::{QpCaps, QpType, Qpn};

use super::cq::ring_pages;
use super::qp_attr;
use super::response::{Created, Response};
use crate::abi::cmd::{CreateQp, CreateQpResp, CreateQpRespV2, DestroyQp, ModifyQp, QueryQp, QueryQpResp, qp_type};
use crate::abi::regs::VERSION_QP_HANDLE;
use crate::core::Core;
use crate::datapath::{RecvRing, SendRing, SendRingParams};
use crate::dsr::Session;
use crate::error::CmdError;
use crate::objects::{Cq, GSI_HANDLE, KERNEL, Pd, Qp, Srq, Vacancy};
use crate::ring::{RingShapeError, recv_stride};

/// Checked parts of a new QP.
pub(crate) struct Parts<H: Hca> {
    pub(crate) qp_type: QpType,
    pd: Arc<Pd<H>>,
    send_cq: Arc<Cq<H>>,
    recv_cq: Arc<Cq<H>>,
    srq: Option<Arc<Srq<H>>>,
    caps: QpCaps,
}

pub(super) fn create<H: Hca>(core: &Core<H>, session: &Session, request: &CreateQp) -> Result<Response, CmdError> {
    let parts = parts(core, request)?;
    let (vacancy, qpn) = number(core, session, parts.qp_type)?;
    let (handle, qp_type) = (vacancy.handle, parts.qp_type);
    let pages = |needed| ring_pages(core, request.pdir_dma, request.total_chunks.into(), needed);
    let qp = build(core, (handle, qpn), parts, request, pages, Ok, |init| core.hca.create_qp(init))?;
    let qpn = qp.verbs.qpn();
    if session.version < VERSION_QP_HANDLE && qpn.get() != handle {
        // The driver would use the number as an index into its tables without a check (section 2.3).
        qp.verbs.destroy();
        return Err(CmdError::Invalid("QP number for this interface version", qpn.get().into()));
    }
    if qp_type == QpType::Gsi {
        core.objects.qps.insert_at(handle, Arc::clone(&qp));
    } else {
        core.objects.qps.insert(vacancy, Arc::clone(&qp));
    }
    core.watch_new_qp(&qp);
    Ok(response(session, handle, qpn, &qp.caps).created(Created::Qp(handle)))
}

/// Rings of a QP.
pub(crate) type Rings = (SendRing, Option<RecvRing>);

/// Charges a QP and creates it. `pages` returns its pages, given their number. `place` moves its rings to their
/// positions; `make` creates the object of the adapter.
pub(crate) fn build<H: Hca>(
    core: &Core<H>,
    (handle, qpn): (u32, Qpn),
    parts: Parts<H>,
    request: &CreateQp,
    pages: impl FnOnce(u64) -> Result<PageList, CmdError>,
    place: impl FnOnce(Rings) -> Result<Rings, RingShapeError>,
    make: impl FnOnce(QpInit<'_, H>) -> Result<H::Qp, VerbsError>,
) -> Result<Arc<Qp<H>>, CmdError> {
    let pages = pages(needed_pages(request, &parts)?)?;
    // Each ring keeps the pages of its elements. An extent may hold pages of both rings, and each ring is then charged
    // for it.
    let lists = if parts.srq.is_some() { &[&pages][..] } else { &[&pages, &pages] };
    let charge = core.charge(Object::Qp(parts.caps), lists)?;
    let (mut send_queue, mut recv_queue) = place(rings(request, &parts, pages)?)?;
    let state_page = send_queue.words().state_page();
    let watched = core.may_watch(parts.pd.owner);
    let send_progress = watched.then(|| send_queue.watch());
    let recv_progress = recv_queue.as_mut().filter(|_| watched).map(RecvRing::watch);
    let verbs = make(QpInit {
        cookie: handle,
        qpn,
        qp_type: parts.qp_type,
        pd: &parts.pd.verbs,
        send_cq: &parts.send_cq.verbs,
        recv_cq: &parts.recv_cq.verbs,
        srq: parts.srq.as_ref().map(|srq| &srq.verbs),
        send_queue: Box::new(send_queue),
        recv_queue: recv_queue.map(|queue| Box::new(queue) as Box<dyn RecvSource>),
        caps: parts.caps,
        signal_all: request.sq_sig_all != 0,
    })?;
    let Parts { pd, send_cq, recv_cq, srq, caps, qp_type } = parts;
    Ok(Arc::new(Qp {
        qp_type,
        pd,
        send_cq,
        recv_cq,
        srq,
        verbs,
        state_page,
        send_progress,
        recv_progress,
        caps,
        pending_doorbells: Pending::new(),
        _charge: charge,
    }))
}

/// Looks up the objects and checks all fields that need no access to memory. The guest's kernel hardly checks the
/// requests of a process (section 13 B14).
fn parts<H: Hca>(core: &Core<H>, request: &CreateQp) -> Result<Parts<H>, CmdError> {
    let objects = &core.objects;
    let pd = objects.pds.find(request.pd_handle)?;
    let send_cq = objects.cqs.find(request.send_cq_handle)?;
    let recv_cq = objects.cqs.find(request.recv_cq_handle)?;
    let srq = if request.is_srq == 0 { None } else { Some(objects.srqs.find(request.srq_handle)?) };
    checked_parts(core, request, pd, (send_cq, recv_cq), srq)
}

/// Checks that a QP may consist of these objects, and the other fields that need no access to memory.
pub(crate) fn checked_parts<H: Hca>(
    core: &Core<H>,
    request: &CreateQp,
    pd: Arc<Pd<H>>,
    (send_cq, recv_cq): (Arc<Cq<H>>, Arc<Cq<H>>),
    srq: Option<Arc<Srq<H>>>,
) -> Result<Parts<H>, CmdError> {
    let qp_type = match request.qp_type {
        qp_type::GSI => QpType::Gsi,
        qp_type::RC => QpType::Rc,
        qp_type::UD => QpType::Ud,
        other => return Err(CmdError::Invalid("QP type", other.into())),
    };
    if qp_type == QpType::Gsi && pd.owner != KERNEL {
        return Err(CmdError::Foreign("the general services QP"));
    }
    if send_cq.owner != pd.owner || recv_cq.owner != pd.owner {
        return Err(CmdError::Foreign("a completion queue of the QP"));
    }
    if srq.as_ref().is_some_and(|srq| srq.pd.owner != pd.owner) {
        return Err(CmdError::Foreign("the SRQ of the QP"));
    }
    let requests = |count: u32| {
        let fits = count.is_power_of_two() && count <= core.limits().verbs.max_qp_wr;
        if fits { Ok(count) } else { Err(CmdError::Invalid("number of requests", count.into())) }
    };
    let sges = |count: u32| {
        // The limit is a power of two, so rounding up as the kernel's driver does stays within it.
        if count <= core.limits().verbs.max_sge {
            Ok(count)
        } else {
            Err(CmdError::Invalid("number of SGEs", count.into()))
        }
    };
    // With an SRQ, the receive fields of the request are ignored.
    let (max_recv_wr, max_recv_sge) = match srq {
        Some(_) => (0, 0),
        None => (requests(request.max_recv_wr)?, sges(request.max_recv_sge)?),
    };
    let caps = QpCaps {
        max_send_wr: requests(request.max_send_wr)?,
        max_recv_wr,
        max_send_sge: sges(request.max_send_sge)?,
        max_recv_sge,
    };
    Ok(Parts { qp_type, pd, send_cq, recv_cq, srq, caps })
}

/// Allocates handle and QPN. Before version 20 they are equal. From then on, a QPN is reused only after 256 rounds
/// through the table, so that late packets for an earlier owner of the handle are dropped (section 2.5).
fn number<H: Hca>(core: &Core<H>, session: &Session, qp_type: QpType) -> Result<(Vacancy, Qpn), CmdError> {
    let table = &core.objects.qps;
    if qp_type == QpType::Gsi {
        if table.get(GSI_HANDLE).is_some() {
            return Err(CmdError::Taken("the general services QP"));
        }
        return Ok((Vacancy { handle: GSI_HANDLE, round: 0 }, Qpn::GSI));
    }
    let vacancy = table.room()?;
    let generation = if session.version < VERSION_QP_HANDLE { 0 } else { (vacancy.round & 0xff) << 16 };
    Ok((vacancy, Qpn::new(generation | vacancy.handle)))
}

/// Returns the number of pages of the rings: state, `send_chunks` of send elements, the rest for receive elements
/// (section 5.3).
fn needed_pages<H: Hca>(request: &CreateQp, parts: &Parts<H>) -> Result<u64, CmdError> {
    let caps = &parts.caps;
    let recv_bytes = if parts.srq.is_some() {
        0
    } else {
        let stride = recv_stride(caps.max_recv_sge)
            .ok_or_else(|| CmdError::Invalid("number of SGEs", caps.max_recv_sge.into()))?;
        u64::from(caps.max_recv_wr).saturating_mul(stride.into())
    };
    let recv_pages = recv_bytes.div_ceil(pvrdma_pages::PAGE_SIZE);
    Ok(recv_pages.saturating_add(u64::from(request.send_chunks)).saturating_add(1))
}

/// Creates the rings, which checks that the elements fit their pages.
fn rings<H: Hca>(request: &CreateQp, parts: &Parts<H>, pages: PageList) -> Result<Rings, CmdError> {
    let caps = &parts.caps;
    let send_pages = u32::from(request.send_chunks);
    let first_recv_page = send_pages.saturating_add(1);
    let recv_pages = pages.pages().saturating_sub(first_recv_page);
    let recv_queue = match parts.srq {
        Some(_) => None,
        None => Some(RecvRing::new(pages.clone(), first_recv_page, recv_pages, caps.max_recv_wr, caps.max_recv_sge)?),
    };
    let send_queue = SendRing::new(SendRingParams {
        pages,
        first_page: 1,
        page_count: send_pages,
        entries: caps.max_send_wr,
        max_sge: caps.max_send_sge,
        qp_type: parts.qp_type,
        user: parts.pd.owner != KERNEL,
        pd_handle: parts.pd.handle,
    })?;
    Ok((send_queue, recv_queue))
}

fn response(session: &Session, handle: u32, qpn: Qpn, caps: &QpCaps) -> Response {
    let &QpCaps { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge } = caps;
    let qpn = qpn.get();
    if session.version < VERSION_QP_HANDLE {
        Response::new(&CreateQpResp { qpn, max_send_wr, max_recv_wr, max_send_sge, max_recv_sge })
    } else {
        Response::new(&CreateQpRespV2 { qpn, qp_handle: handle, max_send_wr, max_recv_wr, max_send_sge, max_recv_sge })
    }
}

/// Modifies a QP. A refusal is a response here, not an error of the command: the driver returns it as EINVAL (section
/// 4.2).
pub(super) fn modify<H: Hca>(core: &Core<H>, _session: &Session, request: &ModifyQp) -> Result<Response, CmdError> {
    let qp = core.objects.qps.find(request.qp_handle)?;
    let result =
        qp_attr::parse(&request.attrs, request.attr_mask, core.offer().caps.max_qp_rd_atom, core.limits().gid_table)
            .and_then(|(attrs, mask)| qp.verbs.modify(&attrs, mask).map_err(CmdError::from));
    Ok(match result {
        Ok(()) => Response::header(),
        Err(error) => {
            core.log.warn(module_path!(), format_args!("MODIFY_QP of QP {} refused: {error}", request.qp_handle));
            core.stats.counts.modify_qp_refused.increment();
            Response::failure(&error)
        }
    })
}

/// Returns the current state, all attributes, and the sizes at creation.
pub(super) fn query<H: Hca>(core: &Core<H>, _session: &Session, request: &QueryQp) -> Result<Response, CmdError> {
    let qp = core.objects.qps.find(request.qp_handle)?;
    Ok(Response::new(&QueryQpResp { attrs: qp_attr::encode(&qp.verbs.query(), &qp.caps) }))
}

/// Destroys a QP. When this returns, nothing accesses its pages and it generates no more completions.
pub(super) fn destroy<H: Hca>(core: &Core<H>, _session: &Session, request: &DestroyQp) -> Result<Response, CmdError> {
    core.end_qp(request.qp_handle).map(|()| Response::header())
}

#[cfg(test)]
mod tests;
