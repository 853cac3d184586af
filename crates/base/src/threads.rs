//! Thread creation: the only place that starts threads, so that each one is confined and contained before its first
//! step.
//!
//! The program may set each of two hooks once: a [start hook](set_start_hook), which every thread runs first and which
//! installs the thread's system call filter, and a [panic hook](set_panic_hook), which is called when a thread ends by
//! a panic. Without hooks a thread starts as `std::thread` starts it, and a panic ends the process, see
//! [`EndOnPanic`](crate::EndOnPanic).
//!
//! A thread inherits the system call filters of its parent, and filters can only be narrowed. [`start_launcher`]
//! therefore starts one thread that starts all others: no other thread needs the system calls that create threads, or
//! those that its children need.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{OnceLock, mpsc};
use std::thread::{Builder, JoinHandle};

use thiserror::Error;

use crate::containment::thread_panicked;

pub use crate::thread_kind::ThreadKind;

/// Error of setting a hook or starting the launcher a second time; each is possible once in the life of a process.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("already set")]
pub struct AlreadySet;

type StartHook = Box<dyn Fn(ThreadKind) + Send + Sync>;
type PanicHook = Box<dyn Fn(ThreadKind, &str) + Send + Sync>;

static START_HOOK: OnceLock<StartHook> = OnceLock::new();
static PANIC_HOOK: OnceLock<PanicHook> = OnceLock::new();

type Start = Box<dyn FnOnce() + Send>;

/// Channel to the launcher.
static LAUNCHER: OnceLock<mpsc::Sender<Start>> = OnceLock::new();

/// Makes every thread that starts from now on run `hook` first. If a hook cannot do its work it must end the process;
/// no other code of the thread has run by then.
///
/// # Errors
/// A start hook is already set.
pub fn set_start_hook(hook: impl Fn(ThreadKind) + Send + Sync + 'static) -> Result<(), AlreadySet> {
    START_HOOK.set(Box::new(hook)).map_err(|_| AlreadySet)
}

/// Sets the hook that determines the effect of an uncaught panic, by the thread's kind and name. It runs after the
/// stack is unwound. If it returns, the thread ends with the panic as its result. Without a hook, a capture's thread
/// ends alone, and a panic of any other thread ends the process.
///
/// # Errors
/// A panic hook is already set.
pub fn set_panic_hook(hook: impl Fn(ThreadKind, &str) + Send + Sync + 'static) -> Result<(), AlreadySet> {
    PANIC_HOOK.set(Box::new(hook)).map_err(|_| AlreadySet)
}

/// Starts one thread that starts all others from now on: they inherit its system call filters instead of the caller's.
///
/// # Errors
/// The launcher runs already, or the system cannot create another thread.
pub fn start_launcher() -> io::Result<()> {
    let (starts, waiting) = mpsc::channel::<Start>();
    // A surplus launcher gets no work: it ends when `starts` is dropped below.
    start(ThreadKind::Launcher, "launcher".to_owned(), move || waiting.into_iter().for_each(|start| start()))?;
    LAUNCHER.set(starts).map_err(|_| io::Error::new(io::ErrorKind::AlreadyExists, AlreadySet))
}

/// Starts a thread. The kernel shows the first 15 bytes of its name.
///
/// # Errors
/// The system cannot create another thread.
pub fn spawn<T: Send + 'static>(
    kind: ThreadKind,
    name: impl Into<String>,
    body: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    let mut name = name.into();
    // The standard library panics if a name contains a NUL byte.
    name.retain(|character| character != '\0');
    let Some(launcher) = LAUNCHER.get() else { return start(kind, name, body) };
    let gone = || io::Error::other("the launcher of threads has ended");
    let (answer, started) = mpsc::sync_channel(1);
    let launch = move || {
        // Sending fails only if the caller has ended; the new thread runs anyway.
        let _ = answer.send(start(kind, name, body));
    };
    launcher.send(Box::new(launch)).map_err(|_| gone())?;
    started.recv().map_err(|_| gone())?
}

fn start<T: Send + 'static>(
    kind: ThreadKind,
    name: String,
    body: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    Builder::new().name(name.clone()).spawn(move || run(kind, &name, body))
}

fn run<T>(kind: ThreadKind, name: &str, body: impl FnOnce() -> T) -> T {
    if let Some(hook) = START_HOOK.get() {
        hook(kind);
    }
    // `AssertUnwindSafe` is correct because no code looks at the state that the panic may have left half changed: the
    // panic continues at once.
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(result) => result,
        Err(panic) => {
            match PANIC_HOOK.get() {
                Some(hook) => hook(kind, name),
                None => thread_panicked(kind, name),
            }
            resume_unwind(panic)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    static STARTED: Mutex<Vec<(ThreadKind, Option<String>)>> = Mutex::new(Vec::new());
    static PANICKED: Mutex<Vec<(ThreadKind, String)>> = Mutex::new(Vec::new());

    // A single test, because the hooks and the launcher can be set only once per process.
    #[test]
    fn hooks_see_starts_and_panics_and_the_launcher_starts_all() {
        let current = || std::thread::current().name().map(str::to_owned);
        set_start_hook(move |kind| STARTED.lock().unwrap().push((kind, current()))).unwrap();
        set_panic_hook(|kind, name| PANICKED.lock().unwrap().push((kind, name.to_owned()))).unwrap();
        assert_eq!(set_start_hook(|_| ()), Err(AlreadySet));
        assert_eq!(set_panic_hook(|_, _| ()), Err(AlreadySet));

        // The hook has run before the body does.
        let started = |kind, name: &str| STARTED.lock().unwrap().contains(&(kind, Some(name.to_owned())));
        assert!(spawn(ThreadKind::Pin, "pin", move || started(ThreadKind::Pin, "pin")).unwrap().join().unwrap());
        assert!(PANICKED.lock().unwrap().is_empty());

        let ended = spawn(ThreadKind::Port, "port-02:00:00:00:00:01", || -> u8 {
            resume_unwind(Box::new("a bug"));
        });
        let panic = ended.unwrap().join().unwrap_err();
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"a bug"));
        assert_eq!(*PANICKED.lock().unwrap(), [(ThreadKind::Port, "port-02:00:00:00:00:01".to_owned())]);

        start_launcher().unwrap();
        assert_eq!(start_launcher().unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        let value = String::from("moved in and out");
        let outer = spawn(ThreadKind::Accept, "outer", move || {
            let inner = spawn(ThreadKind::Connection, "inner", move || value);
            inner.unwrap().join().unwrap()
        });
        assert_eq!(outer.unwrap().join().unwrap(), "moved in and out");
        assert!(started(ThreadKind::Accept, "outer") && started(ThreadKind::Connection, "inner"));
        // The hook ran in the launcher before it started any thread.
        assert!(started(ThreadKind::Launcher, "launcher"));
    }

    #[test]
    fn a_name_may_hold_anything() {
        let name = || std::thread::current().name().map(str::to_owned);
        let named = spawn(ThreadKind::Accept, "a\0b is longer than the kernel takes", name).unwrap();
        assert_eq!(named.join().unwrap().as_deref(), Some("ab is longer than the kernel takes"));
    }
}
