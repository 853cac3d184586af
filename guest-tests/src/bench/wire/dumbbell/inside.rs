//! Part that runs in the guest (hidden command `dumbbell`): the hosts of both ends, and a thread that samples the
//! queue.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;
use serde::{Deserialize, Serialize};

use super::super::session::Talker;
use super::hosts::{HostsOptions, MESSAGE, PARTS, Sent};
use super::line::{KERNELS, Queue, RATE, Watch};
use super::losses::{self, Losses};

/// Interval of the queue samples.
const LOOKS: Duration = Duration::from_millis(10);

/// Scenario.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct DumbbellOptions {
    #[command(flatten)]
    pub(crate) hosts: HostsOptions,
    /// Seconds before anything is measured.
    #[arg(long)]
    pub(crate) warm: u32,
    /// A TCP stream beside them.
    #[arg(long)]
    pub(crate) tcp: bool,
}

impl DumbbellOptions {
    /// Formats the options as arguments.
    pub(super) fn arguments(&self) -> Vec<String> {
        let mut words = self.hosts.arguments();
        "dumbbell".clone_into(&mut words[0]);
        words.extend(["--warm".to_owned(), self.warm.to_string()]);
        words.extend(self.tcp.then(|| "--tcp".to_owned()));
        words
    }
}

/// Results after the warm-up, unless stated otherwise.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Shares {
    /// Mb/s of each host, and of the TCP stream.
    pub(crate) hosts: Vec<f64>,
    pub(crate) tcp: Option<f64>,
    /// Jain's index of the hosts.
    pub(crate) jain: f64,
    /// Fraction of time in which the line was sending.
    pub(crate) utilisation: f64,
    /// Maximum of queued bytes, their mean, and the number of samples.
    pub(crate) most: f64,
    pub(crate) mean: f64,
    pub(crate) looks: usize,
    /// Maximum of queued bytes before.
    pub(crate) most_warm: f64,
    /// Marked packets since the start.
    pub(crate) marked: u64,
    pub(crate) dropped: u64,
    /// Lost packets by place, since the start.
    pub(crate) losses: Losses,
    /// Counters of all senders, and of the receiver.
    pub(crate) sent: serde_json::Value,
    pub(crate) received: serde_json::Value,
}

fn start(namespace: &str, words: &[String]) -> Result<Talker> {
    let mut all = ["ip", "netns", "exec", namespace].map(str::to_owned).to_vec();
    all.extend_from_slice(words);
    Talker::spawn(&all)
}

fn start_hosts(namespace: &str, options: &HostsOptions) -> Result<Talker> {
    let program = std::env::current_exe().context("cannot find this program")?;
    let mut words = vec![program.to_string_lossy().into_owned()];
    words.extend(options.arguments());
    start(namespace, &words)
}

/// Runs the scenario and prints the results.
pub(crate) fn run(options: &DumbbellOptions) -> Result<()> {
    let hosts = &options.hosts;
    let mut receiver = start_hosts("receiver", &HostsOptions { receives: true, ..*hosts })?;
    let mut senders = start_hosts("senders", &HostsOptions { receives: false, ..*hosts })?;
    let places = [senders.line()?, receiver.line()?];
    receiver.tell(&places[0])?;
    receiver.line().context("the receiver")?;
    senders.tell(&places[1])?;
    senders.line().context("the senders")?;
    let tcp = options.tcp.then(|| Tcp::start(hosts.seconds)).transpose()?;
    let mut watch = Watch::new()?;
    let losses = losses::Watch::new()?;
    senders.tell("go")?;
    let seen = look(&mut watch, Duration::from_secs(hosts.seconds.into()))?;
    let sent: Sent = serde_json::from_str(&senders.line().context("the senders")?)?;
    receiver.tell("end")?;
    let received = serde_json::from_str(&receiver.line().context("the receiver")?)?;
    let tcp = tcp.map(|tcp| tcp.megabits(options.warm)).transpose()?;
    let mut shares = shares(options, &seen, &sent, received, tcp)?;
    shares.losses = losses.losses()?;
    println!("{}", serde_json::to_string(&shares)?);
    Ok(())
}

fn look(watch: &mut Watch, length: Duration) -> Result<Vec<(Duration, Queue)>> {
    let began = Instant::now();
    let mut seen = Vec::new();
    while began.elapsed() < length {
        let due = Instant::now() + LOOKS;
        let queue = watch.look()?;
        seen.push((began.elapsed(), queue));
        thread::sleep(due.saturating_duration_since(Instant::now()));
    }
    Ok(seen)
}

/// Returns `(sum x)² / (n sum x²)`: 1 if all shares are equal.
#[expect(clippy::cast_precision_loss, reason = "few")]
fn jain(shares: &[f64]) -> f64 {
    let (sum, squares) = shares.iter().fold((0.0, 0.0), |(sum, squares), x| (sum + x, squares + x * x));
    sum * sum / (shares.len() as f64 * squares)
}

#[expect(clippy::cast_precision_loss, reason = "figures have three digits")]
fn shares(
    options: &DumbbellOptions,
    seen: &[(Duration, Queue)],
    sent: &Sent,
    received: serde_json::Value,
    tcp: Option<f64>,
) -> Result<Shares> {
    let warm = Duration::from_secs(options.warm.into());
    let (before, after): (Vec<_>, Vec<_>) = seen.iter().copied().partition(|(when, _)| *when < warm);
    let (&(from, first), &(to, last)) = (after.first().context("no look")?, after.last().context("no look")?);
    let seconds = f64::from(options.hosts.seconds - options.warm);
    let megabits = |counts: &Vec<u64>| {
        let messages: u64 = counts.iter().skip((options.warm * PARTS) as usize).sum();
        messages as f64 * MESSAGE as f64 * 8.0 / seconds / 1e6
    };
    let hosts: Vec<f64> = sent.hosts.iter().map(megabits).collect();
    let most = |seen: &[(Duration, Queue)]| seen.iter().map(|(_, queue)| queue.backlog as f64).fold(0.0, f64::max);
    Ok(Shares {
        jain: jain(&hosts),
        hosts,
        tcp,
        utilisation: (last.bytes - first.bytes) as f64 * 8.0 / (to - from).as_secs_f64() / RATE,
        most: most(&after),
        mean: after.iter().map(|(_, queue)| queue.backlog as f64).sum::<f64>() / after.len() as f64,
        looks: after.len(),
        most_warm: most(&before),
        marked: last.marked,
        dropped: last.dropped,
        losses: Losses::new(),
        sent: sum(&sent.counters),
        received,
    })
}

fn sum(all: &[serde_json::Value]) -> serde_json::Value {
    let mut sums = std::collections::BTreeMap::<_, u64>::new();
    for (name, value) in all.iter().filter_map(serde_json::Value::as_object).flatten() {
        *sums.entry(name.clone()).or_default() += value.as_u64().unwrap_or(0);
    }
    serde_json::json!(sums)
}

/// One TCP stream between the two kernels.
struct Tcp {
    client: Talker,
    _server: Talker,
}

impl Tcp {
    fn start(seconds: u32) -> Result<Self> {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let mut server = start("receiver", &words("iperf3 -s -1 --forceflush"))?;
        while !server.line()?.contains("listening") {}
        let client = start("senders", &words(&format!("iperf3 -J -c {} -t {seconds}", KERNELS[1])))?;
        Ok(Self { client, _server: server })
    }

    /// Returns its rate after the warm-up.
    #[expect(clippy::cast_precision_loss, reason = "seconds")]
    fn megabits(mut self, warm: u32) -> Result<f64> {
        let result: serde_json::Value = serde_json::from_str(&self.client.rest()?).context("the output of iperf3")?;
        let intervals = result["intervals"].as_array().context("no intervals")?;
        let rates: Vec<f64> = intervals
            .iter()
            .skip(warm as usize)
            .filter_map(|interval| interval.pointer("/sum/bits_per_second")?.as_f64())
            .collect();
        Ok(rates.iter().sum::<f64>() / rates.len().max(1) as f64 / 1e6)
    }
}
