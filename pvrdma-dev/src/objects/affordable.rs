//! Number of objects that a device advertises: as many as its memory limit allows, for objects of the sizes given
//! below.

use pvrdma_pages::{Extent, PAGE_SIZE};
use pvrdma_verbs::{Hca, HcaLimits, Object};
use pvrdma_verbs_types::QpCaps;

use super::{Cq, Mr, Pd, Qp, Srq};
use crate::limits::Limits;
use crate::ring::{RING_BYTES, recv_stride, send_stride};

/// Requests per queue of a QP or SRQ, each with the maximum number of SGEs of the device. Deeper rings need more page
/// list entries, one for each page of guest memory that they occupy.
const REQUESTS: u32 = 256;
/// Size in bytes of the ring of a CQ: 1024 entries.
const CQ_BYTES: u64 = 64 << 10;
/// Pages of a memory region: the maximum of a fast registration.
const MR_PAGES: u64 = 128;

/// Denominator of the share of the memory limit that one kind of objects leaves for other kinds, requests and packets.
const LEFT: u64 = 8;

/// Returns the size of the page lists of rings with this many bytes, including their state page, if no two pages are
/// adjacent.
fn ring_bytes(bytes: u64) -> u64 {
    list_bytes(bytes.div_ceil(PAGE_SIZE).saturating_add(1))
}

fn list_bytes(pages: u64) -> u64 {
    pages.saturating_mul(size_of::<Extent>() as u64)
}

/// Returns the adapter's limits, reduced to the number of objects that fit into `bytes` for each kind. `limits` are
/// those in force otherwise.
pub(crate) fn affordable<H: Hca>(hca: &H, limits: &Limits, bytes: u64) -> HcaLimits {
    let sges = limits.verbs.max_sge;
    let queue = |stride: Option<u32>| u64::from(REQUESTS).saturating_mul(stride.map_or(PAGE_SIZE, u64::from));
    let (sends, receives) = (queue(send_stride(sges)), queue(recv_stride(sges)));
    let requests = REQUESTS.min(limits.verbs.max_qp_wr);
    let caps = QpCaps { max_send_wr: requests, max_recv_wr: requests, max_send_sge: sges, max_recv_sge: sges };
    let room = bytes.saturating_sub(bytes / LEFT);
    let most = |least: u32, limit: u32, object: Object, lists: u64| {
        let count = room / bytes_of(hca, object, lists).max(1);
        // A driver needs at least this number, so the device always advertises it. The creation of some of these
        // objects may be refused later.
        limit.min(u32::try_from(count).unwrap_or(u32::MAX).max(least))
    };
    let hca_limits = hca.limits();
    // The page list covers both rings of a QP, and each ring is charged for all of it.
    let qp_lists = ring_bytes(sends.saturating_add(receives)).saturating_mul(2);
    hca_limits
        .with_max_qp(most(3, hca_limits.max_qp, Object::Qp(caps), qp_lists))
        .with_max_cq(most(2, hca_limits.max_cq, Object::Cq, ring_bytes(CQ_BYTES)))
        .with_max_mr(most(1, hca_limits.max_mr, Object::Mr, list_bytes(MR_PAGES)))
        .with_max_pd(most(1, hca_limits.max_pd, Object::Pd, 0))
        .with_max_srq(most(0, hca_limits.max_srq, Object::Srq(REQUESTS), ring_bytes(receives)))
}

/// Overhead of an object in bytes: its slots in tables whose size may have doubled, queued events, and the allocator.
const BESIDE: u64 = 192;

/// Returns the memory that an object needs, including `lists` bytes of page lists.
pub(super) fn bytes_of<H: Hca>(hca: &H, object: Object, lists: u64) -> u64 {
    let own = match object {
        Object::Pd => size_of::<Pd<H>>(),
        Object::Mr => size_of::<Mr<H>>(),
        Object::Cq => size_of::<Cq<H>>() + RING_BYTES,
        Object::Srq(_) => size_of::<Srq<H>>() + RING_BYTES,
        Object::Qp(_) => size_of::<Qp<H>>() + 2 * RING_BYTES,
    };
    (own as u64).saturating_add(BESIDE).saturating_add(hca.bytes_of(object)).saturating_add(lists)
}
