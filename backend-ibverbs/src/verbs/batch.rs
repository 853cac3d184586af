//! Batches of work requests, as the lists that `ibv_post_send(3)` and `ibv_post_recv(3)` take.
#![expect(unsafe_code, reason = "lists with pointers are sent between threads")]

use std::ffi::{c_int, c_uint};
use std::io;
use std::ptr;
use std::sync::Arc;

use super::errno::check;
use super::memory::{HostAh, HostMr, HostMw};
use crate::sys::{
    AtomicTarget, BindMw, MwBindInfo, RdmaTarget, RecvWr, SendWr, Sge, UdTarget, WR_ATOMIC_CMP_AND_SWP,
    WR_ATOMIC_FETCH_AND_ADD, WR_BIND_MW, WR_LOCAL_INV, WR_RDMA_READ, WR_RDMA_WRITE, WR_RDMA_WRITE_WITH_IMM, WR_SEND,
    WR_SEND_WITH_IMM, WR_SEND_WITH_INV, WrTarget,
};

/// An operation of the host's adapter.
#[derive(Clone, Debug)]
pub(crate) enum HostOp {
    Send,
    SendImmediate([u8; 4]),
    SendInvalidate(u32),
    Datagram { ah: Arc<HostAh>, qpn: u32, qkey: u32, immediate: Option<[u8; 4]> },
    Write { addr: u64, rkey: u32, immediate: Option<[u8; 4]> },
    Read { addr: u64, rkey: u32 },
    CompareSwap { addr: u64, rkey: u32, compare: u64, swap: u64 },
    FetchAdd { addr: u64, rkey: u32, add: u64 },
    LocalInvalidate(u32),
    BindMw { mw: Arc<HostMw>, mr: Arc<HostMr>, key: u32, addr: u64, length: u64, access: c_uint },
}

/// Fields of a request that depend on its operation.
struct Encoded {
    opcode: c_int,
    extra: [u8; 4],
    wr: WrTarget,
    bind_mw: BindMw,
}

impl HostOp {
    fn encode(&self) -> Encoded {
        let none = BindMw {
            mw: ptr::null_mut(),
            rkey: 0,
            bind_info: MwBindInfo { mr: ptr::null_mut(), addr: 0, length: 0, mw_access_flags: 0 },
        };
        let nowhere = WrTarget { words: [0; 4] };
        let rdma = |remote_addr, rkey| {
            let mut target = nowhere;
            target.rdma = RdmaTarget { remote_addr, rkey };
            target
        };
        let atomic = |remote_addr, compare_add, swap, rkey| WrTarget {
            atomic: AtomicTarget { remote_addr, compare_add, swap, rkey },
        };
        let (opcode, extra, wr, bind_mw) = match self {
            Self::Send => (WR_SEND, [0; 4], nowhere, none),
            Self::SendImmediate(data) => (WR_SEND_WITH_IMM, *data, nowhere, none),
            Self::SendInvalidate(key) => (WR_SEND_WITH_INV, key.to_ne_bytes(), nowhere, none),
            Self::Datagram { ah, qpn, qkey, immediate } => {
                let mut wr = nowhere;
                wr.ud = UdTarget { ah: ah.raw.as_ptr(), remote_qpn: *qpn, remote_qkey: *qkey };
                let opcode = if immediate.is_some() { WR_SEND_WITH_IMM } else { WR_SEND };
                (opcode, immediate.unwrap_or_default(), wr, none)
            }
            Self::Write { addr, rkey, immediate } => {
                let opcode = if immediate.is_some() { WR_RDMA_WRITE_WITH_IMM } else { WR_RDMA_WRITE };
                (opcode, immediate.unwrap_or_default(), rdma(*addr, *rkey), none)
            }
            Self::Read { addr, rkey } => (WR_RDMA_READ, [0; 4], rdma(*addr, *rkey), none),
            Self::CompareSwap { addr, rkey, compare, swap } => {
                (WR_ATOMIC_CMP_AND_SWP, [0; 4], atomic(*addr, *compare, *swap, *rkey), none)
            }
            Self::FetchAdd { addr, rkey, add } => {
                (WR_ATOMIC_FETCH_AND_ADD, [0; 4], atomic(*addr, *add, 0, *rkey), none)
            }
            Self::LocalInvalidate(key) => (WR_LOCAL_INV, key.to_ne_bytes(), nowhere, none),
            Self::BindMw { mw, mr, key, addr, length, access } => {
                let bind_info =
                    MwBindInfo { mr: mr.raw.as_ptr(), addr: *addr, length: *length, mw_access_flags: *access };
                (WR_BIND_MW, [0; 4], nowhere, BindMw { mw: mw.raw.as_ptr(), rkey: *key, bind_info })
            }
        };
        Encoded { opcode, extra, wr, bind_mw }
    }
}

/// A batch of send requests.
#[derive(Default)]
pub(crate) struct SendBatch {
    requests: Vec<SendWr>,
    sges: Vec<Sge>,
    /// Operations that the requests point to.
    ops: Vec<HostOp>,
}

// SAFETY: the pointers in the requests refer to elements of `ops` and `sges`, and are set anew with each post.
unsafe impl Send for SendBatch {}

impl SendBatch {
    pub(crate) fn clear(&mut self) {
        self.requests.clear();
        self.sges.clear();
        self.ops.clear();
    }

    pub(crate) const fn len(&self) -> usize {
        self.requests.len()
    }

    /// Adds a request. `flags` are `IBV_SEND_` bits.
    pub(crate) fn push(&mut self, wr_id: u64, flags: c_uint, op: HostOp, sges: &[Sge]) {
        let num_sge = c_int::try_from(sges.len()).unwrap_or(c_int::MAX);
        let (next, sg_list) = (ptr::null_mut(), ptr::null_mut());
        let Encoded { opcode, extra, wr, bind_mw } = op.encode();
        self.sges.extend_from_slice(sges);
        self.requests.push(SendWr {
            wr_id,
            next,
            sg_list,
            num_sge,
            opcode,
            send_flags: flags,
            extra,
            wr,
            xrc_srqn: 0,
            bind_mw,
        });
        self.ops.push(op);
    }

    pub(super) fn post(
        &mut self,
        post: impl FnOnce(*mut SendWr, *mut *mut SendWr) -> c_int,
    ) -> (usize, io::Result<()>) {
        let Self { requests, sges, .. } = self;
        let count = requests.len();
        let first = requests.as_mut_ptr();
        let mut sge = sges.as_mut_ptr();
        for (i, request) in requests.iter_mut().enumerate() {
            request.sg_list = sge;
            sge = sge.wrapping_add(usize::try_from(request.num_sge).unwrap_or(0));
            request.next = if i + 1 < count { first.wrapping_add(i + 1) } else { ptr::null_mut() };
        }
        posted(first, count, size_of::<SendWr>(), post)
    }
}

/// A batch of receive requests.
#[derive(Debug, Default)]
pub(crate) struct RecvBatch {
    requests: Vec<RecvWr>,
    sges: Vec<Sge>,
}

// SAFETY: the pointers in the requests are to `sges` and are set anew with each post.
unsafe impl Send for RecvBatch {}

impl RecvBatch {
    pub(crate) fn clear(&mut self) {
        self.requests.clear();
        self.sges.clear();
    }

    pub(crate) const fn len(&self) -> usize {
        self.requests.len()
    }

    pub(crate) fn push(&mut self, wr_id: u64, sges: &[Sge]) {
        let num_sge = c_int::try_from(sges.len()).unwrap_or(c_int::MAX);
        self.sges.extend_from_slice(sges);
        self.requests.push(RecvWr { wr_id, next: ptr::null_mut(), sg_list: ptr::null_mut(), num_sge });
    }

    pub(super) fn post(
        &mut self,
        post: impl FnOnce(*mut RecvWr, *mut *mut RecvWr) -> c_int,
    ) -> (usize, io::Result<()>) {
        let Self { requests, sges } = self;
        let count = requests.len();
        let first = requests.as_mut_ptr();
        let mut sge = sges.as_mut_ptr();
        for (i, request) in requests.iter_mut().enumerate() {
            request.sg_list = sge;
            sge = sge.wrapping_add(usize::try_from(request.num_sge).unwrap_or(0));
            request.next = if i + 1 < count { first.wrapping_add(i + 1) } else { ptr::null_mut() };
        }
        posted(first, count, size_of::<RecvWr>(), post)
    }
}

/// Posts a list of `count` elements of `size` bytes. On error, the library reports the first element that it did not
/// accept.
fn posted<T>(
    first: *mut T,
    count: usize,
    size: usize,
    post: impl FnOnce(*mut T, *mut *mut T) -> c_int,
) -> (usize, io::Result<()>) {
    if count == 0 {
        return (0, Ok(()));
    }
    let mut bad = ptr::null_mut();
    match check(post(first, &raw mut bad)) {
        Ok(()) => (count, Ok(())),
        Err(error) => (bad.addr().saturating_sub(first.addr()).checked_div(size).unwrap_or(0).min(count), Err(error)),
    }
}
