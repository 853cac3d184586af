//! The switch of a network: one link to the outside, and ports that are told apart by Ethernet address.
//!
//! A frame to the address of a port goes to that port, one to a group goes to all others and to the uplink, and one to
//! an address that no port has goes to the uplink. Addresses are given, not learned: no port gets what is for another,
//! whatever it sends.
//!
//! A switch with a *hairpin* sends all that its ports send to the uplink, and brings back what comes from there.
//!
//! A port that is alone reads the uplink itself: nothing stands between them but a look at the destination. From the
//! second on a thread reads it, and has each port take its frames there and then, if that can ([`LinkReceiver`]) and
//! has not had more than its share of that thread's time. Otherwise, and for what ports send each other, each has a
//! queue. All queues are bounded, and of each the senders have shares: who sends more than a port takes loses its own
//! frames. What a port has for the uplink waits there for room, and what is behind it as well, unless the uplink takes
//! nothing for a second: then its frames are lost. Ports come and go at any time ([`Readiness::changed`]).
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

/// The switch of a network.
#[derive(Debug)]
pub struct Switch(Arc<Shared>);

/// A port at one moment.
#[derive(Clone, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(Serialize))]
pub struct SwitchPortInspect {
    /// Its address.
    pub mac: MacAddr,
    /// It gets frames to addresses that no port has.
    pub flood: bool,
    /// Frames that wait for it.
    pub queued_frames: Snapshot<usize>,
    /// What these cost, in bytes, of the capacity of the queue.
    pub queued_bytes: Snapshot<usize>,
    /// Frames that were dropped because the queue was full.
    pub dropped_full: u64,
}

/// A switch at one moment.
#[derive(Clone, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(Serialize))]
pub struct SwitchInspect {
    /// The way to the outside.
    pub uplink: Option<LinkInspect>,
    /// Its ports, by address.
    pub ports: Snapshot<Vec<SwitchPortInspect>>,
    /// Ports that wait for room in the uplink.
    pub waiting_for_uplink: usize,
}

impl Switch {
    /// A switch with an uplink, or without one for a network that ends here, whose packets have at most `mtu` bytes.
    ///
    /// # Errors
    /// There are no descriptors left.
    pub fn new(uplink: Option<Arc<dyn Link>>, mtu: u32) -> io::Result<Self> {
        Ok(Self(Arc::new(Shared::new(uplink, mtu, None, false)?)))
    }

    /// A switch whose uplink is read by [`Self::service`] when it has several ports, in the time of `clock`.
    ///
    /// # Errors
    /// There are no descriptors left.
    pub fn without_thread(uplink: Option<Arc<dyn Link>>, mtu: u32, clock: Arc<dyn Clock>) -> io::Result<Self> {
        Ok(Self(Arc::new(Shared::new(uplink, mtu, Some(clock), false)?)))
    }

    /// A switch whose ports reach each other only through the uplink, whose other end sends frames back (the reflective
    /// relay of IEEE 802.1Qbg, VEPA).
    ///
    /// # Errors
    /// There are no descriptors left.
    pub fn hairpin(uplink: Arc<dyn Link>, mtu: u32) -> io::Result<Self> {
        Ok(Self(Arc::new(Shared::new(Some(uplink), mtu, None, true)?)))
    }

    /// The same as [`Self::without_thread`] is to [`Self::new`].
    ///
    /// # Errors
    /// There are no descriptors left.
    pub fn hairpin_without_thread(uplink: Arc<dyn Link>, mtu: u32, clock: Arc<dyn Clock>) -> io::Result<Self> {
        Ok(Self(Arc::new(Shared::new(Some(uplink), mtu, Some(clock), true)?)))
    }

    /// Adds a port for the station with the address `mac`. It is there until it is [unplugged](SwitchPort::unplug) or
    /// dropped.
    ///
    /// # Errors
    /// The address is that of another port or of a group, or the system refuses.
    pub fn port(&self, mac: MacAddr, unknown: UnknownUnicast) -> Result<Arc<SwitchPort>, SwitchError> {
        Ok(Arc::new(SwitchPort::new(Arc::clone(&self.0), self.0.plug(mac, unknown)?)))
    }

    /// Takes the port with this address away, if there is one, although somebody may still hold it.
    pub fn unplug(&self, mac: MacAddr) {
        let port = self.0.ports.read().get(mac);
        if let Some(port) = port {
            self.0.unplug(&port);
        }
    }

    /// The uplink wants to be waited for in another way than it said last.
    pub fn uplink_changed(&self) {
        self.0.topology_changed();
    }

    /// Moves what has come from the uplink to the ports, without waiting. Returns `true` if there may be more. Does
    /// nothing while a single port does it itself.
    pub fn service(&self) -> bool {
        self.0.service()
    }

    /// Describes itself. Waits for nobody.
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

    /// What the uplink counts, and what came from it for nobody.
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
        // Ports that are left have no switch any more.
        self.0.close();
    }
}
