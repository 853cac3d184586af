//! Rules for the addresses of a device and for its peers.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use pvrdma_packet::MacAddr;
use pvrdma_verbs_types::Gid;
use serde::{Deserialize, Serialize};

use crate::network::Network;

/// Rules of a device. By default it may use addresses that no other device or host used first, and may communicate with
/// every peer.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Rules {
    /// Addresses that its guest may bind.
    pub addresses: AddressRule,
    /// Peers allowed by the device's own rule.
    pub peers: Peers,
    /// Peers allowed by the rule of its network. Both must allow a peer.
    pub network_peers: Peers,
    /// Ports of its guest on which a backend listens for peers, if its host makes the guest's connections.
    #[serde(default)]
    pub listen: Vec<u16>,
}

pvrdma_base::setters!(Rules {
    with_addresses => addresses: AddressRule,
    with_peers => peers: Peers,
    with_network_peers => network_peers: Peers,
    with_listen => listen: Vec<u16>,
});

impl Rules {
    /// Returns `true` if the device must not communicate with some peers.
    pub const fn limit_peers(&self) -> bool {
        !self.peers.0.is_empty() || !self.network_peers.0.is_empty()
    }

    /// Returns `true` if the device may communicate with this peer.
    #[inline]
    pub fn allow_peer(&self, peer: Gid) -> bool {
        self.peers.contain(peer) && self.network_peers.contain(peer)
    }
}

/// Addresses that a guest may bind: the listed ones, the link-local one of its MAC address, and others according to
/// `others`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct AddressRule {
    /// Rule for addresses that are not listed.
    pub others: OtherAddresses,
    /// Addresses reserved for this device. Other devices may use them only if they list them as well.
    pub listed: Vec<IpAddr>,
}

/// Rule for addresses that are not listed for the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OtherAddresses {
    /// The guest may not bind them.
    Refuse,
    /// The guest may bind those that no other device of the network, and no host beyond the uplink, used first.
    #[default]
    Own,
    /// The guest may bind those that no other device of the network used first.
    Any,
}

impl AddressRule {
    /// Rule that allows a guest to bind every address that no other device uses.
    pub const ANY: Self = Self { others: OtherAddresses::Any, listed: Vec::new() };

    /// Returns the GIDs that are reserved for the device with this MAC address.
    pub fn reserved(&self, mac: MacAddr) -> impl Iterator<Item = Gid> {
        [link_local(mac)].into_iter().chain(self.listed.iter().map(|&address| address.into()))
    }

    /// Returns the rule in one word, as in the configuration.
    pub const fn word(&self) -> &'static str {
        match self.others {
            OtherAddresses::Refuse => "listed",
            OtherAddresses::Own => "own",
            OtherAddresses::Any => "any",
        }
    }
}

/// Returns the link-local GID of a MAC address (RFC 4291, 2.5.6 and appendix A).
pub const fn link_local(mac: MacAddr) -> Gid {
    let [a, b, c, d, e, f, g, h] = mac.eui64();
    Gid([0xfe, 0x80, 0, 0, 0, 0, 0, 0, a, b, c, d, e, f, g, h])
}

/// Peers allowed by address. An empty list allows all peers.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Peers(pub Vec<Prefix>);

impl Peers {
    /// Returns `true` if the rule allows a peer.
    #[inline]
    pub fn contain(&self, peer: Gid) -> bool {
        self.0.is_empty() || self.0.iter().any(|prefix| prefix.contains(peer))
    }
}

/// Address prefix, as `ADDRESS/BITS` or a single `ADDRESS`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Prefix(Network);

impl Prefix {
    /// Returns `true` if the GID's address has this prefix. An IPv6 prefix matches no IPv4 address.
    pub fn contains(&self, gid: Gid) -> bool {
        self.0.contains(gid.into())
    }
}

impl FromStr for Prefix {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let network = text.parse::<IpAddr>().map(Network::of).ok().or_else(|| text.parse().ok());
        network.map(Self).ok_or_else(|| format!("'{text}' is neither an address nor ADDRESS/BITS"))
    }
}

impl TryFrom<String> for Prefix {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Prefix> for String {
    fn from(prefix: Prefix) -> Self {
        prefix.to_string()
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(text: &str) -> Gid {
        text.parse::<IpAddr>().unwrap().into()
    }

    #[test]
    fn prefixes() {
        for (prefix, inside, outside) in [
            ("10.0.0.0/8", &["10.1.2.3", "10.255.255.255"][..], &["11.0.0.0", "::10.0.0.1", "fe80::1"][..]),
            ("10.0.0.7", &["10.0.0.7"], &["10.0.0.6", "10.0.0.8"]),
            ("0.0.0.0/0", &["1.2.3.4", "255.255.255.255"], &["fe80::1", "::1"]),
            ("fe80::/10", &["fe80::1", "febf::"], &["fec0::1", "10.0.0.1"]),
            ("::/0", &["::1", "fd00::7"], &["10.0.0.1"]),
            ("fd00::7", &["fd00::7"], &["fd00::6"]),
        ] {
            let rule = Peers(vec![prefix.parse().unwrap()]);
            assert!(inside.iter().all(|text| rule.contain(gid(text))), "{prefix}");
            assert!(!outside.iter().any(|text| rule.contain(gid(text))), "{prefix}");
            let [prefix] = rule.0[..] else { unreachable!() };
            assert_eq!(prefix.to_string().parse(), Ok(prefix));
        }
        for wrong in ["", "10.0.0.1/33", "fe80::/129", "10.0.0/8", "10.0.0.1/", "10.0.0.1/-1", "host", "10.0.0.1/8/9"] {
            assert!(wrong.parse::<Prefix>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn both_rules_must_allow_a_peer() {
        let of = |text: &str| Peers(text.split_whitespace().map(|prefix| prefix.parse().unwrap()).collect());
        let rules = Rules::default().with_peers(of("10.0.0.0/8 fd00::/8")).with_network_peers(of("10.1.0.0/16"));
        assert!(rules.allow_peer(gid("10.1.0.1")));
        assert!(!rules.allow_peer(gid("10.2.0.1")) && !rules.allow_peer(gid("fd00::1")));
        assert!(Rules::default().allow_peer(gid("1.2.3.4")));
    }

    #[test]
    fn reserved_addresses() {
        let rule = AddressRule { listed: vec!["10.0.0.5".parse().unwrap()], ..AddressRule::default() };
        let reserved: Vec<Gid> = rule.reserved(MacAddr([0x52, 0x54, 0, 0xab, 0xcd, 0xef])).collect();
        assert_eq!(reserved, [gid("fe80::5054:ff:feab:cdef"), gid("10.0.0.5")]);
    }
}
