//! Translation of the host's completions to the guest's.

use std::sync::atomic::Ordering;

use pvrdma_guest_memory::DmaView;
use pvrdma_verbs::QpEvent;
use pvrdma_verbs_types::{Completion, GidType, NetworkType, QpState, QpType, Qpn, WcFlags, WcOpcode, WcStatus};

use super::queue_pair::Qp;
use crate::convert;
use crate::counters::bump;
use crate::inflight::WrId;
use crate::sys::{WC_GRH, WC_KERNEL_INVALIDATE, WC_RECV_RDMA_WITH_IMM, WC_WITH_IMM, WC_WITH_INV, Wc};

impl Qp {
    /// Publishes a completion of the host. Returns `true` if the caller must kick the QP afterwards, once it holds no
    /// lock.
    pub(crate) fn complete(&self, view: &DmaView<'_>, wc: &Wc) -> bool {
        let id = WrId::decode(wc.wr_id);
        let cq = if id.recv { &self.recv_cq } else { &self.send_cq };
        let status = convert::status(wc.status);
        if status != WcStatus::Success {
            bump(&self.adapter.counters.completion_errors);
            if status != WcStatus::Flushed {
                log::debug!(
                    "{}: QP {}: {status:?} of the host, vendor error {:#x}",
                    self.adapter.name,
                    self.qpn,
                    wc.vendor_err
                );
            }
        }
        let known = if id.recv { self.complete_recv(view, wc, id) } else { self.complete_send(view, id, status) };
        let Some(waits) = known else {
            // The completion belongs to an earlier epoch, so its error does not affect the QP.
            bump(&self.adapter.counters.stale_completions);
            return false;
        };
        let failed = status != WcStatus::Success && self.set_error_of(id.recv, status);
        // An error puts a connected QP of the host into its error state without this call. The QP may still need to
        // notify its peer: rdma_rxe does that after the completion, and not in the error state.
        if failed && self.qp_type.is_datagram() || cq.is_dead() && self.set_error() {
            self.failing.store(true, Ordering::Release);
        }
        waits || self.state() == QpState::Error
    }

    /// Returns `true` if an error ends the QP. A datagram that does not fit ends at most its receive, if that comes
    /// from an SRQ (IBA 9.9.3, class E). Adapters report it as a length error, `rdma_rxe` as an invalid request.
    fn set_error_of(&self, recv: bool, status: WcStatus) -> bool {
        let too_long = matches!(status, WcStatus::LocalLength | WcStatus::RemoteInvalidRequest);
        let harmless = recv && self.qp_type.is_datagram() && too_long;
        !harmless && self.set_error()
    }

    /// Returns `true` if sends wait for this completion, or `None` if it belongs to no request in flight.
    fn complete_send(&self, view: &DmaView<'_>, id: WrId, status: WcStatus) -> Option<bool> {
        let mut inflight = self.send_inflight.lock();
        if inflight.epoch != id.epoch || !inflight.is_in_flight(id.number) {
            return None;
        }
        // Earlier requests have succeeded: a failed one would have raised a completion of its own.
        let mut entries = inflight.complete(id.number).peekable();
        while let Some(entry) = entries.next() {
            let status = if entries.peek().is_some() { WcStatus::Success } else { status };
            if let Some(bind) = &entry.bind {
                bind.ended(status == WcStatus::Success);
            }
            if self.is_muted() || status == WcStatus::Success && !entry.signaled {
                continue;
            }
            let local = matches!(entry.opcode, WcOpcode::FastRegister | WcOpcode::LocalInvalidate);
            let status = match status {
                // Windows are not visible to the guest.
                WcStatus::MwBind => WcStatus::LocalQpOperation,
                status if local && status != WcStatus::Success && status != WcStatus::Flushed => {
                    WcStatus::LocalQpOperation
                }
                status => status,
            };
            let completion = Completion {
                byte_len: if status == WcStatus::Success { entry.byte_len } else { 0 },
                ..Completion::new(self.cookie, entry.wr_id, entry.opcode, status)
            };
            self.send_cq.publish(&self.adapter, view, &completion);
        }
        drop(entries);
        if inflight.is_empty() && self.state() == QpState::Sqd {
            self.drained(view);
        }
        Some(self.send_waits.swap(false, Ordering::SeqCst))
    }

    /// Reports once that the send queue is drained, if requested. The caller holds the sends in flight.
    pub(super) fn drained(&self, view: &DmaView<'_>) {
        if self.notify_drained.swap(false, Ordering::AcqRel) && !self.is_muted() {
            self.event(view, QpEvent::SendQueueDrained);
        }
    }

    /// Like [`Self::complete_send`], for receives.
    fn complete_recv(&self, view: &DmaView<'_>, wc: &Wc, id: WrId) -> Option<bool> {
        let mut inflight = self.recv_inflight.lock();
        let wr_id = match &self.srq {
            Some(srq) => {
                let mut shared = srq.inflight.lock();
                if shared.epoch == id.epoch { shared.complete(id.number) } else { None }
            }
            None if inflight.epoch == id.epoch => inflight.complete(id.number),
            None => None,
        }?;
        let completion = self.received(wc, wr_id);
        if completion.flags.contains(WcFlags::INVALIDATED) {
            self.mrs.invalidated(completion.invalidated_key);
        }
        if !self.is_muted() {
            self.recv_cq.publish(&self.adapter, view, &completion);
        }
        drop(inflight);
        // A shared queue is refilled here, because its guest rings the doorbell only when it posts.
        Some(self.srq.is_some() || self.recv_waits.swap(false, Ordering::SeqCst))
    }

    fn received(&self, wc: &Wc, wr_id: u64) -> Completion {
        let status = convert::status(wc.status);
        let mut completion = Completion::new(self.cookie, wr_id, WcOpcode::Recv, status);
        if status != WcStatus::Success {
            return completion;
        }
        if wc.opcode == WC_RECV_RDMA_WITH_IMM {
            completion.opcode = WcOpcode::RecvRdmaWithImmediate;
        }
        completion.byte_len = wc.byte_len;
        if wc.wc_flags & WC_WITH_IMM != 0 {
            completion.flags |= WcFlags::IMMEDIATE;
            completion.immediate = wc.extra;
        } else if wc.wc_flags & WC_WITH_INV != 0 || self.is_kernel_invalidate(wc) {
            completion.flags |= WcFlags::INVALIDATED;
            completion.invalidated_key = u32::from_ne_bytes(wc.extra);
        }
        if self.qp_type.is_datagram() {
            if wc.wc_flags & WC_GRH != 0 {
                completion.flags |= WcFlags::GRH;
            }
            completion.src_qpn = Qpn::new(wc.src_qp);
            completion.service_level = wc.sl;
            let host = self.adapter.shared.default_gid;
            completion.network = Some(match (host.kind, host.gid.ipv4()) {
                (GidType::RoceV1, _) => NetworkType::RoceV1,
                (GidType::RoceV2, Some(_)) => NetworkType::Ipv4,
                (GidType::RoceV2, None) => NetworkType::Ipv6,
            });
        }
        // The host's entries do not report this. Extra notifications are allowed, but missing ones are not.
        completion.solicited = true;
        completion
    }

    /// Returns `true` if the completion reports an invalidation under the kernel's flag. `rdma_rxe` passes the kernel's
    /// value of this flag to user space, where that value has another meaning. It counts as an invalidation only if the
    /// key is one that can have been invalidated.
    fn is_kernel_invalidate(&self, wc: &Wc) -> bool {
        wc.wc_flags & WC_KERNEL_INVALIDATE != 0
            && self.qp_type == QpType::Rc
            && self.mrs.is_bound(u32::from_ne_bytes(wc.extra))
    }
}
