//! Connection identity for local delivery, which has no PSNs to tell connections apart.
//!
//! Addresses and QPNs are reused: sooner or later the next owner of a GID creates a QP with the same number. On the
//! wire, PSNs tell the old connection from the new one. In local delivery, the first request assigns an identifier to
//! the connection, and both halves keep it until RESET.

use std::io;

use pvrdma_base::Random;
use pvrdma_verbs_types::Psn;

/// Identifier of the connection that a half of a QP belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub(crate) struct Connection(u64);

impl Connection {
    /// No request has arrived at the responder, or was accepted from the requester, yet.
    pub(crate) const NONE: Self = Self(0);
    /// The other half is on the wire.
    pub(crate) const WIRE: Self = Self(1);

    /// Returns a new identifier. It is random, because a VMM can read the identifiers of its own guest's connections,
    /// and restore queue pairs with any others.
    ///
    /// # Errors
    /// The system call failed.
    fn begin() -> io::Result<Self> {
        let mut random = Random::System;
        let number = u64::from(random.draw()?) << 32 | u64::from(random.draw()?);
        // The smallest ones have a meaning.
        Ok(Self(number.max(2)))
    }

    /// Returns `true` if the other half is in this process.
    pub(crate) fn is_local(self) -> bool {
        self != Self::NONE && self != Self::WIRE
    }

    /// Returns the number that identifies the connection in a saved state.
    pub(crate) const fn save(self) -> u64 {
        self.0
    }

    /// Restores an identifier, so that halves restored in one process still belong together.
    pub(crate) const fn restore(number: u64) -> Self {
        Self(number)
    }

    /// Handles a request from the wire at this responder. Returns `true` if the responder's requests come from the
    /// wire.
    pub(crate) fn meet_wire(&mut self) -> bool {
        if *self == Self::NONE {
            *self = Self::WIRE;
        }
        *self == Self::WIRE
    }

    /// Handles a request from a requester of this process at this responder, which accepts requests. Returns `true` if
    /// the two belong to the same connection. The first request connects them if its PSN is the agreed one; without a
    /// random number it does not, and is refused as one of another connection.
    pub(crate) fn meet(&mut self, requester: &mut Self, (sq_psn, rq_psn): (Psn, Psn)) -> bool {
        if *self == Self::NONE
            && *requester == Self::NONE
            && sq_psn == rq_psn
            && let Ok(connection) = Self::begin()
        {
            (*self, *requester) = (connection, connection);
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
        assert_eq!(
            (responder, requester),
            (Connection::NONE, Connection::NONE),
            "a request with another PSN begins no connection"
        );
        assert!(responder.meet(&mut requester, psns(6, 6)));
        assert!(responder.meet(&mut requester, psns(7, 6)), "later requests are matched by identity, not by PSN");
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
            // Even the right PSN does not connect them: it may be reused, as the QPN and the address may be.
            let (mut responder, mut requester) = before;
            assert!(!responder.meet(&mut requester, psns(5, 5)), "{before:?}");
            assert_eq!((responder, requester), before, "halves of two connections do not connect");
        }
    }

    /// A VMM can restore a queue pair with any number, and knows the numbers of its own guest's connections.
    #[test]
    fn a_number_is_not_guessed_from_others() {
        let own = [(); 100].map(|()| connection().0.save());
        let (mut responder, _) = connection();
        for number in own {
            for near in number.saturating_sub(1000)..number.saturating_add(1000) {
                let mut forged = Connection::restore(near);
                assert!(!responder.meet(&mut forged, psns(5, 5)), "{number} {near}");
            }
        }
        let mut restored = Connection::restore(responder.save());
        assert!(responder.meet(&mut restored, psns(5, 5)), "both halves were restored in one process");
    }

    #[test]
    fn a_local_connection_ignores_packets_from_the_wire() {
        let (mut responder, requester) = connection();
        assert!(!responder.meet_wire());
        assert_eq!(responder, requester);
    }
}
