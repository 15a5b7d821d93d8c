//! Grouped-query attention: many query heads share few key heads; MHA and MQA are its two ends.
//!
//! **Idea.** Project hidden states to queries, keys and values, rotate queries and keys by position, attend, and
//! project the heads' outputs back. `n_kv_heads = n_heads` is multi-head, `n_kv_heads = 1` multi-query attention.
//!
//! **Math.** $q_h = W_Q^h x$, $k_g = W_K^g x$, $v_g = W_V^g x$; query head $h$ uses key head
//! $g = \lfloor h\, n_{kv} / n_h \rfloor$; $y = W_O [o_0; \dots; o_{n_h - 1}]$. Keys are rotated once and cached
//! rotated. Attention itself is any method of the registry that has a causal form.
//!
//! **Reference.** vaswani2017 (MHA), shazeer2019 (MQA), ainslie2023 (GQA), su2024 (RoPE); survey, Section 2.
//!
//! **Cost.** $4 D n_h d + 4 D n_{kv} d$ operations per token for the projections when $d_v = d$, then the method's;
//! the cache holds $n_{kv}(d + d_v)$ numbers per token.
//!
//! **Guarantees.** With `exact`, token-by-token decoding, any chunking and one-shot prefill agree to rounding;
//! grouped heads equal multi-head attention with repeated weights. Both tested here.
//!
//! **When to use.** It is the layer of Llama, Mistral, Qwen and most models since.

pub use super::common::Pairs;

use super::common::{Rotary, check_cross, check_io, check_shape, check_unrotated, own, projections, take};
use crate::cache::KvCache;
use crate::layer::{Layer, LayerCache, LayerKind, LayerShape, Linear, Weights};
use crate::method::{Method, RunInfo};
use crate::methods::exact::exact::METHOD as EXACT;
use crate::{Error, Mask, MatRef, Options, Out, Problem, Qkv, Result, TensorMut, TensorRef, Workspace};
use attlas_num::rope::{Layout, Rope, Scaling};

/// Registry entry.
pub static LAYER: LayerKind = LayerKind {
    id: "grouped_query",
    title: "Grouped-query attention (MHA, GQA, MQA) with rotary positions",
    reference: "vaswani2017, shazeer2019, ainslie2023, su2024",
    grid: None,
    params: Params::SPECS,
    weights: |shape, _| Ok(projections(["q", "k", "v", "o"], shape).into()),
    cache_elements: |shape, _| Ok(shape.n_kv_heads * (shape.d + shape.d_v)),
    build: |shape, options, weights| {
        let params = Params::from_options(options)?;
        let rope = params.rope(shape)?;
        let layer = GroupedQuery::new(*shape, weights, rope, &EXACT, Options::new())?;
        Ok(Box::new(layer))
    },
};

crate::params! {
    /// Parameters of [`GroupedQuery`].
    pub struct Params {
        /// Layout of rotated pairs, or none for a layer without rotary positions.
        rope: Pairs = Pairs::Half;
        /// Base of the rotation frequencies.
        rope_base: f64 = 10_000.0, in 1.0..=1e12;
    }
}

impl Params {
    fn rope(&self, shape: &LayerShape) -> Result<Option<Rope>> {
        let layout = match self.rope {
            Pairs::None => return Ok(None),
            Pairs::Half => Layout::Half,
            Pairs::Interleaved => Layout::Interleaved,
        };
        if !shape.d.is_multiple_of(2) {
            return Err(Error::shape("head width", "an even number for rotary positions", shape.d));
        }
        Ok(Some(Rope { dim: shape.d, base: self.rope_base, layout, scaling: Scaling::None }))
    }
}

/// The layer: four projections, the rotation, and the method that attends.
#[derive(Debug)]
pub struct GroupedQuery {
    shape: LayerShape,
    q: Box<dyn Linear>,
    k: Box<dyn Linear>,
    v: Box<dyn Linear>,
    o: Box<dyn Linear>,
    rotary: Option<Rotary>,
    method: &'static Method,
    options: Options,
}

impl GroupedQuery {
    /// Makes a layer that attends by `method`. [`LayerKind::layer`] has checked the weights `q`, `k`, `v` and `o`;
    /// missing ones are also refused here.
    pub fn new(
        shape: LayerShape,
        mut weights: Weights,
        rope: Option<Rope>,
        method: &'static Method,
        options: Options,
    ) -> Result<Self> {
        let mut take = |name| take(&mut weights, name);
        let (q, k, v, o) = (take("q")?, take("k")?, take("v")?, take("o")?);
        check_shape(&shape)?;
        Ok(Self { shape, q, k, v, o, rotary: rope.map(Rotary::from_rope), method, options })
    }
}

impl Layer for GroupedQuery {
    fn shape(&self) -> LayerShape {
        self.shape
    }

    fn parameters(&self) -> usize {
        [&self.q, &self.k, &self.v, &self.o].iter().map(|w| w.parameters()).sum()
    }

    fn cache_elements(&self) -> usize {
        self.shape.n_kv_heads * (self.shape.d + self.shape.d_v)
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
        self.append_and_attend(x, x, own::<RotatedCache>(cache, LAYER.id)?, Mask::Causal, out, ws)
    }

    fn forward_all(&self, x: MatRef<'_, f32>, out: &mut [f32], ws: &mut Workspace) -> Result<RunInfo> {
        check_io(x, out, self.shape.d_model)?;
        self.append_and_attend(x, x, &mut self.empty(), Mask::None, out, ws)
    }

    fn forward_cross(
        &self,
        x: MatRef<'_, f32>,
        context: MatRef<'_, f32>,
        out: &mut [f32],
        ws: &mut Workspace,
    ) -> Result<RunInfo> {
        check_cross(x, context, out, self.shape.d_model)?;
        check_unrotated(LAYER.id, self.rotary.is_some())?;
        self.append_and_attend(x, context, &mut self.empty(), Mask::None, out, ws)
    }
}

impl GroupedQuery {
    fn empty(&self) -> RotatedCache {
        let s = &self.shape;
        RotatedCache(KvCache::new(1, s.n_kv_heads, s.d, s.d_v, 0))
    }

    /// Appends the tokens of `context` to a cache and attends to it with those of `x`.
    fn append_and_attend(
        &self,
        x: MatRef<'_, f32>,
        context: MatRef<'_, f32>,
        RotatedCache(cache): &mut RotatedCache,
        mask: Mask,
        out: &mut [f32],
        ws: &mut Workspace,
    ) -> Result<RunInfo> {
        let s = self.shape;
        let (tokens, keys) = (x.rows(), context.rows());
        let first = cache.len();
        let p = Problem { d_v: s.d_v, mask, ..Problem::new(s.n_heads, 1, s.d).with_kv_heads(s.n_kv_heads) };
        let problem = p.with_lens(tokens, first + keys);
        let plan = self.method.plan(&problem, &self.options)?;

        let mut q = vec![0.0f32; tokens * s.n_heads * s.d];
        let mut k = vec![0.0f32; keys * s.n_kv_heads * s.d];
        let mut v = vec![0.0f32; keys * s.n_kv_heads * s.d_v];
        ws.install(|cx| {
            self.q.apply(x, &mut q, cx);
            self.k.apply(context, &mut k, cx);
            self.v.apply(context, &mut v, cx);
        });
        if let Some(rotary) = &self.rotary {
            rotary.rotate(first, &mut q, s.n_heads, s.d);
            rotary.rotate(first, &mut k, s.n_kv_heads, s.d);
        }
        cache.append(
            TensorRef::bnhd(&k, [1, s.n_kv_heads, keys, s.d])?,
            TensorRef::bnhd(&v, [1, s.n_kv_heads, keys, s.d_v])?,
        )?;
        let mut heads = vec![0.0f32; tokens * s.n_heads * s.d_v];
        let queries = TensorRef::bnhd(&q, [1, s.n_heads, tokens, s.d])?;
        let inputs = Qkv::new(queries, cache.keys()?, cache.values()?);
        let output = Out::new(TensorMut::bnhd(&mut heads, [1, s.n_heads, tokens, s.d_v])?);
        let info = plan.execute(&inputs.into(), &mut output.into(), ws)?;
        ws.install(|cx| self.o.apply(MatRef::new(&heads, tokens, s.n_heads * s.d_v), out, cx));
        Ok(info)
    }
}

/// Rotated keys and values.
#[derive(Debug)]
struct RotatedCache(KvCache<f32>);

impl LayerCache for RotatedCache {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn truncate(&mut self, len: usize) {
        self.0.truncate(len);
    }

    fn bytes(&self) -> usize {
        self.0.bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layer::{Dense, WeightSpec};
    use attlas_num::Mat;
    use attlas_num::rng::StreamKey;

    const SHAPE: LayerShape = LayerShape { d_model: 24, n_heads: 6, n_kv_heads: 2, d: 8, d_v: 4 };

    fn random(name: &str, rows: usize, cols: usize) -> Mat<f32> {
        let mut rng = StreamKey::new(1).named(name).rng();
        Mat::from_fn(rows, cols, |_, _| (0.3 * rng.normal()) as f32)
    }

    fn random_weights(shape: &LayerShape) -> Weights {
        let dense = |w: WeightSpec| {
            let linear: Box<dyn Linear> = Box::new(Dense::new(random(w.name, w.n_out, w.n_in)));
            (w.name.to_string(), linear)
        };
        projections(["q", "k", "v", "o"], shape).into_iter().map(dense).collect()
    }

    fn forward(layer: &dyn Layer, x: &Mat<f32>, chunks: &[usize]) -> Vec<f32> {
        let mut ws = Workspace::single().unwrap();
        let mut cache = layer.new_cache();
        let mut out = vec![f32::NAN; x.rows() * x.cols()];
        for &c in chunks {
            let rows = cache.len()..cache.len() + c;
            let part = &mut out[rows.start * x.cols()..rows.end * x.cols()];
            layer.forward(x.as_ref().sub_rows(rows), &mut *cache, part, &mut ws).unwrap();
        }
        assert_eq!(cache.bytes(), 4 * x.rows() * layer.cache_elements());
        out
    }

    fn assert_close(a: &[f32], b: &[f32]) {
        let worst = a.iter().zip(b).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
        assert!(worst < 1e-5, "largest difference {worst}");
    }

    #[test]
    fn decoding_chunks_and_one_shot_agree() {
        let x = random("x", 41, 24);
        for rope in ["half", "interleaved", "none"] {
            let options = Options::new().with("rope", rope);
            let layer = LAYER.layer(&SHAPE, &options, random_weights(&SHAPE)).unwrap();
            let whole = forward(&*layer, &x, &[41]);
            assert_close(&forward(&*layer, &x, &[1; 41]), &whole);
            assert_close(&forward(&*layer, &x, &[7, 1, 20, 13]), &whole);
        }
    }

    #[test]
    fn grouped_heads_equal_multi_head_with_repeated_weights() {
        let x = random("x", 19, 24);
        let mut weights = random_weights(&SHAPE);
        let grouped = LAYER.layer(&SHAPE, &Options::new(), random_weights(&SHAPE)).unwrap();
        for (name, width) in [("k", SHAPE.d), ("v", SHAPE.d_v)] {
            let w = random(name, SHAPE.n_kv_heads * width, 24);
            let repeated =
                Mat::from_fn(SHAPE.n_heads * width, 24, |i, j| w[(i / width / 3 * width + i % width, j)]);
            weights.insert(name.into(), Box::new(Dense::new(repeated)));
        }
        let shape = LayerShape { n_kv_heads: SHAPE.n_heads, ..SHAPE };
        let full = LAYER.layer(&shape, &Options::new(), weights).unwrap();
        assert_close(&forward(&*grouped, &x, &[19]), &forward(&*full, &x, &[19]));
        assert_eq!((grouped.cache_elements(), full.cache_elements()), (2 * 12, 6 * 12));
    }

    #[test]
    fn both_layouts_agree_when_rows_are_permuted() {
        let x = random("x", 19, 24);
        let half = LAYER.layer(&SHAPE, &Options::new(), random_weights(&SHAPE)).unwrap();
        let mut weights = random_weights(&SHAPE);
        for (name, heads) in [("q", SHAPE.n_heads), ("k", SHAPE.n_kv_heads)] {
            let w = random(name, heads * SHAPE.d, 24);
            let rows = attlas_num::rope::convert_rows(w.data(), 24, heads, SHAPE.d, Layout::Interleaved);
            weights.insert(name.into(), Box::new(Dense::new(Mat::from_vec(rows, heads * SHAPE.d, 24))));
        }
        let interleaved = LAYER.layer(&SHAPE, &Options::new().with("rope", "interleaved"), weights).unwrap();
        assert_close(&forward(&*half, &x, &[19]), &forward(&*interleaved, &x, &[19]));
    }

    #[test]
    fn truncating_the_cache_takes_tokens_back() {
        let x = random("x", 12, 24);
        let layer = LAYER.layer(&SHAPE, &Options::new(), random_weights(&SHAPE)).unwrap();
        let mut ws = Workspace::single().unwrap();
        let mut cache = layer.new_cache();
        let mut first = vec![0.0; 12 * 24];
        layer.forward(x.as_ref(), &mut *cache, &mut first, &mut ws).unwrap();
        cache.truncate(8);
        let mut again = vec![0.0; 4 * 24];
        layer.forward(x.as_ref().sub_rows(8..12), &mut *cache, &mut again, &mut ws).unwrap();
        assert_close(&again, &first[8 * 24..]);
    }

    #[test]
    fn wrong_weights_and_shapes_are_refused() {
        let mut weights = random_weights(&SHAPE);
        weights.remove("o");
        assert!(LAYER.layer(&SHAPE, &Options::new(), weights).is_err());
        let mut weights = random_weights(&SHAPE);
        weights.insert("q".into(), Box::new(Dense::new(random("q", 3, 24))));
        assert!(LAYER.layer(&SHAPE, &Options::new(), weights).is_err());
        let odd = LayerShape { d: 7, ..SHAPE };
        assert!(LAYER.layer(&odd, &Options::new(), random_weights(&odd)).is_err());
        let layer = LAYER.layer(&SHAPE, &Options::new(), random_weights(&SHAPE)).unwrap();
        let mut ws = Workspace::single().unwrap();
        let mut cache = layer.new_cache();
        let x = random("x", 3, 20);
        assert!(layer.forward(x.as_ref(), &mut *cache, &mut [0.0; 72], &mut ws).is_err());
        assert_eq!(cache.len(), 0);
    }
}
