//! Mode-wise attention: fold the sequence into a grid and attend along one mode after another.
//!
//! **Idea.** A sequence of $N = n_1 \cdots n_m$ tokens is a tensor; attending along each mode in turn takes $m$ hops of
//! short attention, $\sum n_i$ keys per token instead of $N$.
//!
//! **Math.** Token $t \leftrightarrow (i_1, \dots, i_m)$, row-major. Queries and keys stay the projected ones (rotated by
//! the position $t$); only the values move: for each mode, last first, `fiber` replaces $V$ by $AV$ with
//! $A = \operatorname{softmax}(\tau q k^\top)$ on the tokens of each fibre. The whole operator is a product of
//! block-sparse stochastic matrices. `unfolded` uses one $n_i \times n_i$ matrix for all fibres of a mode,
//! $A_i = \operatorname{softmax}(\tau_i Q_{(i)} K_{(i)}^\top)$, $\tau_i = 1/\sqrt{d N / n_i}$, and then it is literally
//! $A_1 \otimes \cdots \otimes A_m$.
//!
//! **Reference.** feng2024; with per-fibre scores it is axial attention with frozen queries and keys. Which of the two
//! scores the paper's models use, and with which scale, could not be verified; `fiber` is the default because it alone has
//! a causal form.
//!
//! **Cost.** $4 N d \sum n_i$ operations per head. Decoding keeps the values of every hop but the last:
//! $d + m\, d_v$ numbers per key head and token for the first hop's, per query head for later ones.
//!
//! **Guarantees.** One mode is ordinary attention; rows of the operator are non-negative and sum to one. A causal token
//! sees $\prod (i_l + 1)$ tokens of its past, never the future; `unfolded` scores mix future tokens, so it has no causal
//! form.
//!
//! **When to use.** Very long inputs to a model trained or further trained for it; without training, quality drops.

use super::common::fold::Along;
use super::common::rows::{HeadRows, head_of, interleave};
use super::common::{
    Pairs, Rotary, check_io, check_room, check_shape, layer_kind, own, project, projections, refuse, take,
};
use crate::layer::{Layer, LayerCache, LayerShape, Linear, Weights};
use crate::params::Sizes;
use crate::workspace::Context;
use crate::{Cost, Error, Mask, Mat, MatRef, Result, RunInfo, Workspace};
use attlas_num::kernels::{Op, gemm, softmax_in_place};
use attlas_num::par::*;

layer_kind! {
    /// Registry entry.
    ModeWise {
        id: "mode_wise",
        title: "Mode-wise attention on a folded sequence",
        reference: "feng2024",
        weights: |s, _| Ok(projections(["q", "k", "v", "o"], s).into()),
        cache_elements: |s, p| Ok(cache_elements(s, p)),
        grid: "modes",
    }
}

crate::choices! {
    /// Scores of the tokens of a fibre.
    pub enum Score {
        /// Each fibre by its own queries and keys.
        Fiber = "fiber",
        /// All fibres of a mode by one matrix.
        Unfolded = "unfolded",
    }
}

crate::params! {
    /// Parameters of [`ModeWise`].
    pub struct Params {
        /// The grid, slowest mode first; auto is two modes near the square root of the length. A causal layer requires
        /// a given grid, because a fold that changed with the length would change earlier outputs.
        modes: Option<Sizes> = None, in 1..=1 << 40;
        /// Scores of the tokens of a fibre.
        score: Score = Score::Fiber;
        /// Layout of rotated pairs, or none.
        rope: Pairs = Pairs::None;
        /// Base of the rotation frequencies.
        rope_base: f64 = 10_000.0, in 1.0..=1e12;
    }
}

impl Params {
    /// Returns the number of modes of a fold.
    fn n_modes(&self) -> usize {
        self.modes.as_ref().map_or(2, |m| m.0.len().max(1))
    }
}

fn cache_elements(s: &LayerShape, p: &Params) -> usize {
    s.n_kv_heads * (s.d + s.d_v) + (p.n_modes() - 1) * s.n_heads * s.d_v
}

/// Returns two modes for `n` tokens; the faster one is the power of two next to the root.
fn default_grid(n: usize) -> Vec<usize> {
    let mut fast = 1;
    while fast * fast < n {
        fast *= 2;
    }
    vec![n.div_ceil(fast).max(1), fast]
}

/// The mode-wise attention layer.
#[derive(Debug)]
pub struct ModeWise {
    shape: LayerShape,
    params: Params,
    q: Box<dyn Linear>,
    k: Box<dyn Linear>,
    v: Box<dyn Linear>,
    o: Box<dyn Linear>,
    rotary: Option<Rotary>,
}

impl ModeWise {
    /// Makes the layer from its weights `q`, `k`, `v` and `o`.
    pub fn new(shape: LayerShape, params: Params, mut weights: Weights) -> Result<Self> {
        params.validate()?;
        check_shape(&shape)?;
        if let Some(modes) = &params.modes
            && (modes.0.is_empty() || modes.0.len() > 8 || modes.product().is_none())
        {
            return Err(Error::param(
                "modes",
                format!("{:?}", modes.0),
                "one to eight sizes with a product below 2^64",
            ));
        }
        let rotary = Rotary::new(params.rope, shape.d, params.rope_base)?;
        let mut take = |name| take(&mut weights, name);
        Ok(Self { shape, params, q: take("q")?, k: take("k")?, v: take("v")?, o: take("o")?, rotary })
    }

    fn project(&self, x: MatRef<'_, f32>, first: usize, cx: Context<'_>) -> [Vec<f32>; 3] {
        let s = &self.shape;
        let mut qkv = [&self.q, &self.k, &self.v].map(|w| project(&**w, x, cx));
        if let Some(rotary) = &self.rotary {
            rotary.rotate(first, &mut qkv[0], s.n_heads, s.d);
            rotary.rotate(first, &mut qkv[1], s.n_kv_heads, s.d);
        }
        qkv
    }

    /// Runs all hops over the new tokens, whose keys and values are in the cache.
    fn hops(
        &self,
        q: &[f32],
        cache: &mut HopCache,
        grid: &[usize],
        first: usize,
        causal: bool,
        cx: Context<'_>,
    ) -> (Vec<f32>, u64) {
        let s = &self.shape;
        let end = cache.k.len();
        let mut visited = 0;
        let mut parts = Vec::new();
        for (hop, mode) in (0..grid.len()).rev().enumerate() {
            let v = &cache.v[hop];
            let along = Along {
                q,
                heads: s.n_heads,
                k: &cache.k,
                v,
                kv_heads: (s.n_kv_heads, if hop == 0 { s.n_kv_heads } else { s.n_heads }),
                tokens: first..end,
                causal,
                scale: (1.0 / (s.d as f64).sqrt()) as f32,
            };
            let (rows, pairs) = along.run(grid, mode, cx);
            visited += pairs;
            if mode > 0 {
                rows.iter().enumerate().for_each(|(h, rows)| cache.v[hop + 1].append_to(h, rows));
            }
            parts = rows;
        }
        (interleave(&parts, end - first, s.d_v), visited)
    }

    /// Attends with one matrix for all fibres of each mode.
    fn unfolded(
        &self,
        [q, k, v]: &[Vec<f32>; 3],
        n: usize,
        grid: &[usize],
        cx: Context<'_>,
    ) -> (Vec<f32>, u64) {
        let s = &self.shape;
        let parts: Vec<Vec<f32>> = (0..s.n_heads)
            .into_par_iter()
            .map(|h| {
                let g = h * s.n_kv_heads / s.n_heads;
                let q = head_of(q, n, s.n_heads, s.d, h).to_mat();
                let k = head_of(k, n, s.n_kv_heads, s.d, g).to_mat();
                let mut v = head_of(v, n, s.n_kv_heads, s.d_v, g).to_mat().into_vec();
                for mode in (0..grid.len()).rev() {
                    let a = unfolded_scores(q.as_ref(), k.as_ref(), grid, mode, cx);
                    v = mode_product(&a, &v, grid, mode, s.d_v, cx);
                }
                v
            })
            .collect();
        let pairs: usize = grid.iter().map(|n| n * n).sum();
        (interleave(&parts, n, s.d_v), (pairs * s.n_heads) as u64)
    }
}

/// Computes $\operatorname{softmax}(\tau_i Q_{(i)} K_{(i)}^\top)$, the sums over all other modes and features.
fn unfolded_scores(
    q: MatRef<'_, f32>,
    k: MatRef<'_, f32>,
    grid: &[usize],
    mode: usize,
    cx: Context<'_>,
) -> Mat<f32> {
    let (d, size) = (q.cols(), grid[mode]);
    let inner: usize = grid[mode + 1..].iter().product::<usize>() * d;
    let scale = 1.0 / ((q.rows() / size * d) as f32).sqrt();
    let mut a = Mat::zeros(size, size);
    for (q, k) in q.data().chunks_exact(size * inner).zip(k.data().chunks_exact(size * inner)) {
        let (q, k) = (MatRef::new(q, size, inner), MatRef::new(k, size, inner));
        gemm(cx.schedule.isa, scale, Op::N(q), Op::T(k), 1.0, a.data_mut(), size, cx.scratch);
    }
    (0..size).for_each(|i| {
        softmax_in_place(a.row_mut(i));
    });
    a
}

/// Multiplies the grid's rows of width `width` along one mode.
fn mode_product(
    a: &Mat<f32>,
    v: &[f32],
    grid: &[usize],
    mode: usize,
    width: usize,
    cx: Context<'_>,
) -> Vec<f32> {
    let size = grid[mode];
    let inner: usize = grid[mode + 1..].iter().product::<usize>() * width;
    let mut out = vec![0.0; v.len()];
    for (v, out) in v.chunks_exact(size * inner).zip(out.chunks_exact_mut(size * inner)) {
        gemm(
            cx.schedule.isa,
            1.0,
            Op::N(a.as_ref()),
            Op::N(MatRef::new(v, size, inner)),
            0.0,
            out,
            inner,
            cx.scratch,
        );
    }
    out
}

impl Layer for ModeWise {
    fn shape(&self) -> LayerShape {
        self.shape
    }

    fn parameters(&self) -> usize {
        [&self.q, &self.k, &self.v, &self.o].iter().map(|w| w.parameters()).sum()
    }

    fn cache_elements(&self) -> usize {
        cache_elements(&self.shape, &self.params)
    }

    fn new_cache(&self) -> Box<dyn LayerCache> {
        Box::new(HopCache::new(&self.shape, self.params.n_modes()))
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
        if self.params.score == Score::Unfolded {
            return refuse(LAYER.id, "unfolded scores mix future tokens; a causal layer needs score = fiber");
        }
        let Some(Sizes(grid)) = &self.params.modes else {
            return refuse(LAYER.id, "a causal layer needs its fold: set modes, such as 512x256");
        };
        let cache: &mut HopCache = own(cache, LAYER.id)?;
        let (first, tokens) = (cache.k.len(), x.rows());
        check_room(LAYER.id, first + tokens, grid)?;
        ws.install(|cx| {
            let [q, k, v] = self.project(x, first, cx);
            cache.k.append(&k);
            cache.v[0].append(&v);
            let (heads, visited) = self.hops(&q, cache, grid, first, true, cx);
            self.o.apply(MatRef::new(&heads, tokens, s.n_heads * s.d_v), out, cx);
            Ok(RunInfo::visited(visited))
        })
    }

    fn forward_all(&self, x: MatRef<'_, f32>, out: &mut [f32], ws: &mut Workspace) -> Result<RunInfo> {
        let s = &self.shape;
        check_io(x, out, s.d_model)?;
        let n = x.rows();
        let grid = self.params.modes.as_ref().map_or_else(|| default_grid(n), |m| m.0.clone());
        check_room(LAYER.id, n, &grid)?;
        let room: usize = grid.iter().product();
        let unfolded = self.params.score == Score::Unfolded;
        if unfolded && n != room {
            return refuse(
                LAYER.id,
                format!("unfolded scores need a full grid: {n} tokens for {room} places"),
            );
        }
        ws.install(|cx| {
            let qkv = self.project(x, 0, cx);
            let (heads, visited) = if unfolded {
                self.unfolded(&qkv, n, &grid, cx)
            } else {
                let mut cache = HopCache::new(s, grid.len());
                cache.k.append(&qkv[1]);
                cache.v[0].append(&qkv[2]);
                self.hops(&qkv[0], &mut cache, &grid, 0, false, cx)
            };
            self.o.apply(MatRef::new(&heads, n, s.n_heads * s.d_v), out, cx);
            Ok(RunInfo::visited(visited))
        })
    }

    fn cost(&self, mask: Mask, cached: usize, tokens: usize) -> Option<Cost> {
        let s = &self.shape;
        let total = cached + tokens;
        let grid = self.params.modes.as_ref().map_or_else(|| default_grid(total), |m| m.0.clone());
        let mut pairs = 0u64;
        for (mode, &size) in grid.iter().enumerate() {
            let stride: usize = grid[mode + 1..].iter().product();
            pairs += match mask {
                Mask::Causal => (cached..total).map(|t| (t / stride % size + 1) as u64).sum(),
                Mask::None => (tokens * size) as u64,
            };
        }
        let flops = 2 * pairs * (s.n_heads * (s.d + s.d_v)) as u64 + 2 * (tokens * self.parameters()) as u64;
        let bytes = 4 * (total * self.cache_elements() + 2 * tokens * s.d_model) as u64;
        Some(Cost { setup_flops: 0, run_flops: flops, bytes })
    }
}

/// Keys, and the values before each hop.
#[derive(Debug)]
struct HopCache {
    k: HeadRows,
    v: Vec<HeadRows>,
}

impl HopCache {
    fn new(s: &LayerShape, modes: usize) -> Self {
        let hop = |i: usize| HeadRows::new(if i == 0 { s.n_kv_heads } else { s.n_heads }, s.d_v);
        Self { k: HeadRows::new(s.n_kv_heads, s.d), v: (0..modes).map(hop).collect() }
    }
}

impl LayerCache for HopCache {
    fn len(&self) -> usize {
        self.k.len()
    }

    fn truncate(&mut self, len: usize) {
        self.v.iter_mut().chain([&mut self.k]).for_each(|rows| rows.truncate(len));
    }

    fn bytes(&self) -> usize {
        self.v.iter().chain([&self.k]).map(HeadRows::bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::super::grouped_query;
    use super::super::testing::{
        assert_close, check_causal, dense, forward, forward_all, random, random_layer, random_weights,
    };
    use super::*;
    use crate::Options;
    use attlas_num::tensor::kronecker;

    const SHAPE: LayerShape = LayerShape { d_model: 20, n_heads: 4, n_kv_heads: 2, d: 6, d_v: 5 };

    fn modes(text: &str) -> Options {
        Options::new().with("modes", text)
    }

    #[test]
    fn keeps_what_every_causal_layer_keeps() {
        check_causal(&LAYER, &SHAPE, &modes("8x5"), 33);
        check_causal(&LAYER, &SHAPE, &modes("3x4x5").with("rope", "half"), 47);
        check_causal(&LAYER, &SHAPE, &modes("64"), 20);
    }

    #[test]
    fn one_mode_is_ordinary_attention_bit_by_bit() {
        let x = random("x", 50, 20);
        let plain = random_layer(&grouped_query::LAYER, &SHAPE, &Options::new());
        let folded = random_layer(&LAYER, &SHAPE, &modes("50").with("rope", "half"));
        assert_eq!(forward(&*folded, &x, &[50]), forward(&*plain, &x, &[50]));
    }

    #[test]
    fn modes_of_length_one_may_be_dropped() {
        let x = random("x", 24, 20);
        for score in ["fiber", "unfolded"] {
            let of =
                |m: &str| forward_all(&*random_layer(&LAYER, &SHAPE, &modes(m).with("score", score)), &x);
            assert_close(&of("1x4x1x6x1"), &of("4x6"));
        }
        let of = |m: &str| forward(&*random_layer(&LAYER, &SHAPE, &modes(m)), &x, &[24]);
        assert_close(&of("1x4x1x6x1"), &of("4x6"));
    }

    /// Makes a layer with one head whose values are the first five of its inputs, and whose output is those numbers.
    fn transparent(options: &Options) -> (Box<dyn Layer>, LayerShape) {
        let s = LayerShape { d_model: 8, n_heads: 1, n_kv_heads: 1, d: 6, d_v: 8 };
        let mut weights = random_weights(&projections(["q", "k", "v", "o"], &s));
        weights.insert("v".into(), dense(Mat::identity(8)));
        weights.insert("o".into(), dense(Mat::identity(8)));
        (LAYER.layer(&s, options, weights).unwrap(), s)
    }

    #[test]
    fn unfolded_scores_make_a_kronecker_product() {
        let x = random("x", 12, 8);
        let (layer, s) = transparent(&modes("3x4").with("score", "unfolded"));
        let ws = Workspace::single().unwrap();
        let cx = ws.context();
        let of = |name| Mat::from_vec(project(&*dense(random(name, 6, 8)), x.as_ref(), cx), 12, 6);
        let (q, k) = (of("q"), of("k"));
        let a = [0, 1].map(|mode| unfolded_scores(q.as_ref(), k.as_ref(), &[3, 4], mode, cx));
        // Entry by entry: rows of mode 1 over the columns of all others.
        let explicit: Vec<f32> = (0..3)
            .map(|j| {
                (0..4).map(|c| (0..6).map(|e| q[(c, e)] * k[(j * 4 + c, e)]).sum::<f32>()).sum::<f32>()
                    / 24f32.sqrt()
            })
            .collect();
        let total: f32 = explicit.iter().map(|x| x.exp()).sum();
        (0..3).for_each(|j| assert!((a[0][(0, j)] - explicit[j].exp() / total).abs() < 1e-6));
        let whole = kronecker(&a[0], &a[1]);
        let want = attlas_num::linalg::matmul(whole.as_ref(), x.as_ref());
        assert_eq!(s.d_v, 8);
        assert_close(&forward_all(&*layer, &x), want.data());
    }

    /// The operator on tokens, from the images of unit values: queries and keys see `x`, values a constant.
    #[test]
    fn constant_values_are_kept_and_weights_are_not_negative() {
        let s = LayerShape { d_model: 8, n_heads: 1, n_kv_heads: 1, d: 6, d_v: 8 };
        for (options, causal) in
            [(modes("3x5"), true), (modes("3x5"), false), (modes("3x5").with("score", "unfolded"), false)]
        {
            // Token t has a one in column 7 and, for t < 7, a one in column t; queries and keys read all columns.
            let x = Mat::from_fn(15, 8, |t, c| if c == 7 || c == t { 1.0 } else { 0.0 });
            let (layer, _) = transparent(&options);
            let out = if causal { forward(&*layer, &x, &[15]) } else { forward_all(&*layer, &x) };
            for row in out.chunks_exact(s.d_model) {
                assert!((row[7] - 1.0).abs() < 1e-6, "rows sum to {}", row[7]);
                assert!(row.iter().all(|&w| w >= 0.0));
            }
        }
    }

    #[test]
    fn a_causal_token_reaches_the_product_of_its_indices() {
        let (layer, _) = transparent(&modes("4x5"));
        let base = Mat::from_fn(20, 8, |t, c| ((t * 8 + c) as f32).sin());
        let before = forward(&*layer, &base, &[20]);
        let mut reached = vec![0; 20];
        for t in 0..20 {
            let mut x = base.clone();
            x.row_mut(t)[3] += 0.5;
            let after = forward(&*layer, &x, &[20]);
            for i in 0..20 {
                let same = (0..8).all(|c| before[i * 8 + c].to_bits() == after[i * 8 + c].to_bits());
                reached[i] += usize::from(!same);
            }
        }
        let want: Vec<usize> = (0..20).map(|t| (t / 5 + 1) * (t % 5 + 1)).collect();
        assert_eq!(reached, want);
    }

    #[test]
    fn grids_may_be_larger_than_the_sequence() {
        assert_eq!(default_grid(131_072), [256, 512]);
        assert_eq!((default_grid(1), default_grid(0), default_grid(5)), (vec![1, 1], vec![1, 1], vec![2, 4]));
        let x = random("x", 23, 20);
        let auto = random_layer(&LAYER, &SHAPE, &Options::new());
        let given = random_layer(&LAYER, &SHAPE, &modes("9x8"));
        assert_eq!(forward_all(&*auto, &x), forward_all(&*given, &x));
    }

    #[test]
    fn what_has_no_causal_form_is_refused() {
        let x = random("x", 10, 20);
        let mut ws = Workspace::single().unwrap();
        let mut out = vec![0.0; 200];
        for options in [modes("2x5").with("score", "unfolded"), Options::new(), modes("3x3")] {
            let layer = random_layer(&LAYER, &SHAPE, &options);
            assert!(layer.forward(x.as_ref(), &mut *layer.new_cache(), &mut out, &mut ws).is_err());
        }
        let partial = random_layer(&LAYER, &SHAPE, &modes("3x4").with("score", "unfolded"));
        assert!(partial.forward_all(x.as_ref(), &mut out, &mut ws).is_err());
        let small = random_layer(&LAYER, &SHAPE, &modes("3x3"));
        assert!(small.forward_all(x.as_ref(), &mut out, &mut ws).is_err());
        assert!((LAYER.weights)(&SHAPE, &Options::new()).is_ok());
        assert!(
            LAYER
                .layer(&SHAPE, &modes("0x4"), random_weights(&projections(["q", "k", "v", "o"], &SHAPE)))
                .is_err()
        );
    }

    #[test]
    fn counts_are_those_of_the_page() {
        let s = LayerShape { d_model: 8, n_heads: 1, n_kv_heads: 1, d: 8, d_v: 8 };
        let layer = random_layer(&LAYER, &s, &modes("512x256"));
        let n = 131_072u64;
        let work =
            layer.cost(Mask::None, 0, n as usize).unwrap().run_flops - 2 * n * layer.parameters() as u64;
        assert_eq!(work, 4 * n * 8 * 768);
        assert_eq!(layer.cache_elements(), 3 * 8);
        let step =
            layer.cost(Mask::Causal, n as usize - 1, 1).unwrap().run_flops - 2 * layer.parameters() as u64;
        assert_eq!(step, 4 * 8 * 768);
    }
}
