//! Construction of packets in a caller's buffer.

use pvrdma_packet::Ethernet;

use super::bth::Bth;
use super::error::BuildError;
use super::extension::Extension;
use super::icrc::Icrc;
use super::ipv4::Ipv4;
use super::packet::{Header, Network};
use super::udp::Udp;

/// Largest number of bytes before the payload.
pub const MAX_HEADER: usize = Ethernet::UNTAGGED_LEN + Ethernet::TAG_LEN + 48 + Bth::LEN + Extension::MAX_LEN;
/// Largest payload in bytes: the largest path MTU.
pub const MAX_PAYLOAD: usize = 4096;
/// Buffer size that holds any packet with at most [`MAX_PAYLOAD`] bytes of payload.
pub const MAX_FRAME: usize = MAX_HEADER + MAX_PAYLOAD + 3 + Icrc::LEN;

impl Header {
    /// Length of everything before the payload in bytes.
    #[expect(clippy::len_without_is_empty, reason = "a header is never empty")]
    #[inline]
    pub fn len(&self) -> usize {
        let mut len = self.ethernet.len() + self.network.len() + Bth::LEN;
        self.extension.emit(|bytes| len += bytes.len());
        len
    }

    /// Writes everything before the payload. Pad count, length fields and the IPv4 checksum are computed. Returns the
    /// bytes written and the ICRC over them, to be continued over payload and pad bytes.
    ///
    /// # Errors
    /// The extension headers do not match the opcode, the buffer is too small, or the length is too large.
    #[inline]
    pub fn write(&self, payload_len: usize, out: &mut [u8]) -> Result<(usize, Icrc), BuildError> {
        let expected = self.bth.opcode.info().map_or(super::Shape::None, |info| info.shape);
        if expected != self.extension.shape() {
            return Err(BuildError::Shape);
        }
        let len = self.len();
        let mut rest = out.get_mut(..len).ok_or(BuildError::NoRoom)?;
        let mut append = |bytes: &[u8]| {
            let (to, after) = std::mem::take(&mut rest).split_at_mut(bytes.len());
            to.copy_from_slice(bytes);
            rest = after;
        };

        let ethertype = self.network.ethertype();
        append(&self.ethernet.to_bytes(ethertype));
        if let Some(tag) = self.ethernet.tag_bytes(ethertype) {
            append(&tag);
        }

        let pad = pad_of(payload_len);
        let bth = Bth { pad, ..self.bth }.to_bytes();
        let before_bth = self.ethernet.len() + self.network.len();
        let transport_len = payload_len
            .checked_add(len - before_bth + usize::from(pad) + Icrc::LEN)
            .and_then(|len| u16::try_from(len).ok())
            .ok_or(BuildError::TooLong)?;
        let longer =
            |by: usize| u16::try_from(by).ok().and_then(|by| transport_len.checked_add(by)).ok_or(BuildError::TooLong);
        let mut icrc = match &self.network {
            Network::V1(grh) => {
                let grh = grh.to_bytes(transport_len);
                append(&grh);
                Icrc::over_grh(&grh, &bth)
            }
            Network::V2Ipv4(ip, udp) => {
                let ip = ip.to_bytes(longer(Ipv4::LEN + Udp::LEN)?);
                let udp = udp.to_bytes(longer(Udp::LEN)?);
                append(&ip);
                append(&udp);
                Icrc::over_ipv4(&ip, &udp, &bth)
            }
            Network::V2Ipv6(ip, udp) => {
                let length = longer(Udp::LEN)?;
                let (ip, udp) = (ip.to_bytes(length), udp.to_bytes(length));
                append(&ip);
                append(&udp);
                Icrc::over_ipv6(&ip, &udp, &bth)
            }
        };
        append(&bth);
        self.extension.emit(|bytes| {
            append(bytes);
            icrc.update(bytes);
        });
        Ok((len, icrc))
    }
}

/// Number of pad bytes that extend a payload to a multiple of four.
const fn pad_of(payload_len: usize) -> u8 {
    match payload_len % 4 {
        1 => 3,
        2 => 2,
        3 => 1,
        _ => 0,
    }
}

/// A frame whose payload is still to be written.
#[derive(Debug)]
pub struct FrameWriter<'b> {
    payload: &'b mut [u8],
    tail: &'b mut [u8],
    header_len: usize,
    icrc: Icrc,
}

impl<'b> FrameWriter<'b> {
    /// Writes the headers and reserves `payload_len` bytes.
    ///
    /// # Errors
    /// Those of [`Header::write`].
    #[inline]
    pub fn new(header: &Header, payload_len: usize, out: &'b mut [u8]) -> Result<Self, BuildError> {
        let (header_len, icrc) = header.write(payload_len, out)?;
        let tail_len = usize::from(pad_of(payload_len)) + Icrc::LEN;
        let (_, rest) = out.split_at_mut_checked(header_len).ok_or(BuildError::NoRoom)?;
        let (payload, rest) = rest.split_at_mut_checked(payload_len).ok_or(BuildError::NoRoom)?;
        let (tail, _) = rest.split_at_mut_checked(tail_len).ok_or(BuildError::NoRoom)?;
        Ok(Self { payload, tail, header_len, icrc })
    }

    /// Returns the payload area, to be filled by the caller.
    #[inline]
    pub fn payload(&mut self) -> &mut [u8] {
        self.payload
    }

    /// Appends zero pad bytes and the ICRC. Returns the length of the frame in bytes.
    #[inline]
    pub fn finish(mut self) -> usize {
        self.icrc.update(self.payload);
        let total = self.header_len + self.payload.len() + self.tail.len();
        if let Some((pad, trailer)) = self.tail.split_last_chunk_mut::<{ Icrc::LEN }>() {
            pad.fill(0);
            self.icrc.update(pad);
            *trailer = self.icrc.finish();
        }
        total
    }

    /// Appends zero pad bytes, and zeros in place of the ICRC. Returns the length of the frame in bytes. Only a peer
    /// that agreed accepts the packet ([`super::agreement`]).
    #[inline]
    pub fn finish_without_icrc(self) -> usize {
        let Self { payload, tail, header_len, icrc: _ } = self;
        tail.fill(0);
        header_len + payload.len() + tail.len()
    }
}

/// Builds a complete frame.
///
/// # Errors
/// Those of [`Header::write`].
#[inline]
pub fn build(header: &Header, payload: &[u8]) -> Result<Vec<u8>, BuildError> {
    let room = header.len() + payload.len() + usize::from(pad_of(payload.len())) + Icrc::LEN;
    let mut frame = vec![0; room];
    let mut writer = FrameWriter::new(header, payload.len(), &mut frame)?;
    writer.payload().copy_from_slice(payload);
    writer.finish();
    Ok(frame)
}

#[cfg(test)]
mod tests {
    use pvrdma_packet::Vlan;
    use pvrdma_verbs_types::{Psn, Qpn};

    use super::super::atomic_eth::AtomicEth;
    use super::super::ipv6::Ipv6;
    use super::super::opcode::Opcode;
    use super::*;

    #[test]
    fn the_largest_headers_are_as_long_as_is_said() {
        let header = Header {
            ethernet: Ethernet { vlan: Some(Vlan::default()), ..Ethernet::default() },
            network: Network::V2Ipv6(Ipv6::default(), Udp::default()),
            bth: Bth::new(Opcode::COMPARE_SWAP, Qpn::new(2), Psn::new(0)),
            extension: Extension::AtomicEth(AtomicEth { address: 0, rkey: 0, swap_or_add: 0, compare: 0 }),
        };
        assert_eq!((header.len(), MAX_HEADER), (106, 106));
        // The payload with the pad bytes of a shorter one, and the ICRC.
        assert_eq!(MAX_FRAME, 106 + 4096 + 3 + 4);
    }

    /// The length fields have 16 bits, and each counts different headers.
    #[test]
    fn what_no_length_field_can_say_is_refused() {
        let bth = Bth::new(Opcode::UD_SEND, Qpn::new(2), Psn::new(0));
        let deth = super::super::deth::Deth { qkey: 0, source: Qpn::new(2) };
        for (network, counted) in [
            (Network::V1(super::super::grh::Grh::default()), 0),
            (Network::V2Ipv4(Ipv4::default(), Udp::default()), 28),
            (Network::V2Ipv6(Ipv6::default(), Udp::default()), 8),
        ] {
            let header = Header { ethernet: Ethernet::default(), network, bth, extension: Extension::Deth(deth) };
            // BTH, DETH and ICRC.
            let most = (usize::from(u16::MAX) - counted - 12 - 8 - 4) / 4 * 4;
            let mut out = vec![0; 70_000];
            assert!(header.write(most, &mut out).is_ok(), "{counted}");
            assert_eq!(header.write(most + 4, &mut out).err(), Some(BuildError::TooLong), "{counted}");
            assert_eq!(header.write(usize::MAX, &mut out).err(), Some(BuildError::TooLong), "{counted}");
        }
    }
}
