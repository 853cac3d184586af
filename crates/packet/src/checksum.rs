//! The Internet checksum (RFC 1071).

/// Internet checksum (RFC 1071): the complement of the ones' complement sum of 16-bit big-endian words, used by IPv4
/// headers, UDP and TCP.
///
/// To compute one, leave the checksum field zero, add all bytes, and store [`Self::finish`] big-endian. To verify one,
/// add all bytes with the field: the result is 0 if they are intact. Bytes may be added in pieces of any length,
/// including odd lengths.
#[derive(Debug, Default)]
pub struct Checksum {
    sum: u64,
    /// `true` if an odd number of bytes was added: the next one is the low half of its word.
    odd: bool,
}

impl Checksum {
    /// Adds bytes. The sum cannot overflow before 2^48 calls.
    #[inline]
    pub fn add(&mut self, bytes: &[u8]) {
        let part = sum(bytes);
        self.sum += u64::from(if self.odd { part.swap_bytes() } else { part });
        self.odd ^= bytes.len() % 2 == 1;
    }

    /// Returns the checksum. It is 0 if the bytes included a valid checksum.
    #[inline]
    pub const fn finish(self) -> u16 {
        !fold(self.sum)
    }
}

/// Returns the ones' complement sum of 16-bit big-endian words. If the last one lacks its second byte, that counts as
/// 0.
#[inline]
pub fn sum(bytes: &[u8]) -> u16 {
    let (words, rest) = bytes.as_chunks::<8>();
    // The sum of words in host byte order is the byte-swapped sum in network order (RFC 1071, 2 (B)), so the words need
    // not be swapped. Separate sums of halves, which cannot wrap before 2^35 bytes, let the compiler use vectors.
    let (mut low, mut high) = (0_u64, 0_u64);
    for word in words {
        let word = u64::from_ne_bytes(*word);
        low = low.wrapping_add(word & u64::from(u32::MAX));
        high = high.wrapping_add(word >> 32);
    }
    // The end has no loop: most calls are for the 20 bytes of an IPv4 header, where it would take most of the time.
    let (four, rest) = rest.as_chunks::<4>();
    let (two, rest) = rest.as_chunks::<2>();
    low = low.wrapping_add(four.first().map_or(0, |word| u32::from_ne_bytes(*word)).into());
    high = high.wrapping_add(two.first().map_or(0, |word| u16::from_ne_bytes(*word)).into());
    high = high.wrapping_add(rest.first().map_or(0, |&byte| u16::from_ne_bytes([byte, 0])).into());
    u16::from_be(fold(u64::from(fold(low)) + u64::from(fold(high))))
}

/// Folds a sum to 16 bits.
#[inline]
pub const fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    let [.., high, low] = sum.to_be_bytes();
    u16::from_be_bytes([high, low])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksum_of_rfc_1071() {
        let mut sum = Checksum::default();
        sum.add(&[0x00, 0x01, 0xf2]);
        sum.add(&[]);
        sum.add(&[0x03, 0xf4]);
        sum.add(&[0xf5, 0xf6, 0xf7]);
        assert_eq!(sum.finish(), !0xddf2);
    }

    #[test]
    fn sums_are_those_of_single_words() {
        let bytes: Vec<u8> = (0..300_u32).map(|number| (number * number + 5 * (number % 2)).to_le_bytes()[0]).collect();
        for (start, end) in (0..20).flat_map(|start| (start..300).map(move |end| (start, end))) {
            let bytes = &bytes[start..end];
            let word = |pair: &[u8]| u64::from(pair[0]) << 8 | u64::from(pair.get(1).copied().unwrap_or(0));
            let expected = fold(bytes.chunks(2).map(word).sum());
            assert_eq!(sum(bytes), expected, "{start}..{end}");
            let (mut parts, middle) = (Checksum::default(), bytes.len() / 3);
            parts.add(&bytes[..middle]);
            parts.add(&bytes[middle..]);
            assert_eq!(parts.finish(), !expected, "{start}..{end}");
        }
    }
}
