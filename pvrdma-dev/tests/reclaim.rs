//! Objects and memory that a guest takes back while they are in use: once the command is complete, the device no longer
//! accesses them.
#![expect(clippy::unwrap_used, reason = "a panic fails the test")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use common::{Process, gid, rxe_member, rxe_pair};
use pvrdma_dev::testing::{
    AddressHandle, Buffer, Cq, Driver, GuestMemory, MEMORY_BASE, Mr, Path, Qp, QpInit, RecvWr, SendWr, Srq, access,
    register, state, status, wait_for,
};
use pvrdma_pci_function::PciFunction;
use pvrdma_rxe::{Rxe, RxeConfig};

/// Number of receives that are posted for one connection.
const RECEIVES: u32 = 1024;

/// Large enough that all messages together take longer than one time slice of a thread on a single processor.
const MESSAGE: usize = 256 << 10;

/// The receiving end of a connection, with all objects that can be destroyed.
struct Receiver {
    process: Process,
    cq: Cq,
    srq: Srq,
    qp: Qp,
    buffer: Buffer,
    mr: Mr,
}

impl Receiver {
    /// Creates a receiver with its receives in a shared queue or in its own.
    fn new(driver: &Driver, shared: bool) -> Self {
        let process = Process::new(driver, true, 4);
        let cq = driver.create_cq(process.context.as_ref(), 4 * RECEIVES).unwrap();
        let srq = driver.create_srq(&process.pd, RECEIVES, 1, 0).unwrap();
        let init = QpInit { max_recv_wr: RECEIVES, srq: shared.then_some(&srq), ..QpInit::rc(&process.pd, &cq) };
        let qp = driver.create_qp(&init).unwrap();
        let (buffer, mr) = driver.registered_buffer(&process.pd, MESSAGE, access::ALL).unwrap();
        Self { process, cq, srq, qp, buffer, mr }
    }

    /// Connects with all receives posted, and sends the first messages.
    fn start(&mut self, sender: &mut Qp, message: &SendWr, shared: bool) {
        self.qp.to_init(access::ALL).unwrap();
        let receives = vec![RecvWr::new(1, &[self.buffer.sge(&self.mr, 0, MESSAGE)]); RECEIVES as usize];
        if shared { self.srq.post(&receives) } else { self.qp.post_recv(&receives) }.unwrap();
        let path = Path::to(gid(1), sender.qpn);
        self.qp.to_rtr(&path).unwrap();
        self.qp.to_rts(&path).unwrap();
        sender.connect(&impatient(2, self.qp.qpn)).unwrap();
        let message = sender.encode(message);
        assert_eq!(sender.post_encoded(&[message], RECEIVES), RECEIVES);
        wait_for("the first messages", || (self.cq.ring().prod_tail() > 5).then_some(()));
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Object {
    Mr,
    Qp,
    Cq,
    Srq,
}

/// The remaining objects of a receiver.
type Rest = (Process, Option<Cq>, Option<Srq>, Option<Qp>);

/// Destroys one object of the receiver. Returns the pages that the owner may reuse from then on.
fn destroy(receiver: Receiver, object: Object) -> (Vec<u64>, Rest) {
    let Receiver { process, cq, srq, qp, buffer, mr } = receiver;
    match object {
        Object::Mr => {
            mr.destroy().unwrap();
            (buffer.pages().to_vec(), (process, Some(cq), Some(srq), Some(qp)))
        }
        Object::Qp => {
            // Its receives are over as well.
            let pages = [qp.pages(), buffer.pages()].concat();
            qp.destroy().unwrap();
            (pages, (process, Some(cq), Some(srq), None))
        }
        Object::Cq => {
            let pages = cq.pages().to_vec();
            cq.destroy().unwrap();
            (pages, (process, None, Some(srq), Some(qp)))
        }
        Object::Srq => {
            let pages = srq.pages().to_vec();
            srq.destroy().unwrap();
            (pages, (process, Some(cq), None, Some(qp)))
        }
    }
}

/// A way that gives up soon.
fn impatient(host: u8, qpn: u32) -> Path {
    Path { timeout: 1, retry_cnt: 1, rnr_retry: 1, ..Path::to(gid(host), qpn) }
}

/// Conformance 28, 37: a region, QP, CQ or SRQ is destroyed in the middle of a transfer. After the command, its pages
/// are filled with other data, which must not change.
#[test]
fn destroyed_under_traffic() {
    let [(_test_a, driver_a), (_test_b, driver_b)] = rxe_pair();
    let mut a = Process::new(&driver_a, true, 2 * RECEIVES);
    let (source, lkey) = driver_a.registered_buffer(&a.pd, MESSAGE, access::ALL).unwrap();
    source.fill(0x77);
    for object in [Object::Mr, Object::Qp, Object::Cq, Object::Srq] {
        let mut in_the_middle = 0;
        for round in 0..20 {
            let shared = object == Object::Srq || round % 2 == 0;
            let mut receiver = Receiver::new(&driver_b, shared);
            let mut sender = driver_a.create_qp(&QpInit { max_send_wr: RECEIVES, ..QpInit::rc(&a.pd, &a.cq) }).unwrap();
            receiver.start(&mut sender, &SendWr::send(1, &[source.sge(&lkey, 0, MESSAGE)]), shared);
            in_the_middle += u32::from(receiver.cq.ring().prod_tail() < RECEIVES);

            let (pages, mut rest) = destroy(receiver, object);
            for &page in &pages {
                driver_b.memory().write(page, &[0xc3; 4096]);
            }
            // Requests posted now are flushed, or served if the necessary objects still exist.
            if let Some(qp) = &mut rest.3 {
                qp.post_send(&[SendWr::send(1, &[])]).unwrap();
                qp.ring_recv();
            }
            // All requests end, one way or another.
            let ends = a.cq.wait_many(RECEIVES as usize);
            let broken = ends.iter().any(|cqe| cqe.status != status::SUCCESS);
            assert_eq!(broken, sender.query().unwrap().get_state() == state::ERR);
            for &page in &pages {
                assert_eq!(driver_b.memory().read_vec(page, 4096), [0xc3; 4096], "{object:?}");
            }
            sender.destroy().unwrap();
            drop(rest);
            driver_b.async_events();
        }
        assert!(in_the_middle > 0, "{object:?}: all messages were faster than the command");
    }
}

/// Conformance 10, 11, 12, 37: each kind of reset, a new handshake, and the end of bus mastering, in the middle of a
/// transfer. After the register write, no byte of memory changes, no interrupt is raised, and the peer's requests end.
#[test]
fn reset_under_traffic() {
    const BYTES: usize = 16 << 20;
    let backend = Arc::new(Rxe::new(RxeConfig::default()).unwrap());
    let (_test_a, driver_a) = rxe_member(&backend, 1, GuestMemory::new(128 << 20));
    let mut a = Process::new(&driver_a, true, 2 * RECEIVES);
    let (source, lkey) = driver_a.registered_buffer(&a.pd, MESSAGE, access::ALL).unwrap();
    source.fill(0x77);
    for round in 0..40_usize {
        let (test, driver) = rxe_member(&backend, 2, GuestMemory::new(BYTES));
        let shared = round % 8 < 4;
        let mut receiver = Receiver::new(&driver, shared);
        receiver.cq.arm();
        let mut sender = driver_a.create_qp(&QpInit { max_send_wr: RECEIVES, ..QpInit::rc(&a.pd, &a.cq) }).unwrap();
        receiver.start(&mut sender, &SendWr::send(1, &[source.sge(&lkey, 0, MESSAGE)]), shared);
        match round % 4 {
            0 => driver.pci().set_register(register::CTL, 2),
            1 => driver.pci().set_register(register::DSRHIGH, 0x7777),
            2 => test.device.reset(),
            _ => driver.pci().set_bus_master(false),
        }
        let everything = || (test.memory.read_vec(MEMORY_BASE, BYTES), test.irqs.counts());
        let before = everything();
        a.cq.wait_many(RECEIVES as usize);
        receiver.qp.ring_recv();
        receiver.cq.arm();
        assert!(everything() == before, "way {} left something running", round % 4);
        assert_eq!(test.device.status().objects.qps, 0, "way {} left a queue pair", round % 4);
        sender.destroy().unwrap();
    }
}

/// A process with thousands of objects. Half of its queue pairs have requests in progress.
struct Hoard {
    process: Process,
    mrs: Vec<Mr>,
    cqs: Vec<Cq>,
    srqs: Vec<Srq>,
    qps: Vec<Qp>,
}

impl Hoard {
    fn new(driver: &Driver, peer: &Process) -> (Self, Vec<Qp>) {
        let process = Process::new(driver, true, 16);
        let pages = driver.memory().alloc(1, Default::default());
        let mr = || driver.reg_mr_pages(&process.pd, 0x7000, 4096, &pages, access::ALL).unwrap();
        let mrs = (0..2000).map(|_| mr()).collect();
        let cqs: Vec<_> = (0..500).map(|_| driver.create_cq(process.context.as_ref(), 16).unwrap()).collect();
        let srqs: Vec<_> = (0..100).map(|_| driver.create_srq(&process.pd, 16, 1, 0).unwrap()).collect();
        let mut peers = Vec::new();
        let qps = (0..1000)
            .map(|i| {
                let (cq, srq) = (&cqs[i % cqs.len()], (i % 4 == 0).then(|| &srqs[i % srqs.len()]));
                let small = QpInit { max_send_wr: 4, max_recv_wr: 4, srq, ..QpInit::rc(&process.pd, cq) };
                let mut qp = driver.create_qp(&small).unwrap();
                if i % 2 == 0 {
                    let theirs = QpInit { max_send_wr: 4, max_recv_wr: 4, ..QpInit::rc(&peer.pd, &peer.cq) };
                    let mut other = peer.driver.create_qp(&theirs).unwrap();
                    qp.connect(&Path::to(gid(1), other.qpn)).unwrap();
                    other.connect(&impatient(2, qp.qpn)).unwrap();
                    // Neither side has posted a receive, so both wait.
                    qp.post_send(&[SendWr::send(1, &[]), SendWr::send(2, &[])]).unwrap();
                    peers.push(other);
                }
                qp
            })
            .collect();
        (Self { process, mrs, cqs, srqs, qps }, peers)
    }

    /// Ends the process as the kernel does for a killed one: one command after the other.
    fn end(self) {
        self.qps.into_iter().for_each(|qp| qp.destroy().unwrap());
        self.srqs.into_iter().for_each(|srq| srq.destroy().unwrap());
        self.cqs.into_iter().for_each(|cq| cq.destroy().unwrap());
        self.mrs.into_iter().for_each(|mr| mr.destroy().unwrap());
        let Process { context, pd, cq, .. } = self.process;
        cq.destroy().unwrap();
        pd.destroy().unwrap();
        context.unwrap().close().unwrap();
    }
}

/// Conformance 29, 73: a process with thousands of objects ends, once command by command, and once only by the end of
/// its context, as when the kernel was interrupted (spec §4.4). Everything is reclaimed, its peers are notified, and no
/// other process is affected.
#[test]
fn thousands_of_objects() {
    let [(_test_a, driver_a), (test_b, driver_b)] = rxe_pair();
    let mut peer = Process::new(&driver_a, true, 4096);
    let mut bystander = Process::new(&driver_b, true, 16);
    let mut peer_of_bystander = Process::new(&driver_a, true, 16);
    let (mut left, mut right) = (bystander.rc(), peer_of_bystander.rc());
    common::connect(&mut right, 1, &mut left, 2);
    let baseline = test_b.device.status();
    for orderly in [true, false] {
        let (hoard, mut peers) = Hoard::new(&driver_b, &peer);
        let full = test_b.device.status();
        assert_eq!(full.objects.mrs - baseline.objects.mrs, 2000);
        if orderly {
            hoard.end();
        } else {
            hoard.process.context.clone().unwrap().close().unwrap();
        }
        let after = test_b.device.status();
        assert_eq!((after.objects, after.kept.used_bytes), (baseline.objects, baseline.kept.used_bytes));
        for qp in &mut peers {
            qp.post_send(&[SendWr::send(7, &[])]).unwrap();
        }
        for cqe in peer.cq.wait_many(peers.len()) {
            assert_eq!((cqe.wr_id, cqe.status), (7, status::RETRY_EXC), "its peer is gone");
        }
        peers.into_iter().for_each(|qp| qp.destroy().unwrap());
        left.post_recv(&[RecvWr::new(1, &[])]).unwrap();
        right.post_send(&[SendWr::send(2, &[])]).unwrap();
        assert_eq!((bystander.cq.wait().wr_id, peer_of_bystander.cq.wait().wr_id), (1, 2));
    }
}

/// Conformance 75: three guests, whose general services QPs all have number 1, send at the same time. Each message
/// arrives at the guest whose GID it names.
#[test]
fn general_services_by_address() {
    const COUNT: u32 = 200;
    const QKEY: u32 = 0x8001_0000;
    let backend = Arc::new(Rxe::new(RxeConfig::default()).unwrap());
    let devices = [1, 2, 3].map(|host| rxe_member(&backend, host, GuestMemory::new(16 << 20)));
    let failed = AtomicBool::new(false);
    let start = std::sync::Barrier::new(3);
    std::thread::scope(|scope| {
        for (me, (_, driver)) in (1_u8..).zip(&devices) {
            let (failed, start) = (&failed, &start);
            scope.spawn(move || {
                let mut process = Process::new(driver, false, 2048);
                let mr = driver.dma_mr(&process.pd).unwrap();
                let gsi = QpInit { max_send_wr: 512, max_recv_wr: 512, ..QpInit::gsi(&process.pd, &process.cq) };
                let mut qp = driver.create_qp(&gsi).unwrap();
                qp.start_datagrams(QKEY).unwrap();
                let buffer = driver.buffer(512 * 64, 0, Default::default());
                let receives: Vec<_> = (0..)
                    .zip((0..512).map(|slot| buffer.dma_sge(mr.lkey, slot * 64, 48)))
                    .map(|(id, sge)| RecvWr::new(id, &[sge]))
                    .collect();
                qp.post_recv(&receives).unwrap();
                let message = driver.buffer(4096, 0, Default::default());
                start.wait();
                let others: Vec<u8> = (1..4).filter(|&host| host != me).collect();
                for &host in &others {
                    // The message names its sender and its receiver.
                    message.write(usize::from(host) * 8, &[me, host, 0, 0, 0, 0, 0, 0]);
                }
                for i in 0..COUNT {
                    let host = others[i as usize % 2];
                    let to = AddressHandle::new(process.pd.handle, gid(host));
                    let sge = message.dma_sge(mr.lkey, usize::from(host) * 8, 8);
                    qp.post_send(&[SendWr::datagram(1000, &[sge], &to, 1, QKEY)]).unwrap();
                }
                let mut from = [0; 4];
                for cqe in process.cq.wait_many(2 * COUNT as usize) {
                    if cqe.wr_id == 1000 {
                        continue;
                    }
                    let at = usize::try_from(cqe.wr_id).unwrap() * 64;
                    let (source, text) = (buffer.read(at + 12 + 20, 1), buffer.read(at + 40, 2));
                    // The last byte of the sender's address in the IPv4 header.
                    let address = buffer.read(at + 20 + 12, 4);
                    let wrong = cqe.src_qp != 1 || text[1] != me || address != [10, 0, 0, text[0]] || source != [10];
                    failed.fetch_or(wrong, Ordering::Relaxed);
                    from[usize::from(text[0])] += 1;
                }
                for host in others {
                    assert_eq!(from[usize::from(host)], COUNT / 2, "from {host} at {me}");
                }
            });
        }
    });
    assert!(!failed.into_inner(), "a message arrived at the wrong receiver, or from no sender");
}
