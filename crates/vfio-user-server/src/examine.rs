//! Descriptors of a client: which are taken.
//!
//! The process that receives them examines them, and the process that uses them examines them again.

use std::os::fd::{AsFd, BorrowedFd};

use rustix::fs::{OFlags, SealFlags};
use rustix::io::Errno;
use thiserror::Error;

use super::eventfd::{Eventfds, HostEventfds};

/// `statfs` of memfd and tmpfs.
const TMPFS_MAGIC: i64 = 0x0102_1994;
/// `statfs` of huge pages, memfd with `MFD_HUGETLB` included.
const HUGETLBFS_MAGIC: i64 = 0x9584_58f6;

/// Bytes in a page of files other than huge ones.
pub(super) const PAGE: usize = 4096;

/// Why a descriptor is not taken.
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
    /// The error for the client.
    pub(crate) const fn errno(self) -> Errno {
        match self {
            Self::System(errno) => errno,
            Self::MayBlock | Self::NotEventfd => Errno::INVAL,
            Self::NotSealed => Errno::PERM,
        }
    }
}

/// A file by device and inode, and whether it is open for writing. The numbers stay its own while we have it open.
pub(super) type FileId = (u64, u64, bool);

/// A file of guest memory that may be taken.
pub(crate) struct Candidate {
    pub(super) id: FileId,
    pub(super) length: usize,
    pub(super) page: usize,
}

/// Examines a file of guest memory without touching its contents. `sealed`: it must not be able to shrink.
///
/// # Errors
/// It is not one that is taken.
pub(crate) fn memory(fd: BorrowedFd<'_>, sealed: bool) -> Result<Candidate, DescriptorError> {
    // Asked first, because the kernel answers for itself: only files in memory have seals, or the lack of any. The
    // server of another file system may be asked for anything else, and not answer.
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

/// Examines a descriptor that interrupts are signalled to.
///
/// # Errors
/// It is not an eventfd.
pub(crate) fn interrupt(fd: impl AsFd) -> Result<(), DescriptorError> {
    if HostEventfds.is_one(fd.as_fd()) { Ok(()) } else { Err(DescriptorError::NotEventfd) }
}

/// The unit in which the kernel maps a file of a file system that is nothing but memory. Others suggest block sizes
/// that are unrelated to it.
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

    /// C4: what is behind these is somebody else's answer, or a disk's.
    #[test]
    fn sec_c4_file_systems_that_may_block_are_refused() {
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
