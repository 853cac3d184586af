//! State of an interface of this host, and notification of its changes through netlink (`rtnetlink(7)`).
//!
//! The kernel's notifications about links are only hints, and their content is never read: the state of the interface
//! is always queried by name. So no change is missed when hints are lost, when the interface is deleted, recreated or
//! renamed, or when it changes between two queries. Only the kernel can influence the result.

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

/// Multicast group of link notifications (`RTMGRP_LINK` of linux/rtnetlink.h).
const LINKS: u32 = 1;
/// Receive buffer for hints, in bytes. It may overflow, because further hints add no information.
const HINTS: usize = 4096;
/// Maximum number of hints that a query discards. The rest is left to the next query.
const MAX_HINTS: usize = 64;
/// Maximum length of a response, in bytes: the most that the kernel fills in at once.
const RESPONSE: usize = 32 << 10;
/// Length of `struct ifinfomsg` of linux/rtnetlink.h in bytes, and the range of its flags.
const HEADER: usize = 16;
const FLAGS: std::ops::Range<usize> = 8..12;
/// Message types of linux/netlink.h and linux/rtnetlink.h.
const ERROR: u16 = 2;
const NEW_LINK: u16 = 16;
/// `IFF_UP` and `IFF_LOWER_UP` of linux/if.h.
const UP: u32 = 1 << 0;
const LOWER_UP: u32 = 1 << 16;
/// `IFLA_MTU` of linux/if_link.h.
const MTU: u16 = 4;

/// State of an interface at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum InterfaceState {
    /// There is no interface of this name.
    Absent,
    /// The administrator has set the interface down.
    Down {
        /// MTU: longest IP packet, in bytes.
        mtu: u32,
    },
    /// The interface has no carrier, or its lower device has none.
    NoCarrier {
        /// MTU: longest IP packet, in bytes.
        mtu: u32,
    },
    /// Frames can pass.
    Up {
        /// MTU: longest IP packet, in bytes.
        mtu: u32,
    },
}

impl InterfaceState {
    /// Returns the MTU: the maximum size of an IP packet, in bytes. `None` if there is no interface.
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

/// Watches an interface, which need not exist.
#[derive(Debug)]
pub struct InterfaceWatch {
    name: InterfaceName,
    hints: OwnedFd,
    /// Connected to the kernel, so no other process can send to it.
    queries: OwnedFd,
    /// Sequence number of the last query, which its response repeats.
    sequence: u32,
}

impl InterfaceWatch {
    /// Starts to watch an interface. No later change is missed.
    ///
    /// # Errors
    /// The system provides no netlink socket, or has no descriptors left.
    pub fn open(name: InterfaceName) -> io::Result<Self> {
        let (hints, queries) = (socket()?, socket()?);
        set_socket_recv_buffer_size(&hints, HINTS)?;
        rustix::net::bind(&hints, &SocketAddrNetlink::new(0, LINKS))?;
        rustix::net::connect(&queries, &SocketAddrNetlink::new(0, 0))?;
        Ok(Self { name, hints, queries, sequence: 0 })
    }

    /// Returns the name of the interface.
    pub const fn name(&self) -> &InterfaceName {
        &self.name
    }

    /// Returns a descriptor that is readable, or in error, when the interface may have changed since the last query.
    pub fn hints(&self) -> BorrowedFd<'_> {
        self.hints.as_fd()
    }

    /// Queries the present state of the interface.
    ///
    /// # Errors
    /// The kernel does not answer the query.
    pub fn look(&mut self) -> io::Result<InterfaceState> {
        // Hints are discarded before the query, not after it: the hint of a change that the query missed must stay.
        self.forget_hints()?;
        self.sequence = self.sequence.wrapping_add(1);
        rustix::net::send(&self.queries, &query(&self.name, self.sequence), SendFlags::empty())?;
        let mut buffer = vec![0; RESPONSE];
        loop {
            // The kernel has answered by the time the send call returns, so there is no wait here.
            let (bytes, _) = rustix::net::recv(&self.queries, &mut buffer[..], RecvFlags::DONTWAIT)?;
            if let Some(state) = parse(buffer.get(..bytes).unwrap_or_default(), self.sequence)? {
                return Ok(state);
            }
        }
    }

    fn forget_hints(&self) -> io::Result<()> {
        for _ in 0..MAX_HINTS {
            match rustix::net::recv(&self.hints, &mut [0_u8; 1], RecvFlags::DONTWAIT) {
                // The buffer has overflowed, which is a hint like any other.
                Ok(_) | Err(Errno::NOBUFS | Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }
}

fn socket() -> io::Result<OwnedFd> {
    // Protocol 0 is `NETLINK_ROUTE`.
    Ok(rustix::net::socket_with(AddressFamily::NETLINK, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?)
}

/// Returns a query for one link, without its statistics.
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

/// Parses a datagram from the kernel, only as far as the flags and the MTU: attributes that are specific to kinds of
/// interfaces, or new in later kernels, are ignored. Returns `None` if it does not respond to the query with number
/// `sequence`.
///
/// # Errors
/// The kernel refuses the query, or the datagram is not a netlink message.
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

/// Returns the state of the link in an `RTM_NEWLINK` message.
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
