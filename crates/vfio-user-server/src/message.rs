//! Messages of the vfio-user protocol: their header, their commands and how large they may be.
//!
//! Everything here comes from another process. Numbers are little-endian, as on every host we run on.

use std::fmt;

use rustix::io::Errno;

/// Bytes of a message header.
pub const HEADER_SIZE: usize = 16;

/// The same as it is written in headers.
pub(crate) const HEADER_ONLY: u32 = 16;

/// Largest amount of data in one region access, as we advertise it.
pub const MAX_DATA_XFER_SIZE: u32 = 1 << 20;

/// Most file descriptors with one message, as we advertise it.
pub const MAX_MSG_FDS: usize = 16;

/// Largest message other than a region write. The largest one seen in practice has 4,824 bytes.
const MAX_MESSAGE_SIZE: u32 = 64 << 10;

/// Fixed part of a region access after the header.
const REGION_ACCESS_SIZE: u32 = 16;

/// What a message asks for. Any number is a command; most are unknown.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Command(pub u16);

impl Command {
    /// Version and capability negotiation, the first message.
    pub const VERSION: Self = Self(1);
    /// A range of bus addresses appears.
    pub const DMA_MAP: Self = Self(2);
    /// Ranges of bus addresses go away.
    pub const DMA_UNMAP: Self = Self(3);
    /// Number of regions and interrupt types.
    pub const DEVICE_GET_INFO: Self = Self(4);
    /// Size and flags of a region.
    pub const DEVICE_GET_REGION_INFO: Self = Self(5);
    /// Not served: no client asks.
    pub const DEVICE_GET_REGION_IO_FDS: Self = Self(6);
    /// Number and kind of interrupts of a type.
    pub const DEVICE_GET_IRQ_INFO: Self = Self(7);
    /// Where interrupts go.
    pub const DEVICE_SET_IRQS: Self = Self(8);
    /// Reads from a region.
    pub const REGION_READ: Self = Self(9);
    /// Writes to a region.
    pub const REGION_WRITE: Self = Self(10);
    /// From us to the client only.
    pub const DMA_READ: Self = Self(11);
    /// From us to the client only.
    pub const DMA_WRITE: Self = Self(12);
    /// Back to power-on state.
    pub const DEVICE_RESET: Self = Self(13);
    /// Withdrawn from the protocol.
    pub const DIRTY_PAGES: Self = Self(14);
    /// Several small region writes.
    pub const REGION_WRITE_MULTI: Self = Self(15);

    /// Largest message with this command that is read at all.
    const fn max_size(self) -> u32 {
        match self {
            Self::REGION_WRITE => HEADER_ONLY + REGION_ACCESS_SIZE + MAX_DATA_XFER_SIZE,
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
            Self(other) => return write!(f, "command {other}"),
        };
        f.write_str(name)
    }
}

/// What kind of message a header announces.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MessageKind {
    /// A request that must be answered exactly once.
    Request,
    /// A request that must not be answered.
    Posted,
    /// An answer. We ask nothing, so none is expected.
    Reply,
    /// The type bits have no meaning.
    Invalid,
}

/// The header that every message begins with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// Chosen by the requester and repeated in the reply.
    pub id: u16,
    /// What is asked for.
    pub command: Command,
    /// Bytes of the message, this header included.
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

    /// Reads a header.
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

    /// Writes a header.
    pub fn to_bytes(self) -> [u8; HEADER_SIZE] {
        let ([i0, i1], [c0, c1]) = (self.id.to_le_bytes(), self.command.0.to_le_bytes());
        let ([s0, s1, s2, s3], [f0, f1, f2, f3]) = (self.size.to_le_bytes(), self.flags.to_le_bytes());
        let [e0, e1, e2, e3] = self.error.to_le_bytes();
        [i0, i1, c0, c1, s0, s1, s2, s3, f0, f1, f2, f3, e0, e1, e2, e3]
    }

    /// What kind of message follows.
    pub const fn kind(&self) -> MessageKind {
        match (self.flags & Self::TYPE_MASK, self.flags & Self::NO_REPLY) {
            (0, 0) => MessageKind::Request,
            (0, _) => MessageKind::Posted,
            (Self::REPLY, _) => MessageKind::Reply,
            _ => MessageKind::Invalid,
        }
    }

    /// Bytes that follow the header.
    ///
    /// # Errors
    /// The size is less than a header or more than we read: where the next message begins is unknown then.
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
    }
}
