//! The thread of a device.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pvrdma_base::threads::ThreadKind;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use super::manager::Manager;
use crate::adapter::Adapter;
use crate::rdmacm::Libraries;
use crate::worker::Worker;

/// Events of the host that are processed before the guest's datagrams are looked at.
const BATCH: usize = 64;

/// Connections of one device through the host, until it is dropped. Dropping ends all of them.
pub(crate) struct HostCm {
    adapter: Arc<Adapter>,
    /// `None` once it has ended.
    thread: Option<Worker>,
}

impl fmt::Debug for HostCm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostCm").finish_non_exhaustive()
    }
}

impl HostCm {
    /// Starts the thread, and listens on the ports of the device.
    pub(crate) fn start(adapter: &Arc<Adapter>, libraries: &Libraries) -> io::Result<Self> {
        let mut manager = Manager::new(adapter, libraries)?;
        adapter.cm_paths.activate();
        let name = format!("ibcm-{}", adapter.name);
        let thread = Worker::start(ThreadKind::HostManagement, &name, move |stop| {
            if let Err(error) = run(&mut manager, stop) {
                manager.lost(&error);
            }
        });
        let thread = thread.inspect_err(|_| adapter.cm_paths.deactivate())?;
        Ok(Self { adapter: Arc::clone(adapter), thread: Some(thread) })
    }
}

impl Drop for HostCm {
    fn drop(&mut self) {
        // The thread ends first, because it may still note connections.
        drop(self.thread.take());
        self.adapter.cm_paths.deactivate();
    }
}

fn run(manager: &mut Manager, stop: &OwnedFd) -> io::Result<()> {
    let start = Instant::now();
    loop {
        let now = start.elapsed();
        let wait = manager.deadline().map(|deadline| deadline.saturating_sub(now));
        let [stopped, worked, arrived] = {
            let (paths, channel) = manager.files();
            let mut files = [
                PollFd::new(stop, PollFlags::IN),
                PollFd::new(paths, PollFlags::IN),
                PollFd::new(channel, PollFlags::IN),
            ];
            poll(&mut files, wait)?;
            files.map(|file| file.revents())
        };
        if !stopped.is_empty() {
            return Ok(());
        }
        let now = start.elapsed();
        if !worked.is_empty() {
            manager.work(now);
        }
        if arrived.contains(PollFlags::IN) {
            manager.host_events(now, BATCH)?;
        } else if !arrived.is_empty() {
            // Without this, a file that only reports errors would be polled in a busy loop.
            return Err(io::Error::other("the host's connection manager is gone"));
        }
        manager.timeouts(now);
    }
}

/// Waits until one of these files is ready, or until the time has passed.
fn poll(files: &mut [PollFd<'_>], wait: Option<Duration>) -> io::Result<()> {
    let wait = wait.map(Timespec::try_from).transpose().map_err(|_| io::ErrorKind::InvalidInput)?;
    match rustix::event::poll(files, wait.as_ref()) {
        // The caller looks at the time and waits again.
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}
