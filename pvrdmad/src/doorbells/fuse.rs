//! The subset of the FUSE protocol that a single file of pages needs (kernel header `linux/fuse.h`, version 7.31).
//!
//! The file has no content: reads return zeros, and writes are dropped. Only the read requests matter: the kernel sends
//! one when a page is touched that is not in the page cache.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;

/// Size of a page in bytes, and the longest read.
const PAGE: u32 = 4096;
/// Size of a request's header (`fuse_in_header`) in bytes.
const IN_HEADER: usize = 40;
/// Size of a reply's header (`fuse_out_header`) in bytes.
const OUT_HEADER: usize = 16;
/// Size of a buffer for any request, in bytes: the kernel requires at least 8 KiB.
pub(super) const REQUEST: usize = 64 << 10;

const MAJOR: u32 = 7;
const MINOR: u32 = 31;
/// Node numbers of the root directory and the file.
const ROOT: u64 = 1;
const FILE: u64 = 2;
/// Name of the file.
pub(super) const NAME: &str = "doorbells";

const LOOKUP: u32 = 1;
const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const SETATTR: u32 = 4;
const OPEN: u32 = 14;
const READ: u32 = 15;
const WRITE: u32 = 16;
const RELEASE: u32 = 18;
const FSYNC: u32 = 20;
const FLUSH: u32 = 25;
const INIT: u32 = 26;
const INTERRUPT: u32 = 36;
const BATCH_FORGET: u32 = 42;

/// `FOPEN_KEEP_CACHE | FOPEN_NOFLUSH`: cached pages stay, and closing the file does not wait for this process.
const OPEN_FLAGS: u32 = 1 << 1 | 1 << 5;
/// `FUSE_NOTIFY_INVAL_INODE`.
const INVALIDATE: i32 = 2;

/// Notification of Linux 6.9 that makes the kernel repeat all requests that were read but not answered
/// (`linux/fuse.h`).
const ASK_AGAIN: i32 = 7;

/// Kind of a handled request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Served {
    /// The file was opened.
    Open,
    /// Any other request.
    Other,
    /// The connection has ended: the file is no longer open or mapped anywhere.
    Ended,
}

/// A connection to the kernel, from the side of the process that serves it.
#[derive(Debug)]
pub(super) struct Connection {
    device: OwnedFd,
    /// Number of pages of the file.
    pages: u32,
}

impl Connection {
    pub(super) const fn new(device: OwnedFd, pages: u32) -> Self {
        Self { device, pages }
    }

    /// Reads a request and answers it. Before a page becomes present, its number is passed to `touched`.
    ///
    /// # Errors
    /// The connection failed.
    pub(super) fn serve(&self, buffer: &mut [u8], touched: impl FnMut(u32)) -> io::Result<Served> {
        let read = match rustix::io::read(&self.device, &mut *buffer) {
            Ok(read) => read,
            // The request was withdrawn, or a signal arrived.
            Err(Errno::NOENT | Errno::INTR | Errno::AGAIN) => return Ok(Served::Other),
            Err(Errno::NODEV | Errno::CONNABORTED) => return Ok(Served::Ended),
            Err(errno) => return Err(errno.into()),
        };
        let Some(request) = buffer.get(..read).and_then(Request::parse) else { return Ok(Served::Other) };
        let mut answer = vec![0; OUT_HEADER];
        match self.answer(&request, touched, &mut answer) {
            Answer::None => return Ok(Served::Other),
            Answer::Body => {}
            Answer::Error(errno) => {
                answer.truncate(OUT_HEADER);
                put_at(&mut answer, 4, &(-errno.raw_os_error()).to_le_bytes());
            }
        }
        let len = u32::try_from(answer.len()).unwrap_or(0);
        put_at(&mut answer, 0, &len.to_le_bytes());
        put_at(&mut answer, 8, &request.unique.to_le_bytes());
        match rustix::io::write(&self.device, &answer) {
            // The process that waited for the reply has gone.
            Ok(_) | Err(Errno::NOENT) => {}
            Err(Errno::NODEV | Errno::CONNABORTED) => return Ok(Served::Ended),
            Err(errno) => return Err(errno.into()),
        }
        Ok(if request.opcode == OPEN { Served::Open } else { Served::Other })
    }

    fn answer(&self, request: &Request<'_>, mut touched: impl FnMut(u32), out: &mut Vec<u8>) -> Answer {
        match request.opcode {
            INIT => put_init(out),
            LOOKUP if request.node == ROOT => {
                // Node, generation, and the validity of the name and the attributes: unlimited.
                put_u64s(out, &[FILE, 0, u64::from(u32::MAX), u64::from(u32::MAX), 0]);
                self.put_attributes(out, FILE);
            }
            GETATTR => {
                put_u64s(out, &[u64::from(u32::MAX), 0]);
                self.put_attributes(out, request.node);
            }
            OPEN if request.node == FILE => {
                put_u64s(out, &[1]);
                put_u32s(out, &[OPEN_FLAGS, 0]);
            }
            READ => {
                let (Some(offset), Some(size)) = (request.u64(8), request.u32(16)) else {
                    return Answer::Error(Errno::INVAL);
                };
                // The kernel reads ahead in large steps where a VMM has advised huge pages. After a refused read-ahead,
                // each page is requested when it is touched.
                let page = u32::try_from(offset / u64::from(PAGE)).ok();
                let page = page.filter(|&page| page < self.pages && request.node == FILE);
                let (Some(page), PAGE) = (page, size) else { return Answer::Error(Errno::IO) };
                touched(page);
                out.resize(OUT_HEADER.saturating_add(PAGE as usize), 0);
            }
            // Writing back must succeed. A page that cannot be written back would stay present, and its next touch
            // would cause no request.
            WRITE => put_u32s(out, &[request.u32(16).unwrap_or(0), 0]),
            FLUSH | RELEASE | FSYNC => {}
            FORGET | BATCH_FORGET | INTERRUPT => return Answer::None,
            SETATTR => return Answer::Error(Errno::PERM),
            LOOKUP | OPEN => return Answer::Error(Errno::NOENT),
            _ => return Answer::Error(Errno::NOSYS),
        }
        Answer::Body
    }

    fn put_attributes(&self, out: &mut Vec<u8>, node: u64) {
        let size = u64::from(self.pages) * u64::from(PAGE);
        let (size, mode) = if node == ROOT { (0, 0o040_700) } else { (size, 0o100_600) };
        put_u64s(out, &[node, size, size / 512, 0, 0, 0]);
        // Fractions of seconds, mode, links, owner, device, block size, flags.
        put_u32s(out, &[0, 0, 0, mode, 1, 0, 0, 0, PAGE, 0]);
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }
}

/// Writes notifications to a connection.
#[derive(Debug)]
pub(super) struct Notifier(OwnedFd);

impl Notifier {
    /// Creates a notifier for the connection of `device`.
    ///
    /// # Errors
    /// No descriptors are available.
    pub(super) fn of(device: &OwnedFd) -> io::Result<Self> {
        device.try_clone().map(Self)
    }

    /// Returns a duplicate of the connection.
    ///
    /// # Errors
    /// No descriptors are available.
    pub(super) fn connection(&self) -> io::Result<OwnedFd> {
        self.0.try_clone()
    }

    /// Removes a page from the page cache and from all processes that map it. This waits for accesses in progress and
    /// for the write-back of the page. The serving thread answers that write-back, so it must not call this.
    ///
    /// # Errors
    /// The kernel failed to remove the page, which may still be present.
    pub(super) fn invalidate(&self, page: u32) -> io::Result<()> {
        let mut body = Vec::with_capacity(24);
        put_u64s(&mut body, &[FILE, u64::from(page) * u64::from(PAGE), u64::from(PAGE)]);
        match self.notify(INVALIDATE, &body) {
            // The file was never opened, so none of it is cached.
            Err(Errno::NOENT) => Ok(()),
            result => result.map_err(Into::into),
        }
    }

    /// Makes the kernel repeat requests that were read but not answered.
    ///
    /// # Errors
    /// The kernel does not support this notification, or the connection has ended.
    pub(super) fn ask_again(&self) -> io::Result<()> {
        self.notify(ASK_AGAIN, &[]).map_err(Into::into)
    }

    fn notify(&self, code: i32, body: &[u8]) -> Result<(), Errno> {
        let mut message = Vec::with_capacity(OUT_HEADER + body.len());
        put_u32s(&mut message, &[u32::try_from(OUT_HEADER + body.len()).unwrap_or(0), code.cast_unsigned()]);
        put_u64s(&mut message, &[0]);
        message.extend(body);
        rustix::io::retry_on_intr(|| rustix::io::write(self.0.as_fd(), &message)).map(drop)
    }
}

enum Answer {
    Body,
    Error(Errno),
    None,
}

/// A request of the kernel.
struct Request<'a> {
    opcode: u32,
    unique: u64,
    node: u64,
    body: &'a [u8],
}

impl<'a> Request<'a> {
    fn parse(bytes: &'a [u8]) -> Option<Self> {
        let (header, body) = bytes.split_at_checked(IN_HEADER)?;
        let header = Self { opcode: 0, unique: 0, node: 0, body: header };
        Some(Self { opcode: header.u32(4)?, unique: header.u64(8)?, node: header.u64(16)?, body })
    }

    fn u32(&self, at: usize) -> Option<u32> {
        Some(u32::from_le_bytes(*self.body.get(at..)?.first_chunk()?))
    }

    fn u64(&self, at: usize) -> Option<u64> {
        Some(u64::from_le_bytes(*self.body.get(at..)?.first_chunk()?))
    }
}

/// Encodes `fuse_init_out`: no read-ahead, small writes, no optional features.
fn put_init(out: &mut Vec<u8>) {
    put_u32s(out, &[MAJOR, MINOR, 0, 0, 0, PAGE, 1]);
    out.resize(OUT_HEADER + 64, 0);
}

fn put_u32s(out: &mut Vec<u8>, words: &[u32]) {
    out.extend(words.iter().flat_map(|word| word.to_le_bytes()));
}

fn put_u64s(out: &mut Vec<u8>, words: &[u64]) {
    out.extend(words.iter().flat_map(|word| word.to_le_bytes()));
}

fn put_at(out: &mut [u8], at: usize, bytes: &[u8]) {
    if let Some(place) = out.get_mut(at..at.saturating_add(bytes.len())) {
        place.copy_from_slice(bytes);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use rustix::fs::MemfdFlags;

    use super::*;

    fn connection() -> Connection {
        Connection::new(rustix::fs::memfd_create("none", MemfdFlags::CLOEXEC).unwrap(), 8)
    }

    fn request(opcode: u32, node: u64, body: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        put_u32s(&mut bytes, &[u32::try_from(IN_HEADER + body.len()).unwrap(), opcode]);
        put_u64s(&mut bytes, &[77, node, 0, 0]);
        bytes.extend(body);
        bytes
    }

    fn read(node: u64, offset: u64, size: u32) -> (Vec<u8>, Option<i32>, Vec<u32>) {
        let mut body = Vec::new();
        put_u64s(&mut body, &[1, offset]);
        put_u32s(&mut body, &[size, 0, 0, 0, 0, 0]);
        answer(&request(READ, node, &body))
    }

    fn answer(bytes: &[u8]) -> (Vec<u8>, Option<i32>, Vec<u32>) {
        let (mut out, mut touched) = (vec![0; OUT_HEADER], Vec::new());
        let answer = connection().answer(&Request::parse(bytes).unwrap(), |page| touched.push(page), &mut out);
        let errno = match answer {
            Answer::Error(errno) => Some(errno.raw_os_error()),
            Answer::Body | Answer::None => None,
        };
        (out.split_off(OUT_HEADER), errno, touched)
    }

    #[test]
    fn a_page_is_read_as_zeros_and_reported() {
        assert_eq!(read(FILE, 3 * 4096, 4096), (vec![0; 4096], None, vec![3]));
        // Read-ahead and accesses outside of the file are refused.
        for (node, offset, size) in
            [(FILE, 0, 8192), (FILE, 0, 0), (FILE, 8 * 4096, 4096), (FILE, u64::MAX, 4096), (ROOT, 0, 4096)]
        {
            assert_eq!(read(node, offset, size), (vec![], Some(5), vec![]), "{node} {offset} {size}");
        }
    }

    #[test]
    fn the_file_cannot_be_changed() {
        assert_eq!(answer(&request(SETATTR, FILE, &[0; 88])).1, Some(1));
        for opcode in [0, 5, 9, 12, 43, u32::MAX] {
            assert_eq!(answer(&request(opcode, FILE, &[])).1, Some(38), "{opcode}");
        }
    }

    #[test]
    fn a_request_that_is_cut_short_touches_nothing() {
        let mut body = vec![0; 40];
        body[16..20].copy_from_slice(&4096_u32.to_le_bytes());
        let whole = request(READ, FILE, &body);
        assert_eq!(answer(&whole).2, [0]);
        for len in 0..IN_HEADER {
            assert!(Request::parse(&whole[..len]).is_none(), "{len}");
        }
        for len in IN_HEADER..IN_HEADER + 20 {
            assert_eq!(answer(&whole[..len]).2, [0; 0], "{len}");
        }
    }

    #[test]
    fn serving_a_file_that_is_no_connection_fails() {
        let connection = Connection::new(File::open("/proc/self/mem").unwrap().into(), 8);
        assert!(connection.serve(&mut vec![0; REQUEST], |_| ()).is_err());
    }
}
