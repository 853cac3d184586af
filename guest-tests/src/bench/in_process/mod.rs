//! Measurements in one process: the device, the adapter and a test guest that drives them through configuration space
//! and BARs.
//!
//! Every comparison alternates between the measured side and its baseline, round by round.

mod attackers;
mod beside_bulk;
mod connections;
mod memory;
mod neighbours;
mod rates;
mod receive;
mod recorded;
mod registration;
mod sides;
mod tape;
mod tunnels;

use anyhow::Result;

use super::figure::{Distribution, Figure};

/// Measures everything, each figure in `runs` rounds.
pub(super) fn measure(runs: usize) -> Result<Vec<Figure>> {
    // Memory is measured first, while the heap has no free blocks that would hide the size of objects.
    let mut figures = vec![memory::objects()?];
    for size in [64 << 10, 1 << 20, 16 << 20] {
        figures.push(rates::write_against_memcpy(size, runs)?);
    }
    figures.push(rates::small_writes(runs)?);
    figures.push(rates::latency(runs)?);
    figures.push(rates::sends_against_writes(64, runs)?);
    figures.push(rates::sends_against_writes(64 << 10, runs)?);
    figures.push(receive::threads(runs)?);
    figures.push(receive::devices(runs)?);
    figures.push(tunnels::tls_against_vxlan(runs)?);
    figures.push(neighbours::write_beside_busy_guest(runs)?);
    figures.push(attackers::p99_beside_attackers(runs)?);
    figures.extend(beside_bulk::small_beside_bulk(runs)?);
    figures.push(registration::against_mlock(4 << 10, runs)?);
    figures.push(registration::against_mlock(1 << 30, runs)?);
    figures.push(connections::processor_time_of_one(runs)?);
    figures.push(neighbours::idle_guest_without_receives()?);
    Ok(figures)
}

/// Writes of many sizes, for a curve with those of [`measure`].
pub(super) fn sweep(runs: usize) -> Result<Vec<Figure>> {
    [64, 256, 1 << 10, 4 << 10, 16 << 10, 256 << 10, 4 << 20]
        .into_iter()
        .map(|size| rates::write_against_memcpy(size, runs))
        .collect()
}

/// Measures the latency of single writes.
pub(super) fn latencies() -> Result<Distribution> {
    rates::latencies()
}
