//! The thread of a device, behind the guest's QP 1.

use pvrdma_verbs::{MemoryRegion, MrRequest};
use pvrdma_verbs_types::{Access, SendData, SendOp, Sge, WcStatus};

use super::*;

const QKEY: u32 = 0x8001_0000;

#[test]
fn the_guests_datagrams_reach_the_host_and_the_answer_its_receives() {
    let backend = FakeBackend::with(|config| config.cm = CmMode::Host);
    backend.set_host_gid(&HostGid { index: 1, gid: gid(1), kind: GidType::RoceV2 });
    let node = Node::with_rules(&backend, 1, 8 << 20, rules());
    node.hca.bind_gid(0, gid(1), GidType::RoceV2).unwrap();
    let before = backend.host.objects();
    let (key, end) =
        (node.hca.register_mr(&node.pd, MrRequest::Dma { access: Access::LOCAL_WRITE }), node.qp(QpType::Rc));
    let (key, page) = (key.unwrap(), node.pages(1)[0]);
    let manager = backend.enter(|| node.qp(QpType::Gsi));
    manager.start_datagrams(QKEY);
    assert!(matches!(backend.host.wait_cm_calls(1)[..], [(_, CmCall::Listen(_))]));

    manager.recv(9, &[Sge { addr: page + 1024, length: 296, lkey: key.lkey() }]);
    let mad = Mad { transaction: TRANSACTION, message: Message::Req(Box::new(request(qpn(&end)))) };
    node.memory.view().write(page, &mad.to_bytes()).unwrap();
    let to = UdDestination { qpn: Qpn::GSI, dgid: gid(9), hop_limit: 64, ..UdDestination::default() };
    let sge = Sge { addr: page, length: 256, lkey: key.lkey() };
    manager.submit(1, SendOp::Send { data: SendData::None, to: Some(to) }, &[sge]);
    assert_eq!(manager.scq.one().status, WcStatus::Success);
    let calls = backend.host.wait_cm_calls(1);
    let [(id, CmCall::ResolveAddress { .. })] = calls[..] else { panic!("{calls:?}") };
    backend.host.cm_event(id, sys::ADDR_ERROR, -110, ConnectionData::default());
    assert_eq!(manager.rcq.one().status, WcStatus::Success);
    let mut bytes = [0; 256];
    node.memory.view().read(page + 1024 + 40, &mut bytes).unwrap();
    assert!(matches!(Mad::parse(&bytes).unwrap().message, Message::Rej(rej) if rej.remote_id == GUEST_ID));

    drop(manager);
    assert_eq!(backend.host.cm_ids(), 0);
    drop((end, key));
    assert_eq!(backend.host.objects(), before);
}
