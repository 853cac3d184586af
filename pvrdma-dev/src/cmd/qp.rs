//! CREATE_QP, MODIFY_QP and QUERY_QP (sections 4.6 and 11).

use std::sync::Arc;
use std::sync::atomic::AtomicU8;

use pvrdma_guest_memory::PageList;
use pvrdma_verbs::{Hca, QpCaps, QpInit, QpType, Qpn, QueuePair, RecvSource, SendSource};

use super::cq::ring_pages;
use super::qp_attr;
use super::{Answer, Created};
use crate::abi::cmd::{CreateQp, CreateQpResp, CreateQpRespV2, ModifyQp, QueryQp, QueryQpResp, qp_type};
use crate::abi::regs::VERSION_QP_HANDLE;
use crate::adapter::Adapter;
use crate::datapath::{RecvRing, SendRing, SendRingParams};
use crate::dsr::Session;
use crate::error::CmdError;
use crate::objects::{Cq, GSI_HANDLE, KERNEL, Pd, Qp, Srq, Vacancy};
use crate::ring::recv_stride;

/// What a QP is made of, found and checked.
struct Parts<H: Hca> {
    qp_type: QpType,
    pd: Arc<Pd<H>>,
    send_cq: Arc<Cq<H>>,
    recv_cq: Arc<Cq<H>>,
    srq: Option<Arc<Srq<H>>>,
    caps: QpCaps,
}

pub(super) fn create<H: Hca>(adapter: &Adapter<H>, session: &Session, request: &CreateQp) -> Result<Answer, CmdError> {
    let parts = parts(adapter, request)?;
    let (vacancy, qpn) = number(adapter, session, parts.qp_type)?;
    let handle = vacancy.handle;
    let pages = pages(adapter, request, &parts)?;
    // Each of the two rings keeps the list.
    let charge = adapter.objects.budget.charge_pages(&pages, if parts.srq.is_some() { 1 } else { 2 })?;
    let (send_queue, recv_queue) = rings(request, &parts, pages)?;
    let verbs = adapter.hca.create_qp(QpInit {
        cookie: handle,
        qpn,
        qp_type: parts.qp_type,
        pd: &parts.pd.verbs,
        send_cq: &parts.send_cq.verbs,
        recv_cq: &parts.recv_cq.verbs,
        srq: parts.srq.as_ref().map(|srq| &srq.verbs),
        send_queue,
        recv_queue,
        caps: parts.caps,
        signal_all: request.sq_sig_all != 0,
    })?;
    let qpn = verbs.qpn();
    if session.version < VERSION_QP_HANDLE && qpn.get() != handle {
        // The driver would use the number as an index into its tables (section 2.3).
        verbs.destroy();
        return Err(CmdError::Invalid("QP number for this interface version", qpn.get().into()));
    }
    let Parts { pd, send_cq, recv_cq, srq, caps, qp_type } = parts;
    let qp = Qp { pd, send_cq, recv_cq, srq, verbs, caps, rung: AtomicU8::new(0), _charge: charge };
    if qp_type == QpType::Gsi {
        adapter.objects.qps.insert_at(handle, Arc::new(qp));
    } else {
        adapter.objects.qps.insert(vacancy, Arc::new(qp));
    }
    Ok(response(session, handle, qpn, &caps).of(Created::Qp(handle)))
}

/// Finds the objects and checks everything that needs no memory. The kernel checks next to nothing of what a process asks
/// for (section 13 B14).
fn parts<H: Hca>(adapter: &Adapter<H>, request: &CreateQp) -> Result<Parts<H>, CmdError> {
    let qp_type = match request.qp_type {
        qp_type::GSI => QpType::Gsi,
        qp_type::RC => QpType::Rc,
        qp_type::UD => QpType::Ud,
        other => return Err(CmdError::Invalid("QP type", other.into())),
    };
    let objects = &adapter.objects;
    let pd = objects.pds.find(request.pd_handle)?;
    if qp_type == QpType::Gsi && pd.owner != KERNEL {
        return Err(CmdError::Foreign("the general services QP"));
    }
    let send_cq = objects.cqs.find(request.send_cq_handle)?;
    let recv_cq = objects.cqs.find(request.recv_cq_handle)?;
    if send_cq.owner != pd.owner || recv_cq.owner != pd.owner {
        return Err(CmdError::Foreign("a completion queue of the QP"));
    }
    let srq = if request.is_srq == 0 { None } else { Some(objects.srqs.find(request.srq_handle)?) };
    if srq.as_ref().is_some_and(|srq| srq.pd.owner != pd.owner) {
        return Err(CmdError::Foreign("the SRQ of the QP"));
    }
    let requests = |count: u32| {
        let fits = count.is_power_of_two() && count <= adapter.limits.max_qp_wr;
        if fits { Ok(count) } else { Err(CmdError::Invalid("number of requests", count.into())) }
    };
    let sges = |count: u32| {
        // The limit is a power of two, so rounding up as the kernel's driver does stays inside.
        if count <= adapter.limits.max_sge { Ok(count) } else { Err(CmdError::Invalid("number of SGEs", count.into())) }
    };
    // With an SRQ the receive half of the request means nothing.
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

/// Handle and number. Before version 20 they are the same; from then on a number comes back only after 256 rounds through
/// the table, so that late packets for an earlier owner of the handle miss (section 2.5).
fn number<H: Hca>(adapter: &Adapter<H>, session: &Session, qp_type: QpType) -> Result<(Vacancy, Qpn), CmdError> {
    let table = &adapter.objects.qps;
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

/// The pages of the rings: state, `send_chunks` of send elements, the rest for receive elements (section 5.3).
fn pages<H: Hca>(adapter: &Adapter<H>, request: &CreateQp, parts: &Parts<H>) -> Result<PageList, CmdError> {
    let caps = &parts.caps;
    let recv_bytes = if parts.srq.is_some() {
        0
    } else {
        let stride = recv_stride(caps.max_recv_sge)
            .ok_or_else(|| CmdError::Invalid("number of SGEs", caps.max_recv_sge.into()))?;
        u64::from(caps.max_recv_wr).saturating_mul(stride.into())
    };
    let recv_pages = recv_bytes.div_ceil(pvrdma_guest_memory::PAGE_SIZE);
    let needed = recv_pages.saturating_add(u64::from(request.send_chunks)).saturating_add(1);
    ring_pages(adapter, request.pdir_dma, request.total_chunks.into(), needed)
}

type Queues = (Box<dyn SendSource>, Option<Box<dyn RecvSource>>);

/// The rings. That the elements fit their pages is checked where the rings are made.
fn rings<H: Hca>(request: &CreateQp, parts: &Parts<H>, pages: PageList) -> Result<Queues, CmdError> {
    let caps = &parts.caps;
    let send_pages = u32::from(request.send_chunks);
    let first_recv_page = send_pages.saturating_add(1);
    let recv_pages = pages.pages().saturating_sub(first_recv_page);
    let recv_queue: Option<Box<dyn RecvSource>> = match parts.srq {
        Some(_) => None,
        None => Some(Box::new(RecvRing::new(
            pages.clone(),
            first_recv_page,
            recv_pages,
            caps.max_recv_wr,
            caps.max_recv_sge,
        )?)),
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
    Ok((Box::new(send_queue), recv_queue))
}

fn response(session: &Session, handle: u32, qpn: Qpn, caps: &QpCaps) -> Answer {
    let &QpCaps { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge } = caps;
    let qpn = qpn.get();
    if session.version < VERSION_QP_HANDLE {
        Answer::new(&CreateQpResp { qpn, max_send_wr, max_recv_wr, max_send_sge, max_recv_sge })
    } else {
        Answer::new(&CreateQpRespV2 { qpn, qp_handle: handle, max_send_wr, max_recv_wr, max_send_sge, max_recv_sge })
    }
}

/// A refusal is an answer here, not an error of the command: the driver passes it on as EINVAL (section 4.2).
pub(super) fn modify<H: Hca>(adapter: &Adapter<H>, request: &ModifyQp) -> Result<Answer, CmdError> {
    let qp = adapter.objects.qps.find(request.qp_handle)?;
    let result =
        qp_attr::parse(&request.attrs, request.attr_mask, adapter.caps.max_qp_rd_atom, adapter.limits.gid_table)
            .and_then(|(attrs, mask)| qp.verbs.modify(&attrs, mask).map_err(CmdError::from));
    Ok(match result {
        Ok(()) => Answer::header(),
        Err(error) => {
            adapter
                .log
                .warn(&adapter.config.name, format_args!("MODIFY_QP of QP {} refused: {error}", request.qp_handle));
            adapter.stats.counts.modify_qp_refused.increment();
            Answer::failure(&error)
        }
    })
}

/// True state, all attributes, sizes as created.
pub(super) fn query<H: Hca>(adapter: &Adapter<H>, request: &QueryQp) -> Result<Answer, CmdError> {
    let qp = adapter.objects.qps.find(request.qp_handle)?;
    Ok(Answer::new(&QueryQpResp { attrs: qp_attr::encode(&qp.verbs.query(), &qp.caps) }))
}
