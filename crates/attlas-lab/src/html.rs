//! A comparison as one self-contained page: a plot of error against time, and the table. No script, no network.

use crate::compare::{Comparison, Summary};
use crate::table::{Table, number, seconds};
use std::fmt::Write;

/// The page.
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
         </head><body>\n<h1>Error against time</h1>\n<p>{source}; mask {mask}, {heads} heads, {threads} threads, {isa}, {seeds} \
         seeds. Exact attention takes {exact}, {gflops} GF/s.</p>\n{plot}\n<p>Relative Frobenius error and seconds of set-up \
         and run, all heads together, both axes logarithmic. The line joins the methods that no other beats in both; the \
         dashed one is the time of exact attention.</p>\n<table>\n{rows}</table>\n<p>error: mean; sure: upper bound from exact \
         attention on sampled rows; faster: exact over set-up and run; keys: share of scores computed; mean_v: the mean of \
         the visible values.</p>\n{refused}\n</body></html>\n",
        source = escape(&c.source),
        mask = c.mask,
        heads = c.exact.heads.len(),
        threads = c.threads,
        isa = escape(&c.isa),
        seeds = c.seeds,
        exact = seconds(c.exact.run_seconds),
        gflops = number(c.exact.gflops),
        plot = plot(c),
    )
}

/// The rows of a table, titles first.
pub(crate) fn table_rows(table: &Table) -> String {
    let mut rows = String::new();
    for line in table.markdown().lines() {
        // The table's own Markdown form is the source of its cells: titles, a rule, then rows.
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

/// An axis in logarithms, between whole powers of ten.
struct Axis {
    lo: f64,
    hi: f64,
}

impl Axis {
    fn around(values: impl Iterator<Item = f64> + Clone) -> Self {
        let lo = values.clone().fold(f64::INFINITY, f64::min).log10().floor();
        let hi = values.fold(0.0, f64::max).log10().ceil();
        if lo.is_finite() && hi.is_finite() {
            Self { lo, hi: hi.max(lo + 1.0) }
        } else {
            Self { lo: -3.0, hi: 0.0 }
        }
    }

    /// 0 at the lower end, 1 at the upper.
    fn place(&self, x: f64) -> f64 {
        ((x.log10() - self.lo) / (self.hi - self.lo)).clamp(0.0, 1.0)
    }

    fn powers(&self) -> impl Iterator<Item = f64> {
        (self.lo as i32..=self.hi as i32).map(|p| 10f64.powi(p))
    }
}

/// Error against time for every method with a finite error above zero.
fn plot(c: &Comparison) -> String {
    let time = |s: &Summary| s.setup_seconds + s.run_seconds;
    let mut points: Vec<&Summary> = c
        .summary
        .iter()
        .filter(|s| s.rel_fro.mean.is_finite() && s.rel_fro.mean > 0.0 && time(s) > 0.0)
        .collect();
    points.sort_by(|a, b| time(a).total_cmp(&time(b)));
    let x = Axis::around(points.iter().map(|s| time(s)).chain([c.exact.run_seconds]));
    let y = Axis::around(points.iter().map(|s| s.rel_fro.mean));
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
        let _ = write!(
            svg,
            "<line x1=\"{left}\" y1=\"{py:.1}\" x2=\"{right}\" y2=\"{py:.1}\" stroke=\"#8883\"/>"
        );
        let _ = write!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{e:e}</text>",
            left - 6.0,
            py + 4.0
        );
    }
    let px = at_x(c.exact.run_seconds);
    let _ = write!(
        svg,
        "<line x1=\"{px:.1}\" y1=\"{top}\" x2=\"{px:.1}\" y2=\"{bottom}\" stroke=\"currentColor\" stroke-dasharray=\"4 4\"/>\
         <text x=\"{px:.1}\" y=\"{:.1}\" text-anchor=\"middle\">exact</text>",
        top - 6.0
    );
    let mut best = f64::INFINITY;
    let mut front = Vec::new();
    for s in points.iter().filter(|s| s.family != "baseline") {
        if s.rel_fro.mean < best {
            best = s.rel_fro.mean;
            front.push(format!("{:.1},{:.1}", at_x(time(s)), at_y(s.rel_fro.mean)));
        }
    }
    let _ = write!(
        svg,
        "<polyline points=\"{}\" fill=\"none\" stroke=\"#c60\" stroke-width=\"1.5\"/>",
        front.join(" ")
    );
    let mut labels = Labels::default();
    for s in &points {
        labels.avoid(at_x(time(s)), at_y(s.rel_fro.mean));
    }
    for s in &points {
        let (px, py) = (at_x(time(s)), at_y(s.rel_fro.mean));
        let (lo, hi) = (at_y(s.rel_fro.lo.max(10f64.powf(y.lo))), at_y(s.rel_fro.hi));
        let fill = colour(s.family);
        let (tx, ty) = labels.place(px, py, s.method.len());
        let _ = write!(
            svg,
            "<g>\
             <line x1=\"{px:.1}\" y1=\"{lo:.1}\" x2=\"{px:.1}\" y2=\"{hi:.1}\" stroke=\"{fill}\"/>\
             <circle cx=\"{px:.1}\" cy=\"{py:.1}\" r=\"4\" fill=\"{fill}\"><title>{name}: {error}, {time}</title></circle>\
             <text x=\"{tx:.1}\" y=\"{ty:.1}\">{name}</text></g>",
            name = escape(s.method),
            error = number(s.rel_fro.mean),
            time = seconds(time(s)),
        );
    }
    let _ = write!(
        svg,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">seconds per head, set-up included</text>\
         <text transform=\"translate(14 {:.1}) rotate(-90)\" text-anchor=\"middle\">relative error (Frobenius)</text>",
        WIDTH / 2.0,
        HEIGHT - 8.0,
        HEIGHT / 2.0,
    );
    svg + "</svg>"
}

/// The plot alone, as a picture that stands for itself.
pub fn picture(c: &Comparison) -> String {
    let style = "<style>text{font:11px system-ui,sans-serif;fill:#222}</style><rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>";
    let mut legend = String::new();
    for (i, family) in ["exact", "clustering", "low_rank", "kernel", "baseline"].into_iter().enumerate() {
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

/// One colour for each family; told apart in print and by the colour-blind (Okabe and Ito's palette).
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

/// Places names beside their points without covering points or other names, where there is room.
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
        let sides = [(7.0, 4.0), (-7.0 - width, 4.0), (-width / 2.0, -8.0), (-width / 2.0, 17.0)];
        let lifts = [0.0, -9.0, 9.0, -18.0, 18.0, -27.0, 27.0];
        let boxes = lifts.iter().flat_map(|lift| sides.iter().map(move |(dx, dy)| (x + dx, y + dy + lift)));
        let free = |&(tx, ty): &(f64, f64)| {
            let (x0, y0, x1, y1) = (tx, ty - height + 2.0, tx + width, ty + 2.0);
            x0 > 0.0
                && x1 < WIDTH
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::select::Choice;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn the_page_shows_every_method_and_loads_nothing() {
        let workload = "synthetic:clustered,n=64,d=8".parse::<crate::Source>().unwrap().load().unwrap();
        let selection = Choice {
            methods: vec!["top_k".into(), "sink_window".into()],
            set: vec!["top_k.keys=8".into()],
            family: None,
        };
        let selection = selection.resolve().unwrap();
        let stop = AtomicBool::new(false);
        let c =
            crate::compare::compare(&workload, &selection, &Default::default(), &mut |_| (), &stop).unwrap();
        let page = comparison(&c);
        assert!(page.starts_with("<!doctype html>") && page.ends_with("</html>\n"));
        assert!(page.contains("<td>sink_window</td>") && page.contains("<td>top_k</td>"));
        // top_k has an error and is a point; sink_window covers everything, is exact, and has no place on a log axis.
        assert!(page.contains("<title>top_k: ") && page.contains("<title>mean_v: "));
        assert!(!page.contains("http") && !page.contains("<script"));
    }

    #[test]
    fn names_do_not_cover_each_other() {
        let mut labels = Labels::default();
        let places: Vec<_> = (0..5).map(|_| labels.place(300.0, 200.0, 10)).collect();
        for (i, a) in places.iter().enumerate() {
            for b in &places[..i] {
                assert!((a.0 - b.0).abs() >= 62.0 || (a.1 - b.1).abs() >= 11.0, "{a:?} {b:?}");
            }
        }
    }

    #[test]
    fn axes_span_whole_decades() {
        let a = Axis::around([0.02, 0.5].into_iter());
        assert_eq!((a.lo, a.hi, a.powers().count()), (-2.0, 0.0, 3));
        assert_eq!((a.place(0.01), a.place(1.0), a.place(0.1)), (0.0, 1.0, 0.5));
        let empty = Axis::around(std::iter::empty());
        assert!(empty.lo < empty.hi);
    }
}
