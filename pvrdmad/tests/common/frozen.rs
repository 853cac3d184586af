//! A file system whose only file, `memory`, can be opened and has a size, but whose reads never complete.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;

use rustix::io::{FdFlags, fcntl_setfd};
use tempfile::TempDir;

pub(super) const LOOKUP: u32 = 1;
pub(super) const GETATTR: u32 = 3;
pub(super) const OPEN: u32 = 14;
const READ: u32 = 15;
pub(super) const INIT: u32 = 26;
pub(super) const ENOSYS: i32 = 38;
const ROOT: u64 = 1;

/// Mount at a folder, which ends on drop.
pub struct Frozen(TempDir);

impl Frozen {
    /// Returns `None` if mounting is not permitted.
    pub fn mount() -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let device = OpenOptions::new().read(true).write(true).open("/dev/fuse").ok()?;
        // The mount program inherits the descriptor.
        fcntl_setfd(&device, FdFlags::empty()).unwrap();
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_raw_fd());
        let mut mount = Command::new("mount");
        mount.args(["-i", "-t", "fuse", "-o", &options, "frozen"]).arg(folder.path());
        let mounted = mount.stdin(Stdio::null()).stderr(Stdio::null()).status().ok()?.success();
        fcntl_setfd(&device, FdFlags::CLOEXEC).unwrap();
        // The thread ends with the mount.
        thread::spawn(move || while serve(&device).is_some() {});
        mounted.then_some(Self(folder))
    }

    pub fn memory(&self) -> PathBuf {
        self.0.path().join("memory")
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

/// Answers a request. `None` when there are no more.
fn serve(mut device: &File) -> Option<()> {
    let mut request = vec![0; 1 << 17];
    let count = device.read(&mut request).ok()?;
    let node = u64::from_le_bytes(request[16..24].try_into().unwrap());
    assert!(count >= 40);
    let (error, body) = match number(&request, 4) {
        // Version 7.31, no flags, 12 bits of requests, 64 KiB of data.
        INIT => (0, words(&[7, 31, 0, 0, 12 << 16, 1 << 16, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0])),
        LOOKUP => (0, [words(&[2, 0, 0, 0, 1, 0, 1, 0, 0, 0]), attributes(2)].concat()),
        GETATTR => (0, [words(&[1, 0, 0, 0]), attributes(node)].concat()),
        OPEN => (0, words(&[1, 0, 0, 0])),
        READ => return Some(()),
        _ => (-ENOSYS, Vec::new()),
    };
    // The write fails if the caller is gone.
    let _ = device.write(&reply(&request, error, &body));
    Some(())
}

/// Returns the answer to a request.
pub(super) fn reply(request: &[u8], error: i32, body: &[u8]) -> Vec<u8> {
    let mut reply = u32::try_from(16 + body.len()).unwrap().to_le_bytes().to_vec();
    reply.extend(error.to_le_bytes());
    reply.extend(&request[8..16]);
    reply.extend(body);
    reply
}

/// Returns a field of a request.
pub(super) fn number(request: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(request[at..at + 4].try_into().unwrap())
}

/// Returns a `struct fuse_attr`.
pub(super) fn attributes(node: u64) -> Vec<u8> {
    let mode = if node == ROOT { 0o40_755 } else { 0o100_600 };
    let (inode, size) = (u32::try_from(node).unwrap(), 2 << 20);
    words(&[inode, 0, size, 0, size >> 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0])
}

pub(super) fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}
