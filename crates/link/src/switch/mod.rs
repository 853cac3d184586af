//! Ethernet switch of a network: one uplink, and ports with fixed MAC addresses.
//!
//! A frame to the address of a port goes to that port. A frame to a group goes to all other ports and to the uplink. A
//! frame to an address that no port has goes to the uplink. Addresses are configured, not learned: no port can get the
//! frames of another one, whatever it sends.
//!
//! A station that moves between hosts has a port at both for a while. While it is at the other host, its port here is
//! *silent* ([`Switch::silence`]): frames of other ports to its address go to the uplink as well. The first frame that
//! the port sends ends this.
//!
//! A switch with a *hairpin* sends all frames of its ports to the uplink, and delivers the frames that come back from
//! there.
//!
//! With one port, the port reads the uplink itself, and the switch only checks the destination. With several ports, a
//! thread reads the uplink. It delivers frames inline if the port has a receiver ([`LinkReceiver`]) that has not used
//! up its share of that thread's time. Otherwise, and for frames between ports, each port has a queue. All queues are
//! bounded, and each sender has a share of a queue: a sender that exceeds the capacity of a port loses its own frames.
//! Frames for the uplink wait in the sender's own queue until there is room, together with the frames behind them. If
//! the uplink takes no frame for a second, they are dropped instead. Ports can be added and removed at any time
//! ([`Readiness::changed`]).
//!
//! [`LinkReceiver`]: crate::LinkReceiver
//! [`Readiness::changed`]: crate::Readiness::changed

mod counters;
mod direct;
mod forward;
mod mailbox;
mod port;
mod shared;
mod stall;
#[cfg(test)]
mod tests;

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use pvrdma_base::{Counter, Snapshot};
use pvrdma_packet::MacAddr;
#[cfg(feature = "serde")]
use serde::Serialize;

use crate::{Clock, Link, LinkInspect};
use mailbox::Mailbox;
use shared::Shared;

pub use counters::all_counters;
pub use mailbox::UnknownUnicast;
pub use port::SwitchPort;
pub use shared::SwitchError;

/// Ethernet switch of a network.
#[derive(Debug)]
pub struct Switch(Arc<Shared>);

/// State of a port at one moment.
#[derive(Clone, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(Serialize))]
pub struct SwitchPortInspect {
    /// Address of the port.
    pub mac: MacAddr,
    /// The port gets frames to addresses that no port has.
    pub flood: bool,
    /// Number of frames in the queue of the port.
    pub queued_frames: Snapshot<usize>,
    /// Their cost in bytes, out of the capacity of the queue.
    pub queued_bytes: Snapshot<usize>,
    /// Number of frames that were dropped because the queue was full.
    pub dropped_full: u64,
}

/// State of a switch at one moment.
#[derive(Clone, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(Serialize))]
pub struct SwitchInspect {
    /// State of the uplink.
    pub uplink: Option<LinkInspect>,
    /// The ports, sorted by address.
    pub ports: Snapshot<Vec<SwitchPortInspect>>,
    /// Number of ports that wait for room in the uplink.
    pub waiting_for_uplink: usize,
}

impl Switch {
    /// Creates a switch with an uplink, or without one for a network inside this process. IP packets between ports have
    /// at most `mtu` bytes.
    ///
    /// # Errors
    /// The process has no descriptors left.
    pub fn new(uplink: Option<Arc<dyn Link>>, mtu: u32) -> io::Result<Self> {
        Ok(Self(Arc::new(Shared::new(uplink, mtu, None, false)?)))
    }

    /// Creates a switch without a thread: with several ports, [`Self::service`] reads the uplink. Time comes from
    /// `clock`.
    ///
    /// # Errors
    /// The process has no descriptors left.
    pub fn without_thread(uplink: Option<Arc<dyn Link>>, mtu: u32, clock: Arc<dyn Clock>) -> io::Result<Self> {
        Ok(Self(Arc::new(Shared::new(uplink, mtu, Some(clock), false)?)))
    }

    /// Creates a switch whose ports reach each other only through the uplink, which must send their frames back (the
    /// reflective relay of IEEE 802.1Qbg, VEPA).
    ///
    /// # Errors
    /// The process has no descriptors left.
    pub fn hairpin(uplink: Arc<dyn Link>, mtu: u32) -> io::Result<Self> {
        Ok(Self(Arc::new(Shared::new(Some(uplink), mtu, None, true)?)))
    }

    /// Creates a switch like [`Self::hairpin`] without a thread; see [`Self::without_thread`].
    ///
    /// # Errors
    /// The process has no descriptors left.
    pub fn hairpin_without_thread(uplink: Arc<dyn Link>, mtu: u32, clock: Arc<dyn Clock>) -> io::Result<Self> {
        Ok(Self(Arc::new(Shared::new(Some(uplink), mtu, Some(clock), true)?)))
    }

    /// Adds a port for the host with the address `mac`. The port exists until it is [unplugged](SwitchPort::unplug) or
    /// dropped.
    ///
    /// # Errors
    /// The address is that of another port or of a group, or the system refuses.
    pub fn port(&self, mac: MacAddr, unknown: UnknownUnicast) -> Result<Arc<SwitchPort>, SwitchError> {
        Ok(Arc::new(SwitchPort::new(Arc::clone(&self.0), self.0.plug(mac, unknown)?)))
    }

    /// Records that the station with this address may be at another host. Frames to it go to the uplink as well, until
    /// its port sends. Does nothing if no port has the address.
    pub fn silence(&self, mac: MacAddr) {
        if let Some(port) = self.0.ports.read().get(mac) {
            port.falls_silent();
        }
    }

    /// Makes all waiters query the readiness of the uplink again, because it has changed.
    pub fn uplink_changed(&self) {
        self.0.topology_changed();
    }

    /// Moves pending frames from the uplink to the ports, without waiting. Returns `true` if there may be more. Does
    /// nothing while a single port reads the uplink itself.
    pub fn service(&self) -> bool {
        self.0.service()
    }

    /// Describes the switch. Never blocks.
    pub fn inspect(&self) -> SwitchInspect {
        let ports = self.0.ports.try_read().map(|ports| {
            let mut list: Vec<_> = ports.all().map(|mailbox| inspect(mailbox)).collect();
            list.sort_by_key(|port| port.mac.0);
            list
        });
        SwitchInspect {
            uplink: self.0.uplink.as_ref().map(|uplink| uplink.inspect()),
            ports: ports.into(),
            waiting_for_uplink: self.0.refused.load(Ordering::Relaxed),
        }
    }

    /// Returns the counters of the uplink, and of frames from it that no port got.
    pub fn counters(&self) -> Vec<Counter> {
        let mut list = self.0.counters.list();
        list.extend(self.0.uplink.iter().flat_map(|uplink| uplink.counters()));
        list
    }
}

fn inspect(mailbox: &Mailbox) -> SwitchPortInspect {
    let load = mailbox.load().taken();
    SwitchPortInspect {
        mac: mailbox.mac,
        flood: mailbox.unknown == UnknownUnicast::Flood,
        queued_frames: load.map(|(frames, _)| frames).into(),
        queued_bytes: load.map(|(_, bytes)| bytes).into(),
        dropped_full: mailbox.counters.switch_dropped_full.get(),
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        // Ports that still exist are detached: they receive nothing, and frames sent through them are lost.
        self.0.close();
    }
}
