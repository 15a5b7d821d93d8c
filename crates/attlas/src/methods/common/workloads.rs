//! The synthetic workloads on which the reference figures of the clustering methods were taken: 2048 tokens of
//! width 64, one head, no mask.

use crate::testkit::{Case, run_method};
use crate::{Method, Options, Problem, metrics, registry};
use attlas_num::rng::StreamKey;

const N: usize = 2048;
const D: usize = 64;

/// Independent standard normal entries.
pub fn diffuse(seed: u64) -> Case {
    Case::gaussian(Problem::new(1, N, D), seed)
}

/// 64 centres for queries and keys, 64 others for the values, noise of half their size.
pub fn clustered(seed: u64) -> Case {
    clustered_with(seed, 0.5).0
}

/// The same with noise of size `noise` on queries and keys; with the centres and the centre of every key.
pub fn clustered_with(seed: u64, noise: f64) -> (Case, Vec<f64>, Vec<usize>) {
    let mut case = diffuse(seed);
    let mut rng = StreamKey::new(seed).named("centres").rng();
    let mut centres = vec![0.0; 64 * D];
    let mut values = vec![0.0; 64 * D];
    rng.fill_normal(&mut centres);
    rng.fill_normal(&mut values);
    let mut owners = Vec::with_capacity(N);
    for i in 0..N {
        let (a, b) = (rng.below(64), rng.below(64));
        owners.push(b);
        for c in 0..D {
            case.q[i * D + c] = centres[a * D + c] + noise * case.q[i * D + c];
            case.k[i * D + c] = centres[b * D + c] + noise * case.k[i * D + c];
            case.v[i * D + c] = values[b * D + c] + 0.5 * case.v[i * D + c];
        }
    }
    (case, centres, owners)
}

/// Four keys that every query looks at, with small values.
pub fn sinks(seed: u64) -> Case {
    let mut case = diffuse(seed);
    let mut u = vec![0.0; D];
    StreamKey::new(seed).named("sink").rng().fill_normal(&mut u);
    let size = u.iter().map(|x: &f64| x * x).sum::<f64>().sqrt() / (D as f64).sqrt();
    u.iter_mut().for_each(|x| *x /= size);
    case.q.chunks_mut(D).for_each(|q| q.iter_mut().zip(&u).for_each(|(q, u)| *q += u));
    for j in 0..4 {
        case.k[j * D..(j + 1) * D].iter_mut().zip(&u).for_each(|(k, u)| *k = 0.1 * *k + u);
        case.v[j * D..(j + 1) * D].iter_mut().for_each(|v| *v *= 0.1);
    }
    case
}

/// Mean over seeds of the relative error and of the share of the normaliser that was found.
pub fn measure(method: &Method, options: &Options, make: fn(u64) -> Case, seeds: u64) -> (f64, f64) {
    let exact = registry::method("exact").unwrap_or_else(|e| panic!("{e}"));
    let (mut error, mut mass) = (0.0, 0.0);
    for seed in 0..seeds {
        let case = make(seed);
        let (want, want_lse) = run_method(exact, &Options::new(), &case);
        let (got, lse) = run_method(method, &options.clone().with("seed", seed), &case);
        error += metrics::relative_frobenius(&got, &want);
        mass += lse.iter().zip(&want_lse).map(|(a, b)| (a - b).exp()).sum::<f64>() / lse.len() as f64;
    }
    (error / seeds as f64, mass / seeds as f64)
}

/// Panics unless `got` is within `share` of `want`.
#[track_caller]
pub fn assert_within(got: f64, want: f64, share: f64, what: &str) {
    assert!((got / want - 1.0).abs() <= share, "{what}: {got}, expected {want} ± {} %", 100.0 * share);
}
