//! Rates of counters.

use std::time::Duration;

/// Returns the growth per second. A counter that shrank was reset, so its rate is not known yet.
pub(super) fn rate(before: u64, now: u64, between: Duration) -> u64 {
    let grown = u128::from(now.saturating_sub(before));
    let a_second = grown.saturating_mul(1_000_000_000) / between.as_nanos().max(1);
    u64::try_from(a_second).unwrap_or(u64::MAX)
}

/// Formats a rate with at most four digits and a decimal unit prefix.
pub(super) fn short(rate: u64) -> String {
    const UNITS: [&str; 7] = ["", "k", "M", "G", "T", "P", "E"];
    let (mut left, mut rest, mut unit) = (rate, 0, 0);
    while left >= 1000 && unit + 1 < UNITS.len() {
        (rest, left, unit) = (left % 1000, left / 1000, unit + 1);
    }
    match UNITS.get(unit) {
        None | Some(&"") => rate.to_string(),
        Some(name) if left < 10 => format!("{left}.{:02}{name}", rest / 10),
        Some(name) if left < 100 => format!("{left}.{}{name}", rest / 100),
        Some(name) => format!("{left}{name}"),
    }
}

/// Formats a rate of bytes in bits.
pub(super) fn bits(bytes: u64) -> String {
    short(bytes.saturating_mul(8))
}

/// Formats nanoseconds of work per second as a percentage of a processor.
pub(super) fn processor(ns: u64) -> String {
    match ns / 10_000_000 {
        percent @ 0..10 => format!("{percent}.{}%", ns / 1_000_000 % 10),
        percent => format!("{percent}%"),
    }
}
