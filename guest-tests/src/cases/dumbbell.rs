//! Congestion control over a link with ECN marking, in one guest.

use super::case::Case;
use crate::bench::wire::dumbbell;

/// The only test.
pub(crate) fn cases() -> Vec<Case> {
    const WHEN: &str = "emulates a minute of a busy network; runs when asked for: --only slow/dumbbell";
    vec![Case::alone("slow/dumbbell", dumbbell::check).slow(WHEN)]
}
