//! A daemon process that is killed when its test ends.
#![allow(
    clippy::allow_attributes,
    dead_code,
    unreachable_pub,
    missing_debug_implementations,
    clippy::unwrap_used,
    clippy::panic,
    reason = "each test uses a part"
)]

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

/// A daemon, killed when dropped.
pub struct Daemon(Child);

impl Daemon {
    /// Starts the daemon with this command.
    pub fn spawn(command: &mut Command) -> Self {
        Self(command.spawn().unwrap())
    }

    /// Starts the daemon, and waits until it is ready.
    ///
    /// # Panics
    /// The daemon exits before it is ready. Its errors are part of the message if the command pipes standard error.
    #[track_caller]
    pub fn start(command: &mut Command) -> Self {
        let mut daemon = Self::spawn(command.stdin(Stdio::null()).stdout(Stdio::piped()));
        let ready = BufReader::new(daemon.0.stdout.take().unwrap()).lines().next();
        if !ready.is_some_and(|line| line.unwrap().contains("ready")) {
            let said = daemon.0.stderr.take().map(std::io::read_to_string);
            panic!("the daemon ended at its start: {said:?}");
        }
        daemon
    }

    /// Returns the standard output of the daemon, if the command pipes it.
    pub fn output(&mut self) -> Option<std::process::ChildStdout> {
        self.0.stdout.take()
    }

    /// Returns the standard error of the daemon, if the command pipes it.
    pub fn errors(&mut self) -> Option<std::process::ChildStderr> {
        self.0.stderr.take()
    }

    /// Returns its process id.
    pub fn id(&self) -> u32 {
        self.0.id()
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }

    /// Waits for the daemon's exit. Returns its status.
    pub fn wait(&mut self) -> Option<i32> {
        self.0.wait().unwrap().code()
    }

    /// Asks the daemon to end, and waits for its exit.
    #[track_caller]
    pub fn stop(&mut self) {
        self.signal(Signal::TERM);
        assert_eq!(self.wait(), Some(0));
    }

    /// Kills it.
    pub fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Returns the child processes of a process.
pub fn children(pid: u32) -> BTreeSet<String> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let children =
        threads.map(|thread| fs::read_to_string(thread.unwrap().path().join("children")).unwrap_or_default());
    children.collect::<String>().split_whitespace().map(str::to_owned).collect()
}

/// Returns the role of a process of the daemon: the first words of its command line.
pub fn role(pid: &str) -> String {
    let line = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    line.split('\0').skip(1).take(4).collect::<Vec<_>>().join(" ")
}
