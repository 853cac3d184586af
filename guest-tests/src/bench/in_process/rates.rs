//! Bandwidth, rates and latency of local delivery.

use std::time::Instant;

use anyhow::Result;
use pvrdma_dev::testing::{Encoded, RecvWr, SendWr};

use super::pair::{DEPTH, Side, connected};
use super::{against_baseline, against_target};
use crate::bench::Figure;

/// Working set of the bandwidth measurements: well beyond the caches.
const WORKING_SET: usize = 64 << 20;

/// Bytes that a round of a bandwidth measurement moves.
const ROUND: usize = 512 << 20;

/// Requests of a round of a rate measurement.
const REQUESTS: u32 = 1 << 20;

/// Requests for each doorbell where a target names a number.
const BATCH: u32 = 64;

/// RDMA writes against `memcpy` between the same buffers.
pub(super) fn write_against_memcpy(size: usize, runs: usize) -> Result<Figure> {
    let [mut a, b] = connected(WORKING_SET)?;
    let elements = writes(&a, &b, size);
    let batch = u32::try_from((256 << 10) / size).unwrap_or(1).max(1);
    let mut rounds = Vec::new();
    for _ in 0..runs {
        let device = gigabytes(ROUND, || post_and_reap(&mut a, &elements, count(size), batch))?;
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
    let title = format!("RDMA write of {} KiB, {batch} a doorbell", size >> 10);
    Ok(against_baseline(&format!("write-{size}"), title, "GB/s", &rounds, "memcpy between the same buffers"))
}

/// 64-byte writes, 64 for each doorbell, every request with a completion.
pub(super) fn small_writes(runs: usize) -> Result<Figure> {
    let [mut a, b] = connected(1 << 20)?;
    let elements: Vec<Encoded> = writes(&a, &b, 64).into_iter().take(DEPTH as usize).collect();
    let rates = (0..runs)
        .map(|_| millions(REQUESTS, || post_and_reap(&mut a, &elements, REQUESTS, BATCH)))
        .collect::<Result<_>>()?;
    let title = format!("RDMA write of 64 bytes, {BATCH} a doorbell");
    Ok(against_target("write-rate", title, "million/s", false, rates, 3.0))
}

/// From the doorbell of an 8-byte write to the poll that finds its completion.
pub(super) fn latency(runs: usize) -> Result<Figure> {
    const ROUNDS: u32 = 100_000;
    let [mut a, b] = connected(1 << 20)?;
    let elements: Vec<Encoded> = writes(&a, &b, 8).into_iter().take(1).collect();
    let times = (0..runs)
        .map(|_| {
            let start = Instant::now();
            post_and_reap(&mut a, &elements, ROUNDS, 1)?;
            Ok(start.elapsed().as_secs_f64() * 1e6 / f64::from(ROUNDS))
        })
        .collect::<Result<_>>()?;
    Ok(against_target("write-latency", "8-byte RDMA write, post to completion".into(), "µs", true, times, 1.5))
}

/// Send and receive against write, at the same size.
pub(super) fn sends_against_writes(size: usize, runs: usize) -> Result<Figure> {
    let small = size < 4096;
    let requests = if small { REQUESTS } else { count(size) };
    let batch = if small { BATCH } else { 4 };
    let [mut a, mut b] = connected(size * DEPTH as usize)?;
    let write = writes(&a, &b, size);
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
                a.reap(batch)?;
                b.reap(batch)?;
            }
            Ok(())
        })?;
        let writes = millions(requests, || post_and_reap(&mut a, &write, requests, batch))?;
        rounds.push([sends, writes]);
    }
    let title = format!("send and receive of {size} bytes, {batch} a doorbell");
    Ok(against_baseline(&format!("send-{size}"), title, "million/s", &rounds, "RDMA write of that size"))
}

/// Writes that walk through the buffers of both sides.
fn writes(a: &Side, b: &Side, size: usize) -> Vec<Encoded> {
    (0..a.buffer.len() / size)
        .map(|i| {
            let remote = b.buffer.va() + (i * size) as u64;
            a.qp.encode(&SendWr::write(0, &[a.buffer.sge(&a.mr, i * size, size)], remote, b.mr.rkey))
        })
        .collect()
}

/// Posts `total` requests in batches and takes the completions of each before the next.
fn post_and_reap(side: &mut Side, elements: &[Encoded], total: u32, batch: u32) -> Result<()> {
    let mut done = 0;
    while done < total {
        let now = (total - done).min(batch);
        let at = done as usize % elements.len();
        let end = (at + now as usize).min(elements.len());
        let posted = side.qp.post_encoded(elements.get(at..end).unwrap_or(elements), now);
        anyhow::ensure!(posted == now, "the send ring is full");
        side.reap(now)?;
        done += now;
    }
    Ok(())
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
