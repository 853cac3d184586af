//! Limits of a connection, and the memory that it is charged for.

use pvrdma_iwarp::Stream;

use crate::limits::FAST_REGISTER_PAGES;

/// Number of requests that are taken from the ring before they are done.
pub(crate) const REQUESTS: usize = 128;
/// Number of fast registrations that wait with their page lists.
pub(crate) const PAGE_LISTS: usize = 2;
/// Bytes of a waiting fast registration: 16 for each page, and the fixed part.
const PAGE_LIST_BYTES: usize = FAST_REGISTER_PAGES as usize * 16 + 160;
/// Bytes that are read from a socket at a time.
pub(super) const INCOMING: usize = 64 << 10;
/// Bytes that were built and that the socket has not accepted.
pub(super) const OUTGOING: usize = 64 << 10;
/// Maximum length of an FPDU to send, so that several fit.
pub(super) const LONGEST: usize = OUTGOING / 4;
/// Bytes of an FPDU that has not arrived completely.
const PARTIAL: usize = 64 << 10;

/// Returns the bytes that a queue pair is charged for a connection, if its requests have up to `max_sge` SGEs.
pub(super) fn bytes(max_sge: u8) -> u64 {
    // The smallest allocation of a list has room for four entries.
    let request = Stream::bytes_of_request(usize::from(max_sge).max(4)).saturating_add(16);
    let requests = REQUESTS.saturating_mul(request).saturating_add(PAGE_LISTS * PAGE_LIST_BYTES);
    let all = requests.saturating_add(INCOMING + OUTGOING + PARTIAL).saturating_add(size_of::<Stream>());
    all as u64
}
