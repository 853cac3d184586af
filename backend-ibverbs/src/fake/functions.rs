//! Functions of the fake adapter.
#![expect(unsafe_code, reason = "implements the C functions of libibverbs")]

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ffi::{c_char, c_int, c_void};
use std::mem::zeroed;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr;
use std::sync::Arc;

use rustix::io::Errno;

use super::gate::Call;
use super::host::{self, ERROR, FakeHost, Posted, RESET, Region, event_file};
use crate::sys::library::Library;
use crate::sys::{
    self, Ah, AhAttr, AsyncEvent, CompChannel, Context, Device, DeviceAttr, LINK_LAYER_ETHERNET, Mr, Mw, PORT_ACTIVE,
    Pd, PortAttr, QpAttr, QpInitAttr, RecvWr, SRQ_LIMIT, SendWr, SrqAttr, SrqInitAttr, Wc,
};

thread_local! {
    /// Adapter that this thread is opening.
    static HOST: RefCell<Option<Arc<FakeHost>>> = const { RefCell::new(None) };
    /// Number of asynchronous events that this thread has taken and not acknowledged.
    static UNACKNOWLEDGED: Cell<usize> = const { Cell::new(0) };
}

/// Returns the adapter that this thread is opening.
pub(super) fn host_of_thread() -> Option<Arc<FakeHost>> {
    HOST.with_borrow(Clone::clone)
}

/// Runs `open`, during which devices of this adapter are opened.
pub(super) fn with_host<T>(host: &Arc<FakeHost>, open: impl FnOnce() -> T) -> T {
    HOST.set(Some(Arc::clone(host)));
    let result = open();
    HOST.set(None);
    result
}

/// An object: the part visible to the library, and its adapter.
#[repr(C)]
struct Object<T> {
    shown: T,
    host: Arc<FakeHost>,
    /// Keeps the visible descriptor open.
    file: Option<Arc<OwnedFd>>,
}

fn object<T>(host: &Arc<FakeHost>, shown: T, file: Option<Arc<OwnedFd>>) -> *mut T {
    host.with(|state| state.objects += 1);
    Box::into_raw(Box::new(Object { shown, host: Arc::clone(host), file })).cast()
}

/// Returns the adapter of an object.
///
/// # Safety
/// `raw` comes from [`object`] and was not destroyed.
unsafe fn host_of<'a, T>(raw: *mut T) -> &'a Arc<FakeHost> {
    // SAFETY: the caller's promise.
    unsafe { &(*raw.cast::<Object<T>>()).host }
}

/// Destroys an object.
///
/// # Safety
/// `raw` comes from [`object`] and is not used any more.
unsafe fn destroy<T>(raw: *mut T) -> c_int {
    // SAFETY: the caller's promise.
    let object = unsafe { Box::from_raw(raw.cast::<Object<T>>()) };
    object.host.with(|state| state.objects -= 1);
    0
}

pub(super) fn fail(errno: Errno) -> c_int {
    // SAFETY: the location of this thread's errno.
    unsafe { *libc::__errno_location() = errno.raw_os_error() };
    -1
}

fn number(host: &FakeHost) -> u32 {
    host.with(|state| {
        state.next_number += 1;
        state.next_number
    })
}

extern "C" fn get_device_list(count: *mut c_int) -> *mut *mut Device {
    // SAFETY: the caller gives a place for the number.
    unsafe { *count = 1 };
    let transport_type = HOST.with_borrow(|host| host.as_ref().map_or(0, |host| host.with(|state| state.transport)));
    let device = Device { ops: [None; 2], node_type: 0, transport_type };
    Box::into_raw(Box::new(Box::into_raw(Box::new(device))))
}

extern "C" fn free_device_list(list: *mut *mut Device) {
    // SAFETY: made above, freed once.
    drop(unsafe { Box::from_raw(*Box::from_raw(list)) });
}

extern "C" fn get_device_name(_: *mut Device) -> *const c_char {
    c"fake0".as_ptr()
}

extern "C" fn open_device(_: *mut Device) -> *mut Context {
    let Some(host) = host_of_thread() else { return ptr::null_mut() };
    // SAFETY: numbers, pointers and optional functions, for which zeros are a value.
    let mut context: Context = unsafe { zeroed() };
    let ops = &mut context.ops;
    ops.alloc_mw = Some(alloc_mw);
    ops.dealloc_mw = Some(dealloc_mw);
    ops.poll_cq = Some(poll_cq);
    ops.req_notify_cq = Some(req_notify_cq);
    ops.post_srq_recv = Some(post_srq_recv);
    ops.post_send = Some(post_send);
    ops.post_recv = Some(post_recv);
    let file = event_file();
    context.async_fd = file.as_raw_fd();
    host.with(|state| state.async_fd = Some(Arc::clone(&file)));
    object(&host, context, Some(file))
}

extern "C" fn close_device(context: *mut Context) -> c_int {
    // SAFETY: the library's rules for its callers.
    unsafe { destroy(context) }
}

extern "C" fn get_async_event(context: *mut Context, out: *mut AsyncEvent) -> c_int {
    // SAFETY: the library's rules for its callers.
    let host = unsafe { host_of(context) };
    let next = host.with(|state| state.async_events.pop_front());
    let Some((event_type, address)) = next else { return fail(Errno::AGAIN) };
    UNACKNOWLEDGED.set(unacknowledged() + 1);
    host.with(|state| rustix::io::read(state.async_fd.as_ref().unwrap(), &mut [0; 8]).unwrap());
    // SAFETY: likewise; the address is never dereferenced.
    unsafe { *out = AsyncEvent { element: ptr::without_provenance_mut(address), event_type } };
    0
}

extern "C" fn ack_async_event(_: *mut AsyncEvent) {
    UNACKNOWLEDGED.set(unacknowledged() - 1);
}

/// Returns the number of asynchronous events that this thread has taken and not acknowledged.
pub(crate) fn unacknowledged() -> usize {
    UNACKNOWLEDGED.get()
}

extern "C" fn query_device(context: *mut Context, out: *mut DeviceAttr) -> c_int {
    // SAFETY: the library's rules for its callers.
    let vendor_id = unsafe { host_of(context) }.with(|state| state.vendor);
    let attr = DeviceAttr {
        vendor_id,
        max_qp: 64,
        max_qp_wr: 128,
        max_srq_wr: 128,
        max_sge: 4,
        max_srq_sge: 4,
        max_cq: 64,
        max_cqe: 1024,
        max_mr: 64,
        max_mr_size: u64::MAX,
        max_pd: 64,
        max_srq: 64,
        max_qp_rd_atom: 16,
        max_qp_init_rd_atom: 16,
        atomic_cap: 1,
        device_cap_flags: sys::DEVICE_MEM_WINDOW_TYPE_2,
        ..DeviceAttr::default()
    };
    // SAFETY: the library's rules for its callers.
    unsafe { *out = attr };
    0
}

extern "C" fn query_port(context: *mut Context, _: u8, out: *mut PortAttr) -> c_int {
    // SAFETY: the library's rules for its callers.
    let link_layer = unsafe { host_of(context) }.with(|state| state.link_layer);
    let attr = PortAttr {
        state: PORT_ACTIVE,
        max_mtu: 5,
        active_mtu: 3,
        max_msg_sz: 1 << 30,
        link_layer: link_layer.unwrap_or(LINK_LAYER_ETHERNET),
        ..PortAttr::default()
    };
    // SAFETY: the library's rules for its callers.
    unsafe { *out = attr };
    0
}

extern "C" fn alloc_pd(context: *mut Context) -> *mut Pd {
    // SAFETY: the library's rules for its callers.
    object(unsafe { host_of(context) }, Pd { context }, None)
}

extern "C" fn dealloc_pd(pd: *mut Pd) -> c_int {
    // SAFETY: the library's rules for its callers.
    unsafe { destroy(pd) }
}

extern "C" fn reg_mr_iova(pd: *mut Pd, start: *mut c_void, length: usize, iova: u64, access: c_int) -> *mut Mr {
    // SAFETY: the library's rules for its callers.
    let host = unsafe { host_of(pd) };
    if host.with(|state| state.refuse_registration) {
        fail(Errno::NOMEM);
        return ptr::null_mut();
    }
    let key = number(host) << 8;
    host.with(|state| state.regions.push(Region { key, start: start.addr(), length, iova, access }));
    // SAFETY: numbers and pointers, for which zeros are a value.
    let mut mr: Mr = unsafe { zeroed() };
    (mr.lkey, mr.rkey) = (key, key);
    object(host, mr, None)
}

extern "C" fn dereg_mr(mr: *mut Mr) -> c_int {
    // SAFETY: the library's rules for its callers.
    let (host, key) = unsafe { (host_of(mr), (*mr).lkey) };
    host.with(|state| state.regions.retain(|known| known.key != key));
    // SAFETY: likewise.
    unsafe { destroy(mr) }
}

extern "C" fn create_comp_channel(context: *mut Context) -> *mut CompChannel {
    let file = event_file();
    // SAFETY: numbers and pointers, for which zeros are a value.
    let mut channel: CompChannel = unsafe { zeroed() };
    channel.fd = file.as_raw_fd();
    // SAFETY: the library's rules for its callers.
    object(unsafe { host_of(context) }, channel, Some(file))
}

extern "C" fn destroy_comp_channel(channel: *mut CompChannel) -> c_int {
    // SAFETY: the library's rules for its callers.
    unsafe { destroy(channel) }
}

extern "C" fn create_cq(
    context: *mut Context,
    entries: c_int,
    _: *mut c_void,
    channel: *mut CompChannel,
    _: c_int,
) -> *mut sys::Cq {
    // SAFETY: numbers and pointers, for which zeros are a value.
    let mut cq: sys::Cq = unsafe { zeroed() };
    cq.cqe = entries;
    // SAFETY: the library's rules for its callers.
    let (host, file) = unsafe { (host_of(context), (*channel.cast::<Object<CompChannel>>()).file.clone()) };
    let raw = object(host, cq, None);
    host.with(|state| state.cqs.insert(raw.addr(), host::Cq { channel: file, ..host::Cq::default() }));
    raw
}

extern "C" fn resize_cq(cq: *mut sys::Cq, entries: c_int) -> c_int {
    // SAFETY: the library's rules for its callers.
    if unsafe { host_of(cq) }.with(|state| state.refuse_resize) {
        return Errno::NOMEM.raw_os_error();
    }
    // SAFETY: likewise.
    unsafe { (*cq).cqe = entries };
    0
}

extern "C" fn destroy_cq(cq: *mut sys::Cq) -> c_int {
    // SAFETY: the library's rules for its callers.
    unsafe { host_of(cq) }.with(|state| {
        state.cqs.remove(&cq.addr());
        state.completion_events.retain(|known| *known != cq.addr());
    });
    // SAFETY: likewise.
    unsafe { destroy(cq) }
}

extern "C" fn get_cq_event(channel: *mut CompChannel, out: *mut *mut sys::Cq, _: *mut *mut c_void) -> c_int {
    // SAFETY: the library's rules for its callers.
    let (host, file) = unsafe { (host_of(channel), &(*channel.cast::<Object<CompChannel>>()).file) };
    if rustix::io::read(file.as_ref().unwrap(), &mut [0; 8]).is_err() {
        return fail(Errno::AGAIN);
    }
    let Some(address) = host.with(|state| state.completion_events.pop_front()) else { return fail(Errno::AGAIN) };
    // SAFETY: likewise; the address is never dereferenced.
    unsafe { *out = ptr::without_provenance_mut(address) };
    0
}

extern "C" fn ack_cq_events(_: *mut sys::Cq, _: u32) {}

extern "C" fn create_srq(pd: *mut Pd, init: *mut SrqInitAttr) -> *mut sys::Srq {
    // SAFETY: the library's rules for its callers.
    let (host, limit) = unsafe { (host_of(pd), (*init).attr.srq_limit) };
    // SAFETY: it has no fields.
    let raw = object(host, unsafe { zeroed::<sys::Srq>() }, None);
    host.with(|state| state.srqs.insert(raw.addr(), (limit, VecDeque::new())));
    raw
}

extern "C" fn modify_srq(srq: *mut sys::Srq, attr: *mut SrqAttr, mask: c_int) -> c_int {
    assert_eq!(mask, SRQ_LIMIT);
    // SAFETY: the library's rules for its callers.
    let (host, limit) = unsafe { (host_of(srq), (*attr).srq_limit) };
    host.with(|state| state.srqs.get_mut(&srq.addr()).unwrap().0 = limit);
    0
}

extern "C" fn destroy_srq(srq: *mut sys::Srq) -> c_int {
    // SAFETY: the library's rules for its callers.
    unsafe { host_of(srq) }.with(|state| state.srqs.remove(&srq.addr()));
    // SAFETY: likewise.
    unsafe { destroy(srq) }
}

extern "C" fn create_qp(pd: *mut Pd, init: *mut QpInitAttr) -> *mut sys::Qp {
    // SAFETY: the library's rules for its callers.
    let (host, init) = unsafe { (host_of(pd), &*init) };
    let qpn = number(host);
    // SAFETY: numbers and pointers, for which zeros are a value.
    let mut shown: sys::Qp = unsafe { zeroed() };
    shown.qp_num = qpn;
    let raw = object(host, shown, None);
    let qp = host::Qp {
        send_cq: init.send_cq.addr(),
        recv_cq: init.recv_cq.addr(),
        srq: (!init.srq.is_null()).then(|| init.srq.addr()),
        ..host::Qp::default()
    };
    host.with(|state| {
        state.max_sges.push([init.cap.max_send_sge, init.cap.max_recv_sge]);
        state.qps.insert(qpn, qp);
        state.qp_numbers.insert(raw.addr(), qpn);
    });
    raw
}

extern "C" fn query_qp(qp: *mut sys::Qp, out: *mut QpAttr, _: c_int, _: *mut QpInitAttr) -> c_int {
    // SAFETY: the library's rules for its callers.
    let (host, qpn) = unsafe { (host_of(qp), (*qp).qp_num) };
    let qp_state = host.with(|state| state.qps[&qpn].state);
    // SAFETY: likewise.
    unsafe { *out = QpAttr { qp_state, ..QpAttr::default() } };
    0
}

extern "C" fn modify_qp(qp: *mut sys::Qp, attr: *mut QpAttr, mask: c_int) -> c_int {
    // SAFETY: the library's rules for its callers.
    let (host, qpn, attr) = unsafe { (host_of(qp), (*qp).qp_num, *attr) };
    let to = attr.qp_state;
    if to == ERROR {
        host.pass(Call::Stop);
    }
    host.with(|state| {
        let known = state.qps.get_mut(&qpn).unwrap();
        known.state = to;
        known.modified.push((attr, mask));
        match to {
            RESET => {
                known.sends.clear();
                known.receives.clear();
            }
            ERROR => {
                known.stopped = true;
                state.flush(qpn);
            }
            _ => {}
        }
    });
    0
}

extern "C" fn destroy_qp(qp: *mut sys::Qp) -> c_int {
    // SAFETY: the library's rules for its callers.
    let (host, qpn) = unsafe { (host_of(qp), (*qp).qp_num) };
    host.with(|state| {
        state.qps.remove(&qpn);
        state.qp_numbers.remove(&qp.addr());
    });
    // SAFETY: likewise.
    unsafe { destroy(qp) }
}

extern "C" fn create_ah(pd: *mut Pd, _: *mut AhAttr) -> *mut Ah {
    // SAFETY: the library's rules for its callers.
    let host = unsafe { host_of(pd) };
    if !host.look_up() {
        return ptr::null_mut();
    }
    // SAFETY: it has no fields.
    unsafe { object(host, zeroed::<Ah>(), None) }
}

extern "C" fn destroy_ah(ah: *mut Ah) -> c_int {
    // SAFETY: the library's rules for its callers.
    unsafe { destroy(ah) }
}

unsafe extern "C" fn alloc_mw(pd: *mut Pd, _: c_int) -> *mut Mw {
    // SAFETY: the library's rules for its callers.
    let host = unsafe { host_of(pd) };
    // SAFETY: numbers and pointers, for which zeros are a value.
    let mut mw: Mw = unsafe { zeroed() };
    mw.rkey = number(host) << 8;
    object(host, mw, None)
}

unsafe extern "C" fn dealloc_mw(mw: *mut Mw) -> c_int {
    // SAFETY: the library's rules for its callers.
    unsafe { destroy(mw) }
}

unsafe extern "C" fn poll_cq(cq: *mut sys::Cq, room: c_int, out: *mut Wc) -> c_int {
    // SAFETY: the library's rules for its callers.
    let host = unsafe { host_of(cq) };
    let room = usize::try_from(room).unwrap();
    let taken: Vec<_> = host.with(|state| {
        let entries = &mut state.cqs.get_mut(&cq.addr()).unwrap().entries;
        entries.drain(..entries.len().min(room)).collect()
    });
    for (i, wc) in taken.iter().enumerate() {
        // SAFETY: there is room for that many.
        unsafe { *out.add(i) = *wc };
    }
    c_int::try_from(taken.len()).unwrap()
}

unsafe extern "C" fn req_notify_cq(cq: *mut sys::Cq, _: c_int) -> c_int {
    // SAFETY: the library's rules for its callers.
    unsafe { host_of(cq) }.with(|state| {
        let cq = state.cqs.get_mut(&cq.addr()).unwrap();
        (cq.armed, cq.arms) = (true, cq.arms + 1);
    });
    0
}

unsafe extern "C" fn post_send(qp: *mut sys::Qp, mut wr: *mut SendWr, bad: *mut *mut SendWr) -> c_int {
    // SAFETY: the library's rules for its callers.
    let (host, qpn) = unsafe { (host_of(qp), (*qp).qp_num) };
    host.pass(Call::PostSend);
    while !wr.is_null() {
        // SAFETY: an element of the caller's list.
        let request = unsafe { *wr };
        // SAFETY: likewise.
        let sges = unsafe { sges(request.sg_list, request.num_sge) };
        let taken = host.with(|state| {
            match &mut state.sends_until_refused {
                Some(0) => return false,
                Some(left) => *left -= 1,
                None => {}
            }
            let posted = Posted { wr_id: request.wr_id, opcode: request.opcode, sges };
            let known = state.qps.get_mut(&qpn).unwrap();
            known.sends.push_back(posted);
            if known.state == ERROR {
                state.flush(qpn);
            }
            true
        });
        if !taken {
            // SAFETY: a place for the address.
            unsafe { *bad = wr };
            return Errno::NOMEM.raw_os_error();
        }
        wr = request.next;
    }
    0
}

/// Returns the SGEs of a request.
///
/// # Safety
/// `first` points to `count` SGEs.
unsafe fn sges(first: *mut sys::Sge, count: c_int) -> Vec<sys::Sge> {
    // SAFETY: the caller's promise.
    (0..usize::try_from(count).unwrap()).map(|at| unsafe { *first.add(at) }).collect()
}

/// Returns the requests of a list.
///
/// # Safety
/// The list is well formed.
unsafe fn receives(mut wr: *mut RecvWr) -> Vec<Posted> {
    let mut posted = Vec::new();
    while !wr.is_null() {
        // SAFETY: the caller's promise.
        let request = unsafe { *wr };
        // SAFETY: likewise.
        let sges = unsafe { sges(request.sg_list, request.num_sge) };
        posted.push(Posted { wr_id: request.wr_id, opcode: 0, sges });
        wr = request.next;
    }
    posted
}

unsafe extern "C" fn post_recv(qp: *mut sys::Qp, wr: *mut RecvWr, _: *mut *mut RecvWr) -> c_int {
    // SAFETY: the library's rules for its callers.
    let (host, qpn, posted) = unsafe { (host_of(qp), (*qp).qp_num, receives(wr)) };
    host.pass(Call::PostReceive);
    host.with(|state| {
        let known = state.qps.get_mut(&qpn).unwrap();
        known.receives.extend(posted);
        if known.state == ERROR {
            state.flush(qpn);
        }
    });
    0
}

unsafe extern "C" fn post_srq_recv(srq: *mut sys::Srq, wr: *mut RecvWr, _: *mut *mut RecvWr) -> c_int {
    // SAFETY: the library's rules for its callers.
    let (host, posted) = unsafe { (host_of(srq), receives(wr)) };
    host.with(|state| state.srqs.get_mut(&srq.addr()).unwrap().1.extend(posted));
    0
}

/// Returns the function table.
pub(super) fn library() -> Arc<Library> {
    Arc::new(Library {
        ibv_get_device_list: get_device_list,
        ibv_free_device_list: free_device_list,
        ibv_get_device_name: get_device_name,
        ibv_open_device: open_device,
        ibv_close_device: close_device,
        ibv_get_async_event: get_async_event,
        ibv_ack_async_event: ack_async_event,
        ibv_query_device: query_device,
        ibv_query_port: query_port,
        ibv_alloc_pd: alloc_pd,
        ibv_dealloc_pd: dealloc_pd,
        ibv_reg_mr_iova: reg_mr_iova,
        ibv_dereg_mr: dereg_mr,
        ibv_create_comp_channel: create_comp_channel,
        ibv_destroy_comp_channel: destroy_comp_channel,
        ibv_create_cq: create_cq,
        ibv_resize_cq: resize_cq,
        ibv_destroy_cq: destroy_cq,
        ibv_get_cq_event: get_cq_event,
        ibv_ack_cq_events: ack_cq_events,
        ibv_create_srq: create_srq,
        ibv_modify_srq: modify_srq,
        ibv_destroy_srq: destroy_srq,
        ibv_create_qp: create_qp,
        ibv_query_qp: query_qp,
        ibv_modify_qp: modify_qp,
        ibv_destroy_qp: destroy_qp,
        ibv_create_ah: create_ah,
        ibv_destroy_ah: destroy_ah,
        _library: None,
    })
}
