//! Queue pairs, and posting of requests.
#![expect(unsafe_code, reason = "calls libibverbs")]

use std::ffi::c_int;
use std::io;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use super::batch::{RecvBatch, SendBatch};
use super::errno::{check, destroyed};
use super::memory::HostPd;
use super::queue::{HostCq, HostSrq};
use crate::sys::{Qp, QpAttr, QpCap, QpInitAttr};

/// Components of a queue pair.
#[derive(Debug)]
pub(crate) struct HostQpInit {
    pub(crate) pd: Arc<HostPd>,
    pub(crate) send_cq: Arc<HostCq>,
    pub(crate) recv_cq: Arc<HostCq>,
    pub(crate) srq: Option<Arc<HostSrq>>,
    pub(crate) cap: QpCap,
    /// `IBV_QPT_RC` or `IBV_QPT_UD`.
    pub(crate) qp_type: c_int,
}

/// A queue pair.
#[derive(Debug)]
pub(crate) struct HostQp {
    parts: HostQpInit,
    raw: NonNull<Qp>,
}

// SAFETY: see the head of the parent module.
unsafe impl Send for HostQp {}
// SAFETY: likewise.
unsafe impl Sync for HostQp {}

impl HostQp {
    pub(crate) fn new(parts: HostQpInit) -> io::Result<Self> {
        let mut init = QpInitAttr {
            qp_context: ptr::null_mut(),
            send_cq: parts.send_cq.raw.as_ptr(),
            recv_cq: parts.recv_cq.raw.as_ptr(),
            srq: parts.srq.as_ref().map_or(ptr::null_mut(), |srq| srq.raw.as_ptr()),
            cap: parts.cap,
            qp_type: parts.qp_type,
            sq_sig_all: 0,
        };
        // SAFETY: everything that `init` names exists and is kept by `parts`.
        let raw = unsafe { (parts.pd.device.library.ibv_create_qp)(parts.pd.raw.as_ptr(), &raw mut init) };
        let raw = NonNull::new(raw).ok_or_else(io::Error::last_os_error)?;
        Ok(Self { parts, raw })
    }

    /// Returns the QPN on the wire.
    pub(crate) const fn number(&self) -> u32 {
        // SAFETY: the number does not change while the object exists.
        unsafe { self.raw.as_ref() }.qp_num
    }

    /// Returns the address that identifies the queue pair in events.
    pub(crate) fn address(&self) -> usize {
        self.raw.as_ptr().addr()
    }

    pub(crate) fn modify(&self, attr: &QpAttr, mask: c_int) -> io::Result<()> {
        let mut attr = *attr;
        // SAFETY: the object exists, `attr` is only read.
        check(unsafe { (self.parts.pd.device.library.ibv_modify_qp)(self.raw.as_ptr(), &raw mut attr, mask) })
    }

    pub(crate) fn query(&self, mask: c_int) -> io::Result<QpAttr> {
        let mut attr = QpAttr::default();
        // SAFETY: a structure of numbers and pointers, for which zeros are a value.
        let mut init: QpInitAttr = unsafe { std::mem::zeroed() };
        let (at, init) = (&raw mut attr, &raw mut init);
        // SAFETY: the object exists, both structures are valid for writing.
        check(unsafe { (self.parts.pd.device.library.ibv_query_qp)(self.raw.as_ptr(), at, mask, init) })?;
        Ok(attr)
    }

    /// Posts the batch. Returns the number of requests accepted.
    pub(crate) fn post_send(&self, batch: &mut SendBatch) -> (usize, io::Result<()>) {
        let Some(post) = self.parts.pd.device.ops().post_send else {
            return (0, Err(io::Error::from(io::ErrorKind::Unsupported)));
        };
        // SAFETY: the object exists. The list is that of the batch, which also holds the data its requests point to.
        batch.post(|first, bad| unsafe { post(self.raw.as_ptr(), first, bad) })
    }

    /// Posts the batch. Returns the number of requests accepted.
    pub(crate) fn post_recv(&self, batch: &mut RecvBatch) -> (usize, io::Result<()>) {
        let Some(post) = self.parts.pd.device.ops().post_recv else {
            return (0, Err(io::Error::from(io::ErrorKind::Unsupported)));
        };
        // SAFETY: the object exists; the list is that of the batch.
        batch.post(|first, bad| unsafe { post(self.raw.as_ptr(), first, bad) })
    }
}

impl Drop for HostQp {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed once.
        destroyed("queue pair", unsafe { (self.parts.pd.device.library.ibv_destroy_qp)(self.raw.as_ptr()) });
    }
}
