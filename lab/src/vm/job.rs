//! A command that runs in a guest.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use super::channel::Channel;

/// Result of a command.
#[derive(Clone, Debug)]
pub struct JobOutput {
    /// Exit code as a shell reports it.
    pub code: i32,
    /// Standard output and error in the order of arrival.
    pub text: String,
}

/// A handle to a running command; dropping it kills the command.
#[derive(Debug)]
pub struct Job {
    channel: Arc<Channel>,
    id: u64,
    /// `machine: command`, for messages.
    title: String,
}

impl Job {
    pub(super) fn new(channel: Arc<Channel>, id: u64, title: String) -> Self {
        Self { channel, id, title }
    }

    /// Waits for the end. Returns an error if the command does not end in time, and kills it, or if the machine is
    /// gone.
    pub fn wait(&self, timeout: Duration) -> Result<JobOutput> {
        let started = Instant::now();
        let state = self.channel.wait_job(self.id, timeout, |_| false);
        match state.exit {
            Some(code) => {
                log::debug!("{} ended with {code} after {:.1} s", self.title, started.elapsed().as_secs_f64());
                Ok(JobOutput { code, text: state.output })
            }
            None if self.channel.is_closed() => bail!("{}: the virtual machine is gone\n{}", self.title, state.output),
            None => {
                // The line is open, so the request arrives.
                let _ = self.channel.kill(self.id);
                bail!("{}: not ended within {} s\n{}", self.title, timeout.as_secs(), state.output)
            }
        }
    }

    /// Waits for success and returns the output.
    pub fn wait_success(&self, timeout: Duration) -> Result<String> {
        let output = self.wait(timeout)?;
        if output.code != 0 {
            bail!("{}: exit code {}\n{}", self.title, output.code, output.text);
        }
        Ok(output.text)
    }

    /// Waits until the output contains a text. Programs write to a pipe in blocks unless told otherwise.
    pub fn wait_for_output(&self, text: &str, timeout: Duration) -> Result<()> {
        let state = self.channel.wait_job(self.id, timeout, |job| job.output.contains(text));
        if !state.output.contains(text) {
            bail!("{}: no '{text}' in its output\n{}", self.title, state.output);
        }
        Ok(())
    }

    /// Waits at most `limit` for more output or the end. Returns the output that was not taken yet, and the exit code
    /// if the command has ended.
    pub fn take(&self, limit: Duration) -> (String, Option<i32>) {
        let state = self.channel.take(self.id, limit);
        (state.output, state.exit)
    }

    /// Waits at most `limit` for the end; a command that has not ended continues.
    pub fn pause(&self, limit: Duration) {
        self.channel.wait_job(self.id, limit, |_| false);
    }

    /// Kills the command.
    pub fn kill(&self) -> Result<()> {
        self.channel.kill(self.id)
    }

    /// Returns `true` if the command still runs.
    pub fn is_running(&self) -> bool {
        self.channel.wait_job(self.id, Duration::ZERO, |_| true).exit.is_none() && !self.channel.is_closed()
    }

    /// Returns the output so far.
    pub fn output(&self) -> String {
        self.channel.wait_job(self.id, Duration::ZERO, |_| true).output
    }

    /// Returns machine and command, for messages.
    pub fn title(&self) -> &str {
        &self.title
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if self.is_running() {
            // If the machine is gone, so is the command.
            let _ = self.channel.kill(self.id);
        }
        self.channel.forget(self.id);
    }
}
