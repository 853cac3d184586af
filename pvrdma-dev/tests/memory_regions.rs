//! Keys through the whole device and the software adapter: address translation and access rights.
#![expect(clippy::unwrap_used, reason = "a panic fails the test")]

mod common;

use common::{Process, connect, rxe_pair, rxe_pair_with};
use pvrdma_dev::testing::{
    Buffer, Driver, Mr, Placement, Qp, RecvWr, SendWr, access, state, status, wait_for, wc_opcode,
};
use pvrdma_verbs_types::Sge;

/// Pages of the largest region.
const GIB_PAGES: u64 = 262_144;

/// One side of every connection here.
struct Endpoint {
    host: u8,
    process: Process,
    buffer: Buffer,
    mr: Mr,
}

impl Endpoint {
    fn new(driver: &Driver, host: u8, user: bool) -> Self {
        let process = Process::new(driver, user, 64);
        let (buffer, mr) = driver.registered_buffer(&process.pd, 4096, access::ALL).unwrap();
        Self { host, process, buffer, mr }
    }

    fn sge(&self, offset: usize, len: usize) -> Sge {
        self.buffer.sge(&self.mr, offset, len)
    }

    fn next(&mut self) -> u32 {
        self.process.cq.wait().status
    }
}

/// Connects two ends anew, because a failed request ends a connection.
fn connected(a: &Endpoint, b: &Endpoint) -> (Qp, Qp) {
    let (mut left, mut right) = (a.process.rc(), b.process.rc());
    connect(&mut left, a.host, &mut right, b.host);
    (left, right)
}

/// Runs one request from `a` to `b` on a new connection and returns its status. A second request behind it is flushed
/// if it fails.
fn run(a: &mut Endpoint, b: &Endpoint, request: &SendWr) -> u32 {
    let (mut left, right) = connected(a, b);
    left.post_send(&[request.clone(), SendWr::write(2, &[], 0, 0)]).unwrap();
    let (first, second) = (a.next(), a.next());
    let failed = first != status::SUCCESS;
    assert_eq!(second, if failed { status::WR_FLUSH } else { status::SUCCESS }, "{request:?}");
    assert_eq!(left.query().unwrap().get_state(), if failed { state::ERR } else { state::RTS });
    left.destroy().unwrap();
    right.destroy().unwrap();
    first
}

/// Conformance 32, 33: each byte of a gibibyte maps to its page, also with pages in reverse order, from an odd start,
/// up to the last byte; and a region of one byte has one byte.
#[test]
fn translation_of_a_gibibyte() {
    let memory = pvrdma_dev::testing::GuestMemory::new((1 << 30) + (64 << 20));
    let pages: Vec<u64> = memory.reserve(usize::try_from(GIB_PAGES).unwrap()).into_iter().rev().collect();
    let [(_test_a, driver_a), (_test_b, driver_b)] = rxe_pair_with(memory.clone());
    let (mut a, b) = (Endpoint::new(&driver_a, 1, true), Endpoint::new(&driver_b, 2, true));
    a.buffer.fill_pattern(1);
    let data = a.buffer.read(0, 16);

    let gib = 1_u64 << 30;
    // First address in the first page, bytes.
    for (start, length) in
        [(0, gib), (0xfff, gib - 0xfff), (0x123, gib - 0x123), (1, gib - 4096), (0xfff, 1), (0xfff, 2)]
    {
        let count = usize::try_from((start + length).div_ceil(4096)).unwrap();
        let va = 0x7f12_3450_0000 + start;
        let mr = driver_b.reg_mr_pages(&b.process.pd, va, length, &pages[..count], access::ALL).unwrap();
        let place = |offset: u64| {
            let at = start + offset;
            pages[usize::try_from(at / 4096).unwrap()] + at % 4096
        };
        let len = length.min(16);
        // At both ends, and across boundaries of pages and of directory tables.
        let borders =
            [1, 2, 511, 512, 513, 131_072, GIB_PAGES - 1].map(|page: u64| (page * 4096).saturating_sub(start + 7));
        for offset in [0, length - len].into_iter().chain(borders).filter(|offset| *offset <= length - len) {
            let sge = a.sge(0, usize::try_from(len).unwrap());
            assert_eq!(run(&mut a, &b, &SendWr::write(1, &[sge], va + offset, mr.rkey)), status::SUCCESS);
            for i in 0..len {
                let byte = memory.read_vec(place(offset + i), 1)[0];
                assert_eq!(byte, data[usize::try_from(i).unwrap()], "byte {i} at {offset:#x} of {length:#x}");
                memory.write(place(offset + i), &[0]);
            }
        }
        // Bytes around the region in the pages of both ends were not written.
        let (first, last) = (place(0), place(length - 1));
        assert!(memory.read_vec(first - start, usize::try_from(start).unwrap()).iter().all(|&byte| byte == 0));
        let behind = usize::try_from(4095 - last % 4096).unwrap();
        assert!(memory.read_vec(last + 1, behind).iter().all(|&byte| byte == 0));
        // One byte too many, at either end.
        for (addr, len) in [(va + length - 1, 2), (va - 1, 2), (va + length, 1)] {
            let sge = a.sge(0, len);
            assert_eq!(run(&mut a, &b, &SendWr::write(1, &[sge], addr, mr.rkey)), status::REM_ACCESS);
        }
        mr.destroy().unwrap();
    }
}

/// Conformance 34: requests of a peer outside the region, in another protection domain, without the access right, or
/// with an invalid or former key. None moves a byte, and the responder's QP reports it.
#[test]
fn remote_keys() {
    type Make = fn(Sge, u64, u32) -> SendWr;
    let operations: [(Make, u32); 3] = [
        (|sge, addr, key| SendWr::write(1, &[sge], addr, key), access::REMOTE_WRITE),
        (|sge, addr, key| SendWr::read(1, &[sge], addr, key), access::REMOTE_READ),
        (|sge, addr, key| SendWr::fetch_add(1, sge, addr, key, 1), access::REMOTE_ATOMIC),
    ];
    let [(_test_a, driver_a), (_test_b, driver_b)] = rxe_pair();
    let (mut a, b) = (Endpoint::new(&driver_a, 1, true), Endpoint::new(&driver_b, 2, true));
    let pd = &b.process.pd;
    let (target, good) = driver_b.registered_buffer(pd, 8192, access::ALL).unwrap();
    let (va, end) = (target.va(), target.va() + 8192);
    let other_pd = driver_b.create_pd(b.process.context.as_ref()).unwrap();
    let foreign = driver_b.reg_mr(&other_pd, &target, access::ALL).unwrap();
    let destroyed = driver_b.reg_mr(pd, &target, access::ALL).unwrap();
    let dead_key = destroyed.rkey;
    destroyed.destroy().unwrap();
    target.fill(0x55);
    a.buffer.fill(0xaa);
    for (make, right) in operations {
        let without = driver_b.reg_mr(pd, &target, access::ALL & !right).unwrap();
        for (what, addr, key) in [
            ("before the start", va - 8, good.rkey),
            ("past the end", end, good.rkey),
            ("far away", va + (1 << 40), good.rkey),
            ("at the top", u64::MAX - 7, good.rkey),
            ("another domain", va, foreign.rkey),
            ("no right", va, without.rkey),
            ("another byte", va, good.rkey ^ 1),
            ("another index", va, good.rkey ^ 0x0010_0000),
            ("destroyed", va, dead_key),
            ("nothing", va, 0),
            ("anything", va, u32::MAX),
        ] {
            driver_b.async_events();
            let request = make(a.sge(0, 8), addr, key);
            assert_eq!(run(&mut a, &b, &request), status::REM_ACCESS, "{what}: {request:?}");
            assert!(driver_b.async_events().iter().any(|event| event.kind == 3), "{what}: QP_ACCESS_ERR");
        }
        if right != access::REMOTE_ATOMIC {
            let across = make(a.sge(0, 9), end - 8, good.rkey);
            assert_eq!(run(&mut a, &b, &across), status::REM_ACCESS);
        }
        without.destroy().unwrap();
    }
    assert_eq!((target.read(0, 8192), a.buffer.read(0, 4096)), (vec![0x55; 8192], vec![0xaa; 4096]));
    for (make, _) in operations {
        let request = make(a.sge(0, 8), end - 8, good.rkey);
        assert_eq!(run(&mut a, &b, &request), status::SUCCESS, "the last bytes");
    }
}

/// Conformance 34: the same for local keys of sends and receives. A receive that cannot be filled fails at both ends.
#[test]
fn local_keys() {
    let [(_test_a, driver_a), (_test_b, driver_b)] = rxe_pair();
    let (mut a, mut b) = (Endpoint::new(&driver_a, 1, true), Endpoint::new(&driver_b, 2, true));
    let (va, peer) = (a.buffer.va(), (b.buffer.va(), b.mr.rkey));
    let other_pd = driver_a.create_pd(a.process.context.as_ref()).unwrap();
    let foreign = driver_a.reg_mr(&other_pd, &a.buffer, access::ALL).unwrap();
    let destroyed = driver_a.reg_mr(&a.process.pd, &a.buffer, access::ALL).unwrap();
    let read_only = driver_a.reg_mr(&a.process.pd, &a.buffer, access::REMOTE_READ).unwrap();
    let (lkey, dead_key) = (a.mr.lkey, destroyed.lkey);
    destroyed.destroy().unwrap();
    let bad = |addr, length, lkey| Sge { addr, length, lkey };
    let cases = [
        bad(va - 1, 8, lkey),
        bad(va + 4089, 8, lkey),
        bad(va, u32::MAX, lkey),
        bad(u64::MAX - 3, 8, lkey),
        bad(va, 8, foreign.lkey),
        bad(va, 8, dead_key),
        bad(va, 8, lkey ^ 1),
        bad(va, 8, 0),
    ];
    a.buffer.fill(0xaa);
    b.buffer.fill(0x55);
    for sge in cases {
        // Also behind a valid SGE: a WRITE must not arrive, and a READ may fill the valid part.
        for sges in [vec![sge], vec![a.sge(0, 8), sge]] {
            let expected = if sge.length > 1 << 31 { status::LOC_LEN } else { status::LOC_PROT };
            assert_eq!(run(&mut a, &b, &SendWr::write(1, &sges, peer.0, peer.1)), expected, "{sges:?}");
            assert_eq!(run(&mut a, &b, &SendWr::read(1, &sges, peer.0, peer.1)), expected, "{sges:?}");
        }
        // Used in a receive of `a` for a message of `b`.
        let (mut left, mut right) = connected(&a, &b);
        left.post_recv(&[RecvWr::new(5, &[a.sge(0, 2), sge])]).unwrap();
        right.post_send(&[SendWr::send(6, &[b.sge(0, 8)])]).unwrap();
        assert_eq!((a.next(), b.next()), (status::LOC_PROT, status::REM_OP), "{sge:?}");
        assert_eq!(left.query().unwrap().get_state(), state::ERR);
        left.destroy().unwrap();
        right.destroy().unwrap();
    }
    assert_eq!((a.buffer.read(8, 4088), b.buffer.read(0, 4096)), (vec![0xaa; 4088], vec![0x55; 4096]));
    let from_read_only = a.buffer.sge(&read_only, 0, 8);
    assert_eq!(run(&mut a, &b, &SendWr::write(1, &[from_read_only], peer.0, peer.1)), status::SUCCESS);
    assert_eq!(run(&mut a, &b, &SendWr::read(1, &[from_read_only], peer.0, peer.1)), status::LOC_PROT);
}

/// Conformance 35: the kernel's key is valid for every address of memory and for no other. A refusal ends the QP, not
/// the device. Peers cannot use the key.
#[test]
fn kernel_key() {
    let [(_test_a, driver_a), (_test_b, driver_b)] = rxe_pair();
    let (mut a, b) = (Endpoint::new(&driver_a, 1, false), Endpoint::new(&driver_b, 2, false));
    let dma = driver_a.dma_mr(&a.process.pd).unwrap();
    let memory = driver_a.memory().clone();
    let (base, end) = (pvrdma_dev::testing::MEMORY_BASE, memory.end());
    let peer = (b.buffer.va(), b.mr.rkey);
    let at = |addr: u64, length: u32| Sge { addr, length, lkey: dma.lkey };
    let pages = memory.alloc(2, Placement::Contiguous);
    memory.write(pages[0] + 4090, b"across a border");
    assert_eq!(run(&mut a, &b, &SendWr::write(1, &[at(pages[0] + 4090, 15)], peer.0, peer.1)), status::SUCCESS);
    assert_eq!(b.buffer.read(0, 15), b"across a border");
    for good in [base, end - 8] {
        assert_eq!(run(&mut a, &b, &SendWr::write(1, &[at(good, 8)], peer.0, peer.1)), status::SUCCESS, "{good:#x}");
    }
    for bad in [0, base - 8, base - 1, end - 7, end, 0xfebd_0000, 1 << 47, u64::MAX - 7] {
        assert_eq!(run(&mut a, &b, &SendWr::write(1, &[at(bad, 8)], peer.0, peer.1)), status::LOC_PROT, "{bad:#x}");
        assert_eq!(run(&mut a, &b, &SendWr::read(1, &[at(bad, 8)], peer.0, peer.1)), status::LOC_PROT, "{bad:#x}");
        driver_a.query_port().unwrap();
    }
    let theirs = driver_b.dma_mr(&b.process.pd).unwrap();
    for request in [
        SendWr::write(1, &[a.sge(0, 8)], base, theirs.rkey),
        SendWr::read(1, &[a.sge(0, 8)], base, theirs.rkey),
        SendWr::fetch_add(1, a.sge(0, 8), base, theirs.rkey, 1),
    ] {
        assert_eq!(run(&mut a, &b, &request), status::REM_ACCESS);
    }
    let process = driver_a.create_pd(Some(&driver_a.open().unwrap())).unwrap();
    assert!(driver_a.dma_mr(&process).is_err(), "no process gets such a key");
}

/// Conformance 36: a fast-registered region, from both sides: unusable before the registration and after the
/// invalidation, usable only with the new key byte, and with the pages at the time of the post.
#[test]
fn fast_registered_keys() {
    let [(_test_a, driver_a), (_test_b, driver_b)] = rxe_pair();
    let (mut a, mut b) = (Endpoint::new(&driver_a, 1, false), Endpoint::new(&driver_b, 2, false));
    let fast = driver_b.fast_mr(&b.process.pd, 8).unwrap();
    let (first, second) = (fast.mr.rkey, fast.mr.rkey & !0xff | (fast.mr.rkey + 7) & 0xff);
    assert_eq!(fast.mr.lkey, fast.mr.rkey);
    let memory = driver_b.buffer(3 * 4096, 0, Placement::Scattered);
    let other = driver_b.buffer(3 * 4096, 0, Placement::Scattered);
    let iova = 0x4_0000_0800_u64;

    // Returns the status of a write to the region by `a`, and of a send from it by `b`.
    let use_key = |a: &mut Endpoint, b: &mut Endpoint, key: u32| {
        let to = SendWr::write(1, &[a.sge(0, 3000)], iova + 1000, key);
        let sge = Sge { addr: iova, length: 8, lkey: key };
        let from = SendWr::write(1, &[sge], a.buffer.va() + 3500, a.mr.rkey);
        (run(a, b, &to), run(b, a, &from))
    };
    let refused = (status::REM_ACCESS, status::LOC_PROT);
    let (mut worker, _idle) = connected(&b, &a);
    let post = |worker: &mut Qp, b: &mut Endpoint, request: SendWr, opcode: u32| {
        worker.post_send(&[request]).unwrap();
        let cqe = b.process.cq.wait();
        assert_eq!(cqe.opcode, opcode);
        cqe.status
    };

    assert_eq!(use_key(&mut a, &mut b, first), refused, "before it is registered");
    let directory = fast.set_pages(memory.pages());
    let register = |key| SendWr::fast_register(3, key, iova, directory, 3, 8192, access::ALL);
    assert_eq!(post(&mut worker, &mut b, register(second), wc_opcode::FAST_REG_MR), status::SUCCESS);
    fast.set_pages(other.pages());
    a.buffer.fill_pattern(9);
    assert_eq!(use_key(&mut a, &mut b, second), (status::SUCCESS, status::SUCCESS));
    assert_eq!(memory.read(0x800 + 1000, 3000), a.buffer.read(0, 3000), "the region has the pages of the posted list");
    assert_eq!(other.read(0, 3 * 4096), vec![0; 3 * 4096]);
    assert_eq!(use_key(&mut a, &mut b, first), refused, "the old byte");
    assert_eq!(post(&mut worker, &mut b, SendWr::local_invalidate(4, second), wc_opcode::LOCAL_INV), status::SUCCESS);
    assert_eq!(use_key(&mut a, &mut b, second), refused, "after it was invalidated");
    assert_eq!(post(&mut worker, &mut b, register(first), wc_opcode::FAST_REG_MR), status::SUCCESS);
    assert_eq!(use_key(&mut a, &mut b, second), refused);
    assert_eq!(use_key(&mut a, &mut b, first), (status::SUCCESS, status::SUCCESS));
    assert_eq!(other.read(0x800 + 1000, 3000), a.buffer.read(0, 3000));
    // A second registration without an invalidation is an error.
    assert_ne!(post(&mut worker, &mut b, register(second), wc_opcode::FAST_REG_MR), status::SUCCESS);
    wait_for("QP in ERR", || (worker.query().unwrap().get_state() == state::ERR).then_some(()));
    fast.mr.destroy().unwrap();
    assert_eq!(use_key(&mut a, &mut b, first), refused, "after its end");
}
