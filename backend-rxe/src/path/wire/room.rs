//! How many requests a QP may take from its ring before it is their turn.
//!
//! Requests that were taken are memory of ours, and what each of them takes is the guest's choice. A QP that was made
//! has paid for a few. More are paid for when they are wanted, many at a time, and given back by a QP that has none in
//! flight while the device has little left. Without them requests wait in the guest's ring.

use std::sync::Arc;

use pvrdma_guest_memory::{Charge, Kept, MemoryBudget};
use pvrdma_roce::{Requester, Tuning};

/// Requests that a QP may take: first, and with each step.
const REQUESTS: [usize; 3] = [8, 32, 128];
/// Fast registrations that wait with their lists of pages: first, and with each step.
const PAGE_LISTS: [usize; 3] = [1, 4, 8];
/// Bytes of a fast registration that waits: an entry for each page, in 16 bytes, and what is beside it.
const PAGE_LIST_BYTES: usize = 128 * 16 + 160;

/// Bytes that a QP whose requests have so many SGEs pays for when it is made.
pub(crate) fn first_bytes(max_sge: u32) -> usize {
    requests_bytes(REQUESTS[0], max_sge).saturating_add(PAGE_LISTS[0] * PAGE_LIST_BYTES)
}

/// So many requests with all the SGEs that they may have. Each list of SGEs is an allocation.
fn requests_bytes(count: usize, max_sge: u32) -> usize {
    // The heap's smallest list has four.
    count.saturating_mul(Requester::bytes_of_request(max_sge.max(4) as usize).saturating_add(16))
}

/// The requester's tuning at first. `negotiate`: it offers to take selective acknowledgements. `multipath`: it may take
/// several paths then.
pub(super) fn tuning(negotiate: bool, multipath: bool) -> Tuning {
    Tuning { requests: REQUESTS[0], page_lists: PAGE_LISTS[0], negotiate, multipath, ..Tuning::default() }
}

/// What a QP has beyond its first room.
#[derive(Debug)]
pub(super) struct Room {
    /// SGEs of a request.
    max_sge: u32,
    requests: Step,
    page_lists: Step,
}

/// How far one of the two has grown.
#[derive(Debug, Default)]
struct Step {
    at: u8,
    charge: Option<Charge>,
}

impl Step {
    fn value(&self, steps: [usize; 3]) -> usize {
        steps.get(usize::from(self.at)).copied().unwrap_or(steps[0])
    }

    /// Takes the next step, if there is one and it can be paid for.
    fn grow(&mut self, budget: &Arc<MemoryBudget>, steps: [usize; 3], bytes: impl Fn(usize) -> usize) {
        let Some(next) = steps.get(usize::from(self.at) + 1) else { return };
        // The old charge stays until the new one is there; it pays for the copy that growing makes.
        if let Ok(charge) = budget.charge(Kept::Requests, bytes(next - steps[0]) as u64) {
            self.charge = Some(charge);
            self.at += 1;
        }
    }
}

impl Room {
    /// That of a QP whose requests have so many SGEs.
    pub(super) fn new(max_sge: u8) -> Self {
        Self { max_sge: max_sge.into(), requests: Step::default(), page_lists: Step::default() }
    }

    /// Makes room for more, if that is what keeps the next request out and the device has half of its memory left,
    /// which is for the guest's objects. Returns `true` if there is room now.
    #[cold]
    pub(super) fn grow(&mut self, budget: &Arc<MemoryBudget>, transport: &mut Requester) -> bool {
        if budget.is_scarce() {
            return false;
        }
        if transport.has_most_page_lists() {
            self.page_lists.grow(budget, PAGE_LISTS, |count| count * PAGE_LIST_BYTES);
        } else {
            let max_sge = self.max_sge;
            self.requests.grow(budget, REQUESTS, |count| requests_bytes(count, max_sge));
        }
        transport.set_room(self.requests.value(REQUESTS), self.page_lists.value(PAGE_LISTS));
        transport.has_room()
    }

    /// Gives back what a QP with nothing in flight does not need, if the device has little left.
    #[inline]
    pub(super) fn rest(&mut self, budget: &MemoryBudget, transport: &mut Requester) {
        let grown = self.requests.charge.is_some() || self.page_lists.charge.is_some();
        if grown && transport.is_empty() && budget.is_scarce() {
            (self.requests, self.page_lists) = (Step::default(), Step::default());
            transport.set_room(REQUESTS[0], PAGE_LISTS[0]);
        }
    }
}

#[cfg(test)]
mod tests {
    use pvrdma_guest_memory::Extent;
    use pvrdma_verbs::FastRegister;

    use super::*;

    #[test]
    fn the_last_step_is_what_a_requester_can_use() {
        let Tuning { requests, page_lists, .. } = Tuning::default();
        assert_eq!((REQUESTS[2], PAGE_LISTS[2]), (requests, page_lists));
        assert!(PAGE_LIST_BYTES >= 128 * size_of::<Extent>() + size_of::<FastRegister>() + 32);
    }
}
