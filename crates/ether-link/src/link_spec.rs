//! Textual description of a link, as on a command line.

use std::fmt;
use std::io;
#[cfg(feature = "unix")]
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use thiserror::Error;

#[cfg(any(feature = "af-packet", feature = "tap"))]
use crate::InterfaceName;
#[cfg(feature = "af-packet")]
use crate::af_packet::{AfPacketError, AfPacketLink, AfPacketSocket, VlanFilter};
#[cfg(feature = "tap")]
use crate::tap::{TapError, TapLink};
#[cfg(feature = "tls")]
use crate::tls::{TlsAddress, TlsConfig, TlsError, TlsLink, TlsRole};
#[cfg(feature = "unix")]
use crate::unix::{DatagramLink, StreamLink};
#[cfg(feature = "vxlan")]
use crate::vxlan::{TunnelAddress, VXLAN_PORT, VxlanConfig, VxlanError, VxlanLink};
use pvrdma_link::Link;
#[cfg(feature = "vxlan")]
use pvrdma_link::MonotonicClock;

/// One end of a link. Each variant exists with the feature of its kind.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LinkSpec {
    /// `unix:PATH`: accepts one connection after the other, from QEMU's `-netdev stream,server=off`.
    #[cfg(feature = "unix")]
    Listen(PathBuf),
    /// `unix-connect:PATH`: connects, and reconnects when the connection has ended. QEMU: `-netdev stream,server=on`.
    #[cfg(feature = "unix")]
    Connect(PathBuf),
    /// `unix-dgram:LOCAL:REMOTE`: receives at one socket and sends to the other. QEMU: `-netdev dgram`.
    #[cfg(feature = "unix")]
    Datagrams {
        /// Path of the local socket.
        local: PathBuf,
        /// Path of the other end's socket.
        remote: PathBuf,
    },
    /// `vxlan:ADDRESS[:PORT]`: a tunnel from this local address. Its other ends are configured by separate keys.
    #[cfg(feature = "vxlan")]
    Vxlan(VxlanConfig),
    /// `tls:ADDRESS:PORT` listens, `tls-connect:ADDRESS:PORT` connects. Its key files are configured by separate keys.
    #[cfg(feature = "tls")]
    Tls(TlsConfig),
    /// `af_packet:NAME`: an interface of the host, which the host can still use.
    #[cfg(feature = "af-packet")]
    AfPacket(InterfaceName),
    /// `af_packet:NAME+NAME`: two interfaces of the host, of which one is active and the other one its backup.
    #[cfg(feature = "af-packet")]
    AfPacketPair([InterfaceName; 2]),
    /// `tap:NAME`: an interface of the host whose other end is this process. Created if it does not exist.
    #[cfg(feature = "tap")]
    Tap(InterfaceName),
}

impl LinkSpec {
    /// Returns the path of the socket that is created for the link, if there is one.
    pub fn socket(&self) -> Option<&Path> {
        match self {
            #[cfg(feature = "unix")]
            Self::Listen(path) | Self::Datagrams { local: path, .. } => Some(path),
            #[cfg(feature = "unix")]
            Self::Connect(_) => None,
            #[cfg(feature = "vxlan")]
            Self::Vxlan(_) => None,
            #[cfg(feature = "tls")]
            Self::Tls(_) => None,
            #[cfg(feature = "af-packet")]
            Self::AfPacket(_) | Self::AfPacketPair(_) => None,
            #[cfg(feature = "tap")]
            Self::Tap(_) => None,
        }
    }

    /// Iterates over all paths of the link.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        let paths: [Option<&PathBuf>; 3] = match self {
            #[cfg(feature = "unix")]
            Self::Listen(path) | Self::Connect(path) => [Some(path), None, None],
            #[cfg(feature = "unix")]
            Self::Datagrams { local, remote } => [Some(local), Some(remote), None],
            #[cfg(feature = "tls")]
            Self::Tls(TlsConfig { files, .. }) => [Some(&files.certificate), Some(&files.key), Some(&files.authority)],
            #[cfg(feature = "vxlan")]
            Self::Vxlan(_) => [None; 3],
            #[cfg(feature = "af-packet")]
            Self::AfPacket(_) | Self::AfPacketPair(_) => [None; 3],
            #[cfg(feature = "tap")]
            Self::Tap(_) => [None; 3],
        };
        paths.into_iter().flatten().map(PathBuf::as_path)
    }

    /// Opens the link, for a process with the necessary rights. On an interface of the host it receives frames without
    /// a VLAN tag, to the addresses that are set later ([`Link::set_addresses`]).
    ///
    /// # Errors
    /// The system refuses: missing privileges, no such interface, a socket's path that is in use.
    pub fn open(&self) -> Result<Arc<dyn Link>, LinkError> {
        Ok(match self {
            #[cfg(feature = "unix")]
            Self::Listen(path) => {
                let listener = UnixListener::bind(path).and_then(StreamLink::listen);
                Arc::new(listener.map_err(at(path))?)
            }
            #[cfg(feature = "unix")]
            Self::Connect(path) => Arc::new(StreamLink::connect(path.clone())),
            #[cfg(feature = "unix")]
            Self::Datagrams { local, remote } => {
                let socket = UnixDatagram::bind(local).and_then(|socket| DatagramLink::new(socket, remote.clone()));
                Arc::new(socket.map_err(at(local))?)
            }
            #[cfg(feature = "vxlan")]
            Self::Vxlan(config) => Arc::new(VxlanLink::bind(config, Arc::new(MonotonicClock::default()))?),
            #[cfg(feature = "tls")]
            Self::Tls(config) => Arc::new(TlsLink::open(config)?),
            #[cfg(feature = "af-packet")]
            Self::AfPacket(name) => {
                let host = AfPacketSocket::open(name.as_str(), VlanFilter::Untagged)?;
                let socket = host.descriptor().map_err(at(name.as_str().as_ref()))?;
                Arc::new(AfPacketLink::from_socket(name.as_str(), socket, Arc::new(host)))
            }
            #[cfg(feature = "af-packet")]
            Self::AfPacketPair(_) => return Err(LinkError::Pair(self.to_string())),
            #[cfg(feature = "tap")]
            Self::Tap(name) => Arc::new(TapLink::open(name.clone())?),
        })
    }
}

/// Adds the path to an error of the system.
#[cfg(any(feature = "af-packet", feature = "unix"))]
fn at(path: &Path) -> impl FnOnce(io::Error) -> LinkError + use<> {
    let path = path.to_owned();
    move |source| LinkError::Socket { path, source }
}

/// Error of opening a link.
#[derive(Debug, Error)]
pub enum LinkError {
    /// Error of an interface of the host.
    #[cfg(feature = "af-packet")]
    #[error(transparent)]
    AfPacket(#[from] AfPacketError),
    /// A link that only the daemon can open, because it watches the carrier of the interfaces.
    #[cfg(feature = "af-packet")]
    #[error("{0}: only the daemon uses one of two interfaces")]
    Pair(String),
    /// Error of a tap device.
    #[cfg(feature = "tap")]
    #[error(transparent)]
    Tap(#[from] TapError),
    /// Error of a tunnel.
    #[cfg(feature = "vxlan")]
    #[error(transparent)]
    Vxlan(#[from] VxlanError),
    /// Error of a TLS link.
    #[cfg(feature = "tls")]
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// Error of another socket.
    #[error("{}: {source}", path.display())]
    Socket {
        /// Path of the socket.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
}

/// Kinds of links with their descriptions, for help texts.
pub const LINKS: &[(&str, &str)] = &[
    #[cfg(feature = "af-packet")]
    ("af_packet:INTERFACE[+INTERFACE]", "an interface of this host, or two; needs CAP_NET_RAW"),
    #[cfg(feature = "vxlan")]
    ("vxlan:ADDRESS[:PORT]", "a tunnel over UDP from this address; uplink only"),
    #[cfg(feature = "tls")]
    ("tls:ADDRESS:PORT", "listens for another daemon, encrypted over TCP; uplink only"),
    #[cfg(feature = "tls")]
    ("tls-connect:ADDRESS:PORT", "connects to such a listener; uplink only"),
    #[cfg(feature = "tap")]
    ("tap:NAME", "a new interface of this host, whose other end is the daemon"),
    #[cfg(feature = "unix")]
    ("unix:PATH", "listens for QEMU's -netdev stream,server=off"),
    #[cfg(feature = "unix")]
    ("unix-connect:PATH", "connects to -netdev stream,server=on"),
    #[cfg(feature = "unix")]
    ("unix-dgram:LOCAL:REMOTE", "sockets of -netdev dgram"),
];

/// Returns the error message for an invalid text. It lists the kinds of links that are compiled in.
fn wrong(text: &str) -> String {
    let kinds: Vec<_> = LINKS.iter().map(|(kind, _)| *kind).collect();
    match kinds.split_last() {
        Some((last, others)) if !others.is_empty() => {
            format!("'{text}' is not one of {} or {last}", others.join(", "))
        }
        _ => format!("'{text}' is not {}", kinds.join("")),
    }
}

impl FromStr for LinkSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (kind, rest) = text.split_once(':').filter(|(_, rest)| !rest.is_empty()).ok_or_else(|| wrong(text))?;
        match kind {
            #[cfg(feature = "unix")]
            "unix" => Ok(Self::Listen(rest.into())),
            #[cfg(feature = "unix")]
            "unix-connect" => Ok(Self::Connect(rest.into())),
            #[cfg(feature = "unix")]
            "unix-dgram" => match rest.split_once(':') {
                Some((local, remote)) if !local.is_empty() && !remote.is_empty() && local != remote => {
                    Ok(Self::Datagrams { local: local.into(), remote: remote.into() })
                }
                _ => Err(wrong(text)),
            },
            #[cfg(feature = "vxlan")]
            "vxlan" => {
                let TunnelAddress(local) = rest.parse()?;
                Ok(Self::Vxlan(VxlanConfig::new(local)))
            }
            #[cfg(feature = "tls")]
            "tls" => Ok(Self::Tls(TlsConfig::new(TlsRole::Listen, rest.parse::<TlsAddress>()?.0))),
            #[cfg(feature = "tls")]
            "tls-connect" => Ok(Self::Tls(TlsConfig::new(TlsRole::Connect, rest.parse::<TlsAddress>()?.0))),
            #[cfg(feature = "af-packet")]
            "af_packet" => match rest.split_once('+') {
                None => Ok(Self::AfPacket(rest.parse()?)),
                Some((first, second)) if first == second => Err(format!("'{text}' names one interface twice")),
                Some((_, second)) if second.contains('+') => Err(format!("'{text}' names more than two interfaces")),
                Some((first, second)) => Ok(Self::AfPacketPair([first.parse()?, second.parse()?])),
            },
            #[cfg(feature = "tap")]
            "tap" => Ok(Self::Tap(rest.parse()?)),
            _ => Err(wrong(text)),
        }
    }
}

impl fmt::Display for LinkSpec {
    /// Formats the link as it is specified; a tunnel with its VNI.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            #[cfg(feature = "unix")]
            Self::Listen(path) => write!(f, "unix:{}", path.display()),
            #[cfg(feature = "unix")]
            Self::Connect(path) => write!(f, "unix-connect:{}", path.display()),
            #[cfg(feature = "unix")]
            Self::Datagrams { local, remote } => write!(f, "unix-dgram:{}:{}", local.display(), remote.display()),
            #[cfg(feature = "vxlan")]
            Self::Vxlan(VxlanConfig { local, vni, .. }) if local.port() == VXLAN_PORT => {
                write!(f, "vxlan:{}/{vni}", local.ip())
            }
            #[cfg(feature = "vxlan")]
            Self::Vxlan(VxlanConfig { local, vni, .. }) => write!(f, "vxlan:{local}/{vni}"),
            #[cfg(feature = "tls")]
            Self::Tls(config) => write!(f, "{}:{}", config.word(), config.address),
            #[cfg(feature = "af-packet")]
            Self::AfPacket(name) => write!(f, "af_packet:{name}"),
            #[cfg(feature = "af-packet")]
            Self::AfPacketPair([first, second]) => write!(f, "af_packet:{first}+{second}"),
            #[cfg(feature = "tap")]
            Self::Tap(name) => write!(f, "tap:{name}"),
        }
    }
}

#[cfg(test)]
#[cfg(all(feature = "af-packet", feature = "tap", feature = "tls", feature = "unix", feature = "vxlan"))]
mod tests {
    use super::*;

    #[test]
    fn words() {
        assert_eq!("unix:/a".parse(), Ok(LinkSpec::Listen("/a".into())));
        assert_eq!("unix-connect:/a".parse(), Ok(LinkSpec::Connect("/a".into())));
        let datagrams = LinkSpec::Datagrams { local: "/a".into(), remote: "/b".into() };
        assert_eq!("unix-dgram:/a:/b".parse(), Ok(datagrams));
        assert_eq!("tap:tap0".parse(), Ok(LinkSpec::Tap("tap0".parse().unwrap())));
        assert_eq!("af_packet:eth0".parse(), Ok(LinkSpec::AfPacket("eth0".parse().unwrap())));
        let pair = ["eth0", "eth1"].map(|name| name.parse().unwrap());
        assert_eq!("af_packet:eth0+eth1".parse(), Ok(LinkSpec::AfPacketPair(pair)));
        for text in ["tls:10.0.0.1:7", "tls-connect:[fd00::1]:7", "af_packet:eth0+eth1"] {
            assert_eq!(text.parse::<LinkSpec>().unwrap().to_string(), text);
        }
        for wrong in ["", "/a", "unix:", "tcp:/a", "unix-dgram:/a", "unix-dgram:/a:", "unix-dgram:/a:/a", "tap:"] {
            assert!(wrong.parse::<LinkSpec>().unwrap_err().contains("unix-connect"), "{wrong}");
        }
        for (wrong, word) in [
            ("tap:a/b", "interface"),
            ("af_packet:much-too-long-name", "interface"),
            ("af_packet:eth0+", "interface"),
            ("af_packet:eth0+eth0", "twice"),
            ("af_packet:a+b+c", "more than two"),
            ("vxlan:host", "IP address"),
            ("tls:10.0.0.1", "PORT"),
            ("tls-connect:fd00::1:7", "[IPv6]:PORT"),
            ("tls:10.0.0.1:0", "PORT"),
        ] {
            assert!(wrong.parse::<LinkSpec>().unwrap_err().contains(word), "{wrong}");
        }
    }

    /// Links are opened from their description, and an error names the path in use.
    #[test]
    fn links_are_opened() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        let open = |text: &str| text.parse::<LinkSpec>().unwrap().open();
        let ends = [
            [format!("unix:{}", path("s")), format!("unix-connect:{}", path("s"))],
            [format!("unix-dgram:{}:{}", path("a"), path("b")), format!("unix-dgram:{}:{}", path("b"), path("a"))],
        ];
        for ends in ends {
            let links = ends.each_ref().map(|text| open(text).unwrap());
            assert_eq!(links.each_ref().map(|link| link.inspect().kind), ["unix"; 2]);
            let error = open(&ends[0]).unwrap_err().to_string();
            assert!(error.contains(&folder.path().display().to_string()), "{error}");
        }
        assert!(open("af_packet:not-there").unwrap_err().to_string().contains("not-there"));
        assert!(matches!(open("af_packet:a+b").unwrap_err(), LinkError::Pair(_)));
    }

    #[test]
    fn addresses_of_tunnels() {
        for (text, address) in [
            ("10.0.0.1", "10.0.0.1:4789"),
            ("10.0.0.1:8472", "10.0.0.1:8472"),
            ("fd00::1", "[fd00::1]:4789"),
            ("[fd00::1]", "[fd00::1]:4789"),
            ("[fd00::1]:8472", "[fd00::1]:8472"),
        ] {
            let Ok(LinkSpec::Vxlan(config)) = format!("vxlan:{text}").parse() else { panic!("{text}") };
            assert_eq!((config.local.to_string(), config.remotes.len()), (address.to_owned(), 0));
        }
    }
}
