//! Tables of a comparison.

use super::budget::Budget;
use super::{Comparison, Matching, Row, Summary};
use crate::stats::Interval;
use crate::table::Shown::{Bytes, Made, Number, Percent, Seconds, Text, Times};
use crate::table::{Column, Table, bytes, count, number, objects_of, percent, raw};
use serde::Serialize;
use serde_json::Value;

impl Matching {
    /// Returns a table with one line per method.
    pub fn table(&self) -> Table {
        let mut table = Table::new(&["<method", "<set", "spends", "<within"]);
        for m in &self.methods {
            let spent = |x: f64| match self.budget {
                Budget::Keys(_) => number(x),
                Budget::Time(_) => percent(x),
                Budget::Memory(_) => bytes(x as usize),
            };
            let mut set: Vec<String> =
                m.value.iter().flat_map(|v| m.params.iter().map(move |name| format!("{name}={v}"))).collect();
            set.extend(m.switch.map(|(name, length)| format!("{name}={length}")));
            table.push(vec![
                m.method.into(),
                if set.is_empty() { "defaults".into() } else { set.join(" ") },
                m.measured.or(m.spent).map_or("-".into(), spent),
                match (m.within, m.measured.or(m.spent)) {
                    (true, _) => "yes".into(),
                    (false, None) => "unknown".into(),
                    (false, Some(_)) => "cannot match".into(),
                },
            ]);
        }
        table
    }

    /// Names the methods over the budget, each with the reason; none if all are within it.
    pub fn unmatched(&self) -> Option<String> {
        let over = self.methods.iter().filter(|m| self.is_over(m.method));
        let named: Vec<String> = over
            .map(|m| format!("{} ({})", m.method, m.reason.as_deref().unwrap_or("more than the budget")))
            .collect();
        (!named.is_empty()).then(|| format!("Cannot match: {}.", named.join(", ")))
    }
}

/// A method on a head.
const COLUMNS: [Column; 25] = [
    Column::table(
        "head",
        "",
        Made(|r| match &r["layer"] {
            Value::Null => raw(&r["head"]),
            layer => format!("{layer}/{}", r["head"]),
        }),
    ),
    Column::both("<method", "method", "/method", Text),
    Column::file("family", "/family"),
    Column::file("params", "/params"),
    Column::file("layer", "/layer"),
    Column::file("head", "/head"),
    Column::file("seeds", "/seeds"),
    Column::both("error", "rel_fro", "/rel_fro/mean", Number),
    Column::both("lo", "rel_fro_lo", "/rel_fro/lo", Number),
    Column::both("hi", "rel_fro_hi", "/rel_fro/hi", Number),
    Column::file("rel_spectral", "/errors/rel_spectral"),
    Column::file("max_abs", "/errors/max_abs"),
    Column::file("cosine", "/errors/cosine"),
    Column::file("rel_l1", "/errors/rel_l1"),
    Column::file("setup_seconds", "/setup_seconds"),
    Column::both("run", "run_seconds", "/run_seconds", Seconds),
    Column::both("faster", "speedup", "/speedup", Times),
    Column::file("peak_bytes", "/peak_bytes"),
    Column::file("scratch_bytes", "/scratch_bytes"),
    Column::file("keys_visited", "/keys_visited"),
    Column::both("keys", "keys_share", "/keys_share", Percent),
    Column::file("predicted_rel_sd", "/figures/predicted_rel_sd"),
    Column::file("features_needed", "/figures/features_needed"),
    Column::file("decode_bytes", "/figures/decode_bytes"),
    Column::both(
        "<status",
        "status",
        "/status",
        Made(|s| if s == "complete" { String::new() } else { raw(s) }),
    ),
];

/// A method over all heads, with what depends on the others.
#[derive(Serialize)]
struct Line<'a> {
    #[serde(flatten)]
    summary: &'a Summary,
    seconds: f64,
    /// Half the interval for one head, or the largest error of several heads.
    spread: f64,
    exact: bool,
    note: String,
}

impl Summary {
    /// Columns of tables and of the report's figures.
    fn columns(heads: usize) -> [Column; 14] {
        [
            Column::both("<method", "method", "/method", Text),
            Column::file("family", "/family"),
            Column::both("error", "error", "/rel_fro/mean", Number),
            Column::table(if heads > 1 { "worst" } else { "+-" }, "/spread", Number),
            Column::file("lo", "/rel_fro/lo"),
            Column::file("hi", "/rel_fro/hi"),
            Column::both("set-up", "setup", "/setup_seconds", Seconds),
            Column::table("run", "/run_seconds", Seconds),
            Column::file("seconds", "/seconds"),
            Column::both("faster", "speedup", "/speedup", Times),
            Column::both("memory", "bytes", "/peak_bytes", Bytes),
            Column::both(
                "keys",
                "keys",
                "/keys_share",
                Made(|x| x.as_f64().filter(|x| *x != 0.0).map_or("-".into(), percent)),
            ),
            Column::file("exact", "/exact"),
            Column::table("<status", "/note", Text),
        ]
    }
}

impl Comparison {
    fn line<'a>(&self, summary: &'a Summary) -> Line<'a> {
        let (s, all) = (summary, self.exact.heads.len());
        let note = match s.status {
            _ if s.heads < all => count(s.heads, "head"),
            _ if self.matched.as_ref().is_some_and(|m| m.is_over(s.method)) => "over".into(),
            "complete" if s.front => "front".into(),
            "complete" => "".into(),
            "stopped_early" => "early".into(),
            "not_finite" => "NaN".into(),
            other => other.into(),
        };
        let spread = if all > 1 { s.rel_fro.hi } else { s.rel_fro.hi - s.rel_fro.mean };
        Line { summary, seconds: s.seconds(), spread, exact: s.fell_back(), note }
    }

    /// Returns a table with one line per method, smallest error first; methods that computed exact attention, or that
    /// refuse some heads, are not ranked and come last.
    pub fn table(&self) -> Table {
        let mut lines: Vec<&Summary> = self.summary.iter().collect();
        let unranked = |s: &Summary| !self.ranks(s);
        lines.sort_by(|a, b| unranked(a).cmp(&unranked(b)).then(a.rel_fro.mean.total_cmp(&b.rel_fro.mean)));
        Table::of(lines.into_iter().map(|s| self.line(s)), &Summary::columns(self.exact.heads.len()))
    }

    /// Returns each method as an object with the same columns, for the figures of a page, and exact attention in the
    /// same form.
    pub(crate) fn objects(&self) -> (Vec<Value>, Value) {
        let exact = Summary {
            method: self.exact.method,
            family: "exact",
            heads: self.exact.heads.len(),
            rel_fro: Interval { mean: 0.0, lo: 0.0, hi: 0.0 },
            setup_seconds: 0.0,
            run_seconds: self.exact.run_seconds,
            speedup: 1.0,
            peak_bytes: self.exact.peak_bytes,
            keys_share: 1.0,
            status: "complete",
            front: true,
        };
        let lines = self.summary.iter().chain([&exact]).map(|s| self.line(s));
        let mut objects = objects_of(lines, &Summary::columns(self.exact.heads.len()));
        let exact = objects.pop().unwrap_or_default();
        (objects, exact)
    }

    /// Returns a table with one line per method and head, smallest error first within a head. A head is written as
    /// `layer/head`.
    pub fn head_table(&self) -> Table {
        let mut lines: Vec<&Row> = self.rows.iter().collect();
        lines.sort_by(|a, b| {
            (a.layer, a.head).cmp(&(b.layer, b.head)).then(a.rel_fro.mean.total_cmp(&b.rel_fro.mean))
        });
        Table::of(lines, &COLUMNS)
    }

    /// Returns the predictions of methods with feature maps or sketches, at the worst head of each: the relative
    /// standard deviation of a kernel entry, the number of features and the number that their `target_error` would need
    /// (for methods that keep keys, of kept keys), and the bytes of decoding state per key head. Empty if no method has
    /// predictions.
    pub fn feature_table(&self) -> Table {
        let mut table = Table::new(&["<method", "features", "entry sd", "needed", "for sd", "decode"]);
        for s in &self.summary {
            let rows = || self.rows.iter().filter(|r| r.method == s.method);
            let worst = |name: &str| {
                rows()
                    .filter_map(|r| r.figures.get(name))
                    .copied()
                    .fold(None, |m: Option<f64>, x| Some(m.map_or(x, |m| m.max(x))))
            };
            let Some(needed) = worst("features_needed").or(worst("keys_needed")) else { continue };
            let rank = rows().filter_map(|r| r.rank).max();
            let target = rows().find_map(|r| r.params.get("target_error")?.as_f64());
            table.push(vec![
                s.method.into(),
                worst("features").or(rank.map(|m| m as f64)).map_or("-".into(), number),
                worst("predicted_rel_sd").map_or("-".into(), number),
                number(needed),
                target.map_or("-".into(), number),
                worst("decode_bytes").map_or("-".into(), |b| bytes(b as usize)),
            ]);
        }
        table
    }

    /// Returns every row with all digits, for other programs.
    pub fn csv_table(&self) -> Table {
        Table::csv_of(&self.rows, &COLUMNS)
    }
}
