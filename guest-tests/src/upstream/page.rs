//! The tables of `docs/suites.md`.

use std::collections::BTreeMap;
use std::fmt::Write;

use anyhow::{Context, Result};

use super::reasons::{self, Reason};
use super::record::{Record, Stored};

const BEGIN: &str = "<!-- results:begin -->\n";
const END: &str = "<!-- results:end -->\n";

/// Returns the page with the tables of these results between its markers.
pub(super) fn with_results(page: &str, stored: &Stored) -> Result<String> {
    let (before, rest) = page.split_once(BEGIN).context("no marker before the results")?;
    let (_, after) = rest.split_once(END).context("no marker after the results")?;
    Ok(format!("{before}{BEGIN}\n{}\n{END}{after}", tables(stored)?))
}

fn tables(stored: &Stored) -> Result<String> {
    let mut text = String::from("| suite | executed | passed | failed | skipped | version | commit |\n");
    text.push_str("| --- | ---: | ---: | ---: | ---: | --- | --- |\n");
    for record in &stored.suites {
        let Record { name, version, commit, date, .. } = record;
        let [executed, passed] = [record.executed(), record.passed.len()];
        let [failed, skipped] = [record.failed.len(), record.skipped.len()];
        writeln!(text, "| {name} | {executed} | {passed} | {failed} | {skipped} | {version} | {commit}, {date} |")?;
    }
    let sum = |count: fn(&Record) -> usize| stored.suites.iter().map(count).sum::<usize>();
    let [executed, passed] = [sum(Record::executed), sum(|record| record.passed.len())];
    let [failed, skipped] = [sum(|record| record.failed.len()), sum(|record| record.skipped.len())];
    writeln!(text, "| **all** | {executed} | {passed} | {failed} | {skipped} | | |")?;
    text.push_str("\n## Failures\n\n| suite | cases | attributed to | cause |\n| --- | --- | --- | --- |\n");
    for record in &stored.suites {
        failures(record, &mut text)?;
    }
    text.push_str("\n## Skipped cases\n\n| suite | cases | reason, as the suite gives it |\n| --- | ---: | --- |\n");
    for record in &stored.suites {
        skips(record, &mut text)?;
    }
    Ok(text)
}

/// Writes a row for each attribution of a suite.
fn failures(record: &Record, text: &mut String) -> Result<()> {
    let mut groups: BTreeMap<usize, (&Reason, Vec<&str>)> = BTreeMap::new();
    for case in record.failed.keys() {
        let (at, reason) = reasons::of(&record.name, case).with_context(|| format!("{case} has no attribution"))?;
        groups.entry(at).or_insert((reason, Vec::new())).1.push(case);
    }
    for (reason, cases) in groups.into_values() {
        let cases = match &cases[..] {
            few if few.len() <= 3 => few.iter().map(|case| format!("`{case}`")).collect::<Vec<_>>().join(", "),
            many => format!("{} cases `{}`", many.len(), reason.shown()),
        };
        writeln!(text, "| {} | {cases} | {} | {} |", record.name, reason.of, reason.why)?;
    }
    Ok(())
}

/// Writes a row for each of the most frequent reasons, and one for the others.
fn skips(record: &Record, text: &mut String) -> Result<()> {
    const MOST: usize = 8;
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for reason in record.skipped.values() {
        *counts.entry(cell(reason)).or_default() += 1;
    }
    let mut counts: Vec<_> = counts.into_iter().collect();
    counts.sort_by(|one, other| other.1.cmp(&one.1).then_with(|| one.0.cmp(&other.0)));
    for (reason, count) in counts.iter().take(MOST) {
        writeln!(text, "| {} | {count} | {reason} |", record.name)?;
    }
    let others: usize = counts.iter().skip(MOST).map(|(_, count)| count).sum();
    if others > 0 {
        writeln!(text, "| {} | {others} | {} other reasons |", record.name, counts.len() - MOST)?;
    }
    Ok(())
}

/// Makes a message fit into a cell.
fn cell(message: &str) -> String {
    const MOST: usize = 100;
    let plain: String = message.chars().map(|c| if "|`<>*_[]\\".contains(c) { ' ' } else { c }).collect();
    let words = plain.split_whitespace().collect::<Vec<_>>().join(" ");
    if words.is_empty() { "none".to_owned() } else { words.chars().take(MOST).collect() }
}
