//! Collaborative attention: all heads share one query and one key projection and weigh its features.
//!
//! **Idea.** Instead of a projection for each head, one of width $R$ for all; head $h$ multiplies the $R$ features by
//! row $h$ of a mixing matrix before it compares.
//!
//! **Math.** $\tilde Q = X \tilde W_Q$, $\tilde K = X \tilde W_K$ ($N \times R$), $c = X V_c^\top$ ($N \times H$);
//! head $h$ has logits $\tau(\tilde q_i \odot M_h) \cdot \tilde k_j + \tau c_{jh}$, then softmax and values as usual. A
//! multi-head layer with $R = H d$ features, $M$ one-hot by blocks and $V_c^h = W_K^h b_Q^h$ is the special case in
//! which $b_K$ has no effect: it adds a constant to every row of logits.
//!
//! **Reference.** cordonnier2020; conversion of trained layers: [`conversions`](crate::conversions::collaborative).
//! The public code divides by $\sqrt{R/H}$; `temperature` selects the width.
//!
//! **Cost.** Projections $4 N D R$ instead of $4 N D H d$; **scores $2 N^2 R H$, no fewer than multi-head attention
//! unless $R \le d$**. Parameters of queries and keys $R(2D + H) + HD$. The cache holds $R + H + H d_v$ numbers per
//! token.
//!
//! **Guarantees.** Equal to multi-head attention with all four biases at $R = Hd$; tested here.
//!
//! **When to use.** To shrink query and key projections of BERT- and GPT-2-like layers. Rotary positions stand between
//! $W_Q$ and $W_K^\top$ and rule it out.

use super::common::fold::attend;
use super::common::rows::{HeadRows, interleave};
use super::common::{
    check_cross, check_io, check_own_keys, check_shape, constant, layer_kind, needed, optional, own, project,
    take,
};
use crate::layer::{Layer, LayerCache, LayerShape, Linear, WeightSpec, Weights};
use crate::workspace::Context;
use crate::{Cost, Mask, MatRef, Problem, Result, RunInfo, Workspace};
use attlas_num::kernels::Band;
use attlas_num::par::*;

layer_kind! {
    /// Registry entry.
    Collaborative {
        id: "collaborative",
        title: "Collaborative multi-head attention: shared query and key features",
        reference: "cordonnier2020",
        weights: weight_specs,
        cache_elements: |s, p| Ok(p.rank(s) + s.n_heads * (1 + s.d_v)),
    }
}

crate::choices! {
    /// Divisor of the logits.
    pub enum Temperature {
        /// √d, as in the layer it replaces.
        Original = "original",
        /// √(R / H), as in the public code.
        FromRank = "from_rank",
    }
}

crate::params! {
    /// Parameters of [`Collaborative`].
    pub struct Params {
        /// Shared features R; auto is H·d / 2.
        rank: Option<usize> = None, in 1..=1 << 20;
        /// Divisor of the logits.
        temperature: Temperature = Temperature::Original;
    }
}

impl Params {
    fn rank(&self, s: &LayerShape) -> usize {
        self.rank.unwrap_or((s.n_heads * s.d / 2).max(1))
    }
}

fn weight_specs(s: &LayerShape, p: &Params) -> Result<Vec<WeightSpec>> {
    check_shape(s)?;
    check_own_keys(s, "")?;
    let r = p.rank(s);
    Ok(vec![
        needed("q", r, s.d_model),
        needed("k", r, s.d_model),
        needed("mix", s.n_heads * r, 1),
        optional("content", s.n_heads, s.d_model),
        needed("v", s.n_heads * s.d_v, s.d_model),
        needed("o", s.d_model, s.n_heads * s.d_v),
    ])
}

/// The collaborative attention layer.
#[derive(Debug)]
pub struct Collaborative {
    shape: LayerShape,
    rank: usize,
    scale: f32,
    q: Box<dyn Linear>,
    k: Box<dyn Linear>,
    v: Box<dyn Linear>,
    o: Box<dyn Linear>,
    content: Option<Box<dyn Linear>>,
    /// `heads × rank`.
    mix: Vec<f32>,
    mix_parameters: usize,
}

impl Collaborative {
    /// Makes the layer from its weights `q`, `k`, `mix` (`heads × rank` numbers), `v`, `o` and, if there is one,
    /// `content`.
    pub fn new(shape: LayerShape, params: Params, mut weights: Weights) -> Result<Self> {
        weight_specs(&shape, &params)?;
        let rank = params.rank(&shape);
        let width = match params.temperature {
            Temperature::Original => shape.d as f64,
            Temperature::FromRank => rank as f64 / shape.n_heads as f64,
        };
        let content = weights.remove("content");
        let mut take = |name| take(&mut weights, name);
        let mix = take("mix")?;
        Ok(Self {
            shape,
            rank,
            scale: (1.0 / width.sqrt()) as f32,
            q: take("q")?,
            k: take("k")?,
            v: take("v")?,
            o: take("o")?,
            content,
            mix_parameters: mix.parameters(),
            mix: constant(&*mix),
        })
    }

    fn run(
        &self,
        x: MatRef<'_, f32>,
        context: MatRef<'_, f32>,
        cache: &mut SharedKeyCache,
        band: Band,
        out: &mut [f32],
        cx: Context<'_>,
    ) {
        let (s, r, n) = (&self.shape, self.rank, x.rows());
        let q = project(&*self.q, x, cx);
        cache.k.append(&project(&*self.k, context, cx));
        cache.v.append(&project(&*self.v, context, cx));
        let content = match &self.content {
            Some(w) => project(&**w, context, cx),
            None => vec![0.0; context.rows() * s.n_heads],
        };
        cache.content.append(&content.iter().map(|c| self.scale * c).collect::<Vec<f32>>());
        // One call computes the rows of a block; more calls than threads keep all threads busy.
        const ROWS: usize = 256;
        let tasks: Vec<(usize, usize)> =
            (0..s.n_heads).flat_map(|h| (0..n).step_by(ROWS).map(move |i| (h, i))).collect();
        let rows: Vec<Vec<f32>> = tasks
            .par_iter()
            .map(|&(h, start)| {
                let end = (start + ROWS).min(n);
                let mix = &self.mix[h * r..(h + 1) * r];
                let mixed: Vec<f32> = q[start * r..end * r]
                    .chunks_exact(r)
                    .flat_map(|row| row.iter().zip(mix).map(|(q, m)| q * m))
                    .collect();
                let (k, v) = (cache.k.head(0), cache.v.head(h));
                let bias = self.content.as_ref().map(|_| cache.content.data(h));
                attend(MatRef::new(&mixed, end - start, r), k, v, self.scale, bias, band.from_row(start), cx)
                    .0
            })
            .collect();
        let mut parts = vec![Vec::with_capacity(n * s.d_v); s.n_heads];
        tasks.iter().zip(rows).for_each(|(&(h, _), rows)| parts[h].extend(rows));
        self.o.apply(MatRef::new(&interleave(&parts, n, s.d_v), n, s.n_heads * s.d_v), out, cx);
    }

    fn empty(&self) -> SharedKeyCache {
        let s = &self.shape;
        SharedKeyCache {
            k: HeadRows::new(1, self.rank),
            v: HeadRows::new(s.n_heads, s.d_v),
            content: HeadRows::new(s.n_heads, 1),
        }
    }
}

impl Layer for Collaborative {
    fn shape(&self) -> LayerShape {
        self.shape
    }

    fn parameters(&self) -> usize {
        let dense = [&self.q, &self.k, &self.v, &self.o].into_iter().chain(&self.content);
        self.mix_parameters + dense.map(|w| w.parameters()).sum::<usize>()
    }

    fn cache_elements(&self) -> usize {
        self.rank + self.shape.n_heads * (1 + self.shape.d_v)
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
        let cache: &mut SharedKeyCache = own(cache, LAYER.id)?;
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
        let projections = 2 * (tokens * (self.parameters() - self.mix_parameters)) as u64;
        let mixing = (tokens * s.n_heads * self.rank) as u64;
        Some(Cost {
            setup_flops: 0,
            run_flops: projections + mixing + 2 * p.visible_pairs() * (self.rank + s.d_v) as u64,
            bytes: 4 * ((cached + tokens) * self.cache_elements() + 2 * tokens * s.d_model) as u64,
        })
    }
}

/// Shared keys, values of every head, and what each key adds to the logits of each head.
#[derive(Debug)]
struct SharedKeyCache {
    k: HeadRows,
    v: HeadRows,
    content: HeadRows,
}

impl LayerCache for SharedKeyCache {
    fn len(&self) -> usize {
        self.k.len()
    }

    fn truncate(&mut self, len: usize) {
        [&mut self.k, &mut self.v, &mut self.content].into_iter().for_each(|rows| rows.truncate(len));
    }

    fn bytes(&self) -> usize {
        self.k.bytes() + self.v.bytes() + self.content.bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{
        assert_close, check_causal, forward, forward_all, random, random_layer, random_weights, weights_from,
    };
    use super::*;
    use crate::layer::Dense;
    use crate::{Mat, Options};
    use attlas_num::tensor::known;

    const SHAPE: LayerShape = LayerShape { d_model: 20, n_heads: 4, n_kv_heads: 4, d: 6, d_v: 5 };

    #[test]
    fn keeps_what_every_causal_layer_keeps() {
        check_causal(&LAYER, &SHAPE, &Options::new(), 33);
        check_causal(&LAYER, &SHAPE, &Options::new().with("rank", 3).with("temperature", "from_rank"), 14);
    }

    /// Makes the weight of a map, `head·out × in`, from the sequence `fill` read as `[head, in, out]`.
    fn heads_of(heads: usize, n_in: usize, n_out: usize, seed: u64) -> Mat<f32> {
        Mat::from_fn(heads * n_out, n_in, |o, i| {
            known::entry((o / n_out * n_in + i) * n_out + o % n_out, seed) as f32
        })
    }

    fn biases(n: usize, seed: u64) -> Option<Vec<f32>> {
        Some((0..n).map(|k| known::entry(k, seed) as f32).collect())
    }

    /// The multi-head layer of the known answer, in collaborative form with one-hot blocks.
    fn known_weights(b_k: f32) -> Weights {
        let (h, dh, d) = (2, 3, 8);
        let (w_k, b_q) = (heads_of(h, d, dh, 12), biases(h * dh, 15).unwrap());
        let content =
            Mat::from_fn(h, d, |head, i| (0..dh).map(|e| w_k[(head * dh + e, i)] * b_q[head * dh + e]).sum());
        let mut weights = weights_from([
            ("q", heads_of(h, d, dh, 11)),
            ("content", content),
            (
                "mix",
                Mat::from_fn(h * h * dh, 1, |i, _| if i % (h * dh) / dh == i / (h * dh) { 1.0 } else { 0.0 }),
            ),
            ("o", Mat::from_fn(d, h * dh, |o, i| known::entry(i * d + o, 14) as f32)),
        ]);
        // The bias of keys has no effect.
        weights.insert("k".into(), Box::new(Dense { weight: w_k, bias: Some(vec![b_k; h * dh]) }));
        weights
            .insert("v".into(), Box::new(Dense { weight: heads_of(h, d, dh, 13), bias: biases(h * dh, 17) }));
        weights
    }

    #[test]
    fn full_rank_is_multi_head_attention_with_all_biases() {
        let s = LayerShape { d_model: 8, n_heads: 2, n_kv_heads: 2, d: 3, d_v: 3 };
        let x = Mat::from_fn(5, 8, |i, j| known::entry(i * 8 + j, 10) as f32);
        for b_k in [0.0, 0.7] {
            let layer = LAYER.layer(&s, &Options::new().with("rank", 6), known_weights(b_k)).unwrap();
            let out = forward(&*layer, &x, &[5]);
            let first =
                [-1.116431419471, 0.653296428693, -1.670487212782, -0.339194823440].map(|x: f64| x as f32);
            let last =
                [-1.027197066212, 0.462907148184, -1.131881347950, -0.085972796478].map(|x: f64| x as f32);
            assert_close(&out[..4], &first);
            assert_close(&out[32..36], &last);
            assert!((f64::from(out.iter().sum::<f32>()) + 25.930389211144).abs() < 1e-4);
        }
    }

    #[test]
    fn permuting_the_shared_features_changes_nothing() {
        let x = random("x", 19, 20);
        let options = Options::new().with("rank", 7);
        let layer = random_layer(&LAYER, &SHAPE, &options);
        let order = [3, 0, 6, 1, 5, 2, 4];
        let mut weights = random_weights(&(LAYER.weights)(&SHAPE, &options).unwrap());
        for name in ["q", "k"] {
            let w = random(name, 7, 20);
            weights.insert(name.into(), Box::new(Dense::new(Mat::from_fn(7, 20, |i, j| w[(order[i], j)]))));
        }
        let mix = random("mix", 28, 1);
        weights.insert(
            "mix".into(),
            Box::new(Dense::new(Mat::from_fn(28, 1, |i, _| mix[(i / 7 * 7 + order[i % 7], 0)]))),
        );
        let permuted = LAYER.layer(&SHAPE, &options, weights).unwrap();
        assert_close(&forward(&*permuted, &x, &[19]), &forward(&*layer, &x, &[19]));
        assert_close(&forward_all(&*permuted, &x)[18 * 20..], &forward(&*layer, &x, &[19])[18 * 20..]);
    }

    #[test]
    fn counts_are_those_of_the_page() {
        let bert = LayerShape { d_model: 768, n_heads: 12, n_kv_heads: 12, d: 64, d_v: 64 };
        let of = |rank: usize| {
            let specs = (LAYER.weights)(&bert, &Options::new().with("rank", rank)).unwrap();
            let shared = ["q", "k", "mix", "content"];
            specs.iter().filter(|w| shared.contains(&w.name)).map(|w| w.n_out * w.n_in).sum::<usize>()
        };
        for rank in [768, 384, 256] {
            assert_eq!(of(rank), rank * (2 * 768 + 12) + 12 * 768);
        }
        // BERT-base in millions of parameters: queries and keys of 12 layers with their biases are replaced.
        let total = |rank: usize| (109_482_240 - 12 * 2 * 768 * 769 + 12 * of(rank)) as f64 / 1e6;
        let change = [(768, 108.51 - 108.31), (384, 101.38 - 108.31), (256, 99.00 - 108.31)];
        for (rank, want) in change {
            assert!(
                (total(rank) - 109.48224 - want).abs() < 0.01,
                "rank {rank}: {}",
                total(rank) - 109.48224
            );
        }
        assert_eq!((LAYER.cache_elements)(&bert, &Options::new().with("rank", 256)).unwrap(), 256 + 12 + 768);
        let s = LayerShape { d_model: 16, n_heads: 4, n_kv_heads: 4, d: 4, d_v: 4 };
        let layer = random_layer(&LAYER, &s, &Options::new().with("rank", 8));
        let at = |n| layer.cost(Mask::None, 0, n).unwrap().run_flops;
        // The quadratic part: scores over R features, values over d_v, for each head.
        assert_eq!(at(200) + at(0) - 2 * at(100), 2 * 2 * 100 * 100 * 4 * (8 + 4));
    }
}
