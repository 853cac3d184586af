//! Every operation of a connected QP when all is well.

use pvrdma_verbs::{
    Access, AsyncEvent, FastRegister, Hca, Invalidate, MemoryRegion, MrRequest, QpAttrMask, QpEvent, QpState, QpType,
    QueuePair, SendData, SendFlags, SendOp, SendWr, Sge, WcFlags, WcOpcode, WcStatus,
};

use crate::testing::*;

#[test]
pub(super) fn send_and_receive() {
    let pair = Pair::new();
    let (source, target) =
        (pair.a.buffer_at(100, 5000, Access::empty()), pair.b.buffer_at(7, 6000, Access::LOCAL_WRITE));
    let data = pattern(1, 5000);
    source.write(0, &data);
    pair.right.recv(9, &[target.all()]);
    pair.left.send(4, &[source.all()]);
    let sent = pair.left.scq.one();
    assert_eq!((sent.wr_id, sent.status, sent.opcode, sent.qp), (4, WcStatus::Success, WcOpcode::Send, 0x100));
    let got = pair.right.rcq.one();
    assert_eq!((got.wr_id, got.status, got.opcode, got.byte_len), (9, WcStatus::Success, WcOpcode::Recv, 5000));
    assert!(got.flags.is_empty());
    assert_eq!(target.read(0, 5000), data);
    assert_eq!(pair.a.counter("rc_send_bytes"), 5000);
}

#[test]
pub(super) fn the_first_request_in_rtr_establishes_the_communication() {
    let world = World::new();
    let (a, b) = (world.node(1), world.node(2));
    let (left, right) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    right.rtr(&left, |_| {});
    left.connect(&right, |_| {});
    right.recv(1, &[]);
    right.recv(2, &[]);
    left.send(1, &[]);
    left.send(2, &[]);
    assert_eq!(right.rcq.poll().len(), 2);
    assert_eq!(b.events.poll(), [AsyncEvent::Qp(QpEvent::CommunicationEstablished, right.cookie)]);
}

#[test]
pub(super) fn only_signaled_requests_complete_unless_all_do() {
    let pair = Pair::new();
    let post = |end: &End, wr_id, flags| {
        let work = SendWr { wr_id, op: write(Default::default()), flags, sges: Vec::new() };
        end.sends.posted.lock().push_back(work);
        end.qp.notify_send();
    };
    post(&pair.left, 1, SendFlags::empty());
    post(&pair.left, 2, SendFlags::SIGNALED);
    assert_eq!(pair.left.scq.statuses(), [(2, WcStatus::Success)]);
    assert_eq!(pair.left.sends.retired.load(std::sync::atomic::Ordering::SeqCst), 2);
    let all = pair.a.qp_with(QpType::Rc, None, |init| init.signal_all = true);
    let peer = pair.b.qp(QpType::Rc);
    all.connect(&peer, |_| {});
    peer.connect(&all, |_| {});
    post(&all, 3, SendFlags::empty());
    assert_eq!(all.scq.statuses(), [(3, WcStatus::Success)]);
}

#[test]
pub(super) fn immediate_data_and_solicited() {
    let pair = Pair::new();
    let (source, target) = (pair.a.buffer(64), pair.b.buffer(64));
    pair.right.recv(1, &[target.all()]);
    pair.right.recv(2, &[]);
    let data = SendData::Immediate([1, 2, 3, 4]);
    pair.left.submit(1, SendOp::Send { data, to: None }, &[source.sge(0, 8)]);
    let op = SendOp::Write { remote: target.remote(8), immediate: Some([9, 8, 7, 6]) };
    let flags = SendFlags::SOLICITED;
    let sges = vec![source.sge(0, 16)];
    pair.left.sends.posted.lock().push_back(SendWr { wr_id: 2, op, flags, sges });
    pair.left.qp.notify_send();
    pair.settle();
    let got = pair.right.rcq.poll();
    assert_eq!((got[0].opcode, got[0].byte_len, got[0].immediate), (WcOpcode::Recv, 8, [1, 2, 3, 4]));
    assert_eq!((got[0].flags, got[0].solicited), (WcFlags::IMMEDIATE, false));
    assert_eq!((got[1].opcode, got[1].byte_len), (WcOpcode::RecvRdmaWithImmediate, 16));
    assert_eq!((got[1].immediate, got[1].solicited), ([9, 8, 7, 6], true));
    assert_eq!(pair.left.scq.statuses(), [(1, WcStatus::Success)], "the second was not signaled");
    assert_eq!((pair.a.counter("rc_sends"), pair.a.counter("rc_write_bytes")), (1, 16));
}

#[test]
pub(super) fn write_and_read() {
    let pair = Pair::new();
    let (mine, theirs) = (pair.a.buffer_at(1, 20_000, ALL), pair.b.buffer_at(4095, 20_000, ALL));
    let data = pattern(2, 20_000);
    mine.write(0, &data);
    pair.left.submit(1, write(theirs.remote(3)), &[mine.sge(5, 9000), mine.sge(100, 0), mine.sge(9005, 999)]);
    assert_eq!(theirs.read(3, 9999), data[5..10_004]);
    let wc = pair.left.scq.one();
    assert_eq!((wc.opcode, wc.status), (WcOpcode::RdmaWrite, WcStatus::Success));
    mine.write(0, &vec![0; 20_000]);
    pair.left.submit(2, SendOp::Read { remote: theirs.remote(3) }, &[mine.sge(10_000, 4000), mine.sge(0, 5999)]);
    let wc = pair.left.scq.one();
    assert_eq!((wc.opcode, wc.status, wc.byte_len), (WcOpcode::RdmaRead, WcStatus::Success, 9999));
    assert_eq!(mine.read(10_000, 4000), data[5..4005]);
    assert_eq!(mine.read(0, 5999), data[4005..10_004]);
    assert!(pair.right.rcq.poll().is_empty());
}

#[test]
pub(super) fn empty_operations_look_at_no_key() {
    let pair = Pair::new();
    let nowhere = pvrdma_verbs::RemoteAddress { addr: 12345, rkey: 0xdead_beef };
    let nothing = Sge { addr: 99, length: 0, lkey: 0xdead_beef };
    pair.left.submit(1, write(nowhere), &[nothing]);
    pair.left.submit(2, SendOp::Read { remote: nowhere }, &[]);
    pair.right.recv(3, &[nothing]);
    pair.left.send(3, &[nothing]);
    let ok = WcStatus::Success;
    assert_eq!(pair.left.scq.statuses(), [(1, ok), (2, ok), (3, ok)]);
    assert_eq!(pair.right.rcq.one().byte_len, 0);
}

#[test]
pub(super) fn the_dma_key_names_bus_addresses_and_is_local() {
    let pair = Pair::new();
    let dma = pair.a.hca.register_mr(&pair.a.pd, MrRequest::Dma { access: ALL }).unwrap();
    let remote = pair.b.hca.register_mr(&pair.b.pd, MrRequest::Dma { access: ALL }).unwrap();
    let target = pair.b.buffer(64);
    pair.a.memory.view().write(0x1000_0800, b"bus addresses").unwrap();
    let sge = Sge { addr: 0x1000_0800, length: 13, lkey: dma.lkey() };
    pair.left.submit(1, write(target.remote(0)), &[sge]);
    assert_eq!(target.read(0, 13), b"bus addresses");
    let remote = pvrdma_verbs::RemoteAddress { addr: 0x1000_0000, rkey: remote.rkey() };
    pair.left.submit(2, write(remote), &[sge]);
    assert_eq!(pair.left.scq.statuses(), [(1, WcStatus::Success), (2, WcStatus::RemoteAccess)]);
}

#[test]
pub(super) fn fast_registration_and_invalidation() {
    let pair = Pair::new();
    let fast = pair.b.hca.register_mr(&pair.b.pd, MrRequest::FastRegister { max_pages: 4 }).unwrap();
    let plain = pair.b.buffer(8192);
    let mine = pair.a.buffer(4096);
    mine.write(0, b"through a fast key");
    let mut pages = pvrdma_guest_memory::PageListBuilder::default();
    pages.push(0x1800_0000).unwrap();
    let key = fast.rkey() & !0xff | 0x42;
    let register = SendOp::FastRegister(Box::new(FastRegister {
        key,
        iova: 0x9000,
        length: 4096,
        access: ALL,
        pages: Some(pages.finish()),
    }));
    pair.right.submit(1, register.clone(), &[]);
    let wc = pair.right.scq.one();
    assert_eq!((wc.opcode, wc.status), (WcOpcode::FastRegister, WcStatus::Success));
    let remote = pvrdma_verbs::RemoteAddress { addr: 0x9010, rkey: key };
    pair.left.submit(2, write(remote), &[mine.sge(0, 18)]);
    let mut back = [0; 18];
    pair.b.memory.view().read(0x1800_0010, &mut back).unwrap();
    assert_eq!(&back, b"through a fast key");
    // The peer takes the key away with its answer.
    pair.right.recv(3, &[plain.all()]);
    pair.left.submit(3, SendOp::Send { data: SendData::Invalidate(key), to: None }, &[mine.sge(0, 4)]);
    let got = pair.right.rcq.one();
    assert_eq!((got.flags, got.invalidated_key), (WcFlags::INVALIDATED, key));
    pair.right.submit(4, register, &[]);
    pair.right.submit(5, SendOp::LocalInvalidate(Invalidate { key }), &[]);
    let wc = pair.right.scq.poll();
    assert_eq!((wc[1].opcode, wc[1].status), (WcOpcode::LocalInvalidate, WcStatus::Success));
    pair.left.submit(6, write(remote), &[mine.sge(0, 18)]);
    assert_eq!(pair.left.scq.poll().last().unwrap().status, WcStatus::RemoteAccess);
}

#[test]
pub(super) fn a_qp_may_be_its_own_peer_and_two_of_one_device_may_meet() {
    let world = World::new();
    let a = world.node(1);
    let own = a.qp(QpType::Rc);
    own.connect(&own, |_| {});
    let (x, y) = (a.qp(QpType::Rc), a.qp(QpType::Rc));
    x.connect(&y, |_| {});
    y.connect(&x, |_| {});
    let buffer = a.buffer(4096);
    buffer.write(0, b"hello");
    for (from, to) in [(&own, &own), (&x, &y), (&y, &x)] {
        to.recv(1, &[buffer.sge(100, 5)]);
        from.send(2, &[buffer.sge(0, 5)]);
        assert_eq!(from.scq.one().status, WcStatus::Success);
        assert_eq!(to.rcq.one().byte_len, 5);
        assert_eq!(buffer.read(100, 5), b"hello");
    }
    // Overlapping copies behave like memmove.
    buffer.write(0, &pattern(3, 2000));
    own.submit(3, write(buffer.remote(16)), &[buffer.sge(0, 2000)]);
    assert_eq!(buffer.read(16, 2000), pattern(3, 2000));
    // An error of a self-connected QP ends both halves.
    own.recv(5, &[]);
    own.submit(4, write(Default::default()), &[buffer.sge(0, 1)]);
    world.settle();
    assert_eq!(own.scq.poll().last().unwrap().status, WcStatus::RemoteAccess);
    assert_eq!(own.rcq.statuses(), [(5, WcStatus::Flushed)]);
    assert_eq!(own.state(), QpState::Error);
}

#[test]
pub(super) fn two_adapters_on_one_guest_memory() {
    let world = World::new();
    let a = world.node(1);
    let b = world.node_on(2, std::sync::Arc::clone(&a.memory));
    let (left, right) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    left.connect(&right, |_| {});
    right.connect(&left, |_| {});
    let (mine, theirs) = (a.buffer(100), b.buffer(100));
    mine.write(0, b"shared");
    left.submit(1, write(theirs.remote(0)), &[mine.sge(0, 6)]);
    right.submit(1, write(mine.remote(50)), &[theirs.sge(0, 6)]);
    assert_eq!(mine.read(50, 6), b"shared");
}

#[test]
pub(super) fn doorbells_are_hints() {
    let pair = Pair::new();
    // A request that arrives while another one runs needs no doorbell of its own, and a doorbell may find nothing.
    pair.left.qp.notify_send();
    pair.left.post(1, write(Default::default()), &[]);
    pair.left.post(2, write(Default::default()), &[]);
    pair.left.qp.notify_send();
    pair.left.qp.notify_send();
    assert_eq!(pair.left.scq.poll().len(), 2);
}

#[test]
pub(super) fn the_budget_of_a_doorbell_ends_and_the_rest_is_left_to_workers() {
    let world = World::with(|config| (config.inline_bytes, config.inline_requests) = (10_000, 8));
    let pair = Pair::with(world, |_| {}, |_| {});
    let (mine, theirs) = (pair.a.buffer(30_000), pair.b.buffer(30_000));
    for i in 0..20 {
        pair.left.post(i, write(Default::default()), &[]);
    }
    pair.left.qp.notify_send();
    assert_eq!(pair.left.scq.poll().len(), 8);
    pair.settle();
    assert_eq!(pair.left.scq.poll().len(), 12);
    mine.write(0, &pattern(5, 30_000));
    pair.left.submit(1, write(theirs.remote(0)), &[mine.all()]);
    assert!(pair.left.scq.poll().is_empty());
    assert_eq!(theirs.read(0, 30_000)[..10_000], pattern(5, 30_000)[..10_000]);
    assert_eq!(theirs.read(10_000, 20_000), vec![0; 20_000]);
    pair.settle();
    assert_eq!(pair.left.scq.one().status, WcStatus::Success);
    assert_eq!(theirs.read(0, 30_000), pattern(5, 30_000));
}

#[test]
pub(super) fn sqd_finishes_what_was_started_and_says_so() {
    let world = World::with(|config| config.inline_bytes = 100);
    let pair = Pair::with(world, |_| {}, |_| {});
    let (mine, theirs) = (pair.a.buffer(1000), pair.b.buffer(1000));
    let drain = |end: &End| end.change(QpState::Sqd, |a| a.en_sqd_async_notify = true, QpAttrMask::EN_SQD_ASYNC_NOTIFY);
    let drained = [AsyncEvent::Qp(QpEvent::SendQueueDrained, pair.left.cookie)];
    pair.left.post(1, write(theirs.remote(0)), &[mine.all()]);
    pair.left.submit(2, write(Default::default()), &[]);
    assert!(pair.left.scq.poll().is_empty());
    // The doorbell inside of modify runs another hundred bytes, not all.
    drain(&pair.left);
    assert!(pair.left.qp.query().sq_draining);
    assert!(pair.a.events.poll().is_empty());
    pair.settle();
    assert_eq!(pair.left.scq.statuses(), [(1, WcStatus::Success)]);
    assert_eq!(pair.a.events.poll(), drained);
    assert!(!pair.left.qp.query().sq_draining);
    pair.left.qp.notify_send();
    assert!(pair.left.scq.poll().is_empty());
    // It still takes requests of the peer.
    pair.right.submit(3, write(mine.remote(0)), &[theirs.sge(0, 10)]);
    assert_eq!(pair.right.scq.one().status, WcStatus::Success);
    pair.left.to(QpState::Rts);
    assert_eq!(pair.left.scq.statuses(), [(2, WcStatus::Success)]);
    drain(&pair.left);
    assert_eq!(pair.a.events.poll(), drained);
}
