//! Configuration of an end of a TLS link.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The end that opens the connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TlsRole {
    /// The other end opens it; this end listens.
    Listen,
    /// This end opens it.
    Connect,
}

/// Configuration of an end of a TLS link.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TlsConfig {
    /// The end that opens the connection.
    pub role: TlsRole,
    /// Address that this end listens on, or connects to.
    pub address: SocketAddr,
    /// Name or IP address that the other end's certificate must contain. If absent, the connecting end requires the
    /// address, and the listening end accepts every certificate of the authority.
    pub peer: Option<String>,
    /// Files with the keys.
    pub files: TlsFiles,
}

pvrdma_base::setters!(TlsConfig {
    with_role => role: TlsRole,
    with_address => address: SocketAddr,
    with_peer => peer: Option<String>,
    with_files => files: TlsFiles,
});

/// Files in PEM format.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct TlsFiles {
    /// Certificate of this end, followed by the intermediate certificates.
    pub certificate: PathBuf,
    /// Private key of this end.
    pub key: PathBuf,
    /// Certificates of the authorities that this end trusts.
    pub authority: PathBuf,
}

impl TlsFiles {
    /// Returns all paths, each with its option name.
    pub fn each(&self) -> [(&'static str, &Path); 3] {
        [("tls-certificate", &self.certificate), ("tls-key", &self.key), ("tls-authority", &self.authority)]
    }
}

/// `ADDRESS:PORT`, with an IPv6 address in brackets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct TlsAddress(pub(crate) SocketAddr);

impl FromStr for TlsAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("'{text}' is not IPv4:PORT or [IPv6]:PORT");
        let address: SocketAddr = text.parse().map_err(|_| wrong())?;
        if address.port() == 0 { Err(wrong()) } else { Ok(Self(address)) }
    }
}

impl TlsConfig {
    /// Creates the configuration without keys.
    pub fn new(role: TlsRole, address: SocketAddr) -> Self {
        Self { role, address, peer: None, files: TlsFiles::default() }
    }

    /// Returns the keyword in front of the address.
    pub const fn word(&self) -> &'static str {
        match self.role {
            TlsRole::Listen => "tls",
            TlsRole::Connect => "tls-connect",
        }
    }
}
