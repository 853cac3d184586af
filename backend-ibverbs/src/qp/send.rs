//! The send side: from the guest's ring to the host's queue.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use pvrdma_guest_memory::DmaView;
use pvrdma_verbs::{
    Access, Completion, MAX_MESSAGE, QpState, QpType, SendData, SendFlags, SendOp, SendSource, SendWr, UdDestination,
    WcOpcode, WcStatus,
};

use super::{FLUSH_BUDGET, Qp};
use crate::adapter::bump;
use crate::convert::{self, Route};
use crate::flight::{SendEntry, Ticket};
use crate::mr::{Bind, FastStep};
use crate::sys::{self, AhAttr, SEND_FENCE, SEND_SIGNALED, SEND_SOLICITED};
use crate::verbs::{HostAh, HostOp, HostQp, SendBatch};

/// Requests posted to the host at once.
const BATCH: usize = 32;
/// Address handles that a QP keeps.
const MAX_AHS: usize = 256;
/// Bytes of an atomic operand.
const ATOMIC: u64 = 8;

/// The guest's ring and room to work.
pub(super) struct SendSide {
    source: Box<dyn SendSource>,
    work: SendWr,
    /// `work` holds a request that waits for those before it.
    held: bool,
    batch: SendBatch,
    sges: Vec<sys::Sge>,
    /// Requests that fail without the host, once those before them have ended.
    failed: VecDeque<(SendEntry, WcStatus)>,
    /// Ways to peers of datagrams.
    ahs: HashMap<Destination, Arc<HostAh>>,
}

type Destination = ([u8; 16], u8, Route);

/// What a request became.
enum Step {
    Post(HostOp, SendEntry),
    Fail(SendEntry, WcStatus),
    Hold,
}

impl SendSide {
    pub(super) fn new(source: Box<dyn SendSource>) -> Self {
        Self {
            source,
            work: SendWr::default(),
            held: false,
            batch: SendBatch::default(),
            sges: Vec::new(),
            failed: VecDeque::new(),
            ahs: HashMap::new(),
        }
    }

    /// Starts over.
    pub(super) fn reset(&mut self) {
        self.source.reset();
        self.held = false;
        self.failed.clear();
        self.ahs.clear();
    }
}

impl Qp {
    /// Posts sends, or flushes them.
    pub(super) fn run_send(&self) {
        // The side first: who ends the QP takes the host's object and then waits for us to be done with it.
        let mut guard = self.send.lock();
        let Some(side) = guard.as_mut() else { return };
        let Some(host) = self.host() else { return };
        loop {
            // First: a completion from here on is one more reason to look.
            self.send_waits.store(true, Ordering::SeqCst);
            match self.state() {
                QpState::Rts => {
                    if !self.post_some(&host, side) {
                        return;
                    }
                }
                QpState::Error | QpState::Sqe => return self.flush_sends(side),
                QpState::Reset | QpState::Init | QpState::Rtr | QpState::Sqd => return,
            }
        }
    }

    /// Posts one batch. Whether it is worth to try once more.
    fn post_some(&self, host: &HostQp, side: &mut SendSide) -> bool {
        side.batch.clear();
        let mut emptied = false;
        let mut binds = Vec::new();
        {
            let view = self.adapter.memory.view();
            while side.batch.len() < BATCH && side.failed.is_empty() && binds.is_empty() {
                if self.send_flight.lock().len() >= self.depth {
                    break;
                }
                if !std::mem::take(&mut side.held) {
                    match side.source.pop(&view, &mut side.work) {
                        Ok(true) => side.source.retire(&view),
                        Ok(false) => {
                            emptied = true;
                            break;
                        }
                        Err(error) => {
                            self.broken_ring(&view, &error);
                            return true;
                        }
                    }
                }
                match self.translate(&view, side) {
                    Step::Post(op, entry) => {
                        let flags = host_flags(side.work.flags);
                        // Posted at once: what follows may need it, and the host's library looks at the key then.
                        binds.extend(entry.bind.clone());
                        let mut flight = self.send_flight.lock();
                        let ticket = Ticket { recv: false, life: flight.life, number: flight.next() };
                        flight.push(entry);
                        side.batch.push(ticket.encode(), flags, op, &side.sges);
                    }
                    Step::Fail(entry, status) => side.failed.push_back((entry, status)),
                    Step::Hold => {
                        side.held = true;
                        break;
                    }
                }
            }
        }
        // What the guest adds comes with a doorbell, so nothing waits for completions.
        if emptied && side.failed.is_empty() {
            self.send_waits.store(false, Ordering::SeqCst);
        }
        let count = side.batch.len();
        if count == 0 {
            // The first failure comes when everything before it has ended.
            return !side.failed.is_empty() && self.send_flight.lock().is_empty() && self.fail_local(side);
        }
        let (taken, result) = host.post_send(&mut side.batch);
        side.batch.clear();
        self.adapter.counters.sends_posted.add(taken as u64);
        match result {
            Ok(()) => {
                binds.iter().for_each(Bind::posted);
                !emptied
            }
            Err(error) => {
                log::warn!("{}: the host refuses a request of QP {}: {error}", self.adapter.name, self.qpn);
                let mut flight = self.send_flight.lock();
                for _ in taken..count {
                    if let Some(entry) = flight.pop_newest() {
                        side.failed.push_front((entry, WcStatus::Flushed));
                    }
                }
                if let Some((_, status)) = side.failed.front_mut() {
                    *status = WcStatus::LocalQpOperation;
                }
                true
            }
        }
    }

    /// Ends the oldest request with its own error, and the queue with it.
    fn fail_local(&self, side: &mut SendSide) -> bool {
        let Some((entry, status)) = side.failed.pop_front() else { return false };
        bump(&self.adapter.counters.local_errors);
        if self.qp_type.is_datagram() {
            self.set_state(QpState::Sqe);
        } else {
            self.set_error();
            self.stop_host();
        }
        let view = self.adapter.memory.view();
        self.publish_send(&view, &entry, status);
        true
    }

    fn publish_send(&self, view: &DmaView<'_>, entry: &SendEntry, status: WcStatus) {
        if let Some(bind) = &entry.bind {
            bind.ended(status == WcStatus::Success);
        }
        let _flight = self.send_flight.lock();
        if self.is_muted() || status == WcStatus::Success && !entry.signaled {
            return;
        }
        let completion = Completion {
            byte_len: if status == WcStatus::Success { entry.byte_len } else { 0 },
            ..Completion::new(self.cookie, entry.wr_id, entry.opcode, status)
        };
        self.send_cq.publish(&self.adapter, view, &completion);
    }

    /// The host flushes what it has; then comes what is ours, then what is in the guest's ring.
    fn flush_sends(&self, side: &mut SendSide) {
        if !self.send_flight.lock().is_empty() {
            return;
        }
        let view = self.adapter.memory.view();
        for (entry, _) in std::mem::take(&mut side.failed) {
            self.publish_send(&view, &entry, WcStatus::Flushed);
        }
        for _ in 0..FLUSH_BUDGET {
            if !std::mem::take(&mut side.held) {
                match side.source.pop(&view, &mut side.work) {
                    Ok(true) => side.source.retire(&view),
                    Ok(false) | Err(_) => break,
                }
            }
            let entry = self.entry(&side.work, 0);
            self.publish_send(&view, &entry, WcStatus::Flushed);
        }
    }

    fn entry(&self, work: &SendWr, byte_len: u32) -> SendEntry {
        let signaled = self.signal_all || work.flags.contains(SendFlags::SIGNALED);
        let opcode = work.op.completion_opcode();
        SendEntry { wr_id: work.wr_id, opcode, signaled, byte_len, _ah: None, bind: None }
    }

    /// Makes the host's request of the guest's. Leaves the host's SGEs in the side.
    fn translate(&self, view: &DmaView<'_>, side: &mut SendSide) -> Step {
        side.sges.clear();
        let total: u64 = side.work.sges.iter().map(|sge| u64::from(sge.length)).sum();
        let mut entry = self.entry(&side.work, u32::try_from(total).unwrap_or(u32::MAX));
        let op = match self.operation(view, side, total, &mut entry) {
            Ok(Some(op)) => op,
            Ok(None) => return Step::Hold,
            Err(status) => return Step::Fail(entry, status),
        };
        // Results go to local memory.
        let result = matches!(entry.opcode, WcOpcode::RdmaRead | WcOpcode::CompareSwap | WcOpcode::FetchAdd);
        let need = if result { Access::LOCAL_WRITE } else { Access::empty() };
        let SendSide { work, sges, .. } = side;
        if self.adapter.mrs.translate(&self.adapter, view, &self.pd, &work.sges, need, sges).is_none() {
            if let Some(bind) = &entry.bind {
                bind.ended(false);
            }
            return Step::Fail(entry, WcStatus::LocalProtection);
        }
        Step::Post(op, entry)
    }

    /// The operation; `None` when it must wait for those before it.
    fn operation(
        &self,
        view: &DmaView<'_>,
        side: &mut SendSide,
        total: u64,
        entry: &mut SendEntry,
    ) -> Result<Option<HostOp>, WcStatus> {
        if self.qp_type == QpType::Ud {
            return self.datagram(side, total, entry).map(Some);
        }
        if total > MAX_MESSAGE.into() {
            return Err(WcStatus::LocalLength);
        }
        let reads = || if self.attrs.lock().max_rd_atomic == 0 { Err(WcStatus::LocalQpOperation) } else { Ok(()) };
        Ok(Some(match &mut side.work.op {
            SendOp::Send { data, to: None } => match *data {
                SendData::None => HostOp::Send,
                SendData::Immediate(data) => HostOp::SendImmediate(data),
                SendData::Invalidate(key) => HostOp::SendInvalidate(key),
            },
            SendOp::Write { remote, immediate } => {
                HostOp::Write { addr: remote.addr, rkey: remote.rkey, immediate: *immediate }
            }
            SendOp::Read { remote } => {
                reads()?;
                HostOp::Read { addr: remote.addr, rkey: remote.rkey }
            }
            SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } if total < ATOMIC => {
                return Err(WcStatus::LocalLength);
            }
            // The host's library refuses what its peer would.
            SendOp::CompareSwap { remote, .. } | SendOp::FetchAdd { remote, .. }
                if !remote.addr.is_multiple_of(ATOMIC) =>
            {
                return Err(WcStatus::RemoteInvalidRequest);
            }
            SendOp::CompareSwap { remote, compare, swap } => {
                reads()?;
                let op = HostOp::CompareSwap { addr: remote.addr, rkey: remote.rkey, compare: *compare, swap: *swap };
                shorten(side, entry);
                op
            }
            SendOp::FetchAdd { remote, add } => {
                reads()?;
                let op = HostOp::FetchAdd { addr: remote.addr, rkey: remote.rkey, add: *add };
                shorten(side, entry);
                op
            }
            SendOp::LocalInvalidate(request) => {
                let (op, bind) =
                    self.adapter.mrs.invalidate(&self.pd, request.key).ok_or(WcStatus::LocalQpOperation)?;
                entry.bind = Some(bind);
                op
            }
            SendOp::FastRegister(request) => {
                match self.adapter.mrs.fast_register(&self.adapter, view, (&self.pd, self.qpn.get()), request) {
                    FastStep::Bind(op, bind) => {
                        entry.bind = Some(bind);
                        op
                    }
                    FastStep::Wait if !self.send_flight.lock().is_empty() => return Ok(None),
                    FastStep::Wait | FastStep::Refuse => return Err(WcStatus::LocalQpOperation),
                }
            }
            SendOp::Send { to: Some(_), .. } | SendOp::Unsupported { .. } | SendOp::Malformed => {
                return Err(WcStatus::LocalQpOperation);
            }
        }))
    }

    fn datagram(&self, side: &mut SendSide, total: u64, entry: &mut SendEntry) -> Result<HostOp, WcStatus> {
        let SendOp::Send { data, to: Some(to) } = &side.work.op else { return Err(WcStatus::LocalQpOperation) };
        let immediate = match *data {
            SendData::None => None,
            SendData::Immediate(data) => Some(data),
            SendData::Invalidate(_) => return Err(WcStatus::LocalQpOperation),
        };
        if total > u64::from(self.datagram.load(Ordering::Relaxed)) {
            return Err(WcStatus::LocalLength);
        }
        let (to, own_key) = (*to, self.attrs.lock().qkey);
        let ah = self.address_handle(side, &to)?;
        entry._ah = Some(Arc::clone(&ah));
        // A privileged key is not the guest's to send: as the specification has it, the QP's own goes out instead.
        let qkey = if to.qkey >> 31 == 1 { own_key } else { to.qkey };
        Ok(HostOp::Datagram { ah, qpn: to.qpn.get(), qkey, immediate })
    }

    /// The host's handle for a destination, made when first used.
    fn address_handle(&self, side: &mut SendSide, to: &UdDestination) -> Result<Arc<HostAh>, WcStatus> {
        let shared = &self.adapter.shared;
        let source = self.adapter.gid(to.sgid_index).ok_or(WcStatus::LocalQpOperation)?;
        let dgid = shared.fabric.translate(to.dgid);
        let route = Route {
            flow_label: to.flow_label,
            hop_limit: to.hop_limit,
            traffic_class: to.traffic_class,
            service_level: to.service_level,
        };
        let key = (dgid.0, source.host.index, route);
        if let Some(ah) = side.ahs.get(&key) {
            return Ok(Arc::clone(ah));
        }
        if side.ahs.len() >= MAX_AHS {
            // Those in use live on until their requests end.
            side.ahs.clear();
        }
        let attr: AhAttr = convert::route(dgid, source.host.index, shared.config.port, &route);
        let ah = HostAh::new(&self.pd, &attr).map_err(|error| {
            log::warn!("{}: no way to {dgid}: {error}", self.adapter.name);
            WcStatus::LocalQpOperation
        })?;
        let ah = Arc::new(ah);
        side.ahs.insert(key, Arc::clone(&ah));
        Ok(ah)
    }
}

/// An atomic has a result of eight bytes, however much room there is.
fn shorten(side: &mut SendSide, entry: &mut SendEntry) {
    let mut left = 8;
    for sge in &mut side.work.sges {
        sge.length = sge.length.min(left);
        left -= sge.length;
    }
    entry.byte_len = 8;
}

/// Every request is signaled at the host: each tells that its neighbours have ended.
fn host_flags(flags: SendFlags) -> u32 {
    let bit = |flag, bit| if flags.contains(flag) { bit } else { 0 };
    SEND_SIGNALED | bit(SendFlags::FENCE, SEND_FENCE) | bit(SendFlags::SOLICITED, SEND_SOLICITED)
}
