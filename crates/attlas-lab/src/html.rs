//! A comparison as one self-contained page: a plot of error against time, and the table. No script, no network.

use crate::compare::Comparison;
use crate::compare::curves::{Curve, CurvePoint};
use crate::table::{Table, count, number, seconds};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Returns the page of a comparison.
pub fn comparison(c: &Comparison) -> String {
    let rows = table_rows(&c.table());
    let refused: String = c
        .refused
        .iter()
        .map(|r| format!("<li>{}: {}</li>", escape(r.method), escape(&r.reasons.join("; "))))
        .collect();
    let refused = if refused.is_empty() { refused } else { format!("<h2>Refused</h2><ul>{refused}</ul>") };
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n<title>attlas: {source}</title>\n<style>{STYLE}</style>\
         </head><body>\n<h1>Error against time</h1>\n<p>{origin}</p>\n<p>Mask {mask}, {heads}, {threads}, {isa}, {seeds}. \
         Exact attention takes {exact}, {gflops} GF/s.</p>\n<p><b>{verdict}</b> {fallbacks}</p>\n{plot}\n{curves}<p>{legend}</p>\n<p>Relative Frobenius error and seconds of set-up \
         and run, all heads together, both axes logarithmic, an error of zero on the lowest line. The line joins what nothing \
         beats in both, exact attention and the mean of the values included; the dashed one is the time of exact attention. \
         Rings are methods whose settings cover everything at this length: they computed exact attention.</p>\n<table>\n{rows}</table>\n<p>error: mean; sure: upper bound from exact \
         attention on sampled rows; faster: exact over set-up and run; keys: share of scores computed; mean_v: the mean of \
         the visible values.</p>\n{refused}\n</body></html>\n",
        source = escape(&c.source),
        mask = c.mask,
        origin = escape(&origin(&c.source, &c.metadata)),
        heads = count(c.exact.heads.len(), "head"),
        threads = count(c.threads, "thread"),
        isa = escape(&c.isa),
        seeds = count(c.seeds, "seed"),
        verdict = escape(&c.verdict),
        fallbacks = escape(&c.fallbacks().unwrap_or_default()),
        legend = FAMILIES
            .map(|f| format!("<span style=\"color:{}\">●</span> {}", colour(f), f.replace('_', " ")))
            .join(" "),
        exact = seconds(c.exact.run_seconds),
        gflops = number(c.exact.gflops),
        plot = plot(c),
        curves = match c.curves.is_empty() {
            true => String::new(),
            false => format!(
                "<h2>Over a range of scores</h2>\n{}<p>Dashed: as published; whole: beside sinks and a window, or with a near field of its own.</p>\n",
                self::curves(&c.curves)
            ),
        },
    )
}

/// Returns the rows of a table, titles first.
pub(crate) fn table_rows(table: &Table) -> String {
    let mut rows = String::new();
    for line in table.markdown().lines() {
        // The cells come from the table's Markdown form: titles, a rule, then rows.
        if line.starts_with("| ---") {
            continue;
        }
        let tag = if rows.is_empty() { "th" } else { "td" };
        let cells = line.trim_start_matches("| ").trim_end_matches(" |").split(" | ");
        let cells: String = cells.map(|cell| format!("<{tag}>{}</{tag}>", escape(cell))).collect();
        let _ = writeln!(rows, "<tr>{cells}</tr>");
    }
    rows
}

pub(crate) const STYLE: &str = ":root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;max-width:56rem;margin:2rem auto;\
padding:0 1rem}svg{width:100%;height:auto}svg text{font:11px system-ui,sans-serif;fill:currentColor}table{border-collapse:\
collapse;font-variant-numeric:tabular-nums}th,td{padding:.15rem .6rem;text-align:right;border-bottom:1px solid #8884}\
th:first-child,td:first-child{text-align:left}";

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 460.0;
const MARGIN: f64 = 56.0;

/// A logarithmic axis between whole powers of ten.
struct Axis {
    lo: f64,
    hi: f64,
    /// The lowest power stands for zero.
    zero: bool,
}

impl Axis {
    fn around(values: impl Iterator<Item = f64> + Clone) -> Self {
        let lo = values.clone().fold(f64::INFINITY, f64::min).log10().floor();
        let hi = values.fold(0.0, f64::max).log10().ceil();
        if lo.is_finite() && hi.is_finite() {
            Self { lo, hi: hi.max(lo + 1.0), zero: false }
        } else {
            Self { lo: -3.0, hi: 0.0, zero: false }
        }
    }

    /// Adds one more power below, which stands for zero.
    fn with_zero(self) -> Self {
        Self { lo: self.lo - 1.0, zero: true, ..self }
    }

    /// Returns the position of `x`: 0 at the lower end, 1 at the upper.
    fn place(&self, x: f64) -> f64 {
        ((x.log10() - self.lo) / (self.hi - self.lo)).clamp(0.0, 1.0)
    }

    fn powers(&self) -> impl Iterator<Item = f64> {
        let (lowest, zero) = (self.lo as i32, self.zero);
        (lowest..=self.hi as i32).map(move |p| if zero && p == lowest { 0.0 } else { 10f64.powi(p) })
    }
}

/// One method, or exact attention, in the plot.
struct Point<'a> {
    name: &'a str,
    family: &'a str,
    /// Mean, smallest and largest.
    error: [f64; 3],
    seconds: f64,
    front: bool,
    /// True if its settings made it exact attention.
    fell_back: bool,
}

/// Returns every method with a finite error, and exact attention, ordered by time.
fn points(c: &Comparison) -> Vec<Point<'_>> {
    let exact = Point {
        name: c.exact.method,
        family: "exact",
        error: [0.0; 3],
        seconds: c.exact.run_seconds,
        front: true,
        fell_back: false,
    };
    let methods = c.summary.iter().filter(|s| s.rel_fro.mean.is_finite()).map(|s| Point {
        name: s.method,
        family: s.family,
        error: [s.rel_fro.mean, s.rel_fro.lo, s.rel_fro.hi],
        seconds: s.seconds(),
        front: s.front,
        fell_back: s.fell_back(),
    });
    let mut points: Vec<Point<'_>> =
        std::iter::once(exact).chain(methods).filter(|p| p.seconds > 0.0).collect();
    points.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
    points
}

/// Plots error against time. Errors of zero, which have no logarithm, lie on a separate line below the others.
fn plot(c: &Comparison) -> String {
    let points = points(c);
    let x = Axis::around(points.iter().map(|p| p.seconds));
    let y = Axis::around(points.iter().map(|p| p.error[0]).filter(|e| *e > 0.0)).with_zero();
    let at_x = |t: f64| MARGIN + x.place(t) * (WIDTH - 2.0 * MARGIN);
    let at_y = |e: f64| HEIGHT - MARGIN - y.place(e) * (HEIGHT - 2.0 * MARGIN);
    let mut svg =
        format!("<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"error against time\">");
    let (left, right, top, bottom) = (MARGIN, WIDTH - MARGIN, MARGIN, HEIGHT - MARGIN);
    for t in x.powers() {
        let px = at_x(t);
        let _ = write!(
            svg,
            "<line x1=\"{px:.1}\" y1=\"{top}\" x2=\"{px:.1}\" y2=\"{bottom}\" stroke=\"#8883\"/>"
        );
        let label = seconds(t);
        let _ = write!(
            svg,
            "<text x=\"{px:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{label}</text>",
            bottom + 16.0
        );
    }
    for e in y.powers() {
        let py = at_y(e);
        // The lowest line is zero.
        let (label, dashes) = match e {
            0.0 => ("0".into(), " stroke-dasharray=\"2 3\""),
            e => (format!("{e:e}"), ""),
        };
        let _ = write!(
            svg,
            "<line x1=\"{left}\" y1=\"{py:.1}\" x2=\"{right}\" y2=\"{py:.1}\" stroke=\"#8883\"{dashes}/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>",
            left - 6.0,
            py + 4.0
        );
    }
    let px = at_x(c.exact.run_seconds);
    let _ = write!(
        svg,
        "<line x1=\"{px:.1}\" y1=\"{top}\" x2=\"{px:.1}\" y2=\"{bottom}\" stroke=\"currentColor\" stroke-dasharray=\"4 4\"/>"
    );
    let front: Vec<String> = points
        .iter()
        .filter(|p| p.front)
        .map(|p| format!("{:.1},{:.1}", at_x(p.seconds), at_y(p.error[0])))
        .collect();
    let _ = write!(
        svg,
        "<polyline points=\"{}\" fill=\"none\" stroke=\"{FRONT}\" stroke-width=\"2\"/>",
        front.join(" ")
    );
    let mut labels = Labels::default();
    for p in &points {
        labels.avoid(at_x(p.seconds), at_y(p.error[0]));
    }
    for p in &points {
        let (px, py) = (at_x(p.seconds), at_y(p.error[0]));
        let (lo, hi) = (at_y(p.error[1]), at_y(p.error[2]));
        let colour = colour(p.family);
        // A ring marks methods that computed exact attention.
        let fill = if p.fell_back { "none" } else { colour };
        let (tx, ty) = labels.place(px, py, p.name.len());
        // A name that is not directly beside its point gets a line to it.
        let edge = (px.clamp(tx, tx + 6.2 * p.name.len() as f64), py.clamp(ty - 9.0, ty + 2.0));
        if (edge.0 - px).hypot(edge.1 - py) > 12.0 {
            let _ = write!(
                svg,
                "<line x1=\"{px:.1}\" y1=\"{py:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"#8886\"/>",
                edge.0, edge.1
            );
        }
        let shown = if p.fell_back { "exact at this length".into() } else { number(p.error[0]) };
        let _ = write!(
            svg,
            "<g>\
             <line x1=\"{px:.1}\" y1=\"{lo:.1}\" x2=\"{px:.1}\" y2=\"{hi:.1}\" stroke=\"{colour}\"/>\
             <circle cx=\"{px:.1}\" cy=\"{py:.1}\" r=\"4\" fill=\"{fill}\" stroke=\"{colour}\" stroke-width=\"1.5\">\
             <title>{name}: {shown}, {time}</title></circle>\
             <text x=\"{tx:.1}\" y=\"{ty:.1}\">{name}</text></g>",
            name = escape(p.name),
            time = seconds(p.seconds),
        );
    }
    let heads = match c.exact.heads.len() {
        1 => "one head".into(),
        n => format!("all {n} heads together"),
    };
    let _ = write!(
        svg,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">time of {heads}, set-up included</text>\
         <text transform=\"translate(14 {:.1}) rotate(-90)\" text-anchor=\"middle\">relative error (Frobenius)</text>",
        WIDTH / 2.0,
        HEIGHT - 8.0,
        HEIGHT / 2.0,
    );
    svg + "</svg>"
}

/// The colour of the front: that of no family.
const FRONT: &str = "#cc79a7";

/// Returns the plot alone, as a self-contained picture.
pub fn picture(c: &Comparison) -> String {
    let style = "<style>text{font:11px system-ui,sans-serif;fill:#222}</style><rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>";
    let mut legend = String::new();
    for (i, family) in FAMILIES.into_iter().enumerate() {
        let x = MARGIN + 110.0 * i as f64;
        let fill = colour(family);
        let _ = write!(
            legend,
            "<circle cx=\"{x:.1}\" cy=\"14\" r=\"4\" fill=\"{fill}\"/><text x=\"{:.1}\" y=\"18\">{family}</text>",
            x + 8.0
        );
    }
    let open = plot(c).replacen("<svg ", "<svg xmlns=\"http://www.w3.org/2000/svg\" color=\"#222\" ", 1);
    let body = open.find('>').map_or(0, |i| i + 1);
    format!("{}{style}{legend}{}\n", &open[..body], &open[body..])
}

const FAMILIES: [&str; 5] = ["exact", "clustering", "low_rank", "kernel", "baseline"];

/// Describes the origin of a page: model and text, machine, version and date.
pub(crate) fn origin(source: &str, metadata: &BTreeMap<String, String>) -> String {
    let known = |key: &str| metadata.get(key).filter(|v| !v.is_empty() && !source.contains(v.as_str()));
    let named = |key: &str| known(key).map(|v| format!(", {key} {v}")).unwrap_or_default();
    format!(
        "{source}{}{}; {}; attlas {}, {}",
        named("model"),
        named("text"),
        crate::machine::processor(),
        env!("CARGO_PKG_VERSION"),
        crate::machine::date()
    )
}

/// Returns the colour of a family, distinguishable in print and by the colour-blind (Okabe and Ito's palette).
fn colour(family: &str) -> &'static str {
    match family {
        // Black on white, white where the page is dark.
        "exact" => "currentColor",
        "clustering" => "#0072b2",
        "low_rank" => "#009e73",
        "kernel" => "#d55e00",
        _ => "#888888",
    }
}

/// Placement of names beside their points; names avoid points and other names if there is room.
#[derive(Default)]
struct Labels {
    taken: Vec<[f64; 4]>,
}

impl Labels {
    fn avoid(&mut self, x: f64, y: f64) {
        self.taken.push([x - 4.0, y - 4.0, x + 4.0, y + 4.0]);
    }

    fn place(&mut self, x: f64, y: f64, letters: usize) -> (f64, f64) {
        let (width, height) = (6.2 * letters as f64, 11.0);
        let near = [(7.0, 4.0), (-7.0 - width, 4.0), (-width / 2.0, -8.0), (-width / 2.0, 17.0)];
        // A second column on either side.
        let sides = [near[0], near[1], near[2], near[3], (12.0 + width, 4.0), (-12.0 - 2.0 * width, 4.0)];
        // Positions move further up and down, as far as a line to the point can be followed.
        let lifts = (0..=24).map(|i: i32| 11.0 * f64::from(if i % 2 == 1 { -(i + 1) / 2 } else { i / 2 }));
        let boxes = lifts.flat_map(|lift| sides.iter().map(move |(dx, dy)| (x + dx, y + dy + lift)));
        let free = |&(tx, ty): &(f64, f64)| {
            let (x0, y0, x1, y1) = (tx, ty - height + 2.0, tx + width, ty + 2.0);
            x0 > 0.0
                && x1 < WIDTH
                && y0 > 24.0
                && y1 < HEIGHT - 24.0
                && !self.taken.iter().any(|t| x0 < t[2] && t[0] < x1 && y0 < t[3] && t[1] < y1)
        };
        let (tx, ty) = boxes.clone().find(free).unwrap_or((x + 7.0, y + 4.0));
        self.taken.push([tx, ty - height + 2.0, tx + width, ty + 2.0]);
        (tx, ty)
    }
}

pub(crate) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Left edges of the two panels.
const PANELS: [f64; 2] = [60.0, 500.0];
const PANEL: f64 = 340.0;

/// Plots error against the share of scores, and against time over exact attention's. Curves are dashed for methods as
/// published, solid with an added or built-in near field. Exact attention is at 1; an error of zero lies on the lowest
/// line.
pub fn curves(curves: &[Curve]) -> String {
    const WIDTH: f64 = 900.0;
    const HEIGHT: f64 = 440.0;
    let (top, bottom) = (30.0, HEIGHT - 60.0);
    let y = |e: f64| bottom - ((e.max(1e-4).log10() + 4.0) / 4.0).clamp(0.0, 1.0) * (bottom - top);
    let x = |panel: usize, share: f64| {
        PANELS[panel] + ((share.max(1e-2).log10() + 2.0) / 3.0).clamp(0.0, 1.0) * PANEL
    };
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"error against scores \
         and time\" color=\"#222\"><style>text{{font:11px system-ui,sans-serif;fill:#222}}</style>\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>"
    );
    for (panel, name) in ["share of the scores", "time over exact attention's"].iter().enumerate() {
        for share in [0.01, 0.1, 1.0, 10.0] {
            let px = x(panel, share);
            let _ = write!(
                svg,
                "<line x1=\"{px:.1}\" y1=\"{top}\" x2=\"{px:.1}\" y2=\"{bottom}\" stroke=\"#8883\"/>\
                 <text x=\"{px:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{share}</text>",
                bottom + 16.0
            );
        }
        for e in [1e-4, 1e-3, 1e-2, 1e-1, 1.0] {
            let label = if e < 2e-4 { "0".into() } else { format!("{e}") };
            let _ = write!(
                svg,
                "<line x1=\"{0}\" y1=\"{1:.1}\" x2=\"{2}\" y2=\"{1:.1}\" stroke=\"#8883\"/>\
                 <text x=\"{3}\" y=\"{4:.1}\" text-anchor=\"end\">{label}</text>",
                PANELS[panel],
                y(e),
                PANELS[panel] + PANEL,
                PANELS[panel] - 6.0,
                y(e) + 4.0
            );
        }
        let _ = write!(
            svg,
            "<circle cx=\"{:.1}\" cy=\"{bottom}\" r=\"5\" fill=\"currentColor\"><title>exact attention</title></circle>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{name}</text>",
            x(panel, 1.0),
            PANELS[panel] + PANEL / 2.0,
            HEIGHT - 14.0
        );
        for c in curves {
            let at = |p: &CurvePoint| if panel == 0 { p.keys_share } else { 1.0 / p.speedup };
            let points: Vec<String> =
                c.points.iter().map(|p| format!("{:.1},{:.1}", x(panel, at(p)), y(p.error))).collect();
            let own = !c.near && curves.iter().any(|o| o.method == c.method && o.near);
            let dashes = if own { " stroke-dasharray=\"4 3\"" } else { "" };
            let colour = colour(c.family);
            let label =
                if c.near { format!("{} beside a near field", c.method) } else { c.method.to_string() };
            let _ = write!(
                svg,
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\"{dashes}><title>{label}</title>\
                 </polyline>",
                points.join(" ")
            );
            if let Some(last) = c.points.last().filter(|p| p.error < 0.3) {
                let _ = write!(
                    svg,
                    "<text x=\"{:.1}\" y=\"{:.1}\">{}</text>",
                    x(panel, at(last)) + 4.0,
                    y(last.error) + 3.0,
                    escape(c.method)
                );
            }
        }
    }
    svg + "</svg>\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::Run;
    use crate::select::Choice;

    #[test]
    fn the_page_shows_every_method_and_loads_nothing() {
        let workload = "synthetic:clustered,n=64,d=8".parse::<crate::Source>().unwrap().load().unwrap();
        let selection = Choice {
            methods: vec!["top_k".into(), "sink_window".into()],
            set: vec!["top_k.keys=8".into()],
            family: None,
        };
        let selection = selection.resolve().unwrap();
        let settings = Default::default();
        let c =
            Run::silent(0, 0, |run| crate::compare::compare(&workload, &selection, &settings, run)).unwrap();
        let page = comparison(&c);
        assert!(page.starts_with("<!doctype html>") && page.ends_with("</html>\n"));
        assert!(page.contains("<td>sink_window</td>") && page.contains("<td>top_k</td>"));
        // top_k has an error; sink_window covers everything, is exact, and stands on the line of zero as exact attention does.
        assert!(page.contains("<title>top_k: ") && page.contains("<title>mean_v: "));
        assert!(
            page.contains("<title>sink_window: exact at this length") && page.contains("<title>exact: 0, ")
        );
        assert!(page.contains("time of one head, set-up included") && page.contains(&c.verdict));
        assert!(page.contains(concat!("attlas ", env!("CARGO_PKG_VERSION"))), "what made it");
        assert!(!FAMILIES.iter().any(|f| colour(f) == FRONT));
        assert!(!page.contains("http") && !page.contains("<script"));
    }

    #[test]
    fn names_do_not_cover_each_other() {
        let mut labels = Labels::default();
        let places: Vec<_> = (0..40).map(|_| labels.place(300.0, 200.0, 10)).collect();
        for (i, a) in places.iter().enumerate() {
            for b in &places[..i] {
                assert!((a.0 - b.0).abs() >= 62.0 || (a.1 - b.1).abs() >= 11.0, "{a:?} {b:?}");
            }
        }
    }

    #[test]
    fn curves_have_a_line_in_both_panels() {
        let point = |error, keys_share| CurvePoint {
            params: attlas::Options::new(),
            error,
            keys_share,
            speedup: 2.0,
        };
        let curve = |near| Curve {
            method: "hyper",
            family: "clustering",
            near,
            points: vec![point(0.2, 0.1), point(0.0, 0.3)],
        };
        let svg = curves(&[curve(false), curve(true)]);
        assert_eq!((svg.matches("<polyline").count(), svg.matches("stroke-dasharray").count()), (4, 2));
    }

    #[test]
    fn axes_span_whole_decades() {
        let a = Axis::around([0.02, 0.5].into_iter());
        assert_eq!((a.lo, a.hi, a.powers().count()), (-2.0, 0.0, 3));
        assert_eq!((a.place(0.01), a.place(1.0), a.place(0.1)), (0.0, 1.0, 0.5));
        let b = a.with_zero();
        assert_eq!((b.place(0.0), b.powers().next(), b.powers().count()), (0.0, Some(0.0), 4));
        let empty = Axis::around(std::iter::empty());
        assert!(empty.lo < empty.hi);
    }
}
