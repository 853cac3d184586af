//! Checks how the sources of this repository are built: who may import whom, what the protocol core may know, how large
//! files and functions are, which dependencies and words are used.
//!
//! A compiler accepts a crate in which every file imports every other one. A reader does not: he wants to open one file and
//! need only the files below it. These rules keep it that way, and the tests in `tests/repository.rs` apply them to the
//! repository itself. Each rule is a function over a parsed [`workspace::Workspace`] that returns the [`Problem`]s it found,
//! and is tested on small trees with a seeded fault.
//!
//! | module | rule |
//! | --- | --- |
//! | [`circles`] | no import circle of more than two product files |
//! | [`purity`] | no arrow from the protocol core to input, output or clocks |
//!
//! [`config`] holds all that is particular to this repository. [`workspace`] finds packages and files, [`cfg`] takes out
//! what only tests contain, [`modules`] resolves names, [`imports`] finds them.

pub mod cfg;
pub mod circles;
pub mod config;
pub mod imports;
pub mod modules;
pub mod tokens;
pub mod workspace;

use std::fmt;

/// A place that breaks a rule.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Problem {
    /// The file, from the root of the repository.
    pub file: String,
    /// The line, from 1.
    pub line: usize,
    /// What is wrong and what to do instead.
    pub message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file, self.line, self.message)
    }
}
