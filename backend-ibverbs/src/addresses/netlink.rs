//! Addresses of network interfaces, changed through netlink (`rtnetlink(7)`, `RTM_NEWADDR` and related messages).

use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload,
};
use netlink_packet_route::address::{AddressAttribute, AddressFlags, AddressHeader, AddressMessage, AddressProtocol};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily as SocketFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

/// Maximum size of a response in bytes: the kernel fills at most this much at once.
const RESPONSE: usize = 32 << 10;

/// A netlink connection to the kernel.
#[derive(Debug)]
pub(super) struct Netlink {
    socket: OwnedFd,
    /// Sequence number of the last request. Its responses carry the same number.
    sequence: u32,
}

impl Netlink {
    pub(super) fn open() -> io::Result<Self> {
        let (family, kind) = (SocketFamily::NETLINK, SocketType::DGRAM);
        // The routing protocol, which covers addresses, has number 0.
        let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
        rustix::net::connect(&socket, &SocketAddrNetlink::new(0, 0))?;
        Ok(Self { socket, sequence: 0 })
    }

    /// Adds an address to an interface, as a single address without a network, and with a mark that identifies its
    /// owner.
    pub(super) fn add(&mut self, interface: u32, address: IpAddr, mark: u8) -> io::Result<()> {
        let mut message = message(interface, address);
        message.attributes.push(AddressAttribute::Flags(AddressFlags::Nodad | AddressFlags::Noprefixroute));
        message.attributes.push(AddressAttribute::Protocol(AddressProtocol::Other(mark)));
        self.change(RouteNetlinkMessage::NewAddress(message), NLM_F_CREATE | NLM_F_EXCL)
    }

    /// Removes an address.
    pub(super) fn remove(&mut self, interface: u32, address: IpAddr) -> io::Result<()> {
        self.change(RouteNetlinkMessage::DelAddress(message(interface, address)), 0)
    }

    fn change(&mut self, message: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
        self.request(message, NLM_F_REQUEST | NLM_F_ACK | flags, &mut |_| {})
    }

    /// Returns the addresses of an interface that have a mark.
    pub(super) fn marked(&mut self, interface: u32, mark: u8) -> io::Result<Vec<IpAddr>> {
        let mut found = Vec::new();
        let request = RouteNetlinkMessage::GetAddress(AddressMessage::default());
        self.request(request, NLM_F_REQUEST | NLM_F_DUMP, &mut |response| {
            found.extend(marked_address(&response, interface, mark));
        })?;
        Ok(found)
    }

    /// Sends a request and reads until the response is complete.
    fn request(
        &mut self,
        message: RouteNetlinkMessage,
        flags: u16,
        each: &mut dyn FnMut(RouteNetlinkMessage),
    ) -> io::Result<()> {
        let mut header = NetlinkHeader::default();
        self.sequence = self.sequence.wrapping_add(1);
        (header.flags, header.sequence_number) = (flags, self.sequence);
        let mut request = NetlinkMessage::new(header, NetlinkPayload::from(message));
        request.finalize();
        let mut bytes = vec![0; request.buffer_len()];
        request.serialize(&mut bytes);
        rustix::net::send(&self.socket, &bytes, SendFlags::empty())?;
        let mut buffer = vec![0; RESPONSE];
        loop {
            let (bytes, _) = rustix::net::recv(&self.socket, &mut buffer[..], RecvFlags::empty())?;
            if parse(buffer.get(..bytes).unwrap_or_default(), self.sequence, each)? {
                return Ok(());
            }
        }
    }
}

/// Parses one datagram of the kernel. Returns `true` if the response to the request with number `sequence` is complete.
///
/// # Errors
/// The kernel refuses the request, or the datagram is not valid netlink.
fn parse(bytes: &[u8], sequence: u32, each: &mut dyn FnMut(RouteNetlinkMessage)) -> io::Result<bool> {
    let mut rest = bytes;
    while !rest.is_empty() {
        let response = NetlinkMessage::<RouteNetlinkMessage>::deserialize(rest).map_err(io::Error::other)?;
        // Each message starts at a multiple of four.
        let length = (response.header.length as usize).next_multiple_of(4);
        rest = rest.get(length.max(4)..).unwrap_or_default();
        // The remainder of a response that reported an error before its end.
        if response.header.sequence_number != sequence {
            continue;
        }
        match response.payload {
            NetlinkPayload::Done(_) => return Ok(true),
            NetlinkPayload::Error(error) if error.code.is_none() => return Ok(true),
            NetlinkPayload::Error(error) => return Err(error.to_io()),
            NetlinkPayload::InnerMessage(message) => each(message),
            _ => {}
        }
    }
    Ok(false)
}

/// Returns the address in a response, if it belongs to the interface and has the mark.
fn marked_address(response: &RouteNetlinkMessage, interface: u32, mark: u8) -> Option<IpAddr> {
    let RouteNetlinkMessage::NewAddress(message) = response else { return None };
    let marked = message.attributes.contains(&AddressAttribute::Protocol(AddressProtocol::Other(mark)));
    if message.header.index != interface || !marked {
        return None;
    }
    // IPv4 addresses have both attributes, and the local one is the first; IPv6 addresses have only the second.
    let local = message.attributes.iter().find_map(|attribute| match attribute {
        AddressAttribute::Local(address) => Some(*address),
        _ => None,
    });
    let address = message.attributes.iter().find_map(|attribute| match attribute {
        AddressAttribute::Address(address) => Some(*address),
        _ => None,
    });
    local.or(address)
}

fn message(interface: u32, address: IpAddr) -> AddressMessage {
    let (family, prefix_len) = if address.is_ipv4() { (AddressFamily::Inet, 32) } else { (AddressFamily::Inet6, 128) };
    let mut message = AddressMessage::default();
    message.header = AddressHeader { family, prefix_len, index: interface, ..AddressHeader::default() };
    message.attributes = vec![AddressAttribute::Local(address), AddressAttribute::Address(address)];
    message
}

#[cfg(test)]
mod tests {
    use netlink_packet_core::{DoneMessage, ErrorMessage};

    use super::*;

    const MARK: u8 = 0x52;

    fn bytes(sequence: u32, payload: NetlinkPayload<RouteNetlinkMessage>) -> Vec<u8> {
        let mut header = NetlinkHeader::default();
        header.sequence_number = sequence;
        let mut message = NetlinkMessage::new(header, payload);
        message.finalize();
        let mut bytes = vec![0; message.buffer_len().next_multiple_of(4)];
        message.serialize(&mut bytes);
        bytes
    }

    fn address(sequence: u32, interface: u32, address: &str, mark: u8) -> Vec<u8> {
        let mut message = message(interface, address.parse().unwrap());
        message.attributes.push(AddressAttribute::Protocol(AddressProtocol::Other(mark)));
        bytes(sequence, NetlinkPayload::from(RouteNetlinkMessage::NewAddress(message)))
    }

    fn done(sequence: u32) -> Vec<u8> {
        bytes(sequence, NetlinkPayload::Done(DoneMessage::default()))
    }

    fn error(sequence: u32, errno: i32) -> Vec<u8> {
        let mut error = ErrorMessage::default();
        error.code = std::num::NonZeroI32::new(-errno);
        bytes(sequence, NetlinkPayload::Error(error))
    }

    /// Returns the marked addresses of interface 2 in a datagram, and whether it is the last of its response.
    fn found(datagram: &[u8]) -> io::Result<(Vec<String>, bool)> {
        let mut found = Vec::new();
        let last = parse(datagram, 7, &mut |response| found.extend(marked_address(&response, 2, MARK)))?;
        Ok((found.iter().map(ToString::to_string).collect(), last))
    }

    #[test]
    fn only_marked_addresses_of_the_interface_are_found() {
        let datagram = [
            address(7, 2, "192.0.2.7", MARK),
            address(7, 2, "192.0.2.8", 3),
            address(7, 3, "192.0.2.9", MARK),
            address(6, 2, "192.0.2.10", MARK),
            address(7, 2, "fd00::7", MARK),
        ]
        .concat();
        assert_eq!(found(&datagram).unwrap(), (vec!["192.0.2.7".into(), "fd00::7".into()], false));
        assert_eq!(found(&[datagram, done(7), address(7, 2, "192.0.2.11", MARK)].concat()).unwrap().0.len(), 2);
    }

    #[test]
    fn a_response_ends_with_done_success_or_an_error() {
        assert!(found(&done(7)).unwrap().1 && found(&error(7, 0)).unwrap().1);
        // The end of an earlier response does not end this one.
        assert!(!found(&done(6)).unwrap().1 && !found(&error(6, 1)).unwrap().1);
        assert_eq!(found(&error(7, libc::EPERM)).unwrap_err().raw_os_error(), Some(libc::EPERM));
    }

    #[test]
    fn whatever_arrives_is_parsed_or_refused() {
        let datagram = [address(7, 2, "192.0.2.7", MARK), address(7, 2, "fd00::7", MARK), done(7)].concat();
        for length in 0..datagram.len() {
            let _ = found(&datagram[..length]);
        }
        for at in 0..datagram.len() {
            for value in [0, 1, 3, 0x7f, 0xff] {
                let mut bytes = datagram.clone();
                bytes[at] = value;
                let _ = found(&bytes);
            }
        }
        assert!(found(&[0; 16]).is_err() && found(&[0xff; 64]).is_err());
    }
}
