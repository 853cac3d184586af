use serde_json::{Value, json};

use super::rates::{bits, processor, rate, short};
use super::*;

/// A device with this number of writes and bytes.
fn device(name: &str, writes: u64, bytes: u64) -> Value {
    json!({
        "name": name, "phase": "active", "mac": "52:54:00:00:00:01",
        "adapter": {"rc_writes": writes, "rc_write_bytes": bytes, "ud_dropped_no_qp": writes / 10, "retries": 7},
        "counters": {}, "objects": {"qps": 3},
        "socket": "/s", "port": "active", "mtu": 4096, "client": {"connected": true},
        "doorbells": {"mode": "trapped"},
        "memory": {
            "pin": "off", "mapped_bytes": 0, "pinned_bytes": 0, "files": "any", "max_mapped_bytes": 0,
            "max_locked_bytes": 0, "open_files": 0, "mappings": 0, "pin_error": null,
        },
        "addresses": {"rule": "own", "listed": [], "guarded": true}, "peers": [[], []],
        // Reported in two places, but counted once.
        "network": {"name": "default", "mtu": 9000, "counters": {"wire_sent_bytes": bytes, "ud_dropped_no_qp": 0}},
        "share": {
            "weight": 100, "max_rate": null, "qp_max_rate": null, "min_rate": null, "worker_ns": writes * 1_000_000,
            "port_ns": 0, "throttled": 0,
        },
        "flows": [
            {"peer": "10.0.0.2", "road": "local", "requests": writes, "bytes_out": bytes, "bytes_in": 0},
            {"peer": null, "road": "wire", "requests": 1, "bytes_out": 1, "bytes_in": 2 * bytes},
        ],
        "capture": {"active": 0, "frames": 0, "dropped": 0},
    })
}

fn look(at: Instant, devices: &[Value], queue_pairs: Value) -> Look {
    let status = json!({
        "version": "0.1.0", "pid": 1, "uptime_s": 9, "backend": "rxe", "lost_mappings": 0, "control": {},
        "networks": [], "devices": devices,
    });
    let queue_pairs = serde_json::from_value(queue_pairs).unwrap();
    Look { at, status: serde_json::from_value(status).unwrap(), queue_pairs }
}

fn queue_pair(qpn: u32, requests: u64, bytes: u64) -> Value {
    json!({
        "qpn": qpn, "type": "RC", "state": "RTS", "peer": {"qpn": 0xdd_1731, "gid": "::ffff:10.0.0.2"},
        "send_ring_used": 1, "send_ring_size": 64,
        "progress": {"requests": requests, "bytes": bytes, "retries_left": 7, "path": "local"},
    })
}

/// Two samples at an interval of two seconds.
fn two(before: &[Value], now: &[Value], queue_pairs: [Value; 2], device: Option<&str>, lines: usize) -> String {
    let at = Instant::now();
    let [old, new] = queue_pairs;
    let later = at + Duration::from_secs(2);
    frame(&look(at, before, old), &look(later, now, new), device, lines)
}

#[test]
fn rates_of_all_devices() {
    let before = [device("quiet", 0, 0), device("busy", 100, 1000)];
    let name = "a-name-of-thirty-two-characters!";
    let now = [device("quiet", 0, 0), device("busy", 2100, 2_501_000), device(name, 5, 5)];
    let text = two(&before, &now, [json!([]), json!([])], None, usize::MAX);
    let rows: Vec<Vec<_>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[0].join(" "), "pvrdmad 0.1.0, up 9 s, backend rxe: 3 devices, 0 networks");
    // 2000 writes and 2.5 million bytes in two seconds; two seconds of work in them. The retries are old.
    assert_eq!(rows[2], ["busy", "active", "3", "1.00k", "10.0M", "10.0M", "0", "0", "100", "100%"]);
    // A device that was absent from the first sample has no rates.
    assert_eq!(rows[3][..5], [&name[..16], "active", "3", "0", "0"]);
    assert_eq!(rows[4][0], "quiet");
    assert!(text.lines().all(|line| line.chars().count() <= COLUMNS), "{text}");
}

#[test]
fn queue_pairs_of_one_device() {
    let queue_pairs = [
        json!([queue_pair(1, 0, 0), queue_pair(2, 0, 0)]),
        json!([
            queue_pair(1, 10, 10),
            queue_pair(2, 20, 1 << 40),
            queue_pair(0x00ff_ffff, 5, 5),
            {
                "qpn": 9, "type": "UD", "state": null, "peer": null, "send_ring_used": null, "send_ring_size": 64,
                "progress": null,
            },
        ]),
    ];
    let now = [device("vm0", 20, 2000)];
    let text = two(&[device("vm0", 0, 0)], &now, queue_pairs, Some("vm0"), usize::MAX);
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines[1], "vm0: guest active, port active, network default, MTU 9000");
    assert_eq!(lines[2], "a second: send 0 0b, write 10 8.00kb, read 0 0b, atomic 0, datagram 0 0b");
    let flows: Vec<Vec<_>> = lines[4..7].iter().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(flows[1], ["others", "wire", "0", "0", "16.0k"]);
    assert_eq!(flows[2], ["10.0.0.2", "local", "10", "8.00k", "0"]);
    let words: Vec<Vec<_>> = lines[8..].iter().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(words[0], ["0x2", "RC", "RTS", "10", "4.39T", "1/64", "local", "7", "0xdd1731", "10.0.0.2"]);
    assert_eq!(words[1][..5], ["0x1", "RC", "RTS", "5", "40"]);
    // A queue pair that is new or busy has no rates.
    assert_eq!(words[2], ["0x9", "UD", "-", "-", "-", "-", "-", "-", "-"]);
    assert_eq!(words[3][..5], ["0xffffff", "RC", "RTS", "-", "-"]);
    assert!(lines.iter().all(|line| line.chars().count() <= COLUMNS), "{text}");
    assert!(two(&[], &[], [json!([]), json!([])], Some("vm0"), 24).contains("does not say how it is"));
}

#[test]
fn no_more_lines_than_the_terminal_has() {
    let devices: Vec<_> = (0..64).map(|number| device(&format!("vm{number}"), 0, 0)).collect();
    for lines in [2, 3, 24, 66] {
        let text = two(&devices, &devices, [json!([]), json!([])], None, lines);
        assert_eq!(text.lines().count(), lines - 1);
        let left_out = 66 - (lines - 2);
        assert!(text.ends_with(&format!("… and {left_out} more lines\n")), "{lines}: {text}");
    }
    assert_eq!(two(&devices, &devices, [json!([]), json!([])], None, 67).lines().count(), 66);
}

#[test]
fn numbers_are_short() {
    let second = Duration::from_secs(1);
    assert_eq!([rate(5, 25, second * 2), rate(9, 3, second), rate(0, u64::MAX, second)], [10, 0, u64::MAX]);
    assert_eq!(rate(0, u64::MAX, Duration::ZERO), u64::MAX);
    let texts = [0, 999, 1000, 9999, 10_000, 123_456, 1_234_567, u64::MAX].map(short);
    assert_eq!(texts, ["0", "999", "1.00k", "9.99k", "10.0k", "123k", "1.23M", "18.4E"]);
    assert_eq!((bits(125), bits(u64::MAX)), ("1.00k".to_owned(), "18.4E".to_owned()));
    assert_eq!([0, 12_300_000, 2_000_000_000].map(processor), ["0.0%", "1.2%", "200%"]);
}
