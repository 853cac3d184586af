//! Baseline of the benchmark: a native program on the host's adapter, with two connected queue pairs, RDMA writes and a
//! polling loop.

use std::io;

use pvrdma_ibverbs::testing::{BareQp, DEPTH};

/// Two connected queue pairs with a buffer each.
pub(super) struct NativePair {
    a: BareQp,
    b: BareQp,
    /// Bytes of each buffer.
    bytes: usize,
    /// Offset of the next write.
    next: usize,
}

impl NativePair {
    /// Connects them on port 1 of a device of the host.
    pub(super) fn connect(device: &str, bytes: usize) -> io::Result<Self> {
        let (a, b) = (BareQp::open(device, bytes)?, BareQp::open(device, bytes)?);
        a.connect(&b)?;
        b.connect(&a)?;
        Ok(Self { a, b, bytes, next: 0 })
    }

    /// Writes `count` pieces of `size` bytes, `batch` per call, and waits for all of each call.
    pub(super) fn write(&mut self, size: u32, count: u32, batch: u32) -> io::Result<()> {
        let Self { a, b, bytes, next } = self;
        let mut done = 0;
        while done < count {
            let now = batch.min(count - done).min(DEPTH);
            let offsets = (0..now).map(|_| {
                let at = if *next + size as usize > *bytes { 0 } else { *next };
                *next = at + size as usize;
                at
            });
            a.post_writes(b, offsets, size)?;
            let mut left = now as usize;
            while left > 0 {
                left = left.saturating_sub(a.poll()?);
            }
            done += now;
        }
        Ok(())
    }
}
