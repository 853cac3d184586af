//! Sides of these measurements: on the software adapter, with deep queues and a contiguous buffer.

use anyhow::Result;
use pvrdma_dev::testing::Placement;
use pvrdma_rxe::{Rxe, RxeConfig};

use crate::device_pair::{Side, SideOptions, connect};

/// Requests per queue.
pub(super) const DEPTH: u32 = 256;

/// Two connected sides, each with a registered buffer of `bytes`.
pub(super) fn connected(bytes: usize) -> Result<[Side; 2]> {
    connected_with_spare(bytes, 64 << 20)
}

/// Same as [`connected`], with this many bytes of additional guest memory.
pub(super) fn connected_with_spare(bytes: usize, other_memory: usize) -> Result<[Side; 2]> {
    let backend = Rxe::new(RxeConfig::default())?;
    let options = SideOptions {
        other_memory,
        depth: DEPTH,
        cq_entries: 2 * DEPTH,
        ..SideOptions::new(bytes, Placement::Contiguous)
    };
    connect(Side::private(&backend, 1, &options)?, Side::private(&backend, 2, &options)?)
}
