//! Worker processes, and processes that do not end although they were killed.
//!
//! SIGKILL does not end a thread in an uninterruptible system call. `close(2)` of a file on a FUSE file system is one:
//! it waits for the answer to FUSE_FLUSH, and a client can send a worker such a file. The process then keeps its memory
//! and descriptors; its leader is a zombie, and neither a pidfd nor `wait(2)` reports its end. So every wait for an end
//! here has a deadline. A process that misses it is moved to a list, and the next worker starts.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::events::{Event, Events};
use crate::status::WedgedProcess;
use crate::text::printable_text;

/// Maximum number of wedged workers of a network. While it is reached, no other worker of the network starts.
pub(super) const MAX_OF_NETWORK: usize = 4;
/// Maximum number of threads of a process that a report names.
const MAX_THREADS: usize = 8;

/// Process of the supervisor: a worker or a keeper.
#[derive(Debug)]
pub(super) struct WorkerProcess {
    /// `None` if an earlier supervisor has started it.
    child: Option<Child>,
    pid: Pid,
    /// Readable when all threads of the process have ended.
    pidfd: OwnedFd,
}

impl AsFd for WorkerProcess {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

impl WorkerProcess {
    /// # Errors
    /// The process cannot be watched. It is then killed.
    pub(super) fn new(mut child: Child) -> io::Result<Self> {
        match pidfd_open(Pid::from_child(&child), PidfdFlags::empty()) {
            Ok(pidfd) => Ok(Self { pid: Pid::from_child(&child), child: Some(child), pidfd }),
            Err(errno) => {
                let _ = child.kill();
                Err(errno.into())
            }
        }
    }

    /// Takes a process that an earlier supervisor has started.
    pub(super) const fn adopt(pid: Pid, pidfd: OwnedFd) -> Self {
        Self { child: None, pid, pidfd }
    }

    pub(super) const fn id(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    /// Kills the process, in any state.
    pub(super) fn kill(&mut self) {
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
    }

    /// Waits for the end of the process. Returns `None` if it does not end within `patience`.
    ///
    /// # Errors
    /// The kernel does not return the exit status.
    pub(super) fn end_within(&mut self, patience: Duration) -> io::Result<Option<ExitStatus>> {
        let deadline = Instant::now() + patience;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let mut poll = [PollFd::new(&self.pidfd, PollFlags::IN)];
            match rustix::event::poll(&mut poll, Timespec::try_from(left).ok().as_ref()) {
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
                Ok(0) => return Ok(None),
                Ok(_) => return self.try_wait(),
            }
        }
    }

    /// Returns the exit status if the process has ended; that of an adopted process is not known.
    fn try_wait(&mut self) -> io::Result<Option<ExitStatus>> {
        match &mut self.child {
            Some(child) => child.try_wait(),
            None => {
                const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };
                let ended = rustix::event::poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], Some(&NOW))?;
                Ok((ended > 0).then(ExitStatus::default))
            }
        }
    }

    /// Returns `true` if the process has ended, even if a thread of it is stuck in the kernel. Its descriptors may
    /// still be open then, so that the other ends of its sockets show no end.
    pub(super) fn is_over(&self) -> bool {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.id()));
        // The program name in front of the state may contain any characters.
        stat.is_ok_and(|stat| {
            stat.rsplit_once(") ").is_some_and(|(_, rest)| matches!(rest.chars().next(), Some('Z' | 'X')))
        })
    }

    /// Returns the names of the remaining threads besides the leader: a client's connection has the name of its device.
    fn threads(&self) -> Vec<String> {
        let Ok(tasks) = fs::read_dir(format!("/proc/{}/task", self.id())) else { return Vec::new() };
        let leader = self.id().to_string();
        let tasks = tasks.flatten().filter(|task| task.file_name() != leader.as_str());
        let names = tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
        names.map(|name| printable_text(name.trim_end())).take(MAX_THREADS).collect()
    }
}

/// Processes that were killed and have not ended.
#[derive(Debug, Default)]
pub(super) struct Wedged(Mutex<Vec<Left>>);

/// Entry of [`Wedged`].
#[derive(Debug)]
struct Left {
    process: WorkerProcess,
    network: String,
    /// Device of a keeper; `None` for a worker.
    device: Option<String>,
    since: Instant,
}

impl Left {
    fn report(&self) -> WedgedProcess {
        WedgedProcess {
            pid: self.process.id(),
            network: self.network.clone(),
            device: self.device.clone(),
            since_s: self.since.elapsed().as_secs(),
            threads: self.process.threads(),
        }
    }
}

impl Wedged {
    /// Adds a killed process to the list until it ends.
    pub(super) fn keep(&self, process: WorkerProcess, network: &str, device: Option<&str>, events: &Events) {
        let (network, device) = (network.to_owned(), device.map(str::to_owned));
        let left = Left { process, network, device, since: Instant::now() };
        let report = left.report();
        // Log: once for a process, and the number of wedged processes of a network is limited.
        log::error!("{}", report.render());
        events.tell(&Event::ProcessWedged { network: report.network, pid: report.pid });
        self.0.lock().push(left);
    }

    /// Removes and reports the processes that have ended. Does not block.
    pub(super) fn look(&self, events: &Events) {
        let has_ended = |left: &mut Left| !matches!(left.process.try_wait(), Ok(None));
        for Left { process, network, .. } in self.0.lock().extract_if(.., has_ended) {
            let pid = process.id();
            // Log: once for a process.
            log::info!("network {network}: process {pid}, which was killed, has ended");
            events.tell(&Event::ProcessGone { network, pid });
        }
    }

    /// Returns `true` if the network has reached its maximum number of wedged workers.
    pub(super) fn is_full(&self, network: &str) -> bool {
        self.0.lock().iter().filter(|left| left.network == network && left.device.is_none()).count() >= MAX_OF_NETWORK
    }

    /// Returns the PIDs of the wedged keepers of a device.
    pub(super) fn keepers_of(&self, network: &str, device: &str) -> Vec<u32> {
        let left = self.0.lock();
        let its = left.iter().filter(|left| left.network == network && left.device.as_deref() == Some(device));
        its.map(|left| left.process.id()).collect()
    }

    /// Returns reports of all wedged processes.
    pub(super) fn report(&self) -> Vec<WedgedProcess> {
        self.0.lock().iter().map(Left::report).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// Timeout of the tests, longer than any step takes.
    const PATIENCE: Duration = Duration::from_secs(20);

    fn process() -> WorkerProcess {
        WorkerProcess::new(Command::new("sleep").arg("1000").spawn().unwrap()).unwrap()
    }

    #[test]
    fn the_end_of_a_process_is_seen_within_a_deadline() {
        let mut process = process();
        assert!(matches!(process.end_within(Duration::ZERO), Ok(None)) && !process.is_over());
        process.kill();
        let ended = process.end_within(PATIENCE).unwrap().unwrap();
        assert!(!ended.success());
    }

    #[test]
    fn a_process_is_over_before_it_was_waited_for() {
        let mut process = process();
        process.kill();
        let patience = Timespec::try_from(PATIENCE).unwrap();
        rustix::event::poll(&mut [PollFd::new(&process.pidfd, PollFlags::IN)], Some(&patience)).unwrap();
        assert!(process.is_over());
        process.end_within(PATIENCE).unwrap().unwrap();
    }

    #[test]
    fn a_network_leaves_a_bounded_number_of_processes_behind() {
        let (wedged, events) = (Wedged::default(), Events::default());
        // A keeper does not count against the network's limit, but against its device's.
        wedged.keep(process(), "red", Some("vm1"), &events);
        assert_eq!(["vm1", "vm2"].map(|device| wedged.keepers_of("red", device).len()), [1, 0]);
        for count in 0..MAX_OF_NETWORK {
            assert!(!wedged.is_full("red"), "{count}");
            wedged.keep(process(), "red", None, &events);
        }
        assert!(wedged.is_full("red") && !wedged.is_full("blue"));
        wedged.look(&events);
        assert_eq!(wedged.report().len(), MAX_OF_NETWORK + 1);
        let ended = {
            let mut left = wedged.0.lock();
            let process = &mut left[1].process;
            process.kill();
            let patience = Timespec::try_from(PATIENCE).unwrap();
            rustix::event::poll(&mut [PollFd::new(&process.pidfd, PollFlags::IN)], Some(&patience)).unwrap();
            process.id()
        };
        wedged.look(&events);
        assert!(!wedged.is_full("red"));
        assert!(wedged.report().iter().all(|left| left.pid != ended && left.network == "red"));
        for mut left in wedged.0.into_inner() {
            left.process.kill();
            left.process.end_within(PATIENCE).unwrap().unwrap();
        }
    }
}
