//! The published figures. `docs/results.json` has all of them, each with its commit and date; the tables of
//! docs/figures.md and of other pages, and the pictures, are generated from it.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use super::chart::{self, Curve, GREEN, GREY, ORANGE};

/// Document with the main table.
const FIGURES: &str = "figures.md";
/// Curves of the picture: the name, colour, prefix of the figures, and whether the baseline is drawn.
const CURVES: [(&str, chart::Colour, &str, bool); 3] = [
    ("PVRDMA device", GREEN, "vm/size-", false),
    ("TCP, iperf3", ORANGE, "vm/tcp-size-", true),
    ("rdma_rxe", GREY, "vm/size-", true),
];

/// Contents of `docs/results.json`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Results {
    /// Machine of the rows of the table.
    machine: String,
    table: Vec<Row>,
    tables: Vec<Table>,
    /// Output of `bench`, as its JSON.
    measurements: Vec<Measured>,
}

/// A row of the table.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    title: String,
    value: String,
    baseline: String,
    ratio: String,
    runs: String,
    /// Commit that recorded the figure.
    commit: String,
    /// Day of that commit.
    date: String,
}

/// A table of another form.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    /// Document that has it.
    page: String,
    /// Name in the markers around it.
    name: String,
    machine: String,
    runs: String,
    commit: String,
    date: String,
    columns: Vec<String>,
    rows: Vec<Vec<String>>,
}

/// A run of `bench`.
#[derive(Debug, Deserialize)]
struct Measured {
    commit: String,
    date: String,
    processor: String,
    cpus: usize,
    figures: Vec<Figure>,
}

/// A figure of such a run.
#[derive(Debug, Deserialize)]
struct Figure {
    name: String,
    value: f64,
    baseline: f64,
}

impl Results {
    fn read(documents: &Path) -> Result<Self> {
        let path = documents.join("results.json");
        let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        serde_json::from_str(&text).with_context(|| path.display().to_string())
    }

    /// Returns the table, in Markdown.
    fn table(&self) -> String {
        let mut text = format!(
            "Measured on {}.\nThe last column has the commit that recorded the figure.\n\n\
             | measured | our device | compared with | ratio | runs | recorded |\n| --- | --- | --- | --- | --- | --- |\n",
            self.machine
        );
        for Row { title, value, baseline, ratio, runs, commit, date } in &self.table {
            let _ = writeln!(text, "| {title} | {value} | {baseline} | {ratio} | {runs} | {commit}, {date} |");
        }
        text
    }

    /// Returns the documents that have tables of these results.
    fn pages(&self) -> BTreeSet<&str> {
        self.tables.iter().map(|table| table.page.as_str()).chain([FIGURES]).collect()
    }

    /// Returns the text of a document with its tables of these results.
    fn page(&self, name: &str, text: String) -> Result<String> {
        let text = if name == FIGURES { with_table(&text, "figures", &self.table())? } else { text };
        let mut tables = self.tables.iter().filter(|table| table.page == name);
        tables.try_fold(text, |text, table| with_table(&text, &table.name, &table.markdown()))
    }

    /// Returns the picture: bandwidth by size of a write, between guests.
    fn picture(&self) -> Result<String> {
        let run = self.measurements.iter().find(|run| run.figures.iter().any(|it| it.name.starts_with("vm/tcp-size-")));
        let run = run.context("no measurement has the bandwidth by size")?;
        let curve = |(name, colour, prefix, baseline): (&str, _, &str, bool)| -> Result<Curve> {
            let at = |figure: &Figure| {
                let size = figure.name.strip_prefix(prefix)?.parse().ok()?;
                Some((size, if baseline { figure.baseline } else { figure.value }))
            };
            let mut points: Vec<_> = run.figures.iter().filter_map(at).collect();
            points.sort_by(|(a, _), (b, _)| f64::total_cmp(a, b));
            ensure!(points.len() > 2, "{name} has {} points", points.len());
            Ok((name.to_owned(), colour, points))
        };
        let curves = CURVES.into_iter().map(curve).collect::<Result<Vec<_>>>()?;
        let Measured { commit, date, processor, cpus, .. } = run;
        chart::bandwidth(&curves, &format!("{date}, commit {commit}, {cpus} cores, {processor}; emulated guests"))
    }
}

impl Table {
    /// Returns the table in Markdown, and its origin.
    fn markdown(&self) -> String {
        let row = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
        let rule = vec!["---".to_owned(); self.columns.len()];
        let rows: String = self.rows.iter().map(|cells| row(cells)).collect();
        let Self { machine, runs, commit, date, columns, .. } = self;
        format!(
            "{}{}{rows}\nMeasured on {machine}.\nRuns: {runs}. Recorded: {commit}, {date}.\n",
            row(columns),
            row(&rule)
        )
    }
}

/// Replaces a table of a document.
fn with_table(document: &str, name: &str, table: &str) -> Result<String> {
    let [begin, end] = ["begin", "end"].map(|edge| format!("<!-- {name}:{edge} -->\n"));
    let (before, rest) = document.split_once(&begin).with_context(|| format!("no marker before {name}"))?;
    let (_, after) = rest.split_once(&end).with_context(|| format!("no marker after {name}"))?;
    Ok(format!("{before}{begin}\n{table}\n{end}{after}"))
}

/// Generates the tables and the pictures, in the folder of the documents.
pub(crate) fn draw(documents: &Path) -> Result<()> {
    let results = Results::read(documents)?;
    for name in results.pages() {
        let page = documents.join(name);
        let text = std::fs::read_to_string(&page).with_context(|| format!("cannot read {}", page.display()))?;
        std::fs::write(&page, results.page(name, text)?).with_context(|| format!("cannot write {}", page.display()))?;
    }
    let picture = documents.join("bandwidth.svg");
    std::fs::write(&picture, results.picture()?).with_context(|| format!("cannot write {}", picture.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(path: &str) -> String {
        std::fs::read_to_string(crate::daemon::workspace_manifest().unwrap().with_file_name(path)).unwrap()
    }

    fn results() -> Results {
        Results::read(&crate::daemon::workspace_manifest().unwrap().with_file_name("docs")).unwrap()
    }

    #[test]
    fn table_and_picture_are_those_of_the_results() {
        if std::env::var_os("WRITE_DOCUMENTS").is_some() {
            draw(&crate::daemon::workspace_manifest().unwrap().with_file_name("docs")).unwrap();
        }
        let results = results();
        assert!(results.table.len() > 50);
        for name in results.pages() {
            let page = read(&format!("docs/{name}"));
            let expected = results.page(name, page.clone()).unwrap();
            assert!(expected == page, "{name}: `guest-tests published` writes the tables anew");
        }
        assert!(results.picture().unwrap() == read("docs/bandwidth.svg"), "`guest-tests published` draws it anew");
        assert!(read("README.md").contains("(docs/bandwidth.svg)"), "README has another picture");
    }

    /// Each figure has its commit and date.
    #[test]
    fn the_origin_of_each_figure_is_known() {
        let results = results();
        let rows = results.table.iter().map(|row| (&row.commit, &row.date));
        let tables = results.tables.iter().map(|table| (&table.commit, &table.date));
        let runs = results.measurements.iter().map(|run| (&run.commit, &run.date));
        for (commit, date) in rows.chain(tables).chain(runs) {
            let is_commit = commit.len() >= 8 && commit.bytes().all(|digit| digit.is_ascii_hexdigit());
            assert!(is_commit, "{commit} is no commit");
            assert!(date.parse::<jiff::civil::Date>().is_ok(), "{date} is no date");
        }
    }

    #[test]
    fn the_readme_quotes_the_results() {
        let (readme, results) = (read("README.md"), results());
        let table = readme.lines().skip_while(|line| !line.starts_with("| measured |")).skip(2);
        let quoted: Vec<Vec<_>> = table
            .take_while(|line| line.starts_with('|'))
            .map(|line| line.split('|').skip(1).map(str::trim).collect())
            .collect();
        assert!(quoted.len() >= 5, "{quoted:?}");
        // The README may compare the same number with a baseline of another name.
        let number = |text: &str| text.rsplit(": ").next().unwrap_or_default().split(',').next().map(str::to_owned);
        for quote in &quoted {
            let [_, value, baseline, ratio, _] = quote[..] else { panic!("{quote:?}") };
            let is_quoted = |row: &&Row| {
                row.value.split(',').next() == Some(value)
                    && row.ratio == ratio
                    && number(&row.baseline) == number(baseline)
            };
            assert!(results.table.iter().find(is_quoted).is_some(), "docs/results.json has no such row: {quote:?}");
        }
    }

    /// Units of rates. In documents, they belong to measured figures and to the lines of networks.
    const RATES: [&str; 5] = ["Gb/s", "Mb/s", "GB/s", "MB/s", "million/s"];
    const UNITS: [&str; 4] = ["ns", "µs", "ms", "MiB"];

    /// Rates of lines in configurations and simulations.
    const LINES: [&str; 4] = ["100 Mb/s", "1 Gb/s", "10 Gb/s", "20 Gb/s"];

    /// Returns the quantities in a text: each number that is followed by one of these units.
    fn quantities(text: &str, units: &[&str]) -> BTreeSet<String> {
        let is_around = |c: char| !c.is_alphanumeric();
        let words: Vec<_> = text.split_whitespace().map(|word| word.trim_matches(is_around)).collect();
        let pairs = words.windows(2).filter_map(|pair| {
            let &[number, unit] = pair else { return None };
            let is_number = number.starts_with(|c: char| c.is_ascii_digit());
            (is_number && units.contains(&unit)).then(|| format!("{number} {unit}"))
        });
        pairs.filter(|quantity| !LINES.contains(&quantity.as_str())).collect()
    }

    /// Returns the paragraphs, items and rows of a document that refer to the page of figures.
    fn references(document: &str) -> String {
        let mut parts = vec![String::new()];
        for line in document.lines() {
            if line.trim().is_empty() || line.starts_with('|') || line.trim_start().starts_with("- ") {
                parts.push(String::new());
            }
            if let Some(part) = parts.last_mut() {
                *part += line;
                part.push(' ');
            }
        }
        parts.retain(|part| part.contains("figures.md"));
        parts.concat()
    }

    /// Returns the figures of a document that the results do not have: rates everywhere, and all other quantities where
    /// the document refers to the page of figures.
    fn unknown(document: &str, results: &str) -> Vec<String> {
        let units = [RATES.as_slice(), &UNITS].concat();
        let known = quantities(results, &units);
        let mut quoted = quantities(&references(document), &units);
        quoted.append(&mut quantities(document, &RATES));
        quoted.difference(&known).cloned().collect()
    }

    #[test]
    fn no_document_has_another_figure() {
        let results = read("docs/results.json");
        let root = crate::daemon::workspace_manifest().unwrap();
        let folders = [root.with_file_name("docs"), root.with_file_name("docs/dev"), root.parent().unwrap().to_owned()];
        let files = folders.iter().flat_map(|folder| std::fs::read_dir(folder).unwrap());
        let files =
            files.map(|entry| entry.unwrap().path()).filter(|path| path.extension().is_some_and(|it| it == "md"));
        for path in files {
            let mut text = std::fs::read_to_string(&path).unwrap();
            if path.ends_with("figures.md") {
                // All paragraphs of this page are about figures.
                text = text.replace("\n\n", " figures.md\n\n");
            }
            let unknown = unknown(&text, &results);
            assert!(unknown.is_empty(), "{}: docs/results.json does not have {unknown:?}", path.display());
        }
    }

    #[test]
    fn another_figure_is_found() {
        let results = r#"{"value": "1.5 µs", "baseline": "TCP: 2 Gb/s, 0.4 s"}"#;
        let wrong = "It takes 9 ms.\n\n- ([Figures](figures.md)): 1.5 µs,\n  or (3 µs)\n- 7 ms\n";
        assert_eq!(unknown(wrong, results), ["3 µs"]);
        assert_eq!(unknown("It sends (4 Gb/s).\n\nA line of 10 Gb/s.", results), ["4 Gb/s"]);
        assert_eq!(unknown("1.5 µs and 2 Gb/s, see [Figures](figures.md)", results), Vec::<String>::new());
    }

    /// The simulations in the table of runs that mark are those that `crates/roce` tests.
    #[test]
    fn the_simulations_are_those_of_the_test() {
        let results = results();
        let table = results.tables.iter().find(|table| table.name == "dumbbell").unwrap();
        for line in include_str!("../../../crates/roce/tests/pair/dumbbell.txt").lines() {
            let [hosts, figures @ ..] = &line.split(' ').collect::<Vec<_>>()[..] else { panic!("{line}") };
            let [jain, utilization, queue] = [0, 1, 2].map(|column| figures[column].parse::<f64>().unwrap());
            let wanted =
                ["simulation", &format!("{jain:.2}"), &format!("{utilization:.2}"), &format!("{:.0} KB", queue / 1e3)];
            let at = table.rows.iter().position(|row| row[0] == *hosts).unwrap();
            assert_eq!(table.rows[at + 1][1..5], wanted, "{hosts} hosts");
        }
    }

    /// Returns Jain's index, utilization and queue of the runs in a guest whose hosts write all the time.
    fn runs_that_mark(figures: &str) -> Vec<[f64; 3]> {
        let row = |line: &str| {
            let mut cells = line.split('|').skip(1).map(str::trim);
            let _hosts: u8 = cells.next()?.parse().ok()?;
            (cells.next()? == "`tc` in a guest").then_some(())?;
            let mut number = || cells.next()?.split(' ').next()?.parse().ok();
            Some([number()?, number()?, number()?])
        };
        figures.lines().filter_map(row).collect()
    }

    #[test]
    fn the_page_about_congestion_summarizes_the_runs() {
        let runs = runs_that_mark(&read("docs/figures.md"));
        assert!(runs.len() >= 5, "{runs:?}");
        let least = |column: usize| runs.iter().map(|run| run[column]).fold(f64::INFINITY, f64::min);
        let most = |column: usize| runs.iter().map(|run| run[column]).fold(0.0, f64::max);
        let (utilization, jain) = (format!("{} to {}", least(1), most(1)), least(0));
        let wanted =
            format!("| {utilization} | {jain} or more | {} to {} KB after 4 s, no losses |", least(2), most(2));
        assert!(read("docs/congestion.md").contains(&wanted), "docs/congestion.md does not say {wanted}");
    }

    /// The recording of `demo` contains no figures, because those depend on the machine that recorded it.
    #[test]
    fn the_recording_has_no_speeds() {
        let picture = read("docs/demo.svg");
        let picture = roxmltree::Document::parse(&picture).unwrap();
        let words: Vec<_> = picture.descendants().filter_map(|node| node.text()).collect();
        let text = words.join(" ");
        assert!(!text.contains("times better") && !text.contains("Gb/s"), "{text}");
    }
}
