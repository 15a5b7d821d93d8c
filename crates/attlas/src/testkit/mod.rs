//! Checks that every method must pass, for the methods here and for your own.
//!
//! [`check_method`] reads a method's claims and tries to refute each of them, and every rule that holds for all
//! methods. [`Case`] builds inputs, [`reference()`] computes slow reference outputs, and [`run_method`] runs a method
//! with outputs and scratch memory full of NaN. Checks panic with the method, the setting, the shape and the first
//! difference.

pub mod adversarial;
mod checks;
pub mod golden;
pub mod heads;
#[cfg(test)]
mod liars;
pub mod workloads;

pub use checks::check_method;

use crate::method::{Method, Plan};
use crate::{Options, Out, Problem, Qkv, Real, Result, RunInfo, Schedule, TensorMut, TensorRef, Workspace};
use attlas_num::Scratch;
use attlas_num::rng::StreamKey;

/// Inputs of a problem, contiguous `[batch, heads, rows, columns]`, kept in double precision.
#[derive(Clone, Debug)]
pub struct Case {
    /// Sizes and mask.
    pub problem: Problem,
    /// Queries.
    pub q: Vec<f64>,
    /// Keys.
    pub k: Vec<f64>,
    /// Values.
    pub v: Vec<f64>,
    /// True if it runs in single precision.
    pub single: bool,
}

impl Case {
    /// Draws independent standard normal queries, keys and values.
    pub fn gaussian(problem: Problem, seed: u64) -> Self {
        let p = &problem;
        let fill = |what: &str, n: usize| {
            let mut rng = StreamKey::new(seed).named(what).rng();
            (0..n).map(|_| rng.normal()).collect::<Vec<f64>>()
        };
        Self {
            q: fill("q", p.batch * p.n_heads * p.n_q * p.d),
            k: fill("k", p.batch * p.n_kv_heads * p.n_k * p.d),
            v: fill("v", p.batch * p.n_kv_heads * p.n_k * p.d_v),
            problem,
            single: false,
        }
    }

    /// Rounds the case to single precision, in which it then runs.
    #[must_use]
    pub fn cast_f32(mut self) -> Self {
        for x in self.q.iter_mut().chain(&mut self.k).chain(&mut self.v) {
            *x = f64::from(*x as f32);
        }
        self.single = true;
        self
    }

    /// Returns the same data as another problem of the same sizes.
    #[must_use]
    pub fn with_problem(&self, problem: Problem) -> Self {
        Self { problem, ..self.clone() }
    }

    /// Returns the case with the first `n` keys and values of every head.
    #[must_use]
    pub fn with_keys(&self, n: usize) -> Self {
        let p = &self.problem;
        let cut = |data: &[f64], cols: usize| {
            data.chunks(p.n_k * cols).flat_map(|head| head[..n * cols].to_vec()).collect::<Vec<f64>>()
        };
        Self {
            problem: Problem { n_k: n, ..*p },
            q: self.q.clone(),
            k: cut(&self.k, p.d),
            v: cut(&self.v, p.d_v),
            single: self.single,
        }
    }

    /// Iterates over the rows of key head `h` of the first sequence.
    pub fn key_rows(&mut self, h: usize) -> impl Iterator<Item = &mut [f64]> {
        let (n, d) = (self.problem.n_k, self.problem.d);
        self.k[h * n * d..(h + 1) * n * d].chunks_mut(d)
    }
}

/// Settings of [`run_with`].
#[derive(Clone, Copy, Debug)]
pub struct How {
    /// Threads, tiles and instruction set.
    pub schedule: Schedule,
    /// True if inputs and outputs are `[batch, rows, heads, columns]`.
    pub token_major: bool,
    /// True if the log-sum-exp is requested.
    pub lse: bool,
}

impl Default for How {
    fn default() -> Self {
        Self { schedule: Schedule { threads: 1, ..Schedule::default() }, token_major: false, lse: true }
    }
}

/// Output, log-sum-exp (NaN if the method has none) and record of a run.
#[derive(Clone, Debug)]
pub struct Ran {
    /// Output rows, `[batch, heads, rows, columns]`, widened to double precision.
    pub o: Vec<f64>,
    /// Log-sum-exp of the rows.
    pub lse: Vec<f64>,
    /// Record of the run.
    pub info: RunInfo,
    /// Peak scratch memory in bytes.
    pub peak_bytes: usize,
}

/// Runs a plan on a case with outputs and scratch memory full of NaN.
pub fn run_with(plan: &dyn Plan, case: &Case, how: How) -> Result<Ran> {
    if case.single { run_typed::<f32>(plan, case, how) } else { run_typed::<f64>(plan, case, how) }
}

/// Turns `[b, h, n, c]` into `[b, n, h, c]` or back, with the two middle sizes as given.
fn swap_axes<T: Copy>(x: &[T], [b, h, n, c]: [usize; 4]) -> Vec<T> {
    let mut out = Vec::with_capacity(x.len());
    for b in 0..b {
        for i in 0..n {
            for h_ in 0..h {
                let start = ((b * h + h_) * n + i) * c;
                out.extend_from_slice(&x[start..start + c]);
            }
        }
    }
    out
}

fn run_typed<T: Real>(plan: &dyn Plan, case: &Case, how: How) -> Result<Ran>
where
    for<'a> Qkv<'a, T>: Into<crate::Inputs<'a>>,
    for<'a> Out<'a, T>: Into<crate::Output<'a>>,
{
    let p = case.problem;
    let dims = |h, n, c| [p.batch, h, n, c];
    let load = |x: &[f64], dims: [usize; 4]| {
        let x: Vec<T> = x.iter().map(|&x| T::from_f64(x)).collect();
        if how.token_major { swap_axes(&x, dims) } else { x }
    };
    fn view<T>(x: &[T], dims: [usize; 4], token_major: bool) -> Result<TensorRef<'_, T>> {
        if token_major { TensorRef::bnhd(x, dims) } else { TensorRef::bhnd(x, dims) }
    }
    let (dq, dk) = (dims(p.n_heads, p.n_q, p.d), dims(p.n_kv_heads, p.n_k, p.d));
    let (dv, dout) = (dims(p.n_kv_heads, p.n_k, p.d_v), dims(p.n_heads, p.n_q, p.d_v));
    let (q, k, v) = (load(&case.q, dq), load(&case.k, dk), load(&case.v, dv));
    let x = Qkv::new(
        view(&q, dq, how.token_major)?,
        view(&k, dk, how.token_major)?,
        view(&v, dv, how.token_major)?,
    );
    let mut o = vec![T::NAN; dout.iter().product()];
    let mut lse = vec![T::NAN; p.batch * p.n_heads * p.n_q];
    let mut ws = Workspace::with_scratch(how.schedule, Scratch::poisoned())?;
    let tensor =
        if how.token_major { TensorMut::bnhd(&mut o, dout)? } else { TensorMut::bhnd(&mut o, dout)? };
    let out = if how.lse { Out::with_lse(tensor, &mut lse) } else { Out::new(tensor) };
    let info = plan.execute(&x.into(), &mut out.into(), &mut ws)?;
    let o = if how.token_major { swap_axes(&o, [p.batch, p.n_q, p.n_heads, p.d_v]) } else { o };
    let widen = |x: Vec<T>| x.into_iter().map(Real::to_f64).collect();
    Ok(Ran { o: widen(o), lse: widen(lse), info, peak_bytes: ws.scratch().peak_bytes() })
}

/// Plans and runs a method on one thread; panics on an error. The log-sum-exp is NaN if the method claims none.
pub fn run_method(method: &Method, options: &Options, case: &Case) -> (Vec<f64>, Vec<f64>) {
    let how = How { lse: method.claims.lse, ..How::default() };
    let ran = method
        .plan(&case.problem, options)
        .and_then(|plan| run_with(&*plan, case, how))
        .unwrap_or_else(|e| panic!("{} with {options} on {:?}: {e}", method.id, case.problem));
    (ran.o, ran.lse)
}

/// Computes softmax attention in double precision, in two passes: output and log-sum-exp.
pub fn reference(case: &Case) -> (Vec<f64>, Vec<f64>) {
    reference_masked(case, |_, _| true)
}

/// Computes softmax attention in which row `i` sees key `j` only if `visible(i, j)` and the problem's mask allow it.
pub fn reference_masked(case: &Case, visible: impl Fn(usize, usize) -> bool) -> (Vec<f64>, Vec<f64>) {
    reference_weights(case, |i, j, s| if visible(i, j) { s } else { f64::NEG_INFINITY })
}

/// Computes softmax attention with the logit of row `i` and key `j` replaced by `logit(i, j, s)`; −∞ hides a key.
pub fn reference_weights(case: &Case, logit: impl Fn(usize, usize, f64) -> f64) -> (Vec<f64>, Vec<f64>) {
    let p = &case.problem;
    let mut o = vec![0.0; p.batch * p.n_heads * p.n_q * p.d_v];
    let mut lse = vec![f64::NEG_INFINITY; p.batch * p.n_heads * p.n_q];
    for row in 0..lse.len() {
        let (bh, i) = (row / p.n_q, row % p.n_q);
        let kv = bh / p.n_heads * p.n_kv_heads + (bh % p.n_heads) / p.group_size();
        let q = &case.q[row * p.d..(row + 1) * p.d];
        let last = p.visible(i);
        let logits: Vec<f64> = (0..last)
            .map(|j| {
                let k = &case.k[(kv * p.n_k + j) * p.d..][..p.d];
                logit(i, j, p.scale * q.iter().zip(k).map(|(a, b)| a * b).sum::<f64>())
            })
            .collect();
        let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if max == f64::NEG_INFINITY {
            continue;
        }
        let z: f64 = logits.iter().map(|s| (s - max).exp()).sum();
        lse[row] = max + z.ln();
        for (j, s) in logits.iter().enumerate() {
            let w = (s - max).exp() / z;
            let v = &case.v[(kv * p.n_k + j) * p.d_v..][..p.d_v];
            o[row * p.d_v..(row + 1) * p.d_v].iter_mut().zip(v).for_each(|(o, v)| *o += w * v);
        }
    }
    (o, lse)
}

/// Panics with the first element that differs by more than `tolerance` times the largest value.
pub fn assert_rows_close(got: &[f64], want: &[f64], tolerance: f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}: lengths differ");
    let size = want.iter().filter(|x| x.is_finite()).fold(1e-300f64, |a, x| a.max(x.abs()));
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let same = g == w || (g.is_nan() && w.is_nan()) || (g - w).abs() <= tolerance * size;
        assert!(same, "{what}: element {i} is {g}, expected {w} within {:e}", tolerance * size);
    }
}

/// Panics with the first element whose bits differ.
pub fn assert_same_bits(got: &[f64], want: &[f64], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}: lengths differ");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!(
            g.to_bits() == w.to_bits() || g.is_nan() && w.is_nan(),
            "{what}: element {i} is {g:e}, expected {w:e} bit for bit"
        );
    }
}
