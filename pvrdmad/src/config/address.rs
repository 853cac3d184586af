//! Addresses that a guest may bind.

use std::net::IpAddr;
use std::str::FromStr;

use pvrdma_verbs::{AddressRule, OtherAddresses};

use super::keys::deserialize_from_str;

/// A value of `address`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AddressWord {
    /// `own`, `any`.
    Others(OtherAddresses),
    /// An address.
    Listed(IpAddr),
}

impl FromStr for AddressWord {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "own" => Ok(Self::Others(OtherAddresses::Own)),
            "any" => Ok(Self::Others(OtherAddresses::Any)),
            _ => {
                let address: IpAddr = text.parse().map_err(|_| format!("'{text}' is not own, any or an IP address"))?;
                if address.is_unspecified() || address.is_multicast() {
                    return Err(format!("{address} is no address of a device"));
                }
                Ok(Self::Listed(address))
            }
        }
    }
}

deserialize_from_str!(AddressWord);

/// Combines these values into a rule.
///
/// # Errors
/// The values contradict each other.
pub(super) fn rule(words: &[AddressWord]) -> Result<AddressRule, String> {
    let (mut others, mut listed) = (None, Vec::new());
    for word in words {
        match *word {
            AddressWord::Others(word) if others.is_some_and(|other| other != word) => {
                return Err("address is own or any, not both".to_owned());
            }
            AddressWord::Others(word) => others = Some(word),
            AddressWord::Listed(address) => listed.push(address),
        }
    }
    let default = if listed.is_empty() { OtherAddresses::Own } else { OtherAddresses::Refuse };
    Ok(AddressRule { others: others.unwrap_or(default), listed })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_address() {
        let parse = |words: &[&str]| rule(&words.iter().map(|word| word.parse().unwrap()).collect::<Vec<_>>());
        let of = |others, listed: &[&str]| {
            let listed = listed.iter().map(|address| address.parse().unwrap()).collect();
            Ok(AddressRule { others, listed })
        };
        assert_eq!(parse(&[]), of(OtherAddresses::Own, &[]));
        assert_eq!(parse(&["any"]), of(OtherAddresses::Any, &[]));
        assert_eq!(parse(&["10.0.0.5", "fe80::1"]), of(OtherAddresses::Refuse, &["10.0.0.5", "fe80::1"]));
        assert_eq!(parse(&["10.0.0.5", "own"]), of(OtherAddresses::Own, &["10.0.0.5"]));
        assert!(parse(&["own", "any"]).unwrap_err().contains("not both"));
        for wrong in ["", "none", "10.0.0.0/8", "0.0.0.0", "::", "224.0.0.1", "ff02::1"] {
            assert!(wrong.parse::<AddressWord>().is_err(), "{wrong}");
        }
    }
}
