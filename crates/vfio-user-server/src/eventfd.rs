//! Signalling a client's eventfds.
//!
//! A write to an eventfd blocks while its counter is full, unless its flags say otherwise. The client can change both
//! at any time, even between a check of the counter and the write. Only the kernel's own additions, from interrupt
//! handlers, never block. Such an addition occurs at the end of an asynchronous operation that names an eventfd
//! (`IOCB_FLAG_RESFD`). So a signal is an asynchronous operation that completes at once: a poll of an eventfd of this
//! process that is always writable. This takes one system call, where a check and a write take two.
//!
//! If no asynchronous operations are available (`fs.aio-max-nr` is used up), a signal is a write, which can block, and
//! a thread of the client's device makes it. That thread could make all the writes, but waking it costs more than the
//! interrupt itself, so low latency on an idle host depends on the asynchronous operations.
#![expect(unsafe_code, reason = "io_setup, io_submit and io_getevents take addresses")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::OnceLock;

use log::warn;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};

/// Maximum number of operations that have completed and were not collected.
const DEPTH: usize = 64;

/// Maximum number of attempts to submit an operation. A failed attempt collects all completed operations, so the next
/// one succeeds unless other threads use the room first.
const ATTEMPTS: usize = 10_000;

const IOCB_CMD_PREAD: u16 = 0;
const IOCB_CMD_POLL: u16 = 5;
/// Address above the address space of processes.
const NO_ADDRESS: u64 = u64::MAX - 0xffff;
const IOCB_FLAG_RESFD: u32 = 1;

/// `struct iocb`.
#[repr(C)]
struct Operation {
    data: u64,
    key: u32,
    flags_of_rw: u32,
    opcode: u16,
    priority: i16,
    descriptor: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    result_descriptor: u32,
}

/// `struct io_event`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Ended {
    data: u64,
    operation: u64,
    result: i64,
    result2: i64,
}

const _: () = assert!(size_of::<Operation>() == 64 && size_of::<Ended>() == 32);

/// Asynchronous I/O context of the process. It lives as long as the process.
struct Context {
    id: libc::c_ulong,
    /// Eventfd that is never written to, so always writable.
    writable: OwnedFd,
}

static CONTEXT: OnceLock<Option<Context>> = OnceLock::new();

/// Sets up the asynchronous operations that signal eventfds. A process that sandboxes itself calls this first; in other
/// processes the first signal does it.
pub fn prepare() {
    context();
}

fn context() -> Option<&'static Context> {
    let made = CONTEXT.get_or_init(|| match Context::new() {
        Ok(context) => Some(context),
        Err(error) => {
            // Log: once, at the start.
            warn!(
                "no asynchronous operations ({error}; fs.aio-max-nr may be used up): interrupts of each device are \
                 delivered by a thread of its own"
            );
            None
        }
    });
    made.as_ref()
}

/// System calls on clients' eventfds, replaced in tests.
pub(super) trait Eventfds: Send + Sync {
    /// Returns `true` if [`Self::signal`] never blocks. It may still take long.
    fn never_block(&self) -> bool;

    /// Returns `true` if a descriptor is an eventfd. Never blocks.
    fn is_one(&self, fd: BorrowedFd<'_>) -> bool;

    /// Adds 1. Returns `true` if that succeeded or the counter is full, which has the same effect.
    fn signal(&self, fd: BorrowedFd<'_>) -> bool;

    /// Closes a descriptor.
    fn close(&self, fd: OwnedFd);
}

/// Implementation by the kernel.
pub(super) struct HostEventfds;

impl Eventfds for HostEventfds {
    fn never_block(&self) -> bool {
        context().is_some()
    }

    fn is_one(&self, fd: BorrowedFd<'_>) -> bool {
        const ANON_INODE_FS_MAGIC: i64 = 0x0904_1934;
        match context() {
            Some(context) => context.is_eventfd(fd),
            // Other anonymous inodes are never writable or refuse the write.
            None => rustix::fs::fstatfs(fd).is_ok_and(|stat| stat.f_type == ANON_INODE_FS_MAGIC),
        }
    }

    fn signal(&self, fd: BorrowedFd<'_>) -> bool {
        match context() {
            Some(context) => context.signal(fd).is_ok(),
            None => write_if_there_is_room(fd),
        }
    }

    fn close(&self, fd: OwnedFd) {
        drop(fd);
    }
}

impl Context {
    fn new() -> io::Result<Self> {
        let writable = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let mut id: libc::c_ulong = 0;
        // SAFETY: the kernel writes the number of the context to `id`, which has to be 0 before.
        if unsafe { libc::syscall(libc::SYS_io_setup, DEPTH, &raw mut id) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let context = Self { id, writable };
        // Kernels before 4.18 do not support the poll operation.
        let probe = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        context.signal(probe.as_fd())?;
        let mut count = [0; 8];
        match rustix::io::read(&probe, &mut count) {
            Ok(_) if u64::from_ne_bytes(count) == 1 => Ok(context),
            _ => Err(io::Error::from(io::ErrorKind::Unsupported)),
        }
    }

    fn signal(&self, eventfd: BorrowedFd<'_>) -> io::Result<()> {
        for _ in 0..ATTEMPTS {
            match self.submit(eventfd) {
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => self.collect()?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => return result,
            }
        }
        Err(io::Error::from(io::ErrorKind::WouldBlock))
    }

    /// Signals by an operation that completes at once.
    fn submit(&self, eventfd: BorrowedFd<'_>) -> io::Result<()> {
        self.operate(IOCB_CMD_POLL, u64::from(PollFlags::OUT.bits()), 0, eventfd)
    }

    /// Submits an operation that cannot start: the kernel checks `fd` before the address, which is invalid.
    fn is_eventfd(&self, fd: BorrowedFd<'_>) -> bool {
        (0..ATTEMPTS).find_map(|_| match self.operate(IOCB_CMD_PREAD, NO_ADDRESS, 8, fd) {
            Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => self.collect().err().map(|_| false),
            Err(error) => Some(error.raw_os_error() == Some(libc::EFAULT)),
            Ok(()) => Some(false),
        }) == Some(true)
    }

    fn operate(&self, opcode: u16, buffer: u64, bytes: u64, eventfd: BorrowedFd<'_>) -> io::Result<()> {
        let number = |fd: BorrowedFd<'_>| u32::try_from(fd.as_raw_fd()).map_err(io::Error::other);
        let mut operation = Operation {
            data: 0,
            key: 0,
            flags_of_rw: 0,
            opcode,
            priority: 0,
            descriptor: number(self.writable.as_fd())?,
            buffer,
            bytes,
            offset: 0,
            reserved: 0,
            flags: IOCB_FLAG_RESFD,
            result_descriptor: number(eventfd)?,
        };
        let mut list = [&raw mut operation];
        // SAFETY: the list has one pointer, to an operation that lives as long as the call; it names no memory of this
        // process, and the kernel reads it, and writes its key, during the call only.
        let taken = unsafe { libc::syscall(libc::SYS_io_submit, self.id, 1_usize, list.as_mut_ptr()) };
        if taken == 1 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Collects completed operations.
    fn collect(&self) -> io::Result<()> {
        let mut ended = [Ended { data: 0, operation: 0, result: 0, result2: 0 }; DEPTH];
        let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the kernel writes at most as many results as the array has, and does not wait for more.
        let count = unsafe {
            libc::syscall(libc::SYS_io_getevents, self.id, 0_usize, DEPTH, ended.as_mut_ptr(), ptr::from_mut(&mut now))
        };
        let error = io::Error::last_os_error();
        if count >= 0 || error.kind() == io::ErrorKind::Interrupted { Ok(()) } else { Err(error) }
    }
}

/// Signals without asynchronous operations. Blocks if the client fills the counter between the check and the write.
fn write_if_there_is_room(eventfd: BorrowedFd<'_>) -> bool {
    const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut poll = [PollFd::from_borrowed_fd(eventfd, PollFlags::OUT)];
    rustix::event::poll(&mut poll, Some(&NOW)) != Ok(1)
        || rustix::io::write(eventfd, &1u64.to_ne_bytes()).is_ok_and(|_| true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(fd: &OwnedFd) -> u64 {
        let mut count = [0; 8];
        rustix::io::read(fd, &mut count).unwrap();
        u64::from_ne_bytes(count)
    }

    /// No signal is lost if several threads submit more operations than fit.
    #[test]
    fn every_signal_is_added() {
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..5000).for_each(|_| assert!(HostEventfds.signal(event.as_fd()))));
            }
        });
        assert_eq!(take(&event), 20_000);
    }

    /// C5: the counter is full, and the eventfd blocks its writers.
    #[test]
    fn a_full_eventfd_blocks_no_thread() {
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        for _ in 0..1000 {
            assert!(context().unwrap().signal(event.as_fd()).is_ok());
        }
        assert_eq!(take(&event), u64::MAX);
        assert!(HostEventfds.signal(event.as_fd()));
        assert_eq!(take(&event), 1);
    }

    #[test]
    fn files_other_than_eventfds_are_not_signalled() {
        let (_reader, writer) = io::pipe().unwrap();
        assert!(context().unwrap().signal(writer.as_fd()).is_err());
        let memory = rustix::fs::memfd_create("none", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let event = rustix::event::eventfd(5, EventfdFlags::CLOEXEC).unwrap();
        for (fd, expected) in [(writer.as_fd(), false), (memory.as_fd(), false), (event.as_fd(), true)] {
            (0..200).for_each(|_| assert_eq!(HostEventfds.is_one(fd), expected));
        }
        // The check does not signal.
        assert_eq!(take(&event), 5);
    }
}
