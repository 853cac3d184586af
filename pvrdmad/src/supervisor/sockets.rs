//! The sockets of links and devices: opened once, by the process that may, and kept while workers come and go.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use parking_lot::Mutex;
use pvrdma_ether_link::af_packet::{AfPacketSocket, Segmentation, VlanFilter};
use pvrdma_ether_link::tap::{TapConnector, attach};
use pvrdma_ether_link::tls::{self, TlsConnector, TlsKeys, TlsRole};
use pvrdma_ether_link::unix::{PathConnector, ready_datagram, ready_listener};
use pvrdma_ether_link::vxlan::{self, VxlanPorts, VxlanSockets};
use pvrdma_ether_link::{Connector, NoConnector};
use pvrdma_rxe::VlanMode;
use pvrdma_verbs::MacAddr;

use super::doorbells::DoorbellHost;
use super::segmentation_sample::SAMPLE;
use super::wedged::Wedged;
use crate::config::{Device, LinkSpec, SocketPlace};
use crate::events::Events;
use crate::logging::LogFilter;
use crate::socket::{DatagramFile, Inherited, SocketAccess, SocketFile, bind_datagram};

/// Where sockets come from beside paths and interfaces: what networks share.
#[derive(Debug, Default)]
pub(super) struct Sources {
    pub(super) tunnels: VxlanPorts,
    /// What was passed on to us.
    pub(super) inherited: Inherited,
    /// Who is told what happens.
    pub(super) events: Arc<Events>,
    /// Processes that were killed and have not ended.
    pub(super) wedged: Arc<Wedged>,
    /// What is logged, if that was changed.
    pub(super) log: Mutex<Option<LogFilter>>,
    /// Whether doorbell pages can be lent here.
    pub(super) doorbells: DoorbellHost,
}

impl Sources {
    /// A listening socket for a VMM.
    fn listener(&self, place: &SocketPlace, access: SocketAccess) -> Result<SocketFile> {
        match place {
            SocketPlace::Path(path) => Ok(SocketFile::bind(path, access)?),
            SocketPlace::Descriptor(name) => {
                let listener = self.inherited.take(name);
                let listener = listener.with_context(|| format!("{place}: no such descriptor was passed (LISTEN_FDS)"));
                Ok(SocketFile::inherited(listener?))
            }
        }
    }
}

/// The sockets of a device. Dropping it removes their files.
#[derive(Debug)]
pub(super) struct DeviceSockets {
    listener: SocketFile,
    nic: Option<LinkSockets>,
    nic_listener: Option<SocketFile>,
}

impl DeviceSockets {
    /// Opens them. Of the device's network only the VLAN matters.
    ///
    /// # Errors
    /// One of them cannot be had; those that were made are gone again.
    pub(super) fn open(device: &Device, vlan: VlanMode, sources: &Sources) -> Result<Self> {
        let listener = sources.listener(&device.socket, device.access)?;
        // Behind an access port there are no tags.
        let vlan = match vlan {
            VlanMode::Access(_) => VlanMode::Untagged,
            other => other,
        };
        let open = |link| LinkSockets::open(link, &[device.config.mac], vlan, sources);
        let nic = device.nic.as_ref().map(open).transpose().context("nic")?;
        let listener_of = |place| sources.listener(place, device.access);
        let nic_listener = device.nic_socket.as_ref().map(listener_of).transpose().context("nic-socket")?;
        Ok(Self { listener, nic, nic_listener })
    }

    /// Duplicates: where it listens, then its `nic` or its `nic-socket`.
    pub(super) fn duplicates(&self) -> io::Result<Vec<OwnedFd>> {
        let listeners = [Some(&self.listener), self.nic_listener.as_ref()].into_iter().flatten();
        let listeners = listeners.map(|file| file.listener().as_fd().try_clone_to_owned());
        let nic = self.nic.as_ref().map_or_else(|| Ok(Vec::new()), LinkSockets::duplicates)?;
        listeners.chain(nic.into_iter().map(Ok)).collect()
    }

    /// Paths where somebody has removed a socket: nobody finds it.
    pub(super) fn lost(&self) -> Vec<PathBuf> {
        let listeners = [Some(&self.listener), self.nic_listener.as_ref()].into_iter().flatten();
        let nic = self.nic.as_ref().and_then(LinkSockets::lost);
        listeners.filter_map(SocketFile::lost).chain(nic).map(Path::to_owned).collect()
    }

    /// Who gives its `nic` its descriptor anew, if it has one.
    pub(super) fn connector(&self) -> Option<Arc<dyn Connector>> {
        self.nic.as_ref().map(|nic| Arc::clone(&nic.connector))
    }
}

/// The sockets of a link.
#[derive(Debug)]
pub(super) struct LinkSockets {
    kept: Kept,
    /// Who gives the link its descriptor anew.
    pub(super) connector: Arc<dyn Connector>,
}

/// What is open.
#[derive(Debug)]
enum Kept {
    Nothing,
    Listener(OwnedFd, SocketFile),
    Datagrams(OwnedFd, DatagramFile),
    Several(Vec<OwnedFd>),
    Tunnel(VxlanSockets),
    Tls(Option<OwnedFd>, TlsKeys),
    /// Its socket may be another one later.
    AfPacket(Arc<AfPacketSocket>),
}

impl LinkSockets {
    /// Opens them, for frames to `macs`.
    ///
    /// # Errors
    /// One of them cannot be had; those that were made are gone again.
    pub(super) fn open(link: &LinkSpec, macs: &[MacAddr], vlan: VlanMode, sources: &Sources) -> Result<Self> {
        Ok(match link {
            LinkSpec::Listen(path) => {
                let file = SocketFile::bind(path, SocketAccess::default())?;
                let listener = ready_listener(file.listener().try_clone()?)?;
                Self { kept: Kept::Listener(listener, file), connector: Arc::new(NoConnector) }
            }
            LinkSpec::Connect(path) => {
                Self { kept: Kept::Nothing, connector: Arc::new(PathConnector::stream(path.clone())) }
            }
            LinkSpec::Datagrams { local, remote } => {
                let (socket, file) = bind_datagram(local, SocketAccess::default())?;
                let connector = Arc::new(PathConnector::datagram(remote.clone()));
                Self { kept: Kept::Datagrams(ready_datagram(socket)?, file), connector }
            }
            LinkSpec::Vxlan(config) => {
                let kept = match config.local.port() {
                    // A port that the system chooses is nobody else's.
                    0 => Kept::Several(vxlan::sockets(config)?),
                    _ => Kept::Tunnel(sources.tunnels.open(config)?),
                };
                Self { kept, connector: Arc::new(NoConnector) }
            }
            LinkSpec::Tls(config) => {
                let keys = TlsKeys::read(config)?;
                let listener = (config.role == TlsRole::Listen).then(|| tls::listener(config.address)).transpose();
                let listener = listener.with_context(|| config.address.to_string())?;
                Self { kept: Kept::Tls(listener, keys), connector: Arc::new(TlsConnector(config.address)) }
            }
            LinkSpec::AfPacket(name) => {
                let filter = match vlan {
                    VlanMode::Untagged => VlanFilter::Untagged,
                    VlanMode::Access(vlan) => VlanFilter::Tagged(vlan),
                    VlanMode::Trunk => VlanFilter::All,
                };
                let socket = Arc::new(AfPacketSocket::open(name.as_str(), filter)?);
                socket.set_addresses(macs)?;
                Self { kept: Kept::AfPacket(Arc::clone(&socket)), connector: socket }
            }
            LinkSpec::Tap(name) => {
                Self { kept: Kept::Several(vec![attach(name)?]), connector: Arc::new(TapConnector(name.clone())) }
            }
        })
    }

    /// Returns `true` unless packets that leave as one were damaged when one with the address `mac` was tried.
    pub(super) fn may_offload(&self, mac: MacAddr) -> bool {
        let Kept::AfPacket(socket) = &self.kept else { return true };
        match socket.segmentation(mac, SAMPLE) {
            Ok(Segmentation::Wrong) => {
                // Log: once for an uplink.
                log::warn!("{}: packets that are cut there are damaged: each leaves by itself", socket.interface());
                false
            }
            Ok(Segmentation::Refused) => {
                // Log: once for an uplink.
                log::warn!("{}: this kernel does not cut TCP: each packet leaves by itself", socket.interface());
                false
            }
            Ok(Segmentation::Interface) => {
                // Log: once for an uplink.
                log::debug!(
                    "{} cuts packets itself, if it is not virtual (offload=off prevents it)",
                    socket.interface()
                );
                true
            }
            Ok(Segmentation::Kernel | Segmentation::Unknown) | Err(_) => true,
        }
    }

    /// The path of its socket, if somebody has removed that.
    pub(super) fn lost(&self) -> Option<&Path> {
        match &self.kept {
            Kept::Listener(_, file) => file.lost(),
            Kept::Datagrams(_, file) => file.lost(),
            Kept::Nothing | Kept::Several(_) | Kept::Tunnel(_) | Kept::Tls(..) | Kept::AfPacket(_) => None,
        }
    }

    /// Duplicates for a worker.
    pub(super) fn duplicates(&self) -> io::Result<Vec<OwnedFd>> {
        match &self.kept {
            Kept::Nothing => Ok(Vec::new()),
            Kept::Listener(socket, _) | Kept::Datagrams(socket, _) => Ok(vec![socket.try_clone()?]),
            Kept::Several(sockets) => sockets.iter().map(OwnedFd::try_clone).collect(),
            Kept::Tunnel(sockets) => sockets.duplicates(),
            Kept::Tls(listener, keys) => {
                let listener = listener.as_ref().map(OwnedFd::try_clone).transpose()?;
                Ok(listener.into_iter().chain(keys.descriptors()?).collect())
            }
            Kept::AfPacket(socket) => Ok(vec![socket.descriptor()?]),
        }
    }
}
