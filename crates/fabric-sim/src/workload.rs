//! Workloads, and the figures that they give.

use std::time::Duration;

use crate::fabric::{Fabric, Fault, Progress};
use crate::plan::{Plan, Transport};
use crate::random::Random;
use crate::switches::SwitchCounts;

/// Pattern of connections. Each connection writes one message after the other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pattern {
    /// This number of hosts, at all leaves, write to one.
    Incast(usize),
    /// Each host writes to one other host at another leaf, and is written to by one.
    Permutation,
    /// Each host writes to each other host.
    AllToAll,
}

impl Pattern {
    /// Returns the pairs of hosts, and the number of senders that share a receiver's line.
    fn pairs(self, plan: &Plan, random: &mut Random) -> (Vec<(usize, usize)>, u64) {
        let hosts = plan.all_hosts();
        match self {
            Self::Incast(senders) => {
                let mut others: Vec<_> = (1..hosts).collect();
                random.shuffle(&mut others);
                others.truncate(senders);
                (others.iter().map(|&from| (from, 0)).collect(), senders as u64)
            }
            Self::Permutation => {
                let leaf = |host: usize| host / plan.hosts;
                let mut to: Vec<_> = (0..hosts).collect();
                random.shuffle(&mut to);
                // Receivers at the sender's own leaf are exchanged with others.
                for from in 0..hosts {
                    while leaf(to[from]) == leaf(from) {
                        let other = usize::try_from(random.below(hosts as u64)).unwrap_or(0);
                        if leaf(to[other]) != leaf(from) && leaf(to[from]) != leaf(other) {
                            to.swap(from, other);
                        }
                    }
                }
                ((0..hosts).zip(to).collect(), 1)
            }
            Self::AllToAll => {
                // The order of its receivers differs between senders.
                let others = |from: usize| (1..hosts).map(move |step| (from, (from + step) % hosts));
                ((0..hosts).flat_map(others).collect(), hosts as u64 - 1)
            }
        }
    }
}

/// An experiment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Experiment {
    /// The fabric.
    pub plan: Plan,
    /// The connections.
    pub pattern: Pattern,
    /// Number of connections for each pair of hosts.
    pub connections: usize,
    /// Their transport.
    pub transport: Transport,
    /// Bytes of each message.
    pub message: u32,
    /// Time before anything is measured, and time of the measurement.
    pub warm: Duration,
    /// Time of the measurement.
    pub length: Duration,
    /// Time for which messages that began in the measured time are waited for, under the same load.
    pub patience: Duration,
    /// A faulty line.
    pub fault: Option<Fault>,
    /// All random choices follow from it.
    pub seed: u64,
}

/// Figures of an experiment.
#[derive(Clone, PartialEq, Debug)]
pub struct Figures {
    /// Messages that began in the measured time.
    pub messages: usize,
    /// Median of the slowdown of these messages: their time over [`Plan::ideal`].
    pub median: f64,
    /// 99th percentile of the slowdown. Infinite if more messages were not finished.
    pub p99: f64,
    /// Longest time of a message. `None`: one was not finished.
    pub longest: Option<Duration>,
    /// Payload that arrived, as a part of what the receivers' lines carry.
    pub goodput: f64,
    /// Jain's index of the bytes that the connections delivered.
    pub jain: f64,
    /// Retransmitted packets, as a part of all.
    pub retransmitted: f64,
    /// ACK timeouts, changes of path, and lost connections.
    pub timeouts: u64,
    /// Changes of path.
    pub moved: u64,
    /// Lost connections.
    pub failed: usize,
    /// Counts of the switches, from the start.
    pub switches: SwitchCounts,
}

impl Experiment {
    /// Runs it.
    pub fn run(&self) -> Figures {
        let Self { plan, pattern, connections, transport, message, warm, length, patience, fault, seed } = *self;
        let mut random = Random(seed ^ 0x9a77);
        let (pairs, sharers) = pattern.pairs(&plan, &mut random);
        let mut fabric = Fabric::new(&plan, seed);
        let pairs: Vec<_> = pairs.into_iter().flat_map(|pair| vec![pair; connections]).collect();
        let sharers = sharers * connections as u64;
        let connections: Vec<_> = pairs.iter().map(|&(from, to)| fabric.connect(from, to, transport)).collect();
        if let Some(fault) = fault {
            fabric.add_fault(fault);
        }
        let mut order = connections.clone();
        random.shuffle(&mut order);
        let mut began = vec![Duration::ZERO; connections.len()];
        for connection in order {
            fabric.post(connection, message);
        }
        let (mut before, mut after): (Option<Vec<Progress>>, Option<Vec<Progress>>) = (None, None);
        let end = warm + length;
        let in_time = |began: Duration| (warm..end).contains(&began);
        let mut times = Vec::new();
        let mut waiting = true;
        while after.is_none() || waiting && fabric.now() < end + patience {
            let until = if before.is_none() {
                warm
            } else if after.is_none() {
                end
            } else {
                end + patience
            };
            let Some(finished) = fabric.next_finished(until) else {
                let progress = Some(connections.iter().map(|&connection| fabric.progress(connection)).collect());
                if before.is_none() {
                    before = progress;
                } else if after.is_none() {
                    after = progress;
                }
                continue;
            };
            let connection = finished.connection;
            if in_time(began[connection]) {
                times.push(finished.at.saturating_sub(began[connection]));
            }
            began[connection] = finished.at;
            fabric.post(connection, message);
            waiting = after.is_none() || began.iter().copied().any(in_time);
        }
        times.extend(began.into_iter().filter(|&began| in_time(began)).map(|_| Duration::MAX));
        let after = after.unwrap_or_default();
        let receivers = pairs.iter().map(|&(_, to)| to).collect::<std::collections::BTreeSet<_>>().len();
        let line = plan.host_rate as f64 * length.as_secs_f64() * receivers as f64;
        let ideal = plan.ideal(message.into(), sharers);
        figures(&before.unwrap_or_default(), &after, times, ideal, line, fabric.switch_counts())
    }
}

fn figures(
    before: &[Progress],
    after: &[Progress],
    mut times: Vec<Duration>,
    ideal: Duration,
    line: f64,
    switches: SwitchCounts,
) -> Figures {
    let written: Vec<f64> =
        after.iter().zip(before).map(|(after, before)| after.written.saturating_sub(before.written) as f64).collect();
    let grown = |part: fn(&Progress) -> u64| {
        after.iter().map(part).sum::<u64>().saturating_sub(before.iter().map(part).sum::<u64>())
    };
    times.sort_unstable();
    let slowdown = |part: f64| {
        // The index is between 0 and the last one.
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "an index of a vector")]
        let index = (times.len().saturating_sub(1) as f64 * part).ceil() as usize;
        times
            .get(index)
            .filter(|&&time| time < Duration::MAX)
            .map_or(f64::INFINITY, |time| time.as_secs_f64() / ideal.as_secs_f64())
    };
    Figures {
        messages: times.len(),
        median: slowdown(0.5),
        longest: times.last().copied().filter(|&time| time < Duration::MAX),
        p99: slowdown(0.99),
        goodput: written.iter().sum::<f64>() / line,
        jain: jain(&written),
        retransmitted: grown(|it| it.retransmitted) as f64 / (grown(|it| it.packets) as f64).max(1.0),
        timeouts: grown(|it| it.timeouts),
        moved: grown(|it| it.moved),
        failed: after.iter().filter(|it| it.failed).count(),
        switches,
    }
}

/// Returns Jain's fairness index: 1 if all shares are equal, 1/n if one connection has everything.
fn jain(shares: &[f64]) -> f64 {
    let (sum, squares) = shares.iter().fold((0.0, 0.0), |(sum, squares), share| (sum + share, squares + share * share));
    if squares > 0.0 { sum * sum / (shares.len() as f64 * squares) } else { 0.0 }
}
