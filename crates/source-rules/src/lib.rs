//! Checks the structure of this repository's sources: the imports between files and crates, the dependencies of the
//! protocol core, the size of files and functions, and the dependencies and words in use.
//!
//! A compiler accepts a crate in which every file imports every other one. Such a crate is hard to read, because no
//! file can be understood without all others. With these rules a reader needs only the files below the one at hand. The
//! tests in `tests/repository.rs` apply them to the repository itself. Each rule is a function over a parsed
//! [`workspace::Workspace`] that returns the [`Problem`]s it found, and is tested on small trees with a seeded fault.
//!
//! | module | rule |
//! | --- | --- |
//! | [`atomics`] | atomics are listed, each with the reason why its use is correct |
//! | [`circles`] | no import circle of more than two product files |
//! | [`layers`] | crates depend downwards only |
//! | [`module_layers`] | modules of the daemon import downwards only |
//! | [`purity`] | no arrow from the protocol core to input, output or clocks |
//! | [`publishing`] | crates have the metadata that a registry requires |
//! | [`reexports`] | no re-export of items of another member |
//! | [`sizes`] | product files of at most 500 lines, functions of at most 60, or a reason |
//! | [`deadlines`] | the supervisor waits for no process or thread without a deadline |
//! | [`dependencies`] | no dependency that is unused or declared twice |
//! | [`module_style`] | `name/mod.rs`, tests in `tests.rs`, no `#[path]` |
//! | [`logs`] | log lines that others can cause are rate-limited, or have a reason |
//! | [`threads`] | threads of the product start in one place |
//! | [`words`] | standard terms, comments of at most 120 columns |
//!
//! [`config`] holds all settings that are specific to this repository. [`workspace`] finds packages and files,
//! [`conditions`] removes items that only tests contain, [`modules`] resolves names, [`imports`] finds them,
//! [`comments`] finds comments.

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
pub mod module_layers;
pub mod module_style;
pub mod modules;
pub mod publishing;
pub mod purity;
pub mod reexports;
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
    /// Description of the violation and of the fix.
    pub message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file, self.line, self.message)
    }
}
