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
    /// Adds bytes. The sum cannot overflow before 2^48 bytes.
    #[inline]
    pub fn add(&mut self, mut bytes: &[u8]) {
        if let (true, Some((&second, rest))) = (self.odd, bytes.split_first()) {
            self.sum += u64::from(second);
            self.odd = false;
            bytes = rest;
        }
        let (pairs, rest) = bytes.as_chunks::<2>();
        self.sum += pairs.iter().map(|pair| u64::from(u16::from_be_bytes(*pair))).sum::<u64>();
        if let Some(&first) = rest.first() {
            self.sum += u64::from(first) << 8;
            self.odd = true;
        }
    }

    /// Returns the checksum. It is 0 if the bytes included a valid checksum.
    #[inline]
    pub const fn finish(self) -> u16 {
        let mut sum = self.sum;
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        let [.., high, low] = sum.to_be_bytes();
        !u16::from_be_bytes([high, low])
    }
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
}
