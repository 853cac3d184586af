//! Modifying and querying a QP.

use std::sync::atomic::Ordering;

use pvrdma_verbs::VerbsError;
use pvrdma_verbs_types::{Gid, QpAttrMask, QpAttrs, QpState, qp_state};

use super::host_state::{self, STATE};
use super::queue_pair::Qp;
use crate::adapter::Adapter;
use crate::convert::{self, Route};
use crate::counters::bump;
use crate::limits::MAX_RD_ATOMIC;
use crate::reap;
use crate::verbs::HostQp;

/// Attributes that the host can change in RTS.
const IN_RTS: QpAttrMask = QpAttrMask::STATE
    .union(QpAttrMask::CUR_STATE)
    .union(QpAttrMask::ACCESS_FLAGS)
    .union(QpAttrMask::MIN_RNR_TIMER)
    .union(QpAttrMask::QKEY)
    .union(QpAttrMask::PATH_MIG_STATE);

impl Qp {
    pub(crate) fn modify(&self, new: &QpAttrs, mask: QpAttrMask) -> Result<(), VerbsError> {
        let result = self.modify_locked(new, mask);
        // This runs requests that may start in the new state, and the flush.
        self.kick();
        result
    }

    fn modify_locked(&self, new: &QpAttrs, mask: QpAttrMask) -> Result<(), VerbsError> {
        let host = self.host().ok_or(VerbsError::Gone)?;
        let from = self.refresh(&host);
        let to = if mask.contains(QpAttrMask::STATE) { new.state } else { from };
        let ends = matches!(to, QpState::Reset | QpState::Error);
        if mask.contains(QpAttrMask::CUR_STATE) && new.cur_state != from && !ends {
            return Err(VerbsError::Invalid("current state"));
        }
        if !(ends && to == from) {
            qp_state::check(self.qp_type, from, to, mask)?;
        }
        match to {
            QpState::Reset => return self.reset(&host),
            QpState::Error => {
                self.set_state(QpState::Error);
                self.stop(&host);
                return Ok(());
            }
            _ => {}
        }
        new.check(mask, MAX_RD_ATOMIC)?;
        self.change_host(&host, from, to, new, mask)?;
        self.attrs.lock().merge(new, mask);
        self.enter(from, to, new, mask);
        Ok(())
    }

    /// Enters the state that the host has reached, unless an error came first.
    fn enter(&self, from: QpState, to: QpState, new: &QpAttrs, mask: QpAttrMask) {
        let notify = mask.contains(QpAttrMask::EN_SQD_ASYNC_NOTIFY) && new.en_sqd_async_notify;
        if to == QpState::Rtr {
            self.datagram.store(self.adapter.port().active_mtu.bytes(), Ordering::Relaxed);
        }
        if to != QpState::Sqd {
            self.notify_drained.store(false, Ordering::Release);
        }
        // If other attributes change in SQD, the notification that was requested when the queue began to drain stays
        // pending.
        if !self.step(from, to) || to != QpState::Sqd || from == QpState::Sqd {
            return;
        }
        // A thread that still posts under the previous state has not drained yet. Taking its lock waits for it before
        // the report.
        drop(self.send.lock());
        self.notify_drained.store(notify, Ordering::Release);
        let view = self.adapter.memory.view();
        let inflight = self.send_inflight.lock();
        if inflight.is_empty() && self.state() == QpState::Sqd {
            self.drained(&view);
        }
    }

    /// Changes the host's QP. The host's QP never enters SQD and SQE.
    fn change_host(
        &self,
        host: &HostQp,
        from: QpState,
        to: QpState,
        new: &QpAttrs,
        mask: QpAttrMask,
    ) -> Result<(), VerbsError> {
        let ours = |state| matches!(state, QpState::Sqd | QpState::Sqe);
        let host_state = |state| if ours(state) { QpState::Rts } else { state };
        let mask = mask - QpAttrMask::EN_SQD_ASYNC_NOTIFY;
        let mask = if ours(from) || ours(to) { mask - QpAttrMask::CUR_STATE } else { mask };
        let (before, after) = (host_state(from), host_state(to));
        let rest = mask - QpAttrMask::STATE;
        if before == after && rest.is_empty() {
            return Ok(());
        }
        let attrs = QpAttrs { state: after, ..*new };
        if let Some(changed) = self.by_connection(host, to, &attrs, mask) {
            return changed;
        }
        let (mut attr, mut bits) = convert::attributes(&attrs, mask, self.adapter.shared.config.port);
        if mask.contains(QpAttrMask::AV) {
            let source = self.adapter.gids.get(new.av.sgid_index).ok_or(VerbsError::Invalid("source GID"))?;
            self.check_peer(source.gid, new.av.dgid)?;
            let dgid = self.adapter.shared.fabric.translate(new.av.dgid);
            let route = Route {
                flow_label: new.av.flow_label,
                hop_limit: new.av.hop_limit,
                traffic_class: new.av.traffic_class,
                service_level: new.av.service_level,
            };
            attr.ah_attr = convert::route(dgid, source.host.index, self.adapter.shared.config.port, &route);
        }
        if from == QpState::Sqd && !(IN_RTS.contains(mask)) {
            // Some attributes can only be changed while the queue is drained, so the host's queue is drained for a
            // moment.
            host.modify(&host_state::to(QpState::Sqd), STATE)?;
            attr.qp_state = i32::from(QpState::Sqd as u8);
            let changed = host.modify(&attr, bits | STATE);
            host.modify(&host_state::to(QpState::Rts), STATE)?;
            return Ok(changed?);
        }
        bits |= STATE;
        Ok(host.modify(&attr, bits)?)
    }

    /// Checks the peer rules. The adapter accepts packets of a connection only from its peer, so checking here
    /// suffices.
    pub(super) fn check_peer(&self, from: Gid, to: Gid) -> Result<(), VerbsError> {
        let Adapter { shared, member, counters, log, .. } = &*self.adapter;
        if shared.fabric.may_meet(member, from, to) {
            return Ok(());
        }
        bump(&counters.peers_refused);
        log.warn(module_path!(), format_args!("QP {} may not talk to {to} (peers)", self.qpn));
        Err(VerbsError::NotAllowed("the peer is not among those that the devices may talk to"))
    }

    /// Resets the QP: nothing is published until the QP is used again, and the rings start over.
    fn reset(&self, host: &HostQp) -> Result<(), VerbsError> {
        self.mute(true);
        self.set_state(QpState::Reset);
        self.adapter.cm_paths.end_connection_of(self.qpn.get());
        self.unconnected.store(false, Ordering::Release);
        // Requests that a thread is still posting belong to the previous epoch and end with it.
        self.wait_for_posters();
        let result = {
            let _changing = self.host_state.lock();
            host.modify(&host_state::to(QpState::Reset), STATE)
        };
        // Completions of the previous epoch are discarded. Receives of a shared queue are returned to that queue.
        reap::drain(&self.send_cq, &self.adapter, &self.qps);
        reap::drain(&self.recv_cq, &self.adapter, &self.qps);
        if let Some(side) = self.send.lock().as_mut() {
            side.reset();
        }
        if let Some(side) = self.recv.lock().as_mut() {
            side.source.reset();
        }
        let entries = self.send_inflight.lock().restart();
        self.recv_inflight.lock().restart();
        for entry in &entries {
            if let Some(bind) = &entry.bind {
                bind.ended(false);
            }
        }
        drop(entries);
        *self.attrs.lock() = QpAttrs::default();
        self.failing.store(false, Ordering::Release);
        self.last_wqe.store(false, Ordering::Release);
        self.notify_drained.store(false, Ordering::Release);
        self.mute(false);
        Ok(result?)
    }

    /// Returns the current state. The host may have put its QP into the error state without a completion that reports
    /// it.
    fn refresh(&self, host: &HostQp) -> QpState {
        if !matches!(self.state(), QpState::Reset | QpState::Error) {
            // A reset takes this lock as well, so the host's answer cannot belong to the previous epoch.
            let _changing = self.host_state.lock();
            if host.query(STATE).is_ok_and(|attr| convert::state(attr.qp_state) == QpState::Error) {
                self.set_error();
            }
        }
        self.state()
    }

    /// Like [`Self::query`], but with the state known to the daemon, and `None` if another thread holds the attributes.
    pub(crate) fn try_query(&self) -> Option<QpAttrs> {
        let state = self.state();
        let mut attrs = *self.attrs.try_lock()?;
        (attrs.state, attrs.cur_state) = (state, state);
        attrs.sq_draining = state == QpState::Sqd && !self.send_inflight.try_lock()?.is_empty();
        Some(attrs)
    }

    pub(crate) fn query(&self) -> QpAttrs {
        let before = self.state();
        let state = self.host().map_or(QpState::Error, |host| self.refresh(&host));
        if state == QpState::Error && before != state {
            // No other thread may have noticed the error, so the rings are flushed from here.
            self.kick();
        }
        let mut attrs = *self.attrs.lock();
        (attrs.state, attrs.cur_state) = (state, state);
        attrs.sq_draining = state == QpState::Sqd && !self.send_inflight.lock().is_empty();
        attrs
    }
}
