//! The text format of Prometheus before OpenMetrics, which node_exporter's textfile collector and some scrapers read.

use std::collections::BTreeSet;

/// Converts metrics from OpenMetrics. The older format has no units and no end mark, and describes a counter under the
/// name of its sample.
pub(crate) fn classic(openmetrics: &str) -> String {
    let types = openmetrics.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    let counters: BTreeSet<&str> = types.filter_map(|kind| kind.strip_suffix(" counter")).collect();
    let mut text = String::with_capacity(openmetrics.len());
    for line in openmetrics.lines() {
        if line == "# EOF" || line.starts_with("# UNIT ") {
            continue;
        }
        let mut words = line.splitn(4, ' ');
        match (words.next(), words.next(), words.next(), words.next()) {
            (Some("#"), Some(what), Some(name), Some(rest)) if counters.contains(name) => {
                text.extend(["# ", what, " ", name, "_total ", rest]);
            }
            _ => text.push_str(line),
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_older_format_lacks_units() {
        let new = "# HELP a_b Some counter.\n# TYPE a_b counter\n# UNIT a_b bytes\na_b_total{x=\"# y\"} 1\n\
                   # HELP c A gauge of a_b.\n# TYPE c gauge\nc 2\n# EOF\n";
        let old = "# HELP a_b_total Some counter.\n# TYPE a_b_total counter\na_b_total{x=\"# y\"} 1\n\
                   # HELP c A gauge of a_b.\n# TYPE c gauge\nc 2\n";
        assert_eq!(classic(new), old);
    }
}
