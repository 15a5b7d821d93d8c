//! PolySketchFormer: polynomial attention through a sketch whose square is the kernel.
//!
//! **Idea.** Replace $e^{\langle q, k\rangle}$ by $\langle q, k\rangle^p$ on layer-normalised queries and keys, sketch half of the power
//! by products of Gaussian projections, and square the sketch: weights stay non-negative and the sum over keys is a
//! state of fixed size. Causally, the block around a query is exact.
//!
//! **Math.** With $q' = [\sqrt{\tau/\beta}\, q; \sqrt{\alpha/\beta}]$ and $k'$ alike, $\langle q', k'\rangle = (\tau\langle q, k\rangle + \alpha)/\beta$,
//! where $\tau$ is the problem's scale (1 in the paper; set it to 1 to reproduce). $a = \mathrm{half}(q', p/2)$:
//! $\mathrm{half}(x, 1) = x$, $\mathrm{half}(x, h) = r^{-1/2} (G_1 u) \odot (G_2 w)$ with *independent* sketches $u$, $w$ of degree
//! $\lceil h/2\rceil$, $\lfloor h/2\rfloor$. Then $\hat\kappa = (a^\top b)^2 = \langle \mathrm{sym}(a), \mathrm{sym}(b)\rangle$ with $m = r(r+1)/2$
//! products, and $o_i = \sum_j \hat\kappa_{ij} v_j / (c_0 + \sum_j \hat\kappa_{ij})$. Rows are divided by their lengths
//! first, and the powers of the lengths are kept as logarithms, so that no degree overflows. The paper adds
//! $\sqrt{\alpha/(\beta d)}$ to every coordinate; an extra coordinate gives the same inner products and, because the
//! sketch is Gaussian, the same distribution.
//!
//! **Reference.** kacham2024. Errata of the survey: branches must be independent; the feature dimension is $r^2$
//! (here $r(r+1)/2$), not $r$. The published code divides each product by $r$, which `scaling = reference_code`
//! reproduces. Learned sketches need trained weights and are not offered. The symmetric square is a construction of
//! this project.
//!
//! **Cost.** $4 n d r$ for the sketches ($p = 4$), $4 n m d_v$ for the state (half as much again causally, where pieces of
//! the sequence first sum their keys), $n b (d + d_v)$ for blocks of $b$; state $m (d_v + 1)$.
//!
//! **Guarantees.** Weights are non-negative; with $c_0 > 0$ they sum to less than one. With `local_exact` and a block of
//! all keys it is polynomial attention; degree 2 always is. Squaring is biased: the mean of $\hat\kappa$ is
//! $\kappa + \mathrm{Var}(a^\top b)$, by a known formula (tested); `figures` reports the size of this bias on sampled
//! pairs, the corresponding error, and the sketch size that `target_error` needs.
//!
//! **When to use.** In models trained with it, at long contexts. It does not approximate softmax. Without training, a short
//! sketch needs a large `alpha`. Relative errors on normal queries and keys ($n = 512$, $d = 64$, degree 4, 4 seeds), against
//! attention with the kernel itself, without a mask and, in brackets, with a causal one and blocks of 256 (an output of
//! zero has error 1):
//!
//! | `alpha` | $r = 32$ | $r = 64$ | $r = 128$ |
//! |---|---|---|---|
//! | 2 | 1.16 (0.47) | 1.04 (0.41) | 0.92 (0.35) |
//! | 8 | 0.98 (0.34) | 0.79 (0.26) | 0.57 (0.20) |
//! | 16 | 0.65 (0.25) | 0.51 (0.18) | 0.36 (0.15) |
//! | 32 | 0.43 (0.19) | 0.33 (0.13) | 0.23 (0.12) |
//!
//! With `alpha` 0, as in the paper, and $r = 32$ the error is above 1 without a mask. Against softmax, `alpha` 16 and
//! $r = 32$ have an error of 0.84 (0.60); the exact kernel alone has 0.69 (0.57).

use crate::engine::PerGroup;
use crate::engine::poly_state::{
    Form, Guard, HalfSketch, PowerKernel, Prepare, SketchAttention, SketchStream, unit_into,
};
use crate::group::{Group, GroupIndex, GroupPlan, GroupStream};
use crate::method::{Accepted, Claims, Cost, Family, Method, Needs, RunInfo, Spec, Support, Tunable};
use crate::workspace::Context;
use crate::{Error, Mask, MatRef, Problem, Real, Result, Spread};
use attlas_num::rng::StreamKey;
use attlas_num::sketch::features::MapOptions;
use attlas_num::sketch::polynomial::{ProductScale, ProductSketch};
use attlas_num::sketch::variance::{Pair, features_needed, self_tensored_mean};
use std::collections::BTreeMap;

/// Registry entry.
pub static METHOD: Method = Method {
    id: "polysketch",
    family: Family::Kernel,
    title: "Sketched polynomial attention (PolySketchFormer)",
    reference: "kacham2024",
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
        &[("block", "16"), ("features", "8")],
        &[
            ("block", "32"),
            ("features", "5"),
            ("local_exact", "false"),
            ("layer_norm", "false"),
            ("alpha", "0.5"),
        ],
        &[
            ("degree", "8"),
            ("block", "7"),
            ("features", "6"),
            ("scaling", "reference_code"),
            ("share", "false"),
            ("alpha", "0"),
        ],
        &[("degree", "2"), ("block", "64"), ("c0", "0"), ("beta", "2")],
    ],
    tunable: &[Tunable::budget("features")],
    ..Method::of::<Params>()
};

crate::params! {
    /// Parameters of [`PolySketch`].
    pub struct Params {
        /// Degree of the power, even.
        degree: usize = 4, in 2..=32;
        /// Size r of the sketch; r(r+1)/2 products of its entries are summed.
        features: usize = 32, in 1..=1024;
        /// Use the exact kernel inside a causal block.
        local_exact: bool = true;
        /// Keys per causal block.
        block: usize = 256, in 1..=1 << 20;
        /// Constant added to the normaliser.
        c0: f64 = 1.0, in 0.0..=1e6;
        /// Constant added to the scaled inner product. A larger one gives a flatter kernel and a smaller sketching
        /// error; 0 is the pure power.
        alpha: f64 = 16.0, in 0.0..=1e6;
        /// Divisor of the scaled inner product plus alpha.
        beta: f64 = 1.0, in 1e-6..=1e6;
        /// Layer-normalise queries and keys first, without gain.
        layer_norm: bool = true;
        /// Scaling of the products of projections.
        scaling: Scaling = Scaling::Unbiased;
        /// Use one sketch for all heads.
        share: bool = true;
        /// Standard deviation of the half sketch, relative to its root mean square, that the figure `features_needed`
        /// aims at.
        target_error: f64 = 0.1, in 1e-3..=10.0;
        /// Seed of the sketch.
        seed: u64 = 0, in 0..=u64::MAX;
    }
}

impl Spec for Params {
    const METHOD: &'static Method = &METHOD;

    fn supports(&self, p: &Problem) -> Support {
        Support::unless(p.scale <= 0.0, "the power of a sketch needs a positive scale")
    }

    fn build(self, x: Accepted<'_>) -> Result<impl GroupPlan> {
        PolySketch::new(x.problem, self)
    }
}

crate::choices! {
    /// Scaling of the products of projections.
    pub enum Scaling {
        /// Divided by the root of r: half sketches are unbiased.
        Unbiased = "unbiased",
        /// Divided by r, as in the published code: kernels of degree 4 come out divided by r².
        ReferenceCode = "reference_code",
    }
}

/// ε of the layer normalisation.
const EPS: f64 = 1e-5;

/// Rows and keys sampled in pairs for the figures of a run.
const SAMPLED: usize = 16;

/// The sketch of rows divided by their lengths.
#[derive(Clone, Debug)]
struct Half<T> {
    sketch: ProductSketch<T>,
    width_in: usize,
    root: f64,
    extra: f64,
    power: f64,
}

impl<T: Real> HalfSketch<T> for Half<T> {
    fn width(&self) -> usize {
        self.sketch.sketch_len()
    }

    fn sketch_into(&self, x: MatRef<'_, T>, cx: Context<'_>, out: &mut [T], log: &mut [f64]) {
        let mut units = cx.scratch.take::<T>(x.rows() * self.width_in);
        for ((row, unit), log) in x.iter_rows().zip(units.chunks_exact_mut(self.width_in)).zip(log) {
            *log = self.power * unit_into(row, self.root, self.extra, unit);
        }
        let units = MatRef::new(&units, x.rows(), self.width_in);
        self.sketch.sketch_into(units, cx.schedule.isa, cx.scratch, out);
    }
}

/// The plan: parameters and the exact kernel.
#[derive(Clone, Debug)]
pub struct PolySketch {
    params: Params,
    kernel: PowerKernel,
    width_in: usize,
    /// One sketch for each sequence and key head.
    sketches: PerGroup<ProductSketch<f64>>,
}

impl Params {
    /// Draws the sketch of half the power, for rows of `width` elements.
    fn draw(&self, index: GroupIndex, width: usize) -> Result<ProductSketch<f64>> {
        let key = if self.share { StreamKey::new(self.seed) } else { index.stream_key(self.seed) };
        let scaling = match self.scaling {
            Scaling::Unbiased => ProductScale::Unbiased,
            Scaling::ReferenceCode => ProductScale::ReferenceCode,
        };
        let (key, options) = (key.named("polysketch"), MapOptions::default());
        ProductSketch::new(width, self.degree as u32 / 2, self.features, false, scaling, key, options)
            .map_err(|e| Error::param("features", self.features, e.to_string()))
    }
}

impl PolySketch {
    /// Creates a plan with these parameters.
    pub(crate) fn new(problem: &Problem, params: Params) -> Result<Self> {
        params.validate()?;
        if !params.degree.is_multiple_of(2) {
            return Err(Error::param(
                "degree",
                params.degree,
                "an even number: half of the power is squared",
            ));
        }
        let kernel = PowerKernel {
            scale: problem.scale / params.beta,
            shift: params.alpha / params.beta,
            power: params.degree as f64,
        };
        let width_in = problem.d + usize::from(params.alpha > 0.0);
        let sketches = PerGroup::draw(problem, |index| params.draw(index, width_in))?;
        Ok(Self { params, kernel, width_in, sketches })
    }

    /// Length of the sketch.
    fn width(&self) -> usize {
        if self.params.degree == 2 { self.width_in } else { self.params.features }
    }

    fn prepare(&self) -> Prepare {
        if self.params.layer_norm { Prepare::LayerNorm(EPS) } else { Prepare::Copy }
    }

    fn half<T: Real>(&self, index: GroupIndex) -> Half<T> {
        let PowerKernel { scale, shift, power } = self.kernel;
        let sketch = self.sketches.of(index).cast();
        Half { sketch, width_in: self.width_in, root: scale.sqrt(), extra: shift.sqrt(), power }
    }

    fn through<'a, T: Real>(&self, map: &'a Half<T>) -> SketchAttention<'a, T> {
        SketchAttention {
            map,
            form: Form::Squared,
            near: self.params.local_exact.then_some(self.kernel),
            c0: self.params.c0,
            block: self.params.block,
            prepare: self.prepare(),
            guard: Guard::Strict,
        }
    }

    /// Computes, over sampled pairs, the relative bias of the kernel sum by squaring; its root, the standard deviation
    /// of the half sketch relative to its root mean square; and the sketch size that `target_error` needs.
    fn figures<T: Real>(&self, g: &Group<'_, T>, k: MatRef<'_, T>) -> BTreeMap<&'static str, f64> {
        let cached =
            Form::Squared.features(self.width()) * (g.d_v() + 2) + self.params.block * (k.cols() + g.d_v());
        let bytes = ("decode_bytes", (cached * size_of::<T>()) as f64);
        if self.params.degree == 2 || g.n_q() == 0 || k.rows() == 0 {
            return [bytes].into();
        }
        let (q, root) = (g.q.head(0), self.kernel.scale.sqrt());
        let pick = |n: usize| (0..n).step_by(n.div_ceil(SAMPLED));
        let lift = |row: &[T]| -> Vec<f64> {
            let entries = row.iter().map(|x| root * x.to_f64());
            entries.chain([self.kernel.shift.sqrt()]).collect()
        };
        let keys: Vec<Vec<f64>> = pick(k.rows()).map(|j| lift(k.row(j))).collect();
        let mut prepared = vec![T::ZERO; q.cols()];
        let mut pairs = Vec::with_capacity(SAMPLED * SAMPLED);
        for i in pick(q.rows()) {
            self.prepare().apply_into(q.sub_rows(i..i + 1), &mut prepared);
            let x = lift(&prepared);
            pairs.extend(keys.iter().map(|y| Pair::of(&x, y)));
        }
        let Params { degree, features, target_error, .. } = self.params;
        let exact: f64 = pairs.iter().map(|pair| pair.xy.powi(degree as i32)).sum();
        let bias = |r: usize| {
            pairs.iter().map(|pair| self_tensored_mean(pair, degree as u32, r)).sum::<f64>() / exact - 1.0
        };
        let own = bias(features);
        if !own.is_finite() {
            return [bytes].into();
        }
        let mut figures =
            BTreeMap::from([bytes, ("self_tensoring_bias", own), ("predicted_rel_sd", own.max(0.0).sqrt())]);
        if let Some(r) = features_needed(target_error, bias) {
            figures.insert("features_needed", r as f64);
        }
        figures
    }
}

impl GroupPlan for PolySketch {
    fn cost(&self, p: &Problem) -> Cost {
        let rows = (p.batch * p.n_heads * p.n_q) as u64;
        let keys = (p.batch * p.n_kv_heads * p.n_k) as u64;
        let m = Form::Squared.features(self.width());
        let sketch = 2 * self.width_in * self.width() * self.params.degree / 2;
        let state = sketch + 2 * m * (p.d_v + 1);
        let (near, passes) = match p.mask {
            Mask::Causal => (self.params.block.min(p.n_k) * (p.d + p.d_v), 2),
            Mask::None => (0, 1),
        };
        Cost {
            setup_flops: keys * (passes * state) as u64,
            run_flops: rows * (state + near) as u64,
            bytes: 4 * (rows + keys) * (p.d + p.d_v) as u64,
        }
    }

    fn has_lse(&self) -> bool {
        false
    }

    fn run<T: Real>(&self, mut g: Group<'_, T>) -> Result<RunInfo> {
        let map = self.half::<T>(g.index);
        let (k, cx) = (g.k, g.cx);
        let mut prepared = cx.scratch.take::<T>(k.rows() * k.cols());
        self.prepare().par_apply_into(k, &mut prepared);
        let k = MatRef::new(&prepared, k.rows(), k.cols());
        let figures = self.figures(&g, k);
        let info = self.through(&map).run(&mut g, k)?;
        Ok(RunInfo { figures, ..info })
    }

    fn stream<T: Real>(&self, p: &Problem, index: GroupIndex) -> Option<Box<dyn GroupStream<T>>> {
        let map = self.half::<T>(index);
        Some(Box::new(SketchStream::new(&self.through(&map), map.clone(), p.d, p.d_v)))
    }
}

#[cfg(test)]
mod tests {
    use crate::testkit::{Case, assert_rows_close, check_method, run_method, run_with};
    use crate::{Options, Problem};
    use attlas_num::sketch::variance::{Pair, self_tensored_mean};

    #[test]
    fn honours_the_contract() {
        check_method(&super::METHOD);
    }

    fn polynomial() -> &'static crate::Method {
        crate::registry::method("polynomial").unwrap()
    }

    #[test]
    fn a_block_of_all_keys_is_polynomial_attention() {
        let x = Case::gaussian(Problem { d_v: 5, ..Problem::new(2, 61, 8).causal() }, 1);
        for degree in [2usize, 4, 6] {
            let shared = Options::new().with("degree", degree).with("alpha", 0.3).with("c0", 1.0);
            let want = run_method(polynomial(), &shared.clone().with("layer_norm", true), &x).0;
            let got =
                run_method(&super::METHOD, &shared.with("features", 3usize).with("block", 61usize), &x).0;
            assert_rows_close(&got, &want, 1e-12, "one block");
        }
    }

    #[test]
    fn degree_two_is_exact_everywhere() {
        for p in [Problem::new(1, 83, 6), Problem::new(1, 83, 6).causal()] {
            let x = Case::gaussian(p, 2);
            let options = Options::new().with("degree", 2usize).with("c0", 0.0).with("alpha", 0.0);
            let want = run_method(polynomial(), &options.clone().with("layer_norm", true), &x).0;
            let got = run_method(&super::METHOD, &options.with("block", 10usize), &x).0;
            assert_rows_close(&got, &want, 1e-11, "degree 2");
        }
    }

    #[test]
    fn the_sketched_kernel_does_not_depend_on_blocks() {
        for n in [1, 2, 63, 64, 65, 203] {
            let x = Case::gaussian(Problem { d_v: 3, ..Problem::new(1, n, 5).causal() }, 3);
            let run = |block: usize| {
                let options =
                    Options::new().with("local_exact", false).with("features", 4usize).with("block", block);
                run_method(&super::METHOD, &options, &x).0
            };
            let want = run(2 * n);
            for block in [1, 7, 64, n] {
                assert_rows_close(&run(block), &want, 1e-11, &format!("{n} tokens, blocks of {block}"));
            }
        }
    }

    /// The estimated kernel of two rows: with one key of value 1, the output is κ/(1 + κ).
    fn kernel_of(q: &[f64], k: &[f64], options: &Options) -> f64 {
        let p = Problem { d_v: 1, scale: 1.0, ..Problem::new(1, 1, q.len()) };
        let x = Case { q: q.to_vec(), k: k.to_vec(), v: vec![1.0], ..Case::gaussian(p, 0) };
        let o = run_method(&super::METHOD, &options.clone().with("layer_norm", false).with("alpha", 0.0), &x)
            .0[0];
        o / (1.0 - o)
    }

    #[test]
    fn squaring_is_biased_by_the_variance_of_the_half_sketch() {
        let (x, y) = ([0.3, 0.6], [0.9, 0.3]);
        let pair = Pair::of(&x, &y);
        let base = Options::new().with("degree", 4usize).with("features", 8usize);
        let n = 3000u32;
        let values: Vec<f64> =
            (0..n).map(|seed| kernel_of(&x, &y, &base.clone().with("seed", u64::from(seed)))).collect();
        let mean = values.iter().sum::<f64>() / f64::from(n);
        let error = (values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / f64::from(n * (n - 1))).sqrt();
        let target = self_tensored_mean(&pair, 4, 8);
        assert!((mean - target).abs() < 5.0 * error, "{mean} ± {error}, {target}");
        assert!(mean - pair.xy.powi(4) > 5.0 * error, "the bias shows");
        // The same pair, ten thirds as long on both sides: the known values of the documentation page.
        let known = Pair::of(&[1.0, 2.0], &[3.0, 1.0]);
        assert!((self_tensored_mean(&known, 4, 8) - 1796.875).abs() < 1e-9);
        assert!((self_tensored_mean(&known, 8, 8) - 9_004_974.365).abs() < 1e-2);
    }

    #[test]
    fn the_published_scaling_divides_by_the_squared_size() {
        let (x, y) = ([0.3, 0.6, -0.2], [0.9, 0.3, 0.4]);
        let base = Options::new().with("features", 6usize).with("seed", 4u64);
        let (a, b) = (kernel_of(&x, &y, &base), kernel_of(&x, &y, &base.with("scaling", "reference_code")));
        assert!((a / b / 36.0 - 1.0).abs() < 1e-9, "{a} {b}");
    }

    #[test]
    fn the_error_falls_with_the_size_of_the_sketch() {
        let x = Case::gaussian(Problem::new(1, 64, 4), 5);
        let options = Options::new().with("degree", 4usize).with("alpha", 0.0);
        let exact = run_method(polynomial(), &options.clone().with("layer_norm", true).with("c0", 1.0), &x).0;
        let size: f64 = exact.iter().map(|e| e * e).sum();
        let error = |features: usize| {
            let total: f64 = (0..6u64)
                .map(|seed| {
                    let o = options.clone().with("features", features).with("seed", seed);
                    let got = run_method(&super::METHOD, &o, &x).0;
                    got.iter().zip(&exact).map(|(a, b)| (a - b) * (a - b)).sum::<f64>()
                })
                .sum();
            (total / 6.0 / size).sqrt()
        };
        let errors: Vec<f64> = [4, 16, 64].map(error).to_vec();
        assert!(errors[1] < 0.75 * errors[0] && errors[2] < 0.75 * errors[1], "{errors:?}");
    }

    #[test]
    fn the_defaults_are_closer_to_their_kernel_and_to_softmax_than_zero() {
        let p = Problem::new(1, 512, 64);
        for (p, own, softmax) in [(p, 0.75, 0.9), (p.causal(), 0.3, 0.7)] {
            let x = Case::gaussian(p, 100);
            let got = run_method(&super::METHOD, &Options::new(), &x).0;
            let shared = Options::new().with("alpha", super::Params::default().alpha).with("c0", 1.0);
            let kernel = run_method(polynomial(), &shared.with("layer_norm", true), &x).0;
            let exact = run_method(crate::registry::method("exact").unwrap(), &Options::new(), &x).0;
            let errors = [&kernel, &exact].map(|want| crate::metrics::relative_frobenius(&got, want));
            assert!(errors[0] < own && errors[1] < softmax, "{errors:?}");
        }
    }

    #[test]
    fn weights_are_positive_and_sum_to_less_than_one() {
        for local in [false, true] {
            let mut x = Case::gaussian(Problem::new(1, 100, 6).causal(), 6);
            x.v.fill(1.0);
            let options = Options::new().with("block", 16usize).with("local_exact", local);
            let o = run_method(&super::METHOD, &options, &x).0;
            assert!(o.iter().all(|&o| o > 0.0 && o < 1.0));
        }
    }

    #[test]
    fn high_degrees_of_long_rows_are_finite_in_single_precision() {
        for p in [Problem::new(1, 70, 8), Problem::new(1, 70, 8).causal()] {
            let mut x = Case::gaussian(p, 7);
            x.k.iter_mut().chain(&mut x.q).for_each(|x| *x *= 1e3);
            for local in [false, true] {
                let options = Options::new()
                    .with("degree", 16usize)
                    .with("layer_norm", false)
                    .with("block", 8usize)
                    .with("local_exact", local);
                let o = run_method(&super::METHOD, &options, &x.clone().cast_f32()).0;
                assert!(o.iter().all(|o| o.is_finite()) && o.iter().any(|o| *o != 0.0));
            }
        }
    }

    #[test]
    fn a_run_tells_its_bias() {
        let x = Case::gaussian(Problem::new(1, 40, 8), 8);
        let bias = |features: usize| {
            let plan = super::METHOD.plan(&x.problem, &Options::new().with("features", features)).unwrap();
            run_with(&*plan, &x, crate::testkit::How { lse: false, ..Default::default() })
                .unwrap()
                .info
                .figures["self_tensoring_bias"]
        };
        assert!(bias(16) > bias(64) && bias(64) > 0.0);
    }

    #[test]
    fn the_needed_size_gives_the_error_asked_for() {
        let x = Case::gaussian(Problem::new(1, 40, 8), 9);
        let figures = |features: usize| {
            let o = Options::new().with("features", features).with("target_error", 0.3).with("alpha", 0.0);
            let plan = super::METHOD.plan(&x.problem, &o).unwrap();
            let how = crate::testkit::How { lse: false, ..Default::default() };
            run_with(&*plan, &x, how).unwrap().info.figures
        };
        let needed = figures(16)["features_needed"];
        let sd = |r: f64| figures(r as usize)["predicted_rel_sd"];
        assert!(sd(needed) <= 0.3 && sd(needed - 1.0) > 0.3, "{needed}");
        // The mean of the kernel over seeds has the reported bias.
        let reported = figures(16)["self_tensoring_bias"];
        assert!((reported.sqrt() - sd(16.0)).abs() < 1e-12);
    }
}
