//! The VXLAN header (RFC 7348, section 5).

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Bytes of the header.
pub(super) const HEADER_LEN: usize = 8;
/// Flag that marks the VNI as valid.
const FLAG_VNI: u8 = 0x08;

/// A VXLAN network identifier: 24 bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct Vni(u32);

impl Vni {
    /// Highest VNI.
    pub const MAX: u32 = 0xff_ffff;

    /// Creates a VNI. `None` if the number has more than 24 bits.
    pub const fn new(number: u32) -> Option<Self> {
        if number <= Self::MAX { Some(Self(number)) } else { None }
    }

    /// Returns the VNI as a number.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// Returns the header in front of the frames of this network.
    pub(super) const fn header(self) -> [u8; HEADER_LEN] {
        let [_, high, middle, low] = self.0.to_be_bytes();
        [FLAG_VNI, 0, 0, 0, high, middle, low, 0]
    }
}

impl TryFrom<u32> for Vni {
    type Error = String;

    fn try_from(number: u32) -> Result<Self, String> {
        Self::new(number).ok_or_else(|| format!("{number} is not a VNI (0 to {})", Self::MAX))
    }
}

impl From<Vni> for u32 {
    fn from(vni: Vni) -> Self {
        vni.0
    }
}

impl FromStr for Vni {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = text.parse().ok().and_then(Self::new);
        number.ok_or_else(|| format!("'{text}' is not a VNI (0 to {})", Self::MAX))
    }
}

impl fmt::Display for Vni {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Reason why a datagram contains no frame for this link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum NoFrame {
    /// There is no VXLAN header, or it has no VNI.
    Malformed,
    /// The frame belongs to another network.
    OtherNetwork(Vni),
}

/// Returns the frame in a datagram of network `vni`. Reserved fields are ignored, as the RFC requires.
///
/// # Errors
/// There is no frame, or it belongs to another network.
pub(super) fn decapsulate(datagram: &mut [u8], vni: Vni) -> Result<&mut [u8], NoFrame> {
    let (&mut [flags, _, _, _, high, middle, low, _], frame) =
        datagram.split_first_chunk_mut::<HEADER_LEN>().ok_or(NoFrame::Malformed)?;
    if flags & FLAG_VNI == 0 {
        return Err(NoFrame::Malformed);
    }
    let found = Vni(u32::from_be_bytes([0, high, middle, low]));
    if found == vni { Ok(frame) } else { Err(NoFrame::OtherNetwork(found)) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_bytes_of_the_rfc() {
        let vni = Vni::new(0x12_3456).unwrap();
        assert_eq!(vni.header(), [0x08, 0, 0, 0, 0x12, 0x34, 0x56, 0]);
        assert_eq!((Vni::new(Vni::MAX).map(Vni::get), Vni::new(Vni::MAX + 1)), (Some(Vni::MAX), None));
        assert_eq!("16777215".parse(), Ok(Vni(Vni::MAX)));
        for wrong in ["", "-1", "x", "16777216"] {
            assert!(wrong.parse::<Vni>().unwrap_err().contains("VNI"), "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn encapsulated_frames_are_decapsulated(number in 0..=Vni::MAX, other in 0..=Vni::MAX, frame: Vec<u8>) {
            let (vni, other) = (Vni(number), Vni(other));
            let mut datagram = [&vni.header()[..], &frame].concat();
            prop_assert_eq!(decapsulate(&mut datagram, vni), Ok(&mut frame.clone()[..]));
            if other != vni {
                prop_assert_eq!(decapsulate(&mut datagram, other), Err(NoFrame::OtherNetwork(vni)));
            }
        }

        #[test]
        fn reserved_bytes_do_not_matter_and_the_flag_does(header: [u8; HEADER_LEN], frame: Vec<u8>) {
            let [flags, _, _, _, high, middle, low, _] = header;
            let vni = Vni(u32::from_be_bytes([0, high, middle, low]));
            let mut datagram = [&header[..], &frame].concat();
            let result = decapsulate(&mut datagram, vni);
            if flags & 8 == 0 {
                prop_assert_eq!(result, Err(NoFrame::Malformed));
            } else {
                prop_assert_eq!(result, Ok(&mut frame.clone()[..]));
            }
            for len in 0..HEADER_LEN {
                prop_assert_eq!(decapsulate(&mut datagram[..len], vni), Err(NoFrame::Malformed));
            }
        }
    }
}
