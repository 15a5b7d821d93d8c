//! Tables of a comparison.

use super::budget::Budget;
use super::{Comparison, Matching, Row, Summary};
use crate::table::{
    Column, Table, bytes, count, number, params_text, percent, raw, raw_or_empty, seconds, times,
};

impl Matching {
    /// One line for each method.
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

    /// The methods that are over the budget, each with the reason; none where all are within.
    pub fn unmatched(&self) -> Option<String> {
        let over = self.methods.iter().filter(|m| self.is_over(m.method));
        let named: Vec<String> = over
            .map(|m| format!("{} ({})", m.method, m.reason.as_deref().unwrap_or("more than the budget")))
            .collect();
        (!named.is_empty()).then(|| format!("Cannot match: {}.", named.join(", ")))
    }
}

/// Columns of tables and CSV files: a method on a head.
fn columns<'a>() -> Vec<Column<&'a Row>> {
    vec![
        Column::table("head", |r| r.layer.map_or(r.head.to_string(), |l| format!("{l}/{}", r.head))),
        Column::both("<method", "method", |r| r.method.into(), |r| r.method.into()),
        Column::file("family", |r| r.family.into()),
        Column::file("params", |r| params_text(&r.params)),
        Column::file("layer", |r| r.layer.map_or(String::new(), |l| l.to_string())),
        Column::file("head", |r| r.head.to_string()),
        Column::file("seeds", |r| r.seeds.to_string()),
        Column::both("error", "rel_fro", |r| number(r.rel_fro.mean), |r| raw(r.rel_fro.mean)),
        Column::both("lo", "rel_fro_lo", |r| number(r.rel_fro.lo), |r| raw(r.rel_fro.lo)),
        Column::both("hi", "rel_fro_hi", |r| number(r.rel_fro.hi), |r| raw(r.rel_fro.hi)),
        Column::file("rel_spectral", |r| raw(r.errors.rel_spectral)),
        Column::file("max_abs", |r| raw(r.errors.max_abs)),
        Column::file("cosine", |r| raw(r.errors.cosine)),
        Column::file("rel_l1", |r| raw(r.errors.rel_l1)),
        Column::file("setup_seconds", |r| raw(r.setup_seconds)),
        Column::both("run", "run_seconds", |r| seconds(r.run_seconds), |r| raw(r.run_seconds)),
        Column::both("faster", "speedup", |r| times(r.speedup), |r| raw(r.speedup)),
        Column::file("peak_bytes", |r| r.peak_bytes.to_string()),
        Column::file("scratch_bytes", |r| r.scratch_bytes.to_string()),
        Column::file("keys_visited", |r| r.keys_visited.to_string()),
        Column::both("keys", "keys_share", |r| percent(r.keys_share), |r| raw(r.keys_share)),
        Column::file("predicted_rel_sd", |r| raw_or_empty(r.figures.get("predicted_rel_sd").copied())),
        Column::file("features_needed", |r| raw_or_empty(r.figures.get("features_needed").copied())),
        Column::file("decode_bytes", |r| raw_or_empty(r.figures.get("decode_bytes").copied())),
        Column::both(
            "<status",
            "status",
            |r| if r.status == "complete" { String::new() } else { r.status.into() },
            |r| r.status.into(),
        ),
    ]
}

impl Comparison {
    /// One line for each method, smallest error first; methods that computed exact attention, or that refuse some of the
    /// heads, are not ranked and come last.
    pub fn table(&self) -> Table {
        let many = self.exact.heads.len() > 1;
        let spread = if many { "worst" } else { "+-" };
        let mut titles = vec!["<method", "error", spread];
        titles.extend(["set-up", "run", "faster", "memory", "keys", "<status"]);
        let mut table = Table::new(&titles);
        let mut lines: Vec<&Summary> = self.summary.iter().collect();
        let part = |s: &Summary| s.heads < self.exact.heads.len();
        let over = |s: &Summary| self.matched.as_ref().is_some_and(|m| m.is_over(s.method));
        let unranked = |s: &Summary| !self.ranks(s);
        lines.sort_by(|a, b| unranked(a).cmp(&unranked(b)).then(a.rel_fro.mean.total_cmp(&b.rel_fro.mean)));
        for s in lines {
            let gap = if many { s.rel_fro.hi } else { s.rel_fro.hi - s.rel_fro.mean };
            let mut row = vec![s.method.into(), number(s.rel_fro.mean), number(gap)];
            row.extend([
                seconds(s.setup_seconds),
                seconds(s.run_seconds),
                times(s.speedup),
                bytes(s.peak_bytes),
                if s.keys_share == 0.0 { "-".into() } else { percent(s.keys_share) },
                match s.status {
                    _ if part(s) => count(s.heads, "head"),
                    _ if over(s) => "over".into(),
                    "complete" if s.front => "front".into(),
                    "complete" => "".into(),
                    "stopped_early" => "early".into(),
                    "not_finite" => "NaN".into(),
                    other => other.into(),
                },
            ]);
            table.push(row);
        }
        table
    }

    /// One line for each method and head, smallest error first within a head. A head of a layer reads `layer/head`.
    pub fn head_table(&self) -> Table {
        let mut lines: Vec<&Row> = self.rows.iter().collect();
        lines.sort_by(|a, b| {
            (a.layer, a.head).cmp(&(b.layer, b.head)).then(a.rel_fro.mean.total_cmp(&b.rel_fro.mean))
        });
        Table::of(&lines, &columns())
    }

    /// Predictions of methods with feature maps or sketches, the worst head of each: the relative
    /// standard deviation of an entry of their kernel, the features there are and those that their `target_error` would
    /// take (kept keys, where keys are what is kept), and the bytes that decoding holds for each key head. Empty where no method was one.
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

    /// Every row with all digits, for other programs.
    pub fn csv_table(&self) -> Table {
        Table::csv_of(&self.rows.iter().collect::<Vec<&Row>>(), &columns())
    }
}
