//! Comparison with figures of earlier commits.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Deserialize;

use super::figure::Figure;

/// The parts of an earlier run's results that a comparison needs.
#[derive(Debug, Deserialize)]
pub(super) struct Earlier {
    /// Commit that was measured.
    pub(super) commit: String,
    figures: Vec<EarlierFigure>,
}

#[derive(Debug, Deserialize)]
struct EarlierFigure {
    name: String,
    ratio: f64,
}

/// Difference of a ratio from the previous one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    Worse,
    None,
    Better,
}

/// Minimum factor between two ratios that counts as a change. Smaller differences are noise of the machine.
const NOTABLE: f64 = 1.1;

impl Earlier {
    /// Reads a results file of `bench`.
    pub(super) fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        serde_json::from_str(&text).with_context(|| format!("{} has no results of bench", path.display()))
    }

    /// Returns made-up results.
    pub(super) fn example() -> Self {
        let figure = EarlierFigure { name: "in-process/write-rate".to_owned(), ratio: 1.5 };
        Self { commit: "0123abc".to_owned(), figures: vec![figure] }
    }
}

/// The ratios of a figure, commit by commit. Each has its difference from the last earlier one.
pub(super) type Row = Vec<Option<(f64, Change)>>;

/// Returns a row of earlier and current ratios for each current figure.
pub(super) fn rows<'a>(earlier: &[Earlier], now: &'a [Figure]) -> Vec<(&'a str, Row)> {
    let columns: Vec<BTreeMap<&str, f64>> = earlier
        .iter()
        .map(|run| run.figures.iter().map(|figure| (figure.name.as_str(), figure.ratio)).collect())
        .collect();
    let row = |figure: &'a Figure| {
        let ratios = columns.iter().map(|column| column.get(figure.name.as_str()).copied()).chain([Some(figure.ratio)]);
        let mut last = None;
        let cells = ratios.map(|ratio| {
            let ratio = ratio?;
            let change = last.replace(ratio).map_or(Change::None, |last: f64| change(last, ratio));
            Some((ratio, change))
        });
        (figure.title.as_str(), cells.collect())
    };
    now.iter().map(row).collect()
}

fn change(before: f64, after: f64) -> Change {
    if after > before * NOTABLE {
        Change::Better
    } else if after * NOTABLE < before {
        Change::Worse
    } else {
        Change::None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_against_the_last_that_there_is() {
        let run = |commit: &str, figures: &[(&str, f64)]| Earlier {
            commit: commit.to_owned(),
            figures: figures.iter().map(|&(name, ratio)| EarlierFigure { name: name.to_owned(), ratio }).collect(),
        };
        let earlier = [run("a", &[("x", 1.0), ("gone", 9.0)]), run("b", &[]), run("c", &[("x", 1.05)])];
        let now = [
            Figure::against_target("x", "X".to_owned(), "s", false, vec![0.8], 1.0),
            Figure::against_target("new", "New".to_owned(), "s", false, vec![2.0], 1.0),
        ];
        let rows = rows(&earlier, &now);
        assert_eq!(rows[0].0, "X");
        let changes: Vec<_> = rows[0].1.iter().map(|cell| cell.map(|(_, change)| change)).collect();
        assert_eq!(changes, [Some(Change::None), None, Some(Change::None), Some(Change::Worse)]);
        assert_eq!(rows[1].1, [None, None, None, Some((2.0, Change::None))]);
    }

    #[test]
    fn a_file_without_results_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("results.json");
        std::fs::write(&path, "{\"figures\": 1}").unwrap();
        assert!(format!("{:#}", Earlier::read(&path).unwrap_err()).contains("has no results of bench"));
    }
}
