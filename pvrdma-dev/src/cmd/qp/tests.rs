//! Queue pair commands, through registers.

use crate::abi::cmd::*;
use crate::abi::layout::GuestLayout;
use crate::config::DeviceConfig;
use crate::limits::Limits;
use crate::testing::typed::TypedDriver;
use crate::testing::{CommandError, ProbeOptions};

/// Conformance 21, 25: queue pairs.
#[test]
fn queue_pairs() {
    let guest = TypedDriver::up();
    let (one, other) = (guest.open(1), guest.open(2));
    let (pd, cq) = (guest.create_pd(one), guest.create_cq(one));
    let (foreign_cq, foreign_srq) = (guest.create_cq(other), guest.create_srq(guest.create_pd(other)));
    let srq = guest.create_srq(pd);
    let good = guest.qp_request(qp_type::RC, pd, cq);
    let extents = guest.device.status().kept.used_bytes;
    for bad in [
        CreateQp { qp_type: 0, ..good },
        CreateQp { qp_type: 3, ..good },
        CreateQp { qp_type: qp_type::GSI, ..good },
        CreateQp { send_cq_handle: 99, ..good },
        CreateQp { recv_cq_handle: 99, ..good },
        CreateQp { send_cq_handle: foreign_cq, ..good },
        CreateQp { recv_cq_handle: foreign_cq, ..good },
        CreateQp { is_srq: 1, srq_handle: foreign_srq, ..good },
        CreateQp { is_srq: 1, srq_handle: 99, ..good },
        CreateQp { max_send_wr: 0, ..good },
        CreateQp { max_send_wr: 100, ..good },
        CreateQp { max_send_wr: 256, ..good },
        CreateQp { max_send_wr: 1 << 31, ..good },
        CreateQp { max_recv_wr: 0, ..good },
        CreateQp { max_recv_wr: 3, ..good },
        CreateQp { max_recv_wr: 256, ..good },
        CreateQp { max_send_sge: 4, ..good },
        CreateQp { max_send_sge: 17, ..good },
        CreateQp { max_send_sge: u32::MAX, ..good },
        CreateQp { max_recv_sge: 2, ..good },
        CreateQp { max_recv_sge: u32::MAX, ..good },
        CreateQp { total_chunks: 0, ..good },
        CreateQp { total_chunks: 5, ..good },
        CreateQp { send_chunks: 0, ..good },
        CreateQp { send_chunks: 3, ..good },
        CreateQp { send_chunks: 5, ..good },
        CreateQp { send_chunks: u16::MAX, ..good },
        CreateQp { pdir_dma: 0, ..good },
    ] {
        assert!(guest.run(Opcode::CREATE_QP, &bad).is_err(), "{bad:x?}");
    }
    guest.hca.refuse_next();
    assert!(guest.run(Opcode::CREATE_QP, &good).is_err());
    assert_eq!((guest.device.status().objects.qps, guest.device.status().kept.used_bytes), (0, extents));

    guest.hca.take_calls();
    let response: CreateQpRespV2 = guest.ok(Opcode::CREATE_QP, &CreateQp { sq_sig_all: 1, ..good });
    assert_eq!((response.qp_handle, response.qpn, response.max_send_wr), (2, 0x1_0002, 128));
    let shared = CreateQp { is_srq: 1, srq_handle: srq, total_chunks: 5, max_recv_wr: 77, ..good };
    guest.run(Opcode::CREATE_QP, &shared).unwrap();
    assert_eq!(
        guest.hca.take_calls(),
        ["Rc QP 2 0x010002, own receives: true, all: true", "Rc QP 3 0x010003, own receives: false, all: false"]
    );
}

/// Conformance 25, 74: there is one general services QP, which belongs to the kernel and has QPN 1.
#[test]
fn the_general_services_queue_pair() {
    for version in 17..=20 {
        let guest = TypedDriver::version(version);
        let request = guest.qp_request(qp_type::GSI, guest.create_pd(0), guest.create_cq(0));
        let response = guest.run(Opcode::CREATE_QP, &request).unwrap();
        let (qpn, handle) = if version == 20 {
            let response = CreateQpRespV2::decode(&response);
            (response.qpn, response.qp_handle)
        } else {
            let qpn = CreateQpResp::decode(&response).qpn;
            (qpn, qpn)
        };
        assert_eq!(qpn, 1);
        assert!(guest.run(Opcode::CREATE_QP, &request).is_err(), "a second one");
        guest.run(Opcode::DESTROY_QP, &DestroyQp { qp_handle: handle }).unwrap();
        guest.run(Opcode::CREATE_QP, &request).unwrap();
    }
}

/// Conformance 25, 26: before version 20 the QPN equals the handle; from then on it also contains the round.
#[test]
fn numbers_of_queue_pairs() {
    for version in [19, 20] {
        let limits = Limits { verbs: Limits::default().verbs.with_max_qp(5), ..Limits::default() };
        let guest = TypedDriver::on(DeviceConfig { version, limits, ..TypedDriver::config() });
        let request = guest.qp_request(qp_type::RC, guest.create_pd(0), guest.create_cq(0));
        let numbers: Vec<u32> = (0..7)
            .map(|_| {
                let response = guest.run(Opcode::CREATE_QP, &request).unwrap();
                let qpn = CreateQpResp::decode(&response).qpn;
                guest.run(Opcode::DESTROY_QP, &DestroyQp { qp_handle: qpn & 0xffff }).unwrap();
                qpn
            })
            .collect();
        if version == 20 {
            // The handshake counts as a round, so that QPNs of the previous driver are not reused immediately.
            assert_eq!(numbers, [0x1_0002, 0x1_0003, 0x1_0004, 0x2_0002, 0x2_0003, 0x2_0004, 0x3_0002]);
        } else {
            assert_eq!(numbers, [2, 3, 4, 2, 3, 4, 2]);
        }
        for _ in 0..3 {
            guest.run(Opcode::CREATE_QP, &request).unwrap();
        }
        assert!(guest.run(Opcode::CREATE_QP, &request).is_err(), "the table is full");
    }
}

/// With an old driver on a new device, the older version applies.
#[test]
fn the_response_follows_the_older_version() {
    let options = ProbeOptions { driver_version: 18, ..ProbeOptions::default() };
    let guest = TypedDriver::probe_with(TypedDriver::config(), options);
    let request = guest.qp_request(qp_type::UD, guest.create_pd(0), guest.create_cq(0));
    let response: CreateQpResp = guest.ok(Opcode::CREATE_QP, &request);
    assert_eq!((response.qpn, response.max_send_wr), (2, 128));
}

/// Conformance 22, 23, 30.
#[test]
fn changing_and_querying_a_queue_pair() {
    let guest = TypedDriver::up();
    let (qp_handle, _) = guest.create_qp(guest.create_pd(0), guest.create_cq(0));
    let modify = |attr_mask, attrs| match guest.run(Opcode::MODIFY_QP, &ModifyQp { qp_handle, attr_mask, attrs }) {
        Ok(_) => 0,
        Err(CommandError::Failed(err)) => err,
        Err(other) => panic!("{other}"),
    };
    let query = || guest.ok::<_, QueryQpResp>(Opcode::QUERY_QP, &QueryQp { qp_handle }).attrs;
    let garbage = QpAttr { path_mtu: 77, pkey_index: 9, timeout: 0xff, retry_cnt: 0xff, ..Default::default() };

    assert_eq!(modify(1, QpAttr { qp_state: 3, ..garbage }), 22, "RESET to RTS");
    assert_eq!(modify(0x39, QpAttr { qp_state: 1, port_num: 1, ..garbage }), 22, "pkey_index is garbage");
    assert_eq!(query().qp_state, 0);
    let init = QpAttr { qp_state: 1, port_num: 1, pkey_index: 0, qp_access_flags: 0xe, ..garbage };
    assert_eq!(modify(0x39, init), 0);
    assert_eq!(modify(1, QpAttr { qp_state: 3, ..garbage }), 22);
    let attrs = query();
    assert_eq!((attrs.qp_state, attrs.cur_qp_state, attrs.port_num, attrs.qp_access_flags), (1, 1, 1, 0xe));
    assert_eq!((attrs.path_mtu, attrs.timeout), (3, 0), "defaults, not garbage");
    let cap = QpCap { max_send_wr: 128, max_recv_wr: 128, max_send_sge: 1, max_recv_sge: 1 };
    assert_eq!(attrs.cap, cap);
    let ah_attr = AhAttr {
        grh: Grh { dgid: Gid { raw: [7; 16] }, hop_limit: 64, ..Default::default() },
        ah_flags: 1,
        ..Default::default()
    };
    let rtr = QpAttr { qp_state: 2, path_mtu: 5, dest_qp_num: 0x1234, rq_psn: 0xff_ffff, ah_attr, ..garbage };
    assert_eq!(modify(0x12_9181, QpAttr { path_mtu: 6, ..rtr }), 22);
    assert_eq!(modify(0x12_9181, QpAttr { max_dest_rd_atomic: 17, ..rtr }), 22);
    assert_eq!(modify(0x12_9181, QpAttr { ah_attr: AhAttr::default(), ..rtr }), 22, "no global route");
    assert_eq!(modify(0x12_9181, rtr), 0);
    assert_eq!((query().ah_attr.grh.dgid.raw, query().rq_psn, query().dest_qp_num), ([7; 16], 0xff_ffff, 0x1234));
    assert_eq!(modify(u32::MAX, QpAttr { qp_state: 6, ..garbage }), 0);
    assert_eq!(query().qp_state, 6);
    assert_eq!(modify(u32::MAX, QpAttr { qp_state: 0, ..garbage }), 0);
}
