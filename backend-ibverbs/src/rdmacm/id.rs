//! Identifiers of connections and listeners.
#![expect(unsafe_code, reason = "calls librdmacm")]

use std::ffi::{CStr, c_int};
use std::io;
use std::net::SocketAddr;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use pvrdma_ib_cm::terminated::ConnectionData;

use super::channel::EventChannel;
use crate::sys::rdmacm as sys;
use crate::sys::{QpAttr, rdmacm::RdmaCm};

/// Time for the resolution of an address or a path, in milliseconds.
const RESOLVE_MS: c_int = 5000;
/// Connection requests that wait for the daemon.
const BACKLOG: c_int = 64;
/// Attributes that libibverbs knows. The kernel's connection manager sets further bits, for its own use.
const KNOWN_ATTRIBUTES: c_int = 0x1f_ffff;

/// An identifier.
#[derive(Debug)]
pub(crate) struct CmId {
    pub(super) channel: Arc<EventChannel>,
    pub(super) raw: NonNull<sys::CmId>,
}

// SAFETY: see the head of the parent module.
unsafe impl Send for CmId {}
// SAFETY: likewise.
unsafe impl Sync for CmId {}

/// Converts a result of the library: 0, or -1 with `errno`.
fn check(code: c_int) -> io::Result<()> {
    if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

impl CmId {
    /// Creates an identifier whose events the channel reports.
    pub(crate) fn create(channel: &Arc<EventChannel>) -> io::Result<Self> {
        let mut raw = ptr::null_mut();
        let create = channel.libraries.cm.rdma_create_id;
        // SAFETY: the channel is open, `raw` valid for writing.
        check(unsafe { create(channel.raw.as_ptr(), &raw mut raw, ptr::null_mut(), sys::PORT_SPACE_TCP) })?;
        let raw = NonNull::new(raw).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Self { channel: Arc::clone(channel), raw })
    }

    /// Returns the address that identifies the object in events.
    pub(crate) fn address(&self) -> usize {
        self.raw.as_ptr().addr()
    }

    fn library(&self) -> &RdmaCm {
        &self.channel.libraries.cm
    }

    /// Waits for connections to an address of the host.
    pub(crate) fn listen(&self, at: SocketAddr) -> io::Result<()> {
        let mut at = at.into();
        // SAFETY: the object exists, `at` is an address.
        check(unsafe { (self.library().rdma_bind_addr)(self.raw.as_ptr(), &raw mut at) })?;
        // SAFETY: the object exists.
        check(unsafe { (self.library().rdma_listen)(self.raw.as_ptr(), BACKLOG) })
    }

    /// Begins to resolve the address of a peer. Without `source`, the host's routes choose one.
    pub(crate) fn resolve_address(&self, source: Option<SocketAddr>, peer: SocketAddr) -> io::Result<()> {
        let (mut source, mut peer) = (source.map(sys::SocketAddress::from), peer.into());
        let source = source.as_mut().map_or(ptr::null_mut(), ptr::from_mut);
        // SAFETY: the object exists; both are addresses, or the first is null.
        check(unsafe { (self.library().rdma_resolve_addr)(self.raw.as_ptr(), source, &raw mut peer, RESOLVE_MS) })
    }

    /// Begins to resolve the path to the peer, whose address is resolved.
    pub(crate) fn resolve_route(&self) -> io::Result<()> {
        self.check_device()?;
        // SAFETY: the object exists and has a device, which the library uses.
        check(unsafe { (self.library().rdma_resolve_route)(self.raw.as_ptr(), RESOLVE_MS) })
    }

    /// Returns the name of the device and the port that the connection uses.
    pub(crate) fn device(&self) -> Option<(String, u8)> {
        // SAFETY: the object exists, and only this thread calls functions that change it.
        let (verbs, port) = unsafe { (self.raw.as_ref().verbs, self.raw.as_ref().port_num) };
        if verbs.is_null() {
            return None;
        }
        // SAFETY: the library keeps the device open while the object exists; its name lives as long.
        let name = unsafe { CStr::from_ptr((self.channel.libraries.verbs.ibv_get_device_name)((*verbs).device)) };
        Some((name.to_string_lossy().into_owned(), port))
    }

    /// Checks that the object has a device. The library uses it without a check of its own.
    fn check_device(&self) -> io::Result<()> {
        if self.device().is_some() { Ok(()) } else { Err(io::ErrorKind::NotConnected.into()) }
    }

    /// Returns the addresses of this end and of the peer, if they are IP addresses.
    pub(crate) fn addresses(&self) -> Option<[SocketAddr; 2]> {
        // SAFETY: the object exists, and only this thread calls functions that change it.
        let (source, destination) = unsafe { (self.raw.as_ref().source, self.raw.as_ref().destination) };
        Some([source.to_ip()?, destination.to_ip()?])
    }

    /// Asks the peer for a connection.
    pub(crate) fn connect(&self, data: &ConnectionData) -> io::Result<()> {
        self.with_parameters(data, |parameters| {
            // SAFETY: the object exists, and the parameters point to data that lives as long as the call.
            unsafe { (self.library().rdma_connect)(self.raw.as_ptr(), parameters) }
        })
    }

    /// Accepts the peer's request.
    pub(crate) fn accept(&self, data: &ConnectionData) -> io::Result<()> {
        self.with_parameters(data, |parameters| {
            // SAFETY: the object exists, and the parameters point to data that lives as long as the call.
            unsafe { (self.library().rdma_accept)(self.raw.as_ptr(), parameters) }
        })
    }

    fn with_parameters(
        &self,
        data: &ConnectionData,
        call: impl FnOnce(*mut sys::ConnParam) -> c_int,
    ) -> io::Result<()> {
        self.check_device()?;
        let mut parameters = sys::ConnParam {
            private_data: data.private_data.as_ptr(),
            private_data_len: u8::try_from(data.private_data.len()).map_err(|_| io::ErrorKind::InvalidInput)?,
            responder_resources: data.responder_resources,
            initiator_depth: data.initiator_depth,
            flow_control: 1,
            retry_count: data.retry_count,
            rnr_retry_count: data.rnr_retry,
            srq: data.srq.into(),
            qp_num: data.qpn,
        };
        check(call(&raw mut parameters))
    }

    /// Rejects the peer's request or answer.
    pub(crate) fn reject(&self, private_data: &[u8]) -> io::Result<()> {
        let length = u8::try_from(private_data.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: the object exists, and `private_data` has that many bytes.
        check(unsafe { (self.library().rdma_reject)(self.raw.as_ptr(), private_data.as_ptr(), length) })
    }

    /// Confirms the peer's answer.
    pub(crate) fn establish(&self) -> io::Result<()> {
        // SAFETY: the object exists.
        check(unsafe { (self.library().rdma_establish)(self.raw.as_ptr()) })
    }

    /// Ends the connection, or confirms that the peer has ended it.
    pub(crate) fn disconnect(&self) -> io::Result<()> {
        self.check_device()?;
        // SAFETY: the object exists and has a device.
        check(unsafe { (self.library().rdma_disconnect)(self.raw.as_ptr()) })
    }

    /// Returns the attributes, with their mask, that move a queue pair of this connection to a state.
    pub(crate) fn attributes(&self, state: c_int) -> io::Result<(QpAttr, c_int)> {
        let (mut attr, mut mask) = (QpAttr { qp_state: state, ..QpAttr::default() }, 0);
        // SAFETY: the object exists; both are valid for writing.
        check(unsafe { (self.library().rdma_init_qp_attr)(self.raw.as_ptr(), &raw mut attr, &raw mut mask) })?;
        Ok((attr, mask & KNOWN_ATTRIBUTES))
    }
}

impl Drop for CmId {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once. No event of it is unacknowledged.
        if unsafe { (self.library().rdma_destroy_id)(self.raw.as_ptr()) } != 0 {
            // The object stays until the channel is closed, and a `drop` cannot return an error.
            log::debug!("an identifier of librdmacm cannot be destroyed: {}", io::Error::last_os_error());
        }
    }
}
