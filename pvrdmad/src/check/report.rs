//! Report of a check, and the checks of single resources.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::path::Path;

use anyhow::{Error, Result, anyhow};
use pvrdma_ether_link::InterfaceName;
use pvrdma_vfio_user_server::socket::{SocketAccess, SocketError, SocketFile};

use super::finding::{Finding, Findings, Severity};
use crate::socket::in_use;

/// Directory in which the kernel lists network interfaces.
pub(super) const INTERFACES: &str = "/sys/class/net";

/// Resources that would be opened, and their problems.
#[derive(Debug, Default)]
pub struct Report {
    lines: Vec<String>,
    findings: Findings,
}

/// Subject of findings: its name for people, and its key.
pub(super) struct Subject<'a> {
    pub(super) name: &'a str,
    pub(super) key: &'a str,
}

impl Report {
    /// Renders a line for each resource, then the problems.
    pub fn text(&self) -> String {
        self.lines.join("\n") + "\n" + &self.findings.text()
    }

    /// Returns the problems.
    pub fn findings(&self) -> &Findings {
        &self.findings
    }

    /// # Errors
    /// The daemon would not start.
    pub fn result(&self) -> Result<()> {
        self.findings.result().map_err(|errors| anyhow!("the daemon would not start here: {errors}"))
    }

    pub(super) fn say(&mut self, line: String) {
        self.lines.push(line);
    }

    pub(super) fn push(
        &mut self,
        severity: Severity,
        subject: &Subject<'_>,
        message: impl Into<String>,
        remedy: Option<String>,
    ) {
        let finding = Finding::new(severity, subject.name, message).about(subject.key);
        self.findings.push(Finding { remedy, ..finding });
    }

    pub(super) fn error(&mut self, subject: &Subject<'_>, message: impl Into<String>, remedy: &str) {
        self.push(Severity::Error, subject, message, Some(remedy.to_owned()));
    }

    pub(super) fn warning(&mut self, subject: &Subject<'_>, message: impl Into<String>, remedy: impl Into<String>) {
        self.push(Severity::Warning, subject, message, Some(remedy.into()));
    }

    /// Checks that a socket can be bound.
    pub(super) fn socket(&mut self, subject: &Subject<'_>, path: &Path, access: SocketAccess) {
        let Err(error) = SocketFile::check(path, access) else { return };
        let remedy = socket_remedy(&error).map(str::to_owned);
        let error = Error::new(error);
        // Only a warning: the socket may belong to a running daemon that will reload this configuration.
        let severity = if in_use(&error) { Severity::Warning } else { Severity::Error };
        self.push(severity, subject, format!("{error:#}"), remedy);
    }

    /// Checks that an address belongs to this host, by binding a socket with an unused port to it.
    pub(super) fn own_address(&mut self, subject: &Subject<'_>, address: SocketAddr) {
        if let Err(error) = UdpSocket::bind(SocketAddr::new(address.ip(), 0))
            && error.kind() == io::ErrorKind::AddrNotAvailable
        {
            let problem = format!("{} is no address of this host", address.ip());
            self.error(subject, problem, "use an address that `ip address` lists, or add this one to an interface");
        }
    }

    /// Checks that this host has an interface.
    pub(super) fn interface(&mut self, subject: &Subject<'_>, name: &InterfaceName) {
        if !Path::new(INTERFACES).join(name.as_str()).exists() {
            let remedy = "use an interface that `ip link` lists, or create it before the daemon starts";
            self.error(subject, format!("there is no interface {name} on this host"), remedy);
        }
    }
}

/// Returns the remedy for a socket that cannot be bound.
fn socket_remedy(error: &SocketError) -> Option<&'static str> {
    Some(match error {
        SocketError::TooLong(_) => "use a shorter path, such as one in /run/pvrdmad",
        SocketError::NotASocket(_) => "remove the file, or use another path",
        SocketError::InUse { .. } => "if that is not the daemon which will reload this, stop it or use another path",
        SocketError::NoDirectory { .. } => "create the directory, or use another path",
        SocketError::NoPermission { .. } => "give the directory to the daemon's user, or use another path",
        SocketError::Foreign(_) => "stop the other user's process and remove the socket, or use another path",
        SocketError::OpenDirectory { .. } => "use a directory to which no other user can write, such as /run/pvrdmad",
        _ => return None,
    })
}
