//! Addresses of network interfaces, as the kernel's netlink changes them.

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

/// Longest answer: the kernel fills at most this much at once.
const ANSWER: usize = 32 << 10;

/// A connection to the kernel.
#[derive(Debug)]
pub(super) struct Netlink {
    socket: OwnedFd,
    /// Of the last question. Answers carry it.
    number: u32,
}

impl Netlink {
    pub(super) fn open() -> io::Result<Self> {
        let (family, kind) = (SocketFamily::NETLINK, SocketType::DGRAM);
        // Routes and addresses are the protocol of number 0.
        let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
        rustix::net::connect(&socket, &SocketAddrNetlink::new(0, 0))?;
        Ok(Self { socket, number: 0 })
    }

    /// Puts an address on an interface, with no network around it and a mark that says whose it is.
    pub(super) fn add(&mut self, interface: u32, address: IpAddr, mark: u8) -> io::Result<()> {
        let mut message = message(interface, address);
        message.attributes.push(AddressAttribute::Flags(AddressFlags::Nodad | AddressFlags::Noprefixroute));
        message.attributes.push(AddressAttribute::Protocol(AddressProtocol::Other(mark)));
        self.change(RouteNetlinkMessage::NewAddress(message), NLM_F_CREATE | NLM_F_EXCL)
    }

    /// Takes it away.
    pub(super) fn remove(&mut self, interface: u32, address: IpAddr) -> io::Result<()> {
        self.change(RouteNetlinkMessage::DelAddress(message(interface, address)), 0)
    }

    fn change(&mut self, message: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
        self.ask(message, NLM_F_REQUEST | NLM_F_ACK | flags, &mut |_| {})
    }

    /// The addresses of an interface that have a mark.
    pub(super) fn marked(&mut self, interface: u32, mark: u8) -> io::Result<Vec<IpAddr>> {
        let mut found = Vec::new();
        let question = RouteNetlinkMessage::GetAddress(AddressMessage::default());
        self.ask(question, NLM_F_REQUEST | NLM_F_DUMP, &mut |answer| {
            if let RouteNetlinkMessage::NewAddress(message) = answer
                && message.header.index == interface
                && message.attributes.contains(&AddressAttribute::Protocol(AddressProtocol::Other(mark)))
            {
                // Both for IPv4, where the second is ours; only the first for IPv6.
                let local = message.attributes.iter().find_map(|attribute| match attribute {
                    AddressAttribute::Local(address) => Some(*address),
                    _ => None,
                });
                let address = message.attributes.iter().find_map(|attribute| match attribute {
                    AddressAttribute::Address(address) => Some(*address),
                    _ => None,
                });
                found.extend(local.or(address));
            }
        })?;
        Ok(found)
    }

    /// Asks and reads until the answer is complete.
    fn ask(
        &mut self,
        message: RouteNetlinkMessage,
        flags: u16,
        each: &mut dyn FnMut(RouteNetlinkMessage),
    ) -> io::Result<()> {
        let mut header = NetlinkHeader::default();
        self.number = self.number.wrapping_add(1);
        (header.flags, header.sequence_number) = (flags, self.number);
        let mut request = NetlinkMessage::new(header, NetlinkPayload::from(message));
        request.finalize();
        let mut bytes = vec![0; request.buffer_len()];
        request.serialize(&mut bytes);
        rustix::net::send(&self.socket, &bytes, SendFlags::empty())?;
        let mut buffer = vec![0; ANSWER];
        loop {
            let (bytes, _) = rustix::net::recv(&self.socket, &mut buffer[..], RecvFlags::empty())?;
            let mut rest = buffer.get(..bytes).unwrap_or_default();
            while !rest.is_empty() {
                let answer = NetlinkMessage::<RouteNetlinkMessage>::deserialize(rest).map_err(io::Error::other)?;
                // Each starts on a multiple of four.
                let length = (answer.header.length as usize).next_multiple_of(4);
                rest = rest.get(length.max(4)..).unwrap_or_default();
                // What is left of an answer that was an error before its end.
                if answer.header.sequence_number != self.number {
                    continue;
                }
                match answer.payload {
                    NetlinkPayload::Done(_) => return Ok(()),
                    NetlinkPayload::Error(error) if error.code.is_none() => return Ok(()),
                    NetlinkPayload::Error(error) => return Err(error.to_io()),
                    NetlinkPayload::InnerMessage(message) => each(message),
                    _ => {}
                }
            }
        }
    }
}

fn message(interface: u32, address: IpAddr) -> AddressMessage {
    let (family, prefix_len) = if address.is_ipv4() { (AddressFamily::Inet, 32) } else { (AddressFamily::Inet6, 128) };
    let mut message = AddressMessage::default();
    message.header = AddressHeader { family, prefix_len, index: interface, ..AddressHeader::default() };
    message.attributes = vec![AddressAttribute::Local(address), AddressAttribute::Address(address)];
    message
}
