//! Times of tests, for the summary: where the time of a run went.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

/// Number of tests that the summary lists.
const LONGEST: usize = 20;

/// Names of tests or test programs, with their times.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Times(Vec<(String, Duration)>);

impl Times {
    /// Adds a test.
    pub(crate) fn push(&mut self, name: impl Into<String>, time: Duration) {
        self.0.push((name.into(), time));
    }

    /// Adds the tests of another list.
    pub(crate) fn extend(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    /// Returns the longest tests, and the sums of groups of tests: a group is the part of a name before the first
    /// slash. Groups may have run at the same time.
    pub(crate) fn summary(&self) -> String {
        let mut groups = BTreeMap::<&str, Duration>::new();
        for (name, time) in &self.0 {
            let group = name.split('/').next().unwrap_or_default();
            *groups.entry(group).or_default() += *time;
        }
        let groups = longest(groups.into_iter().collect());
        let tests = longest(self.0.iter().map(|(name, time)| (&**name, *time)).collect());
        let mut text = String::new();
        for (title, rows) in [("the longest groups of tests", groups), ("the longest tests", tests)] {
            let _ = writeln!(text, "== {title}");
            for (name, time) in rows {
                let _ = writeln!(text, "{:8.1} s  {name}", time.as_secs_f64());
            }
        }
        text
    }
}

fn longest(mut times: Vec<(&str, Duration)>) -> Vec<(&str, Duration)> {
    times.sort_by_key(|(_, time)| std::cmp::Reverse(*time));
    times.truncate(LONGEST);
    times
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_come_first_and_groups_are_summed() {
        let mut times = Times::default();
        for (name, seconds) in [("nic/rings", 2), ("kvm/boot", 3), ("nic/vlans", 2)] {
            times.push(name, Duration::from_secs(seconds));
        }
        let summary = times.summary();
        let rows: Vec<_> = summary.lines().map(str::trim_start).collect();
        let groups = ["== the longest groups of tests", "4.0 s  nic", "3.0 s  kvm"];
        let tests = ["== the longest tests", "3.0 s  kvm/boot", "2.0 s  nic/rings", "2.0 s  nic/vlans"];
        assert_eq!(rows, [&groups[..], &tests].concat());
    }
}
