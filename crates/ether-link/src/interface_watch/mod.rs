//! How an interface of this host is, and when that may have changed: the kernel's netlink (`rtnetlink(7)`).
//!
//! What the kernel tells everybody about its links is a hint, and never read: only how the interface is *now* counts,
//! and that is asked for by name. So nothing is missed when hints are lost, when the interface is deleted, made again
//! or renamed, or when it changes between two looks, and nobody but the kernel is listened to.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use netlink_packet_core::{NLM_F_REQUEST, NetlinkBuffer, NetlinkHeader, NetlinkMessage, NetlinkPayload, NlasIterator};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{LinkAttribute, LinkExtentMask, LinkMessage};
use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::sockopt::set_socket_recv_buffer_size;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

use crate::InterfaceName;

/// The group of those whom the kernel tells about links (`RTMGRP_LINK` of linux/rtnetlink.h).
const LINKS: u32 = 1;
/// Bytes of hints that may wait: more of them say nothing more.
const HINTS: usize = 4096;
/// Hints that a look takes away at most. If there are more, the next one does.
const MAX_HINTS: usize = 64;
/// Bytes of the longest response: the kernel fills at most this much at once.
const RESPONSE: usize = 32 << 10;
/// Bytes of `struct ifinfomsg` of linux/rtnetlink.h, and where its flags are.
const HEADER: usize = 16;
const FLAGS: std::ops::Range<usize> = 8..12;
/// Types of messages, of linux/netlink.h and linux/rtnetlink.h.
const ERROR: u16 = 2;
const NEW_LINK: u16 = 16;
/// `IFF_UP` and `IFF_LOWER_UP` of linux/if.h.
const UP: u32 = 1 << 0;
const LOWER_UP: u32 = 1 << 16;
/// `IFLA_MTU` of linux/if_link.h.
const MTU: u16 = 4;

/// An interface at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum InterfaceState {
    /// There is none of this name.
    Absent,
    /// The administrator has it down.
    Down {
        /// Bytes of an IP packet.
        mtu: u32,
    },
    /// Its cable, or what it is made of, carries nothing.
    NoCarrier {
        /// Bytes of an IP packet.
        mtu: u32,
    },
    /// Frames can pass.
    Up {
        /// Bytes of an IP packet.
        mtu: u32,
    },
}

impl InterfaceState {
    /// Bytes of an IP packet. None: there is no interface.
    pub const fn mtu(self) -> Option<u32> {
        match self {
            Self::Absent => None,
            Self::Down { mtu } | Self::NoCarrier { mtu } | Self::Up { mtu } => Some(mtu),
        }
    }

    /// Returns `true` if frames can pass.
    pub const fn is_up(self) -> bool {
        matches!(self, Self::Up { .. })
    }
}

impl fmt::Display for InterfaceState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Absent => "absent",
            Self::Down { .. } => "down",
            Self::NoCarrier { .. } => "no carrier",
            Self::Up { .. } => "up",
        })
    }
}

/// Looks at an interface, which need not be there.
#[derive(Debug)]
pub struct InterfaceWatch {
    name: InterfaceName,
    hints: OwnedFd,
    /// To the kernel alone, which nobody else can send to.
    queries: OwnedFd,
    /// Number of the last query. Its response carries it.
    sequence: u32,
}

impl InterfaceWatch {
    /// From now on no change is missed.
    ///
    /// # Errors
    /// The system has no netlink for us, or no descriptors.
    pub fn open(name: InterfaceName) -> io::Result<Self> {
        let (hints, queries) = (socket()?, socket()?);
        set_socket_recv_buffer_size(&hints, HINTS)?;
        rustix::net::bind(&hints, &SocketAddrNetlink::new(0, LINKS))?;
        rustix::net::connect(&queries, &SocketAddrNetlink::new(0, 0))?;
        Ok(Self { name, hints, queries, sequence: 0 })
    }

    /// Name of the interface.
    pub const fn name(&self) -> &InterfaceName {
        &self.name
    }

    /// Readable, or in error, when the interface may be another than at the last look.
    pub fn hints(&self) -> BorrowedFd<'_> {
        self.hints.as_fd()
    }

    /// How the interface is now.
    ///
    /// # Errors
    /// The kernel does not say.
    pub fn look(&mut self) -> io::Result<InterfaceState> {
        // Before: what changes from here on is another hint.
        self.forget_hints()?;
        self.sequence = self.sequence.wrapping_add(1);
        rustix::net::send(&self.queries, &query(&self.name, self.sequence), SendFlags::empty())?;
        let mut buffer = vec![0; RESPONSE];
        loop {
            // The kernel has answered by the time that it has taken the query.
            let (bytes, _) = rustix::net::recv(&self.queries, &mut buffer[..], RecvFlags::DONTWAIT)?;
            if let Some(state) = parse(buffer.get(..bytes).unwrap_or_default(), self.sequence)? {
                return Ok(state);
            }
        }
    }

    fn forget_hints(&self) -> io::Result<()> {
        for _ in 0..MAX_HINTS {
            match rustix::net::recv(&self.hints, &mut [0_u8; 1], RecvFlags::DONTWAIT) {
                // Too many for the buffer: a hint as any other.
                Ok(_) | Err(Errno::NOBUFS | Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }
}

fn socket() -> io::Result<OwnedFd> {
    // Routes and links are the protocol of number 0.
    Ok(rustix::net::socket_with(AddressFamily::NETLINK, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?)
}

/// Asks for one link, without its statistics.
fn query(name: &InterfaceName, sequence: u32) -> Vec<u8> {
    let mut message = LinkMessage::default();
    message.attributes =
        vec![LinkAttribute::IfName(name.as_str().to_owned()), LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats])];
    let mut header = NetlinkHeader::default();
    (header.flags, header.sequence_number) = (NLM_F_REQUEST, sequence);
    let mut request = NetlinkMessage::new(header, NetlinkPayload::from(RouteNetlinkMessage::GetLink(message)));
    request.finalize();
    let mut bytes = vec![0; request.buffer_len()];
    request.serialize(&mut bytes);
    bytes
}

/// Takes a datagram of the kernel apart, as far as its flags and its MTU: what kinds of interfaces say besides is of no
/// interest, however new the kernel is. None: it is no response to the query of number `sequence`.
///
/// # Errors
/// The kernel refuses the query, or the datagram is not netlink's.
fn parse(datagram: &[u8], sequence: u32) -> io::Result<Option<InterfaceState>> {
    let message = NetlinkBuffer::new_checked(datagram).map_err(io::Error::other)?;
    if message.sequence_number() != sequence {
        return Ok(None);
    }
    let body = message.payload();
    match message.message_type() {
        NEW_LINK => link(body).map(Some).ok_or_else(not_understood),
        ERROR => {
            let code = body.first_chunk().map(|code| i32::from_ne_bytes(*code)).ok_or_else(not_understood)?;
            let error = io::Error::from_raw_os_error(code.checked_neg().unwrap_or(0));
            match error.raw_os_error() {
                Some(libc::ENODEV) => Ok(Some(InterfaceState::Absent)),
                _ => Err(error),
            }
        }
        _ => Err(not_understood()),
    }
}

fn not_understood() -> io::Error {
    io::Error::other("the kernel's response is not understood")
}

/// How the link of an `RTM_NEWLINK` is.
fn link(body: &[u8]) -> Option<InterfaceState> {
    let flags = u32::from_ne_bytes(body.get(FLAGS)?.try_into().ok()?);
    let mut attributes = NlasIterator::new(body.get(HEADER..)?);
    let mtu = attributes.find_map(|attribute| {
        let attribute = attribute.ok().filter(|attribute| attribute.kind() == MTU)?;
        Some(u32::from_ne_bytes(attribute.value().try_into().ok()?))
    })?;
    Some(match (flags & UP != 0, flags & LOWER_UP != 0) {
        (false, _) => InterfaceState::Down { mtu },
        (true, false) => InterfaceState::NoCarrier { mtu },
        (true, true) => InterfaceState::Up { mtu },
    })
}

#[cfg(test)]
mod tests;
