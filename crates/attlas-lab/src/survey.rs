//! The survey's figures from any source: sparsity patterns of the weights, and the decay of singular values.
//!
//! Rows of a figure are layers. Patterns have a column per head. Spectra have a column per matrix, with a line per
//! head, relative to the largest singular value; both axes are logarithmic. Axes have titles, and colours have a colour
//! bar.

use crate::figures::{colour_bar, heat_image, named_spectra};
use crate::html::escape;
use crate::inspect::{Inspected, Inspection};
use attlas::diagnostics::Spectrum;
use std::fmt::Write;

/// One of the figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum Figure {
    /// Patterns and spectra of each head.
    Heads,
    /// The weights of the first tokens, of every head.
    Patterns,
    /// Singular values of Q, K and V.
    Inputs,
    /// Singular values of scores QK^T, exponentials A and weights Z^-1 A.
    Scores,
}

const STYLE: &str = "<style>text{font:11px system-ui,sans-serif;fill:#222}</style>\
                     <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>";
/// Decades drawn below the largest singular value.
const DECADES: f64 = 8.0;

impl Figure {
    /// Draws the figure as a self-contained picture.
    pub fn draw(self, found: &Inspection) -> String {
        match self {
            Figure::Heads => found.picture(),
            Figure::Patterns => patterns(found),
            Figure::Inputs => spectra(found, 0..3),
            Figure::Scores => spectra(found, 3..6),
        }
    }
}

/// Returns the heads of each layer.
fn layers(found: &Inspection) -> impl Iterator<Item = &[Inspected]> {
    found.heads.chunk_by(|a, b| a.layer == b.layer)
}

fn layer_name(part: &[Inspected]) -> String {
    part[0].layer.map_or(String::new(), |l| format!("layer {l}"))
}

fn picture(width: f64, height: f64, body: &str) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" \
         color=\"#222\">{STYLE}{body}</svg>\n"
    )
}

fn patterns(found: &Inspection) -> String {
    const SIDE: f64 = 96.0;
    const GAP: f64 = 10.0;
    let (left, top) = (72.0, 24.0);
    let columns = layers(found).map(<[_]>::len).max().unwrap_or(0);
    let mut body = String::new();
    for (row, part) in layers(found).enumerate() {
        let y = top + row as f64 * (SIDE + GAP + 12.0);
        let _ = write!(body, "<text x=\"4\" y=\"{:.1}\">{}</text>", y + SIDE / 2.0, layer_name(part));
        for (column, h) in part.iter().enumerate() {
            let x = left + column as f64 * (SIDE + GAP);
            let _ = write!(body, "<text x=\"{x:.1}\" y=\"{:.1}\">head {}</text>", y - 4.0, h.head);
            body += &heat_image(&h.report.weights.leading, x, y, SIDE, &h.name());
        }
        body += &axis_titles("key", "query", (left, y), (part.len() as f64 * (SIDE + GAP) - GAP, SIDE), 11.0);
    }
    let right = left + columns as f64 * (SIDE + GAP);
    body += &colour_bar(right, top, SIDE, "weight / largest of its row");
    let rows = layers(found).count() as f64;
    picture(right + 70.0, top + rows * (SIDE + GAP + 12.0) + 8.0, &body)
}

fn spectra(found: &Inspection, which: std::ops::Range<usize>) -> String {
    const WIDTH: f64 = 230.0;
    const HEIGHT: f64 = 130.0;
    const GAP: f64 = 42.0;
    let (left, top) = (96.0, 26.0);
    let mut body = String::new();
    let rows = layers(found).count();
    for (row, part) in layers(found).enumerate() {
        let y = top + row as f64 * (HEIGHT + 48.0);
        let _ = write!(body, "<text x=\"4\" y=\"{:.1}\">{}</text>", y + HEIGHT / 2.0, layer_name(part));
        for (column, matrix) in which.clone().enumerate() {
            let x = left + column as f64 * (WIDTH + GAP);
            let lines: Vec<&Spectrum> =
                part.iter().map(|h| named_spectra(&h.report.spectra)[matrix].2).collect();
            let (name, colour, _) = named_spectra(&part[0].report.spectra)[matrix];
            body += &axes(&lines, name, x, y, WIDTH, HEIGHT);
            // Titles beside the first column and below every column.
            let across = if column == 0 { "singular value / largest" } else { "" };
            body += &axis_titles("number of the singular value", across, (x, y), (WIDTH, HEIGHT), 26.0);
            for s in &lines {
                body += &line(s, colour, longest(&lines), x, y, WIDTH, HEIGHT);
            }
        }
    }
    let columns = which.len() as f64;
    picture(left + columns * (WIDTH + GAP), top + rows as f64 * (HEIGHT + 48.0), &body)
}

/// Writes the axis titles of a panel: below it, and on its left if given.
fn axis_titles(
    along: &str,
    across: &str,
    (x, y): (f64, f64),
    (width, height): (f64, f64),
    below: f64,
) -> String {
    let mut titles = format!(
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
        x + width / 2.0,
        y + height + below,
        escape(along)
    );
    if !across.is_empty() {
        let _ = write!(
            titles,
            "<text transform=\"translate({:.1} {:.1}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
            x - if below > 20.0 { 36.0 } else { 5.0 },
            y + height / 2.0,
            escape(across)
        );
    }
    titles
}

fn longest(lines: &[&Spectrum]) -> f64 {
    lines.iter().map(|s| s.values.len()).max().unwrap_or(1).max(2) as f64
}

/// Draws the frame, the decades and the index of the last value.
fn axes(lines: &[&Spectrum], name: &str, x: f64, y: f64, width: f64, height: f64) -> String {
    let mut svg = format!(
        "<text x=\"{x:.1}\" y=\"{:.1}\">{}</text><rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" \
         fill=\"none\" stroke=\"#888\"/>",
        y - 5.0,
        escape(name)
    );
    for decade in (0..=DECADES as i32).step_by(2) {
        let py = y + height * f64::from(decade) / DECADES;
        let label = if decade == 0 { "1".into() } else { format!("1e-{decade}") };
        let _ = write!(
            svg,
            "<line x1=\"{x:.1}\" x2=\"{:.1}\" y1=\"{py:.1}\" y2=\"{py:.1}\" stroke=\"#0002\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>",
            x + width,
            x - 4.0,
            py + 4.0
        );
    }
    let last = longest(lines);
    let mut n = 1.0f64;
    while n <= last {
        let px = x + width * n.ln() / last.ln();
        let _ = write!(
            svg,
            "<text x=\"{px:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{n}</text>",
            y + height + 13.0
        );
        n *= 4.0;
    }
    svg
}

/// Draws the singular values of one head.
fn line(s: &Spectrum, colour: &str, last: f64, x: f64, y: f64, width: f64, height: f64) -> String {
    let first = s.values.first().copied().filter(|v| *v > 0.0).unwrap_or(1.0);
    let mut points = String::new();
    let mut next = 0;
    for (i, value) in s.values.iter().enumerate() {
        // Steps of a tenth are finer than the line is wide.
        if (i >= next || i + 1 == s.values.len()) && *value > 0.0 {
            let px = x + width * ((i + 1) as f64).ln() / last.ln();
            let py = y + height * (-(value / first).log10() / DECADES).clamp(0.0, 1.0);
            let _ = write!(points, "{px:.1},{py:.1} ");
            next = i + 1 + i / 10;
        }
    }
    format!(
        "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.2\" stroke-opacity=\"0.65\"/>",
        points.trim_end()
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::Run;

    #[test]
    fn every_head_has_its_pattern_and_its_lines() {
        let mut workload =
            "synthetic:clustered,n=60,d=8,heads=3".parse::<crate::Source>().unwrap().load().unwrap();
        workload.layers.push(workload.layers[0].clone());
        workload.layers.iter_mut().enumerate().for_each(|(i, l)| l.layer = Some(4 * i));
        let found =
            Run::silent(0, 0, |run| crate::inspect::inspect(&workload, &Default::default(), run)).unwrap();
        let count = |figure: Figure, what: &str| figure.draw(&found).matches(what).count();
        // Six heads and the bar of their colours.
        assert_eq!((count(Figure::Patterns, "<image"), count(Figure::Patterns, "layer 4<")), (7, 1));
        assert_eq!((count(Figure::Patterns, ">query<"), count(Figure::Patterns, ">key<")), (2, 2));
        assert!(count(Figure::Patterns, "largest of its row") == 1 && count(Figure::Patterns, ">1e-4<") == 1);
        for figure in [Figure::Inputs, Figure::Scores] {
            // Two layers, three matrices, three heads.
            assert_eq!((count(figure, "<polyline"), count(figure, "stroke=\"#888\"")), (18, 6));
            assert_eq!(count(figure, "NaN"), 0);
            assert_eq!((count(figure, "number of the singular value"), count(figure, "largest<")), (6, 2));
        }
        for figure in [Figure::Heads, Figure::Patterns, Figure::Inputs, Figure::Scores] {
            let file = crate::pdf::from_svg(&figure.draw(&found)).unwrap();
            assert!(file.starts_with(b"%PDF-") && file.ends_with(b"%%EOF\n"));
        }
        assert!(Figure::Scores.draw(&found).contains("Z⁻¹A") && Figure::Inputs.draw(&found).contains(">V<"));
        assert_eq!(Figure::Heads.draw(&found), found.picture());
    }
}
