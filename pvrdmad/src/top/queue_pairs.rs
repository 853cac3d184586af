//! A line for each queue pair of a device.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::time::Duration;

use super::rates::{bits, rate, short};
use crate::status::QueuePairTraffic;

/// Returns requests and bytes per second, or `None` if the queue pair was busy during a sample or does not count.
fn rates(before: &QueuePairTraffic, now: &QueuePairTraffic, between: Duration) -> Option<[u64; 2]> {
    let (before, now) = (before.progress.as_ref()?, now.progress.as_ref()?);
    Some([rate(before.requests, now.requests, between), rate(before.bytes, now.bytes, between)])
}

/// Returns the lines of the queue pairs, largest rate first.
pub(super) fn lines(before: &[QueuePairTraffic], now: &[QueuePairTraffic], between: Duration) -> Vec<String> {
    // Handles are reused quickly, QPNs are not.
    let old: HashMap<_, _> = before.iter().map(|old| (old.qpn, old)).collect();
    let mut rows: Vec<_> =
        now.iter().map(|now| (now, old.get(&now.qpn).and_then(|old| rates(old, now, between)))).collect();
    rows.sort_by_key(|&(queue_pair, rates)| {
        (Reverse(rates.map(|[requests, bytes]| [bytes, requests])), queue_pair.qpn)
    });
    let head = format!(
        "{:<8} {:<4} {:<5} {:>6} {:>6} {:>9} {:<8} {:>3} {}",
        "QPN", "TYPE", "STATE", "MSG/s", "BIT/s", "SENDRING", "PATH", "RTY", "PEER"
    );
    std::iter::once(head).chain(rows.iter().map(|&(queue_pair, rates)| line(queue_pair, rates))).collect()
}

fn line(queue_pair: &QueuePairTraffic, rates: Option<[u64; 2]>) -> String {
    let unknown = || "-".to_owned();
    let [requests, data] =
        rates.map_or_else(|| [unknown(), unknown()], |[requests, bytes]| [short(requests), bits(bytes)]);
    let size = queue_pair.send_ring_size;
    let ring = queue_pair.send_ring_used.map_or_else(unknown, |used| format!("{used}/{size}"));
    let (path, retries) = queue_pair
        .progress
        .as_ref()
        .map_or_else(|| (unknown(), unknown()), |progress| (progress.path.clone(), progress.retries_left.to_string()));
    let peer = queue_pair
        .peer
        .as_ref()
        .map_or_else(unknown, |peer| format!("{:#x} {}", peer.qpn, peer.gid.trim_start_matches("::ffff:")));
    format!(
        "{:<8} {:<4.4} {:<5.5} {requests:>6} {data:>6} {ring:>9} {path:<8.8} {retries:>3} {peer}",
        format!("{:#x}", queue_pair.qpn),
        queue_pair.qp_type,
        queue_pair.state.as_deref().unwrap_or("-"),
    )
}
