//! Hybrid random features: two estimates of the softmax kernel mixed with weights that depend on the pair.
//!
//! **Idea.** Trigonometric features are exact at angle 0, hyperbolic ones at angle $\pi$. Mix both by a weight that is
//! itself a kernel with random features: the mixture is unbiased and accurate at both ends.
//!
//! **Math.** With $H$ the hyperbolic and $T$ the trigonometric estimate from the same directions:
//! * `angular`: $\hat\lambda H + (1 - \hat\lambda) T$, $\hat\lambda = \frac12 - \frac{1}{2n} \sum_t
//!   \mathrm{sgn}(\tau_t \cdot x)\,\mathrm{sgn}(\tau_t \cdot y)$, with mean $\theta/\pi$: the positive estimate
//!   dominates at large angles. $m = 4M(n + 1)$ features.
//! * `gaussian`: $\hat\lambda T + (1 - \hat\lambda) H$, where $\hat\lambda$ estimates $e^{-\|x - y\|^2/(2\tau^2)}$;
//!   $m = 2M(1 + 4n)$.
//! * `clusters`: hyperbolic features, for each pair of a cluster of queries and one of keys after a diagonal rescaling
//!   that suits their centroids; positive, and without a mask only. $m = 2M c^2$.
//!
//! **Reference.** choromanski2022. A sign on the key side replaces the paper's imaginary unit. All bases are always
//! combined, never selected. Published notebooks swap the weights in one place; here they are correct.
//!
//! **Cost.** $n + 1$ times that of `performer` with $M$ directions.
//!
//! **Guarantees.** Entries are unbiased with the variance of the formula, zero for rows of equal length at angles 0 and
//! $\pi$: tested. Features are signed (except `clusters`), so denominators may cancel. `RunInfo` carries the
//! predicted relative standard deviation of an entry and the `features_needed` for `target_error`.
//!
//! **When to use.** Kernel entries at small norms ($\tau\|q\|\|k\| \lesssim 2$); for normalised rows the sign problem
//! costs more than the mixture gains.

use crate::engine::linear::{
    DenominatorPolicy, Directions, ErrorModel, Linear, PairVariance, Positive, Prepared, Shape, Signed,
    Source,
};
use crate::group::{Group, GroupIndex, GroupPlan};
use crate::method::{Accepted, Claims, Family, Law, Method, Promise, Spec, Support, Tunable, Withdrawn};
use crate::{Error, Mask, Mat, MatRef, Problem, Real, Result, Spread};
use attlas_num::cluster::kmeans::{self, kmeans};
use attlas_num::rng::StreamKey;
use attlas_num::sketch::features::{ClusterFeatures, HybridFeatures, HybridWeight};
use attlas_num::sketch::variance::{
    Pair, angular_hybrid_relative_variance, gaussian_hybrid_relative_variance,
};
use attlas_num::sketch::{Coupling, MapOptions, draw_directions};
use std::sync::Arc;

/// Registry entry.
pub static METHOD: Method = Method {
    id: "hybrid_features",
    family: Family::Kernel,
    title: "Hybrid random features: hyperbolic and trigonometric ones, mixed by angle, distance or cluster",
    reference: "choromanski2022",
    claims: Claims {
        decode: true,
        row_stochastic: false,
        deterministic: false,
        exponent: 1.0,
        withdrawn: &[
            Withdrawn {
                param: "kind",
                value: "clusters",
                promise: Promise::Law(Law::HeadsAlone),
                reason: "clusters are those of the queries of all heads",
            },
            Withdrawn {
                param: "kind",
                value: "clusters",
                promise: Promise::Law(Law::QueriesAlone),
                reason: "clusters are those of all queries",
            },
            Withdrawn {
                param: "kind",
                value: "clusters",
                promise: Promise::Law(Law::KeyOrder),
                reason: "k-means starts from rows drawn by position",
            },
        ],
        spread: Spread::SCAN,
        ..Claims::BASE
    },
    probes: &[
        &[("bases", "5"), ("weights", "2")],
        &[("kind", "gaussian"), ("bases", "8"), ("weights", "3"), ("tau", "2")],
        &[("kind", "clusters"), ("bases", "8"), ("clusters", "3")],
    ],
    tunable: &[Tunable::budget("bases")],
    ..Method::of::<Params>()
};

crate::choices! {
    /// Variable that the mixture weight depends on.
    pub enum Kind {
        /// The angle between query and key.
        Angular = "angular",
        /// Their distance.
        Gaussian = "gaussian",
        /// Their clusters.
        Clusters = "clusters",
    }
}

crate::params! {
    /// Parameters of hybrid random features.
    pub struct Params {
        /// Variable that the mixture weight depends on.
        kind: Kind = Kind::Angular;
        /// Number of directions, shared by both estimates.
        bases: usize = 32, in 1..=1 << 16;
        /// Random features of the weight.
        weights: usize = 8, in 1..=1 << 12;
        /// Width of the Gaussian weight.
        tau: f64 = 1.0, in 1e-6..=1e6;
        /// Number of clusters of queries, and of keys; at most the number of rows.
        clusters: usize = 4, in 1..=256;
        /// Coupling of the shared directions.
        directions: Directions = Directions::Orthogonal;
        /// Treatment of rows where a denominator nearly cancels.
        denominator: DenominatorPolicy = DenominatorPolicy::Clamp;
        /// A denominator counts as cancelled below this share of the sum of its absolute terms.
        den_floor: f64 = 1e-3, in 0.0..=1.0;
        /// Relative standard deviation of a kernel entry that the figure `features_needed` aims at.
        target_error: f64 = 0.1, in 1e-6..=10.0;
        /// Seed of the directions and of the clustering.
        seed: u64 = 0, in 0..=u64::MAX;
    }
}

impl Spec for Params {
    const METHOD: &'static Method = &METHOD;

    fn supports(&self, p: &Problem) -> Support {
        self.directions.supports(p).and_unless(
            self.kind == Kind::Clusters && p.mask == Mask::Causal,
            "clusters of all keys would let causal rows see later tokens: use kind = angular or gaussian",
        )
    }

    fn build(self, x: Accepted<'_>) -> Result<impl GroupPlan> {
        Linear::new(x.problem, Hybrid { params: self })
    }
}

/// Source of feature maps.
#[derive(Clone, Debug)]
pub struct Hybrid {
    params: Params,
}

impl Hybrid {
    fn key(&self, index: GroupIndex) -> StreamKey {
        index.stream_key(self.params.seed)
    }
}

impl Source for Hybrid {
    /// Directions of the bases and of the weights.
    type Draws = [Mat<f64>; 2];

    fn draw(&self, d: usize, index: GroupIndex) -> Result<[Mat<f64>; 2]> {
        let Params { bases, weights, directions, .. } = self.params;
        let key = self.key(index);
        Ok([
            draw_directions(directions.coupling(), bases, d, key.named("directions"))?,
            draw_directions(Coupling::Iid, weights, d, key.named("weights"))?,
        ])
    }

    fn num_features(&self, _: usize) -> usize {
        let Params { kind, bases, weights, clusters, .. } = self.params;
        match kind {
            Kind::Angular => 4 * bases * (weights + 1),
            Kind::Gaussian => 2 * bases * (1 + 4 * weights),
            Kind::Clusters => 2 * bases * clusters * clusters,
        }
    }

    fn feature_flops(&self, d: usize) -> u64 {
        let Params { kind, bases, weights, clusters, .. } = self.params;
        let projections = if kind == Kind::Clusters { bases * clusters } else { bases + weights };
        (2 * d * projections + self.num_features(d)) as u64
    }

    fn target_error(&self) -> f64 {
        self.params.target_error
    }

    fn prepare<T: Real>(
        &self,
        shape: &Shape,
        [bases, weights]: &[Mat<f64>; 2],
        data: Option<&Group<'_, T>>,
    ) -> Result<Prepared<T>> {
        let Params { kind, tau, denominator, den_floor, .. } = self.params;
        let weight = match kind {
            Kind::Angular => HybridWeight::Angular,
            Kind::Gaussian => HybridWeight::Gaussian { tau },
            Kind::Clusters => return self.prepare_clusters(shape, data, bases),
        };
        let map = HybridFeatures::new(bases, weights, weight, shape.scale)?;
        let variance = Arc::new(Mixture { weight, bases: bases.rows(), weights: weights.rows() });
        let acc = Signed::new(map, shape.d_v, denominator, den_floor);
        Ok(Prepared::new(acc).with_error(ErrorModel::Pairs { variance, directions: bases.rows() }))
    }
}

/// The variance of the mixtures, for independent directions: an upper bound for orthogonal ones.
#[derive(Debug)]
struct Mixture {
    weight: HybridWeight,
    bases: usize,
    weights: usize,
}

impl PairVariance for Mixture {
    fn relative_variance(&self, x: &[f64], y: &[f64]) -> f64 {
        let pair = Pair::of(x, y);
        match self.weight {
            HybridWeight::Angular => {
                angular_hybrid_relative_variance(&pair, x.len(), self.bases, self.weights)
            }
            HybridWeight::Gaussian { tau } => {
                gaussian_hybrid_relative_variance(&pair, x.len(), self.bases, self.weights, tau)
            }
        }
    }
}

/// The variance of the features of clusters.
#[derive(Debug)]
struct Rescaled {
    map: ClusterFeatures,
    coupling: Coupling,
}

impl PairVariance for Rescaled {
    fn relative_variance(&self, x: &[f64], y: &[f64]) -> f64 {
        self.map.relative_variance(x, y, self.coupling)
    }
}

impl Hybrid {
    fn prepare_clusters<T: Real>(
        &self,
        shape: &Shape,
        data: Option<&Group<'_, T>>,
        bases: &Mat<f64>,
    ) -> Result<Prepared<T>> {
        let Some(g) = data else {
            let reason = "clusters are those of all keys, which a stream does not have".to_string();
            return Err(Error::Unsupported { method: METHOD.id.into(), reasons: vec![reason] });
        };
        let queries: Vec<T> = g.q.iter_rows().flatten().copied().collect();
        let queries = MatRef::new(&queries, g.q.heads() * g.n_q(), shape.d);
        let centroids = |x: MatRef<'_, T>, what: &str| {
            let options = kmeans::Options::new(self.params.clusters);
            let key = self.key(shape.index).named(what);
            kmeans(x, None, options, kmeans::Init::PlusPlus, key).centroids.cast::<f64>()
        };
        let map = ClusterFeatures::new(
            bases,
            &centroids(queries, "query clusters"),
            &centroids(g.k, "key clusters"),
            true,
            MapOptions { scale: shape.scale, ..MapOptions::default() },
        )?;
        let variance = Arc::new(Rescaled { map: map.clone(), coupling: self.params.directions.coupling() });
        let error = ErrorModel::Pairs { variance, directions: bases.rows() };
        Ok(Prepared::new(Positive::new(map, shape.d_v)).with_error(error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Options;
    use crate::engine::linear::testing::{
        PAIR, check_entry, check_generic, entry_moments, naive_signed, run,
    };
    use crate::group::GroupIndex;
    use crate::testkit::{Case, assert_rows_close, check_method, reference};
    use attlas_num::sketch::variance::{
        exp_relative_variance, hybrid_variance, hyp_trig_relative_covariance, trig_relative_variance,
    };

    fn options(pairs: &[(&str, &str)]) -> Options {
        pairs.iter().fold(Options::new(), |o, (k, v)| o.with(k, *v))
    }

    #[test]
    fn honours_the_contract() {
        check_method(&METHOD);
    }

    #[test]
    fn mixed_rows_equal_the_definition() {
        for (kind, weight) in
            [("angular", HybridWeight::Angular), ("gaussian", HybridWeight::Gaussian { tau: 1.0 })]
        {
            // Small inputs and many bases, so that denominators do not cancel.
            let o = options(&[("kind", kind), ("bases", "40"), ("weights", "3"), ("denominator", "strict")]);
            check_generic(&METHOD, &o, &[0.4], |x| {
                let p = &x.problem;
                let index = GroupIndex { batch: 0, kv_head: 0 };
                let [bases, weights] =
                    Hybrid { params: Params::from_options(&o).unwrap() }.draw(p.d, index).unwrap();
                let map = HybridFeatures::new(&bases, &weights, weight, p.scale).unwrap();
                naive_signed(&map, x)
            });
        }
    }

    #[test]
    fn entries_have_the_known_means_and_variances() {
        let (x, y) = PAIR;
        let pair = Pair::of(&x, &y);
        let angular = options(&[("bases", "4"), ("weights", "4"), ("directions", "iid")]);
        check_entry(&METHOD, &angular, (&x, &y), (pair.sm(), 0.01955996292));
        let gaussian = angular.with("kind", "gaussian").with("tau", 0.8);
        let variance = gaussian_hybrid_relative_variance(&pair, 4, 4, 4, 0.8) * pair.sm().powi(2);
        check_entry(&METHOD, &gaussian, (&x, &y), (pair.sm(), variance));
    }

    #[test]
    fn many_weights_make_a_fixed_mixture() {
        // n → ∞: λ̂ is λ, and the variance that of λH + (1 − λ)T.
        let (x, y) = PAIR;
        let pair = Pair::of(&x, &y);
        let [few, many] = [4, 4000].map(|n| angular_hybrid_relative_variance(&pair, 4, 4, n));
        let lambda = pair.angle() / std::f64::consts::PI;
        let h = exp_relative_variance(&pair, 4, 4, Coupling::Iid, 0.0, true);
        let t = trig_relative_variance(&pair, 4, 4, Coupling::Iid);
        let shared = hyp_trig_relative_covariance(&pair, 4);
        let limit = hybrid_variance(lambda, 0.0, h, t, shared);
        assert!((many - limit).abs() < 1e-3 * limit && few > limit, "{few}, {many}, {limit}");
        // Orthogonal rows: λ is one half.
        assert!((Pair::of(&[1.0, 0.0], &[0.0, 2.0]).angle() / std::f64::consts::PI - 0.5).abs() < 1e-15);
    }

    #[test]
    fn the_predicted_error_is_told_and_falls_with_the_bases() {
        let mut x = Case::gaussian(Problem::new(2, 60, 8), 8);
        x.q.iter_mut().chain(&mut x.k).for_each(|v| *v *= 0.5);
        for kind in ["angular", "gaussian", "clusters"] {
            let figures = |bases: usize| {
                run(&METHOD, &options(&[("kind", kind)]).with("bases", bases), &x).info.figures
            };
            let (few, many) = (figures(16), figures(64));
            assert!((few["predicted_rel_sd"] / many["predicted_rel_sd"] - 2.0).abs() < 0.1, "{kind}");
            let (a, b) = (few["features_needed"], many["features_needed"]);
            assert!((a / b - 1.0).abs() < 0.1 && a > 0.0, "{kind}: {a}, {b}");
        }
    }

    #[test]
    fn equal_and_opposite_rows_have_no_variance() {
        let x = [0.5, -0.2, 0.3, 0.4];
        let norm2: f64 = x.iter().map(|v| v * v).sum();
        for sign in [1.0, -1.0] {
            let y = x.map(|v| sign * v);
            let [mean, variance, _] = entry_moments(&METHOD, &options(&[("bases", "3")]), &x, &y, 50);
            assert!((mean - (sign * norm2).exp()).abs() < 1e-14 && variance < 1e-28);
        }
    }

    #[test]
    fn clusters_are_exact_where_centroids_are_rows_of_opposite_signs() {
        // One query and one key: the centroids are the rows themselves, and A x = −A⁻¹ y.
        let (x, y) = ([0.9, 0.2, -1.5, 0.4], [-0.3, -1.0, 0.7, -2.0]);
        let exact = x.iter().zip(&y).map(|(a, b)| a * b).sum::<f64>().exp();
        let [mean, variance, _] = entry_moments(&METHOD, &options(&[("kind", "clusters")]), &x, &y, 20);
        assert!((mean / exact - 1.0).abs() < 1e-13 && variance < 1e-26 * exact * exact);
    }

    #[test]
    fn more_bases_bring_rows_nearer_to_softmax() {
        let mut x = Case::gaussian(Problem::new(1, 150, 8), 6);
        x.q.iter_mut().chain(&mut x.k).for_each(|v| *v *= 0.6);
        // Two clusters on either side, far from the axes, where the rescaling has an effect.
        let mut clustered = x.clone();
        for (t, v) in clustered.q.iter_mut().chain(&mut clustered.k).enumerate() {
            let sign = if t / 8 % 2 == 0 { 1.0 } else { -1.0 };
            *v = 0.1 * *v + sign * if t % 8 < 4 { 0.2 } else { 0.35 };
        }
        for kind in ["angular", "gaussian", "clusters"] {
            let x = if kind == "clusters" { clustered.clone() } else { x.clone() };
            let exact = reference(&x).0;
            let error = |bases: usize| {
                let base = options(&[("kind", kind), ("clusters", "2")]).with("bases", bases);
                let o = |seed: u64| base.clone().with("seed", seed);
                (0..3)
                    .map(|s| crate::metrics::relative_frobenius(&run(&METHOD, &o(s), &x).o, &exact))
                    .sum::<f64>()
                    / 3.0
            };
            let (few, many) = (error(8), error(512));
            // Errors fall like the root of the number of directions: by 8, here by 4 at least.
            assert!(many < few / 4.0, "{kind}: {few}, {many}");
        }
    }

    #[test]
    fn clusters_reproduce_constant_values() {
        let mut x = Case::gaussian(Problem { d_v: 2, ..Problem::new(1, 30, 4) }, 7);
        x.v = vec![1.5; 60];
        let ran = run(&METHOD, &options(&[("kind", "clusters"), ("clusters", "3")]), &x);
        assert_rows_close(&ran.o, &[1.5; 60], 1e-13, "constant values");
    }
}
