//! Structured synthetic inputs, for which the accuracies of the clustering methods are stated, and the measurement of
//! such accuracies.

use super::{Case, run_method};
use crate::{Method, Options, Problem, metrics, registry};
use attlas_num::rng::StreamKey;

/// Returns the problem of the stated figures: one head, 2048 tokens of width 64, no mask.
pub fn stated() -> Problem {
    Problem::new(1, 2048, 64)
}

/// Draws [`Case::gaussian`] of the [`stated`] problem: diffuse attention, useful for speed but not for quality.
pub fn diffuse(seed: u64) -> Case {
    Case::gaussian(stated(), seed)
}

/// Draws [`Case::clustered`] of the [`stated`] problem.
pub fn clustered(seed: u64) -> Case {
    Case::clustered(stated(), seed)
}

/// Draws [`Case::with_heavy_sinks`] of the [`stated`] problem.
pub fn sinks(seed: u64) -> Case {
    Case::with_heavy_sinks(stated(), seed)
}

/// Accuracy of a method relative to exact attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Quality {
    /// Relative Frobenius error of the outputs.
    pub error: f64,
    /// Mean over rows of $e^{\hat\ell - \ell}$: the share of the normaliser that was found; NaN if the method has no
    /// log-sum-exp.
    pub mass: f64,
}

/// Measures error and mass of a method, averaged over cases from `make(seed)` for the seeds `0..seeds`, which also seed
/// the method if it draws numbers.
pub fn measure(method: &Method, options: &Options, make: impl Fn(u64) -> Case, seeds: u64) -> Quality {
    let exact = registry::method("exact").unwrap_or_else(|e| panic!("{e}"));
    let seeded = method.params.iter().any(|p| p.name == "seed");
    let mut mean = Quality { error: 0.0, mass: 0.0 };
    for seed in 0..seeds {
        let case = make(seed);
        let (want, want_lse) = run_method(exact, &Options::new(), &case);
        let options = if seeded { options.clone().with("seed", seed) } else { options.clone() };
        let (got, lse) = run_method(method, &options, &case);
        let mass = lse.iter().zip(&want_lse).map(|(a, b)| (a - b).exp()).sum::<f64>() / lse.len() as f64;
        mean.error += metrics::relative_frobenius(&got, &want) / seeds as f64;
        mean.mass += mass / seeds as f64;
    }
    mean
}

/// Panics unless `got` is within `share` of `want`.
#[track_caller]
pub fn assert_within(got: f64, want: f64, share: f64, what: &str) {
    assert!((got / want - 1.0).abs() <= share, "{what}: {got}, expected {want} ± {} %", 100.0 * share);
}

/// Inputs around centres, with the centres.
#[derive(Clone, Debug)]
pub struct Clustered {
    /// The inputs.
    pub case: Case,
    /// Centres of queries and keys of the last key head, row after row.
    pub centres: Vec<f64>,
}

impl Case {
    /// Draws queries, keys and values around 64 random centres each: $q = \mu_{c'} + \xi/2$, $k = \mu_c + \xi/2$, $v =
    /// \nu_c + \xi/2$ with $\mu, \nu, \xi$ standard normal and $c, c'$ uniform. With $n = 2048$ and $d = 64$, the 64
    /// largest keys of a row hold 94 % of its mass.
    pub fn clustered(problem: Problem, seed: u64) -> Self {
        Self::clustered_with(problem, seed, 0.5).case
    }

    /// Draws the same with noise of size `noise` on queries and keys; that of the values stays.
    pub fn clustered_with(problem: Problem, seed: u64, noise: f64) -> Clustered {
        const CENTRES: usize = 64;
        let mut last = Vec::new();
        let mut case = Self::gaussian(problem, seed);
        let p = &case.problem;
        let key = StreamKey::new(seed).named("clustered");
        for (b, kv) in (0..p.batch).flat_map(|b| (0..p.n_kv_heads).map(move |kv| (b, kv))) {
            let mut rng = key.with(b as u64).with(kv as u64).rng();
            let mut centres = |d: usize| (0..CENTRES * d).map(|_| rng.normal()).collect::<Vec<f64>>();
            let (mu, nu) = (centres(p.d), centres(p.d_v));
            let group = p.group_size();
            for row in 0..group * p.n_q {
                let start = ((b * p.n_heads + kv * group) * p.n_q + row) * p.d;
                around(&mut case.q[start..start + p.d], &mu, rng.below(CENTRES), noise);
            }
            for row in 0..p.n_k {
                let (c, place) = (rng.below(CENTRES), (b * p.n_kv_heads + kv) * p.n_k + row);
                around(&mut case.k[place * p.d..(place + 1) * p.d], &mu, c, noise);
                around(&mut case.v[place * p.d_v..(place + 1) * p.d_v], &nu, c, 0.5);
            }
            last = mu;
        }
        Clustered { case, centres: last }
    }

    /// Draws standard normal inputs, except that the first four keys lie along a direction $u$ of which every query has
    /// the component $\sqrt d$: $q \mathrel{+}= \sqrt d\,u$, $k_j = \xi/10 + \sqrt d\,u$, and their values are a tenth.
    pub fn with_heavy_sinks(problem: Problem, seed: u64) -> Self {
        let mut case = Self::gaussian(problem, seed);
        let p = &case.problem;
        let mut rng = StreamKey::new(seed).named("sinks").rng();
        let mut u: Vec<f64> = (0..p.d).map(|_| rng.normal()).collect();
        let length = u.iter().map(|x| x * x).sum::<f64>().sqrt();
        u.iter_mut().for_each(|x| *x *= (p.d as f64).sqrt() / length);
        case.q.chunks_exact_mut(p.d).for_each(|q| q.iter_mut().zip(&u).for_each(|(q, u)| *q += u));
        for head in case.k.chunks_exact_mut((p.n_k * p.d).max(1)) {
            for k in head.chunks_exact_mut(p.d).take(4) {
                k.iter_mut().zip(&u).for_each(|(k, u)| *k = 0.1 * *k + u);
            }
        }
        for head in case.v.chunks_exact_mut((p.n_k * p.d_v).max(1)) {
            head.iter_mut().take(4 * p.d_v).for_each(|v| *v *= 0.1);
        }
        case
    }
}

fn around(row: &mut [f64], centres: &[f64], c: usize, noise: f64) {
    let d = row.len();
    row.iter_mut().zip(&centres[c * d..(c + 1) * d]).for_each(|(x, m)| *x = m + noise * *x);
}
