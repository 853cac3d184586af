//! The invariant CRC: fields that routers may change are replaced by ones before it is computed (IBA 7.8.1, annexes A16
//! and A17).

use std::fmt;

use super::bth::Bth;
use super::crc::Crc;
use super::grh::Grh;
use super::ipv4::Ipv4;
use super::ipv6::Ipv6;
use super::udp::Udp;

/// Register after eight bytes of ones, which represent a fully masked local route header.
const AFTER_MASKED_LRH: u32 = 0xdebb_20e3;

/// An ICRC in progress. It is the CRC-32 of Ethernet, sent least significant byte first.
#[derive(Clone)]
pub struct Icrc(Crc);

impl fmt::Debug for Icrc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Icrc")
    }
}

impl Icrc {
    /// Length of the ICRC in bytes.
    pub const LEN: usize = 4;

    /// Starts the ICRC of a RoCE v1 packet.
    #[inline]
    pub fn over_grh(grh: &[u8; Grh::LEN], bth: &[u8; Bth::LEN]) -> Self {
        let mut masked = *grh;
        mask_route(&mut masked);
        Self::start(&masked, bth)
    }

    /// Starts the ICRC of a RoCE v2 packet over IPv4. The identification is covered.
    #[inline]
    pub fn over_ipv4(ip: &[u8; Ipv4::LEN], udp: &[u8; Udp::LEN], bth: &[u8; Bth::LEN]) -> Self {
        let mut masked = [0xff; Ipv4::LEN + Udp::LEN];
        let (network, transport) = masked.split_at_mut(Ipv4::LEN);
        network.copy_from_slice(ip);
        // Masks type of service, time to live and header checksum.
        network[1] = 0xff;
        network[8] = 0xff;
        network[10..12].fill(0xff);
        copy_udp(transport, udp);
        Self::start(&masked, bth)
    }

    /// Starts the ICRC of a RoCE v2 packet over IPv6.
    #[inline]
    pub fn over_ipv6(ip: &[u8; Ipv6::LEN], udp: &[u8; Udp::LEN], bth: &[u8; Bth::LEN]) -> Self {
        let mut route = *ip;
        mask_route(&mut route);
        let mut masked = [0xff; Ipv6::LEN + Udp::LEN];
        let (network, transport) = masked.split_at_mut(Ipv6::LEN);
        network.copy_from_slice(&route);
        copy_udp(transport, udp);
        Self::start(&masked, bth)
    }

    fn start(network: &[u8], bth: &[u8; Bth::LEN]) -> Self {
        let mut crc = Crc::new(AFTER_MASKED_LRH);
        crc.update(network);
        let mut masked = *bth;
        // Masks FECN, BECN and the six reserved bits.
        masked[4] = 0xff;
        crc.update(&masked);
        Self(crc)
    }

    /// Continues with extension headers, payload and pad bytes, in pieces of any size.
    #[inline]
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Returns the four bytes in wire order.
    #[inline]
    pub fn finish(self) -> [u8; Self::LEN] {
        self.0.finish().to_le_bytes()
    }
}

/// Masks traffic class, flow label and hop limit of a GRH or IPv6 header.
const fn mask_route(header: &mut [u8; 40]) {
    header[0] |= 0x0f;
    header[1] = 0xff;
    header[2] = 0xff;
    header[3] = 0xff;
    header[7] = 0xff;
}

/// Copies all but the checksum, which stays ones.
fn copy_udp(masked: &mut [u8], udp: &[u8; Udp::LEN]) {
    for (to, from) in masked.iter_mut().zip(udp).take(6) {
        *to = *from;
    }
}
