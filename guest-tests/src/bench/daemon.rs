//! Cost of observing a daemon: a scrape of its metrics, and `pvrdmad top`.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pvrdma_dev::testing::{Placement, QpInit};

use super::figure::{Figure, median};
use crate::daemon::{Daemon, DaemonDevice, Setup};
use crate::device_pair::{Side, SideOptions};

/// Number of devices in a scrape, all of one network.
const DEVICES: u8 = 64;
/// Number of scrapes in a run, of which the median counts.
const SCRAPES: usize = 21;
/// Longer than the time for which the daemon repeats the same text.
const STALE: Duration = Duration::from_millis(150);
/// Number of queue pairs that `top` shows.
const QPS: usize = 1_000;
/// Duration of a run of `top`.
const WATCHED: Duration = Duration::from_secs(10);

pub(super) fn measure(runs: usize) -> Result<Vec<Figure>> {
    Ok(vec![scrape(runs)?, top(runs)?])
}

fn scrape(runs: usize) -> Result<Figure> {
    let directory = tempfile::tempdir().context("cannot create a directory")?;
    let metrics = directory.path().join("metrics");
    let devices: Vec<_> = (0..DEVICES).map(|number| device(directory.path(), number)).collect();
    let place = format!("unix:{}", metrics.display());
    let setup = Setup { metrics: Some(&place), ..Setup::default() };
    let _daemon = Daemon::launch(&setup, directory.path(), &devices)?;
    let values = (0..runs).map(|_| {
        let times: Result<Vec<f64>> = (0..SCRAPES).map(|_| fetch(&metrics)).collect();
        Ok(median(&times?))
    });
    let title = format!("scrape of a daemon with {DEVICES} devices, from the connection to the last byte");
    let values = values.collect::<Result<_>>()?;
    Ok(Figure::against_target("daemon/scrape", title, "ms", true, values, 5.0))
}

fn device(directory: &Path, number: u8) -> DaemonDevice {
    DaemonDevice {
        name: format!("vm{number}"),
        socket: directory.join(number.to_string()),
        mac: format!("52:54:00:00:01:{number:02x}"),
        options: ",pin=off".to_owned(),
    }
}

/// Returns the duration in milliseconds of a scrape for which the daemon queries its networks.
fn fetch(metrics: &Path) -> Result<f64> {
    thread::sleep(STALE);
    let start = Instant::now();
    let mut stream = UnixStream::connect(metrics).context("no metrics")?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let taken = start.elapsed();
    let last = format!("device=\"vm{}\"", DEVICES - 1);
    ensure!(text.starts_with("HTTP/1.1 200 OK"), "no metrics: {}", text.lines().next().unwrap_or_default());
    // A network that does not answer within a second is missing from the text.
    ensure!(text.contains(&last), "the metrics came after {} ms, without the devices", taken.as_millis());
    Ok(taken.as_secs_f64() * 1e3)
}

fn top(runs: usize) -> Result<Figure> {
    let directory = tempfile::tempdir().context("cannot create a directory")?;
    let watched = device(directory.path(), 1);
    let daemon = Daemon::start(directory.path(), std::slice::from_ref(&watched))?;
    let options = SideOptions { other_memory: 256 << 20, ..SideOptions::new(4096, Placement::Scattered) };
    let side = Side::alone_at(&watched.socket, &options)?;
    let mut qps = Vec::with_capacity(QPS);
    for _ in 0..QPS {
        qps.push(side.driver.create_qp(&QpInit {
            max_send_wr: 16,
            max_recv_wr: 16,
            ..QpInit::rc(&side.pd, &side.cq)
        })?);
    }
    let values = (0..runs).map(|_| {
        let top = daemon.top(&watched.name)?;
        let used = || daemon.processes().chain([top.id()]).map(processor_ns).sum::<Result<u64>>();
        let (before, start) = (used()?, Instant::now());
        thread::sleep(WATCHED);
        let nanoseconds = Duration::from_nanos(used()?.saturating_sub(before));
        Ok(nanoseconds.as_secs_f64() * 100.0 / start.elapsed().as_secs_f64())
    });
    let values = values.collect::<Result<_>>()?;
    let title = format!("`pvrdmad top` once a second at a device with {QPS} QPs, what the daemon does for it included");
    Ok(Figure::against_target("daemon/top", title, "% of a core", true, values, 1.0))
}

/// Returns the processor time of a process so far.
pub(super) fn processor_ns(pid: u32) -> Result<u64> {
    let tasks = format!("/proc/{pid}/task");
    let mut sum = 0;
    for task in fs::read_dir(&tasks).with_context(|| tasks.clone())? {
        let path = task?.path().join("schedstat");
        // A thread that has ended meanwhile used little time.
        let Ok(text) = fs::read_to_string(&path) else { continue };
        let first = text.split_whitespace().next().and_then(|word| word.parse::<u64>().ok());
        sum += first.with_context(|| format!("{} is malformed", path.display()))?;
    }
    Ok(sum)
}
