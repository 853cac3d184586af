//! Random numbers that a seed determines.
#![expect(clippy::unwrap_used, reason = "for tests: a panic fails the test")]

use pvrdma_base::Random;

/// A random number generator. Each actor has its own, so that its choices do not depend on other actors.
#[derive(Debug)]
pub struct Dice(Random);

impl Dice {
    /// Creates the generator of an actor in a run.
    pub fn new(seed: u64, actor: u64) -> Self {
        // A state of 0 would only give zeros, and a small state starts with small numbers.
        let mut dice = Self(Random::Seed((seed << 8 | actor).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1));
        (0..8).for_each(|_| _ = dice.word());
        dice
    }

    /// Any.
    pub fn word(&mut self) -> u32 {
        self.0.draw().unwrap()
    }

    /// Returns any number of 64 bits.
    pub fn long(&mut self) -> u64 {
        u64::from(self.word()) << 32 | u64::from(self.word())
    }

    /// Returns any byte.
    pub fn byte(&mut self) -> u8 {
        self.word().to_le_bytes()[0]
    }

    /// Returns a number below `end`, which is not 0.
    pub fn below(&mut self, end: usize) -> usize {
        self.word() as usize % end
    }

    /// Returns `true` with a probability of 1/`count`.
    pub fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }

    /// Returns one of these elements. There must be at least one.
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    /// Returns `len` random bytes.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(len + 4);
        while bytes.len() < len {
            bytes.extend(self.word().to_le_bytes());
        }
        bytes.truncate(len);
        bytes
    }

    /// Returns a number as it occurs in handles, sizes and masks.
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
