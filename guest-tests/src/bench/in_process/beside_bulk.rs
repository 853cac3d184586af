//! Small writes of a guest beside its large ones, with local delivery.

use std::slice;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use pvrdma_dev::testing::{Cq, Encoded, Path, Placement, Qp, QpInit, SendWr};
use pvrdma_rxe::{Rxe, RxeConfig};
use pvrdma_verbs::testing::gid;

use super::attackers::beside;
use crate::bench::figure::Figure;
use crate::device_pair::{Side, SideOptions, connect, mac};

/// Small writes of a round: about a quarter of a second of them.
const SAMPLES: u32 = 400_000;
/// Size in bytes of a large write, and number of them in flight.
const WRITE: usize = 1 << 20;
const IN_FLIGHT: u32 = 4;
/// Bytes of the buffers, which no cache holds.
const BUFFER: usize = 64 << 20;
/// Time of large writes alone.
const ALONE: Duration = Duration::from_millis(300);

/// Measures the 99th percentile of an 8-byte write beside a QP that writes 1 MiB, and the bandwidth of that QP. Each of
/// the two is posted by a thread of its own; the baseline is each alone.
pub(super) fn small_beside_bulk(runs: usize) -> Result<[Figure; 2]> {
    let backend = Rxe::new(RxeConfig::default())?;
    let side = |host| Side::private(&backend, host, &SideOptions::new(BUFFER, Placement::Contiguous));
    let [mut a, b] = connect(side(1)?, side(2)?)?;
    let small: Vec<Encoded> = a.writes(&b, 8).take(1).collect();
    let mut bulk = Bulk::new(&a, &b)?;
    let (mut times, mut rates) = (Vec::new(), Vec::new());
    for _ in 0..runs {
        let alone = beside(&mut a, &small, SAMPLES, &mut [], Bulk::step)?;
        let start = Instant::now();
        while start.elapsed() < ALONE {
            bulk.step()?;
        }
        let bulk_alone = bulk.rate();
        let both = beside(&mut a, &small, SAMPLES, slice::from_mut(&mut bulk), Bulk::step)?;
        times.push([both, alone]);
        rates.push([bulk.rate(), bulk_alone]);
    }
    let title = "p99 of an 8-byte write beside a QP of the same guest that writes 1 MiB".to_owned();
    let p99 = Figure::of_rounds("in-process/small-beside-bulk", title, "µs", true, &times, "alone");
    let title = "RDMA write of 1 MiB beside a QP of the same guest that writes 8 bytes".to_owned();
    let rate = Figure::of_rounds("in-process/bulk-beside-small", title, "GB/s", false, &rates, "alone");
    Ok([p99, rate])
}

/// A QP that writes all the time.
struct Bulk {
    qp: Qp,
    cq: Cq,
    /// The other end of the connection.
    _peer: (Qp, Cq),
    writes: Vec<Encoded>,
    next: usize,
    in_flight: u32,
    done: u32,
    time: Duration,
}

impl Bulk {
    fn new(a: &Side, b: &Side) -> Result<Self> {
        let create = |side: &Side| -> Result<(Qp, Cq)> {
            let cq = side.driver.create_cq(Some(&side.context), 64)?;
            Ok((side.driver.create_qp(&QpInit { max_send_wr: 16, ..QpInit::rc(&side.pd, &cq) })?, cq))
        };
        let ((mut qp, cq), mut peer) = (create(a)?, create(b)?);
        let path = |side: &Side, qpn| Path { dmac: mac(side.host).0, ..Path::to(gid(side.host), qpn) };
        qp.connect(&path(b, peer.0.qpn))?;
        peer.0.connect(&path(a, qp.qpn))?;
        let write = |at: usize| {
            let from = a.buffer.sge(&a.mr, at * WRITE, WRITE);
            qp.encode(&SendWr::write(0, &[from], b.buffer.va() + (at * WRITE) as u64, b.mr.rkey))
        };
        let writes = (1..BUFFER / WRITE).map(write).collect();
        Ok(Self { qp, cq, _peer: peer, writes, next: 0, in_flight: 0, done: 0, time: Duration::ZERO })
    }

    fn step(&mut self) -> Result<()> {
        let start = Instant::now();
        while self.in_flight < IN_FLIGHT {
            let write = self.writes.get(self.next..=self.next).unwrap_or_default();
            ensure!(self.qp.post_encoded(write, 1) == 1, "the send ring is full");
            (self.next, self.in_flight) = ((self.next + 1) % self.writes.len(), self.in_flight + 1);
        }
        let (done, failed) = self.cq.reap(IN_FLIGHT);
        ensure!(failed == 0, "a large write failed");
        (self.in_flight, self.done) = (self.in_flight - done, self.done + done);
        self.time += start.elapsed();
        Ok(())
    }

    /// Returns the bandwidth in GB/s since the last call.
    fn rate(&mut self) -> f64 {
        let bytes = f64::from(std::mem::take(&mut self.done)) * WRITE as f64;
        bytes / std::mem::take(&mut self.time).as_secs_f64() / 1e9
    }
}
