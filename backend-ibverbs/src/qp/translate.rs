//! Translation of the guest's requests to the host's.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use pvrdma_guest_memory::DmaView;
use pvrdma_verbs_types::{
    Access, FastRegister, MAX_MESSAGE, QpType, SendData, SendFlags, SendOp, SendWr, WcOpcode, WcStatus,
};

use super::queue_pair::Qp;
use super::send_side::SendSide;
use crate::inflight::SendEntry;
use crate::mr::FastStep;
use crate::verbs::HostOp;

/// Size of an atomic operand, in bytes.
const ATOMIC: u64 = 8;

/// Result of translating a request.
pub(super) enum Step {
    Post(HostOp, SendEntry),
    Fail(SendEntry, WcStatus),
    Hold,
}

impl Qp {
    /// Returns the state to keep for a request while it is in flight.
    pub(super) fn entry(&self, wr: &SendWr, byte_len: u32) -> SendEntry {
        let signaled = self.signal_all || wr.flags.contains(SendFlags::SIGNALED);
        let opcode = wr.op.completion_opcode();
        SendEntry { wr_id: wr.wr_id, opcode, signaled, byte_len, _ah: None, bind: None }
    }

    /// Translates the guest's request to the host's. Leaves the host's SGEs in the side.
    pub(super) fn translate(&self, view: &DmaView<'_>, side: &mut SendSide) -> Step {
        side.sges.clear();
        let total: u64 = side.wr.sges.iter().map(|sge| u64::from(sge.length)).sum();
        let mut entry = self.entry(&side.wr, u32::try_from(total).unwrap_or(u32::MAX));
        let op = match self.operation(view, side, total, &mut entry) {
            Ok(Some(op)) => op,
            Ok(None) => return Step::Hold,
            Err(status) => return Step::Fail(entry, status),
        };
        // Results are written to local memory. Adapters check its keys only when the result arrives; here the check
        // comes earlier, because the posted request contains the host's keys.
        let result = matches!(entry.opcode, WcOpcode::RdmaRead | WcOpcode::CompareSwap | WcOpcode::FetchAdd);
        let need = if result { Access::LOCAL_WRITE } else { Access::empty() };
        let SendSide { wr, sges, .. } = side;
        if self.mrs.translate(view, &self.pd, &wr.sges, need, sges).is_none() {
            if let Some(bind) = &entry.bind {
                bind.ended(false);
            }
            return Step::Fail(entry, WcStatus::LocalProtection);
        }
        Step::Post(op, entry)
    }

    /// Returns the host's operation, or `None` if the request must wait for earlier ones or for its destination.
    fn operation(
        &self,
        view: &DmaView<'_>,
        side: &mut SendSide,
        total: u64,
        entry: &mut SendEntry,
    ) -> Result<Option<HostOp>, WcStatus> {
        if self.qp_type == QpType::Ud {
            return self.datagram(side, total, entry);
        }
        if total > MAX_MESSAGE.into() {
            return Err(WcStatus::LocalLength);
        }
        let reads = || if self.attrs.lock().max_rd_atomic == 0 { Err(WcStatus::LocalQpOperation) } else { Ok(()) };
        Ok(Some(match &mut side.wr.op {
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
            SendOp::CompareSwap { remote, compare, swap } => {
                check_atomic(total, remote.addr)?;
                reads()?;
                HostOp::CompareSwap { addr: remote.addr, rkey: remote.rkey, compare: *compare, swap: *swap }
            }
            SendOp::FetchAdd { remote, add } => {
                check_atomic(total, remote.addr)?;
                reads()?;
                HostOp::FetchAdd { addr: remote.addr, rkey: remote.rkey, add: *add }
            }
            SendOp::LocalInvalidate(request) => {
                let (op, bind) = self.mrs.invalidate(&self.pd, request.key).ok_or(WcStatus::LocalQpOperation)?;
                entry.bind = Some(bind);
                op
            }
            SendOp::FastRegister(request) => return self.fast_register(view, request, entry),
            SendOp::Send { to: Some(_), .. } | SendOp::Unsupported { .. } | SendOp::Malformed => {
                return Err(WcStatus::LocalQpOperation);
            }
        }))
    }

    fn fast_register(
        &self,
        view: &DmaView<'_>,
        request: &mut FastRegister,
        entry: &mut SendEntry,
    ) -> Result<Option<HostOp>, WcStatus> {
        let ask = || self.mrs.fast_register(view, &self.pd, self.qpn.get(), request);
        match ask_or_wait(ask, || !self.send_inflight.lock().is_empty()) {
            FastStep::Bind(op, bind) => {
                entry.bind = Some(bind);
                Ok(Some(op))
            }
            FastStep::Wait => Ok(None),
            FastStep::Refuse => Err(WcStatus::LocalQpOperation),
        }
    }

    fn datagram(&self, side: &mut SendSide, total: u64, entry: &mut SendEntry) -> Result<Option<HostOp>, WcStatus> {
        let SendOp::Send { data, to: Some(to) } = &side.wr.op else { return Err(WcStatus::LocalQpOperation) };
        let immediate = match *data {
            SendData::None => None,
            SendData::Immediate(data) => Some(data),
            SendData::Invalidate(_) => return Err(WcStatus::LocalQpOperation),
        };
        if total > u64::from(self.datagram.load(Ordering::Relaxed)) {
            return Err(WcStatus::LocalLength);
        }
        let (to, own_key) = (*to, self.attrs.lock().qkey);
        let Some(ah) = self.address_handle(&mut side.ahs, &to)? else { return Ok(None) };
        entry._ah = Some(Arc::clone(&ah));
        // A guest may not send a privileged Q_Key: as the specification requires, the QP's own Q_Key is sent instead.
        let qkey = if to.qkey >> 31 == 1 { own_key } else { to.qkey };
        Ok(Some(HostOp::Datagram { ah, qpn: to.qpn.get(), qkey, immediate }))
    }
}

/// Requests a fast registration. Returns `Wait` only if requests are in flight whose end will retry it.
fn ask_or_wait(mut ask: impl FnMut() -> FastStep, in_flight: impl FnOnce() -> bool) -> FastStep {
    match ask() {
        FastStep::Wait if in_flight() => FastStep::Wait,
        // The request for which it would wait may have ended after the first call, so it asks again. A step that
        // returns `Wait` has taken nothing from the request.
        FastStep::Wait => match ask() {
            FastStep::Wait => FastStep::Refuse,
            step => step,
        },
        step => step,
    }
}

/// Refuses an atomic whose local memory (of `total` bytes) does not have the size of its result, and one whose address
/// the peer would refuse (IBA 9.4.5), because the host's library refuses it as well.
fn check_atomic(total: u64, addr: u64) -> Result<(), WcStatus> {
    if total != ATOMIC {
        return Err(WcStatus::LocalLength);
    }
    if !addr.is_multiple_of(ATOMIC) {
        return Err(WcStatus::RemoteInvalidRequest);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the result for a region that gives these answers in turn, and the number of calls.
    fn asked(steps: [FastStep; 2], in_flight: bool) -> (FastStep, usize) {
        let mut steps = steps.into_iter();
        let step = ask_or_wait(|| steps.next().unwrap(), || in_flight);
        (step, 2 - steps.len())
    }

    #[test]
    fn a_fast_registration_retries_if_the_request_before_it_has_just_ended() {
        use FastStep::{Refuse, Wait};
        assert!(matches!(asked([Wait, Refuse], true), (Wait, 1)));
        // "Refuse" stands for any other answer of the region.
        assert!(matches!(asked([Refuse, Wait], false), (Refuse, 1)));
        assert!(matches!(asked([Wait, Refuse], false), (Refuse, 2)));
        // Another queue pair empties the region, so no completion of this queue pair would cause a retry.
        assert!(matches!(asked([Wait, Wait], false), (Refuse, 2)));
    }
}
