//! Hybrid random features (Choromanski et al. 2022): two unbiased estimates of $e^{\langle x, y\rangle}$ mixed with
//! weights that are themselves kernels.
//!
//! With $H$ the hyperbolic and $T$ the trigonometric estimate from the same directions:
//!
//! * **Angular**: $\hat\lambda H + (1 - \hat\lambda) T$ with $\hat\lambda = \frac12 - \frac{1}{2n} \sum_t
//!   \mathrm{sgn}(\tau_t \cdot x)\,\mathrm{sgn}(\tau_t \cdot y)$, mean $\theta/\pi$. No variance at angles 0 and
//!   $\pi$ for rows of equal length. $m = 4M(n+1)$.
//! * **Gaussian**: $\hat\lambda T + (1 - \hat\lambda) H$ with trigonometric features of
//!   $e^{-\|x-y\|^2/(2\tau^2)}$. $m = 2M(1 + 4n)$.
//! * **Clusters** ([`ClusterFeatures`]): positive features, for every pair of a query and a key cluster with its
//!   own diagonal $A$: $x \to Ax$, $y \to A^{-1}y$.
//!
//! The minus signs of the mixture are on the key side, real in place of the paper's imaginary unit. Mixed features are
//! signed and their constants never cancel, so they are always kept.

use super::trig::phase;
use super::{
    Constants, LogFeatures, MapOptions, Side, SignedFeatures, check_call, check_signed_call, saturate,
};
use crate::linalg::dot;
use crate::mat::{Mat, MatRef, Real};
use crate::sketch::project::{Projection, needs_wide, norm2_wide};
use crate::sketch::variance::{Pair, exp_relative_variance};
use crate::sketch::{Coupling, SketchError, ensure, ensure_size};

/// Kernel that weights the mixture.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum HybridWeight {
    /// $\theta/\pi$ on the hyperbolic estimate.
    Angular,
    /// $e^{-\|x-y\|^2/(2\tau^2)}$ on the trigonometric estimate.
    Gaussian {
        /// The width.
        tau: f64,
    },
}

/// Angular or Gaussian hybrid features.
#[derive(Clone, Debug)]
pub struct HybridFeatures<T> {
    /// Base directions, then weight directions.
    stacked: Projection<T>,
    bases: usize,
    weight: HybridWeight,
    scale: f64,
}

impl<T: Real> HybridFeatures<T> {
    /// Builds features from base directions (shared by both estimates) and independent standard normal weight
    /// directions.
    pub fn new(
        directions: &Mat<f64>,
        weight_directions: &Mat<f64>,
        weight: HybridWeight,
        scale: f64,
    ) -> Result<Self, SketchError> {
        MapOptions { scale, constants: Constants::Keep }.validate()?;
        ensure(directions.rows() > 0, "directions", 0.0, "at least one")?;
        ensure(weight_directions.rows() > 0, "weight directions", 0.0, "at least one")?;
        ensure_size("length of weight directions", directions.cols(), weight_directions.cols())?;
        let width = match weight {
            HybridWeight::Angular => 1.0,
            HybridWeight::Gaussian { tau } => {
                ensure(tau > 0.0 && tau.is_finite(), "tau", tau, "positive and finite")?;
                tau
            }
        };
        let (bases, root) = (directions.rows(), scale.sqrt());
        let stacked = Mat::from_fn(bases + weight_directions.rows(), directions.cols(), |i, j| {
            T::from_f64(if i < bases {
                root * directions[(i, j)]
            } else {
                root / width * weight_directions[(i - bases, j)]
            })
        });
        Ok(Self { stacked: Projection::new(stacked), bases, weight, scale })
    }
}

impl<T: Real> SignedFeatures<T> for HybridFeatures<T> {
    fn input_dim(&self) -> usize {
        self.stacked.dim()
    }

    fn num_features(&self) -> usize {
        let n = self.stacked.len() - self.bases;
        match self.weight {
            HybridWeight::Angular => 4 * self.bases * (n + 1),
            HybridWeight::Gaussian { .. } => 2 * self.bases * (1 + 4 * n),
        }
    }

    fn signed_features(&self, x: MatRef<'_, T>, side: Side, out: &mut [T], log_scale: &mut [T]) {
        let m = SignedFeatures::<T>::num_features(self);
        check_signed_call(x, self.stacked.dim(), out, m, log_scale);
        let minus = if side == Side::Key { -1.0 } else { 1.0 };
        let n = (self.stacked.len() - self.bases) as f64;
        // Finite bounds keep differences of overflowed numbers from becoming NaN.
        let norms: Vec<f64> =
            x.iter_rows().map(|row| (self.scale * norm2_wide(row)).clamp(0.0, 1e300)).collect();
        let (mut hyp, mut trig) = (vec![0.0; 2 * self.bases], vec![0.0; 2 * self.bases]);
        self.stacked.rows_in_f64(
            x,
            out,
            m,
            |i| needs_wide::<T>(norms[i]),
            |i, p, row| {
                let (p, tau) = p.split_at(self.bases);
                let half = 0.5 * norms[i];
                let top = p.iter().fold(0.0f64, |m, p| m.max(p.abs())).min(1e300);
                let shift = half.max(top - half);
                let (hyp_factor, trig_factor) =
                    (1.0 / (hyp.len() as f64).sqrt(), 1.0 / (p.len() as f64).sqrt());
                let trig_size = trig_factor * (half - shift).exp();
                for (l, &p) in p.iter().enumerate() {
                    let bounded = p.clamp(-1e300, 1e300);
                    hyp[l] = hyp_factor * (bounded - half - shift).exp();
                    hyp[self.bases + l] = hyp_factor * (-bounded - half - shift).exp();
                    let (sin, cos) = phase(p);
                    trig[l] = trig_size * cos;
                    trig[self.bases + l] = trig_size * sin;
                }
                let mut next = row.iter_mut();
                let mut emit = |factor: f64, block: &[f64]| {
                    block.iter().zip(&mut next).for_each(|(b, o)| *o = T::from_f64(factor * b));
                };
                match self.weight {
                    HybridWeight::Angular => {
                        emit(0.5f64.sqrt(), &hyp);
                        emit(0.5f64.sqrt(), &trig);
                        let size = 1.0 / (2.0 * n).sqrt();
                        tau.iter().for_each(|t| emit(size * t.signum(), &trig));
                        tau.iter().for_each(|t| emit(minus * size * t.signum(), &hyp));
                    }
                    HybridWeight::Gaussian { .. } => {
                        emit(1.0, &hyp);
                        let size = 1.0 / n.sqrt();
                        for &t in tau {
                            let (sin, cos) = phase(t);
                            for w in [size * cos, size * sin] {
                                emit(w, &trig);
                                emit(minus * w, &hyp);
                            }
                        }
                    }
                }
                log_scale[i] = saturate(shift);
            },
        );
    }
}

/// Positive features with one diagonal rescaling per pair of clusters.
///
/// A query in cluster $i$ has non-zero features only in the blocks $(i, \cdot)$, a key in cluster $j$ only in
/// $(\cdot, j)$, so a pair shares one block, whose $A_c = \sqrt{|c_{k,c} / c_{q,c}|}$ (1 where either is zero, kept
/// within $10^{\pm3}$) suits its centroids. Weights are cluster indicators, hence deterministic, and the estimate is
/// unbiased.
#[derive(Clone, Debug)]
pub struct ClusterFeatures {
    omega: Mat<f64>,
    query_centroids: Mat<f64>,
    key_centroids: Mat<f64>,
    antithetic: bool,
    options: MapOptions,
}

impl ClusterFeatures {
    /// Builds the map from directions and the centroids of unscaled queries and keys.
    pub fn new(
        directions: &Mat<f64>,
        query_centroids: &Mat<f64>,
        key_centroids: &Mat<f64>,
        antithetic: bool,
        options: MapOptions,
    ) -> Result<Self, SketchError> {
        options.validate()?;
        ensure(directions.rows() > 0, "directions", 0.0, "at least one")?;
        for centroids in [query_centroids, key_centroids] {
            ensure(centroids.rows() > 0, "centroids", 0.0, "at least one")?;
            ensure_size("length of centroids", directions.cols(), centroids.cols())?;
        }
        Ok(Self {
            omega: directions.clone(),
            query_centroids: query_centroids.clone(),
            key_centroids: key_centroids.clone(),
            antithetic,
            options,
        })
    }

    fn block_len(&self) -> usize {
        self.omega.rows() * if self.antithetic { 2 } else { 1 }
    }

    /// Returns the variance of the estimate for *scaled* rows, relative to the squared kernel: that of hyperbolic (or
    /// positive) features after the rescaling of the pair's clusters.
    pub fn relative_variance(&self, x: &[f64], y: &[f64], coupling: Coupling) -> f64 {
        let root = self.options.scale.sqrt();
        let unscaled = |x: &[f64]| -> Vec<f64> { x.iter().map(|x| x / root).collect() };
        let i = nearest(&self.query_centroids, &unscaled(x));
        let j = nearest(&self.key_centroids, &unscaled(y));
        let x: Vec<f64> = x.iter().enumerate().map(|(c, x)| x * self.factor(i, j, c)).collect();
        let y: Vec<f64> = y.iter().enumerate().map(|(c, y)| y / self.factor(i, j, c)).collect();
        let (pair, m) = (Pair::of(&x, &y), self.omega.rows());
        exp_relative_variance(&pair, x.len(), m, coupling, 0.0, self.antithetic)
    }

    /// Returns the factor of coordinate `c` of a query for centroids `i` and `j`.
    fn factor(&self, i: usize, j: usize, c: usize) -> f64 {
        let (q, k) = (self.query_centroids[(i, c)].abs(), self.key_centroids[(j, c)].abs());
        if q > 0.0 && k > 0.0 { (k.sqrt() / q.sqrt()).clamp(1e-3, 1e3) } else { 1.0 }
    }
}

/// Returns the nearest row of `centroids`; the first of equals.
fn nearest(centroids: &Mat<f64>, x: &[f64]) -> usize {
    let distance = |c: &[f64]| -> f64 { c.iter().zip(x).map(|(c, x)| (c - x).powi(2)).sum() };
    (0..centroids.rows())
        .min_by(|&a, &b| distance(centroids.row(a)).total_cmp(&distance(centroids.row(b))))
        .unwrap_or(0)
}

impl<T: Real> LogFeatures<T> for ClusterFeatures {
    fn input_dim(&self) -> usize {
        self.omega.cols()
    }

    fn num_features(&self) -> usize {
        self.query_centroids.rows() * self.key_centroids.rows() * self.block_len()
    }

    fn log_features(&self, x: MatRef<'_, T>, side: Side, out: &mut [T]) {
        let (m, block) = (LogFeatures::<T>::num_features(self), self.block_len());
        check_call(x, self.omega.cols(), out, m);
        let constant =
            if self.options.constants == Constants::Keep { -0.5 * (block as f64).ln() } else { 0.0 };
        let root = self.options.scale.sqrt();
        let (nq, nk) = (self.query_centroids.rows(), self.key_centroids.rows());
        for (row, out) in x.iter_rows().zip(out.chunks_exact_mut(m)) {
            let wide: Vec<f64> = row.iter().map(|x| x.to_f64()).collect();
            out.fill(T::NEG_INFINITY);
            let pairs: Vec<(usize, usize)> = match side {
                Side::Query => {
                    let i = nearest(&self.query_centroids, &wide);
                    (0..nk).map(|j| (i, j)).collect()
                }
                Side::Key => {
                    let j = nearest(&self.key_centroids, &wide);
                    (0..nq).map(|i| (i, j)).collect()
                }
            };
            for (i, j) in pairs {
                let scaled: Vec<f64> = wide
                    .iter()
                    .enumerate()
                    .map(|(c, x)| {
                        let a = self.factor(i, j, c);
                        // The bounds keep the norm and the projections from overflowing.
                        (root * x * if side == Side::Query { a } else { 1.0 / a }).clamp(-1e140, 1e140)
                    })
                    .collect();
                // The factors differ between the blocks of a query, so its norm does not cancel.
                let base = constant - 0.5 * dot(&scaled, &scaled);
                let (plus, minus) = out[(i * nk + j) * block..][..block].split_at_mut(self.omega.rows());
                for (l, o) in plus.iter_mut().enumerate() {
                    let p = dot(&scaled, self.omega.row(l));
                    *o = T::from_f64(base + p);
                    if self.antithetic {
                        minus[l] = T::from_f64(base - p);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::StreamKey;
    use crate::sketch::draw_directions;
    use crate::sketch::testing::{check_moments, kernel_of, signed_kernel_of};
    use crate::sketch::variance::{angular_hybrid_relative_variance, gaussian_hybrid_relative_variance};

    const X: [f64; 3] = [0.5, -0.1, 0.3];
    const Y: [f64; 3] = [0.1, 0.4, 0.05];

    fn map(m: usize, n: usize, weight: HybridWeight, seed: u64) -> HybridFeatures<f64> {
        let draw =
            |m, purpose| draw_directions(Coupling::Iid, m, 3, StreamKey::new(seed).named(purpose)).unwrap();
        HybridFeatures::new(&draw(m, "base"), &draw(n, "weight"), weight, 1.0).unwrap()
    }

    #[test]
    fn both_mixtures_are_unbiased_with_the_stated_variance() {
        let pair = Pair::of(&X, &Y);
        let sm2 = pair.sm() * pair.sm();
        for (weight, variance) in [
            (HybridWeight::Angular, angular_hybrid_relative_variance(&pair, 3, 8, 3)),
            (HybridWeight::Gaussian { tau: 0.7 }, gaussian_hybrid_relative_variance(&pair, 3, 8, 3, 0.7)),
        ] {
            check_moments(&format!("{weight:?}"), 20_000, pair.sm(), variance * sm2, 0.08, |seed| {
                signed_kernel_of(&map(8, 3, weight, seed), &X, &Y)
            });
        }
    }

    #[test]
    fn orthogonal_directions_keep_the_mean() {
        let pair = Pair::of(&X, &Y);
        let n = 4000u32;
        let mean = (0..n)
            .map(|seed| {
                let draw = |coupling, purpose| {
                    let key = StreamKey::new(u64::from(seed)).named(purpose);
                    draw_directions(coupling, 6, 3, key).unwrap()
                };
                let (base, weight) = (draw(Coupling::Orthogonal, "base"), draw(Coupling::Iid, "weight"));
                let map = HybridFeatures::new(&base, &weight, HybridWeight::Angular, 1.0).unwrap();
                signed_kernel_of(&map, &X, &Y)
            })
            .sum::<f64>()
            / f64::from(n);
        let independent = angular_hybrid_relative_variance(&pair, 3, 6, 6).sqrt() * pair.sm();
        assert!((mean - pair.sm()).abs() < 5.0 * independent / f64::from(n).sqrt(), "{mean}, {}", pair.sm());
    }

    #[test]
    fn the_number_of_features_is_as_stated() {
        assert_eq!(SignedFeatures::<f64>::num_features(&map(32, 8, HybridWeight::Angular, 0)), 1152);
        assert_eq!(
            SignedFeatures::<f64>::num_features(&map(4, 2, HybridWeight::Gaussian { tau: 1.0 }, 0)),
            72
        );
    }

    #[test]
    fn equal_and_opposite_rows_have_no_variance() {
        let opposite = X.map(|x| -x);
        for seed in 0..20 {
            let map = map(4, 3, HybridWeight::Angular, seed);
            let norm2: f64 = X.iter().map(|x| x * x).sum();
            assert!((signed_kernel_of(&map, &X, &X) - norm2.exp()).abs() < 1e-14);
            assert!((signed_kernel_of(&map, &X, &opposite) - (-norm2).exp()).abs() < 1e-14);
        }
    }

    #[test]
    fn zero_and_huge_rows_are_finite() {
        for weight in [HybridWeight::Angular, HybridWeight::Gaussian { tau: 1.0 }] {
            let omega = draw_directions(Coupling::Orthogonal, 5, 3, StreamKey::new(1)).unwrap();
            let map = HybridFeatures::<f32>::new(&omega, &omega, weight, 1.0).unwrap();
            let m = map.num_features();
            let x = [0.0, 0.0, 0.0, 40.0, 20.0, -10.0, 3e38, -3e38, 3e38f32];
            let (mut out, mut scale) = (vec![f32::NAN; 3 * m], [f32::NAN; 3]);
            map.signed_features(MatRef::new(&x, 3, 3), Side::Key, &mut out, &mut scale);
            assert!(out.iter().chain(&scale).all(|v| v.is_finite()));
        }
    }

    #[test]
    fn cluster_features_are_unbiased_and_exact_where_the_rescaled_rows_are_opposite() {
        let queries = Mat::from_vec(vec![1.0, 0.2, 0.5, -1.0, 0.4, 0.0], 2, 3);
        let keys = Mat::from_vec(vec![-0.5, -0.3, -1.0, 2.0, 2.0, 2.0, 0.0, 5.0, 0.0], 3, 3);
        let build = |seed| {
            let omega = draw_directions(Coupling::Orthogonal, 6, 3, StreamKey::new(seed)).unwrap();
            ClusterFeatures::new(&omega, &queries, &keys, true, MapOptions::default()).unwrap()
        };
        // At the centroids themselves A x = −A⁻¹ y, coordinate by coordinate.
        let (x, y) = (queries.row(0), keys.row(0));
        let exact = dot(x, y).exp();
        for seed in 0..10 {
            assert!((kernel_of(&build(seed), x, y) / exact - 1.0).abs() < 1e-13);
        }
        // Elsewhere the mean is exact and the variance that of the rescaled pair.
        let (x, y) = ([0.7, 0.3, 0.45], [-0.4, -0.1, -0.9]);
        let map = build(0);
        assert_eq!(LogFeatures::<f64>::num_features(&map), 6 * 12);
        let scaled: Vec<f64> = (0..3).map(|c| x[c] * map.factor(0, 0, c)).collect();
        let back: Vec<f64> = (0..3).map(|c| y[c] / map.factor(0, 0, c)).collect();
        let pair = Pair::of(&scaled, &back);
        let variance = exp_relative_variance(&pair, 3, 6, Coupling::Orthogonal, 0.0, true);
        assert!((map.relative_variance(&x, &y, Coupling::Orthogonal) / variance - 1.0).abs() < 1e-12);
        check_moments("clusters", 20_000, dot(&x, &y).exp(), variance * pair.sm().powi(2), 0.08, |seed| {
            kernel_of(&build(seed), &x, &y)
        });
    }

    #[test]
    fn bad_parameters_are_refused() {
        let omega = draw_directions(Coupling::Iid, 2, 3, StreamKey::new(1)).unwrap();
        let none = Mat::<f64>::zeros(0, 3);
        let other = Mat::<f64>::zeros(1, 2);
        assert!(HybridFeatures::<f32>::new(&omega, &none, HybridWeight::Angular, 1.0).is_err());
        assert!(HybridFeatures::<f32>::new(&omega, &other, HybridWeight::Angular, 1.0).is_err());
        assert!(
            HybridFeatures::<f32>::new(&omega, &omega, HybridWeight::Gaussian { tau: 0.0 }, 1.0).is_err()
        );
        assert!(ClusterFeatures::new(&omega, &none, &omega, true, MapOptions::default()).is_err());
    }
}
