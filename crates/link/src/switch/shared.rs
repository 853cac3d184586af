//! State that the ports of a switch share: the list of ports, and the thread that reads the uplink.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use pvrdma_base::threads::{self, ThreadKind};
use pvrdma_handover::Waker;
use pvrdma_packet::MacAddr;
use rustix::event::{PollFd, PollFlags, Timespec};
use thiserror::Error;

use super::counters::SwitchCounters;
use super::direct::Round;
use super::forward::{Ports, Sorted, deliver, is_group, sort};
use super::mailbox::{Mailbox, Source, UnknownUnicast};
use super::stall::Stall;
use crate::{Bell, Clock, Frames, GsoLink, Link, MonotonicClock, Readiness};

/// Bytes in front of the network header, which count towards the frame but not towards the MTU.
const ETHERNET_LEN: usize = 18;
/// Number of frames that are received from the uplink in one call.
const RECEIVE: usize = 64;
/// Maximum number of batches that are discarded before the first port gets frames.
const STALE_BATCHES: usize = 64;
/// Pause after polling failed.
const PAUSE: Duration = Duration::from_millis(1);

/// Error of adding a port.
#[derive(Debug, Error)]
pub enum SwitchError {
    /// Another port has this address.
    #[error("{0} is the address of another port")]
    InUse(MacAddr),
    /// The address is that of a group.
    #[error("{0} is the address of a group")]
    Group(MacAddr),
    /// The system refused.
    #[error("cannot add a port")]
    Io(#[from] io::Error),
}

/// State of adding and removing ports.
#[derive(Debug, Default)]
struct Plug {
    last: Source,
    thread: Option<JoinHandle<()>>,
}

/// Frames that were read from the uplink, and the accounting round of the reading thread.
#[derive(Debug, Default)]
struct Input {
    frames: Frames,
    sorted: Sorted,
    round: Round,
}

/// State that the ports of a switch share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) uplink: Option<Arc<dyn Link>>,
    /// Longest frame between ports, in bytes.
    pub(super) longest: usize,
    /// Locked for reading while frames are moved.
    pub(super) ports: RwLock<Ports>,
    plug: Mutex<Plug>,
    /// A thread reads the uplink when there are several ports.
    threaded: bool,
    /// Ports reach each other only through the uplink.
    pub(super) hairpin: bool,
    input: Mutex<Input>,
    pub(super) clock: Arc<dyn Clock>,
    waker: Waker<Bell>,
    stopping: AtomicBool,
    /// Number of ports that wait for room in the uplink.
    pub(super) refused: AtomicUsize,
    pub(super) stall: Stall,
    /// Counters of frames from the uplink that no port got.
    pub(super) counters: SwitchCounters,
}

impl Shared {
    /// Creates the state. With a clock, no thread is started.
    pub(super) fn new(
        uplink: Option<Arc<dyn Link>>,
        mtu: u32,
        clock: Option<Arc<dyn Clock>>,
        hairpin: bool,
    ) -> io::Result<Self> {
        // Does the offloads that ports leave to the uplink and that the inner link does not accept.
        let uplink = uplink.map(|link| Arc::new(GsoLink::new(link)) as Arc<dyn Link>);
        Ok(Self {
            uplink,
            longest: usize::try_from(mtu).unwrap_or(usize::MAX).saturating_add(ETHERNET_LEN),
            ports: RwLock::default(),
            plug: Mutex::default(),
            threaded: clock.is_none(),
            hairpin,
            input: Mutex::default(),
            clock: clock.unwrap_or_else(|| Arc::new(MonotonicClock::default())),
            waker: Waker::new(Bell::new()?),
            stopping: AtomicBool::new(false),
            refused: AtomicUsize::new(0),
            stall: Stall::default(),
            counters: SwitchCounters::default(),
        })
    }

    /// Returns `true` if no thread reads the uplink.
    #[cfg(test)]
    pub(super) fn is_threadless(&self) -> bool {
        self.plug.lock().thread.is_none()
    }

    /// Removes all ports.
    pub(super) fn close(&self) {
        let plug = &mut *self.plug.lock();
        let ports = self.ports.write().clear();
        self.stop(plug);
        ports.iter().for_each(|mailbox| mailbox.signal());
    }

    pub(super) fn plug(self: &Arc<Self>, mac: MacAddr, unknown: UnknownUnicast) -> Result<Arc<Mailbox>, SwitchError> {
        if is_group(&mac.0) {
            return Err(SwitchError::Group(mac));
        }
        let plug = &mut *self.plug.lock();
        let mut addresses = self.ports.read().addresses();
        if addresses.contains(&mac) {
            return Err(SwitchError::InUse(mac));
        }
        plug.last = plug.last.saturating_add(1);
        let mailbox = Arc::new(Mailbox::new(plug.last, mac, unknown)?);
        let others = addresses.len();
        if others > 0 {
            self.start(plug)?;
        }
        addresses.push(mac);
        if let Err(error) = self.set_addresses(&addresses) {
            self.stop_if_idle(plug);
            return Err(error.into());
        }
        let mut ports = self.ports.write();
        if others == 0 {
            self.discard_stale();
        }
        ports.insert(&mailbox);
        drop(ports);
        self.topology_changed();
        Ok(mailbox)
    }

    pub(super) fn unplug(&self, mailbox: &Arc<Mailbox>) {
        let plug = &mut *self.plug.lock();
        // A port that becomes the only one reads the uplink itself. Holding this lock ensures that all frames read
        // before have been delivered, so none are reordered.
        let input = self.input.lock();
        let mut ports = self.ports.write();
        if !ports.remove(mailbox) {
            return;
        }
        let addresses = ports.addresses();
        drop((ports, input));
        // The owner may hold the port for a long time after this. The port sends nothing more, so this state cannot
        // change again.
        self.set_refused(mailbox, false);
        self.stop_if_idle(plug);
        if let Err(error) = self.set_addresses(&addresses) {
            // Log: an administrator takes devices away.
            log::warn!("the network still brings frames to {}: {error}", mailbox.mac);
        }
        self.topology_changed();
        // A thread that waits for this port then finds that there is nothing to wait for.
        mailbox.signal();
    }

    /// Records whether a port waits for room in the uplink.
    pub(super) fn set_refused(&self, mailbox: &Mailbox, refused: bool) {
        if mailbox.refused.swap(refused, Ordering::Relaxed) != refused {
            if refused {
                self.refused.fetch_add(1, Ordering::Relaxed);
            } else {
                self.refused.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    fn set_addresses(&self, addresses: &[MacAddr]) -> io::Result<()> {
        self.uplink.as_ref().map_or(Ok(()), |uplink| uplink.set_addresses(addresses))
    }

    /// Drops the frames that arrived while there was no port.
    fn discard_stale(&self) {
        let Some(uplink) = &self.uplink else { return };
        let mut stale = Frames::default();
        for _ in 0..STALE_BATCHES {
            stale.clear();
            uplink.receive(&mut stale, RECEIVE);
            if stale.is_empty() {
                break;
            }
            self.counters.switch_dropped_unknown.add(stale.len() as u64);
        }
    }

    /// Makes all waiters query their readiness again.
    pub(super) fn topology_changed(&self) {
        for mailbox in self.ports.read().all() {
            mailbox.signal();
        }
        self.waker.wake();
    }

    /// Starts the thread that reads the uplink, if it is needed.
    fn start(self: &Arc<Self>, plug: &mut Plug) -> io::Result<()> {
        if self.threaded && self.uplink.is_some() && plug.thread.is_none() {
            self.stopping.store(false, Ordering::Release);
            let shared = Arc::clone(self);
            plug.thread = Some(threads::spawn(ThreadKind::Switch, "switch", move || shared.work())?);
        }
        Ok(())
    }

    /// Stops the thread unless there are several ports.
    fn stop_if_idle(&self, plug: &mut Plug) {
        if !self.ports.read().are_several() {
            self.stop(plug);
        }
    }

    fn stop(&self, plug: &mut Plug) {
        let Some(thread) = plug.thread.take() else { return };
        self.stopping.store(true, Ordering::Release);
        self.waker.wake();
        if thread.join().is_err() {
            // Log: the last of this thread.
            log::error!("the thread of a switch panicked");
        }
    }

    pub(super) fn service(&self) -> bool {
        let Some(uplink) = &self.uplink else { return false };
        let Input { frames, sorted, round } = &mut *self.input.lock();
        frames.clear();
        let mut next = 0;
        loop {
            let ports = self.ports.read();
            if next == 0 {
                if !ports.are_several() {
                    return false;
                }
                uplink.receive(frames, RECEIVE);
            }
            let end = sort(&ports, frames, next, sorted);
            drop(ports);
            // The lock of the ports must not be held here: receivers send frames, which takes it again.
            sorted.bring(frames, round, &*self.clock);
            if end >= frames.len() {
                return !frames.is_empty();
            }
            deliver(&self.ports.read(), frames, end, &self.counters, self.hairpin);
            next = end.saturating_add(1);
        }
    }

    fn work(&self) {
        while !self.stopping.load(Ordering::Acquire) {
            if !self.service() {
                self.waker.sleep(|bell| self.wait(bell));
            }
        }
    }

    /// Blocks until the uplink has frames, or another thread wakes this one.
    fn wait(&self, bell: &Bell) {
        let readiness = match &self.uplink {
            Some(uplink) if self.ports.read().are_several() => uplink.readiness(),
            _ => Readiness::default(),
        };
        let mut fds = vec![PollFd::new(bell, PollFlags::IN)];
        for fd in [&readiness.readable, &readiness.changed].into_iter().flatten() {
            fds.push(PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN));
        }
        let timeout = readiness.wait.and_then(|wait| Timespec::try_from(wait).ok());
        match rustix::event::poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => {
                // Log: the system is out of memory; a pause lies between.
                log::error!("switch: cannot wait: {errno}");
                std::thread::sleep(PAUSE);
            }
        }
    }
}
