//! PolaFormer: linear attention over positive and negative parts, with separate streams for equal and opposite signs.
//!
//! **Idea.** ReLU features discard negative coordinates. Keep both parts of queries and keys; let one stream weight
//! keys of the same sign and another those of opposite sign, each for half of the value channels, and sharpen the
//! weights by a power per channel.
//!
//! **Math.** $x_\pm = \max(\pm x_c / s_c, 0)^{p_c}$ with $p_c = 1 + \alpha\,\mathrm{sigmoid}(w_c)$ and
//! $s_c = \mathrm{softplus}(t_c)$; $\varphi_k = [k_+; k_-]$, $\varphi_{\text{same}} = [q_+; q_-]$,
//! $\varphi_{\text{opp}} = [q_-; q_+]$. With $V = [V_s | V_o]$ by channels,
//! $o = [\mathrm{lin}(\varphi_{\text{same}}, \varphi_k, V_s) \mid \mathrm{lin}(\varphi_{\text{opp}}, \varphi_k, V_o)]$,
//! where each stream divides by $\varepsilon n + \sum_j \langle \varphi, \varphi_k \rangle$ over its $n$ keys. Both
//! streams are positive; nothing is subtracted.
//!
//! **Reference.** meng2025. Untrained, $w = t = 0$: powers $1 + \alpha/2$, divisors $\ln 2$. A calibration brings
//! trained ones as `w.0`, `t.0`, …, one $1 \times d$ matrix per key head. Gates, the convolution on values and the
//! positional term belong to the layer, not to the method. The causal form is ours.
//!
//! **Cost.** $8 n d\, d_v$; state $2d(d_v + 3)$.
//!
//! **Guarantees.** Equals the definition up to rounding. It does not approximate softmax. A stream without matching
//! signs gives zeros.
//!
//! **When to use.** Models trained with it.

use crate::engine::linear::{DenominatorEps, Linear, Positive, Prepared, Shape, Source};
use crate::group::{Group, GroupIndex, GroupPlan};
use crate::method::{Accepted, Calibration, Claims, Family, Method, Needs, Spec, Support};
use crate::{Error, MatRef, Problem, Real, Result, Spread};
use attlas_num::sketch::features::Pola;
use attlas_num::sketch::{LogFeatures, Side};
use std::sync::Arc;

/// Registry entry.
pub static METHOD: Method = Method {
    id: "polaformer",
    family: Family::Kernel,
    title: "PolaFormer: linear attention on powers of positive and negative parts",
    reference: "meng2025",
    claims: Claims {
        decode: true,
        softmax: false,
        row_stochastic: false,
        lse: false,
        exponent: 1.0,
        needs: Needs::Training,
        spread: Spread::SCAN,
        ..Claims::BASE
    },
    probes: &[&[("alpha", "0"), ("den_eps", "0")], &[("alpha", "7")]],
    ..Method::of::<Params>()
};

crate::params! {
    /// Parameters of [`Polarity`].
    pub struct Params {
        /// Powers lie between 1 and 1 + alpha; untrained ones are in the middle.
        alpha: f64 = 4.0, in 0.0..=64.0;
        /// Constant added to every denominator, times the number of keys that the row sees.
        den_eps: f64 = 1e-6, in 0.0..=1.0;
    }
}

impl Spec for Params {
    const METHOD: &'static Method = &METHOD;

    fn supports(&self, p: &Problem) -> Support {
        Support::unless(p.d_v % 2 == 1, "the values are split into two halves: d_v must be even")
    }

    fn build(self, x: Accepted<'_>) -> Result<impl GroupPlan> {
        Linear::new(x.problem, Polarity::new(x.problem, self, x.calibration)?)
    }
}

/// Source of feature maps.
#[derive(Clone, Debug)]
pub struct Polarity {
    params: Params,
    /// One map for each key head if trained, otherwise one for all.
    maps: Vec<Pola>,
}

impl Polarity {
    /// Creates the source, with trained powers and divisors if a calibration has them.
    pub fn new(p: &Problem, params: Params, calibration: Option<&Calibration>) -> Result<Self> {
        let maps = match calibration {
            None => vec![Pola::untrained(p.d, params.alpha)?],
            Some(c) => (0..p.n_kv_heads)
                .map(|h| {
                    let [w, t] = ["w", "t"].map(|name| c.matrix(&format!("{name}.{h}")));
                    let (w, t) = (w?, t?);
                    if w.data().len() != p.d || t.data().len() != p.d {
                        return Err(Error::shape("trained powers", p.d, w.data().len().max(t.data().len())));
                    }
                    Ok(Pola::from_weights(params.alpha, w.data(), t.data())?)
                })
                .collect::<Result<_>>()?,
        };
        Ok(Self { params, maps })
    }
}

impl Polarity {
    /// One map for each key head if trained, otherwise one for all.
    pub fn maps(&self) -> &[Pola] {
        &self.maps
    }
}

impl Source for Polarity {
    type Draws = ();

    fn draw(&self, _: usize, _: GroupIndex) -> Result<()> {
        Ok(())
    }

    fn num_features(&self, d: usize) -> usize {
        2 * d
    }

    fn feature_flops(&self, d: usize) -> u64 {
        // Logarithm, power and division of each channel.
        4 * d as u64
    }

    fn prepare<T: Real>(&self, shape: &Shape, _: &(), _: Option<&Group<'_, T>>) -> Result<Prepared<T>> {
        let same = &self.maps[shape.index.kv_head % self.maps.len()];
        let (half, d_v) = (shape.d_v / 2, shape.d_v);
        let keys: Arc<dyn LogFeatures<T>> = Arc::new(same.clone());
        let opposite: Arc<dyn LogFeatures<T>> = Arc::new(Opposite(same.clone()));
        let queries = vec![(keys.clone(), 0..half), (opposite, half..d_v)];
        let eps = DenominatorEps { value: self.params.den_eps, per_key: true };
        Ok(Prepared::new(Positive::with_queries(keys, queries, d_v).with_eps(eps)))
    }

    fn has_lse(&self) -> bool {
        false
    }
}

/// Map of the stream that pairs queries with keys of opposite sign.
#[derive(Debug)]
struct Opposite(Pola);

impl<T: Real> LogFeatures<T> for Opposite {
    fn input_dim(&self) -> usize {
        LogFeatures::<T>::input_dim(&self.0)
    }

    fn num_features(&self) -> usize {
        LogFeatures::<T>::num_features(&self.0)
    }

    fn log_features(&self, x: MatRef<'_, T>, side: Side, out: &mut [T]) {
        self.0.log_features(x, side, out);
        if side == Side::Query {
            self.0.swap_streams_in_place(out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::linear::testing::run;
    use crate::testkit::{Case, assert_rows_close, check_method};
    use crate::{Mask, Options};
    use attlas_num::Mat;

    #[test]
    fn honours_the_contract() {
        check_method(&METHOD);
    }

    /// Both streams of row `i` by the definition.
    fn definition(x: &Case, power: f64, eps: f64) -> Vec<f64> {
        let p = &x.problem;
        let part = |x: f64, sign: f64| (sign * x / 2f64.ln()).max(0.0).powf(power);
        let kernel = |q: &[f64], k: &[f64], flip: f64| -> f64 {
            q.iter()
                .zip(k)
                .map(|(q, k)| part(flip * q, 1.0) * part(*k, 1.0) + part(flip * q, -1.0) * part(*k, -1.0))
                .sum()
        };
        let mut o = vec![0.0; p.n_heads * p.n_q * p.d_v];
        for (row, o) in o.chunks_mut(p.d_v).enumerate() {
            let i = row % p.n_q;
            let seen = if p.mask == Mask::Causal { (i + 1 + p.n_k).saturating_sub(p.n_q) } else { p.n_k };
            for (stream, flip) in [1.0, -1.0].into_iter().enumerate() {
                let q = &x.q[row * p.d..(row + 1) * p.d];
                let w: Vec<f64> = (0..seen).map(|j| kernel(q, &x.k[j * p.d..(j + 1) * p.d], flip)).collect();
                let den = eps * seen as f64 + w.iter().sum::<f64>();
                for c in stream * p.d_v / 2..(stream + 1) * p.d_v / 2 {
                    let num: f64 = w.iter().enumerate().map(|(j, w)| w * x.v[j * p.d_v + c]).sum();
                    o[c] = if den > 0.0 { num / den } else { 0.0 };
                }
            }
        }
        o
    }

    #[test]
    fn rows_equal_the_definition() {
        for (n_q, n_k) in [(1, 1), (65, 65), (30, 203), (203, 203)] {
            let base = Problem { d_v: 6, ..Problem::new(2, 1, 4).with_kv_heads(1).with_lens(n_q, n_k) };
            for p in [base, base.causal()] {
                let x = Case::gaussian(p, 3);
                for (alpha, eps) in [(4.0, 1e-6), (0.0, 0.0), (2.0, 0.1)] {
                    let o = Options::new().with("alpha", alpha).with("den_eps", eps);
                    let want = definition(&x, 1.0 + alpha / 2.0, eps);
                    assert_rows_close(&run(&METHOD, &o, &x).o, &want, 1e-12, &format!("{o} {n_q} × {n_k}"));
                }
            }
        }
    }

    #[test]
    fn negative_queries_swap_the_streams() {
        let x = Case::gaussian(Problem { d_v: 4, ..Problem::new(1, 20, 4) }, 4);
        let swap = |v: &[f64]| -> Vec<f64> { v.chunks(4).flat_map(|r| [r[2], r[3], r[0], r[1]]).collect() };
        let mirrored = Case { q: x.q.iter().map(|q| -q).collect(), v: swap(&x.v), ..x.clone() };
        let (a, b) = (run(&METHOD, &Options::new(), &x), run(&METHOD, &Options::new(), &mirrored));
        assert_rows_close(&swap(&b.o), &a.o, 1e-13, "mirrored");
    }

    #[test]
    fn streams_whose_signs_never_meet_give_zeros() {
        let mut x = Case::gaussian(Problem { d_v: 4, ..Problem::new(1, 20, 4) }, 5);
        x.q.iter_mut().chain(&mut x.k).for_each(|v| *v = v.abs());
        let ran = run(&METHOD, &Options::new(), &x);
        assert!(ran.o.chunks(4).all(|row| row[0] != 0.0 && row[2] == 0.0 && row[3] == 0.0));
        assert_eq!(ran.info.fallback_rows, 20);
    }

    #[test]
    fn larger_powers_sharpen_the_weights() {
        // Values are unit vectors: the sum of squared weights grows as weights concentrate.
        let p = Problem { d_v: 16, ..Problem::new(1, 8, 16) };
        let mut x = Case::gaussian(p, 6);
        x.v = (0..8 * 16).map(|t| f64::from(u8::from(t % 16 % 8 == t / 16))).collect();
        let focus = |alpha: f64| {
            let o = Options::new().with("alpha", alpha).with("den_eps", 0.0);
            run(&METHOD, &o, &x).o.iter().map(|w| w * w).sum::<f64>()
        };
        assert!(focus(0.0) < focus(4.0) && focus(4.0) < focus(12.0));
    }

    #[test]
    fn trained_powers_come_with_a_calibration() {
        let p = Problem { d_v: 4, ..Problem::new(1, 12, 4) };
        let x = Case::gaussian(p, 7);
        let mut c = Calibration::new("polaformer", &p);
        // w = −∞ in effect: power 1 whatever alpha is.
        c.insert("w.0".into(), &Mat::from_vec(vec![-800.0; 4], 1, 4));
        c.insert("t.0".into(), &Mat::from_vec(vec![0.0; 4], 1, 4));
        let plan = METHOD.plan_with(&p, &Options::new(), Some(&c)).unwrap();
        let how = crate::testkit::How { lse: false, ..Default::default() };
        let trained = crate::testkit::run_with(&*plan, &x, how).unwrap().o;
        assert_rows_close(&trained, &definition(&x, 1.0, 1e-6), 1e-12, "power one");
        c.matrices.remove("t.0");
        assert!(METHOD.plan_with(&p, &Options::new(), Some(&c)).is_err());
    }
}
