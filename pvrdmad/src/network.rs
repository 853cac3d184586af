//! How a device is connected to the network: links in the words of the command line, and as sockets.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use anyhow::{Context, Result};
use backend_rxe::link::Link;
use backend_rxe::link::unix::{DatagramLink, StreamLink};
use backend_rxe::{PortConfig, Rxe, Uplink};
use rdma_backend::MacAddr;
use serde::{Deserialize, Deserializer};

use crate::fault::FaultSpec;
use crate::status::{NetworkReport, by_name};
use crate::vfio_user::{SocketError, SocketFile};

/// What Ethernet carries when nobody says otherwise.
const DEFAULT_MTU: u32 = 1500;
/// The smallest packet that every IPv4 network carries, and about the largest that there is.
const MTU_RANGE: std::ops::RangeInclusive<u32> = 576..=65_535;

/// One end of a link.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LinkSpec {
    /// `unix:PATH`: takes one connection after the other, as QEMU's `-netdev stream,server=off` makes them.
    Listen(PathBuf),
    /// `unix-connect:PATH`: connects, and again when the connection ended. QEMU: `-netdev stream,server=on`.
    Connect(PathBuf),
    /// `unix-dgram:LOCAL:REMOTE`: receives at one socket and sends to the other. QEMU: `-netdev dgram`.
    Datagrams {
        /// Our socket.
        local: PathBuf,
        /// The other side's.
        remote: PathBuf,
    },
}

impl FromStr for LinkSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let kinds = "unix:PATH, unix-connect:PATH or unix-dgram:LOCAL:REMOTE";
        let wrong = || format!("'{text}' is not one of {kinds}");
        let (kind, rest) = text.split_once(':').filter(|(_, rest)| !rest.is_empty()).ok_or_else(wrong)?;
        match kind {
            "unix" => Ok(Self::Listen(rest.into())),
            "unix-connect" => Ok(Self::Connect(rest.into())),
            "unix-dgram" => match rest.split_once(':') {
                Some((local, remote)) if !local.is_empty() && !remote.is_empty() && local != remote => {
                    Ok(Self::Datagrams { local: local.into(), remote: remote.into() })
                }
                _ => Err(wrong()),
            },
            _ => Err(wrong()),
        }
    }
}

impl<'de> Deserialize<'de> for LinkSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// The links of a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NetworkSpec {
    /// The way to other hosts.
    pub uplink: LinkSpec,
    /// The paired network function.
    pub nic: Option<LinkSpec>,
    /// Octets of an IP packet that the network carries.
    pub mtu: u32,
    /// What the uplink suffers from, for tests.
    pub fault: Option<FaultSpec>,
}

impl NetworkSpec {
    /// Puts the values of a device together.
    ///
    /// # Errors
    /// They do not go together.
    pub fn new(uplink: Option<LinkSpec>, nic: Option<LinkSpec>, mtu: Option<u32>) -> Result<Option<Self>, String> {
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
        let mtu = mtu.unwrap_or(DEFAULT_MTU);
        if !MTU_RANGE.contains(&mtu) {
            return Err(format!("mtu {mtu} is not one of {} to {}", MTU_RANGE.start(), MTU_RANGE.end()));
        }
        Ok(Some(Self { uplink, nic, mtu, fault: None }))
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
        let uplink = open(&spec.uplink, &mut files).context("uplink")?;
        let uplink = match spec.fault {
            Some(fault) => fault.wrap(uplink),
            None => uplink,
        };
        let nic = spec.nic.as_ref().map(|nic| open(nic, &mut files)).transpose().context("nic")?;
        let uplink = backend.plug(mac, PortConfig { uplink, nic, mtu: spec.mtu }).context("uplink")?;
        Ok(Self { uplink, mtu: spec.mtu, _files: files })
    }
}

impl Network {
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

fn open(spec: &LinkSpec, files: &mut Vec<OpenFile>) -> Result<Arc<dyn Link>> {
    Ok(match spec {
        LinkSpec::Listen(path) => {
            let file = SocketFile::bind(path)?;
            let link = StreamLink::listen(file.listener().try_clone()?)?;
            files.push(OpenFile::Stream(file));
            Arc::new(link)
        }
        LinkSpec::Connect(path) => Arc::new(StreamLink::connect(path.clone())),
        LinkSpec::Datagrams { local, remote } => {
            let (socket, file) = bind_datagram(local)?;
            files.push(OpenFile::Datagram(file));
            Arc::new(DatagramLink::new(socket, remote.clone())?)
        }
    })
}

#[derive(Debug)]
struct DatagramFile(PathBuf);

impl Drop for DatagramFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Binds a datagram socket for this user only. The socket of a process that is gone is replaced.
fn bind_datagram(path: &Path) -> Result<(UnixDatagram, DatagramFile), SocketError> {
    let io_error = |source: io::Error| SocketError::Io { path: path.to_owned(), source };
    let make = || -> io::Result<UnixDatagram> {
        let socket = UnixDatagram::bind(path)?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
        Ok(socket)
    };
    let socket = match make() {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            let probe = UnixDatagram::unbound().map_err(io_error)?;
            match probe.connect(path) {
                Ok(()) => return Err(SocketError::InUse(path.to_owned())),
                // Refused is also what a plain file says.
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused && is_socket(path) => {}
                Err(_) => return Err(SocketError::NotASocket(path.to_owned())),
            }
            fs::remove_file(path).and_then(|()| make())
        }
        made => made,
    };
    Ok((socket.map_err(io_error)?, DatagramFile(path.to_owned())))
}

fn is_socket(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words() {
        assert_eq!("unix:/a".parse(), Ok(LinkSpec::Listen("/a".into())));
        assert_eq!("unix-connect:/a".parse(), Ok(LinkSpec::Connect("/a".into())));
        let datagrams = LinkSpec::Datagrams { local: "/a".into(), remote: "/b".into() };
        assert_eq!("unix-dgram:/a:/b".parse(), Ok(datagrams.clone()));
        for wrong in ["", "/a", "unix:", "tcp:/a", "unix-dgram:/a", "unix-dgram:/a:", "unix-dgram:/a:/a"] {
            assert!(wrong.parse::<LinkSpec>().unwrap_err().contains("unix-connect"), "{wrong}");
        }
        assert_eq!(NetworkSpec::new(None, None, None), Ok(None));
        let network = NetworkSpec::new(Some(datagrams.clone()), None, None).unwrap().unwrap();
        assert_eq!(network.mtu, 1500);
        for (uplink, nic, mtu, word) in [
            (None, Some(datagrams.clone()), None, "needs an uplink"),
            (None, None, Some(9000), "mtu"),
            (Some(datagrams.clone()), Some(datagrams.clone()), None, "the same"),
            (Some(datagrams), None, Some(100), "576"),
        ] {
            assert!(NetworkSpec::new(uplink, nic, mtu).unwrap_err().contains(word));
        }
    }

    #[test]
    fn datagram_sockets_are_ours_or_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        drop(UnixDatagram::bind(&path).unwrap());
        let (socket, file) = bind_datagram(&path).unwrap();
        assert!(matches!(bind_datagram(&path), Err(SocketError::InUse(_))));
        drop((socket, file));
        assert!(!path.exists());
        fs::write(&path, "precious").unwrap();
        assert!(matches!(bind_datagram(&path), Err(SocketError::NotASocket(_))));
    }
}
