//! What an end of a TLS link is to be.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Which end opens the connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TlsRole {
    /// The other one.
    Listen,
    /// This one.
    Connect,
}

/// An end of a TLS link.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TlsConfig {
    /// Who opens the connection.
    pub role: TlsRole,
    /// Where this end listens, or connects to.
    pub address: SocketAddr,
    /// Name or IP address that the certificate of the other end has to have. Without: who connects wants the address,
    /// who listens takes every certificate of the authority.
    pub peer: Option<String>,
    /// Where its keys are.
    pub files: TlsFiles,
}

/// Files in PEM format.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct TlsFiles {
    /// The certificate of this end, with those between it and the authority behind it.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// Certificates of the authorities whose word this end takes.
    pub authority: PathBuf,
}

impl TlsFiles {
    /// All of them, each with what it is.
    pub fn each(&self) -> [(&'static str, &Path); 3] {
        [("tls-certificate", &self.certificate), ("tls-key", &self.key), ("tls-authority", &self.authority)]
    }
}

/// `ADDRESS:PORT`, an IPv6 address in brackets.
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
    /// An end without its keys.
    pub(crate) fn new(role: TlsRole, TlsAddress(address): TlsAddress) -> Self {
        Self { role, address, peer: None, files: TlsFiles::default() }
    }

    /// The word in front of its address.
    pub const fn word(&self) -> &'static str {
        match self.role {
            TlsRole::Listen => "tls",
            TlsRole::Connect => "tls-connect",
        }
    }
}
