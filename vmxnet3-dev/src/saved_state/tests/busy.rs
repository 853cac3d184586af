//! busy
use crate::testing::RxLayout;

/// Both kinds of rings, with a data ring, and small, so that they wrap.
pub(super) const LAYOUT: RxLayout =
    RxLayout { first: 32, second: 32, head: 1536, body: 512, bodies: 0, data_slot: 128 };
