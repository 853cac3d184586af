//! Bandwidth, rates and latency of local delivery.

use std::time::Instant;

use anyhow::Result;
use pvrdma_dev::testing::{Encoded, RecvWr, SendWr};

use super::sides::{DEPTH, connected};
use crate::bench::figure::{Distribution, Figure};
use crate::device_pair::spin;

/// Working set of the bandwidth measurements: well beyond the caches.
const WORKING_SET: usize = 64 << 20;

/// Bytes that a round of a bandwidth measurement moves.
const ROUND: usize = 512 << 20;

/// Requests of a round of a rate measurement.
const REQUESTS: u32 = 1 << 20;

/// Requests per doorbell, where a target specifies a number.
const BATCH: u32 = 64;

/// Compares RDMA writes with `memcpy` between the same buffers.
pub(super) fn write_against_memcpy(size: usize, runs: usize) -> Result<Figure> {
    let [mut a, b] = connected(WORKING_SET)?;
    let elements: Vec<Encoded> = a.writes(&b, size).collect();
    let batch = u32::try_from((256 << 10) / size).unwrap_or(DEPTH).clamp(1, DEPTH);
    let mut rounds = Vec::new();
    for _ in 0..runs {
        let device = gigabytes(ROUND, || a.post_and_reap(&elements, count(size), batch, spin))?;
        let copy = gigabytes(ROUND, || {
            for i in 0..count(size) as usize {
                let offset = i * size % WORKING_SET;
                let from = a.memory.slice(a.buffer.bus(offset), size);
                from.copy_to_volatile_slice(b.memory.slice(b.buffer.bus(offset), size));
            }
            Ok(())
        })?;
        rounds.push([device, copy]);
    }
    let length = if size < 1024 { format!("{size} bytes") } else { format!("{} KiB", size >> 10) };
    let title = format!("RDMA write of {length}, {batch} a doorbell");
    Ok(Figure::of_rounds(
        format!("in-process/write-{size}"),
        title,
        "GB/s",
        false,
        &rounds,
        "memcpy between the same buffers",
    ))
}

/// 64-byte writes, 64 for each doorbell, every request with a completion.
pub(super) fn small_writes(runs: usize) -> Result<Figure> {
    let [mut a, b] = connected(1 << 20)?;
    let elements: Vec<Encoded> = a.writes(&b, 64).take(DEPTH as usize).collect();
    let rates = (0..runs)
        .map(|_| millions(REQUESTS, || a.post_and_reap(&elements, REQUESTS, BATCH, spin)))
        .collect::<Result<_>>()?;
    let title = format!("RDMA write of 64 bytes, {BATCH} a doorbell");
    Ok(Figure::against_target("in-process/write-rate", title, "million/s", false, rates, 3.0))
}

/// Measures from the doorbell of an 8-byte write to the poll that finds its completion.
pub(super) fn latency(runs: usize) -> Result<Figure> {
    const ROUNDS: u32 = 100_000;
    let [mut a, b] = connected(1 << 20)?;
    let elements: Vec<Encoded> = a.writes(&b, 8).take(1).collect();
    let times = (0..runs)
        .map(|_| {
            let start = Instant::now();
            a.post_and_reap(&elements, ROUNDS, 1, spin)?;
            Ok(start.elapsed().as_secs_f64() * 1e6 / f64::from(ROUNDS))
        })
        .collect::<Result<_>>()?;
    Ok(Figure::against_target(
        "in-process/write-latency",
        "8-byte RDMA write, post to completion".into(),
        "µs",
        true,
        times,
        1.5,
    ))
}

/// Measures the latency of each single write.
pub(super) fn latencies() -> Result<Distribution> {
    const SAMPLES: u32 = 200_000;
    let [mut a, b] = connected(1 << 20)?;
    let elements: Vec<Encoded> = a.writes(&b, 8).take(1).collect();
    let samples = (0..SAMPLES)
        .map(|_| {
            let start = Instant::now();
            a.post_and_reap(&elements, 1, 1, spin)?;
            Ok(start.elapsed().as_secs_f64() * 1e6)
        })
        .collect::<Result<_>>()?;
    Ok(Distribution::of("in-process/latency", "8-byte RDMA write, post to completion".to_owned(), "µs", samples))
}

/// Compares send and receive with write, at the same size.
pub(super) fn sends_against_writes(size: usize, runs: usize) -> Result<Figure> {
    let small = size < 4096;
    let requests = if small { REQUESTS } else { count(size) };
    let batch = if small { BATCH } else { 4 };
    let [mut a, mut b] = connected(size * DEPTH as usize)?;
    let write: Vec<Encoded> = a.writes(&b, size).collect();
    let offsets = (0..DEPTH as usize).map(|i| i * size);
    let send: Vec<Encoded> =
        offsets.clone().map(|at| a.qp.encode(&SendWr::send(0, &[a.buffer.sge(&a.mr, at, size)]))).collect();
    let receive: Vec<Encoded> = offsets.map(|at| RecvWr::new(0, &[b.buffer.sge(&b.mr, at, size)]).encode()).collect();
    let mut rounds = Vec::new();
    for _ in 0..runs {
        let sends = millions(requests, || {
            for at in (0..requests as usize).step_by(batch as usize) {
                let slots = at % send.len()..;
                let posted = b.qp.post_encoded_recv(receive.get(slots.clone()).unwrap_or_default(), batch);
                anyhow::ensure!(posted == batch, "the receive ring is full");
                let posted = a.qp.post_encoded(send.get(slots).unwrap_or_default(), batch);
                anyhow::ensure!(posted == batch, "the send ring is full");
                a.reap(batch, spin)?;
                b.reap(batch, spin)?;
            }
            Ok(())
        })?;
        let writes = millions(requests, || a.post_and_reap(&write, requests, batch, spin))?;
        rounds.push([sends, writes]);
    }
    let title = format!("send and receive of {size} bytes, {batch} a doorbell");
    Ok(Figure::of_rounds(
        format!("in-process/send-{size}"),
        title,
        "million/s",
        false,
        &rounds,
        "RDMA write of that size",
    ))
}

fn count(size: usize) -> u32 {
    u32::try_from(ROUND / size).unwrap_or(u32::MAX)
}

#[expect(clippy::cast_precision_loss, reason = "figures have three digits")]
fn gigabytes(bytes: usize, work: impl FnOnce() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    work()?;
    Ok(bytes as f64 / start.elapsed().as_secs_f64() / 1e9)
}

fn millions(requests: u32, work: impl FnOnce() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    work()?;
    Ok(f64::from(requests) / start.elapsed().as_secs_f64() / 1e6)
}
