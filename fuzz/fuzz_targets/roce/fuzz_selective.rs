//! Two ends that may agree on selective acknowledgements, and a forger between them: any script of posts, losses,
//! repetitions, edits and inventions. Nothing panics, everything that was posted ends in bounded time, what is owed and
//! kept is bounded, and no lie but one about what was executed costs a byte. The tests of the crate play scripts, too.
#![no_main]

use libfuzzer_sys::fuzz_target;

// Links to the tests' own.
mod forger;
mod host;
#[expect(dead_code, reason = "the tests use more of it")]
mod net;

fuzz_target!(|input: &[u8]| forger::play(input));
