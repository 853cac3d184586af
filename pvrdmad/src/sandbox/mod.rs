//! Confines a process that serves a network, from its first instruction on.
//!
//! Such a process parses what guests, VMMs and peers send. Everything that it needs to have opened is handed to it as
//! descriptors, so it may lose the right to open anything: [`enter`] drops all capabilities, closes the file system, TCP
//! ports, abstract sockets and signals to others with Landlock, keeps other processes of its user from tracing it, and
//! installs a filter of system calls. Each thread then installs a narrower one for its kind ([`reference`](mod@reference)
//! lists them). Only one thread, the launcher, may start threads (see [`pvrdma_verbs::threads`]).
//!
//! What the kernel lacks is logged and reported; the process runs with the rest.

mod calls;
mod filter;
mod landlocked;
mod privileges;
#[cfg(feature = "testing")]
pub mod probe;
pub mod reference;

use std::fs;
use std::sync::OnceLock;

use log::{error, warn};
use pvrdma_verbs::threads::{self, ThreadKind};
use serde::{Deserialize, Serialize};

use filter::Filters;

/// What the process serves a network with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Profile {
    /// The software adapter: nothing is opened, no socket made.
    Rxe {
        /// Frames are sent to addresses, by VXLAN or a packet socket. Where none are, a socket reaches only what it is
        /// connected to.
        addressed: bool,
    },
    /// The host's adapter: libibverbs reads its configuration and `/sys` and opens the adapter's device nodes whenever a
    /// guest's driver starts.
    Ibverbs,
}

/// What becomes of a system call that a filter does not know.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mismatch {
    /// It fails with EPERM.
    Refuse,
    /// The kernel kills the process with SIGSYS: for tests, which so find what a filter lacks.
    Kill,
}

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

/// The filters of this process, for threads that start.
static FILTERS: OnceLock<Filters> = OnceLock::new();

/// Confines this process, which has one thread. To be called before anything is read that is not ours, and after what
/// opens files by itself: the logger, and the number of processors for the adapter's threads.
///
/// The calling thread can load the host's adapter until [`confine_main`].
pub fn enter(profile: Profile, mismatch: Mismatch) -> SandboxReport {
    let mut report = SandboxReport::default();
    if let Some(threads) = other_threads() {
        report.missing.push(format!("{threads} threads were there before the sandbox and are outside of it"));
    }
    privileges::drop_all(&mut report);
    landlocked::restrict(profile, &mut report);
    match confine_calls(profile, mismatch) {
        Ok(()) => report.seccomp = true,
        Err(reason) => report.missing.push(format!("seccomp: {reason}")),
    }
    for missing in &report.missing {
        warn!("sandbox: {missing}");
    }
    report
}

/// Gives the calling thread the filter of [`ThreadKind::Main`], once the adapter is loaded and what must start with the
/// process runs. Without a sandbox it does nothing.
pub fn confine_main() {
    confine_thread(ThreadKind::Main);
}

fn other_threads() -> Option<usize> {
    let threads = fs::read_dir("/proc/self/task").ok()?.count();
    threads.checked_sub(1).filter(|&others| others > 0)
}

fn confine_calls(profile: Profile, mismatch: Mismatch) -> Result<(), String> {
    let filters = Filters::compile(profile, mismatch).map_err(|error| error.to_string())?;
    filters.install_base().map_err(|error| error.to_string())?;
    FILTERS.set(filters).map_err(|_| "the process is in a sandbox already")?;
    threads::set_start_hook(confine_thread).map_err(|error| format!("threads: {error}"))?;
    threads::start_launcher().map_err(|error| format!("threads: {error}"))
}

/// What every thread does first. One that cannot be confined must not run.
fn confine_thread(kind: ThreadKind) {
    if let Some(Err(error)) = FILTERS.get().map(|filters| filters.install(kind)) {
        error!("a thread ({kind}) cannot be confined: {error}");
        std::process::abort();
    }
}
