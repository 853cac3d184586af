//! The published figures: the table of docs/figures.md, from which the chart is drawn and which the README quotes.

use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::chart::{self, Bar};

/// Rows of the chart, by the beginning of the title and, if that is not unique, of the baseline.
const CHARTED: [(&str, &str); 13] = [
    ("RDMA write of 1 MiB, guest to guest", ""),
    ("RDMA read of 1 MiB, guest to guest", ""),
    ("send of 64 KiB, guest to guest", ""),
    ("latency of an 8-byte write, guest to guest", ""),
    ("one TCP stream between two guests", ""),
    ("RDMA write of 64 KiB, in process", ""),
    ("RDMA write of 1 MiB, in process", ""),
    ("RDMA write of 16 MiB, in process", ""),
    ("8-byte write, post to completion, in process", ""),
    ("RDMA write of 1 MiB over a wire (veth", ""),
    ("the same with 1,000 connected QPs", ""),
    ("the same with 1 % of all frames lost", "without faults"),
    ("send and receive of 64 bytes over that wire", ""),
];

/// A row of the table.
#[derive(Debug)]
struct Row<'a> {
    title: &'a str,
    value: &'a str,
    baseline: &'a str,
    ratio: &'a str,
}

/// Returns the rows of the first table whose header begins with `measured`.
fn rows(document: &str) -> Vec<Row<'_>> {
    let table = document.lines().skip_while(|line| !line.starts_with("| measured |"));
    let row = |line| {
        let mut cells = str::split(line, '|').skip(1).map(str::trim);
        Some(Row { title: cells.next()?, value: cells.next()?, baseline: cells.next()?, ratio: cells.next()? })
    };
    table.skip(2).take_while(|line| line.starts_with('|')).filter_map(row).collect()
}

/// Returns the chart of a document's table.
fn picture(document: &str) -> Result<String> {
    let rows = rows(document);
    let bar = |(title, baseline): (&str, &str)| -> Result<Bar> {
        let found = rows.iter().find(|row| row.title.starts_with(title) && row.baseline.starts_with(baseline));
        let row = found.with_context(|| format!("no figure is called {title:?}"))?;
        let ratio = row.ratio.parse().with_context(|| format!("{title:?} has no single ratio"))?;
        ensure!(f64::is_normal(ratio), "{title:?} has the ratio {ratio}");
        let value = row.value.split(',').next().unwrap_or_default();
        Ok(Bar { title: row.title.to_owned(), value: format!("{value} ({}x)", row.ratio), ratio })
    };
    chart::draw_bars(&CHARTED.into_iter().map(bar).collect::<Result<Vec<_>>>()?)
}

/// Draws the chart beside the table, in the folder of the documents.
pub(crate) fn draw(documents: &Path) -> Result<()> {
    let (table, chart) = (documents.join("figures.md"), documents.join("figures.svg"));
    let table = std::fs::read_to_string(&table).with_context(|| format!("cannot read {}", table.display()))?;
    std::fs::write(&chart, picture(&table)?).with_context(|| format!("cannot write {}", chart.display()))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn read(path: &str) -> String {
        std::fs::read_to_string(crate::daemon::workspace_manifest().unwrap().with_file_name(path)).unwrap()
    }

    #[test]
    fn the_chart_is_that_of_the_table() {
        let drawn = picture(&read("docs/figures.md")).unwrap();
        assert!(drawn == read("docs/figures.svg"), "the table changed: `guest-tests published` draws the chart anew");
    }

    #[test]
    fn the_readme_quotes_the_table() {
        let (readme, figures) = (read("README.md"), read("docs/figures.md"));
        let (quoted, rows) = (rows(&readme), rows(&figures));
        assert!(quoted.len() >= 5, "{quoted:?}");
        // The README may compare the same number with a baseline of another name.
        let number = |text: &str| text.rsplit(": ").next().unwrap_or_default().split(',').next().map(str::to_owned);
        for quote in &quoted {
            let is_quoted = |row: &&Row<'_>| {
                row.value.split(',').next() == Some(quote.value)
                    && row.ratio == quote.ratio
                    && number(row.baseline) == number(quote.baseline)
            };
            assert!(rows.iter().find(is_quoted).is_some(), "docs/figures.md has no such row: {quote:?}");
        }
    }

    /// Returns the quantities in a text: each number that is followed by a unit of the figures.
    fn quantities(text: &str) -> BTreeSet<String> {
        const UNITS: [&str; 9] = ["Gb/s", "Mb/s", "GB/s", "MB/s", "million/s", "ns", "µs", "ms", "MiB"];
        let words: Vec<_> = text.split_whitespace().collect();
        let pairs = words.windows(2).filter_map(|pair| {
            let &[number, unit] = pair else { return None };
            let number = number.trim_start_matches(['(', '|', '~']);
            let unit = unit.trim_end_matches([',', '.', ';', ':', ')', '|']);
            let is_number = number.starts_with(|c: char| c.is_ascii_digit());
            (is_number && UNITS.contains(&unit)).then(|| format!("{number} {unit}"))
        });
        pairs.collect()
    }

    /// Returns the paragraphs, items and rows of a document that refer to the page of figures.
    fn references(document: &str) -> Vec<String> {
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
        parts
    }

    /// Returns the quantities that a document attributes to the page of figures and that are not there.
    fn unknown(document: &str, figures: &str) -> Vec<String> {
        let known = quantities(figures);
        let quoted: BTreeSet<_> = references(document).iter().flat_map(|part| quantities(part)).collect();
        quoted.difference(&known).cloned().collect()
    }

    #[test]
    fn no_document_quotes_another_figure() {
        let figures = read("docs/figures.md");
        let root = crate::daemon::workspace_manifest().unwrap();
        let folders = [root.with_file_name("docs"), root.with_file_name("docs/dev"), root.parent().unwrap().to_owned()];
        let files = folders.iter().flat_map(|folder| std::fs::read_dir(folder).unwrap());
        let files =
            files.map(|entry| entry.unwrap().path()).filter(|path| path.extension().is_some_and(|it| it == "md"));
        for path in files.filter(|path| !path.ends_with("figures.md")) {
            let unknown = unknown(&std::fs::read_to_string(&path).unwrap(), &figures);
            assert!(unknown.is_empty(), "{}: docs/figures.md does not have {unknown:?}", path.display());
        }
    }

    #[test]
    fn another_figure_is_found() {
        let figures = "| a | 1.5 µs | 2 Gb/s, 0.4 s |";
        let wrong = "It takes 9 ms.\n\n- ([Figures](figures.md)): 1.5 µs,\n  or (3 Gb/s)\n- 7 ms\n";
        assert_eq!(unknown(wrong, figures), ["3 Gb/s"]);
        assert_eq!(unknown("1.5 µs and 2 Gb/s, see [Figures](figures.md)", figures), Vec::<String>::new());
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
