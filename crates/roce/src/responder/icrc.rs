//! Agreement with the requester on packets without an ICRC ([`crate::wire::agreement`]).

use pvrdma_verbs_types::Psn;

use crate::wire::{Bth, REQUEST_WITHOUT_ICRC};

/// State of the agreement at the responder.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct IcrcAgreement {
    /// The newest request permits responses without an ICRC.
    omits: bool,
    /// PSN of the newest packet behind a gap, if it was not executed.
    seen: Option<Psn>,
}

impl IcrcAgreement {
    /// Returns `true` if responses leave without an ICRC.
    #[inline]
    pub(super) const fn omits(self) -> bool {
        self.omits
    }

    /// Ends the agreement unless the rule of the path permits it.
    pub(super) const fn limit(&mut self, may_omit: bool) {
        self.omits &= may_omit;
    }

    /// Handles a request. `may_omit`: this end permits packets without an ICRC, and has agreed on selective
    /// acknowledgements.
    ///
    /// Up to the newest packet behind a gap, a packet may be one that was kept, and then it is older than the packet
    /// that filled the gap. If the peer has moved in between, only the latter is from its new host. So such a packet
    /// can only withdraw the permission.
    #[inline]
    pub(super) fn on_request(&mut self, bth: &Bth, expected: Psn, may_omit: bool) {
        let seen = self.seen.filter(|seen| !seen.precedes(expected));
        let may_be_kept = bth.psn == expected && seen.is_some();
        let is_newest = bth.psn.since(expected) > 0 && seen.is_none_or(|seen| seen.precedes(bth.psn));
        self.seen = if is_newest { Some(bth.psn) } else { seen };
        self.omits = may_omit && bth.reserved7 == REQUEST_WITHOUT_ICRC && (self.omits || !may_be_kept);
    }
}

#[cfg(test)]
mod tests {
    use pvrdma_verbs_types::Qpn;

    use super::*;
    use crate::wire::{Opcode, Position};

    const PERMITS: u8 = REQUEST_WITHOUT_ICRC;

    #[test]
    fn the_newest_request_decides() {
        let mut agreement = IcrcAgreement::default();
        let mut expected = Psn::new(0xff_fffe);
        // Distance from the expected PSN, bits, and the result.
        for (ahead, reserved7, omits) in [
            (0, 0, false),
            (0, PERMITS, true),
            (0, 0x2d, false),
            (0, PERMITS, true),
            // A duplicate, and a packet behind a gap.
            (u32::MAX, 0, false),
            (2, PERMITS, true),
            // The packet that fills the gap comes from another host. Then the kept one is executed.
            (0, 0, false),
            (0, PERMITS, false),
            (0, PERMITS, false),
            // A packet that was not seen before.
            (0, PERMITS, true),
            (1, 0, false),
            (5, PERMITS, true),
        ] {
            let bth = Bth { reserved7, ..Bth::new(Opcode::send(Position::Only), Qpn::new(2), expected.plus(ahead)) };
            agreement.on_request(&bth, expected, true);
            assert_eq!(agreement.omits(), omits, "{ahead} {reserved7:#x} at {expected:?}");
            expected = if ahead == 0 { expected.plus(1) } else { expected };
        }
        agreement.limit(true);
        assert!(agreement.omits());
        agreement.limit(false);
        assert!(!agreement.omits());
    }

    /// Old packets behind a gap do not delay the agreement when PSNs wrap.
    #[test]
    fn executed_packets_are_forgotten() {
        let mut agreement = IcrcAgreement::default();
        let at = |psn| Bth { reserved7: PERMITS, ..Bth::new(Opcode::CNP, Qpn::new(2), psn) };
        let start = Psn::new(7);
        agreement.on_request(&at(start.plus(3)), start, false);
        agreement.on_request(&at(start.plus(4)), start.plus(4), false);
        let later = start.plus(1 << 23).plus(100);
        agreement.on_request(&at(later), later, true);
        assert!(agreement.omits());
    }
}
