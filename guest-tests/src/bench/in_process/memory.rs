//! Memory cost of objects.

use anyhow::{Context, Result};
use pvrdma_dev::testing::{QpInit, access};

use super::sides::connected_with_spare;
use crate::bench::figure::Figure;
use crate::device_pair::Side;

const OBJECTS: usize = 10_000;

/// Resident memory of this process for 10,000 QPs and 10,000 MRs on one device, without the guest's own memory.
pub(super) fn objects() -> Result<Figure> {
    let [a, _b] = connected_with_spare(16 << 10, 512 << 20)?;
    let before = resident_without_guest(&a)?;
    let mut qps = Vec::with_capacity(OBJECTS);
    let mut mrs = Vec::with_capacity(OBJECTS);
    for _ in 0..OBJECTS {
        qps.push(a.driver.create_qp(&QpInit { max_send_wr: 16, max_recv_wr: 16, ..QpInit::rc(&a.pd, &a.cq) })?);
        mrs.push(a.driver.reg_mr(&a.pd, &a.buffer, access::ALL)?);
    }
    let after = resident_without_guest(&a)?;
    // The test guest's own records of the objects are a small part of this, and are counted as the device's.
    let mebibytes = after.saturating_sub(before) / (1 << 10);
    drop((qps, mrs));
    #[expect(clippy::cast_precision_loss, reason = "a few MiB")]
    let value = mebibytes as f64;
    Ok(Figure::against_target(
        "in-process/objects",
        format!("memory of {OBJECTS} QPs and {OBJECTS} MRs"),
        "MiB",
        true,
        vec![value],
        64.0,
    ))
}

/// Returns the resident KiB of the process without the guest's memory.
fn resident_without_guest(side: &Side) -> Result<usize> {
    let slice = side.memory.slice(side.buffer.bus(0), 1);
    let guest = slice.ptr_guard().as_ptr() as usize;
    let maps = std::fs::read_to_string("/proc/self/smaps").context("cannot read /proc/self/smaps")?;
    let mut total = 0;
    let mut counts = true;
    for line in maps.lines() {
        if let Some((start, end)) = range(line) {
            counts = !(start..end).contains(&guest);
        } else if let Some(kib) = line.strip_prefix("Rss:").filter(|_| counts) {
            total += kib.trim().trim_end_matches(" kB").parse::<usize>().context("cannot parse Rss")?;
        }
    }
    Ok(total)
}

/// Returns the address range at the beginning of a line of `smaps`, if there is one.
fn range(line: &str) -> Option<(usize, usize)> {
    let (start, end) = line.split_whitespace().next()?.split_once('-')?;
    Some((usize::from_str_radix(start, 16).ok()?, usize::from_str_radix(end, 16).ok()?))
}
