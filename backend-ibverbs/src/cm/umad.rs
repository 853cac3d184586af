//! Files of the kernel's `ib_umad`.
//!
//! The interface is that of the kernel's `rdma/ib_user_mad.h` and Documentation/infiniband/user_mad.rst.
#![expect(unsafe_code, reason = "the requests of ib_umad are ones that no safe library has")]

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use pvrdma_ib_cm::{CLASS, CLASS_VERSION, METHOD_SEND};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::ioctl::{NoArg, Opcode, Updater, ioctl, opcode};

use super::error::CmError;

const REGISTER_AGENT: Opcode = opcode::read_write::<Registration>(0x1b, 1);
const ENABLE_PKEY: Opcode = opcode::none(0x1b, 3);

/// `struct ib_user_mad_reg_req`.
#[repr(C)]
#[derive(Default)]
struct Registration {
    id: u32,
    /// One bit for each method, in words of the kernel.
    method_mask: [u32; 4],
    qpn: u8,
    class: u8,
    class_version: u8,
    oui: [u8; 3],
    rmpp_version: u8,
}

const _: () = assert!(size_of::<Registration>() == 28);

/// An open file with a registered agent.
#[derive(Debug)]
pub(super) struct Umad {
    file: OwnedFd,
    agent: u32,
}

/// Returns the path of a port's file.
pub(super) fn path(device: &str, port: u8) -> Option<PathBuf> {
    let entries = fs::read_dir("/sys/class/infiniband_mad").ok()?;
    let says = |folder: &Path, what: &str, wanted: &str| {
        fs::read_to_string(folder.join(what)).is_ok_and(|text| text.trim() == wanted)
    };
    let port = port.to_string();
    let name = entries.flatten().find_map(|entry| {
        let name = entry.file_name();
        let found = name.to_str()?.starts_with("umad")
            && says(&entry.path(), "ibdev", device)
            && says(&entry.path(), "port", &port);
        found.then_some(name)
    })?;
    Some(Path::new("/dev/infiniband").join(name))
}

impl Umad {
    /// Opens a file that receives the connection manager's class.
    pub(super) fn receiving(path: &Path) -> Result<Self, CmError> {
        let mut words = [0; 4];
        // The first word of the kernel has 64 bits.
        words[usize::from(cfg!(target_endian = "big"))] = 1 << METHOD_SEND;
        let (class, class_version) = (CLASS, CLASS_VERSION);
        Self::open(path, Registration { qpn: 1, class, class_version, method_mask: words, ..Registration::default() })
    }

    /// Opens a file that only sends.
    pub(super) fn sending(path: &Path) -> Result<Self, CmError> {
        Self::open(path, Registration { qpn: 1, ..Registration::default() })
    }

    fn open(path: &Path, mut registration: Registration) -> Result<Self, CmError> {
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::empty())
            .map_err(|errno| CmError::Open { path: path.to_owned(), source: errno.into() })?;
        let refused = |errno: Errno| CmError::Refused { path: path.to_owned(), source: errno.into() };
        // SAFETY: ENABLE_PKEY has no argument and does not access memory of the process.
        unsafe { ioctl(&file, NoArg::<ENABLE_PKEY>::new()) }.map_err(refused)?;
        let exclusive = registration.class != 0;
        // SAFETY: REGISTER_AGENT reads and writes a `struct ib_user_mad_reg_req`, which `Registration` is in size and
        // layout.
        let result = unsafe { ioctl(&file, Updater::<REGISTER_AGENT, Registration>::new(&mut registration)) };
        result.map_err(|errno| match errno {
            // For a valid request, the kernel returns EINVAL only for this reason.
            Errno::INVAL if exclusive && Path::new("/sys/module/ib_cm").exists() => CmError::KernelHasIt,
            Errno::INVAL if exclusive => CmError::ProcessHasIt { path: path.to_owned() },
            errno => refused(errno),
        })?;
        Ok(Self { file, agent: registration.id })
    }

    /// Wraps any file that preserves message boundaries, for tests.
    #[cfg(test)]
    pub(super) const fn stand_in(file: OwnedFd) -> Self {
        Self { file, agent: 9 }
    }

    /// Returns the number of the agent, for messages.
    pub(super) const fn agent(&self) -> u32 {
        self.agent
    }

    /// Reads a message. Returns `None` if there is none.
    pub(super) fn read(&self, room: &mut [u8]) -> io::Result<Option<usize>> {
        loop {
            match rustix::io::read(&self.file, &mut *room) {
                // A file at its end is always readable.
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(length) => return Ok(Some(length)),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(None),
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Sends a message. Takes up to a second while the kernel resolves the address of the peer.
    pub(super) fn write(&self, bytes: &[u8]) -> io::Result<()> {
        rustix::io::retry_on_intr(|| rustix::io::write(&self.file, bytes))?;
        Ok(())
    }
}

impl AsFd for Umad {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
