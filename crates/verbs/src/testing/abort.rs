//! Tests of what ends the process: each runs in a process of its own.

use std::env;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, exit};

use log::{LevelFilter, Log, Metadata, Record};

/// Tells the child which test it is.
const CHILD: &str = "PVRDMA_TEST_ABORTS";

/// `SIGABRT`.
const ABORTED: i32 = 6;

struct Stderr;

impl Log for Stderr {
    fn enabled(&self, _metadata: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        eprintln!("{}", record.args());
    }

    fn flush(&self) {}
}

/// Runs `body`, which is to abort, in another process, and returns what that has written to its standard error, with
/// what it logged. `test` is the full name of the test that calls this, whose other process it is.
///
/// # Panics
/// The process ended otherwise, or there is no test of this name.
pub fn aborts(test: &str, body: impl FnOnce()) -> String {
    if env::var_os(CHILD).is_some_and(|name| name == test) {
        // Nobody else has a logger in this process.
        let _ = log::set_logger(&Stderr);
        log::set_max_level(LevelFilter::Info);
        body();
        eprintln!("it goes on");
        exit(0);
    }
    let mut child = Command::new(env::current_exe().unwrap());
    let output = child.args(["--exact", test, "--nocapture"]).env(CHILD, test).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.signal(), Some(ABORTED), "{}: {text}", output.status);
    text
}
