//! A VLAN, as written on the command line and in the file.

use std::fmt;
use std::ops::RangeInclusive;

use pvrdma_rxe::VlanMode;
use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer};

/// Valid VLAN identifiers of frames (IEEE 802.1Q, 9.6).
const VLANS: RangeInclusive<u16> = 1..=4094;

/// `trunk`, or the number of a VLAN.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VlanWord(pub VlanMode);

impl<'de> Deserialize<'de> for VlanWord {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(VlanVisitor)
    }
}

struct VlanVisitor;

impl Visitor<'_> for VlanVisitor {
    type Value = VlanWord;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("trunk or the number of a VLAN")
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<VlanWord, E> {
        access(u16::try_from(number).ok(), number)
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<VlanWord, E> {
        access(u16::try_from(number).ok(), number)
    }

    fn visit_str<E: de::Error>(self, word: &str) -> Result<VlanWord, E> {
        if word == "trunk" { Ok(VlanWord(VlanMode::Trunk)) } else { access(word.parse().ok(), word) }
    }
}

fn access<E: de::Error>(vlan: Option<u16>, given: impl fmt::Display) -> Result<VlanWord, E> {
    let vlan = vlan.filter(|vlan| VLANS.contains(vlan));
    let problem = || E::custom(format!("'{given}' is neither trunk nor a VLAN ({} to {})", VLANS.start(), VLANS.end()));
    vlan.map(|vlan| VlanWord(VlanMode::Access(vlan))).ok_or_else(problem)
}
