//! The opcode table: meaning, extension headers and payload length of each packet type (IBA 9.2.1, congestion
//! notifications: annex A17.9).

use std::fmt;

/// A BTH opcode. Any byte is possible; [`Opcode::info`] knows the defined ones.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Opcode(pub u8);

/// Transport service, from the top three bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Service {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Unreliable datagram.
    Ud,
    /// Congestion notification.
    Congestion,
}

/// Operation that the packet belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[expect(missing_docs, reason = "each is the operation of the same name")]
pub enum Operation {
    Send,
    Write,
    ReadRequest,
    ReadResponse,
    Acknowledge,
    AtomicAcknowledge,
    CompareSwap,
    FetchAdd,
    Flush,
    AtomicWrite,
    CongestionNotification,
}

impl Operation {
    /// Returns `true` if the packet goes from responder to requester.
    #[inline]
    pub const fn is_response(self) -> bool {
        matches!(self, Self::ReadResponse | Self::Acknowledge | Self::AtomicAcknowledge)
    }
}

/// Position of the packet in its message.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Position {
    /// First packet; more follow.
    First,
    /// Neither the first nor the last packet.
    Middle,
    /// Last packet of a message of several packets.
    Last,
    /// Only packet of its message.
    Only,
}

impl Position {
    /// Returns `true` if the packet starts a message.
    #[inline]
    pub const fn starts(self) -> bool {
        matches!(self, Self::First | Self::Only)
    }

    /// Returns `true` if the packet ends a message.
    #[inline]
    pub const fn ends(self) -> bool {
        matches!(self, Self::Last | Self::Only)
    }

    /// Returns the position of a packet, given whether it is the first and whether it is the last.
    #[inline]
    pub const fn of(first: bool, last: bool) -> Self {
        match (first, last) {
            (true, true) => Self::Only,
            (true, false) => Self::First,
            (false, true) => Self::Last,
            (false, false) => Self::Middle,
        }
    }
}

/// Combination of extension headers, in this order.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Shape {
    /// No extension header.
    None,
    /// ImmDt.
    ImmDt,
    /// IETH.
    Ieth,
    /// RETH.
    Reth,
    /// RETH, ImmDt.
    RethImmDt,
    /// AETH.
    Aeth,
    /// AETH, AtomicAckETH.
    AtomicAckEth,
    /// AtomicETH.
    AtomicEth,
    /// DETH.
    Deth,
    /// DETH, ImmDt.
    DethImmDt,
    /// FETH, RETH.
    FethReth,
}

/// Permitted payload length.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum PayloadRule {
    /// Exactly this number of bytes.
    Exactly(u8),
    /// A full path MTU.
    Full,
    /// 1 byte to a full path MTU.
    Rest,
    /// 0 bytes to a full path MTU.
    Any,
}

impl PayloadRule {
    /// Returns `true` if a payload of `len` bytes is legal with a path MTU of `mtu` bytes.
    #[inline]
    pub const fn allows(self, len: usize, mtu: usize) -> bool {
        match self {
            Self::Exactly(exactly) => len == exactly as usize,
            Self::Full => len == mtu,
            Self::Rest => len >= 1 && len <= mtu,
            Self::Any => len <= mtu,
        }
    }
}

/// Properties of an opcode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OpcodeInfo {
    /// Transport service.
    pub service: Service,
    /// Operation.
    pub operation: Operation,
    /// Position in the message.
    pub position: Position,
    /// Extension headers.
    pub shape: Shape,
    /// Payload length.
    pub payload: PayloadRule,
    /// Name without the service.
    pub name: &'static str,
}

const NO_PAYLOAD: PayloadRule = PayloadRule::Exactly(0);

/// Returns one line of the table: the meaning of the low five bits.
const fn line(low: u8) -> Option<(Operation, Position, Shape, PayloadRule, &'static str)> {
    use Operation as O;
    use PayloadRule::{Any, Exactly, Full, Rest};
    use Position::{First, Last, Middle, Only};
    use Shape as S;
    Some(match low {
        0x00 => (O::Send, First, S::None, Full, "SEND_FIRST"),
        0x01 => (O::Send, Middle, S::None, Full, "SEND_MIDDLE"),
        0x02 => (O::Send, Last, S::None, Rest, "SEND_LAST"),
        0x03 => (O::Send, Last, S::ImmDt, Rest, "SEND_LAST_WITH_IMMEDIATE"),
        0x04 => (O::Send, Only, S::None, Any, "SEND_ONLY"),
        0x05 => (O::Send, Only, S::ImmDt, Any, "SEND_ONLY_WITH_IMMEDIATE"),
        0x06 => (O::Write, First, S::Reth, Full, "RDMA_WRITE_FIRST"),
        0x07 => (O::Write, Middle, S::None, Full, "RDMA_WRITE_MIDDLE"),
        0x08 => (O::Write, Last, S::None, Rest, "RDMA_WRITE_LAST"),
        0x09 => (O::Write, Last, S::ImmDt, Rest, "RDMA_WRITE_LAST_WITH_IMMEDIATE"),
        0x0a => (O::Write, Only, S::Reth, Any, "RDMA_WRITE_ONLY"),
        0x0b => (O::Write, Only, S::RethImmDt, Any, "RDMA_WRITE_ONLY_WITH_IMMEDIATE"),
        0x0c => (O::ReadRequest, Only, S::Reth, NO_PAYLOAD, "RDMA_READ_REQUEST"),
        0x0d => (O::ReadResponse, First, S::Aeth, Full, "RDMA_READ_RESPONSE_FIRST"),
        0x0e => (O::ReadResponse, Middle, S::None, Full, "RDMA_READ_RESPONSE_MIDDLE"),
        0x0f => (O::ReadResponse, Last, S::Aeth, Rest, "RDMA_READ_RESPONSE_LAST"),
        0x10 => (O::ReadResponse, Only, S::Aeth, Any, "RDMA_READ_RESPONSE_ONLY"),
        0x11 => (O::Acknowledge, Only, S::Aeth, NO_PAYLOAD, "ACKNOWLEDGE"),
        0x12 => (O::AtomicAcknowledge, Only, S::AtomicAckEth, NO_PAYLOAD, "ATOMIC_ACKNOWLEDGE"),
        0x13 => (O::CompareSwap, Only, S::AtomicEth, NO_PAYLOAD, "COMPARE_SWAP"),
        0x14 => (O::FetchAdd, Only, S::AtomicEth, NO_PAYLOAD, "FETCH_ADD"),
        0x16 => (O::Send, Last, S::Ieth, Rest, "SEND_LAST_WITH_INVALIDATE"),
        0x17 => (O::Send, Only, S::Ieth, Any, "SEND_ONLY_WITH_INVALIDATE"),
        0x1c => (O::Flush, Only, S::FethReth, NO_PAYLOAD, "FLUSH"),
        0x1d => (O::AtomicWrite, Only, S::Reth, Exactly(8), "ATOMIC_WRITE"),
        _ => return None,
    })
}

const fn describe(byte: u8) -> Option<OpcodeInfo> {
    let service = match byte >> 5 {
        0 => Service::Rc,
        1 => Service::Uc,
        3 => Service::Ud,
        4 if byte == Opcode::CNP.0 => {
            return Some(OpcodeInfo {
                service: Service::Congestion,
                operation: Operation::CongestionNotification,
                position: Position::Only,
                shape: Shape::None,
                payload: PayloadRule::Exactly(16),
                name: "CNP",
            });
        }
        _ => return None,
    };
    let Some((operation, position, shape, payload, name)) = line(byte & 0x1f) else {
        return None;
    };
    let (shape, defined) = match service {
        Service::Ud => match shape {
            Shape::None => (Shape::Deth, matches!(position, Position::Only)),
            _ => (Shape::DethImmDt, matches!((position, shape), (Position::Only, Shape::ImmDt))),
        },
        Service::Uc => (shape, byte & 0x1f <= 0x0b),
        Service::Rc | Service::Congestion => (shape, true),
    };
    if defined { Some(OpcodeInfo { service, operation, position, shape, payload, name }) } else { None }
}

static TABLE: [Option<OpcodeInfo>; 256] = {
    let mut table = [None; 256];
    let mut byte = 0_u8;
    loop {
        table[byte as usize] = describe(byte);
        if byte == u8::MAX {
            break table;
        }
        byte += 1;
    }
};

impl Opcode {
    /// RDMA READ request.
    pub const READ_REQUEST: Self = Self(0x0c);
    /// Acknowledgement.
    pub const ACKNOWLEDGE: Self = Self(0x11);
    /// Response to an atomic operation.
    pub const ATOMIC_ACKNOWLEDGE: Self = Self(0x12);
    /// Compare and swap.
    pub const COMPARE_SWAP: Self = Self(0x13);
    /// Fetch and add.
    pub const FETCH_ADD: Self = Self(0x14);
    /// Datagram.
    pub const UD_SEND: Self = Self(0x64);
    /// Datagram with immediate data.
    pub const UD_SEND_IMMEDIATE: Self = Self(0x65);
    /// Congestion notification packet.
    pub const CNP: Self = Self(0x81);

    /// Returns the properties of this opcode; `None` if it is undefined.
    #[inline]
    pub fn info(self) -> Option<&'static OpcodeInfo> {
        TABLE[usize::from(self.0)].as_ref()
    }

    /// Packet of an RC SEND.
    #[inline]
    pub const fn send(position: Position) -> Self {
        Self(match position {
            Position::First => 0x00,
            Position::Middle => 0x01,
            Position::Last => 0x02,
            Position::Only => 0x04,
        })
    }

    /// Last packet of an RC SEND with immediate data.
    #[inline]
    pub const fn send_immediate(only: bool) -> Self {
        Self(if only { 0x05 } else { 0x03 })
    }

    /// Last packet of an RC SEND with invalidate.
    #[inline]
    pub const fn send_invalidate(only: bool) -> Self {
        Self(if only { 0x17 } else { 0x16 })
    }

    /// Packet of an RC RDMA WRITE.
    #[inline]
    pub const fn write(position: Position) -> Self {
        Self(match position {
            Position::First => 0x06,
            Position::Middle => 0x07,
            Position::Last => 0x08,
            Position::Only => 0x0a,
        })
    }

    /// Last packet of an RC RDMA WRITE with immediate data.
    #[inline]
    pub const fn write_immediate(only: bool) -> Self {
        Self(if only { 0x0b } else { 0x09 })
    }

    /// Packet of a response to an RDMA READ.
    #[inline]
    pub const fn read_response(position: Position) -> Self {
        Self(match position {
            Position::First => 0x0d,
            Position::Middle => 0x0e,
            Position::Last => 0x0f,
            Position::Only => 0x10,
        })
    }
}

impl fmt::Display for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.info() {
            Some(OpcodeInfo { service: Service::Congestion, name, .. }) => f.write_str(name),
            Some(info) => write!(f, "{:?} {}", info.service, info.name),
            None => write!(f, "opcode {:#04x}", self.0),
        }
    }
}

impl fmt::Debug for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defined_opcodes() {
        let defined: Vec<u8> = (0..=u8::MAX).filter(|&byte| Opcode(byte).info().is_some()).collect();
        let expected: Vec<u8> =
            (0x00..=0x14).chain([0x16, 0x17, 0x1c, 0x1d]).chain(0x20..=0x2b).chain([0x64, 0x65, 0x81]).collect();
        assert_eq!(defined, expected);
    }

    #[test]
    fn constructors_agree_with_the_table() {
        for position in [Position::First, Position::Middle, Position::Last, Position::Only] {
            for (opcode, operation) in [
                (Opcode::send(position), Operation::Send),
                (Opcode::write(position), Operation::Write),
                (Opcode::read_response(position), Operation::ReadResponse),
            ] {
                let info = opcode.info().unwrap();
                assert_eq!((info.operation, info.position), (operation, position), "{opcode}");
            }
        }
        for only in [false, true] {
            for (opcode, shape) in [
                (Opcode::send_immediate(only), Shape::ImmDt),
                (Opcode::send_invalidate(only), Shape::Ieth),
                (Opcode::write_immediate(only), if only { Shape::RethImmDt } else { Shape::ImmDt }),
            ] {
                let info = opcode.info().unwrap();
                assert_eq!((info.shape, info.position == Position::Only), (shape, only), "{opcode}");
            }
        }
    }

    #[test]
    fn every_place_in_a_message() {
        for (first, last, position) in [
            (true, true, Position::Only),
            (true, false, Position::First),
            (false, true, Position::Last),
            (false, false, Position::Middle),
        ] {
            assert_eq!(Position::of(first, last), position);
            assert_eq!((position.starts(), position.ends()), (first, last));
        }
    }

    #[test]
    fn every_payload_of_a_small_path() {
        const MTU: usize = 16;
        for len in 0..2 * MTU {
            let allowed = [PayloadRule::Exactly(8), PayloadRule::Full, PayloadRule::Rest, PayloadRule::Any]
                .map(|rule| rule.allows(len, MTU));
            assert_eq!(allowed, [len == 8, len == MTU, (1..=MTU).contains(&len), (0..=MTU).contains(&len)], "{len}");
        }
    }

    #[test]
    fn responses_are_those_of_a_responder() {
        for byte in 0..=u8::MAX {
            let response = Opcode(byte).info().is_some_and(|info| info.operation.is_response());
            assert_eq!(response, (0x0d..=0x12).contains(&byte), "{byte:#04x}");
        }
    }

    #[test]
    fn names() {
        assert_eq!(Opcode(0x65).to_string(), "Ud SEND_ONLY_WITH_IMMEDIATE");
        assert_eq!(Opcode::CNP.to_string(), "CNP");
        assert_eq!(format!("{:?}", Opcode::CNP), "CNP");
        assert_eq!(Opcode(0x15).to_string(), "opcode 0x15");
    }
}
