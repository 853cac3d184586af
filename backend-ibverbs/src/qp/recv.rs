//! The receive side of a queue pair or of a shared receive queue.

use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use pvrdma_guest_memory::DmaView;
use pvrdma_verbs::{Access, QueueError, RecvSource, RecvWr, Sge};

use crate::adapter::Adapter;
use crate::flight::{RecvFlight, Ticket};
use crate::sys;
use crate::verbs::{HostPd, RecvBatch};

/// Receives posted to the host at once.
const BATCH: usize = 32;

/// The guest's ring and room to work.
pub(crate) struct RecvSide {
    pub(crate) source: Box<dyn RecvSource>,
    pub(crate) work: RecvWr,
    batch: RecvBatch,
    sges: Vec<sys::Sge>,
    /// Numbers of what is in the batch.
    numbers: Vec<u32>,
}

impl RecvSide {
    pub(crate) fn new(source: Box<dyn RecvSource>) -> Self {
        let (batch, sges, numbers) = (RecvBatch::default(), Vec::new(), Vec::new());
        Self { source, work: RecvWr::default(), batch, sges, numbers }
    }

    /// Takes requests from the ring into the batch, and notes them as under way. Gives how many.
    pub(crate) fn fill(
        &mut self,
        adapter: &Adapter,
        view: &DmaView<'_>,
        pd: &Arc<HostPd>,
        flight: &Mutex<RecvFlight>,
    ) -> Result<usize, QueueError> {
        self.batch.clear();
        self.numbers.clear();
        while self.batch.len() < BATCH && flight.lock().has_room() && self.source.pop(view, &mut self.work)? {
            self.sges.clear();
            let RecvWr { wr_id, sges, malformed } = &self.work;
            let known = adapter.mrs.translate(adapter, view, pd, sges, Access::LOCAL_WRITE, &mut self.sges);
            if *malformed || known.is_none() {
                // An error shows when the receive is used: the host is given what it must refuse.
                let first = sges
                    .iter()
                    .find(|sge| sge.length != 0)
                    .copied()
                    .unwrap_or_else(|| Sge { length: 1, ..Sge::default() });
                self.sges.clear();
                self.sges.push(sys::Sge { addr: first.addr, length: first.length, lkey: 0 });
            }
            let mut flight = flight.lock();
            let Some(number) = flight.push(*wr_id) else { break };
            self.batch.push(Ticket { recv: true, life: flight.life, number }.encode(), &self.sges);
            self.numbers.push(number);
        }
        Ok(self.batch.len())
    }

    /// Posts the batch. What the host does not take is not under way any more.
    pub(crate) fn post(
        &mut self,
        adapter: &Adapter,
        post: impl FnOnce(&mut RecvBatch) -> (usize, io::Result<()>),
        flight: &Mutex<RecvFlight>,
    ) -> (Vec<u64>, io::Result<()>) {
        let (taken, result) = post(&mut self.batch);
        adapter.counters.receives_posted.add(taken as u64);
        let mut flight = flight.lock();
        let refused = self.numbers.iter().skip(taken).filter_map(|&number| flight.complete(number)).collect();
        (refused, result)
    }
}
