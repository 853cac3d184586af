//! Compares trapped doorbells with doorbells in mapped memory, round by round: with a spare processor for the polling
//! thread, and without one.

mod client;
mod guests;
mod sides;
mod to_device;

use anyhow::Result;
use pvrdmad::doorbells::PageFile;

use super::figure::Figure;

/// Measures everything `runs` times, without guests if `guests` is not set. A measurement that is not possible here
/// yields the reason.
pub(super) fn measure(runs: usize, guests: bool) -> Result<Vec<Result<Figure, String>>> {
    let mut rows = vec![Ok(to_device::measure(runs)?)];
    if let Err(error) = PageFile::make(1) {
        rows.push(Err(format!("mapped doorbells of pvrdmad: {error}")));
        return Ok(rows);
    }
    rows.push(Ok(client::measure(runs)?));
    if guests {
        rows.extend(guests::measure(runs)?.into_iter().map(Ok));
    }
    Ok(rows)
}
