//! Reasons why requests of the guest are refused, and the only place that maps them to error numbers.

use pvrdma_guest_memory::{DmaError, OverBudget, PinError};
use pvrdma_verbs::VerbsError;
use thiserror::Error;

use crate::abi::cmd::Opcode;
use crate::ring::RingShapeError;

/// Numbers for the ERR register. The driver treats every value but 0 as a failure, and logs it (section 4.2).
mod errno {
    pub(super) const ENOENT: u8 = 2;
    pub(super) const EIO: u8 = 5;
    pub(super) const ENOMEM: u8 = 12;
    pub(super) const EACCES: u8 = 13;
    pub(super) const EFAULT: u8 = 14;
    pub(super) const EBUSY: u8 = 16;
    pub(super) const ENODEV: u8 = 19;
    pub(super) const EINVAL: u8 = 22;
    pub(super) const ENOSPC: u8 = 28;
    pub(super) const ENOSYS: u8 = 38;
}

/// Reason why a command is refused.
#[derive(Debug, Error)]
pub(crate) enum CmdError {
    /// The command does not exist.
    #[error("unknown {0}")]
    Unknown(Opcode),
    /// A handle names no object.
    #[error("no {0} {1}")]
    NoSuch(&'static str, u32),
    /// A parameter is out of range.
    #[error("invalid {0}: {1:#x}")]
    Invalid(&'static str, u64),
    /// A parameter names an object of another owner.
    #[error("{0} belongs to another context")]
    Foreign(&'static str),
    /// An object exists already.
    #[error("{0} is taken")]
    Taken(&'static str),
    /// A table is full or a budget used up.
    #[error("no room for another {0}")]
    NoRoom(&'static str),
    /// The device would exceed its memory budget.
    #[error(transparent)]
    Budget(#[from] OverBudget),
    /// Guest memory could not be accessed.
    #[error(transparent)]
    Memory(#[from] DmaError),
    /// A ring does not fit its pages.
    #[error(transparent)]
    Shape(#[from] RingShapeError),
    /// The adapter refused the operation.
    #[error(transparent)]
    Verbs(#[from] VerbsError),
}

impl CmdError {
    /// Returns the number for ERR, or for `err` of a MODIFY_QP response. Never 0.
    pub(crate) const fn code(&self) -> u8 {
        match self {
            Self::Unknown(_) => errno::ENOSYS,
            Self::NoSuch(..) => errno::ENOENT,
            Self::Invalid(..) | Self::Shape(_) => errno::EINVAL,
            Self::Foreign(_) => errno::EACCES,
            Self::Taken(_) => errno::EBUSY,
            Self::NoRoom(_) => errno::ENOSPC,
            Self::Budget(_) => errno::ENOMEM,
            Self::Memory(_) => errno::EFAULT,
            Self::Verbs(error) => match error {
                VerbsError::Exhausted(_) | VerbsError::Budget(_) => errno::ENOMEM,
                VerbsError::Invalid(_) | VerbsError::Transition(_) => errno::EINVAL,
                VerbsError::Unsupported(_) => errno::ENOSYS,
                VerbsError::InUse(_) => errno::EBUSY,
                VerbsError::NotAllowed(_) => errno::EACCES,
                VerbsError::Gone => errno::ENOENT,
                VerbsError::Memory(_) => errno::EFAULT,
                VerbsError::Host(_) => errno::EIO,
            },
        }
    }
}

/// Reason why a DSR is not accepted (section 2.2).
#[derive(Debug, Error)]
pub(crate) enum HandshakeError {
    /// The region or a slot is not aligned.
    #[error("{0} at {1:#x} is not aligned")]
    Misaligned(&'static str, u64),
    /// Guest memory could not be accessed.
    #[error("{0}: {1}")]
    Memory(&'static str, DmaError),
    /// The device is paused, and does not access guest memory.
    #[error("the device is paused")]
    Paused,
    /// The device reads zeros where the driver has written.
    #[error("the shared region is empty: the guest's memory is private to the VMM (it needs share=on)")]
    PrivateMemory,
    /// A ring has too few or too many pages.
    #[error("{0} of {1} pages")]
    RingPages(&'static str, u32),
    /// A ring cannot be created.
    #[error(transparent)]
    Shape(#[from] RingShapeError),
}

/// Reason why a write to CTL or REQUEST fails.
#[derive(Debug, Error)]
pub(crate) enum RegisterError {
    /// There is no accepted DSR, or the device is not active.
    #[error("the device is not {0}")]
    NotReady(&'static str),
    /// Bus mastering is disabled.
    #[error("bus mastering is off")]
    Masked,
    /// The device is paused.
    #[error("the device is paused")]
    Paused,
    /// The control function does not exist.
    #[error("unknown control {0:#x}")]
    Control(u32),
    /// Guest memory could not be locked as configured.
    #[error(transparent)]
    Pin(#[from] PinError),
    /// The command was refused.
    #[error("{0} refused: {1}")]
    Command(Opcode, CmdError),
    /// The command slot cannot be read.
    #[error("command slot: {0}")]
    Slot(DmaError),
}

impl RegisterError {
    /// Returns the number for ERR. Never 0.
    pub(crate) const fn code(&self) -> u8 {
        match self {
            Self::NotReady(_) => errno::ENODEV,
            Self::Masked => errno::EIO,
            Self::Paused => errno::EBUSY,
            Self::Control(_) => errno::EINVAL,
            Self::Pin(_) => errno::ENOMEM,
            Self::Command(_, error) => error.code(),
            Self::Slot(_) => errno::EFAULT,
        }
    }
}
