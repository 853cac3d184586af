//! Keys that only tunnels have.

use std::path::PathBuf;

use pvrdma_ether_link::tls::{TlsConfig, TlsFiles};
use pvrdma_ether_link::vxlan::{TunnelAddress, Vni, VxlanConfig, VxlanError};
use serde::Deserialize;

/// Addresses that a tunnel learns from received packets.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Learn {
    /// The MAC addresses behind each configured remote. Packets from other senders are dropped.
    Stations,
    /// Also the remotes: packets from all senders are accepted.
    Remotes,
}

/// Keys that only a network with a tunnel has.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct TunnelKeys {
    /// Remote endpoints.
    pub remotes: Vec<TunnelAddress>,
    /// The VXLAN network identifier: 0 unless given.
    pub vni: Option<u32>,
    /// Learning mode: `stations` unless given.
    pub learn: Option<Learn>,
}

impl TunnelKeys {
    /// Returns `true` if none is given.
    pub(super) fn is_empty(&self) -> bool {
        self.remotes.is_empty() && self.vni.is_none() && self.learn.is_none()
    }

    /// Returns the tunnel with these keys.
    ///
    /// # Errors
    /// The keys contradict each other.
    pub(super) fn complete(self, tunnel: VxlanConfig) -> Result<VxlanConfig, String> {
        let vni = self.vni.unwrap_or_default();
        let config = VxlanConfig::new(tunnel.local)
            .with_remotes(self.remotes.into_iter().map(|TunnelAddress(remote)| remote).collect())
            .with_vni(Vni::new(vni).ok_or_else(|| format!("vni {vni} is more than {}", Vni::MAX))?)
            .with_open(self.learn == Some(Learn::Remotes));
        match config.check() {
            Ok(()) => Ok(config),
            Err(VxlanError::NoRemote) => Err("vxlan needs a remote (remote=ADDRESS), or learn=remotes".to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }
}

/// Keys that only a network with a TLS uplink has.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct TlsWords {
    pub certificate: Option<PathBuf>,
    pub key: Option<PathBuf>,
    pub authority: Option<PathBuf>,
    pub peer: Option<String>,
}

impl TlsWords {
    /// Returns the link with these keys.
    ///
    /// # Errors
    /// A key is missing.
    pub(super) fn complete(self, link: TlsConfig) -> Result<TlsConfig, String> {
        let given = |path: Option<PathBuf>, key: &str| {
            path.filter(|path| !path.as_os_str().is_empty()).ok_or_else(|| format!("a tls uplink needs {key}=FILE"))
        };
        let files = TlsFiles {
            certificate: given(self.certificate, "tls-certificate")?,
            key: given(self.key, "tls-key")?,
            authority: given(self.authority, "tls-authority")?,
        };
        Ok(link.with_peer(self.peer).with_files(files))
    }
}
