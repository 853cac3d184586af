//! The receive queue: from the guest's ring to the host's queue.

use std::sync::atomic::Ordering;

use pvrdma_guest_memory::DmaView;
use pvrdma_verbs::{Completion, QpState, WcOpcode, WcStatus};

use super::queue_pair::{FLUSH_BUDGET, Qp};
use super::recv_side::{Filled, RecvSide};
use crate::verbs::HostQp;

impl Qp {
    /// Posts receives, or flushes them.
    pub(crate) fn run_recv(&self) {
        if self.post_receives() {
            // Nobody rings for the sends of a QP that its receives have ended.
            self.run_send();
        }
    }

    /// Returns `true` if it was this that ended the QP.
    fn post_receives(&self) -> bool {
        let mut ended = false;
        // The side first: who ends the QP takes the host's object and then waits for us to be done with it.
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
            // First: a completion from here on is one more reason to look.
            self.recv_waits.store(true, Ordering::SeqCst);
            let filled = side.fill(&self.mrs, &view, &self.pd, &self.recv_inflight);
            let again = match &filled {
                Filled::More => side.is_filled(),
                Filled::Empty => {
                    // What the guest adds comes with a doorbell, so nothing waits for completions. Only who saw the
                    // ring empty knows that: room that is there now may have come after the ring was left alone.
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

    /// Posts what is in the batch. Returns `false` if the host does not take all of it, which ends the QP.
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

    /// The host flushes what it has; then comes what is in the guest's ring.
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
