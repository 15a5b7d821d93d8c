//! Exact polynomial attention: an even power of the inner product in place of its exponential.
//!
//! **Idea.** $\kappa(q, k) = ((\tau\langle q, k\rangle + \alpha)/\beta)^p$ grows fast enough for selective attention
//! and has a finite feature map, so at low degrees the sum over keys is a matrix of fixed size.
//!
//! **Math.** $o_i = \sum_j \kappa(q_i, k_j) v_j / (c_0 + \sum_j \kappa(q_i, k_j))$, where $\tau$ is the problem's
//! scale. The direct form computes weights $(t/t^*)^p$ with $t = |\tau\langle q, k\rangle + \alpha|/\beta$ and $t^*$
//! the running maximum of the row, and $c_0$ enters as $c_0 t^{*-p}$. At $p = 2$ the features are the symmetric square
//! of $[\sqrt{\tau} x; \sqrt\alpha]$, $m = d'(d'+1)/2$ of them; at $p = 4$ and $d' \le 16$ all monomials,
//! $m = \binom{d'+3}{4}$. With $c_0 > 0$ the weights of a row sum to less than one. Only even powers are allowed: odd
//! ones have negative weights.
//!
//! **Reference.** kacham2024; the limits in $p$ follow the corrected survey: with $c_0 = 1$, $p \to \infty$ and
//! $\mu = \max_j |t_{ij}|$, a row becomes hardmax for $\mu > 1$, $1/(1 + |S|)$ on the maximisers $S$ for $\mu = 1$, and zero for
//! $\mu < 1$.
//!
//! **Cost.** Directly $2 n_q n_k (d + d_v)$; with features $4 n\, m\, d_v$ and a state of $m (d_v + 1)$ numbers. `form = auto`
//! takes the cheaper one.
//!
//! **Guarantees.** Both forms equal the kernel up to rounding (tested). Weights are non-negative; $q \to -q$ changes
//! nothing where $\alpha = 0$. It does not approximate softmax.
//!
//! **When to use.** In models trained with it, and as the reference that `polysketch`, `tensor_sketch` and `lev`
//! approximate.

use crate::engine::poly_state::{
    Form, Guard, HalfSketch, PowerKernel, Prepare, Signed, SketchAttention, SketchStream, UnitRows,
};
use crate::group::{Group, GroupIndex, GroupPlan, GroupStream};
use crate::method::{
    Accepted, Claims, Cost, Family, Method, Needs, Promise, RunInfo, Spec, Support, Withdrawn,
};
use crate::workspace::Context;
use crate::{Error, Mask, MatRef, Problem, Real, Result, Spread};
use attlas_num::sketch::features::MapOptions;
use attlas_num::sketch::polynomial::ExactPolynomial;

/// Registry entry.
pub static METHOD: Method = Method {
    id: "polynomial",
    family: Family::Kernel,
    title: "Exact polynomial attention",
    reference: "kacham2024",
    claims: Claims {
        decode: true,
        row_stochastic: true,
        softmax: false,
        lse: false,
        needs: Needs::Training,
        withdrawn: &[Withdrawn {
            param: "c0",
            value: "*",
            promise: Promise::RowStochastic,
            reason: "a constant added to the normaliser makes weights sum to less than one",
        }],
        spread: Spread::Scan { block: Some("block") },
        ..Claims::BASE
    },
    probes: &[
        &[("degree", "2"), ("form", "features"), ("alpha", "0.5"), ("block", "16")],
        &[("degree", "4"), ("form", "features"), ("block", "32")],
        &[("degree", "2"), ("form", "features"), ("beta", "2")],
        &[("degree", "8"), ("form", "direct"), ("layer_norm", "true"), ("alpha", "1")],
        &[("degree", "2"), ("c0", "1")],
    ],
    ..Method::of::<Params>()
};

crate::params! {
    /// Parameters of [`Polynomial`].
    pub struct Params {
        /// Degree of the power, even.
        degree: usize = 4, in 2..=64;
        /// Constant added to the scaled inner product.
        alpha: f64 = 0.0, in 0.0..=1e6;
        /// Divisor of the scaled inner product plus alpha.
        beta: f64 = 1.0, in 1e-6..=1e6;
        /// Constant added to the normaliser; 1 in PolySketchFormer. Above 0, constant values are not reproduced.
        c0: f64 = 0.0, in 0.0..=1e6;
        /// Layer-normalise queries and keys first, without gain.
        layer_norm: bool = false;
        /// Form of the sum over keys: direct, or through features.
        form: Arrangement = Arrangement::Auto;
        /// Keys per block within which the causal form with features is direct.
        block: usize = 256, in 1..=1 << 20;
    }
}

impl Spec for Params {
    const METHOD: &'static Method = &METHOD;

    fn supports(&self, p: &Problem) -> Support {
        let wanted = self.form == Arrangement::Features;
        Support::unless(
            wanted && self.map(p).is_none(),
            "features need degree 2, or degree 4 with d of at most 16, and a positive scale",
        )
    }

    fn build(self, x: Accepted<'_>) -> Result<impl GroupPlan> {
        Polynomial::new(x.problem, self)
    }
}

crate::choices! {
    /// Form of the sums over keys.
    pub enum Arrangement {
        /// The cheaper one by counted work.
        Auto = "auto",
        /// Every query reads every key.
        Direct = "direct",
        /// A state of monomials.
        Features = "features",
    }
}

/// ε of the layer normalisation.
const EPS: f64 = 1e-5;

/// Maximum row width for monomials of degree 4.
const QUARTIC_WIDTH: usize = 16;

/// The feature map of a low degree.
#[derive(Clone, Debug)]
enum Map {
    Square(UnitRows),
    Quartic(Signed<ExactPolynomial>),
}

impl Map {
    fn form(&self) -> Form {
        match self {
            Map::Square(_) => Form::Squared,
            Map::Quartic(_) => Form::Direct,
        }
    }
}

impl<T: Real> HalfSketch<T> for Map {
    fn width(&self) -> usize {
        match self {
            Map::Square(map) => HalfSketch::<T>::width(map),
            Map::Quartic(map) => HalfSketch::<T>::width(map),
        }
    }

    fn sketch_into(&self, x: MatRef<'_, T>, cx: Context<'_>, out: &mut [T], log: &mut [f64]) {
        match self {
            Map::Square(map) => map.sketch_into(x, cx, out, log),
            Map::Quartic(map) => map.sketch_into(x, cx, out, log),
        }
    }
}

impl Params {
    fn kernel(&self, p: &Problem) -> PowerKernel {
        PowerKernel { scale: p.scale / self.beta, shift: self.alpha / self.beta, power: self.degree as f64 }
    }

    fn prepare(&self) -> Prepare {
        if self.layer_norm { Prepare::LayerNorm(EPS) } else { Prepare::Copy }
    }

    /// Returns the feature map, if the degree has one of a reasonable size.
    fn map(&self, p: &Problem) -> Option<Map> {
        let PowerKernel { scale, shift, power } = self.kernel(p);
        let width = p.d + usize::from(shift > 0.0);
        if scale <= 0.0 {
            return None;
        }
        match self.degree {
            2 => Some(Map::Square(UnitRows { d: p.d, scale, shift, power })),
            4 if width <= QUARTIC_WIDTH => {
                let options = MapOptions { scale, ..MapOptions::default() };
                ExactPolynomial::new(p.d, 4, shift, options).ok().map(|map| Map::Quartic(Signed(map)))
            }
            _ => None,
        }
    }
}

/// The plan: the kernel, and its feature map if there is one.
#[derive(Clone, Debug)]
pub struct Polynomial {
    params: Params,
    kernel: PowerKernel,
    map: Option<Map>,
}

impl Polynomial {
    /// Creates a plan with these parameters.
    pub(crate) fn new(problem: &Problem, params: Params) -> Result<Self> {
        params.validate()?;
        if !params.degree.is_multiple_of(2) {
            return Err(Error::param(
                "degree",
                params.degree,
                "an even number: odd powers have negative weights",
            ));
        }
        let map = params.map(problem).filter(|_| params.form != Arrangement::Direct);
        Ok(Self { kernel: params.kernel(problem), map, params })
    }

    /// Returns the number of features; 0 without a map.
    fn features(&self) -> usize {
        self.map.as_ref().map_or(0, |map| map.form().features(HalfSketch::<f64>::width(map)))
    }

    /// Returns the map, if the form uses it for this number of keys.
    fn map_for(&self, n_k: usize, mask: Mask, d: usize, d_v: usize) -> Option<&Map> {
        let seen = if mask == Mask::Causal { n_k / 2 } else { n_k };
        let pays = seen * (d + d_v) > 3 * self.features() * (d_v + 1);
        self.map.as_ref().filter(|_| pays || self.params.form == Arrangement::Features)
    }

    fn through<'a, T: Real>(&self, map: &'a Map) -> SketchAttention<'a, T> {
        SketchAttention {
            map,
            form: map.form(),
            near: Some(self.kernel),
            c0: self.params.c0,
            block: self.params.block,
            prepare: self.params.prepare(),
            guard: Guard::Strict,
        }
    }
}

impl GroupPlan for Polynomial {
    fn cost(&self, p: &Problem) -> Cost {
        let pairs = p.visible_pairs();
        let rows = (p.batch * p.n_heads * p.n_q) as u64;
        let keys = (p.batch * p.n_kv_heads * p.n_k) as u64;
        let bytes = 4 * (rows + keys) * (p.d + p.d_v) as u64;
        if self.map_for(p.n_k, p.mask, p.d, p.d_v).is_none() {
            return Cost { setup_flops: 0, run_flops: pairs * (2 * (p.d + p.d_v) + 8) as u64, bytes };
        }
        let state = (2 * self.features() * (p.d_v + 1)) as u64;
        let near = if p.mask == Mask::Causal { self.params.block.min(p.n_k) * (p.d + p.d_v) } else { 0 };
        Cost { setup_flops: keys * state, run_flops: rows * (state + near as u64), bytes }
    }

    fn has_lse(&self) -> bool {
        false
    }

    fn run<T: Real>(&self, mut g: Group<'_, T>) -> Result<RunInfo> {
        let (k, prepare, cx) = (g.k, self.params.prepare(), g.cx);
        let mut prepared = cx.scratch.take::<T>(if self.params.layer_norm { k.rows() * k.cols() } else { 0 });
        let k = if self.params.layer_norm {
            prepare.par_apply_into(k, &mut prepared);
            MatRef::new(&prepared, k.rows(), k.cols())
        } else {
            k
        };
        match self.map_for(k.rows(), g.mask, k.cols(), g.d_v()) {
            Some(map) => {
                let through = self.through(map);
                let cached = through.state_len(g.d_v()) + self.params.block * (k.cols() + g.d_v());
                let figures = [("decode_bytes", (cached * size_of::<T>()) as f64)].into();
                let info = through.run(&mut g, k)?;
                // The features are exact: rows counted by the guard of sketches are no fallbacks here.
                Ok(RunInfo { fallback_rows: 0, figures, ..info })
            }
            None => self.kernel.attend_group(&mut g, k, self.params.c0, prepare),
        }
    }

    fn stream<T: Real>(&self, p: &Problem, index: GroupIndex) -> Option<Box<dyn GroupStream<T>>> {
        Some(match &self.map {
            Some(map) => Box::new(SketchStream::new(&self.through::<T>(map), map.clone(), p.d, p.d_v)),
            None => Box::new(PreparedStream {
                plan: self.clone(),
                d: p.d,
                d_v: p.d_v,
                k: Vec::new(),
                v: Vec::new(),
                index,
            }),
        })
    }
}

/// All keys and values, for powers without a small feature map.
#[derive(Debug)]
struct PreparedStream<T> {
    plan: Polynomial,
    d: usize,
    d_v: usize,
    k: Vec<T>,
    v: Vec<T>,
    index: GroupIndex,
}

impl<T: Real> GroupStream<T> for PreparedStream<T> {
    fn push(&mut self, k: MatRef<'_, T>, v: MatRef<'_, T>, _: Context<'_>) -> Result<()> {
        let start = self.k.len();
        self.k.resize(start + k.rows() * self.d, T::ZERO);
        self.plan.params.prepare().apply_into(k, &mut self.k[start..]);
        v.iter_rows().for_each(|v| self.v.extend_from_slice(v));
        Ok(())
    }

    fn attend(
        &mut self,
        q: MatRef<'_, T>,
        scale: T,
        out: &mut [T],
        lse: &mut [T],
        cx: Context<'_>,
    ) -> Result<RunInfo> {
        let n = self.v.len() / self.d_v;
        let (k, v) = (MatRef::new(&self.k, n, self.d), MatRef::new(&self.v, n, self.d_v));
        let mut g = Group::decode(q, k, v, scale, out, lse, self.index, cx)?;
        let Polynomial { kernel, params, .. } = &self.plan;
        kernel.attend_group(&mut g, k, params.c0, params.prepare())
    }

    fn state_bytes(&self) -> usize {
        (self.k.len() + self.v.len()) * size_of::<T>()
    }
}

#[cfg(test)]
mod tests {
    use crate::testkit::{Case, assert_rows_close, check_method, run_method};
    use crate::{Mask, Options, Problem};

    #[test]
    fn honours_the_contract() {
        check_method(&super::METHOD);
    }

    fn small(q: &[f64], k: &[f64], v: &[f64], d: usize) -> Case {
        let p = Problem { d_v: 1, scale: 1.0, ..Problem::new(1, 1, d).with_lens(q.len() / d, k.len() / d) };
        Case { q: q.to_vec(), k: k.to_vec(), v: v.to_vec(), ..Case::gaussian(p, 0) }
    }

    /// The kernel by its definition.
    fn by_definition(x: &Case, alpha: f64, beta: f64, degree: i32, c0: f64) -> Vec<f64> {
        let p = &x.problem;
        let mut o = vec![0.0; p.n_heads * p.n_q * p.d_v];
        for (row, out) in o.chunks_exact_mut(p.d_v).enumerate() {
            let (h, i) = (row / p.n_q, row % p.n_q);
            let kv = h / p.group_size();
            let q = &x.q[row * p.d..(row + 1) * p.d];
            let mut den = c0;
            for j in 0..p.n_k {
                if p.mask == Mask::Causal && j + p.n_q > i + p.n_k {
                    continue;
                }
                let k = &x.k[(kv * p.n_k + j) * p.d..][..p.d];
                let dot: f64 = q.iter().zip(k).map(|(a, b)| a * b).sum();
                let w = ((p.scale * dot + alpha) / beta).powi(degree);
                den += w;
                let v = &x.v[(kv * p.n_k + j) * p.d_v..][..p.d_v];
                out.iter_mut().zip(v).for_each(|(o, v)| *o += w * v);
            }
            out.iter_mut().for_each(|o| *o = if den > 0.0 { *o / den } else { 0.0 });
        }
        o
    }

    #[test]
    fn known_answers_with_and_without_the_constant() {
        let x = small(&[1.0, 0.0], &[1.0, 0.0, 2.0, 0.0, 0.0, 3.0], &[1.0, 10.0, 100.0], 2);
        for form in ["direct", "features"] {
            for (degree, c0, want) in
                [(2, 0.0, 8.2), (2, 1.0, 41.0 / 6.0), (4, 0.0, 161.0 / 17.0), (4, 1.0, 161.0 / 18.0)]
            {
                let options = Options::new().with("degree", degree).with("c0", c0).with("form", form);
                let (o, _) = run_method(&super::METHOD, &options, &x);
                assert!((o[0] - want).abs() < 1e-13, "{form} {degree} {c0}: {}", o[0]);
            }
        }
    }

    #[test]
    fn both_forms_are_the_kernel_for_all_masks_and_blocks() {
        for (n_q, n_k) in [(1, 1), (2, 2), (63, 63), (203, 203), (20, 91), (91, 20)] {
            for causal in [false, true] {
                let p = Problem { d_v: 5, ..Problem::new(4, 1, 6).with_lens(n_q, n_k).with_kv_heads(2) };
                let x = Case::gaussian(if causal { p.causal() } else { p }, 3);
                for (degree, alpha, beta, c0) in [(2, 0.0, 1.0, 0.0), (2, 0.7, 2.0, 1.0), (4, 0.4, 1.5, 0.5)]
                {
                    let want = by_definition(&x, alpha, beta, degree, c0);
                    for (form, block) in [
                        ("direct", 64),
                        ("features", 1),
                        ("features", 7),
                        ("features", 64),
                        ("features", 500),
                    ] {
                        let options = Options::new()
                            .with("degree", degree as usize)
                            .with("alpha", alpha)
                            .with("beta", beta)
                            .with("c0", c0)
                            .with("form", form)
                            .with("block", block as usize);
                        let (o, _) = run_method(&super::METHOD, &options, &x);
                        assert_rows_close(
                            &o,
                            &want,
                            1e-11,
                            &format!("{form} {block} {degree} {n_q}×{n_k} {causal}"),
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn turning_all_queries_changes_nothing() {
        let x = Case::gaussian(Problem::new(1, 50, 8), 4);
        let turned = Case { q: x.q.iter().map(|q| -q).collect(), ..x.clone() };
        for degree in [2usize, 4, 6] {
            let options = Options::new().with("degree", degree);
            let (a, b) =
                (run_method(&super::METHOD, &options, &x), run_method(&super::METHOD, &options, &turned));
            assert_rows_close(&a.0, &b.0, 1e-14, "q and −q");
        }
    }

    #[test]
    fn high_powers_tend_to_the_corrected_limits() {
        let run = |k: &[f64], v: &[f64]| {
            let options = Options::new().with("degree", 64usize).with("c0", 1.0);
            run_method(&super::METHOD, &options, &small(&[1.0], k, v, 1)).0[0]
        };
        // μ > 1: hardmax, by the absolute value.
        assert!((run(&[-2.0, 1.5, 0.3], &[7.0, 1.0, 1.0]) - 7.0).abs() < 1e-6);
        // μ = 1, two maximisers: each 1/(1 + 2).
        assert!((run(&[1.0, -1.0, 0.5], &[3.0, 6.0, 100.0]) - 3.0).abs() < 1e-12);
        // μ < 1: nothing is left.
        assert!(run(&[0.5, 0.3], &[1e6, 1e6]) < 1e-6);
    }

    #[test]
    fn a_power_of_zero_with_the_constant_is_one_over_n_plus_one() {
        use crate::engine::poly_state::{KeyTile, PowerKernel, augment_into, finish_row};
        use crate::{MatRef, Workspace};
        let (k, v) = ([1.0, 2.0, -3.0], [1.0; 3]);
        let mut augmented = [0.0; 6];
        augment_into(MatRef::new(&v, 3, 1), &mut augmented);
        let kernel = PowerKernel { scale: 1.0, shift: 0.0, power: 0.0 };
        let tile = KeyTile {
            k: MatRef::new(&k, 3, 1),
            v: MatRef::new(&v, 3, 1),
            augmented: MatRef::new(&augmented, 3, 2),
            spoiled: &[],
        };
        let (mut acc, mut top, mut out) = ([0.0; 2], [0.0], [0.0]);
        let ws = Workspace::single().unwrap();
        kernel.add_tile(MatRef::new(&[1.0], 1, 1), tile, |_| 0..3, &mut acc, &mut top, ws.context());
        finish_row(&acc, kernel.log_scale(&acc, top[0]), 1.0, &mut out);
        // Three equal weights, and that of the constant.
        assert!((out[0] - 3.0 / 4.0f64).abs() < 1e-15);
    }

    #[test]
    fn huge_rows_neither_overflow_nor_lose_the_constant() {
        for single in [false, true] {
            for (degree, form) in [(8usize, "direct"), (2, "features"), (64, "direct")] {
                let x = small(&[1e5, 0.0], &[1e5, 0.0, 2e5, 0.0], &[1.0, 2.0], 2);
                let x = if single { x.cast_f32() } else { x };
                let options = Options::new().with("degree", degree).with("form", form).with("c0", 1.0);
                let (o, _) = run_method(&super::METHOD, &options, &x);
                let w = 0.5f64.powi(degree as i32);
                assert!((o[0] - (w + 2.0) / (w + 1.0)).abs() < 1e-5, "{degree} {form}: {}", o[0]);
            }
        }
    }

    #[test]
    fn odd_powers_are_refused() {
        let p = Problem::new(1, 8, 4);
        assert!(super::METHOD.plan(&p, &Options::new().with("degree", 3usize)).is_err());
        let wide = Options::new().with("degree", 6usize).with("form", "features");
        assert!(super::METHOD.plan(&p, &wide).is_err());
    }
}
