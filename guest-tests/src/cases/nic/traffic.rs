//! Traffic between the guests: ping, `iperf3`, and a program that compares each byte.

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::super::case::{Case, WAYS};
use super::super::exchange::{Exchange, Programs, Ready};
use super::cards::{Both, CARD, Cards, PATIENCE, PEER, PORT};

/// Port of the `iperf3` server.
const IPERF_PORT: u16 = 5201;

pub(super) fn cases(cards: &Both) -> Vec<Case> {
    let mut cases = vec![
        cards.case("nic/ping-sizes", ping_sizes),
        cards.case("nic/ping-flood", ping_flood),
        cards.case("nic/datagram-sizes", datagram_sizes),
        cards.case("nic/stream", stream),
        cards.case("nic/16-streams", |cards: &Cards| cards.both_ways(4 << 20, 16).map(|()| String::new())),
    ];
    for (server, way) in WAYS {
        cases.push(cards.case(format!("nic/iperf3-tcp/{way}"), move |cards| iperf_tcp(cards, server)));
        cases.push(cards.case(format!("nic/iperf3-udp/{way}"), move |cards| iperf_udp(cards, server)));
    }
    cases
}

/// `ping` compares the replies, so one direction covers both. The sizes are at every boundary: of a frame's padding, of
/// the MTU, and of IP fragments.
fn ping_sizes(cards: &Cards) -> Result<String> {
    let sizes = "$(seq 0 66) $(seq 77 11 1463) $(seq 1466 1482) 2952 2953 4096 9000 16384 32768 65507";
    let [_, b] = cards.addresses()?;
    let link_local = format!("fe80::5054:ff:fe00:2%{CARD}");
    for (address, sizes) in [(b.to_string(), sizes), (link_local, "0 56 1452 1453 9000 65527")] {
        let script = format!(
            "for size in {sizes}; do
                 ping -n -c 1 -W 20 -s $size {address} > /tmp/ping 2>&1 && ! grep -i wrong /tmp/ping ||
                     {{ echo \"size $size\"; cat /tmp/ping; exit 1; }}
             done"
        );
        cards.vm(0).spawn(&script)?.wait_success(PATIENCE)?;
    }
    Ok(String::new())
}

/// One stream with a window that fits into the device's queues: no packet is dropped, however slow the receiver is.
fn stream(cards: &Cards) -> Result<String> {
    let dropped = || -> Result<u64> {
        let ends = [cards.device(0)?, cards.device(1)?];
        let counts =
            ends.iter().flat_map(|device| ["switch_dropped_full", "passed_dropped"].map(|name| (device, name)));
        counts
            .map(|(device, name)| device["network"]["counters"][name].as_u64().with_context(|| format!("no {name}")))
            .sum()
    };
    let before = dropped()?;
    cards.both_ways(96 << 20, 1)?;
    let lost = dropped()? - before;
    ensure!(lost == 0, "{lost} frames of a stream were dropped");
    Ok(String::new())
}

fn ping_flood(cards: &Cards) -> Result<String> {
    let [_, b] = cards.addresses()?;
    let text = cards.vm(0).spawn(&format!("ping -n -q -f -c 5000 -W 20 {b}"))?.wait_success(PATIENCE)?;
    ensure!(text.contains(" 0% packet loss"), "{text}");
    let times = text.lines().find(|line| line.starts_with("rtt"));
    Ok(times.unwrap_or_default().trim().to_owned())
}

/// UDP of every size up to one that takes two packets, then of others up to the maximum.
fn datagram_sizes(cards: &Cards) -> Result<String> {
    for (end, address) in cards.addresses()?.into_iter().enumerate() {
        let _server = cards.serve(end)?;
        for sizes in ["--to 1600", "--from 1601 --step 611 --to 65507"] {
            let command = format!("{PEER} datagrams {address}:{PORT} {sizes}");
            cards.vm(1 - end).spawn(&command)?.wait_success(PATIENCE)?;
        }
    }
    Ok(String::new())
}

/// Runs `iperf3` with its server in a guest. Returns the reports of both sides.
fn iperf(cards: &Cards, server: usize, options: &str) -> Result<[Value; 2]> {
    let address = cards.addresses()?[server];
    let programs = Programs {
        server_vm: cards.vm(server),
        server: format!("iperf3 -s -1 -J -p {IPERF_PORT}"),
        ready: Ready::Tcp(IPERF_PORT),
        client_vm: cards.vm(1 - server),
        client: format!("iperf3 -c {address} -J -p {IPERF_PORT} {options}"),
        timeout: PATIENCE,
    };
    let Exchange { client, server } = programs.run()?;
    let parse = |text: &str| -> Result<Value> {
        // Warnings may precede the report.
        let (_, json) = text.split_at(text.find('{').unwrap_or(0));
        let report: Value = serde_json::from_str(json).with_context(|| format!("iperf3 printed no JSON:\n{text}"))?;
        match report["error"].as_str() {
            Some(error) => bail!("iperf3: {error}"),
            None => Ok(report),
        }
    };
    Ok([parse(&client)?, parse(&server)?])
}

fn number(report: &Value, path: &str) -> Result<f64> {
    report.pointer(path).and_then(Value::as_f64).with_context(|| format!("no {path} in {report}"))
}

/// Four streams, in which the device loses no packet.
fn iperf_tcp(cards: &Cards, server: usize) -> Result<String> {
    let [client, _] = iperf(cards, server, "-n 128M -P 4")?;
    let (sent, received) = (number(&client, "/end/sum_sent/bytes")?, number(&client, "/end/sum_received/bytes")?);
    // The client ends the test when it has sent enough; bytes in flight are not counted.
    ensure!(sent >= f64::from(128 << 20) && received > 0.5 * sent, "{received} of {sent} bytes were received");
    let (speed, again) =
        (number(&client, "/end/sum_received/bits_per_second")?, number(&client, "/end/sum_sent/retransmits")?);
    Ok(format!("{:.2} Gb/s, {again} segments retransmitted", speed / 1e9))
}

/// Datagrams of one packet and of several. Missing ones were dropped by the guest's socket for lack of buffer space.
fn iperf_udp(cards: &Cards, server: usize) -> Result<String> {
    let overflow = || -> Result<f64> {
        let text = cards.vm(server).run("awk '/^Udp: [0-9]/ { print $6 }' /proc/net/snmp")?;
        text.trim().parse().with_context(|| format!("no number of errors: {text}"))
    };
    let mut notes = Vec::new();
    for (length, rate) in [(1400, "40M"), (64, "2M"), (8000, "40M")] {
        let before = overflow()?;
        let [client, report] = iperf(cards, server, &format!("-u -b {rate} -l {length} -n {}", length * 4000))?;
        let (packets, lost) = (number(&client, "/end/sum/packets")?, number(&client, "/end/sum/lost_packets")?);
        let full = overflow()? - before;
        ensure!(
            packets >= 4000.0 && lost <= full,
            "{lost} of {packets} are lost, {full} in the guest's socket: {report}"
        );
        let order = report.pointer("/end/streams/0/udp/out_of_order").and_then(Value::as_f64).unwrap_or(0.0);
        ensure!(order == 0.0, "{order} out of order: {report}");
        notes.push(format!("{length} bytes: {lost} of {packets} without room in the socket"));
    }
    Ok(notes.join(", "))
}
