//! The requester's side of an exchange: memory that is held together with that of the responder, or a buffer.
//!
//! The two are types and not variants, so that the compiler keeps an exchange in registers.

use std::sync::atomic::{Ordering, fence};

use pvrdma_verbs_types::{Access, AccessError, SendWr};
use vm_memory::VolatileSlice;

use crate::budget::Budget;
use crate::qp::Qp;
use crate::qp::requester::Progress;
use crate::sg::{FaultyList, Located, Memory, SgList, transfer};

/// The requester's memory during a step.
pub(super) trait OwnSide {
    /// Moves a part of a message to the responder. Returns `true` if the message is complete.
    fn put(&mut self, moving: Moving<'_>, to: Located<'_>, ordered: bool) -> Result<bool, FaultyList>;

    /// Moves a part of a message from the responder. Returns `true` if the message is complete.
    fn get(&mut self, moving: Moving<'_>, from: Located<'_>) -> Result<bool, FaultyList>;

    /// Stores the result of an atomic operation.
    fn store(&mut self, qp: &Qp, work: &SendWr, old: [u8; 8]) -> Result<(), AccessError>;
}

/// A message of which a part is moved.
pub(super) struct Moving<'a> {
    pub(super) qp: &'a Qp,
    pub(super) work: &'a SendWr,
    pub(super) progress: &'a mut Progress,
    pub(super) budget: &'a mut Budget,
}

/// Held together with the responder's memory.
pub(super) struct Joint<'a> {
    pub(super) memory: Memory<'a>,
    /// The data to send, if they are contiguous and were checked in this step.
    pub(super) data: Option<VolatileSlice<'a>>,
}

/// The requester's memory is not held. The buffer has the bytes that the request moves in this step.
pub(super) struct Apart<'a>(pub(super) &'a mut [u8]);

impl OwnSide for Joint<'_> {
    #[inline(always)]
    fn put(&mut self, moving: Moving<'_>, to: Located<'_>, ordered: bool) -> Result<bool, FaultyList> {
        let Moving { qp, work, progress, budget } = moving;
        let from = Located { list: own_list(self.memory, qp, work, Access::empty()), memory: self.data };
        move_chunk(from, to, progress, budget, ordered)
    }

    #[inline]
    fn get(&mut self, moving: Moving<'_>, from: Located<'_>) -> Result<bool, FaultyList> {
        let Moving { qp, work, progress, budget } = moving;
        let to = own_list(self.memory, qp, work, Access::LOCAL_WRITE).into();
        move_chunk(from, to, progress, budget, true)
    }

    fn store(&mut self, qp: &Qp, work: &SendWr, old: [u8; 8]) -> Result<(), AccessError> {
        own_list(self.memory, qp, work, Access::LOCAL_WRITE).write(0, &old)
    }
}

impl OwnSide for Apart<'_> {
    fn put(&mut self, moving: Moving<'_>, to: Located<'_>, _ordered: bool) -> Result<bool, FaultyList> {
        let (Moving { progress, budget, .. }, to) = (moving, to.list);
        // Programs that poll a written buffer expect its last bytes to arrive last.
        let (body, tail) = self.0.split_at(self.0.len().saturating_sub(8));
        let tail_at = progress.done.saturating_add(body.len() as u64);
        let written = to.write(progress.done, body).and_then(|()| {
            fence(Ordering::Release);
            to.write(tail_at, tail)
        });
        written.map_err(|_| FaultyList::Target)?;
        Ok(moved(self.0.len() as u64, progress, budget))
    }

    fn get(&mut self, moving: Moving<'_>, from: Located<'_>) -> Result<bool, FaultyList> {
        let Moving { progress, budget, .. } = moving;
        from.list.read(progress.done, self.0).map_err(|_| FaultyList::Source)?;
        Ok(moved(self.0.len() as u64, progress, budget))
    }

    fn store(&mut self, _qp: &Qp, _work: &SendWr, old: [u8; 8]) -> Result<(), AccessError> {
        self.0.iter_mut().zip(old).for_each(|(byte, old)| *byte = old);
        Ok(())
    }
}

/// Returns the SGE list of the request.
pub(super) fn own_list<'a>(memory: Memory<'a>, qp: &'a Qp, work: &'a SendWr, need: Access) -> SgList<'a> {
    SgList { memory, sges: &work.sges, pd: qp.pd, need }
}

/// Accounts for moved bytes. Returns `true` if the message is complete.
const fn moved(count: u64, progress: &mut Progress, budget: &mut Budget) -> bool {
    budget.take_bytes(count);
    progress.done = progress.done.saturating_add(count);
    progress.done >= progress.length
}

/// Moves as much of a message as the budget allows. Returns `true` if the message is complete.
#[inline(always)]
fn move_chunk(
    from: Located<'_>,
    to: Located<'_>,
    progress: &mut Progress,
    budget: &mut Budget,
    ordered: bool,
) -> Result<bool, FaultyList> {
    let left = progress.length.saturating_sub(progress.done);
    if left == 0 {
        return Ok(true);
    }
    let count = left.min(budget.bytes().max(1));
    transfer((from, progress.done), (to, progress.done), count, ordered && count == left)?;
    budget.take_bytes(count);
    progress.done += count;
    Ok(count == left)
}
