//! The tensorized transformer's layer: queries, keys and values are the factors of a third-order tensor.
//!
//! **Idea.** No softmax. The $N \times N \times N$ tensor with factors $Q$, $K$, $V$ is cut into slices that are
//! flattened, concatenated and projected.
//!
//! **Math.** $Q, K, V = X W_q, X W_k, X W_v \in \mathbb{R}^{N \times R}$, one set for all cores; $h$ diagonal cores with
//! mean $\bar g$; $\mathcal{A}_{ijm} = \sum_r \bar g_r Q_{ir} K_{jr} V_{mr}$ and $O = \mathcal{A}_{(1)} W_O$ with row
//! $jN + m$ of $W_O \in \mathbb{R}^{N^2 \times D}$. The tensor is never formed: with $T_r = \sum_{jm} K_{jr} V_{mr}
//! W_O[jN + m]$, $O = (Q \odot \bar g) T$. Causal ($j, m \le i$): $T_i = T_{i-1}$ plus the terms with $j = i$ or $m = i$.
//!
//! **Reference.** ma2019; survey errata: $V$ is $N \times R$ like the others, rows of $W_O$ follow $(K * V)^\top$, and
//! cores with shared factors equal one averaged core, so several add nothing at inference. The published
//! language-model code leaves its causal mask unused.
//!
//! **Cost.** $2 N^2 R D + 4 N R D$ operations instead of $O(N^3 (R + D))$; parameters $3 D R + h R + N^2 D$, the length
//! fixed by $W_O$. Decoding keeps $2R$ numbers per token and $T$ ($R \times D$); step $i$ takes $4 i R D$ operations.
//!
//! **Guarantees.** Equal to the explicit tensor; linear in the queries and in the cores; tested here.
//!
//! **When to use.** To reproduce that model. It has no normalisation and does not generalise in length.

use super::common::{check_io, constant, layer_kind, needed, own, project, refuse, take};
use crate::layer::{Layer, LayerCache, LayerShape, Linear, WeightSpec, Weights};
use crate::workspace::Context;
use crate::{Cost, Mask, MatRef, Real, Result, RunInfo, Workspace};
use attlas_num::kernels::{Op, axpy, gemm};
use attlas_num::par::*;

layer_kind! {
    /// Registry entry.
    Tensorized {
        id: "tensorized",
        title: "Tensorized transformer attention: single block and multi-linear, with split and concat",
        reference: "ma2019",
        weights: weight_specs,
        cache_elements: |_, p| Ok(2 * p.rank),
    }
}

crate::params! {
    /// Parameters of [`Tensorized`].
    pub struct Params {
        /// Width R of queries, keys and values.
        rank: usize = 40, in 1..=1 << 16;
        /// Diagonal cores that are averaged.
        cores: usize = 2, in 1..=64;
        /// Longest sequence N; fixed, because the output weights have N² rows.
        seq_len: usize = 32, in 1..=1 << 14;
    }
}

fn weight_specs(s: &LayerShape, p: &Params) -> Result<Vec<WeightSpec>> {
    let Some(output) = (p.seq_len * p.seq_len).checked_mul(s.d_model) else {
        return refuse(LAYER.id, "N² D output weights do not fit into memory addresses");
    };
    Ok(vec![
        needed("q", p.rank, s.d_model),
        needed("k", p.rank, s.d_model),
        needed("v", p.rank, s.d_model),
        needed("core", p.cores * p.rank, 1),
        needed("o", output, 1),
    ])
}

/// The layer of the tensorized transformer.
#[derive(Debug)]
pub struct Tensorized {
    shape: LayerShape,
    params: Params,
    q: Box<dyn Linear>,
    k: Box<dyn Linear>,
    v: Box<dyn Linear>,
    /// Mean of the cores.
    core: Vec<f32>,
    /// `N × N × d_model`.
    o: Vec<f32>,
    fixed_parameters: usize,
}

impl Tensorized {
    /// Makes the layer from its weights `q`, `k`, `v`, `core` (`cores × rank` numbers) and `o` (`N² × d_model`
    /// numbers).
    pub fn new(shape: LayerShape, params: Params, mut weights: Weights) -> Result<Self> {
        params.validate()?;
        weight_specs(&shape, &params)?;
        let mut take = |name| take(&mut weights, name);
        let (core, o) = (take("core")?, take("o")?);
        Ok(Self {
            shape,
            q: take("q")?,
            k: take("k")?,
            v: take("v")?,
            core: mean_core(&constant(&*core), params.rank),
            o: constant(&*o),
            fixed_parameters: core.parameters() + o.parameters(),
            params,
        })
    }
}

/// Computes $\bar g = \frac1h \sum_p g^{(p)}$.
pub fn mean_core<T: Real>(cores: &[T], rank: usize) -> Vec<T> {
    let mut mean = vec![T::ZERO; rank];
    cores.chunks_exact(rank).for_each(|g| mean.iter_mut().zip(g).for_each(|(m, &g)| *m += g));
    let count = T::from_usize((cores.len() / rank.max(1)).max(1));
    mean.iter_mut().for_each(|m| *m /= count);
    mean
}

/// Computes $T_r = \sum_{jm} K_{jr} V_{mr} W_O[jN + m]$ over the rows of `k` and `v`; `o` is $N \times N \times D$.
pub fn contract<T: Real>(
    k: MatRef<'_, T>,
    v: MatRef<'_, T>,
    o: &[T],
    n: usize,
    d: usize,
    cx: Context<'_>,
) -> Vec<T> {
    let rank = k.cols();
    // Sums over fixed runs of j, added in order, whatever the number of threads.
    const RUN: usize = 8;
    let starts: Vec<usize> = (0..k.rows()).step_by(RUN).collect();
    let parts: Vec<Vec<T>> = starts
        .into_par_iter()
        .map(|start| {
            let mut total = vec![T::ZERO; rank * d];
            let mut u = vec![T::ZERO; rank * d];
            for j in start..(start + RUN).min(k.rows()) {
                let w = MatRef::new(&o[j * n * d..(j * n + v.rows()) * d], v.rows(), d);
                gemm(cx.schedule.isa, T::ONE, Op::T(v), Op::N(w), T::ZERO, &mut u, d, cx.scratch);
                add_scaled(k.row(j), &u, &mut total, d);
            }
            total
        })
        .collect();
    let mut total = vec![T::ZERO; rank * d];
    parts.iter().for_each(|part| axpy(T::ONE, part, &mut total));
    total
}

/// Adds `c[r]` times row `r` of `u` to row `r` of `t`.
fn add_scaled<T: Real>(c: &[T], u: &[T], t: &mut [T], d: usize) {
    for ((&c, u), t) in c.iter().zip(u.chunks_exact(d)).zip(t.chunks_exact_mut(d)) {
        axpy(c, u, t);
    }
}

/// Computes $(Q \odot \bar g) T$ without a mask.
pub fn attend_all<T: Real>(
    [q, k, v]: [MatRef<'_, T>; 3],
    core: &[T],
    o: &[T],
    n: usize,
    d: usize,
    cx: Context<'_>,
) -> Vec<T> {
    let t = contract(k, v, o, n, d, cx);
    let mut out = vec![T::ZERO; q.rows() * d];
    out.par_chunks_mut(d.max(1)).enumerate().for_each(|(i, out)| answer(q.row(i), core, &t, out));
    out
}

fn answer<T: Real>(q: &[T], core: &[T], t: &[T], out: &mut [T]) {
    out.fill(T::ZERO);
    for ((&q, &g), t) in q.iter().zip(core).zip(t.chunks_exact(out.len())) {
        axpy(q * g, t, out);
    }
}

/// Adds the terms of token `i`, the last row of `k` and `v`, to `t`: those with $j = i$ or $m = i$.
pub fn extend<T: Real>(
    t: &mut [T],
    k: MatRef<'_, T>,
    v: MatRef<'_, T>,
    o: &[T],
    n: usize,
    d: usize,
    cx: Context<'_>,
) {
    let Some(i) = k.rows().checked_sub(1) else { return };
    let mut u = vec![T::ZERO; t.len()];
    let row = MatRef::new(&o[i * n * d..(i * n + i + 1) * d], i + 1, d);
    gemm(cx.schedule.isa, T::ONE, Op::T(v), Op::N(row), T::ZERO, &mut u, d, cx.scratch);
    add_scaled(k.row(i), &u, t, d);
    if i > 0 {
        let column = MatRef::with_stride(&o[i * d..], i, d, n * d)
            .unwrap_or_else(|| unreachable!("earlier rows lie inside the weights"));
        gemm(cx.schedule.isa, T::ONE, Op::T(k.sub_rows(0..i)), Op::N(column), T::ZERO, &mut u, d, cx.scratch);
        add_scaled(v.row(i), &u, t, d);
    }
}

impl Layer for Tensorized {
    fn shape(&self) -> LayerShape {
        self.shape
    }

    fn parameters(&self) -> usize {
        self.fixed_parameters + [&self.q, &self.k, &self.v].iter().map(|w| w.parameters()).sum::<usize>()
    }

    fn cache_elements(&self) -> usize {
        2 * self.params.rank
    }

    fn new_cache(&self) -> Box<dyn LayerCache> {
        let t = vec![0.0; self.params.rank * self.shape.d_model];
        Box::new(ContractionCache { k: Vec::new(), v: Vec::new(), rank: self.params.rank, t, summed: 0 })
    }

    fn forward(
        &self,
        x: MatRef<'_, f32>,
        cache: &mut dyn LayerCache,
        out: &mut [f32],
        ws: &mut Workspace,
    ) -> Result<RunInfo> {
        let (d, n, r) = (self.shape.d_model, self.params.seq_len, self.params.rank);
        check_io(x, out, d)?;
        let cache: &mut ContractionCache = own(cache, LAYER.id)?;
        let (first, tokens) = (cache.len(), x.rows());
        if first + tokens > n {
            return refuse(
                LAYER.id,
                format!("{} tokens, and the output weights are for {n}", first + tokens),
            );
        }
        ws.install(|cx| {
            let q = project(&*self.q, x, cx);
            if cache.summed != first {
                // Tokens were taken back: the sum is recomputed from the remaining ones.
                let (k, v) = (MatRef::new(&cache.k, first, r), MatRef::new(&cache.v, first, r));
                cache.t = contract(k, v, &self.o, n, d, cx);
            }
            cache.k.extend(project(&*self.k, x, cx));
            cache.v.extend(project(&*self.v, x, cx));
            cache.summed = first + tokens;
            for (i, out) in out.chunks_exact_mut(d).enumerate() {
                let seen = first + i + 1;
                let (k, v) =
                    (MatRef::new(&cache.k[..seen * r], seen, r), MatRef::new(&cache.v[..seen * r], seen, r));
                extend(&mut cache.t, k, v, &self.o, n, d, cx);
                answer(&q[i * r..(i + 1) * r], &self.core, &cache.t, out);
            }
            Ok(RunInfo::visited((first + 1..=first + tokens).map(|i| (i * i) as u64).sum()))
        })
    }

    fn forward_all(&self, x: MatRef<'_, f32>, out: &mut [f32], ws: &mut Workspace) -> Result<RunInfo> {
        let (d, n, r) = (self.shape.d_model, self.params.seq_len, self.params.rank);
        check_io(x, out, d)?;
        let tokens = x.rows();
        if tokens > n {
            return refuse(LAYER.id, format!("{tokens} tokens, and the output weights are for {n}"));
        }
        ws.install(|cx| {
            let qkv = [&self.q, &self.k, &self.v].map(|w| project(&**w, x, cx));
            let [q, k, v] = [0, 1, 2].map(|i: usize| MatRef::new(&qkv[i], tokens, r));
            out.copy_from_slice(&attend_all([q, k, v], &self.core, &self.o, n, d, cx));
        });
        Ok(RunInfo::visited((tokens as u64).pow(3)))
    }

    fn cost(&self, mask: Mask, cached: usize, tokens: usize) -> Option<Cost> {
        let (d, r) = (self.shape.d_model as u64, self.params.rank as u64);
        let n = tokens as u64;
        let projections = 6 * n * d * r;
        let work = match mask {
            Mask::None => 2 * n * n * r * d + 4 * n * r * d,
            Mask::Causal => {
                (cached as u64..cached as u64 + n).map(|i| 2 * (2 * i + 1) * r * d + 4 * r * d).sum()
            }
        };
        let total = (cached + tokens) as u64;
        let read = if mask == Mask::None { n * n } else { total * total - (cached as u64).pow(2) };
        let bytes = 4 * (read * d + total * 2 * r + 2 * n * d);
        Some(Cost { setup_flops: 0, run_flops: projections + work, bytes })
    }
}

/// Keys, values, and the contraction with the output weights so far.
#[derive(Debug)]
struct ContractionCache {
    k: Vec<f32>,
    v: Vec<f32>,
    rank: usize,
    t: Vec<f32>,
    /// Number of tokens summed in `t`.
    summed: usize,
}

impl LayerCache for ContractionCache {
    fn len(&self) -> usize {
        self.k.len() / self.rank.max(1)
    }

    fn truncate(&mut self, len: usize) {
        self.k.truncate(len.saturating_mul(self.rank));
        self.v.truncate(len.saturating_mul(self.rank));
    }

    fn bytes(&self) -> usize {
        4 * (self.k.len() + self.v.len() + self.t.len())
    }
}

#[cfg(test)]
mod tests {
    use super::super::common::third::tests::{assert_close, assert_known, fill};
    use super::super::testing::{
        self, check_causal, forward, forward_all, random, random_layer, random_weights,
    };
    use super::*;
    use crate::{Mat, Options};

    const SHAPE: LayerShape = LayerShape { d_model: 12, n_heads: 1, n_kv_heads: 1, d: 6, d_v: 6 };

    fn small() -> Options {
        Options::new().with("rank", 6).with("seq_len", 24)
    }

    #[test]
    fn keeps_what_every_causal_layer_keeps() {
        check_causal(&LAYER, &SHAPE, &small(), 24);
        check_causal(&LAYER, &SHAPE, &small().with("cores", 1), 13);
    }

    /// Computes the explicit tensor, its first unfolding and the product.
    fn explicit(x: [&Mat<f64>; 3], core: &[f64], o: &Mat<f64>, causal: bool) -> Mat<f64> {
        let n = x[0].rows();
        let mut out = Mat::zeros(n, o.cols());
        for i in 0..n {
            let seen = if causal { i + 1 } else { n };
            for j in 0..seen {
                for m in 0..seen {
                    let a: f64 =
                        (0..core.len()).map(|r| core[r] * x[0][(i, r)] * x[1][(j, r)] * x[2][(m, r)]).sum();
                    (0..o.cols()).for_each(|c| out[(i, c)] += a * o[(j * n + m, c)]);
                }
            }
        }
        out
    }

    fn causal(x: [&Mat<f64>; 3], core: &[f64], o: &Mat<f64>) -> Mat<f64> {
        let (n, d) = (x[0].rows(), o.cols());
        let ws = Workspace::single().unwrap();
        let mut t = vec![0.0; core.len() * d];
        let mut out = Mat::zeros(n, d);
        for i in 0..n {
            let [k, v] = [x[1], x[2]].map(|m| m.as_ref().sub_rows(0..i + 1));
            extend(&mut t, k, v, o.data(), n, d, ws.context());
            answer(x[0].row(i), core, &t, out.row_mut(i));
        }
        out
    }

    #[test]
    fn the_known_answers() {
        let x = [40, 41, 42].map(|s| fill(5, 4, s, 1.0));
        let x = [&x[0], &x[1], &x[2]];
        let o = fill(25, 6, 43, 1.0);
        let core = [0.1, 0.2, 0.3, 0.4];
        let ws = Workspace::single().unwrap();
        let all = attend_all(x.map(Mat::as_ref), &core, o.data(), 5, 6, ws.context());
        let all = Mat::from_vec(all, 5, 6);
        assert_known(
            &all,
            &[-0.231127512090, -0.081052551639, -0.242483008205, -0.212248686560],
            &[],
            -1.594947105422,
        );
        let masked = causal(x, &core, &o);
        assert_known(
            &masked,
            &[-0.053555982082, -0.011144207612, -0.035022235374, -0.065310627966],
            &[],
            -1.159728426722,
        );
        assert_close(&all, &explicit(x, &core, &o, false), 1e-15 * 16.0);
        assert_close(&masked, &explicit(x, &core, &o, true), 1e-15 * 16.0);
    }

    #[test]
    fn longer_sequences_equal_the_explicit_tensor() {
        let x = [1, 2, 3].map(|s| fill(19, 3, s, 1.0));
        let x = [&x[0], &x[1], &x[2]];
        let (o, core) = (fill(361, 2, 4, 1.0), [0.5, -0.2, 0.7]);
        let ws = Workspace::single().unwrap();
        let all = attend_all(x.map(Mat::as_ref), &core, o.data(), 19, 2, ws.context());
        assert_close(&Mat::from_vec(all, 19, 2), &explicit(x, &core, &o, false), 1e-13);
        assert_close(&causal(x, &core, &o), &explicit(x, &core, &o, true), 1e-13);
    }

    #[test]
    fn several_cores_are_their_mean_and_outputs_are_linear_in_them() {
        let x = random("x", 20, 12);
        let with_cores = |g: Vec<f32>| {
            let options = small().with("cores", g.len() / 6);
            let mut weights = random_weights(&(LAYER.weights)(&SHAPE, &options).unwrap());
            let rows = g.len();
            weights.insert("core".into(), testing::dense(Mat::from_vec(g, rows, 1)));
            LAYER.layer(&SHAPE, &options, weights).unwrap()
        };
        let g: Vec<f32> = random("g", 18, 1).into_vec();
        let mean = mean_core(&g, 6);
        let doubled: Vec<f32> = mean.iter().map(|g| 2.0 * g).collect();
        let (three, one, two) = (with_cores(g), with_cores(mean), with_cores(doubled));
        testing::assert_close(&forward(&*three, &x, &[20]), &forward(&*one, &x, &[20]));
        testing::assert_close(&forward_all(&*three, &x), &forward_all(&*one, &x));
        let twice: Vec<f32> = forward_all(&*one, &x).iter().map(|y| 2.0 * y).collect();
        testing::assert_close(&forward_all(&*two, &x), &twice);
    }

    #[test]
    fn outputs_are_linear_in_the_queries() {
        let x = [1, 2, 3].map(|s| fill(7, 3, s, 1.0));
        let o = fill(49, 2, 4, 1.0);
        let ws = Workspace::single().unwrap();
        let run = |q: &Mat<f64>| {
            attend_all(
                [q.as_ref(), x[1].as_ref(), x[2].as_ref()],
                &[0.5, 0.2, 0.3],
                o.data(),
                7,
                2,
                ws.context(),
            )
        };
        let (p, q) = (fill(7, 3, 8, 1.0), &x[0]);
        let sum = Mat::from_fn(7, 3, |i, j| p[(i, j)] + 3.0 * q[(i, j)]);
        let want: Vec<f64> = run(&p).iter().zip(run(q)).map(|(a, b)| a + 3.0 * b).collect();
        assert!(run(&sum).iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-13));
    }

    #[test]
    fn counts_are_those_of_the_page_and_longer_texts_are_refused() {
        let wide = LayerShape { d_model: 256, ..SHAPE };
        let options = Options::new().with("rank", 40).with("seq_len", 80);
        let specs = (LAYER.weights)(&wide, &options).unwrap();
        let total: usize = specs.iter().map(|w| w.n_out * w.n_in).sum();
        assert_eq!(total, 3 * 256 * 40 + 2 * 40 + 80 * 80 * 256);
        let layer = random_layer(&LAYER, &SHAPE, &small());
        let all = layer.cost(Mask::None, 0, 24).unwrap().run_flops;
        assert_eq!(all, 6 * 24 * 12 * 6 + 2 * 24 * 24 * 6 * 12 + 4 * 24 * 6 * 12);
        let x = random("x", 25, 12);
        let mut ws = Workspace::single().unwrap();
        let mut out = vec![0.0; 300];
        assert!(layer.forward(x.as_ref(), &mut *layer.new_cache(), &mut out, &mut ws).is_err());
        assert!(layer.forward_all(x.as_ref(), &mut out, &mut ws).is_err());
    }
}
