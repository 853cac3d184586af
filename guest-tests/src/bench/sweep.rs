//! Measurements of one kind over a range of sizes, losses or connections.

use super::figure::Figure;

/// The varied parameter, and its place in the report.
#[derive(Debug)]
pub(super) struct Sweep {
    /// Id of the chart's place on the page.
    pub(super) id: &'static str,
    /// Title above the chart.
    pub(super) title: &'static str,
    /// Prefix of the names of its figures; the value of the parameter follows, as a number.
    pub(super) prefix: &'static str,
    /// The varied parameter with its unit.
    pub(super) varies: &'static str,
}

/// All sweeps.
pub(super) const SWEEPS: [Sweep; 9] = [
    Sweep {
        id: "sweep",
        title: "RDMA writes by size, in one process",
        prefix: "in-process/write-",
        varies: "bytes of a write",
    },
    Sweep {
        id: "sweep-guests",
        title: "RDMA writes by size, between two guests",
        prefix: "vm/size-",
        varies: "bytes of a write",
    },
    Sweep {
        id: "sweep-wire",
        title: "RDMA writes by size, over a wire",
        prefix: "wire/size-",
        varies: "bytes of a write",
    },
    Sweep {
        id: "losses",
        title: "RDMA writes of 1 MiB over a wire that loses frames",
        prefix: "wire/lost-",
        varies: "% of all frames",
    },
    Sweep {
        id: "scaling",
        title: "RDMA writes of 1 MiB over a wire, by connections",
        prefix: "wire/connections-",
        varies: "connections",
    },
    Sweep {
        id: "slow-line",
        title: "RDMA writes of 64 KiB over 100 Mb/s with a queue of 60 KB that only drops, by connections",
        prefix: "wire/slow-connections-",
        varies: "connections",
    },
    Sweep {
        id: "dumbbell-jain",
        title: "100 Mb/s, 5 ms, marks at 60 KB: Jain's index, by hosts that write all the time",
        prefix: "dumbbell/jain-",
        varies: "hosts",
    },
    Sweep {
        id: "dumbbell-utilisation",
        title: "100 Mb/s, 5 ms, marks at 60 KB: utilisation, by hosts that write all the time",
        prefix: "dumbbell/utilisation-",
        varies: "hosts",
    },
    Sweep {
        id: "dumbbell-queue",
        title: "100 Mb/s, 5 ms, marks at 60 KB: most that waits, by hosts that write all the time",
        prefix: "dumbbell/queue-",
        varies: "hosts",
    },
];

impl Sweep {
    /// Returns its figures among these, in ascending order of the parameter.
    pub(super) fn points<'a>(&self, figures: &'a [Figure]) -> Vec<(f64, &'a Figure)> {
        let at = |figure: &Figure| figure.name.strip_prefix(self.prefix)?.parse::<f64>().ok();
        let mut points: Vec<_> = figures.iter().filter_map(|figure| Some((at(figure)?, figure))).collect();
        points.sort_by(|(a, _), (b, _)| a.total_cmp(b));
        points
    }
}
