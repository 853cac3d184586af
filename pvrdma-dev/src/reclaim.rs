//! Destruction of objects. A destroy command never fails because the object is still in use: the driver frees its
//! memory whatever ERR contains (sections 3.5 and 4.4). So dependent objects are destroyed as well, or disconnected.
//!
//! Everything here waits for users of guest memory, so the caller must hold no view.

use std::sync::Arc;

use pvrdma_verbs::{Hca, MemoryRegion, QueuePair, SharedReceiveQueue};
use pvrdma_verbs_types::{QpAttrMask, QpAttrs, QpState};

use crate::core::Core;
use crate::error::CmdError;
use crate::objects::{Cq, Qp};

impl<H: Hca> Core<H> {
    /// Destroys a QP. Afterwards its rings and the memory of its requests are not accessed, and it generates no
    /// completion.
    pub(crate) fn end_qp(&self, handle: u32) -> Result<(), CmdError> {
        let qp = self.objects.qps.take(handle)?;
        self.watch.rings.remove_qp(&qp);
        qp.verbs.destroy();
        self.pending_doorbells.remove_qp(&qp);
        Ok(())
    }

    /// Destroys an SRQ. QPs that still use it go to their error state.
    pub(crate) fn end_srq(&self, handle: u32) -> Result<(), CmdError> {
        let srq = self.objects.srqs.take(handle)?;
        self.watch.rings.remove_srq(&srq);
        let uses = |qp: &Qp<H>| qp.srq.as_ref().is_some_and(|other| Arc::ptr_eq(other, &srq));
        self.fail_qps(Arc::strong_count(&srq), uses);
        srq.verbs.destroy();
        self.pending_doorbells.remove_srq(&srq);
        Ok(())
    }

    /// Destroys a CQ. QPs that still complete to it go to their error state without completions: the ring is shut
    /// before they flush.
    pub(crate) fn end_cq(&self, handle: u32) -> Result<(), CmdError> {
        let cq = self.objects.cqs.take(handle)?;
        cq.ring.shut();
        let is = |other: &Arc<Cq<H>>| Arc::ptr_eq(other, &cq);
        self.fail_qps(Arc::strong_count(&cq), |qp| is(&qp.send_cq) || is(&qp.recv_cq));
        // A thread that found the ring open may still be writing its entry. The barrier waits for all views.
        self.memory.barrier();
        Ok(())
    }

    /// Moves QPs to their error state. `owners` is the reference count of the object they use: one reference is the
    /// caller's, others belong to QPs.
    fn fail_qps(&self, owners: usize, uses: impl Fn(&Qp<H>) -> bool) {
        if owners <= 1 {
            return;
        }
        let attrs = QpAttrs { state: QpState::Error, ..QpAttrs::default() };
        for handle in self.objects.qps.handles(uses) {
            if let Some(qp) = self.objects.qps.get(handle)
                && let Err(error) = qp.verbs.modify(&attrs, QpAttrMask::STATE)
            {
                self.log.warn(module_path!(), format_args!("QP {handle} does not stop: {error}"));
            }
        }
    }

    /// Destroys a memory region.
    pub(crate) fn end_mr(&self, handle: u32) -> Result<(), CmdError> {
        let mr = self.objects.mrs.take(handle)?;
        mr.verbs.destroy();
        Ok(())
    }

    /// Destroys a protection domain and everything in it.
    pub(crate) fn end_pd(&self, handle: u32) -> Result<(), CmdError> {
        let pd = self.objects.pds.take(handle)?;
        if Arc::strong_count(&pd) > 1 {
            // Errors can be ignored: only unknown handles fail, and these were just listed. Users are destroyed before
            // the objects that they use.
            for qp in self.objects.qps.handles(|qp| Arc::ptr_eq(&qp.pd, &pd)) {
                let _ = self.end_qp(qp);
            }
            for srq in self.objects.srqs.handles(|srq| Arc::ptr_eq(&srq.pd, &pd)) {
                let _ = self.end_srq(srq);
            }
            for mr in self.objects.mrs.handles(|mr| Arc::ptr_eq(&mr.pd, &pd)) {
                let _ = self.end_mr(mr);
            }
        }
        Ok(())
    }

    /// Destroys a context and everything it owns. Its doorbell page is ignored until it is bound again.
    pub(crate) fn end_context(&self, handle: u32) -> Result<(), CmdError> {
        let context = self.objects.contexts.take(handle)?;
        self.uar.unbind(context.uar_page);
        for pd in self.objects.pds.handles(|pd| pd.owner == handle) {
            let _ = self.end_pd(pd);
        }
        for cq in self.objects.cqs.handles(|cq| cq.owner == handle) {
            let _ = self.end_cq(cq);
        }
        Ok(())
    }

    /// Destroys everything. When this returns, nothing accesses guest memory and no interrupt is raised (section 3.1).
    pub(crate) fn end_all(&self) {
        self.watch.rings.clear();
        self.pending_doorbells.clear();
        for qp in self.objects.qps.drain() {
            qp.verbs.destroy();
        }
        for srq in self.objects.srqs.drain() {
            srq.verbs.destroy();
        }
        for cq in self.objects.cqs.drain() {
            cq.ring.shut();
        }
        for mr in self.objects.mrs.drain() {
            mr.verbs.destroy();
        }
        drop(self.objects.pds.drain());
        for context in self.objects.contexts.drain() {
            self.uar.unbind(context.uar_page);
        }
        let bound = self.objects.gids.lock().drain();
        for index in bound {
            self.hca.unbind_gid(index);
        }
        // The lists are cleared again: a watcher that found an object in a table may have listed it meanwhile, and a
        // thread that was decoding a doorbell may have left it pending. The list of watched rings comes first, because
        // watched rings create pending doorbells.
        self.watch.rings.clear();
        self.pending_doorbells.clear();
        self.hub.remove();
        self.interrupts.reset();
        self.memory.barrier();
    }
}
