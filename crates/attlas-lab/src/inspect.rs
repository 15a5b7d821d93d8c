//! Diagnostics of the heads of a layer: patterns, sinks, spectra, ranks, entropies.
//!
//! [`attlas::diagnostics`] analyses every query head separately and, above a length, stores no matrix of the size of
//! the scores. A head that has non-finite numbers or cannot be decomposed is named and left out; the others are still
//! reported.

use crate::crew::{Alone, Crew};
use crate::figures::{Cell, heat_image, layer_map, spectra_lines};
use crate::html::{STYLE, escape, origin, table_rows};
use crate::run::{Run, timed};
use crate::table::Shown::{Made, Number, Percent, Text};
use crate::table::{Column, Table, count, number, percent, seconds};
use crate::units::{Done, Ledger, share};
use crate::workload::{LayerData, Workload};
use crate::{Error, Result};
use attlas::Mask;
use attlas::diagnostics::{self, AtLeast, Head, HeadReport};
use attlas_model::recipe::Numbers;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write;

/// Settings of an inspection.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// Mask; the workload's own if absent.
    pub mask: Option<Mask>,
    /// Query heads, counted from 0; all if absent.
    pub heads: Option<Numbers>,
    /// Thresholds and sizes.
    pub figures: diagnostics::Settings,
}

/// Result of an inspection.
#[derive(Clone, Debug, Serialize)]
pub struct Inspection {
    /// Source of the inputs.
    pub source: String,
    /// Metadata of the source.
    pub metadata: BTreeMap<String, String>,
    /// Mask of every head.
    pub mask: Mask,
    /// Threads used.
    pub threads: usize,
    /// Thresholds and sizes.
    pub settings: diagnostics::Settings,
    /// Share of the heads that have a sink at their first key.
    pub first_key_sinks: f64,
    /// One for each head.
    pub heads: Vec<Inspected>,
    /// Heads that were left out.
    pub skipped: Vec<SkippedHead>,
    /// The caller asked to stop before every head was inspected.
    pub interrupted: bool,
}

/// One head.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Inspected {
    /// Layer, where the source has layers.
    pub layer: Option<usize>,
    /// Query head.
    pub head: usize,
    /// Key head that it shares.
    pub kv_head: usize,
    /// Seconds it took.
    pub seconds: f64,
    /// The machine that inspected it, if several processes shared the heads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// The findings.
    #[serde(flatten)]
    pub report: HeadReport,
}

/// A head that could not be inspected.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SkippedHead {
    /// Layer, where the source has layers.
    pub layer: Option<usize>,
    /// Query head.
    pub head: usize,
    /// Why.
    pub reason: String,
}

/// Inspects every chosen head.
pub fn inspect(workload: &Workload, settings: &Settings, run: &mut Run<'_>) -> Result<Inspection> {
    inspect_with(workload, settings, &Alone::default(), &mut Ledger::none(), run)
}

/// Findings on one head.
#[derive(Serialize, Deserialize)]
enum Said {
    Head(Box<Inspected>),
    Skipped(SkippedHead),
}

/// Returns everything that determines the figures of a head: two runs with the same key may share heads.
pub fn key(workload: &Workload, settings: &Settings) -> String {
    format!(
        "{} {:?} {:?} {:?} {}",
        workload.hash(),
        settings.mask,
        settings.heads,
        settings.figures,
        env!("CARGO_PKG_VERSION")
    )
}

/// Inspects heads shared among the processes of a crew and kept in a ledger; every process gets all of them.
pub fn inspect_with(
    workload: &Workload,
    settings: &Settings,
    crew: &dyn Crew,
    ledger: &mut Ledger,
    run: &mut Run<'_>,
) -> Result<Inspection> {
    let ws = run.workspace()?;
    let mask = settings.mask.unwrap_or(workload.mask);
    let mut result = Inspection {
        source: workload.source.clone(),
        metadata: workload.metadata.clone(),
        mask,
        threads: ws.schedule().threads,
        settings: settings.figures.clone(),
        first_key_sinks: 0.0,
        heads: Vec::new(),
        skipped: Vec::new(),
        interrupted: false,
    };
    let mut work = Vec::new();
    for layer in &workload.layers {
        if let Some(heads) = &settings.heads {
            heads.check("a head", layer.problem.n_heads)?;
        }
        let wanted = |h: &usize| settings.heads.as_ref().is_none_or(|heads| heads.contains(*h));
        work.extend((0..layer.problem.n_heads).filter(wanted).map(|h| (layer, h)));
    }
    if work.is_empty() {
        return Err(Error::argument("heads", "at least one", "none"));
    }
    let total = work.len();
    let mut look = |unit: usize, at: usize| -> Result<Done<Said>> {
        let (layer, head) = work[unit];
        if run.stopped() {
            return Ok(Done::Stopped);
        }
        let number = layer.layer;
        run.at(at, total, &number.map_or(format!("head {head}"), |l| format!("layer {l}, head {head}")));
        let size = layer.problem.group_size();
        let kv_head = head / size;
        let x = layer.group(kv_head)?;
        let (report, seconds) = timed(|| {
            let q = x.q.head(0, head % size);
            let head = Head::new(q, x.k.head(0, 0), x.v.head(0, 0), layer.problem.scale, mask)?;
            diagnostics::inspect(&head, &settings.figures, &ws)
        });
        Ok(Done::Whole(match report {
            Ok(report) => {
                let node = crew.node();
                Said::Head(Box::new(Inspected { layer: number, head, kv_head, seconds, node, report }))
            }
            Err(e) => Said::Skipped(SkippedHead { layer: number, head, reason: e.to_string() }),
        }))
    };
    let weight = |layer: &LayerData| (layer.problem.n_q * layer.problem.n_k) as u64;
    let weights: Vec<u64> = work.iter().map(|(layer, _)| weight(layer)).collect();
    let shared = share(crew, ledger, &weights, &mut look)?;
    result.interrupted = shared.interrupted;
    for (said, _) in shared.records.into_iter().flatten() {
        match said {
            Said::Head(head) => result.heads.push(*head),
            Said::Skipped(head) => result.skipped.push(head),
        }
    }
    let with = result.heads.iter().filter(|h| h.report.weights.sinks.iter().any(|s| s.key == 0)).count();
    result.first_key_sinks = with as f64 / result.heads.len().max(1) as f64;
    Ok(result)
}

/// Formats a rank, with `>` if it is only a lower bound.
fn rank(r: AtLeast) -> String {
    format!("{}{}", if r.open { ">" } else { "" }, r.value)
}

/// A quantity drawn over layers and heads.
pub(crate) struct Figure {
    pub(crate) name: &'static str,
    /// Number format: `count`, `number` or `share`.
    pub(crate) kind: &'static str,
    pub(crate) of: fn(&HeadReport) -> f64,
    /// Returns true if the value is only a lower bound.
    pub(crate) open: fn(&HeadReport) -> bool,
}

impl Figure {
    const fn known(name: &'static str, kind: &'static str, of: fn(&HeadReport) -> f64) -> Self {
        Self { name, kind, of, open: |_| false }
    }

    fn shown(&self, r: &HeadReport) -> String {
        let x = (self.of)(r);
        match self.kind {
            "count" => rank(AtLeast { value: x as usize, open: (self.open)(r) }),
            "share" => percent(x),
            _ => number(x),
        }
    }
}

pub(crate) const FIGURES: [Figure; 8] = [
    Figure {
        name: "rank of Z⁻¹A at 90 %",
        kind: "count",
        of: |r| r.spectra.weights.variance_rank.value as f64,
        open: |r| r.spectra.weights.variance_rank.open,
    },
    Figure::known("stable rank of Z⁻¹A", "number", |r| r.spectra.weights.stable_rank),
    Figure::known("keys that hold 90 % of a row", "number", |r| r.weights.keys_for_mass[0].keys.mean),
    Figure::known("mass of the 64 largest weights", "share", |r| r.weights.mass_of_top[3].mass.mean),
    Figure::known("entropy of rows, nats", "number", |r| r.weights.entropy.mean),
    Figure::known("weights below 1 % of their row's largest", "share", |r| r.weights.below[1].1),
    Figure::known("mean weight of the first key", "share", |r| {
        r.weights.mean_weight.first().copied().unwrap_or(0.0)
    }),
    Figure {
        name: "rank of QKᵀ at 90 %",
        kind: "count",
        of: |r| r.spectra.qk.variance_rank.value as f64,
        open: |r| r.spectra.qk.variance_rank.open,
    },
];

/// Column of a rank, with its title in tables and its name in files.
const fn rank_column(title: &'static str, at: &'static str) -> Column {
    Column::table(
        title,
        at,
        Made(|r| rank(AtLeast::deserialize(r).unwrap_or(AtLeast { value: 0, open: true }))),
    )
}

const COLUMNS: [Column; 41] = [
    Column::both("layer", "layer", "/layer", Text),
    Column::both("head", "head", "/head", Text),
    Column::file("kv_head", "/kv_head"),
    Column::file("n_q", "/n_q"),
    Column::file("n_k", "/n_k"),
    Column::file("d", "/d"),
    rank_column("Q", "/spectra/q/variance_rank"),
    rank_column("K", "/spectra/k/variance_rank"),
    rank_column("V", "/spectra/v/variance_rank"),
    rank_column("QK", "/spectra/qk/variance_rank"),
    rank_column("A", "/spectra/scores/variance_rank"),
    rank_column("P", "/spectra/weights/variance_rank"),
    Column::file("rank_q", "/spectra/q/variance_rank/value"),
    Column::file("rank_k", "/spectra/k/variance_rank/value"),
    Column::file("rank_v", "/spectra/v/variance_rank/value"),
    Column::file("rank_qk", "/spectra/qk/variance_rank/value"),
    Column::file("rank_scores", "/spectra/scores/variance_rank/value"),
    Column::file("rank_weights", "/spectra/weights/variance_rank/value"),
    Column::file("rank_scores_is_lower_bound", "/spectra/scores/variance_rank/open"),
    Column::file("rank_weights_is_lower_bound", "/spectra/weights/variance_rank/open"),
    Column::file("stable_rank_scores", "/spectra/scores/stable_rank"),
    Column::both("stable", "stable_rank_weights", "/spectra/weights/stable_rank", Number),
    Column::both("keys", "keys_90", "/weights/keys_for_mass/0/keys/mean", Number),
    Column::file("keys_95", "/weights/keys_for_mass/1/keys/mean"),
    Column::file("keys_99", "/weights/keys_for_mass/2/keys/mean"),
    Column::file("mass_of_top_1", "/weights/mass_of_top/0/mass/mean"),
    Column::file("mass_of_top_4", "/weights/mass_of_top/1/mass/mean"),
    Column::file("mass_of_top_16", "/weights/mass_of_top/2/mass/mean"),
    Column::file("mass_of_top_64", "/weights/mass_of_top/3/mass/mean"),
    Column::file("mass_of_top_256", "/weights/mass_of_top/4/mass/mean"),
    Column::file("mass_of_top_1024", "/weights/mass_of_top/5/mass/mean"),
    Column::both("entropy", "entropy", "/weights/entropy/mean", Number),
    Column::file("below_1e-1", "/weights/below/0/1"),
    Column::both("sparse", "below_1e-2", "/weights/below/1/1", Percent),
    Column::file("below_1e-3", "/weights/below/2/1"),
    Column::table("<sink", "/weights/sinks/0", Made(sink)),
    Column::file("sink_key", "/weights/sinks/0/key"),
    Column::file("sink_weight", "/weights/sinks/0/weight"),
    Column::file("sink_key_norm", "/weights/sinks/0/key_norm"),
    Column::file("sink_value_norm", "/weights/sinks/0/value_norm"),
    Column::file("seconds", "/seconds"),
];

fn sink(s: &Value) -> String {
    s["weight"].as_f64().map_or("-".into(), |weight| format!("{}:{}", s["key"], percent(weight)))
}

impl Inspection {
    /// Returns a table with one line per head.
    pub fn table(&self) -> Table {
        Table::of(&self.heads, &COLUMNS)
    }

    /// Returns the mean share of a row's mass in its largest weights, one line per head.
    pub fn mass_table(&self) -> Table {
        let mut columns = COLUMNS[..2].to_vec();
        columns.extend([
            Column::table("top 1", "/weights/mass_of_top/0/mass/mean", Percent),
            Column::table("top 4", "/weights/mass_of_top/1/mass/mean", Percent),
            Column::table("top 16", "/weights/mass_of_top/2/mass/mean", Percent),
            Column::table("top 64", "/weights/mass_of_top/3/mass/mean", Percent),
            Column::table("top 256", "/weights/mass_of_top/4/mass/mean", Percent),
            Column::table("top 1024", "/weights/mass_of_top/5/mass/mean", Percent),
        ]);
        Table::of(&self.heads, &columns)
    }

    /// Returns a table with all digits and more columns.
    pub fn csv_table(&self) -> Table {
        Table::csv_of(&self.heads, &COLUMNS)
    }

    /// Explains the columns.
    pub fn legend(&self) -> String {
        let s = &self.settings;
        format!(
            "Q to P: singular values that hold {} of the sum of squares, of Q, K, V, QK^T, A = exp(scores) and P = A\n\
             with rows that sum to one; > where only leading ones were computed; stable: squared Frobenius over\n\
             squared spectral norm of P; keys: that hold 90% of a row, mean; entropy: of rows, nats, mean; sparse:\n\
             weights below 1% of their row's largest; sink: key that half of its rows or more give over {} times a\n\
             uniform weight, with its mean weight",
            percent(s.share),
            s.sink
        )
    }

    /// States the number of heads with a sink at their first key, and the definition of a sink.
    pub fn sinks_said(&self) -> String {
        format!(
            "{} have a sink at their first key (half of the rows: over {} x uniform)",
            percent(self.first_key_sinks),
            self.settings.sink
        )
    }

    /// Returns the figures over layers and heads, each with its name.
    fn maps(&self) -> Vec<(&'static str, String)> {
        let cell = |figure: &Figure, h: &Inspected| {
            let (value, label) = ((figure.of)(&h.report), figure.shown(&h.report));
            Cell { layer: h.layer.unwrap_or(0), head: h.head, value, label }
        };
        let cells = |figure: &Figure| self.heads.iter().map(|h| cell(figure, h)).collect::<Vec<Cell>>();
        FIGURES.iter().map(|f| (f.name, layer_map(f.name, &cells(f)))).collect()
    }

    /// Returns patterns and spectra of every head as a self-contained picture.
    pub fn picture(&self) -> String {
        let height = PANEL_HEIGHT * self.heads.len() as f64 + 8.0;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {PANEL_WIDTH} {height}\" color=\"#222\">\
             <style>text{{font:11px system-ui,sans-serif;fill:#222}}</style>\
             <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>"
        );
        for (i, head) in self.heads.iter().enumerate() {
            svg += &head.panel(PANEL_HEIGHT * i as f64);
        }
        svg + "</svg>\n"
    }

    /// Returns a section per layer with the panels of its heads, collapsed if there are many.
    fn sections(&self) -> String {
        let mut out = String::new();
        let open = if self.heads.len() <= 16 { " open" } else { "" };
        for part in self.heads.chunk_by(|a, b| a.layer == b.layer) {
            let name = part[0].layer.map_or("heads".into(), |l| format!("layer {l}"));
            let _ = write!(out, "<details{open}><summary>{name}</summary>");
            for h in part {
                let _ = write!(
                    out,
                    "<svg viewBox=\"0 0 {PANEL_WIDTH} {PANEL_HEIGHT}\" role=\"img\" aria-label=\"{}\">{}</svg>",
                    h.name(),
                    h.panel(0.0)
                );
            }
            out += "</details>\n";
        }
        out
    }

    /// Returns a list of the heads left out; empty if there are none.
    pub(crate) fn skipped_list(&self) -> String {
        if self.skipped.is_empty() {
            return String::new();
        }
        let items: String = self
            .skipped
            .iter()
            .map(|s| format!("<li>{}: {}</li>", place(s.layer, s.head), escape(&s.reason)))
            .collect();
        format!("<h2>Left out</h2><ul>{items}</ul>\n")
    }

    /// Returns the inspection as one self-contained page.
    pub fn page(&self) -> String {
        let maps: String = self
            .maps()
            .into_iter()
            .map(|(name, svg)| format!("<figure><figcaption>{name}</figcaption>{svg}</figure>"))
            .collect();
        format!(
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
             <meta name=\"viewport\" content=\"width=device-width\">\n<title>attlas: inside {source}</title>\n\
             <style>{STYLE}{MAP_STYLE}</style></head><body>\n<h1>Inside the heads</h1>\n\
             <p>{origin}</p>\n<p>Mask {mask}, {heads}. {sinks}.</p>\n\
             <h2>Layers and heads</h2><div class=\"maps\">{maps}</div>\n<h2>Figures</h2>\n<table>\n{rows}</table>\n\
             <p>{legend}</p>\n<h2>Mass of the largest weights of a row</h2>\n<table>\n{masses}</table>\n{skipped}<h2>Patterns and spectra</h2>\n<p>{caption}</p>\n{sections}</body></html>\n",
            source = escape(&self.source),
            mask = self.mask,
            origin = escape(&origin(&self.source, &self.metadata)),
            heads = count(self.heads.len(), "head"),
            sinks = escape(&self.sinks_said()),
            rows = table_rows(&self.table()),
            legend = escape(&self.legend()),
            masses = table_rows(&self.mass_table()),
            skipped = self.skipped_list(),
            caption = CAPTION,
            sections = self.sections(),
        )
    }
}

/// Captions of the panels.
const CAPTION: &str = "Left: the first rows and keys of Z⁻¹A, each row over its largest weight. Middle: all of \
it, averaged over blocks. Both on a logarithmic scale of four decades. Right: singular values over the largest one, \
against their number, both axes logarithmic.";

const MAP_STYLE: &str = ".maps{display:flex;flex-wrap:wrap;gap:1rem}figure{margin:0;flex:1 1 16rem}\
svg.map{display:block}g:focus{outline:none}g:focus rect{stroke:currentColor;stroke-width:2}table{display:block;\
overflow-x:auto}@media print{details::details-content{content-visibility:visible}}";

const PANEL_WIDTH: f64 = 720.0;
const PANEL_HEIGHT: f64 = 190.0;

fn place(layer: Option<usize>, head: usize) -> String {
    layer.map_or(format!("head {head}"), |l| format!("layer {l}, head {head}"))
}

impl SkippedHead {
    /// Names the head and the reason in one line.
    pub fn line(&self) -> String {
        format!("{} left out: {}", place(self.layer, self.head), self.reason)
    }
}

impl Inspected {
    pub(crate) fn name(&self) -> String {
        place(self.layer, self.head)
    }

    /// Draws leading block, whole matrix and spectra side by side, from `top` downwards.
    fn panel(&self, top: f64) -> String {
        let r = &self.report;
        let w = &r.weights;
        let (y, side) = (top + 24.0, 160.0);
        let captions = [
            (8.0, format!("{}: first {} tokens", self.name(), w.leading.cols)),
            (190.0, format!("all {} tokens", r.n_k)),
            (
                400.0,
                format!(
                    "rank {} of Z⁻¹A, {} keys for 90 %, {}",
                    rank(r.spectra.weights.variance_rank),
                    number(r.weights.keys_for_mass[0].keys.mean),
                    seconds(self.seconds)
                ),
            ),
        ];
        let mut svg = String::new();
        for (x, caption) in captions {
            let _ = write!(svg, "<text x=\"{x}\" y=\"{:.1}\">{}</text>", top + 17.0, escape(&caption));
        }
        svg += &heat_image(&w.leading, 8.0, y, side, "first rows and keys");
        svg += &heat_image(&w.map, 190.0, y, side, "all rows and keys");
        svg + &spectra_lines(&r.spectra, 400.0, y, 270.0, side)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::Progress;
    use std::sync::atomic::{AtomicBool, Ordering};

    fn look(source: &str, settings: &Settings) -> Result<Inspection> {
        let workload = source.parse::<crate::Source>()?.load()?;
        Run::silent(0, 0, |run| inspect(&workload, settings, run))
    }

    const SMALL: &str = "synthetic:clustered,n=80,d=8,heads=4,kv_heads=2";

    #[test]
    fn every_chosen_head_is_looked_at_with_its_own_key_head() {
        let all = look(SMALL, &Settings::default()).unwrap();
        let places: Vec<_> = all.heads.iter().map(|h| (h.head, h.kv_head)).collect();
        assert_eq!(places, [(0, 0), (1, 0), (2, 1), (3, 1)]);
        let settings = Settings { heads: Some("3".parse().unwrap()), ..Settings::default() };
        let one = look(SMALL, &settings).unwrap();
        assert_eq!(one.heads.len(), 1);
        assert_eq!(one.heads[0].report, all.heads[3].report);
        assert!(all.heads[0].report != all.heads[3].report);
        let beyond = Settings { heads: Some("4".parse().unwrap()), ..Settings::default() };
        assert!(look(SMALL, &beyond).unwrap_err().to_string().contains("0 to 3"));
    }

    #[test]
    fn a_head_that_is_not_finite_is_named_and_the_others_are_reported() {
        let mut workload = SMALL.parse::<crate::Source>().unwrap().load().unwrap();
        let p = workload.layers[0].problem;
        workload.layers[0].q[p.n_q * p.d + 3] = f32::NAN;
        workload.layers[0].v[p.n_k * p.d_v] = f32::INFINITY;
        let found = Run::silent(0, 0, |run| inspect(&workload, &Settings::default(), run)).unwrap();
        assert_eq!(found.heads.iter().map(|h| h.head).collect::<Vec<_>>(), [0]);
        assert_eq!(found.skipped.iter().map(|s| s.head).collect::<Vec<_>>(), [1, 2, 3]);
        assert!(found.skipped[0].line().contains("queries") && found.skipped[1].line().contains("values"));
        assert!(found.page().contains("<h2>Left out</h2>"));
    }

    #[test]
    fn above_the_limit_leading_values_agree_with_the_dense_ones() {
        let figures = |dense_limit| diagnostics::Settings { dense_limit, rank: 12, ..Default::default() };
        let with = |limit| Settings { figures: figures(limit), ..Settings::default() };
        let source = "synthetic:low_rank,n=120,d=8";
        let (dense, free) = (look(source, &with(120)).unwrap(), look(source, &with(60)).unwrap());
        let (a, b) = (&dense.heads[0].report.spectra.weights, &free.heads[0].report.spectra.weights);
        assert!(a.complete && !b.complete && b.values.len() == 12);
        assert!((a.values[0] / b.values[0] - 1.0).abs() < 1e-6, "{} {}", a.values[0], b.values[0]);
    }

    #[test]
    fn a_rank_of_which_only_a_lower_bound_is_known_says_so_wherever_it_stands() {
        let figures = diagnostics::Settings { dense_limit: 20, rank: 3, ..Default::default() };
        let found =
            look("synthetic:gaussian,n=80,d=8", &Settings { figures, ..Settings::default() }).unwrap();
        assert!(found.heads[0].report.spectra.weights.variance_rank.open);
        let (name, map) = &found.maps()[0];
        assert!(name.starts_with("rank") && map.contains("&gt;3"), "{map}");
        assert!(found.table().text().contains(">3"));
        let csv = found.csv_table().csv();
        assert!(
            csv.lines().next().unwrap().contains("rank_scores_is_lower_bound,rank_weights_is_lower_bound")
        );
    }

    #[test]
    fn pages_and_pictures_show_every_head_and_load_nothing() {
        let found = look(SMALL, &Settings::default()).unwrap();
        let (page, picture) = (found.page(), found.picture());
        assert_eq!(page.matches("data:image/png").count(), 8);
        assert_eq!(picture.matches("<polyline").count(), 6 * 4);
        assert!(page.ends_with("</html>\n") && picture.ends_with("</svg>\n"));
        assert!(!page.contains("http") && !page.contains("NaN"), "a page loads nothing");
        assert!(!picture.replacen("http://www.w3.org", "", 1).contains("http"));
        assert!(found.table().text().lines().all(|l| l.chars().count() <= 80));
        assert_eq!(found.csv_table().csv().lines().count(), 5);
    }

    #[test]
    fn a_stop_keeps_what_is_finished() {
        let workload = SMALL.parse::<crate::Source>().unwrap().load().unwrap();
        let stop = AtomicBool::new(false);
        let mut progress = |at: Progress<'_>| {
            if at.done == 1 {
                stop.store(true, Ordering::Relaxed)
            }
        };
        let mut run = Run { threads: 0, seed: 0, progress: &mut progress, stop: &stop };
        let found = inspect(&workload, &Settings::default(), &mut run).unwrap();
        assert!(found.interrupted && found.heads.len() == 2);
    }
}
