//! How a device is connected to the network: links in the words of the command line, and as sockets.

mod datagram_file;
mod link_spec;
mod tunnel;

use std::sync::Arc;

use anyhow::{Context, Result};
use pvrdma_ether_link::Link;
use pvrdma_ether_link::af_packet::AfPacketLink;
use pvrdma_ether_link::tap::TapLink;
use pvrdma_ether_link::unix::{DatagramLink, StreamLink};
use pvrdma_ether_link::vxlan::{IPV4_OVERHEAD, IPV6_OVERHEAD, VxlanLink};
use pvrdma_rxe::{MonotonicClock, PortConfig, PortRules, Rxe, Uplink};
use pvrdma_verbs::MacAddr;

use self::datagram_file::{DatagramFile, bind_datagram};
use crate::fault::FaultSpec;
use crate::status::{NetworkReport, by_name};
use crate::vfio_user::SocketFile;

pub use link_spec::LinkSpec;
pub use tunnel::{Learn, TunnelAddress, TunnelKeys};

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

/// A device's connection to the network. Dropping it takes the cables out and removes the sockets.
#[derive(Debug)]
pub struct Network {
    // In this order: nobody uses a socket whose file is gone.
    uplink: Uplink,
    mtu: u32,
    _files: Vec<OpenFile>,
}

impl Network {
    /// Opens the links and connects the device with this address.
    ///
    /// # Errors
    /// A socket cannot be made.
    pub fn start(spec: &NetworkSpec, mac: MacAddr, backend: &Rxe) -> Result<Self> {
        let mut files = Vec::new();
        let uplink = open(&spec.uplink, mac, &mut files).context("uplink")?;
        let uplink = match spec.fault {
            Some(fault) => fault.wrap(uplink),
            None => uplink,
        };
        let nic = spec.nic.as_ref().map(|nic| open(nic, mac, &mut files)).transpose().context("nic")?;
        let port = PortConfig { uplink, nic, mtu: spec.mtu, rules: spec.rules.clone() };
        let uplink = backend.plug(mac, port).context("uplink")?;
        Ok(Self { uplink, mtu: spec.mtu, _files: files })
    }

    /// How it is doing.
    pub fn report(&self) -> NetworkReport {
        NetworkReport { mtu: self.mtu, counters: by_name(&self.uplink.counters()) }
    }
}

/// A socket file that goes away with us.
#[derive(Debug)]
#[expect(dead_code, reason = "held for what happens when it is dropped")]
enum OpenFile {
    Stream(SocketFile),
    Datagram(DatagramFile),
}

fn open(spec: &LinkSpec, mac: MacAddr, files: &mut Vec<OpenFile>) -> Result<Arc<dyn Link>> {
    Ok(match spec {
        LinkSpec::Listen(path) => {
            let file = SocketFile::bind(path)?;
            let link = StreamLink::listen(file.listener().try_clone()?)?;
            files.push(OpenFile::Stream(file));
            Arc::new(link)
        }
        LinkSpec::Vxlan(config) => Arc::new(VxlanLink::bind(config, Arc::new(MonotonicClock::default()))?),
        LinkSpec::AfPacket(name) => Arc::new(AfPacketLink::open(name.as_str(), mac)?),
        LinkSpec::Tap(name) => Arc::new(TapLink::open(name.clone())?),
        LinkSpec::Connect(path) => Arc::new(StreamLink::connect(path.clone())),
        LinkSpec::Datagrams { local, remote } => {
            let (socket, file) = bind_datagram(local)?;
            files.push(OpenFile::Datagram(file));
            Arc::new(DatagramLink::new(socket, remote.clone())?)
        }
    })
}

#[cfg(test)]
mod tests {
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
