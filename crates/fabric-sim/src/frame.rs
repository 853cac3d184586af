//! Frames on their way, with the fields that switches read.

use pvrdma_packet::Checksum;

/// Offsets in a frame without a VLAN tag.
const IP: usize = 14;
const UDP: usize = IP + 20;

/// Bytes of a frame that are carried: all headers, and notifications completely.
const CARRIED: usize = 96;

/// A frame of RoCE v2 over IPv4. Payload has no content in the simulation, so only its length is carried.
#[derive(Debug)]
pub(crate) struct Frame {
    head: [u8; CARRIED],
    len: usize,
    /// Hosts that it comes from and goes to.
    pub(crate) from: usize,
    pub(crate) to: usize,
}

impl Default for Frame {
    fn default() -> Self {
        Self { head: [0; CARRIED], len: 0, from: 0, to: 0 }
    }
}

impl Frame {
    /// Fills the frame.
    pub(crate) fn fill(&mut self, bytes: &[u8]) {
        let carried = bytes.len().min(CARRIED);
        self.head[..carried].copy_from_slice(&bytes[..carried]);
        self.len = bytes.len();
        (self.from, self.to) = (self.host(IP + 12), self.host(IP + 16));
    }

    /// Writes the frame into `room`, and returns it.
    pub(crate) fn restore<'a>(&self, room: &'a mut [u8]) -> &'a [u8] {
        let carried = self.len.min(CARRIED);
        room[..carried].copy_from_slice(&self.head[..carried]);
        &room[..self.len]
    }

    /// Returns the number of the host with the address at this offset.
    fn host(&self, offset: usize) -> usize {
        let number = |index| self.head.get(offset + index).copied().map_or(0, usize::from);
        number(2) << 8 | number(3)
    }

    /// UDP source port.
    pub(crate) fn source_port(&self) -> u64 {
        let byte = |index| self.head.get(UDP + index).copied().map_or(0, u64::from);
        byte(0) << 8 | byte(1)
    }

    /// Bytes on the wire, with preamble, checksum and gap.
    pub(crate) const fn wire_len(&self) -> u64 {
        self.len as u64 + 24
    }

    /// Marks the frame as having met congestion. Returns `false` if its sender does not react to marks.
    pub(crate) fn mark(&mut self) -> bool {
        let Some(header) = self.head.get_mut(IP..UDP) else { return false };
        if header[1] & 3 == 0 {
            return false;
        }
        header[1] |= 3;
        header[10..12].fill(0);
        let mut sum = Checksum::default();
        sum.add(header);
        let sum = sum.finish().to_be_bytes();
        header[10..12].copy_from_slice(&sum);
        true
    }
}
