//! REQ, which asks for a connection (IBA 12.6.5).

use pvrdma_packet::field::{field, put, u24, u24_bytes};
use pvrdma_verbs_types::{Gid, Psn, Qpn};

/// Length of a message, whatever its kind.
pub(crate) const BODY_LEN: usize = 232;

/// Path of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PathInfo {
    /// LID of the sender's port. RoCE has none: 0xffff.
    pub local_lid: u16,
    /// LID of the receiver's port.
    pub remote_lid: u16,
    /// GID of the sender's port.
    pub local_gid: Gid,
    /// GID of the receiver's port.
    pub remote_gid: Gid,
    /// Flow label, 20 bits.
    pub flow_label: u32,
    /// Packet rate, six bits.
    pub rate: u8,
    /// Traffic class.
    pub traffic_class: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// Service level, four bits.
    pub service_level: u8,
    /// The path stays in the subnet.
    pub subnet_local: bool,
    /// ACK timeout, five bits.
    pub ack_timeout: u8,
}

impl PathInfo {
    const LEN: usize = 44;

    fn from_bytes(bytes: &[u8; Self::LEN]) -> Self {
        let flow = u32::from_be_bytes(field::<36, _, _>(bytes));
        let [traffic_class, hop_limit, service, timeout] = field::<40, _, _>(bytes);
        Self {
            local_lid: u16::from_be_bytes(field::<0, _, _>(bytes)),
            remote_lid: u16::from_be_bytes(field::<2, _, _>(bytes)),
            local_gid: Gid(field::<4, _, _>(bytes)),
            remote_gid: Gid(field::<20, _, _>(bytes)),
            flow_label: flow >> 12,
            rate: flow.to_be_bytes()[3] & 0x3f,
            traffic_class,
            hop_limit,
            service_level: service >> 4,
            subnet_local: service & 8 != 0,
            ack_timeout: timeout >> 3,
        }
    }

    fn to_bytes(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        put::<0, _, _>(&mut bytes, self.local_lid.to_be_bytes());
        put::<2, _, _>(&mut bytes, self.remote_lid.to_be_bytes());
        put::<4, _, _>(&mut bytes, self.local_gid.0);
        put::<20, _, _>(&mut bytes, self.remote_gid.0);
        put::<36, _, _>(&mut bytes, (self.flow_label << 12 | u32::from(self.rate & 0x3f)).to_be_bytes());
        let service = self.service_level << 4 | u8::from(self.subnet_local) << 3;
        put::<40, _, _>(&mut bytes, [self.traffic_class, self.hop_limit, service, self.ack_timeout << 3]);
        bytes
    }
}

/// REQ.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Req {
    /// Communication ID of the sender.
    pub local_id: u32,
    /// The service that is asked for.
    pub service_id: u64,
    /// GUID of the sender's adapter.
    pub ca_guid: [u8; 8],
    /// Q_Key of the sender's QP.
    pub qkey: u32,
    /// The sender's QP.
    pub qpn: Qpn,
    /// READs and atomics that the sender executes at a time.
    pub responder_resources: u8,
    /// READs and atomics that the sender may have outstanding.
    pub initiator_depth: u8,
    /// Time in which the receiver should answer, five bits.
    pub remote_response_timeout: u8,
    /// Transport: 0 is RC. Two bits.
    pub transport: u8,
    /// End-to-end flow control.
    pub flow_control: bool,
    /// First PSN of the sender's requests.
    pub starting_psn: Psn,
    /// Time in which the sender answers, five bits.
    pub local_response_timeout: u8,
    /// Retries of the connection, three bits.
    pub retry_count: u8,
    /// Partition.
    pub pkey: u16,
    /// Path MTU, as in verbs, four bits.
    pub path_mtu: u8,
    /// RNR retries of the connection, three bits.
    pub rnr_retry: u8,
    /// Retries of messages, four bits.
    pub max_cm_retries: u8,
    /// The sender's QP has a shared receive queue.
    pub srq: bool,
    /// Path of the connection.
    pub primary: PathInfo,
    /// Second path, or zeros.
    pub alternate: PathInfo,
    /// Private data.
    pub private_data: [u8; 92],
}

impl Default for Req {
    fn default() -> Self {
        Self {
            local_id: 0,
            service_id: 0,
            ca_guid: [0; 8],
            qkey: 0,
            qpn: Qpn::new(0),
            responder_resources: 0,
            initiator_depth: 0,
            remote_response_timeout: 0,
            transport: 0,
            flow_control: false,
            starting_psn: Psn::new(0),
            local_response_timeout: 0,
            retry_count: 0,
            pkey: 0xffff,
            path_mtu: 0,
            rnr_retry: 0,
            max_cm_retries: 0,
            srq: false,
            primary: PathInfo::default(),
            alternate: PathInfo::default(),
            private_data: [0; 92],
        }
    }
}

impl Req {
    pub(crate) fn from_bytes(body: &[u8; BODY_LEN]) -> Self {
        let [remote_timeout, local_timeout] = [field::<43, 1, _>(body)[0], field::<47, 1, _>(body)[0]];
        let [mtu, retries] = field::<50, _, _>(body);
        Self {
            local_id: u32::from_be_bytes(field::<0, _, _>(body)),
            service_id: u64::from_be_bytes(field::<8, _, _>(body)),
            ca_guid: field::<16, _, _>(body),
            qkey: u32::from_be_bytes(field::<28, _, _>(body)),
            qpn: Qpn::new(u24(field::<32, _, _>(body))),
            responder_resources: field::<35, 1, _>(body)[0],
            initiator_depth: field::<39, 1, _>(body)[0],
            remote_response_timeout: remote_timeout >> 3,
            transport: remote_timeout >> 1 & 3,
            flow_control: remote_timeout & 1 != 0,
            starting_psn: Psn::new(u24(field::<44, _, _>(body))),
            local_response_timeout: local_timeout >> 3,
            retry_count: local_timeout & 7,
            pkey: u16::from_be_bytes(field::<48, _, _>(body)),
            path_mtu: mtu >> 4,
            rnr_retry: mtu & 7,
            max_cm_retries: retries >> 4,
            srq: retries & 8 != 0,
            primary: PathInfo::from_bytes(&field::<52, _, _>(body)),
            alternate: PathInfo::from_bytes(&field::<96, _, _>(body)),
            private_data: field::<140, _, _>(body),
        }
    }

    pub(crate) fn to_bytes(&self) -> [u8; BODY_LEN] {
        let mut body = [0; BODY_LEN];
        put::<0, _, _>(&mut body, self.local_id.to_be_bytes());
        put::<8, _, _>(&mut body, self.service_id.to_be_bytes());
        put::<16, _, _>(&mut body, self.ca_guid);
        put::<28, _, _>(&mut body, self.qkey.to_be_bytes());
        put::<32, _, _>(&mut body, u24_bytes(self.qpn.get()));
        put::<35, _, _>(&mut body, [self.responder_resources]);
        put::<39, _, _>(&mut body, [self.initiator_depth]);
        let timeout = self.remote_response_timeout << 3 | (self.transport & 3) << 1 | u8::from(self.flow_control);
        put::<43, _, _>(&mut body, [timeout]);
        put::<44, _, _>(&mut body, u24_bytes(self.starting_psn.get()));
        put::<47, _, _>(&mut body, [self.local_response_timeout << 3 | self.retry_count & 7]);
        put::<48, _, _>(&mut body, self.pkey.to_be_bytes());
        let retries = self.max_cm_retries << 4 | u8::from(self.srq) << 3;
        put::<50, _, _>(&mut body, [self.path_mtu << 4 | self.rnr_retry & 7, retries]);
        put::<52, _, _>(&mut body, self.primary.to_bytes());
        put::<96, _, _>(&mut body, self.alternate.to_bytes());
        put::<140, _, _>(&mut body, self.private_data);
        body
    }
}
