//! Registrations with the host.

use pvrdma_pages::{PAGE_SIZE, PageListBuilder};
use pvrdma_verbs::{
    AddressRule, Hca, MemoryRegion, MrRequest, OtherAddresses, Rules, VerbsError,
    testing::{ALL, Node, SEND, gid},
};
use pvrdma_verbs_types::{Access, FastRegister, Gid, GidType, Invalidate, QpState, SendData, SendOp, Sge, WcStatus};

use super::{SUCCESS, connected, counter, qpn};
use crate::fake::FakeBackend;
use crate::gid::HostGid;
use crate::hca::IbvHca;
use crate::sys::{WR_BIND_MW, WR_LOCAL_INV, WR_SEND};

#[test]
fn unmapped_memory_is_deregistered_before_the_guest_continues() {
    let backend = FakeBackend::new();
    let (end, node) = connected(&backend);
    let (gone, kept) = (node.buffer(64), node.buffer(64));
    let dma = node.hca.register_mr(&node.pd, MrRequest::Dma { access: Access::LOCAL_WRITE }).unwrap();
    let page = node.pages(1)[0];
    // The anchor of the key for bus addresses, and the range that is registered on first use.
    assert_eq!(backend.host.regions(), 3);
    end.submit(1, SEND, &[Sge { addr: page, length: 8, lkey: dma.lkey() }]);
    assert_eq!(backend.host.regions(), 4);
    assert_ne!(backend.host.sends(qpn(&end))[0].lkey(), dma.lkey());
    node.memory.set_enabled(false);
    assert_eq!((backend.host.regions(), counter(&node, "regions_revoked")), (1, 3));
    node.memory.set_enabled(true);
    backend.host.complete_send(qpn(&end), SUCCESS);
    end.scq.one();
    // A region of a process stays dead; bus addresses are registered again.
    end.submit(2, SEND, &[Sge { addr: page, length: 8, lkey: dma.lkey() }]);
    assert_eq!(backend.host.regions(), 2);
    backend.host.complete_send(qpn(&end), SUCCESS);
    end.scq.one();
    end.submit(3, SEND, &[gone.all()]);
    assert_eq!(end.scq.statuses(1), [(3, WcStatus::LocalProtection)]);
    drop((kept, dma));
    assert_eq!((backend.host.regions(), end.state()), (0, QpState::Error));
}

#[test]
fn a_device_registers_no_more_than_it_may() {
    let backend = FakeBackend::with(|config| config.max_pinned = 3 * PAGE_SIZE);
    let node = Node::new(&backend, 1);
    let register = |pages: u64| {
        let mut list = PageListBuilder::default();
        node.pages(pages).into_iter().for_each(|page| list.push(page).unwrap());
        let request = MrRequest::User { start: 0, length: pages * PAGE_SIZE, pages: list.finish(), access: ALL };
        node.hca.register_mr(&node.pd, request)
    };
    let first = register(2).unwrap();
    assert!(matches!(register(2), Err(VerbsError::Exhausted("registered memory"))));
    // A refused registration does not count.
    backend.host.refuse_registration(true);
    assert!(matches!(register(1), Err(VerbsError::Host(_))));
    backend.host.refuse_registration(false);
    assert_eq!(counter(&node, "registered_bytes"), 2 * PAGE_SIZE);
    drop(first);
    assert!(register(3).is_ok());
    assert_eq!(counter(&node, "registered_bytes"), 0);
}

/// Returns a fast registration of one page under a new low byte of the region's key.
pub(super) fn fill(node: &Node<IbvHca>, key: u32) -> SendOp {
    let mut pages = PageListBuilder::default();
    pages.push(node.pages(1)[0]).unwrap();
    let request = FastRegister { key, iova: 0x9000, length: PAGE_SIZE, access: ALL, pages: Some(pages.finish()) };
    SendOp::FastRegister(Box::new(request))
}

#[test]
fn a_fast_registration_waits_for_the_invalidation_before_it() {
    let backend = FakeBackend::new();
    let (end, node) = connected(&backend);
    let region = node.hca.register_mr(&node.pd, MrRequest::FastRegister { max_pages: 4 }).unwrap();
    let key = |byte| region.rkey() | byte;
    let opcodes = || backend.host.sends(qpn(&end)).iter().map(|posted| posted.opcode).collect::<Vec<_>>();
    end.submit(1, fill(&node, key(1)), &[]);
    end.submit(2, SendOp::LocalInvalidate(Invalidate { key: key(1) }), &[]);
    end.submit(3, fill(&node, key(2)), &[]);
    end.submit(4, SEND, &[]);
    assert_eq!(opcodes(), [WR_BIND_MW, WR_LOCAL_INV]);
    assert_eq!(backend.host.regions(), 1);
    backend.host.complete_send(qpn(&end), SUCCESS);
    backend.host.complete_send(qpn(&end), SUCCESS);
    assert_eq!(end.scq.statuses(2), [(1, WcStatus::Success), (2, WcStatus::Success)]);
    // The thread that took the completion posts the waiting request.
    backend.host.wait_sends(qpn(&end), 2);
    assert_eq!(opcodes(), [WR_BIND_MW, WR_SEND]);
    // A filled region cannot be filled again.
    end.submit(5, fill(&node, key(3)), &[]);
    backend.host.complete_send(qpn(&end), SUCCESS);
    backend.host.complete_send(qpn(&end), SUCCESS);
    let (ok, refused) = (WcStatus::Success, WcStatus::LocalQpOperation);
    assert_eq!(end.scq.statuses(3), [(3, ok), (4, ok), (5, refused)]);
}

#[test]
fn a_fast_registration_that_fails_registers_nothing() {
    let backend = FakeBackend::new();
    let (end, node) = connected(&backend);
    let region = node.hca.register_mr(&node.pd, MrRequest::FastRegister { max_pages: 4 }).unwrap();
    end.submit(1, fill(&node, region.rkey() | 1), &[]);
    assert_eq!((backend.host.regions(), counter(&node, "fast_registrations")), (1, 1));
    // "Memory window bind": windows are not visible to the guest.
    backend.host.complete_send(qpn(&end), 6);
    assert_eq!(end.scq.statuses(1), [(1, WcStatus::LocalQpOperation)]);
    assert_eq!(backend.host.regions(), 0);
}

#[test]
fn a_guests_gid_is_the_hosts_own_entry_if_it_has_one() {
    let backend = FakeBackend::new();
    let own = HostGid { index: 3, gid: gid(1), kind: GidType::RoceV2 };
    backend.set_host_gid(&own);
    let (first, second) = (own_addresses(&backend, 1, &[1]), own_addresses(&backend, 2, &[1, 2]));
    let bound = |node: &Node<IbvHca>, index| node.hca.objects().adapter.gids.get(index);
    assert!(bound(&first, 0).is_some_and(|bound| bound.is_own() && bound.host == own));
    assert!(bound(&second, 0).is_some_and(|bound| !bound.is_own() && bound.host.gid == gid(250)));
    // A GID has one owner in the process, until it is released.
    assert!(matches!(second.hca.bind_gid(1, gid(1), GidType::RoceV2), Err(VerbsError::InUse("GID"))));
    first.hca.bind_gid(7, gid(1), GidType::RoceV2).unwrap();
    first.hca.unbind_gid(0);
    assert!(second.hca.bind_gid(1, gid(1), GidType::RoceV2).is_err());
    first.hca.unbind_gid(7);
    second.hca.bind_gid(1, gid(1), GidType::RoceV2).unwrap();
    assert!(matches!(second.hca.bind_gid(2, Gid::default(), GidType::RoceV2), Err(VerbsError::Invalid("GID"))));
    assert!(second.hca.bind_gid_in_vlan(2, gid(9), GidType::RoceV2, Some(5)).is_err());
}

/// Creates a device with the GID of its number, whose rules list the addresses with these numbers.
fn own_addresses(backend: &FakeBackend, number: u8, listed: &[u8]) -> Node<IbvHca> {
    let listed = listed.iter().map(|last| std::net::Ipv4Addr::new(10, 0, 0, *last).into()).collect();
    let addresses = AddressRule { others: OtherAddresses::Refuse, listed };
    let node = Node::with_rules(backend, number, 8 << 20, Rules::default().with_addresses(addresses));
    node.hca.bind_gid(0, gid(number), GidType::RoceV2).unwrap();
    node
}

/// Regression test: a guest that assigned the host's address to its interface sent as the host, and received the host's
/// messages.
#[test]
fn the_hosts_own_address_is_not_a_guests() {
    let backend = FakeBackend::new();
    backend.set_host_gid(&HostGid { index: 3, gid: gid(7), kind: GidType::RoceV2 });
    for addresses in [AddressRule::default(), AddressRule::ANY] {
        let node = Node::with_rules(&backend, 1, 8 << 20, Rules::default().with_addresses(addresses));
        // The GID used for guests is the host's own as well.
        for (count, own) in (1..).zip([7, 250]) {
            let refused = node.hca.bind_gid(0, gid(own), GidType::RoceV2).unwrap_err();
            assert!(matches!(refused, VerbsError::NotAllowed(_)), "{refused}");
            assert_eq!(counter(&node, "gids_refused"), count);
        }
        assert!(node.hca.objects().adapter.gids.get(0).is_none());
        node.hca.bind_gid(0, gid(8), GidType::RoceV2).unwrap();
    }
    let listed = own_addresses(&backend, 7, &[7]);
    assert!(listed.hca.objects().adapter.gids.get(0).is_some_and(|bound| bound.is_own()));
    assert!(listed.hca.bind_gid(1, gid(9), GidType::RoceV2).is_err(), "it is not listed");
}

#[test]
fn management_datagrams_stay_inside_the_process_without_a_way_out() {
    use pvrdma_verbs_types::{QpAttrMask as M, QpAttrs, QpType, Qpn, UdDestination};
    let backend = FakeBackend::new();
    let (a, b) = (Node::new(&backend, 1), Node::new(&backend, 2));
    let dma = |node: &Node<IbvHca>| {
        let key = node.hca.register_mr(&node.pd, MrRequest::Dma { access: Access::LOCAL_WRITE }).unwrap();
        (Sge { addr: node.pages(1)[0], length: 256, lkey: key.lkey() }, key)
    };
    let ((from, _from), (to, _to)) = (dma(&a), dma(&b));
    let (left, right) = (a.qp(QpType::Gsi), b.qp(QpType::Gsi));
    for end in [&left, &right] {
        let attrs = QpAttrs { qkey: 0x8001_0000, ..QpAttrs::default() };
        end.change(QpState::Init, attrs, M::PKEY_INDEX | M::QKEY);
        end.to(QpState::Rtr);
        end.change(QpState::Rts, attrs, M::SQ_PSN);
    }
    let to_guest = |number| {
        let to = UdDestination { qpn: Qpn::GSI, dgid: gid(number), hop_limit: 64, ..UdDestination::default() };
        SendOp::Send { data: SendData::None, to: Some(to) }
    };
    right.recv(9, &[Sge { length: 296, ..to }]);
    a.memory.view().write(from.addr, b"REQ").unwrap();
    left.submit(1, to_guest(2), &[from]);
    let got = right.rcq.one();
    assert_eq!((got.wr_id, got.status, got.byte_len, got.src_qpn), (9, WcStatus::Success, 296, Qpn::GSI));
    let mut start = [0; 3];
    b.memory.view().read(to.addr + 40, &mut start).unwrap();
    assert_eq!(&start, b"REQ");
    // First no receive is posted; then no device has the address.
    left.submit(2, to_guest(2), &[from]);
    left.submit(3, to_guest(77), &[from]);
    assert_eq!(left.scq.wait(3).iter().filter(|wc| wc.status == WcStatus::Success).count(), 3);
    assert_eq!((counter(&a, "gsi_delivered"), counter(&a, "gsi_dropped")), (1, 2));
    // A datagram that does not fit uses no receive, and the next one does.
    right.recv(10, &[Sge { length: 295, ..to }]);
    left.submit(4, to_guest(2), &[from]);
    left.submit(5, to_guest(2), &[Sge { length: 255, ..from }]);
    let got = right.rcq.one();
    assert_eq!((got.wr_id, got.status, got.byte_len), (10, WcStatus::Success, 295));
    assert_eq!((counter(&a, "gsi_delivered"), counter(&a, "gsi_dropped")), (2, 3));
}

/// Each piece of scattered memory is one of the process's 65,530 mappings: without a limit, two buffers of 128 MiB made
/// registration fail for all guests.
#[test]
fn pieces_of_scattered_memory_are_bounded_for_a_device() {
    let backend = FakeBackend::with(|config| config.max_mappings = 10);
    let (node, other) = (Node::new(&backend, 1), Node::new(&backend, 2));
    let scattered = |node: &Node<IbvHca>, pages: u64| {
        let mut list = PageListBuilder::default();
        node.pages(pages).into_iter().for_each(|page| list.push(page).unwrap());
        let request = MrRequest::User { start: 0, length: pages * PAGE_SIZE, pages: list.finish(), access: ALL };
        node.hca.register_mr(&node.pd, request)
    };
    let first = scattered(&node, 8).unwrap();
    let refused = scattered(&node, 3).unwrap_err().to_string();
    assert!(refused.contains("max_mappings"), "{refused}");
    // Memory in one piece needs no mapping, and other devices have limits of their own.
    let (_single, _others) = (scattered(&node, 1).unwrap(), scattered(&other, 10).unwrap());
    drop(first);
    scattered(&node, 10).unwrap();
}
