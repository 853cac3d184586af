//! Agreement with the responder on selective acknowledgements, and on packets without an ICRC.

use pvrdma_saved_state::roce::Agreement;

use crate::wire::{ACCEPT_WITHOUT_ICRC, OFFER, REQUEST_WITHOUT_ICRC, agreement::accepts};

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

    /// Value of the reserved bits of requests. `may_omit_icrc`: the rule of the path permits packets without an ICRC.
    #[inline]
    pub(super) const fn request_bits(self, may_omit_icrc: bool) -> u8 {
        match self {
            Self::Offered => OFFER,
            Self::On if may_omit_icrc => REQUEST_WITHOUT_ICRC,
            Self::On | Self::Off => 0,
        }
    }

    /// Handles the reserved bits of a response. The first response decides on selective acknowledgements. Returns
    /// `true` if the responder accepts requests without an ICRC until its next response.
    #[inline]
    pub(super) const fn on_response(&mut self, reserved7: u8) -> bool {
        if matches!(self, Self::Offered) {
            *self = if accepts(reserved7) { Self::On } else { Self::Off };
        }
        matches!(self, Self::On) && reserved7 == ACCEPT_WITHOUT_ICRC
    }
}
