//! What came of it.

use serde::{Deserialize, Serialize};

/// What confines a process.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct SandboxReport {
    /// No program that it would run gains rights (`no_new_privs`).
    pub no_new_privs: bool,
    /// Other processes of its user may not trace it or read its memory, and it leaves no core.
    pub undumpable: bool,
    /// Capabilities that it still has.
    pub capabilities: Vec<String>,
    /// The ABI of Landlock that is enforced, 0 if none is.
    pub landlock_abi: u32,
    /// System calls are filtered.
    pub seccomp: bool,
    /// What the kernel lacks or refused, in words.
    pub missing: Vec<String>,
}
