//! Sockets of links and devices. The supervisor has the privilege to open them, opens them once, and keeps them when
//! workers are replaced.

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

/// State that networks share and that sockets and plans are made from.
#[derive(Debug, Default)]
pub(super) struct Sources {
    pub(super) tunnels: VxlanPorts,
    /// Sockets that were passed to the daemon at its start.
    pub(super) inherited: Inherited,
    /// Subscribers of events.
    pub(super) events: Arc<Events>,
    /// Processes that were killed and have not ended.
    pub(super) wedged: Arc<Wedged>,
    /// Log filter, if it was changed at run time.
    pub(super) log: Mutex<Option<LogFilter>>,
    /// Tells whether doorbell pages can be exported on this host.
    pub(super) doorbells: DoorbellHost,
}

impl Sources {
    /// Opens a listening socket for a VMM.
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

/// Sockets of a device. Dropping it removes their files.
#[derive(Debug)]
pub(super) struct DeviceSockets {
    listener: SocketFile,
    nic: Option<LinkSockets>,
    nic_listener: Option<SocketFile>,
}

impl DeviceSockets {
    /// Opens the sockets of a device. Of its network only the VLAN mode matters.
    ///
    /// # Errors
    /// A socket cannot be opened. Those that were opened before are removed again.
    pub(super) fn open(device: &Device, vlan: VlanMode, sources: &Sources) -> Result<Self> {
        let listener = sources.listener(&device.socket, device.access)?;
        // Frames behind an access port carry no tags.
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

    /// Returns duplicates: the listening socket, then its `nic` or its `nic-socket`.
    pub(super) fn duplicates(&self) -> io::Result<Vec<OwnedFd>> {
        let listeners = [Some(&self.listener), self.nic_listener.as_ref()].into_iter().flatten();
        let listeners = listeners.map(|file| file.listener().as_fd().try_clone_to_owned());
        let nic = self.nic.as_ref().map_or_else(|| Ok(Vec::new()), LinkSockets::duplicates)?;
        listeners.chain(nic.into_iter().map(Ok)).collect()
    }

    /// Returns the paths of sockets whose files were removed, so that no client can connect to them.
    pub(super) fn lost(&self) -> Vec<PathBuf> {
        let listeners = [Some(&self.listener), self.nic_listener.as_ref()].into_iter().flatten();
        let nic = self.nic.as_ref().and_then(LinkSockets::lost);
        listeners.filter_map(SocketFile::lost).chain(nic).map(Path::to_owned).collect()
    }

    /// Returns the connector that reopens the descriptor of its `nic`, if it has one.
    pub(super) fn connector(&self) -> Option<Arc<dyn Connector>> {
        self.nic.as_ref().map(|nic| Arc::clone(&nic.connector))
    }
}

/// Sockets of a link.
#[derive(Debug)]
pub(super) struct LinkSockets {
    kept: Kept,
    /// Reopens the link's descriptor.
    pub(super) connector: Arc<dyn Connector>,
}

/// Open sockets and files of a link.
#[derive(Debug)]
enum Kept {
    Nothing,
    Listener(OwnedFd, SocketFile),
    Datagrams(OwnedFd, DatagramFile),
    Several(Vec<OwnedFd>),
    Tunnel(VxlanSockets),
    Tls(Option<OwnedFd>, TlsKeys),
    /// May replace its socket later.
    AfPacket(Arc<AfPacketSocket>),
}

impl LinkSockets {
    /// Opens the sockets of a link for frames to `macs`.
    ///
    /// # Errors
    /// A socket cannot be opened. Those that were opened before are removed again.
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
                    // A port that the system chooses is not shared with another network.
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

    /// Returns `false` if a trial with the address `mac` shows that super-frames arrive damaged or are refused.
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

    /// Returns the path of its socket, if the file was removed.
    pub(super) fn lost(&self) -> Option<&Path> {
        match &self.kept {
            Kept::Listener(_, file) => file.lost(),
            Kept::Datagrams(_, file) => file.lost(),
            Kept::Nothing | Kept::Several(_) | Kept::Tunnel(_) | Kept::Tls(..) | Kept::AfPacket(_) => None,
        }
    }

    /// Returns duplicates for a worker.
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
