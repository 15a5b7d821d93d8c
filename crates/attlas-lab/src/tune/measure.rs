//! Timing of candidates on one key head beside exact attention, in prompts and for new tokens.

use super::candidates::Candidate;
use crate::Result;
use crate::run::{execute, timed};
use crate::stats::median;
use crate::workload::LayerData;
use attlas::{
    Calibration, DType, Mask, Method, Options, Out, Plan, Problem, Qkv, Status, TensorMut, Workspace,
    registry,
};

/// A key head with its query heads and their exact output.
pub(super) struct Unit<'a> {
    problem: Problem,
    x: Qkv<'a, f32>,
    /// Number of rows of every head with known exact output: the last ones.
    rows: usize,
    exact: Vec<f32>,
    exact_seconds: Vec<f64>,
}

/// Measurements of a candidate.
pub(super) struct Seen {
    /// Largest relative error of the query heads; none if an output is not finite.
    pub(super) error: Option<f64>,
    pub(super) seconds: f64,
    /// Time over exact attention's.
    pub(super) cost: f64,
    /// True if the candidate computed exact attention.
    pub(super) exact: bool,
    /// The output, `[heads, rows, d_v]`: all rows of a prompt, or those of the new tokens.
    pub(super) output: Vec<f32>,
}

impl<'a> Unit<'a> {
    /// Computes the exact output of the last `rows` rows, or of all.
    pub(super) fn new(
        layer: &'a LayerData,
        g: usize,
        rows: Option<usize>,
        ws: &mut Workspace,
    ) -> Result<Self> {
        let problem = layer.group_problem(Mask::Causal);
        let x = layer.group(g)?;
        let (n, rows) = (problem.n_q, rows.unwrap_or(problem.n_q));
        let plan = registry::baseline().plan(&problem.with_lens(rows, problem.n_k), &Options::new())?;
        let mut exact = vec![f32::NAN; problem.n_heads * rows * problem.d_v];
        let last = Qkv::new(x.q.rows(n - rows..n), x.k, x.v);
        let (info, seconds) = timed(|| execute(&*plan, last, &mut exact, None, ws));
        info?;
        Ok(Self { problem, x, rows, exact, exact_seconds: vec![seconds] })
    }

    /// Returns the last `rows` rows of every head from an output of the whole prompt.
    pub(super) fn last(&self, output: &[f32], rows: usize) -> Vec<f32> {
        let (n, d) = (self.problem.n_q, self.problem.d_v);
        output.chunks(n * d).flat_map(|h| h[(n - rows) * d..].iter().copied()).collect()
    }

    /// Measures the whole prompt. Exact attention is timed beside every run after the first.
    pub(super) fn prompt(
        &mut self,
        candidate: &Candidate,
        calibration: Option<&Calibration>,
        runs: usize,
        ws: &mut Workspace,
    ) -> Result<Seen> {
        let p = self.problem;
        let mut output = vec![f32::NAN; self.exact.len()];
        let (mut all, mut exact) = (Vec::new(), false);
        for run in 0..runs.max(1) {
            if run > 0 {
                let plan = registry::baseline().plan(&p, &Options::new())?;
                let mut again = vec![0.0; self.exact.len()];
                let (info, seconds) = timed(|| execute(&*plan, self.x, &mut again, None, ws));
                info?;
                self.exact_seconds.push(seconds);
            }
            let (info, seconds) = timed(|| -> Result<_> {
                let plan = candidate.method.plan_with(&p, &candidate.options, calibration)?;
                execute(&*plan, self.x, &mut output, None, ws)
            });
            exact = info?.status == Status::Exact;
            all.push(seconds);
        }
        let seconds = median(&all);
        let cost = seconds / median(&self.exact_seconds).max(1e-9);
        let error = self.error(&output, p.n_q);
        Ok(Seen { error, seconds, cost, exact, output })
    }

    /// Measures the last `steps` tokens one by one after the others. Exact attention is timed beside them, both on the
    /// single thread of `ws`: in a model the heads of a layer share the threads, and the total work counts.
    pub(super) fn decode(
        &self,
        candidate: &Candidate,
        calibration: Option<&Calibration>,
        steps: usize,
        ws: &Workspace,
    ) -> Result<Seen> {
        let d_v = self.problem.d_v;
        let mut output = vec![f32::NAN; self.problem.n_heads * steps * d_v];
        let plan = candidate.method.plan_with(&self.problem, &candidate.options, calibration)?;
        let keep = |i: usize, row: &[f32]| {
            for (h, row) in row.chunks(d_v).enumerate() {
                output[(h * steps + i) * d_v..][..d_v].copy_from_slice(row);
            }
        };
        let (seconds, exact) = self.tokens(candidate.method, &*plan, steps, keep, ws)?;
        let baseline = registry::baseline();
        let plan = baseline.plan(&self.problem, &Options::new())?;
        let (beside, _) = self.tokens(baseline, &*plan, steps, |_, _| (), ws)?;
        let cost = seconds / beside.max(1e-9);
        Ok(Seen { error: self.error(&output, steps), seconds, cost, exact, output })
    }

    /// Returns the mean seconds of a new token over the last `steps`, without the first, in which methods finish their
    /// work on the prompt; and true if every answer was exact attention's. `keep` receives the outputs.
    fn tokens(
        &self,
        method: &Method,
        plan: &dyn Plan,
        steps: usize,
        mut keep: impl FnMut(usize, &[f32]) + Send,
        ws: &Workspace,
    ) -> Result<(f64, bool)> {
        let Problem { n_heads, n_k: n, d_v, .. } = self.problem;
        let Some(mut stream) = plan.stream(DType::F32) else {
            let reasons = vec!["it has no form for new tokens".to_owned()];
            return Err(attlas::Error::Unsupported { method: method.id.into(), reasons }.into());
        };
        let mut inner = ws.sibling();
        let mut row = vec![f32::NAN; n_heads * d_v];
        // Runs on the thread itself: handing over a token takes as long as some tokens do.
        ws.install(|_| {
            let known = 0..n - steps;
            let (k, v) = (self.x.k, self.x.v);
            stream.push(k.rows(known.clone()).into(), v.rows(known).into(), &mut inner)?;
            let (mut all, mut first, mut exact) = (0.0, 0.0, true);
            for (i, t) in (n - steps..n).enumerate() {
                let (info, seconds) = timed(|| -> Result<_> {
                    stream.push(k.rows(t..t + 1).into(), v.rows(t..t + 1).into(), &mut inner)?;
                    let out = TensorMut::new(&mut row, [1, n_heads, 1, d_v], [0, d_v, d_v])?;
                    let q = self.x.q.rows(t..t + 1);
                    Ok(stream.attend(q.into(), &mut Out::new(out).into(), &mut inner)?)
                });
                exact &= info?.status == Status::Exact;
                all += seconds;
                if i == 0 {
                    first = seconds;
                }
                keep(i, &row);
            }
            let seconds = if steps > 1 { (all - first) / (steps - 1) as f64 } else { all };
            Ok((seconds, exact))
        })
    }

    /// Returns the largest relative error of a head over the last `rows` rows.
    fn error(&self, output: &[f32], rows: usize) -> Option<f64> {
        let (n, d) = (self.rows, self.problem.d_v);
        let mut worst = 0.0f64;
        for (got, exact) in output.chunks(rows * d).zip(self.exact.chunks(n * d)) {
            let exact = &exact[(n - rows) * d..];
            let (gap, size) = got.iter().zip(exact).fold((0.0, 0.0), |(gap, size), (g, e)| {
                let (g, e) = (f64::from(*g), f64::from(*e));
                (gap + (g - e) * (g - e), size + e * e)
            });
            let error = if gap == 0.0 { 0.0 } else { (gap / size).sqrt() };
            if !error.is_finite() {
                return None;
            }
            worst = worst.max(error);
        }
        Some(worst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attlas::Schedule;

    #[test]
    fn prompts_and_new_tokens_are_compared_with_the_same_rows() {
        let workload = "synthetic:clustered,n=256,d=8,heads=4,kv_heads=2"
            .parse::<crate::Source>()
            .unwrap()
            .load()
            .unwrap();
        let mut ws = Workspace::new(Schedule { threads: 1, ..Schedule::default() }).unwrap();
        let mut unit = Unit::new(&workload.layers[0], 1, None, &mut ws).unwrap();
        let window = |keys: usize| Candidate {
            method: registry::method("sink_window").unwrap(),
            options: Options::new().with("window", keys),
        };
        let whole = unit.prompt(&window(32), None, 2, &mut ws).unwrap();
        assert!(whole.error.unwrap() > 0.01 && whole.cost > 0.0 && !whole.exact);
        let new = unit.decode(&window(32), None, 16, &ws).unwrap();
        // A window treats a token alike in a prompt and after it.
        let last = unit.last(&whole.output, 16);
        let gap = new.output.iter().zip(&last).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(gap < 1e-5, "{gap}");
        assert!(new.cost > 0.0 && new.seconds > 0.0 && !new.exact);
        let few = Unit::new(&workload.layers[0], 1, Some(16), &mut ws).unwrap();
        let again = few.decode(&window(32), None, 16, &ws).unwrap();
        assert!((again.error.unwrap() - new.error.unwrap()).abs() < 1e-5);
        let all = few.decode(&window(512), None, 16, &ws).unwrap();
        assert!(all.error.unwrap() < 1e-5);
    }
}
