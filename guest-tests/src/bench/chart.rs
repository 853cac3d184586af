//! The figures as a picture.

use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::prelude::*;

use super::figure::Figure;

const ROW: u32 = 34;
const WIDTH: u32 = 900;
const LABELS: i32 = 420;

/// Draws how many times better than its base line each figure is, as bars on a logarithmic scale.
pub(super) fn draw(figures: &[Figure], path: &Path) -> Result<()> {
    paint(figures, path).map_err(|error| anyhow!("cannot draw {}: {error}", path.display()))
}

fn paint(figures: &[Figure], path: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let rows = u32::try_from(figures.len())?;
    let height = ROW * (rows + 2);
    let root = SVGBackend::new(path, (WIDTH, height)).into_drawing_area();
    root.fill(&WHITE)?;
    let best = figures.iter().map(|figure| figure.ratio).fold(10.0, f64::max);
    let decades = best.log10() + 1.0;
    // One decade below "equal" is the left edge.
    let x = |ratio: f64| {
        let share = (ratio.max(0.1).log10() + 1.0) / (decades + 0.6);
        #[expect(clippy::cast_possible_truncation, reason = "pixels of a picture of 900")]
        let pixel = (share * f64::from(WIDTH.cast_signed() - LABELS)) as i32;
        LABELS + pixel
    };
    let font = ("sans-serif", 14).into_font();
    root.draw_text("times better than the base line (logarithmic; the line is 1)", &font.color(&BLACK), (10, 8))?;
    for (row, figure) in (1_i32..).zip(figures) {
        let top = row * ROW.cast_signed();
        let colour = if figure.ratio >= 1.0 { RGBColor(46, 125, 50) } else { RGBColor(239, 108, 0) };
        let bar = [(LABELS, top), (x(figure.ratio), top + 18)];
        root.draw(&Rectangle::new(bar, colour.filled()))?;
        root.draw_text(&figure.title, &font.color(&BLACK), (10, top + 2))?;
        let value = format!("{:.2} {} ({:.2}x)", figure.value, figure.unit, figure.ratio);
        root.draw_text(&value, &font.color(&BLACK), (x(figure.ratio) + 6, top + 2))?;
    }
    let bottom = height.cast_signed() - ROW.cast_signed() / 2;
    root.draw(&PathElement::new([(x(1.0), 26), (x(1.0), bottom)], BLACK))?;
    root.present()?;
    Ok(())
}
