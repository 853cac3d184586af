//! Tests of memory that is kept for peers, whose bounds are visible only inside the crate.

mod pause;

use std::fmt;
use std::sync::{Arc, mpsc};

use parking_lot::Mutex;
use pvrdma_base::Snapshot;
use pvrdma_link::{
    Frames, Link, LinkInspect, ManualClock, Readiness,
    memory::{self, MemoryLink},
};
use pvrdma_packet::Ethernet;
use pvrdma_roce::wire::{
    Aeth, Bth, Deth, Extension, Header, Ipv4, Network, Opcode, Packet, Position, Reth, Syndrome, Udp, build,
};
use pvrdma_verbs::{
    CompletionQueue, Hca, MemoryRegion, QueuePair, SharedReceiveQueue,
    testing::{End, Node, gid, mac},
};
use pvrdma_verbs_types::{Access, QpState, QpType, RemoteAddress, SendOp, WcStatus};
use serde_json::{Value, json};

use crate::path::wire::Admitted;
use crate::port::Arrival;
use crate::{PortConfig, Rxe, RxeConfig, RxeHca, RxeSrq, RxeStation};

/// Returns the numbers of packets that wait behind a READ and of owed responses, of a QP that has received packets.
fn kept_for_peer(end: &End<RxeHca>) -> Option<(usize, usize)> {
    end.qp.endpoint.wire_load()
}

/// Returns the number of senders in the list of waiters of an SRQ.
fn waiters(srq: &RxeSrq) -> usize {
    srq.0.waiters()
}

fn engine() -> Rxe {
    Rxe::new(RxeConfig { workers: 0, clock: Arc::new(ManualClock::default()), ..RxeConfig::default() }).unwrap()
}

/// Creates a device on a cable, and its QP that is connected to the other end, where the test acts as the peer.
fn exposed(capacity: usize) -> (Rxe, Node<RxeHca>, End<RxeHca>, MemoryLink, RxeStation) {
    let rxe = engine();
    let (ours, theirs) = memory::pair(capacity).unwrap();
    let config = PortConfig::new(Arc::new(ours), 4500);
    let station = rxe.station(mac(1));
    station.plug(config).unwrap();
    let node = Node::new(&rxe, 1);
    let end = node.qp(QpType::Rc);
    end.connect(&end, |a| (a.av.dgid, a.av.dmac) = (gid(2), mac(2)));
    (rxe, node, end, theirs, station)
}

/// Builds a request from an address, with a PSN relative to the first.
fn request(source: [u8; 4], end: &End<RxeHca>, opcode: Opcode, psn: u32, reth: Reth) -> Header {
    let ip = Ipv4 {
        traffic_class: 0,
        identification: 0,
        dont_fragment: true,
        hop_limit: 64,
        source,
        destination: [10, 0, 0, 1],
    };
    let mut bth = Bth::new(opcode, end.qp.qpn(), End::toward(end).rq_psn.plus(psn));
    bth.ack_request = true;
    Header {
        ethernet: Ethernet { destination: mac(1), source: mac(2), vlan: None },
        network: Network::V2Ipv4(ip, Udp { source_port: 0xc001, checksum: 0 }),
        bth,
        extension: Extension::Reth(reth),
    }
}

fn give(link: &MemoryLink, header: &Header, payload: &[u8]) {
    let mut frames = Frames::default();
    frames.push(&build(header, payload).unwrap());
    assert_eq!(link.send(&frames, 0), 1);
}

/// Action that happens while a link is read.
type Meanwhile = Box<dyn FnOnce(&mut Frames) + Send>;

/// A link on which frames arrive while something else happens.
struct SlowRead(Mutex<Option<Meanwhile>>);

impl fmt::Debug for SlowRead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlowRead").finish_non_exhaustive()
    }
}

impl Link for SlowRead {
    fn receive(&self, frames: &mut Frames, _most: usize) {
        if let Some(meanwhile) = self.0.lock().take() {
            meanwhile(frames);
        }
    }

    fn send(&self, frames: &Frames, from: usize) -> usize {
        frames.len() - from
    }

    fn readiness(&self) -> Readiness {
        Readiness::default()
    }

    fn lost(&self) -> u64 {
        0
    }

    fn inspect(&self) -> LinkInspect {
        LinkInspect { kind: "slow", name: String::new(), peers: Vec::new(), up: Snapshot::Taken(true) }
    }
}

/// The device attaches after the port has begun to read, and before the first frame of a peer arrives.
#[test]
fn a_frame_behind_the_attachment_of_its_device_reaches_it() {
    let rxe = engine();
    let link = Arc::new(SlowRead(Mutex::default()));
    let config = PortConfig::new(Arc::clone(&link) as _, 4500);
    let station = rxe.station(mac(1));
    station.plug(config).unwrap();
    let (backend, (attached, device)) = (rxe.clone(), mpsc::channel());
    *link.0.lock() = Some(Box::new(move |frames| {
        let node = Node::new(&backend, 1);
        let end = node.qp(QpType::Rc);
        end.connect(&end, |a| (a.av.dgid, a.av.dmac) = (gid(2), mac(2)));
        let reth = Reth { address: 0, rkey: 0, length: 0 };
        let header = request([10, 0, 0, 2], &end, Opcode::write(Position::Only), 0, reth);
        frames.push(&build(&header, &[]).unwrap());
        attached.send((node, end)).unwrap();
    }));
    rxe.run_ready();
    let (_node, end) = device.try_recv().unwrap();
    assert_eq!(kept_for_peer(&end), Some((0, 0)));
}

#[test]
fn strangers_cost_no_memory() {
    let (rxe, node, end, cable, _station) = exposed(100_000);
    for number in 0..1000_u32 {
        let source = (0x0a01_0000 + number).to_be_bytes();
        let reth = Reth { address: 0, rkey: 0, length: 0 };
        give(&cable, &request(source, &end, Opcode::write(Position::Only), 0, reth), &[]);
    }
    rxe.run_ready();
    assert_eq!(node.counter("wire_dropped_address"), 1000);
    assert_eq!(kept_for_peer(&end), None);
    let mut answers = Frames::default();
    cable.receive(&mut answers, 1);
    assert_eq!(answers.len(), 0, "no packet gets an answer");
}

/// A host beyond the uplink sends as a device of this process: with its IP address only, and with its Ethernet address
/// as well. Its local peer is connected with it, and has received nothing yet.
#[test]
fn a_neighbour_cannot_be_forged() {
    let (rxe, node, _, cable, _station) = exposed(100);
    let neighbour = Node::new(&rxe, 2);
    let [end, other] = [&node, &neighbour].map(|node| node.qp(QpType::Rc));
    end.connect(&other, |a| (a.av.dgid, a.av.dmac) = (gid(2), mac(2)));
    other.connect(&end, |a| (a.av.dgid, a.av.dmac) = (gid(1), mac(1)));
    let datagrams = node.qp(QpType::Ud);
    datagrams.start_datagrams(0);
    let reth = Reth { address: 0, rkey: 0, length: 0 };
    let mut dropped = 0;
    for station in [mac(9), mac(2)] {
        for opcode in [Opcode::write(Position::Only), Opcode::ACKNOWLEDGE, Opcode::UD_SEND] {
            let to = if opcode == Opcode::UD_SEND { &datagrams } else { &end };
            let mut header = request([10, 0, 0, 2], to, opcode, 0, reth);
            header.ethernet.source = station;
            header.extension = match opcode {
                Opcode::ACKNOWLEDGE => Extension::Aeth(Aeth { syndrome: Syndrome::ACK, msn: 0 }),
                Opcode::UD_SEND => Extension::Deth(Deth { qkey: 0, source: other.qp.qpn() }),
                _ => header.extension,
            };
            give(&cable, &header, &[]);
            rxe.run_ready();
            dropped += 1;
            assert_eq!(node.counter("wire_dropped_address"), dropped, "{station} {opcode:?}");
        }
    }
    assert_eq!(kept_for_peer(&end), None);
}

/// A peer requests many responses and accepts none: the memory kept for it is bounded, the rest is dropped and counted.
#[test]
fn a_peer_that_does_not_listen_costs_little_memory() {
    const PEER: [u8; 4] = [10, 0, 0, 2];
    let (rxe, node, end, cable, _station) = exposed(2);
    let memory = node.buffer(1 << 20);
    let remote = memory.remote(0);
    let reth = Reth { address: remote.addr, rkey: remote.rkey, length: 1 << 20 };
    give(&cable, &request(PEER, &end, Opcode::READ_REQUEST, 0, reth), &[]);
    rxe.run_ready();
    let (mut kept, mut owed) = (0, 0);
    for number in 0..1000 {
        // The READ takes 1,024 PSNs. Each of these is repeated once, and the READ many times.
        let write = Reth { length: 4, ..reth };
        give(&cable, &request(PEER, &end, Opcode::write(Position::Only), 1024 + number / 2, write), &[1; 4]);
        let again = Reth { length: 1024, ..reth };
        give(&cable, &request(PEER, &end, Opcode::READ_REQUEST, number, again), &[]);
        rxe.run_ready();
        let load = kept_for_peer(&end).unwrap();
        (kept, owed) = (load.0.max(kept), load.1.max(owed));
    }
    assert_eq!(kept, 128);
    assert!(owed <= 64, "{owed}");
    assert!(node.counter("wire_dropped_deferred") > 1000, "{}", node.counter("wire_dropped_deferred"));
    assert_eq!(node.counter("wire_dropped_no_room"), 0);
}

/// While a thread handles a response, a doorbell leaves its request to that thread, which then drops the response
/// because it is not from the peer.
#[test]
fn a_doorbell_beside_a_dropped_response_is_not_lost() {
    let (rxe, _node, end, cable, _station) = exposed(10);
    let mut header = request([10, 0, 0, 9], &end, Opcode::ACKNOWLEDGE, 0, Reth { address: 0, rkey: 0, length: 0 });
    header.extension = Extension::Aeth(Aeth { syndrome: Syndrome::ACK, msn: 0 });
    let requester = end.qp.endpoint.hold_requester();
    end.send(1, &[]);
    drop(requester);
    rxe.run_ready();
    let mut sent = Frames::default();
    cable.receive(&mut sent, 10);
    assert_eq!(sent.len(), 0, "another thread has run it");
    give(&cable, &header, &[]);
    rxe.run_ready();
    cable.receive(&mut sent, 10);
    assert_eq!(sent.len(), 1);
}

/// The guest sees a message before the port's thread has acknowledged it. A QP that ends then still acknowledges it.
#[test]
fn received_messages_are_acknowledged_before_a_qp_ends() {
    let endings: [fn(&End<RxeHca>); 3] =
        [|end| end.to(QpState::Error), |end| end.to(QpState::Reset), |end| end.qp.destroy()];
    for ending in endings {
        let (rxe, _node, end, cable, station) = exposed(2);
        let header =
            request([10, 0, 0, 2], &end, Opcode::write(Position::Only), 0, Reth { address: 0, rkey: 0, length: 0 });
        let frame = build(&header, &[]).unwrap();
        let packet = Packet::parse(&frame).unwrap();
        let request = std::iter::once((packet, Arrival::alone(&frame)));
        end.qp.endpoint.take_requests(&station.place().port().unwrap(), Admitted::All, request, |taken| taken.unwrap());
        let mut answers = Frames::default();
        cable.receive(&mut answers, 1);
        assert_eq!(answers.len(), 0);
        ending(&end);
        cable.receive(&mut answers, 2);
        let answer = Packet::parse(answers.iter().next().unwrap()).unwrap();
        assert!(
            matches!(answer.header.extension, Extension::Aeth(aeth) if matches!(aeth.syndrome, Syndrome::Ack { .. }))
        );
        assert_eq!((answers.len(), answer.header.bth.psn), (1, header.bth.psn));
        drop(rxe);
    }
}

/// Covers local delivery and a cable.
#[test]
fn endings_leave_no_memory_behind() {
    for cable in [false, true] {
        let near = engine();
        let far = if cable { engine() } else { near.clone() };
        let (ours, theirs) = memory::pair(100_000).unwrap();
        let plug = |rxe: &Rxe, number, link| {
            let station = rxe.station(mac(number));
            station.plug(PortConfig::new(Arc::new(link), 4500)).unwrap();
            station
        };
        let _stations = cable.then(|| (plug(&near, 1, ours), plug(&far, 2, theirs)));
        let (a, b) = (Node::new(&near, 1), Node::new(&far, 2));
        let (srq, _ring) = b.srq(0);
        for _ in 0..1000 {
            let (left, right) = (a.qp(QpType::Rc), b.qp_with(QpType::Rc, Some(&srq), |_| {}));
            left.connect(&right, |_| {});
            right.connect(&left, |_| {});
            left.send(1, &[]);
            while near.run_ready() + far.run_ready() > 0 {}
        }
        assert!(waiters(&srq) < 100, "{cable}");
        assert_eq!((near.next_deadline(), far.next_deadline()), (None, None), "{cable}");
    }
}

/// Two devices whose QPs are connected, by local delivery or over a cable.
struct Connected {
    engines: [Rxe; 2],
    nodes: [Node<RxeHca>; 2],
    ends: [End<RxeHca>; 2],
    _stations: Vec<RxeStation>,
}

impl Connected {
    fn new(cable: bool) -> Self {
        let near = engine();
        let far = if cable { engine() } else { near.clone() };
        let mut stations = Vec::new();
        if cable {
            let (ours, theirs) = memory::pair(1000).unwrap();
            for (rxe, number, link) in [(&near, 1, ours), (&far, 2, theirs)] {
                let station = rxe.station(mac(number));
                station.plug(PortConfig::new(Arc::new(link), 4500)).unwrap();
                stations.push(station);
            }
        }
        let nodes = [Node::new(&near, 1), Node::new(&far, 2)];
        let ends = nodes.each_ref().map(|node| node.qp(QpType::Rc));
        let [left, right] = &ends;
        left.connect(right, |_| {});
        right.connect(left, |_| {});
        Self { engines: [near, far], nodes, ends, _stations: stations }
    }

    fn settle(&self) {
        while self.engines.iter().map(Rxe::run_ready).sum::<usize>() > 0 {}
    }
}

/// Asserts that no number in an inspection gives access to memory or to a QP.
fn assert_no_keys(shown: &Value) {
    let text = shown.to_string();
    assert!(!text.contains("key"), "{text}");
}

#[test]
fn a_qp_shows_its_way_to_a_local_peer() {
    let connected = Connected::new(false);
    let Connected { nodes: [_, b], ends: [left, right], .. } = &connected;
    let memory = b.buffer(64);
    left.post(1, SendOp::Write { remote: memory.remote(0), immediate: None }, &[]);
    // No receive was posted.
    left.send(2, &[]);
    let shown = left.qp.inspect();
    assert_no_keys(&shown);
    assert_eq!((&shown["state"], &shown["type"]), (&json!("RTS"), &json!("RC")), "{shown}");
    let route = &shown["requester"]["route"];
    assert_eq!((&route["path"], &route["peer"]["qpn"]), (&json!("local"), &json!(right.qp.qpn())), "{shown}");
    assert!(route["peer"]["device"].is_string(), "{shown}");
    let requester = &shown["requester"];
    assert_eq!(requester["current"]["opcode"], "Send", "{shown}");
    assert_eq!((&requester["wait"]["for"], &requester["gate"]), (&json!("receive"), &json!("rnr_wait")), "{shown}");
    assert_eq!(requester["wait"]["due_in_us"], requester["timer_due_in_us"], "{shown}");
    assert!(requester["timer_due_in_us"].as_u64().is_some_and(|due| due > 0), "{shown}");
    // The write has ended, the send has not.
    assert_eq!((&requester["requests"], &requester["bytes"]), (&json!(1), &json!(0)), "{shown}");
    let peer = right.qp.inspect();
    assert_eq!((&peer["responder"]["established"], &peer["awaited"]), (&json!(true), &json!(true)), "{peer}");
    assert_eq!((&peer["wire_responder"], &peer["rate_bytes_per_s"]), (&Value::Null, &Value::Null), "{peer}");
}

#[test]
fn a_qp_shows_its_psns_on_the_wire() {
    let connected = Connected::new(true);
    let Connected { nodes: [a, b], ends: [left, right], .. } = &connected;
    let (source, target) = (a.buffer(64), b.buffer(64));
    let write = |wr_id| {
        let remote: RemoteAddress = target.remote(0);
        left.submit(wr_id, SendOp::Write { remote, immediate: None }, &[source.all()]);
    };
    write(1);
    connected.settle();
    write(2);
    let first = End::toward(right).sq_psn;
    let (shown, peer) = (left.qp.inspect(), right.qp.inspect());
    assert_no_keys(&shown);
    let route = &shown["requester"]["route"];
    assert_eq!((&route["path"], &route["peer_qpn"]), (&json!("wire"), &json!(right.qp.qpn())), "{shown}");
    assert_eq!(route["address"]["destination"], json!(gid(2)), "{shown}");
    assert_eq!((&route["snd_una"], &route["snd_nxt"]), (&json!(first.plus(1)), &json!(first.plus(2))), "{shown}");
    assert_eq!((&route["in_flight"], &route["stats"]["packets"]), (&json!(1), &json!(2)), "{shown}");
    assert_eq!(route["timers"][0]["timer"], "ack", "{shown}");
    let requester = &shown["requester"];
    assert_eq!((&requester["requests"], &requester["bytes"]), (&json!(1), &json!(64)), "{shown}");
    assert_eq!(requester["gate"], "ack_wait", "{shown}");
    connected.settle();
    assert_eq!(left.qp.inspect()["requester"]["gate"], Value::Null);
    let responder = &peer["wire_responder"];
    assert_eq!((&responder["expected_psn"], &responder["msn"]), (&json!(first.plus(1)), &json!(1)), "{peer}");
    assert_eq!((&responder["reorder_packets"], &responder["pending_responses"]), (&json!(0), &json!(0)), "{peer}");
    let port = a.hca.inspect();
    assert_eq!((&port["gids"][0]["gid"], &port["port"]["path_mtu"]), (&json!(gid(1)), &json!(4096)), "{port}");
    let uplink = json!({"kind": "memory", "name": "", "peers": [], "up": true, "waiting_frames": 0});
    assert_eq!(port["port"]["uplink"], uplink, "{port}");
}

#[test]
fn a_qp_shows_that_the_link_is_full() {
    let (rxe, node, end, cable, _station) = exposed(2);
    let source = node.buffer(64);
    let gate = || end.qp.inspect()["requester"]["gate"].clone();
    let remote = RemoteAddress { addr: 0, rkey: 0 };
    for wr_id in 0..20 {
        end.submit(wr_id, SendOp::Write { remote, immediate: None }, &[source.all()]);
    }
    assert_eq!(gate(), "link_full");
    // Everything leaves, and the peer does not answer.
    for _ in 0..20 {
        cable.receive(&mut Frames::default(), usize::MAX);
        rxe.run_ready();
    }
    assert_eq!(gate(), "ack_wait");
}

#[test]
fn an_inspection_does_not_wait_for_locks() {
    let connected = Connected::new(false);
    let [left, _right] = &connected.ends;
    let endpoint = &left.qp.endpoint;
    let requester = endpoint.hold_requester();
    let shown = left.qp.inspect();
    assert_eq!((&shown["requester"], &shown["state"]), (&json!("busy"), &json!("RTS")), "{shown}");
    assert_eq!(shown["responder"]["established"], false, "{shown}");
    drop(requester);
    let responder = endpoint.qp().responder.lock();
    let shown = left.qp.inspect();
    assert_eq!((&shown["responder"], &shown["requester"]["retries_left"]), (&json!("busy"), &json!(7)), "{shown}");
    assert!(left.qp.try_query().is_none());
    drop(responder);
    assert_eq!(left.qp.try_query().map(|attrs| attrs.state), Some(QpState::Rts));
}

#[test]
fn other_objects_describe_themselves() {
    let node = Node::new(&engine(), 1);
    let (srq, _ring) = node.srq(3);
    let end = node.qp_with(QpType::Rc, Some(&srq), |_| {});
    assert_eq!(SharedReceiveQueue::inspect(&srq), json!({"broken": false, "limit": 3, "waiters": 0}));
    let (cq, _completions) = node.cq();
    assert_eq!(CompletionQueue::inspect(&cq), json!({"qps": [], "dead": false}));
    let buffer = node.buffer(4096);
    let shown = buffer.mr.inspect();
    assert_no_keys(&shown);
    assert_eq!((&shown["range"]["length"], &shown["max_pages"]), (&json!(4096), &json!(0)), "{shown}");
    let mrs = end.qp.endpoint.qp().adapter.mrs.block();
    assert_eq!(buffer.mr.inspect(), "busy");
    drop(mrs);
    buffer.mr.destroy();
    assert_eq!(buffer.mr.inspect(), Value::Null);
    assert_eq!(node.hca.inspect()["port"], Value::Null);
}

/// A process that creates domains for days must not get the number of another process's domain, because only the number
/// separates the regions of processes.
#[test]
fn numbers_of_domains_are_not_reused() {
    let rxe = engine();
    let node = Node::new(&rxe, 1);
    let end = node.qp(QpType::Rc);
    node.hca.count_domains(u64::from(u32::MAX));
    for wr_id in 0..3 {
        let foreign = node.hca.create_pd().unwrap();
        let secret = node.register(&foreign, &node.pages(1), 0, 16, Access::LOCAL_WRITE);
        end.to(QpState::Reset);
        end.connect(&end, |_| ());
        end.send(wr_id, &[secret.all()]);
        rxe.run_ready();
        assert_eq!(end.scq.poll_statuses(), [(wr_id, WcStatus::LocalProtection)]);
    }
}

/// The same holds for the epochs of responders: a requester in the middle of a message only continues where it began.
#[test]
fn no_responder_is_taken_for_another_in_the_middle_of_a_message() {
    let node = Node::new(&engine(), 1);
    let (first, second) = (node.qp(QpType::Rc), node.qp(QpType::Rc));
    let epoch = |end: &End<RxeHca>| end.qp.endpoint.qp().responder.lock().epoch;
    let mut seen = vec![epoch(&first), epoch(&second)];
    for end in [&first, &second] {
        end.to(QpState::Reset);
        seen.push(epoch(end));
    }
    for (at, epoch) in seen.iter().enumerate() {
        assert!(!seen.iter().skip(at + 1).any(|other| other == epoch), "{seen:?}");
    }
}

/// A guest that registers memory must not block another one that delivers to it.
#[test]
fn delivery_continues_during_a_registration() {
    let rxe = engine();
    let (a, b) = (Node::new(&rxe, 1), Node::new(&rxe, 2));
    let (left, right) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    left.connect(&right, |_| ());
    right.connect(&left, |_| ());
    let (from, to, gone) = (a.buffer(4096), b.buffer(4096), b.buffer(4096));
    let key = gone.mr.rkey();
    // Represents a long copy.
    let under_way = b.hca.adapter().mrs.read();
    std::thread::scope(|scope| {
        scope.spawn(|| gone.mr.destroy());
        while b.hca.adapter().mrs.read().inspect(key).is_some() {
            std::thread::yield_now();
        }
        left.submit(1, pvrdma_verbs::testing::write(to.remote(0)), &[from.all()]);
        assert_eq!(left.scq.poll_statuses(), [(1, WcStatus::Success)]);
        drop(under_way);
    });
    assert_eq!(gone.mr.inspect(), Value::Null);
}
