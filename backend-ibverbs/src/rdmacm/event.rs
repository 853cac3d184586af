//! Events of the host's connection manager.
#![expect(unsafe_code, reason = "calls librdmacm")]

use std::ffi::c_int;
use std::io;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use pvrdma_ib_cm::terminated::ConnectionData;

use super::channel::EventChannel;
use super::id::CmId;
use crate::sys::rdmacm as sys;

/// Type of an event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum HostEventKind {
    /// The peer's address was resolved, and the device is known.
    AddressResolved,
    /// The path to the peer was resolved.
    RouteResolved,
    /// A peer asks for a connection.
    Request,
    /// The peer has accepted; this end must confirm.
    Accepted,
    /// The peer has rejected. The status is the reason of the REJ, or a negative errno (iWARP).
    Rejected,
    /// The connection is established.
    Established,
    /// The connection has ended.
    Disconnected,
    /// Address or path cannot be resolved, or the peer does not answer.
    Unreachable,
    /// The adapter is being removed.
    DeviceRemoved,
    /// Any other event, which has no meaning for guests.
    Other,
}

/// An event.
#[derive(Debug)]
pub(crate) struct HostEvent {
    /// Address of the identifier that the event is about; for a request, that of the listening one.
    pub(crate) id: usize,
    pub(crate) kind: HostEventKind,
    pub(crate) status: c_int,
    pub(crate) data: ConnectionData,
    /// Identifier of the new connection, for a request.
    pub(crate) new: Option<CmId>,
}

impl HostEvent {
    fn new(id: usize, event: &sys::CmEvent, private_data: Vec<u8>, new: Option<CmId>) -> Self {
        let kind = match event.event {
            sys::ADDR_RESOLVED => HostEventKind::AddressResolved,
            sys::ROUTE_RESOLVED => HostEventKind::RouteResolved,
            sys::CONNECT_REQUEST => HostEventKind::Request,
            sys::CONNECT_RESPONSE => HostEventKind::Accepted,
            sys::REJECTED => HostEventKind::Rejected,
            sys::ESTABLISHED => HostEventKind::Established,
            sys::DISCONNECTED => HostEventKind::Disconnected,
            sys::ADDR_ERROR | sys::ROUTE_ERROR | sys::CONNECT_ERROR | sys::UNREACHABLE => HostEventKind::Unreachable,
            sys::DEVICE_REMOVAL => HostEventKind::DeviceRemoved,
            _ => HostEventKind::Other,
        };
        Self { id, kind, status: event.status, data: event.conn.data(private_data), new }
    }
}

impl sys::ConnParam {
    /// Returns the parameters with a copy of their private data.
    pub(crate) fn data(&self, private_data: Vec<u8>) -> ConnectionData {
        ConnectionData {
            private_data,
            responder_resources: self.responder_resources,
            initiator_depth: self.initiator_depth,
            retry_count: self.retry_count,
            rnr_retry: self.rnr_retry_count,
            srq: self.srq != 0,
            qpn: self.qp_num,
        }
    }
}

impl EventChannel {
    /// Returns the next event, or `None` if there is none.
    ///
    /// # Errors
    /// The channel is unusable.
    pub(crate) fn next_event(self: &Arc<Self>) -> io::Result<Option<HostEvent>> {
        let mut raw = ptr::null_mut();
        // SAFETY: the channel is open, `raw` valid for writing. The descriptor does not block.
        if unsafe { (self.libraries.cm.rdma_get_cm_event)(self.raw.as_ptr(), &raw mut raw) } != 0 {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
                _ => Err(error),
            };
        }
        // SAFETY: the library returned the event, which is valid until it is acknowledged below.
        let event = unsafe { *raw };
        let (private_data, length) = (event.conn.private_data, usize::from(event.conn.private_data_len));
        let private_data = if length == 0 || private_data.is_null() {
            Vec::new()
        } else {
            // SAFETY: the event points to that many bytes in itself. Each event of a connection has this variant of
            // the union, and the library clears it for all other events.
            unsafe { std::slice::from_raw_parts(private_data, length) }.to_vec()
        };
        let new = (event.event == sys::CONNECT_REQUEST).then(|| NonNull::new(event.id)).flatten();
        let new = new.map(|raw| CmId { channel: Arc::clone(self), raw });
        let subject = if event.event == sys::CONNECT_REQUEST { event.listen_id } else { event.id };
        let event = HostEvent::new(subject.addr(), &event, private_data, new);
        // SAFETY: the event is acknowledged once and not used afterwards.
        unsafe { (self.libraries.cm.rdma_ack_cm_event)(raw) };
        Ok(Some(event))
    }
}
