//! Saving and restoring the halves of a queue pair, and its attributes.

use pvrdma_packet::MacAddr;
use pvrdma_roce::saved::{restore_receive, restore_send, save_receive, save_send};
use pvrdma_saved_state::{rxe as saved, work};
use pvrdma_verbs::VerbsError;
use pvrdma_verbs_types::{
    Access, AddressVector, Gid, GidType, Mtu, Psn, QpAttrMask, QpAttrs, QpState, Qpn, RecvWr, SendWr,
};

use super::Qp;
use super::contact::Connection;
use super::requester::{Progress, Requester};
use super::responder::Responder;
use crate::gid::BoundGid;
use crate::limits::{FAST_REGISTER_PAGES, MAX_RD_ATOMIC, VLANS, hca_limits};

/// Attributes whose ranges are checked. The port number is 0 before INIT.
const CHECKED: QpAttrMask = QpAttrMask::PKEY_INDEX
    .union(QpAttrMask::TIMEOUT)
    .union(QpAttrMask::RETRY_CNT)
    .union(QpAttrMask::RNR_RETRY)
    .union(QpAttrMask::MIN_RNR_TIMER)
    .union(QpAttrMask::MAX_QP_RD_ATOMIC)
    .union(QpAttrMask::MAX_DEST_RD_ATOMIC);

impl Qp {
    /// Saves the state that both halves share: QP state, draining of the send queue, and source address.
    pub(crate) fn save(&self) -> (QpState, bool, Option<saved::Address>) {
        // The parameters of its creation are the device's.
        let Self {
            adapter: _,
            qpn: _,
            qp_type: _,
            pd: _,
            cookie: _,
            signal_all: _,
            max_send_sge: _,
            send_cq: _,
            recv_cq: _,
            srq: _,
            state,
            awaited: _,
            waiter: _,
            source,
            responder: _,
        } = self;
        (state.get(), state.is_draining(), source.lock().map(save_address))
    }

    /// Restores the state that both halves share.
    pub(crate) fn restore(&self, state: QpState, draining: bool, source: Option<BoundGid>) {
        self.state.change(QpState::Reset, state);
        self.state.set_draining(draining && state == QpState::Sqd);
        *self.source.lock() = source;
    }
}

impl Requester {
    /// Saves the half, without its ring and its route. No thread runs it.
    pub(crate) fn save(&self, route: saved::Route) -> saved::Requester {
        let Self {
            source: _,
            broken,
            work,
            current,
            wait: _,
            pauses: _,
            retries,
            rnr_retries,
            rnr_backoff: _,
            armed: _,
            attrs: _,
            notify_drained,
            pending: _,
            moved: [requests, bytes],
            flow: _,
        } = self;
        saved::Requester {
            broken: *broken,
            current: current.map(|_| save_send(work)),
            retries: (*retries).into(),
            rnr_retries: (*rnr_retries).into(),
            notify_drained: *notify_drained,
            requests: *requests,
            bytes: *bytes,
            route: Some(route),
        }
    }

    /// Restores the half of a new queue pair, without its route. The request in flight starts from its beginning.
    ///
    /// # Errors
    /// The state is not one that it can be in.
    pub(crate) fn restore(
        &mut self,
        attrs: &QpAttrs,
        max_sge: u8,
        state: saved::Requester,
    ) -> Result<Option<saved::Route>, VerbsError> {
        let saved::Requester { broken, current, retries, rnr_retries, notify_drained, requests, bytes, route } = state;
        if let Some(work) = current {
            self.work = restore_work(work, max_sge)?;
            self.current = Some(Progress::default());
        }
        self.attrs = *attrs;
        self.retries = at_most("number of retries", retries, attrs.retry_cnt)?;
        self.rnr_retries = at_most("number of RNR retries", rnr_retries, attrs.rnr_retry)?;
        (self.broken, self.notify_drained, self.moved) = (broken, notify_drained, [requests, bytes]);
        Ok(route)
    }

    /// Returns the state of the ring. `None`: the queue pair was destroyed, or its ring cannot be saved.
    pub(crate) fn save_ring(&self) -> Option<pvrdma_verbs::SavedRing> {
        self.source.save()
    }
}

impl Responder {
    /// Saves the half, without its ring. No thread runs it. `wire` is its state for the wire.
    pub(crate) fn save(&self, wire: Option<saved::WireResponder>) -> saved::Responder {
        let Self {
            source: _,
            broken,
            recv,
            in_use,
            pending: _,
            receives_published: _,
            lost: _,
            epoch: _,
            attrs: _,
            established,
            connection,
            last_wqe_raised,
            // A device that moves on before it has run prompts no peer: the peer's timer does it.
            left_peer: _,
            own_gid: _,
        } = self;
        saved::Responder {
            broken: *broken,
            receive: in_use.then(|| save_receive(recv)),
            established: *established,
            last_wqe_raised: *last_wqe_raised,
            connection: connection.save(),
            wire,
        }
    }

    /// Restores the half of a new queue pair, without its state for the wire. A message that had arrived in part from a
    /// requester of this process starts from its beginning.
    ///
    /// # Errors
    /// The state is not one that it can be in.
    pub(crate) fn restore(
        &mut self,
        attrs: &QpAttrs,
        state: saved::Responder,
    ) -> Result<Option<saved::WireResponder>, VerbsError> {
        let saved::Responder { broken, receive, established, last_wqe_raised, connection, wire } = state;
        if let Some(receive) = receive {
            self.recv = restore_taken(&receive)?;
            self.in_use = true;
        }
        self.attrs = *attrs;
        self.connection = Connection::restore(connection);
        if wire.is_some() && self.connection != Connection::WIRE {
            return Err(VerbsError::Invalid("connection of a responder on the wire"));
        }
        (self.broken, self.established, self.last_wqe_raised) = (broken, established, last_wqe_raised);
        Ok(wire)
    }

    /// Returns the state of the receive ring: `Some(None)` with an SRQ. `None`: it cannot be saved.
    #[expect(clippy::option_option, reason = "no ring is not a failure")]
    pub(crate) fn save_ring(&self) -> Option<Option<pvrdma_verbs::SavedRing>> {
        self.source.as_ref().map(|source| source.save()).map_or(Some(None), |ring| Some(Some(ring?)))
    }

    /// Bytes of the receive in use. `None`: none is in use.
    pub(crate) fn receive_length(&self) -> Option<u64> {
        self.in_use.then(|| pvrdma_verbs_types::Sge::total_length(&self.recv.sges))
    }
}

/// Returns `true` if a saved send request is no longer than one of a queue pair with `max_sge` SGEs.
pub(crate) fn is_short(work: &work::SendWr, max_sge: u8) -> bool {
    let few_pages = match &work.operation {
        Some(work::Operation::FastRegister(work::FastRegister { pages: Some(pages), .. })) => {
            pages.count.iter().copied().map(u64::from).sum::<u64>() <= FAST_REGISTER_PAGES.into()
        }
        _ => true,
    };
    few_pages && work.sges.len() <= usize::from(max_sge)
}

/// Restores a send request of a queue pair whose requests have up to `max_sge` SGEs.
///
/// # Errors
/// The request is not valid.
pub(crate) fn restore_work(work: work::SendWr, max_sge: u8) -> Result<SendWr, VerbsError> {
    let short = is_short(&work, max_sge);
    restore_send(work).ok().filter(|_| short).ok_or(VerbsError::Invalid("send request"))
}

fn restore_taken(receive: &work::RecvWr) -> Result<RecvWr, VerbsError> {
    let few = receive.sges.len() <= hca_limits().max_sge as usize;
    if few && !receive.malformed { Ok(restore_receive(receive)) } else { Err(VerbsError::Invalid("receive request")) }
}

fn at_most(what: &'static str, value: u32, most: u8) -> Result<u8, VerbsError> {
    u8::try_from(value).ok().filter(|&value| value <= most).ok_or(VerbsError::Invalid(what))
}

/// Saves attributes. The state is saved elsewhere.
pub(crate) fn save_attrs(attrs: &QpAttrs) -> saved::QpAttributes {
    let QpAttrs {
        state: _,
        cur_state: _,
        path_mtu,
        qkey,
        rq_psn,
        sq_psn,
        dest_qpn,
        access,
        pkey_index,
        en_sqd_async_notify,
        sq_draining: _,
        max_rd_atomic,
        max_dest_rd_atomic,
        min_rnr_timer,
        port_num,
        timeout,
        retry_cnt,
        rnr_retry,
        path_mig_state,
        av,
    } = *attrs;
    saved::QpAttributes {
        path_mtu: path_mtu as u32,
        qkey,
        rq_psn: rq_psn.get(),
        sq_psn: sq_psn.get(),
        dest_qpn: dest_qpn.get(),
        access: access.bits(),
        pkey_index: pkey_index.into(),
        en_sqd_async_notify,
        max_rd_atomic: max_rd_atomic.into(),
        max_dest_rd_atomic: max_dest_rd_atomic.into(),
        min_rnr_timer: min_rnr_timer.into(),
        port_num: port_num.into(),
        timeout: timeout.into(),
        retry_cnt: retry_cnt.into(),
        rnr_retry: rnr_retry.into(),
        path_mig_state,
        av: Some(save_av(&av)),
    }
}

/// Restores attributes.
///
/// # Errors
/// The first one that is out of range.
pub(crate) fn restore_attrs(state: &saved::QpAttributes) -> Result<QpAttrs, VerbsError> {
    let saved::QpAttributes {
        path_mtu,
        qkey,
        rq_psn,
        sq_psn,
        dest_qpn,
        access,
        pkey_index,
        en_sqd_async_notify,
        max_rd_atomic,
        max_dest_rd_atomic,
        min_rnr_timer,
        port_num,
        timeout,
        retry_cnt,
        rnr_retry,
        path_mig_state,
        av,
    } = state;
    if rq_psn | sq_psn | dest_qpn > 0x00ff_ffff || *port_num > 1 {
        return Err(VerbsError::Invalid("PSN, QPN or port number"));
    }
    let attrs = QpAttrs {
        state: QpState::Reset,
        cur_state: QpState::Reset,
        path_mtu: Mtu::try_from(*path_mtu).map_err(|_| VerbsError::Invalid("path MTU"))?,
        qkey: *qkey,
        rq_psn: Psn::new(*rq_psn),
        sq_psn: Psn::new(*sq_psn),
        dest_qpn: Qpn::new(*dest_qpn),
        access: Access::from_bits(*access).ok_or(VerbsError::Invalid("access rights"))?,
        pkey_index: narrow("P_Key index", *pkey_index)?,
        en_sqd_async_notify: *en_sqd_async_notify,
        sq_draining: false,
        max_rd_atomic: narrow("initiator depth", *max_rd_atomic)?,
        max_dest_rd_atomic: narrow("responder resources", *max_dest_rd_atomic)?,
        min_rnr_timer: narrow("RNR timer", *min_rnr_timer)?,
        port_num: narrow("port number", *port_num)?,
        timeout: narrow("timeout", *timeout)?,
        retry_cnt: narrow("retry count", *retry_cnt)?,
        rnr_retry: narrow("RNR retry count", *rnr_retry)?,
        path_mig_state: *path_mig_state,
        av: restore_av(av.as_ref().ok_or(VerbsError::Invalid("attributes without a path"))?)?,
    };
    attrs.check(CHECKED, MAX_RD_ATOMIC)?;
    Ok(attrs)
}

fn save_av(av: &AddressVector) -> saved::AddressVector {
    let AddressVector { dgid, sgid_index, flow_label, hop_limit, traffic_class, service_level, dmac } = *av;
    saved::AddressVector {
        dgid: dgid.0.to_vec(),
        sgid_index: sgid_index.into(),
        flow_label,
        hop_limit: hop_limit.into(),
        traffic_class: traffic_class.into(),
        service_level: service_level.into(),
        dmac: dmac.0.to_vec(),
    }
}

fn restore_av(av: &saved::AddressVector) -> Result<AddressVector, VerbsError> {
    let saved::AddressVector { dgid, sgid_index, flow_label, hop_limit, traffic_class, service_level, dmac } = av;
    if *flow_label > 0xf_ffff {
        return Err(VerbsError::Invalid("flow label"));
    }
    Ok(AddressVector {
        dgid: restore_gid(dgid)?,
        sgid_index: narrow("GID index", *sgid_index)?,
        flow_label: *flow_label,
        hop_limit: narrow("hop limit", *hop_limit)?,
        traffic_class: narrow("traffic class", *traffic_class)?,
        service_level: narrow("service level", *service_level)?,
        dmac: MacAddr(dmac.as_slice().try_into().map_err(|_| VerbsError::Invalid("MAC address"))?),
    })
}

fn narrow<T: TryFrom<u32>>(what: &'static str, value: u32) -> Result<T, VerbsError> {
    T::try_from(value).map_err(|_| VerbsError::Invalid(what))
}

/// Saves a bound GID.
pub(crate) fn save_address(address: BoundGid) -> saved::Address {
    let BoundGid { gid, kind, vlan } = address;
    saved::Address { gid: gid.0.to_vec(), v1: kind == GidType::RoceV1, vlan: vlan.map(u32::from) }
}

/// Restores a bound GID.
///
/// # Errors
/// It is not valid.
pub(crate) fn restore_address(address: &saved::Address) -> Result<BoundGid, VerbsError> {
    let saved::Address { gid, v1, vlan } = address;
    let kind = if *v1 { GidType::RoceV1 } else { GidType::RoceV2 };
    let vlan = match vlan {
        None => None,
        Some(vlan) => {
            let vlan = u16::try_from(*vlan).ok().filter(|vlan| VLANS.contains(vlan));
            Some(vlan.ok_or(VerbsError::Invalid("VLAN"))?)
        }
    };
    Ok(BoundGid { gid: restore_gid(gid)?, kind, vlan })
}

fn restore_gid(bytes: &[u8]) -> Result<Gid, VerbsError> {
    bytes.try_into().map(Gid).map_err(|_| VerbsError::Invalid("GID"))
}
