//! Memory regions, keys and the guest's memory map.

use pvrdma_pages::PAGE_SIZE;
use pvrdma_verbs_types::{
    Access, FastRegister, Invalidate, QpType, RemoteAddress, SendData, SendOp, Sge, WcFlags, WcOpcode, WcStatus,
};

use super::Subject;
use crate::testing::{ALL, BORDER, page_list, write};
use crate::{Backend, Hca, MemoryRegion, MrRequest};

const OK: WcStatus = WcStatus::Success;

pub(super) fn the_dma_key_names_bus_addresses_and_is_local<B: Backend>(subject: &Subject<'_, B>) {
    let pair = subject.pair();
    let dma = pair.a.hca.register_mr(&pair.a.pd, MrRequest::Dma { access: ALL }).unwrap();
    let remote = pair.b.hca.register_mr(&pair.b.pd, MrRequest::Dma { access: ALL }).unwrap();
    let (target, bus) = (pair.b.buffer(64), pair.a.pages(2)[1]);
    pair.a.memory.view().write(bus + 0x800, b"bus addresses").unwrap();
    let sge = Sge { addr: bus + 0x800, length: 13, lkey: dma.lkey() };
    pair.left.submit(1, write(target.remote(0)), &[sge]);
    assert_eq!(pair.left.scq.statuses(1), [(1, OK)]);
    assert_eq!(target.read(0, 13), b"bus addresses");
    // A receive may use the key as well, and may span two ranges of the map.
    pair.left.recv(9, &[Sge { addr: BORDER - 6, length: 13, lkey: dma.lkey() }]);
    pair.right.send(9, &[target.sge(0, 13)]);
    assert_eq!(pair.left.rcq.statuses(1), [(9, OK)]);
    assert_eq!(pair.right.scq.statuses(1), [(9, OK)]);
    let mut back = [0; 13];
    pair.a.memory.view().read(BORDER - 6, &mut back).unwrap();
    assert_eq!(&back, b"bus addresses");
    let remote = RemoteAddress { addr: 0x1000_0000, rkey: remote.rkey() };
    pair.left.submit(2, write(remote), &[sge]);
    assert_eq!(pair.left.scq.statuses(1), [(2, WcStatus::RemoteAccess)]);
}

pub(super) fn fast_registration_and_invalidation<B: Backend>(subject: &Subject<'_, B>) {
    let pair = subject.pair();
    if !pair.b.hca.limits().memory_management {
        assert!(pair.b.hca.register_mr(&pair.b.pd, MrRequest::FastRegister { max_pages: 4 }).is_err());
        return;
    }
    let fast = pair.b.hca.register_mr(&pair.b.pd, MrRequest::FastRegister { max_pages: 4 }).unwrap();
    let plain = pair.b.buffer(8192);
    let mine = pair.a.buffer(4096);
    mine.write(0, b"through a fast key");
    let pages = pair.b.pages(2);
    let last_page = pages[1];
    let key = |byte: u32| fast.rkey() & !0xff | (fast.rkey() + byte) & 0xff;
    let register = |byte| {
        let (iova, length, access) = (0x9000, 2 * PAGE_SIZE, ALL);
        let request = FastRegister { key: key(byte), iova, length, access, pages: Some(page_list(&pages)) };
        SendOp::FastRegister(Box::new(request))
    };
    pair.right.submit(1, register(1), &[]);
    let wc = pair.right.scq.one();
    assert_eq!((wc.opcode, wc.status), (WcOpcode::FastRegister, OK));
    let remote = |byte| RemoteAddress { addr: 0x9010 + PAGE_SIZE, rkey: key(byte) };
    pair.left.submit(2, write(remote(1)), &[mine.sge(0, 18)]);
    assert_eq!(pair.left.scq.statuses(1), [(2, OK)]);
    let mut back = [0; 18];
    pair.b.memory.view().read(last_page + 0x10, &mut back).unwrap();
    assert_eq!(&back, b"through a fast key");
    // The key is valid for local use as well.
    let target = pair.a.buffer(64);
    let sge = Sge { addr: 0x9010 + PAGE_SIZE, length: 18, lkey: key(1) };
    pair.right.submit(20, write(target.remote(0)), &[sge]);
    assert_eq!(pair.right.scq.statuses(1), [(20, OK)]);
    assert_eq!(target.read(0, 18), b"through a fast key");
    if subject.profile.fast_keys_for_all {
        let (other, peer) = (pair.b.qp(QpType::Rc), pair.a.qp(QpType::Rc));
        other.connect(&peer, |_| {});
        peer.connect(&other, |_| {});
        peer.submit(21, write(remote(1)), &[mine.sge(0, 18)]);
        assert_eq!(peer.scq.statuses(1), [(21, OK)]);
    }
    // The peer invalidates the key with its answer.
    pair.right.recv(3, &[plain.all()]);
    pair.left.submit(3, SendOp::Send { data: SendData::Invalidate(key(1)), to: None }, &[mine.sge(0, 4)]);
    let got = pair.right.rcq.one();
    assert_eq!((got.status, got.flags, got.invalidated_key), (OK, WcFlags::INVALIDATED, key(1)));
    assert_eq!(pair.left.scq.statuses(1), [(3, OK)]);
    pair.right.submit(4, register(2), &[]);
    pair.right.submit(5, SendOp::LocalInvalidate(Invalidate { key: key(2) }), &[]);
    let wc = pair.right.scq.wait(2);
    assert_eq!((wc[0].opcode, wc[0].status), (WcOpcode::FastRegister, OK));
    assert_eq!((wc[1].opcode, wc[1].status), (WcOpcode::LocalInvalidate, OK));
    pair.left.submit(6, write(remote(2)), &[mine.sge(0, 18)]);
    assert_eq!(pair.left.scq.statuses(1), [(6, WcStatus::RemoteAccess)]);
    fast.destroy();
}

pub(super) fn a_destroyed_region_is_gone<B: Backend>(subject: &Subject<'_, B>) {
    let pair = subject.pair();
    let (mine, theirs) = (pair.a.buffer(64), pair.b.buffer(64));
    pair.left.submit(1, write(theirs.remote(0)), &[mine.sge(0, 8)]);
    assert_eq!(pair.left.scq.statuses(1), [(1, OK)]);
    theirs.mr.destroy();
    theirs.mr.destroy();
    theirs.write(0, &[5; 64]);
    pair.left.submit(2, write(theirs.remote(0)), &[mine.sge(0, 8)]);
    assert_eq!(pair.left.scq.statuses(1), [(2, WcStatus::RemoteAccess)]);
    assert_eq!(theirs.read(0, 64), [5; 64]);
}

pub(super) fn unmapped_memory_is_not_reached<B: Backend>(subject: &Subject<'_, B>) {
    let pair = subject.pair();
    let (mine, theirs) = (pair.a.buffer(64), pair.b.buffer(64));
    pair.b.memory.unmap_all();
    pair.left.submit(1, write(theirs.remote(0)), &[mine.sge(0, 8)]);
    let [(1, status)] = pair.left.scq.statuses(1)[..] else { panic!("another request completed") };
    assert!(matches!(status, WcStatus::RemoteAccess | WcStatus::RemoteOperation), "{status:?}");
    drop((mine, theirs, pair));
    // The memory is local.
    let pair = subject.pair();
    let (mine, theirs) = (pair.a.buffer(64), pair.b.buffer(64));
    pair.a.memory.unmap_all();
    pair.left.submit(1, write(theirs.remote(0)), &[mine.sge(0, 8)]);
    assert_eq!(pair.left.scq.statuses(1), [(1, WcStatus::LocalProtection)]);
    assert_eq!(theirs.read(0, 8), [0; 8]);
}

pub(super) fn switched_off_memory_is_not_reached<B: Backend>(subject: &Subject<'_, B>) {
    let pair = subject.pair();
    let (mine, theirs) = (pair.a.buffer(64), pair.b.buffer(64));
    mine.write(0, &[7; 8]);
    pair.b.memory.set_enabled(false);
    pair.left.submit(1, write(theirs.remote(0)), &[mine.sge(0, 8)]);
    let [(1, status)] = pair.left.scq.statuses(1)[..] else { panic!("another request completed") };
    assert!(matches!(status, WcStatus::RemoteAccess | WcStatus::RemoteOperation), "{status:?}");
    pair.b.memory.set_enabled(true);
    assert_eq!(theirs.read(0, 8), [0; 8]);
}

pub(super) fn keys_differ_and_can_be_made_again<B: Backend>(subject: &Subject<'_, B>) {
    let pair = subject.pair();
    let pages = pair.b.pages(1);
    let mut seen = Vec::new();
    for i in 0..20 {
        let region = pair.b.register(&pair.b.pd, &pages, 0, PAGE_SIZE, Access::LOCAL_WRITE | Access::REMOTE_READ);
        let key = (region.mr.lkey(), region.mr.rkey());
        assert!(!seen.contains(&key), "{key:x?} came twice in a row");
        if i % 4 == 0 {
            seen.clear();
        }
        seen.push(key);
    }
    // These access rights are inconsistent.
    let request =
        MrRequest::User { start: 0x7000, length: 4096, pages: page_list(&pages), access: Access::REMOTE_WRITE };
    assert!(pair.b.hca.register_mr(&pair.b.pd, request).is_err());
    let request =
        MrRequest::User { start: 0x7000, length: 4097, pages: page_list(&pages), access: Access::LOCAL_WRITE };
    assert!(pair.b.hca.register_mr(&pair.b.pd, request).is_err(), "more bytes than pages");
}
