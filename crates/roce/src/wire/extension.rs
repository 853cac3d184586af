//! The extension headers of a packet, between BTH and payload (IBA 9.3): their combinations and their order.

use super::aeth::Aeth;
use super::atomic_ack_eth::AtomicAckEth;
use super::atomic_eth::AtomicEth;
use super::deth::Deth;
use super::feth::Feth;
use super::ieth::Ieth;
use super::immdt::ImmDt;
use super::opcode::Shape;
use super::reth::Reth;

/// The extension headers of a packet, in one of the combinations that opcodes use.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Extension {
    /// No extension header.
    #[default]
    None,
    /// Immediate data.
    ImmDt(ImmDt),
    /// Key to invalidate.
    Ieth(Ieth),
    /// Remote memory range.
    Reth(Reth),
    /// Remote memory range, then immediate data.
    RethImmDt(Reth, ImmDt),
    /// Acknowledgement.
    Aeth(Aeth),
    /// Acknowledgement, then the value before an atomic operation.
    AtomicAckEth(Aeth, AtomicAckEth),
    /// Atomic operation.
    AtomicEth(AtomicEth),
    /// Q_Key and sender of a datagram.
    Deth(Deth),
    /// Q_Key and sender of a datagram, then immediate data.
    DethImmDt(Deth, ImmDt),
    /// Flush, then its range of remote memory.
    FethReth(Feth, Reth),
}

impl Extension {
    /// Largest length of a combination: that of an AtomicETH.
    pub(super) const MAX_LEN: usize = 28;

    /// Returns the combination.
    #[inline]
    pub const fn shape(&self) -> Shape {
        match self {
            Self::None => Shape::None,
            Self::ImmDt(_) => Shape::ImmDt,
            Self::Ieth(_) => Shape::Ieth,
            Self::Reth(_) => Shape::Reth,
            Self::RethImmDt(..) => Shape::RethImmDt,
            Self::Aeth(_) => Shape::Aeth,
            Self::AtomicAckEth(..) => Shape::AtomicAckEth,
            Self::AtomicEth(_) => Shape::AtomicEth,
            Self::Deth(_) => Shape::Deth,
            Self::DethImmDt(..) => Shape::DethImmDt,
            Self::FethReth(..) => Shape::FethReth,
        }
    }

    /// Takes the headers of this shape off the front. Returns `None` if there are too few bytes.
    #[inline]
    pub(super) fn parse(shape: Shape, bytes: &[u8]) -> Option<(Self, &[u8])> {
        let mut rest = bytes;
        let extension = match shape {
            Shape::None => Self::None,
            Shape::ImmDt => Self::ImmDt(ImmDt(*take(&mut rest)?)),
            Shape::Ieth => Self::Ieth(Ieth::from_bytes(take(&mut rest)?)),
            Shape::Reth => Self::Reth(Reth::from_bytes(take(&mut rest)?)),
            Shape::RethImmDt => Self::RethImmDt(Reth::from_bytes(take(&mut rest)?), ImmDt(*take(&mut rest)?)),
            Shape::Aeth => Self::Aeth(Aeth::from_bytes(*take(&mut rest)?)),
            Shape::AtomicAckEth => {
                Self::AtomicAckEth(Aeth::from_bytes(*take(&mut rest)?), AtomicAckEth::from_bytes(take(&mut rest)?))
            }
            Shape::AtomicEth => Self::AtomicEth(AtomicEth::from_bytes(take(&mut rest)?)),
            Shape::Deth => Self::Deth(Deth::from_bytes(take(&mut rest)?)),
            Shape::DethImmDt => Self::DethImmDt(Deth::from_bytes(take(&mut rest)?), ImmDt(*take(&mut rest)?)),
            Shape::FethReth => Self::FethReth(Feth::from_bytes(*take(&mut rest)?), Reth::from_bytes(take(&mut rest)?)),
        };
        Some((extension, rest))
    }

    /// Passes the bytes of the headers to `out`, in order.
    #[inline]
    pub(super) fn emit(&self, mut out: impl FnMut(&[u8])) {
        match self {
            Self::None => {}
            Self::ImmDt(immediate) => out(&immediate.0),
            Self::Ieth(ieth) => out(&ieth.to_bytes()),
            Self::Reth(reth) => out(&reth.to_bytes()),
            Self::RethImmDt(reth, immediate) => {
                out(&reth.to_bytes());
                out(&immediate.0);
            }
            Self::Aeth(aeth) => out(&aeth.to_bytes()),
            Self::AtomicAckEth(aeth, ack) => {
                out(&aeth.to_bytes());
                out(&ack.to_bytes());
            }
            Self::AtomicEth(atomic) => out(&atomic.to_bytes()),
            Self::Deth(deth) => out(&deth.to_bytes()),
            Self::DethImmDt(deth, immediate) => {
                out(&deth.to_bytes());
                out(&immediate.0);
            }
            Self::FethReth(feth, reth) => {
                out(&feth.to_bytes());
                out(&reth.to_bytes());
            }
        }
    }

    /// Immediate data, if any.
    #[inline]
    pub const fn immediate(&self) -> Option<[u8; 4]> {
        match *self {
            Self::ImmDt(immediate) | Self::RethImmDt(_, immediate) | Self::DethImmDt(_, immediate) => Some(immediate.0),
            _ => None,
        }
    }

    /// RETH, if any.
    #[inline]
    pub const fn reth(&self) -> Option<Reth> {
        match *self {
            Self::Reth(reth) | Self::RethImmDt(reth, _) | Self::FethReth(_, reth) => Some(reth),
            _ => None,
        }
    }

    /// AETH, if any.
    #[inline]
    pub const fn aeth(&self) -> Option<Aeth> {
        match *self {
            Self::Aeth(aeth) | Self::AtomicAckEth(aeth, _) => Some(aeth),
            _ => None,
        }
    }

    /// DETH, if any.
    #[inline]
    pub const fn deth(&self) -> Option<Deth> {
        match *self {
            Self::Deth(deth) | Self::DethImmDt(deth, _) => Some(deth),
            _ => None,
        }
    }
}

/// Takes a header of `N` bytes off the front.
#[inline]
fn take<'a, const N: usize>(bytes: &mut &'a [u8]) -> Option<&'a [u8; N]> {
    let (header, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(header)
}

#[cfg(test)]
mod tests {
    use pvrdma_verbs_types::Qpn;

    use super::super::aeth::Syndrome;
    use super::*;

    #[test]
    fn each_combination_has_its_headers() {
        let (immediate, ieth) = (ImmDt([1, 2, 3, 4]), Ieth { rkey: 7 });
        let reth = Reth { address: 0x1000, rkey: 2, length: 3 };
        let (aeth, ack) = (Aeth { syndrome: Syndrome::ACK, msn: 9 }, AtomicAckEth { original: 5 });
        let deth = Deth { qkey: 8, source: Qpn::new(0x21) };
        let atomic = AtomicEth { address: 0x10, rkey: 1, swap_or_add: 2, compare: 3 };
        let feth = Feth { placement: 1, selectivity: 2 };
        let (i, r, a, d) = (Some(immediate.0), Some(reth), Some(aeth), Some(deth));
        for (extension, expected) in [
            (Extension::None, (None, None, None, None)),
            (Extension::ImmDt(immediate), (i, None, None, None)),
            (Extension::Ieth(ieth), (None, None, None, None)),
            (Extension::Reth(reth), (None, r, None, None)),
            (Extension::RethImmDt(reth, immediate), (i, r, None, None)),
            (Extension::Aeth(aeth), (None, None, a, None)),
            (Extension::AtomicAckEth(aeth, ack), (None, None, a, None)),
            (Extension::AtomicEth(atomic), (None, None, None, None)),
            (Extension::Deth(deth), (None, None, None, d)),
            (Extension::DethImmDt(deth, immediate), (i, None, None, d)),
            (Extension::FethReth(feth, reth), (None, r, None, None)),
        ] {
            let headers = (extension.immediate(), extension.reth(), extension.aeth(), extension.deth());
            assert_eq!(headers, expected, "{extension:?}");
        }
    }
}
