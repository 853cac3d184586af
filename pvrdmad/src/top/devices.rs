//! A line for each device, and the traffic of one device by operation.

use std::cmp::Reverse;
use std::time::Duration;

use super::rates::{bits, processor, rate, short};
use crate::status::{DaemonStatus, DeviceReport, FlowReport};

/// Counters of operations: label, number of operations, and their bytes.
const OPERATIONS: [(&str, &str, Option<&str>); 5] = [
    ("send", "rc_sends", Some("rc_send_bytes")),
    ("write", "rc_writes", Some("rc_write_bytes")),
    ("read", "rc_reads", Some("rc_read_bytes")),
    ("atomic", "rc_atomics", None),
    ("datagram", "ud_sends", Some("ud_send_bytes")),
];

/// Returns a number of a device from any part of its report.
fn number(device: &DeviceReport, name: &str) -> u64 {
    let own = device.numbers("adapter").chain(device.numbers("counters")).find(|(known, _)| *known == name);
    own.map(|(_, value)| value).or_else(|| device.network.counters.get(name).copied()).unwrap_or(0)
}

/// Returns the growth per second of all counters for whose name `is_meant` returns `true`.
fn sum(before: &DeviceReport, now: &DeviceReport, between: Duration, is_meant: impl Fn(&str) -> bool) -> u64 {
    let old = |name: &str| number(before, name);
    let grown = |(name, value)| rate(old(name), value, between);
    let own = now.numbers("adapter").filter(|(name, _)| is_meant(name)).map(grown);
    let port = now.network.counters.iter().map(|(name, &value)| (name.as_str(), value));
    // The host's adapter has no port. Other adapters report counters of the port in both places, which must count once.
    let port = port.filter(|(name, _)| is_meant(name) && now.numbers("adapter").all(|(known, _)| known != *name));
    own.chain(port.map(grown)).fold(0, u64::saturating_add)
}

/// Rates of a device.
#[derive(Debug, Default, PartialEq, Eq)]
struct Rates {
    messages: u64,
    bytes: u64,
    wire_out: u64,
    wire_in: u64,
    retries: u64,
    drops: u64,
    processor_ns: u64,
}

impl Rates {
    fn between(before: &DeviceReport, now: &DeviceReport, between: Duration) -> Self {
        let of = |name: &str| rate(number(before, name), number(now, name), between);
        let worked = |device: &DeviceReport| {
            device.share.as_ref().map_or(0, |share| share.worker_ns.saturating_add(share.port_ns))
        };
        Self {
            messages: OPERATIONS.iter().map(|(_, count, _)| of(count)).fold(0, u64::saturating_add),
            bytes: OPERATIONS.iter().filter_map(|(_, _, bytes)| bytes.map(of)).fold(0, u64::saturating_add),
            wire_out: of("wire_sent_bytes"),
            wire_in: of("wire_received_bytes"),
            retries: of("retries").saturating_add(of("rnr_retries")).saturating_add(of("wire_resent")),
            drops: sum(before, now, between, |name| name.contains("dropped")),
            processor_ns: rate(worked(before), worked(now), between),
        }
    }
}

fn find<'a>(status: &'a DaemonStatus, device: &str) -> Option<&'a DeviceReport> {
    status.devices.iter().find(|known| known.name() == device)
}

/// Returns the lines of all devices, largest rate first.
pub(super) fn lines(before: &DaemonStatus, now: &DaemonStatus, between: Duration) -> Vec<String> {
    let mut rows: Vec<_> = now
        .devices
        .iter()
        .map(|device| {
            let rates = find(before, device.name()).map(|old| Rates::between(old, device, between)).unwrap_or_default();
            (device, rates)
        })
        .collect();
    rows.sort_by_key(|(device, rates)| (Reverse((rates.bytes, rates.messages)), device.name().to_owned()));
    let head = format!(
        "{:<16} {:<9} {:>5} {:>6} {:>6} {:>7} {:>7} {:>5} {:>5} {:>5}",
        "DEVICE", "GUEST", "QPs", "MSG/s", "BIT/s", "WIRE>", "WIRE<", "RETRY", "DROP", "CPU"
    );
    let row = |(device, rates): &(&DeviceReport, Rates)| {
        let guest = if device.client.connected { device.phase() } else { "none" };
        let queue_pairs = device.numbers("objects").find(|(name, _)| *name == "qps").map_or(0, |(_, count)| count);
        format!(
            "{:<16.16} {guest:<9.9} {:>5} {:>6} {:>6} {:>7} {:>7} {:>5} {:>5} {:>5}",
            device.name(),
            short(queue_pairs),
            short(rates.messages),
            bits(rates.bytes),
            bits(rates.wire_out),
            bits(rates.wire_in),
            short(rates.retries),
            short(rates.drops),
            processor(rates.processor_ns)
        )
    };
    std::iter::once(head).chain(rows.iter().map(row)).collect()
}

/// Number of flows of a device that are shown.
const FLOWS: usize = 5;

/// Returns the traffic of a device by peer, largest rate first.
fn flows(old: &DeviceReport, now: &DeviceReport, between: Duration) -> Vec<String> {
    let mut rows: Vec<_> = now
        .flows
        .iter()
        .map(|flow| {
            let before = old.flows.iter().find(|known| (known.peer, known.road) == (flow.peer, flow.road));
            let of = |count: fn(&FlowReport) -> u64| rate(before.map_or(0, count), count(flow), between);
            (flow, of(|flow| flow.requests), of(|flow| flow.bytes_out), of(|flow| flow.bytes_in))
        })
        .collect();
    rows.sort_by_key(|&(_, requests, out, read)| Reverse((out.saturating_add(read), requests)));
    rows.truncate(FLOWS);
    let head = format!("{:<40} {:<6} {:>8} {:>8} {:>8}", "PEER", "ROAD", "MSG/s", "BIT/s >", "BIT/s <");
    let row = |(flow, requests, out, read): (&FlowReport, u64, u64, u64)| {
        let (peer, road) = (flow.peer(), flow.road.word());
        format!("{peer:<40.40} {road:<6} {:>8} {:>8} {:>8}", short(requests), bits(out), bits(read))
    };
    let rows: Vec<_> = rows.into_iter().map(row).collect();
    if rows.is_empty() { rows } else { [vec![head], rows].concat() }
}

/// Returns the traffic of one device by operation.
pub(super) fn detail(before: &DaemonStatus, now: &DaemonStatus, name: &str, between: Duration) -> Vec<String> {
    let Some(device) = find(now, name) else { return vec![format!("{name}: its network does not say how it is")] };
    let old = find(before, name).unwrap_or(device);
    let mut lines = vec![format!(
        "{name}: guest {}, port {}, network {}, MTU {}",
        if device.client.connected { device.phase() } else { "none" },
        device.port,
        device.network.name,
        device.network.mtu
    )];
    let of = |name: &str| rate(number(old, name), number(device, name), between);
    let operations = OPERATIONS.iter().map(|(word, count, bytes)| {
        let data = bytes.map_or_else(String::new, |bytes| format!(" {}b", bits(of(bytes))));
        format!("{word} {}{data}", short(of(count)))
    });
    lines.push(format!("a second: {}", operations.collect::<Vec<_>>().join(", ")));
    lines.push(format!(
        "port: out {}b, in {}b; resent {}, timeouts {}, CNPs {}, cuts {}",
        bits(of("wire_sent_bytes")),
        bits(of("wire_received_bytes")),
        short(of("wire_resent")),
        short(of("wire_timeouts")),
        short(of("wire_cnps_received")),
        short(of("wire_rate_cuts"))
    ));
    lines.extend(flows(old, device, between));
    lines
}
