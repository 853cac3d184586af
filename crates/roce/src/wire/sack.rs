//! Selective acknowledgements: an extension of this implementation, negotiated in reserved bits of the BTH
//! ([`super::agreement`]).
//!
//! A sequence NAK names one missing packet. Between two endpoints that agreed, its payload reports the packets that
//! have arrived after that one, so that all missing packets can be retransmitted in one round trip (RFC 2018 does this
//! for TCP).
//!
//! A sequence NAK without a map says that nothing is kept after the missing packet, whatever earlier ones reported. A
//! responder that loses its reorder buffer sends one, and the requester goes back to that packet without using a retry.

use pvrdma_verbs_types::Psn;

/// Minimum number of READs and atomics whose responses an agreed responder can repeat. While responses of earlier ones
/// are missing, its peer starts more than it may have outstanding, so a loss costs only the lost packet.
pub const AGREED_RESOURCES: usize = 16;

/// Number of packets that a map covers.
const BITS: u32 = 1024;
const WORDS: usize = BITS as usize / u32::BITS as usize;

/// Map of the packets that have arrived after a missing one.
///
/// On the wire: bit `b` of byte `k` (bit 0 is the least significant) represents the PSN `1 + 8 * k + b` after the
/// missing one. Trailing zeros are omitted, except for those that fill up four bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SackMap {
    words: [u32; WORDS],
    /// Number of words up to the last that is not 0.
    used: usize,
}

impl SackMap {
    /// Largest distance from the missing packet that a map covers, in PSNs.
    pub const MAX_DISTANCE: u32 = BITS;
    /// Largest length of a map on the wire, in bytes.
    pub const MAX_LEN: usize = BITS as usize / 8;

    /// Records that the packet at `psn` has arrived; the map starts after the PSN `missing`. Packets that are too far
    /// away are ignored.
    #[inline]
    pub fn insert(&mut self, missing: Psn, psn: Psn) {
        let Some(bit) = u32::try_from(psn.since(missing)).ok().and_then(|distance| distance.checked_sub(1)) else {
            return;
        };
        let at = (bit / u32::BITS) as usize;
        if let Some(word) = self.words.get_mut(at) {
            *word |= 1 << (bit % u32::BITS);
            self.used = self.used.max(at + 1);
        }
    }

    /// Distances of the arrived packets from the missing one, in order.
    pub fn distances(&self) -> impl Iterator<Item = u32> {
        let words = self.words.iter().take(self.used).zip((0..).step_by(u32::BITS as usize));
        words.flat_map(|(&word, first)| {
            (0..u32::BITS).filter(move |bit| word >> bit & 1 == 1).map(move |bit| first + bit + 1)
        })
    }

    /// Returns `true` if no packet has arrived after the missing one.
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.used == 0
    }

    /// Length on the wire in bytes.
    #[inline]
    pub const fn wire_len(&self) -> usize {
        self.used * 4
    }

    /// Writes [`Self::wire_len`] bytes to the start of `out`.
    pub(crate) fn write(&self, out: &mut [u8]) {
        for (bytes, word) in out.chunks_exact_mut(4).zip(self.words.iter().take(self.used)) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
    }

    /// Parses the bytes on the wire. `None`: they are not a valid map.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let (chunks, rest) = bytes.as_chunks::<4>();
        if chunks.len() > WORDS || !rest.is_empty() {
            return None;
        }
        let mut map = Self::default();
        for (word, &chunk) in map.words.iter_mut().zip(chunks) {
            *word = u32::from_le_bytes(chunk);
        }
        map.used = map.words.iter().rposition(|&word| word != 0).map_or(0, |at| at + 1);
        Some(map)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_says_what_has_come() {
        let missing = Psn::new(0x00ff_fffe);
        let mut map = SackMap::default();
        assert_eq!((map.wire_len(), map.distances().next()), (0, None));
        for distance in [1, 2, 40, 1024] {
            map.insert(missing, missing.plus(distance));
        }
        let whole = map;
        // Neither the missing packet itself, nor packets before it or too far after it.
        for other in [missing, missing.plus(1025), missing.plus(u32::MAX)] {
            map.insert(missing, other);
        }
        assert_eq!(map, whole);
        assert_eq!(map.distances().collect::<Vec<_>>(), [1, 2, 40, 1024]);
        let mut bytes = [0xff; SackMap::MAX_LEN];
        assert_eq!(map.wire_len(), bytes.len());
        map.write(&mut bytes);
        assert_eq!((bytes[0], bytes[4], bytes[127]), (3, 0x80, 0x80));
        assert_eq!(SackMap::parse(&bytes), Some(map));
        assert_eq!(SackMap::parse(&bytes[..8]).map(|map| map.wire_len()), Some(8));
        assert_eq!(SackMap::parse(&[0; 8]), Some(SackMap::default()));
        assert_eq!((SackMap::parse(&[0; 7]), SackMap::parse(&[1; 132])), (None, None));
    }
}
