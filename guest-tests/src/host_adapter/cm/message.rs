//! The connection manager's messages, as far as connections are made and ended by them (InfiniBand Architecture
//! Specification, volume 1, chapter 12), with the addresses that `rdma_cm` puts into private data (annex A11).

use std::net::{IpAddr, Ipv4Addr};

use anyhow::{Context, Result, bail, ensure};
use pvrdma_verbs_types::Gid;

/// Size of a message in bytes.
pub(super) const MAD: usize = 256;
/// Offset of the message after the common header of management datagrams.
const BODY: usize = 24;
/// `RDMA_PS_TCP` of `rdma_cm`'s service numbers.
const PORT_SPACE: u64 = 0x0106_0000;

const REQ: u16 = 0x10;
const MRA: u16 = 0x11;
const REJ: u16 = 0x12;
const REP: u16 = 0x13;
const RTU: u16 = 0x14;
const DREQ: u16 = 0x15;
const DREP: u16 = 0x16;

/// A queue pair that one side offers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Offer {
    pub(super) qpn: u32,
    /// PSN of the first packet from the other side.
    pub(super) psn: u32,
    /// GUID of the adapter; identifies the side together with the communication id.
    pub(super) guid: u64,
}

/// A request for a connection over IPv4.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Request {
    pub(super) offer: Offer,
    /// Port of the service.
    pub(super) port: u16,
    pub(super) from: Ipv4Addr,
    pub(super) to: Ipv4Addr,
}

/// Content of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Body {
    Request(Request),
    Reply(Offer),
    ReadyToUse,
    Reject(u16),
    /// Queue pair number of the receiver.
    Disconnect(u32),
    Disconnected,
    /// The peer asks for more time.
    Delay,
}

/// A message between two communication ids.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Message {
    pub(super) transaction: u64,
    pub(super) from: u32,
    /// Zero in a request.
    pub(super) to: u32,
    pub(super) body: Body,
}

impl Message {
    pub(super) fn encode(&self) -> [u8; MAD] {
        let mut mad = [0; MAD];
        let attribute = match self.body {
            Body::Request(_) => REQ,
            Body::Delay => MRA,
            Body::Reject(_) => REJ,
            Body::Reply(_) => REP,
            Body::ReadyToUse => RTU,
            Body::Disconnect(_) => DREQ,
            Body::Disconnected => DREP,
        };
        put(&mut mad, 0, &[1, 7, 2, 3]);
        put(&mut mad, 8, &self.transaction.to_be_bytes());
        put(&mut mad, 16, &attribute.to_be_bytes());
        put(&mut mad, BODY, &self.from.to_be_bytes());
        if !matches!(self.body, Body::Request(_)) {
            put(&mut mad, BODY + 4, &self.to.to_be_bytes());
        }
        let body = &mut mad[BODY..];
        match self.body {
            Body::Request(request) => request.encode(body),
            Body::Reply(offer) => {
                put(body, 12, &(offer.qpn << 8).to_be_bytes());
                put(body, 20, &(offer.psn << 8).to_be_bytes());
                // One read at a time each way, no delay, retry forever when there is no receive.
                put(body, 24, &[1, 1, 0, 7 << 5]);
                put(body, 28, &offer.guid.to_be_bytes());
            }
            Body::Reject(reason) => put(body, 10, &reason.to_be_bytes()),
            Body::Disconnect(qpn) => put(body, 8, &(qpn << 8).to_be_bytes()),
            Body::ReadyToUse | Body::Disconnected | Body::Delay => {}
        }
        mad
    }

    pub(super) fn decode(mad: &[u8]) -> Result<Self> {
        ensure!(mad.len() == MAD && mad.starts_with(&[1, 7, 2, 3]), "no message of the connection manager");
        let body = &mad[BODY..];
        let (from, to) = (number(body, 0), number(body, 4));
        let attribute = (number(mad, 16) >> 16) as u16;
        let body = match attribute {
            REQ => Body::Request(Request::decode(body).context("the request is none of rdma_cm over IPv4")?),
            MRA => Body::Delay,
            REJ => Body::Reject((number(body, 8) & 0xffff) as u16),
            REP => {
                let (qpn, psn) = (number(body, 12) >> 8, number(body, 20) >> 8);
                Body::Reply(Offer { qpn, psn, guid: long(body, 28) })
            }
            RTU => Body::ReadyToUse,
            DREQ => Body::Disconnect(number(body, 8) >> 8),
            DREP => Body::Disconnected,
            other => bail!("a message with attribute {other:#x}"),
        };
        let to = if matches!(body, Body::Request(_)) { 0 } else { to };
        Ok(Self { transaction: long(mad, 8), from, to, body })
    }
}

impl Request {
    fn encode(&self, body: &mut [u8]) {
        let Self { offer, port, from, to } = self;
        put(body, 8, &(PORT_SPACE | u64::from(*port)).to_be_bytes());
        put(body, 16, &offer.guid.to_be_bytes());
        // One read at a time in each direction; answers within 4 s; a reliable connection with flow control, 7 retries.
        put(body, 32, &(offer.qpn << 8 | 1).to_be_bytes());
        put(body, 36, &1_u32.to_be_bytes());
        put(body, 40, &(20_u32 << 3 | 1).to_be_bytes());
        put(body, 44, &(offer.psn << 8 | 20 << 3 | 7).to_be_bytes());
        // The default partition, path MTU 1024, retry forever when there is no receive, 15 retries of messages.
        put(body, 48, &[0xff, 0xff, 3 << 4 | 7, 15 << 4]);
        // No LIDs; GIDs; 2.5 Gb/s; hop limit 64; acknowledgements within 67 ms.
        put(body, 52, &[0xff; 4]);
        put(body, 56, &Gid::from(IpAddr::V4(*from)).0);
        put(body, 72, &Gid::from(IpAddr::V4(*to)).0);
        put(body, 88, &[0, 0, 0, 2, 0, 64, 0, 14 << 3]);
        // Private data: IP version 4, and both addresses in the last bytes of their fields.
        put(body, 141, &[4 << 4]);
        put(body, 142, &port.to_be_bytes());
        put(body, 156, &from.octets());
        put(body, 172, &to.octets());
    }

    fn decode(body: &[u8]) -> Option<Self> {
        let service = long(body, 8);
        let address = |at| Ipv4Addr::from(number(body, at));
        (service & !0xffff == PORT_SPACE && body[141] >> 4 == 4).then(|| Self {
            offer: Offer { qpn: number(body, 32) >> 8, psn: number(body, 44) >> 8, guid: long(body, 16) },
            port: (service & 0xffff) as u16,
            from: address(156),
            to: address(172),
        })
    }
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

fn number(bytes: &[u8], at: usize) -> u32 {
    bytes[at..at + 4].iter().fold(0, |sum, &byte| sum << 8 | u32::from(byte))
}

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from(number(bytes, at)) << 32 | u64::from(number(bytes, at + 4))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_can_be_read() {
        let offer = Offer { qpn: 0x12_3456, psn: 0xab_cdef, guid: 0x5254_00ff_fe00_0001 };
        let (from, to) = (Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 0, 0, 9));
        let request = Request { offer, port: 7174, from, to };
        for body in [
            Body::Request(request),
            Body::Reply(offer),
            Body::ReadyToUse,
            Body::Reject(28),
            Body::Disconnect(0x11),
            Body::Disconnected,
            Body::Delay,
        ] {
            let to = if matches!(body, Body::Request(_)) { 0 } else { 8 };
            let message = Message { transaction: 0x1_0000_0002, from: 7, to, body };
            assert_eq!(Message::decode(&message.encode()).unwrap(), message);
        }
        assert!(Message::decode(&[0; MAD]).is_err() && Message::decode(&[]).is_err());
    }
}
