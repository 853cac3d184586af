//! The `[device.limits]` table.

use pvrdma_dev::Limits;

use super::keys::{Overlay, keys};

keys! {
    /// Upper limits of a device; what is not given keeps its default.
    pub struct LimitsSpec {
        /// Queue pairs, two of them reserved; at most 65535.
        ["max_qp", "NUMBER", "16384"]
        max_qp: Option<u32>,
        /// Work requests in a queue.
        ["max_qp_wr", "NUMBER", "16384"]
        max_qp_wr: Option<u32>,
        /// Scatter/gather elements in a request, at most 128.
        ["max_sge", "NUMBER", "16"]
        max_sge: Option<u32>,
        /// Completion queues.
        ["max_cq", "NUMBER", "16384"]
        max_cq: Option<u32>,
        /// Entries of a completion queue.
        ["max_cqe", "NUMBER", "131072"]
        max_cqe: Option<u32>,
        /// Memory regions.
        ["max_mr", "NUMBER", "65536"]
        max_mr: Option<u32>,
        /// Bytes of a memory region, at most 1 GiB.
        ["max_mr_size", "BYTES", "1073741824"]
        max_mr_size: Option<u64>,
        /// Protection domains, fewer than 2^24.
        ["max_pd", "NUMBER", "16384"]
        max_pd: Option<u32>,
        /// Shared receive queues.
        ["max_srq", "NUMBER", "1024"]
        max_srq: Option<u32>,
        /// Work requests in a shared receive queue.
        ["max_srq_wr", "NUMBER", "16384"]
        max_srq_wr: Option<u32>,
        /// Doorbell pages: one for each process and one for the driver.
        ["max_uar", "NUMBER", "1024"]
        max_uar: Option<u32>,
        /// Address handles of the guest's kernel.
        ["max_ah", "NUMBER", "65536"]
        max_ah: Option<u32>,
        /// Entries of the GID table, at most 256.
        ["gid_table", "NUMBER", "256"]
        gid_table: Option<u32>,
        /// Extents of page lists of all objects together, 16 bytes of the daemon's memory each.
        ["max_extents", "NUMBER", "4194304"]
        max_extents: Option<u64>,
    }
}

/// They stand in the file only.
impl Overlay for LimitsSpec {
    fn overlay(&mut self, _over: Self) {}
}

impl LimitsSpec {
    /// All of them.
    pub(super) fn resolve(&self) -> Limits {
        let default = Limits::default();
        Limits {
            max_qp: self.max_qp.unwrap_or(default.max_qp),
            max_qp_wr: self.max_qp_wr.unwrap_or(default.max_qp_wr),
            max_sge: self.max_sge.unwrap_or(default.max_sge),
            max_cq: self.max_cq.unwrap_or(default.max_cq),
            max_cqe: self.max_cqe.unwrap_or(default.max_cqe),
            max_mr: self.max_mr.unwrap_or(default.max_mr),
            max_mr_size: self.max_mr_size.unwrap_or(default.max_mr_size),
            max_pd: self.max_pd.unwrap_or(default.max_pd),
            max_srq: self.max_srq.unwrap_or(default.max_srq),
            max_srq_wr: self.max_srq_wr.unwrap_or(default.max_srq_wr),
            max_uar: self.max_uar.unwrap_or(default.max_uar),
            max_ah: self.max_ah.unwrap_or(default.max_ah),
            gid_table: self.gid_table.unwrap_or(default.gid_table),
            max_extents: self.max_extents.unwrap_or(default.max_extents),
        }
    }
}
