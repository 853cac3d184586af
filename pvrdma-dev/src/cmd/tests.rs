//! Commands, through registers.

use crate::abi::cmd::*;
use crate::abi::layout::GuestLayout;
use crate::config::DeviceConfig;
use crate::limits::Limits;
use crate::stats::ObjectCounts;
use crate::testing::typed::TypedDriver;
use crate::testing::{CommandError, Placement};

/// Conformance 6: the port.
#[test]
fn the_port() {
    let guest = TypedDriver::up();
    let query = |port_num| guest.run(Opcode::QUERY_PORT, &QueryPort { port_num });
    let attrs = QueryPortResp::decode(&query(1).unwrap()).attrs;
    assert_eq!((attrs.state, attrs.phys_state, attrs.max_mtu, attrs.active_mtu), (4, 5, 5, 3));
    assert_eq!((attrs.gid_tbl_len, attrs.pkey_tbl_len, attrs.max_msg_sz), (256, 1, 1 << 30));
    guest.hca.set_port_down(true);
    let attrs = QueryPortResp::decode(&query(1).unwrap()).attrs;
    assert_eq!((attrs.state, attrs.phys_state), (1, 3));
    assert!(query(0).is_err() && query(2).is_err());

    let pkey: QueryPkeyResp = guest.ok(Opcode::QUERY_PKEY, &QueryPkey { port_num: 1, index: 0 });
    assert_eq!(pkey.pkey, 0xffff);
    assert!(guest.run(Opcode::QUERY_PKEY, &QueryPkey { port_num: 1, index: 1 }).is_err());
    assert!(guest.run(Opcode::QUERY_PKEY, &QueryPkey { port_num: 2, index: 0 }).is_err());
}

/// Conformance 27.
#[test]
fn doorbell_pages_of_contexts() {
    let guest = TypedDriver::up();
    let create = |pfn64| guest.run(Opcode::CREATE_UC, &CreateUc { pfn64 });
    for bad in
        [guest.uar_pfn(), guest.uar_pfn() - 1, guest.uar_pfn() + 1024, guest.uar_pfn() + (1 << 32) + 1, 0, u64::MAX]
    {
        assert!(create(bad).is_err(), "{bad:#x}");
    }
    let first = guest.open(1);
    assert_ne!(first, 0);
    assert!(create(guest.uar_pfn() + 1).is_err());
    let last = guest.open(1023);
    assert_ne!(first, last);
    guest.run(Opcode::DESTROY_UC, &DestroyUc { ctx_handle: first }).unwrap();
    assert!(guest.run(Opcode::DESTROY_UC, &DestroyUc { ctx_handle: first }).is_err());
    guest.open(1);
    assert!(guest.run(Opcode::CREATE_PD, &CreatePd { ctx_handle: first }).is_err(), "a dead context");
}

/// Conformance 28: handles that name no object.
#[test]
fn unknown_handles() {
    let guest = TypedDriver::up();
    for handle in [0, 1, 2, 0x00ff_ffff, u32::MAX] {
        assert!(guest.run(Opcode::DESTROY_PD, &DestroyPd { pd_handle: handle }).is_err());
        assert!(guest.run(Opcode::DESTROY_MR, &DestroyMr { mr_handle: handle }).is_err());
        assert!(guest.run(Opcode::DESTROY_CQ, &DestroyCq { cq_handle: handle }).is_err());
        assert!(guest.run(Opcode::DESTROY_QP, &DestroyQp { qp_handle: handle }).is_err());
        assert!(guest.run(Opcode::DESTROY_SRQ, &DestroySrq { srq_handle: handle }).is_err());
        assert!(guest.run(Opcode::DESTROY_UC, &DestroyUc { ctx_handle: handle }).is_err());
        assert!(guest.run(Opcode::QUERY_QP, &QueryQp { qp_handle: handle }).is_err());
        assert!(guest.run(Opcode::QUERY_SRQ, &QuerySrq { srq_handle: handle }).is_err());
        assert!(guest.run(Opcode::MODIFY_QP, &ModifyQp { qp_handle: handle, ..Default::default() }).is_err());
        assert!(guest.run(Opcode::MODIFY_SRQ, &ModifySrq { srq_handle: handle, ..Default::default() }).is_err());
        assert!(guest.run(Opcode::CREATE_MR, &CreateMr { pd_handle: handle, ..guest.mr_request(0) }).is_err());
        assert!(guest.run(Opcode::CREATE_SRQ, &guest.srq_request(handle)).is_err());
        assert!(guest.run(Opcode::CREATE_QP, &guest.qp_request(qp_type::RC, handle, handle)).is_err());
    }
    assert!(guest.run(Opcode::CREATE_CQ, &guest.cq_request(5)).is_err());
    assert_eq!(guest.counts(), ObjectCounts::default());
    assert_eq!(guest.device.status().kept.used_bytes, 0);
}

/// Conformance 21, 33: memory regions.
#[test]
fn memory_regions() {
    let guest = TypedDriver::up();
    let (kernel, user) = (guest.create_pd(0), guest.create_pd(guest.open(1)));
    let domains = guest.device.status().kept.used_bytes;
    let create = |request: &CreateMr| guest.run(Opcode::CREATE_MR, request);
    let good = guest.mr_request(user);
    for bad in [
        CreateMr { length: 0, nchunks: 0, ..good },
        CreateMr { length: 0, ..good },
        CreateMr { nchunks: 0, ..good },
        CreateMr { nchunks: 1, ..good },
        CreateMr { nchunks: 3, ..good },
        // The sizes agree only modulo 2^32 bytes (QEMU computes this check in 32 bits).
        CreateMr { start: 0, length: 0x1000, nchunks: 0x10_0001, ..good },
        CreateMr { length: (1 << 30) + 1, nchunks: 262_145, ..good },
        CreateMr { start: 0, length: (1 << 30) + 1, nchunks: 262_145, ..good },
        CreateMr { length: u64::MAX, ..good },
        CreateMr { start: u64::MAX - 0x7ff, ..good },
        CreateMr { pdir_dma: 0, ..good },
        CreateMr { pdir_dma: good.pdir_dma + 8, ..good },
        CreateMr { pdir_dma: guest.memory.end(), ..good },
        CreateMr { flags: 3, ..good },
        CreateMr { flags: 4, ..good },
        CreateMr { flags: mr_flags::DMA, ..good },
        CreateMr { flags: mr_flags::FAST_REGISTER, nchunks: 8, ..good },
        CreateMr { pd_handle: kernel, flags: mr_flags::FAST_REGISTER, nchunks: 0, ..good },
        CreateMr { pd_handle: kernel, flags: mr_flags::FAST_REGISTER, nchunks: 129, ..good },
    ] {
        assert!(create(&bad).is_err(), "{bad:x?}");
    }
    guest.hca.refuse_next();
    assert!(create(&good).is_err());
    assert_eq!((guest.counts().mrs, guest.device.status().kept.used_bytes), (0, domains));

    guest.hca.take_calls();
    let response: CreateMrResp = guest.ok(Opcode::CREATE_MR, &good);
    assert_eq!((response.lkey, response.rkey), (0x101, 0x101));
    assert_eq!(
        guest.hca.take_calls(),
        ["user MR 0x7f0000000800+0x1000 in 2 pages, Access(LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ)"]
    );
    let one_byte = CreateMr { start: 0xfff, length: 1, nchunks: 1, access_flags: 0, ..good };
    create(&one_byte).unwrap();
    create(&CreateMr { pd_handle: kernel, flags: mr_flags::DMA, access_flags: 1, ..Default::default() }).unwrap();
    let fast = CreateMr { pd_handle: kernel, flags: mr_flags::FAST_REGISTER, nchunks: 128, ..Default::default() };
    create(&fast).unwrap();
    assert_eq!(
        guest.hca.take_calls()[1..],
        ["DMA MR Access(LOCAL_WRITE)", "fast-register MR of 128 pages"].map(str::to_owned)
    );
    guest.run(Opcode::DESTROY_MR, &DestroyMr { mr_handle: response.mr_handle }).unwrap();
    assert_eq!(guest.hca.take_calls(), ["destroy MR 0x101"]);
}

/// Conformance 21: the memory that a guest makes this process allocate is bounded, and freed.
#[test]
fn the_budget_of_page_lists() {
    let limits = Limits { max_memory: 10_000, ..Limits::default() };
    let guest = TypedDriver::on(DeviceConfig { limits, ..TypedDriver::config() });
    let pd = guest.create_pd(0);
    let scattered = |count: usize| {
        // No two pages are adjacent.
        let dir = guest.directory(count);
        let length = count as u64 * 4096;
        let nchunks = u32::try_from(count).unwrap();
        CreateMr { start: 0, length, pdir_dma: dir, pd_handle: pd, nchunks, ..Default::default() }
    };
    // 16 bytes per page, in addition to the objects.
    guest.run(Opcode::CREATE_MR, &scattered(600)).unwrap_err();
    let mr: CreateMrResp = guest.ok(Opcode::CREATE_MR, &scattered(400));
    guest.run(Opcode::CREATE_MR, &scattered(200)).unwrap_err();
    assert_eq!(guest.device.status().kept.refused, 2);
    let one_extent = guest.memory.directory(&guest.memory.alloc(2, Placement::Contiguous)).addr;
    guest.run(Opcode::CREATE_CQ, &CreateCq { pdir_dma: one_extent, ..guest.cq_request(0) }).unwrap();
    guest.run(Opcode::DESTROY_MR, &DestroyMr { mr_handle: mr.mr_handle }).unwrap();
    guest.run(Opcode::CREATE_MR, &scattered(400)).unwrap();
}

/// Conformance 21, 25: completion queues.
#[test]
fn completion_queues() {
    let guest = TypedDriver::up();
    let good = guest.cq_request(0);
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
        assert!(guest.run(Opcode::CREATE_CQ, &bad).is_err(), "{bad:x?}");
    }
    guest.hca.refuse_next();
    assert!(guest.run(Opcode::CREATE_CQ, &good).is_err());
    assert_eq!((guest.counts().cqs, guest.device.status().kept.used_bytes), (0, 0));
    for (cqe, nchunks) in [(1, 2), (64, 2), (64, 9), (64, u32::MAX)] {
        let response: CreateCqResp = guest.ok(Opcode::CREATE_CQ, &CreateCq { cqe, nchunks, ..good });
        assert_eq!(response.cqe, cqe);
    }
}

#[test]
fn shared_receive_queues() {
    let guest = TypedDriver::up();
    let pd = guest.create_pd(guest.open(1));
    let good = guest.srq_request(pd);
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
        assert!(guest.run(Opcode::CREATE_SRQ, &bad).is_err(), "{bad:x?}");
    }
    let srq_handle = guest.create_srq(pd);
    let query = || guest.ok::<_, QuerySrqResp>(Opcode::QUERY_SRQ, &QuerySrq { srq_handle }).attrs;
    assert_eq!(query(), attrs);
    let modify = |attr_mask, srq_limit| {
        let attrs = SrqAttr { srq_limit, ..Default::default() };
        guest.run(Opcode::MODIFY_SRQ, &ModifySrq { srq_handle, attr_mask, attrs })
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
    let guest = TypedDriver::up();
    let bind_in =
        |index, gid_type, vlan| guest.run(Opcode::CREATE_BIND, &CreateBind { vlan, index, new_gid: [1; 16], gid_type });
    let bind = |index, gid_type| bind_in(index, gid_type, 0xfff);
    bind(0, 2).unwrap();
    bind(0, 2).unwrap();
    bind(255, 2).unwrap();
    assert!(bind(256, 2).is_err() && bind(u32::MAX, 2).is_err());
    assert!(bind(1, 1).is_err() && bind(1, 0).is_err() && bind(1, 3).is_err());
    assert_eq!(guest.counts().gids, Some(2));
    guest.hca.take_calls();
    let unbind = |index| guest.run(Opcode::DESTROY_BIND, &DestroyBind { index });
    unbind(255).unwrap();
    unbind(255).unwrap();
    assert!(unbind(256).is_err());
    assert_eq!(guest.hca.take_calls(), ["unbind 255"]);
    assert_eq!(guest.counts().gids, Some(1));
    // No driver sets a VLAN; 0xFFF means none.
    for vlan in [0, 0xfff, 42, 0xffe] {
        bind_in(3, 2, vlan).unwrap();
    }
    assert!(bind_in(3, 2, 0x1000).is_err() && bind_in(3, 2, 0x1_002a).is_err());
    let tails: Vec<_> =
        guest.hca.take_calls().iter().map(|note| note.split(" VLAN").nth(1).map(str::to_owned)).collect();
    assert_eq!(tails, [None, None, Some(" 42".to_owned()), Some(" 4094".to_owned())]);
}

/// Conformance 28, 29: users of an object are destroyed before it, and QPs without their objects are disconnected.
#[test]
fn destroying_objects_in_use() {
    let guest = TypedDriver::up();
    let context = guest.open(1);
    let pd = guest.create_pd(context);
    let cq = guest.create_cq(context);
    let srq = guest.create_srq(pd);
    guest.create_mr(pd);
    guest.create_qp(pd, cq);
    let shared = CreateQp { is_srq: 1, srq_handle: srq, ..guest.qp_request(qp_type::RC, pd, cq) };
    guest.run(Opcode::CREATE_QP, &shared).unwrap();
    guest.hca.take_calls();

    guest.run(Opcode::DESTROY_SRQ, &DestroySrq { srq_handle: srq }).unwrap();
    assert_eq!(guest.hca.take_calls(), ["QP 3 Error", "destroy SRQ 0"]);
    guest.run(Opcode::DESTROY_CQ, &DestroyCq { cq_handle: cq }).unwrap();
    assert_eq!(guest.hca.take_calls(), ["QP 2 Error", "QP 3 Error"]);
    guest.run(Opcode::DESTROY_PD, &DestroyPd { pd_handle: pd }).unwrap();
    assert_eq!(guest.hca.take_calls(), ["destroy QP 2", "destroy QP 3", "destroy MR 0x101"]);
    assert_eq!(guest.counts(), ObjectCounts { contexts: 1, ..Default::default() });

    let pd = guest.create_pd(context);
    let cq = guest.create_cq(context);
    guest.create_qp(pd, cq);
    guest.create_mr(pd);
    let other = guest.create_pd(0);
    guest.run(Opcode::DESTROY_UC, &DestroyUc { ctx_handle: context }).unwrap();
    assert_eq!(guest.counts(), ObjectCounts { pds: 1, ..Default::default() });
    guest.run(Opcode::DESTROY_PD, &DestroyPd { pd_handle: other }).unwrap();
    assert_eq!(guest.device.status().kept.used_bytes, 0);
}

/// Section 4.4: an object of which the driver never learns is destroyed.
#[test]
fn a_response_that_cannot_be_written_undoes_the_command() {
    let guest = TypedDriver::up();
    let pd = guest.create_pd(0);
    let cq = guest.create_cq(0);
    let requests = [
        TypedDriver::request(Opcode::CREATE_PD, &CreatePd::default()),
        TypedDriver::request(Opcode::CREATE_UC, &CreateUc { pfn64: guest.uar_pfn() + 9 }),
        TypedDriver::request(Opcode::CREATE_CQ, &guest.cq_request(0)),
        TypedDriver::request(Opcode::CREATE_MR, &guest.mr_request(pd)),
        TypedDriver::request(Opcode::CREATE_QP, &guest.qp_request(qp_type::RC, pd, cq)),
        TypedDriver::request(Opcode::CREATE_SRQ, &guest.srq_request(pd)),
    ];
    let before = guest.counts();
    // A vIOMMU may unmap the page of the response slot like this.
    let [_, response] = guest.driver.slots();
    guest.memory.remove_page(response);
    for request in requests {
        assert!(matches!(guest.driver.execute(&request), Err(CommandError::Refused(_))), "{request:?}");
        assert_eq!(guest.counts(), before, "{request:?}");
    }
}
