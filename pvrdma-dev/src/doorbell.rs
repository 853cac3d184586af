//! What doorbells do (section 7).
//!
//! Arming a CQ acts at once. Posting only leaves a note, one for each queue however often it rings, and
//! [`Adapter::run_deferred`] passes the notes on after the guest's write was answered.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use parking_lot::Mutex;
use pvrdma_verbs::{CompletionQueue, Hca, QueuePair, SharedReceiveQueue};

use crate::adapter::Adapter;
use crate::objects::{Qp, Srq};
use crate::uar::{Arm, Doorbell};

/// Bits of `rung`.
const SEND: u8 = 1;
const RECV: u8 = 2;

/// A queue with a doorbell to pass on.
enum Rung<H: Hca> {
    Qp(Arc<Qp<H>>),
    Srq(Arc<Srq<H>>),
}

/// Queues whose doorbell rang. Each is in here at most once, because it enters when its `rung` bits leave 0.
pub(crate) struct Deferred<H: Hca>(Mutex<VecDeque<Rung<H>>>);

impl<H: Hca> Deferred<H> {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(VecDeque::new()))
    }

    fn ring(&self, bits: &AtomicU8, bit: u8, queue: impl FnOnce() -> Rung<H>) {
        if bits.fetch_or(bit, Ordering::AcqRel) == 0 {
            self.0.lock().push_back(queue());
        }
    }

    /// Drops the note of a QP that was destroyed.
    pub(crate) fn forget_qp(&self, qp: &Arc<Qp<H>>) {
        if qp.rung.load(Ordering::Acquire) != 0 {
            self.0.lock().retain(|rung| !matches!(rung, Rung::Qp(other) if Arc::ptr_eq(other, qp)));
        }
    }

    /// Drops the note of an SRQ that was destroyed.
    pub(crate) fn forget_srq(&self, srq: &Arc<Srq<H>>) {
        if srq.rung.load(Ordering::Acquire) != 0 {
            self.0.lock().retain(|rung| !matches!(rung, Rung::Srq(other) if Arc::ptr_eq(other, srq)));
        }
    }

    /// Drops all notes.
    pub(crate) fn clear(&self) {
        *self.0.lock() = VecDeque::new();
    }

    fn len(&self) -> usize {
        self.0.lock().len()
    }

    fn pop(&self) -> Option<Rung<H>> {
        self.0.lock().pop_front()
    }
}

impl<H: Hca> Adapter<H> {
    /// A write to BAR 2. What names nothing, or nothing of this page's context, is ignored.
    pub(crate) fn doorbell(&self, offset: u64, data: &[u8]) {
        let acted = self.gate.is_open()
            && Doorbell::decode(offset, data).is_some_and(|(page, doorbell)| self.act(page, doorbell).is_some());
        if !acted {
            self.stats.counts.doorbells_ignored.increment();
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
                self.deferred.ring(&qp.rung, bits, || Rung::Qp(Arc::clone(&qp)));
            }
            Doorbell::Srq { handle } => {
                let srq = self.objects.srqs.get(handle).filter(|srq| self.uar.may_ring(page, srq.pd.owner))?;
                self.stats.counts.doorbells_recv.increment();
                self.deferred.ring(&srq.rung, RECV, || Rung::Srq(Arc::clone(&srq)));
            }
            Doorbell::Cq { handle, arm, poll } => {
                let cq = self.objects.cqs.get(handle).filter(|cq| self.uar.may_ring(page, cq.owner))?;
                if poll {
                    self.stats.counts.doorbells_poll.increment();
                    cq.verbs.notify_poll();
                }
                if let Some(arm) = arm {
                    self.stats.counts.doorbells_arm.increment();
                    // The ring asks for event rings under this view, so a reset waits for what happens here.
                    cq.ring.arm(&self.memory.view(), arm == Arm::Solicited, self.config.posted_doorbells);
                    cq.verbs.notify_arm();
                }
            }
        }
        self.retry_events();
        Some(())
    }

    /// Whoever is heard of may have made room in an event ring.
    pub(crate) fn retry_events(&self) {
        if self.hub.has_pending() {
            self.hub.retry_pending(&self.memory.view());
        }
    }

    /// Passes on the doorbells that were noted when this began. Each costs a bounded amount of work.
    pub(crate) fn run_deferred(&self) {
        for _ in 0..self.deferred.len() {
            let Some(rung) = self.deferred.pop() else { return };
            match rung {
                // The bits are cleared first: a doorbell from now on leaves a new note.
                Rung::Qp(qp) => {
                    let bits = qp.rung.swap(0, Ordering::AcqRel);
                    if bits & RECV != 0 {
                        qp.verbs.notify_recv();
                    }
                    if bits & SEND != 0 {
                        qp.verbs.notify_send();
                    }
                }
                Rung::Srq(srq) => {
                    srq.rung.store(0, Ordering::Release);
                    srq.verbs.notify_recv();
                }
            }
        }
    }
}

#[cfg(test)]
#[path = "doorbell_tests.rs"]
mod tests;
