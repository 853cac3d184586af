//! Limits of the host's adapter, and limits on a device's use of host resources.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pvrdma_verbs::{HcaLimits, VerbsError};

use crate::sys::{DEVICE_MEM_WINDOW_TYPE_2, DeviceAttr};

/// Maximum number of RDMA reads and atomics in flight per QP that is reported to guests.
pub(crate) const MAX_RD_ATOMIC: u8 = 128;

/// Returns the limits of the host's adapter that are reported to guests (`ibv_query_device(3)`). A QP and an SRQ have
/// the same limits in the guest's interface, so the smaller of the host's two values applies. A negative number, which
/// no adapter should report, counts as 0.
pub(crate) fn of(attr: &DeviceAttr) -> HcaLimits {
    let number = |value: i32| u32::try_from(value).unwrap_or(0);
    let rd_atomic = attr.max_qp_rd_atom.min(attr.max_qp_init_rd_atom).min(MAX_RD_ATOMIC.into());
    HcaLimits::NONE
        .with_max_qp(number(attr.max_qp))
        .with_max_qp_wr(number(attr.max_qp_wr.min(attr.max_srq_wr)))
        .with_max_sge(number(attr.max_sge.min(attr.max_srq_sge)))
        .with_max_cq(number(attr.max_cq))
        .with_max_cqe(number(attr.max_cqe))
        .with_max_mr(number(attr.max_mr))
        .with_max_mr_size(attr.max_mr_size)
        .with_max_pd(number(attr.max_pd))
        .with_max_srq(number(attr.max_srq))
        .with_max_rd_atomic(u8::try_from(rd_atomic).unwrap_or(0))
        .with_atomics(attr.atomic_cap != 0)
        .with_memory_management(attr.device_cap_flags & DEVICE_MEM_WINDOW_TYPE_2 != 0)
}

/// A quantity with an upper limit.
#[derive(Debug)]
pub(crate) struct Limit {
    used: Arc<AtomicU64>,
    limit: u64,
    what: &'static str,
}

/// A share of a [`Limit`], returned when dropped.
#[derive(Debug)]
pub(crate) struct Share {
    used: Arc<AtomicU64>,
    count: u64,
}

impl Limit {
    pub(crate) fn new(limit: u64, what: &'static str) -> Self {
        Self { used: Arc::default(), limit, what }
    }

    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    pub(crate) fn take(&self, count: u64) -> Result<Share, VerbsError> {
        self.used
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |used| {
                used.checked_add(count).filter(|&sum| sum <= self.limit)
            })
            .map(|_| Share { used: Arc::clone(&self.used), count })
            .map_err(|_| VerbsError::Exhausted(self.what))
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.used.fetch_sub(self.count, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smaller_of_two_limits_counts_and_negative_ones_are_none() {
        let attr = DeviceAttr {
            max_qp: 10,
            max_qp_wr: 100,
            max_srq_wr: 90,
            max_sge: 5,
            max_srq_sge: 6,
            max_cq: -1,
            max_cqe: 4096,
            max_mr: i32::MAX,
            max_mr_size: u64::MAX,
            max_qp_rd_atom: 16,
            max_qp_init_rd_atom: 1000,
            atomic_cap: 1,
            device_cap_flags: 1 << 24,
            ..DeviceAttr::default()
        };
        let limits = of(&attr);
        let expected = HcaLimits::NONE
            .with_max_qp(10)
            .with_max_qp_wr(90)
            .with_max_sge(5)
            .with_max_cq(0)
            .with_max_cqe(4096)
            .with_max_mr(0x7fff_ffff)
            .with_max_mr_size(u64::MAX)
            .with_max_pd(0)
            .with_max_srq(0)
            .with_max_rd_atomic(16)
            .with_atomics(true)
            .with_memory_management(true);
        assert_eq!(limits, expected);
        let many = of(&DeviceAttr { max_qp_rd_atom: 1000, device_cap_flags: !(3 << 23), atomic_cap: 0, ..attr });
        assert_eq!((many.max_rd_atomic, many.memory_management, many.atomics), (MAX_RD_ATOMIC, false, false));
        assert_eq!(of(&DeviceAttr { max_qp_rd_atom: -1, ..attr }).max_rd_atomic, 0);
    }

    #[test]
    fn shares_come_back() {
        let limit = Limit::new(10, "bytes");
        let first = limit.take(7).unwrap();
        assert!(limit.take(4).is_err() && limit.take(u64::MAX).is_err());
        let second = limit.take(3).unwrap();
        drop(first);
        assert_eq!(limit.used(), 3);
        drop(second);
        assert!(limit.take(10).is_ok());
    }
}
