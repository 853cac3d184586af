//! A port: the link of one host.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use pvrdma_base::{Counter, Snapshot};
use pvrdma_packet::MacAddr;

use super::forward::{Forwarder, Local, Ports, is_from, is_group};
use super::mailbox::{Mailbox, UnknownUnicast};
use super::shared::Shared;
use super::stall;
use crate::{Frames, Link, LinkInspect, LinkReceiver, Offload, Readiness};

/// Bytes that a port sends to the uplink in one call while another port waits for room there.
pub(super) const QUANTUM: usize = 256 << 10;

/// A port of a switch.
#[derive(Debug)]
pub struct SwitchPort {
    shared: Arc<Shared>,
    mailbox: Arc<Mailbox>,
    /// Buffer for those of the offered frames that go to the uplink.
    scratch: Mutex<Frames>,
}

impl SwitchPort {
    pub(super) fn new(shared: Arc<Shared>, mailbox: Arc<Mailbox>) -> Self {
        Self { shared, mailbox, scratch: Mutex::default() }
    }

    /// Returns the address of the host behind the port.
    pub fn address(&self) -> MacAddr {
        self.mailbox.mac
    }

    /// Removes the port from the switch. It gets no more frames, and frames sent through it are lost.
    pub fn unplug(&self) {
        self.shared.unplug(&self.mailbox);
        self.mailbox.direct.set(None);
    }

    /// Records that the port waits for room in the uplink, or no longer does. The caller holds the lock of the ports,
    /// and this port is one of them.
    fn set_refused(&self, refused: bool) {
        self.shared.set_refused(&self.mailbox, refused);
    }

    /// Returns `true` if another port waits for room in the uplink.
    fn others_wait(&self) -> bool {
        self.shared.refused.load(Ordering::Relaxed) > usize::from(self.mailbox.refused.load(Ordering::Relaxed))
    }

    /// Records that the uplink took `taken` of the offered frames. Returns `false` if the others are lost, because the
    /// uplink has been stalled for too long.
    fn may_wait(&self, taken: usize, offered: usize) -> bool {
        let stall = &self.shared.stall;
        if taken >= offered {
            // An empty batch tells nothing about the uplink.
            if offered > 0 {
                stall.took_all();
            }
            return true;
        }
        if !stall.refused(taken > 0, self.shared.clock.now()) {
            return true;
        }
        self.mailbox.counters.switch_dropped_uplink.add((offered - taken) as u64);
        false
    }

    /// Sends frames to other ports and to the uplink.
    fn forward(&self, ports: &Ports, frames: &Frames, from: usize) -> usize {
        let list: Vec<_> = frames.iter_from(from).map(|frame| ports.local(frame, self.mailbox.id)).collect();
        let taken = match &self.shared.uplink {
            Some(uplink) => self.send_up(&**uplink, &list, frames, from),
            None => list.len(),
        };
        let counters = &self.mailbox.counters;
        let mut forwarder = Forwarder::new(ports, self.mailbox.id);
        for ((frame, offload), &local) in frames.iter_with_offloads(from).zip(&list).take(taken) {
            if frame.len() > self.shared.longest && offload.longest(frame) > self.shared.longest {
                if !matches!(local, Local::Unknown) {
                    counters.switch_dropped_too_long.increment();
                }
            } else if !(forwarder.deliver(frame, offload, local) || local.goes_up() && self.shared.uplink.is_some()) {
                counters.switch_dropped_unknown.increment();
            }
        }
        taken
    }

    /// Sends the frames for the uplink. Returns the number of frames that the caller need not offer again because of
    /// the uplink.
    fn send_up(&self, uplink: &dyn Link, list: &[Local<'_>], frames: &Frames, from: usize) -> usize {
        let limit = if self.others_wait() { QUANTUM } else { usize::MAX };
        let taken = if limit == usize::MAX && list.iter().all(Local::goes_up) {
            let taken = uplink.send(frames, from);
            if self.may_wait(taken, list.len()) { taken } else { list.len() }
        } else {
            let scratch = &mut *self.scratch.lock();
            scratch.clear();
            // This is the index of the first frame that is not offered to the uplink in this call.
            let mut end = list.len();
            for (index, ((frame, offload), local)) in frames.iter_with_offloads(from).zip(list).enumerate() {
                if scratch.bytes() >= limit {
                    end = index;
                    break;
                }
                if local.goes_up() {
                    scratch.push_with_offload(frame, offload);
                }
            }
            let left = uplink.send(scratch, 0);
            let refused = list.iter().take(end).enumerate().filter(|(_, local)| local.goes_up()).nth(left);
            let waits = self.may_wait(left, scratch.len());
            refused.filter(|_| waits).map_or(end, |(index, _)| index)
        };
        self.set_refused(taken < list.len());
        taken
    }
}

impl Drop for SwitchPort {
    fn drop(&mut self) {
        self.unplug();
    }
}

impl Link for SwitchPort {
    fn receive(&self, frames: &mut Frames, most: usize) {
        let ports = self.shared.ports.read();
        // Frames in the queue arrived before those that the uplink has now, so they are taken first.
        if self.mailbox.take(frames, most) || !ports.is_sole(&self.mailbox) {
            return;
        }
        let Some(uplink) = &self.shared.uplink else { return };
        let before = frames.len();
        uplink.receive(frames, most);
        if self.mailbox.unknown == UnknownUnicast::Drop && frames.len() > before {
            let mac = self.mailbox.mac.0;
            let own = self.mailbox.mac;
            let dropped = frames.retain_from(before, |frame| {
                (frame.starts_with(&mac) || is_group(frame)) && !(self.shared.hairpin && is_from(frame, own))
            });
            if dropped > 0 {
                self.mailbox.counters.switch_dropped_unknown.add(dropped as u64);
            }
        }
    }

    fn send(&self, frames: &Frames, from: usize) -> usize {
        let ports = self.shared.ports.read();
        if from < frames.len() {
            self.mailbox.speaks();
        }
        match &self.shared.uplink {
            Some(uplink) if ports.is_sole(&self.mailbox) || self.shared.hairpin && ports.contains(&self.mailbox) => {
                let taken = uplink.send(frames, from);
                self.set_refused(taken < frames.len().saturating_sub(from));
                taken
            }
            _ if ports.contains(&self.mailbox) => self.forward(&ports, frames, from),
            _ => {
                let all = frames.len().saturating_sub(from);
                self.mailbox.counters.switch_dropped_unknown.add(all as u64);
                all
            }
        }
    }

    /// Ports accept frames with any offload, and `GsoLink` does the work in front of the uplink.
    fn takes(&self, _frame: &[u8], _offload: Offload) -> bool {
        true
    }

    fn unsent(&self) -> bool {
        // A port that was removed need not wait for frames that others have left in the uplink.
        self.shared.ports.read().contains(&self.mailbox)
            && self.shared.uplink.as_ref().is_some_and(|uplink| uplink.unsent())
    }

    fn line(&self) -> Option<usize> {
        Some(Arc::as_ptr(&self.shared).addr())
    }

    fn readiness(&self) -> Readiness {
        let event = Some(self.mailbox.event());
        let ports = self.shared.ports.read();
        let uplink = || self.shared.uplink.as_ref().map(|uplink| uplink.readiness()).unwrap_or_default();
        if ports.is_sole(&self.mailbox) {
            return Readiness { changed: event, ..uplink() };
        }
        let writable: Option<Arc<OwnedFd>> = if ports.contains(&self.mailbox) { uplink().writable } else { None };
        // A port that waits for room must retry after this time even if the uplink still has none, because its frames
        // are then dropped.
        let wait = self.mailbox.refused.load(Ordering::Relaxed).then_some(stall::LIMIT);
        Readiness { readable: event, writable, wait, ..Readiness::default() }
    }

    fn set_receiver(&self, receiver: Weak<dyn LinkReceiver>) {
        self.mailbox.direct.set(Some(receiver));
    }

    fn leaves_process(&self) -> bool {
        self.shared.uplink.as_ref().is_some_and(|uplink| uplink.leaves_process())
    }

    fn inspect(&self) -> LinkInspect {
        match &self.shared.uplink {
            Some(uplink) => uplink.inspect(),
            None => LinkInspect { kind: "switch", name: String::new(), peers: Vec::new(), up: Snapshot::Taken(true) },
        }
    }

    fn lost(&self) -> u64 {
        let uplink = self.shared.uplink.as_ref().map_or(0, |uplink| uplink.lost());
        uplink.saturating_add(self.mailbox.counters.switch_dropped_full.get())
    }

    fn counters(&self) -> Vec<Counter> {
        let mut list = self.mailbox.counters.list();
        list.extend(self.shared.uplink.iter().flat_map(|uplink| uplink.counters()));
        list
    }

    fn detach(&self) {
        self.unplug();
    }
}
