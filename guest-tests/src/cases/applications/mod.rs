//! RDMA applications between two guests, which verify the data: libraries and MPI, and RDMA users in the kernel.

mod kernel;
pub(super) mod libraries;
mod mpi;
mod pair;

use super::case::Case;
use super::shared::Shared;
use pair::ApplicationsPair;

/// Reason why they do not run by default.
const WHEN: &str = "needs a disk with more programs; runs when asked for: --only applications/";

/// Returns the cases. The first of them boots the guests.
pub(crate) fn cases() -> Vec<Case> {
    let shared = Shared::new(ApplicationsPair::boot);
    let cases = [mpi::cases(&shared), libraries::cases(&shared), kernel::cases(&shared)];
    cases.into_iter().flatten().map(|case| case.slow(WHEN)).collect()
}
