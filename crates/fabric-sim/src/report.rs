//! The experiments of the documentation, and their table.

use std::fmt::Write as _;
use std::time::Duration;

use crate::fabric::Fault;
use crate::plan::{Plan, Transport};
use crate::workload::{Experiment, Figures, Pattern};

/// Lines between which the table stands in the page.
const BEGIN: &str = "<!-- simulated: written by fabric-sim -->\n";
const END: &str = "<!-- end of simulated -->\n";

const fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

impl Experiment {
    /// Returns an incast of 64 hosts, 200 ms after they have started together.
    pub const fn incast(plan: Plan, transport: Transport, message: u32) -> Self {
        Self {
            plan,
            pattern: Pattern::Incast(64),
            connections: 1,
            transport,
            message,
            warm: ms(200),
            length: ms(200),
            patience: ms(10_000),
            fault: None,
            seed: 1,
        }
    }

    /// Returns a permutation, with this number of connections for each pair of hosts, 200 ms after they have started
    /// together.
    pub const fn permutation(plan: Plan, transport: Transport, connections: usize) -> Self {
        Self {
            plan,
            pattern: Pattern::Permutation,
            connections,
            transport,
            message: 1 << 20,
            warm: ms(200),
            length: ms(10),
            patience: ms(100),
            fault: None,
            seed: 1,
        }
    }

    /// Returns an exchange among all hosts.
    pub const fn all_to_all(plan: Plan, transport: Transport) -> Self {
        Self {
            plan,
            pattern: Pattern::AllToAll,
            connections: 1,
            transport,
            message: 16 << 10,
            warm: ms(2),
            length: ms(4),
            patience: ms(8),
            fault: None,
            seed: 1,
        }
    }

    /// Returns the same experiment with a line between a leaf and a spine that loses frames, in ten-thousandths, from
    /// the start of the measurement on.
    #[must_use]
    pub const fn with_loss(self, loss: u64, withdrawn: Option<Duration>) -> Self {
        let fault = Fault { leaf: 0, spine: 0, loss, at: self.warm, withdrawn };
        Self { fault: Some(fault), ..self }
    }
}

/// Experiments of one section, each with a description.
type Rows = Vec<(String, Experiment)>;

fn row(what: &str, experiment: Experiment) -> (String, Experiment) {
    let marks = if experiment.plan.mark.is_some() { "ECN" } else { "no ECN" };
    (format!("{what} | {} | {marks}", experiment.transport.name()), experiment)
}

fn incasts() -> Rows {
    let mut rows = Rows::new();
    for (name, message) in [("4 KiB", 4 << 10), ("64 KiB", 64 << 10), ("1 MiB", 1 << 20)] {
        for transport in [Transport::Plain, Transport::Multipath] {
            for plan in [Plan::full(), Plan::full().without_marks()] {
                rows.push(row(&format!("incast 64:1, {name}"), Experiment::incast(plan, transport, message)));
            }
        }
    }
    rows
}

fn permutations() -> Rows {
    let plan = Plan::full();
    let mut rows = Rows::new();
    for connections in [1, 8] {
        let what = |balance: &str| format!("permutation, {connections} × 1 MiB{balance}");
        let of = |plan, transport| Experiment::permutation(plan, transport, connections);
        rows.push(row(&what(", ideal balance"), of(plan.balanced(), Transport::Selective)));
        rows.push(row(&what(""), of(plan, Transport::Selective)));
        rows.push(row(&what(""), of(plan, Transport::Multipath)));
    }
    for plan in [plan, plan.without_marks()] {
        let plain = Experiment::permutation(plan, Transport::Plain, 1);
        rows.push(row("permutation, 1 × 1 MiB", plain));
    }
    rows.push(row("permutation, 1 × 1 MiB", Experiment::permutation(plan.without_marks(), Transport::Multipath, 1)));
    let wide = Plan { spine_rate: plan.spine_rate * 2, ..plan };
    let of = |plan, transport| Experiment::permutation(plan, transport, 1);
    rows.push(row("permutation, spines twice as fast, ideal balance", of(wide.balanced(), Transport::Selective)));
    rows.push(row("permutation, spines twice as fast", of(wide, Transport::Selective)));
    rows.push(row("permutation, spines twice as fast", of(wide, Transport::Multipath)));
    rows
}

fn exchanges() -> Rows {
    let of = |plan, transport| row("all to all, 16 KiB", Experiment::all_to_all(plan, transport));
    let (marks, drops) = (Plan::full(), Plan::full().without_marks());
    vec![
        of(marks, Transport::Plain),
        of(marks, Transport::Multipath),
        of(drops, Transport::Plain),
        of(drops, Transport::Multipath),
    ]
}

fn faults() -> Rows {
    let plan = Plan { leaves: 4, ..Plan::full() };
    let of = |transport| Experiment { length: ms(40), ..Experiment::permutation(plan, transport, 1) };
    let mut rows = Rows::new();
    for transport in Transport::ALL {
        rows.push(row("64 hosts, a line loses 1 %", of(transport).with_loss(100, None)));
        rows.push(row("64 hosts, a line fails", of(transport).with_loss(10_000, None)));
        rows.push(row(
            "64 hosts, a line fails, routed around after 20 ms",
            of(transport).with_loss(10_000, Some(ms(20))),
        ));
    }
    rows
}

fn number(value: f64) -> String {
    if value.is_finite() { format!("{value:.2}") } else { "not finished".to_owned() }
}

fn line(what: &str, got: &Figures) -> String {
    let longest =
        got.longest.map_or_else(|| "not finished".to_owned(), |time| format!("{:.1} ms", time.as_secs_f64() * 1e3));
    format!(
        "| {what} | {} | {} | {longest} | {:.2} | {:.2} | {:.1} % | {} |\n",
        number(got.median),
        number(got.p99),
        got.goodput,
        got.jain,
        got.retransmitted * 100.0,
        got.failed
    )
}

/// Runs all experiments. `progress` gets each row.
pub fn table(mut progress: impl FnMut(&str)) -> String {
    let mut table = String::from(
        "| pattern | transport | switches | median | p99 | longest | goodput | Jain | retransmitted | lost |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n",
    );
    for (what, experiment) in [incasts(), permutations(), exchanges(), faults()].into_iter().flatten() {
        let line = line(&what, &experiment.run());
        progress(&line);
        let _ = table.write_str(&line);
    }
    table
}

/// Replaces the table in a page. `None`: the page has no place for it.
pub fn insert(page: &str, table: &str) -> Option<String> {
    let (before, rest) = page.split_once(BEGIN)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!("{before}{BEGIN}\n{table}\n{END}{after}"))
}
