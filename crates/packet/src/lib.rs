//! Ethernet headers and the Internet checksum, as bytes and as values. The crate is `no_std` and does no I/O. With the
//! feature `serde`, addresses are serialized as text.
//!
//! [`Ethernet::parse`] splits a frame into a header, with its optional VLAN tag, and a payload; [`Ethernet::to_bytes`]
//! and [`Ethernet::tag_bytes`] encode a header. [`Checksum`] computes or verifies the Internet checksum over the pieces
//! of a packet. [`field`] reads and writes fields of fixed-size headers; a field outside its header is a compile error,
//! so that no input can cause a panic.
//!
//! Layouts are those of IEEE 802.3 and 802.1Q; the checksum is that of RFC 1071.
//!
//! # Example
//!
//! ```
//! use pvrdma_packet::{EtherType, Ethernet, Vlan};
//!
//! let ethernet = Ethernet {
//!     destination: "52:54:00:00:00:02".parse()?,
//!     source: "52:54:00:00:00:01".parse()?,
//!     vlan: Some(Vlan { pcp: 3, dei: false, vid: 42 }),
//! };
//! let mut frame = ethernet.to_bytes(EtherType::IPV4).to_vec();
//! frame.extend(ethernet.tag_bytes(EtherType::IPV4).into_iter().flatten());
//! frame.extend(*b"payload");
//!
//! let (header, ethertype, payload) = Ethernet::parse(&frame).map_err(|error| error.to_string())?;
//! assert_eq!((header, ethertype, payload), (ethernet, EtherType::IPV4, &b"payload"[..]));
//! assert_eq!(header.vlan_id(), Some(42));
//! # Ok::<(), String>(())
//! ```

#![cfg_attr(not(test), no_std)]

extern crate alloc;

mod checksum;
mod ethernet;
pub mod field;
mod mac_addr;
mod protocol;

pub use checksum::Checksum;
pub use ethernet::{EtherType, Ethernet, Vlan};
pub use mac_addr::MacAddr;
pub use protocol::{IPV6_LEN, PROTOCOL_TCP, PROTOCOL_UDP, ROCE_PORT, UDP_LEN};

/// A frame is too short for this header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[error("truncated in the {0}")]
pub struct Truncated(pub &'static str);
