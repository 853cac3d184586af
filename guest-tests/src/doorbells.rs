//! Rings the doorbells of a device, for who counts outside what each costs. Runs in a guest.

use anyhow::{Context, Result, ensure};
use clap::Args;
use pvrdma_ibverbs::testing::BareQp;

/// Bytes of a write.
const SIZE: u32 = 8;

/// What is done how often.
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
    Ok(())
}
