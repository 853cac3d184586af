//! Host side of the line to a guest's agent.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::agent::{Event, Request};

/// Connection to the agent, shared by a machine and its jobs.
#[derive(Debug)]
pub(crate) struct Channel {
    writer: Mutex<UnixStream>,
    state: Mutex<State>,
    changed: Condvar,
}

/// State of one command in the guest.
#[derive(Clone, Debug, Default)]
pub(crate) struct JobState {
    /// All output so far.
    pub output: String,
    /// Exit code, once the command has ended.
    pub exit: Option<i32>,
}

#[derive(Debug, Default)]
struct State {
    jobs: HashMap<u64, JobState>,
    next_id: u64,
    /// Number of hello messages from the agent: one per boot.
    boots: u32,
    closed: bool,
}

impl Channel {
    /// Starts to listen on a connected stream.
    pub(crate) fn new(stream: UnixStream) -> Result<Arc<Self>> {
        let reader = stream.try_clone().context("cannot share the agent's socket")?;
        let channel =
            Arc::new(Self { writer: Mutex::new(stream), state: Mutex::new(State::default()), changed: Condvar::new() });
        let shared = Arc::clone(&channel);
        std::thread::spawn(move || shared.receive(reader));
        Ok(channel)
    }

    /// Starts a command and returns its id.
    pub(crate) fn spawn(&self, command: &str) -> Result<u64> {
        let id = self.new_job();
        self.send(&Request::Spawn { id, command: command.to_owned() })?;
        Ok(id)
    }

    /// Writes a piece of a file and returns the id under which the result is reported.
    pub(crate) fn write(&self, path: &str, append: bool, mode: u32, hex: String) -> Result<u64> {
        let id = self.new_job();
        self.send(&Request::Write { id, path: path.to_owned(), append, mode, hex })?;
        Ok(id)
    }

    /// Kills a command.
    pub(crate) fn kill(&self, id: u64) -> Result<()> {
        self.send(&Request::Kill { id })
    }

    /// Kills every command that still runs.
    pub(crate) fn kill_all(&self) -> Result<()> {
        let ids: Vec<u64> = self.lock().jobs.iter().filter(|(_, job)| job.exit.is_none()).map(|(id, _)| *id).collect();
        ids.into_iter().try_for_each(|id| self.kill(id))
    }

    /// Waits until `done` returns `true` for a job, the job ends, the guest is gone, or time is up; returns the job's
    /// state.
    pub(crate) fn wait_job(&self, id: u64, timeout: Duration, done: impl Fn(&JobState) -> bool) -> JobState {
        self.wait(timeout, |state| {
            state.closed || state.jobs.get(&id).is_some_and(|job| job.exit.is_some() || done(job))
        })
        .jobs
        .get(&id)
        .cloned()
        .unwrap_or_default()
    }

    /// Waits until a job has new output or ends, the guest is gone, or time is up; takes the new output.
    pub(crate) fn take(&self, id: u64, timeout: Duration) -> JobState {
        let news = |state: &State| {
            state.closed || state.jobs.get(&id).is_some_and(|job| job.exit.is_some() || !job.output.is_empty())
        };
        let mut state = self.wait(timeout, news);
        let taken = |job: &mut JobState| JobState { output: std::mem::take(&mut job.output), exit: job.exit };
        state.jobs.get_mut(&id).map(taken).unwrap_or_default()
    }

    /// Waits for the agent's `count`th hello.
    pub(crate) fn wait_boots(&self, count: u32, timeout: Duration) -> bool {
        self.wait(timeout, |state| state.closed || state.boots >= count).boots >= count
    }

    /// Returns the number of boots of the guest.
    pub(crate) fn boots(&self) -> u32 {
        self.lock().boots
    }

    /// Returns `true` if the machine has closed the line because QEMU has ended.
    pub(crate) fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// Shuts the line down at this end, so that the other end can connect again. The receiving thread holds a clone of
    /// the socket, so dropping this one would not close the connection.
    pub(crate) fn close(&self) {
        // This fails if the machine has closed the line first.
        let _ = self.writer.lock().unwrap_or_else(PoisonError::into_inner).shutdown(Shutdown::Both);
    }

    /// Forgets a job's output.
    pub(crate) fn forget(&self, id: u64) {
        self.lock().jobs.remove(&id);
    }

    fn new_job(&self) -> u64 {
        let mut state = self.lock();
        state.next_id += 1;
        let id = state.next_id;
        state.jobs.insert(id, JobState::default());
        id
    }

    fn send(&self, request: &Request) -> Result<()> {
        let mut line = serde_json::to_vec(request).context("cannot encode a request")?;
        line.push(b'\n');
        self.writer
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .write_all(&line)
            .context("the guest's agent does not take requests: its virtual machine is gone")
    }

    fn wait(&self, timeout: Duration, done: impl Fn(&State) -> bool) -> MutexGuard<'_, State> {
        let deadline = Instant::now() + timeout;
        let mut state = self.lock();
        while !done(&state) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        state
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn receive(&self, stream: UnixStream) {
        let mut reader = BufReader::new(stream);
        let mut line = Vec::new();
        loop {
            line.clear();
            match reader.read_until(b'\n', &mut line) {
                Ok(1..) => {}
                _ => break,
            }
            match serde_json::from_slice::<Event>(&line) {
                Ok(event) => self.lock().apply(event),
                // A guest that was reset in the middle of a line leaves half a line.
                Err(error) => log::debug!("not an event: {error}: {}", String::from_utf8_lossy(&line)),
            }
            self.changed.notify_all();
        }
        self.lock().closed = true;
        self.changed.notify_all();
    }
}

impl State {
    fn apply(&mut self, event: Event) {
        match event {
            Event::Hello { boot } => {
                log::debug!("guest boot {boot}");
                self.boots += 1;
                // Commands from before the boot no longer run.
                for job in self.jobs.values_mut() {
                    job.exit.get_or_insert(-1);
                }
            }
            Event::Output { id, text } => {
                if let Some(job) = self.jobs.get_mut(&id) {
                    job.output.push_str(&text);
                }
            }
            Event::Exit { id, code } => {
                if let Some(job) = self.jobs.get_mut(&id) {
                    job.exit.get_or_insert(code);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn a_line_that_was_closed_ends_at_the_other_end() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let channel = Channel::new(ours).unwrap();
        channel.close();
        assert_eq!(theirs.read(&mut [0; 1]).unwrap(), 0);
        assert!(!channel.wait_boots(1, Duration::from_secs(60)), "a waiting thread is told");
        assert!(channel.is_closed());
    }
}
