//! Parsers for the headers of a frame (Ethernet, IP, TCP, UDP, ARP, neighbour discovery), and the Internet checksum.
//! The crate is `no_std`, does not allocate for a packet and does no I/O. With the feature `serde`, addresses are
//! serialized as text.
//!
//! [`Ethernet::parse`] splits a frame into a header, with its optional VLAN tag, and a payload; [`Ethernet::to_bytes`]
//! and [`Ethernet::tag_bytes`] encode a header. [`Ethernet::behind_tags`] looks behind several tags.
//!
//! There are two kinds of parsers, because some users require a well-formed packet and others must judge any packet:
//! - [`IpPacket`] is a packet whose lengths all agree, with [`Transport`] for its TCP or UDP header. Checksum and
//!   segmentation offloads write at its offsets.
//! - [`Ipv4Header`], [`Ipv6Header`], [`Extension`], [`UdpHeader`] and [`TcpHeader`] read single fields of a packet that
//!   may be malformed or cut off. Guards decide with them about packets that some receiver may accept.
//!
//! [`Arp`] and [`Discovery`] are messages with which hosts announce their addresses.
//!
//! [`Checksum`] computes or verifies the Internet checksum over the pieces of a packet. [`field`] reads and writes
//! fields of headers. No input can cause a panic: a field outside a header of fixed size is a compile error, and all
//! other accesses are checked.
//!
//! Layouts are those of IEEE 802.3 and 802.1Q, and of RFC 791 (IPv4), 8200 (IPv6), 768 (UDP), 9293 (TCP),
//! 826 (ARP) and 4861 (neighbour discovery); the checksum is that of RFC 1071.
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

mod arp;
pub mod checksum;
mod discovery;
mod error;
mod ethernet;
pub mod field;
mod ip;
mod ipv4;
mod ipv6;
mod mac_addr;
mod protocol;
mod transport;

pub use arp::Arp;
pub use checksum::Checksum;
pub use discovery::{Discovery, DiscoveryOption, DiscoveryOptions};
pub use error::Truncated;
pub use ethernet::{EtherType, Ethernet, Vlan};
pub use ip::{IpPacket, IpVersion, Transport};
pub use ipv4::Ipv4Header;
pub use ipv6::{Extension, ExtensionKind, Ipv6Header};
pub use mac_addr::MacAddr;
pub use protocol::{PROTOCOL_TCP, PROTOCOL_UDP, ROCE_PORT};
pub use transport::{TcpHeader, UdpHeader};
