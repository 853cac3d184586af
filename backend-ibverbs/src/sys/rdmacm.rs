//! Binary interface of `librdmacm.so.1` on 64-bit Linux, limited to the parts in use.
//!
//! Written from the facts in rdma-core's `rdma_cma.h`. The offsets were compared with those of a C compiler; the
//! assertions below verify them. Only the library creates values of these types, except for [`ConnParam`].

use std::ffi::{c_int, c_void};
use std::mem::{offset_of, size_of};

use super::load::library;
use super::{Context, QpAttr};

/// Address in the layout of `struct sockaddr_storage`.
#[repr(C, align(8))]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SocketAddress(pub(crate) [u8; 128]);

/// `struct rdma_event_channel`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct EventChannel {
    pub(crate) fd: c_int,
}

/// The first fields of `struct rdma_cm_id`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct CmId {
    /// Device, once the address is resolved.
    pub(crate) verbs: *mut Context,
    pub(crate) channel: *mut EventChannel,
    pub(crate) context: *mut c_void,
    _qp: *mut c_void,
    pub(crate) source: SocketAddress,
    pub(crate) destination: SocketAddress,
    _gids: [u64; 5],
    _paths: *mut c_void,
    _path_count: c_int,
    _padding: c_int,
    _port_space: c_int,
    pub(crate) port_num: u8,
}

/// `struct rdma_conn_param`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConnParam {
    pub(crate) private_data: *const u8,
    pub(crate) private_data_len: u8,
    pub(crate) responder_resources: u8,
    pub(crate) initiator_depth: u8,
    pub(crate) flow_control: u8,
    pub(crate) retry_count: u8,
    pub(crate) rnr_retry_count: u8,
    pub(crate) srq: u8,
    pub(crate) qp_num: u32,
}

/// `struct rdma_cm_event`. The union at its end is larger than its variant for connections.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CmEvent {
    pub(crate) id: *mut CmId,
    pub(crate) listen_id: *mut CmId,
    pub(crate) event: c_int,
    pub(crate) status: c_int,
    pub(crate) conn: ConnParam,
    _rest: [u64; 4],
}

/// `RDMA_PS_TCP`.
pub(crate) const PORT_SPACE_TCP: c_int = 0x0106;

// Values of `enum rdma_cm_event_type`.
pub(crate) const ADDR_RESOLVED: c_int = 0;
pub(crate) const ADDR_ERROR: c_int = 1;
pub(crate) const ROUTE_RESOLVED: c_int = 2;
pub(crate) const ROUTE_ERROR: c_int = 3;
pub(crate) const CONNECT_REQUEST: c_int = 4;
pub(crate) const CONNECT_RESPONSE: c_int = 5;
pub(crate) const CONNECT_ERROR: c_int = 6;
pub(crate) const UNREACHABLE: c_int = 7;
pub(crate) const REJECTED: c_int = 8;
pub(crate) const ESTABLISHED: c_int = 9;
pub(crate) const DISCONNECTED: c_int = 10;
pub(crate) const DEVICE_REMOVAL: c_int = 11;

library! {
    /// Functions of `librdmacm`, valid while this value lives.
    RdmaCm = "librdmacm.so.1", "Debian: librdmacm1; Fedora: librdmacm";
    rdma_create_event_channel: fn() -> *mut EventChannel;
    rdma_destroy_event_channel: fn(*mut EventChannel) -> ();
    rdma_create_id: fn(*mut EventChannel, *mut *mut CmId, *mut c_void, c_int) -> c_int;
    rdma_destroy_id: fn(*mut CmId) -> c_int;
    rdma_bind_addr: fn(*mut CmId, *mut SocketAddress) -> c_int;
    rdma_resolve_addr: fn(*mut CmId, *mut SocketAddress, *mut SocketAddress, c_int) -> c_int;
    rdma_resolve_route: fn(*mut CmId, c_int) -> c_int;
    rdma_listen: fn(*mut CmId, c_int) -> c_int;
    rdma_connect: fn(*mut CmId, *mut ConnParam) -> c_int;
    rdma_accept: fn(*mut CmId, *mut ConnParam) -> c_int;
    rdma_reject: fn(*mut CmId, *const u8, u8) -> c_int;
    rdma_establish: fn(*mut CmId) -> c_int;
    rdma_disconnect: fn(*mut CmId) -> c_int;
    rdma_init_qp_attr: fn(*mut CmId, *mut QpAttr, *mut c_int) -> c_int;
    rdma_get_cm_event: fn(*mut EventChannel, *mut *mut CmEvent) -> c_int;
    rdma_ack_cm_event: fn(*mut CmEvent) -> c_int;
}

const _: () = {
    assert!(offset_of!(CmId, context) == 16 && offset_of!(CmId, source) == 32);
    assert!(offset_of!(CmId, destination) == 160 && offset_of!(CmId, port_num) == 348);
    assert!(size_of::<ConnParam>() == 24 && offset_of!(ConnParam, qp_num) == 16);
    assert!(offset_of!(CmEvent, status) == 20 && offset_of!(CmEvent, conn) == 24 && size_of::<CmEvent>() == 80);
};
