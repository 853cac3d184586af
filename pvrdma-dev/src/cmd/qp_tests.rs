//! Queue pair commands through the register face.

use std::sync::atomic::Ordering;

use crate::abi::cmd::*;
use crate::abi::dsr::SharedRegion;
use crate::abi::layout::GuestLayout;
use crate::abi::regs::offset;
use crate::config::{DeviceConfig, Limits};
use crate::test_rig::{Rig, config};

/// Conformance 21, 25: queue pairs.
#[test]
fn queue_pairs() {
    let rig = Rig::up();
    let (one, other) = (rig.open(1), rig.open(2));
    let (pd, cq) = (rig.create_pd(one), rig.create_cq(one));
    let (foreign_cq, foreign_srq) = (rig.create_cq(other), rig.create_srq(rig.create_pd(other)));
    let srq = rig.create_srq(pd);
    let good = rig.qp_request(qp_type::RC, pd, cq);
    let extents = rig.device.status().page_list_extents;
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
        assert!(rig.run(Opcode::CREATE_QP, &bad).is_err(), "{bad:x?}");
    }
    rig.books.refuse.store(true, Ordering::Relaxed);
    assert!(rig.run(Opcode::CREATE_QP, &good).is_err());
    assert_eq!((rig.device.status().objects.qps, rig.device.status().page_list_extents), (0, extents));

    rig.books.take();
    let response: CreateQpRespV2 = rig.ok(Opcode::CREATE_QP, &CreateQp { sq_sig_all: 1, ..good });
    assert_eq!((response.qp_handle, response.qpn, response.max_send_wr), (2, 0x1_0002, 128));
    let shared = CreateQp { is_srq: 1, srq_handle: srq, total_chunks: 5, max_recv_wr: 77, ..good };
    rig.run(Opcode::CREATE_QP, &shared).unwrap();
    assert_eq!(
        rig.books.take(),
        ["Rc QP 2 0x010002, own receives: true, all: true", "Rc QP 3 0x010003, own receives: false, all: false"]
    );
}

/// Conformance 25, 74: one general services QP, the kernel's, with number 1.
#[test]
fn the_general_services_queue_pair() {
    for version in 17..=20 {
        let rig = Rig::version(version);
        let request = rig.qp_request(qp_type::GSI, rig.create_pd(0), rig.create_cq(0));
        let response = rig.run(Opcode::CREATE_QP, &request).unwrap();
        let (qpn, handle) = if version == 20 {
            let response = CreateQpRespV2::decode(&response);
            (response.qpn, response.qp_handle)
        } else {
            let qpn = CreateQpResp::decode(&response).qpn;
            (qpn, qpn)
        };
        assert_eq!(qpn, 1);
        assert!(rig.run(Opcode::CREATE_QP, &request).is_err(), "a second one");
        rig.run(Opcode::DESTROY_QP, &DestroyQp { qp_handle: handle }).unwrap();
        rig.run(Opcode::CREATE_QP, &request).unwrap();
    }
}

/// Conformance 25, 26: before version 20 the number is the handle; from then on it also tells the rounds apart.
#[test]
fn numbers_of_queue_pairs() {
    for version in [19, 20] {
        let limits = Limits { max_qp: 5, ..Limits::default() };
        let rig = Rig::active(DeviceConfig { version, limits, ..config() });
        let request = rig.qp_request(qp_type::RC, rig.create_pd(0), rig.create_cq(0));
        let numbers: Vec<u32> = (0..7)
            .map(|_| {
                let response = rig.run(Opcode::CREATE_QP, &request).unwrap();
                let qpn = CreateQpResp::decode(&response).qpn;
                rig.run(Opcode::DESTROY_QP, &DestroyQp { qp_handle: qpn & 0xffff }).unwrap();
                qpn
            })
            .collect();
        if version == 20 {
            // The handshake counts as a round, so that the numbers of the driver before are not used at once.
            assert_eq!(numbers, [0x1_0002, 0x1_0003, 0x1_0004, 0x2_0002, 0x2_0003, 0x2_0004, 0x3_0002]);
        } else {
            assert_eq!(numbers, [2, 3, 4, 2, 3, 4, 2]);
        }
        for _ in 0..3 {
            rig.run(Opcode::CREATE_QP, &request).unwrap();
        }
        assert!(rig.run(Opcode::CREATE_QP, &request).is_err(), "the table is full");
    }
}

/// An old driver on a new device: the older of both versions counts.
#[test]
fn the_response_follows_the_older_version() {
    let rig = Rig::enabled(config());
    let region = SharedRegion { driver_version: 18, ..rig.region() };
    rig.show(&region);
    rig.write(offset::IMR, 0);
    assert_eq!(rig.ctl(0), 0);
    let request = rig.qp_request(qp_type::UD, rig.create_pd(0), rig.create_cq(0));
    let response: CreateQpResp = rig.ok(Opcode::CREATE_QP, &request);
    assert_eq!((response.qpn, response.max_send_wr), (2, 128));
}

/// Conformance 22, 23, 30.
#[test]
fn changing_and_querying_a_queue_pair() {
    let rig = Rig::up();
    let (qp_handle, _) = rig.create_qp(rig.create_pd(0), rig.create_cq(0));
    let modify = |attr_mask, attrs| {
        let response = rig.run(Opcode::MODIFY_QP, &ModifyQp { qp_handle, attr_mask, attrs }).unwrap();
        ResponseHeader::decode(&response).err
    };
    let query = || rig.ok::<_, QueryQpResp>(Opcode::QUERY_QP, &QueryQp { qp_handle }).attrs;
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
