//! The figures as pictures.

use std::ops::Range;
use std::path::Path;

use anyhow::{Context, Result, anyhow};
use plotters::coord::combinators::LogCoord;
use plotters::drawing::DrawingAreaErrorKind;
use plotters::prelude::*;

use super::figure::{Distribution, Figure};
use super::sweep::Sweep;

const ROW: u32 = 34;
const WIDTH: u32 = 1000;
const LABELS: i32 = 520;
/// Room for the value after the longest bar.
const VALUES: i32 = 150;

/// Draws the ratio of each figure to its baseline, as bars on a logarithmic scale.
pub(super) fn draw(figures: &[Figure], path: &Path) -> Result<()> {
    std::fs::write(path, bars(figures)?).with_context(|| format!("cannot write {}", path.display()))
}

/// Returns the same as the text of an SVG.
pub(super) fn bars(figures: &[Figure]) -> Result<String> {
    let bar = |figure: &Figure| Bar {
        title: figure.title.clone(),
        value: format!("{:.2} {} ({:.2}x)", figure.value, figure.unit, figure.ratio),
        ratio: figure.ratio,
    };
    let bars: Vec<_> = figures.iter().map(bar).collect();
    let mut text = String::new();
    paint(&bars, &mut text).map_err(|error| anyhow!("cannot draw: {error}"))?;
    Ok(text)
}

/// A bar of the chart, with the texts before and after it.
#[derive(Debug)]
struct Bar {
    title: String,
    value: String,
    ratio: f64,
}

/// Colour of a curve.
pub(super) type Colour = RGBColor;

/// A curve: its name, colour and points.
pub(super) type Curve = (String, Colour, Vec<(f64, f64)>);

/// Draws the device and the baseline over the varied parameter, both logarithmic. Returns `None` if there are too few
/// points.
pub(super) fn sweep(sweep: &Sweep, figures: &[Figure]) -> Result<Option<String>> {
    let points = sweep.points(figures);
    let Some((_, first)) = points.first().filter(|_| points.len() > 2) else { return Ok(None) };
    let curve = |value: fn(&Figure) -> f64| points.iter().map(|(at, figure)| (*at, value(figure))).collect();
    let curves = [
        ("our device".to_owned(), GREEN, curve(|figure| figure.value)),
        (first.baseline_name.to_owned(), GREY, curve(|figure| figure.baseline)),
    ];
    lines(&curves, sweep.varies, first.unit).map(Some)
}

/// Draws curves in Gb/s over the size of a message, with a caption.
pub(super) fn bandwidth(curves: &[Curve], caption: &str) -> Result<String> {
    let mut text = String::new();
    paint_bandwidth(curves, caption, &mut text).map_err(|error| anyhow!("cannot draw: {error}"))?;
    Ok(text)
}

fn paint_bandwidth(curves: &[Curve], caption: &str, text: &mut String) -> Result<(), Box<dyn std::error::Error>> {
    let (xs, ys) = ranges(curves);
    let root = SVGBackend::with_string(text, (WIDTH, 480)).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .margin(16)
        .caption("RDMA writes and TCP between two guests of a host", ("sans-serif", 20))
        .x_label_area_size(60)
        .y_label_area_size(80)
        .build_cartesian_2d(xs.log_scale().base(16.0), ys.log_scale())?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .label_style(("sans-serif", 15))
        .x_label_formatter(&|bytes| size(*bytes))
        .y_label_formatter(&|gigabits| format!("{gigabits}"))
        .x_desc(format!("size of a write ({caption})"))
        .y_desc("Gb/s")
        .draw()?;
    draw_curves(&mut chart, curves)?;
    root.present()?;
    Ok(())
}

/// Returns a number of bytes with a unit.
fn size(bytes: f64) -> String {
    let (unit, name) =
        [(1_048_576.0, "MiB"), (1024.0, "KiB")].into_iter().find(|(unit, _)| bytes >= *unit).unwrap_or((1.0, "bytes"));
    format!("{} {name}", bytes / unit)
}

/// Draws fractions of samples over their value, which is logarithmic. Returns `None` if there are no samples.
pub(super) fn distributions(distributions: &[Distribution]) -> Result<Option<String>> {
    let Some(first) = distributions.first() else { return Ok(None) };
    let points = |of: &Distribution| of.quantiles.iter().map(|&[share, value]| (value, share.max(0.001))).collect();
    let curves: Vec<Curve> = distributions.iter().map(|of| (of.title.clone(), GREEN, points(of))).collect();
    lines(&curves, first.unit, "share").map(Some)
}

pub(super) const GREEN: Colour = RGBColor(46, 125, 50);
pub(super) const ORANGE: Colour = RGBColor(239, 108, 0);
pub(super) const GREY: Colour = RGBColor(117, 117, 117);

/// Curves on two logarithmic axes.
fn lines(curves: &[Curve], x: &str, y: &str) -> Result<String> {
    let mut text = String::new();
    draw_lines(curves, (x, y), &mut text).map_err(|error| anyhow!("cannot draw: {error}"))?;
    Ok(text)
}

fn draw_lines(curves: &[Curve], (x, y): (&str, &str), text: &mut String) -> Result<(), Box<dyn std::error::Error>> {
    let (xs, ys) = ranges(curves);
    let root = SVGBackend::with_string(text, (WIDTH, 420)).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(70)
        .build_cartesian_2d(xs.log_scale(), ys.log_scale())?;
    chart.configure_mesh().x_desc(x).y_desc(y).draw()?;
    draw_curves(&mut chart, curves)?;
    root.present()?;
    Ok(())
}

/// Returns the ranges of two logarithmic axes.
fn ranges(curves: &[Curve]) -> (Range<f64>, Range<f64>) {
    let all = || curves.iter().flat_map(|(.., points)| points.iter().copied());
    let range = |values: Vec<f64>| {
        let least = values.iter().copied().fold(f64::MAX, f64::min).max(1e-6);
        let most = values.iter().copied().fold(least, f64::max);
        least * 0.8..most * 1.25
    };
    (range(all().map(|(x, _)| x).collect()), range(all().map(|(_, y)| y).collect()))
}

/// Draws curves and their names into a chart with axes.
fn draw_curves<'a>(
    chart: &mut ChartContext<'a, SVGBackend<'a>, Cartesian2d<LogCoord<f64>, LogCoord<f64>>>,
    curves: &[Curve],
) -> Result<(), DrawingAreaErrorKind<std::io::Error>> {
    for (name, colour, points) in curves {
        let style = colour.stroke_width(2);
        chart
            .draw_series(LineSeries::new(points.iter().copied(), style))?
            .label(name.as_str())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], style));
        chart.draw_series(points.iter().map(|&point| Circle::new(point, 3, colour.filled())))?;
    }
    // Curves that rise leave this corner empty.
    let mut labels = chart.configure_series_labels();
    labels.position(SeriesLabelPosition::UpperLeft).background_style(WHITE).border_style(BLACK).draw()?;
    Ok(())
}

fn paint(bars: &[Bar], text: &mut String) -> Result<(), Box<dyn std::error::Error>> {
    let rows = u32::try_from(bars.len())?;
    let height = ROW * (rows + 2);
    let root = SVGBackend::with_string(text, (WIDTH, height)).into_drawing_area();
    root.fill(&WHITE)?;
    let best = bars.iter().map(|bar| bar.ratio).fold(10.0, f64::max);
    let decades = best.log10() + 1.0;
    // One decade below "equal" is the left edge.
    let x = |ratio: f64| {
        let share = (ratio.max(0.1).log10() + 1.0) / decades;
        #[expect(clippy::cast_possible_truncation, reason = "pixels of a picture of 1000")]
        let pixel = (share * f64::from(WIDTH.cast_signed() - LABELS - VALUES)) as i32;
        LABELS + pixel
    };
    let font = ("sans-serif", 14).into_font();
    root.draw_text("times better than the base line (logarithmic; the line is 1)", &font.color(&BLACK), (10, 8))?;
    for (row, bar) in (1_i32..).zip(bars) {
        let top = row * ROW.cast_signed();
        let colour = if bar.ratio >= 1.0 { RGBColor(46, 125, 50) } else { RGBColor(239, 108, 0) };
        let corners = [(LABELS, top), (x(bar.ratio), top + 18)];
        root.draw(&Rectangle::new(corners, colour.filled()))?;
        root.draw_text(&bar.title, &font.color(&BLACK), (10, top + 2))?;
        // The text is placed after the line at 1 if a short bar ends before it, so that no figure is struck through.
        let at = x(bar.ratio).max(x(1.0)) + 6;
        root.draw_text(&bar.value, &font.color(&BLACK), (at, top + 2))?;
    }
    let bottom = height.cast_signed() - ROW.cast_signed() / 2;
    root.draw(&PathElement::new([(x(1.0), 26), (x(1.0), bottom)], BLACK))?;
    root.present()?;
    Ok(())
}
