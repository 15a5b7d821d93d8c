//! What a comparison says: the records that are printed, written and drawn.

use crate::budget::{Budget, Matched};
use crate::calibration::Calibrations;
use crate::certify::Certificate;
use crate::stats::{Interval, mean};
use attlas::metrics::Errors;
use attlas::{Mask, Status};
use serde::Serialize;
use std::collections::BTreeMap;

/// The result: everything measured, in the order it was measured.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// What the inputs were loaded from.
    pub source: String,
    /// What the source says of itself.
    pub metadata: BTreeMap<String, String>,
    /// Mask of every problem.
    pub mask: Mask,
    /// Threads used.
    pub threads: usize,
    /// Instruction set of the kernels.
    pub isa: String,
    /// Seeds asked for.
    pub seeds: usize,
    /// The first seed.
    pub seed: u64,
    /// What `lo` and `hi` of an error mean.
    pub interval: &'static str,
    /// The baseline.
    pub exact: Baseline,
    /// One for each method and head.
    pub rows: Vec<Row>,
    /// One for each method, over heads.
    pub summary: Vec<Summary>,
    /// Methods that cannot do this, with all their reasons.
    pub refused: Vec<Refused>,
    /// What was left out for lack of time.
    pub skipped: Vec<Skipped>,
    /// The caller asked to stop before everything was measured.
    pub interrupted: bool,
    /// The budget that methods share, where one was asked for.
    pub matched: Option<Matching>,
    /// What methods learnt, to be saved.
    #[serde(skip)]
    pub learnt: Calibrations,
}

/// The same budget for every method.
#[derive(Clone, Debug, Serialize)]
pub struct Matching {
    /// What every method may spend.
    pub budget: Budget,
    /// What each was given.
    pub methods: Vec<Matched>,
}

/// Exact attention on the same inputs.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Baseline {
    /// Id of the method.
    pub method: &'static str,
    /// Median seconds of all heads together.
    pub run_seconds: f64,
    /// Counted operations of all heads together.
    pub flops: u64,
    /// Billions of counted operations per second.
    pub gflops: f64,
    /// Most bytes allocated by one run.
    pub peak_bytes: usize,
    /// Each head alone.
    pub heads: Vec<BaselineHead>,
}

/// Exact attention on one head.
#[derive(Clone, Debug, Serialize)]
pub struct BaselineHead {
    /// Layer, where the source has layers.
    pub layer: Option<usize>,
    /// Query head.
    pub head: usize,
    /// Median seconds.
    pub run_seconds: f64,
    /// Runs behind the median.
    pub runs: usize,
}

/// One method on one head.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Id of the method, or `mean_v`.
    pub method: &'static str,
    /// Its family, or `baseline`.
    pub family: &'static str,
    /// Every parameter with its value.
    pub params: serde_json::Map<String, serde_json::Value>,
    /// Layer, where the source has layers.
    pub layer: Option<usize>,
    /// Query head.
    pub head: usize,
    /// Seeds behind the error; 1 for methods that draw nothing.
    pub seeds: usize,
    /// Relative Frobenius error against exact attention.
    pub rel_fro: Interval,
    /// Further distances, of the first seed.
    pub errors: Errors,
    /// What a sample of exact rows proves about the first seed's error.
    pub certified: Certificate,
    /// Median seconds of planning, per query head.
    pub setup_seconds: f64,
    /// Median seconds of executing, per query head.
    pub run_seconds: f64,
    /// Shortest and longest run, per query head.
    pub run_range: [f64; 2],
    /// Runs behind the median; 0 where only the warm-up was affordable and stands in.
    pub runs: usize,
    /// Seconds of learning from data, per query head, where the method does.
    pub calibrate_seconds: Option<f64>,
    /// Seconds of exact attention over set-up and run together.
    pub speedup: f64,
    /// Share of the counted operations that comes before the first row.
    pub counted_setup_share: f64,
    /// Most bytes allocated while planning and running the whole group.
    pub peak_bytes: usize,
    /// Most scratch bytes in use by the whole group.
    pub scratch_bytes: usize,
    /// Scores computed, per query head.
    pub keys_visited: u64,
    /// The same as a share of the pairs that exact attention visits.
    pub keys_share: f64,
    /// Rows answered by a fallback, in the whole group.
    pub fallback_rows: u64,
    /// Largest rank reached, where the method has one.
    pub rank: Option<usize>,
    /// Most iterations, where the method iterates.
    pub iterations: Option<usize>,
    /// Further figures that the method reports.
    pub figures: BTreeMap<&'static str, f64>,
    /// `complete`, `exact`, `stopped_early`, or `not_finite` where an output is no number.
    pub status: &'static str,
}

/// One method over all heads.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// Id of the method, or `mean_v`.
    pub method: &'static str,
    /// Its family, or `baseline`.
    pub family: &'static str,
    /// Heads measured.
    pub heads: usize,
    /// Mean error over heads, with the Student t interval over seeds where there is one head, and the smallest
    /// and largest head where there are more.
    pub rel_fro: Interval,
    /// Largest certified bound; none where a head has none.
    pub certified: Option<f64>,
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
    /// Whether no other method is both faster and more accurate.
    pub front: bool,
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
#[derive(Clone, Debug, Serialize)]
pub struct Skipped {
    /// Id of the method.
    pub method: &'static str,
    /// Layer, where the source has layers.
    pub layer: Option<usize>,
    /// Query heads.
    pub heads: Vec<usize>,
    /// Why.
    pub reason: String,
}

/// How a run ended, as it stands in records.
pub(crate) fn status_name(status: Status) -> &'static str {
    match status {
        Status::Complete => "complete",
        Status::Exact => "exact",
        Status::StoppedEarly => "stopped_early",
    }
}

/// Joins the heads of each method, in the order of the rows.
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
            certified: rows.iter().try_fold(0.0, |a: f64, r| r.certified.bound.map(|b| a.max(b))),
            setup_seconds,
            run_seconds,
            speedup: exact / (setup_seconds + run_seconds),
            peak_bytes: rows.iter().map(|r| r.peak_bytes).max().unwrap_or(0),
            keys_share: mean(&rows.iter().map(|r| r.keys_share).collect::<Vec<f64>>()),
            status: rows.iter().max_by_key(worst).map_or("complete", |r| r.status),
            front: false,
        }
    };
    let mut summary: Vec<Summary> = order.iter().map(one).collect();
    mark_front(&mut summary);
    summary
}

/// Marks the methods that no other beats in both error and time; the trivial baseline takes no part.
pub(super) fn mark_front(summary: &mut [Summary]) {
    let cost = |s: &Summary| (s.rel_fro.mean, s.setup_seconds + s.run_seconds);
    let points: Vec<(f64, f64)> =
        summary.iter().filter(|s| s.family != "baseline").map(cost).filter(|p| p.0.is_finite()).collect();
    for s in summary.iter_mut().filter(|s| s.family != "baseline" && s.rel_fro.mean.is_finite()) {
        let (error, time) = cost(s);
        s.front = !points.iter().any(|&(e, t)| e <= error && t <= time && (e < error || t < time));
    }
}
