//! Operations of guests on the level of registers and rings: data operations, errors, integrity, kernel objects, the
//! connection manager.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pvrdma_dev::testing::{
    AddressHandle, Buffer, Cq, Mr, Path, Pd, Placement, Qp, QpInit, RecvWr, SendWr, access, status, wc_opcode,
};

use pvrdma_verbs::testing::gid;

use crate::device_pair::Side;

/// Runs all checks on two devices, one after the other.
pub(super) fn check([mut a, mut b]: [Side; 2]) -> Result<()> {
    operations(&mut a, &mut b)?;
    println!("operations: ok");
    integrity(&mut a, &mut b)?;
    println!("integrity: ok");
    datagrams(&mut a, &mut b)?;
    println!("datagrams: ok");
    shared_receives(&mut a, &b)?;
    println!("shared receive queue: ok");
    kernel(&a, &b)?;
    println!("kernel objects: ok");
    connection_manager(&a, &b)?;
    println!("connection manager: ok");
    errors(&mut a, &mut b)?;
    println!("errors: ok");
    Ok(())
}

/// Runs endless traffic, and prints a line for each second in which a write ended.
pub(super) fn hold([mut a, b]: [Side; 2]) -> Result<()> {
    let mut printed: Option<Instant> = None;
    loop {
        a.qp.post_send(&[SendWr::write(0, &[a.buffer.sge(&a.mr, 0, 1 << 20)], b.buffer.va(), b.mr.rkey)])?;
        ensure!(a.cq.wait().status == status::SUCCESS, "a write failed");
        if printed.is_none_or(|printed| printed.elapsed() >= Duration::from_secs(1)) {
            println!("traffic");
            printed = Some(Instant::now());
        }
    }
}

fn done(cq: &mut Cq, wr_id: u64, opcode: u32) -> Result<u32> {
    let cqe = cq.wait();
    ensure!((cqe.wr_id, cqe.status, cqe.opcode) == (wr_id, status::SUCCESS, opcode), "request {wr_id}: {cqe:?}");
    Ok(cqe.byte_len)
}

fn operations(a: &mut Side, b: &mut Side) -> Result<()> {
    let data = Buffer::pattern(3, 5000);
    a.buffer.write(100, &data);
    b.qp.post_recv(&[RecvWr::new(1, &[b.buffer.sge(&b.mr, 7, 6000)]), RecvWr::new(2, &[]), RecvWr::new(3, &[])])?;
    a.qp.post_send(&[SendWr::send(1, &[a.buffer.sge(&a.mr, 100, 5000)])])?;
    ensure!(done(&mut b.cq, 1, wc_opcode::RECV)? == 5000, "length of a send");
    done(&mut a.cq, 1, wc_opcode::SEND)?;
    ensure!(b.buffer.read(7, 5000) == data, "data of a send");
    a.qp.post_send(&[SendWr::send(2, &[]).immediate([1, 2, 3, 4])])?;
    let got = b.cq.wait();
    ensure!((got.wr_id, got.imm_data) == (2, [1, 2, 3, 4]), "immediate data: {got:?}");
    done(&mut a.cq, 2, wc_opcode::SEND)?;
    let remote = |offset: usize| (b.buffer.va() + offset as u64, b.mr.rkey);
    let (va, key) = remote(20_001);
    a.qp.post_send(&[SendWr::write(3, &[a.buffer.sge(&a.mr, 100, 5000)], va, key).immediate([9; 4])])?;
    ensure!(done(&mut b.cq, 3, wc_opcode::RECV_RDMA_WITH_IMM)? == 5000, "length of a write with immediate data");
    done(&mut a.cq, 3, wc_opcode::RDMA_WRITE)?;
    ensure!(b.buffer.read(20_001, 5000) == data, "data of a write");
    a.qp.post_send(&[SendWr::read(4, &[a.buffer.sge(&a.mr, 50_000, 5000)], va, key)])?;
    ensure!(done(&mut a.cq, 4, wc_opcode::RDMA_READ)? == 5000, "length of a read");
    ensure!(a.buffer.read(50_000, 5000) == data, "data of a read");
    let (va, key) = remote(64);
    b.buffer.write(64, &40_u64.to_le_bytes());
    a.qp.post_send(&[SendWr::fetch_add(5, a.buffer.sge(&a.mr, 0, 8), va, key, 2)])?;
    done(&mut a.cq, 5, wc_opcode::FETCH_ADD)?;
    a.qp.post_send(&[SendWr::compare_swap(6, a.buffer.sge(&a.mr, 8, 8), va, key, 42, 7)])?;
    done(&mut a.cq, 6, wc_opcode::COMP_SWAP)?;
    let words = (a.buffer.read(0, 8), a.buffer.read(8, 8), b.buffer.read(64, 8));
    ensure!(words == (40_u64.to_le_bytes().into(), 42_u64.to_le_bytes().into(), 7_u64.to_le_bytes().into()), "atomics");
    Ok(())
}

/// Moves a few megabytes by writes and reads of all sizes; every byte of both buffers is compared with the expected
/// one.
pub(super) fn integrity(a: &mut Side, b: &mut Side) -> Result<()> {
    let len = a.buffer.len();
    a.buffer.fill_pattern(11);
    b.buffer.fill_pattern(12);
    let (mut ours, mut theirs) = (Buffer::pattern(11, len), Buffer::pattern(12, len));
    let mut random = 0x1234_5678_9abc_def1_u64;
    let mut next = |below: usize| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        usize::try_from(random >> 20).unwrap_or(0) % below
    };
    for wr_id in 0..120 {
        let size = 1 + next(if wr_id % 4 == 0 { 200_000 } else { 6000 });
        let (from, to) = (next(len - size), next(len - size));
        if wr_id % 3 == 0 {
            let request = SendWr::read(wr_id, &[a.buffer.sge(&a.mr, to, size)], b.buffer.va() + from as u64, b.mr.rkey);
            a.qp.post_send(&[request])?;
            ours[to..to + size].copy_from_slice(&theirs[from..from + size]);
            done(&mut a.cq, wr_id, wc_opcode::RDMA_READ)?;
        } else {
            let half = size / 2;
            let sges = [a.buffer.sge(&a.mr, from, half), a.buffer.sge(&a.mr, from + half, size - half)];
            a.qp.post_send(&[SendWr::write(wr_id, &sges, b.buffer.va() + to as u64, b.mr.rkey)])?;
            theirs[to..to + size].copy_from_slice(&ours[from..from + size]);
            done(&mut a.cq, wr_id, wc_opcode::RDMA_WRITE)?;
        }
    }
    ensure!(a.buffer.read(0, len) == ours && b.buffer.read(0, len) == theirs, "memory differs");
    Ok(())
}

/// Ensures that the device has processed every doorbell so far. Over a socket, a doorbell is answered before its work
/// is done, and a datagram that finds no receive is lost. A command is processed after all earlier doorbells.
fn seen(side: &Side) -> Result<()> {
    side.driver.query_port().map(drop).context("a command")
}

fn datagrams(a: &mut Side, b: &mut Side) -> Result<()> {
    const QKEY: u32 = 0x1111;
    let mut left = a.driver.create_qp(&QpInit::ud(&a.pd, &a.cq))?;
    let mut right = b.driver.create_qp(&QpInit::ud(&b.pd, &b.cq))?;
    left.start_datagrams(QKEY)?;
    right.start_datagrams(QKEY)?;
    right.post_recv(&[RecvWr::new(1, &[b.buffer.sge(&b.mr, 0, 2000)])])?;
    seen(b)?;
    let to = AddressHandle::new(a.pd.handle, gid(b.host));
    left.post_send(&[SendWr::datagram(2, &[a.buffer.sge(&a.mr, 500, 1000)], &to, right.qpn, QKEY)])?;
    done(&mut a.cq, 2, wc_opcode::SEND)?;
    let got = b.cq.wait();
    ensure!((got.status, got.byte_len, got.src_qp) == (status::SUCCESS, 1040, left.qpn), "{got:?}");
    ensure!(b.buffer.read(40, 1000) == a.buffer.read(500, 1000), "data of a datagram");
    left.destroy()?;
    right.destroy()?;
    Ok(())
}

fn shared_receives(a: &mut Side, b: &Side) -> Result<()> {
    let srq = b.driver.create_srq(&b.pd, 32, 2, 0)?;
    let mut cq = b.driver.create_cq(Some(&b.context), 64)?;
    let init = QpInit { srq: Some(&srq), ..QpInit::rc(&b.pd, &cq) };
    let mut rights = [b.driver.create_qp(&init)?, b.driver.create_qp(&init)?];
    let mut lefts = [a.driver.create_qp(&QpInit::rc(&a.pd, &a.cq))?, a.driver.create_qp(&QpInit::rc(&a.pd, &a.cq))?];
    let mut srq = srq;
    for (left, right) in lefts.iter_mut().zip(&mut rights) {
        connect(left, a.host, right, b.host)?;
    }
    for round in 0..40 {
        srq.post(&[RecvWr::new(round, &[b.buffer.sge(&b.mr, 0, 64)])])?;
        lefts[usize::from(round % 3 == 0)].post_send(&[SendWr::send(round, &[a.buffer.sge(&a.mr, 0, 64)])])?;
        done(&mut cq, round, wc_opcode::RECV)?;
        done(&mut a.cq, round, wc_opcode::SEND)?;
    }
    lefts.into_iter().chain(rights).try_for_each(Qp::destroy)?;
    srq.destroy()?;
    cq.destroy()?;
    Ok(())
}

fn connect(left: &mut Qp, left_host: u8, right: &mut Qp, right_host: u8) -> Result<()> {
    left.connect(&Path::to(gid(right_host), right.qpn))?;
    right.connect(&Path::to(gid(left_host), left.qpn))?;
    Ok(())
}

/// Objects of a guest's kernel.
struct Kernel {
    pd: Pd,
    cq: Cq,
    dma: Mr,
    qp: Qp,
    buffer: Buffer,
}

impl Kernel {
    fn new(side: &Side) -> Result<Self> {
        let (pd, cq) = (side.driver.create_pd(None)?, side.driver.create_cq(None, 64)?);
        let dma = side.driver.dma_mr(&pd)?;
        let qp = side.driver.create_qp(&QpInit::rc(&pd, &cq))?;
        let buffer = side.driver.buffer(8192, 0, Placement::Scattered);
        buffer.fill_pattern(side.host.into());
        Ok(Self { pd, cq, dma, qp, buffer })
    }

    fn destroy(self) -> Result<()> {
        self.qp.destroy()?;
        self.dma.destroy()?;
        self.cq.destroy()?;
        self.pd.destroy()?;
        Ok(())
    }
}

/// Tests kernel objects: keys for bus addresses, and fast registration with a key that the peer invalidates.
fn kernel(a: &Side, b: &Side) -> Result<()> {
    let (mut left, mut right) = (Kernel::new(a)?, Kernel::new(b)?);
    connect(&mut left.qp, a.host, &mut right.qp, b.host)?;
    let target = (a.buffer.va() + 300_000, a.mr.rkey);
    let whole = [left.buffer.dma_sge(left.dma.lkey, 0, 4096), left.buffer.dma_sge(left.dma.lkey, 4096, 904)];
    let fast = b.driver.fast_mr(&right.pd, 4)?;
    for round in 0..3_u32 {
        let key = fast.mr.rkey & !0xff | (fast.mr.rkey + 1 + round) & 0xff;
        let directory = fast.set_pages(right.buffer.pages());
        let register = SendWr::fast_register(2, key, 0x40_0000, directory, 2, 8192, access::ALL);
        right.qp.post_send(&[register])?;
        done(&mut right.cq, 2, wc_opcode::FAST_REG_MR)?;
        left.qp.post_send(&[SendWr::write(3, &whole, 0x40_0000 + 3000, key)])?;
        done(&mut left.cq, 3, wc_opcode::RDMA_WRITE)?;
        ensure!(right.buffer.read(3000, 5000) == left.buffer.read(0, 5000), "data through a fast-registered key");
        right.buffer.fill(0);
        if round == 1 {
            right.qp.post_recv(&[RecvWr::new(4, &[])])?;
            left.qp.post_send(&[SendWr::send(4, &[]).invalidate(key)])?;
            done(&mut left.cq, 4, wc_opcode::SEND)?;
            done(&mut right.cq, 4, wc_opcode::RECV)?;
        } else {
            right.qp.post_send(&[SendWr::local_invalidate(5, key)])?;
            done(&mut right.cq, 5, wc_opcode::LOCAL_INV)?;
        }
    }
    // The key belongs to a process of the other protection domain, so its use is refused.
    left.qp.post_send(&[SendWr::write(6, &[a.buffer.sge(&a.mr, 0, 8)], target.0, target.1)])?;
    let cqe = left.cq.wait();
    ensure!((cqe.wr_id, cqe.status) == (6, status::LOC_PROT), "{cqe:?}");
    left.destroy()?;
    right.qp.destroy()?;
    fast.mr.destroy()?;
    right.dma.destroy()?;
    right.cq.destroy()?;
    right.pd.destroy()?;
    Ok(())
}

/// Sends a management datagram from one guest's kernel to the other's.
fn connection_manager(a: &Side, b: &Side) -> Result<()> {
    const QKEY: u32 = 0x8001_0000;
    let mut endpoints = Vec::new();
    for side in [a, b] {
        let (pd, cq) = (side.driver.create_pd(None)?, side.driver.create_cq(None, 1024)?);
        let dma = side.driver.dma_mr(&pd)?;
        let mut qp = side.driver.create_qp(&QpInit::gsi(&pd, &cq))?;
        qp.start_datagrams(QKEY)?;
        let buffer = side.driver.buffer(4096, 0, Placement::Contiguous);
        buffer.fill_pattern(side.host.into());
        endpoints.push((pd, cq, dma, qp, buffer));
    }
    let [left, right] = &mut endpoints[..] else { anyhow::bail!("two endpoints were made") };
    right.3.post_recv(&[RecvWr::new(1, &[right.4.dma_sge(right.2.lkey, 1024, 296)])])?;
    seen(b)?;
    let to = AddressHandle::new(left.0.handle, gid(b.host));
    left.3.post_send(&[SendWr::datagram(2, &[left.4.dma_sge(left.2.lkey, 0, 256)], &to, 1, QKEY)])?;
    done(&mut left.1, 2, wc_opcode::SEND)?;
    let got = right.1.wait();
    ensure!((got.status, got.byte_len, got.src_qp) == (status::SUCCESS, 296, 1), "{got:?}");
    ensure!(right.4.read(1064, 256) == left.4.read(0, 256), "data of a management datagram");
    // There is no other queue pair for such datagrams.
    let dropped = a.counter("gsi_dropped");
    right.3.post_recv(&[RecvWr::new(3, &[right.4.dma_sge(right.2.lkey, 1024, 296)])])?;
    left.3.post_send(&[SendWr::datagram(4, &[left.4.dma_sge(left.2.lkey, 0, 256)], &to, 5, QKEY)])?;
    done(&mut left.1, 4, wc_opcode::SEND)?;
    ensure!(a.counter("gsi_dropped") == dropped.map(|count| count + 1), "a management datagram to QP 5 is not dropped");
    ensure!(right.1.poll().is_none(), "a management datagram to QP 5 arrived");
    Ok(())
}

/// Causes errors at both ends; then the connection is re-established and works.
fn errors(a: &mut Side, b: &mut Side) -> Result<()> {
    b.qp.post_recv(&[RecvWr::new(50, &[])])?;
    // rdma_rxe flushes the present requests when it fails, and never later ones.
    seen(b)?;
    let beyond = b.buffer.va() + b.buffer.len() as u64;
    a.qp.post_send(&[SendWr::write(1, &[a.buffer.sge(&a.mr, 0, 8)], beyond, b.mr.rkey), SendWr::send(2, &[])])?;
    let statuses: Vec<_> = a.cq.wait_many(2).iter().map(|cqe| cqe.status).collect();
    ensure!(statuses == [status::REM_ACCESS, status::WR_FLUSH], "{statuses:?}");
    ensure!(b.cq.wait().status == status::WR_FLUSH, "the receive of the responder is not flushed");
    for side in [&mut *a, &mut *b] {
        side.qp.to_reset()?;
    }
    connect(&mut a.qp, a.host, &mut b.qp, b.host)?;
    let foreign = SendWr::send(3, &[pvrdma_verbs_types::Sge { lkey: 0x77, ..a.buffer.sge(&a.mr, 0, 8) }]);
    a.qp.post_send(&[foreign])?;
    let cqe = a.cq.wait();
    ensure!((cqe.wr_id, cqe.status) == (3, status::LOC_PROT), "{cqe:?}");
    a.qp.to_reset()?;
    b.qp.to_reset()?;
    connect(&mut a.qp, a.host, &mut b.qp, b.host)?;
    operations(a, b)
}
