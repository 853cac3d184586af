//! The receive queue: from the guest's ring to the host's queue.

use std::sync::atomic::Ordering;

use pvrdma_guest_memory::DmaView;
use pvrdma_verbs::{Completion, QpState, WcOpcode, WcStatus};

use super::host_state;
use super::queue_pair::{FLUSH_BUDGET, Qp};
use super::recv_side::RecvSide;

impl Qp {
    /// Posts receives, or flushes them.
    pub(crate) fn run_recv(&self) {
        // The side first: who ends the QP takes the host's object and then waits for us to be done with it.
        let mut guard = self.recv.lock();
        let Some(side) = guard.as_mut() else { return };
        let Some(host) = self.host() else { return };
        loop {
            let view = self.adapter.memory.view();
            match self.state() {
                QpState::Reset => return,
                QpState::Error => return self.flush_recv(&view, side),
                QpState::Init | QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe => {}
            }
            // First: a completion from here on is one more reason to look.
            self.recv_waits.store(true, Ordering::SeqCst);
            match side.fill(&self.mrs, &view, &self.pd, &self.recv_inflight) {
                Ok(0) => {
                    if self.recv_inflight.lock().has_room() {
                        self.recv_waits.store(false, Ordering::SeqCst);
                    }
                    return;
                }
                Ok(_) => {}
                Err(error) => return self.broken_ring(&view, &error),
            }
            let (refused, result) = side.post(&self.adapter, |batch| host.post_recv(batch), &self.recv_inflight);
            if let Err(error) = result {
                let log = &self.adapter.log;
                log.warn(format_args!("the host takes no receive for QP {}: {error}", self.qpn));
                self.set_error();
                self.failing.store(true, Ordering::Release);
                for wr_id in refused {
                    self.publish_recv(&view, wr_id, WcStatus::Flushed);
                }
            }
            drop(view);
            if self.failing.swap(false, Ordering::AcqRel) {
                host_state::to_error(&self.adapter, &host);
            }
        }
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
