//! Overhead of the device: the same RDMA writes by a native program on the adapter and through two devices, round by
//! round.

use std::hint;
use std::time::{Duration, Instant};

use anyhow::Result;
use pvrdma_dev::testing::{Encoded, Placement};
use pvrdma_ibverbs::Ibverbs;
use serde::{Deserialize, Serialize};

use super::native::NativePair;
use crate::device_pair::{connected, ring};

/// Size of each buffer in bytes.
const BUFFER: usize = 4 << 20;
/// Number of posts of the latency measurement.
const POSTS: u32 = 10_000;
/// Pause before each post in the latency measurement with pauses. The threads of a software adapter go to sleep in it,
/// so every write finds the adapter in the same state on both sides.
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
    /// Microseconds of pause before each write, which are not counted. 0: without pauses.
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
        let elements: Vec<Encoded> = a.writes(&b, size).take(64).collect();
        let bytes = u32::try_from(size)?;
        let mut ours = |count| a.post_and_reap(&elements, count, batch, ring);
        let mut theirs = |count| Ok(native.write(bytes, count, batch)?);
        let rounds = (0..runs).map(|_| Ok([timed(&mut ours, count, pause)?, timed(&mut theirs, count, pause)?]));
        let rounds = rounds.collect::<Result<_>>()?;
        let pause = u32::try_from(pause.as_micros())?;
        println!("{}", serde_json::to_string(&Measured { size, count, pause, rounds })?);
    }
    Ok(())
}

/// Returns the seconds that `count` writes take: one after the other, or each after a pause, which is not counted.
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
