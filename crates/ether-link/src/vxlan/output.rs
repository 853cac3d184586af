//! Outgoing datagrams: a train of datagrams of equal length leaves with one call, and is segmented by the kernel or the
//! adapter (UDP_SEGMENT); others leave several per call (sendmmsg).

use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use nix::errno::Errno;
use nix::sys::socket::sockopt::UdpGsoSegment;
use nix::sys::socket::{ControlMessage, MsgFlags, MultiHeaders, SockaddrStorage, getsockopt, sendmmsg, sendmsg};

use pvrdma_base::Count;

use super::header::HEADER_LEN;

/// Number of sockets, and therefore source ports, among which flows are spread.
pub(super) const SOCKETS: usize = 16;
/// Highest number of datagrams in a train that older kernels accept.
const MAX_SEGMENTS: usize = 64;
/// Maximum length of a train in bytes: that of a UDP payload, over IPv4 or IPv6.
const MAX_TRAIN: usize = 65_535 - 40 - 8;
/// Highest number of datagrams per sendmmsg.
const MAX_SINGLES: usize = 64;

/// A frame with its destination.
#[derive(Clone, Copy, Debug)]
pub(super) struct Datagram<'a> {
    pub(super) frame: &'a [u8],
    /// Index of the frame in the batch. Copies for several remotes share it.
    pub(super) index: usize,
    pub(super) to: SocketAddr,
    /// Flow, which selects the source port.
    pub(super) flow: u32,
    /// Traffic class of the outer header.
    pub(super) class: u8,
}

/// Result of sending datagrams.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Outcome {
    /// This number of datagrams was sent.
    Sent(usize),
    /// The socket has no room now.
    Full,
    /// This number of datagrams cannot be sent.
    Lost(usize),
}

/// Sockets with one source port each. Remotes do not send to these ports.
#[derive(Debug)]
pub(super) struct Output {
    sockets: Vec<Arc<OwnedFd>>,
    header: [u8; HEADER_LEN],
    ipv6: bool,
    /// Maximum length of a datagram in a train. Reduced to the length that the path supports; 0: no trains.
    longest_segment: AtomicUsize,
    /// Index of the socket that had no room last.
    full: AtomicUsize,
    /// Number of trains sent.
    pub(super) trains: Count,
}

impl Output {
    /// Sends through these sockets, whose number must be [`SOCKETS`].
    pub(super) fn new(sockets: Vec<Arc<OwnedFd>>, ipv6: bool, header: [u8; HEADER_LEN]) -> io::Result<Self> {
        if sockets.len() != SOCKETS {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let has_trains = sockets.first().is_some_and(|socket| getsockopt(socket, UdpGsoSegment).is_ok());
        Ok(Self {
            sockets,
            header,
            ipv6,
            longest_segment: AtomicUsize::new(if has_trains { usize::from(u16::MAX) } else { 0 }),
            full: AtomicUsize::new(0),
            trains: Count::default(),
        })
    }

    /// Returns the socket to wait for.
    pub(super) fn writable(&self) -> Option<Arc<OwnedFd>> {
        self.sockets.get(self.full.load(Ordering::Relaxed)).cloned()
    }

    /// Behaves as if the kernel had no segmentation offload.
    #[cfg(test)]
    pub(super) fn no_trains(&self) {
        self.longest_segment.store(0, Ordering::Relaxed);
    }

    /// Sends as many of the first datagrams of a list as one call accepts.
    pub(super) fn send(&self, datagrams: &[Datagram<'_>]) -> Outcome {
        let Some(first) = datagrams.first() else { return Outcome::Sent(0) };
        let number = socket_of(first.flow);
        let Some(socket) = self.sockets.get(number) else { return Outcome::Lost(1) };
        let train = self.train(datagrams);
        let result = match datagrams.get(..train) {
            Some(train) if train.len() > 1 => self.send_train(socket, train),
            _ => self.send_singles(socket, datagrams.get(..self.singles(datagrams)).unwrap_or_default()),
        };
        match result {
            Ok(count) => Outcome::Sent(count),
            Err(Errno::EINTR) => Outcome::Sent(0),
            Err(Errno::EAGAIN) => {
                self.full.store(number, Ordering::Relaxed);
                Outcome::Full
            }
            Err(errno) if train > 1 && self.shorten(errno, first) => Outcome::Sent(0),
            Err(errno) => {
                log::debug!("a datagram to {} is lost: {errno}", first.to);
                Outcome::Lost(train.max(1))
            }
        }
    }

    /// Returns the number of datagrams that form one train: all of one length, except that the last may be shorter.
    fn train(&self, datagrams: &[Datagram<'_>]) -> usize {
        let Some(first) = datagrams.first() else { return 0 };
        let segment = bytes(first);
        if segment > self.longest_segment.load(Ordering::Relaxed) {
            return 1;
        }
        let mut length = 0_usize;
        let mut count = 0;
        for datagram in datagrams.iter().take(MAX_SEGMENTS) {
            length = length.saturating_add(bytes(datagram));
            let other_way = datagram.to != first.to || !same_socket(datagram, first);
            if other_way || bytes(datagram) > segment || length > MAX_TRAIN {
                break;
            }
            count += 1;
            if bytes(datagram) < segment {
                break;
            }
        }
        count
    }

    /// Returns the number of datagrams for one sendmmsg: those of one socket, up to the start of a train.
    fn singles(&self, datagrams: &[Datagram<'_>]) -> usize {
        let mut count = 1;
        while let (Some(first), Some(next)) = (datagrams.first(), datagrams.get(count)) {
            let train_begins = datagrams.get(count..).is_some_and(|rest| self.train(rest) > 1);
            if count >= MAX_SINGLES || !same_socket(first, next) || train_begins {
                break;
            }
            count += 1;
        }
        count
    }

    fn send_train(&self, socket: &OwnedFd, train: &[Datagram<'_>]) -> Result<usize, Errno> {
        let first = train.first().ok_or(Errno::EINVAL)?;
        let segment = u16::try_from(bytes(first)).map_err(|_| Errno::EMSGSIZE)?;
        let slices: Vec<_> = train.iter().flat_map(|datagram| self.slices(datagram)).collect();
        let (tos, class) = (first.class, i32::from(first.class));
        let control = [ControlMessage::UdpGsoSegments(&segment), self.class(&tos, &class)];
        let control = if tos == 0 { control.get(..1).unwrap_or_default() } else { &control };
        sendmsg(socket.as_raw_fd(), &slices, control, FLAGS, Some(&SockaddrStorage::from(first.to)))?;
        self.trains.increment();
        Ok(train.len())
    }

    fn send_singles(&self, socket: &OwnedFd, datagrams: &[Datagram<'_>]) -> Result<usize, Errno> {
        let first = datagrams.first().ok_or(Errno::EINVAL)?;
        let (tos, class) = (first.class, i32::from(first.class));
        let control = [self.class(&tos, &class)];
        let control = if tos == 0 { &[] } else { &control[..] };
        if datagrams.len() == 1 {
            let slices = self.slices(first);
            sendmsg(socket.as_raw_fd(), &slices, control, FLAGS, Some(&SockaddrStorage::from(first.to)))?;
            return Ok(1);
        }
        let slices: Vec<_> = datagrams.iter().map(|datagram| self.slices(datagram)).collect();
        let to: Vec<_> = datagrams.iter().map(|datagram| Some(SockaddrStorage::from(datagram.to))).collect();
        let space = match (tos, self.ipv6) {
            (0, _) => None,
            (_, false) => Some(nix::cmsg_space!(u8)),
            (_, true) => Some(nix::cmsg_space!(i32)),
        };
        let mut headers = MultiHeaders::preallocate(datagrams.len(), space);
        Ok(sendmmsg(socket.as_raw_fd(), &mut headers, &slices, to, control, FLAGS)?.count())
    }

    fn slices<'a>(&'a self, datagram: &Datagram<'a>) -> [IoSlice<'a>; 2] {
        [IoSlice::new(&self.header), IoSlice::new(datagram.frame)]
    }

    const fn class<'a>(&self, tos: &'a u8, class: &'a i32) -> ControlMessage<'a> {
        if self.ipv6 { ControlMessage::Ipv6TClass(class) } else { ControlMessage::Ipv4Tos(tos) }
    }

    /// Reduces the length of later trains if the error calls for it. Returns `true` if another attempt can succeed.
    fn shorten(&self, errno: Errno, first: &Datagram<'_>) -> bool {
        let longest = match errno {
            // The segment is longer than the path MTU.
            Errno::EINVAL | Errno::EMSGSIZE => bytes(first).saturating_sub(1),
            // The output device has no checksum offload, or lacks something else that trains need.
            Errno::EIO | Errno::EOPNOTSUPP | Errno::ENOPROTOOPT => 0,
            _ => return false,
        };
        log::debug!("no trains of {} bytes to {}: {errno}", bytes(first), first.to);
        self.longest_segment.fetch_min(longest, Ordering::Relaxed);
        true
    }
}

const FLAGS: MsgFlags = MsgFlags::MSG_DONTWAIT.union(MsgFlags::MSG_NOSIGNAL);

const fn bytes(datagram: &Datagram<'_>) -> usize {
    HEADER_LEN.saturating_add(datagram.frame.len())
}

fn socket_of(flow: u32) -> usize {
    usize::try_from(flow).unwrap_or(0) % SOCKETS
}

fn same_socket(one: &Datagram<'_>, other: &Datagram<'_>) -> bool {
    socket_of(one.flow) == socket_of(other.flow) && one.class == other.class
}
