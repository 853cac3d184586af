//! Connections on virtual time, with a fake host and a guest that the test plays message by message.

mod active;
mod hostile;
mod passive;
mod protocols;
mod thread;

use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use pvrdma_ib_cm::terminated::ConnectionData;
use pvrdma_ib_cm::{Drep, Dreq, IpAddresses, Mad, Message, PORT_SPACE_TCP, Rep, Req, Rtu};
use pvrdma_verbs::testing::{End, Node, gid};
use pvrdma_verbs::{AddressRule, Hca, QueuePair, Rules, VerbsError};
use pvrdma_verbs_types::{Gid, GidType, QpAttrMask as M, QpAttrs, QpState, QpType, Qpn, UdDestination};

use super::manager::Manager;
use crate::config::CmMode;
use crate::datagram::Datagram;
use crate::fake::{CmCall, FakeBackend};
use crate::gid::{Bound, DatagramReceiver, HostGid, ip};
use crate::hca::IbvHca;
use crate::sys::{LINK_LAYER_ETHERNET, TRANSPORT_IB, rdmacm as sys};

/// Port on which the guest's program listens.
const PORT: u16 = 7174;
/// Communication ID and transaction of the guest.
const GUEST_ID: u32 = 0x6001;
const TRANSACTION: u64 = 0x77_0000_0001;
const PEER_QPN: u32 = 0x4321;

/// QP 1 of the guest, which keeps what it gets.
#[derive(Default)]
struct Inbox(Mutex<Vec<Mad>>);

impl DatagramReceiver for Inbox {
    fn receive(&self, datagram: &Datagram) -> bool {
        self.0.lock().push(Mad::parse(&datagram.payload).unwrap());
        true
    }
}

/// A device with its manager, which the test drives.
struct Bench {
    // Dropped first: the manager destroys its identifiers while the adapter exists.
    manager: Option<Manager>,
    node: Node<IbvHca>,
    inbox: Arc<Inbox>,
    backend: FakeBackend,
    now: Duration,
}

fn rules() -> Rules {
    let addresses = AddressRule { listed: vec![ip(gid(1))], ..AddressRule::ANY };
    Rules::default().with_addresses(addresses).with_listen(vec![PORT])
}

impl Bench {
    fn new() -> Self {
        Self::on(TRANSPORT_IB, LINK_LAYER_ETHERNET, rules())
    }

    fn on(transport: i32, link_layer: u8, rules: Rules) -> Self {
        let backend = FakeBackend::that_speaks(transport, link_layer, |config| {
            config.cm = CmMode::Host;
            config.untested_infiniband = true;
        });
        // The host has the guest's address. The tables of other adapters have no IP addresses.
        if (transport, link_layer) == (TRANSPORT_IB, LINK_LAYER_ETHERNET) {
            backend.set_host_gid(&HostGid { index: 1, gid: gid(1), kind: GidType::RoceV2 });
        }
        let node = Node::with_rules(&backend, 1, 8 << 20, rules);
        node.hca.bind_gid(0, gid(1), GidType::RoceV2).unwrap();
        let adapter = &node.hca.objects().adapter;
        let inbox = Arc::<Inbox>::default();
        let receiver: Weak<dyn DatagramReceiver> = Arc::downgrade(&(Arc::clone(&inbox) as Arc<dyn DatagramReceiver>));
        *adapter.member.gsi.lock() = Some(receiver);
        let manager = backend.enter(|| Manager::new(adapter, backend.libraries()).unwrap());
        adapter.cm_paths.activate();
        let mut bench = Self { manager: Some(manager), node, inbox, backend, now: Duration::from_secs(100) };
        bench.run();
        bench
    }

    fn manager(&mut self) -> &mut Manager {
        self.manager.as_mut().unwrap()
    }

    /// Processes everything that is due.
    fn run(&mut self) {
        let now = self.now;
        let manager = self.manager();
        manager.work(now);
        manager.host_events(now, usize::MAX).unwrap();
        manager.timeouts(now);
    }

    /// Lets time pass to the next deadline.
    fn tick(&mut self) {
        self.now = self.manager().deadline().unwrap();
        self.run();
    }

    fn bound(&self) -> Bound {
        self.node.hca.objects().adapter.gids.get(0).unwrap()
    }

    /// Sends a message of the guest to a peer.
    fn send_to(&mut self, peer: Gid, mad: &Mad) {
        let to = UdDestination { dgid: peer, qpn: Qpn::GSI, ..UdDestination::default() };
        let payload = mad.to_bytes().to_vec();
        let datagram = Datagram { from: gid(1), to, kind: GidType::RoceV2, immediate: None, solicited: false, payload };
        let bound = self.bound();
        assert!(self.node.hca.objects().adapter.cm_paths.submit(bound, datagram));
        self.run();
    }

    fn send(&mut self, message: Message) {
        self.send_to(gid(9), &Mad { transaction: TRANSACTION, message });
    }

    /// Returns the messages that the guest has got.
    fn received(&self) -> Vec<Message> {
        self.inbox.0.lock().drain(..).map(|mad| mad.message).collect()
    }

    /// Returns the only message that the guest has got.
    #[track_caller]
    fn one(&self) -> Message {
        let mut received = self.received();
        assert_eq!(received.len(), 1, "{received:?}");
        received.remove(0)
    }

    /// Returns the calls of the library, without the numbers of their identifiers.
    fn calls(&self) -> Vec<CmCall> {
        self.backend.host.cm_calls().into_iter().map(|(_, call)| call).collect()
    }

    /// Raises an event of the host.
    fn event(&mut self, id: u32, kind: i32, status: i32, data: ConnectionData) {
        self.backend.host.cm_event(id, kind, status, data);
        self.run();
    }

    fn counter(&self, name: &str) -> u64 {
        self.node.hca.counters().iter().find(|counter| counter.name == name).unwrap().value
    }

    /// Begins a connection of the guest with a QP in INIT. Returns the number of the host's identifier.
    fn begin(&mut self, qpn: u32) -> u32 {
        self.backend.host.cm_calls();
        self.send(Message::Req(Box::new(request(qpn))));
        let (id, call) = self.backend.host.cm_calls().remove(0);
        let expected = CmCall::ResolveAddress { from: Some(ip(gid(1))), to: SocketAddr::new(ip(gid(9)), 4420) };
        assert_eq!(call, expected);
        id
    }

    /// Continues to the request to the peer.
    fn connecting(&mut self, qpn: u32) -> u32 {
        let id = self.begin(qpn);
        self.event(id, sys::ADDR_RESOLVED, 0, ConnectionData::default());
        self.event(id, sys::ROUTE_RESOLVED, 0, ConnectionData::default());
        id
    }

    /// Continues to the REP to the guest, which it returns.
    fn offered(&mut self, qpn: u32) -> (u32, Rep) {
        let id = self.connecting(qpn);
        self.event(id, sys::CONNECT_RESPONSE, 0, answer());
        let Message::Rep(rep) = self.one() else { panic!("no REP") };
        (id, rep)
    }

    /// Continues to the established connection.
    fn connected(&mut self, end: &End<IbvHca>) -> (u32, Rep) {
        let (id, rep) = self.offered(qpn(end));
        to_rtr(end, rep.qpn.get()).unwrap();
        to_rts(end).unwrap();
        self.send(Message::Rtu(Rtu { local_id: GUEST_ID, remote_id: rep.local_id, private_data: [0; 224] }));
        self.backend.host.cm_calls();
        (id, rep)
    }

    /// Returns the number of the identifier that listens for the guest.
    fn listener(&self) -> u32 {
        let calls = self.backend.host.cm_calls();
        let listening = calls.iter().find(|(_, call)| matches!(call, CmCall::Listen(_)));
        listening.unwrap_or_else(|| panic!("{calls:?}")).0
    }

    /// Makes a peer ask for a connection. Returns the identifier of it and the guest's REQ.
    fn asked(&mut self, listener: u32) -> (u32, Req) {
        self.backend.host.cm_request(listener, "10.0.0.9:40000".parse().unwrap(), wish());
        self.run();
        let Message::Req(req) = self.one() else { panic!("no REQ") };
        // The listening identifier is older.
        (self.backend.host.last_cm_id(), *req)
    }
}

fn qpn(end: &End<IbvHca>) -> u32 {
    end.qp.qpn().get()
}

/// A QP in INIT.
fn init(bench: &Bench) -> End<IbvHca> {
    let end = bench.node.qp(QpType::Rc);
    end.change(QpState::Init, End::toward(&end), M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS);
    end
}

fn to_rtr(end: &End<IbvHca>, peer_qpn: u32) -> Result<(), VerbsError> {
    let mut attrs = QpAttrs { state: QpState::Rtr, dest_qpn: Qpn::new(peer_qpn), ..End::toward(end) };
    (attrs.av.dgid, attrs.max_dest_rd_atomic) = (gid(9), 4);
    let mask = M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN | M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER;
    end.qp.modify(&attrs, mask | M::STATE)
}

fn to_rts(end: &End<IbvHca>) -> Result<(), VerbsError> {
    let attrs = QpAttrs { state: QpState::Rts, ..End::toward(end) };
    let mask = M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::SQ_PSN | M::MAX_QP_RD_ATOMIC;
    end.qp.modify(&attrs, mask | M::STATE)
}

/// REQ of the guest to port 4420 of 10.0.0.9.
fn request(qpn: u32) -> Req {
    let (source, destination) = (ip(gid(1)), ip(gid(9)));
    let header = IpAddresses { source, source_port: 1234, destination }.to_bytes().unwrap();
    let mut private_data = [7; 92];
    private_data[..36].copy_from_slice(&header);
    Req {
        local_id: GUEST_ID,
        service_id: PORT_SPACE_TCP + 4420,
        qpn: Qpn::new(qpn),
        responder_resources: 3,
        initiator_depth: 200,
        retry_count: 6,
        rnr_retry: 5,
        private_data,
        ..Req::default()
    }
}

/// The peer's answer.
fn answer() -> ConnectionData {
    ConnectionData { private_data: vec![8; 196], responder_resources: 2, initiator_depth: 1, qpn: PEER_QPN, ..wish() }
}

/// The peer's request.
fn wish() -> ConnectionData {
    ConnectionData {
        private_data: vec![9; 56],
        responder_resources: 2,
        initiator_depth: 1,
        retry_count: 7,
        rnr_retry: 7,
        srq: false,
        qpn: PEER_QPN,
    }
}

fn dreq(connection: &Rep, qpn: u32) -> Message {
    let (local_id, remote_id) = (GUEST_ID, connection.local_id);
    Message::Dreq(Dreq { local_id, remote_id, remote_qpn: Qpn::new(qpn), private_data: [0; 220] })
}

fn drep(dreq: &Dreq) -> Message {
    Message::Drep(Drep { local_id: dreq.remote_id, remote_id: dreq.local_id, private_data: [0; 224] })
}
