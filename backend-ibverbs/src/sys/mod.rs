//! Binary interface of `libibverbs.so.1` on 64-bit Linux, limited to the parts in use.
//!
//! Written from the facts in rdma-core's `verbs.h`: these layouts are the library's stable ABI since version 1.1. If
//! only the first fields of an object are needed, only they are declared, and values of such a type are never created
//! here. The offsets were compared with those of a C compiler; the assertions below verify them.

pub(crate) mod library;
pub(crate) mod load;
pub(crate) mod rdmacm;

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::mem::{offset_of, size_of};

/// A device in the library's list: the first fields of the public structure.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) ops: [Unused; 2],
    pub(crate) node_type: c_int,
    pub(crate) transport_type: c_int,
}

/// `IBV_TRANSPORT_IB`, which includes RoCE.
pub(crate) const TRANSPORT_IB: c_int = 0;
pub(crate) const TRANSPORT_IWARP: c_int = 1;

/// An open device: function pointers of its provider, and descriptors.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) device: *mut Device,
    pub(crate) ops: ContextOps,
    pub(crate) cmd_fd: c_int,
    pub(crate) async_fd: c_int,
}

pub(crate) type Unused = Option<unsafe extern "C" fn()>;

/// Operations that the library's header calls without an exported symbol.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct ContextOps {
    _unused_0: [Unused; 7],
    pub(crate) alloc_mw: Option<unsafe extern "C" fn(*mut Pd, c_int) -> *mut Mw>,
    _bind_mw: Unused,
    pub(crate) dealloc_mw: Option<unsafe extern "C" fn(*mut Mw) -> c_int>,
    _unused_10: Unused,
    pub(crate) poll_cq: Option<unsafe extern "C" fn(*mut Cq, c_int, *mut Wc) -> c_int>,
    pub(crate) req_notify_cq: Option<unsafe extern "C" fn(*mut Cq, c_int) -> c_int>,
    _unused_13: [Unused; 7],
    pub(crate) post_srq_recv: Option<unsafe extern "C" fn(*mut Srq, *mut RecvWr, *mut *mut RecvWr) -> c_int>,
    _unused_21: [Unused; 4],
    pub(crate) post_send: Option<unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int>,
    pub(crate) post_recv: Option<unsafe extern "C" fn(*mut Qp, *mut RecvWr, *mut *mut RecvWr) -> c_int>,
    _unused_27: [Unused; 5],
}

#[repr(C)]
#[derive(Debug)]
pub(crate) struct Pd {
    pub(crate) context: *mut Context,
}

#[repr(C)]
#[derive(Debug)]
pub(crate) struct Mr {
    _context: *mut Context,
    _pd: *mut Pd,
    _addr: *mut c_void,
    _length: usize,
    _handle: u32,
    pub(crate) lkey: u32,
    pub(crate) rkey: u32,
}

#[repr(C)]
#[derive(Debug)]
pub(crate) struct Mw {
    _context: *mut Context,
    _pd: *mut Pd,
    pub(crate) rkey: u32,
}

#[repr(C)]
#[derive(Debug)]
pub(crate) struct CompChannel {
    _context: *mut Context,
    pub(crate) fd: c_int,
}

#[repr(C)]
#[derive(Debug)]
pub(crate) struct Cq {
    _context: *mut Context,
    _channel: *mut CompChannel,
    _cq_context: *mut c_void,
    _handle: u32,
    pub(crate) cqe: c_int,
}

#[repr(C)]
#[derive(Debug)]
pub(crate) struct Srq {
    _private: [u8; 0],
}

#[repr(C)]
#[derive(Debug)]
pub(crate) struct Qp {
    _pointers: [*mut c_void; 6],
    _handle: u32,
    pub(crate) qp_num: u32,
}

#[repr(C)]
#[derive(Debug)]
pub(crate) struct Ah {
    _private: [u8; 0],
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DeviceAttr {
    /// 64 bytes, in two halves, because longer arrays do not implement `Default`.
    pub(crate) fw_ver: [[c_char; 32]; 2],
    pub(crate) node_guid: u64,
    pub(crate) sys_image_guid: u64,
    pub(crate) max_mr_size: u64,
    pub(crate) page_size_cap: u64,
    pub(crate) vendor_id: u32,
    pub(crate) vendor_part_id: u32,
    pub(crate) hw_ver: u32,
    pub(crate) max_qp: c_int,
    pub(crate) max_qp_wr: c_int,
    pub(crate) device_cap_flags: c_uint,
    pub(crate) max_sge: c_int,
    pub(crate) max_sge_rd: c_int,
    pub(crate) max_cq: c_int,
    pub(crate) max_cqe: c_int,
    pub(crate) max_mr: c_int,
    pub(crate) max_pd: c_int,
    pub(crate) max_qp_rd_atom: c_int,
    pub(crate) max_ee_rd_atom: c_int,
    pub(crate) max_res_rd_atom: c_int,
    pub(crate) max_qp_init_rd_atom: c_int,
    pub(crate) max_ee_init_rd_atom: c_int,
    pub(crate) atomic_cap: c_int,
    pub(crate) max_ee: c_int,
    pub(crate) max_rdd: c_int,
    pub(crate) max_mw: c_int,
    pub(crate) unused: [c_int; 5],
    pub(crate) max_ah: c_int,
    pub(crate) max_fmr: c_int,
    pub(crate) max_map_per_fmr: c_int,
    pub(crate) max_srq: c_int,
    pub(crate) max_srq_wr: c_int,
    pub(crate) max_srq_sge: c_int,
    pub(crate) max_pkeys: u16,
    pub(crate) local_ca_ack_delay: u8,
    pub(crate) phys_port_cnt: u8,
}

/// Structure that the symbol `ibv_query_port` fills; the header's inline function would return more.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PortAttr {
    pub(crate) state: c_int,
    pub(crate) max_mtu: c_int,
    pub(crate) active_mtu: c_int,
    pub(crate) gid_tbl_len: c_int,
    pub(crate) port_cap_flags: u32,
    pub(crate) max_msg_sz: u32,
    pub(crate) bad_pkey_cntr: u32,
    pub(crate) qkey_viol_cntr: u32,
    pub(crate) pkey_tbl_len: u16,
    pub(crate) lid: u16,
    pub(crate) sm_lid: u16,
    pub(crate) small: [u8; 7],
    pub(crate) phys_state: u8,
    pub(crate) link_layer: u8,
    pub(crate) flags: u8,
    /// Space for fields that a later library may add.
    pub(crate) spare: [u32; 4],
}

pub(crate) const PORT_ACTIVE: c_int = 4;
pub(crate) const LINK_LAYER_INFINIBAND: u8 = 1;
pub(crate) const LINK_LAYER_ETHERNET: u8 = 2;

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct GlobalRoute {
    pub(crate) dgid: AlignedGid,
    pub(crate) flow_label: u32,
    pub(crate) sgid_index: u8,
    pub(crate) hop_limit: u8,
    pub(crate) traffic_class: u8,
}

/// `union ibv_gid`, aligned as it holds 64-bit words.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct AlignedGid(pub(crate) [u8; 16]);

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct AhAttr {
    pub(crate) grh: GlobalRoute,
    pub(crate) dlid: u16,
    pub(crate) sl: u8,
    pub(crate) src_path_bits: u8,
    pub(crate) static_rate: u8,
    pub(crate) is_global: u8,
    pub(crate) port_num: u8,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SrqAttr {
    pub(crate) max_wr: u32,
    pub(crate) max_sge: u32,
    pub(crate) srq_limit: u32,
}

pub(crate) const SRQ_LIMIT: c_int = 2;

#[repr(C)]
#[derive(Debug)]
pub(crate) struct SrqInitAttr {
    pub(crate) srq_context: *mut c_void,
    pub(crate) attr: SrqAttr,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct QpCap {
    pub(crate) max_send_wr: u32,
    pub(crate) max_recv_wr: u32,
    pub(crate) max_send_sge: u32,
    pub(crate) max_recv_sge: u32,
    pub(crate) max_inline_data: u32,
}

pub(crate) const QPT_RC: c_int = 2;
pub(crate) const QPT_UD: c_int = 4;

#[repr(C)]
#[derive(Debug)]
pub(crate) struct QpInitAttr {
    pub(crate) qp_context: *mut c_void,
    pub(crate) send_cq: *mut Cq,
    pub(crate) recv_cq: *mut Cq,
    pub(crate) srq: *mut Srq,
    pub(crate) cap: QpCap,
    pub(crate) qp_type: c_int,
    pub(crate) sq_sig_all: c_int,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct QpAttr {
    pub(crate) qp_state: c_int,
    pub(crate) cur_qp_state: c_int,
    pub(crate) path_mtu: c_int,
    pub(crate) path_mig_state: c_int,
    pub(crate) qkey: u32,
    pub(crate) rq_psn: u32,
    pub(crate) sq_psn: u32,
    pub(crate) dest_qp_num: u32,
    pub(crate) qp_access_flags: c_uint,
    pub(crate) cap: QpCap,
    pub(crate) ah_attr: AhAttr,
    pub(crate) alt_ah_attr: AhAttr,
    pub(crate) pkey_index: u16,
    pub(crate) alt_pkey_index: u16,
    pub(crate) en_sqd_async_notify: u8,
    pub(crate) sq_draining: u8,
    pub(crate) max_rd_atomic: u8,
    pub(crate) max_dest_rd_atomic: u8,
    pub(crate) min_rnr_timer: u8,
    pub(crate) port_num: u8,
    pub(crate) timeout: u8,
    pub(crate) retry_cnt: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) alt_port_num: u8,
    pub(crate) alt_timeout: u8,
    pub(crate) rate_limit: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sge {
    pub(crate) addr: u64,
    pub(crate) length: u32,
    pub(crate) lkey: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct MwBindInfo {
    pub(crate) mr: *mut Mr,
    pub(crate) addr: u64,
    pub(crate) length: u64,
    pub(crate) mw_access_flags: c_uint,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct BindMw {
    pub(crate) mw: *mut Mw,
    pub(crate) rkey: u32,
    pub(crate) bind_info: MwBindInfo,
}

/// The three variants of the union `wr` have 32 bytes each; `words` stands for all of them.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) union WrTarget {
    pub(crate) rdma: RdmaTarget,
    pub(crate) atomic: AtomicTarget,
    pub(crate) ud: UdTarget,
    pub(crate) words: [u64; 4],
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct RdmaTarget {
    pub(crate) remote_addr: u64,
    pub(crate) rkey: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct AtomicTarget {
    pub(crate) remote_addr: u64,
    pub(crate) compare_add: u64,
    pub(crate) swap: u64,
    pub(crate) rkey: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct UdTarget {
    pub(crate) ah: *mut Ah,
    pub(crate) remote_qpn: u32,
    pub(crate) remote_qkey: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct SendWr {
    pub(crate) wr_id: u64,
    pub(crate) next: *mut Self,
    pub(crate) sg_list: *mut Sge,
    pub(crate) num_sge: c_int,
    pub(crate) opcode: c_int,
    pub(crate) send_flags: c_uint,
    /// Immediate data in memory order, or the key to invalidate.
    pub(crate) extra: [u8; 4],
    pub(crate) wr: WrTarget,
    pub(crate) xrc_srqn: u64,
    pub(crate) bind_mw: BindMw,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecvWr {
    pub(crate) wr_id: u64,
    pub(crate) next: *mut Self,
    pub(crate) sg_list: *mut Sge,
    pub(crate) num_sge: c_int,
}

pub(crate) const WR_RDMA_WRITE: c_int = 0;
pub(crate) const WR_RDMA_WRITE_WITH_IMM: c_int = 1;
pub(crate) const WR_SEND: c_int = 2;
pub(crate) const WR_SEND_WITH_IMM: c_int = 3;
pub(crate) const WR_RDMA_READ: c_int = 4;
pub(crate) const WR_ATOMIC_CMP_AND_SWP: c_int = 5;
pub(crate) const WR_ATOMIC_FETCH_AND_ADD: c_int = 6;
pub(crate) const WR_LOCAL_INV: c_int = 7;
pub(crate) const WR_BIND_MW: c_int = 8;
pub(crate) const WR_SEND_WITH_INV: c_int = 9;

pub(crate) const SEND_FENCE: c_uint = 1;
pub(crate) const SEND_SIGNALED: c_uint = 2;
pub(crate) const SEND_SOLICITED: c_uint = 4;

/// Type of memory windows that work requests bind and invalidate.
pub(crate) const MW_TYPE_2: c_int = 2;
/// Device capabilities: type 2 windows, of either variant (2A or 2B).
pub(crate) const DEVICE_MEM_WINDOW_TYPE_2: c_uint = 1 << 23 | 1 << 24;
/// Windows may be bound to this region.
pub(crate) const ACCESS_MW_BIND: c_uint = 1 << 4;

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Wc {
    pub(crate) wr_id: u64,
    pub(crate) status: c_int,
    pub(crate) opcode: c_int,
    pub(crate) vendor_err: u32,
    pub(crate) byte_len: u32,
    /// Immediate data in memory order, or the key that was invalidated.
    pub(crate) extra: [u8; 4],
    pub(crate) qp_num: u32,
    pub(crate) src_qp: u32,
    pub(crate) wc_flags: c_uint,
    pub(crate) pkey_index: u16,
    pub(crate) slid: u16,
    pub(crate) sl: u8,
    pub(crate) dlid_path_bits: u8,
}

pub(crate) const WC_RECV_RDMA_WITH_IMM: c_int = 129;
pub(crate) const WC_GRH: c_uint = 1;
pub(crate) const WC_WITH_IMM: c_uint = 2;
pub(crate) const WC_WITH_INV: c_uint = 8;
/// The kernel's value of [`WC_WITH_INV`]; in the library this bit means that a checksum was correct.
pub(crate) const WC_KERNEL_INVALIDATE: c_uint = 4;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct AsyncEvent {
    /// Address of the object, or the port number in its first four bytes.
    pub(crate) element: *mut c_void,
    pub(crate) event_type: c_int,
}

// Values of `enum ibv_event_type`.
pub(crate) const EVENT_CQ_ERR: c_int = 0;
pub(crate) const EVENT_QP_FATAL: c_int = 1;
pub(crate) const EVENT_QP_REQ_ERR: c_int = 2;
pub(crate) const EVENT_QP_ACCESS_ERR: c_int = 3;
pub(crate) const EVENT_COMM_EST: c_int = 4;
pub(crate) const EVENT_SQ_DRAINED: c_int = 5;
pub(crate) const EVENT_DEVICE_FATAL: c_int = 8;
pub(crate) const EVENT_PORT_ACTIVE: c_int = 9;
pub(crate) const EVENT_PORT_ERR: c_int = 10;
pub(crate) const EVENT_SRQ_ERR: c_int = 14;
pub(crate) const EVENT_SRQ_LIMIT_REACHED: c_int = 15;
pub(crate) const EVENT_QP_LAST_WQE_REACHED: c_int = 16;

const _: () = {
    assert!(offset_of!(Device, node_type) == 16 && offset_of!(Device, transport_type) == 20);
    assert!(size_of::<ContextOps>() == 256 && offset_of!(Context, ops) == 8);
    assert!(offset_of!(Context, cmd_fd) == 264 && offset_of!(Context, async_fd) == 268);
    assert!(offset_of!(ContextOps, alloc_mw) == 56 && offset_of!(ContextOps, dealloc_mw) == 72);
    assert!(offset_of!(ContextOps, poll_cq) == 88 && offset_of!(ContextOps, req_notify_cq) == 96);
    assert!(offset_of!(ContextOps, post_srq_recv) == 160 && offset_of!(ContextOps, post_send) == 200);
    assert!(offset_of!(ContextOps, post_recv) == 208);
    assert!(offset_of!(Qp, qp_num) == 52 && offset_of!(Cq, cqe) == 28 && offset_of!(CompChannel, fd) == 8);
    assert!(offset_of!(Mr, rkey) == 40 && offset_of!(Mw, rkey) == 16);
    assert!(size_of::<Wc>() == 48 && offset_of!(Wc, extra) == 24 && offset_of!(Wc, sl) == 44);
    assert!(size_of::<SendWr>() == 128 && offset_of!(SendWr, wr) == 40 && offset_of!(SendWr, bind_mw) == 80);
    assert!(offset_of!(SendWr, bind_mw.bind_info) == 96 && size_of::<RecvWr>() == 32);
    assert!(size_of::<QpAttr>() == 144 && offset_of!(QpAttr, ah_attr) == 56 && offset_of!(QpAttr, pkey_index) == 120);
    assert!(offset_of!(QpAttr, sq_draining) == 125 && offset_of!(QpAttr, rate_limit) == 136);
    assert!(size_of::<QpInitAttr>() == 64 && offset_of!(QpInitAttr, qp_type) == 52);
    assert!(size_of::<DeviceAttr>() == 232 && offset_of!(DeviceAttr, max_srq) == 212);
    assert!(offset_of!(DeviceAttr, phys_port_cnt) == 227 && size_of::<AhAttr>() == 32);
    assert!(offset_of!(AhAttr, port_num) == 30 && size_of::<AsyncEvent>() == 16 && size_of::<SrqInitAttr>() == 24);
    assert!(offset_of!(PortAttr, link_layer) == 46 && offset_of!(PortAttr, max_msg_sz) == 20);
};
