//! Commands through the register face. [`Rig::run`] checks what holds for all of them.

use std::sync::atomic::Ordering;

use crate::abi::cmd::*;
use crate::abi::layout::GuestLayout;
use crate::config::{DeviceConfig, Limits};
use crate::stats::ObjectCounts;
use crate::test_rig::{FREE, PAGES, Rig, UAR_PFN, config, page};

fn counts(rig: &Rig) -> ObjectCounts {
    rig.device.status().objects
}

/// Conformance 20.
#[test]
fn commands_that_do_not_exist() {
    let rig = Rig::up();
    for id in [7, 21, 22, 0xffff, 0x8000_0000, u32::MAX] {
        assert!(rig.run(Opcode(id), &QueryQp::default()).is_err(), "{id}");
    }
}

/// Conformance 6: the port.
#[test]
fn the_port() {
    let rig = Rig::up();
    let query = |port_num| rig.run(Opcode::QUERY_PORT, &QueryPort { port_num });
    let attrs = QueryPortResp::decode(&query(1).unwrap()).attrs;
    assert_eq!((attrs.state, attrs.phys_state, attrs.max_mtu, attrs.active_mtu), (4, 5, 5, 3));
    assert_eq!((attrs.gid_tbl_len, attrs.pkey_tbl_len, attrs.max_msg_sz), (256, 1, 1 << 30));
    rig.books.port_down.store(true, Ordering::Relaxed);
    let attrs = QueryPortResp::decode(&query(1).unwrap()).attrs;
    assert_eq!((attrs.state, attrs.phys_state), (1, 3));
    assert!(query(0).is_err() && query(2).is_err());

    let pkey: QueryPkeyResp = rig.ok(Opcode::QUERY_PKEY, &QueryPkey { port_num: 1, index: 0 });
    assert_eq!(pkey.pkey, 0xffff);
    assert!(rig.run(Opcode::QUERY_PKEY, &QueryPkey { port_num: 1, index: 1 }).is_err());
    assert!(rig.run(Opcode::QUERY_PKEY, &QueryPkey { port_num: 2, index: 0 }).is_err());
}

/// Conformance 27.
#[test]
fn doorbell_pages_of_contexts() {
    let rig = Rig::up();
    let create = |pfn64| rig.run(Opcode::CREATE_UC, &CreateUc { pfn64 });
    for bad in [UAR_PFN, UAR_PFN - 1, UAR_PFN + 1024, UAR_PFN + (1 << 32) + 1, 0, u64::MAX] {
        assert!(create(bad).is_err(), "{bad:#x}");
    }
    let first = rig.open(1);
    assert_ne!(first, 0);
    assert!(create(UAR_PFN + 1).is_err());
    let last = rig.open(1023);
    assert_ne!(first, last);
    rig.run(Opcode::DESTROY_UC, &DestroyUc { ctx_handle: first }).unwrap();
    assert!(rig.run(Opcode::DESTROY_UC, &DestroyUc { ctx_handle: first }).is_err());
    rig.open(1);
    assert!(rig.run(Opcode::CREATE_PD, &CreatePd { ctx_handle: first }).is_err(), "a dead context");
}

/// Conformance 28: handles that name nothing.
#[test]
fn unknown_handles() {
    let rig = Rig::up();
    for handle in [0, 1, 2, 0x00ff_ffff, u32::MAX] {
        assert!(rig.run(Opcode::DESTROY_PD, &DestroyPd { pd_handle: handle }).is_err());
        assert!(rig.run(Opcode::DESTROY_MR, &DestroyMr { mr_handle: handle }).is_err());
        assert!(rig.run(Opcode::DESTROY_CQ, &DestroyCq { cq_handle: handle }).is_err());
        assert!(rig.run(Opcode::DESTROY_QP, &DestroyQp { qp_handle: handle }).is_err());
        assert!(rig.run(Opcode::DESTROY_SRQ, &DestroySrq { srq_handle: handle }).is_err());
        assert!(rig.run(Opcode::DESTROY_UC, &DestroyUc { ctx_handle: handle }).is_err());
        assert!(rig.run(Opcode::QUERY_QP, &QueryQp { qp_handle: handle }).is_err());
        assert!(rig.run(Opcode::QUERY_SRQ, &QuerySrq { srq_handle: handle }).is_err());
        assert!(rig.run(Opcode::MODIFY_QP, &ModifyQp { qp_handle: handle, ..Default::default() }).is_err());
        assert!(rig.run(Opcode::MODIFY_SRQ, &ModifySrq { srq_handle: handle, ..Default::default() }).is_err());
        assert!(rig.run(Opcode::CREATE_MR, &CreateMr { pd_handle: handle, ..rig.mr_request(0) }).is_err());
        assert!(rig.run(Opcode::CREATE_SRQ, &rig.srq_request(handle)).is_err());
        assert!(rig.run(Opcode::CREATE_QP, &rig.qp_request(qp_type::RC, handle, handle)).is_err());
    }
    assert!(rig.run(Opcode::CREATE_CQ, &rig.cq_request(5)).is_err());
    assert_eq!(counts(&rig), ObjectCounts::default());
    assert_eq!(rig.device.status().page_list_extents, 0);
}

/// Conformance 21, 33: memory regions.
#[test]
fn memory_regions() {
    let rig = Rig::up();
    let (kernel, user) = (rig.create_pd(0), rig.create_pd(rig.open(1)));
    let create = |request: &CreateMr| rig.run(Opcode::CREATE_MR, request);
    let good = rig.mr_request(user);
    for bad in [
        CreateMr { length: 0, nchunks: 0, ..good },
        CreateMr { length: 0, ..good },
        CreateMr { nchunks: 0, ..good },
        CreateMr { nchunks: 1, ..good },
        CreateMr { nchunks: 3, ..good },
        // Sizes that agree modulo 2^32 bytes only (the check that QEMU computes in 32 bits).
        CreateMr { start: 0, length: 0x1000, nchunks: 0x10_0001, ..good },
        CreateMr { length: (1 << 30) + 1, nchunks: 262_145, ..good },
        CreateMr { start: 0, length: (1 << 30) + 1, nchunks: 262_145, ..good },
        CreateMr { length: u64::MAX, ..good },
        CreateMr { start: u64::MAX - 0x7ff, ..good },
        CreateMr { pdir_dma: 0, ..good },
        CreateMr { pdir_dma: good.pdir_dma + 8, ..good },
        CreateMr { pdir_dma: page(PAGES), ..good },
        CreateMr { flags: 3, ..good },
        CreateMr { flags: 4, ..good },
        CreateMr { flags: mr_flags::DMA, ..good },
        CreateMr { flags: mr_flags::FAST_REGISTER, nchunks: 8, ..good },
        CreateMr { pd_handle: kernel, flags: mr_flags::FAST_REGISTER, nchunks: 0, ..good },
        CreateMr { pd_handle: kernel, flags: mr_flags::FAST_REGISTER, nchunks: 129, ..good },
    ] {
        assert!(create(&bad).is_err(), "{bad:x?}");
    }
    rig.books.refuse.store(true, Ordering::Relaxed);
    assert!(create(&good).is_err());
    assert_eq!((counts(&rig).mrs, rig.device.status().page_list_extents), (0, 0));

    rig.books.take();
    let response: CreateMrResp = rig.ok(Opcode::CREATE_MR, &good);
    assert_eq!((response.lkey, response.rkey), (0x101, 0x101));
    assert_eq!(
        rig.books.take(),
        ["user MR 0x7f0000000800+0x1000 in 2 pages, Access(LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ)"]
    );
    let one_byte = CreateMr { start: 0xfff, length: 1, nchunks: 1, access_flags: 0, ..good };
    create(&one_byte).unwrap();
    create(&CreateMr { pd_handle: kernel, flags: mr_flags::DMA, access_flags: 1, ..Default::default() }).unwrap();
    let fast = CreateMr { pd_handle: kernel, flags: mr_flags::FAST_REGISTER, nchunks: 128, ..Default::default() };
    create(&fast).unwrap();
    assert_eq!(
        rig.books.take()[1..],
        ["DMA MR Access(LOCAL_WRITE)", "fast-register MR of 128 pages"].map(str::to_owned)
    );
    rig.run(Opcode::DESTROY_MR, &DestroyMr { mr_handle: response.mr_handle }).unwrap();
    assert_eq!(rig.books.take(), ["destroy MR 0x101"]);
}

/// Conformance 32, 33: a full gibibyte, through one directory of 512 tables.
#[test]
fn a_memory_region_of_one_gibibyte() {
    let rig = Rig::up();
    let pd = rig.create_pd(0);
    // The directory takes 513 pages; all tables name the same few data pages.
    let dir = rig.directory(FREE, FREE + 520, 262_144);
    let request =
        CreateMr { start: 0, length: 1 << 30, pdir_dma: dir, pd_handle: pd, nchunks: 262_144, ..Default::default() };
    rig.books.take();
    rig.run(Opcode::CREATE_MR, &request).unwrap();
    assert_eq!(rig.books.take(), ["user MR 0x0+0x40000000 in 262144 pages, Access(0x0)"]);
    assert!(rig.run(Opcode::CREATE_MR, &CreateMr { start: 1, ..request }).is_err());
}

/// Conformance 21: the memory that a guest makes us hold is bounded, and given back.
#[test]
fn the_budget_of_page_lists() {
    let limits = Limits { max_extents: 5, ..Limits::default() };
    let rig = Rig::active(DeviceConfig { limits, ..config() });
    let pd = rig.create_pd(0);
    let scattered = |count: u64| {
        let dir = rig.directory(FREE, FREE + 8, count);
        for index in 0..count {
            rig.poke(dir + 4096 + index * 8, &page(FREE + 8 + index * 2).to_le_bytes());
        }
        let nchunks = u32::try_from(count).unwrap();
        let length = count * 4096;
        CreateMr { start: 0, length, pdir_dma: dir, pd_handle: pd, nchunks, ..Default::default() }
    };
    assert!(rig.run(Opcode::CREATE_MR, &scattered(6)).is_err());
    let mr: CreateMrResp = rig.ok(Opcode::CREATE_MR, &scattered(4));
    assert!(rig.run(Opcode::CREATE_MR, &scattered(2)).is_err());
    rig.create_cq(0);
    rig.run(Opcode::DESTROY_MR, &DestroyMr { mr_handle: mr.mr_handle }).unwrap();
    rig.run(Opcode::CREATE_MR, &scattered(4)).unwrap();
}

/// Conformance 21, 25: completion queues.
#[test]
fn completion_queues() {
    let rig = Rig::up();
    let good = rig.cq_request(0);
    for bad in [
        CreateCq { cqe: 0, ..good },
        CreateCq { cqe: 63, ..good },
        CreateCq { cqe: 1 << 31, nchunks: u32::MAX, ..good },
        CreateCq { cqe: 262_144, nchunks: 262_144, ..good },
        CreateCq { nchunks: 0, ..good },
        CreateCq { nchunks: 1, ..good },
        CreateCq { cqe: 128, ..good },
        CreateCq { pdir_dma: 0, ..good },
        CreateCq { pdir_dma: good.pdir_dma + 1, ..good },
        CreateCq { pdir_dma: !0xfff, ..good },
        CreateCq { ctx_handle: 1, ..good },
    ] {
        assert!(rig.run(Opcode::CREATE_CQ, &bad).is_err(), "{bad:x?}");
    }
    rig.books.refuse.store(true, Ordering::Relaxed);
    assert!(rig.run(Opcode::CREATE_CQ, &good).is_err());
    assert_eq!((counts(&rig).cqs, rig.device.status().page_list_extents), (0, 0));
    for (cqe, nchunks) in [(1, 2), (64, 2), (64, 9), (64, u32::MAX)] {
        let response: CreateCqResp = rig.ok(Opcode::CREATE_CQ, &CreateCq { cqe, nchunks, ..good });
        assert_eq!(response.cqe, cqe);
    }
}

#[test]
fn shared_receive_queues() {
    let rig = Rig::up();
    let pd = rig.create_pd(rig.open(1));
    let good = rig.srq_request(pd);
    let attrs = good.attrs;
    for bad in [
        CreateSrq { srq_type: 1, ..good },
        CreateSrq { attrs: SrqAttr { max_wr: 0, ..attrs }, ..good },
        CreateSrq { attrs: SrqAttr { max_wr: 63, ..attrs }, ..good },
        CreateSrq { attrs: SrqAttr { max_wr: 32_768, ..attrs }, nchunks: 9999, ..good },
        CreateSrq { attrs: SrqAttr { max_wr: 256, ..attrs }, ..good },
        CreateSrq { attrs: SrqAttr { max_sge: 17, ..attrs }, ..good },
        CreateSrq { attrs: SrqAttr { max_sge: u32::MAX, ..attrs }, ..good },
        CreateSrq { attrs: SrqAttr { srq_limit: 65, ..attrs }, ..good },
        CreateSrq { nchunks: 1, ..good },
        CreateSrq { pdir_dma: 8, ..good },
    ] {
        assert!(rig.run(Opcode::CREATE_SRQ, &bad).is_err(), "{bad:x?}");
    }
    let srq_handle = rig.create_srq(pd);
    let query = || rig.ok::<_, QuerySrqResp>(Opcode::QUERY_SRQ, &QuerySrq { srq_handle }).attrs;
    assert_eq!(query(), attrs);
    let modify = |attr_mask, srq_limit| {
        let attrs = SrqAttr { srq_limit, ..Default::default() };
        rig.run(Opcode::MODIFY_SRQ, &ModifySrq { srq_handle, attr_mask, attrs })
    };
    modify(2, 10).unwrap();
    assert_eq!(query().srq_limit, 10);
    modify(3, 64).unwrap();
    assert_eq!(query().srq_limit, 64);
    assert!(modify(2, 65).is_err() && modify(1, 1).is_err() && modify(0, 1).is_err());
    assert_eq!(query().srq_limit, 64);
}

/// Conformance 31.
#[test]
fn gid_bindings() {
    let rig = Rig::up();
    let bind_in =
        |index, gid_type, vlan| rig.run(Opcode::CREATE_BIND, &CreateBind { vlan, index, new_gid: [1; 16], gid_type });
    let bind = |index, gid_type| bind_in(index, gid_type, 0xfff);
    bind(0, 2).unwrap();
    bind(0, 2).unwrap();
    bind(255, 2).unwrap();
    assert!(bind(256, 2).is_err() && bind(u32::MAX, 2).is_err());
    assert!(bind(1, 1).is_err() && bind(1, 0).is_err() && bind(1, 3).is_err());
    assert_eq!(counts(&rig).gids, 2);
    rig.books.take();
    let unbind = |index| rig.run(Opcode::DESTROY_BIND, &DestroyBind { index });
    unbind(255).unwrap();
    unbind(255).unwrap();
    assert!(unbind(256).is_err());
    assert_eq!(rig.books.take(), ["unbind 255"]);
    assert_eq!(counts(&rig).gids, 1);
    // No driver names a VLAN; 0xFFF is none.
    for vlan in [0, 0xfff, 42, 0xffe] {
        bind_in(3, 2, vlan).unwrap();
    }
    assert!(bind_in(3, 2, 0x1000).is_err() && bind_in(3, 2, 0x1_002a).is_err());
    let tails: Vec<_> = rig.books.take().iter().map(|note| note.split(" VLAN").nth(1).map(str::to_owned)).collect();
    assert_eq!(tails, [None, None, Some(" 42".to_owned()), Some(" 4094".to_owned())]);
}

/// Conformance 28, 29: users go before what they use, and what has died is cut off.
#[test]
fn destroying_what_is_in_use() {
    let rig = Rig::up();
    let context = rig.open(1);
    let pd = rig.create_pd(context);
    let cq = rig.create_cq(context);
    let srq = rig.create_srq(pd);
    rig.create_mr(pd);
    rig.create_qp(pd, cq);
    let shared = CreateQp { is_srq: 1, srq_handle: srq, ..rig.qp_request(qp_type::RC, pd, cq) };
    rig.run(Opcode::CREATE_QP, &shared).unwrap();
    rig.books.take();

    rig.run(Opcode::DESTROY_SRQ, &DestroySrq { srq_handle: srq }).unwrap();
    assert_eq!(rig.books.take(), ["QP 3 Error", "destroy SRQ 0"]);
    rig.run(Opcode::DESTROY_CQ, &DestroyCq { cq_handle: cq }).unwrap();
    assert_eq!(rig.books.take(), ["QP 2 Error", "QP 3 Error"]);
    rig.run(Opcode::DESTROY_PD, &DestroyPd { pd_handle: pd }).unwrap();
    assert_eq!(rig.books.take(), ["destroy QP 2", "destroy QP 3", "destroy MR 0x101"]);
    assert_eq!(counts(&rig), ObjectCounts { contexts: 1, ..Default::default() });

    let pd = rig.create_pd(context);
    let cq = rig.create_cq(context);
    rig.create_qp(pd, cq);
    rig.create_mr(pd);
    let other = rig.create_pd(0);
    rig.run(Opcode::DESTROY_UC, &DestroyUc { ctx_handle: context }).unwrap();
    assert_eq!(counts(&rig), ObjectCounts { pds: 1, ..Default::default() });
    rig.run(Opcode::DESTROY_PD, &DestroyPd { pd_handle: other }).unwrap();
    assert_eq!(rig.device.status().page_list_extents, 0);
}

/// Section 4.4: what the driver never learns of is taken back.
#[test]
fn a_response_that_cannot_be_written_undoes_the_command() {
    let rig = Rig::up();
    let pd = rig.create_pd(0);
    let cq = rig.create_cq(0);
    let requests = [
        (Opcode::CREATE_PD, encode(&CreatePd::default())),
        (Opcode::CREATE_UC, encode(&CreateUc { pfn64: UAR_PFN + 9 })),
        (Opcode::CREATE_CQ, encode(&rig.cq_request(0))),
        (Opcode::CREATE_MR, encode(&rig.mr_request(pd))),
        (Opcode::CREATE_QP, encode(&rig.qp_request(qp_type::RC, pd, cq))),
        (Opcode::CREATE_SRQ, encode(&rig.srq_request(pd))),
    ];
    let before = counts(&rig);
    // Memory is mapped again without the page of the response slot, as when a vIOMMU takes it away.
    let backing = vm_memory::mmap::MmapRegion::new(usize::try_from(PAGES * 4096).unwrap()).unwrap();
    let backing = std::sync::Arc::new(backing);
    let all = rig.peek(page(0), usize::try_from(PAGES * 4096).unwrap());
    rig.memory.unmap_all();
    let map = |from: u64, to: u64| {
        let backing = pvrdma_guest_memory::Backing {
            mapping: std::sync::Arc::clone(&backing),
            offset: usize::try_from(from * 4096).unwrap(),
        };
        let range = pvrdma_guest_memory::DmaRange {
            iova: page(from),
            len: (to - from) * 4096,
            writable: true,
            backing: Some(backing),
        };
        rig.memory.map(range).unwrap();
    };
    map(0, 2);
    map(3, PAGES);
    rig.poke(page(0), &all[..0x2000]);
    rig.poke(page(3), &all[0x3000..]);
    for (opcode, request) in requests {
        let (body, _) = request.split_at(80);
        let mut slot = body.to_vec();
        RequestHeader { response: 0, cmd: opcode.0 }.encode(&mut slot);
        rig.directory(FREE, FREE + 8, 6);
        rig.poke(page(1), &slot);
        rig.sink.take();
        assert_ne!(rig.request(), 0, "{opcode}");
        assert!(rig.sink.take().is_empty());
        assert_eq!(counts(&rig), before, "{opcode}");
    }
}

fn encode<T: GuestLayout>(body: &T) -> [u8; REQUEST_SIZE] {
    let mut bytes = [0; REQUEST_SIZE];
    body.encode(&mut bytes);
    bytes
}
