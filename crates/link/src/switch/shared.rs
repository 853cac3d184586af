//! What the ports of a switch share: who is there, and the thread that reads the uplink.

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

/// Bytes before the network header that count towards a frame but not towards the MTU.
const ETHERNET_LEN: usize = 18;
/// Frames that are taken from the uplink at a time.
const RECEIVE: usize = 64;
/// How often the uplink is emptied at most before the first port gets anything.
const STALE_BATCHES: usize = 64;
/// Pause when waiting fails.
const PAUSE: Duration = Duration::from_millis(1);

/// Why there is no port.
#[derive(Debug, Error)]
pub enum SwitchError {
    /// There is one with this address.
    #[error("{0} is the address of another port")]
    InUse(MacAddr),
    /// It is not the address of one station.
    #[error("{0} is the address of a group")]
    Group(MacAddr),
    /// The system refused.
    #[error("cannot add a port")]
    Io(#[from] io::Error),
}

/// Who adds and removes ports.
#[derive(Debug, Default)]
struct Plug {
    last: Source,
    thread: Option<JoinHandle<()>>,
}

/// What was read from the uplink, and the time of whoever reads it.
#[derive(Debug, Default)]
struct Input {
    frames: Frames,
    sorted: Sorted,
    round: Round,
}

/// What the ports of a switch share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) uplink: Option<Arc<dyn Link>>,
    /// Longest frame between ports, in bytes.
    pub(super) longest: usize,
    /// Held for reading while frames are moved.
    pub(super) ports: RwLock<Ports>,
    plug: Mutex<Plug>,
    /// A thread reads the uplink when there are several ports.
    threaded: bool,
    /// Ports reach each other through the uplink only.
    pub(super) hairpin: bool,
    input: Mutex<Input>,
    pub(super) clock: Arc<dyn Clock>,
    waker: Waker<Bell>,
    stopping: AtomicBool,
    /// Ports that wait for room in the uplink.
    pub(super) refused: AtomicUsize,
    pub(super) stall: Stall,
    /// What came from the uplink for nobody.
    pub(super) counters: SwitchCounters,
}

impl Shared {
    /// With a clock, nothing runs by itself.
    pub(super) fn new(
        uplink: Option<Arc<dyn Link>>,
        mtu: u32,
        clock: Option<Arc<dyn Clock>>,
        hairpin: bool,
    ) -> io::Result<Self> {
        // What ports leave to be done is done for links that do not.
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

    /// Takes all ports away.
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
        // A port that is alone from here on reads the uplink itself: all that was read before is where it belongs.
        let input = self.input.lock();
        let mut ports = self.ports.write();
        if !ports.remove(mailbox) {
            return;
        }
        let addresses = ports.addresses();
        drop((ports, input));
        // Somebody may hold the port for a long time. It sends nothing any more, so this stays as it is.
        self.set_refused(mailbox, false);
        self.stop_if_idle(plug);
        if let Err(error) = self.set_addresses(&addresses) {
            // Log: an administrator takes devices away.
            log::warn!("the network still brings frames to {}: {error}", mailbox.mac);
        }
        self.topology_changed();
        // Whoever waits for this port finds that there is nothing to wait for.
        mailbox.signal();
    }

    /// Notes whether a port waits for room in the uplink.
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

    /// Drops what came while there was nobody to take it.
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

    /// Has everybody look at what to wait for.
    pub(super) fn topology_changed(&self) {
        for mailbox in self.ports.read().all() {
            mailbox.signal();
        }
        self.waker.wake();
    }

    /// Starts the thread that reads the uplink.
    fn start(self: &Arc<Self>, plug: &mut Plug) -> io::Result<()> {
        if self.threaded && self.uplink.is_some() && plug.thread.is_none() {
            self.stopping.store(false, Ordering::Release);
            let shared = Arc::clone(self);
            plug.thread = Some(threads::spawn(ThreadKind::Switch, "switch", move || shared.work())?);
        }
        Ok(())
    }

    /// Ends the thread if there are not several ports.
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
            // Not with the ports held: those that take their frames send.
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

    /// Blocks until the uplink has something, or somebody wakes us.
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
