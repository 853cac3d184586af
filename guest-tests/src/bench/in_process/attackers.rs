//! Cost of attackers for a tenant, compared with the cost of other guests that use their full share.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use pvrdma_dev::testing::{Encoded, Path, Placement, Qp, QpInit, SendWr, access};
use pvrdma_rxe::{Rxe, RxeConfig};
use pvrdma_verbs::testing::gid;

use super::sides::DEPTH;
use crate::bench::figure::{Distribution, Figure};
use crate::device_pair::{Side, SideOptions, connect, spin};

/// Writes of a tenant in a round.
const SAMPLES: u32 = 20_000;
/// Other guests beside it.
const OTHERS: u8 = 3;
/// Size in bytes of the others' buffers, and of their writes.
const BUFFER: usize = 1 << 20;
const WRITE: usize = 64 << 10;

/// Measures the 99th percentile of an 8-byte write beside three attackers, and beside three guests that write all the
/// time.
pub(super) fn p99_beside_attackers(runs: usize) -> Result<Figure> {
    let backend = Rxe::new(RxeConfig::default())?;
    let options = SideOptions { depth: DEPTH, cq_entries: 1024, ..SideOptions::new(BUFFER, Placement::Contiguous) };
    let side = |host| Side::private(&backend, host, &options);
    let [mut tenant, peer] = connect(side(1)?, side(2)?)?;
    let write: Vec<Encoded> = tenant.writes(&peer, 8).take(1).collect();
    let mut attackers: Vec<Attacker> =
        (0..OTHERS).map(|number| Attacker::new(side(3 + number)?, number, &peer)).collect::<Result<_>>()?;
    let mut workers: Vec<Worker> =
        (0..OTHERS).map(|number| Worker::new(side(3 + OTHERS + number)?)).collect::<Result<_>>()?;
    let mut rounds = Vec::new();
    for _ in 0..runs {
        let attacked = beside(&mut tenant, &write, SAMPLES, &mut attackers, Attacker::step)?;
        let shared = beside(&mut tenant, &write, SAMPLES, &mut workers, Worker::step)?;
        rounds.push([attacked, shared]);
    }
    let title = format!("p99 of an 8-byte write of a tenant beside {OTHERS} attackers, each on a thread");
    let than = "beside as many guests that write all the time";
    Ok(Figure::of_rounds("in-process/p99-beside-attackers", title, "µs", true, &rounds, than))
}

/// Returns the 99th percentile of `samples` writes of a tenant, in microseconds, while each of `others` runs its steps
/// on a thread.
pub(super) fn beside<T: Send>(
    tenant: &mut Side,
    write: &[Encoded],
    samples: u32,
    others: &mut [T],
    step: impl Fn(&mut T) -> Result<()> + Sync,
) -> Result<f64> {
    let (stop, busy, count) = (AtomicBool::new(false), AtomicU32::new(0), others.len());
    thread::scope(|scope| {
        let (stop, busy, step) = (&stop, &busy, &step);
        let threads: Vec<_> = others
            .iter_mut()
            .map(|other| {
                scope.spawn(move || -> Result<()> {
                    step(other)?;
                    busy.fetch_add(1, Ordering::Relaxed);
                    while !stop.load(Ordering::Relaxed) {
                        step(other)?;
                    }
                    Ok(())
                })
            })
            .collect();
        while busy.load(Ordering::Relaxed) as usize != count && threads.iter().all(|thread| !thread.is_finished()) {
            thread::yield_now();
        }
        let samples = (0..samples).map(|_| {
            let start = Instant::now();
            tenant.post_and_reap(write, 1, 1, spin)?;
            Ok(start.elapsed().as_secs_f64() * 1e6)
        });
        let samples = samples.collect::<Result<Vec<_>>>();
        stop.store(true, Ordering::Relaxed);
        for thread in threads {
            thread.join().ok().context("a neighbour panicked")??;
        }
        let quantiles = Distribution::of("", String::new(), "µs", samples?).quantiles;
        quantiles.iter().find_map(|&[share, value]| (share > 0.985 && share < 0.995).then_some(value)).context("no p99")
    })
}

/// A guest that writes to itself.
struct Worker {
    side: Side,
    qps: Vec<Qp>,
    write: Vec<Encoded>,
}

impl Worker {
    fn new(side: Side) -> Result<Self> {
        let qps = (0..8).map(|_| loop_to_itself(&side)).collect::<Result<_>>()?;
        let write = SendWr::write(0, &[side.buffer.sge(&side.mr, 0, WRITE)], side.buffer.va(), side.mr.rkey);
        let write = vec![side.qp.encode(&write)];
        Ok(Self { side, qps, write })
    }

    fn step(&mut self) -> Result<()> {
        for qp in &mut self.qps {
            qp.post_encoded(&self.write, 1);
        }
        let (_, failed) = self.side.cq.reap(u32::MAX);
        ensure!(failed == 0, "a guest that does as it should failed");
        Ok(())
    }
}

/// A guest that does as much harm as it can: one floods its own queue pair with foreign keys, one the command slot, one
/// the doorbell page.
struct Attacker {
    side: Side,
    qp: Qp,
    number: u8,
    turn: u32,
    foreign: Vec<Encoded>,
}

impl Attacker {
    fn new(side: Side, number: u8, peer: &Side) -> Result<Self> {
        let foreign = SendWr::write(0, &[side.buffer.sge(&side.mr, 0, WRITE)], peer.buffer.va(), peer.mr.rkey);
        let foreign = vec![side.qp.encode(&foreign)];
        let init = QpInit { max_send_wr: 8, max_recv_wr: 8, ..QpInit::rc(&side.pd, &side.cq) };
        let qp = side.driver.create_qp(&init)?;
        Ok(Self { side, qp, number, turn: 0, foreign })
    }

    fn step(&mut self) -> Result<()> {
        self.turn = self.turn.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        match self.number {
            0 => self.post(),
            1 => self.command(),
            _ => self.ring(),
        }
    }

    /// Writes with the keys of a tenant, which moves the queue pair to the error state each time.
    fn post(&mut self) -> Result<()> {
        self.qp.to_reset()?;
        self.qp.connect(&Path::to(gid(self.side.host), self.qp.qpn))?;
        // The device takes and flushes each request as soon as it is posted.
        for _ in 0..8 {
            self.qp.post_encoded(&self.foreign, 1);
        }
        self.side.cq.reap(u32::MAX);
        Ok(())
    }

    /// Issues commands for queue pairs, regions and connections to existing objects, as fast as the device answers.
    fn command(&mut self) -> Result<()> {
        let (side, turn) = (&self.side, self.turn);
        let mut qp = side.driver.create_qp(&QpInit::rc(&side.pd, &side.cq))?;
        let _ = qp.connect(&Path { rq_psn: turn & 0xff_ffff, ..Path::to(gid(1), turn >> 24) });
        side.driver.reg_mr(&side.pd, &side.buffer, access::ALL)?.destroy()?;
        qp.destroy()?;
        Ok(())
    }

    /// Rings doorbells of existing and of non-existing queue pairs, and with invalid indices.
    fn ring(&mut self) -> Result<()> {
        let page = self.side.context.uar;
        for at in 0..64_u32 {
            let value = (self.turn.rotate_left(at) & 0xff00_0000) | (self.turn.wrapping_add(at) & 0x3f);
            self.side.driver.pci().doorbell(page, u64::from(4 * (at % 5)), value);
        }
        self.qp.send_ring().set_prod_tail(self.turn);
        Ok(())
    }
}

fn loop_to_itself(side: &Side) -> Result<Qp> {
    let init = QpInit { max_send_wr: 8, max_recv_wr: 8, ..QpInit::rc(&side.pd, &side.cq) };
    let mut qp = side.driver.create_qp(&init)?;
    qp.connect(&Path::to(gid(side.host), qp.qpn)).context("connecting")?;
    Ok(qp)
}
