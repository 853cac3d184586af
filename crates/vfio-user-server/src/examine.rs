//! Checks that a client's descriptor is acceptable.
//!
//! The process that receives a descriptor examines it, and the process that uses it examines it again.

use std::os::fd::{AsFd, BorrowedFd};

use rustix::fs::{OFlags, SealFlags};
use rustix::io::Errno;
use thiserror::Error;

use super::eventfd::{Eventfds, HostEventfds};

/// `statfs` type of memfd and tmpfs.
const TMPFS_MAGIC: i64 = 0x0102_1994;
/// `statfs` type of huge pages, including memfd with `MFD_HUGETLB`.
const HUGETLBFS_MAGIC: i64 = 0x9584_58f6;

/// Page size of files without huge pages, in bytes.
pub(super) const PAGE: usize = 4096;

/// Reason why a descriptor is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub(crate) enum DescriptorError {
    #[error("{0}")]
    System(#[from] Errno),
    #[error("guest memory in a file that may block: it is to be a memfd, or on tmpfs or hugetlbfs")]
    MayBlock,
    #[error("guest memory in a file that can shrink: with memory=sealed the VMM has to seal it (F_SEAL_SHRINK)")]
    NotSealed,
    #[error("an interrupt is to be an eventfd")]
    NotEventfd,
}

impl DescriptorError {
    /// Returns the errno for the client.
    pub(crate) const fn errno(self) -> Errno {
        match self {
            Self::System(errno) => errno,
            Self::MayBlock | Self::NotEventfd => Errno::INVAL,
            Self::NotSealed => Errno::PERM,
        }
    }
}

/// Identity of a file: device, inode, and whether it is open for writing. No other file gets the numbers while it is
/// open.
pub(super) type FileId = (u64, u64, bool);

/// File of guest memory that passed the checks.
pub(crate) struct Candidate {
    pub(super) id: FileId,
    pub(super) length: usize,
    pub(super) page: usize,
}

/// Examines a file of guest memory without accessing its contents. `sealed`: it must not be able to shrink.
///
/// # Errors
/// The file is not acceptable.
pub(crate) fn memory(fd: BorrowedFd<'_>, sealed: bool) -> Result<Candidate, DescriptorError> {
    // The seals are checked first, because the kernel itself answers this query: only files in memory support seals.
    // Any other query may go to the server of a file system, which may never answer.
    let seals = rustix::fs::fcntl_get_seals(fd).map_err(|errno| match errno {
        Errno::INVAL => DescriptorError::MayBlock,
        errno => errno.into(),
    })?;
    if sealed && !seals.contains(SealFlags::SHRINK) {
        return Err(DescriptorError::NotSealed);
    }
    let stat = rustix::fs::fstat(fd)?;
    let page = memory_page(rustix::fs::fstatfs(fd)?.f_type, stat.st_blksize)?;
    let writable = rustix::fs::fcntl_getfl(fd)? & OFlags::RWMODE == OFlags::RDWR;
    let length = usize::try_from(stat.st_size).map_err(|_| Errno::OVERFLOW)?;
    Ok(Candidate { id: (stat.st_dev, stat.st_ino, writable), length, page })
}

/// Examines a descriptor for signalling interrupts.
///
/// # Errors
/// It is not an eventfd.
pub(crate) fn interrupt(fd: impl AsFd) -> Result<(), DescriptorError> {
    if HostEventfds.is_one(fd.as_fd()) { Ok(()) } else { Err(DescriptorError::NotEventfd) }
}

/// Returns the unit in which the kernel maps a file of a memory-only file system. The block sizes of other file systems
/// are unrelated to it.
fn memory_page(file_system: i64, block: impl TryInto<usize>) -> Result<usize, DescriptorError> {
    match file_system {
        TMPFS_MAGIC => Ok(PAGE),
        HUGETLBFS_MAGIC => {
            let page = block.try_into().ok().filter(|page: &usize| page.is_power_of_two());
            page.ok_or(DescriptorError::MayBlock)
        }
        _ => Err(DescriptorError::MayBlock),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// C4: accesses to files of these file systems wait for another machine or process, or for a disk.
    #[test]
    fn file_systems_that_may_block_are_refused() {
        let others: [(&str, i64); 12] = [
            ("fuse", 0x6573_5546),
            ("nfs", 0x6969),
            ("9p", 0x0102_1997),
            ("smb2", 0xfe53_4d42),
            ("cifs", 0xff53_4d42),
            ("ceph", 0x00c3_6400),
            ("afs", 0x5346_414f),
            ("overlayfs", 0x794c_7630),
            ("ext4", 0xef53),
            ("xfs", 0x5846_5342),
            ("btrfs", 0x9123_683e),
            ("proc", 0x9fa0),
        ];
        for (name, magic) in others {
            assert_eq!(memory_page(magic, 4096).unwrap_err().errno(), Errno::INVAL, "{name}");
        }
        assert_eq!(memory_page(TMPFS_MAGIC, 1 << 20).unwrap(), 4096);
        assert_eq!(memory_page(HUGETLBFS_MAGIC, 2 << 20).unwrap(), 2 << 20);
        assert!(memory_page(HUGETLBFS_MAGIC, 0).is_err());
    }
}
