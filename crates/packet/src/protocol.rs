//! Protocol numbers.

/// Number of TCP in the protocol field of IPv4 (RFC 791) and the next header field of IPv6 (RFC 8200).
pub const PROTOCOL_TCP: u8 = 6;

/// Number of UDP in the same fields.
pub const PROTOCOL_UDP: u8 = 17;

/// UDP destination port of RoCE v2 packets (IBA annex A17).
pub const ROCE_PORT: u16 = 4791;
