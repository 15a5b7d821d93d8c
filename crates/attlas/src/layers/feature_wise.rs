//! Feature-wise tensorised self-attention: scores of pairs of tokens and of single features together.
//!
//! **Idea.** A score for each pair of tokens *and* each feature of the values, a tensor $N \times N \times d_v$, so that different
//! features of one value can be weighted differently; computed without storing the tensor.
//!
//! **Math.** For each head, $\mathcal{S}(i, j, l) = \tau \langle q_i, k_j \rangle + b_{jl}$ with $b = c \tanh(X W_s / c)$, $c$ =
//! `cap`, and $o_{il} = \sum_j \mathrm{softmax}_j(\mathcal{S}(i, \cdot, l))_j\, v_{jl}$. Since $e^{\mathcal{S}}$ is a product,
//! $$o_{il} = \frac{\sum_j p_{ij}\, e^{b_{jl}} v_{jl}}{\sum_j p_{ij}\, e^{b_{jl}}}, \qquad p_i = \mathrm{softmax}(\tau \langle q_i, k_\cdot \rangle):$$
//! one ordinary attention with the values $[e^b \odot v,\; e^b]$, and a division.
//!
//! **Reference.** shen2019: alignment scores of tokens with tokens and of single tokens with features. The paper
//! computes $b$ by two layers, which may replace the map $s$, and adds position masks. The form $Q(i, l) K(j, l)$ in
//! which the survey writes the tensor is `grouped_query` with heads of width 1.
//!
//! **Cost.** $2 N^2 (d + 2 d_v)$ operations per head, half of it when causal; the cache holds $d + 2 d_v$ numbers per
//! token and head.
//!
//! **Guarantees.** A zero map $s$ gives multi-head attention; a constant that $s$ adds to all tokens cancels; tested
//! here. The weights of a feature are at most $e^{2c}$ times those of multi-head attention.
//!
//! **When to use.** Models trained with it.

use super::common::fold::attend;
use super::common::rows::{HeadRows, head_of, interleave};
use super::common::{
    check_cross, check_io, check_own_keys, check_shape, layer_kind, needed, own, project, projections, take,
};
use crate::layer::{Layer, LayerCache, LayerShape, Linear, WeightSpec, Weights};
use crate::workspace::Context;
use crate::{Cost, Mask, MatRef, Problem, Result, RunInfo, Workspace};
use attlas_num::kernels::Band;
use attlas_num::par::*;

layer_kind! {
    /// Registry entry.
    FeatureWise {
        id: "feature_wise",
        title: "Tensorised self-attention: a score for each pair of tokens and feature",
        reference: "shen2019",
        weights: weight_specs,
        cache_elements: |s, _| Ok(s.n_heads * (s.d + 2 * s.d_v)),
    }
}

crate::params! {
    /// Parameters of [`FeatureWise`].
    pub struct Params {
        /// Largest score of a feature: scores are cap · tanh(x / cap).
        cap: f64 = 5.0, in 1e-3..=40.0;
    }
}

fn weight_specs(s: &LayerShape, _: &Params) -> Result<Vec<WeightSpec>> {
    check_shape(s)?;
    check_own_keys(s, "")?;
    let mut list = projections(["q", "k", "v", "o"], s).to_vec();
    list.push(needed("s", s.n_heads * s.d_v, s.d_model));
    Ok(list)
}

/// The feature-wise attention layer.
#[derive(Debug)]
pub struct FeatureWise {
    shape: LayerShape,
    cap: f32,
    q: Box<dyn Linear>,
    k: Box<dyn Linear>,
    v: Box<dyn Linear>,
    s: Box<dyn Linear>,
    o: Box<dyn Linear>,
}

impl FeatureWise {
    /// Makes the layer from its weights `q`, `k`, `v`, `s` and `o`.
    pub fn new(shape: LayerShape, params: Params, mut weights: Weights) -> Result<Self> {
        params.validate()?;
        weight_specs(&shape, &params)?;
        let mut take = |name| take(&mut weights, name);
        Ok(Self {
            shape,
            cap: params.cap as f32,
            q: take("q")?,
            k: take("k")?,
            v: take("v")?,
            s: take("s")?,
            o: take("o")?,
        })
    }

    fn empty(&self) -> WeightedValueCache {
        let s = &self.shape;
        WeightedValueCache { k: HeadRows::new(s.n_heads, s.d), v: HeadRows::new(s.n_heads, 2 * s.d_v) }
    }

    fn run(
        &self,
        x: MatRef<'_, f32>,
        context: MatRef<'_, f32>,
        cache: &mut WeightedValueCache,
        band: Band,
        out: &mut [f32],
        cx: Context<'_>,
    ) {
        let (s, n) = (&self.shape, x.rows());
        let q = project(&*self.q, x, cx);
        cache.k.append(&project(&*self.k, context, cx));
        let (v, b) = (project(&*self.v, context, cx), project(&*self.s, context, cx));
        let mut weighted = Vec::with_capacity(2 * v.len());
        for (v, b) in v.chunks_exact(s.d_v).zip(b.chunks_exact(s.d_v)) {
            let weight = |b: &f32| (self.cap * (b / self.cap).tanh()).exp();
            weighted.extend(v.iter().zip(b).map(|(v, b)| v * weight(b)));
            weighted.extend(b.iter().map(weight));
        }
        cache.v.append(&weighted);
        let scale = (1.0 / (s.d as f64).sqrt()) as f32;
        let parts: Vec<Vec<f32>> = (0..s.n_heads)
            .into_par_iter()
            .map(|h| {
                let rows = head_of(&q, n, s.n_heads, s.d, h);
                let (sums, _) = attend(rows, cache.k.head(h), cache.v.head(h), scale, None, band, cx);
                let divided = |row: &[f32]| -> Vec<f32> {
                    let (num, den) = row.split_at(s.d_v);
                    num.iter().zip(den).map(|(n, d)| n / d).collect()
                };
                sums.chunks_exact(2 * s.d_v).flat_map(divided).collect()
            })
            .collect();
        self.o.apply(MatRef::new(&interleave(&parts, n, s.d_v), n, s.n_heads * s.d_v), out, cx);
    }
}

impl Layer for FeatureWise {
    fn shape(&self) -> LayerShape {
        self.shape
    }

    fn parameters(&self) -> usize {
        [&self.q, &self.k, &self.v, &self.s, &self.o].into_iter().map(|w| w.parameters()).sum()
    }

    fn cache_elements(&self) -> usize {
        self.shape.n_heads * (self.shape.d + 2 * self.shape.d_v)
    }

    fn new_cache(&self) -> Box<dyn LayerCache> {
        Box::new(self.empty())
    }

    fn forward(
        &self,
        x: MatRef<'_, f32>,
        cache: &mut dyn LayerCache,
        out: &mut [f32],
        ws: &mut Workspace,
    ) -> Result<RunInfo> {
        check_io(x, out, self.shape.d_model)?;
        let cache: &mut WeightedValueCache = own(cache, LAYER.id)?;
        let first = cache.k.len();
        ws.install(|cx| self.run(x, x, cache, Band::causal(first as isize), out, cx));
        let p = Problem::new(self.shape.n_heads, 1, 1).with_lens(x.rows(), first + x.rows()).causal();
        Ok(RunInfo::visited(p.visible_pairs()))
    }

    fn forward_all(&self, x: MatRef<'_, f32>, out: &mut [f32], ws: &mut Workspace) -> Result<RunInfo> {
        check_io(x, out, self.shape.d_model)?;
        ws.install(|cx| self.run(x, x, &mut self.empty(), Band::ALL, out, cx));
        Ok(RunInfo::visited(Problem::new(self.shape.n_heads, x.rows(), 1).visible_pairs()))
    }

    fn forward_cross(
        &self,
        x: MatRef<'_, f32>,
        context: MatRef<'_, f32>,
        out: &mut [f32],
        ws: &mut Workspace,
    ) -> Result<RunInfo> {
        check_cross(x, context, out, self.shape.d_model)?;
        ws.install(|cx| self.run(x, context, &mut self.empty(), Band::ALL, out, cx));
        let p = Problem::new(self.shape.n_heads, 1, 1).with_lens(x.rows(), context.rows());
        Ok(RunInfo::visited(p.visible_pairs()))
    }

    fn cost(&self, mask: Mask, cached: usize, tokens: usize) -> Option<Cost> {
        let s = &self.shape;
        let p = Problem { mask, ..Problem::new(s.n_heads, 1, 1) }.with_lens(tokens, cached + tokens);
        Some(Cost {
            setup_flops: 0,
            run_flops: 2 * (tokens * self.parameters()) as u64
                + 2 * p.visible_pairs() * (s.d + 2 * s.d_v) as u64,
            bytes: 4 * ((cached + tokens) * self.cache_elements() + 2 * tokens * s.d_model) as u64,
        })
    }
}

/// Keys, and weighted values with their weights.
#[derive(Debug)]
struct WeightedValueCache {
    k: HeadRows,
    v: HeadRows,
}

impl LayerCache for WeightedValueCache {
    fn len(&self) -> usize {
        self.k.len()
    }

    fn truncate(&mut self, len: usize) {
        self.k.truncate(len);
        self.v.truncate(len);
    }

    fn bytes(&self) -> usize {
        self.k.bytes() + self.v.bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{
        assert_close, check_causal, forward, forward_all, random, random_layer, random_weights,
    };
    use super::*;
    use crate::layer::Dense;
    use crate::{Mat, Options, registry};

    const SHAPE: LayerShape = LayerShape { d_model: 20, n_heads: 3, n_kv_heads: 3, d: 6, d_v: 5 };

    #[test]
    fn keeps_what_every_causal_layer_keeps() {
        check_causal(&LAYER, &SHAPE, &Options::new(), 33);
        check_causal(&LAYER, &SHAPE, &Options::new().with("cap", 0.5), 14);
    }

    /// The definition: a softmax over tokens for every feature.
    #[test]
    fn it_is_the_softmax_over_tokens_for_every_feature() {
        let (n, s) = (9, SHAPE);
        let x = random("x", n, s.d_model);
        let image = |name: &str, width: usize| {
            let w = random(name, s.n_heads * width, s.d_model);
            Mat::from_fn(n, s.n_heads * width, |i, o| {
                (0..s.d_model).map(|c| w[(o, c)] * x[(i, c)]).sum::<f32>()
            })
        };
        let (q, k, v, b) = (image("q", s.d), image("k", s.d), image("v", s.d_v), image("s", s.d_v));
        let heads = Mat::from_fn(n, s.n_heads * s.d_v, |i, l| {
            let h = l / s.d_v;
            let weight = |j: usize| {
                let score: f32 = (0..s.d).map(|c| q[(i, h * s.d + c)] * k[(j, h * s.d + c)]).sum();
                f64::from(score / (s.d as f32).sqrt() + 5.0 * (b[(j, l)] / 5.0).tanh()).exp()
            };
            let total: f64 = (0..n).map(weight).sum();
            ((0..n).map(|j| weight(j) * f64::from(v[(j, l)])).sum::<f64>() / total) as f32
        });
        let o = random("o", s.d_model, s.n_heads * s.d_v);
        let want: Vec<f32> = (0..n * s.d_model)
            .map(|t| (0..heads.cols()).map(|l| o[(t % s.d_model, l)] * heads[(t / s.d_model, l)]).sum())
            .collect();
        let layer = random_layer(&LAYER, &s, &Options::new());
        assert_close(&forward_all(&*layer, &x), &want);
    }

    #[test]
    fn scores_that_are_zero_or_alike_for_all_tokens_are_multi_head_attention() {
        let x = random("x", 17, SHAPE.d_model);
        let specs = (LAYER.weights)(&SHAPE, &Options::new()).unwrap();
        let (n_out, n_in) = (SHAPE.n_heads * SHAPE.d_v, SHAPE.d_model);
        let multi_head = registry::layer("grouped_query").unwrap();
        let mut others = random_weights(&specs);
        others.remove("s");
        let plain = multi_head.layer(&SHAPE, &Options::new().with("rope", "none"), others).unwrap();
        for bias in [0.0, 1.5] {
            let mut weights = random_weights(&specs);
            let s = Dense { weight: Mat::zeros(n_out, n_in), bias: Some(vec![bias; n_out]) };
            weights.insert("s".into(), Box::new(s));
            let layer = LAYER.layer(&SHAPE, &Options::new(), weights).unwrap();
            assert_close(&forward(&*layer, &x, &[17]), &forward(&*plain, &x, &[17]));
            assert_close(&forward_all(&*layer, &x), &forward_all(&*plain, &x));
        }
    }
}
