//! Tests of code that ends the process: each runs in its own process.

use std::env;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, exit};

use log::{LevelFilter, Log, Metadata, Record};

/// Environment variable that tells the child process which test it runs.
const CHILD: &str = "PVRDMA_TEST_ABORTS";

/// Signal number of `SIGABRT`.
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

/// Runs `body`, which must abort, in another process, and returns its standard error output, including its log. `test`
/// is the full name of the calling test, which the other process runs.
///
/// # Panics
/// The process ended in another way, or there is no test of this name.
pub fn aborts(test: &str, body: impl FnOnce()) -> String {
    if env::var_os(CHILD).is_some_and(|name| name == test) {
        // This fails only if the process has a logger already, and it has none.
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
