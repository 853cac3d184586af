//! Child processes that never outlive this program.
//!
//! A guest that a failed test leaves behind would hold gigabytes and a processor. Each child is therefore killed when
//! its handle is dropped. When this program ends in any other way, the kernel kills the children (`PR_SET_PDEATHSIG`,
//! set by `setpriv` so that no unsafe code is needed). The kernel sends that signal when the *thread* that forked ends,
//! so one thread that lives as long as the program starts them all.

use std::collections::BTreeSet;
use std::io;
use std::process::{Child, Command, ExitStatus};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use std::os::unix::process::CommandExt;

/// A running child; dropping it kills its whole process group.
#[derive(Debug)]
pub struct BoundChild {
    name: String,
    child: Child,
}

impl BoundChild {
    /// Starts the command for `program` as set up by `configure`.
    pub fn spawn(name: &str, program: &str, configure: impl FnOnce(&mut Command)) -> Result<Self> {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--", program]);
        configure(&mut command);
        // The child has its own process group. Ctrl-C then ends only this program, whose end in turn ends the child;
        // and programs that the child starts can be killed with it.
        command.process_group(0);
        let mut live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
        ensure!(!live.ended, "{name} is not started: the program ends");
        let child =
            spawn_from_keeper(command).with_context(|| format!("cannot start {name} ({program}) through setpriv"))?;
        live.groups.insert(child.id());
        drop(live);
        Ok(Self { name: name.to_owned(), child })
    }

    /// The exit status if the child has ended.
    pub fn exited(&mut self) -> Option<ExitStatus> {
        // The lock keeps `kill_all` from a number that belongs to another process from now on.
        let mut live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
        let status = self.child.try_wait().ok().flatten();
        if status.is_some() {
            live.groups.remove(&self.child.id());
        }
        status
    }

    /// The process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Kills the process group and reaps the child.
    pub fn kill(&mut self) {
        if self.exited().is_none() {
            self.signal(rustix::process::Signal::KILL);
            LIVE.lock().unwrap_or_else(PoisonError::into_inner).groups.remove(&self.child.id());
            if let Err(error) = self.child.wait() {
                log::warn!("cannot wait for {}: {error}", self.name);
            }
        }
    }

    /// Asks the child to end and returns its exit status; kills it after `timeout`.
    pub fn terminate(&mut self, timeout: Duration) -> Option<ExitStatus> {
        self.signal(rustix::process::Signal::TERM);
        let status = self.wait(timeout);
        if status.is_none() {
            self.kill();
        }
        status
    }

    /// Waits at most `timeout` for the child to end by itself, and returns its exit status.
    pub fn wait(&mut self, timeout: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + timeout;
        while Instant::now() < deadline {
            if let Some(status) = self.exited() {
                return Some(status);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        None
    }

    fn signal(&self, signal: rustix::process::Signal) {
        if let Err(error) = signal_group(self.child.id(), signal) {
            log::debug!("cannot signal {}: {error}", self.name);
        }
    }
}

impl Drop for BoundChild {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Process groups of the children that run.
#[derive(Debug)]
struct Live {
    groups: BTreeSet<u32>,
    /// No child is started any more.
    ended: bool,
}

static LIVE: Mutex<Live> = Mutex::new(Live { groups: BTreeSet::new(), ended: false });

/// Kills all children, and lets no more be started. Their handles find them ended.
pub fn kill_all() {
    let mut live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
    live.ended = true;
    for &group in &live.groups {
        if let Err(error) = signal_group(group, rustix::process::Signal::KILL) {
            log::debug!("cannot kill the process group {group}: {error}");
        }
    }
}

fn signal_group(id: u32, signal: rustix::process::Signal) -> rustix::io::Result<()> {
    match i32::try_from(id).ok().and_then(rustix::process::Pid::from_raw) {
        Some(pid) => rustix::process::kill_process_group(pid, signal),
        None => Ok(()),
    }
}

type SpawnRequest = (Command, Sender<io::Result<Child>>);

fn spawn_from_keeper(command: Command) -> io::Result<Child> {
    static KEEPER: OnceLock<Mutex<Sender<SpawnRequest>>> = OnceLock::new();
    let keeper = KEEPER.get_or_init(|| {
        let (sender, receiver) = channel::<SpawnRequest>();
        std::thread::spawn(move || {
            for (mut command, reply) in receiver {
                // The requester waits for the reply, so the send cannot fail.
                let _ = reply.send(command.spawn());
            }
        });
        Mutex::new(sender)
    });
    let (sender, receiver) = channel();
    keeper.lock().unwrap_or_else(PoisonError::into_inner).send((command, sender)).map_err(io::Error::other)?;
    receiver.recv().map_err(io::Error::other)?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kill_ends_the_whole_group() {
        let mut child = BoundChild::spawn("sleepers", "sh", |command| {
            command.args(["-c", "sleep 1000 & sleep 1000"]);
        })
        .unwrap();
        assert!(child.exited().is_none());
        child.kill();
        assert!(child.exited().is_some());
    }
}
