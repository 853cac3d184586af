//! Incoming datagrams: several per call (recvmmsg), each possibly a train that the kernel has coalesced (UDP_GRO).

use std::collections::VecDeque;
use std::io::IoSliceMut;
use std::net::{SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::{ControlMessageOwned, MsgFlags, MultiHeaders, RecvMsg, SockaddrStorage, recvmmsg};

/// Highest number of messages per call.
const MAX_MESSAGES: usize = 16;
/// Buffer for a message, in bytes: the longest train.
const MESSAGE_LEN: usize = 1 << 16;

/// A message from the kernel: a datagram or a train of them, from `start` to `end` in the buffer. The part before
/// `start` has been taken.
#[derive(Debug)]
struct Message {
    from: SocketAddr,
    class: u8,
    /// Length of each datagram except the last.
    segment: usize,
    start: usize,
    end: usize,
}

/// A received datagram.
#[derive(Debug)]
pub(super) struct Arrived<'a> {
    pub(super) from: SocketAddr,
    /// Traffic class of the outer header.
    pub(super) class: u8,
    pub(super) payload: &'a mut [u8],
}

/// Messages that were received and not yet taken.
#[derive(Debug)]
pub(super) struct Input {
    buffer: Vec<u8>,
    received: VecDeque<Message>,
}

impl Default for Input {
    fn default() -> Self {
        Self { buffer: vec![0; MAX_MESSAGES * MESSAGE_LEN], received: VecDeque::new() }
    }
}

impl Input {
    /// Returns `true` if no received message is left. Messages that are left here do not make the socket readable.
    pub(super) fn is_empty(&self) -> bool {
        self.received.is_empty()
    }

    /// Returns the next datagram. `None` if there is none now.
    pub(super) fn next(&mut self, socket: &OwnedFd) -> Option<Arrived<'_>> {
        if self.received.is_empty() {
            self.fill(socket);
        }
        let message = self.received.front_mut()?;
        let Message { from, class, start, .. } = *message;
        let end = start.saturating_add(message.segment).min(message.end);
        message.start = end;
        if end >= message.end {
            self.received.pop_front();
        }
        Some(Arrived { from, class, payload: self.buffer.get_mut(start..end)? })
    }

    fn fill(&mut self, socket: &OwnedFd) {
        // The headers are allocated for each call, because the library does not restore the length of a control buffer
        // after use.
        let mut headers = MultiHeaders::<SockaddrStorage>::preallocate(MAX_MESSAGES, Some(nix::cmsg_space!(i32, i32)));
        let mut slices: Vec<_> =
            self.buffer.chunks_exact_mut(MESSAGE_LEN).map(|slot| [IoSliceMut::new(slot)]).collect();
        let messages = match recvmmsg(socket.as_raw_fd(), &mut headers, &mut slices, MsgFlags::MSG_DONTWAIT, None) {
            Ok(messages) => messages,
            Err(Errno::EAGAIN | Errno::EINTR) => return,
            Err(errno) => return log::debug!("a vxlan socket fails: {errno}"),
        };
        let received = messages.enumerate().filter_map(|(slot, message)| parse(slot, &message));
        self.received.extend(received);
    }
}

/// Parses the metadata of the message in a slot of the buffer.
fn parse(slot: usize, message: &RecvMsg<'_, '_, SockaddrStorage>) -> Option<Message> {
    let from = socket_address(message.address.as_ref()?)?;
    let (mut class, mut segment) = (0, message.bytes);
    for control in message.cmsgs().into_iter().flatten() {
        match control {
            ControlMessageOwned::UdpGroSegments(bytes) => segment = usize::try_from(bytes).unwrap_or(0),
            ControlMessageOwned::Ipv4Tos(tos) => class = tos,
            ControlMessageOwned::Ipv6TClass(bytes) => class = u8::try_from(bytes).unwrap_or(0),
            _ => {}
        }
    }
    let start = slot.checked_mul(MESSAGE_LEN)?;
    // An empty message is one datagram as well: it is counted like any other datagram without a frame.
    Some(Message { from, class, segment: segment.max(1), start, end: start.checked_add(message.bytes)? })
}

fn socket_address(address: &SockaddrStorage) -> Option<SocketAddr> {
    let v4 = || Some(SocketAddr::V4(SocketAddrV4::from(*address.as_sockaddr_in()?)));
    v4().or_else(|| Some(SocketAddr::V6(SocketAddrV6::from(*address.as_sockaddr_in6()?))))
}
