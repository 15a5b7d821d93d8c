//! Time against divergence: the predicted cost of every budget.

use super::choose::{Point, choose};
use super::{Round, Tuned};
use crate::html::escape;
use serde::Serialize;
use std::fmt::Write;

/// One budget and its predicted cost.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CurvePoint {
    /// Sum of the divergences of single key heads, nats.
    pub kl: f64,
    /// Mean time of attention over exact attention's.
    pub cost: f64,
    /// Share of key heads without exact attention.
    pub changed: f64,
}

/// Returns the points of the whole curve, from exact attention to the fastest choice.
pub(super) fn curve(hulls: &[Vec<Point>]) -> Vec<CurvePoint> {
    let n = hulls.len().max(1) as f64;
    let most: f64 = hulls.iter().filter_map(|h| h.last()).map(|p| p.kl).sum();
    let mut points: Vec<CurvePoint> = Vec::new();
    let budgets = std::iter::once(0.0).chain((0..=24).map(|i| most * 10f64.powf(f64::from(i) / 4.0 - 6.0)));
    for budget in budgets {
        let picks = choose(hulls, budget);
        let point = CurvePoint {
            kl: picks.iter().map(|p| p.kl).sum(),
            cost: picks.iter().map(|p| p.cost).sum::<f64>() / n,
            changed: picks.iter().filter(|p| p.candidate.is_some()).count() as f64 / n,
        };
        if points.last().is_none_or(|last| point.cost < last.cost) {
            points.push(point);
        }
    }
    points
}

/// Formats the curve for the evidence of a recipe: `kl:cost` pairs.
pub(super) fn words(points: &[CurvePoint]) -> String {
    points.iter().map(|p| format!("{:.3e}:{:.4}", p.kl, p.cost)).collect::<Vec<_>>().join(" ")
}

/// Parses the output of [`words`]; malformed pairs are left out.
pub(crate) fn read(words: &str) -> Vec<(f64, f64)> {
    let pair = |w: &str| w.split_once(':').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
    words
        .split_whitespace()
        .filter_map(pair)
        .filter(|p: &(f64, f64)| p.0.is_finite() && p.1.is_finite())
        .collect()
}

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 400.0;
const MARGIN: f64 = 56.0;

/// Draws the curve: predicted points as a line, recipes checked on other text as dots, the chosen one filled.
pub fn picture(tuned: &Tuned) -> String {
    let line: Vec<(f64, f64)> = tuned.curve.iter().map(|p| (p.kl, p.cost)).collect();
    let dot = |(i, r): (usize, &Round)| {
        let kl = r.check.as_ref()?.kl_mean;
        (kl > 0.0).then_some((kl, r.cost, tuned.chosen == Some(i)))
    };
    let dots: Vec<(f64, f64, bool)> = tuned.rounds.iter().enumerate().filter_map(dot).collect();
    let title = format!("{} reading {}, {} tokens", tuned.model, tuned.text, tuned.tokens);
    draw(&line, &dots, &title)
}

pub(crate) fn draw(line: &[(f64, f64)], dots: &[(f64, f64, bool)], title: &str) -> String {
    let values = || line.iter().map(|p| p.0).chain(dots.iter().map(|d| d.0)).filter(|x| *x > 0.0);
    let lo = values().fold(f64::INFINITY, f64::min).log10().floor().max(-9.0);
    let hi = values().fold(0.0, f64::max).log10().ceil();
    let (lo, hi) = if lo.is_finite() && hi.is_finite() { (lo, hi.max(lo + 1.0)) } else { (-6.0, 0.0) };
    let x = |kl: f64| {
        MARGIN + ((kl.max(1e-300).log10() - lo) / (hi - lo)).clamp(0.0, 1.0) * (WIDTH - 2.0 * MARGIN)
    };
    let y = |cost: f64| HEIGHT - MARGIN - cost.clamp(0.0, 1.0) * (HEIGHT - 2.0 * MARGIN);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"time of attention \
         against divergence\" color=\"#222\"><style>text{{font:11px system-ui,sans-serif;fill:#222}}</style>\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>"
    );
    for p in lo as i32..=hi as i32 {
        let px = x(10f64.powi(p));
        let _ = write!(
            svg,
            "<line x1=\"{px:.1}\" y1=\"{MARGIN}\" x2=\"{px:.1}\" y2=\"{0}\" stroke=\"#8883\"/>\
             <text x=\"{px:.1}\" y=\"{1}\" text-anchor=\"middle\">1e{p}</text>",
            HEIGHT - MARGIN,
            HEIGHT - MARGIN + 16.0
        );
    }
    for tenth in [0, 2, 4, 6, 8, 10] {
        let py = y(f64::from(tenth) / 10.0);
        let _ = write!(
            svg,
            "<line x1=\"{MARGIN}\" y1=\"{py:.1}\" x2=\"{0}\" y2=\"{py:.1}\" stroke=\"#8883\"/>\
             <text x=\"{1}\" y=\"{2:.1}\" text-anchor=\"end\">{3} %</text>",
            WIDTH - MARGIN,
            MARGIN - 6.0,
            py + 4.0,
            10 * tenth
        );
    }
    let path: Vec<String> = line.iter().map(|p| format!("{:.1},{:.1}", x(p.0), y(p.1))).collect();
    let _ = write!(
        svg,
        "<polyline points=\"{}\" fill=\"none\" stroke=\"#0072b2\" stroke-width=\"2\"/>",
        path.join(" ")
    );
    for (kl, cost, taken) in dots {
        let fill = if *taken { "#d55e00" } else { "none" };
        let _ = write!(
            svg,
            "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"4.5\" fill=\"{fill}\" stroke=\"#d55e00\" stroke-width=\"1.5\">\
             <title>KL {kl:.2e}, time {:.0} %</title></circle>",
            x(*kl),
            y(*cost),
            100.0 * cost
        );
    }
    let _ = write!(
        svg,
        "<text x=\"{0}\" y=\"20\" text-anchor=\"middle\">{1}</text>\
         <text x=\"{0}\" y=\"{2}\" text-anchor=\"middle\">divergence from exact attention, nats: predicted (line), on other text \
         (rings; filled: taken)</text>\
         <text transform=\"translate(14 {3}) rotate(-90)\" text-anchor=\"middle\">time of attention</text></svg>",
        WIDTH / 2.0,
        escape(title),
        HEIGHT - 10.0,
        HEIGHT / 2.0
    );
    svg + "\n"
}

#[cfg(test)]
mod tests {
    use super::super::choose::hull;
    use super::*;

    #[test]
    fn the_curve_falls_from_exact_attention_to_the_fastest() {
        let p = |cost, kl| Point { candidate: Some(0), cost, kl };
        let hulls =
            vec![hull(&[Point::EXACT, p(0.5, 1e-4), p(0.2, 1e-2)]), hull(&[Point::EXACT, p(0.4, 1e-3)])];
        let points = curve(&hulls);
        assert_eq!((points[0].cost, points[0].kl, points[0].changed), (1.0, 0.0, 0.0));
        assert!((points.last().unwrap().cost - 0.3).abs() < 1e-12);
        assert!(points.windows(2).all(|w| w[1].cost < w[0].cost && w[1].kl > w[0].kl));
        let again = read(&words(&points));
        assert_eq!(again.len(), points.len());
        assert!((again[1].1 - points[1].cost).abs() < 1e-3);
        let svg = draw(&again, &[(1e-3, 0.4, true)], "a <model>");
        assert!(svg.contains("a &lt;model&gt;") && svg.contains("<polyline") && svg.contains("#d55e00"));
        assert!(read("nonsense 1:x 2e-3:0.5") == [(2e-3, 0.5)]);
    }
}
