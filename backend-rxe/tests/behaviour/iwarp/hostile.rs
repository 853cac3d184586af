//! Peers that send any bytes.

use std::io::Write;
use std::net::{Shutdown, TcpStream};

use pvrdma_ib_cm::Message;
use pvrdma_iwarp::wire::{Cause, Opcode, Placement, RawHeader, SegmentHeader, Terminate, fpdu};
use pvrdma_iwarp::{Answer, Initiator, Limits};
use pvrdma_rxe::Sockets;
use pvrdma_verbs::{AsyncEvent, QpEvent, QueuePair};
use pvrdma_verbs_types::QpState;

use super::*;
use crate::world::pattern;

const LIMITS: Limits = Limits { ird: 4, ord: 4, crc: true };

/// A host that has connected to the second guest.
fn connect(net: &Net) -> TcpStream {
    TcpStream::connect((net.sockets.host(2), PORT)).unwrap()
}

/// A host that has a connection with a QP of the second guest.
fn establish(net: &Net) -> (TcpStream, End) {
    use std::io::Read;
    let mut peer = connect(net);
    let initiator = Initiator::new(Duration::ZERO, LIMITS, b"hello").unwrap();
    peer.write_all(&initiator.request()).unwrap();
    let req = net.next_req(1);
    let right = net.qp(1);
    to_rts(&right, 1, req.qpn);
    let rep = net.guests[1].accept(&req, right.qp.qpn());
    // The peer has an address of the loopback interface, which is host 1 of the network.
    let from = pvrdma_ib_cm::IpAddresses::from_bytes(req.private_data.first_chunk().unwrap()).unwrap().source;
    assert_eq!(from, std::net::IpAddr::from(gid(1)));
    net.guests[1].send(gid(1), Message::Rep(rep));
    assert!(matches!(net.next(1), Message::Rtu(_)));
    net.run();
    let mut reply = [0; 20 + 4 + 196];
    peer.set_nonblocking(false).unwrap();
    peer.read_exact(&mut reply).unwrap();
    assert!(matches!(initiator.handle_bytes(&reply), Ok(Some(Answer::Accepted { .. }))));
    (peer, right)
}

/// Returns an FPDU with a CRC.
fn segment(header: SegmentHeader, payload: &[u8]) -> Vec<u8> {
    let raw = header.to_raw();
    let segment = raw.bytes().len() + payload.len();
    let mut out = vec![0; fpdu::fpdu_len(segment)];
    out[2..2 + raw.bytes().len()].copy_from_slice(raw.bytes());
    out[2 + raw.bytes().len()..2 + segment].copy_from_slice(payload);
    fpdu::seal(&mut out, segment, true).unwrap();
    out
}

fn write_to(stag: u32, offset: u64, payload: &[u8]) -> Vec<u8> {
    let placement = Placement::Tagged { stag, offset };
    segment(SegmentHeader { last: true, opcode: Opcode::Write, placement }, payload)
}

/// Reads the Terminate and the end of the connection, and nothing else.
fn terminate(net: &Net, peer: &TcpStream) -> Terminate {
    let bytes = read_to_end(net, peer).unwrap();
    let whole = fpdu::Fpdu::parse(&bytes, true).unwrap().unwrap();
    assert_eq!(whole.len, bytes.len());
    let (_, body) = RawHeader::split(whole.segment).unwrap();
    Terminate::parse(body)
}

#[test]
fn requests_that_are_not_of_mpa_do_not_reach_the_guest() {
    let net = Net::new();
    let mut bad_key = Initiator::new(Duration::ZERO, LIMITS, b"").unwrap().request();
    bad_key[0] ^= 1;
    let mut long = Initiator::new(Duration::ZERO, LIMITS, b"").unwrap().request();
    long[18..20].copy_from_slice(&513_u16.to_be_bytes());
    for request in [&bad_key[..], &long, &[0; 4096], b"GET / HTTP/1.0\r\n\r\n"] {
        let mut peer = connect(&net);
        peer.write_all(request).unwrap();
        // Reset, or closed.
        assert!(read_to_end(&net, &peer).unwrap_or_default().is_empty());
    }
    // A peer that says nothing, and one that closes the connection.
    let silent = connect(&net);
    drop(connect(&net));
    net.until("the end of the second", || net.counter(1, "iwarp_refused") == 5);
    net.pass(Duration::from_secs(5));
    assert!(read_to_end(&net, &silent).unwrap_or_default().is_empty());
    assert_eq!(net.counter(1, "iwarp_refused"), 6);
    assert!(!net.guests[1].has_message());
    net.connect();
}

/// The guest is told that it need not decide any more.
#[test]
fn a_peer_that_leaves_before_the_guest_answers() {
    for more in [&[][..], b"more"] {
        let net = Net::new();
        let mut peer = connect(&net);
        peer.write_all(&Initiator::new(Duration::ZERO, LIMITS, b"").unwrap().request()).unwrap();
        let req = net.next_req(1);
        // Bytes behind the request break the protocol.
        peer.write_all(more).unwrap();
        if more.is_empty() {
            drop(peer);
        }
        let Message::Rej(rej) = net.next(1) else { unreachable!("no REJ") };
        assert_eq!(rej.remote_id, 0);
        // An answer that crosses the rejection does no harm.
        let right = net.qp(1);
        net.accept(&right, &req, |_| {});
        net.run();
        right.qp.destroy();
    }
}

#[test]
fn many_sockets_without_a_request_are_bounded() {
    let net = Net::new();
    let to = std::net::SocketAddr::new(gid(2).into(), PORT);
    let peers: Vec<_> = (0..80).map(|_| net.sockets.connect(gid(3).into(), to).unwrap()).collect();
    // One peer has sixteen at most, and another one is served beside them.
    net.until("the bound", || net.counter(1, "iwarp_overflow") == 64);
    let _beside = net.connect();
    drop(peers);
    net.until("the end of all", || net.counter(1, "iwarp_refused") == 16);
    net.connect();
}

#[test]
fn a_good_peer_is_served() {
    let net = Net::new();
    let (mut peer, right) = establish(&net);
    let theirs = net.guests[1].node.buffer(5000);
    let (remote, data) = (theirs.remote(100), pattern(1, 4000));
    // Byte by byte at first, then everything.
    let bytes = write_to(remote.rkey, remote.addr, &data);
    for byte in &bytes[..40] {
        peer.write_all(&[*byte]).unwrap();
        net.run();
    }
    peer.write_all(&bytes[40..]).unwrap();
    net.until("the data", || theirs.read(100, 4000) == data);
    assert_eq!(right.state(), QpState::Rts);
}

#[test]
fn damaged_and_forbidden_messages_end_the_connection() {
    let net = Net::new();
    let theirs = net.guests[1].node.buffer(4096);
    let remote = theirs.remote(0);
    let mut damaged = write_to(remote.rkey, remote.addr, &[9; 100]);
    *damaged.last_mut().unwrap() ^= 1;
    let unexpected = Placement::Untagged { stag: 0, queue: 0, msn: 7, offset: 0 };
    let unexpected = segment(SegmentHeader { last: true, opcode: Opcode::Send, placement: unexpected }, &[]);
    let cases = [
        (damaged, Some(Cause::CRC), false),
        (write_to(remote.rkey ^ 0x100, remote.addr, &[9; 100]), None, true),
        (write_to(remote.rkey, remote.addr + 4000, &[9; 100]), None, true),
        (unexpected, Some(Cause::MSN_RANGE), false),
        (vec![0; 100], Some(Cause::FPDU_START), false),
    ];
    for (bytes, cause, access) in cases {
        let (mut peer, right) = establish(&net);
        peer.write_all(&bytes).unwrap();
        let found = terminate(&net, &peer).cause;
        assert!(cause.map_or_else(|| found.is_protection(), |cause| found == cause), "{found:?}");
        peer.shutdown(Shutdown::Write).unwrap();
        assert_eq!(right.state(), QpState::Error);
        let events = net.guests[1].node.events.poll();
        assert_eq!(access, events.contains(&AsyncEvent::Qp(QpEvent::AccessError, right.cookie)), "{events:?}");
        net.expect_disconnect(1);
        assert_eq!(theirs.read(0, 4096), vec![0; 4096]);
    }
}

#[test]
fn a_peer_that_leaves_within_a_message() {
    for reset in [false, true] {
        let net = Net::new();
        let (mut peer, right) = establish(&net);
        let theirs = net.guests[1].node.buffer(4096);
        let remote = theirs.remote(0);
        let bytes = write_to(remote.rkey, remote.addr, &[9; 100]);
        peer.write_all(&bytes[..50]).unwrap();
        if reset {
            rustix::net::sockopt::set_socket_linger(&peer, Some(Duration::ZERO)).unwrap();
        }
        drop(peer);
        net.until("the error state", || right.state() == QpState::Error);
        net.expect_disconnect(1);
        assert_eq!(theirs.read(0, 100), vec![0; 100]);
    }
}

/// A peer that reads nothing holds up its own connection only, and what is kept for it is bounded.
#[test]
fn a_peer_that_reads_nothing() {
    use pvrdma_verbs_types::WcStatus;
    let net = Net::new();
    let (mut peer, right) = establish(&net);
    // The first message of the initiator, behind which the responder may send.
    let first = write_to(1, 0, &[]);
    peer.write_all(&first).unwrap();
    let mine = net.guests[1].node.buffer(1 << 20);
    for id in 0..60 {
        right.post(id, crate::world::SEND, &[mine.all()]);
    }
    right.qp.notify_send();
    net.run();
    assert!(right.scq.total() < 60);
    let other = net.connect();
    other.right.recv(1, &[]);
    other.left.send(1, &[]);
    net.wait(&other.right.rcq, 1);
    drop(peer);
    net.wait(&right.scq, 60);
    assert_eq!(right.scq.poll().last().unwrap().status, WcStatus::Flushed);
}
