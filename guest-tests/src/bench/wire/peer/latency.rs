//! Latency of small writes, alone or beside large ones.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use pvrdma_dev::testing::{Cqe, SendWr};

use super::{COMPLETIONS, Peer, PeerOptions, Place};

/// Size of a small write in bytes.
const SMALL: usize = 8;
/// Work request id that distinguishes small writes from large ones.
const SMALL_ID: u64 = 1;

impl Peer {
    /// Makes small writes one after the other on the first QP, while the second one, if there is one, is kept busy.
    /// Returns the microseconds from each post to the moment at which its completion is seen.
    pub(super) fn time_small(&mut self, options: &PeerOptions, remote: &Place) -> Result<Vec<f64>> {
        let large = self.requests(options, remote);
        let list = [self.buffer.sge(&self.mr, 0, SMALL)];
        let small = self.qps[0].encode(&SendWr::write(SMALL_ID, &list, remote.address, remote.rkey));
        let small = std::slice::from_ref(&small);
        let end = Instant::now() + Duration::from_secs_f64(options.seconds);
        let (mut times, mut under_way) = (Vec::new(), 0);
        while Instant::now() < end {
            let posted = Instant::now();
            ensure!(self.qps[0].post_encoded(small, 1) == 1, "the send ring is full");
            loop {
                if let Some(bulk) = self.qps.get_mut(1) {
                    under_way += bulk.post_encoded(&large, options.depth.saturating_sub(under_way));
                }
                if self.completion()?.wr_id == SMALL_ID {
                    break;
                }
                under_way -= 1;
            }
            times.push(posted.elapsed().as_secs_f64() * 1e6);
        }
        for _ in 0..under_way {
            self.completion()?;
        }
        Ok(times)
    }

    /// Takes one completion; waits for the interrupt if there is none.
    fn completion(&mut self) -> Result<Cqe> {
        let irqs = Arc::clone(&self.irqs);
        loop {
            let seen = irqs.count(COMPLETIONS);
            let mut cqe = self.cq.poll();
            if cqe.is_none() {
                self.cq.arm();
                cqe = self.cq.poll();
            }
            if let Some(cqe) = cqe {
                ensure!(cqe.status == 0, "a request failed: {cqe:?}; {}", self.counters());
                return Ok(cqe);
            }
            irqs.wait_beyond(COMPLETIONS, seen);
            let _ = self.driver.notifications();
        }
    }
}
