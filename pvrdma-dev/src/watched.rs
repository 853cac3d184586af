//! Watching of processes whose doorbell page is mapped: its start, its end, and the work of a pass.

use std::sync::Arc;

use pvrdma_verbs::{CompletionQueue, Hca};

use crate::core::Core;
use crate::datapath::infer;
use crate::due::DueLooks;
use crate::objects::{Context, Cq, KERNEL, Qp, Srq};
use crate::uar::{Doorbell, KERNEL_PAGE};
use crate::watcher::{Depth, DoorbellWatcher, Outcome};

impl<H: Hca> Core<H> {
    /// Sets the watcher. Returns `true` if there was none.
    pub(crate) fn set_watcher(&self, watcher: Arc<dyn DoorbellWatcher>) -> bool {
        self.watch.looks.set(Arc::new(DueLooks::new(watcher))).is_ok()
    }

    /// Revokes a doorbell page from its previous process.
    pub(crate) fn renew_page(&self, page: u32) {
        if let Some(looks) = self.watch.looks.get() {
            looks.watcher().renew(page);
        }
    }

    /// Returns `true` if rings of this owner may have to be watched at some time.
    pub(crate) fn may_watch(&self, owner: u32) -> bool {
        owner != KERNEL && self.watch.looks.get().is_some()
    }

    /// Tells the watcher that a doorbell of a process was trapped and handled.
    pub(crate) fn heard(&self, page: u32, doorbell: Doorbell) {
        if page != KERNEL_PAGE
            && let Some(looks) = self.watch.looks.get()
        {
            looks.watcher().heard(page, matches!(doorbell, Doorbell::Cq { arm: Some(_), .. }));
        }
    }

    /// Runs `watch` for a new object of a context if the context's doorbells do not trap.
    fn watch_new(&self, owner: u32, watch: impl FnOnce(&Arc<DueLooks>)) {
        if let Some(looks) = self.watch.looks.get()
            && let Some(context) = self.objects.contexts.get(owner)
        {
            context.if_mapped(|| watch(looks));
        }
    }

    /// Watches a queue pair if necessary. It must be in its table already.
    pub(crate) fn watch_new_qp(&self, qp: &Arc<Qp<H>>) {
        self.watch_new(qp.pd.owner, |_| self.watch.rings.add_qp(qp));
    }

    /// Watches an SRQ if necessary. It must be in its table already.
    pub(crate) fn watch_new_srq(&self, srq: &Arc<Srq<H>>) {
        self.watch_new(srq.pd.owner, |_| self.watch.rings.add_srq(srq));
    }

    /// Watches a completion queue if necessary. It must be in its table already.
    pub(crate) fn watch_new_cq(&self, cq: &Arc<Cq<H>>) {
        self.watch_new(cq.owner, |looks| cq.ring.infer(&self.memory.view(), looks, infer::SHORTEST));
    }

    /// Returns the context of a page, with its handle.
    fn context_of(&self, page: u32) -> Option<(u32, Arc<Context>)> {
        let owner = self.uar.context(page)?;
        Some((owner, self.objects.contexts.get(owner)?))
    }

    /// Responds to a page whose doorbells do not trap from now on. The rings of its process are watched, and the guest
    /// is notified of completions that stay in its completion queues for `delay` nanoseconds. Returns `true` if there
    /// is such a process.
    pub(crate) fn watch_page(&self, page: u32, delay: u64) -> bool {
        let Some(looks) = self.watch.looks.get() else { return false };
        let Some((owner, context)) = self.context_of(page) else { return false };
        // An object that is created from now on sees that the page is mapped, and adds itself; existing ones are added
        // here. An object may be added twice, which the list ignores.
        if context.set_mapped(true, || self.watch_all_of(owner, looks, delay)) {
            self.stats.counts.doorbells_mapped.increment();
            self.arm_all_of(owner);
        }
        true
    }

    /// Makes the adapter publish the completions of a context as they arrive: the polls of its process do not trap, so
    /// the adapter must not wait for them.
    fn arm_all_of(&self, owner: u32) {
        for handle in self.objects.cqs.handles(|cq| cq.owner == owner) {
            if let Some(cq) = self.objects.cqs.get(handle) {
                cq.verbs.notify_arm();
            }
        }
    }

    fn watch_all_of(&self, owner: u32, looks: &Arc<DueLooks>, delay: u64) {
        for handle in self.objects.qps.handles(|qp| qp.pd.owner == owner) {
            if let Some(qp) = self.objects.qps.get(handle) {
                self.watch.rings.add_qp(&qp);
                self.unwatch_ended_qp(handle, &qp);
            }
        }
        for handle in self.objects.srqs.handles(|srq| srq.pd.owner == owner) {
            if let Some(srq) = self.objects.srqs.get(handle) {
                self.watch.rings.add_srq(&srq);
                self.unwatch_ended_srq(&srq);
            }
        }
        self.infer_cqs_of(owner, looks, delay);
    }

    /// Makes the completion queues of a context infer notifications. During a pause, this is left to the end of the
    /// pause.
    fn infer_cqs_of(&self, owner: u32, looks: &Arc<DueLooks>, delay: u64) {
        for handle in self.objects.cqs.handles(|cq| cq.owner == owner) {
            if let Some(cq) = self.objects.cqs.get(handle)
                && let Some(view) = self.view_unless_paused()
            {
                cq.ring.infer(&view, looks, delay);
            }
        }
    }

    /// Makes the completion queues of a context infer notifications, if its doorbells do not trap.
    pub(crate) fn infer_all_of(&self, owner: u32, delay: u64) {
        self.watch_new(owner, |looks| self.infer_cqs_of(owner, looks, delay));
    }

    /// Makes the watcher look again.
    pub(crate) fn wake_watcher(&self) {
        if let Some(looks) = self.watch.looks.get() {
            looks.watcher().wake();
        }
    }

    /// Removes a queue pair that was destroyed before it was added to the list, because no other code would remove it.
    /// If everything is destroyed, the tables are emptied before the list, so this also finds such a queue pair.
    fn unwatch_ended_qp(&self, handle: u32, qp: &Arc<Qp<H>>) {
        if self.objects.qps.get(handle).is_none_or(|other| !Arc::ptr_eq(&other, qp)) {
            self.watch.rings.remove_qp(qp);
        }
    }

    /// As [`Self::unwatch_ended_qp`], for an SRQ.
    fn unwatch_ended_srq(&self, srq: &Arc<Srq<H>>) {
        if self.objects.srqs.get(srq.handle).is_none_or(|other| !Arc::ptr_eq(&other, srq)) {
            self.watch.rings.remove_srq(srq);
        }
    }

    /// Responds to pages whose doorbells trap again. Finds requests that were posted while they did not. Arming that
    /// was missed is made up for by arming each queue once.
    pub(crate) fn unwatch_pages(&self, pages: &[u32], now: u64) {
        self.look_at_rings(now, Depth::All);
        self.run_deferred();
        let contexts: Vec<_> = pages.iter().filter_map(|&page| self.context_of(page)).collect();
        for (owner, context) in contexts {
            let unwatch = || {
                self.watch.rings.remove_owner(owner);
                for handle in self.objects.cqs.handles(|cq| cq.owner == owner) {
                    if let Some(cq) = self.objects.cqs.get(handle) {
                        cq.ring.listen(self.view_unless_paused().as_ref());
                    }
                }
            };
            if context.set_mapped(false, unwatch) {
                self.stats.counts.doorbells_unmapped.increment();
            }
        }
        self.retry_events();
    }

    /// Marks the doorbells that are due as pending, and returns the number of rings to which requests were posted.
    fn look_at_rings(&self, now: u64, depth: Depth) -> u32 {
        let mut moved = 0;
        if self.gate.is_open() && !self.watch.rings.is_empty() {
            let mut below = Some(usize::MAX);
            while let Some(end) = below {
                let Some(view) = self.view_unless_paused() else { break };
                let (more, rest) = self.watch.rings.look(&view, now, depth, end, &self.pending_doorbells);
                moved += more;
                below = rest;
            }
        }
        self.stats.counts.doorbells_found.add(moved.into());
        moved
    }

    /// Does one pass of the watcher.
    pub(crate) fn poll_doorbells(&self, now: u64, depth: Depth) -> Outcome {
        let Some(looks) = self.watch.looks.get() else { return Outcome::default() };
        let completed = looks.begin(depth);
        let moved = self.look_at_rings(now, depth);
        self.run_deferred();
        // The number of looks is bounded by the current length, because a queue that is looked at may be listed again.
        for _ in 0..looks.len() {
            if self.is_paused() {
                break;
            }
            let Some(handle) = looks.take(now) else { break };
            if let Some(cq) = self.objects.cqs.get(handle) {
                match self.view_unless_paused() {
                    Some(view) => cq.ring.look(&view, now),
                    None => looks.add(now, handle),
                }
            }
        }
        self.retry_events();
        // The end of a pause wakes the watcher.
        let due = looks.plan(depth == Depth::All).filter(|_| !self.is_paused());
        Outcome { moved, completed, due }
    }
}

#[cfg(test)]
mod tests {
    use pvrdma_pci_function::PciFunction;

    use super::*;
    use crate::device::PvrdmaDevice;
    use crate::testing::{
        Cq as DriverCq, Driver, GuestMemory, MappedPages, MockBackend, MockHca, Pd, Qp as DriverQp, QpInit, RecvWr,
        SendWr, Srq as DriverSrq, TestDevice,
    };

    /// A device with room for one queue pair and one SRQ, so that the next one gets the same handle, and two processes.
    /// The page of the second one is memory.
    struct World {
        device: Arc<PvrdmaDevice<MockHca>>,
        driver: Driver,
        owners: [(Pd, DriverCq); 2],
    }

    impl World {
        fn new() -> Self {
            let mut config = TestDevice::<MockBackend>::config(1);
            config.limits.verbs.max_qp = 3;
            config.limits.verbs.max_srq = 1;
            let test = TestDevice::new(&MockBackend::new(), config, GuestMemory::new(1 << 20));
            let pages: Arc<dyn PciFunction> = MappedPages::new(&test.device);
            let driver = Driver::probe(pages, &test.memory, &test.irqs).unwrap();
            let [first, second] = [driver.open().unwrap(), driver.open().unwrap()];
            assert!(test.device.core().watch_page(second.uar, 0));
            let owners = [first, second].map(|process| {
                let pd = driver.create_pd(Some(&process)).unwrap();
                (pd, driver.create_cq(Some(&process), 16).unwrap())
            });
            Self { device: test.device, driver, owners }
        }

        fn core(&self) -> &Core<MockHca> {
            self.device.core()
        }

        fn create_qp(&self, owner: usize) -> DriverQp {
            let (pd, cq) = &self.owners[owner];
            self.driver.create_qp(&QpInit::rc(pd, cq)).unwrap()
        }

        fn create_srq(&self, owner: usize) -> DriverSrq {
            self.driver.create_srq(&self.owners[owner].0, 16, 1, 0).unwrap()
        }
    }

    /// Returns all orders of three steps of a watcher and of two commands: the number of each, and whether it is a
    /// command.
    fn orders() -> impl Iterator<Item = impl Iterator<Item = (u32, bool)>> {
        (0..1_u32 << 5).filter(|order| order.count_ones() == 2).map(|order| {
            (0..5).map(move |step| {
                let commands = (order & ((1 << step) - 1)).count_ones();
                let is_command = order >> step & 1 == 1;
                (if is_command { commands } else { step - commands }, is_command)
            })
        })
    }

    /// A queue pair is destroyed while a watcher lists it, and another process gets its handle. Regression: the new
    /// queue pair was not watched.
    #[test]
    fn a_queue_pair_that_is_listed_late_hides_none() {
        for order in orders() {
            let world = World::new();
            let core = world.core();
            let (mut old, mut new, mut found) = (Some(world.create_qp(0)), None, None);
            let handle = old.as_ref().unwrap().handle;
            for step in order {
                match (step, &found) {
                    ((0, true), _) => old.take().unwrap().destroy().unwrap(),
                    ((1, true), _) => new = Some(world.create_qp(1)),
                    ((0, false), _) => found = core.objects.qps.get(handle),
                    ((1, false), Some(qp)) => core.watch.rings.add_qp(qp),
                    ((_, false), Some(qp)) => core.unwatch_ended_qp(handle, qp),
                    _ => {}
                }
            }
            let mut new = new.unwrap();
            assert_eq!(new.handle, handle);
            new.post_send(&[SendWr::send(1, &[])]).unwrap();
            new.post_recv(&[RecvWr::new(1, &[])]).unwrap();
            assert_eq!(core.look_at_rings(0, Depth::All), 2, "an element is posted, and no thread looks");
            new.destroy().unwrap();
            assert!(core.watch.rings.is_empty(), "a destroyed queue pair stays on the list");
        }
    }

    /// The same for shared receive queues.
    #[test]
    fn a_shared_queue_that_is_listed_late_hides_none() {
        for order in orders() {
            let world = World::new();
            let core = world.core();
            let (mut old, mut new, mut found) = (Some(world.create_srq(0)), None, None);
            let handle = old.as_ref().unwrap().handle;
            for step in order {
                match (step, &found) {
                    ((0, true), _) => old.take().unwrap().destroy().unwrap(),
                    ((1, true), _) => new = Some(world.create_srq(1)),
                    ((0, false), _) => found = core.objects.srqs.get(handle),
                    ((1, false), Some(srq)) => core.watch.rings.add_srq(srq),
                    ((_, false), Some(srq)) => core.unwatch_ended_srq(srq),
                    _ => {}
                }
            }
            let mut new = new.unwrap();
            assert_eq!(new.handle, handle);
            new.post(&[RecvWr::new(1, &[])]).unwrap();
            assert_eq!(core.look_at_rings(0, Depth::All), 1, "an element is posted, and no thread looks");
            new.destroy().unwrap();
            assert!(core.watch.rings.is_empty(), "a destroyed SRQ stays on the list");
        }
    }

    /// Everything is destroyed while a watcher lists a queue pair and an SRQ that are still in their tables.
    /// Regression: they stayed on the list and kept their memory.
    #[test]
    fn objects_listed_during_their_destruction_do_not_stay() {
        let world = World::new();
        let core = world.core();
        let (qp, srq) = (world.create_qp(1), world.create_srq(1));
        let (found, shared) = (core.objects.qps.get(qp.handle).unwrap(), core.objects.srqs.get(srq.handle).unwrap());
        let rings = &core.watch.rings;
        assert!(!rings.is_empty());
        std::thread::scope(|scope| {
            // The table cannot be emptied while it is locked here.
            core.objects.qps.handles(|_| {
                scope.spawn(|| core.end_all());
                while !rings.is_empty() {
                    std::thread::yield_now();
                }
                rings.add_qp(&found);
                rings.add_srq(&shared);
                true
            });
        });
        assert!(rings.is_empty(), "a destroyed object stays on the list");
        assert_eq!((Arc::strong_count(&found), Arc::strong_count(&shared)), (1, 1));
    }
}
