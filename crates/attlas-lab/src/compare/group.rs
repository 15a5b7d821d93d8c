//! Timing of one key head with the query heads that share it.

use super::records::{Baseline, BaselineHead, Row, status_name};
use super::{Settings, name_method};
use crate::Result;
use crate::calibration::Calibrations;
use crate::run::{execute, timed};
use crate::select::{Chosen, baseline};
use crate::stats::{Interval, median};
use crate::workload::LayerData;
use attlas::method::Needs;
use attlas::metrics::Errors;
use attlas::{Calibration, Inputs, Mask, Options, Plan, Problem, Qkv, RunInfo, Workspace};
use std::time::Instant;

/// Seconds of a run beyond which an optional repetition is skipped.
const REPEAT_SECONDS: f64 = 0.5;

/// One key head with its query heads, its exact output, and the exact times measured so far.
pub(crate) struct Group<'a> {
    settings: &'a Settings,
    seed: u64,
    given: &'a Calibrations,
    kv_head: usize,
    layer: Option<usize>,
    first_head: usize,
    /// Errors count the rows from here on.
    first_row: usize,
    problem: Problem,
    x: Qkv<'a, f32>,
    exact_plan: Box<dyn Plan>,
    exact: Vec<f32>,
    exact_lse: Vec<f32>,
    exact_seconds: Vec<f64>,
    exact_peak: usize,
    values: Vec<f32>,
}

impl<'a> Group<'a> {
    pub(crate) fn new(
        layer: &'a LayerData,
        g: usize,
        mask: Mask,
        settings: &'a Settings,
        seed: u64,
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
            settings.meter.watch(ws, |ws| execute(&*exact_plan, x, &mut exact, Some(&mut lse), ws));
        info?;
        let first_head = g * problem.n_heads;
        let first_row = settings.first_row.min(problem.n_q.saturating_sub(1));
        let values = layer.v[g * problem.n_k * problem.d_v..][..problem.n_k * problem.d_v].to_vec();
        let mut group = Self {
            settings,
            seed,
            given,
            kv_head: g,
            layer: layer.layer,
            first_head,
            first_row,
            problem,
            x,
            exact_plan,
            exact,
            exact_lse: lse,
            exact_seconds: Vec::new(),
            exact_peak,
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

    pub(super) fn heads(&self) -> impl Iterator<Item = usize> {
        self.first_head..self.first_head + self.problem.n_heads
    }

    /// Times one more run of exact attention.
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
        let seed = self.seed;
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
        let (first, peak_bytes) = self.settings.meter.watch(ws, |ws| -> Result<_> {
            let (plan, setup) = plan_for(seed)?;
            let (info, run) = timed(|| execute(&*plan, self.x, &mut output, lse.as_deref_mut(), ws));
            Ok((plan.cost(), info?, setup, run))
        });
        let (cost, info, setup, run) = first?;
        let scratch_bytes = ws.scratch().peak_bytes();
        let mut errors: Vec<Vec<f64>> = self.relative_errors(&output).into_iter().map(|e| vec![e]).collect();
        let mut rows = self.rows(chosen, &output, lse.as_deref(), &info);

        // The warm-up gives the times until there is a warm run.
        let (mut setups, mut runs, mut exacts) = (Vec::new(), Vec::new(), Vec::new());
        let random = chosen.has_free_seed();
        // With few seeds there are more runs than seeds: the time of a single run says little.
        let times = self.settings.runs.max(1) + 1;
        let wanted = if random { self.settings.seeds.max(times) } else { times };
        for s in 1..wanted {
            let spent = begun.elapsed().as_secs_f64();
            let last_seed = !random || s >= self.settings.seeds;
            let enough = last_seed && !runs.is_empty() && spent > REPEAT_SECONDS;
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

    /// Returns the calibration of a method that needs one: the given one, or one learnt from the first quarter of the
    /// tokens, with the seconds of learning.
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
        let options = chosen.options_for(self.seed);
        let (learnt, seconds) = timed(|| learn(&problem, &options, &[Inputs::from(x)]));
        Ok((Some(learnt.map_err(|e| name_method(chosen, e))?), Some(seconds)))
    }

    fn head_rows<'b>(&self, all: &'b [f32], head: usize, width: usize) -> &'b [f32] {
        let len = self.problem.n_q * width;
        &all[head * len + self.first_row * width..(head + 1) * len]
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

    /// Returns the rows with everything but times.
    fn rows(&self, chosen: &Chosen, output: &[f32], lse: Option<&[f32]>, info: &RunInfo) -> Vec<Row> {
        let params = chosen.params(&chosen.options_for(self.seed));
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
        let pairs = p.visible_pairs();
        Row {
            method,
            family,
            params,
            layer: self.layer,
            head: self.first_head + h,
            queries: p.n_q,
            seeds: 1,
            rel_fro: Interval::student(&[errors.rel_fro]),
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
            node: None,
            status: if got.iter().all(|x| x.is_finite()) { status_name(info.status) } else { "not_finite" },
        }
    }

    /// Returns the rows of the trivial baseline: the mean of the values that a row attends to.
    pub(super) fn mean_of_values(&self) -> Vec<Row> {
        let p = &self.problem;
        let d_v = p.d_v;
        let mut output = vec![0.0f32; self.exact.len()];
        let ((), seconds) = timed(|| {
            // Prefix sums over the first 0, 1, …, n_k values.
            let mut sums = vec![0.0f64; (p.n_k + 1) * d_v];
            for (j, v) in self.values.chunks_exact(d_v).enumerate() {
                for (c, v) in v.iter().enumerate() {
                    sums[(j + 1) * d_v + c] = sums[j * d_v + c] + f64::from(*v);
                }
            }
            for (r, row) in output.chunks_exact_mut(d_v).enumerate() {
                let seen = p.visible(r % p.n_q);
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

    pub(super) fn finish(&self, baseline: &mut Baseline) {
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
