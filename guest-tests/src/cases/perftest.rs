//! The programs of the perftest package.

use anyhow::{Context, Result, bail};

use super::case::Case;
use super::exchange::{Programs, Ready};
use crate::endpoints::Endpoints;

/// One line of a result table.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Row {
    /// Message size.
    pub(crate) bytes: u64,
    /// The columns after it.
    pub(crate) values: Vec<f64>,
}

impl Row {
    /// Returns the average bandwidth in Gb/s of a bandwidth program.
    pub(crate) fn gigabits(&self) -> Option<f64> {
        self.values.get(2).copied()
    }

    /// Returns the typical latency in microseconds of a latency program.
    pub(crate) fn typical_microseconds(&self) -> Option<f64> {
        self.values.get(3).copied()
    }
}

/// `(name, program, options, rows expected)`. Few iterations: an emulated processor is slow, and these are tests.
/// perftest has no events for writes.
const VARIANTS: [(&str, &str, &str, usize); 21] = [
    ("send-bw/all-sizes", "ib_send_bw", "-a -n 10", 23),
    ("write-bw/all-sizes", "ib_write_bw", "-a -n 10", 23),
    ("read-bw/all-sizes", "ib_read_bw", "-a -n 10", 23),
    ("atomic-bw", "ib_atomic_bw", "-n 500", 1),
    ("atomic-bw/compare-swap", "ib_atomic_bw", "-A CMP_AND_SWAP -n 500", 1),
    ("send-lat/all-sizes", "ib_send_lat", "-a -n 10", 23),
    ("write-lat/all-sizes", "ib_write_lat", "-a -n 10", 23),
    ("read-lat/all-sizes", "ib_read_lat", "-a -n 10", 23),
    ("atomic-lat", "ib_atomic_lat", "-n 200", 1),
    ("send-bw/16-qps", "ib_send_bw", "-q 16 -n 50", 1),
    ("write-bw/16-qps", "ib_write_bw", "-q 16 -n 50", 1),
    ("read-bw/16-qps", "ib_read_bw", "-q 16 -n 50", 1),
    ("atomic-bw/16-qps", "ib_atomic_bw", "-q 16 -n 50", 1),
    ("send-bw/events", "ib_send_bw", "-e -n 200", 1),
    ("read-bw/events", "ib_read_bw", "-e -n 200", 1),
    ("send-lat/events", "ib_send_lat", "-e -n 200", 1),
    ("send-bw/bidirectional", "ib_send_bw", "-b -n 200", 1),
    ("write-bw/bidirectional", "ib_write_bw", "-b -n 200", 1),
    ("read-bw/bidirectional", "ib_read_bw", "-b -n 200", 1),
    ("send-bw/ud", "ib_send_bw", "-c UD -n 500 -s 1024", 1),
    ("send-lat/ud", "ib_send_lat", "-c UD -n 200 -s 1024", 1),
];

/// Every variant with the server in guest b, and again with it in guest a; variants with all sizes take ten seconds
/// each, and run in one direction.
pub(crate) fn cases() -> Vec<Case> {
    [(1, ""), (0, "/reversed")]
        .into_iter()
        .flat_map(|(server, suffix)| VARIANTS.iter().map(move |variant| (server, suffix, variant)))
        .filter(|(server, _, (_, _, _, rows))| *server == 1 || *rows == 1)
        .map(|(server, suffix, &(name, program, options, expected))| {
            Case::new(format!("perftest/{name}{suffix}"), move |pair, link| {
                table(&pair.endpoints(link), server, program, options, expected)
            })
        })
        .collect()
}

/// Runs a program whose table has this many rows; returns its best figure.
pub(crate) fn table(
    endpoints: &Endpoints<'_>,
    server: usize,
    program: &str,
    options: &str,
    expected: usize,
) -> Result<String> {
    let rows = run(endpoints, server, program, options)?;
    if rows.len() != expected {
        bail!("{} rows instead of {expected}: {rows:?}", rows.len());
    }
    Ok(match (program.ends_with("_lat"), options.contains("-C")) {
        (true, false) => latency_note(&rows),
        // Cycles of an emulated processor are not meaningful.
        (true, true) => String::new(),
        (false, _) => bandwidth_note(&rows),
    })
}

/// Runs a program with its server in guest `server` and returns the client's table.
pub(crate) fn run(endpoints: &Endpoints<'_>, server: usize, program: &str, options: &str) -> Result<Vec<Row>> {
    let exchange = programs(endpoints, server, program, [options; 2]).run()?;
    let rows = parse(&exchange.client);
    if rows.is_empty() {
        bail!("no result in the client's output:\n{}", exchange.client);
    }
    Ok(rows)
}

/// Returns the two commands, each with its own options: the server's first.
pub(crate) fn programs<'a>(
    endpoints: &Endpoints<'a>,
    server: usize,
    program: &str,
    options: [&str; 2],
) -> Programs<'a> {
    let client = 1 - server;
    let gigabits = if program.ends_with("_bw") { "--report_gbits" } else { "" };
    let mtu = endpoints.path_mtu.map(|mtu| format!("-m {mtu}")).unwrap_or_default();
    let command = |end: usize, options: &str| {
        format!("{program} -F -d {} -x {} {mtu} {gigabits} {options}", endpoints.device[end], endpoints.gid_index[end])
    };
    Programs {
        server_vm: endpoints.vms[server],
        server: command(server, options[0]),
        ready: Ready::Tcp(18515),
        client_vm: endpoints.vms[client],
        client: format!("{} {}", command(client, options[1]), endpoints.tcp[server]),
        timeout: endpoints.patience,
    }
}

/// Parses the result table in a program's output: lines that begin with a size and a number of iterations. An invalid
/// figure is NaN (the clock of an emulated processor may not advance during a short run).
pub(crate) fn parse(output: &str) -> Vec<Row> {
    output
        .lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            let bytes = words.next()?.parse::<u64>().ok().filter(|bytes| bytes.is_power_of_two())?;
            words.clone().next()?.parse::<u64>().ok()?;
            Some(Row { bytes, values: words.map(|word| word.parse().unwrap_or(f64::NAN)).collect() })
        })
        .collect()
}

/// Returns the figure of a single run.
pub(crate) fn single(rows: &[Row], value: impl Fn(&Row) -> Option<f64>) -> Result<f64> {
    rows.last().and_then(value).context("a result without the column that is wanted")
}

/// Formats the best bandwidth for a report.
pub(crate) fn bandwidth_note(rows: &[Row]) -> String {
    let best = rows.iter().filter_map(Row::gigabits).fold(0.0, f64::max);
    // Atomics move eight bytes each.
    if best < 0.01 { format!("{:.2} Mb/s", best * 1000.0) } else { format!("{best:.2} Gb/s") }
}

fn latency_note(rows: &[Row]) -> String {
    let best = rows.iter().filter_map(Row::typical_microseconds).fold(f64::INFINITY, f64::min);
    format!("{best:.1} us")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_found_in_the_output() {
        let output = "\
 GID: 00:00:00:00:00:00:00:00:00:00:255:255:192:168:78:01
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 65536      10               0.09               0.08               0.000172
 131072     10               0.10               0.09               0.000086
---------------------------------------------------------------------------------------
";
        let rows = parse(output);
        assert_eq!(rows.len(), 2);
        assert_eq!(rows[1].bytes, 131_072);
        assert_eq!(rows[1].gigabits(), Some(0.09));
        assert_eq!(bandwidth_note(&rows), "0.09 Gb/s");
    }
}
