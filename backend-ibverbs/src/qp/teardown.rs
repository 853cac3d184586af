//! The end of a QP, and of the host's device under it.

use pvrdma_verbs::{Completion, QpState, WcOpcode, WcStatus};

use super::queue_pair::Qp;
use crate::reap;

impl Qp {
    /// The host will complete nothing any more: everything in flight is flushed.
    pub(crate) fn abandon(&self) {
        self.set_error();
        // What they post by the state before is flushed, too.
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

    /// Ends it. Its rings and memory are not touched afterwards, and nothing of it is published.
    pub(crate) fn destroy(&self) {
        self.mute(true);
        let Some(host) = self.host.write().take() else { return };
        self.set_state(QpState::Error);
        // What the host gives back now belongs to a shared queue, or to nobody.
        self.stop(&host);
        reap::drain(&self.recv_cq, &self.adapter, &self.qps);
        // Whoever posts now has the host's object, and both sides are theirs until they have done so.
        let sides = (self.send.lock().take(), self.recv.lock().take());
        // After that: what they post may fill a region.
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
