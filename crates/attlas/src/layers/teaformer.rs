//! TEAFormer: tensor-valued time series, projected mode by mode, attended to over time.
//!
//! **Idea.** Each time step is a tensor $\mathcal{X}_t \in \mathbb{R}^{D_1 \times \cdots \times D_M}$; projections are
//! products with one small matrix per mode instead of one large matrix on the flattened step.
//!
//! **Math.** Compression $\mathcal{Y}_t = \mathcal{X}_t \times_1 U_1^\top \cdots \times_M U_M^\top$ to $P_1 \times \cdots
//! \times P_M$. Head $h$: $\mathcal{Q}_t = \mathcal{Y}_t \times_m (U_m^{Q,h})^\top \in \mathbb{R}^{p_1 \times \cdots \times
//! p_M}$, keys and values likewise; attention over time with scale $1/\sqrt{\prod p_m}$. Heads are concatenated along the
//! first mode ($H p_1 \times p_2 \cdots$) and go back with $\times_m W_m$. Several `views`, independent sets of factors,
//! are averaged. It equals multi-head attention on the flattened steps with Kronecker products as weights.
//!
//! **Reference.** kong2024. The order of the paper's layers could not be verified; this is compression, mode-wise
//! projections and attention.
//!
//! **Cost.** A projection takes $2 \sum_m (\prod_{l \le m} P_l)(\prod_{l \ge m} D_l)$ operations instead of
//! $2 \prod D \prod P$, and $\sum_m D_m P_m$ parameters; attention $4 T^2 \prod p$ per head. The cache holds $2 \prod
//! p$ numbers per head, view and step.
//!
//! **Guarantees.** Equal to the flattened layer with Kronecker weights; tested here.
//!
//! **When to use.** Series of matrices or tensors (sensors × quantities × places).

use super::common::fold::attend;
use super::common::rows::{HeadRows, KeyValues, head_of, interleave};
use super::common::{check_cross, check_io, check_shape, layer_kind, matrix, needed, own, take};
use crate::layer::{Layer, LayerCache, LayerShape, Linear, WeightSpec, Weights};
use crate::params::Sizes;
use crate::workspace::Context;
use crate::{Cost, Error, Mask, Mat, MatRef, Problem, Real, Result, RunInfo, Workspace};
use attlas_num::kernels::{Band, Op, gemm};
use attlas_num::par::*;

layer_kind! {
    /// Registry entry.
    Teaformer {
        id: "teaformer",
        title: "TEAFormer: tensor-augmented attention over time",
        reference: "kong2024",
        weights: weight_specs,
        cache_elements: |s, p| Ok(p.views * s.n_heads * (s.d + s.d_v)),
    }
}

crate::params! {
    /// Parameters of [`Teaformer`].
    pub struct Params {
        /// Sizes of one step, at most four modes; their product is the width of hidden states.
        dims: Sizes = Sizes(vec![8, 8]), in 1..=1 << 20;
        /// Sizes after compression (or expansion).
        core: Sizes = Sizes(vec![4, 4]), in 1..=1 << 20;
        /// Sizes of a head's queries, keys and values; their product is the width of a head.
        head: Sizes = Sizes(vec![2, 2]), in 1..=1 << 20;
        /// Independent sets of factors that are averaged.
        views: usize = 1, in 1..=16;
    }
}

const U: [&str; 4] = ["u.0", "u.1", "u.2", "u.3"];
const QKV: [[&str; 4]; 3] =
    [["q.0", "q.1", "q.2", "q.3"], ["k.0", "k.1", "k.2", "k.3"], ["v.0", "v.1", "v.2", "v.3"]];
const O: [&str; 4] = ["o.0", "o.1", "o.2", "o.3"];

fn weight_specs(s: &LayerShape, p: &Params) -> Result<Vec<WeightSpec>> {
    check_shape(s)?;
    let m = p.dims.0.len();
    let mut reasons = Vec::new();
    if m == 0 || m > U.len() || p.core.0.len() != m || p.head.0.len() != m {
        reasons.push("dims, core and head must have the same number of modes, one to four".to_string());
    } else {
        if p.dims.product() != Some(s.d_model) {
            reasons.push(format!(
                "dims {:?} must multiply to the width of hidden states, {}",
                p.dims.0, s.d_model
            ));
        }
        if p.head.product() != Some(s.d) || s.d_v != s.d {
            reasons.push(format!(
                "head {:?} must multiply to the width of a head, {} and {}",
                p.head.0, s.d, s.d_v
            ));
        }
        if s.n_kv_heads != s.n_heads {
            reasons.push("every query head needs keys of its own".into());
        }
    }
    if !reasons.is_empty() {
        return Err(Error::Unsupported { method: LAYER.id.into(), reasons });
    }
    let (dims, core, head) = (&p.dims.0, &p.core.0, &p.head.0);
    let mut list = Vec::new();
    for i in 0..m {
        list.push(needed(U[i], p.views * core[i], dims[i]));
        for names in &QKV {
            list.push(needed(names[i], p.views * s.n_heads * head[i], core[i]));
        }
        list.push(needed(O[i], p.views * dims[i], if i == 0 { s.n_heads * head[0] } else { head[i] }));
    }
    Ok(list)
}

/// The factors of one view.
#[derive(Debug)]
struct View {
    u: Vec<Mat<f32>>,
    /// Queries, keys, values; head by head.
    qkv: [Vec<Vec<Mat<f32>>>; 3],
    o: Vec<Mat<f32>>,
}

/// The TEAFormer layer.
#[derive(Debug)]
pub struct Teaformer {
    shape: LayerShape,
    params: Params,
    views: Vec<View>,
    parameters: usize,
}

impl Teaformer {
    /// Makes the layer from its weights: for each mode `m`, `u.m` (views × core), `q.m`, `k.m`, `v.m` (views × heads ×
    /// head) and `o.m` (views × dims), as maps of that mode.
    pub fn new(shape: LayerShape, params: Params, mut weights: Weights) -> Result<Self> {
        params.validate()?;
        weight_specs(&shape, &params)?;
        let modes = params.dims.0.len();
        let mut parameters = 0;
        let mut read = |name: &str| -> Result<Mat<f32>> {
            let w: Box<dyn Linear> = take(&mut weights, name)?;
            parameters += w.parameters();
            Ok(matrix(&*w))
        };
        let u = U[..modes].iter().map(|n| read(n)).collect::<Result<Vec<_>>>()?;
        let mut qkv = Vec::new();
        for names in &QKV {
            qkv.push(names[..modes].iter().map(|n| read(n)).collect::<Result<Vec<_>>>()?);
        }
        let o = O[..modes].iter().map(|n| read(n)).collect::<Result<Vec<_>>>()?;
        let cut = |w: &Mat<f32>, parts: usize, part: usize| {
            let rows = w.rows() / parts;
            w.as_ref().sub_rows(part * rows..(part + 1) * rows).to_mat()
        };
        let views = (0..params.views)
            .map(|view| {
                let of = |list: &[Mat<f32>]| -> Vec<Mat<f32>> {
                    list.iter().map(|w| cut(w, params.views, view)).collect()
                };
                let heads = |list: &[Mat<f32>]| -> Vec<Vec<Mat<f32>>> {
                    let whole = of(list);
                    (0..shape.n_heads)
                        .map(|h| whole.iter().map(|w| cut(w, shape.n_heads, h)).collect())
                        .collect()
                };
                View { u: of(&u), qkv: [heads(&qkv[0]), heads(&qkv[1]), heads(&qkv[2])], o: of(&o) }
            })
            .collect();
        Ok(Self { shape, params, views, parameters })
    }

    /// Runs one view over the new steps; returns outputs and visited pairs.
    fn view(
        &self,
        view: &View,
        x: &[f32],
        context: Option<&[f32]>,
        cache: &mut (HeadRows, HeadRows),
        causal: bool,
        cx: Context<'_>,
    ) -> Vec<f32> {
        let (s, p) = (&self.shape, &self.params);
        let steps = x.len() / s.d_model.max(1);
        let project = |y: &[f32], heads: &[Vec<Mat<f32>>]| -> Vec<Vec<f32>> {
            heads.par_iter().map(|factors| mode_products(y, &p.core.0, factors, cx)).collect()
        };
        let own = mode_products(x, &p.dims.0, &view.u, cx);
        let q = project(&own, &view.qkv[0]);
        let y = context.map_or(own, |c| mode_products(c, &p.dims.0, &view.u, cx));
        let [k, v] = [1, 2].map(|i: usize| project(&y, &view.qkv[i]));
        let first = cache.0.len();
        for h in 0..s.n_heads {
            cache.0.append_to(h, &k[h]);
            cache.1.append_to(h, &v[h]);
        }
        let band = if causal { Band::causal(first as isize) } else { Band::ALL };
        let scale = (1.0 / (s.d as f64).sqrt()) as f32;
        let heads: Vec<Vec<f32>> = (0..s.n_heads)
            .into_par_iter()
            .map(|h| {
                attend(
                    head_of(&q[h], steps, 1, s.d, 0),
                    cache.0.head(h),
                    cache.1.head(h),
                    scale,
                    None,
                    band,
                    cx,
                )
                .0
            })
            .collect();
        // Heads after one another are the first mode, H p₁ long.
        let joined = interleave(&heads, steps, s.d);
        let mut sizes = p.head.0.clone();
        sizes[0] *= s.n_heads;
        mode_products(&joined, &sizes, &view.o, cx)
    }

    fn empty(&self) -> Vec<(HeadRows, HeadRows)> {
        let s = &self.shape;
        let one = || (HeadRows::new(s.n_heads, s.d), HeadRows::new(s.n_heads, s.d_v));
        self.views.iter().map(|_| one()).collect()
    }

    fn run(
        &self,
        x: MatRef<'_, f32>,
        context: Option<MatRef<'_, f32>>,
        cache: &mut [(HeadRows, HeadRows)],
        causal: bool,
        out: &mut [f32],
        cx: Context<'_>,
    ) {
        let flat = x.to_mat();
        let other = context.map(|c| c.to_mat());
        out.fill(0.0);
        for (view, cache) in self.views.iter().zip(cache) {
            let y = self.view(view, flat.data(), other.as_ref().map(Mat::data), cache, causal, cx);
            out.iter_mut().zip(y).for_each(|(o, y)| *o += y / self.params.views as f32);
        }
    }
}

/// Multiplies every step of `x` (`[steps, sizes…]`, row-major) along each mode by `factors[m]` (`new × old`).
pub fn mode_products<T: Real>(x: &[T], sizes: &[usize], factors: &[Mat<T>], cx: Context<'_>) -> Vec<T> {
    let mut sizes = sizes.to_vec();
    let mut x = x.to_vec();
    for (m, f) in factors.iter().enumerate() {
        let (size, inner): (usize, usize) = (sizes[m], sizes[m + 1..].iter().product());
        let blocks = x.len() / (size * inner).max(1);
        let mut out = vec![T::ZERO; blocks * f.rows() * inner];
        if inner == 1 {
            let x = Op::N(MatRef::new(&x, blocks, size));
            gemm(cx.schedule.isa, T::ONE, x, Op::T(f.as_ref()), T::ZERO, &mut out, f.rows(), cx.scratch);
        } else {
            for (x, out) in x.chunks_exact(size * inner).zip(out.chunks_exact_mut((f.rows() * inner).max(1)))
            {
                let x = Op::N(MatRef::new(x, size, inner));
                gemm(cx.schedule.isa, T::ONE, Op::N(f.as_ref()), x, T::ZERO, out, inner, cx.scratch);
            }
        }
        sizes[m] = f.rows();
        x = out;
    }
    x
}

/// Counts the operations of [`mode_products`] for one step.
fn product_flops(from: &[usize], to: &[usize]) -> u64 {
    let term = |m: usize| to[..=m].iter().product::<usize>() * from[m..].iter().product::<usize>();
    (0..from.len()).map(|m| 2 * term(m) as u64).sum()
}

impl Layer for Teaformer {
    fn shape(&self) -> LayerShape {
        self.shape
    }

    fn parameters(&self) -> usize {
        self.parameters
    }

    fn cache_elements(&self) -> usize {
        self.params.views * self.shape.n_heads * (self.shape.d + self.shape.d_v)
    }

    fn new_cache(&self) -> Box<dyn LayerCache> {
        Box::new(KeyValues(self.empty()))
    }

    fn forward(
        &self,
        x: MatRef<'_, f32>,
        cache: &mut dyn LayerCache,
        out: &mut [f32],
        ws: &mut Workspace,
    ) -> Result<RunInfo> {
        check_io(x, out, self.shape.d_model)?;
        let cache: &mut KeyValues = own(cache, LAYER.id)?;
        let first = cache.len();
        ws.install(|cx| self.run(x, None, &mut cache.0, true, out, cx));
        let heads = self.shape.n_heads * self.params.views;
        let p = Problem::new(heads, 1, 1).with_lens(x.rows(), first + x.rows()).causal();
        Ok(RunInfo::visited(p.visible_pairs()))
    }

    fn forward_all(&self, x: MatRef<'_, f32>, out: &mut [f32], ws: &mut Workspace) -> Result<RunInfo> {
        check_io(x, out, self.shape.d_model)?;
        ws.install(|cx| self.run(x, None, &mut self.empty(), false, out, cx));
        Ok(RunInfo::visited(
            Problem::new(self.shape.n_heads * self.params.views, x.rows(), 1).visible_pairs(),
        ))
    }

    fn forward_cross(
        &self,
        x: MatRef<'_, f32>,
        context: MatRef<'_, f32>,
        out: &mut [f32],
        ws: &mut Workspace,
    ) -> Result<RunInfo> {
        check_cross(x, context, out, self.shape.d_model)?;
        ws.install(|cx| self.run(x, Some(context), &mut self.empty(), false, out, cx));
        let p =
            Problem::new(self.shape.n_heads * self.params.views, 1, 1).with_lens(x.rows(), context.rows());
        Ok(RunInfo::visited(p.visible_pairs()))
    }

    fn cost(&self, mask: Mask, cached: usize, tokens: usize) -> Option<Cost> {
        let (s, p) = (&self.shape, &self.params);
        let mut joined = p.head.0.clone();
        joined[0] *= s.n_heads;
        let step = product_flops(&p.dims.0, &p.core.0)
            + 3 * s.n_heads as u64 * product_flops(&p.core.0, &p.head.0)
            + product_flops(&joined, &p.dims.0);
        let problem = Problem { mask, ..Problem::new(s.n_heads, 1, 1) }.with_lens(tokens, cached + tokens);
        let work = tokens as u64 * step + 2 * problem.visible_pairs() * (s.d + s.d_v) as u64;
        let bytes = 4 * ((cached + tokens) * self.cache_elements() + 2 * tokens * s.d_model) as u64;
        Some(Cost { setup_flops: 0, run_flops: p.views as u64 * work, bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::super::common::third::tests::{assert_close as assert_near, fill};
    use super::super::mode_wise;
    use super::super::testing::{
        assert_close, check_causal, forward, forward_all, random, random_layer, weights_from,
    };
    use super::*;
    use crate::Options;
    use attlas_num::linalg::{matmul, matmul_nt};
    use attlas_num::tensor::kronecker;

    const SHAPE: LayerShape = LayerShape { d_model: 24, n_heads: 2, n_kv_heads: 2, d: 4, d_v: 4 };

    fn options() -> Options {
        Options::new().with("dims", "4x6").with("core", "3x5").with("head", "2x2")
    }

    #[test]
    fn keeps_what_every_causal_layer_keeps() {
        check_causal(&LAYER, &SHAPE, &options(), 21);
        check_causal(&LAYER, &SHAPE, &options().with("views", 3), 14);
        let third = Options::new().with("dims", "2x3x4").with("core", "2x2x3").with("head", "2x1x2");
        check_causal(&LAYER, &SHAPE, &third, 14);
    }

    #[test]
    fn mode_products_are_a_kronecker_product_on_the_row_major_vector() {
        let factors = [fill(3, 2, 1, 1.0), fill(2, 4, 2, 1.0), fill(5, 3, 3, 1.0)];
        let x = fill(6, 24, 4, 1.0);
        let ws = Workspace::single().unwrap();
        let got = mode_products(x.data(), &[2, 4, 3], &factors, ws.context());
        let whole = kronecker(&kronecker(&factors[0], &factors[1]), &factors[2]);
        assert_near(&Mat::from_vec(got, 6, 30), &matmul_nt(x.as_ref(), whole.as_ref()), 1e-14);
    }

    #[test]
    fn it_equals_multi_head_attention_with_kronecker_weights() {
        let layer = random_layer(&LAYER, &SHAPE, &options());
        let u = kronecker(&random("u.0", 3, 4), &random("u.1", 5, 6));
        let heads = |name: &str| {
            let (a, b) = (random(&format!("{name}.0"), 4, 3), random(&format!("{name}.1"), 4, 5));
            let parts: Vec<f32> = (0..2)
                .flat_map(|h| {
                    let cut = |w: &Mat<f32>| w.as_ref().sub_rows(2 * h..2 * h + 2).to_mat();
                    matmul(kronecker(&cut(&a), &cut(&b)).as_ref(), u.as_ref()).into_vec()
                })
                .collect();
            Mat::from_vec(parts, 8, 24)
        };
        let o = kronecker(&random("o.0", 4, 4), &random("o.1", 6, 2));
        let weights = weights_from([("q", heads("q")), ("k", heads("k")), ("v", heads("v")), ("o", o)]);
        let plain = mode_wise::LAYER.layer(&SHAPE, &Options::new().with("modes", "30"), weights).unwrap();
        let x = random("x", 30, 24);
        assert_close(&forward(&*layer, &x, &[30]), &forward(&*plain, &x, &[30]));
        assert_close(&forward_all(&*layer, &x), &forward_all(&*plain, &x));
    }

    #[test]
    fn one_mode_and_identity_factors_leave_attention_on_the_raw_vectors() {
        let s = LayerShape { d_model: 6, n_heads: 1, n_kv_heads: 1, d: 6, d_v: 6 };
        let x = random("x", 15, 6);
        for (dims, modes) in [("6", vec![6]), ("2x3", vec![2, 3])] {
            let options = Options::new().with("dims", dims).with("core", dims).with("head", dims);
            let names = [U, QKV[0], QKV[1], QKV[2], O];
            let weights = names
                .iter()
                .flat_map(|n| modes.iter().enumerate().map(|(m, &size)| (n[m], Mat::identity(size))));
            let layer = LAYER.layer(&s, &options, weights_from(weights)).unwrap();
            let ws = Workspace::single().unwrap();
            let plain =
                attend(x.as_ref(), x.as_ref(), x.as_ref(), 1.0 / 6f32.sqrt(), None, Band::ALL, ws.context())
                    .0;
            assert_close(&forward_all(&*layer, &x), &plain);
        }
    }

    #[test]
    fn equal_views_average_to_one() {
        let x = random("x", 15, 24);
        let one = random_layer(&LAYER, &SHAPE, &options());
        let specs = weight_specs(&SHAPE, &Params::from_options(&options()).unwrap()).unwrap();
        let doubled = specs.iter().map(|w| {
            let m = random(w.name, w.n_out, w.n_in);
            (w.name, Mat::from_vec([m.data(), m.data()].concat(), 2 * w.n_out, w.n_in))
        });
        let two = LAYER.layer(&SHAPE, &options().with("views", 2), weights_from(doubled)).unwrap();
        assert_close(&forward(&*two, &x, &[15]), &forward(&*one, &x, &[15]));
    }

    #[test]
    fn counts_are_those_of_the_page_and_sizes_that_do_not_fit_are_refused() {
        let layer = random_layer(&LAYER, &SHAPE, &options());
        let parameters = (4 * 3 + 6 * 5) + 3 * 2 * (3 * 2 + 5 * 2) + (4 * 4 + 2 * 6);
        assert_eq!(layer.parameters(), parameters);
        assert_eq!(layer.cache_elements(), 2 * 2 * 4);
        assert_eq!(product_flops(&[4, 6], &[3, 5]), 2 * (3 * 24 + 15 * 6));
        let at = |n| layer.cost(Mask::None, 0, n).unwrap().run_flops;
        assert_eq!(at(20) - 2 * at(10), 2 * 4 * 100 * 4 * 2);
        for bad in [options().with("dims", "4x5"), options().with("core", "3"), options().with("head", "2x3")]
        {
            assert!((LAYER.weights)(&SHAPE, &bad).is_err());
        }
        assert!((LAYER.weights)(&LayerShape { n_kv_heads: 1, ..SHAPE }, &options()).is_err());
    }
}
