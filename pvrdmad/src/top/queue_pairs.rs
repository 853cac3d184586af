//! A line for each queue pair of a device.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::time::Duration;

use serde_json::Value;

use super::rates::{bits, rate, short};

/// Requests that ended, and bytes in them. None if the queue pair was busy when it was looked at, or does not count.
fn moved(queue_pair: &Value) -> Option<[u64; 2]> {
    let requester = queue_pair.pointer("/adapter/requester")?;
    Some([requester.get("requests")?.as_u64()?, requester.get("bytes")?.as_u64()?])
}

fn number<'a>(queue_pair: &'a Value, pointer: &str) -> Option<&'a Value> {
    queue_pair.pointer(pointer).filter(|value| value.is_number())
}

fn word<'a>(queue_pair: &'a Value, pointer: &str) -> &'a str {
    queue_pair.pointer(pointer).and_then(Value::as_str).unwrap_or("-")
}

/// The queue pairs, those first that move most.
pub(super) fn lines(before: &Value, now: &Value, between: Duration) -> Vec<String> {
    // A handle is used again; a QPN hardly.
    let qpn = |queue_pair: &Value| queue_pair.get("qpn").and_then(Value::as_u64);
    let old: HashMap<_, _> = before.as_array().into_iter().flatten().map(|old| (qpn(old), old)).collect();
    let mut rows: Vec<_> = now
        .as_array()
        .into_iter()
        .flatten()
        .map(|queue_pair| {
            let rates = old.get(&qpn(queue_pair)).copied().and_then(moved).zip(moved(queue_pair)).map(
                |([requests, bytes], [more, longer])| [rate(requests, more, between), rate(bytes, longer, between)],
            );
            (queue_pair, rates)
        })
        .collect();
    rows.sort_by_key(|(queue_pair, rates)| {
        (Reverse(rates.map(|[requests, bytes]| [bytes, requests])), qpn(queue_pair))
    });
    let head = format!(
        "{:<8} {:<4} {:<5} {:>6} {:>6} {:>9} {:<8} {:>3} {}",
        "QPN", "TYPE", "STATE", "MSG/s", "BIT/s", "SENDRING", "PATH", "RTY", "PEER"
    );
    let row = |(queue_pair, rates): &(&Value, Option<[u64; 2]>)| line(queue_pair, *rates);
    std::iter::once(head).chain(rows.iter().map(row)).collect()
}

fn line(queue_pair: &Value, rates: Option<[u64; 2]>) -> String {
    let state = match word(queue_pair, "/attrs/state") {
        "-" => word(queue_pair, "/adapter/state"),
        state => state,
    };
    let [requests, data] =
        rates.map_or_else(|| ["-", "-"].map(str::to_owned), |[requests, bytes]| [short(requests), bits(bytes)]);
    let ring = match (number(queue_pair, "/send_ring/used"), number(queue_pair, "/send_ring/size")) {
        (Some(used), Some(size)) => format!("{used}/{size}"),
        _ => "-".to_owned(),
    };
    let retries =
        number(queue_pair, "/adapter/requester/retries_left").map_or_else(|| "-".to_owned(), Value::to_string);
    let peer = match queue_pair.pointer("/attrs/dest_qpn").and_then(Value::as_u64) {
        Some(qpn @ 1..) if word(queue_pair, "/type") == "RC" => {
            format!("{qpn:#x} {}", word(queue_pair, "/attrs/av/dgid").trim_start_matches("::ffff:"))
        }
        _ => "-".to_owned(),
    };
    let qpn = queue_pair.get("qpn").and_then(Value::as_u64).unwrap_or(0);
    format!(
        "{:<8} {:<4.4} {state:<5.5} {requests:>6} {data:>6} {ring:>9} {:<8.8} {retries:>3} {peer}",
        format!("{qpn:#x}"),
        word(queue_pair, "/type"),
        word(queue_pair, "/adapter/requester/route/path"),
    )
}
