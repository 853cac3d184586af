//! BAR 2: doorbell pages, one for the driver and one for each context (section 7).

use std::sync::atomic::{AtomicU32, Ordering};

use pvrdma_pages::PAGE_SIZE;

use crate::abi::regs::uar;
use crate::objects::KERNEL;

/// Page of the kernel, which always traps.
pub(crate) const KERNEL_PAGE: u32 = 0;

/// Decoded write to a doorbell page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Doorbell {
    /// Requests were posted to a QP.
    Qp { handle: u32, send: bool, recv: bool },
    /// A CQ is to be armed, or was polled.
    Cq { handle: u32, arm: Option<Arm>, poll: bool },
    /// Receives were posted to an SRQ.
    Srq { handle: u32 },
}

/// Completions for which a CQ is armed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Arm {
    Any,
    Solicited,
}

impl Doorbell {
    /// Decodes a write into its page and doorbell, if it is valid. Only the low 12 bits of the offset select the
    /// register.
    pub(crate) fn decode(offset: u64, data: &[u8]) -> Option<(u32, Self)> {
        let value = u32::from_le_bytes(data.try_into().ok()?);
        let page = u32::try_from(offset / PAGE_SIZE).ok()?;
        let handle = value & uar::HANDLE_MASK;
        let has = |bit| value & bit != 0;
        let doorbell = match offset % PAGE_SIZE {
            uar::QP if has(uar::QP_SEND | uar::QP_RECV) => {
                Self::Qp { handle, send: has(uar::QP_SEND), recv: has(uar::QP_RECV) }
            }
            uar::CQ if has(uar::CQ_ARM | uar::CQ_ARM_SOL | uar::CQ_POLL) => {
                let arm =
                    if has(uar::CQ_ARM) { Some(Arm::Any) } else { has(uar::CQ_ARM_SOL).then_some(Arm::Solicited) };
                Self::Cq { handle, arm, poll: has(uar::CQ_POLL) }
            }
            uar::SRQ if has(uar::SRQ_RECV) => Self::Srq { handle },
            _ => return None,
        };
        Some((page, doorbell))
    }
}

/// Owners of the doorbell pages.
#[derive(Debug)]
pub(crate) struct UarPages {
    /// Context handle by page; [`KERNEL`] if the page has no context. Page 0 always belongs to the kernel.
    owners: Box<[AtomicU32]>,
}

impl UarPages {
    /// Creates `count` pages, none of them bound.
    pub(crate) fn new(count: u32) -> Self {
        Self { owners: (0..count).map(|_| AtomicU32::new(KERNEL)).collect() }
    }

    fn owner(&self, page: u32) -> Option<&AtomicU32> {
        self.owners.get(usize::try_from(page).ok()?)
    }

    /// Binds a page to a context. Returns `false` for the kernel's page, a page that does not exist or one that is
    /// bound already.
    pub(crate) fn bind(&self, page: u32, context: u32) -> bool {
        page != 0
            && self.owner(page).is_some_and(|owner| {
                owner.compare_exchange(KERNEL, context, Ordering::Relaxed, Ordering::Relaxed).is_ok()
            })
    }

    /// Unbinds a page.
    pub(crate) fn unbind(&self, page: u32) {
        if let Some(owner) = self.owner(page) {
            owner.store(KERNEL, Ordering::Relaxed);
        }
    }

    /// Returns the context to which a page is bound.
    pub(crate) fn context(&self, page: u32) -> Option<u32> {
        self.owner(page).map(|owner| owner.load(Ordering::Relaxed)).filter(|&owner| owner != KERNEL)
    }

    /// Returns `true` if doorbells on `page` may act on objects of `owner`: the kernel's page on all objects, a
    /// context's page on the context's own.
    pub(crate) fn may_ring(&self, page: u32, owner: u32) -> bool {
        page == 0 || owner != KERNEL && self.owner(page).is_some_and(|o| o.load(Ordering::Relaxed) == owner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(offset: u64, value: u32) -> Option<(u32, Doorbell)> {
        Doorbell::decode(offset, &value.to_le_bytes())
    }

    #[test]
    fn doorbells() {
        assert_eq!(decode(0, 0x4000_0007), Some((0, Doorbell::Qp { handle: 7, send: true, recv: false })));
        assert_eq!(decode(0x3000, 0xff00_0007), Some((3, Doorbell::Qp { handle: 7, send: true, recv: true })));
        assert_eq!(decode(4, 0x4000_0007), Some((0, Doorbell::Cq { handle: 7, arm: Some(Arm::Any), poll: false })));
        assert_eq!(
            decode(4, 0x2000_0007),
            Some((0, Doorbell::Cq { handle: 7, arm: Some(Arm::Solicited), poll: false }))
        );
        assert_eq!(decode(4, 0xe000_0007), Some((0, Doorbell::Cq { handle: 7, arm: Some(Arm::Any), poll: true })));
        assert_eq!(decode(4, 0x8000_0007), Some((0, Doorbell::Cq { handle: 7, arm: None, poll: true })));
        assert_eq!(decode(8, 0x4000_0007), Some((0, Doorbell::Srq { handle: 7 })));
    }

    /// Conformance 4: BAR 2.
    #[test]
    fn everything_else_means_nothing() {
        assert_eq!(decode(0, 7), None);
        assert_eq!(decode(8, 0x8000_0007), None);
        assert_eq!(decode(12, u32::MAX), None);
        assert_eq!(decode(2, u32::MAX), None);
        for len in [0, 1, 2, 3, 5, 8] {
            assert_eq!(Doorbell::decode(0, &vec![0xff; len]), None);
        }
        assert_eq!(decode(u64::MAX - 0xfff, u32::MAX), None);
    }

    /// Conformance 27, 48: the pages.
    #[test]
    fn pages_belong_to_one_context() {
        let pages = UarPages::new(4);
        assert!(!pages.bind(0, 1) && !pages.bind(4, 1));
        assert!(pages.bind(1, 5) && !pages.bind(1, 6));
        assert!(pages.may_ring(1, 5) && !pages.may_ring(1, 6) && !pages.may_ring(2, 5));
        assert!(!pages.may_ring(1, KERNEL) && !pages.may_ring(2, KERNEL) && !pages.may_ring(9, KERNEL));
        assert!(pages.may_ring(0, 5) && pages.may_ring(0, KERNEL));
        pages.unbind(1);
        assert!(!pages.may_ring(1, 5) && pages.bind(1, 6));
    }
}
