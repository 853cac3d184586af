//! Unpredictable numbers.

use std::io;

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
#[cfg(feature = "serde")]
use serde::{Deserialize, Serialize};

/// Source of keys and QPNs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(Serialize, Deserialize))]
pub enum Random {
    /// The kernel's random number generator, whose output is unpredictable.
    #[default]
    System,
    /// A reproducible sequence for tests: an xorshift generator that starts in this state. State 0 yields only zeros.
    Seed(u64),
}

impl Random {
    /// Returns the next number.
    ///
    /// # Errors
    /// The system call failed.
    pub fn draw(&mut self) -> io::Result<u32> {
        match self {
            Self::System => system(),
            Self::Seed(state) => {
                *state ^= *state << 13;
                *state ^= *state >> 7;
                *state ^= *state << 17;
                let [.., a, b, c, d] = state.to_be_bytes();
                Ok(u32::from_be_bytes([a, b, c, d]))
            }
        }
    }
}

fn system() -> io::Result<u32> {
    let mut bytes = [0; 4];
    loop {
        match getrandom(&mut bytes, GetRandomFlags::empty()) {
            // The kernel never returns only a part of a request this small.
            Ok(_) => return Ok(u32::from_ne_bytes(bytes)),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_systems_numbers_differ() {
        let mut random = Random::System;
        let numbers: [u32; 8] = std::array::from_fn(|_| random.draw().unwrap());
        assert!(numbers.iter().any(|number| *number != numbers[0]), "{numbers:x?}");
    }

    #[test]
    fn a_seed_gives_the_same_again() {
        let draw = |seed| {
            let mut random = Random::Seed(seed);
            [random.draw().unwrap(), random.draw().unwrap()]
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
        assert_eq!(draw(0), [0; 2]);
    }
}
