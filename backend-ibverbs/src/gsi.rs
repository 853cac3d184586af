//! The connection manager's queue pair.
//!
//! The host's GSI QP belongs to its kernel and is not available to user space. This one is therefore implemented in
//! software: it reaches the connection managers of the other guests of this process directly, and all others through
//! the [`ConnectionManager`] or, with `cm=host`, [`HostCm`]. The connections that they establish use queue pairs of the
//! host.
//!
//! [`ConnectionManager`]: crate::cm::ConnectionManager

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use pvrdma_base::{EndOnPanic, Snapshot};
use pvrdma_guest_memory::DmaView;
use pvrdma_verbs::{RecvSource, SendSource, VerbsError};
use pvrdma_verbs_types::{
    Access, Completion, GidType, NetworkType, QpAttrMask, QpAttrs, QpState, QpType, Qpn, RecvWr, SendData, SendFlags,
    SendOp, SendWr, Sge, WcFlags, WcOpcode, WcStatus, qp_state,
};
use serde::Serialize;

use crate::adapter::Adapter;
use crate::cm::{Outgoing, Sender};
use crate::counters::bump;
use crate::cq::Cq;
use crate::datagram::{Datagram, HEADER, header};
use crate::gid::{Bound, DatagramReceiver};
use crate::host_cm::HostCm;
use crate::limits::MAX_RD_ATOMIC;
use crate::mr::MrTable;
use crate::qp::QpParts;
use crate::verbs::HostPd;

/// Maximum length of a datagram, in bytes: management datagrams have 256 bytes.
const MAX_DATAGRAM: u64 = 2048;
/// Maximum number of requests per doorbell; the guest's kernel rings for each.
const BUDGET: usize = 1024;

/// The connection manager's queue pair.
pub(crate) struct Gsi {
    adapter: Arc<Adapter>,
    mrs: Arc<MrTable>,
    pd: Arc<HostPd>,
    cookie: u32,
    signal_all: bool,
    send_cq: Arc<Cq>,
    recv_cq: Arc<Cq>,
    attrs: Mutex<QpAttrs>,
    /// `None` once it is destroyed.
    send: Mutex<Option<(Box<dyn SendSource>, SendWr)>>,
    recv: Mutex<Option<Receives>>,
    /// Sender for datagrams to connection managers outside this process.
    sender: Mutex<Option<Sender>>,
    /// Connections through the host, if it makes them.
    host_cm: Mutex<Option<HostCm>>,
    /// Set once the log has reported that the guest's address cannot be used outside this process.
    warned: AtomicBool,
}

/// State of the receive queue.
struct Receives {
    source: Box<dyn RecvSource>,
    /// The current receive, if `in_use` is set. A datagram that did not fit leaves it for the next one.
    wr: RecvWr,
    in_use: bool,
}

impl Receives {
    fn new(source: Box<dyn RecvSource>) -> Self {
        Self { source, wr: RecvWr::default(), in_use: false }
    }

    /// Takes the next receive, unless one is in use. Returns `false` if there is none.
    fn take(&mut self, view: &DmaView<'_>) -> bool {
        self.in_use = self.in_use || self.source.pop(view, &mut self.wr).unwrap_or(false);
        self.in_use
    }
}

/// Snapshot of the queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct GsiInspect {
    state: Snapshot<QpState>,
    /// Connection managers outside this process can be reached.
    leads_out: Snapshot<bool>,
}

impl fmt::Debug for Gsi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gsi").field("device", &self.adapter.name).finish_non_exhaustive()
    }
}

impl Gsi {
    pub(crate) fn create(adapter: &Arc<Adapter>, mrs: &Arc<MrTable>, parts: QpParts) -> Result<Arc<Self>, VerbsError> {
        let mut slot = adapter.member.gsi.lock();
        if slot.as_ref().is_some_and(|gsi| gsi.strong_count() > 0) {
            return Err(VerbsError::InUse("QPN"));
        }
        let manager = adapter.shared.manager.as_ref();
        let gsi = Arc::new(Self {
            sender: Mutex::new(manager.and_then(|manager| manager.sender(&adapter.log, &adapter.counters))),
            host_cm: Mutex::default(),
            warned: AtomicBool::new(false),
            adapter: Arc::clone(adapter),
            mrs: Arc::clone(mrs),
            pd: parts.pd,
            cookie: parts.cookie,
            signal_all: parts.signal_all,
            send_cq: parts.send_cq,
            recv_cq: parts.recv_cq,
            attrs: Mutex::default(),
            send: Mutex::new(Some((parts.send_queue, SendWr::default()))),
            recv: Mutex::new(parts.recv_queue.map(Receives::new)),
        });
        let receiver = Arc::downgrade(&gsi);
        *slot = Some(receiver as Weak<dyn DatagramReceiver>);
        drop(slot);
        if let Some(libraries) = &adapter.shared.host_cm {
            let started = HostCm::start(adapter, libraries).inspect_err(|error| {
                adapter.log.error(module_path!(), format_args!("the host cannot connect the guest: {error}"));
            });
            *gsi.host_cm.lock() = started.ok();
        }
        Ok(gsi)
    }

    fn state(&self) -> QpState {
        self.attrs.lock().state
    }

    /// Returns a snapshot. Does not wait for locks.
    pub(crate) fn inspect(&self) -> GsiInspect {
        GsiInspect { state: self.attrs.try_lock().map(|attrs| attrs.state).into(), leads_out: self.leads_out().into() }
    }

    /// Returns `true` if connection managers outside this process can be reached, or `None` if another thread holds the
    /// state.
    fn leads_out(&self) -> Option<bool> {
        Some(self.sender.try_lock()?.is_some() || self.host_cm.try_lock()?.is_some())
    }

    /// Like [`Self::query`], but returns `None` if another thread holds the attributes.
    pub(crate) fn try_query(&self) -> Option<QpAttrs> {
        self.attrs.try_lock().map(|attrs| *attrs)
    }

    pub(crate) fn modify(&self, new: &QpAttrs, mask: QpAttrMask) -> Result<(), VerbsError> {
        {
            let mut send = self.send.lock();
            let Some((send, _)) = send.as_mut() else { return Err(VerbsError::Gone) };
            let mut recv = self.recv.lock();
            let mut attrs = self.attrs.lock();
            let from = attrs.state;
            let to = if mask.contains(QpAttrMask::STATE) { new.state } else { from };
            qp_state::check(QpType::Gsi, from, to, mask)?;
            if to == QpState::Reset {
                *attrs = QpAttrs::default();
                send.reset();
                if let Some(recv) = recv.as_mut() {
                    recv.in_use = false;
                    recv.source.reset();
                }
                return Ok(());
            }
            if to != QpState::Error {
                new.check(mask, MAX_RD_ATOMIC)?;
                attrs.merge(new, mask);
            }
            (attrs.state, attrs.cur_state) = (to, to);
        }
        self.run_send();
        if self.state() == QpState::Error {
            self.flush_recv();
        }
        Ok(())
    }

    pub(crate) fn query(&self) -> QpAttrs {
        *self.attrs.lock()
    }

    pub(crate) fn destroy(&self) {
        let sides = (self.send.lock().take(), self.recv.lock().take());
        drop(sides);
        let outside = (self.sender.lock().take(), self.host_cm.lock().take());
        drop(outside);
        self.adapter.member.gsi.lock().take_if(|gsi| std::ptr::addr_eq(gsi.as_ptr(), self));
    }

    /// Sends the datagrams that the guest has posted.
    pub(crate) fn run_send(&self) {
        let _end = EndOnPanic::new("the delivery of management datagrams");
        for _ in 0..BUDGET {
            let mut guard = self.send.lock();
            let Some((source, wr)) = guard.as_mut() else { return };
            let state = self.state();
            if !matches!(state, QpState::Rts | QpState::Sqe | QpState::Error) {
                return;
            }
            let taken = {
                let view = self.adapter.memory.view();
                match source.pop(&view, wr) {
                    Ok(true) => source.retire(&view),
                    Ok(false) => return,
                    Err(error) => {
                        self.adapter.log.warn(module_path!(), format_args!("send queue of the GSI QP: {error}"));
                        self.attrs.lock().state = QpState::Error;
                        return;
                    }
                }
                let result = if state == QpState::Rts { self.take(&view, wr) } else { Err(WcStatus::Flushed) };
                let status = result.as_ref().err().copied().unwrap_or(WcStatus::Success);
                if status != WcStatus::Success && status != WcStatus::Flushed {
                    self.attrs.lock().state = QpState::Sqe;
                }
                if status != WcStatus::Success || self.signal_all || wr.flags.contains(SendFlags::SIGNALED) {
                    let completion = Completion::new(self.cookie, wr.wr_id, wr.op.completion_opcode(), status);
                    self.send_cq.publish(&self.adapter, &view, &completion);
                }
                result
            };
            // The lock is released first: the peer may be this very QP, and delivery may write to this guest's memory.
            drop(guard);
            if let Ok((source, datagram)) = taken {
                self.deliver(&source, datagram);
            }
        }
    }

    /// Copies a request from guest memory.
    fn take(&self, view: &DmaView<'_>, wr: &SendWr) -> Result<(Bound, Datagram), WcStatus> {
        let SendOp::Send { data, to: Some(to) } = &wr.op else { return Err(WcStatus::LocalQpOperation) };
        let immediate = match *data {
            SendData::None => None,
            SendData::Immediate(data) => Some(data),
            SendData::Invalidate(_) => return Err(WcStatus::LocalQpOperation),
        };
        let source = self.adapter.gids.get(to.sgid_index).ok_or(WcStatus::LocalQpOperation)?;
        let total: u64 = wr.sges.iter().map(|sge| u64::from(sge.length)).sum();
        if total > MAX_DATAGRAM {
            return Err(WcStatus::LocalLength);
        }
        let mut payload = Vec::new();
        for sge in self.pieces(&wr.sges, Access::empty()).ok_or(WcStatus::LocalProtection)? {
            let start = payload.len();
            payload.resize(start + sge.length as usize, 0);
            let room = payload.get_mut(start..).unwrap_or_default();
            view.read(sge.addr, room).map_err(|_| WcStatus::LocalProtection)?;
        }
        let solicited = wr.flags.contains(SendFlags::SOLICITED);
        Ok((source, Datagram { from: source.gid, to: *to, kind: source.kind, immediate, solicited, payload }))
    }

    /// Returns the pieces that are not empty, if all of them are bus addresses.
    fn pieces<'a>(&self, sges: &'a [Sge], need: Access) -> Option<Vec<&'a Sge>> {
        let pieces: Vec<_> = sges.iter().filter(|sge| sge.length != 0).collect();
        pieces.iter().all(|sge| self.mrs.is_bus(&self.pd, sge.lkey, need)).then_some(pieces)
    }

    fn deliver(&self, source: &Bound, datagram: Datagram) {
        let dgid = datagram.to.dgid;
        let Adapter { shared, member, counters, .. } = &*self.adapter;
        if !shared.fabric.may_meet(member, source.gid, dgid) {
            return bump(&counters.peers_refused);
        }
        // Guests of this process can connect their queue pairs themselves only on RoCE.
        let peer = shared.fabric.owner(datagram.to.dgid).filter(|_| shared.transport.has_ip_gids());
        let delivered = match peer {
            Some(peer) => datagram.to.qpn == Qpn::GSI && peer.receive(&datagram),
            None if shared.host_cm.is_some() => {
                let taken = self.adapter.cm_paths.submit(*source, datagram);
                return if taken { bump(&counters.cm_sent) } else { bump(&counters.cm_overflow) };
            }
            None => return self.send_away(source, &datagram),
        };
        bump(if delivered { &self.adapter.counters.gsi_delivered } else { &self.adapter.counters.gsi_dropped });
        if !delivered {
            log::debug!("{}: a management datagram to {dgid} is lost", self.adapter.name);
        }
    }

    /// Sends a datagram to a peer outside this process.
    fn send_away(&self, source: &Bound, datagram: &Datagram) {
        let counters = &self.adapter.counters;
        let sender = self.sender.lock();
        let Some(sender) = sender.as_ref() else {
            log::debug!("{}: a management datagram to {} is lost", self.adapter.name, datagram.to.dgid);
            return bump(&counters.gsi_dropped);
        };
        if !source.is_own() && !self.warned.swap(true, Ordering::Relaxed) {
            self.adapter.log.warn(
                module_path!(),
                format_args!(
                    "the host does not have {}, so the connection manager reaches guests of this process only",
                    source.gid
                ),
            );
        }
        match Outgoing::new(source, datagram).map(|outgoing| sender.send(outgoing)) {
            Some(true) => {}
            Some(false) => bump(&counters.cm_overflow),
            None => bump(&counters.cm_refused),
        }
    }

    /// Copies header and payload to guest memory.
    fn scatter(&self, view: &DmaView<'_>, sges: &[Sge], datagram: &Datagram) -> WcStatus {
        let mut bytes = header(datagram).to_vec();
        bytes.extend_from_slice(&datagram.payload);
        let Some(pieces) = self.pieces(sges, Access::LOCAL_WRITE) else { return WcStatus::LocalProtection };
        let mut rest = &bytes[..];
        for sge in pieces {
            let (now, later) = rest.split_at(rest.len().min(sge.length as usize));
            if view.write(sge.addr, now).is_err() {
                return WcStatus::LocalProtection;
            }
            rest = later;
        }
        WcStatus::Success
    }

    fn flush_recv(&self) {
        let mut guard = self.recv.lock();
        let Some(receives) = guard.as_mut() else { return };
        let view = self.adapter.memory.view();
        for _ in 0..BUDGET {
            if !receives.take(&view) {
                return;
            }
            receives.in_use = false;
            let completion = Completion::new(self.cookie, receives.wr.wr_id, WcOpcode::Recv, WcStatus::Flushed);
            self.recv_cq.publish(&self.adapter, &view, &completion);
        }
    }
}

impl DatagramReceiver for Gsi {
    fn receive(&self, datagram: &Datagram) -> bool {
        let mut guard = self.recv.lock();
        let Some(receives) = guard.as_mut() else { return false };
        if !matches!(self.state(), QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe) {
            return false;
        }
        let view = self.adapter.memory.view();
        if !receives.take(&view) {
            return false;
        }
        let wr = &receives.wr;
        if (HEADER + datagram.payload.len()) as u64 > Sge::total_length(&wr.sges) {
            // Fault class D of IBA 9.9.3: the datagram is dropped, and the receive stays for the next one.
            return false;
        }
        receives.in_use = false;
        let status = self.scatter(&view, &wr.sges, datagram);
        let mut completion = Completion::new(self.cookie, wr.wr_id, WcOpcode::Recv, status);
        if status == WcStatus::Success {
            completion.byte_len = u32::try_from(HEADER + datagram.payload.len()).unwrap_or(u32::MAX);
            completion.flags = WcFlags::GRH;
            if let Some(immediate) = datagram.immediate {
                completion.flags |= WcFlags::IMMEDIATE;
                completion.immediate = immediate;
            }
            completion.src_qpn = Qpn::GSI;
            completion.service_level = datagram.to.service_level;
            completion.solicited = datagram.solicited;
            completion.network = Some(match (datagram.kind, datagram.from.ipv4()) {
                (GidType::RoceV1, _) => NetworkType::RoceV1,
                (GidType::RoceV2, Some(_)) => NetworkType::Ipv4,
                (GidType::RoceV2, None) => NetworkType::Ipv6,
            });
        }
        self.recv_cq.publish(&self.adapter, &view, &completion);
        status == WcStatus::Success
    }
}
