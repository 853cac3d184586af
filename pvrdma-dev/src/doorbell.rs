//! Doorbells (section 7).
//!
//! Arming a CQ takes effect immediately. Posting only marks a doorbell as pending, once per queue however often it is
//! written. [`Core::run_deferred`] forwards it to the backend after the guest's write has completed.

use pvrdma_pages::PAGE_SIZE;
use pvrdma_verbs::{CompletionQueue, Hca, QueuePair, SharedReceiveQueue};

use crate::core::Core;
use crate::pending_doorbells::{PendingDoorbell, RECV, SEND};
use crate::uar::{Arm, Doorbell};

impl<H: Hca> Core<H> {
    /// Handles a write to BAR 2. A write that names no object, or none of this page's context, is ignored.
    pub(crate) fn doorbell(&self, offset: u64, data: &[u8]) {
        if offset >= PAGE_SIZE {
            self.stats.counts.doorbells_of_processes.increment();
        }
        let doorbell = Doorbell::decode(offset, data).filter(|_| self.gate.is_open());
        match doorbell.filter(|&(page, doorbell)| self.act(page, doorbell).is_some()) {
            Some((page, doorbell)) => self.heard(page, doorbell),
            None => self.stats.counts.doorbells_ignored.increment(),
        }
    }

    fn act(&self, page: u32, doorbell: Doorbell) -> Option<()> {
        match doorbell {
            Doorbell::Qp { handle, send, recv } => {
                let qp = self.objects.qps.get(handle).filter(|qp| self.uar.may_ring(page, qp.pd.owner))?;
                if send {
                    self.stats.counts.doorbells_send.increment();
                }
                if recv {
                    self.stats.counts.doorbells_recv.increment();
                }
                let bits = if send { SEND } else { 0 } | if recv { RECV } else { 0 };
                self.pending_doorbells.push_qp(&qp, bits);
            }
            Doorbell::Srq { handle } => {
                let srq = self.objects.srqs.get(handle).filter(|srq| self.uar.may_ring(page, srq.pd.owner))?;
                self.stats.counts.doorbells_recv.increment();
                self.pending_doorbells.push_srq(&srq);
            }
            Doorbell::Cq { handle, arm, poll } => {
                let cq = self.objects.cqs.get(handle).filter(|cq| self.uar.may_ring(page, cq.owner))?;
                if poll {
                    self.stats.counts.doorbells_poll.increment();
                    cq.verbs.notify_poll();
                }
                if let Some(arm) = arm {
                    self.stats.counts.doorbells_arm.increment();
                    // The ring accesses event rings under this view, so a reset, which waits for all views, waits for
                    // the notification as well.
                    let view = self.memory.view();
                    // In a pause the look follows at its end.
                    let check_not_empty = self.config.posted_doorbells && !self.is_paused();
                    cq.ring.arm(&view, arm == Arm::Solicited, check_not_empty);
                    drop(view);
                    cq.verbs.notify_arm();
                }
            }
        }
        self.retry_events();
        Some(())
    }

    /// Forwards the doorbells that are pending when the call begins. Each does a bounded amount of work.
    pub(crate) fn run_deferred(&self) {
        for _ in 0..self.pending_doorbells.len() {
            let Some(pending) = self.pending_doorbells.pop() else { return };
            match pending {
                // The bits are cleared before the notification, so a doorbell that arrives during it becomes pending
                // again and is not lost.
                PendingDoorbell::Qp(qp) => {
                    let bits = qp.pending_doorbells.take();
                    if bits & RECV != 0 {
                        qp.verbs.notify_recv();
                    }
                    if bits & SEND != 0 {
                        qp.verbs.notify_send();
                    }
                }
                PendingDoorbell::Srq(srq) => {
                    srq.pending_doorbells.take();
                    srq.verbs.notify_recv();
                }
            }
        }
    }
}
