//! `libibverbs.so.1`: the functions in use.

use std::ffi::{c_char, c_int, c_void};

use super::load::library;
use super::{
    Ah, AhAttr, AsyncEvent, CompChannel, Context, Cq, Device, DeviceAttr, Mr, Pd, PortAttr, Qp, QpAttr, QpInitAttr,
    Srq, SrqAttr, SrqInitAttr,
};

library! {
    /// Functions of `libibverbs`, valid while this value lives.
    Library = "libibverbs.so.1", "Debian: libibverbs1 and ibverbs-providers; Fedora: libibverbs";
    ibv_get_device_list: fn(*mut c_int) -> *mut *mut Device;
    ibv_free_device_list: fn(*mut *mut Device) -> ();
    ibv_get_device_name: fn(*mut Device) -> *const c_char;
    ibv_open_device: fn(*mut Device) -> *mut Context;
    ibv_close_device: fn(*mut Context) -> c_int;
    ibv_get_async_event: fn(*mut Context, *mut AsyncEvent) -> c_int;
    ibv_ack_async_event: fn(*mut AsyncEvent) -> ();
    ibv_query_device: fn(*mut Context, *mut DeviceAttr) -> c_int;
    ibv_query_port: fn(*mut Context, u8, *mut PortAttr) -> c_int;
    ibv_alloc_pd: fn(*mut Context) -> *mut Pd;
    ibv_dealloc_pd: fn(*mut Pd) -> c_int;
    ibv_reg_mr_iova: fn(*mut Pd, *mut c_void, usize, u64, c_int) -> *mut Mr;
    ibv_dereg_mr: fn(*mut Mr) -> c_int;
    ibv_create_comp_channel: fn(*mut Context) -> *mut CompChannel;
    ibv_destroy_comp_channel: fn(*mut CompChannel) -> c_int;
    ibv_create_cq: fn(*mut Context, c_int, *mut c_void, *mut CompChannel, c_int) -> *mut Cq;
    ibv_resize_cq: fn(*mut Cq, c_int) -> c_int;
    ibv_destroy_cq: fn(*mut Cq) -> c_int;
    ibv_get_cq_event: fn(*mut CompChannel, *mut *mut Cq, *mut *mut c_void) -> c_int;
    ibv_ack_cq_events: fn(*mut Cq, u32) -> ();
    ibv_create_srq: fn(*mut Pd, *mut SrqInitAttr) -> *mut Srq;
    ibv_modify_srq: fn(*mut Srq, *mut SrqAttr, c_int) -> c_int;
    ibv_destroy_srq: fn(*mut Srq) -> c_int;
    ibv_create_qp: fn(*mut Pd, *mut QpInitAttr) -> *mut Qp;
    ibv_query_qp: fn(*mut Qp, *mut QpAttr, c_int, *mut QpInitAttr) -> c_int;
    ibv_modify_qp: fn(*mut Qp, *mut QpAttr, c_int) -> c_int;
    ibv_destroy_qp: fn(*mut Qp) -> c_int;
    ibv_create_ah: fn(*mut Pd, *mut AhAttr) -> *mut Ah;
    ibv_destroy_ah: fn(*mut Ah) -> c_int;
}
