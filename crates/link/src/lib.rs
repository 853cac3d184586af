//! Ethernet links without sockets: the trait that moves frames, and the parts that need no privileges.
//!
//! A [`Link`] moves batches of complete frames (without FCS) and never blocks. [`Readiness`] lists the descriptors and
//! the timeout to wait for, so that one thread can sleep until any of its links has work. Links buffer almost no
//! frames: a frame that cannot be sent now stays with the caller, and a frame that can never be sent is lost and
//! counted, as on a cable. Time comes from a [`Clock`], so that tests can set it.
//!
//! * [`Frames`] is a batch of frames in one buffer, each with an [`Offload`]: the checksum or segmentation that its
//!   sender did not do. A [`GsoLink`] does this work in front of a link that does not accept such frames.
//! * [`memory`] is a cable between two ends in one process.
//! * [`switch`] shares one link among several hosts.
//! * A [`Connector`] replaces the descriptor of a link that lost it; [`Reconnect`] limits the rate of its calls.
//! * With the feature `fault`, `fault` wraps any link with loss, duplicates, reordering, corruption and delay.
//! * With the feature `testing`, `testing` checks that a frame obeys the rules of its network.
//! * With the feature `serde`, descriptions can be serialized.
//!
//! The links with sockets (packet sockets, tap, VXLAN, TLS, QEMU's sockets) are in `pvrdma-ether-link`.
//!
//! # Example
//!
//! Two hosts at a switch whose uplink is one end of a cable:
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
mod link;
pub mod memory;
pub mod offload;
pub mod switch;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use bell::Bell;
pub use clock::{Clock, ManualClock, MonotonicClock};
pub use connector::{Connector, NoConnector, RETRY, Reconnect};
pub use frames::Frames;
pub use gso::GsoLink;
pub use link::{Link, LinkInspect, LinkReader, LinkReceiver, MAX_LINK_FRAME, Readiness};
pub use offload::Offload;
pub use switch::all_counters;
