//! Guests of a daemon, and verified traffic between them.

use std::path::Path as FilePath;

use pvrdma_dev::testing::{
    AddressHandle, Driver, Path, QpInit, RecvWr, SendWr, access, opcode, status, wc_flag, wc_opcode,
};
use pvrdma_verbs_types::Gid;

use super::remote::probe;

pub const QKEY: u32 = 0x1234;
/// Bytes of a transfer: many packets, the last one not full.
const LENGTH: usize = 300_001;

pub fn mac(number: u8) -> [u8; 6] {
    [0x52, 0x54, 0, 0, 3, number]
}

pub fn gid(number: u8) -> Gid {
    let mut gid = Gid::default();
    gid.0[10..12].fill(0xff);
    gid.0[12..].copy_from_slice(&[10, 33, 0, number]);
    gid
}

/// A guest of a daemon. Guests with the same number have equal addresses.
pub struct Guest {
    pub number: u8,
    pub driver: Driver,
}

impl Guest {
    /// Starts the driver of the device behind a socket, and binds the address of this number.
    pub fn new(number: u8, socket: &FilePath) -> Self {
        let driver = probe(socket, 16 << 20);
        driver.bind_gid(0, gid(number)).unwrap();
        Self { number, driver }
    }
}

/// Runs connected requests of each kind, and a datagram, from one guest to the other. The path MTU is encoded as in the
/// verbs interface.
///
/// Returns the numbers of the connected QPs.
pub fn transfer(from: &Guest, to: &Guest, mtu: u32) -> [u32; 2] {
    let [(a, a_pd, mut a_cq), (b, b_pd, mut b_cq)] = [from, to].map(|guest| {
        let driver = &guest.driver;
        (driver, driver.create_pd(None).unwrap(), driver.create_cq(None, 64).unwrap())
    });
    let mut left = a.create_qp(&QpInit::rc(&a_pd, &a_cq)).unwrap();
    let mut right = b.create_qp(&QpInit::rc(&b_pd, &b_cq)).unwrap();
    left.connect(&Path { dmac: mac(to.number), mtu, ..Path::to(gid(to.number), right.qpn) }).unwrap();
    right.connect(&Path { dmac: mac(from.number), mtu, ..Path::to(gid(from.number), left.qpn) }).unwrap();
    let all = access::LOCAL_WRITE | access::REMOTE_WRITE | access::REMOTE_READ;
    let (mine, mine_mr) = a.registered_buffer(&a_pd, LENGTH, all).unwrap();
    let (theirs, theirs_mr) = b.registered_buffer(&b_pd, LENGTH, all).unwrap();
    let whole = [mine.sge(&mine_mr, 0, LENGTH)];
    let remote = theirs.sge(&theirs_mr, 0, LENGTH);

    // Write, and check the remote memory once a later send has arrived.
    mine.fill_pattern(1);
    right.post_recv(&[RecvWr::new(7, &[])]).unwrap();
    left.post_send(&[SendWr::write(1, &whole, remote.addr, theirs_mr.rkey), SendWr::send(2, &[])]).unwrap();
    let done = a_cq.wait_many(2);
    assert!(done.iter().map(|cqe| (cqe.wr_id, cqe.status)).eq([(1, status::SUCCESS), (2, status::SUCCESS)]));
    assert_eq!((b_cq.wait().wr_id, theirs.read(0, LENGTH) == mine.read(0, LENGTH)), (7, true));
    // Send into a receive.
    mine.fill_pattern(2);
    right.post_recv(&[RecvWr::new(8, &[remote])]).unwrap();
    left.post_send(&[SendWr::send(3, &whole)]).unwrap();
    assert_eq!(a_cq.wait().status, status::SUCCESS);
    let received = b_cq.wait();
    assert_eq!((received.wr_id, received.opcode, received.byte_len as usize), (8, wc_opcode::RECV, LENGTH));
    assert!(theirs.read(0, LENGTH) == mine.read(0, LENGTH));
    // Read.
    theirs.fill_pattern(3);
    left.post_send(&[SendWr::read(4, &whole, remote.addr, theirs_mr.rkey)]).unwrap();
    assert_eq!(a_cq.wait().status, status::SUCCESS);
    assert!(mine.read(0, LENGTH) == theirs.read(0, LENGTH));

    let mut sender = a.create_qp(&QpInit::ud(&a_pd, &a_cq)).unwrap();
    let mut receiver = b.create_qp(&QpInit::ud(&b_pd, &b_cq)).unwrap();
    sender.start_datagrams(QKEY).unwrap();
    receiver.start_datagrams(QKEY).unwrap();
    receiver.post_recv(&[RecvWr::new(9, &[theirs.sge(&theirs_mr, 0, 40 + 1000)])]).unwrap();
    let handle = AddressHandle { dmac: mac(to.number), ..AddressHandle::new(a_pd.handle, gid(to.number)) };
    let datagram = SendWr::datagram(5, &[mine.sge(&mine_mr, 0, 1000)], &handle, receiver.qpn, QKEY);
    assert_eq!(datagram.opcode, opcode::SEND);
    sender.post_send(&[datagram.immediate([1, 2, 3, 4])]).unwrap();
    assert_eq!(a_cq.wait().status, status::SUCCESS);
    let received = b_cq.wait();
    assert_eq!((received.wr_id, received.byte_len, received.src_qp), (9, 1040, sender.qpn));
    assert_eq!((received.imm_data, received.wc_flags & wc_flag::WITH_IMM), ([1, 2, 3, 4], wc_flag::WITH_IMM));
    assert!(theirs.read(40, 1000) == mine.read(0, 1000));
    [left.qpn, right.qpn]
}
