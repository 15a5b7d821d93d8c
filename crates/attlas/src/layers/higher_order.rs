//! Higher-order attention over a grid: one small attention matrix for each mode, combined as a Kronecker product.
//!
//! **Idea.** Data on an $N_1 \times \cdots \times N_k$ grid (images, videos, tables) is attended to by the product (or
//! sum) of one $N_i \times N_i$ matrix per mode instead of one $N \times N$ matrix.
//!
//! **Math.** $\mathcal{V} = \mathcal{X} W_V$; for mode $i$, queries and keys are pooled over all other modes,
//! $\tilde Q^{(i)} = \operatorname{pool}(\mathcal{X} W_Q^{(i)})$, normalised, and $S_h^{(i)} =
//! \operatorname{softmax}(\tilde Q \tilde K^\top / \sqrt d)$. `product`: $\mathcal{O}_h = \mathcal{V}_h \times_1 S_h^{(1)}
//! \cdots \times_k S_h^{(k)}$, that is $(S_h^{(1)} \otimes \cdots \otimes S_h^{(k)})$ on the row-major vector, per head;
//! `sum`: $\sum_i \mathcal{V}_h \times_i S_h^{(i)}$, not divided by $k$. `kernel = linear` replaces each $S$ by
//! $D^{-1} \phi(\tilde Q) \phi(\tilde K)^\top$, where $\phi$ is $\mathrm{elu} + 1$, or the positive random features of the
//! Performer, $m^{-1/2} \exp(\pm\omega_l^\top x - \|x\|^2/2)$ of $x = d^{-1/4} \tilde q$ and $d^{-1/4} \tilde k$, whose products
//! estimate $e^{\tilde q^\top \tilde k/\sqrt d}$ without bias; heads share directions, modes do not.
//!
//! **Reference.** omranpour2025, with the authors' code's separate projections for each mode, sum pooling and layer
//! norm; choromanski2021 for the random features. It could not be verified that the first version of the paper shares
//! projections between modes; `per_mode_qk = false` does. Pooling precedes projection, with the same result at less
//! cost; a bias counts once for each pooled token.
//!
//! **Cost.** $2 N D \sum N_i$ operations to apply, $2 D \sum N_i^2$ for the scores; memory $H \sum N_i^2$; with $m$ features
//! $4 N D m$ per mode. Parameters $(2k + 2) D^2$, or $4 D^2$ with shared projections.
//!
//! **Guarantees.** One mode without norm is multi-head attention; rows of a product sum to 1, of a sum to $k$; random
//! features tend to softmax as their number grows; tested here. There is no causal form: every pooled matrix has summed
//! over the future of the other modes.
//!
//! **When to use.** Tensor-valued inputs whose modes are long.

use super::common::rows::{head_of, interleave};
use super::common::{
    NoCache, Pairs, Rotary, check_io, check_own_keys, check_shape, constant, layer_kind, layer_norm, needed,
    optional, project, refuse, take,
};
use crate::layer::{Layer, LayerCache, LayerShape, Linear, WeightSpec, Weights};
use crate::params::Sizes;
use crate::workspace::Context;
use crate::{Cost, Error, Mask, Mat, MatRef, Real, Result, RunInfo, Workspace};
use attlas_num::kernels::{Op, exp_in_place, gemm, max, softmax_in_place};
use attlas_num::par::*;
use attlas_num::rng::StreamKey;
use attlas_num::sketch::features::{ExpFeatures, Exponent, default_num_features};
use attlas_num::sketch::{Coupling, LogFeatures, MapOptions, Side, draw_directions};

layer_kind! {
    /// Registry entry.
    HigherOrder {
        id: "higher_order",
        title: "Higher-order transformer attention (HOT): Kronecker-factored over a grid",
        reference: "omranpour2025",
        weights: weight_specs,
        cache_elements: |_, _| Ok(0),
        grid: "dims",
    }
}

crate::choices! {
    /// Combination of the modes.
    pub enum Combine {
        /// One after another.
        Product = "product",
        /// Each applied to the input, then added.
        Sum = "sum",
    }
}

crate::choices! {
    /// Pooling of the tokens of the other modes.
    pub enum Pool {
        /// Added.
        Sum = "sum",
        /// Averaged.
        Mean = "mean",
    }
}

crate::choices! {
    /// Treatment of pooled queries and keys.
    pub enum Norm {
        /// Layer norm of each head, with weights where given.
        Layernorm = "layernorm",
        /// Nothing.
        None = "none",
    }
}

crate::choices! {
    /// Conversion of scores into weights.
    pub enum Kernel {
        /// Softmax.
        Softmax = "softmax",
        /// Products of features, so that no matrix is formed.
        Linear = "linear",
    }
}

crate::choices! {
    /// The features of the linear kernel.
    pub enum Map {
        /// elu + 1 of every number.
        Elu = "elu",
        /// Positive random features of the softmax kernel.
        Performer = "performer",
    }
}

crate::params! {
    /// Parameters of [`HigherOrder`].
    pub struct Params {
        /// The grid, slowest mode first; at most four modes.
        dims: Sizes = Sizes(vec![16, 16]), in 1..=1 << 30;
        /// Combination of the modes.
        combine: Combine = Combine::Product;
        /// Pooling of the tokens of the other modes.
        pool: Pool = Pool::Sum;
        /// Treatment of pooled queries and keys.
        qk_norm: Norm = Norm::Layernorm;
        /// Each mode has its own query and key projections, q.0, k.0, q.1, …; otherwise all use q.0 and k.0.
        per_mode_qk: bool = true;
        /// Conversion of scores into weights.
        kernel: Kernel = Kernel::Softmax;
        /// The features of the linear kernel.
        map: Map = Map::Elu;
        /// Random features of a token, rounded up to an even number; auto is d ln d, rounded up to a multiple of 8.
        features: Option<usize> = None, in 1..=1 << 20;
        /// Stream of the random features.
        seed: u64 = 0, in 0..=u64::MAX;
        /// Rotary positions along each mode.
        rope: Pairs = Pairs::None;
        /// Base of the rotation frequencies.
        rope_base: f64 = 10_000.0, in 1.0..=1e12;
    }
}

const Q: [&str; 4] = ["q.0", "q.1", "q.2", "q.3"];
const K: [&str; 4] = ["k.0", "k.1", "k.2", "k.3"];
const Q_NORM: [&str; 4] = ["q_norm.0", "q_norm.1", "q_norm.2", "q_norm.3"];
const K_NORM: [&str; 4] = ["k_norm.0", "k_norm.1", "k_norm.2", "k_norm.3"];

fn weight_specs(s: &LayerShape, p: &Params) -> Result<Vec<WeightSpec>> {
    check_shape(s)?;
    let k = p.dims.0.len();
    if k == 0 || k > Q.len() || p.dims.product().is_none() {
        return Err(Error::param("dims", format!("{:?}", p.dims.0), "one to four sizes"));
    }
    check_own_keys(s, "")?;
    let mut list = vec![needed("v", s.n_heads * s.d_v, s.d_model), needed("o", s.d_model, s.n_heads * s.d_v)];
    for mode in 0..if p.per_mode_qk { k } else { 1 } {
        list.push(needed(Q[mode], s.n_heads * s.d, s.d_model));
        list.push(needed(K[mode], s.n_heads * s.d, s.d_model));
        if p.qk_norm == Norm::Layernorm {
            // Gain, then shift.
            list.push(optional(Q_NORM[mode], 2 * s.d, 1));
            list.push(optional(K_NORM[mode], 2 * s.d, 1));
        }
    }
    Ok(list)
}

/// The projections of one mode.
#[derive(Debug)]
struct Mode {
    q: Box<dyn Linear>,
    k: Box<dyn Linear>,
    q_norm: Option<Vec<f32>>,
    k_norm: Option<Vec<f32>>,
}

/// The higher-order attention layer.
#[derive(Debug)]
pub struct HigherOrder {
    shape: LayerShape,
    params: Params,
    modes: Vec<Mode>,
    v: Box<dyn Linear>,
    o: Box<dyn Linear>,
    rotary: Option<Rotary>,
    /// One map for each mode, if features are random.
    maps: Vec<ExpFeatures<f32>>,
}

/// Returns the factor of the logits: one over the root of the width of a head.
fn scale(d: usize) -> f64 {
    1.0 / (d as f64).sqrt()
}

/// Draws the random features of one mode.
fn random_map<T: Real>(
    d: usize,
    features: Option<usize>,
    scale: f64,
    seed: u64,
    mode: usize,
) -> Result<ExpFeatures<T>> {
    let key = StreamKey::new(seed).named("higher order features").with(mode as u64);
    let count = features.unwrap_or_else(|| default_num_features(d)).div_ceil(2);
    let failed = |e: attlas_num::sketch::SketchError| Error::Unsupported {
        method: LAYER.id.into(),
        reasons: vec![e.to_string()],
    };
    let directions = draw_directions(Coupling::Orthogonal, count, d, key).map_err(failed)?;
    let options = MapOptions { scale, ..MapOptions::default() };
    ExpFeatures::new(&Exponent::favor(d), &directions, true, options).map_err(failed)
}

impl HigherOrder {
    /// Makes the layer from its weights `v`, `o`, and `q.i`, `k.i` (and, if given, `q_norm.i`, `k_norm.i`) for each
    /// mode.
    pub fn new(shape: LayerShape, params: Params, mut weights: Weights) -> Result<Self> {
        params.validate()?;
        weight_specs(&shape, &params)?;
        let count = if params.per_mode_qk { params.dims.0.len() } else { 1 };
        let modes = (0..count)
            .map(|i| {
                let mut norm = |name: &str| weights.remove(name).map(|w| constant(&*w));
                let (q_norm, k_norm) = (norm(Q_NORM[i]), norm(K_NORM[i]));
                Ok(Mode { q: take(&mut weights, Q[i])?, k: take(&mut weights, K[i])?, q_norm, k_norm })
            })
            .collect::<Result<_>>()?;
        let rotary = Rotary::new(params.rope, shape.d, params.rope_base)?;
        let maps = if params.kernel == Kernel::Linear && params.map == Map::Performer {
            let map = |mode| random_map(shape.d, params.features, scale(shape.d), params.seed, mode);
            (0..params.dims.0.len()).map(map).collect::<Result<_>>()?
        } else {
            Vec::new()
        };
        let (v, o) = (take(&mut weights, "v")?, take(&mut weights, "o")?);
        Ok(Self { shape, modes, v, o, rotary, maps, params })
    }

    /// Computes pooled, projected and normalised queries or keys of a mode, `[N_i, heads, d]`.
    fn pooled(
        &self,
        mean: &Mat<f32>,
        w: &dyn Linear,
        norm: &Option<Vec<f32>>,
        factor: f32,
        cx: Context<'_>,
    ) -> Vec<f32> {
        let s = &self.shape;
        // The mean passes through the projection with its bias; a sum is the mean times the number of tokens, bias
        // included.
        let mut x = project(w, mean.as_ref(), cx);
        if self.params.pool == Pool::Sum {
            x.iter_mut().for_each(|x| *x *= factor);
        }
        if self.params.qk_norm == Norm::Layernorm {
            x.chunks_exact_mut(s.d).for_each(|row| layer_norm(row, norm.as_deref()));
        }
        if let Some(rotary) = &self.rotary {
            rotary.rotate(0, &mut x, s.n_heads, s.d);
        }
        x
    }
}

/// Computes the means of the rows of a grid over all modes but one: `sizes[mode] × width`.
pub fn pool_mean<T: Real>(x: MatRef<'_, T>, sizes: &[usize], mode: usize) -> Mat<T> {
    let (size, inner) = (sizes[mode], sizes[mode + 1..].iter().product::<usize>());
    let mut out = Mat::zeros(size, x.cols());
    for (t, row) in x.iter_rows().enumerate() {
        out.row_mut(t / inner.max(1) % size).iter_mut().zip(row).for_each(|(o, &x)| *o += x);
    }
    let count = T::from_usize((x.rows() / size.max(1)).max(1));
    out.data_mut().iter_mut().for_each(|x| *x /= count);
    out
}

/// Action of one mode on values: a matrix, or two thin ones.
#[derive(Clone, Debug)]
pub enum Action<T> {
    /// `N_i × N_i`, rows are queries.
    Dense(Mat<T>),
    /// $D^{-1} \phi_q \phi_k^\top$ with $\phi_q$ already divided by $D$.
    Factored(Mat<T>, Mat<T>),
}

/// Conversion of scores into weights, with the data for it.
#[derive(Clone, Copy, Debug)]
pub enum Weighting<'a, T> {
    /// Softmax.
    Softmax,
    /// Features elu + 1.
    Elu,
    /// These positive features, which include the scale.
    Random(&'a ExpFeatures<T>),
}

impl<T: Real> Action<T> {
    /// Makes the action of softmax of `scale · q kᵀ`, or of a linear kernel.
    pub fn new(
        q: MatRef<'_, T>,
        k: MatRef<'_, T>,
        scale: T,
        weighting: Weighting<'_, T>,
        cx: Context<'_>,
    ) -> Self {
        let features = match weighting {
            Weighting::Softmax => None,
            Weighting::Elu => {
                let elu = |x: MatRef<'_, T>| {
                    Mat::from_fn(x.rows(), x.cols(), |i, j| {
                        let x = x.at(i, j);
                        if x > T::ZERO { x + T::ONE } else { x.exp() }
                    })
                };
                Some((elu(q), elu(k)))
            }
            Weighting::Random(map) => Some(random_features(map, q, k)),
        };
        if let Some((mut q, k)) = features {
            let total: Vec<T> = (0..k.cols()).map(|e| (0..k.rows()).map(|i| k[(i, e)]).sum()).collect();
            for i in 0..q.rows() {
                let sum: T = q.row(i).iter().zip(&total).map(|(&q, &t)| q * t).sum();
                q.row_mut(i).iter_mut().for_each(|q| *q /= sum);
            }
            return Self::Factored(q, k);
        }
        let mut s = Mat::zeros(q.rows(), k.rows());
        let n = k.rows();
        gemm(cx.schedule.isa, scale, Op::N(q), Op::T(k), T::ZERO, s.data_mut(), n, cx.scratch);
        (0..q.rows()).for_each(|i| {
            softmax_in_place(s.row_mut(i));
        });
        Self::Dense(s)
    }

    /// Multiplies values of a grid (`rows × width`, row-major) along `mode`.
    pub fn apply(&self, v: &[T], sizes: &[usize], mode: usize, width: usize, cx: Context<'_>) -> Vec<T> {
        let size = sizes[mode];
        let inner: usize = sizes[mode + 1..].iter().product::<usize>() * width;
        let block = (size * inner).max(1);
        let mut out = vec![T::ZERO; v.len()];
        let product = |a: Op<MatRef<'_, T>>, b: MatRef<'_, T>, out: &mut [T]| {
            gemm(cx.schedule.isa, T::ONE, a, Op::N(b), T::ZERO, out, inner, cx.scratch);
        };
        for (v, out) in v.chunks_exact(block).zip(out.chunks_exact_mut(block)) {
            let v = MatRef::new(v, size, inner);
            match self {
                Self::Dense(s) => product(Op::N(s.as_ref()), v, out),
                Self::Factored(q, k) => {
                    let mut middle = vec![T::ZERO; k.cols() * inner];
                    product(Op::T(k.as_ref()), v, &mut middle);
                    product(Op::N(q.as_ref()), MatRef::new(&middle, k.cols(), inner), out);
                }
            }
        }
        out
    }
}

/// Computes random features of queries and keys, up to a factor for each query.
///
/// Feature $l$ of the keys is divided by its largest value over them, and that of the queries multiplied by it; then each
/// query by its largest feature. So no sum over keys overflows, and no denominator is below 1.
fn random_features<T: Real>(map: &ExpFeatures<T>, q: MatRef<'_, T>, k: MatRef<'_, T>) -> (Mat<T>, Mat<T>) {
    let m = map.num_features();
    // Logarithms of numbers that underflow the type still have differences.
    let bound = T::from_f64(1e37);
    let logs = |x: MatRef<'_, T>, side| {
        let mut out = Mat::zeros(x.rows(), m);
        map.log_features(x, side, out.data_mut());
        out.data_mut().iter_mut().for_each(|x| *x = if x.is_nan() { *x } else { x.max(-bound).min(bound) });
        out
    };
    let (mut q, mut k) = (logs(q, Side::Query), logs(k, Side::Key));
    let mut tops = vec![-bound; m];
    for i in 0..k.rows() {
        tops.iter_mut().zip(k.row(i)).for_each(|(t, &x)| *t = t.max(x));
    }
    for i in 0..k.rows() {
        k.row_mut(i).iter_mut().zip(&tops).for_each(|(x, &t)| *x -= t);
    }
    for i in 0..q.rows() {
        q.row_mut(i).iter_mut().zip(&tops).for_each(|(x, &t)| *x += t);
        let top = max(q.row(i));
        q.row_mut(i).iter_mut().for_each(|x| *x -= top);
    }
    exp_in_place(q.data_mut());
    exp_in_place(k.data_mut());
    (q, k)
}

/// Applies all modes to the values of one head.
pub fn combine<T: Real>(
    actions: &[Action<T>],
    v: &[T],
    sizes: &[usize],
    width: usize,
    how: Combine,
    cx: Context<'_>,
) -> Vec<T> {
    match how {
        Combine::Product => {
            actions.iter().enumerate().fold(v.to_vec(), |v, (mode, a)| a.apply(&v, sizes, mode, width, cx))
        }
        Combine::Sum => {
            let mut out = vec![T::ZERO; v.len()];
            for (mode, a) in actions.iter().enumerate() {
                let part = a.apply(v, sizes, mode, width, cx);
                out.iter_mut().zip(part).for_each(|(o, x)| *o += x);
            }
            out
        }
    }
}

impl Layer for HigherOrder {
    fn shape(&self) -> LayerShape {
        self.shape
    }

    fn parameters(&self) -> usize {
        let norms = |m: &Mode| m.q_norm.iter().chain(&m.k_norm).map(Vec::len).sum::<usize>();
        let modes = self.modes.iter().map(|m| m.q.parameters() + m.k.parameters() + norms(m)).sum::<usize>();
        modes + self.v.parameters() + self.o.parameters()
    }

    fn cache_elements(&self) -> usize {
        0
    }

    fn new_cache(&self) -> Box<dyn LayerCache> {
        Box::new(NoCache)
    }

    fn forward(
        &self,
        _: MatRef<'_, f32>,
        _: &mut dyn LayerCache,
        _: &mut [f32],
        _: &mut Workspace,
    ) -> Result<RunInfo> {
        refuse(
            LAYER.id,
            "it has no causal form: queries and keys of a mode are pooled over the future of the others",
        )
    }

    fn forward_all(&self, x: MatRef<'_, f32>, out: &mut [f32], ws: &mut Workspace) -> Result<RunInfo> {
        let (s, p) = (&self.shape, &self.params);
        check_io(x, out, s.d_model)?;
        let (sizes, n) = (&p.dims.0, x.rows());
        if n != sizes.iter().product::<usize>() {
            return refuse(LAYER.id, format!("{n} tokens do not fill a grid of {sizes:?}"));
        }
        ws.install(|cx| {
            let v = project(&*self.v, x, cx);
            let scale = scale(s.d) as f32;
            let qk: Vec<(Vec<f32>, Vec<f32>)> = (0..sizes.len())
                .map(|i| {
                    let mean = pool_mean(x, sizes, i);
                    let mode = &self.modes[if p.per_mode_qk { i } else { 0 }];
                    let factor = (n / sizes[i].max(1)) as f32;
                    let of = |w: &dyn Linear, norm| self.pooled(&mean, w, norm, factor, cx);
                    (of(&*mode.q, &mode.q_norm), of(&*mode.k, &mode.k_norm))
                })
                .collect();
            let parts: Vec<Vec<f32>> = (0..s.n_heads)
                .into_par_iter()
                .map(|h| {
                    let actions: Vec<Action<f32>> = qk
                        .iter()
                        .zip(sizes)
                        .enumerate()
                        .map(|(mode, ((q, k), &size))| {
                            let of = |x| head_of(x, size, s.n_heads, s.d, h);
                            let weighting = match (p.kernel, self.maps.get(mode)) {
                                (Kernel::Softmax, _) => Weighting::Softmax,
                                (Kernel::Linear, None) => Weighting::Elu,
                                (Kernel::Linear, Some(map)) => Weighting::Random(map),
                            };
                            Action::new(of(q), of(k), scale, weighting, cx)
                        })
                        .collect();
                    let v = head_of(&v, n, s.n_heads, s.d_v, h).to_mat();
                    combine(&actions, v.data(), sizes, s.d_v, p.combine, cx)
                })
                .collect();
            self.o.apply(MatRef::new(&interleave(&parts, n, s.d_v), n, s.n_heads * s.d_v), out, cx);
            let pairs: usize = sizes.iter().map(|n| n * n).sum();
            Ok(RunInfo::visited((pairs * s.n_heads) as u64))
        })
    }

    fn cost(&self, mask: Mask, _: usize, tokens: usize) -> Option<Cost> {
        let (s, p) = (&self.shape, &self.params);
        if mask == Mask::Causal || tokens != p.dims.product()? {
            return None;
        }
        let (h, d, d_v, n) = (s.n_heads as u64, s.d as u64, s.d_v as u64, tokens as u64);
        let mut flops = 2 * n * (self.v.parameters() + self.o.parameters()) as u64;
        for (mode, &size) in p.dims.0.iter().enumerate() {
            let size = size as u64;
            flops += n * s.d_model as u64 + 4 * size * s.d_model as u64 * h * d;
            flops += match (p.kernel, self.maps.get(mode)) {
                (Kernel::Softmax, _) => 2 * h * (d * size * size + n * size * d_v),
                (Kernel::Linear, None) => 4 * h * n * d * d_v,
                (Kernel::Linear, Some(map)) => {
                    let m = map.num_features() as u64;
                    // A direction serves two features of a query and of a key.
                    4 * h * n * m * d_v + 2 * h * size * m * d
                }
            };
        }
        let squares: usize = p.dims.0.iter().map(|n| n * n).sum();
        let bytes = 4 * (2 * tokens * s.d_model + s.n_heads * squares) as u64;
        Some(Cost { setup_flops: 0, run_flops: flops, bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::super::common::third::tests::{assert_close as assert_near, assert_known, fill};
    use super::super::mode_wise;
    use super::super::testing::{
        assert_close, forward_all, random, random_layer, random_weights, weights_from,
    };
    use super::*;
    use crate::Options;
    use attlas_num::linalg::matmul;
    use attlas_num::tensor::kronecker;

    const SHAPE: LayerShape = LayerShape { d_model: 20, n_heads: 4, n_kv_heads: 4, d: 6, d_v: 5 };

    fn dims(text: &str) -> Options {
        Options::new().with("dims", text)
    }

    /// Computes the layer of the known answers in double precision, and the actions of its heads.
    fn known(
        pool_sum: bool,
        how: Combine,
        weighting: [Weighting<'_, f64>; 2],
    ) -> (Mat<f64>, Vec<Vec<Action<f64>>>) {
        let (sizes, h, d) = ([3, 4], 2, 4);
        let x = fill(12, 8, 30, 1.0);
        let ws = Workspace::single().unwrap();
        let cx = ws.context();
        let v = matmul(x.as_ref(), fill(8, 8, 35, 1.0).as_ref());
        let of = |m: &Mat<f64>, head: usize| Mat::from_fn(m.rows(), d, |i, e| m[(i, head * d + e)]);
        let mut heads = Mat::zeros(12, 8);
        let mut all = Vec::new();
        for head in 0..h {
            let actions: Vec<Action<f64>> = (0..2)
                .map(|mode| {
                    let mut mean = pool_mean(x.as_ref(), &sizes, mode);
                    if pool_sum {
                        mean.data_mut().iter_mut().for_each(|x| *x *= 12.0 / sizes[mode] as f64);
                    }
                    let part = |seed| of(&matmul(mean.as_ref(), fill(8, 8, seed, 1.0).as_ref()), head);
                    let (q, k) = (part(31 + 2 * mode as u64), part(32 + 2 * mode as u64));
                    Action::new(q.as_ref(), k.as_ref(), 0.5, weighting[mode], cx)
                })
                .collect();
            let out = combine(&actions, of(&v, head).data(), &sizes, d, how, cx);
            out.chunks_exact(d)
                .enumerate()
                .for_each(|(i, row)| heads.row_mut(i)[head * d..][..d].copy_from_slice(row));
            all.push(actions);
        }
        (matmul(heads.as_ref(), fill(8, 8, 36, 1.0).as_ref()), all)
    }

    #[test]
    fn the_known_answers() {
        let cases = [
            (
                true,
                Combine::Product,
                [0.270760913986, 0.913623225065, -0.625789583894, -1.029592873210],
                6.087505894397,
            ),
            (
                false,
                Combine::Product,
                [0.408177273377, 0.551376559306, 0.022103910682, -0.331745464214],
                11.339789329011,
            ),
            (
                true,
                Combine::Sum,
                [1.459050860151, 0.568749423579, 1.292588443728, -0.109471314696],
                20.901460119796,
            ),
        ];
        for (sum, how, first, total) in cases {
            assert_known(&known(sum, how, [Weighting::Softmax; 2]).0, &first, &[], total);
        }
    }

    #[test]
    fn a_product_of_modes_is_a_kronecker_product_and_rows_sum_as_stated() {
        let ws = Workspace::single().unwrap();
        let maps = [0, 1].map(|mode| random_map(4, Some(9), 0.5, 3, mode).unwrap());
        let random = [0, 1].map(|mode: usize| Weighting::Random(&maps[mode]));
        for weighting in [[Weighting::Softmax; 2], [Weighting::Elu; 2], random] {
            for actions in known(true, Combine::Product, weighting).1 {
                let dense: Vec<Mat<f64>> = actions
                    .iter()
                    .map(|a| match a {
                        Action::Dense(s) => s.clone(),
                        Action::Factored(q, k) => matmul(q.as_ref(), k.transpose().as_ref()),
                    })
                    .collect();
                let v = fill(12, 4, 9, 1.0);
                let want = matmul(kronecker(&dense[0], &dense[1]).as_ref(), v.as_ref());
                let got = combine(&actions, v.data(), &[3, 4], 4, Combine::Product, ws.context());
                assert_near(&Mat::from_vec(got, 12, 4), &want, 1e-15 * 8.0);
                let ones = vec![1.0; 12];
                let product = combine(&actions, &ones, &[3, 4], 1, Combine::Product, ws.context());
                let sum = combine(&actions, &ones, &[3, 4], 1, Combine::Sum, ws.context());
                assert!(product.iter().all(|x| (x - 1.0).abs() < 1e-14));
                assert!(sum.iter().all(|x| (x - 2.0).abs() < 1e-14));
            }
        }
    }

    #[test]
    fn one_mode_without_norm_is_multi_head_attention() {
        let x = random("x", 18, 20);
        let list = [("q.0", "q", 24, 20), ("k.0", "k", 24, 20), ("v", "v", 20, 20), ("o", "o", 20, 20)];
        let weights = |named: bool| {
            weights_from(
                list.iter().map(|&(name, from, o, i)| (if named { name } else { from }, random(from, o, i))),
            )
        };
        let plain =
            mode_wise::LAYER.layer(&SHAPE, &Options::new().with("modes", "18"), weights(false)).unwrap();
        for grid in ["18", "1x18", "18x1"] {
            let options = dims(grid).with("qk_norm", "none").with("per_mode_qk", false);
            let layer = LAYER.layer(&SHAPE, &options, weights(true)).unwrap();
            // A mode of length one pools everything and acts as the identity.
            assert_close(&forward_all(&*layer, &x), &forward_all(&*plain, &x));
        }
    }

    #[test]
    fn after_a_norm_both_poolings_agree() {
        // Up to eps: pooled inputs are far larger than its root.
        let x = Mat::from_fn(24, 20, |i, j| 300.0 * random("x", 24, 20)[(i, j)]);
        let of =
            |pool: &str| forward_all(&*random_layer(&LAYER, &SHAPE, &dims("4x6").with("pool", pool)), &x);
        let (sum, mean) = (of("sum"), of("mean"));
        let size = mean.iter().fold(0f32, |m, x| m.max(x.abs()));
        assert!(sum.iter().zip(&mean).all(|(a, b)| (a - b).abs() < 1e-4 * size));
    }

    #[test]
    fn permuting_positions_of_a_mode_permutes_the_output() {
        let x = random("x", 24, 20);
        let linear = dims("4x6").with("kernel", "linear");
        let performer = linear.clone().with("map", "performer").with("features", 40);
        for options in [dims("4x6"), dims("4x6").with("combine", "sum"), linear, performer] {
            let layer = random_layer(&LAYER, &SHAPE, &options);
            let order = [2, 0, 5, 1, 4, 3];
            let permute = |m: &[f32]| -> Vec<f32> {
                (0..24).flat_map(|t| m[(t / 6 * 6 + order[t % 6]) * 20..][..20].to_vec()).collect()
            };
            let moved = Mat::from_vec(permute(x.data()), 24, 20);
            assert_close(&forward_all(&*layer, &moved), &permute(&forward_all(&*layer, &x)));
        }
    }

    /// Computes the weights that random features give, as a dense matrix.
    fn estimate(q: &Mat<f64>, k: &Mat<f64>, features: usize, seed: u64) -> Mat<f64> {
        let map = random_map(q.cols(), Some(features), 0.5, seed, 0).unwrap();
        let ws = Workspace::single().unwrap();
        match Action::new(q.as_ref(), k.as_ref(), 0.5, Weighting::Random(&map), ws.context()) {
            Action::Factored(q, k) => matmul(q.as_ref(), k.transpose().as_ref()),
            Action::Dense(_) => panic!("features make no dense matrix"),
        }
    }

    fn softmax(q: &Mat<f64>, k: &Mat<f64>) -> Mat<f64> {
        let ws = Workspace::single().unwrap();
        match Action::new(q.as_ref(), k.as_ref(), 0.5, Weighting::Softmax, ws.context()) {
            Action::Dense(s) => s,
            Action::Factored(..) => panic!("softmax is dense"),
        }
    }

    #[test]
    fn shifted_random_features_are_those_of_the_definition() {
        let (q, k) = (fill(5, 4, 70, 1.0), fill(7, 4, 71, 1.0));
        for seed in 0..5 {
            let map: ExpFeatures<f64> = random_map(4, Some(17), 0.5, seed, 0).unwrap();
            let phi = |x: &Mat<f64>, side| {
                let mut logs = Mat::zeros(x.rows(), map.num_features());
                map.log_features(x.as_ref(), side, logs.data_mut());
                Mat::from_fn(logs.rows(), logs.cols(), |i, l| logs[(i, l)].exp())
            };
            let dense = matmul(phi(&q, Side::Query).as_ref(), phi(&k, Side::Key).transpose().as_ref());
            let want = Mat::from_fn(5, 7, |i, j| dense[(i, j)] / dense.row(i).iter().sum::<f64>());
            assert_eq!(map.num_features(), 18);
            assert_near(&estimate(&q, &k, 17, seed), &want, 64.0 * f64::EPSILON);
        }
    }

    #[test]
    fn random_features_estimate_softmax_over_seeds() {
        let (q, k) = (fill(6, 4, 72, 1.5), fill(8, 4, 73, 1.5));
        let exact = softmax(&q, &k);
        // Squared errors of all entries, one number for each seed.
        let errors = |features: usize| -> Vec<f64> {
            let square =
                |s: &Mat<f64>| s.data().iter().zip(exact.data()).map(|(a, b)| (a - b).powi(2)).sum::<f64>();
            (0..200).map(|seed| square(&estimate(&q, &k, features, seed))).collect()
        };
        let mean = |x: &[f64]| x.iter().sum::<f64>() / x.len() as f64;
        let error = |x: &[f64]| {
            let m = mean(x);
            (x.iter().map(|x| (x - m).powi(2)).sum::<f64>() / (x.len() * (x.len() - 1)) as f64).sqrt()
        };
        // Four times the features, a quarter of the squared error; five standard errors of the two means.
        let (few, many) = (errors(256), errors(1024));
        let off = mean(&few) - 4.0 * mean(&many);
        assert!(off.abs() < 5.0 * error(&few).hypot(4.0 * error(&many)), "{} {}", mean(&few), mean(&many));
        // The bias of a ratio is of the size of its variance, so at most the mean squared error here.
        for i in 0..6 {
            for j in 0..8 {
                let all: Vec<f64> = (0..200).map(|seed| estimate(&q, &k, 1024, seed)[(i, j)]).collect();
                let off = (mean(&all) - exact[(i, j)]).abs();
                assert!(off < 5.0 * error(&all) + mean(&many), "{i} {j}: {off} of {}", error(&all));
            }
        }
    }

    #[test]
    fn a_layer_with_many_random_features_is_near_the_softmax_one() {
        let x = random("x", 24, 20);
        let exact = forward_all(&*random_layer(&LAYER, &SHAPE, &dims("4x6")), &x);
        let size = exact.iter().map(|x| f64::from(x * x)).sum::<f64>().sqrt();
        let off = |features: usize, seed: usize| {
            let options = dims("4x6")
                .with("kernel", "linear")
                .with("map", "performer")
                .with("features", features)
                .with("seed", seed);
            let got = forward_all(&*random_layer(&LAYER, &SHAPE, &options), &x);
            got.iter().zip(&exact).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>().sqrt() / size
        };
        let mean = |features| (0..8).map(|seed| off(features, seed)).sum::<f64>() / 8.0;
        let (few, many) = (mean(64), mean(4096));
        // Eight times less by the law of large numbers, if few features were many.
        assert!(many < few / 4.0 && many < 0.2, "{few} {many}");
        assert_ne!(off(64, 0), off(64, 1));
    }

    #[test]
    fn keys_of_any_length_give_finite_random_features() {
        for size in [1.0, 1e3, 1e18] {
            let (q, k) = (fill(5, 4, 74, size).cast::<f32>(), fill(5, 4, 75, size).cast::<f32>());
            let map = random_map(4, None, 0.5, 0, 0).unwrap();
            let ws = Workspace::single().unwrap();
            let action = Action::new(q.as_ref(), k.as_ref(), 0.5, Weighting::Random(&map), ws.context());
            let ones = action.apply(&[1.0; 5], &[5], 0, 1, ws.context());
            assert!(ones.iter().all(|x| (x - 1.0).abs() < 1e-5), "{size}: {ones:?}");
        }
    }

    #[test]
    fn a_bias_counts_once_for_each_pooled_token() {
        use crate::layer::Dense;
        let x = random("x", 12, 20);
        let options = dims("3x4").with("qk_norm", "none");
        let specs = weight_specs(&SHAPE, &Params::from_options(&options).unwrap()).unwrap();
        let mut weights = random_weights(&specs);
        let bias: Vec<f32> = random("b", 24, 1).into_vec();
        weights.insert(
            "q.0".into(),
            Box::new(Dense { weight: random("q.0", 24, 20), bias: Some(bias.clone()) }),
        );
        let layer = LAYER.layer(&SHAPE, &options, weights).unwrap();
        // The same bias as a constant input column.
        let wide = Mat::from_fn(12, 21, |i, j| if j < 20 { x[(i, j)] } else { 1.0 });
        let s = LayerShape { d_model: 21, ..SHAPE };
        let widened = specs.iter().map(|w| {
            let m = random(w.name, w.n_out, w.n_in);
            let n_in = if w.name == "o" { w.n_in } else { 21 };
            let n_out = if w.name == "o" { 21 } else { w.n_out };
            let fill = |o: usize, i: usize| if w.name == "q.0" && i == 20 { bias[o] } else { 0.0 };
            (
                w.name,
                Mat::from_fn(
                    n_out,
                    n_in,
                    |o, i| if o < w.n_out && i < w.n_in { m[(o, i)] } else { fill(o, i) },
                ),
            )
        });
        let other = LAYER.layer(&s, &options, weights_from(widened)).unwrap();
        let got: Vec<f32> =
            forward_all(&*other, &wide).chunks_exact(21).flat_map(|r| r[..20].to_vec()).collect();
        assert_close(&forward_all(&*layer, &x), &got);
    }

    #[test]
    fn counts_are_those_of_the_page_and_causal_calls_are_refused() {
        let s = LayerShape { d_model: 24, d: 6, d_v: 6, ..SHAPE };
        let plain = dims("5x7").with("qk_norm", "none");
        let layer = random_layer(&LAYER, &s, &plain);
        assert_eq!(layer.parameters(), 6 * 24 * 24);
        assert_eq!(
            random_layer(&LAYER, &s, &plain.clone().with("per_mode_qk", false)).parameters(),
            4 * 24 * 24
        );
        let flops = layer.cost(Mask::None, 0, 35).unwrap().run_flops;
        let (apply, scores) = (2 * 35 * 24 * 12, 2 * 24 * (25 + 49));
        let pooling = 2 * 35 * 24 + 4 * 12 * 24 * 24;
        assert_eq!(flops, (4 * 35 * 24 * 24 + apply + scores + pooling) as u64);
        let performer = plain.clone().with("kernel", "linear").with("map", "performer").with("features", 9);
        let flops = random_layer(&LAYER, &s, &performer).cost(Mask::None, 0, 35).unwrap().run_flops;
        let maps = 2 * 24 * 12 * 10;
        assert_eq!(flops, (4 * 35 * 24 * 24 + 2 * 4 * 35 * 24 * 10 + maps + pooling) as u64);
        let x = random("x", 35, 24);
        let mut ws = Workspace::single().unwrap();
        let mut out = vec![0.0; 35 * 24];
        assert!(layer.forward(x.as_ref(), &mut *layer.new_cache(), &mut out, &mut ws).is_err());
        assert!(layer.forward_all(x.as_ref().sub_rows(0..34), &mut out[..34 * 24], &mut ws).is_err());
    }
}
