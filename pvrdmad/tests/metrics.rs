//! Metrics over HTTP, and the dashboard and alerts that use them.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::PATIENCE;
use crate::common::daemon::{Running, TestDaemon};
use pvrdma_verbs::testing::skipped;
use serde_json::Value;

/// Starts a daemon with this number of devices. The first one has everything that has counters.
fn start(devices: u8) -> Running {
    let daemon = TestDaemon::new().arg("--metrics=unix:FOLDER/metrics").network("a", "uplink=unix:FOLDER/uplink");
    let device = |daemon: TestDaemon, number: u8| {
        let nic = if number == 0 { ",nic-socket=FOLDER/nic" } else { "" };
        daemon.device(&format!("vm{number}"), number, &format!("network=a{nic}"))
    };
    (0..devices).fold(daemon, device).start()
}

/// Asks for the metrics, with further lines of the request.
fn ask(daemon: &Running, lines: &str) -> UnixStream {
    let mut stream = UnixStream::connect(daemon.path("metrics")).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(format!("GET /metrics HTTP/1.1\r\n{lines}\r\n").as_bytes()).unwrap();
    stream
}

/// Returns the text of the metrics page.
fn metrics(daemon: &Running) -> String {
    body(ask(daemon, "Host: here\r\n"))
}

/// Reads a response with metrics.
fn body(mut stream: UnixStream) -> String {
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    body.to_owned()
}

fn packaging(name: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging").join(name)).unwrap()
}

/// Returns the names of the samples in the text, without labels and values.
fn names(text: &str) -> BTreeSet<String> {
    let samples = text.lines().filter(|line| !line.starts_with('#'));
    samples.filter_map(|line| line.split(['{', ' ']).next()).map(str::to_owned).collect()
}

#[test]
fn http_serves_the_text_of_the_command() {
    let host = start(2);
    let (told, fetched) = (host.run("status --format openmetrics"), metrics(&host));
    assert_eq!(names(&told), names(&fetched));
    assert!(fetched.ends_with("# EOF\n") && names(&fetched).len() > 130, "{fetched}");
}

/// Each metric that the Grafana dashboard and the Prometheus alerts name exists.
#[test]
fn the_dashboard_and_the_alerts_name_existing_metrics() {
    let host = start(1);
    let known = names(&metrics(&host));
    let dashboard: Value = serde_json::from_str(&packaging("grafana-dashboard.json")).unwrap();
    let mut expressions: Vec<String> = Vec::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        let targets = panel["targets"].as_array().unwrap();
        assert!(!targets.is_empty() && panel["title"].is_string(), "{panel}");
        expressions.extend(targets.iter().map(|target| target["expr"].as_str().unwrap().to_owned()));
    }
    for variable in dashboard["templating"]["list"].as_array().unwrap() {
        expressions.push(variable["query"].as_str().unwrap().to_owned());
    }
    expressions.push(packaging("alerts.yml"));
    let mut used = BTreeSet::new();
    for expression in &expressions {
        let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        used.extend(words.filter(|word| word.starts_with("pvrdma_")).map(str::to_owned));
    }
    assert!(used.len() > 30, "{used:?}");
    let unknown: Vec<_> = used.difference(&known).collect();
    assert_eq!(unknown, [""; 0]);
}

/// Returns the exit status and output of `promtool` for a text. Returns `None`, and prints the reason, if it is not
/// installed.
fn promtool(arguments: &[&str], text: &str) -> Option<String> {
    let mut command = Command::new("promtool");
    let child = command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = child.inspect_err(|error| skipped(&format_args!("promtool: {error}"))).ok()?;
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    Some(format!("{}: {}", output.status, String::from_utf8_lossy(&said)))
}

/// `promtool` reads the older text format, which a scraper gets that asks for it.
#[test]
fn promtool_finds_nothing() {
    let host = start(2);
    let older = body(ask(&host, "Accept: text/plain;version=0.0.4\r\n"));
    assert_eq!(names(&older), names(&host.run("status --format prometheus")));
    assert!(older.contains("# TYPE pvrdma_queue_pairs_failed_total counter\n") && !older.contains("# EOF"));
    let Some(said) = promtool(&["check", "metrics"], &older) else { return };
    assert_eq!(said, "exit status: 0: ");
    let file = |name: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join(name).display().to_string();
    for arguments in
        [["check", "rules", &file("packaging/alerts.yml")], ["test", "rules", &file("tests/alerts.test.yml")]]
    {
        let said = promtool(&arguments, "").unwrap();
        assert!(said.starts_with("exit status: 0: "), "{said}");
    }
}

/// Ten hosts have devices of the same name: no panel and no alert merges them. Each alert has a severity, a description
/// and a section of the documents.
#[test]
fn hosts_are_distinguished() {
    let dashboard: Value = serde_json::from_str(&packaging("grafana-dashboard.json")).unwrap();
    for target in dashboard["panels"].as_array().unwrap().iter().flat_map(|panel| panel["targets"].as_array().unwrap())
    {
        let (expression, legend) = (target["expr"].as_str().unwrap(), target["legendFormat"].as_str().unwrap());
        assert_eq!(expression.matches("pvrdma_").count(), expression.matches(r#"instance=~"$instance""#).count());
        let merges = expression.starts_with("count(");
        assert!(merges || legend.contains("{{instance}}"), "{legend}");
        assert!(!expression.contains("sum by (device"), "{expression}");
    }
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/troubleshooting.md")).unwrap();
    let headings = page.lines().filter_map(|line| line.trim_start_matches('#').strip_prefix(' '));
    let anchors: BTreeSet<_> = headings.map(|heading| heading.to_lowercase().replace(' ', "-")).collect();
    for alert in packaging("alerts.yml").split("- alert: ").skip(1) {
        for part in ["severity: ", "summary: ", "description: ", "$labels.instance"] {
            assert!(alert.contains(part), "{part}: {alert}");
        }
        let runbook = alert.split("runbook_url: /usr/share/doc/pvrdmad/").nth(1).unwrap().lines().next().unwrap();
        let anchor = runbook.strip_prefix("troubleshooting.md#");
        // The name of a cause is the name of its section, which a unit test checks.
        assert!(anchor.is_none_or(|anchor| anchors.contains(anchor) || anchor == "{{ $labels.cause }}"), "{runbook}");
    }
}

/// While one scraper does not read its response, 64 devices serve their clients, other scrapers get theirs, and then
/// the rest of the first response arrives.
#[test]
fn a_scrape_of_64_devices_stalls_none_of_them() {
    let host = start(64);
    let mut clients: Vec<_> = (0..64).map(|number| host.client(&format!("vm{number}"))).collect();
    let mut slow = ask(&host, "Host: here\r\n");
    let mut first = [0; 1];
    slow.read_exact(&mut first).unwrap();
    // The first response is being sent; it is too long for the socket's buffer.
    for client in &mut clients {
        assert_eq!(client.read(1, 0, 4).len(), 4);
    }
    assert!(metrics(&host).ends_with("# EOF\n"));
    let mut rest = Vec::new();
    slow.read_to_end(&mut rest).unwrap();
    assert!(rest.len() > 500_000, "{} bytes may fit into a socket", rest.len());
    assert!(rest.ends_with(b"# EOF\n"));
}
