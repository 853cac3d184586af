//! Test frames, and checksums calculated word by word as in RFC 1071, for comparison.

/// Default MAC address of the guest under test.
pub const GUEST_MAC: [u8; 6] = [0x52, 0x54, 0, 0, 0, 1];
/// MAC address of the guest's peer.
pub const PEER_MAC: [u8; 6] = [0x52, 0x54, 0, 0, 0, 2];

/// Calculates the Internet checksum, one 16-bit word after the other.
pub fn reference_checksum(bytes: &[u8]) -> u16 {
    let mut sum: u16 = 0;
    for pair in bytes.chunks(2) {
        let word = u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]);
        let (next, carry) = sum.overflowing_add(word);
        sum = next + u16::from(carry);
    }
    !sum
}

/// Builds an Ethernet frame of EtherType `kind` with this payload.
pub fn ethernet(destination: [u8; 6], source: [u8; 6], kind: u16, payload: &[u8]) -> Vec<u8> {
    [&destination[..], &source, &kind.to_be_bytes(), payload].concat()
}

/// Inserts a VLAN tag into a frame.
pub fn tagged(frame: &[u8], tag: u16) -> Vec<u8> {
    [&frame[..12], &[0x81, 0], &tag.to_be_bytes(), &frame[12..]].concat()
}

/// Common parameters of TCP and UDP frames.
#[derive(Clone, Copy, Debug)]
pub struct Flow {
    /// IPv6 instead of IPv4.
    pub ipv6: bool,
    /// Source and destination port.
    pub ports: [u16; 2],
    /// Destination MAC address.
    pub to: [u8; 6],
    /// Source MAC address.
    pub from: [u8; 6],
}

impl Flow {
    /// Frames from the peer to the guest.
    pub const TO_GUEST: Self = Self { ipv6: false, ports: [1000, 2000], to: GUEST_MAC, from: PEER_MAC };
    /// Frames from the guest to the peer.
    pub const TO_PEER: Self = Self { ipv6: false, ports: [2000, 1000], to: PEER_MAC, from: GUEST_MAC };

    fn pseudo_header(self, protocol: u8, len: usize) -> Vec<u8> {
        let len = len as u32;
        [&self.addresses()[..], &len.to_be_bytes(), &[0, 0, 0, protocol]].concat()
    }

    fn addresses(self) -> Vec<u8> {
        if self.ipv6 {
            let mut bytes = vec![0xfd; 32];
            (bytes[15], bytes[31]) = (self.from[5], self.to[5]);
            bytes
        } else {
            vec![10, 0, 0, self.from[5], 10, 0, 0, self.to[5]]
        }
    }

    fn ip(self, protocol: u8, payload: &[u8]) -> Vec<u8> {
        let len = payload.len() as u16;
        let (kind, header) = if self.ipv6 {
            let start = [&[0x60, 0, 0, 0][..], &len.to_be_bytes(), &[protocol, 64]].concat();
            (0x86dd, [start, self.addresses()].concat())
        } else {
            let start =
                [&[0x45, 0][..], &(len + 20).to_be_bytes(), &[0x12, 0x34, 0x40, 0, 64, protocol, 0, 0]].concat();
            let mut header = [start, self.addresses()].concat();
            let sum = reference_checksum(&header);
            header[10..12].copy_from_slice(&sum.to_be_bytes());
            (0x0800, header)
        };
        ethernet(self.to, self.from, kind, &[&header[..], payload].concat())
    }

    /// Returns the size of Ethernet and IP header, in bytes.
    pub const fn transport_at(self) -> usize {
        if self.ipv6 { 54 } else { 34 }
    }

    /// Builds a UDP datagram with its checksum.
    pub fn udp(self, data: &[u8]) -> Vec<u8> {
        let [from, to] = self.ports;
        let len = data.len() as u16 + 8;
        let head = [from.to_be_bytes(), to.to_be_bytes(), len.to_be_bytes(), [0, 0]].concat();
        let mut udp = [&head[..], data].concat();
        let sum = reference_checksum(&[self.pseudo_header(17, udp.len()), udp.clone()].concat());
        udp[6..8].copy_from_slice(&if sum == 0 { 0xffff } else { sum }.to_be_bytes());
        self.ip(17, &udp)
    }

    /// Builds a TCP segment with its checksum and `options` bytes of options (a multiple of four).
    pub fn tcp(self, sequence: u32, flags: u8, options: usize, data: &[u8]) -> Vec<u8> {
        let [from, to] = self.ports;
        let offset = ((20 + options) / 4) as u8;
        let head = [
            &from.to_be_bytes()[..],
            &to.to_be_bytes(),
            &sequence.to_be_bytes(),
            &[0, 0, 0, 9, offset << 4, flags, 0xff, 0xff, 0, 0, 0, 0],
            &vec![1; options],
        ]
        .concat();
        let mut tcp = [&head[..], data].concat();
        let sum = reference_checksum(&[self.pseudo_header(6, tcp.len()), tcp.clone()].concat());
        tcp[16..18].copy_from_slice(&sum.to_be_bytes());
        self.ip(6, &tcp)
    }

    /// Returns the frame as passed by a driver that leaves the checksum to the device: the checksum field holds the sum
    /// of the pseudo header with the length, or, for segmentation, without the length, and the IPv4 checksum is
    /// omitted.
    pub fn left_open(self, mut frame: Vec<u8>, checksum_at: usize, segmentation: bool) -> Vec<u8> {
        let transport = self.transport_at();
        let protocol = if checksum_at == 16 { 6 } else { 17 };
        let len = if segmentation { 0 } else { frame.len() - transport };
        let sum = !reference_checksum(&self.pseudo_header(protocol, len));
        frame[transport + checksum_at..transport + checksum_at + 2].copy_from_slice(&sum.to_be_bytes());
        if segmentation && !self.ipv6 {
            frame[24..26].fill(0);
        }
        frame
    }
}

/// Returns bytes that differ from position to position.
pub fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 251) as u8).collect()
}

/// Returns `true` if the checksums of IPv4 and of TCP or UDP of an untagged frame without IP options are correct.
pub fn checksums_are_right(frame: &[u8]) -> bool {
    let ipv6 = frame[12..14] == [0x86, 0xdd];
    let (transport, addresses, protocol) =
        if ipv6 { (54, frame[22..54].to_vec(), frame[20]) } else { (34, frame[26..34].to_vec(), frame[23]) };
    let len = (frame.len() - transport) as u32;
    let pseudo = [&addresses[..], &len.to_be_bytes(), &[0, 0, 0, protocol]].concat();
    let header_is_right = ipv6 || reference_checksum(&frame[14..34]) == 0;
    header_is_right && reference_checksum(&[&pseudo[..], &frame[transport..]].concat()) == 0
}
