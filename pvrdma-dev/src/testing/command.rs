//! Driver's side of the command channel (spec §4).

use thiserror::Error;

/// Bytes that the driver copies to the request slot for every command.
pub const REQUEST_SIZE: usize = 184;

/// Bytes that the driver copies from the response slot.
pub const RESPONSE_SIZE: usize = 176;

/// Commands (spec §4.1).
#[expect(missing_docs, reason = "the names of the specification")]
pub mod command_id {
    pub const QUERY_PORT: u32 = 0;
    pub const QUERY_PKEY: u32 = 1;
    pub const CREATE_PD: u32 = 2;
    pub const DESTROY_PD: u32 = 3;
    pub const CREATE_MR: u32 = 4;
    pub const DESTROY_MR: u32 = 5;
    pub const CREATE_CQ: u32 = 6;
    pub const RESIZE_CQ: u32 = 7;
    pub const DESTROY_CQ: u32 = 8;
    pub const CREATE_QP: u32 = 9;
    pub const MODIFY_QP: u32 = 10;
    pub const QUERY_QP: u32 = 11;
    pub const DESTROY_QP: u32 = 12;
    pub const CREATE_UC: u32 = 13;
    pub const DESTROY_UC: u32 = 14;
    pub const CREATE_BIND: u32 = 15;
    pub const DESTROY_BIND: u32 = 16;
    pub const CREATE_SRQ: u32 = 17;
    pub const MODIFY_SRQ: u32 = 18;
    pub const QUERY_SRQ: u32 = 19;
    pub const DESTROY_SRQ: u32 = 20;
}

/// Size in bytes of each request structure, and whether the driver waits for a response.
const SHAPES: [(usize, bool); 21] = [
    (24, true),
    (24, true),
    (24, true),
    (24, false),
    (56, true),
    (24, false),
    (40, true),
    (24, true),
    (24, false),
    (80, true),
    (184, true),
    (24, true),
    (24, false),
    (24, true),
    (24, false),
    (48, false),
    (40, false),
    (56, true),
    (40, false),
    (24, true),
    (24, false),
];

/// Failure of a command (spec §4.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum CommandError {
    /// E1: reported by the ERR register.
    #[error("refused, ERR is {0:#x}")]
    Refused(u32),
    /// E2: the response acknowledges another command.
    #[error("wrong acknowledgement {ack:#x}, err {err}")]
    WrongAck {
        /// Acknowledgement found.
        ack: u32,
        /// Error byte.
        err: u8,
    },
    /// E3: reported by the error byte, which the driver reads only for MODIFY_QP.
    #[error("the response has err {0}")]
    Failed(u8),
    /// E4: no interrupt.
    #[error("no response")]
    Timeout,
}

/// Request for the slot.
#[derive(Clone, Debug)]
pub struct Request {
    bytes: [u8; REQUEST_SIZE],
    id: u32,
}

impl Request {
    /// Creates a request with zeroes in the command's structure and stack garbage behind it.
    pub fn new(id: u32) -> Self {
        let size = SHAPES.get(id as usize).map_or(16, |(size, _)| *size);
        let mut bytes = std::array::from_fn(|i| (i as u8).wrapping_mul(167) ^ 0x5a);
        bytes[..size].fill(0);
        bytes[8..12].copy_from_slice(&id.to_le_bytes());
        Self { bytes, id }
    }

    /// Creates a request with these bytes.
    pub fn raw(bytes: [u8; REQUEST_SIZE]) -> Self {
        let id = u32::from_le_bytes(bytes[8..12].try_into().unwrap());
        Self { bytes, id }
    }

    /// Returns the command id.
    pub const fn id(&self) -> u32 {
        self.id
    }

    /// Returns `true` if the driver waits for a response.
    pub fn is_waited(&self) -> bool {
        SHAPES.get(self.id as usize).is_some_and(|(_, waited)| *waited)
    }

    /// Returns the bytes.
    pub const fn bytes(&self) -> &[u8; REQUEST_SIZE] {
        &self.bytes
    }

    /// Sets bytes.
    #[must_use]
    pub fn set(mut self, at: usize, value: &[u8]) -> Self {
        self.bytes[at..at + value.len()].copy_from_slice(value);
        self
    }

    /// Sets a number.
    #[must_use]
    pub fn u8(self, at: usize, value: u8) -> Self {
        self.set(at, &[value])
    }

    /// Sets a number.
    #[must_use]
    pub fn u16(self, at: usize, value: u16) -> Self {
        self.set(at, &value.to_le_bytes())
    }

    /// Sets a number.
    #[must_use]
    pub fn u32(self, at: usize, value: u32) -> Self {
        self.set(at, &value.to_le_bytes())
    }

    /// Sets a number.
    #[must_use]
    pub fn u64(self, at: usize, value: u64) -> Self {
        self.set(at, &value.to_le_bytes())
    }

    /// Sets the correlation key that the response must echo.
    #[must_use]
    pub fn key(self, key: u64) -> Self {
        self.u64(0, key)
    }
}

/// Response as copied by the driver.
#[derive(Clone, Debug)]
pub struct Response(pub [u8; RESPONSE_SIZE]);

impl Response {
    /// Bytes at an offset.
    pub fn bytes<const N: usize>(&self, at: usize) -> [u8; N] {
        self.0[at..at + N].try_into().unwrap()
    }

    /// A number.
    pub fn u8(&self, at: usize) -> u8 {
        self.0[at]
    }

    /// A number.
    pub fn u16(&self, at: usize) -> u16 {
        u16::from_le_bytes(self.bytes(at))
    }

    /// A number.
    pub fn u32(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.bytes(at))
    }

    /// A number.
    pub fn u64(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.bytes(at))
    }

    /// Checks the header as the driver does, and the error byte as well, because a driver would accept the response
    /// despite it.
    pub(super) fn check(self, request: &Request) -> Result<Self, CommandError> {
        let (ack, err) = (self.u32(8), self.u8(12));
        if ack != 0x8000_0000 | request.id {
            return Err(CommandError::WrongAck { ack, err });
        }
        assert_eq!(self.bytes::<8>(0), request.bytes[..8], "the response must echo the request's key");
        if err != 0 {
            return Err(CommandError::Failed(err));
        }
        Ok(self)
    }
}
