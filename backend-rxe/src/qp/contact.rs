//! Which two halves are a connection.
//!
//! Addresses and numbers come round: the next owner of a GID makes a QP of the same number sooner or later. PSNs tell
//! connections apart on the wire. Local delivery has none, so there the two halves know each other.

use std::sync::atomic::{AtomicU64, Ordering};

use pvrdma_verbs::Psn;

/// One life of a half of a QP, from RESET to RESET. None comes twice, not in another QP either.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Incarnation(u64);

impl Incarnation {
    /// A new one.
    pub(crate) fn begin() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// Where the requests of a responder come from, which is settled by the first one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Origin {
    Unknown,
    Local(Incarnation),
    Wire,
}

/// What a responder knows of its connection.
#[derive(Debug)]
pub(crate) struct ResponderContact {
    own: Incarnation,
    origin: Origin,
}

impl Default for ResponderContact {
    fn default() -> Self {
        Self { own: Incarnation::begin(), origin: Origin::Unknown }
    }
}

impl ResponderContact {
    /// A request came from the wire. Returns `true` if they all do.
    pub(crate) fn meet_wire(&mut self) -> bool {
        if self.origin == Origin::Unknown {
            self.origin = Origin::Wire;
        }
        self.origin == Origin::Wire
    }
}

/// What a requester knows of its connection by local delivery.
#[derive(Debug)]
pub(crate) struct RequesterContact {
    own: Incarnation,
    responder: Option<Incarnation>,
}

impl Default for RequesterContact {
    fn default() -> Self {
        Self { own: Incarnation::begin(), responder: None }
    }
}

impl RequesterContact {
    /// A request meets a responder that takes requests. Returns `true` if the two are one connection. For the first
    /// request they are if its PSN is the one that was agreed on.
    pub(crate) fn meet(&mut self, responder: &mut ResponderContact, (sq_psn, rq_psn): (Psn, Psn)) -> bool {
        match (self.responder, responder.origin) {
            (None, Origin::Unknown) if sq_psn == rq_psn => {
                self.responder = Some(responder.own);
                responder.origin = Origin::Local(self.own);
                true
            }
            (Some(known), Origin::Local(requester)) => known == responder.own && requester == self.own,
            _ => false,
        }
    }
}
