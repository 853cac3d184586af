//! Connections between two devices over the software adapter.
#![expect(clippy::unwrap_used, reason = "a panic fails the test")]

mod common;

use common::{Process, connect, gid, rxe_pair};
use pvrdma_dev::testing::{
    Buffer, Driver, Mr, Path, Qp, QpInit, RecvWr, SendWr, access, mask, opcode, send_flag, state, status, wc_flag,
    wc_opcode,
};

/// One end of a connection.
struct Endpoint {
    process: Process,
    qp: Qp,
    buffer: Buffer,
    mr: Mr,
}

impl Endpoint {
    fn new(driver: &Driver, user: bool) -> Self {
        let process = Process::new(driver, user, 1024);
        let qp = process.rc();
        let (buffer, mr) = driver.registered_buffer(&process.pd, 64 << 10, access::ALL).unwrap();
        Self { process, qp, buffer, mr }
    }

    fn sge(&self, offset: usize, len: usize) -> pvrdma_verbs_types::Sge {
        self.buffer.sge(&self.mr, offset, len)
    }

    fn at(&self, offset: u64) -> (u64, u32) {
        (self.buffer.va() + offset, self.mr.rkey)
    }
}

/// Two connected ends on two devices. The returned devices keep the ends alive.
fn endpoints(user: bool) -> (Endpoint, Endpoint, impl Sized) {
    let [(test_a, driver_a), (test_b, driver_b)] = rxe_pair();
    let (mut a, mut b) = (Endpoint::new(&driver_a, user), Endpoint::new(&driver_b, user));
    connect(&mut a.qp, 1, &mut b.qp, 2);
    (a, b, (test_a, test_b))
}

fn message(seed: u64) -> Vec<u8> {
    Buffer::pattern(seed, 5000)
}

/// Conformance 53, 55, 61, 62: the seven operations between processes and between kernels. Elements of processes are
/// full of stale values of earlier ones.
#[test]
fn seven_operations() {
    for user in [true, false] {
        let (mut a, mut b, _beds) = endpoints(user);
        let (addr, rkey) = b.at(100);
        let check = |end: &mut Endpoint, wr_id: u64, opcode: u32| {
            let cqe = end.process.cq.wait();
            assert_eq!((cqe.wr_id, cqe.status, cqe.opcode), (wr_id, status::SUCCESS, opcode));
            assert_eq!(cqe.qp, u64::from(end.qp.handle));
            cqe
        };

        a.buffer.write(3, &message(1));
        a.qp.post_send(&[SendWr::write(1, &[a.sge(3, 2000), a.sge(2003, 3000)], addr, rkey)]).unwrap();
        check(&mut a, 1, wc_opcode::RDMA_WRITE);
        assert_eq!(b.buffer.read(100, 5000), message(1));

        b.qp.post_recv(&[RecvWr::new(50, &[])]).unwrap();
        a.buffer.write(3, &message(2));
        a.qp.post_send(&[SendWr::write(2, &[a.sge(3, 5000)], addr, rkey).immediate([1, 2, 3, 4])]).unwrap();
        check(&mut a, 2, wc_opcode::RDMA_WRITE);
        let cqe = check(&mut b, 50, wc_opcode::RECV_RDMA_WITH_IMM);
        assert_eq!((cqe.imm_data, cqe.wc_flags, cqe.byte_len), ([1, 2, 3, 4], wc_flag::WITH_IMM, 5000));
        assert_eq!(b.buffer.read(100, 5000), message(2));

        b.qp.post_recv(&[RecvWr::new(51, &[b.sge(7, 1), b.sge(10, 6000)]), RecvWr::new(52, &[b.sge(0, 10)])]).unwrap();
        a.buffer.write(0, &message(3));
        a.qp.post_send(&[SendWr::send(3, &[a.sge(0, 5000)])]).unwrap();
        check(&mut a, 3, wc_opcode::SEND);
        let cqe = check(&mut b, 51, wc_opcode::RECV);
        assert_eq!((cqe.wc_flags, cqe.byte_len), (0, 5000));
        assert_eq!([b.buffer.read(7, 1), b.buffer.read(10, 4999)].concat(), message(3));
        a.qp.post_send(&[SendWr::send(4, &[]).immediate([0xff, 0, 0xee, 1])]).unwrap();
        check(&mut a, 4, wc_opcode::SEND);
        let cqe = check(&mut b, 52, wc_opcode::RECV);
        assert_eq!((cqe.imm_data, cqe.wc_flags, cqe.byte_len), ([0xff, 0, 0xee, 1], wc_flag::WITH_IMM, 0));

        b.buffer.write(100, &message(4));
        a.qp.post_send(&[SendWr::read(5, &[a.sge(9, 1), a.sge(4096, 4999)], addr, rkey)]).unwrap();
        check(&mut a, 5, wc_opcode::RDMA_READ);
        assert_eq!([a.buffer.read(9, 1), a.buffer.read(4096, 4999)].concat(), message(4));

        b.buffer.write(1000, &77_u64.to_le_bytes());
        let (word, _) = b.at(1000);
        let take = |end: &Endpoint| u64::from_le_bytes(end.buffer.read(8, 8).try_into().unwrap());
        a.qp.post_send(&[SendWr::compare_swap(6, a.sge(8, 8), word, rkey, 77, 1 << 40)]).unwrap();
        check(&mut a, 6, wc_opcode::COMP_SWAP);
        assert_eq!(take(&a), 77);
        a.qp.post_send(&[SendWr::fetch_add(7, a.sge(8, 8), word, rkey, 5)]).unwrap();
        check(&mut a, 7, wc_opcode::FETCH_ADD);
        assert_eq!(take(&a), 1 << 40);
        assert_eq!(b.buffer.read(1000, 8), ((1_u64 << 40) + 5).to_le_bytes());
    }
}

/// Conformance 54: opcodes that a process's library uses for LOCAL_INV, BIND_MW and so on, and invalid ones. The memory
/// region that their stale fields name does not change.
#[test]
fn operations_a_process_does_not_have() {
    let [(_test_a, driver_a), (_test_b, driver_b)] = rxe_pair();
    let b = Endpoint::new(&driver_b, true);
    for number in (7..=16).chain([0x55, 0x8000_0000, u32::MAX]) {
        let mut a = Endpoint::new(&driver_a, true);
        let mut peer = b.process.rc();
        connect(&mut a.qp, 1, &mut peer, 2);
        let mut request = SendWr::new(9, number, &[a.sge(0, 16)]);
        request.ex = Some(a.mr.rkey.to_le_bytes());
        a.qp.post_send(&[request, SendWr::send(10, &[])]).unwrap();
        let (first, second) = (a.process.cq.wait(), a.process.cq.wait());
        assert_eq!((first.wr_id, first.status), (9, status::LOC_QP_OP), "opcode {number}");
        assert_eq!((second.wr_id, second.status), (10, status::WR_FLUSH));
        assert_eq!(a.qp.query().unwrap().get_state(), state::ERR);
        let mut again = a.process.rc();
        let mut peer = b.process.rc();
        connect(&mut again, 1, &mut peer, 2);
        let (addr, rkey) = b.at(0);
        again.post_send(&[SendWr::write(11, &[a.sge(0, 16)], addr, rkey)]).unwrap();
        assert_eq!(a.process.cq.wait().status, status::SUCCESS, "the key is still good after opcode {number}");
    }
}

/// Conformance 56: INLINE has no effect: keys are required, and the data comes from the SGEs.
#[test]
fn inline_flag() {
    let (mut a, b, _beds) = endpoints(true);
    let (addr, rkey) = b.at(0);
    a.buffer.write(0, &message(1));
    a.qp.post_send(&[SendWr::write(1, &[a.sge(0, 200)], addr, rkey).flags(send_flag::INLINE | 0xffff_ff10)]).unwrap();
    assert_eq!(a.process.cq.wait().status, status::SUCCESS);
    assert_eq!(b.buffer.read(0, 200), message(1)[..200]);
    let no_key = pvrdma_verbs_types::Sge { lkey: 0x7777_7700, ..a.sge(0, 200) };
    a.qp.post_send(&[SendWr::write(2, &[no_key], addr, rkey).flags(send_flag::INLINE)]).unwrap();
    assert_eq!(a.process.cq.wait().status, status::LOC_PROT);
}

/// Conformance 57: an unsignaled success has no completion unless the QP signals all; an error or a flush always has
/// one.
#[test]
fn signaling() {
    let (mut a, b, _beds) = endpoints(true);
    let (addr, rkey) = b.at(0);
    let quiet = |wr_id| SendWr::write(wr_id, &[], addr, rkey).unsignaled();
    a.qp.post_send(&[quiet(1), quiet(2), SendWr::write(3, &[], addr, rkey), quiet(4)]).unwrap();
    assert_eq!(a.process.cq.wait().wr_id, 3);
    let bad = SendWr { sges: vec![pvrdma_verbs_types::Sge { lkey: 1, ..a.sge(0, 1) }], ..quiet(5) };
    a.qp.post_send(&[bad, quiet(6)]).unwrap();
    let cqes = a.process.cq.wait_many(2);
    assert_eq!(cqes.iter().map(|cqe| (cqe.wr_id, cqe.status)).collect::<Vec<_>>(), [(5, 4), (6, 5)]);

    let init = QpInit { signal_all: true, ..QpInit::rc(&a.process.pd, &a.process.cq) };
    let mut all = a.process.driver.create_qp(&init).unwrap();
    let mut peer = b.process.rc();
    connect(&mut all, 1, &mut peer, 2);
    all.post_send(&[quiet(7), quiet(8)]).unwrap();
    assert_eq!(a.process.cq.wait_many(2).iter().map(|cqe| cqe.wr_id).collect::<Vec<_>>(), [7, 8]);
}

/// Conformance 36, 53, 60, 62: memory management of the kernel: registration, use, and invalidation locally and by the
/// peer.
#[test]
fn fast_registration() {
    let (mut a, mut b, _beds) = endpoints(false);
    let fast = b.process.driver.fast_mr(&b.process.pd, 16).unwrap();
    let memory = b.process.driver.buffer(4 * 4096, 0, Default::default());
    let (iova, key) = (0x5000_0100_u64, fast.mr.rkey & !0xff | 0x42);
    let directory = fast.set_pages(memory.pages());
    let register = SendWr::fast_register(1, key, iova, directory, 4, 3 * 4096, access::ALL);

    a.buffer.write(0, &message(1));
    let sge = a.sge(0, 5000);
    let write = |wr_id, key| SendWr::write(wr_id, &[sge], iova, key);
    b.qp.post_send(&[register]).unwrap();
    let cqe = b.process.cq.wait();
    assert_eq!((cqe.status, cqe.opcode), (status::SUCCESS, wc_opcode::FAST_REG_MR));
    fast.set_pages(&[0; 16]);
    a.qp.post_send(&[write(2, key)]).unwrap();
    assert_eq!(a.process.cq.wait().status, status::SUCCESS, "the scatter/gather list was copied at the post");
    assert_eq!(memory.read(0x100, 5000), message(1));

    b.qp.post_recv(&[RecvWr::new(60, &[])]).unwrap();
    a.qp.post_send(&[SendWr::send(3, &[]).invalidate(key)]).unwrap();
    assert_eq!(a.process.cq.wait().status, status::SUCCESS);
    let cqe = b.process.cq.wait();
    assert_eq!((cqe.opcode, cqe.wc_flags), (wc_opcode::RECV, wc_flag::WITH_INVALIDATE));
    assert_eq!(u32::from_le_bytes(cqe.imm_data), key);

    fast.set_pages(memory.pages());
    b.qp.post_send(&[
        SendWr::fast_register(4, key + 1, iova, directory, 4, 3 * 4096, access::ALL),
        SendWr::local_invalidate(5, key + 1),
    ])
    .unwrap();
    let cqes = b.process.cq.wait_many(2);
    assert_eq!(cqes.iter().map(|cqe| (cqe.status, cqe.opcode)).collect::<Vec<_>>(), [(0, 8), (0, 7)]);
    a.qp.post_send(&[write(6, key + 1)]).unwrap();
    assert_eq!(a.process.cq.wait().status, status::REM_ACCESS, "invalid again");
}

/// Conformance 63: a fenced send contains the data of the READ before it.
#[test]
fn fence() {
    let (mut a, mut b, _beds) = endpoints(true);
    let (addr, rkey) = b.at(0);
    for round in 0..50 {
        b.buffer.write(0, &message(round));
        b.qp.post_recv(&[RecvWr::new(1, &[b.sge(8192, 5000)])]).unwrap();
        let fenced = SendWr::send(3, &[a.sge(0, 5000)]).flags(send_flag::FENCE);
        a.qp.post_send(&[SendWr::read(2, &[a.sge(0, 5000)], addr, rkey), fenced]).unwrap();
        assert!(a.process.cq.wait_many(2).iter().all(|cqe| cqe.status == status::SUCCESS));
        assert_eq!(b.process.cq.wait().byte_len, 5000);
        assert_eq!(b.buffer.read(8192, 5000), message(round));
    }
}

/// Conformance 57, 64: ERR flushes all requests in order, including those posted later, so `ib_drain_qp` returns.
#[test]
fn flush() {
    let (mut a, _b, _beds) = endpoints(false);
    let recvs: Vec<_> = (0..10).map(|i| RecvWr::new(100 + i, &[])).collect();
    a.qp.post_recv(&recvs).unwrap();
    a.qp.to_error().unwrap();
    let cqes = a.process.cq.wait_many(10);
    assert_eq!(cqes.iter().map(|cqe| cqe.wr_id).collect::<Vec<_>>(), (100..110).collect::<Vec<_>>());
    assert!(cqes.iter().all(|cqe| cqe.status == status::WR_FLUSH && cqe.opcode == wc_opcode::RECV));
    assert!(cqes.iter().all(|cqe| cqe.byte_len == 0 && cqe.qp == u64::from(a.qp.handle)));
    a.qp.post_send(&[SendWr::write(7, &[], 0, 0).unsignaled()]).unwrap();
    a.qp.post_recv(&[RecvWr::new(8, &[])]).unwrap();
    let (send, recv) = (a.process.cq.wait(), a.process.cq.wait());
    assert_eq!((send.wr_id, send.status, send.opcode), (7, status::WR_FLUSH, wc_opcode::RDMA_WRITE));
    assert_eq!((recv.wr_id, recv.status), (8, status::WR_FLUSH));
    assert!(a.process.cq.poll().is_none());
}

/// Conformance 47, 52: nothing is sent in RESET, INIT and RTR. After RESET a QP works like a new one.
#[test]
fn states_that_do_not_send() {
    let (mut a, mut b, _beds) = endpoints(true);
    let (addr, rkey) = b.at(0);
    let request = SendWr::write(1, &[a.sge(0, 64)], addr, rkey);
    for round in 0..3 {
        let path = Path { rq_psn: round, sq_psn: round, ..Path::to(gid(2), b.qp.qpn) };
        a.qp.to_reset().unwrap();
        b.qp.to_reset().unwrap();
        b.qp.connect(&Path { dgid: gid(1), dest_qpn: a.qp.qpn, ..path }).unwrap();
        a.qp.ring_send();
        a.qp.to_init(access::ALL).unwrap();
        a.qp.post_send(std::slice::from_ref(&request)).unwrap();
        a.qp.to_rtr(&path).unwrap();
        a.qp.ring_send();
        assert!(a.process.cq.poll().is_none());
        assert_eq!(a.qp.send_ring().cons_head(), 0);
        a.qp.to_rts(&path).unwrap();
        a.qp.ring_send();
        assert_eq!(a.process.cq.wait().status, status::SUCCESS);
        assert_eq!(a.qp.send_ring().cons_head(), 1);
    }
}

/// Conformance 65: a shared receive queue of several QPs, its limit event, and the last-WQE event.
#[test]
fn shared_receive_queue() {
    let [(_test_a, driver_a), (_test_b, driver_b)] = rxe_pair();
    let (a, mut b) = (Process::new(&driver_a, true, 1024), Process::new(&driver_b, true, 1024));
    let mut srq = driver_b.create_srq(&b.pd, 64, 2, 3).unwrap();
    let mut senders: Vec<Qp> = (0..4).map(|_| a.rc()).collect();
    let init = QpInit { srq: Some(&srq), ..QpInit::rc(&b.pd, &b.cq) };
    let mut receivers: Vec<Qp> = (0..4).map(|_| driver_b.create_qp(&init).unwrap()).collect();
    for (sender, receiver) in senders.iter_mut().zip(&mut receivers) {
        connect(sender, 1, receiver, 2);
    }
    driver_b.async_events();
    let (buffer, mr) = driver_b.registered_buffer(&b.pd, 4096, access::ALL).unwrap();
    let recvs: Vec<_> = (0..8).map(|i| RecvWr::new(i, &[buffer.sge(&mr, 0, 8)])).collect();
    srq.post(&recvs).unwrap();
    for _ in 0..2 {
        for sender in &mut senders {
            sender.post_send(&[SendWr::send(1, &[])]).unwrap();
        }
    }
    let mut ids: Vec<u64> = b.cq.wait_many(8).iter().map(|cqe| cqe.wr_id).collect();
    ids.sort_unstable();
    assert_eq!(ids, (0..8).collect::<Vec<_>>());
    let limits =
        |driver: &Driver| driver.async_events().iter().filter(|e| (e.kind, e.info) == (15, srq.handle)).count();
    assert_eq!(limits(&driver_b), 1, "once per arming");
    assert_eq!(srq.query().unwrap(), [64, 2, 0]);
    receivers[0].to_error().unwrap();
    assert!(driver_b.async_events().iter().any(|e| (e.kind, e.info) == (16, receivers[0].handle)));
}

/// Conformance 66: after DESTROY_QP under traffic there are no completions and no accesses to the ring.
#[test]
fn destroy_under_traffic() {
    let (mut a, b, devices) = endpoints(true);
    for round in 0..20 {
        let mut qp = a.process.rc();
        let mut peer = b.process.rc();
        connect(&mut qp, 1, &mut peer, 2);
        let (addr, rkey) = b.at(0);
        let element = qp.encode(&SendWr::write(round, &[a.sge(0, 32 << 10)], addr, rkey));
        qp.post_encoded(&[element], 64);
        let (handle, pages) = (qp.handle, qp.pages().to_vec());
        qp.destroy().unwrap();
        for &page in &pages {
            a.process.driver.memory().write(page, &[0xc3; 4096]);
        }
        let tail = a.process.cq.ring().prod_tail();
        std::thread::yield_now();
        a.process.cq.remove_qp(handle);
        assert!(a.process.cq.poll().is_none());
        assert_eq!(a.process.cq.ring().prod_tail(), tail);
        for &page in &pages {
            assert_eq!(a.process.driver.memory().read_vec(page, 4096), [0xc3; 4096]);
        }
    }
    drop(devices);
}

/// Errors at both ends as the InfiniBand rules define them, one fault at a time.
#[test]
fn access_errors() {
    let [(_test_a, driver_a), (_test_b, driver_b)] = rxe_pair();
    let (len, all) = (4096_u64, access::ALL);
    let cases: [(&str, u32, u64, u32, u32); 6] = [
        ("no right to write", access::LOCAL_WRITE, 0, 64, status::REM_ACCESS),
        ("beyond the end", all, len - 63, 64, status::REM_ACCESS),
        ("before the start", all, 0_u64.wrapping_sub(1), 64, status::REM_ACCESS),
        ("wraps around", all, u64::MAX - 0x7f00_0000_0000, 64, status::REM_ACCESS),
        ("the last bytes", all, len - 64, 64, status::SUCCESS),
        ("nothing at all", all, 12_345_678, 0, status::SUCCESS),
    ];
    for (name, rights, offset, count, expected) in cases {
        let (mut a, mut b) = (Endpoint::new(&driver_a, true), Endpoint::new(&driver_b, true));
        connect(&mut a.qp, 1, &mut b.qp, 2);
        let (target, mr) = driver_b.registered_buffer(&b.process.pd, 4096, rights).unwrap();
        let addr = target.va().wrapping_add(offset);
        a.qp.post_send(&[SendWr::write(1, &[a.sge(0, count.try_into().unwrap())], addr, mr.rkey)]).unwrap();
        assert_eq!(a.process.cq.wait().status, expected, "{name}");
        let failed = expected != status::SUCCESS;
        assert_eq!(a.qp.query().unwrap().get_state() == state::ERR, failed, "{name}");
        // A key after its region's end.
        mr.destroy().unwrap();
        if !failed {
            a.qp.post_send(&[SendWr::write(2, &[a.sge(0, 8)], target.va(), 0xdead_0000)]).unwrap();
            assert_eq!(a.process.cq.wait().status, status::REM_ACCESS);
        }
    }
    // Access rights of the QP itself, and a memory region of another protection domain.
    let (mut a, mut b) = (Endpoint::new(&driver_a, true), Endpoint::new(&driver_b, true));
    a.qp.connect(&Path::to(gid(2), b.qp.qpn)).unwrap();
    b.qp.connect(&Path { access: access::REMOTE_WRITE, ..Path::to(gid(1), a.qp.qpn) }).unwrap();
    assert_eq!(b.qp.query().unwrap().u32(32) & 0xe, access::REMOTE_WRITE);
    let (addr, rkey) = b.at(0);
    a.qp.post_send(&[SendWr::read(1, &[a.sge(0, 8)], addr, rkey)]).unwrap();
    assert_eq!(a.process.cq.wait().status, status::REM_INV_REQ, "not an operation of that QP");
    let (mut a, mut b) = (Endpoint::new(&driver_a, true), Endpoint::new(&driver_b, true));
    connect(&mut a.qp, 1, &mut b.qp, 2);
    let other = Endpoint::new(&driver_b, true);
    let (addr, rkey) = other.at(0);
    a.qp.post_send(&[SendWr::write(1, &[a.sge(0, 8)], addr, rkey)]).unwrap();
    assert_eq!(a.process.cq.wait().status, status::REM_ACCESS);
}

/// Receiver not ready: the sender retries until there is a receive, or until its retries are used up.
#[test]
fn receiver_not_ready() {
    let [(_test_a, driver_a), (_test_b, driver_b)] = rxe_pair();
    let (mut a, mut b) = (Endpoint::new(&driver_a, true), Endpoint::new(&driver_b, true));
    connect(&mut a.qp, 1, &mut b.qp, 2);
    a.qp.post_send(&[SendWr::send(1, &[])]).unwrap();
    assert!(a.process.cq.poll().is_none());
    b.qp.post_recv(&[RecvWr::new(2, &[])]).unwrap();
    assert_eq!((a.process.cq.wait().status, b.process.cq.wait().wr_id), (status::SUCCESS, 2));

    let (mut a, mut b) = (Endpoint::new(&driver_a, true), Endpoint::new(&driver_b, true));
    a.qp.connect(&Path { rnr_retry: 2, ..Path::to(gid(2), b.qp.qpn) }).unwrap();
    b.qp.connect(&Path { min_rnr_timer: 1, ..Path::to(gid(1), a.qp.qpn) }).unwrap();
    a.qp.post_send(&[SendWr::send(1, &[]), SendWr::new(2, opcode::SEND, &[])]).unwrap();
    let cqes = a.process.cq.wait_many(2);
    assert_eq!(cqes.iter().map(|cqe| cqe.status).collect::<Vec<_>>(), [status::RNR_RETRY_EXC, status::WR_FLUSH]);
}

/// Conformance 23, 30: queries return the attributes as they were set. Attributes without a mask bit are ignored.
#[test]
fn attributes() {
    let (a, b, _beds) = endpoints(true);
    let attr = a.qp.query().unwrap();
    assert_eq!((attr.get_state(), attr.u32(4), attr.u32(8)), (state::RTS, state::RTS, 3));
    assert_eq!((attr.u32(20), attr.u32(24), attr.u32(28)), (0x1234, 0x1234, b.qp.qpn));
    assert_eq!(attr.bytes[42..49], [4, 4, 12, 1, 14, 7, 7]);
    assert_eq!([56, 60, 64, 68].map(|at| attr.u32(at)), [64, 64, 4, 4]);
    assert_eq!(attr.bytes[80..96], gid(2).0);
    assert_eq!(attr.mask, (mask::DEST_QPN << 1) - 1);
}
