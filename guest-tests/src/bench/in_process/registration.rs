//! Registrations of memory, compared with `mlock` of as many pages.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use memmap2::MmapMut;
use pvrdma_dev::testing::{GuestMemory, Placement, access};
use pvrdma_guest_memory::PinPolicy;
use pvrdma_rxe::{Rxe, RxeConfig};

use crate::bench::figure::Figure;
use crate::device_pair::{Side, SideOptions};

/// Bytes that the registrations of a round cover, at most.
const ROUND: usize = 1 << 30;
/// Registrations of a round, at most.
const REPEATS: u32 = 10_000;

/// Measures CREATE_MR for scattered pages of 4 KiB in memory that is locked while it is registered, from the write of
/// the register to the response. The page directory, which the guest's driver writes, is not part of it.
pub(super) fn against_mlock(bytes: usize, runs: usize) -> Result<Figure> {
    let backend = Rxe::new(RxeConfig::default())?;
    let options = SideOptions::new(bytes, Placement::Scattered);
    let memory = GuestMemory::with_policy(options.bytes + options.other_memory, PinPolicy::Registered);
    let side = Side::with_memory(&backend, 1, &options, &memory)?;
    // The buffer is registered once, with the side, and locks do not nest.
    let Side { driver, pd, buffer, mr, .. } = side;
    mr.destroy()?;
    let mut own = MmapMut::map_anon(bytes).context("cannot map memory")?;
    own.fill(1);
    let repeats = u32::try_from(ROUND / bytes).unwrap_or(REPEATS).clamp(1, REPEATS);
    let mut rounds = Vec::new();
    for _ in 0..runs {
        let (mut registered, mut locked) = (Duration::ZERO, Duration::ZERO);
        for _ in 0..repeats {
            let request = driver.mr_request(&pd, buffer.va(), buffer.len() as u64, buffer.pages(), access::ALL);
            let start = Instant::now();
            let mr = request.issue()?;
            registered += start.elapsed();
            mr.destroy()?;
            let start = Instant::now();
            own.lock().context("cannot lock memory")?;
            locked += start.elapsed();
            own.unlock().context("cannot unlock memory")?;
        }
        rounds.push([registered, locked].map(|time| time.as_secs_f64() * 1e6 / f64::from(repeats)));
    }
    let name = format!("in-process/register-{bytes}");
    let title = format!("registration of {} KiB in scattered pages, the device's part", bytes >> 10);
    Ok(Figure::of_rounds(name, title, "µs", true, &rounds, "mlock of as many pages"))
}
