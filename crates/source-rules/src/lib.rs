//! Checks how the sources of this repository are built: who may import whom, what the protocol core may know, how
//! large files and functions are, which dependencies and words are used.
//!
//! A compiler accepts a crate in which every file imports every other one. A reader does not: he wants to open one
//! file and need only the files below it. These rules keep it that way, and the tests in `tests/repository.rs` apply
//! them to the repository itself. Each rule is a function over a parsed [`workspace::Workspace`] that returns the
//! [`Problem`]s it found, and is tested on small trees with a seeded fault.
//!
//! | module | rule |
//! | --- | --- |
//! | [`atomics`] | what threads share without a lock is listed, with what keeps it right |
//! | [`circles`] | no import circle of more than two product files |
//! | [`layers`] | crates depend downwards only |
//! | [`purity`] | no arrow from the protocol core to input, output or clocks |
//! | [`publishing`] | crates have what a registry wants of them |
//! | [`sizes`] | product files of at most 500 lines, functions of at most 60, or a reason |
//! | [`deadlines`] | the supervisor waits for no process or thread without a deadline |
//! | [`dependencies`] | no dependency that is unused or declared twice |
//! | [`module_style`] | `name/mod.rs`, tests in `tests.rs`, no `#[path]` |
//! | [`logs`] | what others can cause is logged under a limit, or with a reason |
//! | [`threads`] | threads of the product start in one place |
//! | [`words`] | the field's words, comments of at most 120 columns |
//!
//! [`config`] holds all that is particular to this repository. [`workspace`] finds packages and files, [`conditions`]
//! takes out what only tests contain, [`modules`] resolves names, [`imports`] finds them, [`comments`] finds
//! comments.

pub mod atomics;
pub mod circles;
pub mod comments;
pub mod conditions;
pub mod config;
pub mod deadlines;
pub mod dependencies;
pub mod imports;
pub mod layers;
pub mod logs;
pub mod module_style;
pub mod modules;
pub mod publishing;
pub mod purity;
pub mod sizes;
pub mod threads;
pub mod tokens;
pub mod words;
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
