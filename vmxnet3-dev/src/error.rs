//! Why the guest's requests are refused.

use pvrdma_guest_memory::DmaError;
use rustix::io::Errno;
use thiserror::Error;

use crate::abi::queue_desc::QueueDescError;
use crate::abi::rss_conf::RssConfError;

/// Why a device cannot be made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum ConfigError {
    /// Outside of 3 to 25.
    #[error("{0} interrupt vectors, not 3 to 25")]
    Vectors(u16),
    /// The system has no descriptors left for its link.
    #[error("no descriptor for the link: {0}")]
    Descriptors(Errno),
}

/// Why a command is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub(crate) enum CommandError {
    /// There is no such command in the revision that the driver chose.
    #[error("unknown command {0:#x}")]
    Unknown(u32),
    /// Bus mastering is off.
    #[error("bus mastering is off")]
    Masked,
    /// The shared area does not start with the magic.
    #[error("no shared area at {0:#x}")]
    NoShared(u64),
    /// Guest memory could not be reached.
    #[error("{0}: {1}")]
    Memory(&'static str, DmaError),
    /// A number is out of its range.
    #[error("invalid {0}: {1:#x}")]
    Invalid(&'static str, u64),
    /// A queue cannot be.
    #[error("{0} queue {1}: {2}")]
    Queue(&'static str, u8, QueueDescError),
    /// The RSS configuration cannot be.
    #[error(transparent)]
    Rss(#[from] RssConfError),
}

/// Why a queue has stopped, until the driver resets the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub(crate) enum QueueError {
    /// The end of a frame is missing.
    #[error("no end of packet")]
    NoEnd,
    /// A frame has too many descriptors.
    #[error("too many descriptors")]
    TooMany,
    /// The driver asks for what its revision does not have.
    #[error("unsupported descriptor")]
    Unsupported,
    /// A receive buffer is too small.
    #[error("receive buffer of {0} bytes")]
    SmallBuffer(u16),
    /// Guest memory could not be reached.
    #[error(transparent)]
    Memory(#[from] DmaError),
}

impl QueueError {
    /// The number in the queue's status. Never 0.
    pub(crate) const fn code(&self) -> u32 {
        match self {
            Self::NoEnd => 0x8000_0000,
            Self::TooMany => 0x8000_0002,
            Self::Unsupported => 0x8000_0003,
            Self::SmallBuffer(_) => 0x8000_0004,
            Self::Memory(_) => 0x8000_0007,
        }
    }
}
