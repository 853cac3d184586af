//! The report: one file that a browser shows without any request to a server.
//!
//! It is valid XML as well as HTML, so that any parser reads it. It contains the same results as the JSON file.

use std::fmt::Write;

use anyhow::{Context, Result, anyhow};

use super::chart;
use super::figure::{Distribution, Figure};
use super::report::Report;
use super::sweep::SWEEPS;
use super::trend::{self, Change, Earlier};

/// Head and introduction of the page.
const STYLE: &str = "body{font:15px/1.5 sans-serif;margin:2em auto;max-width:64em;padding:0 1em;color:#222}\
                     table{border-collapse:collapse;width:100%}td,th{border-bottom:1px solid #ccc;padding:.3em .6em;\
                     text-align:right}td:first-child,th:first-child{text-align:left}svg{max-width:100%;height:auto}\
                     .worse{color:#bf4500}.better{color:#2e7d32}";

/// The page of a report.
pub(super) fn page(report: &Report, earlier: &[Earlier]) -> Result<String> {
    let mut page = String::from("<!DOCTYPE html>\n<html xmlns=\"http://www.w3.org/1999/xhtml\" lang=\"en\">\n<head>");
    page += "<meta charset=\"utf-8\"/><meta name=\"viewport\" content=\"width=device-width\"/>";
    page += "<title>PVRDMA: measurements</title>";
    writeln!(page, "<style>{STYLE}</style></head>\n<body>\n<h1>PVRDMA: measurements</h1>")?;
    let machine = format!("{} processors, {}; commit {}", report.machine.cpus, report.machine.processor, report.commit);
    writeln!(page, "<p id=\"machine\">{}</p>", escaped(&machine))?;
    section(&mut page, "bars", "Ratios to the base lines", &chart::bars(&report.figures)?)?;
    for sweep in &SWEEPS {
        section_if_measured(&mut page, sweep.id, sweep.title, chart::sweep(sweep, &report.figures)?)?;
    }
    let latency = chart::distributions(&report.distributions)?;
    section_if_measured(&mut page, "latency", "Latency: how many completions have come by then", latency)?;
    table(&mut page, &report.figures)?;
    if !earlier.is_empty() {
        trend(&mut page, report, earlier)?;
    }
    for reason in &report.skipped {
        writeln!(page, "<p class=\"skipped\">Skipped: {}</p>", escaped(reason))?;
    }
    let json = serde_json::to_string(report).context("cannot encode the results")?;
    // Both characters occur only in strings, where they can be escaped.
    let json = json.replace('&', "\\u0026").replace('<', "\\u003c");
    writeln!(page, "<script type=\"application/json\" id=\"results\">{json}</script>\n</body>\n</html>")?;
    Ok(page)
}

fn section_if_measured(page: &mut String, id: &str, title: &str, svg: Option<String>) -> Result<()> {
    match svg {
        Some(svg) => section(page, id, title, &svg),
        None => Ok(writeln!(page, "<p>Not measured: {}.</p>", escaped(title))?),
    }
}

fn section(page: &mut String, id: &str, title: &str, svg: &str) -> Result<()> {
    // The XML declaration that the backend writes in front of the picture is valid in a separate file only.
    let picture = svg.find("<svg").and_then(|start| svg.get(start..)).ok_or_else(|| anyhow!("{id}: no picture"))?;
    writeln!(page, "<h2>{}</h2>\n<div id=\"{id}\">{picture}</div>", escaped(title))?;
    Ok(())
}

fn table(page: &mut String, figures: &[Figure]) -> Result<()> {
    *page += "<h2>Figures</h2>\n<table id=\"figures\"><thead><tr><th>measured</th><th>our device</th>\
              <th>compared with</th><th></th><th>times better</th></tr></thead><tbody>\n";
    for figure in figures {
        let class = if figure.ratio < 1.0 { "worse" } else { "better" };
        writeln!(
            page,
            "<tr><td>{}</td><td>{:.2} {unit}</td><td>{:.2} {unit}</td><td>{}</td><td class=\"{class}\">{:.2}</td></tr>",
            escaped(&figure.title),
            figure.value,
            figure.baseline,
            escaped(figure.baseline_name),
            figure.ratio,
            unit = escaped(figure.unit),
        )?;
    }
    *page += "</tbody></table>\n";
    Ok(())
}

/// Adds the table of ratios, commit after commit.
fn trend(page: &mut String, report: &Report, earlier: &[Earlier]) -> Result<()> {
    *page += "<h2>Times better, commit after commit</h2>\n<table id=\"trend\"><thead><tr><th>measured</th>";
    for commit in earlier.iter().map(|run| &run.commit).chain([&report.commit]) {
        write!(page, "<th>{}</th>", escaped(commit))?;
    }
    *page += "<th></th></tr></thead><tbody>\n";
    for (title, cells) in trend::rows(earlier, &report.figures) {
        write!(page, "<tr><td>{}</td>", escaped(title))?;
        let line = sparkline(&cells);
        for cell in cells {
            match cell {
                None => *page += "<td>–</td>",
                Some((ratio, Change::None)) => write!(page, "<td>{ratio:.2}</td>")?,
                Some((ratio, Change::Worse)) => write!(page, "<td class=\"worse\">{ratio:.2}</td>")?,
                Some((ratio, Change::Better)) => write!(page, "<td class=\"better\">{ratio:.2}</td>")?,
            }
        }
        writeln!(page, "<td>{line}</td></tr>")?;
    }
    *page += "</tbody></table>\n";
    Ok(())
}

/// Draws a row of ratios as a line on a logarithmic scale, from the minimum to the maximum.
fn sparkline(cells: &trend::Row) -> String {
    const WIDTH: f64 = 100.0;
    const HEIGHT: f64 = 20.0;
    let logs: Vec<Option<f64>> =
        cells.iter().map(|cell| cell.map(|(ratio, _)| ratio.max(f64::MIN_POSITIVE).ln())).collect();
    let known = || logs.iter().flatten().copied();
    let (least, most) = (known().fold(f64::MAX, f64::min), known().fold(f64::MIN, f64::max));
    // Two runs of one tree differ by a few percent, which must not look like a slope.
    let range = (most - least).max(0.2);
    let step = WIDTH / f64::from(u32::try_from(logs.len()).unwrap_or(u32::MAX).max(2) - 1);
    let mut points = String::new();
    for (column, log) in (0_u32..).zip(&logs) {
        let Some(log) = log else { continue };
        let height = HEIGHT * (1.0 - (log - least) / range);
        let _ = write!(points, "{:.1},{height:.1} ", f64::from(column) * step);
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"104\" height=\"24\" viewBox=\"-2 -2 104 24\">\
         <polyline fill=\"none\" stroke=\"#555\" stroke-width=\"2\" points=\"{}\"/></svg>",
        points.trim_end()
    )
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// The names of all parts that a page can have.
pub(crate) fn parts() -> impl Iterator<Item = &'static str> {
    ["bars", "latency", "figures", "trend"].into_iter().chain(SWEEPS.iter().map(|sweep| sweep.id))
}

/// Returns a page of made-up figures with all possible parts, for tests of its appearance.
pub(crate) fn example_page() -> Result<String> {
    page(&example(), &[Earlier::example()])
}

fn example() -> Report {
    let figure = |name: &str, title: &str, ours: f64, theirs: f64| {
        Figure::of_rounds(name, title.to_owned(), "GB/s", false, &[[ours, theirs]], "memcpy")
    };
    let mut figures = vec![figure("in-process/write-rate", "small & <quick>", 2.0, 3.0)];
    for sweep in &SWEEPS {
        for at in [1_u32, 4, 64, 128] {
            figures.push(figure(&format!("{}{at}", sweep.prefix), sweep.title, f64::from(at), f64::from(at) * 1.1));
        }
    }
    let samples = (1..=1000).map(f64::from).collect();
    let distributions = vec![Distribution::of("in-process/latency", "8-byte write".to_owned(), "µs", samples)];
    Report::new(figures, distributions, vec!["wire: </script> & more".to_owned()])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The greatest ratio is at the top, the least at the bottom; a commit without this figure leaves a gap.
    #[test]
    fn a_row_as_a_line() {
        let line = sparkline(&vec![Some((1.0, Change::None)), None, Some((2.0, Change::Better))]);
        assert!(line.contains("points=\"0.0,20.0 100.0,0.0\""), "{line}");
        let line = sparkline(&vec![Some((1.0, Change::None)), Some((1.01, Change::None))]);
        assert!(line.contains("points=\"0.0,20.0 100.0,19.0\""), "{line}");
    }

    /// Any XML parser reads the page, it fetches nothing, and the results in it are complete.
    #[test]
    fn the_page_is_whole() {
        let report = example();
        let page = page(&report, &[Earlier::example()]).unwrap();
        let options = roxmltree::ParsingOptions { allow_dtd: true, ..roxmltree::ParsingOptions::default() };
        let document = roxmltree::Document::parse_with_options(&page, options).unwrap();
        let by_id = |id: &str| document.descendants().find(|node| node.attribute("id") == Some(id)).expect(id);
        for id in parts() {
            assert!(by_id(id).descendants().any(|node| ["svg", "td"].contains(&node.tag_name().name())), "{id}");
        }
        let lines = |id: &str| by_id(id).descendants().filter(|node| node.tag_name().name() == "polyline").count();
        for sweep in &SWEEPS {
            assert!(lines(sweep.id) >= 2, "{}: not ours and the base line", sweep.id);
        }
        assert!(lines("latency") >= 1);
        assert_eq!(lines("trend"), report.figures.len());
        let rows = by_id("figures").descendants().filter(|node| node.tag_name().name() == "tr").count();
        assert_eq!(rows, 1 + report.figures.len());
        let cells = by_id("trend").descendants().filter(|node| node.tag_name().name() == "td").count();
        assert_eq!(cells, 4 * report.figures.len());
        let results: serde_json::Value = serde_json::from_str(by_id("results").text().unwrap()).unwrap();
        let written: serde_json::Value = serde_json::from_str(&serde_json::to_string(&report).unwrap()).unwrap();
        assert_eq!(results, written);
        for node in document.descendants() {
            let fetched = ["src", "href", "data", "action"].iter().find_map(|name| node.attribute(*name));
            assert_eq!(fetched, None, "{:?}", node.tag_name());
        }
        assert!(!page.contains("url(") && !page.contains("@import"));
    }
}
