//! A bound on the error of a whole output from exact attention on a few of its rows.
//!
//! Let $\hat o_i$ be the rows of the output, known, and $o_i$ the exact ones, known on a uniform sample $S$ of $m$ of
//! the $N$ rows, drawn without replacement and independently of the method. Exact rows are averages of values,
//! so with $c$ the mean of the values and $R = \max_j |v_j - c|$ every squared row error obeys
//! $e_i = |\hat o_i - o_i|^2 \le B := (\max_i |\hat o_i - c| + R)^2$, whatever the method did. ($R$ is raised to $|c|$
//! where rows may see no key, since those are zero.) The variables $e_i / B$ lie in $[0, 1]$, and Hoeffding's
//! inequality in its relative-entropy form gives, with probability at least $1 - \delta$,
//! $\frac1N\sum_i e_i \le B\,\mu$ where $m\,\mathrm{kl}(\bar e / B, \mu) = \ln(1/\delta)$. With
//! $U = \sqrt{N B \mu} \ge \|\hat O - O\|_F$ and $\|O\|_F \ge \|\hat O\|_F - U$ the relative error is at most
//! $U / (\|\hat O\|_F - U)$, and there is no bound where $U \ge \|\hat O\|_F$.
//!
//! No such bound can be sharp when errors are far below the spread of the values: unseen rows might be as wrong
//! as $B$ allows, so it cannot fall below about $\sqrt{B \ln(1/\delta) / m}$ over the size of a row. For that case
//! the percentile bootstrap of the sample stands beside it. It is usually close, and guarantees nothing.

use crate::reread::Name;
use crate::stats::hoeffding_upper;
use attlas_num::rng::StreamKey;
use serde::{Deserialize, Serialize};

/// Bound on an output's relative Frobenius error from a sample of exact rows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Certificate {
    /// Upper bound that holds with probability `confidence`; none where the sample is too small to give one.
    pub bound: Option<f64>,
    /// Probability with which the bound holds; 1 where every row was sampled.
    #[serde(deserialize_with = "crate::reread::number")]
    pub confidence: f64,
    /// Rows on which exact attention was computed.
    pub rows: usize,
    /// The error of the sampled rows alone.
    #[serde(deserialize_with = "crate::reread::number")]
    pub estimate: f64,
    /// The `confidence` quantile of the bootstrap distribution of the estimate; not a guarantee.
    #[serde(deserialize_with = "crate::reread::number")]
    pub bootstrap: f64,
    /// The inequality behind the bound.
    #[serde(deserialize_with = "crate::reread::name")]
    pub inequality: Name,
}

/// Names the inequality in records.
const INEQUALITY: &str = "hoeffding_relative_entropy";

/// Everything that a certificate is computed from.
#[derive(Clone, Copy, Debug)]
pub struct Evidence<'a> {
    /// The output to certify, `rows × d_v`.
    pub output: &'a [f32],
    /// All values that any row may see, `n_k × d_v`.
    pub values: &'a [f32],
    /// Width of values.
    pub d_v: usize,
    /// Sampled rows, distinct.
    pub sample: &'a [usize],
    /// Exact attention on the sampled rows, `sample × d_v`.
    pub exact: &'a [f32],
    /// Whether some rows may see no key.
    pub empty_rows: bool,
}

/// Rows to compute exactly: a uniform sample without replacement, from a stream that no method draws from.
pub fn sample_rows(rows: usize, samples: usize, seed: u64) -> Vec<usize> {
    StreamKey::new(seed).named("certificate").rng().subset(rows, samples)
}

/// The certificate at probability `confidence`.
pub fn certify(x: &Evidence<'_>, confidence: f64, seed: u64) -> Certificate {
    let rows = x.output.len() / x.d_v.max(1);
    let row = |i: usize| &x.output[i * x.d_v..(i + 1) * x.d_v];
    let pairs: Vec<(f64, f64)> = x
        .sample
        .iter()
        .zip(x.exact.chunks_exact(x.d_v))
        .map(|(&i, exact)| (sq_dist(row(i), exact), exact.iter().map(|v| f64::from(*v).powi(2)).sum()))
        .collect();
    let census = x.sample.len() == rows;
    let estimate = relative(pairs.iter().copied());
    let bound = if census { Some(estimate) } else { bound(x, &pairs, confidence) };
    Certificate {
        bound: bound.filter(|b| b.is_finite()),
        confidence: if census { 1.0 } else { confidence },
        rows: x.sample.len(),
        estimate,
        bootstrap: if census { estimate } else { bootstrap(&pairs, confidence, seed) },
        inequality: INEQUALITY,
    }
}

fn bound(x: &Evidence<'_>, pairs: &[(f64, f64)], confidence: f64) -> Option<f64> {
    if pairs.is_empty() || x.values.is_empty() {
        return None;
    }
    let keys = x.values.len() / x.d_v;
    let mut centre = vec![0.0; x.d_v];
    for v in x.values.chunks_exact(x.d_v) {
        centre.iter_mut().zip(v).for_each(|(c, v)| *c += f64::from(*v) / keys as f64);
    }
    let farthest = |rows: &[f32]| {
        rows.chunks_exact(x.d_v)
            .map(|r| r.iter().zip(&centre).map(|(a, c)| (f64::from(*a) - c).powi(2)).sum::<f64>())
            .fold(0.0, |a: f64, b| if b.is_nan() { f64::INFINITY } else { a.max(b) })
            .sqrt()
    };
    let mut radius = farthest(x.values);
    if x.empty_rows {
        radius = radius.max(centre.iter().map(|c| c * c).sum::<f64>().sqrt());
    }
    let range = (farthest(x.output) + radius).powi(2);
    if !range.is_finite() {
        return None;
    }
    if range == 0.0 {
        return Some(0.0);
    }
    let mean = pairs.iter().map(|p| p.0).sum::<f64>() / pairs.len() as f64;
    // Rounding may push a row past the hull by a few units in the last place.
    let worst = range * hoeffding_upper((mean / range).min(1.0), pairs.len(), 1.0 - confidence);
    let rows = (x.output.len() / x.d_v) as f64;
    let gap = (rows * worst).sqrt();
    let size = x.output.iter().map(|o| f64::from(*o).powi(2)).sum::<f64>().sqrt();
    (gap < size).then(|| gap / (size - gap))
}

fn bootstrap(pairs: &[(f64, f64)], confidence: f64, seed: u64) -> f64 {
    const RESAMPLES: usize = 400;
    let mut rng = StreamKey::new(seed).named("bootstrap").rng();
    let mut found: Vec<f64> = (0..if pairs.is_empty() { 0 } else { RESAMPLES })
        .map(|_| relative((0..pairs.len()).map(|_| pairs[rng.below(pairs.len())])))
        .collect();
    found.sort_by(f64::total_cmp);
    found.get(((confidence * RESAMPLES as f64) as usize).min(RESAMPLES - 1)).copied().unwrap_or(f64::NAN)
}

fn relative(pairs: impl Iterator<Item = (f64, f64)>) -> f64 {
    let (gap, size) = pairs.fold((0.0, 0.0), |a, p| (a.0 + p.0, a.1 + p.1));
    if gap == 0.0 { 0.0 } else { (gap / size).sqrt() }
}

fn sq_dist(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values, exact rows in their hull, and an output that is wrong on a few rows.
    fn case(seed: u64, rows: usize, wrong: f64) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
        let mut rng = StreamKey::new(seed).named("case").rng();
        let values: Vec<f32> = (0..50 * 4).map(|_| (rng.normal() + 1.0) as f32).collect();
        let mut exact = Vec::new();
        let mut output = Vec::new();
        for _ in 0..rows {
            let (i, j, w) = (rng.below(50), rng.below(50), rng.uniform() as f32);
            let bad = rng.uniform() < wrong;
            for c in 0..4 {
                let o = w * values[i * 4 + c] + (1.0 - w) * values[j * 4 + c];
                exact.push(o);
                output.push(if bad { values[i * 4 + c] } else { o + 0.01 * rng.normal() as f32 });
            }
        }
        (values, exact, output)
    }

    fn certificate(seed: u64, rows: usize, samples: usize, wrong: f64) -> (Certificate, f64) {
        let (values, exact, output) = case(seed, rows, wrong);
        let sample = sample_rows(rows, samples, seed);
        let chosen: Vec<f32> = sample.iter().flat_map(|&i| exact[i * 4..(i + 1) * 4].to_vec()).collect();
        let evidence = Evidence {
            output: &output,
            values: &values,
            d_v: 4,
            sample: &sample,
            exact: &chosen,
            empty_rows: false,
        };
        let truth = relative(
            output
                .chunks(4)
                .zip(exact.chunks(4))
                .map(|(o, e)| (sq_dist(o, e), e.iter().map(|v| f64::from(*v).powi(2)).sum())),
        );
        (certify(&evidence, 0.9, seed), truth)
    }

    #[test]
    fn the_bound_holds_at_least_as_often_as_it_says() {
        // Rare, large errors are the hard case: many samples miss them.
        for (wrong, samples) in [(0.0, 200), (0.02, 60), (0.1, 200), (0.5, 200)] {
            let runs = 300;
            let (mut held, mut given) = (0, 0);
            for seed in 0..runs {
                let (c, truth) = certificate(seed, 500, samples, wrong);
                given += u64::from(c.bound.is_some());
                held += u64::from(c.bound.is_none_or(|b| b >= truth));
            }
            // Three standard errors below nine tenths.
            let floor = 0.9 - 3.0 * (0.9 * 0.1 / runs as f64).sqrt();
            assert!(held as f64 / runs as f64 >= floor, "wrong {wrong}: held {held} of {runs}");
            assert!(samples < 100 || given > runs / 2, "wrong {wrong}: a bound only {given} times of {runs}");
        }
    }

    #[test]
    fn more_rows_tighten_the_bound_down_to_the_truth() {
        let bounds: Vec<f64> =
            [200, 1000, 1999].map(|m| certificate(1, 2000, m, 0.1).0.bound.unwrap()).to_vec();
        assert!(bounds[0] > bounds[1] && bounds[1] > bounds[2], "{bounds:?}");
        let (all, truth) = certificate(1, 2000, 2000, 0.1);
        assert_eq!((all.bound, all.confidence), (Some(truth), 1.0));
    }

    #[test]
    fn nothing_is_promised_without_evidence() {
        let none = Evidence {
            output: &[1.0; 8],
            values: &[1.0; 8],
            d_v: 4,
            sample: &[],
            exact: &[],
            empty_rows: false,
        };
        assert_eq!(certify(&none, 0.95, 0).bound, None);
        let (values, exact, mut output) = case(3, 100, 0.0);
        output[17] = f32::NAN;
        let evidence = Evidence {
            output: &output,
            values: &values,
            d_v: 4,
            sample: &[0],
            exact: &exact[..4],
            empty_rows: false,
        };
        assert_eq!(certify(&evidence, 0.95, 0).bound, None);
    }

    #[test]
    fn the_bootstrap_stays_near_the_truth() {
        let (c, truth) = certificate(5, 2000, 500, 0.3);
        assert!(c.bootstrap >= c.estimate && c.bootstrap < 1.3 * truth, "{c:?} {truth}");
    }
}
