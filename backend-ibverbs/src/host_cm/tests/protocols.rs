//! Adapters that do not speak RoCE.

use pvrdma_verbs::MrRequest;
use pvrdma_verbs::testing::{SEND, page_list};
use pvrdma_verbs_types::Access;

use super::*;
use crate::fake::{DLID, PKEY_INDEX, SERVICE_LEVEL};
use crate::sys::{LINK_LAYER_INFINIBAND, TRANSPORT_IWARP};

/// The state INIT, as the library's number.
const INIT: i32 = 1;

fn iwarp() -> Bench {
    Bench::on(TRANSPORT_IWARP, LINK_LAYER_ETHERNET, rules())
}

/// An iWARP peer has no QPN, and the kernel moves the QP.
#[test]
fn an_iwarp_connection_is_established_before_the_guest_moves_its_queue_pair() {
    let mut bench = iwarp();
    let end = init(&bench);
    let id = bench.connecting(qpn(&end));
    bench.calls();
    let short = ConnectionData { private_data: vec![8; 3], qpn: 0, ..answer() };
    bench.event(id, sys::ESTABLISHED, 0, short);
    let Message::Rep(rep) = bench.one() else { panic!("no REP") };
    assert!(rep.qpn.get() > 1 && rep.private_data[..4] == [8, 8, 8, 0]);
    to_rtr(&end, rep.qpn.get()).unwrap();
    to_rts(&end).unwrap();
    assert_eq!((end.state(), bench.backend.host.qp_state(qpn(&end))), (QpState::Rts, INIT));
    end.submit(1, SEND, &[]);
    bench.backend.host.wait_sends(qpn(&end), 1);
    bench.send(Message::Rtu(Rtu { local_id: GUEST_ID, remote_id: rep.local_id, private_data: [0; 224] }));
    assert_eq!((bench.calls(), bench.counter("cm_connections")), (vec![], 1));
}

#[test]
fn sends_wait_for_an_iwarp_peer_that_has_asked() {
    let mut bench = iwarp();
    let listener = bench.listener();
    bench.backend.host.cm_request(listener, "10.0.0.9:40000".parse().unwrap(), ConnectionData { qpn: 0, ..wish() });
    bench.run();
    let Message::Req(req) = bench.one() else { panic!("no REQ") };
    let (id, end) = (bench.backend.host.last_cm_id(), init(&bench));
    to_rtr(&end, req.qpn.get()).unwrap();
    to_rts(&end).unwrap();
    end.submit(1, SEND, &[]);
    let rep = Rep { local_id: 5, remote_id: req.local_id, qpn: Qpn::new(qpn(&end)), ..Rep::default() };
    bench.send(Message::Rep(rep));
    assert_eq!(bench.backend.host.sends(qpn(&end)).len(), 0);
    bench.event(id, sys::ESTABLISHED, 0, ConnectionData::default());
    assert_eq!(bench.backend.host.sends(qpn(&end)).len(), 1);
}

#[test]
fn what_iwarp_does_not_have_is_refused() {
    let bench = iwarp();
    let end = init(&bench);
    // No connection of the host fits.
    assert!(matches!(to_rtr(&end, PEER_QPN), Err(VerbsError::Unsupported(_))));
    let datagrams = bench.node.qp_on(QpType::Ud, None, [None, None], |_| {});
    assert!(matches!(datagrams, Err(VerbsError::Unsupported(_))));
}

/// The attributes of the host have LID, service level and partition; the guest's have none of these.
#[test]
fn an_infiniband_path_is_the_hosts() {
    let mut bench = Bench::on(TRANSPORT_IB, LINK_LAYER_INFINIBAND, rules());
    let end = init(&bench);
    bench.connected(&end);
    let (rtr, mask) = bench.backend.host.modifications(qpn(&end))[1];
    assert_eq!((rtr.ah_attr.dlid, rtr.ah_attr.sl, rtr.ah_attr.is_global), (DLID, SERVICE_LEVEL, 0));
    assert_eq!((rtr.pkey_index, mask & 0x80), (PKEY_INDEX, 0x80));
}

/// `siw` registers memory at the addresses of the process, whatever addresses it is told. The guest's own requests are
/// translated; those of peers cannot be.
#[test]
fn an_adapter_that_ignores_addresses_gets_those_of_the_process() {
    const SIW: u32 = 0x62_6d74;
    let backend = FakeBackend::that_speaks(TRANSPORT_IWARP, LINK_LAYER_ETHERNET, |config| config.cm = CmMode::Host);
    backend.host.made_by(SIW);
    let node = Node::with_rules(&backend, 1, 8 << 20, rules());
    let local = node.buffer_at(100, 5000, Access::LOCAL_WRITE);
    let end = node.qp(QpType::Rc);
    end.change(QpState::Init, End::toward(&end), M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS);
    end.recv(1, &[local.sge(40, 64)]);
    let receives = backend.host.receives(qpn(&end));
    let sge = receives[0].sges[0];
    let region = backend.host.region(&sge).unwrap();
    // A region that begins with the buffer, at the same address for both.
    assert_eq!((region.iova, sge.addr), (region.start as u64, region.start as u64 + 40));
    let pages = node.pages(1);
    let request = MrRequest::User {
        start: 0x7f00_0000_0000,
        length: 4096,
        pages: page_list(&pages),
        access: Access::REMOTE_READ,
    };
    let remote = node.hca.register_mr(&node.pd, request);
    assert!(matches!(remote, Err(VerbsError::Unsupported(_))));
}

/// Without IP addresses in the adapter's table, only listed addresses are the guest's own on the host.
#[test]
fn an_address_that_is_not_listed_is_no_source_and_has_no_listener() {
    let rules = Rules::default().with_addresses(AddressRule::ANY).with_listen(vec![PORT]);
    let mut bench = Bench::on(TRANSPORT_IWARP, LINK_LAYER_ETHERNET, rules);
    let end = init(&bench);
    assert_eq!(bench.calls(), []);
    bench.send(Message::Req(Box::new(request(qpn(&end)))));
    assert!(matches!(bench.calls()[..], [CmCall::ResolveAddress { from: None, .. }]));
}
