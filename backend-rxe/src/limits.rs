//! Limits of an adapter.

use std::ops::RangeInclusive;

use pvrdma_verbs::HcaLimits;
use pvrdma_verbs_types::Mtu;

/// Path MTU of local delivery, the largest there is.
pub(crate) const PORT_MTU: Mtu = Mtu::M4096;
/// Maximum number of outstanding RDMA reads and atomics of a QP.
pub(crate) const MAX_RD_ATOMIC: u8 = 128;
/// Maximum number of queue pairs of an adapter.
pub(crate) const MAX_QP: u32 = 65_535;
/// Maximum number of completion queues of an adapter.
pub(crate) const MAX_CQ: u32 = 65_535;
/// Maximum number of shared receive queues of an adapter.
pub(crate) const MAX_SRQ: u32 = 65_535;
/// Maximum number of protection domains of an adapter.
pub(crate) const MAX_PD: u32 = 65_535;
/// Maximum number of memory regions of an adapter.
pub(crate) const MAX_MR: u32 = 1 << 17;
/// Maximum number of pages of a fast registration.
pub(crate) const FAST_REGISTER_PAGES: u32 = 128;
/// Number of entries of the GID table: all values of an eight-bit index.
pub(crate) const GID_INDICES: usize = 256;
/// Valid VLAN identifiers (IEEE 802.1Q table 9-2).
pub(crate) const VLANS: RangeInclusive<u16> = 1..=4094;

/// Returns the limits that the guest sees.
pub(crate) const fn hca_limits() -> HcaLimits {
    HcaLimits::NONE
        .with_max_qp(MAX_QP)
        .with_max_qp_wr(1 << 16)
        .with_max_sge(128)
        .with_max_cq(MAX_CQ)
        .with_max_cqe(1 << 23)
        .with_max_mr(MAX_MR)
        .with_max_mr_size(1 << 40)
        .with_max_pd(MAX_PD)
        .with_max_srq(MAX_SRQ)
        .with_max_rd_atomic(MAX_RD_ATOMIC)
        .with_atomics(true)
        .with_memory_management(true)
}
