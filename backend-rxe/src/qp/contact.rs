//! Which two halves are a connection.
//!
//! Addresses and numbers come round: the next owner of a GID makes a QP of the same number sooner or later. PSNs tell
//! connections apart on the wire. Local delivery has none, so there the first request gives a name to the connection,
//! which both halves keep until RESET.

use std::sync::atomic::{AtomicU64, Ordering};

use pvrdma_verbs::Psn;

/// The connection that a half of a QP belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Connection(u64);

impl Connection {
    /// No request has come, or was answered, yet.
    const NONE: Self = Self(0);
    /// The other half is on the wire.
    const WIRE: Self = Self(1);

    /// One that there was not before.
    fn begin() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(2);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// A request of the wire met this responder. Returns `true` if its requests come from there.
    pub(crate) fn meet_wire(&mut self) -> bool {
        if *self == Self::NONE {
            *self = Self::WIRE;
        }
        *self == Self::WIRE
    }

    /// A request of a requester of this process meets this responder, which takes requests. Returns `true` if the two
    /// are one connection. For the first request they are if its PSN is the one that was agreed on.
    pub(crate) fn meet(&mut self, requester: &mut Self, (sq_psn, rq_psn): (Psn, Psn)) -> bool {
        if *self == Self::NONE && *requester == Self::NONE && sq_psn == rq_psn {
            *self = Self::begin();
            *requester = *self;
        }
        *self == *requester && *self != Self::NONE
    }
}
