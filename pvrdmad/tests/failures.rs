//! Seeded incidents of queue pairs are told apart by `show failures`, metrics, log and events, after the queue pairs
//! are gone.

use std::collections::BTreeMap;

use crate::common::daemon::{Running, TestDaemon};
use crate::common::traffic::{Guest, gid, mac};
use pvrdma_dev::testing::{Buffer, Cq, Mr, Path, Pd, Qp, QpInit, RecvWr, SendWr, access, wait_for};
use pvrdma_verbs_types::Sge;
use serde_json::{Value, json};

/// Bytes of a buffer.
const LENGTH: usize = 8192;

/// Starts a daemon with devices of these numbers, in the network `red` with an uplink.
fn start(uplink: &str, numbers: &[u8]) -> Running {
    // The option has precedence over the variable, in the processes of networks as well.
    let daemon = TestDaemon::new().env("RUST_LOG", "off").arg("--log-level=info");
    let daemon = daemon.network("red", &format!("uplink={uplink}"));
    let device = |daemon: TestDaemon, &number| daemon.device(&format!("vm{number}"), number, "network=red,address=any");
    numbers.iter().fold(daemon, device).start()
}

/// Runs `status --check`. Returns `true` for the status 0, and its output.
fn check_status(host: &Running) -> (bool, String) {
    let output = host.command("status --check").output().unwrap();
    (output.status.success(), String::from_utf8(output.stdout).unwrap())
}

fn guest(host: &Running, number: u8) -> Guest {
    host.guest(&format!("vm{number}"), number)
}

/// Returns device, number of the queue pair and cause of each failure.
fn failures(host: &Running) -> Vec<(String, u64, String)> {
    let shown: Value = serde_json::from_str(&host.run("show failures --json")).unwrap();
    assert_eq!(shown["silent"], json!([]));
    let failures = shown["failures"].as_array().unwrap().iter();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    failures
        .map(|failed| {
            let cause = text(&failed["cause"]);
            assert_eq!(failed["help"], format!("docs/troubleshooting.md#{cause}"));
            assert_eq!(failed["network"], "red");
            (text(&failed["device"]), failed["qpn"].as_u64().unwrap(), cause)
        })
        .collect()
}

/// Timeout code of a connection, and its number of retries.
#[derive(Clone, Copy)]
struct Patience {
    timeout: u8,
    retry_cnt: u8,
}

/// For a peer that never answers: 0.2 s.
const NONE: Patience = Patience { timeout: 14, retry_cnt: 2 };
/// For a peer that answers, if late because the machine is busy: 8.6 s.
const LONG: Patience = Patience { timeout: 18, retry_cnt: 7 };

/// One end of a connection.
struct End {
    number: u8,
    pd: Pd,
    cq: Cq,
    qp: Qp,
    buffer: Buffer,
    mr: Mr,
    /// A second region of the buffer, which peers may only read; `None` once it was deregistered.
    spare: Option<Mr>,
}

impl End {
    fn new(guest: &Guest, cqes: u32) -> Self {
        let driver = &guest.driver;
        let pd = driver.create_pd(None).unwrap();
        let cq = driver.create_cq(None, cqes).unwrap();
        let qp = driver.create_qp(&QpInit::rc(&pd, &cq)).unwrap();
        let (buffer, mr) = driver.registered_buffer(&pd, LENGTH, access::ALL).unwrap();
        let spare = Some(driver.reg_mr(&pd, &buffer, access::LOCAL_WRITE | access::REMOTE_READ).unwrap());
        Self { number: guest.number, pd, cq, qp, buffer, mr, spare }
    }

    fn connect(&mut self, to: &Self, patience: Patience) {
        let Patience { timeout, retry_cnt } = patience;
        let path = Path { timeout, retry_cnt, rnr_retry: 0, ..Path::to(gid(to.number), to.qp.qpn) };
        self.qp.connect(&Path { dmac: mac(to.number), ..path }).unwrap();
    }

    /// Sends a message of this length.
    fn send(&mut self, length: usize) {
        let from = self.buffer.sge(&self.mr, 0, length);
        self.qp.post_send(&[SendWr::send(1, &[from])]).unwrap();
    }

    /// Posts a receive of this length.
    fn receive(&mut self, length: usize) {
        let to = self.buffer.sge(&self.mr, 0, length);
        self.qp.post_recv(&[RecvWr::new(2, &[to])]).unwrap();
    }

    /// Deregisters the second region. Returns an element of a list with its old keys, and its remote key.
    fn deregister(&mut self) -> (Sge, u32) {
        let spare = self.spare.take().unwrap();
        let (old, rkey) = (self.buffer.sge(&spare, 0, 8), spare.rkey);
        spare.destroy().unwrap();
        (old, rkey)
    }

    fn destroy(self) {
        self.qp.destroy().unwrap();
        if let Some(spare) = self.spare {
            spare.destroy().unwrap();
        }
        self.mr.destroy().unwrap();
        self.cq.destroy().unwrap();
        self.pd.destroy().unwrap();
        self.buffer.free();
    }
}

/// An incident: the events at the two ends, and the cause that each reports.
struct Incident {
    name: &'static str,
    happens: fn(&mut End, &mut End),
    causes: [Option<&'static str>; 2],
}

impl Incident {
    /// Causes between two hosts.
    fn causes_on_the_wire(&self) -> [Option<&'static str>; 2] {
        match self.causes {
            // A peer that is silent may be absent or slow.
            [Some("peer-absent"), other] => [Some("retry-exceeded"), other],
            causes => causes,
        }
    }
}

const INCIDENTS: [Incident; 20] = [
    Incident {
        name: "a key that does not exist",
        happens: |left, right| {
            let (from, to) = (left.buffer.sge(&left.mr, 0, 8), right.buffer.sge(&right.mr, 0, 8));
            left.qp.post_send(&[SendWr::write(1, &[from], to.addr, right.mr.rkey ^ (1 << 20))]).unwrap();
        },
        causes: [Some("remote-access"), Some("refused-access")],
    },
    Incident {
        name: "a message that is longer than its receive",
        happens: |left, right| {
            right.receive(100);
            left.send(LENGTH);
        },
        causes: [Some("remote-invalid-request"), Some("refused-request")],
    },
    Incident {
        name: "a receive whose key is wrong",
        happens: |left, right| {
            let to = right.buffer.sge(&right.mr, 0, LENGTH);
            let wrong = Sge { lkey: to.lkey ^ (1 << 20), ..to };
            right.qp.post_recv(&[RecvWr::new(2, &[wrong])]).unwrap();
            left.send(100);
        },
        causes: [Some("remote-operation"), Some("refused-operation")],
    },
    Incident { name: "no receive", happens: |left, _| left.send(100), causes: [Some("rnr-retry-exceeded"), None] },
    Incident {
        name: "a request whose key is wrong",
        happens: |left, _| {
            let from = left.buffer.sge(&left.mr, 0, 8);
            let wrong = Sge { lkey: from.lkey ^ (1 << 20), ..from };
            left.qp.post_send(&[SendWr::send(1, &[wrong])]).unwrap();
        },
        causes: [Some("local-protection"), None],
    },
    Incident {
        name: "an opcode that there is not",
        happens: |left, _| left.qp.post_send(&[SendWr::new(1, 0x77, &[])]).unwrap(),
        causes: [Some("local-qp-operation"), None],
    },
    Incident {
        name: "an atomic of another length than 8 bytes",
        happens: |left, right| {
            let (from, to) = (left.buffer.sge(&left.mr, 0, 16), right.buffer.sge(&right.mr, 0, 8));
            left.qp.post_send(&[SendWr::fetch_add(1, from, to.addr, right.mr.rkey, 1)]).unwrap();
        },
        causes: [Some("local-length"), None],
    },
    Incident {
        name: "the sender does not poll its queue",
        happens: |left, right| {
            let entries = left.cq.ring().entries();
            for _ in 0..=entries {
                right.receive(0);
                left.send(0);
                // The receiver polls.
                wait_for("a receive", || right.cq.poll());
            }
        },
        causes: [Some("cq-overrun"), None],
    },
    Incident {
        name: "an index that no driver writes into the send ring",
        happens: |left, _| {
            left.qp.send_ring().set_prod_tail(0xffff_fff0);
            left.qp.ring_send();
        },
        causes: [Some("send-queue"), None],
    },
    Incident {
        name: "an index that no driver writes into the receive ring",
        happens: |left, right| {
            right.qp.recv_ring().set_prod_tail(0xffff_fff0);
            right.qp.ring_recv();
            left.send(100);
        },
        causes: [Some("remote-operation"), Some("receive-queue")],
    },
    Incident {
        name: "the program of the peer has ended its queue pair",
        happens: |left, right| {
            right.qp.to_error().unwrap();
            left.send(100);
        },
        causes: [Some("peer-absent"), None],
    },
    Incident {
        name: "an atomic on an address that is not aligned",
        happens: |left, right| {
            let (from, to) = (left.buffer.sge(&left.mr, 0, 8), right.buffer.sge(&right.mr, 4, 8));
            left.qp.post_send(&[SendWr::fetch_add(1, from, to.addr, right.mr.rkey, 1)]).unwrap();
        },
        causes: [Some("remote-invalid-request"), Some("refused-request")],
    },
    Incident {
        name: "a read beyond the end of the region",
        happens: |left, right| {
            let (from, to) = (right.buffer.sge(&right.mr, LENGTH, 8), left.buffer.sge(&left.mr, 0, 8));
            left.qp.post_send(&[SendWr::read(1, &[to], from.addr, right.mr.rkey)]).unwrap();
        },
        causes: [Some("remote-access"), Some("refused-access")],
    },
    Incident {
        name: "a write to a region that may only be read",
        happens: |left, right| {
            let (from, to) = (left.buffer.sge(&left.mr, 0, 8), right.buffer.sge(&right.mr, 0, 8));
            let rkey = right.spare.as_ref().unwrap().rkey;
            left.qp.post_send(&[SendWr::write(1, &[from], to.addr, rkey)]).unwrap();
        },
        causes: [Some("remote-access"), Some("refused-access")],
    },
    Incident {
        name: "a read from a region that the peer has deregistered",
        happens: |left, right| {
            let (from, rkey) = right.deregister();
            let to = left.buffer.sge(&left.mr, 0, 8);
            left.qp.post_send(&[SendWr::read(1, &[to], from.addr, rkey)]).unwrap();
        },
        causes: [Some("remote-access"), Some("refused-access")],
    },
    Incident {
        name: "a request from a region that was deregistered",
        happens: |left, _| {
            let (from, _) = left.deregister();
            left.qp.post_send(&[SendWr::send(1, &[from])]).unwrap();
        },
        causes: [Some("local-protection"), None],
    },
    Incident {
        name: "a request from beyond the end of the region",
        happens: |left, _| {
            let from = left.buffer.sge(&left.mr, LENGTH, 8);
            left.qp.post_send(&[SendWr::send(1, &[from])]).unwrap();
        },
        causes: [Some("local-protection"), None],
    },
    Incident {
        name: "a receive beyond the end of the region",
        happens: |left, right| {
            let to = right.buffer.sge(&right.mr, LENGTH, 200);
            right.qp.post_recv(&[RecvWr::new(2, &[to])]).unwrap();
            left.send(100);
        },
        causes: [Some("remote-operation"), Some("refused-operation")],
    },
    Incident {
        name: "a message of more than 2 GiB",
        happens: |left, _| {
            let from = left.buffer.sge(&left.mr, 0, (1 << 31) + 1);
            left.qp.post_send(&[SendWr::send(1, &[from])]).unwrap();
        },
        causes: [Some("local-length"), None],
    },
    Incident {
        name: "the receiver does not poll its queue",
        happens: |left, right| {
            let entries = right.cq.ring().entries();
            for _ in 0..=entries {
                right.receive(0);
                left.send(0);
                // The sender polls.
                wait_for("a request", || left.cq.poll());
            }
        },
        causes: [Some("remote-operation"), Some("cq-overrun")],
    },
];

/// Failures that an incident has to cause: device, number of the queue pair, cause.
type Expected = Vec<(String, u64, String)>;

/// Lets an incident happen between two guests. Returns the failures that it has to cause; the queue pairs are gone.
fn seed(incident: &Incident, guests: [&Guest; 2], hosts: [&Running; 2], causes: [Option<&str>; 2]) -> Expected {
    // The completion queue of the sender is small, so that it can overrun.
    let (mut left, mut right) = (End::new(guests[0], 8), End::new(guests[1], 64));
    // If a connection to a busy peer ran out of retries, it would report that in place of the cause.
    let patience = if incident.causes[0] == Some("peer-absent") { NONE } else { LONG };
    left.connect(&right, patience);
    right.connect(&left, patience);
    (incident.happens)(&mut left, &mut right);
    let ends = [&left, &right].map(|end| (format!("vm{}", end.number), u64::from(end.qp.qpn)));
    let mut expected = Vec::new();
    for ((host, (device, qpn)), cause) in hosts.into_iter().zip(ends).zip(causes) {
        if let Some(cause) = cause {
            let failed = (device, qpn, cause.to_owned());
            wait_for(incident.name, || failures(host).contains(&failed).then_some(()));
            expected.push(failed);
        }
    }
    left.destroy();
    right.destroy();
    expected
}

/// Checks that a host tells of exactly these failures.
fn check(host: &Running, mut expected: Expected) {
    let mut shown = failures(host);
    shown.sort();
    expected.sort();
    assert_eq!(shown, expected, "show failures");

    let metrics = host.run("status --format openmetrics");
    let mut counts = BTreeMap::<_, u64>::new();
    expected.iter().for_each(|(device, _, cause)| *counts.entry((device, cause)).or_default() += 1);
    for ((device, cause), count) in counts {
        let labels = format!(r#"network="red",device="{device}",cause="{cause}""#);
        let sample = format!("pvrdma_queue_pairs_failed_total{{{labels}}} {count}.0");
        assert!(metrics.lines().any(|line| line == sample), "{sample}\n{metrics}");
    }
    let log = host.log();
    let events = host.run("events --last 1000");
    let events: Vec<Value> = events.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for (device, qpn, cause) in &expected {
        let (begin, middle) = (format!("{device}: QP {qpn:#08x} to "), format!(" failed ({cause}) by its "));
        let full = format!(" failed ({cause}) by a full completion queue");
        let is_said = |line: &str| line.contains(&begin) && (line.contains(&middle) || line.contains(&full));
        assert!(log.lines().any(is_said), "{begin}{cause}\n{log}");
        let event = events.iter().find(|event| event["device"] == **device && event["qpn"] == *qpn);
        assert_eq!(event.unwrap()["cause"], **cause);
    }
}

/// Ten log lines about a device are not suppressed, so a few incidents are seeded in each pair of devices.
const EACH: usize = 4;

#[test]
fn incidents_within_a_host_are_distinguished() {
    let folder = tempfile::tempdir().unwrap();
    let host = start(&format!("unix:{}", folder.path().join("uplink").display()), &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
    let mut expected = Vec::new();
    for (pair, incidents) in (0..).zip(INCIDENTS.chunks(EACH)) {
        let guests = [1, 2].map(|number| guest(&host, 2 * pair + number));
        for incident in incidents {
            expected.extend(seed(incident, guests.each_ref(), [&host; 2], incident.causes));
        }
    }
    check(&host, expected.clone());

    // The list can be restricted, and remains when the device is gone.
    let of = |arguments: &str| host.run(&format!("show failures {arguments}"));
    let own = expected.iter().filter(|(device, ..)| device == "vm1").count();
    assert_eq!(of("--device vm1").matches(" vm1: QP ").count(), own);
    assert_eq!(of("--since 2999-01-01T00:00Z"), "no failed queue pairs\n");
    host.run("remove --device vm1");
    assert_eq!(of("--device vm1 --since 1h").matches(" vm1: QP ").count(), own);
    assert!(host.run("status").contains("vm2: queue pairs failed: "));
}

#[test]
fn incidents_between_hosts_are_distinguished() {
    let folder = tempfile::tempdir().unwrap();
    let uplink = folder.path().join("uplink");
    let near = start(&format!("unix:{}", uplink.display()), &[1, 3, 5, 7, 9, 11]);
    let mut far = start(&format!("unix-connect:{}", uplink.display()), &[2, 4, 6, 8, 10, 12]);
    let (mut mine, mut theirs) = (Vec::new(), Vec::new());
    for (pair, incidents) in (0..).zip(INCIDENTS.chunks(EACH)) {
        let guests = [guest(&near, 2 * pair + 1), guest(&far, 2 * pair + 2)];
        for incident in incidents {
            for failed in seed(incident, guests.each_ref(), [&near, &far], incident.causes_on_the_wire()) {
                if failed.0 == format!("vm{}", guests[0].number) { mine.push(failed) } else { theirs.push(failed) }
            }
        }
    }
    check(&far, theirs);
    assert_eq!(check_status(&near), (true, String::new()));
    // The other host goes away.
    let guests = [guest(&near, 11), guest(&far, 12)];
    let (mut left, mut right) = (End::new(&guests[0], 8), End::new(&guests[1], 8));
    left.connect(&right, NONE);
    right.connect(&left, NONE);
    right.receive(100);
    left.send(100);
    left.cq.wait();
    far.kill();
    left.send(100);
    let failed = ("vm11".to_owned(), u64::from(left.qp.qpn), "retry-exceeded".to_owned());
    wait_for("a host that has gone", || failures(&near).contains(&failed).then_some(()));
    let problem = format!("network red: unix:{} is down\n", uplink.display());
    wait_for("a problem", || (check_status(&near) == (false, problem.clone())).then_some(()));
    left.destroy();
    mine.push(failed);
    check(&near, mine);
}
