//! Inputs that break careless numerics, for tests of bounds and degenerate cases beside random inputs.

use super::Case;
use crate::{Calibration, Inputs, Method, Options, Problem, Qkv, Result, TensorRef};
use attlas_num::rng::StreamKey;

/// A hazard, applied to standard normal inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Adversary {
    /// Nothing; the inputs stay random.
    None,
    /// All keys are equal: no variance, kernels of rank one.
    EqualKeys,
    /// Keys and queries are zero.
    Zero,
    /// Queries are zero.
    ZeroQueries,
    /// Three distinct keys, repeated.
    Duplicates,
    /// One key in the middle holds nearly all mass.
    Sink,
    /// Keys come in opposite pairs and are far from zero.
    OppositePairs,
    /// Logits in the hundreds.
    Peaked,
    /// Keys of lengths over twelve decades.
    Scales,
    /// All queries equal.
    EqualQueries,
    /// Values are constant but for one that is a million times larger.
    ValueSpike,
}

impl Adversary {
    /// All hazards.
    pub const ALL: [Adversary; 11] = [
        Adversary::None,
        Adversary::EqualKeys,
        Adversary::Zero,
        Adversary::ZeroQueries,
        Adversary::Duplicates,
        Adversary::Sink,
        Adversary::OppositePairs,
        Adversary::Peaked,
        Adversary::Scales,
        Adversary::EqualQueries,
        Adversary::ValueSpike,
    ];

    /// Makes inputs of this kind; all key heads are treated alike.
    pub fn case(self, problem: Problem, seed: u64) -> Case {
        let mut x = Case::gaussian(problem, seed);
        let Problem { n_k, d, d_v, .. } = problem;
        if n_k == 0 {
            return x;
        }
        let heads = x.k.chunks_exact_mut(n_k * d);
        match self {
            Adversary::None => {}
            Adversary::EqualKeys => heads.for_each(|k| repeat_rows(k, d, 1)),
            Adversary::Zero => {
                x.q.fill(0.0);
                x.k.fill(0.0);
            }
            Adversary::ZeroQueries => x.q.fill(0.0),
            Adversary::Duplicates => heads.for_each(|k| repeat_rows(k, d, 3)),
            Adversary::Sink => {
                x.q.chunks_exact_mut(d).for_each(|q| q[0] = 8.0);
                heads.for_each(|k| k[n_k / 2 * d] = 10.0 * (d as f64).sqrt());
            }
            Adversary::OppositePairs => heads.for_each(|k| {
                for j in (1..n_k).step_by(2) {
                    let (a, b) = k.split_at_mut(j * d);
                    b[..d].iter_mut().zip(&a[(j - 1) * d..]).for_each(|(b, a)| *b = 20.0 - a);
                }
            }),
            Adversary::Peaked => {
                x.q.iter_mut().for_each(|q| *q *= 15.0);
                x.k.iter_mut().for_each(|k| *k *= 10.0);
            }
            Adversary::Scales => heads.for_each(|k| {
                for (j, k) in k.chunks_exact_mut(d).enumerate() {
                    let size = 10f64.powf(1.0 - 12.0 * j as f64 / n_k as f64);
                    k.iter_mut().for_each(|k| *k *= size);
                }
            }),
            Adversary::EqualQueries => {
                let n = problem.n_q * d;
                x.q.chunks_exact_mut(n.max(1)).for_each(|q| repeat_rows(q, d, 1));
            }
            Adversary::ValueSpike => {
                let spike = StreamKey::new(seed).named("spike").rng().below(n_k);
                for v in x.v.chunks_exact_mut(n_k * d_v) {
                    v.fill(1.0);
                    v[spike * d_v..(spike + 1) * d_v].fill(1e6);
                }
            }
        }
        x
    }
}

/// Repeats the first `distinct` rows to the end.
fn repeat_rows(x: &mut [f64], d: usize, distinct: usize) {
    for i in distinct * d..x.len() {
        x[i] = x[i - distinct * d];
    }
}

/// Learns the calibration of a method from the inputs themselves.
pub fn learn(method: &Method, options: &Options, case: &Case) -> Result<Option<Calibration>> {
    let Some(calibrate) = method.calibrate else { return Ok(None) };
    let p = &case.problem;
    let x = Qkv::new(
        TensorRef::bhnd(&case.q, [p.batch, p.n_heads, p.n_q, p.d])?,
        TensorRef::bhnd(&case.k, [p.batch, p.n_kv_heads, p.n_k, p.d])?,
        TensorRef::bhnd(&case.v, [p.batch, p.n_kv_heads, p.n_k, p.d_v])?,
    );
    calibrate(p, options, &[Inputs::F64(x)]).map(Some)
}
