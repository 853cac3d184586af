//! Results of a measurement.

use serde::Serialize;

/// One measured comparison.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Figure {
    /// Stable name, `part/what`.
    pub(crate) name: String,
    /// Title for the reader.
    pub(crate) title: String,
    /// Unit of the values.
    pub(crate) unit: &'static str,
    /// Less is better.
    pub(crate) less_is_better: bool,
    /// Median on the device.
    pub(crate) value: f64,
    /// All runs on the device.
    pub(crate) runs: Vec<f64>,
    /// Median of the baseline in the same run.
    pub(crate) baseline: f64,
    /// All runs of the baseline.
    pub(crate) baseline_runs: Vec<f64>,
    /// Name of the baseline.
    pub(crate) baseline_name: &'static str,
    /// Factor by which the device is better than the baseline.
    pub(crate) ratio: f64,
}

impl Figure {
    /// Returns a figure that is compared with a baseline of the same rounds, `[ours, baseline]` each: the ratio is the
    /// median of the rounds' ratios, so that disturbances affect both sides of a ratio.
    pub(crate) fn of_rounds(
        name: impl Into<String>,
        title: String,
        unit: &'static str,
        less_is_better: bool,
        rounds: &[[f64; 2]],
        baseline_name: &'static str,
    ) -> Self {
        let column = |index: usize| -> Vec<f64> { rounds.iter().map(|round| round[index]).collect() };
        let times_better = |&[ours, theirs]: &[f64; 2]| if less_is_better { theirs / ours } else { ours / theirs };
        let ratios: Vec<f64> = rounds.iter().map(times_better).collect();
        Self {
            name: name.into(),
            title,
            unit,
            less_is_better,
            value: median(&column(0)),
            runs: column(0),
            baseline: median(&column(1)),
            baseline_runs: column(1),
            baseline_name,
            ratio: median(&ratios),
        }
    }

    /// Returns a figure that is compared with a target value.
    pub(crate) fn against_target(
        name: impl Into<String>,
        title: String,
        unit: &'static str,
        less_is_better: bool,
        runs: Vec<f64>,
        target: f64,
    ) -> Self {
        let value = median(&runs);
        Self {
            name: name.into(),
            title,
            unit,
            less_is_better,
            value,
            runs,
            baseline: target,
            baseline_runs: Vec::new(),
            baseline_name: "target",
            ratio: if less_is_better { target / value } else { value / target },
        }
    }
}

/// Distribution of single samples.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Distribution {
    /// Stable name, `part/what`.
    pub(crate) name: String,
    /// Title for the reader.
    pub(crate) title: String,
    /// Unit of the values.
    pub(crate) unit: &'static str,
    /// Number of samples.
    pub(crate) samples: usize,
    /// Fractions of the samples, each with the value that they do not exceed.
    pub(crate) quantiles: Vec<[f64; 2]>,
}

impl Distribution {
    /// Returns the distribution of these samples.
    pub(crate) fn of(name: impl Into<String>, title: String, unit: &'static str, mut samples: Vec<f64>) -> Self {
        const SHARES: [f64; 11] = [0.0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999, 0.9999, 1.0];
        samples.sort_by(f64::total_cmp);
        #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "few")]
        let at = |share: f64| ((samples.len().saturating_sub(1)) as f64 * share).round() as usize;
        let quantiles = SHARES.iter().filter_map(|&share| Some([share, *samples.get(at(share))?])).collect();
        Self { name: name.into(), title, unit, samples: samples.len(), quantiles }
    }
}

/// Returns the median of several runs.
pub(crate) fn median(runs: &[f64]) -> f64 {
    let mut sorted = runs.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        count if count % 2 == 1 => sorted[count / 2],
        count => f64::midpoint(sorted[count / 2 - 1], sorted[count / 2]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_of_samples() {
        let distribution = Distribution::of("a/b", "b".to_owned(), "µs", (0..=1000).rev().map(f64::from).collect());
        assert_eq!((distribution.samples, distribution.quantiles[4]), (1001, [0.5, 500.0]));
        assert_eq!((distribution.quantiles[0], distribution.quantiles[10]), ([0.0, 0.0], [1.0, 1000.0]));
        assert!(Distribution::of("a/b", String::new(), "µs", Vec::new()).quantiles.is_empty());
    }

    #[test]
    fn median_of_odd_and_even() {
        assert!((median(&[3.0, 1.0, 2.0]) - 2.0).abs() < 1e-9);
        assert!((median(&[4.0, 1.0, 2.0, 3.0]) - 2.5).abs() < 1e-9);
    }
}
