//! Messages of a connection (IBA 12.6). REQ is in `req.rs`.

use pvrdma_packet::field::{field, put, u24, u24_bytes};
use pvrdma_verbs_types::{Psn, Qpn};

use crate::req::{BODY_LEN, Req};

/// Kind of the message that a REJ or MRA answers. Two bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MessageKind {
    /// REQ.
    Req,
    /// REP.
    Rep,
    /// Another value. In a REJ, 2 means that it answers no message.
    Other(u8),
}

impl MessageKind {
    const fn from_byte(byte: u8) -> Self {
        match byte >> 6 {
            0 => Self::Req,
            1 => Self::Rep,
            other => Self::Other(other),
        }
    }

    const fn byte(self) -> u8 {
        match self {
            Self::Req => 0,
            Self::Rep => 1 << 6,
            Self::Other(other) => other << 6,
        }
    }
}

/// Reason of a REJ (IBA 12.6.7.2).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RejectReason(pub u16);

impl RejectReason {
    /// The answer to a message did not arrive in time.
    pub const TIMEOUT: Self = Self(4);
    /// Nothing listens for the service.
    pub const INVALID_SERVICE_ID: Self = Self(8);
    /// The program has rejected the connection.
    pub const CONSUMER: Self = Self(28);
}

/// REP, which accepts a REQ.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rep {
    /// Communication ID of the sender.
    pub local_id: u32,
    /// Communication ID of the receiver.
    pub remote_id: u32,
    /// Q_Key of the sender's QP.
    pub qkey: u32,
    /// The sender's QP.
    pub qpn: Qpn,
    /// First PSN of the sender's requests.
    pub starting_psn: Psn,
    /// READs and atomics that the sender executes at a time.
    pub responder_resources: u8,
    /// READs and atomics that the sender may have outstanding.
    pub initiator_depth: u8,
    /// Delay of the sender's ACKs, five bits.
    pub target_ack_delay: u8,
    /// Answer to the alternate path, two bits.
    pub failover: u8,
    /// End-to-end flow control.
    pub flow_control: bool,
    /// RNR retries, three bits.
    pub rnr_retry: u8,
    /// The sender's QP has a shared receive queue.
    pub srq: bool,
    /// GUID of the sender's adapter.
    pub ca_guid: [u8; 8],
    /// Private data.
    pub private_data: [u8; 196],
}

impl Default for Rep {
    fn default() -> Self {
        Self {
            local_id: 0,
            remote_id: 0,
            qkey: 0,
            qpn: Qpn::new(0),
            starting_psn: Psn::new(0),
            responder_resources: 0,
            initiator_depth: 0,
            target_ack_delay: 0,
            failover: 0,
            flow_control: false,
            rnr_retry: 0,
            srq: false,
            ca_guid: [0; 8],
            private_data: [0; 196],
        }
    }
}

/// RTU, which confirms a REP.
#[derive(Clone, PartialEq, Eq, Debug)]
#[expect(missing_docs, reason = "the same fields as in the messages above")]
pub struct Rtu {
    pub local_id: u32,
    pub remote_id: u32,
    pub private_data: [u8; 224],
}

/// REJ, which rejects a REQ or REP.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rej {
    /// Communication ID of the sender, or 0 if it has none.
    pub local_id: u32,
    /// Communication ID of the receiver.
    pub remote_id: u32,
    /// The message that is rejected.
    pub rejected: MessageKind,
    /// Reason.
    pub reason: RejectReason,
    /// Number of valid bytes of `info`, seven bits.
    pub info_len: u8,
    /// Additional information, which depends on the reason.
    pub info: [u8; 72],
    /// Private data.
    pub private_data: [u8; 148],
}

/// MRA, which asks for more time to answer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mra {
    /// Communication ID of the sender.
    pub local_id: u32,
    /// Communication ID of the receiver.
    pub remote_id: u32,
    /// The message that is being answered.
    pub answered: MessageKind,
    /// Time until the answer, five bits.
    pub service_timeout: u8,
    /// Private data.
    pub private_data: [u8; 222],
}

/// DREQ, which ends a connection.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Dreq {
    /// Communication ID of the sender.
    pub local_id: u32,
    /// Communication ID of the receiver.
    pub remote_id: u32,
    /// The receiver's QP.
    pub remote_qpn: Qpn,
    /// Private data.
    pub private_data: [u8; 220],
}

/// DREP, which answers a DREQ.
#[derive(Clone, PartialEq, Eq, Debug)]
#[expect(missing_docs, reason = "the same fields as in the messages above")]
pub struct Drep {
    pub local_id: u32,
    pub remote_id: u32,
    pub private_data: [u8; 224],
}

/// A message.
#[derive(Clone, PartialEq, Eq, Debug)]
#[expect(missing_docs, reason = "the names are those of the specification")]
pub enum Message {
    Req(Box<Req>),
    Mra(Mra),
    Rej(Rej),
    Rep(Rep),
    Rtu(Rtu),
    Dreq(Dreq),
    Drep(Drep),
}

impl Message {
    /// Returns the communication ID of the receiver. `None`: the message begins a connection. 0: the peer gives up its
    /// REQ by a REJ; the connection is the one whose peer has [`Self::source`] as its ID.
    pub const fn destination(&self) -> Option<u32> {
        Some(match self {
            Self::Req(_) => return None,
            Self::Mra(message) => message.remote_id,
            Self::Rej(message) => message.remote_id,
            Self::Rep(message) => message.remote_id,
            Self::Rtu(message) => message.remote_id,
            Self::Dreq(message) => message.remote_id,
            Self::Drep(message) => message.remote_id,
        })
    }

    /// Communication ID of the sender.
    pub const fn source(&self) -> u32 {
        match self {
            Self::Req(message) => message.local_id,
            Self::Mra(message) => message.local_id,
            Self::Rej(message) => message.local_id,
            Self::Rep(message) => message.local_id,
            Self::Rtu(message) => message.local_id,
            Self::Dreq(message) => message.local_id,
            Self::Drep(message) => message.local_id,
        }
    }

    /// Attribute ID of the datagram.
    pub(crate) const fn attribute(&self) -> u16 {
        match self {
            Self::Req(_) => 0x10,
            Self::Mra(_) => 0x11,
            Self::Rej(_) => 0x12,
            Self::Rep(_) => 0x13,
            Self::Rtu(_) => 0x14,
            Self::Dreq(_) => 0x15,
            Self::Drep(_) => 0x16,
        }
    }

    pub(crate) fn from_bytes(attribute: u16, body: &[u8; BODY_LEN]) -> Option<Self> {
        let local_id = u32::from_be_bytes(field::<0, _, _>(body));
        let remote_id = u32::from_be_bytes(field::<4, _, _>(body));
        let [first, second] = field::<8, _, _>(body);
        Some(match attribute {
            0x10 => Self::Req(Box::new(Req::from_bytes(body))),
            0x11 => Self::Mra(Mra {
                local_id,
                remote_id,
                answered: MessageKind::from_byte(first),
                service_timeout: second >> 3,
                private_data: field::<10, _, _>(body),
            }),
            0x12 => Self::Rej(Rej {
                local_id,
                remote_id,
                rejected: MessageKind::from_byte(first),
                reason: RejectReason(u16::from_be_bytes(field::<10, _, _>(body))),
                info_len: second >> 1,
                info: field::<12, _, _>(body),
                private_data: field::<84, _, _>(body),
            }),
            0x13 => Self::Rep(Rep::from_bytes(body)),
            0x14 => Self::Rtu(Rtu { local_id, remote_id, private_data: field::<8, _, _>(body) }),
            0x15 => Self::Dreq(Dreq {
                local_id,
                remote_id,
                remote_qpn: Qpn::new(u24(field::<8, _, _>(body))),
                private_data: field::<12, _, _>(body),
            }),
            0x16 => Self::Drep(Drep { local_id, remote_id, private_data: field::<8, _, _>(body) }),
            _ => return None,
        })
    }

    pub(crate) fn to_bytes(&self) -> [u8; BODY_LEN] {
        let mut body = [0; BODY_LEN];
        match self {
            Self::Req(req) => return req.to_bytes(),
            Self::Rep(rep) => return rep.to_bytes(),
            Self::Mra(mra) => {
                put::<8, _, _>(&mut body, [mra.answered.byte(), mra.service_timeout << 3]);
                put::<10, _, _>(&mut body, mra.private_data);
            }
            Self::Rej(rej) => {
                put::<8, _, _>(&mut body, [rej.rejected.byte(), rej.info_len << 1]);
                put::<10, _, _>(&mut body, rej.reason.0.to_be_bytes());
                put::<12, _, _>(&mut body, rej.info);
                put::<84, _, _>(&mut body, rej.private_data);
            }
            Self::Rtu(rtu) => put::<8, _, _>(&mut body, rtu.private_data),
            Self::Dreq(dreq) => {
                put::<8, _, _>(&mut body, u24_bytes(dreq.remote_qpn.get()));
                put::<12, _, _>(&mut body, dreq.private_data);
            }
            Self::Drep(drep) => put::<8, _, _>(&mut body, drep.private_data),
        }
        put::<0, _, _>(&mut body, self.source().to_be_bytes());
        put::<4, _, _>(&mut body, self.destination().unwrap_or(0).to_be_bytes());
        body
    }
}

impl Rep {
    fn from_bytes(body: &[u8; BODY_LEN]) -> Self {
        let [responder_resources, initiator_depth, delay, retries] = field::<24, _, _>(body);
        Self {
            local_id: u32::from_be_bytes(field::<0, _, _>(body)),
            remote_id: u32::from_be_bytes(field::<4, _, _>(body)),
            qkey: u32::from_be_bytes(field::<8, _, _>(body)),
            qpn: Qpn::new(u24(field::<12, _, _>(body))),
            starting_psn: Psn::new(u24(field::<20, _, _>(body))),
            responder_resources,
            initiator_depth,
            target_ack_delay: delay >> 3,
            failover: delay >> 1 & 3,
            flow_control: delay & 1 != 0,
            rnr_retry: retries >> 5,
            srq: retries & 0x10 != 0,
            ca_guid: field::<28, _, _>(body),
            private_data: field::<36, _, _>(body),
        }
    }

    fn to_bytes(&self) -> [u8; BODY_LEN] {
        let mut body = [0; BODY_LEN];
        put::<0, _, _>(&mut body, self.local_id.to_be_bytes());
        put::<4, _, _>(&mut body, self.remote_id.to_be_bytes());
        put::<8, _, _>(&mut body, self.qkey.to_be_bytes());
        put::<12, _, _>(&mut body, u24_bytes(self.qpn.get()));
        put::<20, _, _>(&mut body, u24_bytes(self.starting_psn.get()));
        let delay = self.target_ack_delay << 3 | (self.failover & 3) << 1 | u8::from(self.flow_control);
        let retries = self.rnr_retry << 5 | u8::from(self.srq) << 4;
        put::<24, _, _>(&mut body, [self.responder_resources, self.initiator_depth, delay, retries]);
        put::<28, _, _>(&mut body, self.ca_guid);
        put::<36, _, _>(&mut body, self.private_data);
        body
    }
}
