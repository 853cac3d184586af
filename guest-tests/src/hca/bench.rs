//! What the device costs: the same RDMA writes by a program of its own on the adapter and through two devices, round by round.

use std::hint;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use pvrdma_dev::testing::{Encoded, Placement, SendWr};
use pvrdma_ibverbs::Ibverbs;
use pvrdma_ibverbs::native::NativePair;
use serde::{Deserialize, Serialize};

use super::pair::{Side, connected};

/// Bytes of each buffer.
const BUFFER: usize = 4 << 20;
/// Posts of the latency measurement.
const POSTS: u32 = 10_000;
/// Time before each post of the latency measurement that has one: the threads of a software adapter have gone to sleep then, so
/// every write begins in the same state of it, whoever posts.
const PAUSE: Duration = Duration::from_micros(200);
/// Bytes that a round of a bandwidth measurement moves.
const ROUND: usize = 32 << 20;

/// One measurement: seconds through the device and by the program, in each round.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Measured {
    /// Bytes of each write.
    pub(crate) size: usize,
    /// Writes in a round.
    pub(crate) count: u32,
    /// Microseconds before each write, which are not counted. 0: each follows the one before.
    pub(crate) pause: u32,
    /// `[device, native]` of each round.
    pub(crate) rounds: Vec<[f64; 2]>,
}

/// Measures, and prints one JSON object a line.
pub(super) fn run(backend: &Ibverbs, device: &str, runs: usize) -> Result<()> {
    let [mut a, b] = connected(backend, BUFFER, Placement::Contiguous)?;
    let mut native = NativePair::connect(device, BUFFER)?;
    for (size, batch, pause) in
        [(8, 1, PAUSE), (8, 1, Duration::ZERO), (64 << 10, 16, Duration::ZERO), (1 << 20, 8, Duration::ZERO)]
    {
        let count = if batch == 1 { POSTS } else { u32::try_from(ROUND / size)? };
        let (elements, bytes) = (writes(&a, &b, size), u32::try_from(size)?);
        let mut ours = |count| post_and_reap(&mut a, &elements, count, batch);
        let mut theirs = |count| Ok(native.write(bytes, count, batch)?);
        let rounds = (0..runs).map(|_| Ok([timed(&mut ours, count, pause)?, timed(&mut theirs, count, pause)?]));
        let rounds = rounds.collect::<Result<_>>()?;
        let pause = u32::try_from(pause.as_micros())?;
        println!("{}", serde_json::to_string(&Measured { size, count, pause, rounds })?);
    }
    Ok(())
}

/// Seconds that `count` writes take: one after the other, or each after a pause, which is not counted.
fn timed(write: &mut impl FnMut(u32) -> Result<()>, count: u32, pause: Duration) -> Result<f64> {
    let mut total = Duration::ZERO;
    let (turns, each) = if pause.is_zero() { (1, count) } else { (count, 1) };
    for _ in 0..turns {
        let begin = Instant::now();
        while begin.elapsed() < pause {
            hint::spin_loop();
        }
        let start = Instant::now();
        write(each)?;
        total += start.elapsed();
    }
    Ok(total.as_secs_f64())
}

/// Writes that walk through the buffers of both sides.
fn writes(a: &Side, b: &Side, size: usize) -> Vec<Encoded> {
    (0..(a.buffer.len() / size).min(64))
        .map(|i| {
            let remote = b.buffer.va() + (i * size) as u64;
            a.qp.encode(&SendWr::write(0, &[a.buffer.sge(&a.mr, i * size, size)], remote, b.mr.rkey))
        })
        .collect()
}

/// Posts `total` requests in batches and takes the completions of each before the next, as the guest's library polls: an empty
/// queue rings.
fn post_and_reap(side: &mut Side, elements: &[Encoded], total: u32, batch: u32) -> Result<()> {
    let mut done = 0;
    while done < total {
        let now = (total - done).min(batch);
        let at = done as usize % elements.len();
        let end = (at + now as usize).min(elements.len());
        let posted = side.qp.post_encoded(&elements[at..end], now);
        ensure!(posted == now, "the send ring is full");
        let mut left = now;
        while left > 0 {
            let (found, failed) = side.cq.reap(left);
            ensure!(failed == 0, "{failed} requests failed");
            if found == 0 {
                side.cq.ring_poll();
            }
            left -= found;
        }
        done += now;
    }
    Ok(())
}
