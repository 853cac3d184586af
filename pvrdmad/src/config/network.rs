//! How a device is connected to the network.

use pvrdma_ether_link::vxlan::{IPV4_OVERHEAD, IPV6_OVERHEAD};
use pvrdma_rxe::PortRules;

use super::fault::FaultSpec;
use super::link::LinkSpec;
use super::tunnel::TunnelKeys;

/// What Ethernet carries when nobody says otherwise.
const DEFAULT_MTU: u32 = 1500;
/// The smallest packet that every IPv4 network carries, and about the largest that there is.
const MTU_RANGE: std::ops::RangeInclusive<u32> = 576..=65_535;

/// The links of a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NetworkSpec {
    /// The way to other hosts.
    pub uplink: LinkSpec,
    /// The paired network function.
    pub nic: Option<LinkSpec>,
    /// Bytes of an IP packet that the network carries.
    pub mtu: u32,
    /// What the device may do there.
    pub rules: PortRules,
    /// What the uplink suffers from, for tests.
    pub fault: Option<FaultSpec>,
}

impl NetworkSpec {
    /// Puts the values of a device together.
    ///
    /// # Errors
    /// They do not go together.
    pub fn new(
        uplink: Option<LinkSpec>,
        tunnel: TunnelKeys,
        nic: Option<LinkSpec>,
        mtu: Option<u32>,
    ) -> Result<Option<Self>, String> {
        if !matches!(uplink, Some(LinkSpec::Vxlan(_))) && !tunnel.is_empty() {
            return Err("remote, vni and learn are keys of a tunnel (uplink=vxlan:ADDRESS)".to_owned());
        }
        let Some(uplink) = uplink else {
            return match (nic, mtu) {
                (None, None) => Ok(None),
                (Some(_), _) => Err("nic needs an uplink, to which its frames are passed (uplink=LINK)".to_owned()),
                (None, Some(_)) => Err("mtu is that of the uplink (uplink=LINK)".to_owned()),
            };
        };
        if nic.as_ref() == Some(&uplink) {
            return Err("nic and uplink are the same".to_owned());
        }
        if matches!(nic, Some(LinkSpec::Vxlan(_))) {
            return Err("a tunnel is an uplink and no nic".to_owned());
        }
        let (uplink, overhead) = match uplink {
            LinkSpec::Vxlan(config) => {
                let overhead = if config.local.is_ipv4() { IPV4_OVERHEAD } else { IPV6_OVERHEAD };
                (LinkSpec::Vxlan(tunnel.complete(config)?), overhead)
            }
            other => (other, 0),
        };
        let mtu = mtu.unwrap_or(DEFAULT_MTU - overhead);
        if !MTU_RANGE.contains(&mtu) {
            return Err(format!("mtu {mtu} is not one of {} to {}", MTU_RANGE.start(), MTU_RANGE.end()));
        }
        Ok(Some(Self { uplink, nic, mtu, rules: PortRules::default(), fault: None }))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tunnel::Learn;
    use super::*;

    fn network(
        uplink: &str,
        remotes: &[&str],
        vni: Option<u32>,
        learn: Option<Learn>,
    ) -> Result<Option<NetworkSpec>, String> {
        let remotes = remotes.iter().map(|text| text.parse().unwrap()).collect();
        NetworkSpec::new(Some(uplink.parse().unwrap()), TunnelKeys { remotes, vni, learn }, None, None)
    }

    #[test]
    fn what_goes_together() {
        let plain = |uplink, nic, mtu| NetworkSpec::new(uplink, TunnelKeys::default(), nic, mtu);
        assert_eq!(plain(None, None, None), Ok(None));
        let link: LinkSpec = "unix-dgram:/a:/b".parse().unwrap();
        assert_eq!(plain(Some(link.clone()), None, None).unwrap().unwrap().mtu, 1500);
        let tunnel: LinkSpec = "vxlan:::1".parse().unwrap();
        for (uplink, nic, mtu, word) in [
            (None, Some(link.clone()), None, "needs an uplink"),
            (None, None, Some(9000), "mtu"),
            (Some(link.clone()), Some(link.clone()), None, "the same"),
            (Some(link.clone()), None, Some(100), "576"),
            (Some(link), Some(tunnel), None, "no nic"),
        ] {
            assert!(plain(uplink, nic, mtu).unwrap_err().contains(word));
        }
    }

    #[test]
    fn tunnels_and_their_keys() {
        let spec = network("vxlan:10.0.0.1", &["10.0.0.2", "10.0.0.3:8472"], Some(7), None).unwrap().unwrap();
        let LinkSpec::Vxlan(config) = &spec.uplink else { panic!("{spec:?}") };
        assert_eq!(config.remotes, ["10.0.0.2:4789", "10.0.0.3:8472"].map(|text| text.parse().unwrap()));
        assert_eq!((config.vni.get(), config.open, spec.mtu), (7, false, 1450));
        let spec = network("vxlan:fd00::1", &[], None, Some(Learn::Remotes)).unwrap().unwrap();
        let LinkSpec::Vxlan(config) = &spec.uplink else { panic!("{spec:?}") };
        assert_eq!((config.vni.get(), config.open, spec.mtu), (0, true, 1430));
        for (uplink, remotes, vni, word) in [
            ("vxlan:10.0.0.1", &[][..], None, "remote=ADDRESS"),
            ("vxlan:10.0.0.1", &["10.0.0.2"], Some(1 << 24), "16777215"),
            ("vxlan:10.0.0.1", &["fd00::2"], None, "IPv6"),
            ("unix:/a", &["10.0.0.2"], None, "keys of a tunnel"),
            ("tap:tap0", &[], Some(1), "keys of a tunnel"),
        ] {
            let error = network(uplink, remotes, vni, None).unwrap_err();
            assert!(error.contains(word), "{error}");
        }
    }
}
