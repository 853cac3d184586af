//! Confines a process that serves a network, from its first instruction on.
//!
//! Such a process parses what guests, VMMs and peers send. Everything that it needs to have opened is handed to it as
//! descriptors, so it may lose the right to open anything: [`enter`] drops all capabilities, closes the file system,
//! TCP ports, abstract sockets and signals to others with Landlock, keeps other processes of its user from tracing it,
//! and installs a filter of system calls. Each thread then installs a narrower one for its kind
//! ([`reference`](mod@reference) lists them). Only one thread, the launcher, may start threads (see
//! [`pvrdma_verbs::threads`]).
//!
//! What the kernel lacks is logged and reported; the process runs with the rest.

mod calls;
mod filter;
mod landlocked;
mod privileges;
#[cfg(feature = "testing")]
pub mod probe;
mod profile;
pub mod reference;
mod report;

use std::fs;
use std::sync::OnceLock;

use log::{error, warn};
use pvrdma_verbs::threads::{self, ThreadKind};

pub use profile::{Mismatch, Profile};
pub use report::SandboxReport;

use filter::Filters;

/// The filters of this process, for threads that start.
static FILTERS: OnceLock<Filters> = OnceLock::new();

/// What confines this process.
static REPORT: OnceLock<SandboxReport> = OnceLock::new();

/// Confines this process, which has one thread. To be called before anything is read that is not ours, and after what
/// opens files by itself: the logger, and the number of processors for the adapter's threads.
///
/// The calling thread can load the host's adapter until [`confine_main`].
pub fn enter(profile: Profile, mismatch: Mismatch) {
    let mut report = SandboxReport::default();
    if let Some(threads) = other_threads() {
        report.missing.push(format!("{threads} threads were there before the sandbox and are outside of it"));
    }
    privileges::drop_all(true, &mut report);
    landlocked::restrict(profile, &mut report);
    match confine_calls(profile, mismatch) {
        Ok(()) => report.seccomp = true,
        Err(reason) => report.missing.push(format!("seccomp: {reason}")),
    }
    for missing in &report.missing {
        // Log: once, at the start.
        warn!("sandbox: {missing}");
    }
    // There is one already if somebody calls this twice, and then what is in place is not less than it says.
    let _ = REPORT.set(report);
}

/// Confines this process to what it takes to answer the kernel for doorbell pages. It has one thread, and starts none.
pub fn enter_alone(mismatch: Mismatch) {
    let mut report = SandboxReport::default();
    privileges::drop_all(false, &mut report);
    landlocked::restrict(Profile::Rxe, &mut report);
    if let Err(reason) = filter::confine_alone(mismatch) {
        report.missing.push(format!("seccomp: {reason}"));
    }
    for missing in &report.missing {
        // Log: once, at the start.
        warn!("sandbox: {missing}");
    }
}

/// Confines this process to what it takes to receive descriptors and pass them on. It has one thread, and starts none.
pub fn enter_keeper(mismatch: Mismatch) {
    let mut report = SandboxReport::default();
    privileges::drop_all(false, &mut report);
    landlocked::restrict(Profile::Rxe, &mut report);
    // It has no log, and its worker has said what is missing.
    let _ = filter::confine_keeper(mismatch);
}

/// What confines this process, if it is in a sandbox.
pub fn report() -> Option<SandboxReport> {
    REPORT.get().cloned()
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
        // Log: the last line of the process.
        error!("a thread ({kind}) cannot be confined: {error}");
        std::process::abort();
    }
}
