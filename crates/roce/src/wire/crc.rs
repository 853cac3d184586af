//! The CRC-32 of Ethernet, computed by the fastest method for this processor.
//!
//! Physical processors have an instruction for polynomial multiplication, which `crc32fast` uses. On an emulated
//! processor, it is among the most expensive instructions, while shifts and exclusive ors stay cheap. For long inputs,
//! [`shifted`] needs only those. A caller with a clock can let [`choose_crc`] measure which method is faster.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// New checksums use [`shifted`].
static USE_SHIFTED: AtomicBool = AtomicBool::new(false);
/// Bytes in a measurement: the payload of a full packet.
const SAMPLE_LEN: usize = 4096;

/// Measures with the clock `now` which of the two ICRC methods is faster on this processor, and selects it for the
/// whole process from now on. Takes some microseconds. Without this call, or if the clock stands still, the method for
/// physical processors is used. Both methods give the same results.
#[inline]
pub fn choose_crc(now: impl Fn() -> Duration) {
    USE_SHIFTED.store(shifted_is_faster(now), Ordering::Relaxed);
}

/// A checksum in progress.
#[derive(Clone)]
pub(super) enum Crc {
    Multiplied(crc32fast::Hasher),
    Shifted(u32),
}

impl Crc {
    /// Continues from a value of the register.
    #[inline]
    pub(super) fn new(register: u32) -> Self {
        if USE_SHIFTED.load(Ordering::Relaxed) { Self::Shifted(register) } else { Self::multiplied(register) }
    }

    fn multiplied(register: u32) -> Self {
        // The crate expects the complement of the register.
        Self::Multiplied(crc32fast::Hasher::new_with_initial(!register))
    }

    #[inline]
    pub(super) fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Multiplied(hasher) => hasher.update(bytes),
            Self::Shifted(register) => *register = shifted(*register, bytes),
        }
    }

    /// Returns the complement of the register.
    #[inline]
    pub(super) fn finish(self) -> u32 {
        match self {
            Self::Multiplied(hasher) => hasher.finalize(),
            Self::Shifted(register) => !register,
        }
    }
}

/// Bytes in the number of words over which one word has an effect.
const BLOCK: usize = 40;

/// Returns the register after `bytes`.
///
/// Adding a multiple of the generator to the bytes, taken as a polynomial, does not change their checksum. One such
/// multiple, x^300 + x^155 + x^117 + x^89 + 1, has few terms, so that each bit can be removed by inverting the four
/// that come 145, 183, 211 and 300 bits later (S. Russell, "Chorba", arXiv:2412.16398). All bits of a word are removed
/// at once, until only the end is left for the table.
fn shifted(register: u32, bytes: &[u8]) -> u32 {
    let blocks = (bytes.len() / BLOCK).saturating_sub(1);
    let (removed, left) = bytes.split_at_checked(blocks * BLOCK).unwrap_or_default();
    let Some((last, rest)) = left.split_first_chunk::<BLOCK>().filter(|_| blocks > 0) else {
        return tabled(register, bytes);
    };
    // Values to be added to the next words.
    let mut ahead = [u64::from(register), 0, 0, 0, 0];
    for block in removed.as_chunks::<BLOCK>().0 {
        for word in block.as_chunks().0 {
            let [now, a, b, c, d] = ahead;
            let x = u64::from_le_bytes(*word) ^ now;
            ahead = [
                a,
                b ^ (x << (145 - 128)) ^ (x << (183 - 128)),
                c ^ (x >> (192 - 145)) ^ (x >> (192 - 183)) ^ (x << (211 - 192)),
                d ^ (x >> (256 - 211)) ^ (x << (300 - 256)),
                x >> (320 - 300),
            ];
        }
    }
    let mut last = *last;
    for (byte, added) in last.iter_mut().zip(ahead.into_iter().flat_map(u64::to_le_bytes)) {
        *byte ^= added;
    }
    tabled(tabled(0, &last), rest)
}

/// Returns the register after `bytes`, computed byte by byte.
fn tabled(register: u32, bytes: &[u8]) -> u32 {
    bytes.iter().fold(register, |register, byte| {
        let [low, ..] = register.to_le_bytes();
        (register >> 8) ^ TABLE[usize::from(low ^ byte)]
    })
}

/// Effect of each byte on an empty register.
static TABLE: [u32; 256] = {
    const GENERATOR: u32 = 0xedb8_8320;
    let mut table = [0; 256];
    let mut index = 0;
    while index < table.len() {
        #[expect(clippy::cast_possible_truncation, reason = "less than 256, and there are no conversions in constants")]
        let mut register = index as u32;
        let mut bit = 0;
        while bit < u8::BITS {
            register = if register & 1 == 0 { register >> 1 } else { register >> 1 ^ GENERATOR };
            bit += 1;
        }
        table[index] = register;
        index += 1;
    }
    table
};

/// Compares both methods. Each counts with the best of a few attempts, so that a disturbance of one attempt does not
/// decide.
fn shifted_is_faster(now: impl Fn() -> Duration) -> bool {
    let bytes = black_box([0x5a; SAMPLE_LEN]);
    let time = |start: Crc| {
        let mut crc = start;
        let begin = now();
        crc.update(&bytes);
        black_box(crc.finish());
        now().saturating_sub(begin)
    };
    let mut best = [Duration::MAX; 2];
    for _ in 0..8 {
        best = [best[0].min(time(Crc::Shifted(0))), best[1].min(time(Crc::multiplied(0)))];
    }
    best[0] < best[1]
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn known_value() {
        assert_eq!(!tabled(!0, b"123456789"), 0xcbf4_3926);
    }

    #[test]
    fn a_clock_that_stands_still_chooses_nothing() {
        assert!(!shifted_is_faster(|| Duration::ZERO));
    }

    #[test]
    fn the_faster_way_is_chosen() {
        // The clock is read in pairs around each attempt: first of shifts, then of multiplications.
        let clock = |shifts: u64, multiplications: u64| {
            let (looks, now) = (Cell::new(0), Cell::new(0));
            move || {
                now.set(now.get() + [0, shifts, 0, multiplications][looks.get() % 4]);
                looks.set(looks.get() + 1);
                Duration::from_nanos(now.get())
            }
        };
        assert!(shifted_is_faster(clock(1, 2)));
        assert!(!shifted_is_faster(clock(2, 1)));
        assert!(!shifted_is_faster(clock(1, 1)));
        choose_crc(clock(1, 2));
        assert!(matches!(Crc::new(0), Crc::Shifted(0)));
        choose_crc(clock(2, 1));
        assert!(matches!(Crc::new(0), Crc::Multiplied(_)));
    }

    proptest! {
        #[test]
        fn both_ways_are_the_same(register: u32, parts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 0..4)) {
            let (mut one, mut other) = (Crc::Shifted(register), Crc::multiplied(register));
            for part in &parts {
                one.update(part);
                other.update(part);
            }
            prop_assert_eq!(one.finish(), other.finish());
        }
    }
}
