//! Two-simplicial attention: third-order attention over a window of recent pairs.
//!
//! **Idea.** Attention to pairs of tokens costs $N^3$; with the first token from the last $w_1$ and the second from
//! the last $w_2$ it is linear in the length.
//!
//! **Math.** $o_i = \sum p_{ijk}\, v^1_j \odot v^2_k$ over $i - w_1 < j \le i$ and $i - w_2 < k \le i$, one softmax
//! over all those pairs of $\tau \sum_l q_l k^1_l k^2_l$, or of $\tau \sum_c \det(q^{(c)}, k^{1(c)}, k^{2(c)})$ over
//! chunks of three features. A determinant does not change under one common rotation of its columns, so rotary
//! positions about a fixed axis of every chunk make it depend on relative positions; the trilinear form lacks this
//! property and takes no rotary positions. `k2_bias` and `v2_bias` are added to second keys and values.
//!
//! `form = gram` is the older layer over a few virtual tokens, [`gram::Block`].
//!
//! **Reference.** clift2020 ([`gram`]), roy2025, which trains the trilinear form and offers the determinant as its rotary
//! variant.
//!
//! **Cost.** $4 N w_1 w_2 d$ operations per head, fewer than causal attention above $N = 2 w_1 w_2$; a constant cache of
//! $(d + d_v)(w_1 + w_2)$ numbers per key head.
//!
//! **Guarantees.** Windows as long as the sequence give causal `third_order`; $w_2 = 1$ with ones as second keys and
//! values gives sliding-window attention. Both tested here.
//!
//! **When to use.** For third-order attention over more than a few hundred tokens.

pub mod gram;

use super::common::rows::{HeadRows, head_of, interleave};
use super::common::third::{Form, Pairwise};
use super::common::{check_io, check_shape, needed, own, project, projections, refuse, take};
use crate::layer::{Layer, LayerCache, LayerKind, LayerShape, Linear, WeightSpec, Weights};
use crate::{Cost, Error, Mask, MatRef, Result, RunInfo, Workspace};
use attlas_num::kernels::Band;
use attlas_num::par::*;
use gram::Block;

/// Registry entry.
pub static LAYER: LayerKind = LayerKind {
    id: "two_simplicial",
    title: "Two-simplicial attention over windows of pairs",
    reference: "clift2020, roy2025",
    grid: None,
    params: Params::SPECS,
    weights: |s, options| {
        let p = Params::from_options(options)?;
        Ok(if p.form == Score::Gram { gram::weight_specs(s, &p) } else { weight_specs(s) })
    },
    cache_elements: |_, _| Ok(0),
    build: |s, options, weights| {
        let p = Params::from_options(options)?;
        Ok(match p.form {
            Score::Gram => Box::new(Block::new(*s, p, weights)?),
            Score::Trilinear | Score::Determinant => Box::new(TwoSimplicial::new(*s, p, weights)?),
        })
    },
};

crate::choices! {
    /// Score of a pair of keys.
    pub enum Score {
        /// The sum of products of three features.
        Trilinear = "trilinear",
        /// Determinants of chunks of three features.
        Determinant = "determinant",
        /// The length of Clift et al., over pairs of virtual tokens.
        Gram = "gram",
    }
}

crate::params! {
    /// Parameters of [`TwoSimplicial`] and [`Block`].
    pub struct Params {
        /// Score of a pair; determinant needs a width divisible by 3, gram has no windows and no causal form.
        form: Score = Score::Trilinear;
        /// Tokens of the first window, the current one included.
        w1: usize = 512, in 1..=1 << 30;
        /// Tokens of the second window, the current one included.
        w2: usize = 32, in 1..=1 << 30;
        /// Factor of the scores; auto is 1/√d. In the gram form, factor of the ordinary heads; auto is 1.
        scale: Option<f64> = None, in 1e-12..=1e12;
        /// Added to second keys.
        k2_bias: f64 = 0.0, in -1e6..=1e6;
        /// Added to second values.
        v2_bias: f64 = 0.0, in -1e6..=1e6;
        /// Rotary positions about the third axis of every chunk; determinant form only.
        rope: bool = false;
        /// Base of the rotation frequencies.
        rope_base: f64 = 10_000.0, in 1.0..=1e12;
        /// Virtual tokens of the gram form: the last rows of its input.
        virtual_tokens: usize = 2, in 1..=1 << 12;
        /// Width of the one two-simplicial head of the gram form.
        width: usize = 48, in 1..=1 << 10;
    }
}

fn weight_specs(s: &LayerShape) -> Vec<WeightSpec> {
    let mut list = projections(["q", "k1", "v1", "o"], s).to_vec();
    list.push(needed("k2", s.n_kv_heads * s.d, s.d_model));
    list.push(needed("v2", s.n_kv_heads * s.d_v, s.d_model));
    list
}

/// The two-simplicial attention layer.
#[derive(Debug)]
pub struct TwoSimplicial {
    shape: LayerShape,
    params: Params,
    q: Box<dyn Linear>,
    k: [Box<dyn Linear>; 2],
    v: [Box<dyn Linear>; 2],
    o: Box<dyn Linear>,
}

impl TwoSimplicial {
    /// Makes the layer from its weights `q`, `k1`, `k2`, `v1`, `v2` and `o`.
    pub fn new(shape: LayerShape, params: Params, mut weights: Weights) -> Result<Self> {
        params.validate()?;
        check_shape(&shape)?;
        if params.form == Score::Gram {
            return refuse(LAYER.id, "the gram form is another layer, gram::Block");
        }
        if params.form == Score::Determinant && !shape.d.is_multiple_of(3) {
            return Err(Error::shape("head width", "a multiple of 3 for determinants", shape.d));
        }
        if params.rope && params.form == Score::Trilinear {
            return refuse(
                LAYER.id,
                "the trilinear form is not invariant under rotations: rope needs form = determinant",
            );
        }
        let mut take = |name| take(&mut weights, name);
        let (k, v) = ([take("k1")?, take("k2")?], [take("v1")?, take("v2")?]);
        Ok(Self { shape, params, q: take("q")?, k, v, o: take("o")? })
    }

    fn windows(&self) -> [usize; 2] {
        [self.params.w1, self.params.w2]
    }

    /// Rotates every chunk of `[tokens, heads, d]` about its third axis.
    fn rotate(&self, first: usize, x: &mut [f32], heads: usize) {
        if !self.params.rope {
            return;
        }
        let chunks = self.shape.d / 3;
        for (t, token) in x.chunks_exact_mut(heads * self.shape.d).enumerate() {
            for (c, chunk) in token.as_chunks_mut::<3>().0.iter_mut().enumerate() {
                let power = (c % chunks) as f64 / chunks as f64;
                let (sin, cos) = ((first + t) as f64 * self.params.rope_base.powf(-power)).sin_cos();
                let [x, y, _] = chunk.map(f64::from);
                (chunk[0], chunk[1]) = ((cos * x - sin * y) as f32, (cos * y + sin * x) as f32);
            }
        }
    }
}

impl Layer for TwoSimplicial {
    fn shape(&self) -> LayerShape {
        self.shape
    }

    fn parameters(&self) -> usize {
        self.k.iter().chain(&self.v).chain([&self.q, &self.o]).map(|w| w.parameters()).sum()
    }

    /// Returns 0: the cache holds two windows and does not grow with the tokens.
    fn cache_elements(&self) -> usize {
        0
    }

    fn new_cache(&self) -> Box<dyn LayerCache> {
        let s = &self.shape;
        let side = |w| Window {
            k: HeadRows::new(s.n_kv_heads, s.d),
            v: HeadRows::new(s.n_kv_heads, s.d_v),
            start: 0,
            w,
        };
        Box::new(WindowPairCache { sides: self.windows().map(side), len: 0 })
    }

    fn forward(
        &self,
        x: MatRef<'_, f32>,
        cache: &mut dyn LayerCache,
        out: &mut [f32],
        ws: &mut Workspace,
    ) -> Result<RunInfo> {
        let s = &self.shape;
        check_io(x, out, s.d_model)?;
        let cache: &mut WindowPairCache = own(cache, LAYER.id)?;
        let (first, tokens) = (cache.len, x.rows());
        if cache.sides.iter().any(|side| side.start > (first + 1).saturating_sub(side.w)) {
            return refuse(LAYER.id, "more tokens were taken back than the windows still hold");
        }
        ws.install(|cx| {
            let mut q = project(&*self.q, x, cx);
            self.rotate(first, &mut q, s.n_heads);
            for (n, side) in cache.sides.iter_mut().enumerate() {
                let (mut k, mut v) = (project(&*self.k[n], x, cx), project(&*self.v[n], x, cx));
                if n == 1 {
                    k.iter_mut().for_each(|k| *k += self.params.k2_bias as f32);
                    v.iter_mut().for_each(|v| *v += self.params.v2_bias as f32);
                }
                self.rotate(first, &mut k, s.n_kv_heads);
                side.k.append(&k);
                side.v.append(&v);
            }
            cache.len += tokens;
            let band = |side: &Window| {
                let shift = first as isize - side.start as isize;
                Band { lower: Some(shift + 1 - side.w as isize), upper: Some(shift) }
            };
            let scale = self.params.scale.unwrap_or(1.0 / (s.d as f64).sqrt());
            let form =
                if self.params.form == Score::Determinant { Form::Determinant } else { Form::Trilinear };
            let parts: Vec<(Vec<f32>, u64)> = (0..s.n_heads)
                .into_par_iter()
                .map(|h| {
                    let g = h * s.n_kv_heads / s.n_heads;
                    let [one, two] = &cache.sides;
                    let p = Pairwise {
                        q: head_of(&q, tokens, s.n_heads, s.d, h),
                        k1: one.k.head(g),
                        v1: one.v.head(g),
                        k2: two.k.head(g),
                        v2: two.v.head(g),
                        scale: scale as f32,
                        band1: band(one),
                        band2: band(two),
                        form,
                    };
                    let mut out = vec![0.0; tokens * s.d_v];
                    p.run(&mut out, &mut vec![0.0; tokens], cx);
                    (out, p.pairs())
                })
                .collect();
            cache.sides.iter_mut().for_each(Window::forget);
            let pairs = parts.iter().map(|p| p.1).sum();
            let parts: Vec<Vec<f32>> = parts.into_iter().map(|p| p.0).collect();
            let heads = interleave(&parts, tokens, s.d_v);
            self.o.apply(MatRef::new(&heads, tokens, s.n_heads * s.d_v), out, cx);
            Ok(RunInfo::visited(pairs))
        })
    }

    fn cost(&self, mask: Mask, cached: usize, tokens: usize) -> Option<Cost> {
        if mask == Mask::None {
            return None;
        }
        let s = &self.shape;
        let pairs: u64 = (cached + 1..=cached + tokens)
            .map(|n| self.windows().map(|w| n.min(w) as u64).iter().product::<u64>())
            .sum();
        let run_flops =
            2 * (tokens * self.parameters()) as u64 + 2 * pairs * (s.n_heads * (s.d + s.d_v)) as u64;
        let in_windows: usize = self.windows().iter().map(|&w| w.min(cached + tokens)).sum();
        let bytes = 4 * (in_windows * s.n_kv_heads * (s.d + s.d_v) + 2 * tokens * s.d_model) as u64;
        Some(Cost { setup_flops: 0, run_flops, bytes })
    }
}

/// Recent keys and values of one side.
#[derive(Debug)]
struct Window {
    k: HeadRows,
    v: HeadRows,
    /// Position of the first row held.
    start: usize,
    w: usize,
}

impl Window {
    /// Drops tokens that no later token sees. Rows move only when an equal number has become useless, so a token costs
    /// a constant on average and the last few can still be taken back.
    fn forget(&mut self) {
        let len = self.k.len();
        if len >= 2 * self.w {
            let useless = len - self.w;
            self.k.drop_front(useless);
            self.v.drop_front(useless);
            self.start += useless;
        }
    }
}

/// The two windows.
#[derive(Debug)]
struct WindowPairCache {
    sides: [Window; 2],
    len: usize,
}

impl LayerCache for WindowPairCache {
    fn len(&self) -> usize {
        self.len
    }

    fn truncate(&mut self, len: usize) {
        if len >= self.len {
            return;
        }
        self.len = len;
        for side in &mut self.sides {
            if len == 0 {
                side.start = 0;
            }
            side.k.truncate(len.saturating_sub(side.start));
            side.v.truncate(len.saturating_sub(side.start));
        }
    }

    /// Returns the bytes of the rows that later tokens may see.
    fn bytes(&self) -> usize {
        let of = |side: &Window, rows: &HeadRows| rows.bytes() * side.w.min(rows.len()) / rows.len().max(1);
        self.sides.iter().map(|side| of(side, &side.k) + of(side, &side.v)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::super::common::fold::attend;
    use super::super::testing::{
        assert_close, check_causal, dense, forward, random, random_layer, random_weights,
    };
    use super::super::third_order;
    use super::*;
    use crate::{Mat, Options};

    const SHAPE: LayerShape = LayerShape { d_model: 20, n_heads: 4, n_kv_heads: 2, d: 6, d_v: 5 };

    fn windows(w1: usize, w2: usize) -> Options {
        Options::new().with("w1", w1).with("w2", w2)
    }

    #[test]
    fn keeps_what_every_causal_layer_keeps() {
        check_causal(&LAYER, &SHAPE, &windows(9, 4), 31);
        check_causal(&LAYER, &SHAPE, &windows(3, 50).with("k2_bias", 0.2).with("v2_bias", 1.0), 31);
        check_causal(&LAYER, &SHAPE, &windows(9, 4).with("form", "determinant").with("rope", true), 31);
        check_causal(&LAYER, &SHAPE, &windows(1, 1), 14);
    }

    #[test]
    fn long_windows_give_causal_third_order_attention() {
        let x = random("x", 40, 20);
        let layer = random_layer(&LAYER, &SHAPE, &windows(40, 64));
        let third = random_layer(&third_order::LAYER, &SHAPE, &Options::new());
        assert_close(&forward(&*layer, &x, &[40]), &forward(&*third, &x, &[40]));
        assert_close(&forward(&*layer, &x, &[11, 29]), &forward(&*third, &x, &[40]));
    }

    #[test]
    fn a_second_window_of_one_gives_sliding_window_attention() {
        // Second keys and values 1: zero weights and biases of 1.
        let s = LayerShape { d_model: 6, n_heads: 1, n_kv_heads: 1, d: 6, d_v: 6 };
        let specs = weight_specs(&s);
        let mut weights = random_weights(&specs);
        for name in ["k2", "v2"] {
            weights.insert(name.into(), dense(Mat::zeros(6, 6)));
        }
        weights.insert("o".into(), dense(Mat::identity(6)));
        let options = windows(5, 1).with("k2_bias", 1.0).with("v2_bias", 1.0);
        let layer = LAYER.layer(&s, &options, weights).unwrap();
        let x = random("x", 30, 6);
        let ws = Workspace::single().unwrap();
        let y = |name| project(&*dense(random(name, 6, 6)), x.as_ref(), ws.context());
        let (q, k, v) = (y("q"), y("k1"), y("v1"));
        let m = |d| MatRef::new(d, 30, 6);
        let band = Band { lower: Some(-4), upper: Some(0) };
        let plain = attend(m(&q), m(&k), m(&v), 1.0 / 6f32.sqrt(), None, band, ws.context()).0;
        assert_close(&forward(&*layer, &x, &[30]), &plain);
    }

    #[test]
    fn the_cache_holds_two_windows_however_long_the_text() {
        let s = LayerShape { d_model: 4, n_heads: 2, n_kv_heads: 1, d: 3, d_v: 3 };
        let layer = random_layer(&LAYER, &s, &windows(7, 3));
        let mut cache = layer.new_cache();
        let mut ws = Workspace::single().unwrap();
        for n in [1usize, 5, 20, 60] {
            let x = random("x", n, 4);
            layer.forward(x.as_ref(), &mut *cache, &mut vec![0.0; 4 * n], &mut ws).unwrap();
            let in_windows = cache.len().min(7) + cache.len().min(3);
            assert_eq!(cache.bytes(), 4 * 6 * in_windows);
        }
        // 512 × 32 in two bytes: the constant of the paper.
        assert_eq!(2 * 128 * (512 + 32) * 2, 278_528);
        cache.truncate(40);
        let x = random("x", 1, 4);
        assert!(layer.forward(x.as_ref(), &mut *cache, &mut [0.0; 4], &mut ws).is_err());
    }

    #[test]
    fn counts_are_those_of_the_page() {
        let s = LayerShape { d_model: 24, n_heads: 4, n_kv_heads: 4, d: 6, d_v: 6 };
        let layer = random_layer(&LAYER, &s, &windows(8, 4));
        let step = layer.cost(Mask::Causal, 1000, 1).unwrap().run_flops;
        assert_eq!(step, 2 * layer.parameters() as u64 + 4 * 8 * 4 * 6 * 4);
        assert_eq!(layer.parameters(), 6 * 24 * 24);
    }

    #[test]
    fn rotated_determinants_depend_on_relative_positions() {
        let x = random("x", 8, 20);
        let options = windows(4, 4).with("form", "determinant").with("rope", true).with("rope_base", 30.0);
        let layer = random_layer(&LAYER, &SHAPE, &options);
        // Preceded by other tokens that have left the windows, the last rows see the same neighbours, shifted.
        let longer = Mat::from_fn(21, 20, |i, j| if i < 13 { 0.1 } else { x[(i - 13, j)] });
        let (short, long) = (forward(&*layer, &x, &[8]), forward(&*layer, &longer, &[21]));
        assert_close(&long[(13 + 3) * 20..], &short[3 * 20..]);
        assert!(
            TwoSimplicial::new(SHAPE, Params { rope: true, ..Params::default() }, Weights::new()).is_err()
        );
    }
}
