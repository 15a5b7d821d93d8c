//! Records of a comparison, which tables, files and figures show.

use crate::budget::{Budget, CLOSE, Matched};
use crate::calibration::Calibrations;
use crate::reread::Name;
use crate::stats::{Interval, mean};
use attlas::metrics::Errors;
use attlas::{Mask, Status};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Result of a comparison: all measurements, in their order.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// Source of the inputs.
    pub source: String,
    /// Metadata of the source.
    pub metadata: BTreeMap<String, String>,
    /// Mask of every problem.
    pub mask: Mask,
    /// Threads used.
    pub threads: usize,
    /// Instruction set of the kernels.
    pub isa: String,
    /// Number of seeds.
    pub seeds: usize,
    /// The first seed.
    pub seed: u64,
    /// Meaning of `lo` and `hi` of an error.
    pub interval: &'static str,
    /// The baseline.
    pub exact: Baseline,
    /// One for each method and head.
    pub rows: Vec<Row>,
    /// One for each method, over heads.
    pub summary: Vec<Summary>,
    /// Methods that cannot do this problem, with all their reasons.
    pub refused: Vec<Refused>,
    /// Measurements left out for lack of time.
    pub skipped: Vec<Skipped>,
    /// Query heads of the source; fewer were compared if time ran out ([`Baseline::heads`]).
    pub heads: usize,
    /// Keys of the longest problem.
    pub tokens: usize,
    /// The method that is worth its error, in a sentence.
    pub verdict: String,
    /// Methods over a range of scores; empty without `--curves`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub curves: Vec<super::curves::Curve>,
    /// The caller asked to stop before everything was measured.
    pub interrupted: bool,
    /// The common budget of the methods, if there is one.
    pub matched: Option<Matching>,
    /// Calibrations of methods, to be saved.
    #[serde(skip)]
    pub learnt: Calibrations,
}

/// The same budget for every method.
#[derive(Clone, Debug, Serialize)]
pub struct Matching {
    /// The budget of every method.
    pub budget: Budget,
    /// The settings of each method.
    pub methods: Vec<Matched>,
}

impl Matching {
    /// Takes the amounts spent on all heads from the rows of a run.
    pub fn settle(&mut self, rows: &[Row]) {
        for m in &mut self.methods {
            let spent: Vec<f64> = rows
                .iter()
                .filter(|r| r.method == m.method)
                .map(|r| self.budget.spent(r, r.queries))
                .collect();
            if spent.is_empty() {
                continue;
            }
            let measured = mean(&spent);
            m.measured = Some(measured);
            m.within = measured <= CLOSE * self.budget.amount();
            if !m.within && m.reason.is_none() {
                m.reason = Some(format!("{} over all heads", self.budget.shown(measured)));
            }
        }
    }

    /// Returns true if a method spent more than the budget and is therefore not comparable.
    pub fn is_over(&self, method: &str) -> bool {
        self.methods.iter().any(|m| m.method == method && m.measured.is_some() && !m.within)
    }
}

impl Comparison {
    /// Marks the methods as matched to one budget; those over it are not ranked.
    #[must_use]
    pub fn matched_to(mut self, mut matching: Matching) -> Self {
        matching.settle(&self.rows);
        self.matched = Some(matching);
        self.summary = summarise(&self);
        self.verdict = self.verdict();
        self
    }

    /// Returns true if a method is ranked: it did the same heads as the others, within the budget, and not by exact
    /// attention.
    pub fn ranks(&self, s: &Summary) -> bool {
        let over = self.matched.as_ref().is_some_and(|m| m.is_over(s.method));
        s.heads == self.exact.heads.len() && !s.fell_back() && !over
    }
}

/// Exact attention on the same inputs.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Baseline {
    /// Id of the method.
    #[serde(deserialize_with = "crate::reread::name")]
    pub method: Name,
    /// Median seconds of all heads together.
    #[serde(deserialize_with = "crate::reread::number")]
    pub run_seconds: f64,
    /// Counted operations of all heads together.
    pub flops: u64,
    /// Billions of counted operations per second.
    #[serde(deserialize_with = "crate::reread::number")]
    pub gflops: f64,
    /// Most bytes allocated by one run.
    pub peak_bytes: usize,
    /// The single heads that methods are compared on.
    pub heads: Vec<BaselineHead>,
}

/// Exact attention on one head.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BaselineHead {
    /// Layer, where the source has layers.
    pub layer: Option<usize>,
    /// Query head.
    pub head: usize,
    /// Median seconds.
    #[serde(deserialize_with = "crate::reread::number")]
    pub run_seconds: f64,
    /// Runs behind the median.
    pub runs: usize,
}

/// One method on one head.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Row {
    /// Id of the method, or `mean_v`.
    #[serde(deserialize_with = "crate::reread::name")]
    pub method: Name,
    /// Its family, or `baseline`.
    #[serde(deserialize_with = "crate::reread::name")]
    pub family: Name,
    /// Every parameter with its value.
    pub params: serde_json::Map<String, serde_json::Value>,
    /// Layer, where the source has layers.
    pub layer: Option<usize>,
    /// Query head.
    pub head: usize,
    /// Queries.
    pub queries: usize,
    /// Seeds behind the error; 1 for methods that draw nothing.
    pub seeds: usize,
    /// Relative Frobenius error against exact attention.
    pub rel_fro: Interval,
    /// Further distances, of the first seed.
    pub errors: Errors,
    /// Median seconds of planning, per query head.
    #[serde(deserialize_with = "crate::reread::number")]
    pub setup_seconds: f64,
    /// Median seconds of executing, per query head.
    #[serde(deserialize_with = "crate::reread::number")]
    pub run_seconds: f64,
    /// Shortest and longest run, per query head.
    #[serde(deserialize_with = "crate::reread::pair")]
    pub run_range: [f64; 2],
    /// Runs behind the median; 0 if time allowed only the warm-up, which then gives the time.
    pub runs: usize,
    /// Seconds of learning from data, per query head, if the method does.
    pub calibrate_seconds: Option<f64>,
    /// Seconds of exact attention over set-up and run together.
    #[serde(deserialize_with = "crate::reread::number")]
    pub speedup: f64,
    /// Share of the counted operations that precede the first row.
    #[serde(deserialize_with = "crate::reread::number")]
    pub counted_setup_share: f64,
    /// Most bytes allocated while planning and running the whole group.
    pub peak_bytes: usize,
    /// Most scratch bytes in use by the whole group.
    pub scratch_bytes: usize,
    /// Scores computed, per query head.
    pub keys_visited: u64,
    /// Scores computed, as a share of the pairs that exact attention visits.
    #[serde(deserialize_with = "crate::reread::number")]
    pub keys_share: f64,
    /// Rows answered by a fallback, in the whole group.
    pub fallback_rows: u64,
    /// Largest rank reached, if the method has one.
    pub rank: Option<usize>,
    /// Most iterations, if the method iterates.
    pub iterations: Option<usize>,
    /// Further figures that the method reports.
    #[serde(deserialize_with = "crate::reread::figures")]
    pub figures: BTreeMap<Name, f64>,
    /// The machine of the measurement, if several processes shared the heads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// `complete`, `exact`, `stopped_early`, or `not_finite` if the output has NaN or infinity.
    #[serde(deserialize_with = "crate::reread::name")]
    pub status: Name,
}

/// One method over all heads.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// Id of the method, or `mean_v`.
    pub method: &'static str,
    /// Its family, or `baseline`.
    pub family: &'static str,
    /// Heads measured; a method that refuses some layers has fewer than the others and is not ranked.
    pub heads: usize,
    /// Mean error over heads, with the Student t interval over seeds for one head, and with the smallest and largest
    /// head for several.
    pub rel_fro: Interval,
    /// Seconds of planning, all heads together.
    pub setup_seconds: f64,
    /// Seconds of running, all heads together.
    pub run_seconds: f64,
    /// Exact seconds of the same heads over set-up and run.
    pub speedup: f64,
    /// Largest peak.
    pub peak_bytes: usize,
    /// Mean share of scores computed.
    pub keys_share: f64,
    /// The worst status.
    pub status: &'static str,
    /// True if no other method, nor exact attention, nor the mean of the values, is both faster and more accurate.
    pub front: bool,
}

impl Summary {
    /// Returns the seconds of set-up and run, all heads together.
    pub fn seconds(&self) -> f64 {
        self.setup_seconds + self.run_seconds
    }

    /// Returns true if the settings covered every key on every head: the method then computed exact attention.
    pub fn fell_back(&self) -> bool {
        self.status == "exact"
    }
}

/// A method that cannot do the problem.
#[derive(Clone, Debug, Serialize)]
pub struct Refused {
    /// Id of the method.
    pub method: &'static str,
    /// Layer, where the source has layers.
    pub layer: Option<usize>,
    /// Every reason.
    pub reasons: Vec<String>,
}

/// Something that was not measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Skipped {
    /// Id of the method.
    #[serde(deserialize_with = "crate::reread::name")]
    pub method: Name,
    /// Layer, where the source has layers.
    pub layer: Option<usize>,
    /// Query heads.
    pub heads: Vec<usize>,
    /// Why.
    pub reason: String,
}

/// Returns the name of a status in records.
pub(crate) fn status_name(status: Status) -> &'static str {
    match status {
        Status::Complete => "complete",
        Status::Exact => "exact",
        Status::StoppedEarly => "stopped_early",
    }
}

/// Summarises the heads of each method, in the order of the rows.
pub(super) fn summarise(result: &Comparison) -> Vec<Summary> {
    let mut order: Vec<&'static str> = Vec::new();
    result.rows.iter().for_each(|r| {
        if !order.contains(&r.method) {
            order.push(r.method);
        }
    });
    let one = |method: &&'static str| {
        let rows: Vec<&Row> = result.rows.iter().filter(|r| r.method == *method).collect();
        let sum = |f: fn(&Row) -> f64| rows.iter().map(|r| f(r)).sum::<f64>();
        let errors: Vec<f64> = rows.iter().map(|r| r.rel_fro.mean).collect();
        let (setup_seconds, run_seconds) = (sum(|r| r.setup_seconds), sum(|r| r.run_seconds));
        let exact = sum(|r| r.speedup * (r.setup_seconds + r.run_seconds));
        let worst = |r: &&&Row| match r.status {
            "not_finite" => 3,
            "stopped_early" => 2,
            "exact" => 0,
            _ => 1,
        };
        Summary {
            method,
            family: rows[0].family,
            heads: rows.len(),
            rel_fro: if let [row] = rows[..] { row.rel_fro } else { Interval::range(&errors) },
            setup_seconds,
            run_seconds,
            speedup: exact / (setup_seconds + run_seconds),
            peak_bytes: rows.iter().map(|r| r.peak_bytes).max().unwrap_or(0),
            keys_share: mean(&rows.iter().map(|r| r.keys_share).collect::<Vec<f64>>()),
            status: rows.iter().max_by_key(worst).map_or("complete", |r| r.status),
            front: false,
        }
    };
    let summary: Vec<Summary> = order.iter().map(one).collect();
    let (mut ranked, partial): (Vec<Summary>, Vec<Summary>) =
        summary.into_iter().partition(|s| result.ranks(s));
    mark_front(&mut ranked, result.exact.run_seconds);
    ranked.extend(partial);
    ranked.sort_by_key(|s| order.iter().position(|id| *id == s.method));
    ranked
}

/// Marks the methods that nothing beats in both error and time; exact attention and the trivial baseline count among
/// the competitors. A method that computed exact attention counts as exact attention.
pub(super) fn mark_front(summary: &mut [Summary], exact_seconds: f64) {
    let mut points = vec![(0.0, exact_seconds)];
    let point = |s: &Summary| if s.fell_back() { (f64::NAN, 0.0) } else { (s.rel_fro.mean, s.seconds()) };
    points.extend(summary.iter().map(point));
    let on = front(&points);
    summary.iter_mut().zip(&on[1..]).for_each(|(s, on)| s.front = *on);
}

/// Returns for each point (error, cost) if it is on the Pareto front; points with NaN or infinity are not.
pub fn front(points: &[(f64, f64)]) -> Vec<bool> {
    let real = |p: &(f64, f64)| p.0.is_finite() && p.1.is_finite();
    let beats = |a: (f64, f64), b: (f64, f64)| a.0 <= b.0 && a.1 <= b.1 && (a.0 < b.0 || a.1 < b.1);
    points.iter().map(|&p| real(&p) && !points.iter().any(|&q| real(&q) && beats(q, p))).collect()
}
