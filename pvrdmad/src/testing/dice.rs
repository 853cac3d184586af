//! Numbers at random that are the same for a seed.
#![expect(clippy::unwrap_used, reason = "for tests, which end with what goes wrong")]

use pvrdma_verbs::Random;

/// A generator. Each actor has its own, so that what one does depends on no other.
#[derive(Debug)]
pub struct Dice(Random);

impl Dice {
    /// A generator for an actor of a run.
    pub fn new(seed: u64, actor: u64) -> Self {
        // Never 0, which gives zeroes only; and the first numbers of a small state are small.
        let mut dice = Self(Random::Seed((seed << 8 | actor).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1));
        (0..8).for_each(|_| _ = dice.word());
        dice
    }

    /// Any.
    pub fn word(&mut self) -> u32 {
        self.0.draw().unwrap()
    }

    /// Any, of 64 bits.
    pub fn long(&mut self) -> u64 {
        u64::from(self.word()) << 32 | u64::from(self.word())
    }

    /// Any, of 8 bits.
    pub fn byte(&mut self) -> u8 {
        self.word().to_le_bytes()[0]
    }

    /// Below `end`, which is not 0.
    pub fn below(&mut self, end: usize) -> usize {
        self.word() as usize % end
    }

    /// `true` once in so many times.
    pub fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }

    /// One of these, of which there is one at least.
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    /// So many bytes.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(len + 4);
        while bytes.len() < len {
            bytes.extend(self.word().to_le_bytes());
        }
        bytes.truncate(len);
        bytes
    }

    /// A number of the kind that handles, sizes and masks are made of.
    pub fn number(&mut self) -> u32 {
        match self.below(8) {
            0..4 => self.word() % 8,
            4 => 1 << self.below(32),
            5 => (1 << self.below(32)) - 1,
            6 => self.word() % 0x200,
            _ => self.word(),
        }
    }
}
