//! Captured exchanges of Linux: every message is decoded and encoded to the same bytes, and both roles replay the
//! exchange.

#![expect(clippy::unwrap_used, clippy::panic, clippy::disallowed_types, reason = "a test, which reads files")]

use std::fs::File;
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use pcap_file::pcap::PcapReader;
use pvrdma_ib_cm::{
    Connection, Event, IpAddresses, MAD_LEN, Mad, Message, PORT_SPACE_TCP, RejectReason, Req, State,
    is_connection_manager,
};

const NOW: Duration = Duration::from_secs(1);

/// All datagrams of the connection manager in a capture.
fn datagrams(name: &str) -> Vec<Vec<u8>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../roce/tests/captures").join(name);
    let mut reader = PcapReader::new(File::open(path).unwrap()).unwrap();
    let mut found = Vec::new();
    while let Some(packet) = reader.next_packet() {
        let frame = packet.unwrap().data.into_owned();
        // The datagram follows BTH and DETH, and the ICRC follows it.
        let start = frame.len().saturating_sub(MAD_LEN + 4);
        let mad = &frame[start..frame.len().saturating_sub(4)];
        if is_connection_manager(mad) {
            found.push(mad.to_vec());
        }
    }
    found
}

fn mads(name: &str) -> Vec<Mad> {
    datagrams(name).iter().map(|bytes| Mad::parse(bytes).unwrap()).collect()
}

#[test]
fn every_captured_message_is_encoded_as_it_was() {
    for (name, count) in
        [("rping_v4.pcap", 5), ("rping_v6ll.pcap", 5), ("ucmatose_v4.pcap", 10), ("cm_reject_no_listener.pcap", 2)]
    {
        let datagrams = datagrams(name);
        assert_eq!(datagrams.len(), count, "{name}");
        for bytes in datagrams {
            assert_eq!(Mad::parse(&bytes).unwrap().to_bytes().to_vec(), bytes, "{name}");
        }
    }
}

fn request(mad: &Mad) -> &Req {
    match &mad.message {
        Message::Req(req) => req,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_request_names_both_ends_of_a_connection() {
    let mads = mads("rping_v4.pcap");
    let req = request(&mads[0]);
    assert_eq!((req.service_id, req.qpn.get(), req.starting_psn.get()), (PORT_SPACE_TCP + 7174, 0x225, 0x15_da50));
    assert_eq!((req.responder_resources, req.initiator_depth, req.transport), (1, 1, 0));
    assert_eq!((req.remote_response_timeout, req.local_response_timeout, req.max_cm_retries), (20, 20, 15));
    assert_eq!((req.retry_count, req.rnr_retry, req.path_mtu, req.pkey), (7, 7, 5, 0xffff));
    let path = req.primary;
    assert_eq!((path.flow_label, path.hop_limit, path.subnet_local, path.ack_timeout), (0x2_96ac, 64, false, 17));
    let addresses = IpAddresses::from_bytes(req.private_data.first_chunk().unwrap()).unwrap();
    let [source, destination]: [IpAddr; 2] = [[192, 168, 77, 12].into(), [192, 168, 77, 11].into()];
    assert_eq!(addresses, IpAddresses { source, source_port: 0x989a, destination });
    assert_eq!((path.local_gid, path.remote_gid), (source.into(), destination.into()));
    assert_eq!(addresses.to_bytes().as_ref(), req.private_data.first_chunk());
}

#[test]
fn the_exchange_of_rping_in_both_roles() {
    for name in ["rping_v4.pcap", "rping_v6ll.pcap"] {
        let [req, rep, rtu, dreq, drep] = <[Mad; 5]>::try_from(mads(name)).unwrap();
        let Message::Rep(accepted) = &rep.message else { panic!("{rep:?}") };

        // As the client.
        let mut client = Connection::outgoing(NOW, req.transaction, request(&req).clone());
        assert_eq!(client.poll_transmit(), Some(req.to_bytes()));
        assert_eq!(client.handle_message(NOW, &rep), Some(Event::Accepted(Box::new(accepted.clone()))));
        client.confirm();
        assert_eq!(client.poll_transmit(), Some(rtu.to_bytes()));
        client.disconnect(NOW);
        assert_eq!(client.poll_transmit(), Some(dreq.to_bytes()));
        client.handle_message(NOW, &drep);
        assert_eq!(client.state(), State::TimeWait);

        // As the server.
        let mut server = Connection::incoming(NOW, accepted.local_id, req.transaction, request(&req).clone());
        server.accept(NOW, accepted.clone());
        assert_eq!(server.poll_transmit(), Some(rep.to_bytes()));
        assert_eq!(server.handle_message(NOW, &rtu), Some(Event::Established));
        assert_eq!(server.handle_message(NOW, &dreq), Some(Event::Disconnected));
        assert_eq!(server.poll_transmit(), Some(drep.to_bytes()));
    }
}

#[test]
fn a_host_without_a_listener_rejects_like_linux() {
    let [req, rej] = <[Mad; 2]>::try_from(mads("cm_reject_no_listener.pcap")).unwrap();
    let mut server = Connection::incoming(NOW, 5, req.transaction, request(&req).clone());
    server.reject(NOW, RejectReason::INVALID_SERVICE_ID, &[]);
    assert_eq!(server.poll_transmit(), Some(rej.to_bytes()));
    let mut client = Connection::outgoing(NOW, req.transaction, request(&req).clone());
    let event = client.handle_message(NOW, &rej);
    assert!(matches!(event, Some(Event::Rejected(rejected)) if rejected.reason == RejectReason::INVALID_SERVICE_ID));
}
