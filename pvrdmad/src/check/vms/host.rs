//! Examination of this host.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::process::Command;

use pvrdma_vfio_user_server::socket::SocketAccess;

use super::machine::Machine;
use crate::rlimits;

/// State of this host.
#[derive(Clone, Debug)]
pub struct Host {
    /// Major and minor version of QEMU.
    pub(super) qemu: Option<(u32, u32)>,
    pub(super) kvm: Kvm,
    /// Bytes that may be locked.
    pub(super) memlock: Option<u64>,
    /// Command lines of processes.
    pub(super) processes: Vec<Vec<String>>,
}

/// Availability of hardware virtualization for guests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kvm {
    Usable,
    Missing,
    NotPermitted,
}

impl Host {
    /// Examines this host, and asks this QEMU program for its version.
    pub fn look(qemu: &Path) -> Self {
        let output = Command::new(qemu).arg("-version").output();
        let version = output.ok().and_then(|output| version(&String::from_utf8_lossy(&output.stdout)));
        let kvm = match File::options().read(true).write(true).open("/dev/kvm") {
            Ok(_) => Kvm::Usable,
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Kvm::NotPermitted,
            Err(_) => Kvm::Missing,
        };
        Self { qemu: version, kvm, memlock: rlimits::lockable(), processes: processes() }
    }

    /// Returns the virtual machines that run here.
    pub(super) fn machines(&self) -> impl Iterator<Item = Machine> {
        self.processes.iter().filter_map(|words| Machine::of(words))
    }

    /// Returns the problem with an existing socket, if its permissions keep intended clients from connecting.
    pub(super) fn socket_problem(&self, path: &Path, access: SocketAccess) -> Option<String> {
        let found = fs::symlink_metadata(path).ok()?;
        if !found.file_type().is_socket() {
            return Some(format!("{} is no socket", path.display()));
        }
        let mode = found.mode() & 0o777;
        let differs = access.owner.is_some_and(|owner| owner != found.uid())
            || access.group.is_some_and(|group| group != found.gid())
            || mode != access.permissions();
        let (user, group, wanted) = (found.uid(), found.gid(), access.permissions());
        differs.then(|| {
            let path = path.display();
            format!("{path} has user {user}, group {group} and mode {mode:o}, instead of the configured ones (mode {wanted:o})")
        })
    }
}

/// Parses the major and minor number of "QEMU emulator version 11.1.3 (Debian …)".
pub(super) fn version(text: &str) -> Option<(u32, u32)> {
    let (_, rest) = text.split_once("version ")?;
    let mut numbers = rest.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// Returns the command lines of all processes that are visible.
fn processes() -> Vec<Vec<String>> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let lines = entries.filter_map(|entry| fs::read(entry.path().join("cmdline")).ok());
    lines.map(|line| words(&line)).filter(|words| !words.is_empty()).collect()
}

fn words(line: &[u8]) -> Vec<String> {
    let words = line.split(|&byte| byte == 0).map(|word| String::from_utf8_lossy(word).into_owned());
    let mut words: Vec<_> = words.collect();
    words.pop_if(|word| word.is_empty());
    words
}
