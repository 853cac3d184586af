//! Messages of the vfio-user protocol: header, commands and maximum sizes.
//!
//! All of this is input from another process. Numbers are little-endian, the byte order of all supported hosts.

use std::fmt;

use rustix::io::Errno;

/// Size of a message header, in bytes.
pub const HEADER_SIZE: usize = 16;

/// [`HEADER_SIZE`] in the type of the header's size field.
pub(crate) const HEADER_ONLY: u32 = 16;

/// Maximum number of data bytes in one region access, as advertised to the client.
pub const MAX_DATA_XFER_SIZE: u32 = 1 << 20;

/// Maximum number of file descriptors with one message, as advertised to the client.
pub const MAX_MSG_FDS: usize = 16;

/// Maximum size of a message other than a region write and migration data. The largest one seen in practice has 4,824
/// bytes.
const MAX_MESSAGE_SIZE: u32 = 64 << 10;

/// Size of the fixed part of a region access after the header.
const REGION_ACCESS_SIZE: u32 = 16;

/// Size of the fixed part of migration data after the header.
const MIG_DATA_SIZE: u32 = 8;

/// Command of a message. Any number is valid here; most are unknown.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Command(pub u16);

impl Command {
    /// Negotiate version and capabilities, the first message.
    pub const VERSION: Self = Self(1);
    /// Add a range of bus addresses.
    pub const DMA_MAP: Self = Self(2);
    /// Remove ranges of bus addresses.
    pub const DMA_UNMAP: Self = Self(3);
    /// Get the number of regions and interrupt types.
    pub const DEVICE_GET_INFO: Self = Self(4);
    /// Get size and flags of a region.
    pub const DEVICE_GET_REGION_INFO: Self = Self(5);
    /// Not implemented: no client sends it.
    pub const DEVICE_GET_REGION_IO_FDS: Self = Self(6);
    /// Get number and kind of interrupts of a type.
    pub const DEVICE_GET_IRQ_INFO: Self = Self(7);
    /// Set the targets of interrupts.
    pub const DEVICE_SET_IRQS: Self = Self(8);
    /// Read from a region.
    pub const REGION_READ: Self = Self(9);
    /// Write to a region.
    pub const REGION_WRITE: Self = Self(10);
    /// From the server to the client only.
    pub const DMA_READ: Self = Self(11);
    /// From the server to the client only.
    pub const DMA_WRITE: Self = Self(12);
    /// Reset to the power-on state.
    pub const DEVICE_RESET: Self = Self(13);
    /// Removed from the protocol.
    pub const DIRTY_PAGES: Self = Self(14);
    /// Do several small region writes.
    pub const REGION_WRITE_MULTI: Self = Self(15);
    /// Probe, get or set a feature of the device.
    pub const DEVICE_FEATURE: Self = Self(16);
    /// Read a part of the saved state.
    pub const MIG_DATA_READ: Self = Self(17);
    /// Write a part of a saved state.
    pub const MIG_DATA_WRITE: Self = Self(18);

    /// Returns the maximum size of a message with this command.
    const fn max_size(self) -> u32 {
        match self {
            Self::REGION_WRITE => HEADER_ONLY + REGION_ACCESS_SIZE + MAX_DATA_XFER_SIZE,
            Self::MIG_DATA_WRITE => HEADER_ONLY + MIG_DATA_SIZE + MAX_DATA_XFER_SIZE,
            _ => MAX_MESSAGE_SIZE,
        }
    }
}

impl fmt::Debug for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match *self {
            Self::VERSION => "VERSION",
            Self::DMA_MAP => "DMA_MAP",
            Self::DMA_UNMAP => "DMA_UNMAP",
            Self::DEVICE_GET_INFO => "DEVICE_GET_INFO",
            Self::DEVICE_GET_REGION_INFO => "DEVICE_GET_REGION_INFO",
            Self::DEVICE_GET_REGION_IO_FDS => "DEVICE_GET_REGION_IO_FDS",
            Self::DEVICE_GET_IRQ_INFO => "DEVICE_GET_IRQ_INFO",
            Self::DEVICE_SET_IRQS => "DEVICE_SET_IRQS",
            Self::REGION_READ => "REGION_READ",
            Self::REGION_WRITE => "REGION_WRITE",
            Self::DMA_READ => "DMA_READ",
            Self::DMA_WRITE => "DMA_WRITE",
            Self::DEVICE_RESET => "DEVICE_RESET",
            Self::DIRTY_PAGES => "DIRTY_PAGES",
            Self::REGION_WRITE_MULTI => "REGION_WRITE_MULTI",
            Self::DEVICE_FEATURE => "DEVICE_FEATURE",
            Self::MIG_DATA_READ => "MIG_DATA_READ",
            Self::MIG_DATA_WRITE => "MIG_DATA_WRITE",
            Self(other) => return write!(f, "command {other}"),
        };
        f.write_str(name)
    }
}

/// Kind of a message, from the flags of its header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MessageKind {
    /// A request that must be answered exactly once.
    Request,
    /// A request that must not be answered.
    Posted,
    /// A reply. The server sends no requests, so none is expected.
    Reply,
    /// The type bits are invalid.
    Invalid,
}

/// Header of every message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// Chosen by the requester and repeated in the reply.
    pub id: u16,
    /// Requested command.
    pub command: Command,
    /// Bytes of the message, including this header.
    pub size: u32,
    /// Type, [`Self::NO_REPLY`], [`Self::ERROR`].
    pub flags: u32,
    /// Errno, if [`Self::ERROR`] is set.
    pub error: u32,
}

impl Header {
    /// Type bits of the flags.
    pub const TYPE_MASK: u32 = 0xf;
    /// The message is a reply.
    pub const REPLY: u32 = 1;
    /// The request must not be answered.
    pub const NO_REPLY: u32 = 1 << 4;
    /// The request failed.
    pub const ERROR: u32 = 1 << 5;

    /// Parses a header.
    pub fn parse(bytes: &[u8; HEADER_SIZE]) -> Self {
        let [i0, i1, c0, c1, s0, s1, s2, s3, f0, f1, f2, f3, e0, e1, e2, e3] = *bytes;
        Self {
            id: u16::from_le_bytes([i0, i1]),
            command: Command(u16::from_le_bytes([c0, c1])),
            size: u32::from_le_bytes([s0, s1, s2, s3]),
            flags: u32::from_le_bytes([f0, f1, f2, f3]),
            error: u32::from_le_bytes([e0, e1, e2, e3]),
        }
    }

    /// Encodes a header.
    pub fn to_bytes(self) -> [u8; HEADER_SIZE] {
        let ([i0, i1], [c0, c1]) = (self.id.to_le_bytes(), self.command.0.to_le_bytes());
        let ([s0, s1, s2, s3], [f0, f1, f2, f3]) = (self.size.to_le_bytes(), self.flags.to_le_bytes());
        let [e0, e1, e2, e3] = self.error.to_le_bytes();
        [i0, i1, c0, c1, s0, s1, s2, s3, f0, f1, f2, f3, e0, e1, e2, e3]
    }

    /// Returns the kind of the message.
    pub const fn kind(&self) -> MessageKind {
        match (self.flags & Self::TYPE_MASK, self.flags & Self::NO_REPLY) {
            (0, 0) => MessageKind::Request,
            (0, _) => MessageKind::Posted,
            (Self::REPLY, _) => MessageKind::Reply,
            _ => MessageKind::Invalid,
        }
    }

    /// Returns the number of bytes that follow the header.
    ///
    /// # Errors
    /// The size is less than a header or above the maximum: the position of the next message is then unknown.
    pub fn body_size(&self) -> Result<usize, Errno> {
        if self.size > self.command.max_size() {
            return Err(Errno::TOOBIG);
        }
        usize::try_from(self.size).ok().and_then(|size| size.checked_sub(HEADER_SIZE)).ok_or(Errno::INVAL)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_round_trip() {
        let header = Header { id: 0x1234, command: Command::REGION_READ, size: 32, flags: 0x10, error: 7 };
        assert_eq!(Header::parse(&header.to_bytes()), header);
        assert_eq!(header.kind(), MessageKind::Posted);
    }

    #[test]
    fn sizes_without_a_next_message() {
        let header = |command, size| Header { id: 0, command, size, flags: 0, error: 0 };
        for size in [0, 1, 15] {
            assert_eq!(header(Command::VERSION, size).body_size(), Err(Errno::INVAL));
        }
        assert_eq!(header(Command::DEVICE_RESET, 16).body_size(), Ok(0));
        assert_eq!(header(Command::VERSION, u32::MAX).body_size(), Err(Errno::TOOBIG));
        assert_eq!(header(Command::VERSION, (64 << 10) + 1).body_size(), Err(Errno::TOOBIG));
        assert_eq!(header(Command::REGION_WRITE, 32 + (1 << 20)).body_size(), Ok(16 + (1 << 20)));
        assert_eq!(header(Command::REGION_WRITE, 33 + (1 << 20)).body_size(), Err(Errno::TOOBIG));
        assert_eq!(header(Command::MIG_DATA_WRITE, 24 + (1 << 20)).body_size(), Ok(8 + (1 << 20)));
        assert_eq!(header(Command::MIG_DATA_WRITE, 25 + (1 << 20)).body_size(), Err(Errno::TOOBIG));
        assert_eq!(header(Command::MIG_DATA_READ, (64 << 10) + 1).body_size(), Err(Errno::TOOBIG));
    }
}
