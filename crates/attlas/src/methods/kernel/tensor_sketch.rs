//! Tensor Sketch attention: a power of the inner product from convolved count sketches.
//!
//! **Idea.** The count sketch of $x^{\otimes p}$ is a circular convolution of $p$ count sketches of $x$, so Fourier
//! transforms give short vectors whose inner product approximates a power of the inner product.
//!
//! **Math.** With $x' = [x; \sqrt c]$, buckets $h_t$, signs $s_t$: $C_t[h_t(i)] \mathrel{+}= s_t(i) x'_i$,
//! $F = \prod_t \mathrm{rfft}(C_t)$; the $r$ real numbers of $F$, weighted by Parseval, have inner products with mean
//! $(\tau\langle q, k\rangle + c)^p$. With `nonneg = self_tensor` (even $p$) a sketch of degree $p/2$ is squared, as in
//! `polysketch`: weights are non-negative and too large on average by the variance of the half sketch. With
//! `nonneg = none` weights have either sign, and a normaliser may vanish: it is compared with
//! $D^+ = \sum_l |\varphi_l(q)| \sum_j |\varphi_l(k_j)|$, and `guard` selects the treatment; a run reports the number
//! of these rows.
//!
//! **Reference.** pham2013; features in the Fourier domain and their variance are derived in this project. The survey's
//! cost lacks a factor $p$.
//!
//! **Cost.** $p(d + 2.5\, r \log_2 r)$ per row for the sketch, $4 r d_v$ (squared: $2 r (r+1) d_v$) for the state of $r (d_v + 1)$
//! (squared: $r(r+1)/2 \cdot (d_v + 1)$) numbers.
//!
//! **Guarantees.** The sketched kernel of `nonneg = none` is unbiased with the known variance
//! $[(\xi+\beta)^p + (\xi+\gamma)^p - 2\xi^p]/r + \dots$ (tested); normalised rows are ratios and biased by $O(1/r)$. One coordinate
//! is exact.
//!
//! **When to use.** Relative errors on normal queries and keys ($n = 512$, $d = 64$, degree 2, 4 seeds, no mask), against
//! attention with the kernel itself (an output of zero has error 1): 5.1 for signed sketches with $r = 512$; 0.94, 0.80
//! and 0.62 for squared ones with $r = 32$, 64 and 128, and 0.77, 0.55 and 0.43 with $c = 4$. Prefer it to `polysketch`
//! when $d$ is large and sketches are long: count sketches cost $d$, not $d r$.

use crate::engine::PerGroup;
use crate::engine::poly_state::{
    Form, Guard, HalfSketch, PowerKernel, Prepare, Signed, SketchAttention, SketchStream,
};
use crate::group::{Group, GroupIndex, GroupPlan, GroupStream};
use crate::method::{Accepted, Claims, Cost, Family, Method, Needs, RunInfo, Spec, Support, Tunable};
use crate::workspace::Context;
use crate::{Error, MatRef, Problem, Real, Result, Spread};
use attlas_num::sketch::features::MapOptions;
use attlas_num::sketch::polynomial::{TensorSketch as Sketch, TensorSketchSpec};
use attlas_num::sketch::variance::{SketchedPair, features_needed};
use std::collections::BTreeMap;

/// Registry entry.
pub static METHOD: Method = Method {
    id: "tensor_sketch",
    family: Family::Kernel,
    title: "Tensor Sketch of polynomial attention",
    reference: "pham2013",
    claims: Claims {
        decode: true,
        row_stochastic: false,
        deterministic: false,
        softmax: false,
        lse: false,
        exponent: 1.0,
        needs: Needs::Training,
        spread: Spread::Scan { block: Some("block") },
        ..Claims::BASE
    },
    probes: &[
        &[("degree", "2"), ("features", "24"), ("block", "16")],
        &[("degree", "2"), ("nonneg", "none"), ("features", "24"), ("block", "16")],
        &[("degree", "2"), ("nonneg", "none"), ("features", "5"), ("block", "16"), ("guard", "exact_row")],
        &[("degree", "4"), ("nonneg", "self_tensor"), ("features", "7"), ("c", "0.5"), ("block", "13")],
        &[
            ("degree", "4"),
            ("nonneg", "none"),
            ("features", "33"),
            ("guard", "zero"),
            ("c", "1"),
            ("block", "32"),
        ],
        &[("degree", "3"), ("nonneg", "none"), ("features", "16"), ("c", "2"), ("block", "9")],
    ],
    tunable: &[Tunable::budget("features")],
    ..Method::of::<Params>()
};

crate::params! {
    /// Parameters of [`TensorSketch`].
    pub struct Params {
        /// Degree of the power.
        degree: usize = 2, in 1..=32;
        /// Constant added to the scaled inner product.
        c: f64 = 0.0, in 0.0..=1e6;
        /// Size of the sketch; auto is 8 d, at most 64 if squared.
        features: Option<usize> = None, in 1..=1 << 16;
        /// Method of keeping weights non-negative; odd degrees require none.
        nonneg: Nonneg = Nonneg::SelfTensor;
        /// Output of rows with a vanishing normaliser, where weights have either sign.
        guard: Policy = Policy::Clamp;
        /// A normaliser counts as vanishing below this share of the sum of absolute products.
        tol: f64 = 1e-3, in 0.0..=1.0;
        /// Keys per causal block.
        block: usize = 128, in 1..=1 << 20;
        /// Standard deviation of the sketch over its root mean square that the figure `features_needed` aims at.
        target_error: f64 = 0.1, in 1e-3..=10.0;
        /// Seed of buckets and signs.
        seed: u64 = 0, in 0..=u64::MAX;
    }
}

impl Spec for Params {
    const METHOD: &'static Method = &METHOD;

    fn supports(&self, p: &Problem) -> Support {
        Support::unless(p.scale <= 0.0, "the power of a sketch needs a positive scale")
    }

    fn build(self, x: Accepted<'_>) -> Result<impl GroupPlan> {
        TensorSketch::new(x.problem, self)
    }
}

crate::choices! {
    /// Method of keeping weights non-negative.
    pub enum Nonneg {
        /// None: the whole power is sketched, and weights have either sign.
        None = "none",
        /// A sketch of half the power is squared.
        SelfTensor = "self_tensor",
    }
}

crate::choices! {
    /// Output of rows with a vanishing normaliser.
    pub enum Policy {
        /// The unmodified ratio.
        Strict = "strict",
        /// The ratio with the normaliser raised to the tolerance.
        Clamp = "clamp",
        /// Attention with the kernel itself; streams keep keys and values for it. Even degrees only.
        ExactRow = "exact_row",
        /// Zero.
        Zero = "zero",
    }
}

/// Rows and keys sampled in pairs for the figures of a run.
const SAMPLED: usize = 16;

/// Sketch map that works in double precision, safe for every single-precision value.
type Map = Signed<Sketch>;

/// The plan: the specification of the sketch.
#[derive(Clone, Debug)]
pub struct TensorSketch {
    params: Params,
    spec: TensorSketchSpec,
    form: Form,
    d: usize,
    scale: f64,
    /// One sketch for each sequence and key head.
    maps: PerGroup<Scaled>,
}

impl TensorSketch {
    /// Creates a plan with these parameters.
    pub(crate) fn new(p: &Problem, params: Params) -> Result<Self> {
        params.validate()?;
        let squared = params.nonneg == Nonneg::SelfTensor;
        if squared && !params.degree.is_multiple_of(2) {
            return Err(Error::param(
                "degree",
                params.degree,
                "an even number, of which half is squared, or nonneg = none",
            ));
        }
        if params.guard == Policy::ExactRow && !params.degree.is_multiple_of(2) {
            return Err(Error::param(
                "guard",
                "exact_row",
                "another policy: odd powers have either sign too",
            ));
        }
        let auto = if squared { (8 * p.d).min(64) } else { 8 * p.d };
        // The half sketch lacks the squared constant: the scale of logarithms is doubled below.
        let degree = if squared { params.degree / 2 } else { params.degree } as u32;
        let spec = TensorSketchSpec {
            degree,
            c: params.c,
            r: params.features.unwrap_or(auto),
            ..TensorSketchSpec::default()
        };
        let form = if squared { Form::Squared } else { Form::Direct };
        let options = MapOptions { scale: p.scale, ..MapOptions::default() };
        let factor = if squared { 2.0 } else { 1.0 };
        let maps = PerGroup::draw(p, |index| {
            let key = index.stream_key(params.seed).named("tensor sketch");
            let map = Sketch::new(p.d, spec, key, options)
                .map_err(|e| Error::param("features", spec.r, e.to_string()))?;
            Ok(Scaled { map: Signed(map), factor })
        })?;
        Ok(Self { params, spec, form, d: p.d, scale: p.scale, maps })
    }

    fn through<'a, T: Real>(&self, map: &'a Scaled) -> SketchAttention<'a, T> {
        SketchAttention {
            map,
            form: self.form,
            near: None,
            c0: 0.0,
            block: self.params.block,
            prepare: Prepare::Copy,
            guard: match self.params.guard {
                Policy::Strict => Guard::Strict,
                Policy::Clamp => Guard::Clamp(self.params.tol),
                Policy::ExactRow => {
                    let power = self.params.degree as f64;
                    let kernel = PowerKernel { scale: self.scale, shift: self.params.c, power };
                    Guard::Exact(self.params.tol, kernel)
                }
                Policy::Zero => Guard::Zero(self.params.tol),
            },
        }
    }

    /// Computes the standard deviation of the sketch over sampled pairs, relative to its root mean square (its square
    /// is the relative bias of the squared sketch), and the size that `target_error` needs.
    fn figures<T: Real>(&self, g: &Group<'_, T>) -> BTreeMap<&'static str, f64> {
        let cached = self.form.features(self.spec.r) * (g.d_v() + 2) + self.params.block * (self.d + g.d_v());
        let mut figures = BTreeMap::new();
        if self.params.guard != Policy::ExactRow {
            figures.insert("decode_bytes", (cached * size_of::<T>()) as f64);
        }
        if g.n_q() == 0 || g.n_k() == 0 {
            return figures;
        }
        let root = self.scale.sqrt();
        let wide = |row: &[T]| -> Vec<f64> { row.iter().map(|x| root * x.to_f64()).collect() };
        let pick = |n: usize| (0..n).step_by(n.div_ceil(SAMPLED));
        let (q, TensorSketchSpec { degree, c, r, .. }) = (g.q.head(0), self.spec);
        let keys: Vec<Vec<f64>> = pick(g.n_k()).map(|j| wide(g.k.row(j))).collect();
        let rows: Vec<Vec<f64>> = pick(q.rows()).map(|i| wide(q.row(i))).collect();
        let pairs: Vec<SketchedPair> =
            rows.iter().flat_map(|x| keys.iter().map(|y| SketchedPair::of(x, y, c))).collect();
        let exact: f64 = pairs.iter().map(|pair| pair.second_power().powi(degree as i32)).sum();
        let relative = |r: usize| pairs.iter().map(|pair| pair.variance(degree, r)).sum::<f64>() / exact;
        let own = relative(r);
        if !own.is_finite() {
            return figures;
        }
        figures.extend([("features", r as f64), ("predicted_rel_sd", own.max(0.0).sqrt())]);
        if self.form == Form::Squared {
            figures.insert("self_tensoring_bias", own);
        }
        if let Some(r) = features_needed(self.params.target_error, relative) {
            figures.insert("features_needed", r as f64);
        }
        figures
    }
}

/// The sketch, with the logarithmic scale that restores the kernel.
#[derive(Clone, Debug)]
struct Scaled {
    map: Map,
    factor: f64,
}

impl<T: Real> HalfSketch<T> for Scaled {
    fn width(&self) -> usize {
        HalfSketch::<T>::width(&self.map)
    }

    fn sketch_into(&self, x: MatRef<'_, T>, cx: Context<'_>, out: &mut [T], log: &mut [f64]) {
        self.map.sketch_into(x, cx, out, log);
        log.iter_mut().for_each(|l| *l *= self.factor);
    }
}

impl GroupPlan for TensorSketch {
    fn cost(&self, p: &Problem) -> Cost {
        let rows = (p.batch * p.n_heads * p.n_q) as u64;
        let keys = (p.batch * p.n_kv_heads * p.n_k) as u64;
        let r = self.spec.r as f64;
        let sketch = f64::from(self.spec.degree) * (p.d as f64 + 2.5 * r * r.max(2.0).log2());
        let state = sketch as u64 + (2 * self.form.features(self.spec.r) * (p.d_v + 1)) as u64;
        Cost {
            setup_flops: keys * state,
            run_flops: rows * state,
            bytes: 4 * (rows + keys) * (p.d + p.d_v) as u64,
        }
    }

    fn has_lse(&self) -> bool {
        false
    }

    fn run<T: Real>(&self, mut g: Group<'_, T>) -> Result<RunInfo> {
        let map = self.maps.of(g.index);
        let (k, figures) = (g.k, self.figures(&g));
        let info = self.through(map).run(&mut g, k)?;
        Ok(RunInfo { figures, ..info })
    }

    fn stream<T: Real>(&self, p: &Problem, index: GroupIndex) -> Option<Box<dyn GroupStream<T>>> {
        let map = self.maps.of(index);
        Some(Box::new(SketchStream::new(&self.through::<T>(map), map.clone(), p.d, p.d_v)))
    }
}

#[cfg(test)]
mod tests {
    use super::{METHOD, Params, TensorSketch};
    use crate::engine::poly_state::HalfSketch;
    use crate::group::GroupIndex;
    use crate::testkit::{Case, How, assert_rows_close, check_method, run_method, run_with};
    use crate::{MatRef, Options, Problem, Workspace};
    use attlas_num::sketch::variance::SketchedPair;

    #[test]
    fn honours_the_contract() {
        check_method(&METHOD);
    }

    /// The sketched kernel of two rows under a seed.
    fn kernel_of(q: &[f64], k: &[f64], params: &Params, seed: u64) -> f64 {
        let p = Problem { scale: 1.0, ..Problem::new(1, 1, q.len()) };
        let plan = TensorSketch::new(&p, Params { seed, ..params.clone() }).unwrap();
        let map = plan.maps.of(GroupIndex { batch: 0, kv_head: 0 });
        let r = HalfSketch::<f64>::width(map);
        let ws = Workspace::single().unwrap();
        let (mut short, mut log) = (vec![0.0; 2 * r], [0.0; 2]);
        let rows = [q, k].concat();
        map.sketch_into(MatRef::new(&rows, 2, q.len()), ws.context(), &mut short, &mut log);
        let inner: f64 = short[..r].iter().zip(&short[r..]).map(|(a, b)| a * b).sum();
        let kernel = if params.degree == 4 { inner * inner } else { inner };
        kernel * (log[0] + log[1]).exp()
    }

    #[test]
    fn the_signed_kernel_is_unbiased_with_the_stated_variance() {
        let (x, y) = ([1.0, 2.0], [3.0, 1.0]);
        for (degree, r, variance) in
            [(1, 8, 6.125), (2, 8, 523.125), (2, 7, 584.265_306_1), (3, 16, 17138.40625)]
        {
            let stated = SketchedPair::of(&x, &y, 0.0).variance(degree as u32, r);
            assert!((stated / variance - 1.0).abs() < 1e-9);
            let nonneg = super::Nonneg::None;
            let params = Params { degree, features: Some(r), nonneg, ..Params::default() };
            let n = 6000;
            let values: Vec<f64> = (0..n).map(|seed| kernel_of(&x, &y, &params, seed)).collect();
            let mean = values.iter().sum::<f64>() / n as f64;
            let central = |p: i32| values.iter().map(|v| (v - mean).powi(p)).sum::<f64>() / n as f64;
            let (spread, fourth) = (central(2), central(4));
            let exact = 5f64.powi(degree as i32);
            assert!((mean - exact).abs() < 5.0 * (variance / n as f64).sqrt(), "degree {degree}: {mean}");
            let error = ((fourth - spread * spread) / n as f64).sqrt();
            assert!(
                (spread - variance).abs() < 5.0 * error,
                "degree {degree}: {spread} ± {error}, {variance}"
            );
            assert!(error < 0.1 * variance, "degree {degree}: {n} seeds tell the variance only to {error}");
        }
    }

    #[test]
    fn squaring_adds_the_variance_of_the_half_sketch() {
        let (x, y) = ([1.0, 2.0], [3.0, 1.0]);
        let params =
            Params { degree: 4, features: Some(8), nonneg: super::Nonneg::SelfTensor, ..Params::default() };
        let n = 3000;
        let values: Vec<f64> = (0..n).map(|seed| kernel_of(&x, &y, &params, seed)).collect();
        let mean = values.iter().sum::<f64>() / n as f64;
        let error = (values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (n * n) as f64).sqrt();
        assert!((mean - (625.0 + 523.125)).abs() < 5.0 * error, "{mean} ± {error}");
        assert!(values.iter().all(|v| *v >= 0.0));
    }

    #[test]
    fn one_coordinate_is_exact() {
        let p = Problem { d_v: 3, ..Problem::new(1, 40, 1) };
        for p in [p, p.causal()] {
            let x = Case::gaussian(p, 1);
            let want = run_method(
                crate::registry::method("polynomial").unwrap(),
                &Options::new().with("degree", 2usize),
                &x,
            );
            for nonneg in ["none", "self_tensor"] {
                let options =
                    Options::new().with("nonneg", nonneg).with("features", 5usize).with("block", 8usize);
                let got = run_method(&METHOD, &options.with("guard", "strict"), &x);
                assert_rows_close(&got.0, &want.0, 1e-10, nonneg);
            }
        }
    }

    #[test]
    fn blocks_do_not_change_the_answer() {
        for nonneg in ["none", "self_tensor"] {
            let x = Case::gaussian(Problem { d_v: 3, ..Problem::new(1, 65, 4).causal() }, 3);
            let run = |block: usize| {
                let options = Options::new()
                    .with("nonneg", nonneg)
                    .with("c", 2.0)
                    .with("features", 9usize)
                    .with("block", block);
                run_method(&METHOD, &options, &x).0
            };
            for block in [1, 7, 64] {
                assert_rows_close(&run(block), &run(130), 1e-9, &format!("{nonneg} {block}"));
            }
        }
    }

    #[test]
    fn the_error_falls_with_the_size() {
        let x = Case::gaussian(Problem::new(1, 48, 4), 4);
        let options = Options::new().with("degree", 2usize).with("c", 1.0).with("nonneg", "none");
        let exact = run_method(
            crate::registry::method("polynomial").unwrap(),
            &Options::new().with("degree", 2usize).with("alpha", 1.0),
            &x,
        );
        let error = |features: usize| -> f64 {
            (0..6u64)
                .map(|seed| {
                    let o = options.clone().with("features", features).with("seed", seed);
                    let got = run_method(&METHOD, &o, &x).0;
                    got.iter().zip(&exact.0).map(|(a, b)| (a - b) * (a - b)).sum::<f64>()
                })
                .sum::<f64>()
                .sqrt()
        };
        let errors = [64, 512, 4096].map(error);
        assert!(errors[1] < 0.6 * errors[0] && errors[2] < 0.6 * errors[1], "{errors:?}");
    }

    #[test]
    fn the_defaults_are_closer_to_their_kernel_than_zero() {
        let p = Problem::new(1, 512, 64);
        for p in [p, p.causal()] {
            let x = Case::gaussian(p, 100);
            let polynomial = crate::registry::method("polynomial").unwrap();
            let kernel = run_method(polynomial, &Options::new().with("degree", 2usize), &x).0;
            let error =
                crate::metrics::relative_frobenius(&run_method(&METHOD, &Options::new(), &x).0, &kernel);
            assert!(error < 0.9, "{error}");
        }
    }

    #[test]
    fn vanishing_normalisers_are_counted_and_treated() {
        // A short sketch of a small kernel: signs are effectively random.
        let x = Case::gaussian(Problem::new(1, 60, 8), 5);
        let run = |guard: &str| {
            let options = Options::new().with("degree", 3usize).with("features", 4usize).with("guard", guard);
            let options = options.with("nonneg", "none");
            let plan = METHOD.plan(&x.problem, &options).unwrap();
            run_with(&*plan, &x, How { lse: false, ..How::default() }).unwrap()
        };
        let (strict, clamp, zero) = (run("strict"), run("clamp"), run("zero"));
        assert!(strict.info.fallback_rows > 0);
        assert_eq!(strict.info.fallback_rows, clamp.info.fallback_rows);
        let zeros = zero.o.chunks(8).filter(|row| row.iter().all(|&x| x == 0.0)).count();
        assert_eq!(zeros as u64, zero.info.fallback_rows);
        assert!(strict.info.figures["predicted_rel_sd"] > 0.5);
    }

    #[test]
    fn vanishing_rows_can_be_computed_with_the_kernel_itself() {
        let base = Problem { d_v: 3, ..Problem::new(2, 70, 8).with_kv_heads(1) };
        for p in [base, base.causal()] {
            let x = Case::gaussian(p, 7);
            let run = |guard: &str| {
                let options =
                    Options::new().with("features", 5usize).with("guard", guard).with("block", 16usize);
                let options = options.with("nonneg", "none");
                let plan = METHOD.plan(&p, &options).unwrap();
                run_with(&*plan, &x, How { lse: false, ..How::default() }).unwrap()
            };
            let (zero, recomputed) = (run("zero"), run("exact_row"));
            let polynomial = crate::registry::method("polynomial").unwrap();
            let exact = run_method(polynomial, &Options::new().with("degree", 2usize), &x).0;
            let mut seen = 0;
            for ((zero, recomputed), exact) in
                zero.o.chunks(3).zip(recomputed.o.chunks(3)).zip(exact.chunks(3))
            {
                if zero == [0.0; 3] {
                    seen += 1;
                    assert_rows_close(recomputed, exact, 1e-11, "a row computed again");
                } else {
                    assert_eq!(zero, recomputed);
                }
            }
            assert!(seen > 0 && seen < 140, "{seen}");
            assert_eq!((zero.info.fallback_rows, recomputed.info.fallback_rows), (seen, seen));
        }
        let odd = Options::new().with("degree", 3usize).with("guard", "exact_row").with("nonneg", "none");
        assert!(METHOD.plan(&base, &odd).is_err());
    }

    #[test]
    fn the_needed_size_gives_the_error_asked_for() {
        let x = Case::gaussian(Problem::new(1, 40, 8), 6);
        for nonneg in ["none", "self_tensor"] {
            let figures = |o: Options| {
                let plan = METHOD.plan(&x.problem, &o).unwrap();
                run_with(&*plan, &x, How { lse: false, ..How::default() }).unwrap().info.figures
            };
            let base = Options::new().with("nonneg", nonneg).with("target_error", 0.5);
            let needed = figures(base.clone().with("features", 20usize))["features_needed"];
            let sd = |r: f64| figures(base.clone().with("features", r as usize))["predicted_rel_sd"];
            assert!(sd(needed) <= 0.5 && sd(needed - 2.0) > 0.5, "{nonneg}: {needed}");
        }
    }

    #[test]
    fn odd_squares_are_refused() {
        let options = Options::new().with("degree", 3usize).with("nonneg", "self_tensor");
        assert!(METHOD.plan(&Problem::new(1, 8, 4), &options).is_err());
    }
}
