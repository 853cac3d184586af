//! Place of a ring's indices in its state page.

use crate::abi::ring::{RX_PROD_TAIL, TX_PROD_TAIL};

/// Pair of index words in the ring-state page (spec §6.2).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum StateWords {
    /// Bytes 0..8: send queues.
    Tx,
    /// Bytes 8..16: all other queues.
    Rx,
}

impl StateWords {
    /// Returns the offset of the producer's word in the state page.
    pub(super) const fn prod_tail(self) -> u64 {
        match self {
            Self::Tx => TX_PROD_TAIL,
            Self::Rx => RX_PROD_TAIL,
        }
    }
}
