//! A link in the words of the command line.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use pvrdma_ether_link::InterfaceName;
use pvrdma_ether_link::vxlan::{VXLAN_PORT, Vni, VxlanConfig};

use serde::{Deserialize, Serialize};

use super::tunnel::TunnelAddress;

/// One end of a link.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
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
    /// `vxlan:ADDRESS[:PORT]`: a tunnel from our address. Its other ends are keys of their own.
    Vxlan(VxlanConfig),
    /// `af_packet:NAME`: an interface of the host, which the host goes on using.
    AfPacket(InterfaceName),
    /// `tap:NAME`: an interface of the host that ends here; made unless it is there.
    Tap(InterfaceName),
}

impl LinkSpec {
    /// The socket that the daemon makes for it, if it makes one.
    pub fn socket(&self) -> Option<&Path> {
        match self {
            Self::Listen(path) | Self::Datagrams { local: path, .. } => Some(path),
            Self::Connect(_) | Self::Vxlan(_) | Self::AfPacket(_) | Self::Tap(_) => None,
        }
    }

    /// All paths in it.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        let paths = match self {
            Self::Listen(path) | Self::Connect(path) => [Some(path), None],
            Self::Datagrams { local, remote } => [Some(local), Some(remote)],
            Self::Vxlan(_) | Self::AfPacket(_) | Self::Tap(_) => [None, None],
        };
        paths.into_iter().flatten().map(PathBuf::as_path)
    }
}

/// Kinds of links with what they are, for `--help` and the reference page.
pub(crate) const LINKS: [(&str, &str); 6] = [
    ("af_packet:INTERFACE", "an interface of this host; needs CAP_NET_RAW"),
    ("vxlan:ADDRESS[:PORT]", "a tunnel over UDP from this address; uplink only"),
    ("tap:NAME", "an interface of this host that ends here"),
    ("unix:PATH", "listens for QEMU's -netdev stream,server=off"),
    ("unix-connect:PATH", "connects to -netdev stream,server=on"),
    ("unix-dgram:LOCAL:REMOTE", "sockets of -netdev dgram"),
];

/// Kinds of links, for who asks for another one.
const KINDS: &str =
    "af_packet:INTERFACE, vxlan:ADDRESS[:PORT], tap:NAME, unix:PATH, unix-connect:PATH or unix-dgram:LOCAL:REMOTE";

impl FromStr for LinkSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("'{text}' is not one of {KINDS}");
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
            "vxlan" => {
                let TunnelAddress(local) = rest.parse()?;
                Ok(Self::Vxlan(VxlanConfig { local, remotes: Vec::new(), vni: Vni::default(), open: false }))
            }
            "af_packet" => Ok(Self::AfPacket(rest.parse()?)),
            "tap" => Ok(Self::Tap(rest.parse()?)),
            _ => Err(wrong()),
        }
    }
}

impl fmt::Display for LinkSpec {
    /// As it is written, a tunnel with its VNI.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Listen(path) => write!(f, "unix:{}", path.display()),
            Self::Connect(path) => write!(f, "unix-connect:{}", path.display()),
            Self::Datagrams { local, remote } => write!(f, "unix-dgram:{}:{}", local.display(), remote.display()),
            Self::Vxlan(VxlanConfig { local, vni, .. }) if local.port() == VXLAN_PORT => {
                write!(f, "vxlan:{}/{vni}", local.ip())
            }
            Self::Vxlan(VxlanConfig { local, vni, .. }) => write!(f, "vxlan:{local}/{vni}"),
            Self::AfPacket(name) => write!(f, "af_packet:{name}"),
            Self::Tap(name) => write!(f, "tap:{name}"),
        }
    }
}

#[cfg(test)]
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
        for wrong in ["", "/a", "unix:", "tcp:/a", "unix-dgram:/a", "unix-dgram:/a:", "unix-dgram:/a:/a", "tap:"] {
            assert!(wrong.parse::<LinkSpec>().unwrap_err().contains("unix-connect"), "{wrong}");
        }
        for (wrong, word) in
            [("tap:a/b", "interface"), ("af_packet:much-too-long-name", "interface"), ("vxlan:host", "IP address")]
        {
            assert!(wrong.parse::<LinkSpec>().unwrap_err().contains(word), "{wrong}");
        }
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
