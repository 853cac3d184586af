//! A daemon that does not outlive its test.
#![allow(
    clippy::allow_attributes,
    dead_code,
    unreachable_pub,
    missing_debug_implementations,
    clippy::unwrap_used,
    clippy::panic,
    reason = "each test uses a part"
)]

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

/// A daemon, killed when dropped.
pub struct Daemon(Child);

impl Daemon {
    /// Starts it as the command says.
    pub fn spawn(command: &mut Command) -> Self {
        Self(command.spawn().unwrap())
    }

    /// Starts it, and waits until it is ready.
    ///
    /// # Panics
    /// It ends before. Its errors are said if the command left them to a pipe.
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

    /// What it writes to standard error, if the command left that to a pipe.
    pub fn errors(&mut self) -> std::process::ChildStderr {
        self.0.stderr.take().unwrap()
    }

    /// Its number.
    pub fn id(&self) -> u32 {
        self.0.id()
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }

    /// Waits for its end, and gives its status.
    pub fn wait(&mut self) -> Option<i32> {
        self.0.wait().unwrap().code()
    }

    /// Has it end, and waits for that.
    #[track_caller]
    pub fn stop(&mut self) {
        self.signal(Signal::TERM);
        assert_eq!(self.wait(), Some(0));
    }

    /// Ends it without a word.
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
