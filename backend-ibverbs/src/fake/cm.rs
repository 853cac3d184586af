//! State of the fake connection manager, and the test's control of it.

use std::collections::{HashMap, VecDeque};
use std::ffi::c_int;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use pvrdma_ib_cm::terminated::ConnectionData;
use rustix::io::Errno;

use super::host::FakeHost;
use crate::sys::rdmacm::CONNECT_REQUEST;
use crate::sys::{AhAttr, LINK_LAYER_INFINIBAND, QpAttr, TRANSPORT_IWARP};

/// A call of the library.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum CmCall {
    Listen(SocketAddr),
    ResolveAddress { from: Option<IpAddr>, to: SocketAddr },
    ResolveRoute,
    Connect(ConnectionData),
    Accept(ConnectionData),
    Reject(Vec<u8>),
    Establish,
    Disconnect,
    Destroy,
}

impl CmCall {
    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::Listen(_) => "listen",
            Self::ResolveAddress { .. } => "resolve_addr",
            Self::ResolveRoute => "resolve_route",
            Self::Connect(_) => "connect",
            Self::Accept(_) => "accept",
            Self::Reject(_) => "reject",
            Self::Establish => "establish",
            Self::Disconnect => "disconnect",
            Self::Destroy => "destroy",
        }
    }
}

/// An event that was not fetched.
pub(super) struct Queued {
    /// Number of the identifier; for a request, of the listening one.
    pub(super) id: u32,
    pub(super) kind: c_int,
    pub(super) status: c_int,
    pub(super) data: ConnectionData,
    /// Address of the peer, for a request.
    pub(super) peer: Option<SocketAddr>,
}

/// State of the connection manager.
#[derive(Default)]
pub(super) struct CmState {
    /// Addresses of the identifiers, by number.
    pub(super) ids: HashMap<u32, usize>,
    pub(super) next_id: u32,
    pub(super) events: VecDeque<Queued>,
    /// Calls since the test looked, with the numbers of their identifiers.
    pub(super) calls: Vec<(u32, CmCall)>,
    pub(super) channel: Option<Arc<OwnedFd>>,
    /// Name of a call that fails, and the error.
    pub(super) refuse: Option<(&'static str, Errno)>,
}

/// Service level and partition of a path on InfiniBand.
pub(crate) const SERVICE_LEVEL: u8 = 5;
pub(crate) const PKEY_INDEX: u16 = 3;
/// LID of the peer on InfiniBand.
pub(crate) const DLID: u16 = 0x77;
/// QPN of the peer in the host's attributes.
pub(crate) const ATTRIBUTE_QPN: u32 = 0x4444;

/// Returns the attributes that the kernel's connection manager has for a queue pair.
pub(super) fn attributes(transport: c_int, link_layer: Option<u8>, state: c_int) -> (QpAttr, c_int) {
    const RTR: c_int = 2;
    /// State, address vector, path MTU, peer's QPN, PSN, READs, RNR timer; and a bit of the kernel's own.
    const RTR_MASK: c_int = 0x1 | 0x80 | 0x100 | 0x1000 | 0x10_0000 | 0x2_0000 | 0x8000 | 1 << 21;
    /// State, timeout, retries, RNR retries, PSN, READs.
    const RTS_MASK: c_int = 0x1 | 0x200 | 0x400 | 0x800 | 0x1_0000 | 0x2000;
    if transport == TRANSPORT_IWARP {
        // Port; before RTS also state and access.
        let mask = if state == RTR { 0x1 | 0x8 | 0x20 } else { 0x20 };
        return (QpAttr { qp_state: state, port_num: 1, ..QpAttr::default() }, mask);
    }
    let ah_attr = if link_layer == Some(LINK_LAYER_INFINIBAND) {
        AhAttr { dlid: DLID, sl: SERVICE_LEVEL, port_num: 1, ..AhAttr::default() }
    } else {
        AhAttr { is_global: 1, port_num: 1, ..AhAttr::default() }
    };
    let attr = QpAttr {
        qp_state: state,
        ah_attr,
        pkey_index: PKEY_INDEX,
        path_mtu: 3,
        dest_qp_num: ATTRIBUTE_QPN,
        max_dest_rd_atomic: 1,
        max_rd_atomic: 1,
        timeout: 18,
        ..QpAttr::default()
    };
    (attr, if state == RTR { RTR_MASK } else { RTS_MASK })
}

impl FakeHost {
    /// Returns the calls since the last time, with the numbers of their identifiers.
    pub(crate) fn cm_calls(&self) -> Vec<(u32, CmCall)> {
        self.with(|state| std::mem::take(&mut state.cm.calls))
    }

    /// Waits for calls that no test has taken yet.
    pub(crate) fn wait_cm_calls(&self, count: usize) -> Vec<(u32, CmCall)> {
        self.wait("the host's connection manager is not called", |state| state.cm.calls.len() >= count);
        self.cm_calls()
    }

    /// Returns the number of identifiers.
    pub(crate) fn cm_ids(&self) -> usize {
        self.with(|state| state.cm.ids.len())
    }

    /// Returns the number of the newest identifier.
    pub(crate) fn last_cm_id(&self) -> u32 {
        self.with(|state| state.cm.next_id)
    }

    /// Makes calls of this name fail.
    pub(crate) fn refuse_cm(&self, name: &'static str, errno: Errno) {
        self.with(|state| state.cm.refuse = Some((name, errno)));
    }

    /// Raises an event of an identifier.
    pub(crate) fn cm_event(&self, id: u32, kind: c_int, status: c_int, data: ConnectionData) {
        self.raise_cm(Queued { id, kind, status, data, peer: None });
    }

    /// Makes a peer ask a listening identifier for a connection.
    pub(crate) fn cm_request(&self, listener: u32, peer: SocketAddr, data: ConnectionData) {
        self.raise_cm(Queued { id: listener, kind: CONNECT_REQUEST, status: 0, data, peer: Some(peer) });
    }

    fn raise_cm(&self, event: Queued) {
        self.with(|state| {
            state.cm.events.push_back(event);
            let channel = state.cm.channel.as_ref().unwrap();
            rustix::io::write(channel, &1_u64.to_ne_bytes()).unwrap();
        });
    }
}
