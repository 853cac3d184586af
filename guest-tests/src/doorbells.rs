//! Rings the doorbells of a device, so that the cost of each can be measured outside. Runs in a guest.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use pvrdma_ibverbs::testing::BareQp;
use serde::{Deserialize, Serialize};

/// Size of a write in bytes.
const SIZE: u32 = 8;

/// Operations and their counts.
#[derive(Clone, Debug, Args)]
pub(crate) struct DoorbellOptions {
    /// Which device.
    #[arg(long)]
    device: String,
    /// Receives are posted, one at a time.
    #[arg(long, default_value_t = 0)]
    posts: u32,
    /// An empty completion queue is polled.
    #[arg(long, default_value_t = 0)]
    polls: u32,
    /// A completion queue is armed.
    #[arg(long, default_value_t = 0)]
    arms: u32,
    /// Number of writes to the other queue pair, one at a time. The time that they took is printed.
    #[arg(long, default_value_t = 0)]
    writes: u32,
    /// Seconds for which an empty completion queue is polled.
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    poll_for: u32,
}

/// Time that writes took, in seconds.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Writes {
    /// All of them.
    pub(crate) seconds: f64,
    /// One of them, from post to completion.
    pub(crate) median: f64,
}

/// Makes two connected queue pairs, and uses one of them.
pub(crate) fn ring(options: &DoorbellOptions) -> Result<()> {
    let open = || BareQp::open(&options.device, SIZE as usize).context("cannot make a queue pair");
    let (mut a, b) = (open()?, open()?);
    a.connect(&b)?;
    b.connect(&a)?;
    for _ in 0..options.posts {
        a.post_receive(SIZE)?;
    }
    for _ in 0..options.polls {
        ensure!(a.poll()? == 0, "nothing was asked for, and something has completed");
    }
    for _ in 0..options.arms {
        a.arm()?;
    }
    if options.poll_for > 0 {
        println!("polls");
        let (start, time) = (Instant::now(), Duration::from_secs(options.poll_for.into()));
        while start.elapsed() < time {
            ensure!(a.poll()? == 0, "nothing was asked for, and something has completed");
        }
    }
    if options.writes > 0 {
        println!("{}", serde_json::to_string(&write(&mut a, &b, options.writes)?)?);
    }
    Ok(())
}

fn write(a: &mut BareQp, b: &BareQp, count: u32) -> Result<Writes> {
    let mut one = || -> Result<Duration> {
        let start = Instant::now();
        a.post_writes(b, [0], SIZE)?;
        while a.poll()? == 0 {}
        Ok(start.elapsed())
    };
    // Populates the pages and warms up the library.
    for _ in 0..count / 10 {
        one()?;
    }
    let start = Instant::now();
    let mut times = (0..count).map(|_| one()).collect::<Result<Vec<_>>>()?;
    let seconds = start.elapsed().as_secs_f64();
    times.sort_unstable();
    let median = times.get(times.len() / 2).context("nothing was written")?.as_secs_f64();
    Ok(Writes { seconds, median })
}
