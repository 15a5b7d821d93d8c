//! Weighted sums of exponentials of inner products, exactly or estimated, in the log domain.
//!
//! The module computes $\ln w_i$ for $w_i = \sum_j x_j e^{\langle q_i, k_j\rangle}$ with weights $x_j \ge 0$, and takes
//! no exponential that could overflow. With $a_j = \ln x_j + |k_j|^2/2$ and $W = \sum_j e^{a_j}$, $w$ is a Gaussian
//! kernel density in one more dimension,
//! $$w = e^{|q|^2/2}\, W \sum_j e^{-(|q - k_j|^2 + y_j^2)/2}, \qquad y_j^2 = 2 \ln(W / e^{a_j}) \ge 0,$$
//! evaluated at $[q; 0]$ for the points $[k_j; y_j]$, so any estimator of kernel densities serves. [`Backend`] lists
//! the estimators. Every estimate of $w$ is unbiased (its logarithm is not), except for medians of means.
//!
//! Keys of weight zero ($\ln x_j = -\infty$) are dropped first. If no key remains, $\ln w = -\infty$. Any other key or
//! log weight that is not finite makes every result NaN; a query with a NaN makes only its own result NaN.
//!
//! References: Zandieh, Han, Daliri and Karbasi 2023 (the density form); Charikar and Siminelakis 2017
//! (hashing-based estimators); Karppa, Aumüller and Pagh 2022 (near keys exactly, the rest by sampling).

use super::sample::AliasTable;
use super::stable::collision_probability;
use super::{Lsh, PStable, SignHash, project_tiles, squared_distance, squared_norm};
use crate::cluster::buckets::{Balanced, order_by};
use crate::rng::StreamKey;
use crate::{Mat, MatRef, Real};

/// Method for the sums.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Backend {
    /// Every term.
    Exact,
    /// `samples` keys drawn with replacement by $e^{a_j}$. The relative variance is at most
    /// $(1/\mu - 1)/m$ for $\mu = \sum_j e^{a_j} e^{-|q - k_j|^2/2} / W$ and $m$ samples.
    Weighted {
        /// Keys drawn, shared by all queries; at least 1.
        samples: usize,
    },
    /// Sorts keys and queries by the Gray rank of a sign hash and cuts them into equally many blocks; a query sums its
    /// block exactly and estimates the other keys from a uniform sample without replacement. Unbiased given that a
    /// sample falls outside the block; if none does, the rest is left out.
    NearPlusSample {
        /// Most keys in a block; 0 for no blocks, i.e. uniform sampling alone.
        block: usize,
        /// Keys drawn, shared by all queries.
        samples: usize,
        /// Bits of the hash, at most 31.
        bits: usize,
    },
    /// Hash tables of Euclidean space; see [`Hbe`].
    Hbe {
        /// Width of a bucket; positive.
        width: f64,
        /// Functions in a table.
        functions: usize,
        /// Tables; at least 1.
        tables: usize,
        /// Groups of tables: the estimate is the median of their means; 1 for the mean of all tables.
        groups: usize,
    },
}

/// Computes $\ln \sum_j x_j e^{\langle q_i, k_j\rangle}$ for every row of `q`; all $x_j = 1$ without `log_weights`.
///
/// `None` if a parameter of the backend is out of range.
///
/// # Panics
/// If rows of `q` and `k` differ in length, or there are log weights but not one per row of `k`.
pub fn log_exp_sums<T: Real>(
    q: MatRef<'_, T>,
    k: MatRef<'_, T>,
    log_weights: Option<&[f64]>,
    backend: Backend,
    key: StreamKey,
) -> Option<Vec<f64>> {
    assert_eq!(q.cols(), k.cols());
    let valid = match backend {
        Backend::Exact => true,
        Backend::Weighted { samples } => samples > 0,
        Backend::NearPlusSample { bits, .. } => bits <= super::sign::MAX_BITS,
        Backend::Hbe { width, tables, .. } => width > 0.0 && width.is_finite() && tables > 0,
    };
    if !valid {
        return None;
    }
    let data = Data::new(k, log_weights);
    if data.log_total.is_nan() {
        return Some(vec![f64::NAN; q.rows()]);
    }
    if data.log_x.is_empty() {
        return Some(
            q.iter_rows()
                .map(|row| if row.iter().any(|v| v.is_nan()) { f64::NAN } else { f64::NEG_INFINITY })
                .collect(),
        );
    }
    match backend {
        Backend::Exact => Some(exact(q, &data)),
        Backend::Weighted { samples } => weighted(q, &data, samples, key.named("weighted draws")),
        Backend::NearPlusSample { block, samples, bits } => {
            near_plus_sample(q, &data, block, samples, bits, key)
        }
        Backend::Hbe { width, functions, tables, groups } => {
            Some(Hbe::from_data(&data, width, functions, tables, key)?.log_estimates(q, groups))
        }
    }
}

/// Computes $\ln \sum_j e^{a_j}$; −∞ for an empty sum, NaN if a term is.
pub fn log_sum_exp(a: &[f64]) -> f64 {
    let largest = a.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if largest.is_infinite() {
        return if a.iter().any(|v| v.is_nan()) { f64::NAN } else { largest };
    }
    largest + a.iter().map(|v| (v - largest).exp()).sum::<f64>().ln()
}

fn log_x(log_weights: Option<&[f64]>, j: usize) -> f64 {
    log_weights.map_or(0.0, |w| w[j])
}

/// Keys of positive weight, with $\ln x_j$, $a_j$ and $\ln W$.
struct Data<T> {
    keys: Mat<T>,
    log_x: Vec<f64>,
    a: Vec<f64>,
    log_total: f64,
}

impl<T: Real> Data<T> {
    fn new(k: MatRef<'_, T>, log_weights: Option<&[f64]>) -> Self {
        if let Some(w) = log_weights {
            assert_eq!(w.len(), k.rows());
        }
        let kept: Vec<usize> =
            (0..k.rows()).filter(|&j| log_x(log_weights, j) != f64::NEG_INFINITY).collect();
        let log_x: Vec<f64> = kept.iter().map(|&j| log_x(log_weights, j)).collect();
        let mut keys = Mat::zeros(kept.len(), k.cols());
        k.gather_into(kept, keys.data_mut());
        let a: Vec<f64> =
            log_x.iter().enumerate().map(|(j, x)| x + 0.5 * squared_norm(keys.row(j))).collect();
        let finite = a.iter().all(|v| v.is_finite());
        Self { log_total: if finite { log_sum_exp(&a) } else { f64::NAN }, keys, log_x, a }
    }
}

fn exact<T: Real>(q: MatRef<'_, T>, data: &Data<T>) -> Vec<f64> {
    let mut out = vec![0.0; q.rows()];
    let mut terms = vec![0.0; data.log_x.len()];
    project_tiles(q, data.keys.as_ref(), |i, y| {
        for (t, (y, x)) in terms.iter_mut().zip(y.iter().zip(&data.log_x)) {
            *t = y.to_f64() + x;
        }
        out[i] = log_sum_exp(&terms);
    });
    out
}

fn weighted<T: Real>(q: MatRef<'_, T>, data: &Data<T>, m: usize, key: StreamKey) -> Option<Vec<f64>> {
    let drawn = AliasTable::from_log_weights(&data.a)?.draws(m, key);
    let shift: Vec<f64> = drawn.iter().map(|&j| data.a[j] - data.log_x[j]).collect();
    let mut keys = Mat::zeros(m, q.cols());
    data.keys.as_ref().gather_into(drawn, keys.data_mut());
    let mut out = vec![0.0; q.rows()];
    let mut terms = vec![0.0; m];
    project_tiles(q, keys.as_ref(), |i, y| {
        for (t, (y, s)) in terms.iter_mut().zip(y.iter().zip(&shift)) {
            *t = y.to_f64() - s;
        }
        out[i] = data.log_total - (m as f64).ln() + log_sum_exp(&terms);
    });
    Some(out)
}

fn near_plus_sample<T: Real>(
    q: MatRef<'_, T>,
    data: &Data<T>,
    block: usize,
    samples: usize,
    bits: usize,
    key: StreamKey,
) -> Option<Vec<f64>> {
    let n = data.log_x.len();
    let hash = SignHash::<T>::new(key.named("near keys"), q.cols(), bits, 1)?;
    let order_k = order_by(&hash.gray_ranks(data.keys.as_ref(), 0));
    let order_q = order_by(&hash.gray_ranks(q, 0));
    let blocks = if block == 0 { 1 } else { n.div_ceil(block) };
    let (cut_q, cut_k) = (Balanced::new(q.rows(), blocks), Balanced::new(n, blocks));

    let mut sorted = Mat::zeros(n, q.cols());
    data.keys.as_ref().gather_into(order_k.iter().map(|&j| j as usize), sorted.data_mut());
    let log_x: Vec<f64> = order_k.iter().map(|&j| data.log_x[j as usize]).collect();
    // Draws ranks, not keys: a uniform subset either way, and the block of a rank is known.
    let drawn = key.named("uniform draws").rng().subset(n, samples);
    let mut sampled = Mat::zeros(drawn.len(), q.cols());
    sorted.as_ref().gather_into(drawn.iter().copied(), sampled.data_mut());

    let mut out = vec![0.0; q.rows()];
    let mut terms = Vec::new();
    for c in 0..blocks {
        let rows = &order_q[cut_q.range(c)];
        let mut own = Mat::zeros(rows.len(), q.cols());
        q.gather_into(rows.iter().map(|&i| i as usize), own.data_mut());
        let near = if block == 0 { 0..0 } else { cut_k.range(c) };
        let far = |r: usize| !near.contains(&r);
        project_tiles(own.as_ref(), sorted.as_ref().sub_rows(near.clone()), |i, y| {
            terms.clear();
            terms.extend(y.iter().zip(&log_x[near.clone()]).map(|(y, x)| y.to_f64() + x));
            out[rows[i] as usize] = log_sum_exp(&terms);
        });
        let used = drawn.iter().filter(|&&r| far(r)).count();
        if used == 0 {
            continue;
        }
        let scale = ((n - near.len()) as f64 / used as f64).ln();
        project_tiles(own.as_ref(), sampled.as_ref(), |i, y| {
            terms.clear();
            let outside = drawn.iter().zip(y).filter(|(r, _)| far(**r));
            terms.extend(outside.map(|(&r, y)| y.to_f64() + log_x[r] + scale));
            let near_sum = &mut out[rows[i] as usize];
            terms.push(*near_sum);
            *near_sum = log_sum_exp(&terms);
        });
    }
    Some(out)
}

/// Hashing-based estimator of the sums.
///
/// Each table hashes the keys with $t$ p-stable functions of one width. A bucket stores its total weight
/// $W_b = \sum e^{a_j}$ and one key $k^*$ drawn in proportion to $e^{a_j}$. A query in that bucket estimates
/// $e^{|q|^2/2}\, W_b\, e^{-|q - k^*|^2/2} / p(|q - k^*|)^t$, and 0 if the bucket has no key: unbiased, as a key shares
/// the bucket with probability $p^t$ and is then drawn with probability $e^{a_j}/W_b$.
#[derive(Clone, Debug)]
pub struct Hbe<T> {
    hash: PStable<T>,
    keys: Mat<T>,
    tables: Vec<Vec<Bucket>>,
}

/// A bucket; those of a table are sorted by code.
#[derive(Clone, Copy, Debug)]
struct Bucket {
    code: u64,
    log_weight: f64,
    key: u32,
}

impl<T: Real> Hbe<T> {
    /// Builds the tables. `None` if `width` is not positive and finite, there is no table, or a key or log
    /// weight is not finite (−∞ drops a key).
    ///
    /// # Panics
    /// If there are log weights but not one per row of `k`.
    pub fn new(
        k: MatRef<'_, T>,
        log_weights: Option<&[f64]>,
        width: f64,
        functions: usize,
        tables: usize,
        key: StreamKey,
    ) -> Option<Self> {
        let data = Data::new(k, log_weights);
        if data.log_total.is_nan() || tables == 0 {
            return None;
        }
        Self::from_data(&data, width, functions, tables, key)
    }

    fn from_data(
        data: &Data<T>,
        width: f64,
        functions: usize,
        tables: usize,
        key: StreamKey,
    ) -> Option<Self> {
        let hash = PStable::new(key.named("tables"), data.keys.cols(), width, functions, tables)?;
        let largest = data.a.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = data.a.iter().map(|a| (a - largest).exp()).collect();
        let build = |table: usize| {
            let codes = hash.codes(data.keys.as_ref(), table);
            let mut rng = key.named("representatives").with(table as u64).rng();
            let mut buckets: Vec<Bucket> = Vec::new();
            let mut total = 0.0;
            for j in order_by(&codes) {
                let (code, weight) = (codes[j as usize], weights[j as usize]);
                if buckets.last().is_none_or(|b| b.code != code) {
                    buckets.push(Bucket { code, log_weight: f64::NEG_INFINITY, key: j });
                    total = 0.0;
                }
                total += weight;
                // A reservoir of one: the newcomer replaces the key with probability weight / total.
                let replace = rng.uniform() * total < weight;
                if let Some(bucket) = buckets.last_mut() {
                    bucket.log_weight = largest + total.ln();
                    if replace {
                        bucket.key = j;
                    }
                }
            }
            buckets
        };
        let tables = (0..tables).map(build).collect();
        Some(Self { keys: data.keys.clone(), tables, hash })
    }

    /// Estimates $\ln \sum_j x_j e^{\langle q_i, k_j\rangle}$ for every row of `q`: by the mean over the tables, or
    /// with more than one group by the median of the groups' means (more robust, not unbiased).
    ///
    /// # Panics
    /// If rows of `q` and the keys differ in length.
    pub fn log_estimates(&self, q: MatRef<'_, T>, groups: usize) -> Vec<f64> {
        let cut = Balanced::new(self.tables.len(), groups.clamp(1, self.tables.len()));
        let norms: Vec<f64> = q.iter_rows().map(squared_norm).collect();
        let mut means = vec![f64::NEG_INFINITY; q.rows() * cut.blocks()];
        let mut codes = vec![0; q.rows()];
        for (group, tables) in cut.iter().enumerate() {
            let share = (tables.len() as f64).ln();
            for table in tables {
                self.hash.codes_into(q, table, &mut codes);
                for (i, code) in codes.iter().enumerate() {
                    let mean = &mut means[i * cut.blocks() + group];
                    let term = self.log_term(table, *code, q.row(i), norms[i]) - share;
                    *mean = log_sum_exp(&[*mean, term]);
                }
            }
        }
        means.chunks_exact_mut(cut.blocks()).map(log_median).collect()
    }

    /// Returns the logarithm of one table's estimate; −∞ if the bucket has no key.
    fn log_term(&self, table: usize, code: u64, q: &[T], squared_norm_q: f64) -> f64 {
        if squared_norm_q.is_nan() {
            return f64::NAN;
        }
        let buckets = &self.tables[table];
        let Ok(found) = buckets.binary_search_by_key(&code, |b| b.code) else {
            return f64::NEG_INFINITY;
        };
        let squared = squared_distance(q, self.keys.row(buckets[found].key as usize));
        let p = collision_probability(squared.sqrt(), self.hash.width());
        if p == 0.0 {
            // Reached only if the distance overflows, and then the kernel vanishes.
            return f64::NEG_INFINITY;
        }
        buckets[found].log_weight + 0.5 * (squared_norm_q - squared) - self.hash.functions() as f64 * p.ln()
    }
}

/// Returns the logarithm of the median of numbers given by their logarithms; NaN if one is.
fn log_median(logs: &mut [f64]) -> f64 {
    if logs.iter().any(|v| v.is_nan()) {
        return f64::NAN;
    }
    logs.sort_unstable_by(f64::total_cmp);
    let (low, high) = (logs[(logs.len() - 1) / 2], logs[logs.len() / 2]);
    if low == high { low } else { log_sum_exp(&[low, high]) - std::f64::consts::LN_2 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::tests::{assert_mean, gaussian};
    use crate::linalg::dot;

    const SAMPLERS: [Backend; 4] = [
        Backend::Weighted { samples: 3 },
        Backend::NearPlusSample { block: 3, samples: 5, bits: 3 },
        Backend::NearPlusSample { block: 0, samples: 3, bits: 0 },
        Backend::Hbe { width: 4.0, functions: 2, tables: 4, groups: 1 },
    ];

    fn sums<T: Real>(q: &Mat<T>, k: &Mat<T>, x: Option<&[f64]>, backend: Backend, seed: u64) -> Vec<f64> {
        log_exp_sums(q.as_ref(), k.as_ref(), x, backend, StreamKey::new(seed)).unwrap()
    }

    fn brute(q: &Mat<f64>, k: &Mat<f64>, x: &[f64]) -> Vec<f64> {
        (0..q.rows())
            .map(|i| (0..k.rows()).map(|j| x[j] * dot(q.row(i), k.row(j)).exp()).sum::<f64>().ln())
            .collect()
    }

    #[test]
    fn the_exact_backend_adds_every_term() {
        let (q, k) = (gaussian::<f64>(3, 7, 4), gaussian::<f64>(4, 50, 4));
        let x: Vec<f64> = (0..50).map(|j| f64::from(j % 4)).collect();
        let log_x: Vec<f64> = x.iter().map(|x| x.ln()).collect();
        for (a, b) in sums(&q, &k, Some(&log_x), Backend::Exact, 0).iter().zip(brute(&q, &k, &x)) {
            assert!((a - b).abs() < 1e-13);
        }
        let single = sums(&q.cast::<f32>(), &k.cast::<f32>(), None, Backend::Exact, 0);
        for (a, b) in single.iter().zip(brute(&q, &k, &[1.0; 50])) {
            assert!((a - b).abs() < 1e-5);
        }
    }

    #[test]
    fn every_backend_is_unbiased_for_every_query() {
        let q = Mat::from_fn(4, 2, |i, j| [0.5, -0.8, 1.1, 0.2, 0.0, -1.4, 0.9, 0.9][2 * i + j]);
        let k = gaussian::<f64>(6, 11, 2);
        let x: Vec<f64> = (0..11).map(|j| if j == 3 { 0.0 } else { 0.2 + f64::from(j % 5) }).collect();
        let log_x: Vec<f64> = x.iter().map(|x| x.ln()).collect();
        let truth = brute(&q, &k, &x);
        for backend in SAMPLERS {
            let runs: Vec<Vec<f64>> =
                (0..20_000).map(|seed| sums(&q, &k, Some(&log_x), backend, seed)).collect();
            for (i, t) in truth.iter().enumerate() {
                let ratios: Vec<f64> = runs.iter().map(|r| (r[i] - t).exp()).collect();
                assert_mean(&ratios, 1.0);
                // The estimate varies, so it is not a constant.
                assert!(ratios.iter().any(|r| (r - 1.0).abs() > 0.02), "{backend:?}");
            }
        }
    }

    #[test]
    fn weighted_sampling_keeps_to_its_variance_bound_and_converges_as_the_root_of_samples() {
        let (q, k) = (gaussian::<f64>(7, 1, 3), gaussian::<f64>(8, 40, 3));
        let truth = sums(&q, &k, None, Backend::Exact, 0)[0];
        let a: Vec<f64> = (0..40).map(|j| 0.5 * squared_norm(k.row(j))).collect();
        let total = log_sum_exp(&a);
        let mu: f64 =
            (0..40).map(|j| (a[j] - total - 0.5 * squared_distance(q.row(0), k.row(j))).exp()).sum();
        let variance = |m: usize| {
            let square = |seed| {
                ((sums(&q, &k, None, Backend::Weighted { samples: m }, seed)[0] - truth).exp() - 1.0).powi(2)
            };
            (0..3000).map(square).sum::<f64>() / 3000.0
        };
        let (few, many) = (variance(8), variance(128));
        assert!(few <= (1.0 / mu - 1.0) / 8.0 && many <= (1.0 / mu - 1.0) / 128.0, "{few} {many} {mu}");
        // The ratio of two variance estimates of 3000 runs each is known to about 10 %.
        assert!((few / many / 16.0).ln().abs() < 0.4, "{}", few / many);
    }

    #[test]
    fn seeing_every_key_is_exact() {
        let (q, k) = (gaussian::<f64>(9, 13, 5), gaussian::<f64>(10, 37, 5));
        let truth = sums(&q, &k, None, Backend::Exact, 0);
        for backend in [
            Backend::NearPlusSample { block: 37, samples: 0, bits: 4 },
            Backend::NearPlusSample { block: 5, samples: 37, bits: 4 },
            Backend::NearPlusSample { block: 0, samples: 99, bits: 0 },
        ] {
            for (a, b) in sums(&q, &k, None, backend, 1).iter().zip(&truth) {
                assert!((a - b).abs() < 1e-13, "{backend:?}");
            }
        }
    }

    #[test]
    fn one_shared_bucket_makes_hashing_weighted_sampling() {
        // Without functions every table is one bucket: W e^{|q|²/2 − |q − k*|²/2}, k* drawn by weight.
        let (q, k) = (gaussian::<f64>(11, 3, 2), gaussian::<f64>(12, 6, 2));
        let backend = Backend::Hbe { width: 1.0, functions: 0, tables: 1, groups: 1 };
        let halves: Vec<f64> = k.as_ref().iter_rows().map(|row| 0.5 * squared_norm(row)).collect();
        let log_total = log_sum_exp(&halves);
        for seed in 0..20 {
            let seen = sums(&q, &k, None, backend, seed);
            let from = |j: usize| -> Vec<f64> {
                (0..3).map(|i| log_total + dot(q.row(i), k.row(j)) - 0.5 * squared_norm(k.row(j))).collect()
            };
            assert!((0..6).any(|j| from(j).iter().zip(&seen).all(|(a, b)| (a - b).abs() < 1e-12)));
        }
    }

    #[test]
    fn scaling_the_weights_shifts_the_logarithm() {
        let (q, k) = (gaussian::<f64>(13, 6, 3), gaussian::<f64>(14, 20, 3));
        let shifted: Vec<f64> = (0..20).map(|j| f64::from(j) / 8.0 + 512.0).collect();
        let plain: Vec<f64> = shifted.iter().map(|x| x - 512.0).collect();
        for backend in SAMPLERS.into_iter().chain([Backend::Exact]) {
            let (a, b) = (sums(&q, &k, Some(&plain), backend, 2), sums(&q, &k, Some(&shifted), backend, 2));
            for (a, b) in a.iter().zip(&b) {
                assert!(*a == *b || (b - a - 512.0).abs() < 1e-10, "{backend:?}: {a} {b}");
            }
        }
    }

    #[test]
    fn rows_of_huge_norm_do_not_overflow() {
        let q = Mat::from_fn(4, 3, |i, j| 300.0 * gaussian::<f32>(15, 4, 3)[(i, j)]);
        let k = Mat::from_fn(30, 3, |i, j| 300.0 * gaussian::<f32>(16, 30, 3)[(i, j)]);
        for backend in SAMPLERS.into_iter().chain([Backend::Exact]) {
            assert!(sums(&q, &k, None, backend, 3).iter().all(|v| !v.is_nan() && *v != f64::INFINITY));
        }
        let exact = sums(&q, &k, None, Backend::Exact, 3);
        let near = sums(&q, &k, None, Backend::NearPlusSample { block: 10, samples: 30, bits: 4 }, 3);
        assert!(exact.iter().zip(&near).all(|(a, b)| (a - b).abs() < 1e-6 * a.abs()));
    }

    #[test]
    fn medians_of_means_lie_between_the_groups() {
        assert_eq!(log_median(&mut [3.0]), 3.0);
        assert_eq!(log_median(&mut [3.0, f64::NEG_INFINITY, 1.0]), 1.0);
        assert!((log_median(&mut [2f64.ln(), 6f64.ln()]) - 4f64.ln()).abs() < 1e-15);
        assert_eq!(log_median(&mut [f64::NEG_INFINITY; 2]), f64::NEG_INFINITY);
        let (q, k) = (gaussian::<f64>(17, 5, 2), gaussian::<f64>(18, 30, 2));
        let backend = |groups| Backend::Hbe { width: 4.0, functions: 1, tables: 9, groups };
        // One table per group, one group at all, and more groups than tables.
        let hbe = Hbe::new(k.as_ref(), None, 4.0, 1, 9, StreamKey::new(4)).unwrap();
        let by_tables = hbe.log_estimates(q.as_ref(), 9);
        assert_eq!(sums(&q, &k, None, backend(9), 4), by_tables);
        assert_eq!(hbe.log_estimates(q.as_ref(), 50), by_tables);
        assert_ne!(hbe.log_estimates(q.as_ref(), 1), by_tables);
    }

    #[test]
    fn degenerate_input_has_a_defined_answer() {
        let q = Mat::from_vec(vec![1.0, 2.0, f64::NAN, 0.0], 2, 2);
        for backend in SAMPLERS.into_iter().chain([Backend::Exact]) {
            // No keys; keys of no weight.
            for (k, x) in [(Mat::zeros(0, 2), vec![]), (gaussian(1, 2, 2), vec![f64::NEG_INFINITY; 2])] {
                let seen = sums(&q, &k, Some(&x), backend, 1);
                assert!(seen[0] == f64::NEG_INFINITY && seen[1].is_nan(), "{backend:?}");
            }
            // One zero key has weight e⁰, whatever the query; only a hash can miss it.
            let one = sums(&q, &Mat::zeros(1, 2), None, backend, 1);
            assert!(one[1].is_nan(), "{backend:?}");
            if !matches!(backend, Backend::Hbe { .. }) {
                assert!(one[0].abs() < 1e-14, "{backend:?}");
            }
            // A key or weight that is not finite makes every result NaN.
            let bad = Mat::from_vec(vec![f64::NAN, 1.0], 1, 2);
            assert!(sums(&q, &bad, None, backend, 1).iter().all(|v| v.is_nan()));
            assert!(
                sums(&q, &Mat::zeros(1, 2), Some(&[f64::INFINITY]), backend, 1).iter().all(|v| v.is_nan())
            );
            assert!(sums(&Mat::<f64>::zeros(0, 2), &gaussian(1, 3, 2), None, backend, 1).is_empty());
        }
        // A key at distance 0 always shares the bucket, and then its share is exact.
        let at = Mat::from_vec(vec![1.0, 2.0], 1, 2);
        let met = sums(&at, &at, None, Backend::Hbe { width: 0.1, functions: 5, tables: 2, groups: 1 }, 1);
        assert!((met[0] - 5.0).abs() < 1e-14);
    }

    #[test]
    fn parameters_out_of_range_are_refused() {
        let m = Mat::<f64>::zeros(1, 1);
        for backend in [
            Backend::Weighted { samples: 0 },
            Backend::NearPlusSample { block: 1, samples: 1, bits: 32 },
            Backend::Hbe { width: 0.0, functions: 1, tables: 1, groups: 1 },
            Backend::Hbe { width: f64::NAN, functions: 1, tables: 1, groups: 1 },
            Backend::Hbe { width: 1.0, functions: 1, tables: 0, groups: 1 },
        ] {
            assert!(log_exp_sums(m.as_ref(), m.as_ref(), None, backend, StreamKey::new(0)).is_none());
        }
        assert!(Hbe::new(m.as_ref(), Some(&[f64::NAN]), 1.0, 1, 1, StreamKey::new(0)).is_none());
    }
}
