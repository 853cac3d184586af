//! Receive path from the link to the two functions of the device.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use pvrdma_base::EndOnPanic;
use pvrdma_link::{Frames, Link};
use pvrdma_packet::Ethernet;
use pvrdma_verbs_types::Qpn;
use rustix::event::{PollFd, PollFlags, Timespec};

use super::arrivals::Batch;
use super::classify::{foreign_destination, rdma_destination};
use super::counters::PortCounters;
use super::outgoing::{Claim, claim, vlans};
use super::receive_queue::{Distribution, Part, ReceiveQueue};
use super::{PASS_BYTES, Port, RECEIVE, RoceReceiver};

/// Size of a batch from which on the link is expected to hold more frames. The unit is bytes, because links deliver
/// only a few super-frames at a time.
const FULL_BYTES: usize = 128 << 10;

impl Port {
    /// Does all work that needs no waiting. Returns `true` if there may be more.
    pub(crate) fn service(&self) -> bool {
        let _guard = EndOnPanic::new("a port");
        let came = self.read();
        let mut busy = came.as_ref().is_some_and(|came| !came.frames.is_empty());
        for queue in self.queues.iter() {
            busy |= queue.empty(|receiver, parts, resumed| {
                parts.iter().for_each(|part| self.give(part, receiver));
                receiver.respond(self, resumed, PASS_BYTES)
            });
        }
        if let Some(came) = came {
            self.arrivals.put_back(came);
        }
        busy | self.nic.as_ref().is_some_and(|nic| self.read_nic(nic))
    }

    /// Reads a batch and passes each frame to its function. Reads nothing if another thread reads now, or if there is
    /// no room.
    fn read(&self) -> Option<Arc<Batch>> {
        let _order = self.reading.try_lock()?;
        self.uplink.flush();
        if let Some(nic) = &self.nic {
            nic.flush();
        }
        if self.queues.are_many() && self.queues.iter().any(ReceiveQueue::is_full) {
            return None;
        }
        let came = self.arrivals.fill(|frames| {
            self.uplink.link.receive(frames, RECEIVE);
            self.drop_if_down(frames);
        });
        let full = came.frames.len() >= RECEIVE || came.frames.bytes() >= FULL_BYTES;
        if full && self.queues.are_many() {
            self.helpers.call();
        }
        let mut passed = self.buffer();
        let untouched = self.sort(&came, &mut passed);
        let frames = if untouched { &came.frames } else { &passed };
        match &self.nic {
            Some(nic) => self.pass(nic, frames, &self.counters.passed_in),
            None => PortCounters::add(&self.counters.passed_dropped, frames.len() as u64),
        }
        passed.clear();
        self.send(passed);
        self.batches.fetch_add(1, Ordering::Relaxed);
        Some(came)
    }

    /// Puts the frames for the RDMA function into its receive queues. Returns `true` if all frames are for the network
    /// function and pass unchanged. Otherwise those that are for it are appended to `passed`.
    fn sort(&self, came: &Arc<Batch>, passed: &mut Frames) -> bool {
        if came.frames.is_empty() {
            return true;
        }
        let attached = self.is_attached();
        let (mut distribution, mut untouched) = (Distribution::of(came), true);
        for (index, (frame, offload)) in came.frames.iter_with_offloads(0).enumerate() {
            let destination = self.destination(frame).filter(|_| attached);
            if untouched && (destination.is_some() || !self.policy.enters_as_it_is(frame)) {
                untouched = false;
                for (frame, offload) in came.frames.iter_with_offloads(0).take(index) {
                    passed.push_with_offload(frame, offload);
                }
            }
            if let Some(qpn) = destination {
                distribution.add(self.queues.of(qpn), index);
                continue;
            }
            self.note_stations(frame);
            if !untouched {
                self.count_violation(self.policy.incoming((frame, offload), passed));
            }
        }
        distribution.finish();
        untouched
    }

    /// Returns the queue pair that a frame is for, or `None` if it is for the network function.
    #[inline]
    fn destination(&self, frame: &[u8]) -> Option<Qpn> {
        let destination = rdma_destination(frame, self.mac);
        if destination.is_some() || frame.first_chunk() == Some(&self.mac.0) {
            return destination;
        }
        self.foreign(frame)
    }

    /// Returns the queue pair of a RoCE frame to an Ethernet address other than the device's. Peers send such frames if
    /// the guest's IP address is at another Ethernet address, because the guest changed the address of its network
    /// function or uses a macvlan or a bond.
    fn foreign(&self, frame: &[u8]) -> Option<Qpn> {
        let (qpn, address) = foreign_destination(frame, self.mac)?;
        if !self.addresses.has_bound(self.mac, address) {
            return None;
        }
        if self.policy.rules.forged.allow_mac() {
            return Some(qpn);
        }
        PortCounters::bump(&self.counters.wire_foreign_mac);
        let (mac, (at, _)) = (self.mac, address);
        self.log.warn(
            module_path!(),
            "port",
            format_args!("{mac}: RoCE for {at} comes to another Ethernet address, see forged-transmits=mac"),
        );
        None
    }

    /// Returns `true` if frames have arrived that a queue pair may not have got yet.
    pub(crate) fn has_unread(&self, qpn: Qpn) -> bool {
        // The checks follow the order in which frames move (link, batch, queue), so a frame that moves between two
        // checks is not missed.
        let readable = self.uplink.link.readiness().readable.is_some_and(|readable| {
            let mut fds = [PollFd::from_borrowed_fd(readable.as_fd(), PollFlags::IN)];
            rustix::event::poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
        });
        readable || self.reading.is_locked() || self.queues.of(qpn).is_in_use()
    }

    /// Returns `true` if an RDMA function is attached to the port.
    pub(super) fn is_attached(&self) -> bool {
        self.function.lock().as_ref().is_some_and(|function| function.strong_count() > 0)
    }

    fn give(&self, part: &Part, receiver: &mut dyn RoceReceiver) {
        if self.is_link_down() {
            return self.counters.frames_dropped_link_down.add(part.len() as u64);
        }
        receiver.receive(self, &mut part.arrivals());
    }

    /// Records the addresses that hosts beyond the uplink announce.
    fn note_stations(&self, frame: &[u8]) {
        let Claim::Station(station) = claim(frame) else { return };
        let Ok((ethernet, ..)) = Ethernet::parse(frame) else { return };
        for gid in station.addresses.into_iter().flatten() {
            // A tag behind that of a priority is the VLAN of the frame.
            let address = (gid, vlans(frame).next());
            if ethernet.source == self.mac {
                self.addresses.twin(self.mac, address);
            } else {
                self.addresses.seen(address, ethernet.source);
            }
        }
    }
}
