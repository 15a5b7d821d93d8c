//! Chefs' random tables: positive random features whose exponent is fitted to the data (FAVOR++ and FAVOR#).
//!
//! **Idea.** Add a quadratic form of the random direction to the exponent of positive features. One scalar (FAVOR++) or
//! matrices (FAVOR#), optimal in closed form from first and second moments of queries and keys, lower the variance by
//! orders of magnitude and bound the features.
//!
//! **Math.** With $x = \sqrt\tau q$, $y = \sqrt\tau k$, $\omega \sim N(0, I)$:
//! $f(\omega, x) = D \exp(\omega^\top A \omega + \omega^\top B x + x^\top C x)$, unbiased for $e^{\langle x, y\rangle}$
//! when $B_1^\top (I - 4A)^{-1} B_2 = I$, $C_k = -\frac12 B_k^\top (I - 4A)^{-1} B_k$, $D = \det(I - 4A)^{1/4}$.
//! * `oprf`: scalar $A = (1 - u)/8$, $u = [(d + 2z) + \sqrt{(d + 2z)^2 + 8dz}]/(2d)$, where $z$ is the mean of
//!   $\|x + y\|^2$ over all pairs; $B = \sqrt{1 - 4A}$, $C = -\frac12$.
//! * `sderf`: $A$ diagonal in the eigenbasis of the second moment of $x + y$.
//! * `aderf`: scalar $A$, different $B$ for queries and keys, from the second moments of both.
//! * `saderf`: `oprf` after a diagonal rescaling of queries against keys.
//!
//! `antithetic` features use each direction with both signs: with `oprf` this is the best map of the family at equal
//! cost for heads of moderate norm.
//!
//! **Reference.** likhosherstov2022 (`oprf`), likhosherstov2023 (the others), reid2023 (simplex). The $\pm\omega$ form
//! for $A \ne 0$, and its use with orthogonal or simplex directions, are constructions of this project.
//!
//! **Source of the statistics.** Without a mask they come from the group's own queries and keys, unless `a` or a
//! calibration fixes them. A causal row may not see later tokens, and a stream's sums become invalid if $A$ changes.
//! Causal plans and streams therefore use `a` or a calibration; without either, `oprf` uses the value for queries and
//! keys of unit variance, $z = 2 \tau d$, which depends on no data, and `sderf`, `aderf` and `saderf` are refused.
//! Every choice is unbiased.
//!
//! **Cost.** $2(n_q + n_k)\,m\,(d + d_v)$, causal half as much again, and the moments: $(n_q + n_k)\,d$ for `oprf` and
//! `saderf`, $(n_q + n_k)\,d^2 + O(d^3)$ for the others. State $m(d_v + 3)$.
//!
//! **Guarantees.** Un-normalised rows are unbiased for every setting: tested. The variance is that of the formulas in
//! `attlas_num::sketch::variance`: tested. `RunInfo` carries the predicted relative standard deviation and the
//! `features_needed` for 10 %.
//!
//! **When to use.** Among random features, wherever the exponent can be fitted: without a mask or with a calibration,
//! up to $\tau \|q\| \|k\| \approx 4$; `sderf` where the spectrum of the keys is far from flat. With a causal mask and
//! no calibration it was no better than `performer` on a trained model. Above that norm, no random feature map helps
//! without training.

use crate::engine::linear::{Directions, ErrorModel, Linear, Positive, Prepared, Shape, Source};
use crate::group::{Group, GroupIndex, GroupPlan};
use crate::method::{
    Accepted, Calibration, Claims, Family, Law, Learn, Method, Promise, Spec, Support, Tunable, Withdrawn,
};
use crate::{Error, Inputs, Mask, MatRef, Problem, Qkv, Real, Result, Spread};
use attlas_num::Mat;
use attlas_num::par::*;
use attlas_num::sketch::features::{
    ExpFeatures, Exponent, Moments, SideMoments, default_num_features, optimal_a,
};
use attlas_num::sketch::{MapOptions, draw_directions};

/// Registry entry.
pub static METHOD: Method = Method {
    id: "crt",
    family: Family::Kernel,
    title: "Chefs' random tables: exponential features fitted to the data (FAVOR++, FAVOR#)",
    reference: "likhosherstov2022, likhosherstov2023",
    claims: Claims {
        decode: true,
        unbiased: true,
        deterministic: false,
        exponent: 1.0,
        withdrawn: &[
            Withdrawn {
                param: "a",
                value: "auto",
                promise: Promise::Law(Law::HeadsAlone),
                reason: "without a mask the features of keys are fitted to the queries of all heads",
            },
            Withdrawn {
                param: "a",
                value: "auto",
                promise: Promise::Law(Law::QueriesAlone),
                reason: "without a mask the features are fitted to all queries",
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
        ],
        spread: Spread::SCAN,
        ..Claims::BASE
    },
    probes: &[
        &[("features", "128")],
        &[("features", "65"), ("antithetic", "false"), ("a", "-0.1"), ("directions", "simplex")],
        &[("variant", "sderf"), ("features", "64")],
        &[("variant", "aderf"), ("features", "64"), ("directions", "iid")],
        &[("variant", "saderf"), ("features", "64"), ("antithetic", "false")],
        &[("directions", "hadamard")],
        &[("directions", "orthogonal_regularised")],
    ],
    tunable: &[Tunable::budget("features")],
    ..Method::of::<Params>()
};

crate::choices! {
    /// Fitted parameters of the exponent.
    pub enum Variant {
        /// One scalar (FAVOR++).
        Oprf = "oprf",
        /// A symmetric matrix (FAVOR#).
        Sderf = "sderf",
        /// One scalar and a matrix for each side (FAVOR#).
        Aderf = "aderf",
        /// One scalar and a diagonal rescaling (FAVOR#).
        Saderf = "saderf",
    }
}

crate::params! {
    /// Parameters of [`Crt`].
    pub struct Params {
        /// Fitted parameters of the exponent.
        variant: Variant = Variant::Oprf;
        /// Use each direction and its opposite.
        antithetic: bool = true;
        /// Features per token; auto is d ln d, rounded up to a multiple of 8. Antithetic features are rounded up to an
        /// even number.
        features: Option<usize> = None, in 1..=1 << 20;
        /// Coupling of the random directions.
        directions: Directions = Directions::Orthogonal;
        /// The scalar of oprf, below 1/8; auto fits it to a calibration if there is one, otherwise to the data without
        /// a mask and to queries and keys of unit variance with one.
        a: Option<f64> = None, in -1e6..=0.1249;
        /// Added to second moments, relative to their average eigenvalue.
        ridge: f64 = 1e-6, in 1e-15..=1.0;
        /// Relative standard deviation of a kernel entry that the figure `features_needed` aims at.
        target_error: f64 = 0.1, in 1e-6..=10.0;
        /// Seed of the random directions.
        seed: u64 = 0, in 0..=u64::MAX;
    }
}

impl Spec for Params {
    const METHOD: &'static Method = &METHOD;
    const CALIBRATE: Option<Learn<Self>> = Some(calibrate);

    fn supports(&self, p: &Problem) -> Support {
        self.directions.supports(p)
    }

    fn build(self, x: Accepted<'_>) -> Result<impl GroupPlan> {
        Linear::new(x.problem, Crt::new(x.problem, self, x.calibration)?)
    }
}

/// Source of feature maps.
#[derive(Clone, Debug)]
pub struct Crt {
    params: Params,
    causal: bool,
    /// Exponents fitted to a calibration, one for each key head.
    frozen: Vec<Exponent>,
}

impl Crt {
    /// Fits the exponents to a calibration, if there is one and `a` is not set.
    pub fn new(p: &Problem, params: Params, calibration: Option<&Calibration>) -> Result<Self> {
        if params.a.is_some() && params.variant != Variant::Oprf {
            return Err(Error::param("a", params.a.unwrap_or(0.0), "auto, except for variant = oprf"));
        }
        let causal = p.mask == Mask::Causal;
        let fits = params.a.is_none();
        if causal && calibration.is_none() && params.variant != Variant::Oprf {
            let reason = "with a causal mask the moments of this text would let rows see later tokens: it needs a \
                          calibration on other text, or variant = oprf";
            return Err(Error::Unsupported { method: METHOD.id.into(), reasons: vec![reason.into()] });
        }
        let frozen = match calibration {
            Some(c) if fits => {
                let side = |name: &str, h: usize| {
                    let mean = c.matrix(&format!("mean_{name}.{h}"))?;
                    let outer = c.matrix(&format!("outer_{name}.{h}"))?;
                    if mean.data().len() != p.d || outer.rows() != p.d || outer.cols() != p.d {
                        return Err(Error::shape("calibrated moments", p.d, outer.rows()));
                    }
                    Ok(SideMoments::from_means(mean.into_vec(), outer))
                };
                (0..p.n_kv_heads)
                    .map(|h| fit(&params, &Moments::new(&side("q", h)?, &side("k", h)?, p.scale)?))
                    .collect::<Result<_>>()?
            }
            _ => Vec::new(),
        };
        Ok(Self { params, causal, frozen })
    }

    fn num_directions(&self, d: usize) -> usize {
        let features = self.params.features.unwrap_or_else(|| default_num_features(d));
        if self.params.antithetic { features.div_ceil(2) } else { features }
    }

    /// Returns the exponent of one group; an error if it must be fitted to the data of a run and these are absent.
    pub fn exponent<T: Real>(&self, shape: &Shape, data: Option<&Group<'_, T>>) -> Result<Exponent> {
        if let Some(frozen) = self.frozen.get(shape.index.kv_head) {
            return Ok(frozen.clone());
        }
        if let Some(a) = self.params.a {
            return Ok(Exponent::oprf(shape.d, a)?);
        }
        if self.causal {
            return Ok(Exponent::oprf(shape.d, optimal_a(2.0 * shape.scale * shape.d as f64, shape.d))?);
        }
        let Some(g) = data else {
            let reason = "a stream needs a causal plan, or a fixed a".to_string();
            return Err(Error::Unsupported { method: METHOD.id.into(), reasons: vec![reason] });
        };
        let dense = matches!(self.params.variant, Variant::Sderf | Variant::Aderf);
        let mut queries = collect(g.q.head(0), dense);
        (1..g.q.heads()).for_each(|h| queries.merge(&collect(g.q.head(h), dense)));
        fit(&self.params, &Moments::new(&queries, &collect(g.k, dense), shape.scale)?)
    }
}

/// Rows whose moments a task sums.
const PIECE: usize = 4096;

/// Computes the moments of some rows: pieces in parallel, added in order.
fn collect<T: Real>(rows: MatRef<'_, T>, dense: bool) -> SideMoments {
    let new = || if dense { SideMoments::dense(rows.cols()) } else { SideMoments::diagonal(rows.cols()) };
    let pieces: Vec<SideMoments> = (0..rows.rows().div_ceil(PIECE))
        .into_par_iter()
        .map(|p| {
            let mut sums = new();
            sums.add(rows.sub_rows(p * PIECE..((p + 1) * PIECE).min(rows.rows())));
            sums
        })
        .collect();
    pieces.iter().fold(new(), |mut sums, piece| {
        sums.merge(piece);
        sums
    })
}

/// Fits the exponent to data with these moments.
fn fit(params: &Params, moments: &Moments) -> Result<Exponent> {
    Ok(match params.variant {
        Variant::Oprf => Exponent::oprf_auto(moments)?,
        Variant::Sderf => Exponent::sderf(moments, params.ridge)?,
        Variant::Aderf => Exponent::aderf(moments, params.ridge)?,
        Variant::Saderf => Exponent::saderf(moments)?,
    })
}

/// Collects moments of queries (pooled over a group) and keys, for each key head.
fn calibrate(_: &Params, p: &Problem, samples: &[Inputs<'_>]) -> Result<Calibration> {
    let mut calibration = Calibration::new(METHOD.id, p);
    for h in 0..p.n_kv_heads {
        let mut sides = [SideMoments::dense(p.d), SideMoments::dense(p.d)];
        for sample in samples {
            match sample {
                Inputs::F32(x) => add_sample(&mut sides, x, p, h)?,
                Inputs::F64(x) => add_sample(&mut sides, x, p, h)?,
            }
        }
        // Rejects moments that are not finite.
        Moments::new(&sides[0], &sides[1], p.scale)?;
        for (name, side) in ["q", "k"].into_iter().zip(&sides) {
            let (mean, outer) = side.means();
            calibration.insert(format!("mean_{name}.{h}"), &Mat::from_vec(mean, 1, p.d));
            if let Some(outer) = outer {
                calibration.insert(format!("outer_{name}.{h}"), &outer);
            }
        }
    }
    Ok(calibration)
}

fn add_sample<T: Real>(sides: &mut [SideMoments; 2], x: &Qkv<'_, T>, p: &Problem, h: usize) -> Result<()> {
    let [batch, heads, _, d] = x.q.dims();
    let [_, kv_heads, _, d_k] = x.k.dims();
    if (heads, kv_heads, d, d_k) != (p.n_heads, p.n_kv_heads, p.d, p.d) {
        let found = format!("{heads} and {kv_heads} heads of width {d} and {d_k}");
        return Err(Error::shape(
            "sample",
            format!("{} and {} heads of width {}", p.n_heads, p.n_kv_heads, p.d),
            found,
        ));
    }
    for b in 0..batch {
        for head in h * p.group_size()..(h + 1) * p.group_size() {
            sides[0].add(x.q.head(b, head));
        }
        sides[1].add(x.k.head(b, h));
    }
    Ok(())
}

impl Source for Crt {
    type Draws = Mat<f64>;

    fn draw(&self, d: usize, index: GroupIndex) -> Result<Mat<f64>> {
        let key = index.stream_key(self.params.seed).named("directions");
        Ok(draw_directions(self.params.directions.coupling(), self.num_directions(d), d, key)?)
    }

    fn num_features(&self, d: usize) -> usize {
        self.num_directions(d) * if self.params.antithetic { 2 } else { 1 }
    }

    fn feature_flops(&self, d: usize) -> u64 {
        (2 * d * self.num_directions(d) + 3 * self.num_features(d) + 4 * d) as u64
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
        let antithetic = self.params.antithetic;
        let exponent = self.exponent(shape, data)?;
        let options = MapOptions { scale: shape.scale, ..MapOptions::default() };
        let map = ExpFeatures::new(&exponent, omega, antithetic, options)?;
        let directions = omega.rows();
        Ok(Prepared::new(Positive::new(map, shape.d_v)).with_error(ErrorModel::Exponential {
            exponent,
            antithetic,
            directions,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::linear::testing::{
        PAIR, check_entry, check_generic, check_large, naive_positive, run, scaled_case, table_errors,
    };
    use crate::group::GroupIndex;
    use crate::testkit::{Case, How, assert_rows_close, assert_same_bits, check_method, run_with};
    use crate::{Options, TensorRef};

    fn options(pairs: &[(&str, &str)]) -> Options {
        pairs.iter().fold(Options::new(), |o, (k, v)| o.with(k, *v))
    }

    /// The map of a run without a mask, by the formulas.
    fn map(o: &Options, x: &Case) -> ExpFeatures<f64> {
        let (p, params) = (&x.problem, Params::from_options(o).unwrap());
        let source = Crt::new(&Problem { mask: Mask::None, ..*p }, params.clone(), None).unwrap();
        let exponent = match params.a {
            Some(a) => Exponent::oprf(p.d, a).unwrap(),
            None if p.mask == Mask::Causal => {
                Exponent::oprf(p.d, optimal_a(2.0 * p.scale * p.d as f64, p.d)).unwrap()
            }
            None => {
                let mut sides = [SideMoments::dense(p.d), SideMoments::dense(p.d)];
                sides[0].add(MatRef::new(&x.q, x.q.len() / p.d, p.d));
                sides[1].add(MatRef::new(&x.k, p.n_k, p.d));
                fit(&params, &Moments::new(&sides[0], &sides[1], p.scale).unwrap()).unwrap()
            }
        };
        let omega = source.draw(p.d, GroupIndex { batch: 0, kv_head: 0 }).unwrap();
        let map = MapOptions { scale: p.scale, ..MapOptions::default() };
        ExpFeatures::new(&exponent, &omega, params.antithetic, map).unwrap()
    }

    #[test]
    fn honours_the_contract() {
        check_method(&METHOD);
    }

    #[test]
    fn rows_equal_the_definition() {
        for pairs in [
            &[("features", "12")][..],
            &[("features", "9"), ("antithetic", "false"), ("a", "-0.2"), ("directions", "simplex")],
        ] {
            let o = options(pairs);
            check_generic(&METHOD, &o, &[1.0, 10.0], |x| naive_positive(&map(&o, x), x));
            check_large(&METHOD, &o);
        }
        for variant in ["sderf", "aderf", "saderf"] {
            let o = options(&[("variant", variant), ("features", "12")]);
            let x = Case::gaussian(Problem::new(3, 70, 5).with_kv_heads(1), 9);
            let (want, _) = naive_positive(&map(&o, &x), &x);
            // The fitted matrices come from sums in another order.
            assert_rows_close(&run(&METHOD, &o, &x).o, &want, 1e-9, variant);
        }
    }

    #[test]
    fn entries_have_the_known_means_and_variances() {
        // One pair: the fitted scalar is the pair's own, −0.0804.
        let (x, y) = PAIR;
        let sm = 0.15f64.exp();
        for (m, antithetic, directions, variance) in [
            ("4", "false", "iid", 0.2829556278),
            ("4", "false", "orthogonal", 0.2387375594),
            ("8", "true", "orthogonal", 0.01419320426),
        ] {
            let o = options(&[("features", m), ("antithetic", antithetic), ("directions", directions)]);
            check_entry(&METHOD, &o, (&x, &y), (sm, variance));
        }
    }

    #[test]
    fn errors_are_those_of_the_table() {
        for (s, m, variant, antithetic, expected) in [
            (0.35, "128", "oprf", "false", 0.44),
            (0.35, "128", "oprf", "true", 0.21),
            (0.35, "128", "sderf", "false", 0.42),
            (0.35, "512", "oprf", "false", 0.22),
            (0.35, "512", "oprf", "true", 0.11),
            (0.35, "512", "sderf", "false", 0.21),
            (0.5, "512", "oprf", "false", 0.43),
            (0.5, "512", "oprf", "true", 0.34),
            (0.5, "512", "sderf", "false", 0.43),
            (0.35, "2048", "oprf", "false", 0.11),
            (0.35, "2048", "oprf", "true", 0.049),
            (0.35, "2048", "sderf", "false", 0.10),
            (0.5, "2048", "oprf", "false", 0.22),
            (0.5, "2048", "oprf", "true", 0.18),
            (0.5, "2048", "sderf", "false", 0.22),
            (0.7, "2048", "oprf", "false", 0.54),
            (0.7, "2048", "oprf", "true", 0.59),
            (0.7, "2048", "sderf", "false", 0.56),
        ] {
            let o = options(&[("features", m), ("variant", variant), ("antithetic", antithetic)]);
            let [error, _] = table_errors(&METHOD, &o, s, 4);
            // Two printed digits, and the stated spread of a mean of four.
            let close = (error - expected).abs() <= 0.1 * expected + 0.005;
            assert!(close, "{s} {m} {variant} {antithetic}: {error}, expected {expected}");
        }
    }

    #[test]
    fn a_calibration_on_the_same_data_gives_the_fit_to_the_data_and_allows_a_mask() {
        let p = Problem { n_q: 80, ..Problem::new(4, 80, 6).with_kv_heads(2) };
        let x = scaled_case(p, 11, 0.8);
        let view = |x, h| TensorRef::bhnd(x, [1, h, 80, 6]).unwrap();
        let sample = Qkv::new(view(&x.q, 4), view(&x.k, 2), view(&x.v, 2));
        for variant in ["oprf", "sderf", "aderf", "saderf"] {
            let o = options(&[("variant", variant), ("features", "32")]);
            let c = calibrate(&Params::from_options(&o).unwrap(), &p, &[sample.into()]).unwrap();
            let with = |p: &Problem| METHOD.plan_with(p, &o, Some(&c)).unwrap();
            let got = run_with(&*with(&p), &x, How::default()).unwrap();
            assert_rows_close(&got.o, &run(&METHOD, &o, &x).o, 1e-8, variant);

            // Causal rows: the last one equals that of the run without a mask, and no row depends on later tokens.
            let causal = x.with_problem(p.causal());
            let plan = with(&p.causal());
            let rows = run_with(&*plan, &causal, How::default()).unwrap().o;
            for h in 0..4 {
                let last = (h * 80 + 79) * 6..(h * 80 + 80) * 6;
                assert_rows_close(&rows[last.clone()], &got.o[last], 1e-10, variant);
            }
            let mut changed = causal.clone();
            changed.k[50 * 6..51 * 6].iter_mut().for_each(|k| *k *= 1e3);
            let after = run_with(&*plan, &changed, How::default()).unwrap().o;
            assert_same_bits(&after[..50 * 6], &rows[..50 * 6], variant);

            let refused = METHOD.plan(&p.causal(), &o);
            assert_eq!(refused.is_err(), variant != "oprf");
        }
    }

    #[test]
    fn settings_that_contradict_are_refused() {
        let p = Problem::new(1, 8, 4);
        assert!(METHOD.plan(&p, &options(&[("a", "0.125")])).is_err());
        assert!(METHOD.plan(&p, &options(&[("a", "-0.1"), ("variant", "sderf")])).is_err());
        assert!(METHOD.plan(&Problem { scale: 0.0, ..p }, &Options::new()).is_err());
        let mut bad = Calibration::new("crt", &p);
        bad.insert("mean_q.0".into(), &Mat::zeros(1, 3));
        assert!(METHOD.plan_with(&p, &Options::new(), Some(&bad)).is_err());
    }

    #[test]
    fn the_fit_lowers_the_predicted_error() {
        let x = scaled_case(Problem::new(2, 300, 16), 3, 0.8);
        let sd = |pairs: &[(&str, &str)]| run(&METHOD, &options(pairs), &x).info.figures["predicted_rel_sd"];
        let (fitted, plain) = (sd(&[]), sd(&[("a", "0")]));
        assert!(fitted < plain, "{fitted}, {plain}");
        let one_sided = sd(&[("antithetic", "false"), ("variant", "sderf")]);
        assert!(one_sided <= sd(&[("antithetic", "false")]) * 1.01);
    }
}
