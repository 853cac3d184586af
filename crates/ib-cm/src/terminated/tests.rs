//! Connections with a host that the test plays. `backend-ibverbs` and `backend-rxe` test them with real ones.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use pvrdma_verbs_types::{Gid, Qpn};

use super::{Accepted, ConnectionData, Counted, GuestConnections, HostSide, Maximum, NO_QP, PeerRequest, QpBinding};
use crate::addresses::{IpAddresses, PORT_SPACE_TCP};
use crate::connection::TIME_WAIT;
use crate::mad::{MAD_LEN, Mad};
use crate::message::{Message, RejectReason, Rep};
use crate::req::Req;

const NOW: Duration = Duration::from_secs(100);

/// A host on which every call succeeds.
#[derive(Default)]
struct Host {
    random: u32,
    delivered: Vec<Message>,
    counted: Vec<Counted>,
    /// Connections whose parts were released.
    released: Vec<u32>,
    no_memory: bool,
}

fn gid(host: u8) -> Gid {
    IpAddr::from([10, 0, 0, host]).into()
}

impl HostSide for Host {
    type Own = Gid;
    type Part = ();
    type Permit = ();
    type Error = &'static str;

    fn gid(own: &Gid) -> Gid {
        *own
    }

    fn random(&mut self) -> Option<u32> {
        self.random += 1;
        Some(self.random)
    }

    fn count(&self, _: Counted) {}

    fn permit(&mut self) -> Option<()> {
        (!self.no_memory).then_some(())
    }

    fn reaches(&self, _: IpAddr) -> bool {
        true
    }

    fn deliver(&mut self, _: &Gid, _: Gid, mad: &[u8; MAD_LEN]) {
        self.delivered.extend(Mad::parse(mad).map(|mad| mad.message));
    }

    fn claim(&mut self, qpn: Qpn, _: u32) -> bool {
        qpn.get() != 0x999
    }

    fn claim_prepared(&mut self, _: Qpn, _: u32) -> bool {
        true
    }

    fn connect(&mut self, _: Duration, _: u32, _: &Gid, to: SocketAddr, _: &Req) -> Result<(), &'static str> {
        if to.port() == 9 { Err("refused") } else { Ok(()) }
    }

    fn prepare(&mut self, _: u32, _: &mut (), _: QpBinding) -> Result<u8, &'static str> {
        Ok(5)
    }

    fn confirm(&mut self, _: u32, _: &mut ()) -> Result<(), &'static str> {
        Ok(())
    }

    fn accept(&mut self, _: Duration, _: u32, _: &mut (), _: &Rep) -> Result<Accepted, &'static str> {
        Ok(Accepted::Established)
    }

    fn established(&mut self, _: u32) {
        self.counted.push(Counted::Established);
    }

    fn reject(&mut self, _: &mut (), _: &[u8]) {}

    fn disconnect(&mut self, _: u32, _: &mut ()) -> bool {
        false
    }

    fn release(&mut self, key: u32, part: Option<()>) {
        self.released.extend(part.map(|()| key));
    }

    fn failed(&mut self, _: Gid, _: &&'static str) -> RejectReason {
        RejectReason::INVALID_SERVICE_ID
    }
}

fn connections(kept: usize) -> GuestConnections<Host> {
    GuestConnections::new(Host::default(), Maximum { in_progress: 2, kept })
}

/// REQ of the guest 10.0.0.1 to a port of 10.0.0.2.
fn ask(connections: &mut GuestConnections<Host>, local_id: u32, port: u16, qpn: u32) -> Option<Message> {
    let addresses = IpAddresses { source: gid(1).into(), source_port: 1, destination: gid(2).into() };
    let mut private_data = [0; 92];
    private_data[..IpAddresses::LEN].copy_from_slice(&addresses.to_bytes().unwrap());
    let service_id = PORT_SPACE_TCP + u64::from(port);
    let req = Req { local_id, service_id, qpn: Qpn::new(qpn), private_data, ..Req::default() };
    let mad = Mad { transaction: local_id.into(), message: Message::Req(Box::new(req)) };
    connections.message(NOW, &gid(1), gid(2), mad);
    connections.host.delivered.pop()
}

fn reason(message: Option<Message>) -> Option<RejectReason> {
    if let Some(Message::Rej(rej)) = message { Some(rej.reason) } else { None }
}

#[test]
fn requests_that_fail_are_rejected_with_the_reason_of_the_host() {
    let mut connections = connections(10);
    assert_eq!(reason(ask(&mut connections, 1, 9, 7)), Some(RejectReason::INVALID_SERVICE_ID));
    assert_eq!(reason(ask(&mut connections, 2, 10, 0x999)), Some(NO_QP));
    assert_eq!(ask(&mut connections, 3, 10, 7), None);
    // The repetition of a REQ begins no other connection.
    assert_eq!((ask(&mut connections, 3, 10, 7), connections.len()), (None, 2));
    connections.host.no_memory = true;
    assert_eq!((ask(&mut connections, 4, 10, 7), connections.len()), (None, 2));
    connections.timeouts(NOW + TIME_WAIT);
    assert_eq!(connections.len(), 1);
}

#[test]
fn connections_that_have_ended_make_room() {
    let mut connections = connections(3);
    let data = ConnectionData::default();
    let peer = "10.0.0.2:40000".parse().unwrap();
    let request = PeerRequest { own: gid(1), own_port: 7174, peer, data: &data };
    for _ in 0..10 {
        let key = connections.ask(NOW, request, ()).unwrap();
        assert!(matches!(connections.host.delivered.pop(), Some(Message::Req(_))));
        connections.close(NOW, key, RejectReason::TIMEOUT, &[]);
        assert_eq!(connections.host.released.pop(), Some(key));
    }
    assert_eq!(connections.len(), 3);
    // Those in progress do not.
    assert!(connections.ask(NOW, request, ()).is_ok() && connections.ask(NOW, request, ()).is_ok());
    assert!(connections.ask(NOW, request, ()).is_err());
    assert_eq!(connections.len(), 3);
}

#[test]
fn a_peer_whose_request_is_accepted_can_send_at_once() {
    let mut connections = connections(3);
    let data = ConnectionData::default();
    let peer = "10.0.0.2:40000".parse().unwrap();
    let key = connections.ask(NOW, PeerRequest { own: gid(1), own_port: 7174, peer, data: &data }, ()).unwrap();
    let rep = Rep { local_id: 77, remote_id: key, qpn: Qpn::new(5), ..Rep::default() };
    let Some(Message::Req(req)) = connections.host.delivered.pop() else { unreachable!() };
    assert_eq!((req.local_id, req.path_mtu), (key, 5));
    connections.message(NOW, &gid(1), gid(2), Mad { transaction: 1, message: Message::Rep(rep) });
    assert!(matches!(connections.host.delivered.pop(), Some(Message::Rtu(rtu)) if rtu.remote_id == 77));
    assert_eq!(connections.host.counted, [Counted::Established]);
    connections.close(NOW, key, NO_QP, &[]);
    assert!(matches!(connections.host.delivered.pop(), Some(Message::Dreq(_))));
}
