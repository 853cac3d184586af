//! RoCE v1 and v2 packets, as bytes and as values. No I/O, and no state except one setting ([`choose_crc`]).
//!
//! A packet has two representations. As *bytes* it is one Ethernet frame in a caller's buffer: [`Packet::parse`] checks
//! it once and borrows payload and network header from it; [`FrameWriter`] writes the headers, exposes the payload area
//! to be filled from a scatter/gather list, and finishes the frame. As *values* it is a [`Header`] with every field
//! that a sender chooses, and without derived fields (lengths, checksums). Parsing a built packet gives the same value,
//! and building from a parsed packet gives the same bytes.
//!
//! No input can cause a panic: headers are fixed-size arrays with fields at compile-time offsets
//! ([`pvrdma_packet::field`]), and data of variable length is split with checks.
//!
//! All multi-byte fields except the ICRC are big-endian. Layouts are those of the InfiniBand Architecture Specification
//! volume 1 ("IBA"), chapters 5 and 9, annex A16 (RoCE) and annex A17 (RoCE v2), with IPv4 of RFC 791, IPv6 of RFC 8200
//! and UDP of RFC 768.
//!
//! Not supported: VLAN stacking, IPv4 options and fragments, the RD and XRC transports.

mod aeth;
pub(crate) mod agreement;
mod atomic_ack_eth;
mod atomic_eth;
mod bth;
mod crc;
mod deth;
mod display;
mod error;
mod extension;
mod feth;
mod frame;
mod grh;
mod icrc;
mod ieth;
mod immdt;
mod ipv4;
mod ipv6;
mod opcode;
mod packet;
mod reth;
mod sack;
mod udp;

pub use aeth::{Aeth, NakCode, Syndrome, rnr_delay};
pub use agreement::{ACCEPT, ACCEPT_WITHOUT_ICRC, OFFER, REQUEST_WITHOUT_ICRC};
pub use atomic_ack_eth::AtomicAckEth;
pub use atomic_eth::AtomicEth;
pub use bth::{Bth, DEFAULT_PKEY, pkey_matches};
pub use crc::choose_crc;
pub use deth::Deth;
pub use error::{BuildError, CrcError, ParseError};
pub use extension::Extension;
pub use feth::Feth;
pub use frame::{FrameWriter, MAX_FRAME, MAX_HEADER, MAX_PAYLOAD, build};
pub use grh::Grh;
pub use icrc::Icrc;
pub use ieth::Ieth;
pub use immdt::ImmDt;
pub use ipv4::{Ecn, Ipv4};
pub use ipv6::Ipv6;
pub use opcode::{Opcode, OpcodeInfo, Operation, PayloadRule, Position, Service, Shape};
pub use packet::{Header, Network, Packet};
pub use reth::Reth;
pub use sack::{AGREED_RESOURCES, SackMap};
pub use udp::{Udp, connected_flow_label, connected_source_port, datagram_source_port};
