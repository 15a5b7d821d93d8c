//! Performer: unbiased random features of the softmax kernel (FAVOR+).
//!
//! **Idea.** Replace $e^{\tau q^\top k}$ by an inner product of random features, so that keys and values are summed
//! once and every query reads the sum. Positive features keep the weights positive; orthogonal directions lower their
//! variance.
//!
//! **Math.** With $x = \sqrt\tau q$, $y = \sqrt\tau k$ and directions $\omega_l \sim N(0, I_d)$:
//! * `pos`: $\varphi_l(x) = m^{-1/2} \exp(\omega_l^\top x - \|x\|^2/2)$;
//! * `hyp`: the same for $\pm\omega_l$, half as many directions; never worse at equal $m$;
//! * `trig`: $e^{\|x\|^2/2} M^{-1/2} (\cos \omega_l^\top x, \sin \omega_l^\top x)$, signed;
//! * `relu`: $\max(\omega_l^\top x, 0) + 10^{-3}$, a kernel of its own ("generalised attention").
//!
//! $o_i = \varphi(q_i)^\top \sum_j \varphi(k_j) v_j^\top / \varphi(q_i)^\top \sum_j \varphi(k_j)$, summed as in
//! [`linear`](crate::engine::linear), with every constant kept, so that the log-sum-exp estimates the exact
//! one.
//!
//! **Reference.** choromanski2021; directions: yu2016 (orthogonal), reid2023 (simplex). Departures: blocks are
//! orthogonal with $\chi_d$ lengths and the sign of the QR factor corrected, without which `pos` is biased; shifts per
//! feature and per row in place of one global key maximum; nothing is added to features unless `feature_eps` is set,
//! which reproduces the reference implementation and works without a mask only, because it needs the maximum over all
//! keys.
//!
//! **Cost.** $2(n_q + n_k)\,m\,(d + d_v)$, causal half as much again; state $m(d_v + 3)$, whatever the length.
//!
//! **Guarantees.** Un-normalised rows are unbiased (`pos`, `hyp`; `trig` before its denominator is guarded): tested.
//! The relative variance of an entry is $(e^{\|x+y\|^2} - 1)/M$ for independent directions, less for orthogonal
//! ones: exponential in the norms. `RunInfo` carries the predicted relative standard deviation
//! (`predicted_rel_sd`; above 0.5 rows are unreliable) and the `features_needed` for 10 %.
//!
//! **When to use.** Small norms ($\tau\|q\|\|k\| \lesssim 2$) or models trained with it. `crt` has less variance when
//! its exponent can be fitted to the data, which needs a calibration when causal; without one neither is the better
//! choice (SmolLM2-135M, 1024 tokens, one seed: perplexity 839 with `performer`, 942 with `crt`, 24.7 exactly).

use crate::engine::linear::{
    DenominatorPolicy, Directions, ErrorModel, Linear, Positive, Prepared, Shape, Signed, Source,
};
use crate::group::{Group, GroupIndex, GroupPlan};
use crate::method::{Accepted, Claims, Family, Method, Promise, Spec, Support, Tunable, Withdrawn};
use crate::{Mask, MatRef, Problem, Real, Result, Spread};
use attlas_num::Mat;
use attlas_num::kernels;
use attlas_num::sketch::features::{ExpFeatures, Exponent, RandomRelu, Trig, default_num_features};
use attlas_num::sketch::{LogFeatures, MapOptions, Side, draw_directions};

/// Registry entry.
pub static METHOD: Method = Method {
    id: "performer",
    family: Family::Kernel,
    title: "Performer: positive, hyperbolic or trigonometric random features (FAVOR+)",
    reference: "choromanski2021",
    claims: Claims {
        decode: true,
        gradient: true,
        unbiased: true,
        deterministic: false,
        exponent: 1.0,
        withdrawn: &[
            Withdrawn {
                param: "map",
                value: "trig",
                promise: Promise::Gradient,
                reason: "a denominator that nearly cancels is recomputed, and the recomputation has no gradient",
            },
            Withdrawn {
                param: "map",
                value: "relu",
                promise: Promise::Gradient,
                reason: "no gradient is written for ReLU features",
            },
            Withdrawn {
                param: "feature_eps",
                value: "*",
                promise: Promise::Gradient,
                reason: "the constant is added relative to the largest feature of the data",
            },
            Withdrawn {
                param: "map",
                value: "trig",
                promise: Promise::RowStochastic,
                reason: "trigonometric features give weights of either sign",
            },
            Withdrawn {
                param: "map",
                value: "trig",
                promise: Promise::Unbiased,
                reason: "a denominator that cancels has no logarithm, or is replaced",
            },
            Withdrawn {
                param: "map",
                value: "relu",
                promise: Promise::Unbiased,
                reason: "the kernel of ReLU features is not the exponential",
            },
            Withdrawn {
                param: "map",
                value: "relu",
                promise: Promise::Softmax,
                reason: "the kernel of ReLU features is not the exponential",
            },
            Withdrawn {
                param: "directions",
                value: "orthogonal_regularised",
                promise: Promise::Unbiased,
                reason: "constant lengths change the mean of the features",
            },
            Withdrawn {
                param: "directions",
                value: "hadamard",
                promise: Promise::Unbiased,
                reason: "Hadamard blocks are only nearly uniform",
            },
            Withdrawn {
                param: "feature_eps",
                value: "*",
                promise: Promise::Unbiased,
                reason: "a constant added to features changes the kernel",
            },
        ],
        spread: Spread::SCAN,
        ..Claims::BASE
    },
    probes: &[
        &[("map", "hyp"), ("features", "192")],
        &[("map", "pos"), ("features", "192"), ("directions", "simplex")],
        &[("map", "pos"), ("features", "33"), ("directions", "hadamard")],
        &[("map", "trig"), ("features", "64"), ("directions", "iid")],
        &[("map", "trig"), ("features", "7"), ("denominator", "exact_row")],
        &[("map", "relu"), ("directions", "orthogonal_regularised")],
        &[("feature_eps", "0.001")],
    ],
    tunable: &[Tunable::budget("features")],
    ..Method::of::<Params>()
};

crate::choices! {
    /// Kinds of features.
    pub enum Map {
        /// Exponentials, one per direction.
        Pos = "pos",
        /// Exponentials for each direction and its opposite.
        Hyp = "hyp",
        /// Cosines and sines.
        Trig = "trig",
        /// Positive parts, a kernel of its own.
        Relu = "relu",
    }
}

crate::params! {
    /// Parameters of [`Performer`].
    pub struct Params {
        /// Kind of features.
        map: Map = Map::Hyp;
        /// Features per token; auto is d ln d, rounded up to a multiple of 8. Features of hyp and trig, two per
        /// direction, are rounded up to an even number.
        features: Option<usize> = None, in 1..=1 << 20;
        /// Coupling of the random directions.
        directions: Directions = Directions::Orthogonal;
        /// Constant added to every stabilised feature, as in the reference implementation; it mixes in uniform
        /// attention. Only for positive and hyperbolic features without a mask.
        feature_eps: f64 = 0.0, in 0.0..=1.0;
        /// Treatment of rows where the denominator of trigonometric features nearly cancels.
        denominator: DenominatorPolicy = DenominatorPolicy::Clamp;
        /// A denominator counts as cancelled below this share of the sum of its absolute terms.
        den_floor: f64 = 1e-3, in 0.0..=1.0;
        /// Relative standard deviation of a kernel entry that the figure `features_needed` aims at.
        target_error: f64 = 0.1, in 1e-6..=10.0;
        /// Seed of the random directions.
        seed: u64 = 0, in 0..=u64::MAX;
    }
}

impl Spec for Params {
    const METHOD: &'static Method = &METHOD;

    fn supports(&self, p: &Problem) -> Support {
        let eps = self.feature_eps > 0.0;
        self
            .directions
            .supports(p)
            .and_unless(
                eps && p.mask == Mask::Causal,
                "feature_eps is relative to the largest feature of all keys, which a causal row may not see: set it to 0",
            )
            .and_unless(
                eps && matches!(self.map, Map::Trig | Map::Relu),
                "feature_eps exists for positive and hyperbolic features only",
            )
    }

    fn build(self, x: Accepted<'_>) -> Result<impl GroupPlan> {
        Linear::new(x.problem, Performer::new(self))
    }
}

/// Constant that the reference implementation adds to ReLU features.
pub const RELU_EPS: f64 = 1e-3;

/// Source of feature maps.
#[derive(Clone, Debug)]
pub struct Performer {
    params: Params,
}

impl Performer {
    /// Creates the source with these parameters.
    pub fn new(params: Params) -> Self {
        Self { params }
    }

    fn is_even(&self) -> bool {
        matches!(self.params.map, Map::Hyp | Map::Trig)
    }

    fn num_directions(&self, d: usize) -> usize {
        let features = self.params.features.unwrap_or_else(|| default_num_features(d));
        if self.is_even() { features.div_ceil(2) } else { features }
    }
}

impl Source for Performer {
    type Draws = Mat<f64>;

    fn draw(&self, d: usize, index: GroupIndex) -> Result<Mat<f64>> {
        let key = index.stream_key(self.params.seed).named("directions");
        Ok(draw_directions(self.params.directions.coupling(), self.num_directions(d), d, key)?)
    }

    fn num_features(&self, d: usize) -> usize {
        self.num_directions(d) * if self.is_even() { 2 } else { 1 }
    }

    fn feature_flops(&self, d: usize) -> u64 {
        (2 * d * self.num_directions(d) + 2 * self.num_features(d)) as u64
    }

    fn has_gradient(&self) -> bool {
        matches!(self.params.map, Map::Pos | Map::Hyp) && self.params.feature_eps == 0.0
    }

    fn fits_keys(&self) -> bool {
        self.params.feature_eps > 0.0
    }

    fn target_error(&self) -> f64 {
        self.params.target_error
    }

    fn prepare<T: Real>(
        &self,
        shape: &Shape,
        omega: &Mat<f64>,
        data: Option<&Group<'_, T>>,
    ) -> Result<Prepared<T>> {
        let Params { map, feature_eps, denominator, den_floor, .. } = self.params;
        let options = MapOptions { scale: shape.scale, ..MapOptions::default() };
        let (d_v, directions) = (shape.d_v, omega.rows());
        Ok(match map {
            Map::Pos | Map::Hyp => {
                let (exponent, antithetic) = (Exponent::favor(shape.d), map == Map::Hyp);
                let inner = ExpFeatures::new(&exponent, omega, antithetic, options)?;
                let acc = match data {
                    Some(g) if feature_eps > 0.0 => {
                        Positive::new(Lifted::new(inner, feature_eps, shape.scale, g.k), d_v)
                    }
                    _ => Positive::new(inner, d_v),
                };
                Prepared::new(acc).with_error(ErrorModel::Exponential { exponent, antithetic, directions })
            }
            Map::Relu => Prepared::new(Positive::new(RandomRelu::new(omega, RELU_EPS, options)?, d_v)),
            Map::Trig => {
                let acc = Signed::new(Trig::new(omega, options)?, d_v, denominator, den_floor);
                Prepared::new(acc).with_error(ErrorModel::Trig { directions })
            }
        })
    }
}

/// Features plus a constant, after the stabilisation of the reference implementation:
/// $e^{\omega \cdot x - \|x\|^2/2 - M} + \varepsilon$, where $M$ is the largest $\omega \cdot x$ of a query, or of all
/// keys.
#[derive(Debug)]
struct Lifted<T> {
    inner: ExpFeatures<T>,
    log_eps: f64,
    scale: f64,
    key_top: f64,
}

impl<T: Real> Lifted<T> {
    fn new(inner: ExpFeatures<T>, eps: f64, scale: f64, keys: MatRef<'_, T>) -> Self {
        let mut lifted = Self { inner, log_eps: eps.ln(), scale, key_top: f64::NEG_INFINITY };
        let mut a = vec![T::ZERO; lifted.inner.num_features()];
        for i in 0..keys.rows() {
            lifted.inner.log_features(keys.sub_rows(i..i + 1), Side::Key, &mut a);
            lifted.key_top = lifted.key_top.max(lifted.top(keys.row(i), &a));
        }
        lifted
    }

    /// Returns the largest log-feature of a row, without the norm term.
    fn top(&self, x: &[T], log_features: &[T]) -> f64 {
        kernels::max(log_features).to_f64() + 0.5 * self.scale * kernels::dot(x, x).to_f64()
    }
}

impl<T: Real> LogFeatures<T> for Lifted<T> {
    fn input_dim(&self) -> usize {
        self.inner.input_dim()
    }

    fn num_features(&self) -> usize {
        self.inner.num_features()
    }

    fn log_features(&self, x: MatRef<'_, T>, side: Side, out: &mut [T]) {
        self.inner.log_features(x, side, out);
        for (i, row) in out.chunks_exact_mut(self.inner.num_features()).enumerate() {
            let top = if side == Side::Key { self.key_top } else { self.top(x.row(i), row) };
            let floor = self.log_eps + top;
            for f in row {
                let a = f.to_f64();
                *f = T::from_f64(a.max(floor) + (-(a - floor).abs()).exp().ln_1p());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Options;
    use crate::engine::linear::testing::{
        PAIR, check_entry, check_generic, check_large, entry_moments, naive, naive_positive, naive_signed,
        run, scaled_case, table_errors,
    };
    use crate::group::GroupIndex;
    use crate::testkit::{Case, assert_rows_close, check_method, reference, run_method};
    use attlas_num::sketch::variance::{Pair, exp_relative_variance};

    fn options(pairs: &[(&str, &str)]) -> Options {
        pairs.iter().fold(Options::new(), |o, (k, v)| o.with(k, *v))
    }

    fn directions(o: &Options, p: &Problem) -> attlas_num::Mat<f64> {
        let source = Performer::new(Params::from_options(o).unwrap());
        source.draw(p.d, GroupIndex { batch: 0, kv_head: 0 }).unwrap()
    }

    fn exponential(o: &Options, p: &Problem) -> ExpFeatures<f64> {
        let even = Performer::new(Params::from_options(o).unwrap()).is_even();
        let map = MapOptions { scale: p.scale, ..MapOptions::default() };
        ExpFeatures::new(&Exponent::favor(p.d), &directions(o, p), even, map).unwrap()
    }

    #[test]
    fn honours_the_contract() {
        check_method(&METHOD);
    }

    #[test]
    fn positive_and_hyperbolic_rows_equal_the_definition() {
        for pairs in [&[("map", "pos"), ("features", "11")][..], &[("features", "12"), ("seed", "3")]] {
            let o = options(pairs);
            check_generic(&METHOD, &o, &[1.0, 30.0], |x| naive_positive(&exponential(&o, &x.problem), x));
            check_large(&METHOD, &o);
        }
    }

    #[test]
    fn relu_rows_equal_the_definition() {
        let o = options(&[("map", "relu"), ("features", "9"), ("directions", "hadamard")]);
        check_generic(&METHOD, &o, &[1.0, 1e3], |x| {
            let map = MapOptions { scale: x.problem.scale, ..MapOptions::default() };
            naive_positive(&RandomRelu::new(&directions(&o, &x.problem), RELU_EPS, map).unwrap(), x)
        });
        check_large(&METHOD, &o);
    }

    #[test]
    fn trigonometric_rows_equal_the_definition() {
        // Enough features and small inputs, so that denominators do not cancel; once with scales that differ much.
        let o = options(&[("map", "trig"), ("features", "400"), ("denominator", "strict")]);
        check_generic(&METHOD, &o, &[0.5], |x| {
            let map = MapOptions { scale: x.problem.scale, ..MapOptions::default() };
            naive_signed(&Trig::new(&directions(&o, &x.problem), map).unwrap(), x)
        });
    }

    #[test]
    fn cancelled_denominators_follow_the_policy() {
        let base = Problem { d_v: 3, ..Problem::new(2, 70, 8).with_kv_heads(1) };
        for p in [base, base.causal()] {
            let x = scaled_case(p, 5, 3.0);
            let with = |policy: &str| {
                run(&METHOD, &options(&[("map", "trig"), ("features", "16"), ("denominator", policy)]), &x)
            };
            let strict = with("strict");
            let count = strict.info.fallback_rows;
            assert!(count > 0 && count < 140, "{count} rows");
            let (exact, exact_lse) = reference(&x);
            let [clamp, recomputed, zero] = ["clamp", "exact_row", "zero_row"].map(with);
            let mut seen = 0;
            for row in 0..140 {
                let of = |o: &[f64]| o[row * 3..row * 3 + 3].to_vec();
                if of(&zero.o) == [0.0; 3] {
                    seen += 1;
                    assert_rows_close(&of(&recomputed.o), &of(&exact), 1e-12, "an exact row");
                    assert!((recomputed.lse[row] - exact_lse[row]).abs() < 1e-9);
                    assert_ne!(of(&clamp.o), of(&strict.o));
                } else {
                    assert_eq!(of(&recomputed.o), of(&strict.o));
                    assert_eq!(of(&clamp.o), of(&strict.o));
                }
            }
            assert_eq!(seen, count);
            for ran in [clamp, recomputed, zero] {
                assert_eq!(ran.info.fallback_rows, count);
            }
        }
    }

    #[test]
    fn entries_have_the_known_means_and_variances() {
        let (x, y) = PAIR;
        let sm = 0.15f64.exp();
        for (map, m, directions, variance) in [
            ("pos", "4", "iid", 0.4135768041f64),
            ("pos", "4", "orthogonal", 0.3693587357),
            ("pos", "4", "simplex", 0.1830182270),
            ("hyp", "8", "iid", 0.1138723836),
            ("hyp", "8", "orthogonal", 0.06965431518),
            ("trig", "8", "iid", 0.006771821703),
            ("trig", "8", "orthogonal", 0.003224167801),
        ] {
            let o = options(&[("map", map), ("features", m), ("directions", directions)]);
            if map == "pos" {
                // Long tails: at half the rows, where a sample determines the variance, against the formula's own
                // value.
                let (x, y) = (x.map(|v| v * 0.5), y.map(|v| v * 0.5));
                let pair = Pair::of(&x, &y);
                let coupling = Params::from_options(&o).unwrap().directions.coupling();
                let of =
                    |pair: &Pair| exp_relative_variance(pair, 4, 4, coupling, 0.0, false) * pair.sm().powi(2);
                assert!((of(&Pair::of(&PAIR.0, &PAIR.1)) / variance - 1.0).abs() < 1e-8);
                check_entry(&METHOD, &o, (&x, &y), (pair.sm(), of(&pair)));
            } else {
                check_entry(&METHOD, &o, (&x, &y), (sm, variance));
                // Turned by 45° in the first two coordinates, then spread: the law is the same.
                let turn = |v: [f64; 4]| {
                    let r = 0.5f64.sqrt();
                    [r * (v[0] + v[1]), v[2], v[3], r * (v[0] - v[1])]
                };
                check_entry(&METHOD, &o, (&turn(x), &turn(y)), (sm, variance));
            }
        }
    }

    #[test]
    fn opposite_rows_have_no_variance_and_equal_rows_none_with_trigonometric_features() {
        let p = Problem { d_v: 1, ..Problem::new(1, 1, 5) };
        let base = Case::gaussian(p, 8);
        let norm2 = p.scale * base.q.iter().map(|x| x * x).sum::<f64>();
        let opposite = Case { k: base.q.iter().map(|x| -x).collect(), ..base.clone() };
        for map in ["pos", "hyp"] {
            let (_, lse) = run_method(&METHOD, &options(&[("map", map)]), &opposite);
            assert!((lse[0] + norm2).abs() < 1e-13 * norm2.max(1.0));
        }
        let equal = Case { k: base.q.clone(), ..base.clone() };
        let (_, lse) = run_method(&METHOD, &options(&[("map", "trig")]), &equal);
        assert!((lse[0] - norm2).abs() < 1e-13 * norm2.max(1.0));
    }

    #[test]
    fn errors_are_those_of_the_table() {
        for (s, m, map, directions, expected) in [
            (0.35, "128", "pos", "orthogonal", 0.47),
            (0.35, "128", "hyp", "orthogonal", 0.26),
            (0.35, "128", "pos", "simplex", 0.33),
            (0.35, "512", "pos", "orthogonal", 0.25),
            (0.35, "512", "hyp", "orthogonal", 0.14),
            (0.35, "512", "pos", "simplex", 0.18),
            (0.5, "512", "pos", "orthogonal", 0.50),
            (0.5, "512", "hyp", "orthogonal", 0.43),
            (0.5, "512", "pos", "simplex", 0.47),
            (0.35, "2048", "pos", "orthogonal", 0.11),
            (0.35, "2048", "hyp", "orthogonal", 0.068),
            (0.35, "2048", "pos", "simplex", 0.083),
            (0.5, "2048", "pos", "orthogonal", 0.27),
            (0.5, "2048", "hyp", "orthogonal", 0.24),
            (0.5, "2048", "pos", "simplex", 0.26),
            (0.7, "2048", "pos", "orthogonal", 0.80),
            (0.7, "2048", "hyp", "orthogonal", 0.72),
            (0.7, "2048", "pos", "simplex", 0.73),
            (1.0, "2048", "pos", "orthogonal", 1.5),
            (1.0, "2048", "hyp", "orthogonal", 1.7),
            (1.0, "2048", "pos", "simplex", 1.5),
        ] {
            let o = options(&[("map", map), ("features", m), ("directions", directions)]);
            // Large inputs have heavy tails: means of four still differ by more than a tenth, of sixteen no more.
            let [error, mean] = table_errors(&METHOD, &o, s, if s < 0.7 { 4 } else { 16 });
            // Two printed digits, and the stated spread of a mean of four.
            let off = |found: f64, printed: f64| (found - printed).abs() > 0.1 * printed + 0.005;
            assert!(!off(error, expected), "{s} {m} {map} {directions}: {error}, expected {expected}");
            let of_mean =
                [(0.35, 0.47), (0.5, 0.72), (0.7, 0.89), (1.0, 0.97)].into_iter().find(|(t, _)| *t == s);
            assert!(of_mean.is_some_and(|(_, m)| !off(mean, m)), "mean of the values: {mean}");
        }
    }

    #[test]
    fn orthogonal_directions_beat_independent_ones_and_positive_features_trigonometric_ones() {
        // The approximation figure of the paper, at width 16: normalised rows, values that name their keys.
        let p = Problem { d_v: 64, ..Problem::new(1, 64, 16).with_lens(256, 64) };
        let mut x = Case::gaussian(p, 12);
        x.v = (0..64 * 64).map(|t| f64::from(u8::from(t / 64 == t % 64))).collect();
        let exact = reference(&x).0;
        let squares = |map: &str, directions: &str| -> f64 {
            let o = options(&[("map", map), ("directions", directions), ("features", "64")]);
            let one = |seed: u64| {
                let got = run(&METHOD, &o.clone().with("seed", seed).with("denominator", "strict"), &x).o;
                crate::metrics::relative_frobenius(&got, &exact).powi(2)
            };
            (0..40).map(one).sum::<f64>() / 40.0
        };
        for map in ["pos", "hyp"] {
            let (iid, orthogonal) = (squares(map, "iid"), squares(map, "orthogonal"));
            assert!(orthogonal < iid, "{map}: {orthogonal}, {iid}");
            assert!(10.0 * iid < squares("trig", "iid"), "{map}: {iid}");
        }
    }

    #[test]
    fn added_constants_reproduce_the_reference_features() {
        let p = Problem { d_v: 2, ..Problem::new(1, 40, 4) };
        let x = scaled_case(p, 9, 1.5);
        let o = options(&[("map", "pos"), ("features", "12"), ("feature_eps", "0.01")]);
        let omega = directions(&o, &p);
        let project = |x: &[f64], l: usize| -> f64 {
            p.scale.sqrt() * x.iter().zip(omega.row(l)).map(|(a, b)| a * b).sum::<f64>()
        };
        let half = |x: &[f64]| 0.5 * p.scale * x.iter().map(|v| v * v).sum::<f64>();
        let top = |x: &[f64]| (0..12).map(|l| project(x, l)).fold(f64::MIN, f64::max);
        let key_top = x.k.chunks(4).map(top).fold(f64::MIN, f64::max);
        let feature = |x: &[f64], l, top: f64| (project(x, l) - half(x) - top).exp() + 0.01;
        let (want, _) = naive(&x, |_, i, j| {
            let (q, k) = (&x.q[4 * i..4 * i + 4], &x.k[4 * j..4 * j + 4]);
            (1.0, (0..12).map(|l| feature(q, l, top(q)) * feature(k, l, key_top)).sum::<f64>().ln())
        });
        assert_rows_close(&run(&METHOD, &o, &x).o, &want, 1e-12, "added constants");
        assert!(METHOD.plan(&p.causal(), &o).is_err());
    }

    #[test]
    fn the_customary_constant_turns_wide_heads_into_uniform_attention() {
        let p = Problem::new(1, 512, 128);
        let mut x = Case::gaussian(p, 4);
        x.v = x.k.clone();
        let exact = reference(&x).0;
        let error = |o: &[f64]| crate::metrics::relative_frobenius(o, &exact);
        let mut mean = vec![0.0; 128];
        x.v.chunks(128).for_each(|v| mean.iter_mut().zip(v).for_each(|(m, v)| *m += v / 512.0));
        let o = options(&[("map", "pos"), ("features", "1024"), ("feature_eps", "0.0001")]);
        let lifted = run(&METHOD, &o, &x).o;
        assert!((error(&lifted) - error(&mean.repeat(512))).abs() < 0.01);
    }

    #[test]
    fn the_predicted_error_falls_with_features_and_is_reported() {
        let x = scaled_case(Problem::new(2, 300, 16), 3, 0.6);
        let figures = |m: &str| run(&METHOD, &options(&[("features", m)]), &x).info.figures;
        let (few, many) = (figures("32"), figures("512"));
        assert!((few["predicted_rel_sd"] / many["predicted_rel_sd"] - 4.0).abs() < 1e-9);
        assert_eq!((few["features"], many["features"]), (32.0, 512.0));
        // Directions come in whole numbers, two features each.
        assert!((few["features_needed"] - many["features_needed"]).abs() <= 2.0);
        let needed = few["features_needed"];
        let at_target = few["predicted_rel_sd"] * (32.0 / needed).sqrt();
        assert!((0.099..=0.1).contains(&at_target), "{needed} features give {at_target}");
    }

    #[test]
    fn the_needed_features_give_the_error_asked_for() {
        let x = scaled_case(Problem { scale: 1.0, ..Problem::new(1, 40, 6) }, 13, 0.35);
        for map in ["pos", "hyp"] {
            let base = options(&[("map", map), ("directions", "iid"), ("target_error", "0.2")]);
            let needed =
                run(&METHOD, &base.clone().with("features", 16usize), &x).info.figures["features_needed"];
            let o = base.with("features", needed as usize);
            // A typical pair: second moments averaged in the logarithm, here over every second pair of the diagonal.
            let directions = needed / if map == "hyp" { 2.0 } else { 1.0 };
            let log = |i: usize| {
                let (q, k) = (&x.q[6 * i..6 * i + 6], &x.k[6 * i..6 * i + 6]);
                let [_, variance, _] = entry_moments(&METHOD, &o, q, k, 1500);
                let sm: f64 = q.iter().zip(k).map(|(a, b)| a * b).sum::<f64>().exp();
                (1.0 + directions * variance / (sm * sm)).ln()
            };
            let mean = (0..40).step_by(2).map(log).sum::<f64>() / 20.0;
            let sd = (mean.exp_m1() / directions).sqrt();
            // Twenty of 1600 pairs, whose norms differ by some ten per cent.
            assert!((sd / 0.2 - 1.0).abs() < 0.25, "{map}: {needed} features give {sd}");
        }
    }

    #[test]
    fn a_stream_holds_the_same_memory_after_any_number_of_tokens() {
        let p = Problem { d_v: 8, ..Problem::new(1, 64, 8).causal() };
        let plan = METHOD.plan(&p, &options(&[("features", "32")])).unwrap();
        let stream = plan.stream(attlas_num::DType::F32).unwrap();
        assert_eq!(stream.state_bytes(), 32 * (8 + 3) * 4);
    }
}
