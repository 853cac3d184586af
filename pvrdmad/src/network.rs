//! A device's connection to the network: its links, opened and plugged into the adapter.

use std::sync::Arc;

use anyhow::{Context, Result};
use pvrdma_ether_link::Link;
use pvrdma_ether_link::af_packet::AfPacketLink;
use pvrdma_ether_link::tap::TapLink;
use pvrdma_ether_link::unix::{DatagramLink, StreamLink};
use pvrdma_ether_link::vxlan::VxlanLink;
use pvrdma_rxe::{MonotonicClock, PortConfig, Rxe, Uplink};
use pvrdma_verbs::{Counter, MacAddr};

use crate::config::{self, Device, LinkSpec};
use crate::socket::{DatagramFile, SocketAccess, SocketFile, bind_datagram};

/// A device's connection to the network. Dropping it takes the cables out and removes the sockets.
#[derive(Debug)]
pub(crate) struct Network {
    // In this order: nobody uses a socket whose file is gone.
    uplink: Uplink,
    mtu: u32,
    _files: Vec<OpenFile>,
}

impl Network {
    /// Opens the links of a device and connects it, if its network has an uplink.
    ///
    /// # Errors
    /// A socket cannot be made.
    pub(crate) fn start(spec: &config::Network, device: &Device, backend: &Rxe) -> Result<Option<Self>> {
        let Some(uplink) = &spec.uplink else { return Ok(None) };
        let (mac, mut files) = (device.config.mac, Vec::new());
        let uplink = open(uplink, mac, &mut files).context("uplink")?;
        let uplink = match spec.fault {
            Some(fault) => fault.wrap(uplink),
            None => uplink,
        };
        let nic = device.nic.as_ref().map(|nic| open(nic, mac, &mut files)).transpose().context("nic")?;
        let port = PortConfig { uplink, nic, mtu: spec.mtu, rules: device.rules.clone() };
        let uplink = backend.plug(mac, port).context("uplink")?;
        Ok(Some(Self { uplink, mtu: spec.mtu, _files: files }))
    }

    /// Bytes of an IP packet that the network carries.
    pub(crate) const fn mtu(&self) -> u32 {
        self.mtu
    }

    /// The port's counters.
    pub(crate) fn counters(&self) -> Vec<Counter> {
        self.uplink.counters()
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
            let file = SocketFile::bind(path, SocketAccess::default())?;
            let link = StreamLink::listen(file.listener().try_clone()?)?;
            files.push(OpenFile::Stream(file));
            Arc::new(link)
        }
        LinkSpec::Vxlan(config) => Arc::new(VxlanLink::bind(config, Arc::new(MonotonicClock::default()))?),
        LinkSpec::AfPacket(name) => Arc::new(AfPacketLink::open(name.as_str(), mac)?),
        LinkSpec::Tap(name) => Arc::new(TapLink::open(name.clone())?),
        LinkSpec::Connect(path) => Arc::new(StreamLink::connect(path.clone())),
        LinkSpec::Datagrams { local, remote } => {
            let (socket, file) = bind_datagram(local, SocketAccess::default())?;
            files.push(OpenFile::Datagram(file));
            Arc::new(DatagramLink::new(socket, remote.clone())?)
        }
    })
}
