//! Number of requests that a QP can take from its ring before they are sent.
//!
//! Requests that were taken occupy host memory, and the guest determines how much each needs. A QP is charged for a few
//! of them when it is created. Further ones are charged on demand, many at a time, and released when the QP has no
//! requests in flight and the device's budget is low. Without a charge, requests stay in the guest's ring.

use std::sync::Arc;

use pvrdma_guest_memory::{Charge, Kept, MemoryBudget};
use pvrdma_roce::{Requester, Tuning};
use pvrdma_verbs::VerbsError;

use crate::limits::FAST_REGISTER_PAGES;

/// Number of requests that a QP can take: initially, and with each step.
const REQUESTS: [usize; 3] = [8, 32, 128];
/// Number of fast registrations that wait with their page lists: initially, and with each step.
const PAGE_LISTS: [usize; 3] = [1, 4, 8];
/// Bytes of a waiting fast registration: 16 for each page, and the fixed part.
const PAGE_LIST_BYTES: usize = FAST_REGISTER_PAGES as usize * 16 + 160;

/// Returns the bytes that a QP is charged when it is created, if its requests have up to `max_sge` SGEs.
pub(crate) fn first_bytes(max_sge: u32) -> usize {
    requests_bytes(REQUESTS[0], max_sge).saturating_add(PAGE_LISTS[0] * PAGE_LIST_BYTES)
}

/// Returns the bytes of `count` requests with `max_sge` SGEs each. Each SGE list is an allocation.
fn requests_bytes(count: usize, max_sge: u32) -> usize {
    // The smallest allocation of a list has room for four entries.
    count.saturating_mul(Requester::bytes_of_request(max_sge.max(4) as usize).saturating_add(16))
}

/// Returns the initial tuning of the requester. With `negotiate` it offers selective acknowledgements; with `multipath`
/// it can then use several paths.
pub(super) fn tuning(negotiate: bool, multipath: bool) -> Tuning {
    Tuning::default()
        .with_requests(REQUESTS[0])
        .with_page_lists(PAGE_LISTS[0])
        .with_negotiate(negotiate)
        .with_multipath(multipath)
}

/// Room of a QP, with the charges beyond the initial room.
#[derive(Debug)]
pub(super) struct Room {
    /// Maximum number of SGEs of a request.
    max_sge: u32,
    requests: Step,
    page_lists: Step,
}

/// Current step of one of the two limits.
#[derive(Debug, Default)]
struct Step {
    at: u8,
    charge: Option<Charge>,
}

impl Step {
    fn value(&self, steps: [usize; 3]) -> usize {
        steps.get(usize::from(self.at)).copied().unwrap_or(steps[0])
    }

    /// Takes the next step, if there is one and the budget allows it.
    fn grow(&mut self, budget: &Arc<MemoryBudget>, steps: [usize; 3], bytes: impl Fn(usize) -> usize) {
        let Some(next) = steps.get(usize::from(self.at) + 1) else { return };
        // The old charge is kept until the new one is made, because it covers the copy that growing makes.
        if let Ok(charge) = budget.charge(Kept::Requests, bytes(next - steps[0]) as u64) {
            self.charge = Some(charge);
            self.at += 1;
        }
    }
}

impl Room {
    /// Creates the initial room of a QP whose requests have up to `max_sge` SGEs.
    pub(super) fn new(max_sge: u8) -> Self {
        Self { max_sge: max_sge.into(), requests: Step::default(), page_lists: Step::default() }
    }

    /// Raises the limit that blocks the next request, as long as half of the device's budget remains for the guest's
    /// objects. Returns `true` if there is room now.
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

    /// Raises the limits until a restored requester has room for this many requests, and for this many fast
    /// registrations that were not started.
    ///
    /// # Errors
    /// It has more than a requester can take, or the budget does not cover them.
    pub(super) fn cover(
        &mut self,
        budget: &Arc<MemoryBudget>,
        transport: &mut Requester,
        [requests, page_lists]: [usize; 2],
    ) -> Result<(), VerbsError> {
        let max_sge = self.max_sge;
        let limits: [(&mut Step, _, _, &dyn Fn(usize) -> usize); 2] = [
            (&mut self.requests, REQUESTS, requests, &|count| requests_bytes(count, max_sge)),
            (&mut self.page_lists, PAGE_LISTS, page_lists, &|count| count * PAGE_LIST_BYTES),
        ];
        for (step, steps, needed, bytes) in limits {
            while step.value(steps) < needed {
                let before = step.at;
                step.grow(budget, steps, bytes);
                if step.at == before {
                    return Err(VerbsError::Exhausted("request in flight"));
                }
            }
        }
        transport.set_room(self.requests.value(REQUESTS), self.page_lists.value(PAGE_LISTS));
        Ok(())
    }

    /// Releases the additional room of a QP without requests in flight, if the device's budget is low.
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
    use pvrdma_pages::Extent;
    use pvrdma_verbs_types::FastRegister;

    use super::*;

    #[test]
    fn the_last_step_is_the_maximum_of_a_requester() {
        let Tuning { requests, page_lists, .. } = Tuning::default();
        assert_eq!((REQUESTS[2], PAGE_LISTS[2]), (requests, page_lists));
        assert!(PAGE_LIST_BYTES >= 128 * size_of::<Extent>() + size_of::<FastRegister>() + 32);
    }
}
