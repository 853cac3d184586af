//! Limits of an adapter.

use std::ops::RangeInclusive;

use pvrdma_verbs::{HcaLimits, Mtu};

/// Path MTU of local delivery, the largest there is.
pub(crate) const PORT_MTU: Mtu = Mtu::M4096;
/// RDMA reads and atomics outstanding per QP that may be asked for.
pub(crate) const MAX_RD_ATOMIC: u8 = 128;
/// Queue pairs of an adapter.
pub(crate) const MAX_QP: u32 = 65_535;
/// Completion queues of an adapter.
pub(crate) const MAX_CQ: u32 = 65_535;
/// Shared receive queues of an adapter.
pub(crate) const MAX_SRQ: u32 = 65_535;
/// Protection domains of an adapter.
pub(crate) const MAX_PD: u32 = 65_535;
/// Memory regions of an adapter.
pub(crate) const MAX_MR: u32 = 1 << 17;
/// Entries of the GID table: as many as an index of eight bits names.
pub(crate) const GID_INDICES: usize = 256;
/// Numbers of VLANs (IEEE 802.1Q table 9-2).
pub(crate) const VLANS: RangeInclusive<u16> = 1..=4094;

/// What a guest may ask for.
pub(crate) const fn hca_limits() -> HcaLimits {
    HcaLimits {
        max_qp: MAX_QP,
        max_qp_wr: 1 << 16,
        max_sge: 128,
        max_cq: MAX_CQ,
        max_cqe: 1 << 23,
        max_mr: MAX_MR,
        max_mr_size: 1 << 40,
        max_pd: MAX_PD,
        max_srq: MAX_SRQ,
        max_rd_atomic: MAX_RD_ATOMIC,
        atomics: true,
        memory_management: true,
    }
}
