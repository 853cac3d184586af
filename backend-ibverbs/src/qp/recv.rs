//! Receive queue: moves requests from the guest's ring to the host's queue.

use std::sync::atomic::Ordering;

use pvrdma_guest_memory::DmaView;
use pvrdma_verbs_types::{Completion, QpState, WcOpcode, WcStatus};

use super::queue_pair::{FLUSH_BUDGET, Qp};
use super::recv_side::{Filled, RecvSide};
use crate::verbs::HostQp;

impl Qp {
    /// Posts receives, or flushes them.
    pub(crate) fn run_recv(&self) {
        if self.post_receives() {
            // The sends are flushed as well, because the guest does not ring for the sends of a QP that failed because
            // of its receives.
            self.run_send();
        }
    }

    /// Returns `true` if this call ended the QP.
    fn post_receives(&self) -> bool {
        let mut ended = false;
        // The side is locked first: a thread that ends the QP takes the host's object and then waits for this thread to
        // release its side.
        let mut guard = self.recv.lock();
        let Some(side) = guard.as_mut() else { return ended };
        let Some(host) = self.host() else { return ended };
        loop {
            let view = self.adapter.memory.view();
            match self.state() {
                QpState::Reset => return ended,
                QpState::Error => {
                    self.flush_recv(&view, side);
                    return ended;
                }
                QpState::Init | QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe => {}
            }
            // The flag is set before the ring is read: a completion from here on causes another look at the ring.
            self.recv_waits.store(true, Ordering::SeqCst);
            let filled = side.fill(&self.mrs, &view, &self.pd, &self.recv_inflight);
            let again = match &filled {
                Filled::More => side.is_filled(),
                Filled::Empty => {
                    // When the guest adds requests, a doorbell follows, so none of them waits for completions. The flag
                    // is cleared only if the ring was seen empty: room that exists now may have become available after
                    // a full batch left the ring unread.
                    self.recv_waits.store(false, Ordering::SeqCst);
                    false
                }
                Filled::Broken(error) => {
                    ended |= self.broken_ring(&view, error);
                    true
                }
            };
            let taken = self.post_batch(&host, &view, side, &mut ended);
            drop(view);
            if self.failing.swap(false, Ordering::AcqRel) {
                self.stop(&host);
            }
            if taken && !again {
                return ended;
            }
        }
    }

    /// Posts the batch. Returns `false` if the host does not accept all of it, which ends the QP.
    fn post_batch(&self, host: &HostQp, view: &DmaView<'_>, side: &mut RecvSide, ended: &mut bool) -> bool {
        if !side.is_filled() {
            return true;
        }
        let (refused, result) = side.post(&self.adapter, |batch| host.post_recv(batch), &self.recv_inflight);
        let Err(error) = result else { return true };
        let log = &self.adapter.log;
        log.warn(module_path!(), format_args!("the host takes no receive for QP {}: {error}", self.qpn));
        *ended |= self.set_error();
        self.failing.store(true, Ordering::Release);
        for wr_id in refused {
            self.publish_recv(view, wr_id, WcStatus::Flushed);
        }
        false
    }

    fn publish_recv(&self, view: &DmaView<'_>, wr_id: u64, status: WcStatus) {
        let _flight = self.recv_inflight.lock();
        if !self.is_muted() {
            let completion = Completion::new(self.cookie, wr_id, WcOpcode::Recv, status);
            self.recv_cq.publish(&self.adapter, view, &completion);
        }
    }

    /// Flushes the guest's ring, once the host has flushed its own receives.
    fn flush_recv(&self, view: &DmaView<'_>, side: &mut RecvSide) {
        self.recv_waits.store(true, Ordering::SeqCst);
        if !self.recv_inflight.lock().is_empty() {
            return;
        }
        for _ in 0..FLUSH_BUDGET {
            match side.source.pop(view, &mut side.wr) {
                Ok(true) => self.publish_recv(view, side.wr.wr_id, WcStatus::Flushed),
                Ok(false) | Err(_) => break,
            }
        }
    }
}
