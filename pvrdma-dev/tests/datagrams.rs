//! Datagrams between two devices over the software adapter.
#![expect(clippy::unwrap_used, reason = "a panic fails the test")]

mod common;

use std::sync::Arc;

use common::{Process, gid};
use pvrdma_dev::{
    DeviceConfig,
    testing::{
        AddressHandle, Driver, GuestMemory, Qp, QpInit, RecvWr, SendWr, TestDevice, access, opcode, status, wc_flag,
        wc_opcode,
    },
};
use pvrdma_rxe::{Rxe, RxeConfig};
use pvrdma_verbs_types::{Gid, GidType, Sge};

const QKEY: u32 = 0x1111_1111;

fn pair(roce: GidType, gids: [Gid; 2]) -> [(TestDevice<Rxe>, Driver); 2] {
    let backend = Arc::new(Rxe::new(RxeConfig::default()).unwrap());
    let mut hosts = 1..;
    gids.map(|gid| {
        let config = DeviceConfig::new("ud").with_roce(roce);
        let test = TestDevice::of_host(hosts.next().unwrap(), &*backend, config, GuestMemory::new(32 << 20));
        let driver = test.driver();
        driver.bind_gid(0, gid).unwrap();
        (test, driver)
    })
}

fn ipv6(host: u8) -> Gid {
    let mut gid = Gid([0; 16]);
    gid.0[0] = 0xfe;
    gid.0[1] = 0x80;
    gid.0[15] = host;
    gid
}

/// Returns the Internet checksum of a header. Over a header with a correct checksum it is all ones.
fn checksum(header: &[u8]) -> u32 {
    let sum: u32 = header.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    (sum & 0xffff) + (sum >> 16)
}

/// Conformance 53, 59, 60, 61: SEND and SEND_WITH_IMM, with the 40 header bytes of each encapsulation.
#[test]
fn headers() {
    for (roce, gids, network) in [
        (GidType::RoceV1, [gid(1), gid(2)], 0),
        (GidType::RoceV1, [ipv6(1), ipv6(2)], 0),
        (GidType::RoceV2, [gid(1), gid(2)], 1),
        (GidType::RoceV2, [ipv6(1), ipv6(2)], 2),
    ] {
        for user in [true, false] {
            let [(_test_a, driver_a), (_test_b, driver_b)] = pair(roce, gids);
            let (mut a, mut b) = (Process::new(&driver_a, user, 64), Process::new(&driver_b, user, 64));
            let (mut sender, mut receiver) = (a.ud(), b.ud());
            sender.start_datagrams(QKEY).unwrap();
            receiver.start_datagrams(QKEY).unwrap();
            let (source, source_mr) = driver_a.registered_buffer(&a.pd, 4096, access::LOCAL_WRITE).unwrap();
            let (target, target_mr) = driver_b.registered_buffer(&b.pd, 8192, access::LOCAL_WRITE).unwrap();
            source.fill_pattern(3);
            receiver.post_recv(&[RecvWr::new(5, &[target.sge(&target_mr, 0, 40 + 1024)])]).unwrap();
            receiver.post_recv(&[RecvWr::new(6, &[target.sge(&target_mr, 4096, 40)])]).unwrap();
            let to = AddressHandle::new(a.pd.handle, gids[1]);
            let request = SendWr::datagram(1, &[source.sge(&source_mr, 0, 1024)], &to, receiver.qpn, QKEY);
            sender
                .post_send(&[request, SendWr::datagram(2, &[], &to, receiver.qpn, QKEY).immediate([1, 2, 3, 4])])
                .unwrap();
            for wr_id in [1, 2] {
                let cqe = a.cq.wait();
                assert_eq!((cqe.wr_id, cqe.status, cqe.opcode), (wr_id, status::SUCCESS, wc_opcode::SEND));
            }
            let cqe = b.cq.wait();
            assert_eq!((cqe.wr_id, cqe.status, cqe.byte_len), (5, status::SUCCESS, 1064));
            assert_eq!((cqe.src_qp, cqe.qp, cqe.opcode), (sender.qpn, receiver.handle.into(), wc_opcode::RECV));
            assert_eq!(cqe.wc_flags & !wc_flag::NETWORK_HDR_TYPE, wc_flag::GRH);
            if cqe.wc_flags & wc_flag::NETWORK_HDR_TYPE != 0 {
                assert_eq!(cqe.network_hdr_type, network);
            }
            assert_eq!(target.read(40, 1024), source.read(0, 1024));
            let header = target.read(0, 40);
            if network == 1 {
                assert_eq!(header[..20], [0; 20]);
                assert_eq!((header[20], checksum(&header[20..])), (0x45, 0xffff));
                assert_eq!((&header[32..36], &header[36..40]), (&gids[0].0[12..], &gids[1].0[12..]));
            } else {
                assert_eq!((header[0] >> 4, header[6]), (6, if network == 0 { 0x1b } else { 17 }));
                assert_eq!((&header[8..24], &header[24..40]), (&gids[0].0[..], &gids[1].0[..]));
            }
            let cqe = b.cq.wait();
            assert_eq!((cqe.wr_id, cqe.byte_len, cqe.imm_data), (6, 40, [1, 2, 3, 4]));
            assert_eq!(cqe.wc_flags & !wc_flag::NETWORK_HDR_TYPE, wc_flag::GRH | wc_flag::WITH_IMM);
        }
    }
}

/// Conformance 58: with bit 31 of the request's Q_Key set, the QP's own Q_Key is sent. A datagram with a wrong Q_Key is
/// not received.
#[test]
fn q_keys() {
    let [(_test_a, driver_a), (_test_b, driver_b)] = pair(GidType::RoceV2, [gid(1), gid(2)]);
    let (mut a, mut b) = (Process::new(&driver_a, true, 64), Process::new(&driver_b, true, 64));
    let (mut sender, mut receiver) = (a.ud(), b.ud());
    sender.start_datagrams(QKEY).unwrap();
    receiver.start_datagrams(QKEY).unwrap();
    let (target, mr) = driver_b.registered_buffer(&b.pd, 4096, access::LOCAL_WRITE).unwrap();
    let recvs: Vec<_> = (0..3).map(|i| RecvWr::new(i, &[target.sge(&mr, 0, 64)])).collect();
    receiver.post_recv(&recvs).unwrap();
    let to = AddressHandle::new(a.pd.handle, gid(2));
    for qkey in [QKEY + 1, 0x8000_0000, QKEY, 5] {
        sender.post_send(&[SendWr::datagram(u64::from(qkey), &[], &to, receiver.qpn, qkey)]).unwrap();
        assert_eq!(a.cq.wait().status, status::SUCCESS, "a lost datagram is no error");
    }
    assert_eq!(b.cq.wait_many(2).iter().map(|cqe| cqe.wr_id).collect::<Vec<_>>(), [0, 1]);
    assert!(b.cq.poll().is_none());
}

/// Address vectors of other processes, operations that datagrams do not have, and messages that are too long: the
/// request fails, and the QP ends in SQE.
#[test]
fn bad_requests() {
    let [(_test_a, driver_a), (_test_b, driver_b)] = pair(GidType::RoceV2, [gid(1), gid(2)]);
    let b = Process::new(&driver_b, true, 64);
    let mut receiver = b.ud();
    receiver.start_datagrams(QKEY).unwrap();
    let mut a = Process::new(&driver_a, true, 64);
    let (source, mr) = driver_a.registered_buffer(&a.pd, 8192, access::LOCAL_WRITE).unwrap();
    let good = AddressHandle::new(a.pd.handle, gid(2));
    let request = |to: &AddressHandle, sges: &[Sge]| SendWr::datagram(1, sges, to, receiver.qpn, QKEY);
    let cases = [
        (request(&AddressHandle { pd_handle: a.pd.handle + 1, ..good }, &[]), status::LOC_QP_OP),
        (request(&AddressHandle { port: 2, ..good }, &[]), status::LOC_QP_OP),
        (request(&AddressHandle { sgid_index: 9, ..good }, &[]), status::LOC_QP_OP),
        (SendWr { opcode: opcode::RDMA_WRITE, ..request(&good, &[]) }, status::LOC_QP_OP),
        (SendWr { opcode: 0xffff, ..request(&good, &[]) }, status::LOC_QP_OP),
        (SendWr { num_sge: Some(99), ..request(&good, &[]) }, status::LOC_QP_OP),
        (request(&good, &[source.sge(&mr, 0, 5000)]), status::LOC_LEN),
        (request(&good, &[Sge { lkey: 3, ..source.sge(&mr, 0, 5) }]), status::LOC_PROT),
    ];
    for (request, expected) in cases {
        let mut qp = a.ud();
        qp.start_datagrams(QKEY).unwrap();
        qp.post_send(&[request.clone(), SendWr::datagram(2, &[], &good, receiver.qpn, QKEY)]).unwrap();
        let (first, second) = (a.cq.wait(), a.cq.wait());
        assert_eq!((first.status, second.status), (expected, status::WR_FLUSH), "{request:?}");
    }
}

/// Conformance 53, 59: the connection manager's QPs exchange messages of 256 bytes by SEND.
#[test]
fn connection_manager() {
    let [(_test_a, driver_a), (_test_b, driver_b)] = pair(GidType::RoceV2, [gid(1), gid(2)]);
    let kernel = |driver: &Driver| {
        let process = Process::new(driver, false, 1024);
        let mr = driver.dma_mr(&process.pd).unwrap();
        let mut qp: Qp = driver.create_qp(&QpInit::gsi(&process.pd, &process.cq)).unwrap();
        qp.start_datagrams(0x8001_0000).unwrap();
        (process, mr, qp)
    };
    let ((mut a, mr_a, mut qp_a), (mut b, mr_b, mut qp_b)) = (kernel(&driver_a), kernel(&driver_b));
    let (source, target) = (driver_a.buffer(4096, 0, Default::default()), driver_b.buffer(4096, 0, Default::default()));
    source.fill_pattern(9);
    qp_b.post_recv(&[RecvWr::new(1, &[target.dma_sge(mr_b.lkey, 0, 296)])]).unwrap();
    let to = AddressHandle::new(a.pd.handle, gid(2));
    let sges = [source.dma_sge(mr_a.lkey, 100, 24), source.dma_sge(mr_a.lkey, 124, 232)];
    qp_a.post_send(&[SendWr::datagram(2, &sges, &to, 1, 0x8001_0000)]).unwrap();
    assert_eq!(a.cq.wait().status, status::SUCCESS);
    let cqe = b.cq.wait();
    assert_eq!((cqe.status, cqe.src_qp, cqe.byte_len, cqe.qp), (status::SUCCESS, 1, 296, qp_b.handle.into()));
    assert_eq!(target.read(40, 256), source.read(100, 256));
    qp_a.post_send(&[SendWr::datagram(3, &[], &to, 1, 0x8001_0000).immediate([0; 4])]).unwrap();
    assert_eq!(a.cq.wait().status, status::LOC_QP_OP);
}
