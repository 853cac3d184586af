//! Peer rules.

use pvrdma_verbs::{
    AddressRule, Hca, MemoryRegion, MrRequest, Peers, QueuePair, Rules, VerbsError,
    testing::{End, Node, gid},
};
use pvrdma_verbs_types::{
    Access, Gid, GidType, QpAttrMask as M, QpAttrs, QpState, QpType, Qpn, SendData, SendOp, Sge, UdDestination,
    WcStatus,
};

use super::{counter, qpn};
use crate::fake::FakeBackend;
use crate::hca::IbvHca;

/// QP state, as the library's number.
const INIT: i32 = 1;

fn peers(text: &str) -> Peers {
    Peers(text.split_whitespace().map(|prefix| prefix.parse().unwrap()).collect())
}

/// Returns the rules of a device.
fn own(text: &str) -> Rules {
    Rules::default().with_peers(peers(text))
}

/// Creates a device with the GID of its number.
fn ruled(backend: &FakeBackend, number: u8, rules: Rules) -> Node<IbvHca> {
    let node = Node::with_rules(backend, number, 8 << 20, rules.with_addresses(AddressRule::ANY));
    node.hca.bind_gid(0, gid(number), GidType::RoceV2).unwrap();
    node
}

/// Moves a new QP to RTR, with this peer address. Returns `false` if the rules refuse the peer.
fn connects(backend: &FakeBackend, node: &Node<IbvHca>, dgid: Gid) -> bool {
    let end = node.qp(QpType::Rc);
    let mut attrs = QpAttrs { state: QpState::Rtr, ..End::toward(&end) };
    attrs.av.dgid = dgid;
    end.change(QpState::Init, attrs, M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS);
    let mask = M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN | M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER;
    let result = end.qp.modify(&attrs, mask | M::STATE);
    let refused = matches!(result, Err(VerbsError::NotAllowed(_)));
    assert!(refused || result.is_ok(), "{result:?}");
    assert_eq!((backend.host.qp_state(qpn(&end)) == INIT, end.state() == QpState::Init), (refused, refused));
    !refused
}

/// Regression: the configuration refused `peers` with this adapter, because the rules were not checked.
#[test]
fn connections_are_made_with_peers_only() {
    for (rules, allowed) in [
        (Rules::default(), [true; 4]),
        // Itself, a guest of this process, another one, a host outside.
        (own("10.0.0.2"), [true, true, false, false]),
        (own("10.0.0.2 10.0.0.99"), [true, true, false, true]),
        (own("fd00::/8"), [true, false, false, false]),
        (own("10.0.0.0/24").with_network_peers(peers("10.0.0.99/32")), [true, false, false, true]),
    ] {
        let backend = FakeBackend::new();
        let node = ruled(&backend, 1, rules);
        let others = [2, 3].map(|number| ruled(&backend, number, Rules::default()));
        let reached = [1, 2, 3, 99].map(|number| connects(&backend, &node, gid(number)));
        assert_eq!(reached, allowed);
        let refused = allowed.iter().filter(|allowed| !**allowed).count();
        assert_eq!(counter(&node, "peers_refused"), refused as u64);
        // The same rule applies to the other end of a connection.
        for (other, allowed) in others.iter().zip([allowed[1], allowed[2]]) {
            assert_eq!(connects(&backend, other, gid(1)), allowed);
            assert_eq!(counter(other, "peers_refused"), u64::from(!allowed));
        }
    }
}

/// The rule also applies when the path is changed later.
#[test]
fn a_connection_does_not_move_to_another_device() {
    let backend = FakeBackend::new();
    let node = ruled(&backend, 1, own("10.0.0.2"));
    let end = node.qp(QpType::Rc);
    end.connect(&end, |attrs| attrs.av.dgid = gid(2));
    end.change(QpState::Sqd, QpAttrs::default(), M::empty());
    for (number, allowed) in [(2, true), (3, false)] {
        let mut attrs = QpAttrs { state: QpState::Sqd, ..End::toward(&end) };
        attrs.av.dgid = gid(number);
        assert_eq!(end.qp.modify(&attrs, M::AV).is_ok(), allowed);
    }
    assert_eq!(counter(&node, "peers_refused"), 1);
}

/// A datagram of any sender is in the guest's memory before the backend is notified of it.
#[test]
fn a_device_with_peers_has_no_datagram_queue_pairs() {
    let backend = FakeBackend::new();
    for (rules, allowed) in [
        (Rules::default(), true),
        (own("0.0.0.0/0"), false),
        (Rules::default().with_network_peers(peers("fd00::1")), false),
    ] {
        let node = ruled(&backend, 1, rules);
        let made = node.qp_on(QpType::Ud, None, [None, None], |_| {});
        assert_eq!((made.is_ok(), counter(&node, "peers_refused")), (allowed, u64::from(!allowed)));
        assert!(allowed || matches!(made, Err(VerbsError::Unsupported(_))));
        assert!(node.qp_on(QpType::Gsi, None, [None, None], |_| {}).is_ok());
    }
}

#[test]
fn management_datagrams_are_for_peers_only() {
    for (rules, delivered) in [
        ([Rules::default(), Rules::default()], true),
        ([own("10.0.0.2"), own("10.0.0.1")], true),
        ([own("10.0.0.2"), own("10.0.0.3")], false),
        ([own("10.0.0.3"), own("10.0.0.1")], false),
    ] {
        let backend = FakeBackend::new();
        let mut number = 0;
        let [a, b] = rules.map(|rules| {
            number += 1;
            ruled(&backend, number, rules)
        });
        let dma = |node: &Node<IbvHca>| {
            let key = node.hca.register_mr(&node.pd, MrRequest::Dma { access: Access::LOCAL_WRITE }).unwrap();
            (Sge { addr: node.pages(1)[0], length: 256, lkey: key.lkey() }, key)
        };
        let ((from, _from), (to, _to)) = (dma(&a), dma(&b));
        let (left, right) = (a.qp(QpType::Gsi), b.qp(QpType::Gsi));
        for end in [&left, &right] {
            end.start_datagrams(0x8001_0000);
        }
        right.recv(9, &[Sge { length: 296, ..to }]);
        let to = UdDestination { qpn: Qpn::GSI, dgid: gid(2), hop_limit: 64, ..UdDestination::default() };
        left.submit(1, SendOp::Send { data: SendData::None, to: Some(to) }, &[from]);
        // The datagram is dropped, like a lost one.
        assert_eq!(left.scq.one().status, WcStatus::Success);
        assert_eq!(right.rcq.poll().len(), usize::from(delivered));
        assert_eq!(
            (counter(&a, "gsi_delivered"), counter(&a, "peers_refused")),
            (delivered.into(), (!delivered).into())
        );
    }
}
