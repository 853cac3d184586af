//! How many objects a device advertises: as many as its memory limit pays for, each of the size that is written here.

use pvrdma_guest_memory::{Extent, PAGE_SIZE};
use pvrdma_verbs::{Hca, HcaLimits, Object, QpCaps};

use super::budget::bytes_of;
use crate::limits::Limits;
use crate::ring::{recv_stride, send_stride};

/// Requests of each queue of a QP or SRQ, with all the SGEs that the device allows. Deeper rings take more page list
/// entries, one for each page of guest memory that they occupy.
const REQUESTS: u32 = 256;
/// Bytes of the ring of a CQ: 1024 entries.
const CQ_BYTES: u64 = 64 << 10;
/// Pages of a memory region: as many as a fast registration has at most.
const MR_PAGES: u64 = 128;

/// The part of the memory limit that is left beside the objects of one kind, as its denominator: for those of other
/// kinds, requests and packets.
const LEFT: u64 = 8;

/// Bytes of the page lists of rings with so many bytes, and their state page, if no two pages are adjacent.
fn ring_bytes(bytes: u64) -> u64 {
    list_bytes(bytes.div_ceil(PAGE_SIZE).saturating_add(1))
}

fn list_bytes(pages: u64) -> u64 {
    pages.saturating_mul(size_of::<Extent>() as u64)
}

/// The adapter's limits with no more objects of a kind than `bytes` pay for. `limits` are those in force otherwise.
pub(crate) fn affordable<H: Hca>(hca: &H, limits: &Limits, bytes: u64) -> HcaLimits {
    let sges = limits.verbs.max_sge;
    let queue = |stride: Option<u32>| u64::from(REQUESTS).saturating_mul(stride.map_or(PAGE_SIZE, u64::from));
    let (sends, receives) = (queue(send_stride(sges)), queue(recv_stride(sges)));
    let requests = REQUESTS.min(limits.verbs.max_qp_wr);
    let caps = QpCaps { max_send_wr: requests, max_recv_wr: requests, max_send_sge: sges, max_recv_sge: sges };
    let room = bytes.saturating_sub(bytes / LEFT);
    let most = |least: u32, limit: u32, object: Object, lists: u64| {
        let count = room / bytes_of(hca, object, lists).max(1);
        // Without the fewest that a driver needs there would be no device. Some of them may be refused then.
        limit.min(u32::try_from(count).unwrap_or(u32::MAX).max(least))
    };
    let hca_limits = hca.limits();
    // Each ring of a QP is charged with the list of both.
    let qp_lists = ring_bytes(sends.saturating_add(receives)).saturating_mul(2);
    HcaLimits {
        max_qp: most(3, hca_limits.max_qp, Object::Qp(caps), qp_lists),
        max_cq: most(2, hca_limits.max_cq, Object::Cq, ring_bytes(CQ_BYTES)),
        max_mr: most(1, hca_limits.max_mr, Object::Mr, list_bytes(MR_PAGES)),
        max_pd: most(1, hca_limits.max_pd, Object::Pd, 0),
        max_srq: most(0, hca_limits.max_srq, Object::Srq(REQUESTS), ring_bytes(receives)),
        ..hca_limits
    }
}
