//! Sockets of links and devices. The supervisor has the privilege to open them, opens them once, and keeps them when
//! workers are replaced.

mod pair;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use parking_lot::Mutex;
use pvrdma_ether_link::backup::Member;
use pvrdma_ether_link::link_spec::LinkSpec;
use pvrdma_ether_link::{
    af_packet::{AfPacketSocket, Segmentation, VlanFilter},
    tap::{TapConnector, attach},
    tls::{self, TlsConnector, TlsKeys, TlsRole},
    unix::{PathConnector, ready_datagram, ready_listener},
    vxlan::{self, VxlanPorts, VxlanSockets},
};
use pvrdma_link::{Connector, NoConnector};
use pvrdma_packet::MacAddr;
use pvrdma_rxe::VlanMode;
use pvrdma_vfio_user_server::socket::{DatagramFile, FileIdentity, SocketAccess, SocketFile, bind_datagram};
use serde::{Deserialize, Serialize};

use self::pair::PairSockets;
use super::doorbells::DoorbellHost;
use super::keeper_places::KeeperPlaces;
use super::segmentation_sample::SAMPLE;
use super::wedged::Wedged;
use crate::config::{Device, SocketPlace};
use crate::events::Events;
use crate::logging::LogFilter;
use crate::socket::Inherited;

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
    /// Directory in which the next daemon finds the keepers.
    pub(super) keepers: Option<Arc<KeeperPlaces>>,
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
        let open = |link| LinkSockets::open(link, &[device.mac], vlan_of_nic(vlan), sources);
        let nic = device.nic.as_ref().map(open).transpose().context("nic")?;
        let listener_of = |place| sources.listener(place, device.access);
        let nic_listener = device.nic_socket.as_ref().map(listener_of).transpose().context("nic-socket")?;
        Ok(Self { listener, nic, nic_listener })
    }

    /// Returns duplicates: the listening socket, then its `nic-socket` and its `nic`.
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

    /// Describes the sockets for a process that takes them over, in the order of [`Self::duplicates`].
    pub(super) fn describe(&self) -> DescribedSockets {
        let listener = |file: &SocketFile| DescribedListener { file: file.identity().cloned() };
        DescribedSockets {
            listener: listener(&self.listener),
            nic: self.nic.as_ref().map(LinkSockets::describe),
            nic_listener: self.nic_listener.as_ref().map(listener),
        }
    }

    /// Uses the sockets of a device that another process has opened. That process owns their files until [`Self::own`]
    /// is called.
    ///
    /// # Errors
    /// The descriptors do not fit the device.
    pub(super) fn adopt(
        device: &Device,
        vlan: VlanMode,
        described: DescribedSockets,
        fds: &mut VecDeque<OwnedFd>,
        sources: &Sources,
    ) -> Result<Self> {
        let DescribedSockets { listener, nic, nic_listener } = described;
        let listener = listener.adopt(fds)?;
        let nic_listener = nic_listener.map(|described| described.adopt(fds)).transpose().context("nic-socket")?;
        let nic = device.nic.as_ref().zip(nic).map(|(link, described)| {
            LinkSockets::adopt(link, &[device.mac], vlan_of_nic(vlan), described, fds, sources)
        });
        Ok(Self { listener, nic: nic.transpose().context("nic")?, nic_listener })
    }

    /// Makes this process the owner of adopted sockets.
    ///
    /// # Errors
    /// The system refuses.
    pub(super) fn own(&self) -> io::Result<()> {
        self.nic.as_ref().map_or(Ok(()), LinkSockets::own)?;
        [Some(&self.listener), self.nic_listener.as_ref()].into_iter().flatten().try_for_each(SocketFile::own)
    }

    /// Returns the connector that reopens the descriptor of its `nic`, if it has one.
    pub(super) fn connector(&self) -> Option<Arc<dyn Connector>> {
        self.nic.as_ref().map(|nic| Arc::clone(&nic.connector))
    }
}

/// Returns the tags of frames behind the port of a device: none behind an access port.
const fn vlan_of_nic(vlan: VlanMode) -> VlanMode {
    match vlan {
        VlanMode::Access(_) => VlanMode::Untagged,
        other => other,
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
    Pair(Arc<PairSockets>),
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
                let socket = Arc::new(AfPacketSocket::open(name.as_str(), filter(vlan))?);
                socket.set_addresses(macs)?;
                Self { kept: Kept::AfPacket(Arc::clone(&socket)), connector: socket }
            }
            LinkSpec::AfPacketPair(names) => {
                let pair = Arc::new(PairSockets::open(names, filter(vlan), macs)?);
                Self { kept: Kept::Pair(Arc::clone(&pair)), connector: pair }
            }
            LinkSpec::Tap(name) => {
                Self { kept: Kept::Several(vec![attach(name)?]), connector: Arc::new(TapConnector(name.clone())) }
            }
        })
    }

    /// Describes the sockets for a process that takes them over, in the order of [`Self::duplicates`].
    pub(super) fn describe(&self) -> DescribedLink {
        let (mut file, mut position) = (None, None);
        let count = match &self.kept {
            Kept::Nothing => 0,
            Kept::Listener(_, listener) => {
                file = listener.identity().cloned();
                1
            }
            Kept::Datagrams(_, datagrams) => {
                file = Some(datagrams.identity().clone());
                1
            }
            Kept::Several(sockets) => sockets.len(),
            Kept::Tunnel(sockets) => {
                position = Some(sockets.position());
                sockets.count()
            }
            Kept::Tls(listener, _) => usize::from(listener.is_some()).saturating_add(TLS_FILES),
            Kept::AfPacket(_) => 1,
            Kept::Pair(_) => 2,
        };
        DescribedLink { file, position, count }
    }

    /// Uses the sockets of a link that another process has opened. That process owns their files until [`Self::own`] is
    /// called.
    ///
    /// # Errors
    /// The descriptors do not fit the link.
    pub(super) fn adopt(
        link: &LinkSpec,
        macs: &[MacAddr],
        vlan: VlanMode,
        described: DescribedLink,
        fds: &mut VecDeque<OwnedFd>,
        sources: &Sources,
    ) -> Result<Self> {
        let DescribedLink { file, position, count } = described;
        ensure!(count <= fds.len(), "too few descriptors");
        let mut fds: VecDeque<_> = fds.drain(..count).collect();
        let mut next = || fds.pop_front().context("too few descriptors");
        let file = || file.context("no file");
        Ok(match link {
            LinkSpec::Listen(_) => {
                let listener = UnixListener::from(next()?);
                let kept =
                    Kept::Listener(ready_listener(listener.try_clone()?)?, SocketFile::adopt(listener, Some(file()?)));
                Self { kept, connector: Arc::new(NoConnector) }
            }
            LinkSpec::Connect(path) => {
                Self { kept: Kept::Nothing, connector: Arc::new(PathConnector::stream(path.clone())) }
            }
            LinkSpec::Datagrams { remote, .. } => {
                let kept = Kept::Datagrams(next()?, DatagramFile::adopt(file()?));
                Self { kept, connector: Arc::new(PathConnector::datagram(remote.clone())) }
            }
            LinkSpec::Vxlan(config) => {
                let kept = match position {
                    None => Kept::Several(fds.into()),
                    Some(position) => Kept::Tunnel(sources.tunnels.adopt(config, position, fds.into())?),
                };
                Self { kept, connector: Arc::new(NoConnector) }
            }
            LinkSpec::Tls(config) => {
                let listener = (config.role == TlsRole::Listen).then(&mut next).transpose()?;
                let files = [next()?, next()?, next()?];
                let kept = Kept::Tls(listener, TlsKeys::from_descriptors(config, files)?);
                Self { kept, connector: Arc::new(TlsConnector(config.address)) }
            }
            LinkSpec::AfPacket(name) => {
                let socket = AfPacketSocket::adopt(name.as_str(), filter(vlan), next()?, macs);
                let socket = Arc::new(socket.with_context(|| name.to_string())?);
                Self { kept: Kept::AfPacket(Arc::clone(&socket)), connector: socket }
            }
            LinkSpec::AfPacketPair(names) => {
                let pair = Arc::new(PairSockets::adopt(names, filter(vlan), [next()?, next()?], macs)?);
                Self { kept: Kept::Pair(Arc::clone(&pair)), connector: pair }
            }
            LinkSpec::Tap(name) => {
                Self { kept: Kept::Several(fds.into()), connector: Arc::new(TapConnector(name.clone())) }
            }
        })
    }

    /// Makes this process the owner of adopted sockets.
    ///
    /// # Errors
    /// The system refuses.
    pub(super) fn own(&self) -> io::Result<()> {
        match &self.kept {
            Kept::Listener(_, file) => return file.own(),
            Kept::Datagrams(_, file) => file.own(),
            Kept::Tunnel(sockets) => sockets.own(),
            Kept::Nothing | Kept::Several(_) | Kept::Tls(..) | Kept::AfPacket(_) | Kept::Pair(_) => {}
        }
        Ok(())
    }

    /// Returns `false` if a trial with the address `mac` shows that super-frames of an interface arrive damaged or are
    /// refused.
    pub(super) fn may_offload(&self, mac: MacAddr) -> bool {
        match &self.kept {
            Kept::AfPacket(socket) => is_segmented(socket, mac),
            Kept::Pair(pair) => pair.sockets.iter().all(|socket| is_segmented(socket, mac)),
            _ => true,
        }
    }

    /// Makes an interface of two the one that receives.
    ///
    /// # Errors
    /// The system refuses.
    pub(super) fn select(&self, active: Member) -> io::Result<()> {
        match &self.kept {
            Kept::Pair(pair) => pair.select(active),
            _ => Ok(()),
        }
    }

    /// Returns the connectors that reopen the link's descriptors: one for each interface.
    pub(super) fn connectors(&self) -> Vec<Arc<dyn Connector>> {
        match &self.kept {
            Kept::Pair(pair) => pair.sockets.iter().map(|socket| Arc::clone(socket) as _).collect(),
            _ => vec![Arc::clone(&self.connector)],
        }
    }

    /// Returns the path of its socket, if the file was removed.
    pub(super) fn lost(&self) -> Option<&Path> {
        match &self.kept {
            Kept::Listener(_, file) => file.lost(),
            Kept::Datagrams(_, file) => file.lost(),
            Kept::Nothing | Kept::Several(_) | Kept::Tunnel(_) | Kept::Tls(..) | Kept::AfPacket(_) | Kept::Pair(_) => {
                None
            }
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
            Kept::Pair(pair) => pair.sockets.iter().map(|socket| socket.descriptor()).collect(),
        }
    }
}

/// Returns `false` if a trial with the address `mac` shows that super-frames arrive damaged or are refused.
fn is_segmented(socket: &AfPacketSocket, mac: MacAddr) -> bool {
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
            log::debug!("{} cuts packets itself, if it is not virtual (offload=off prevents it)", socket.interface());
            true
        }
        Ok(Segmentation::Kernel | Segmentation::Unknown) | Err(_) => true,
    }
}

/// Returns the frames of an interface that a network in this VLAN mode receives.
const fn filter(vlan: VlanMode) -> VlanFilter {
    match vlan {
        VlanMode::Untagged => VlanFilter::Untagged,
        VlanMode::Access(vlan) => VlanFilter::Tagged(vlan),
        VlanMode::Trunk => VlanFilter::All,
    }
}

/// Number of files of a TLS link: certificate, key and authority.
const TLS_FILES: usize = 3;

/// Listening socket that another process takes over, without its descriptor.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct DescribedListener {
    /// Its file. `None` for a socket that was inherited (`LISTEN_FDS`).
    file: Option<FileIdentity>,
}

impl DescribedListener {
    fn adopt(self, fds: &mut VecDeque<OwnedFd>) -> Result<SocketFile> {
        let listener = fds.pop_front().context("too few descriptors")?;
        Ok(SocketFile::adopt(UnixListener::from(listener), self.file))
    }
}

/// Sockets of a link that another process takes over, without their descriptors.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct DescribedLink {
    file: Option<FileIdentity>,
    /// Position of a tunnel among those at the same address and port.
    position: Option<usize>,
    /// Number of descriptors.
    count: usize,
}

/// Sockets of a device that another process takes over, without their descriptors.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct DescribedSockets {
    listener: DescribedListener,
    nic: Option<DescribedLink>,
    nic_listener: Option<DescribedListener>,
}
