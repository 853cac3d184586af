//! Agreement with the responder on selective acknowledgements.

use pvrdma_saved_state::roce::Agreement;

use crate::wire::{ACCEPT, OFFER};

/// State of the agreement on selective acknowledgements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Sack {
    /// The responder does not send them.
    Off,
    /// Requests offer to accept them, until the first response.
    Offered,
    /// The responder sends them.
    On,
}

impl Sack {
    pub(super) const fn save(self) -> Agreement {
        match self {
            Self::Off => Agreement::Off,
            Self::Offered => Agreement::Open,
            Self::On => Agreement::On,
        }
    }

    pub(super) const fn restore(agreement: Agreement) -> Self {
        match agreement {
            Agreement::Off => Self::Off,
            Agreement::Open => Self::Offered,
            Agreement::On => Self::On,
        }
    }

    /// Value of the reserved bits of requests.
    #[inline]
    pub(super) const fn offer(self) -> u8 {
        if matches!(self, Self::Offered) { OFFER } else { 0 }
    }

    /// Handles the reserved bits of a response. The first response decides.
    #[inline]
    pub(super) const fn on_response(&mut self, reserved7: u8) {
        if matches!(self, Self::Offered) {
            *self = if reserved7 == ACCEPT { Self::On } else { Self::Off };
        }
    }
}
