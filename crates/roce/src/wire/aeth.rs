//! The ACK extended transport header (IBA 9.3.5) and its syndrome: ACK, RNR NAK or NAK, and the meaning of their codes
//! (IBA 9.7.5.1, 9.7.5.2.8).

use std::fmt;
use std::time::Duration;

use pvrdma_packet::field::{u24, u24_bytes};

/// ACK extended transport header.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Aeth {
    /// ACK or NAK.
    pub syndrome: Syndrome,
    /// Messages completed so far, 24 bits; informational.
    pub msn: u32,
}

impl Aeth {
    #[inline]
    pub(super) const fn from_bytes([syndrome, high, middle, low]: [u8; 4]) -> Self {
        Self { syndrome: Syndrome::from_byte(syndrome), msn: u24([high, middle, low]) }
    }

    #[inline]
    pub(super) const fn to_bytes(self) -> [u8; 4] {
        let [high, middle, low] = u24_bytes(self.msn);
        [self.syndrome.byte(), high, middle, low]
    }
}

/// Reason why a request was refused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum NakCode {
    /// A packet is missing: the requester retransmits from the PSN of the NAK on.
    SequenceError,
    /// Invalid opcode, length or order, or an operation that is not enabled.
    InvalidRequest,
    /// The R_Key does not allow the access.
    RemoteAccess,
    /// The responder has an internal error.
    RemoteOperation,
    /// Reliable datagrams only.
    InvalidRdRequest,
    /// Undefined: 5..=31.
    Reserved(u8),
}

/// The syndrome byte of an AETH. Every byte maps to a value, and every value maps back to its byte.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Syndrome {
    /// Everything up to the PSN was executed. The credit code (IBA 9.7.7.2) tells how many receives are posted. It is
    /// ignored when received, and always sent as 31: "no credits".
    Ack {
        /// Credit code, 0..=31.
        credits: u8,
    },
    /// No receive was posted; the requester retries after [`rnr_delay`].
    RnrNak {
        /// Timer code, 0..=31.
        timer: u8,
    },
    /// The request was refused.
    Nak(NakCode),
    /// Undefined.
    Reserved(u8),
}

/// Credit code that carries no information.
const NO_CREDITS: u8 = 31;

impl Syndrome {
    /// A positive acknowledgement without credits.
    pub const ACK: Self = Self::Ack { credits: NO_CREDITS };

    /// Decodes the byte on the wire.
    #[inline]
    pub const fn from_byte(byte: u8) -> Self {
        let low = byte & 0x1f;
        match byte >> 5 {
            0 => Self::Ack { credits: low },
            1 => Self::RnrNak { timer: low },
            3 => Self::Nak(match low {
                0 => NakCode::SequenceError,
                1 => NakCode::InvalidRequest,
                2 => NakCode::RemoteAccess,
                3 => NakCode::RemoteOperation,
                4 => NakCode::InvalidRdRequest,
                other => NakCode::Reserved(other),
            }),
            _ => Self::Reserved(byte),
        }
    }

    /// Encodes the byte on the wire.
    #[inline]
    pub const fn byte(self) -> u8 {
        match self {
            Self::Ack { credits } => credits & 0x1f,
            Self::RnrNak { timer } => 0x20 | timer & 0x1f,
            Self::Nak(code) => {
                0x60 | match code {
                    NakCode::SequenceError => 0,
                    NakCode::InvalidRequest => 1,
                    NakCode::RemoteAccess => 2,
                    NakCode::RemoteOperation => 3,
                    NakCode::InvalidRdRequest => 4,
                    NakCode::Reserved(other) => other & 0x1f,
                }
            }
            Self::Reserved(byte) => byte,
        }
    }
}

impl fmt::Display for Syndrome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ack { credits: NO_CREDITS } => f.write_str("ACK"),
            Self::Ack { credits } => write!(f, "ACK credits {credits}"),
            Self::RnrNak { timer } => write!(f, "RNR NAK {:?}", rnr_delay(*timer)),
            Self::Nak(code) => write!(f, "NAK {code:?}"),
            Self::Reserved(byte) => write!(f, "syndrome {byte:#04x}"),
        }
    }
}

/// Wait that an RNR NAK with this timer code requests (IBA table 45), in units of 10 µs.
const RNR_DELAYS: [u32; 32] = [
    65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096,
    6144, 8192, 12288, 16384, 24576, 32768, 49152,
];

/// Returns the wait that an RNR NAK with this timer code (0..=31) requests.
#[inline]
pub fn rnr_delay(timer: u8) -> Duration {
    let units = RNR_DELAYS.get(usize::from(timer & 0x1f)).copied().unwrap_or_default();
    Duration::from_micros(10).saturating_mul(units)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn syndromes_are_lossless() {
        for byte in 0..=u8::MAX {
            assert_eq!(Syndrome::from_byte(byte).byte(), byte);
        }
        assert_eq!(Syndrome::from_byte(0x1f), Syndrome::ACK);
        assert_eq!(Syndrome::from_byte(0x62), Syndrome::Nak(NakCode::RemoteAccess));
        assert_eq!(Syndrome::from_byte(0x34), Syndrome::RnrNak { timer: 20 });
    }

    #[test]
    fn rnr_timers() {
        assert_eq!(rnr_delay(0), Duration::from_micros(655_360));
        assert_eq!(rnr_delay(1), Duration::from_micros(10));
        assert_eq!(rnr_delay(20), Duration::from_micros(10_240));
        assert_eq!(rnr_delay(31), Duration::from_micros(491_520));
    }
}
