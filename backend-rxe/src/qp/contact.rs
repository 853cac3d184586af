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

#[cfg(test)]
mod tests {
    use super::*;

    fn psns(sq: u32, rq: u32) -> (Psn, Psn) {
        (Psn::new(sq), Psn::new(rq))
    }

    /// The two halves of a connection.
    fn connection() -> (Connection, Connection) {
        let (mut responder, mut requester) = (Connection::NONE, Connection::NONE);
        assert!(responder.meet(&mut requester, psns(5, 5)));
        (responder, requester)
    }

    #[test]
    fn the_first_request_has_the_psn_that_was_agreed_on() {
        let (mut responder, mut requester) = (Connection::NONE, Connection::NONE);
        assert!(!responder.meet(&mut requester, psns(5, 6)));
        assert_eq!((responder, requester), (Connection::NONE, Connection::NONE), "nothing was begun");
        assert!(responder.meet(&mut requester, psns(6, 6)));
        assert!(responder.meet(&mut requester, psns(7, 6)), "what follows goes by the name");
    }

    #[test]
    fn halves_of_different_connections_never_meet() {
        let ((first, first_requester), (second, second_requester)) = (connection(), connection());
        let mut wire = Connection::NONE;
        assert!(wire.meet_wire() && wire.meet_wire());
        let halves = [
            (Connection::NONE, first_requester),
            (Connection::NONE, second_requester),
            (first, Connection::NONE),
            (first, second_requester),
            (second, first_requester),
            (wire, Connection::NONE),
            (wire, first_requester),
        ];
        for before in halves {
            // Even with the right PSN: it came round, as the number and the address did.
            let (mut responder, mut requester) = before;
            assert!(!responder.meet(&mut requester, psns(5, 5)), "{before:?}");
            assert_eq!((responder, requester), before, "nobody joins");
        }
    }

    #[test]
    fn a_connection_of_this_process_hears_nothing_from_the_wire() {
        let (mut responder, requester) = connection();
        assert!(!responder.meet_wire());
        assert_eq!(responder, requester);
    }
}
