//! Programs that people run over RDMA, between two guests whose data they verify: libraries and MPI, and what the
//! kernel itself does.

mod kernel;
mod libraries;
mod mpi;
mod pair;

use super::case::Case;
use super::shared::Shared;
use pair::ApplicationsPair;

/// Where the library with `socket` and its friends over RDMA is.
pub(super) const RSOCKETS: &str = "LD_PRELOAD=/usr/lib/x86_64-linux-gnu/rsocket/librspreload.so";

/// Why they do not run with the others.
const WHEN: &str = "needs a disk with more programs; runs when asked for: --only applications/";

/// The guests boot for the first of them.
pub(crate) fn cases() -> Vec<Case> {
    let shared = Shared::new(ApplicationsPair::boot);
    let cases = [mpi::cases(&shared), libraries::cases(&shared), kernel::cases(&shared)];
    cases.into_iter().flatten().map(|case| case.slow(WHEN)).collect()
}
