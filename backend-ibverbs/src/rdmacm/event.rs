//! Events of the host's connection manager.

use std::ffi::c_int;

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

/// Parameters of a connection, as seen by this end.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct ConnectionData {
    pub(crate) private_data: Vec<u8>,
    /// READs and atomics that this end executes at a time.
    pub(crate) responder_resources: u8,
    /// READs and atomics that this end may have outstanding.
    pub(crate) initiator_depth: u8,
    pub(crate) retry_count: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) srq: bool,
    /// In an event, the queue pair of the peer; in a request to the library, that of this end.
    pub(crate) qpn: u32,
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
    pub(super) fn new(id: usize, event: &sys::CmEvent, private_data: Vec<u8>, new: Option<CmId>) -> Self {
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
        let conn = &event.conn;
        let data = ConnectionData {
            private_data,
            responder_resources: conn.responder_resources,
            initiator_depth: conn.initiator_depth,
            retry_count: conn.retry_count,
            rnr_retry: conn.rnr_retry_count,
            srq: conn.srq != 0,
            qpn: conn.qp_num,
        };
        Self { id, kind, status: event.status, data, new }
    }
}
