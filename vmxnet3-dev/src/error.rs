//! Errors.

use pvrdma_guest_memory::DmaError;
use thiserror::Error;

use crate::abi::queue_desc::QueueDescError;
use crate::abi::rss_conf::RssConfError;

/// Reason a device cannot be created.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The number of vectors is outside 3 to 25.
    #[error("{0} interrupt vectors, not 3 to 25")]
    Vectors(u16),
    /// The process or system is out of file descriptors for the link.
    #[cfg(feature = "link")]
    #[error("no descriptor for the link: {0}")]
    Descriptors(rustix::io::Errno),
}

/// Reason a command is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub(crate) enum CommandError {
    /// The revision that the driver chose has no such command.
    #[error("unknown command {0:#x}")]
    Unknown(u32),
    /// The VMM has paused the device.
    #[error("a command during a pause")]
    Paused,
    /// Bus mastering is off.
    #[error("bus mastering is off")]
    Masked,
    /// The shared area does not start with the magic number.
    #[error("no shared area at {0:#x}")]
    NoShared(u64),
    /// Guest memory could not be reached.
    #[error("{0}: {1}")]
    Memory(&'static str, DmaError),
    /// A value is out of range.
    #[error("invalid {0}: {1:#x}")]
    Invalid(&'static str, u64),
    /// A queue is invalid.
    #[error("{0} queue {1}: {2}")]
    Queue(&'static str, u8, QueueDescError),
    /// The RSS configuration is invalid.
    #[error(transparent)]
    Rss(#[from] RssConfError),
}

/// Reason a queue has stopped. It stays stopped until the driver resets the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub(crate) enum QueueError {
    /// A frame has no end-of-packet descriptor.
    #[error("no end of packet")]
    NoEnd,
    /// A frame has too many descriptors.
    #[error("too many descriptors")]
    TooMany,
    /// The driver uses a feature that its revision does not have.
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
    /// Returns the error code for the queue's status. Never 0.
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
