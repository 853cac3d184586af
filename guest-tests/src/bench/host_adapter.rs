//! The host's own adapter: the same writes by a native program and through two devices, on `rdma_rxe` in a guest that
//! acts as the host.

use std::time::Duration;

use anyhow::{Context, Result};

use super::figure::Figure;
use crate::cases::host_adapter::{DEVICE, PROGRAM, PlayedHost};
use crate::host_adapter::Measured;
use crate::image::GuestImage;

/// Time limit of a round. On a machine that emulates the guest and has other work, ten thousand posts can take 40 s on
/// each side.
const ROUND: Duration = Duration::from_secs(180);

/// Measures everything in `runs` rounds.
pub(super) fn measure(runs: usize) -> Result<Vec<Figure>> {
    let image = GuestImage::build()?;
    let directory = tempfile::Builder::new().prefix("guest-tests-").tempdir().context("cannot create a directory")?;
    let vm = PlayedHost::default().boot(&image, directory.path())?;
    let runs = runs.max(1);
    let limit = ROUND * u32::try_from(runs)?;
    let command = format!("{PROGRAM} bench --device {DEVICE} --runs {runs}");
    let output = vm.spawn(&command)?.wait_success(limit).with_context(|| vm.diagnosis())?;
    let measured: Vec<Measured> =
        output.lines().filter(|line| line.starts_with('{')).map(serde_json::from_str).collect::<Result<_, _>>()?;
    anyhow::ensure!(!measured.is_empty(), "nothing was measured:\n{output}");
    Ok(measured.iter().map(figure).collect())
}

#[expect(clippy::cast_precision_loss, reason = "figures have three digits")]
fn figure(measured: &Measured) -> Figure {
    let Measured { size, count, pause, rounds } = measured;
    let latency = *size < 4096;
    let value = |seconds: f64| {
        if latency { seconds * 1e6 / f64::from(*count) } else { *size as f64 * f64::from(*count) / seconds / 1e6 }
    };
    let rounds: Vec<[f64; 2]> = rounds.iter().map(|round| round.map(value)).collect();
    let (name, title) = match (latency, *pause) {
        (true, 0) => (
            format!("hca/write-{size}-at-once"),
            format!("host adapter: {size}-byte RDMA write, post to next post, {count} posts"),
        ),
        (true, pause) => (
            format!("hca/write-{size}"),
            format!("host adapter: {size}-byte RDMA write, post to completion, {count} posts {pause} µs apart"),
        ),
        (false, _) => (format!("hca/write-{size}"), format!("host adapter: RDMA write of {} KiB", size >> 10)),
    };
    let unit = if latency { "µs" } else { "MB/s" };
    Figure::of_rounds(name, title, unit, latency, &rounds, "a program of its own on the same adapter")
}
