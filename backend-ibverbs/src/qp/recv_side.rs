//! Receive side of a queue pair or of a shared receive queue.

use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use pvrdma_guest_memory::DmaView;
use pvrdma_verbs::{QueueError, RecvSource};
use pvrdma_verbs_types::{Access, RecvWr, Sge};

use crate::adapter::Adapter;
use crate::inflight::{RecvInflight, WrId};
use crate::mr::MrTable;
use crate::sys;
use crate::verbs::{HostPd, RecvBatch};

/// Maximum number of receives posted to the host at once.
const BATCH: usize = 32;

/// State of the guest's ring after a batch was taken from it.
#[derive(Debug)]
pub(crate) enum Filled {
    /// The ring may hold more.
    More,
    /// The ring is empty.
    Empty,
    /// The ring cannot be read. Requests that were taken before the error are in the batch.
    Broken(QueueError),
}

/// The guest's ring and working buffers.
pub(crate) struct RecvSide {
    pub(crate) source: Box<dyn RecvSource>,
    pub(crate) wr: RecvWr,
    batch: RecvBatch,
    sges: Vec<sys::Sge>,
    /// Numbers of the requests in the batch.
    numbers: Vec<u32>,
}

impl RecvSide {
    pub(crate) fn new(source: Box<dyn RecvSource>) -> Self {
        let (batch, sges, numbers) = (RecvBatch::default(), Vec::new(), Vec::new());
        Self { source, wr: RecvWr::default(), batch, sges, numbers }
    }

    /// Moves requests from the ring to the batch, and records them as in flight. The caller must post the batch
    /// whatever the result, because the recorded requests are not ended elsewhere.
    pub(crate) fn fill(
        &mut self,
        mrs: &MrTable,
        view: &DmaView<'_>,
        pd: &Arc<HostPd>,
        inflight: &Mutex<RecvInflight>,
    ) -> Filled {
        self.batch.clear();
        self.numbers.clear();
        while self.batch.len() < BATCH && inflight.lock().has_room() {
            match self.source.pop(view, &mut self.wr) {
                Ok(true) => {}
                Ok(false) => return Filled::Empty,
                Err(error) => return Filled::Broken(error),
            }
            self.sges.clear();
            let RecvWr { wr_id, sges, malformed } = &self.wr;
            let known = mrs.translate(view, pd, sges, Access::LOCAL_WRITE, &mut self.sges);
            if *malformed || known.is_none() {
                // An error must appear only when the receive is used, so the host gets an SGE that it will refuse.
                let first = sges
                    .iter()
                    .find(|sge| sge.length != 0)
                    .copied()
                    .unwrap_or_else(|| Sge { length: 1, ..Sge::default() });
                self.sges.clear();
                self.sges.push(sys::Sge { addr: first.addr, length: first.length, lkey: 0 });
            }
            let mut inflight = inflight.lock();
            let Some(number) = inflight.push(*wr_id) else { break };
            self.batch.push(WrId { recv: true, epoch: inflight.epoch, number }.encode(), &self.sges);
            self.numbers.push(number);
        }
        Filled::More
    }

    /// Returns `true` if the batch is not empty.
    pub(crate) const fn is_filled(&self) -> bool {
        self.batch.len() != 0
    }

    /// Posts the batch. Requests that the host does not accept are removed from those in flight and returned.
    pub(crate) fn post(
        &mut self,
        adapter: &Adapter,
        post: impl FnOnce(&mut RecvBatch) -> (usize, io::Result<()>),
        inflight: &Mutex<RecvInflight>,
    ) -> (Vec<u64>, io::Result<()>) {
        let (taken, result) = post(&mut self.batch);
        adapter.counters.receives_posted.add(taken as u64);
        let mut inflight = inflight.lock();
        let refused = self.numbers.iter().skip(taken).filter_map(|&number| inflight.complete(number)).collect();
        (refused, result)
    }
}

#[cfg(test)]
mod tests {
    use pvrdma_verbs::{Hca, testing::Node};

    use super::*;
    use crate::fake::FakeBackend;

    /// A ring with an endless number of receives.
    struct Endless;

    impl RecvSource for Endless {
        fn pop(&mut self, _: &DmaView<'_>, wr: &mut RecvWr) -> Result<bool, QueueError> {
            wr.sges.clear();
            Ok(true)
        }

        fn posted(&mut self, _: &DmaView<'_>) -> Result<u32, QueueError> {
            Ok(1)
        }

        fn reset(&mut self) {}
    }

    /// Room may become available right after this: treating a ring that was left unread as empty would stall it
    /// forever.
    #[test]
    fn a_ring_that_is_unread_for_lack_of_room_does_not_count_as_empty() {
        let node = Node::new(&FakeBackend::new(), 1);
        let (objects, inflight) = (node.hca.objects(), Mutex::new(RecvInflight::new(1)));
        let pd = node.hca.create_pd().unwrap().0;
        let mut side = RecvSide::new(Box::new(Endless));
        for filled in [true, false] {
            let view = objects.adapter.memory.view();
            assert!(matches!(side.fill(&objects.mrs, &view, &pd, &inflight), Filled::More));
            assert_eq!(side.is_filled(), filled);
        }
    }
}
