//! Keys of an end. A process that may open the files reads them and passes them on as descriptors; the process of the
//! link converts them for TLS.

use std::fmt;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{MemfdFlags, memfd_create};
use rustls::client::Resumption;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::{self, SectionKind};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use thiserror::Error;

use super::config::{TlsConfig, TlsFiles, TlsRole};

/// Longest file, in bytes.
const MAX_FILE: u64 = 256 << 10;
/// Application protocol (ALPN). It ensures that a connection of another protocol is not mistaken for one of a TLS link.
pub(super) const PROTOCOL: &[u8] = b"pvrdma-ethernet/1";

/// Error of loading keys.
#[derive(Debug, Error)]
pub enum TlsKeyError {
    /// A file cannot be read. The system's error is the source.
    #[error("{}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Reason.
        source: io::Error,
    },
    /// A file has wrong content.
    #[error("{}: line {line}: {problem}", path.display())]
    Content {
        /// Path of the file.
        path: PathBuf,
        /// First line of the wrong part.
        line: usize,
        /// Description of the problem.
        problem: String,
    },
    /// A file lacks the required content.
    #[error("{}: {problem}", path.display())]
    Missing {
        /// Path of the file.
        path: PathBuf,
        /// Description of the problem.
        problem: &'static str,
    },
    /// The files do not match each other.
    #[error("{}: {problem}", path.display())]
    Together {
        /// Path of the certificate.
        path: PathBuf,
        /// Description of the problem.
        problem: String,
    },
    /// A certificate cannot contain this name.
    #[error("'{0}' is neither a name nor an IP address")]
    Name(String),
}

/// Content of the three files.
pub struct TlsKeys {
    files: TlsFiles,
    certificate: Vec<u8>,
    key: Vec<u8>,
    authority: Vec<u8>,
}

impl fmt::Debug for TlsKeys {
    /// Prints the paths only, because the content includes the private key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsKeys").field("files", &self.files).finish_non_exhaustive()
    }
}

impl TlsKeys {
    /// Reads the files of an end, and checks that they are usable for it.
    ///
    /// # Errors
    /// A file cannot be read or is not usable. The error contains no part of a key.
    pub fn read(config: &TlsConfig) -> Result<Self, TlsKeyError> {
        let files = config.files.clone();
        let read = |path: &Path| {
            let content = File::open(path).and_then(content);
            content.map_err(|source| TlsKeyError::Read { path: path.to_owned(), source })
        };
        let (certificate, key) = (read(&files.certificate)?, read(&files.key)?);
        let keys = Self { certificate, key, authority: read(&files.authority)?, files };
        keys.identity(config)?;
        Ok(keys)
    }

    /// Returns descriptors for the process that is to run this end: files without a name, positioned at their
    /// beginning.
    ///
    /// # Errors
    /// The process has no descriptors left.
    pub fn descriptors(&self) -> io::Result<Vec<OwnedFd>> {
        let file = |content: &[u8]| {
            let mut file = File::from(memfd_create("tls", MemfdFlags::CLOEXEC)?);
            file.write_all(content)?;
            file.rewind()?;
            Ok(OwnedFd::from(file))
        };
        [&self.certificate, &self.key, &self.authority].into_iter().map(|content| file(content)).collect()
    }

    /// Reads the keys from such descriptors.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn from_descriptors(config: &TlsConfig, [certificate, key, authority]: [OwnedFd; 3]) -> io::Result<Self> {
        let read = |fd: OwnedFd| content(File::from(fd));
        let files = config.files.clone();
        Ok(Self { files, certificate: read(certificate)?, key: read(key)?, authority: read(authority)? })
    }

    /// Returns the TLS configuration of an end with these keys.
    ///
    /// # Errors
    /// The keys are not usable for it.
    pub(super) fn identity(&self, config: &TlsConfig) -> Result<Identity, TlsKeyError> {
        let peer = config.peer.as_deref().map(name).transpose()?;
        let provider = Arc::new(ring::default_provider());
        let chain = self.chain()?;
        let key = self.private_key(&provider)?;
        let roots = Arc::new(self.roots()?);
        let together = |problem: &dyn fmt::Display| TlsKeyError::Together {
            path: self.files.certificate.clone(),
            problem: problem.to_string(),
        };
        Ok(match config.role {
            TlsRole::Listen => {
                let verifier = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider));
                let verifier = verifier.build().map_err(|error| together(&error))?;
                let builder = ServerConfig::builder_with_provider(provider).with_protocol_versions(&[&TLS13]);
                let builder = builder.map_err(|error| together(&error))?.with_client_cert_verifier(verifier);
                let mut server = builder.with_single_cert(chain, key).map_err(|error| together(&error))?;
                server.alpn_protocols = vec![PROTOCOL.to_vec()];
                // No resumption: each connection must prove its identity anew.
                (server.session_storage, server.send_tls13_tickets) = (Arc::new(NoServerSessionStorage {}), 0);
                Identity::Server(Arc::new(server), peer)
            }
            TlsRole::Connect => {
                let builder = ClientConfig::builder_with_provider(provider).with_protocol_versions(&[&TLS13]);
                let builder = builder.map_err(|error| together(&error))?.with_root_certificates(roots);
                let mut client = builder.with_client_auth_cert(chain, key).map_err(|error| together(&error))?;
                client.alpn_protocols = vec![PROTOCOL.to_vec()];
                client.resumption = Resumption::disabled();
                let address = || ServerName::IpAddress(IpAddr::into(config.address.ip()));
                Identity::Client(Arc::new(client), peer.unwrap_or_else(address))
            }
        })
    }

    fn chain(&self) -> Result<Vec<CertificateDer<'static>>, TlsKeyError> {
        let path = &self.files.certificate;
        let chain = certificates(path, &self.certificate)?;
        for (line, certificate) in &chain {
            let parsed = ParsedCertificate::try_from(certificate).map(drop);
            parsed.map_err(|error| wrong(path, *line, error))?;
        }
        Ok(chain.into_iter().map(|(_, certificate)| certificate).collect())
    }

    fn roots(&self) -> Result<RootCertStore, TlsKeyError> {
        let path = &self.files.authority;
        let mut roots = RootCertStore::empty();
        for (line, certificate) in certificates(path, &self.authority)? {
            roots.add(certificate).map_err(|error| wrong(path, line, error))?;
        }
        Ok(roots)
    }

    fn private_key(&self, provider: &CryptoProvider) -> Result<PrivateKeyDer<'static>, TlsKeyError> {
        let path = &self.files.key;
        let mut keys = Vec::new();
        for (line, kind, der) in sections(path, &self.key)? {
            let key = match kind {
                SectionKind::PrivateKey => PrivateKeyDer::Pkcs8(der.into()),
                SectionKind::RsaPrivateKey => PrivateKeyDer::Pkcs1(der.into()),
                SectionKind::EcPrivateKey => PrivateKeyDer::Sec1(der.into()),
                _ => continue,
            };
            provider.key_provider.load_private_key(key.clone_key()).map_err(|error| wrong(path, line, error))?;
            keys.push(key);
        }
        match <[_; 1]>::try_from(keys) {
            Ok([key]) => Ok(key),
            Err(none) if none.is_empty() => Err(missing(path, "no private key without a password is in it")),
            Err(_) => Err(missing(path, "more than one private key is in it")),
        }
    }
}

/// Identity of an end, and of the peer that it accepts.
#[derive(Clone, Debug)]
pub(super) enum Identity {
    /// The end listens. With a name, the other end's certificate must contain it.
    Server(Arc<ServerConfig>, Option<ServerName<'static>>),
    /// The end connects to the peer with this name.
    Client(Arc<ClientConfig>, ServerName<'static>),
}

/// Parses a name that a certificate can contain.
fn name(text: &str) -> Result<ServerName<'static>, TlsKeyError> {
    ServerName::try_from(text.to_owned()).map_err(|_| TlsKeyError::Name(text.to_owned()))
}

/// Reads a file from its current position.
fn content(file: File) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    // `read_to_end` would query the length first, which a sandboxed thread may not do.
    let (mut chunk, mut left) = ([0; 4096], file.take(MAX_FILE + 1));
    loop {
        match left.read(&mut chunk) {
            Ok(0) => break,
            Ok(count) => content.extend_from_slice(chunk.get(..count).unwrap_or_default()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    if content.len() as u64 > MAX_FILE { Err(io::ErrorKind::FileTooLarge.into()) } else { Ok(content) }
}

/// Returns the sections of a file, each with its first line number.
fn sections(path: &Path, content: &[u8]) -> Result<Vec<(usize, SectionKind, Vec<u8>)>, TlsKeyError> {
    let (mut found, mut left, mut line) = (Vec::new(), content, 1_usize);
    loop {
        let before = left;
        let lines = before.split(|&byte| byte == b'\n');
        let first = line.saturating_add(lines.take_while(|line| !line.starts_with(b"-----BEGIN")).count());
        match pem::from_buf(&mut left) {
            Ok(None) => return Ok(found),
            Ok(Some((kind, der))) => found.push((first, kind, der)),
            Err(error) => return Err(wrong(path, first, Problem(&error))),
        }
        let read = before.len().saturating_sub(left.len());
        let passed = before.get(..read).unwrap_or_default();
        line = line.saturating_add(passed.iter().filter(|&&byte| byte == b'\n').count());
    }
}

/// Returns the certificates of a file, at least one, each with its first line number.
fn certificates(path: &Path, content: &[u8]) -> Result<Vec<(usize, CertificateDer<'static>)>, TlsKeyError> {
    let sections = sections(path, content)?.into_iter();
    let list = sections.filter(|(_, kind, _)| *kind == SectionKind::Certificate);
    let list: Vec<_> = list.map(|(line, _, der)| (line, der.into())).collect();
    if list.is_empty() { Err(missing(path, "no certificate is in it")) } else { Ok(list) }
}

/// A parse error of a section. Its text omits the content, which may be a key.
struct Problem<'a>(&'a pem::Error);

impl fmt::Display for Problem<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            pem::Error::MissingSectionEnd { .. } => "the line with END is missing",
            pem::Error::IllegalSectionStart { .. } => "the line with BEGIN is damaged",
            pem::Error::Base64Decode(_) => "this is not base64",
            _ => "this is not PEM",
        })
    }
}

fn wrong(path: &Path, line: usize, problem: impl fmt::Display) -> TlsKeyError {
    TlsKeyError::Content { path: path.to_owned(), line, problem: problem.to_string() }
}

fn missing(path: &Path, problem: &'static str) -> TlsKeyError {
    TlsKeyError::Missing { path: path.to_owned(), problem }
}
