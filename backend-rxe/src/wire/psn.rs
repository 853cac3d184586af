//! Circular arithmetic on packet sequence numbers.

use rdma_backend::Psn;

/// Order and distance of PSNs. Meaningful while fewer than 2^23 of them are outstanding.
pub trait PsnExt: Sized {
    /// The PSN `count` packets later.
    fn plus(self, count: u32) -> Self;

    /// Packets from `earlier` to `self`, negative if `self` comes first.
    fn since(self, earlier: Self) -> i32;

    /// Whether `self` comes before `other`.
    fn precedes(self, other: Self) -> bool {
        self.since(other) < 0
    }
}

impl PsnExt for Psn {
    #[inline]
    fn plus(self, count: u32) -> Self {
        Self::new(self.get().wrapping_add(count))
    }

    #[inline]
    fn since(self, earlier: Self) -> i32 {
        (self.get().wrapping_sub(earlier.get()) << 8).cast_signed() >> 8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_is_circular() {
        let (last, first) = (Psn::new(0x00ff_ffff), Psn::new(0));
        assert!(last.precedes(first) && !first.precedes(last));
        assert_eq!(first.since(last), 1);
        assert_eq!(last.since(first), -1);
        assert_eq!(last.plus(2), Psn::new(1));
        assert_eq!(Psn::new(0x7f_ffff).since(first), 0x7f_ffff);
        assert_eq!(Psn::new(0x80_0001).since(first), -0x7f_ffff);
    }
}
