//! Sandbox of a process that serves a network, in force before the process reads any input.
//!
//! Such a process parses data from guests, VMMs and peers. It receives everything that it needs as descriptors, so it
//! can give up the permission to open anything. [`enter`] drops all capabilities; it denies access to the file system,
//! TCP ports, abstract sockets and signals to other processes with Landlock; it prevents other processes of its user
//! from tracing it; and it installs a filter of system calls. Each thread then installs a narrower filter for its kind
//! ([`reference`](mod@reference) lists them). Only one thread, the launcher, may start threads (see
//! [`pvrdma_base::threads`]).
//!
//! Features that the kernel lacks are logged and reported, and the process runs with the rest.

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
use pvrdma_base::threads::{self, ThreadKind};

pub use profile::{Mismatch, Profile};
pub use report::SandboxReport;

use filter::Filters;

/// Filters of this process, for threads that start.
static FILTERS: OnceLock<Filters> = OnceLock::new();

/// Sandbox state of this process.
static REPORT: OnceLock<SandboxReport> = OnceLock::new();

/// Confines this process, which must have a single thread. Must be called before untrusted input is read, and after
/// initialization that opens files itself: that of the logger, and counting processors for the adapter's threads.
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
    // If this is called twice, the first report stays. The sandbox in force is at least as strict as that report.
    let _ = REPORT.set(report);
}

/// Confines this process to the system calls that a fallback server needs. It has one thread, and starts none.
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

/// Confines this process to the system calls for receiving descriptors and passing them on. It has one thread, and
/// starts none.
pub fn enter_keeper(mismatch: Mismatch) {
    let mut report = SandboxReport::default();
    privileges::drop_all(false, &mut report);
    landlocked::restrict(Profile::Rxe, &mut report);
    // A keeper has no log, and its worker has already logged missing features.
    let _ = filter::confine_keeper(mismatch);
}

/// Returns the sandbox state of this process, if it is in a sandbox.
pub fn report() -> Option<SandboxReport> {
    REPORT.get().cloned()
}

/// Installs the filter of [`ThreadKind::Main`] in the calling thread, once the adapter is loaded and all threads that
/// must start with the process run. Does nothing without a sandbox.
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

/// First action of every thread. A thread that cannot be confined must not run.
fn confine_thread(kind: ThreadKind) {
    if let Some(Err(error)) = FILTERS.get().map(|filters| filters.install(kind)) {
        // Log: the last line of the process.
        error!("a thread ({kind}) cannot be confined: {error}");
        std::process::abort();
    }
}
