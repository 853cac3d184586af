//! Links of a network, made from descriptors that the supervisor opened.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use anyhow::{Error, Result, anyhow, bail};
use pvrdma_ether_link::InterfaceName;
use pvrdma_ether_link::link_spec::LinkSpec;
use pvrdma_ether_link::{
    af_packet::AfPacketLink,
    backup::{BackupLink, Member},
    tap::TapLink,
    tls::TlsLink,
    unix::{DatagramLink, StreamLink},
    vxlan::VxlanLink,
};
use pvrdma_link::{
    Connector, Link, MonotonicClock,
    fault::FaultLink,
    switch::{Switch, UnknownUnicast},
};
use pvrdma_packet::MacAddr;

use super::Host;
use crate::config::{Device, FaultSpec, FaultWord, Network};
use crate::status::LinkReport;

/// Connects the devices of a network with each other, and with other hosts if there is an uplink.
#[derive(Debug)]
pub(super) struct Ether {
    switch: Arc<Switch>,
    /// Packets may have no ICRC, so faults must not damage them.
    omit_icrc: bool,
    /// The uplink, behind a link that injects the current faults.
    uplink: Option<Arc<FaultLink<Arc<dyn Link>>>>,
    /// The same uplink, if it has two interfaces.
    pair: Option<Arc<BackupLink>>,
}

impl Ether {
    /// Creates the links with the descriptors of the uplink.
    ///
    /// # Errors
    /// The descriptors do not match the kind of link, none are left for the switch, or the faults damage packets that
    /// may have no ICRC.
    pub(super) fn start(network: &Network, fds: Vec<OwnedFd>, host: &Arc<dyn Host>) -> Result<Self> {
        let (link, pair) = match &network.uplink {
            Some(LinkSpec::AfPacketPair(names)) => {
                let pair = Arc::new(open_pair(names, fds, host, network.offload)?);
                (Some(Arc::clone(&pair) as Arc<dyn Link>), Some(pair))
            }
            Some(spec) => (Some(open(spec, fds, host, None, network.offload)?), None),
            None => (None, None),
        };
        FaultSpec::check(network.fault.as_ref(), network.omit_icrc).map_err(Error::msg)?;
        let uplink = link.map(|link| FaultSpec::wrap(network.fault.as_ref(), link));
        let link = uplink.clone().map(|link| link as Arc<dyn Link>);
        let switch = match link {
            Some(link) if !network.local => Switch::hairpin(link, network.mtu),
            link => Switch::new(link, network.mtu),
        };
        Ok(Self { switch: Arc::new(switch?), omit_icrc: network.omit_icrc, uplink, pair })
    }

    /// Makes an interface of two the active one. Returns `true` if it was not active before.
    pub(super) fn select(&self, active: Member) -> bool {
        let changed = self.pair.as_ref().is_some_and(|pair| pair.select(active));
        if changed {
            self.switch.uplink_changed();
        }
        changed
    }

    /// Returns the state of the uplink, if there is one.
    pub(super) fn report(&self, spec: &LinkSpec) -> Option<LinkReport> {
        self.uplink.as_ref().map(|uplink| LinkReport::new(spec, uplink))
    }

    /// Replaces the faults that are injected into the uplink.
    ///
    /// # Errors
    /// There is no uplink, or the faults damage packets that may have no ICRC.
    pub(super) fn set_fault(&self, FaultWord(fault): FaultWord) -> Result<()> {
        let Some(uplink) = &self.uplink else { bail!("there is no uplink") };
        FaultSpec::check(fault.as_ref(), self.omit_icrc).map_err(Error::msg)?;
        FaultSpec::set(fault.as_ref(), uplink);
        self.switch.uplink_changed();
        Ok(())
    }

    /// Returns `true` if the device needs a port: it has a network function, or frames of its network can leave the
    /// process.
    pub(super) const fn is_for(&self, device: &Device) -> bool {
        self.uplink.is_some() || device.nic_socket.is_some()
    }

    /// Returns the port of a device, which exists until it is dropped.
    ///
    /// # Errors
    /// Another device has the address, or the system lacks resources.
    pub(super) fn port(&self, device: &Device) -> Result<Arc<dyn Link>> {
        // A bridge in the guest forwards for endpoints whose addresses the switch has not learnt, so frames to unknown
        // destinations are flooded.
        let unknown = if device.rules.forged.allow_mac() { UnknownUnicast::Flood } else { UnknownUnicast::Drop };
        let port = self.switch.port(device.mac, unknown)?;
        // Its VM may still run at another host and move here, so the switch also looks for it at the uplink.
        self.switch.silence(device.mac);
        Ok(port)
    }

    /// Returns the function that the servers of a device call when its VM has moved away: the switch then looks for
    /// the VM at the uplink, too.
    pub(super) fn departure(&self, mac: MacAddr) -> Arc<dyn Fn() + Send + Sync> {
        // The thread of a client that is stuck may hold the function for longer than there is a switch.
        let switch = Arc::downgrade(&self.switch);
        Arc::new(move || {
            if let Some(switch) = switch.upgrade() {
                switch.silence(mac);
            }
        })
    }
}

/// Makes a link from its descriptors. `device` is the device whose `nic` it is, or `None` for the uplink. With
/// `offload` the kernel or the interface may segment super-frames.
///
/// # Errors
/// The descriptors do not match the kind of link.
pub(super) fn open(
    link: &LinkSpec,
    fds: Vec<OwnedFd>,
    host: &Arc<dyn Host>,
    device: Option<&str>,
    offload: bool,
) -> Result<Arc<dyn Link>> {
    let connector = Arc::new(Reconnect { host: Arc::clone(host), device: device.map(str::to_owned), interface: 0 });
    let single = |fds: Vec<OwnedFd>| match <[OwnedFd; 1]>::try_from(fds) {
        Ok([fd]) => Ok(fd),
        Err(fds) => bail!("{} descriptors came for a link that has one", fds.len()),
    };
    Ok(match link {
        LinkSpec::Listen(path) => Arc::new(StreamLink::from_listener(single(fds)?, path.clone())),
        LinkSpec::Connect(path) => Arc::new(StreamLink::with_connector(connector, path.clone())),
        LinkSpec::Datagrams { local, remote } => {
            Arc::new(DatagramLink::from_socket(single(fds)?, local.clone(), remote.clone(), connector))
        }
        LinkSpec::Vxlan(config) => Arc::new(VxlanLink::from_sockets(config, fds, Arc::new(MonotonicClock::default()))?),
        LinkSpec::Tls(config) => Arc::new(TlsLink::from_descriptors(config, fds, connector)?),
        LinkSpec::AfPacket(name) => Arc::new(packet_link(name, single(fds)?, connector, offload)),
        LinkSpec::AfPacketPair(_) => bail!("{link} is an uplink only"),
        LinkSpec::Tap(name) => Arc::new(TapLink::from_device(name.clone(), single(fds)?, connector)),
    })
}

/// Makes the link of an interface from its packet socket.
fn packet_link(name: &InterfaceName, socket: OwnedFd, connector: Arc<Reconnect>, offload: bool) -> AfPacketLink {
    let link = AfPacketLink::from_socket(name.as_str(), socket, connector);
    if offload { link } else { link.without_offload() }
}

/// Makes an uplink with two interfaces from their descriptors.
///
/// # Errors
/// There are not two descriptors.
fn open_pair(names: &[InterfaceName; 2], fds: Vec<OwnedFd>, host: &Arc<dyn Host>, offload: bool) -> Result<BackupLink> {
    let fds: [OwnedFd; 2] = fds.try_into().map_err(|_| anyhow!("a link with two interfaces has two descriptors"))?;
    let member = |interface, name: &InterfaceName, fd| -> Arc<dyn Link> {
        let connector = Arc::new(Reconnect { host: Arc::clone(host), device: None, interface });
        Arc::new(packet_link(name, fd, connector, offload))
    };
    let ([first, second], [one, other]) = (names, fds);
    Ok(BackupLink::new([member(0, first, one), member(1, second, other)]))
}

/// Asks the supervisor to reopen a link's descriptor.
#[derive(Debug)]
struct Reconnect {
    host: Arc<dyn Host>,
    device: Option<String>,
    interface: usize,
}

impl Connector for Reconnect {
    fn connect(&self) -> io::Result<OwnedFd> {
        self.host.connect(self.device.as_deref(), self.interface)
    }
}
