//! Ethernet links: where frames leave the process and where they come from.
//!
//! A [`Link`] moves batches of whole frames (without FCS) and never blocks. It says what to wait for ([`Readiness`]),
//! so that one thread can sleep until any of its links has something. Links have no memory of their own to speak of:
//! what cannot be sent now stays with the caller, what cannot be sent at all is lost and counted, as on a cable. Time
//! comes from a [`Clock`], so that tests can set it.
//!
//! Each kind of link has two halves. One needs privileges or paths: it opens, binds and sets options. The other is the
//! link, made `from_` the descriptors that the first half gave; from then on it only reads, writes and waits. What it
//! needs anew (a connection that ended, an interface that was deleted) it has from a [`Connector`]. `open`, `bind`,
//! `listen` and `connect` do both at once, for a process that is allowed to; [`link_spec`] names any kind in words.
//!
//! * [`af_packet`]: an interface of this host;
//! * [`unix`]: the socket back ends of QEMU, `stream` and `dgram`;
//! * [`memory`]: two ends in one process;
//! * [`vxlan`]: a tunnel through UDP;
//! * [`tls`]: a connection to another host, encrypted;
//! * [`tap`]: a virtual network interface of the host;
//! * [`switch`]: one of the others, shared by several stations;
//! * [`fault`]: any other link, with injected loss, duplicates, reordering, corruption and delay.
//!
//! [`InterfaceWatch`] tells whether an interface of this host carries anything.

pub mod af_packet;
mod bell;
mod clock;
mod connector;
pub mod fault;
mod frames;
mod framing;
mod gso;
mod interface_name;
mod interface_watch;
pub mod link_spec;
pub mod memory;
#[cfg(test)]
mod namespace;
mod offload;
pub mod switch;
pub mod tap;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod tls;
pub mod unix;
pub mod vxlan;

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};
use std::time::Duration;

use pvrdma_verbs::{Counter, MacAddr, Snapshot};
use serde::Serialize;

pub use bell::Bell;
pub use clock::{Clock, ManualClock, MonotonicClock};
pub use connector::{Connector, NoConnector};
pub use frames::Frames;
pub use gso::GsoLink;
pub use interface_name::InterfaceName;
pub use interface_watch::{InterfaceState, InterfaceWatch};
pub use offload::Offload;

/// Everything that links of any kind count, at zero.
pub fn all_counters() -> Vec<Counter> {
    let mut list = vxlan::all_counters();
    list.extend(tls::all_counters());
    list.extend(switch::all_counters());
    list
}

/// Longest frame that a link carries, in bytes: 64 KiB, Ethernet header and tag.
pub const MAX_LINK_FRAME: usize = 65_536 + 18;

/// What to wait for before a link is worth another call.
#[derive(Clone, Debug, Default)]
pub struct Readiness {
    /// Frames or connections come when this is readable.
    pub readable: Option<Arc<OwnedFd>>,
    /// There is room again when this is writable.
    pub writable: Option<Arc<OwnedFd>>,
    /// Call again after this time, whatever the descriptors say.
    pub wait: Option<Duration>,
    /// Call again when this is readable: what to wait for may be something else now.
    pub changed: Option<Arc<OwnedFd>>,
}

/// A link at one moment.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct LinkInspect {
    /// What it is: the name of its module.
    pub kind: &'static str,
    /// Its interface, address or path. Empty if it has none.
    pub name: String,
    /// Where the other ends are, as far as they are configured.
    pub peers: Vec<String>,
    /// Frames can pass: the interface is there, or somebody is connected.
    pub up: Snapshot<bool>,
}

/// Who reads the frames of a link: its thread, when the link is readable.
pub trait LinkReader: Send + Sync {
    /// Reads what there is on the calling thread, which saves waking the other, and without waiting: if somebody is
    /// reading, nothing happens.
    fn read(&self);
}

/// Who gets the frames that come on a link. Whoever has read them for it may have it take them on his own thread, which
/// saves a copy and waking the other; it [receives](Link::receive) all others.
pub trait LinkReceiver: Send + Sync {
    /// Takes the frames of `list`, which have come behind all that it received, as far as that can be done on the
    /// calling thread without waiting for another one. Returns how many it took. The rest comes in the ordinary way.
    fn take(&self, frames: &Frames, list: &[usize]) -> usize;
}

/// An end of an Ethernet link. All methods may be called from several threads.
pub trait Link: Send + Sync + fmt::Debug {
    /// Appends frames that have come, at most `most`.
    fn receive(&self, frames: &mut Frames, most: usize);

    /// Sends the frames from index `from` on, in order, and returns how many the link took. Fewer than all: there is no
    /// room now. The rest is untouched and may be presented again, or others in its place.
    ///
    /// Something may be left to be done to a frame only if the link [takes](Self::takes) it so; a [`GsoLink`] in front
    /// takes everything.
    fn send(&self, frames: &Frames, from: usize) -> usize;

    /// Returns `true` if the link takes a frame to which this is left to be done.
    fn takes(&self, _frame: &[u8], _offload: Offload) -> bool {
        false
    }

    /// Returns `true` if something that was taken is still in here for want of room. It leaves with the next call of
    /// [`Self::send`], if only of no frames, when the link is writable.
    fn unsent(&self) -> bool {
        false
    }

    /// What to wait for.
    fn readiness(&self) -> Readiness;

    /// Names who reads. A link may have him read on a thread that makes frames for it; it is made readable all the same
    /// if something is left.
    fn set_reader(&self, _reader: Weak<dyn LinkReader>) {}

    /// Names who gets the frames that come, if he takes them from other threads, too. When this returns nobody has the
    /// one before take any more.
    fn set_receiver(&self, _receiver: Weak<dyn LinkReceiver>) {}

    /// Frames to these addresses and to groups are wanted. A link may bring others, too.
    ///
    /// # Errors
    /// The system refuses.
    fn set_addresses(&self, _addresses: &[MacAddr]) -> io::Result<()> {
        Ok(())
    }

    /// Frames that were taken and got lost in here, in either direction.
    fn lost(&self) -> u64;

    /// Describes itself. Waits for nobody.
    fn inspect(&self) -> LinkInspect;

    /// What else this kind of link counts.
    fn counters(&self) -> Vec<Counter> {
        Vec::new()
    }
}

impl<L: Link + ?Sized> Link for Arc<L> {
    fn receive(&self, frames: &mut Frames, most: usize) {
        (**self).receive(frames, most);
    }

    fn send(&self, frames: &Frames, from: usize) -> usize {
        (**self).send(frames, from)
    }

    fn takes(&self, frame: &[u8], offload: Offload) -> bool {
        (**self).takes(frame, offload)
    }

    fn unsent(&self) -> bool {
        (**self).unsent()
    }

    fn readiness(&self) -> Readiness {
        (**self).readiness()
    }

    fn set_reader(&self, reader: Weak<dyn LinkReader>) {
        (**self).set_reader(reader);
    }

    fn set_receiver(&self, receiver: Weak<dyn LinkReceiver>) {
        (**self).set_receiver(receiver);
    }

    fn set_addresses(&self, addresses: &[MacAddr]) -> io::Result<()> {
        (**self).set_addresses(addresses)
    }

    fn lost(&self) -> u64 {
        (**self).lost()
    }

    fn inspect(&self) -> LinkInspect {
        (**self).inspect()
    }

    fn counters(&self) -> Vec<Counter> {
        (**self).counters()
    }
}
