//! Numbers that nobody can guess.

use std::io;

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
#[cfg(feature = "serde")]
use serde::{Deserialize, Serialize};

/// Where keys and QPNs begin.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(Serialize, Deserialize))]
pub enum Random {
    /// The kernel's generator, which nobody can predict.
    #[default]
    System,
    /// The same numbers each time, for tests: those of a xorshift generator in this state, all zero from 0 on.
    Seed(u64),
}

impl Random {
    /// The next number.
    ///
    /// # Errors
    /// The kernel has none: it refuses the call.
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
            // A request of so few bytes is never answered in part.
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
