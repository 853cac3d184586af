//! Functions of the fake `librdmacm`.
#![expect(unsafe_code, reason = "implements the C functions of librdmacm")]

use std::ffi::{c_int, c_void};
use std::mem::zeroed;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr;
use std::sync::Arc;

use pvrdma_ib_cm::terminated::ConnectionData;
use rustix::io::Errno;

use super::cm::{CmCall, attributes};
use super::functions::{fail, host_of_thread};
use super::host::{FakeHost, event_file};
use crate::sys::rdmacm::{CmEvent, CmId, ConnParam, EventChannel, RdmaCm, SocketAddress};
use crate::sys::{Context, QpAttr};

/// A channel: the part visible to the library, its adapter and its descriptor.
#[repr(C)]
struct FakeChannel {
    shown: EventChannel,
    host: Arc<FakeHost>,
    file: Arc<OwnedFd>,
}

/// An identifier: the visible part, its adapter, and the device that it refers to.
#[repr(C)]
struct FakeId {
    shown: CmId,
    host: Arc<FakeHost>,
    device: Box<Context>,
    number: u32,
}

/// An event, with its private data.
#[repr(C)]
struct FakeEvent {
    shown: CmEvent,
    private_data: Vec<u8>,
}

extern "C" fn create_event_channel() -> *mut EventChannel {
    let Some(host) = host_of_thread() else {
        fail(Errno::NOENT);
        return ptr::null_mut();
    };
    let file = event_file();
    host.with(|state| {
        state.objects += 1;
        state.cm.channel = Some(Arc::clone(&file));
    });
    let shown = EventChannel { fd: file.as_raw_fd() };
    Box::into_raw(Box::new(FakeChannel { shown, host, file })).cast()
}

extern "C" fn destroy_event_channel(channel: *mut EventChannel) {
    // SAFETY: the library's rules for its callers.
    let channel = unsafe { Box::from_raw(channel.cast::<FakeChannel>()) };
    channel.host.with(|state| {
        state.objects -= 1;
        state.cm.events.clear();
    });
}

/// Makes an identifier.
fn new_id(host: &Arc<FakeHost>, addresses: [SocketAddress; 2]) -> *mut CmId {
    // SAFETY: numbers, pointers and optional functions, for which zeros are a value.
    let device: Box<Context> = Box::new(unsafe { zeroed() });
    // SAFETY: likewise.
    let mut shown: CmId = unsafe { zeroed() };
    [shown.source, shown.destination] = addresses;
    let number = host.with(|state| {
        state.objects += 1;
        state.cm.next_id += 1;
        state.cm.next_id
    });
    let raw = Box::into_raw(Box::new(FakeId { shown, host: Arc::clone(host), device, number })).cast::<CmId>();
    host.with(|state| state.cm.ids.insert(number, raw.expose_provenance()));
    raw
}

extern "C" fn create_id(channel: *mut EventChannel, out: *mut *mut CmId, _: *mut c_void, _: c_int) -> c_int {
    // SAFETY: the library's rules for its callers.
    let host = unsafe { &(*channel.cast::<FakeChannel>()).host };
    let raw = new_id(host, [SocketAddress([0; 128]); 2]);
    // SAFETY: likewise.
    unsafe { *out = raw };
    0
}

extern "C" fn destroy_id(id: *mut CmId) -> c_int {
    call(id, CmCall::Destroy);
    // SAFETY: the library's rules for its callers.
    let id = unsafe { Box::from_raw(id.cast::<FakeId>()) };
    id.host.with(|state| {
        state.objects -= 1;
        state.cm.ids.remove(&id.number);
    });
    0
}

/// Records a call, which the test may refuse.
fn call(id: *mut CmId, call: CmCall) -> c_int {
    // SAFETY: the library's rules for its callers.
    let (host, number) = unsafe { (&(*id.cast::<FakeId>()).host, (*id.cast::<FakeId>()).number) };
    let refused = host.with(|state| {
        let refused = state.cm.refuse.as_ref().filter(|(name, _)| *name == call.name()).map(|(_, errno)| *errno);
        state.cm.calls.push((number, call));
        refused
    });
    refused.map_or(0, fail)
}

extern "C" fn bind_addr(id: *mut CmId, address: *mut SocketAddress) -> c_int {
    // SAFETY: the library's rules for its callers.
    unsafe { (*id).source = *address };
    0
}

extern "C" fn resolve_addr(id: *mut CmId, from: *mut SocketAddress, to: *mut SocketAddress, _: c_int) -> c_int {
    // SAFETY: the library's rules for its callers.
    let (from, to) = unsafe { (from.as_ref().and_then(|from| from.to_ip()), (*to).to_ip().unwrap()) };
    // SAFETY: likewise; the device lives as long as the identifier.
    unsafe {
        let device = &raw mut *(*id.cast::<FakeId>()).device;
        (*id).verbs = device;
        (*id).port_num = 1;
        (*id).destination = to.into();
    }
    call(id, CmCall::ResolveAddress { from: from.map(|from| from.ip()), to })
}

extern "C" fn resolve_route(id: *mut CmId, _: c_int) -> c_int {
    call(id, CmCall::ResolveRoute)
}

extern "C" fn listen(id: *mut CmId, _: c_int) -> c_int {
    // SAFETY: the library's rules for its callers.
    let at = unsafe { (*id).source.to_ip().unwrap() };
    call(id, CmCall::Listen(at))
}

/// Copies parameters.
///
/// # Safety
/// `from` points to parameters, and its private data has the given length.
unsafe fn copied(from: *mut ConnParam) -> ConnectionData {
    // SAFETY: the caller's promise.
    let (conn, private_data) = unsafe {
        let conn = *from;
        (conn, std::slice::from_raw_parts(conn.private_data, conn.private_data_len.into()).to_vec())
    };
    conn.data(private_data)
}

extern "C" fn connect(id: *mut CmId, conn: *mut ConnParam) -> c_int {
    // SAFETY: the library's rules for its callers.
    call(id, CmCall::Connect(unsafe { copied(conn) }))
}

extern "C" fn accept(id: *mut CmId, conn: *mut ConnParam) -> c_int {
    // SAFETY: the library's rules for its callers.
    call(id, CmCall::Accept(unsafe { copied(conn) }))
}

extern "C" fn reject(id: *mut CmId, data: *const u8, length: u8) -> c_int {
    // SAFETY: the library's rules for its callers.
    let data = unsafe { std::slice::from_raw_parts(data, length.into()) };
    call(id, CmCall::Reject(data.to_vec()))
}

extern "C" fn establish(id: *mut CmId) -> c_int {
    call(id, CmCall::Establish)
}

extern "C" fn disconnect(id: *mut CmId) -> c_int {
    call(id, CmCall::Disconnect)
}

extern "C" fn init_qp_attr(id: *mut CmId, attr: *mut QpAttr, mask: *mut c_int) -> c_int {
    // SAFETY: the library's rules for its callers.
    let (host, state) = unsafe { (&(*id.cast::<FakeId>()).host, (*attr).qp_state) };
    let (transport, link_layer) = host.with(|host| (host.transport, host.link_layer));
    // SAFETY: likewise.
    unsafe { (*attr, *mask) = attributes(transport, link_layer, state) };
    0
}

extern "C" fn get_cm_event(channel: *mut EventChannel, out: *mut *mut CmEvent) -> c_int {
    // SAFETY: the library's rules for its callers.
    let channel = unsafe { &*channel.cast::<FakeChannel>() };
    let Some(event) = channel.host.with(|state| state.cm.events.pop_front()) else { return fail(Errno::AGAIN) };
    rustix::io::read(&channel.file, &mut [0; 8]).unwrap();
    let address = channel.host.with(|state| state.cm.ids.get(&event.id).copied());
    // The kernel reports no events of identifiers that are destroyed.
    let Some(address) = address else { return fail(Errno::AGAIN) };
    let subject: *mut CmId = ptr::with_exposed_provenance_mut(address);
    // SAFETY: numbers and pointers, for which zeros are a value.
    let mut shown: CmEvent = unsafe { zeroed() };
    (shown.id, shown.event, shown.status) = (subject, event.kind, event.status);
    if let Some(peer) = event.peer {
        // SAFETY: the identifier exists.
        let own = unsafe { (*subject).source };
        let new = new_id(&channel.host, [own, peer.into()]);
        // SAFETY: the identifier was made above; its device lives as long.
        unsafe {
            let device = &raw mut *(*new.cast::<FakeId>()).device;
            (*new).verbs = device;
            (*new).port_num = 1;
        }
        (shown.id, shown.listen_id) = (new, subject);
    }
    let data = event.data;
    let mut boxed = Box::new(FakeEvent { shown, private_data: data.private_data });
    boxed.shown.conn = ConnParam {
        private_data: boxed.private_data.as_ptr(),
        private_data_len: u8::try_from(boxed.private_data.len()).unwrap(),
        responder_resources: data.responder_resources,
        initiator_depth: data.initiator_depth,
        flow_control: 0,
        retry_count: data.retry_count,
        rnr_retry_count: data.rnr_retry,
        srq: data.srq.into(),
        qp_num: data.qpn,
    };
    // SAFETY: the library's rules for its callers.
    unsafe { *out = Box::into_raw(boxed).cast() };
    0
}

extern "C" fn ack_cm_event(event: *mut CmEvent) -> c_int {
    // SAFETY: made above, acknowledged once.
    drop(unsafe { Box::from_raw(event.cast::<FakeEvent>()) });
    0
}

/// Returns the function table.
pub(super) fn library() -> Arc<RdmaCm> {
    Arc::new(RdmaCm {
        rdma_create_event_channel: create_event_channel,
        rdma_destroy_event_channel: destroy_event_channel,
        rdma_create_id: create_id,
        rdma_destroy_id: destroy_id,
        rdma_bind_addr: bind_addr,
        rdma_resolve_addr: resolve_addr,
        rdma_resolve_route: resolve_route,
        rdma_listen: listen,
        rdma_connect: connect,
        rdma_accept: accept,
        rdma_reject: reject,
        rdma_establish: establish,
        rdma_disconnect: disconnect,
        rdma_init_qp_attr: init_qp_attr,
        rdma_get_cm_event: get_cm_event,
        rdma_ack_cm_event: ack_cm_event,
        _library: None,
    })
}
