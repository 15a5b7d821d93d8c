//! Errors and times of methods on given inputs, beside exact attention in the same process.
//!
//! The unit of work is one key head with the query heads that share it, so that methods may share what depends
//! on keys alone; times and counts are then given per query head, as the group's divided by its size. Each method
//! is planned and run once to warm up; that run gives the first error, the peak memory and the log-sum-exp.
//! Further runs, one per seed for methods that draw random numbers, give errors and times, and exact attention is
//! timed between them. Set-up is planning, run is executing; what a plan does with the keys before its first row
//! is part of the run, and `counted_setup_share` says how much of the counted work that is.

use crate::calibration::Calibrations;
use crate::certify::{Certificate, Evidence, certify, sample_rows};
use crate::run::{Meter, execute, timed};
use crate::select::{Chosen, baseline};
use crate::source::{LayerData, Workload};
use crate::stats::{Interval, mean, median};
use crate::{Error, Result};
use attlas::method::Needs;
use attlas::metrics::Errors;
use attlas::{Calibration, Inputs, Mask, Options, Plan, Problem, Qkv, RunInfo, Schedule, Status, Workspace};
use attlas_num::rng::StreamKey;
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// How to compare.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Mask; the workload's own where absent.
    pub mask: Option<Mask>,
    /// Seeds for methods that draw random numbers.
    pub seeds: usize,
    /// The first seed; also seeds the sample of certified rows.
    pub seed: u64,
    /// Threads; 0 for all.
    pub threads: usize,
    /// Rows of each head that certificates are made from.
    pub certify_rows: usize,
    /// Probability with which each certificate holds.
    pub confidence: f64,
    /// Most timed runs of a method that draws nothing.
    pub runs: usize,
    /// Seconds after which nothing new is begun; every method gets an equal share of what is left.
    pub time_limit: Option<f64>,
    /// Who counts allocated bytes.
    pub meter: Meter,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            mask: None,
            seeds: 5,
            seed: 0,
            threads: 0,
            certify_rows: 256,
            confidence: 0.95,
            runs: 5,
            time_limit: None,
            meter: Meter::NONE,
        }
    }
}

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
    /// What methods learnt, to be saved.
    #[serde(skip)]
    pub learnt: Calibrations,
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

/// What is about to be measured.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    /// Steps done.
    pub done: usize,
    /// Steps in all.
    pub total: usize,
    /// The method.
    pub method: &'a str,
}

/// Measures every method of `selection` on every head. Calls `watch` before each step and stops early, with what
/// is finished, once `stop` is set.
pub fn compare(
    workload: &Workload,
    selection: &[Chosen],
    settings: &Settings,
    watch: &mut dyn FnMut(Step<'_>),
    stop: &AtomicBool,
) -> Result<Comparison> {
    compare_with(workload, selection, settings, &Calibrations::default(), watch, stop)
}

/// The same with calibrations from before; methods that have none there learn from the inputs.
pub fn compare_with(
    workload: &Workload,
    selection: &[Chosen],
    settings: &Settings,
    given: &Calibrations,
    watch: &mut dyn FnMut(Step<'_>),
    stop: &AtomicBool,
) -> Result<Comparison> {
    let mask = settings.mask.unwrap_or(workload.mask);
    let mut ws = Workspace::new(Schedule { threads: settings.threads, ..Schedule::default() })?;
    let exact = baseline()?;
    let mut result = Comparison {
        source: workload.source.clone(),
        metadata: workload.metadata.clone(),
        mask,
        threads: ws.schedule().threads,
        isa: ws.schedule().isa.to_string(),
        seeds: settings.seeds,
        seed: settings.seed,
        interval: "95 % Student t interval of the mean over seeds",
        exact: Baseline { method: exact.id, ..Baseline::default() },
        rows: Vec::new(),
        summary: Vec::new(),
        refused: Vec::new(),
        skipped: Vec::new(),
        interrupted: false,
        learnt: Calibrations::default(),
    };

    // Refusals and bad parameters come before any work.
    let mut runnable: Vec<Vec<&Chosen>> = Vec::new();
    for layer in &workload.layers {
        let problem = layer.group_problem(mask);
        let mut able = Vec::new();
        for chosen in selection {
            match refusal(chosen, &problem, settings.seed, given)? {
                None => able.push(chosen),
                Some(reasons) => {
                    result.refused.push(Refused { method: chosen.method.id, layer: layer.layer, reasons })
                }
            }
        }
        runnable.push(able);
    }

    let groups = |layer: &LayerData| layer.problem.n_kv_heads;
    let total: usize = workload.layers.iter().zip(&runnable).map(|(l, r)| groups(l) * (r.len() + 1)).sum();
    let clock = Clock { start: Instant::now(), limit: settings.time_limit };
    let mut done = 0;
    'all: for (layer, able) in workload.layers.iter().zip(&runnable) {
        for g in 0..groups(layer) {
            watch(Step { done, total, method: exact.id });
            let mut bench = Group::new(layer, g, mask, settings, given, &mut ws)?;
            done += 1;
            result.rows.extend(bench.mean_of_values());
            for chosen in able {
                if stop.load(Ordering::Relaxed) {
                    result.interrupted = true;
                    bench.finish(&mut result.exact);
                    break 'all;
                }
                watch(Step { done, total, method: chosen.method.id });
                match clock.share(total - done) {
                    Some(share) if share <= 0.0 => result.skipped.push(Skipped {
                        method: chosen.method.id,
                        layer: layer.layer,
                        heads: bench.heads().collect(),
                        reason: "the time limit was reached".into(),
                    }),
                    share => result.rows.extend(bench.measure(chosen, share, &mut result.learnt, &mut ws)?),
                }
                done += 1;
            }
            bench.finish(&mut result.exact);
        }
    }
    let b = &mut result.exact;
    b.gflops = if b.run_seconds > 0.0 { b.flops as f64 / b.run_seconds * 1e-9 } else { 0.0 };
    result.summary = summarise(&result);
    Ok(result)
}

/// Reasons why a method cannot do a problem; other errors, such as a bad parameter, are the caller's.
fn refusal(
    chosen: &Chosen,
    problem: &Problem,
    seed: u64,
    given: &Calibrations,
) -> Result<Option<Vec<String>>> {
    let options = chosen.options_for(seed);
    if chosen.method.claims.needs == Needs::Calibration || given.has(chosen.method.id) {
        let support = (chosen.method.supports)(problem, &options);
        return Ok((!support.is_yes()).then_some(support.reasons));
    }
    match chosen.method.plan(problem, &options) {
        Ok(_) => Ok(None),
        Err(attlas::Error::Unsupported { reasons, .. }) => Ok(Some(reasons)),
        Err(e) => Err(name_method(chosen, e)),
    }
}

/// Says which method's parameter it was.
fn name_method(chosen: &Chosen, error: attlas::Error) -> Error {
    match error {
        attlas::Error::InvalidParam { name, value, expected } => {
            attlas::Error::InvalidParam { name: format!("{}.{name}", chosen.method.id), value, expected }
                .into()
        }
        other => other.into(),
    }
}

/// Shares out a time limit.
struct Clock {
    start: Instant,
    limit: Option<f64>,
}

impl Clock {
    /// Seconds that each of `left` steps may take.
    fn share(&self, left: usize) -> Option<f64> {
        self.limit.map(|limit| (limit - self.start.elapsed().as_secs_f64()) / left.max(1) as f64)
    }
}

/// Seconds after which a run that need not be is not repeated.
const REPEAT_SECONDS: f64 = 0.5;

/// One key head with its query heads, its exact output, and the exact times measured so far.
pub(crate) struct Group<'a> {
    settings: &'a Settings,
    given: &'a Calibrations,
    kv_head: usize,
    layer: Option<usize>,
    first_head: usize,
    problem: Problem,
    x: Qkv<'a, f32>,
    exact_plan: Box<dyn Plan>,
    exact: Vec<f32>,
    exact_lse: Vec<f32>,
    exact_seconds: Vec<f64>,
    exact_peak: usize,
    /// Sampled rows of each head, and exact attention on them.
    samples: Vec<(Vec<usize>, Vec<f32>)>,
    values: Vec<f32>,
}

impl<'a> Group<'a> {
    pub(crate) fn new(
        layer: &'a LayerData,
        g: usize,
        mask: Mask,
        settings: &'a Settings,
        given: &'a Calibrations,
        ws: &mut Workspace,
    ) -> Result<Self> {
        let problem = layer.group_problem(mask);
        let x = layer.group(g)?;
        let exact_plan = baseline()?.plan(&problem, &Options::new())?;
        let rows = problem.n_heads * problem.n_q;
        let (mut exact, mut lse) = (vec![f32::NAN; rows * problem.d_v], vec![f32::NAN; rows]);
        ws.scratch().trim();
        let (info, exact_peak) =
            settings.meter.watch(|| execute(&*exact_plan, x, &mut exact, Some(&mut lse), ws));
        info?;
        let first_head = g * problem.n_heads;
        let samples = (0..problem.n_heads)
            .map(|h| {
                let label = StreamKey::new(settings.seed).with(layer.layer.unwrap_or(0) as u64);
                let seed = label.with((first_head + h) as u64).rng().next_u64();
                let sample = sample_rows(problem.n_q, settings.certify_rows, seed);
                let row = |i: usize| &exact[(h * problem.n_q + i) * problem.d_v..][..problem.d_v];
                let rows = sample.iter().flat_map(|&i| row(i)).copied().collect();
                (sample, rows)
            })
            .collect();
        let values = layer.v[g * problem.n_k * problem.d_v..][..problem.n_k * problem.d_v].to_vec();
        let mut group = Self {
            settings,
            given,
            kv_head: g,
            layer: layer.layer,
            first_head,
            problem,
            x,
            exact_plan,
            exact,
            exact_lse: lse,
            exact_seconds: Vec::new(),
            exact_peak,
            samples,
            values,
        };
        for _ in 0..3 {
            group.time_exact(ws)?;
            if group.exact_seconds.iter().sum::<f64>() > REPEAT_SECONDS {
                break;
            }
        }
        Ok(group)
    }

    fn heads(&self) -> impl Iterator<Item = usize> {
        self.first_head..self.first_head + self.problem.n_heads
    }

    /// One more exact run under the clock.
    fn time_exact(&mut self, ws: &mut Workspace) -> Result<f64> {
        let (info, seconds) = timed(|| execute(&*self.exact_plan, self.x, &mut self.exact, None, ws));
        info?;
        self.exact_seconds.push(seconds);
        Ok(seconds)
    }

    pub(crate) fn measure(
        &mut self,
        chosen: &Chosen,
        share: Option<f64>,
        learnt: &mut Calibrations,
        ws: &mut Workspace,
    ) -> Result<Vec<Row>> {
        let begun = Instant::now();
        let p = self.problem;
        let seed = self.settings.seed;
        let (calibration, calibrate_seconds) = self.calibrate(chosen)?;
        if let (Some(calibration), Some(_)) = (&calibration, calibrate_seconds) {
            learnt.insert(self.layer, self.kv_head, calibration.clone());
        }
        let plan_for = |seed: u64| {
            let options = chosen.options_for(seed);
            let (plan, seconds) = timed(|| chosen.method.plan_with(&p, &options, calibration.as_ref()));
            plan.map(|plan| (plan, seconds)).map_err(|e| name_method(chosen, e))
        };
        let mut output = vec![f32::NAN; self.exact.len()];
        let mut lse = chosen.method.claims.lse.then(|| vec![f32::NAN; self.exact_lse.len()]);
        ws.scratch().trim();
        ws.scratch().reset_peak();
        let (first, peak_bytes) = self.settings.meter.watch(|| -> Result<_> {
            let (plan, setup) = plan_for(seed)?;
            let (info, run) = timed(|| execute(&*plan, self.x, &mut output, lse.as_deref_mut(), ws));
            Ok((plan.cost(), info?, setup, run))
        });
        let (cost, info, setup, run) = first?;
        let scratch_bytes = ws.scratch().peak_bytes();
        let mut errors: Vec<Vec<f64>> = self.relative_errors(&output).into_iter().map(|e| vec![e]).collect();
        let mut rows = self.rows(chosen, &output, lse.as_deref(), &info);

        // The warm-up stands in for the times until a warm run is there.
        let (mut setups, mut runs, mut exacts) = (Vec::new(), Vec::new(), Vec::new());
        let random = chosen.has_free_seed();
        let wanted = if random { self.settings.seeds.max(2) } else { self.settings.runs.max(1) + 1 };
        for s in 1..wanted {
            let spent = begun.elapsed().as_secs_f64();
            let enough = !random && !runs.is_empty() && spent > REPEAT_SECONDS;
            if enough || share.is_some_and(|share| spent + spent / s as f64 > share) {
                break;
            }
            exacts.push(self.time_exact(ws)?);
            let (plan, setup) = plan_for(seed.wrapping_add(s as u64))?;
            let (info, run) = timed(|| execute(&*plan, self.x, &mut output, None, ws));
            info?;
            setups.push(setup);
            runs.push(run);
            if random && s < self.settings.seeds {
                errors.iter_mut().zip(self.relative_errors(&output)).for_each(|(all, e)| all.push(e));
            }
        }
        let samples = runs.len();
        if runs.is_empty() {
            (setups, runs) = (vec![setup], vec![run]);
            exacts.clone_from(&self.exact_seconds);
        }
        let per_head = 1.0 / p.n_heads as f64;
        let (setup, run) = (median(&setups) * per_head, median(&runs) * per_head);
        let fold = |f: fn(f64, f64) -> f64| runs.iter().copied().reduce(f).unwrap_or(run) * per_head;
        for (row, errors) in rows.iter_mut().zip(&errors) {
            row.seeds = errors.len();
            row.rel_fro = Interval::student(errors);
            row.setup_seconds = setup;
            row.run_seconds = run;
            row.run_range = [fold(f64::min), fold(f64::max)];
            row.runs = samples;
            row.calibrate_seconds = calibrate_seconds.map(|s| s * per_head);
            row.speedup = median(&exacts) * per_head / (setup + run);
            row.counted_setup_share = cost.setup_flops as f64 / cost.flops().max(1) as f64;
            row.peak_bytes = peak_bytes.max(scratch_bytes);
            row.scratch_bytes = scratch_bytes;
        }
        Ok(rows)
    }

    /// What was learnt before, or else from the first quarter of the tokens, where the method has to learn; with the
    /// seconds that learning took.
    fn calibrate(&self, chosen: &Chosen) -> Result<(Option<Calibration>, Option<f64>)> {
        if let Some(known) = self.given.find(chosen.method.id, self.layer, self.kv_head)? {
            return Ok((Some(known.clone()), None));
        }
        let (Needs::Calibration, Some(learn)) = (chosen.method.claims.needs, chosen.method.calibrate) else {
            return Ok((None, None));
        };
        let part = |n: usize| n.div_ceil(4);
        let (n_q, n_k) = (part(self.problem.n_q), part(self.problem.n_k));
        let x = Qkv::new(self.x.q.rows(0..n_q), self.x.k.rows(0..n_k), self.x.v.rows(0..n_k));
        let problem = self.problem.with_lens(n_q, n_k);
        let options = chosen.options_for(self.settings.seed);
        let (learnt, seconds) = timed(|| learn(&problem, &options, &[Inputs::from(x)]));
        Ok((Some(learnt.map_err(|e| name_method(chosen, e))?), Some(seconds)))
    }

    fn head_rows<'b>(&self, all: &'b [f32], head: usize, width: usize) -> &'b [f32] {
        let len = self.problem.n_q * width;
        &all[head * len..(head + 1) * len]
    }

    fn relative_errors(&self, output: &[f32]) -> Vec<f64> {
        let d_v = self.problem.d_v;
        (0..self.problem.n_heads)
            .map(|h| {
                let (got, exact) = (self.head_rows(output, h, d_v), self.head_rows(&self.exact, h, d_v));
                let sums = got.iter().zip(exact).fold((0.0, 0.0), |(gap, size), (g, e)| {
                    let (g, e) = (f64::from(*g), f64::from(*e));
                    (gap + (g - e) * (g - e), size + e * e)
                });
                if sums.0 == 0.0 { 0.0 } else { (sums.0 / sums.1).sqrt() }
            })
            .collect()
    }

    /// Rows with everything but times.
    fn rows(&self, chosen: &Chosen, output: &[f32], lse: Option<&[f32]>, info: &RunInfo) -> Vec<Row> {
        let params = chosen.params(&chosen.options_for(self.settings.seed));
        let family = chosen.method.family.name();
        (0..self.problem.n_heads)
            .map(|h| self.row(chosen.method.id, family, params.clone(), h, output, lse, info))
            .collect()
    }

    #[allow(clippy::too_many_arguments)]
    fn row(
        &self,
        method: &'static str,
        family: &'static str,
        params: serde_json::Map<String, serde_json::Value>,
        h: usize,
        output: &[f32],
        lse: Option<&[f32]>,
        info: &RunInfo,
    ) -> Row {
        let p = &self.problem;
        let got = self.head_rows(output, h, p.d_v);
        let exact = self.head_rows(&self.exact, h, p.d_v);
        let lse = lse.map(|l| (self.head_rows(l, h, 1), self.head_rows(&self.exact_lse, h, 1)));
        let errors = Errors::new(got, exact, p.d_v, lse);
        let (sample, sampled) = &self.samples[h];
        let evidence = Evidence {
            output: got,
            values: &self.values,
            d_v: p.d_v,
            sample,
            exact: sampled,
            empty_rows: p.mask == Mask::Causal && p.n_q > p.n_k || p.n_k == 0,
        };
        let pairs = p.visible_pairs();
        Row {
            method,
            family,
            params,
            layer: self.layer,
            head: self.first_head + h,
            seeds: 1,
            rel_fro: Interval::student(&[errors.rel_fro]),
            certified: certify(&evidence, self.settings.confidence, self.settings.seed),
            errors,
            setup_seconds: 0.0,
            run_seconds: 0.0,
            run_range: [0.0; 2],
            runs: 0,
            calibrate_seconds: None,
            speedup: 0.0,
            counted_setup_share: 0.0,
            peak_bytes: 0,
            scratch_bytes: 0,
            keys_visited: info.keys_visited / p.n_heads as u64,
            keys_share: if pairs == 0 { 0.0 } else { info.keys_visited as f64 / pairs as f64 },
            fallback_rows: info.fallback_rows,
            rank: info.rank,
            iterations: info.iterations,
            figures: info.figures.clone(),
            status: if got.iter().all(|x| x.is_finite()) { status_name(info.status) } else { "not_finite" },
        }
    }

    /// The trivial answer: the mean of the values that a row sees.
    fn mean_of_values(&self) -> Vec<Row> {
        let p = &self.problem;
        let d_v = p.d_v;
        let mut output = vec![0.0f32; self.exact.len()];
        let ((), seconds) = timed(|| {
            // Sums over the first 0, 1, …, n_k values.
            let mut sums = vec![0.0f64; (p.n_k + 1) * d_v];
            for (j, v) in self.values.chunks_exact(d_v).enumerate() {
                for (c, v) in v.iter().enumerate() {
                    sums[(j + 1) * d_v + c] = sums[j * d_v + c] + f64::from(*v);
                }
            }
            for (r, row) in output.chunks_exact_mut(d_v).enumerate() {
                let seen = visible(p, r % p.n_q);
                if seen > 0 {
                    let sum = &sums[seen * d_v..][..d_v];
                    row.iter_mut().zip(sum).for_each(|(o, s)| *o = (s / seen as f64) as f32);
                }
            }
        });
        let per_head = 1.0 / p.n_heads as f64;
        let rows = (0..p.n_heads).map(|h| {
            let mut row =
                self.row("mean_v", "baseline", Default::default(), h, &output, None, &RunInfo::default());
            row.run_seconds = seconds * per_head;
            row.run_range = [row.run_seconds; 2];
            row.runs = 1;
            row.speedup = median(&self.exact_seconds) / seconds;
            row.peak_bytes = (p.n_k + 1) * d_v * size_of::<f64>();
            row
        });
        rows.collect()
    }

    fn finish(&self, baseline: &mut Baseline) {
        let seconds = median(&self.exact_seconds);
        baseline.run_seconds += seconds;
        baseline.flops += self.exact_plan.cost().flops();
        baseline.peak_bytes = baseline.peak_bytes.max(self.exact_peak);
        baseline.heads.extend(self.heads().map(|head| BaselineHead {
            layer: self.layer,
            head,
            run_seconds: seconds / self.problem.n_heads as f64,
            runs: self.exact_seconds.len(),
        }));
    }
}

/// Keys that row `i` sees.
fn visible(p: &Problem, i: usize) -> usize {
    match p.mask {
        Mask::None => p.n_k,
        Mask::Causal => (p.n_k + i + 1).saturating_sub(p.n_q).min(p.n_k),
    }
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
fn summarise(result: &Comparison) -> Vec<Summary> {
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
        }
    };
    order.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::select::Choice;

    fn run(source: &str, methods: &[&str], set: &[&str], settings: Settings) -> Comparison {
        let workload = source.parse::<crate::Source>().unwrap().load().unwrap();
        let owned = |x: &[&str]| x.iter().map(|s| s.to_string()).collect();
        let selection = Choice { methods: owned(methods), family: None, set: owned(set) }.resolve().unwrap();
        compare(&workload, &selection, &settings, &mut |_| (), &AtomicBool::new(false)).unwrap()
    }

    fn error(c: &Comparison, method: &str, head: usize) -> f64 {
        c.rows.iter().find(|r| r.method == method && r.head == head).unwrap().rel_fro.mean
    }

    #[test]
    fn the_oracle_agrees_and_a_full_budget_is_exact() {
        let settings = Settings { mask: Some(Mask::Causal), threads: 1, ..Settings::default() };
        let c = run(
            "synthetic:clustered,n=300,d=16,heads=4,kv_heads=2",
            &["naive", "top_k"],
            &["top_k.keys=300"],
            settings,
        );
        for head in 0..4 {
            // Rounding of single precision: 16 products, 300 terms.
            assert!(
                error(&c, "naive", head) < 16.0 * f64::from(f32::EPSILON),
                "{}",
                error(&c, "naive", head)
            );
            assert_eq!(error(&c, "top_k", head), 0.0);
            assert!(error(&c, "mean_v", head) > 0.3);
        }
        let row = c.rows.iter().find(|r| r.method == "top_k").unwrap();
        assert_eq!((row.status, row.keys_share), ("exact", 1.0));
        assert_eq!(c.rows.len(), 3 * 4);
        assert_eq!(c.summary.iter().map(|s| s.method).collect::<Vec<_>>(), ["mean_v", "naive", "top_k"]);
        assert_eq!(c.exact.heads.len(), 4);
        assert_eq!(row.params["keys"], 300);
    }

    #[test]
    fn the_mean_of_values_has_the_error_of_the_method_pages() {
        // 0.81, 0.99 and 1.01 on the clustering page's workloads; 1.00 and 0.82 on those of the low-rank page.
        for (kind, wanted) in [
            ("gaussian", 0.83),
            ("clustered", 0.99),
            ("heavy_hitters", 1.01),
            ("low_rank", 1.0),
            ("smooth", 0.82),
        ] {
            let settings = Settings { time_limit: Some(0.0), ..Settings::default() };
            let c = run(&format!("synthetic:{kind}"), &["sink_window"], &[], settings);
            let found = error(&c, "mean_v", 0);
            assert!((found / wanted - 1.0).abs() < 0.1, "{kind}: {found} for {wanted}");
        }
    }

    #[test]
    fn certificates_cover_the_error_they_bound() {
        let settings = Settings { certify_rows: 200, ..Settings::default() };
        let c = run(
            "synthetic:clustered,n=400,d=32,heads=6",
            &["top_k", "sink_window"],
            &["sink_window.window=380"],
            settings,
        );
        let certified: Vec<&Row> = c.rows.iter().filter(|r| r.certified.bound.is_some()).collect();
        assert!(!certified.is_empty());
        for row in certified {
            assert!(row.certified.bound.unwrap() >= row.errors.rel_fro, "{} {:?}", row.method, row.certified);
        }
        let all = run("synthetic:clustered,n=100,d=8", &["top_k"], &["top_k.keys=9"], Settings::default());
        assert_eq!(all.rows[1].certified.bound, Some(all.rows[1].certified.estimate));
        assert!((all.rows[1].certified.estimate / all.rows[1].errors.rel_fro - 1.0).abs() < 1e-9);
    }

    #[test]
    fn a_spent_time_limit_and_a_stop_leave_what_is_finished() {
        let settings = Settings { time_limit: Some(0.0), ..Settings::default() };
        let c = run("synthetic:gaussian,n=50,d=8", &["top_k"], &[], settings);
        assert_eq!((c.skipped.len(), c.rows.len()), (1, 1));
        let workload = "synthetic:gaussian,n=50,d=8".parse::<crate::Source>().unwrap().load().unwrap();
        let selection = Choice::default().resolve().unwrap();
        let stop = AtomicBool::new(true);
        let c = compare(&workload, &selection, &Settings::default(), &mut |_| (), &stop).unwrap();
        assert!(c.interrupted && c.rows.iter().all(|r| r.method == "mean_v"));
    }

    #[test]
    fn a_parameter_out_of_range_names_its_method() {
        let workload = "synthetic:gaussian,n=50,d=8".parse::<crate::Source>().unwrap().load().unwrap();
        let selection = Choice { set: vec!["top_k.keys=0".into()], ..Choice::default() }.resolve().unwrap();
        let result =
            compare(&workload, &selection, &Settings::default(), &mut |_| (), &AtomicBool::new(false));
        let message = result.unwrap_err().to_string();
        assert!(message.contains("top_k.keys = 0") && message.contains("from 1 to"), "{message}");
    }

    #[test]
    fn results_do_not_depend_on_the_number_of_threads() {
        let with = |threads| {
            let c = run(
                "synthetic:needle,n=200,d=16,heads=2",
                &["all"],
                &[],
                Settings { threads, ..Settings::default() },
            );
            c.rows.iter().map(|r| (r.method, r.head, r.rel_fro.mean.to_bits())).collect::<Vec<_>>()
        };
        assert_eq!(with(1), with(2));
    }
}
