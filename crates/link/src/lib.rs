//! Ethernet links without sockets: the trait that moves frames, and the parts that need no privileges.
//!
//! A [`Link`] moves batches of whole frames (without FCS) and never blocks. [`Readiness`] has the descriptors and the
//! time to wait for, so that one thread can sleep until any of its links has something. Links hold almost no frames: a
//! frame that cannot be sent now stays with the caller, a frame that cannot be sent at all is lost and counted, as on a
//! cable. Time comes from a [`Clock`], so that tests can set it.
//!
//! * [`Frames`] is a batch of frames in one buffer, each with an [`Offload`]: the checksum or segmentation that its
//!   sender left to others. A [`GsoLink`] does that work in front of a link that takes no such frames.
//! * [`memory`] is a cable between two ends in one process.
//! * [`switch`] lets several stations share one link.
//! * A [`Connector`] replaces the descriptor of a link that lost it; [`Reconnect`] limits how often it is asked.
//! * With the feature `fault`, `fault` wraps any link with loss, duplicates, reordering, corruption and delay.
//! * With the feature `testing`, `testing` checks that a frame keeps the rules of its network.
//! * With the feature `serde`, descriptions can be serialized.
//!
//! The links with sockets (packet sockets, tap, VXLAN, TLS, QEMU's sockets) are in `pvrdma-ether-link`.
//!
//! # Example
//!
//! Two stations at a switch whose uplink is one end of a cable:
//!
//! ```
//! use std::sync::Arc;
//!
//! use pvrdma_link::switch::{Switch, UnknownUnicast};
//! use pvrdma_link::{Frames, Link, memory};
//! use pvrdma_packet::{EtherType, Ethernet, MacAddr};
//!
//! let [a, b, far] = [1, 2, 3].map(|number| MacAddr([2, 0, 0, 0, 0, number]));
//! let (uplink, cable) = memory::pair(16)?;
//! let switch = Switch::new(Some(Arc::new(uplink)), 1500)?;
//! let port_a = switch.port(a, UnknownUnicast::Drop)?;
//! let port_b = switch.port(b, UnknownUnicast::Drop)?;
//!
//! // One frame for the other station, and one for an address beyond the uplink.
//! let mut frames = Frames::default();
//! for destination in [b, far] {
//!     let header = Ethernet { destination, source: a, vlan: None };
//!     frames.push(&[&header.to_bytes(EtherType::IPV4)[..], &[0; 46]].concat());
//! }
//! assert_eq!(port_a.send(&frames, 0), 2);
//!
//! let (mut at_b, mut outside) = (Frames::default(), Frames::default());
//! port_b.receive(&mut at_b, 64);
//! cable.receive(&mut outside, 64);
//! assert_eq!((at_b.get(0), outside.get(0)), (frames.get(0), frames.get(1)));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod bell;
mod clock;
mod connector;
#[cfg(any(test, feature = "fault"))]
pub mod fault;
mod frames;
mod gso;
pub mod memory;
pub mod offload;
pub mod switch;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};
use std::time::Duration;

use pvrdma_base::{Counter, Snapshot};
use pvrdma_packet::MacAddr;
#[cfg(feature = "serde")]
use serde::Serialize;

pub use bell::Bell;
pub use clock::{Clock, ManualClock, MonotonicClock};
pub use connector::{Connector, NoConnector, RETRY, Reconnect};
pub use frames::Frames;
pub use gso::GsoLink;
pub use offload::Offload;
pub use switch::all_counters;

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
#[derive(Clone, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(Serialize))]
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
    #[inline]
    fn receive(&self, frames: &mut Frames, most: usize) {
        (**self).receive(frames, most);
    }

    #[inline]
    fn send(&self, frames: &Frames, from: usize) -> usize {
        (**self).send(frames, from)
    }

    #[inline]
    fn takes(&self, frame: &[u8], offload: Offload) -> bool {
        (**self).takes(frame, offload)
    }

    #[inline]
    fn unsent(&self) -> bool {
        (**self).unsent()
    }

    #[inline]
    fn readiness(&self) -> Readiness {
        (**self).readiness()
    }

    #[inline]
    fn set_reader(&self, reader: Weak<dyn LinkReader>) {
        (**self).set_reader(reader);
    }

    #[inline]
    fn set_receiver(&self, receiver: Weak<dyn LinkReceiver>) {
        (**self).set_receiver(receiver);
    }

    #[inline]
    fn set_addresses(&self, addresses: &[MacAddr]) -> io::Result<()> {
        (**self).set_addresses(addresses)
    }

    #[inline]
    fn lost(&self) -> u64 {
        (**self).lost()
    }

    #[inline]
    fn inspect(&self) -> LinkInspect {
        (**self).inspect()
    }

    #[inline]
    fn counters(&self) -> Vec<Counter> {
        (**self).counters()
    }
}
