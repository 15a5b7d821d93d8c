//! Linear attention: a positive function of each coordinate as the feature map.
//!
//! **Idea.** Choose the kernel so that it is an inner product of features of the same width as the keys; attention is
//! then a running sum, and decoding takes constant time and memory per token.
//!
//! **Math.** $o_i = \sum_j \langle \varphi(q_i), \varphi(k_j) \rangle v_j / (\varepsilon + \sum_j \langle \varphi(q_i),
//! \varphi(k_j) \rangle)$ with $\varphi$ acting on each coordinate of $\sqrt c\, x$, $c$ = `qk_scale`:
//! * `elu1`: $\mathrm{elu}(x) + 1$; its logarithm is $x$ for $x \le 0$ and $\ln(1 + x)$ above, exact where the value
//!   would underflow;
//! * `relu`: $\max(x, 0)$ plus `relu_eps`; `square`: $x^2$;
//! * `softmax`: softmax over the coordinates of a query, $e^x$ for keys;
//! * `identity`: $x$, signed.
//!
//! **Reference.** katharopoulos2020. The problem's scale is not applied, as in the reference: `qk_scale` takes its
//! place. Nothing is added to denominators unless `den_eps` is set; public code adds 1e-6 or 1e-10 to sums of
//! unscaled features, where it can dominate.
//!
//! **Cost.** $4 n d\, d_v$, causal half as much again; state $d(d_v + 3)$.
//!
//! **Guarantees.** Deterministic; equals the kernel attention above up to rounding. It does not approximate softmax.
//!
//! **When to use.** Models trained with it. On other models it is the baseline of the family.

use crate::engine::linear::{
    DenominatorEps, DenominatorPolicy, Linear, Positive, Prepared, Shape, Signed, Source,
};
use crate::group::{Group, GroupIndex, GroupPlan};
use crate::method::{Accepted, Claims, Family, Method, Needs, Promise, Spec, Support, Withdrawn};
use crate::{Problem, Real, Result, Spread};
use attlas_num::sketch::MapOptions;
use attlas_num::sketch::features::{Elementwise, ElementwiseFeatures, Identity};

/// Registry entry.
pub static METHOD: Method = Method {
    id: "linear",
    family: Family::Kernel,
    title: "Linear attention: elu + 1 and other maps of single coordinates",
    reference: "katharopoulos2020",
    claims: Claims {
        decode: true,
        gradient: true,
        softmax: false,
        exponent: 1.0,
        needs: Needs::Training,
        withdrawn: &[
            Withdrawn {
                param: "map",
                value: "identity",
                promise: Promise::Gradient,
                reason: "a denominator that nearly cancels is recomputed, and the recomputation has no gradient",
            },
            Withdrawn {
                param: "map",
                value: "identity",
                promise: Promise::RowStochastic,
                reason: "inner products have either sign",
            },
            Withdrawn {
                param: "map",
                value: "relu",
                promise: Promise::RowStochastic,
                reason: "a query that shares no positive coordinate with any key gives zero",
            },
            Withdrawn {
                param: "den_eps",
                value: "*",
                promise: Promise::RowStochastic,
                reason: "weights sum to less than one when something is added to the denominator",
            },
        ],
        spread: Spread::SCAN,
        ..Claims::BASE
    },
    probes: &[
        &[("map", "relu")],
        &[("map", "relu"), ("relu_eps", "0.1")],
        &[("map", "softmax"), ("qk_scale", "0.5")],
        &[("map", "square")],
        &[("map", "identity")],
        &[("den_eps", "0.5")],
    ],
    ..Method::of::<Params>()
};

crate::choices! {
    /// Functions of a coordinate.
    pub enum Map {
        /// elu(x) + 1.
        Elu1 = "elu1",
        /// max(x, 0), plus an optional constant.
        Relu = "relu",
        /// Softmax over the coordinates of queries, exponentials of keys.
        Softmax = "softmax",
        /// x².
        Square = "square",
        /// x itself.
        Identity = "identity",
    }
}

crate::params! {
    /// Parameters of linear attention.
    pub struct Params {
        /// The function of each coordinate.
        map: Map = Map::Elu1;
        /// Factor on the product of a query's and a key's coordinates; its root is applied to both before the map.
        qk_scale: f64 = 1.0, in 1e-6..=1e6;
        /// Added to every feature of the relu map.
        relu_eps: f64 = 0.0, in 0.0..=1.0;
        /// Added to every denominator of positive maps.
        den_eps: f64 = 0.0, in 0.0..=1.0;
        /// Treatment of rows where the denominator of the identity map nearly cancels.
        denominator: DenominatorPolicy = DenominatorPolicy::Clamp;
        /// A denominator counts as cancelled below this share of the sum of its absolute terms.
        den_floor: f64 = 1e-3, in 0.0..=1.0;
    }
}

impl Spec for Params {
    const METHOD: &'static Method = &METHOD;

    fn supports(&self, p: &Problem) -> Support {
        Support::unless(
            self.denominator == DenominatorPolicy::ExactRow,
            "the features are the kernel itself, so there is no exact row to fall back to: use clamp, zero_row or strict",
        )
        .and_unless(
            !p.near.is_none(),
            "linear takes no near field: its kernel is not that of softmax, so its sums would join the exact near keys only \
             after a scale fitted to each head",
        )
    }

    fn build(self, x: Accepted<'_>) -> Result<impl GroupPlan> {
        Linear::new(x.problem, Coordinates { params: self })
    }
}

/// Source of feature maps.
#[derive(Clone, Debug)]
pub struct Coordinates {
    params: Params,
}

impl Source for Coordinates {
    type Draws = ();

    fn draw(&self, _: usize, _: GroupIndex) -> Result<()> {
        Ok(())
    }

    fn num_features(&self, d: usize) -> usize {
        d
    }

    fn feature_flops(&self, d: usize) -> u64 {
        2 * d as u64
    }

    fn has_gradient(&self) -> bool {
        self.params.map != Map::Identity
    }

    fn prepare<T: Real>(&self, shape: &Shape, _: &(), _: Option<&Group<'_, T>>) -> Result<Prepared<T>> {
        let Params { map, qk_scale, relu_eps, den_eps, denominator, den_floor } = self.params;
        let options = MapOptions { scale: qk_scale, ..MapOptions::default() };
        let function = match map {
            Map::Elu1 => Elementwise::Elu1,
            Map::Relu => Elementwise::Relu { eps: relu_eps },
            Map::Softmax => Elementwise::Softmax,
            Map::Square => Elementwise::Square,
            Map::Identity => {
                let map = Identity::new(shape.d, options)?;
                return Ok(Prepared::new(Signed::new(map, shape.d_v, denominator, den_floor)));
            }
        };
        let map = ElementwiseFeatures::new(function, shape.d, options)?;
        let eps = DenominatorEps { value: den_eps, per_key: false };
        Ok(Prepared::new(Positive::new(map, shape.d_v).with_eps(eps)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Options;
    use crate::engine::linear::testing::{check_generic, check_large, naive, run};
    use crate::testkit::{Case, assert_rows_close, check_method, run_method};

    fn dot(f: impl Fn(f64) -> f64, x: &[f64], y: &[f64]) -> f64 {
        x.iter().zip(y).map(|(x, y)| f(*x) * f(*y)).sum()
    }

    fn elu1(x: f64) -> f64 {
        if x > 0.0 { 1.0 + x } else { x.exp() }
    }

    #[test]
    fn honours_the_contract() {
        check_method(&METHOD);
    }

    #[test]
    fn rows_equal_kernel_attention() {
        type Kernel = fn(&[f64], &[f64]) -> f64;
        let cases: [(&str, &[f64], Kernel); 4] = [
            ("elu1", &[1.0, 20.0], |q, k| dot(elu1, q, k)),
            ("square", &[1.0, 50.0], |q, k| dot(|x| x * x, q, k)),
            ("relu", &[1.0], |q, k| dot(|x| x.max(0.0), q, k)),
            ("softmax", &[1.0, 10.0], |q, k| {
                let total: f64 = q.iter().map(|x| x.exp()).sum();
                q.iter().zip(k).map(|(q, k)| (q + k).exp() / total).sum()
            }),
        ];
        for (map, sizes, kernel) in cases {
            let o = Options::new().with("map", map);
            check_generic(&METHOD, &o, sizes, |x| {
                let d = x.problem.d;
                naive(x, |h, i, j| {
                    let row = h * x.problem.n_q + i;
                    (1.0, kernel(&x.q[row * d..(row + 1) * d], &x.k[j * d..(j + 1) * d]).ln())
                })
            });
        }
        check_large(&METHOD, &Options::new());
    }

    #[test]
    fn the_identity_is_attention_by_inner_products() {
        // Queries and keys around a common vector, so that sums do not cancel.
        let p = Problem { d_v: 3, ..Problem::new(1, 90, 5) };
        for p in [p, p.causal()] {
            let mut x = Case::gaussian(p, 3);
            x.q.iter_mut().chain(&mut x.k).for_each(|v| *v += 3.0);
            let want = naive(&x, |_, i, j| {
                let inner = dot(|v| v, &x.q[5 * i..5 * i + 5], &x.k[5 * j..5 * j + 5]);
                (inner.signum(), inner.abs().ln())
            });
            let ran = run(&METHOD, &Options::new().with("map", "identity"), &x);
            assert_rows_close(&ran.o, &want.0, 1e-12, "inner products");
            assert_eq!(ran.info.fallback_rows, 0);
        }
    }

    #[test]
    fn the_known_answer() {
        let p = Problem { d_v: 1, ..Problem::new(1, 2, 2).causal() };
        let q = vec![0.0, 0.0, 1.0, -(2f64.ln())];
        let x = Case { problem: p, q, k: vec![0.0, 0.0, 1.0, 0.0], v: vec![2.0, 5.0], single: false };
        let (o, _) = run_method(&METHOD, &Options::new(), &x);
        assert_rows_close(&o, &[2.0, 27.5 / 7.0], 1e-15, "two tokens");
    }

    #[test]
    fn inner_products_that_cancel_are_counted_and_treated() {
        // Keys come in pairs of opposite signs: every denominator without a mask is zero.
        let p = Problem { d_v: 2, ..Problem::new(1, 20, 4) };
        let mut x = Case::gaussian(p, 4);
        for j in (0..20).step_by(2) {
            let row: Vec<f64> = x.k[4 * j..4 * j + 4].iter().map(|k| -k).collect();
            x.k[4 * j + 4..4 * j + 8].copy_from_slice(&row);
        }
        for policy in ["strict", "clamp", "zero_row"] {
            let o = Options::new().with("map", "identity").with("denominator", policy);
            let ran = run(&METHOD, &o, &x);
            assert_eq!(ran.info.fallback_rows, 20, "{policy}");
            assert!(ran.o.iter().all(|v| v.is_finite()), "{policy}");
            assert!(policy != "zero_row" || ran.o.iter().all(|&v| v == 0.0));
        }
        // Exact rows would use softmax, a different kernel.
        assert!(METHOD.plan(&p, &Options::new().with("denominator", "exact_row")).is_err());
    }

    #[test]
    fn queries_far_below_zero_have_the_limit_of_their_direction() {
        // φ(q) ∝ e^q there: moving all coordinates by −1000 changes nothing, in both precisions.
        let p = Problem { d_v: 2, ..Problem::new(1, 9, 3) };
        let mut near = Case::gaussian(p, 1);
        near.q.iter_mut().for_each(|q| *q -= 8.0);
        for single in [false, true] {
            let mut near = near.clone();
            // Multiples of 1/64 survive the shift in single precision.
            near.q.iter_mut().for_each(|q| *q = (*q * 64.0).round() / 64.0);
            near.single = single;
            let mut far = near.clone();
            far.q.iter_mut().for_each(|q| *q -= 1000.0);
            let (a, b) = (run(&METHOD, &Options::new(), &near), run(&METHOD, &Options::new(), &far));
            assert_rows_close(&b.o, &a.o, if single { 1e-4 } else { 1e-12 }, "shifted queries");
        }
    }

    #[test]
    fn a_constant_in_the_denominator_is_added_to_unscaled_sums() {
        let p = Problem { d_v: 1, ..Problem::new(1, 12, 3) };
        let x = Case::gaussian(p, 2);
        let o = Options::new().with("den_eps", 0.25);
        let want: Vec<f64> = (0..12)
            .map(|i| {
                let w: Vec<f64> =
                    (0..12).map(|j| dot(elu1, &x.q[3 * i..3 * i + 3], &x.k[3 * j..3 * j + 3])).collect();
                let num: f64 = w.iter().zip(&x.v).map(|(w, v)| w * v).sum();
                num / (0.25 + w.iter().sum::<f64>())
            })
            .collect();
        assert_rows_close(&run(&METHOD, &o, &x).o, &want, 1e-13, "with a constant");
        // Far below zero the constant is all there is, and the rows vanish.
        let mut far = x.clone();
        far.q.iter_mut().for_each(|q| *q -= 1000.0);
        assert!(run(&METHOD, &o, &far).o.iter().all(|o| o.abs() < 1e-300));
    }
}
