//! Result of sandbox setup, per mechanism.

use serde::{Deserialize, Serialize};

/// Restrictions that are in force for a process.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct SandboxReport {
    /// Programs that it executes gain no privileges (`no_new_privs`).
    pub no_new_privs: bool,
    /// Other processes of its user cannot trace it or read its memory, and it leaves no core dump.
    pub undumpable: bool,
    /// Capabilities that it still has.
    pub capabilities: Vec<String>,
    /// Enforced ABI of Landlock, 0 if none.
    pub landlock_abi: u32,
    /// System calls are filtered.
    pub seccomp: bool,
    /// Features that the kernel lacks or refused, as text.
    pub missing: Vec<String>,
}
