//! Scripts of the forger: random ones, and those that the fuzzer found.

use super::forger::play;
use super::net::Random;

#[test]
fn random_forgeries() {
    for seed in 0..200 {
        let mut random = Random(seed);
        let length = 16 + random.below(600);
        let script: Vec<u8> = (0..length).map(|_| random.next().to_le_bytes()[0]).collect();
        let ended = std::panic::catch_unwind(|| play(&script));
        assert!(ended.is_ok(), "seed {seed}");
    }
}

/// Regression: parts of a split READ counted as several outstanding READs.
#[test]
fn a_read_in_parts_is_one_read() {
    play(include_bytes!("scripts/read-in-parts.bin"));
}
