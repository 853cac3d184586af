//! Translation between messages of the guest and parameters of the host.

use std::net::SocketAddr;

use pvrdma_verbs_types::{Gid, Psn, Qpn};

use crate::addresses::{IpAddresses, PORT_SPACE_TCP};
use crate::message::Rep;
use crate::req::{PathInfo, Req};

/// Maximum private data of a REQ behind the addresses, in bytes.
pub const REQ_PRIVATE: usize = 92 - IpAddresses::LEN;
/// Maximum private data of a REJ, in bytes.
pub const REJ_PRIVATE: usize = 148;

/// Parameters of a connection, as seen by this end.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ConnectionData {
    /// Private data of the program.
    pub private_data: Vec<u8>,
    /// READs and atomics that this end executes at a time.
    pub responder_resources: u8,
    /// READs and atomics that this end may have outstanding.
    pub initiator_depth: u8,
    /// Retries of a request without a response.
    pub retry_count: u8,
    /// RNR retries.
    pub rnr_retry: u8,
    /// The QP has a shared receive queue.
    pub srq: bool,
    /// In an event of the host, the QP of the peer; in a request to the host, that of this end.
    pub qpn: u32,
}

/// Values that Linux uses in its own messages.
const RESPONSE_TIMEOUT: u8 = 20;
const MAX_CM_RETRIES: u8 = 15;
const ACK_TIMEOUT: u8 = 17;
const HOP_LIMIT: u8 = 64;

/// Returns the peer that the guest asks for, or `None` if the request is not one of `rdma_cm` in the port space of TCP,
/// or its addresses are not those of the datagram.
pub(super) fn wanted_peer(req: &Req, from: Gid, to: Gid) -> Option<SocketAddr> {
    const RC: u8 = 0;
    if req.transport != RC || req.service_id & !0xffff != PORT_SPACE_TCP {
        return None;
    }
    let (header, _) = req.private_data.split_first_chunk()?;
    let addresses = IpAddresses::from_bytes(header)?;
    let [.., high, low] = req.service_id.to_be_bytes();
    let port = u16::from_be_bytes([high, low]);
    let right = Gid::from(addresses.source) == from && Gid::from(addresses.destination) == to;
    (right && port != 0).then(|| SocketAddr::new(to.into(), port))
}

/// Returns the parameters of the guest's REQ for the host.
pub fn of_req(req: &Req, max_rd_atomic: u8) -> ConnectionData {
    ConnectionData {
        private_data: req.private_data.get(IpAddresses::LEN..).unwrap_or_default().to_vec(),
        responder_resources: req.responder_resources.min(max_rd_atomic),
        initiator_depth: req.initiator_depth.min(max_rd_atomic),
        retry_count: req.retry_count,
        rnr_retry: req.rnr_retry,
        srq: req.srq,
        qpn: req.qpn.get(),
    }
}

/// Returns the parameters of the guest's REP for the host.
pub fn of_rep(rep: &Rep, max_rd_atomic: u8) -> ConnectionData {
    ConnectionData {
        private_data: rep.private_data.to_vec(),
        responder_resources: rep.responder_resources.min(max_rd_atomic),
        initiator_depth: rep.initiator_depth.min(max_rd_atomic),
        retry_count: 0,
        rnr_retry: rep.rnr_retry,
        srq: rep.srq,
        qpn: rep.qpn.get(),
    }
}

/// Copies private data, the rest is zeros. Returns `None` if there is no room for it.
fn padded<const N: usize>(data: &[u8]) -> Option<[u8; N]> {
    let mut out = [0; N];
    out.get_mut(..data.len())?.copy_from_slice(data);
    Some(out)
}

/// Returns the REP for the guest, or `None` if the private data is too long. The GUID is the interface ID of the peer's
/// address; programs do not use it.
pub(super) fn rep(data: &ConnectionData, peer: Gid, peer_qpn: u32, psn: u32) -> Option<Rep> {
    Some(Rep {
        qpn: Qpn::new(peer_qpn),
        starting_psn: Psn::new(psn),
        // The event has the view of this end, the message that of the peer.
        responder_resources: data.initiator_depth,
        initiator_depth: data.responder_resources,
        rnr_retry: data.rnr_retry,
        srq: data.srq,
        ca_guid: guid(peer),
        private_data: padded(&data.private_data)?,
        ..Rep::default()
    })
}

fn guid(gid: Gid) -> [u8; 8] {
    gid.0.last_chunk().copied().unwrap_or_default()
}

/// A request of a peer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    pub(super) own: Gid,
    pub(super) own_port: u16,
    pub(super) peer: SocketAddr,
    pub(super) peer_qpn: u32,
    pub(super) path_mtu: u8,
    pub(super) psn: u32,
}

/// Returns the REQ for the guest, or `None` if the private data is too long.
pub(super) fn req(data: &ConnectionData, asked: &Asked, local_id: u32) -> Option<Req> {
    let (destination, peer) = (asked.own.into(), asked.peer.ip());
    let header = IpAddresses { source: peer, source_port: asked.peer.port(), destination }.to_bytes()?;
    let rest: [u8; REQ_PRIVATE] = padded(&data.private_data)?;
    let mut private_data = [0; 92];
    private_data.iter_mut().zip(header.iter().chain(&rest)).for_each(|(to, from)| *to = *from);
    Some(Req {
        local_id,
        service_id: PORT_SPACE_TCP | u64::from(asked.own_port),
        ca_guid: guid(peer.into()),
        qpn: Qpn::new(asked.peer_qpn),
        responder_resources: data.initiator_depth,
        initiator_depth: data.responder_resources,
        remote_response_timeout: RESPONSE_TIMEOUT,
        local_response_timeout: RESPONSE_TIMEOUT,
        starting_psn: Psn::new(asked.psn),
        retry_count: data.retry_count & 7,
        rnr_retry: data.rnr_retry & 7,
        path_mtu: asked.path_mtu,
        max_cm_retries: MAX_CM_RETRIES,
        srq: data.srq,
        primary: PathInfo {
            local_lid: 0xffff,
            remote_lid: 0xffff,
            local_gid: peer.into(),
            remote_gid: asked.own,
            hop_limit: HOP_LIMIT,
            ack_timeout: ACK_TIMEOUT,
            ..PathInfo::default()
        },
        private_data,
        ..Req::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(host: u8) -> Gid {
        std::net::IpAddr::from([10, 0, 0, host]).into()
    }

    fn asked() -> Asked {
        let peer = "10.0.0.9:1234".parse().unwrap();
        Asked { own: gid(1), own_port: 7174, peer, peer_qpn: 0x99, path_mtu: 3, psn: 5 }
    }

    fn data(private: usize) -> ConnectionData {
        ConnectionData {
            private_data: vec![7; private],
            responder_resources: 3,
            initiator_depth: 4,
            ..Default::default()
        }
    }

    #[test]
    fn a_request_of_a_peer_is_one_that_the_other_way_would_be_accepted() {
        let req = req(&data(56), &asked(), 11).unwrap();
        // Seen from the peer's side.
        assert_eq!((req.responder_resources, req.initiator_depth), (4, 3));
        let own = SocketAddr::new(gid(1).into(), 7174);
        assert_eq!(wanted_peer(&req, gid(9), gid(1)), Some(own));
        assert_eq!(of_req(&req, 2).private_data, [7; 56]);
        assert_eq!((of_req(&req, 2).responder_resources, of_req(&req, 9).initiator_depth), (2, 3));
    }

    #[test]
    fn requests_that_the_host_cannot_serve_are_not() {
        let good = req(&data(0), &asked(), 11).unwrap();
        for change in [
            |req: &mut Req| req.transport = 1,
            |req: &mut Req| req.service_id = 0x0111_0000 + 7174,
            |req: &mut Req| req.service_id = PORT_SPACE_TCP,
            |req: &mut Req| req.private_data[0] = 1,
            |req: &mut Req| req.private_data[19] ^= 1,
            |req: &mut Req| req.private_data[35] ^= 1,
        ] {
            let mut req = good.clone();
            change(&mut req);
            assert_eq!(wanted_peer(&req, gid(9), gid(1)), None);
        }
        assert!(wanted_peer(&good, gid(9), gid(2)).is_none() && wanted_peer(&good, gid(8), gid(1)).is_none());
    }

    #[test]
    fn private_data_that_does_not_fit_is_refused() {
        assert!(req(&data(REQ_PRIVATE + 1), &asked(), 11).is_none());
        let answer = |length| rep(&data(length), gid(9), 0x99, 5);
        assert!(answer(196).is_some_and(|rep| rep.private_data == [7; 196]) && answer(197).is_none());
        let whole = answer(0).unwrap();
        assert_eq!((whole.responder_resources, whole.initiator_depth, whole.qpn.get()), (4, 3, 0x99));
    }
}
