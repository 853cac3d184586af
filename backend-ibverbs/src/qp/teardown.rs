//! Teardown of a QP, and loss of the host's device under it.

use pvrdma_verbs_types::{Completion, QpState, WcOpcode, WcStatus};

use super::queue_pair::Qp;
use crate::reap;

impl Qp {
    /// Flushes everything in flight, because the host will not complete it.
    pub(crate) fn abandon(&self) {
        self.set_error();
        // Requests that a thread still posts under the previous state are flushed as well.
        self.wait_for_posters();
        {
            let view = self.adapter.memory.view();
            let mut inflight = self.send_inflight.lock();
            for entry in inflight.restart() {
                let completion = Completion::new(self.cookie, entry.wr_id, entry.opcode, WcStatus::Flushed);
                if !self.is_muted() {
                    self.send_cq.publish(&self.adapter, &view, &completion);
                }
            }
            drop(inflight);
            let mut inflight = self.recv_inflight.lock();
            for wr_id in inflight.take_all() {
                if !self.is_muted() {
                    let completion = Completion::new(self.cookie, wr_id, WcOpcode::Recv, WcStatus::Flushed);
                    self.recv_cq.publish(&self.adapter, &view, &completion);
                }
            }
        }
        self.kick();
    }

    /// Destroys the QP. Afterwards its rings and memory are not accessed, and nothing is published for it.
    pub(crate) fn destroy(&self) {
        self.mute(true);
        let Some(host) = self.host.write().take() else { return };
        self.set_state(QpState::Error);
        self.adapter.cm_paths.remove_qp(self.qpn.get());
        // Receives that the host returns from here on belong to a shared queue, or are discarded.
        self.stop(&host);
        reap::drain(&self.recv_cq, &self.adapter, &self.qps);
        // A thread that is posting holds the host's object, and its side stays locked until it is done. Taking both
        // sides waits for it.
        let sides = (self.send.lock().take(), self.recv.lock().take());
        // This must follow the above: requests that were just being posted may have filled a region.
        self.mrs.end_with(self.qpn.get());
        drop(host);
        reap::drain(&self.recv_cq, &self.adapter, &self.qps);
        self.qps.remove(self.qpn.get());
        let entries = self.send_inflight.lock().restart();
        self.recv_inflight.lock().restart();
        self.send_cq.release(self.reserved[0]);
        self.recv_cq.release(self.reserved[1]);
        drop((sides, entries));
    }
}
