//! Extension headers, between BTH and payload (IBA 9.3).

use pvrdma_verbs::Qpn;

use super::aeth::Syndrome;
use super::opcode::Shape;
use super::{field, put, u24, u24_bytes};

/// RDMA extended transport header.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Reth {
    /// Virtual address at the responder.
    pub address: u64,
    /// The responder's key.
    pub rkey: u32,
    /// Bytes of the whole message.
    pub length: u32,
}

impl Reth {
    fn from_bytes(header: &[u8; 16]) -> Self {
        Self {
            address: u64::from_be_bytes(field::<0, _, _>(header)),
            rkey: u32::from_be_bytes(field::<8, _, _>(header)),
            length: u32::from_be_bytes(field::<12, _, _>(header)),
        }
    }

    fn to_bytes(self) -> [u8; 16] {
        let mut header = [0; 16];
        put::<0, _, _>(&mut header, self.address.to_be_bytes());
        put::<8, _, _>(&mut header, self.rkey.to_be_bytes());
        put::<12, _, _>(&mut header, self.length.to_be_bytes());
        header
    }
}

/// Extended transport header of an atomic operation. Operands are numbers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct AtomicEth {
    /// Virtual address at the responder.
    pub address: u64,
    /// The responder's key.
    pub rkey: u32,
    /// Value to swap in, or to add.
    pub swap_or_add: u64,
    /// Value to compare with.
    pub compare: u64,
}

impl AtomicEth {
    fn from_bytes(header: &[u8; 28]) -> Self {
        Self {
            address: u64::from_be_bytes(field::<0, _, _>(header)),
            rkey: u32::from_be_bytes(field::<8, _, _>(header)),
            swap_or_add: u64::from_be_bytes(field::<12, _, _>(header)),
            compare: u64::from_be_bytes(field::<20, _, _>(header)),
        }
    }

    fn to_bytes(self) -> [u8; 28] {
        let mut header = [0; 28];
        put::<0, _, _>(&mut header, self.address.to_be_bytes());
        put::<8, _, _>(&mut header, self.rkey.to_be_bytes());
        put::<12, _, _>(&mut header, self.swap_or_add.to_be_bytes());
        put::<20, _, _>(&mut header, self.compare.to_be_bytes());
        header
    }
}

/// ACK extended transport header.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Aeth {
    /// ACK or NAK.
    pub syndrome: Syndrome,
    /// Messages completed so far, 24 bits; for information.
    pub msn: u32,
}

impl Aeth {
    const fn from_bytes([syndrome, high, middle, low]: [u8; 4]) -> Self {
        Self { syndrome: Syndrome::from_byte(syndrome), msn: u24([high, middle, low]) }
    }

    const fn to_bytes(self) -> [u8; 4] {
        let [high, middle, low] = u24_bytes(self.msn);
        [self.syndrome.byte(), high, middle, low]
    }
}

/// Datagram extended transport header.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Deth {
    /// Key that the receiver must have, too.
    pub qkey: u32,
    /// Sender.
    pub source: Qpn,
}

impl Deth {
    fn from_bytes(header: &[u8; 8]) -> Self {
        Self { qkey: u32::from_be_bytes(field::<0, _, _>(header)), source: Qpn::new(u24(field::<5, _, _>(header))) }
    }

    fn to_bytes(self) -> [u8; 8] {
        let mut header = [0; 8];
        put::<0, _, _>(&mut header, self.qkey.to_be_bytes());
        put::<5, _, _>(&mut header, u24_bytes(self.source.get()));
        header
    }
}

/// FLUSH extended transport header.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Feth {
    /// 1 global visibility, 2 persistence.
    pub placement: u8,
    /// 0 a range, 1 the whole memory region.
    pub selectivity: u8,
}

impl Feth {
    const fn from_bytes([.., low]: [u8; 4]) -> Self {
        Self { placement: low & 0xf, selectivity: low >> 4 & 3 }
    }

    const fn to_bytes(self) -> [u8; 4] {
        [0, 0, 0, (self.selectivity & 3) << 4 | self.placement & 0xf]
    }
}

/// The extension headers of a packet, in one of the combinations that opcodes have.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Extension {
    /// None.
    #[default]
    None,
    /// ImmDt: four bytes in the order of the consumer's memory.
    Immediate([u8; 4]),
    /// IETH: a key to invalidate.
    Invalidate(u32),
    /// RETH.
    Rdma(Reth),
    /// RETH and ImmDt.
    RdmaImmediate(Reth, [u8; 4]),
    /// AETH.
    Ack(Aeth),
    /// AETH and AtomicAckETH: the value before the operation.
    AtomicAck(Aeth, u64),
    /// AtomicETH.
    Atomic(AtomicEth),
    /// DETH.
    Datagram(Deth),
    /// DETH and ImmDt.
    DatagramImmediate(Deth, [u8; 4]),
    /// FETH and RETH.
    Flush(Feth, Reth),
}

impl Extension {
    /// Most bytes that any combination takes.
    pub(super) const MAX_LEN: usize = 28;

    /// Which combination this is.
    pub const fn shape(&self) -> Shape {
        match self {
            Self::None => Shape::None,
            Self::Immediate(_) => Shape::Immediate,
            Self::Invalidate(_) => Shape::Invalidate,
            Self::Rdma(_) => Shape::Rdma,
            Self::RdmaImmediate(..) => Shape::RdmaImmediate,
            Self::Ack(_) => Shape::Ack,
            Self::AtomicAck(..) => Shape::AtomicAck,
            Self::Atomic(_) => Shape::Atomic,
            Self::Datagram(_) => Shape::Datagram,
            Self::DatagramImmediate(..) => Shape::DatagramImmediate,
            Self::Flush(..) => Shape::Flush,
        }
    }

    /// Takes the headers of this shape off the front. `None` if there are too few bytes.
    pub(super) fn parse(shape: Shape, bytes: &[u8]) -> Option<(Self, &[u8])> {
        Some(match shape {
            Shape::None => (Self::None, bytes),
            Shape::Immediate => {
                let (immediate, rest) = bytes.split_first_chunk()?;
                (Self::Immediate(*immediate), rest)
            }
            Shape::Invalidate => {
                let (key, rest) = bytes.split_first_chunk()?;
                (Self::Invalidate(u32::from_be_bytes(*key)), rest)
            }
            Shape::Rdma => {
                let (reth, rest) = bytes.split_first_chunk()?;
                (Self::Rdma(Reth::from_bytes(reth)), rest)
            }
            Shape::RdmaImmediate => {
                let (reth, rest) = bytes.split_first_chunk()?;
                let (immediate, rest) = rest.split_first_chunk()?;
                (Self::RdmaImmediate(Reth::from_bytes(reth), *immediate), rest)
            }
            Shape::Ack => {
                let (aeth, rest) = bytes.split_first_chunk()?;
                (Self::Ack(Aeth::from_bytes(*aeth)), rest)
            }
            Shape::AtomicAck => {
                let (aeth, rest) = bytes.split_first_chunk()?;
                let (original, rest) = rest.split_first_chunk()?;
                (Self::AtomicAck(Aeth::from_bytes(*aeth), u64::from_be_bytes(*original)), rest)
            }
            Shape::Atomic => {
                let (atomic, rest) = bytes.split_first_chunk()?;
                (Self::Atomic(AtomicEth::from_bytes(atomic)), rest)
            }
            Shape::Datagram => {
                let (deth, rest) = bytes.split_first_chunk()?;
                (Self::Datagram(Deth::from_bytes(deth)), rest)
            }
            Shape::DatagramImmediate => {
                let (deth, rest) = bytes.split_first_chunk()?;
                let (immediate, rest) = rest.split_first_chunk()?;
                (Self::DatagramImmediate(Deth::from_bytes(deth), *immediate), rest)
            }
            Shape::Flush => {
                let (feth, rest) = bytes.split_first_chunk()?;
                let (reth, rest) = rest.split_first_chunk()?;
                (Self::Flush(Feth::from_bytes(*feth), Reth::from_bytes(reth)), rest)
            }
        })
    }

    /// Hands the headers in order to `out`.
    pub(super) fn emit(&self, mut out: impl FnMut(&[u8])) {
        match self {
            Self::None => {}
            Self::Immediate(immediate) => out(immediate),
            Self::Invalidate(key) => out(&key.to_be_bytes()),
            Self::Rdma(reth) => out(&reth.to_bytes()),
            Self::RdmaImmediate(reth, immediate) => {
                out(&reth.to_bytes());
                out(immediate);
            }
            Self::Ack(aeth) => out(&aeth.to_bytes()),
            Self::AtomicAck(aeth, original) => {
                out(&aeth.to_bytes());
                out(&original.to_be_bytes());
            }
            Self::Atomic(atomic) => out(&atomic.to_bytes()),
            Self::Datagram(deth) => out(&deth.to_bytes()),
            Self::DatagramImmediate(deth, immediate) => {
                out(&deth.to_bytes());
                out(immediate);
            }
            Self::Flush(feth, reth) => {
                out(&feth.to_bytes());
                out(&reth.to_bytes());
            }
        }
    }

    /// Immediate data, if any.
    pub const fn immediate(&self) -> Option<[u8; 4]> {
        match *self {
            Self::Immediate(data) | Self::RdmaImmediate(_, data) | Self::DatagramImmediate(_, data) => Some(data),
            _ => None,
        }
    }

    /// RETH, if any.
    pub const fn reth(&self) -> Option<Reth> {
        match *self {
            Self::Rdma(reth) | Self::RdmaImmediate(reth, _) | Self::Flush(_, reth) => Some(reth),
            _ => None,
        }
    }

    /// AETH, if any.
    pub const fn aeth(&self) -> Option<Aeth> {
        match *self {
            Self::Ack(aeth) | Self::AtomicAck(aeth, _) => Some(aeth),
            _ => None,
        }
    }

    /// DETH, if any.
    pub const fn deth(&self) -> Option<Deth> {
        match *self {
            Self::Datagram(deth) | Self::DatagramImmediate(deth, _) => Some(deth),
            _ => None,
        }
    }
}
