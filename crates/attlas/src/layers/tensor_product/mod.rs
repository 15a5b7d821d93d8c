//! Tensor product attention: per token, the queries (keys, values) of all heads are a short sum of outer products.
//!
//! **Idea.** The $H \times d$ matrix of one token's keys is an average of $R$ outer products of a head factor and a
//! feature factor, both linear in the token. Only the factors are cached, and decoding works on them directly.
//!
//! **Math.** $Q_n = \frac{1}{R_Q} \sum_r a^Q_r(x_n) \otimes b^Q_r(x_n)$, the same for $K$ and $V$; head $h$ attends with
//! row $h$ of each, scale $1/\sqrt d$. Rotary positions act on the feature side, so they commute with the head
//! factors and are applied to $b^Q$ and $b^K$ alone. With $P = B_K B_Q^\top$ shared by all heads, the logits are
//! $L_{hqk} = \frac{\tau}{R_Q R_K} \sum_{rs} A^Q_{qrh} A^K_{ksh} P_{qkrs}$ and the output is $\frac{1}{R_V} \sum_k
//! p_{hqk} \sum_u A^V_{kuh} B^V_{ku}$: $K$ and $V$ are never formed. `order = 3` writes $b$ itself as $b \otimes c$,
//! feature $i_b + d_b i_c$, with rotations on $b$.
//!
//! **Reference.** zhang2025tpa (T6). Weights of its training code rotate by the opposite angle in the half layout.
//!
//! **Cost.** Cache $(R_K + R_V)(H + d)$ numbers a token against $2Hd$ of multi-head attention. A decoding step over
//! $M$ tokens takes $2M(R_K \min(R_Q(d + H), Hd) + H R_K + H R_V d)$ operations. Prefill forms the heads (`materialised`)
//! unless $R_Q R_K (d + H) + H R_V d_v < 2 H d$.
//!
//! **Guarantees.** With fixed head factors, multi-head, grouped-query and multi-query attention are special cases, and
//! so, as functions, is latent attention (with one more term for its rotated part); tested here. The last is a
//! statement about outputs, not memory: the cache of that form is $Hd$, not the latent width.
//!
//! **When to use.** Models trained with it. Trained heads share little along this mode, so that low ranks lose much
//! when fitted afterwards.

pub mod factors;

use super::common::{Pairs, Rotary, check_io, check_shape, constant, needed, own, project, take};
use crate::layer::{Layer, LayerCache, LayerKind, LayerShape, Linear, WeightSpec, Weights};
use crate::workspace::Context;
use crate::{
    Cost, Error, Mask, MatRef, Options, Out, Problem, Qkv, Result, RunInfo, TensorMut, TensorRef, Workspace,
    registry,
};
use factors::{Query, Side, Sizes, attend_factors, combine};
use rayon::prelude::*;
use std::borrow::Cow;
use std::ops::Range;

/// Registry entry.
pub static LAYER: LayerKind = LayerKind {
    id: "tensor_product",
    title: "Tensor product attention (TPA): a cache of factors",
    reference: "zhang2025tpa",
    params: Params::SPECS,
    weights: |shape, options| Ok(Plan::new(shape, Params::from_options(options)?)?.weight_specs()),
    cache_elements: |shape, options| Ok(Plan::new(shape, Params::from_options(options)?)?.cache_elements()),
    build: |shape, options, weights| {
        Ok(Box::new(TensorProduct::new(*shape, Params::from_options(options)?, weights)?))
    },
};

crate::choices! {
    /// Which factors depend on the token.
    pub enum Contextual {
        /// Head and feature factors.
        Both = "both",
        /// Feature factors; head factors are fixed.
        BOnly = "b_only",
        /// Head factors; feature factors are fixed.
        AOnly = "a_only",
    }
}

crate::choices! {
    /// What is done to head factors.
    pub enum HeadAct {
        /// Nothing.
        None = "none",
        /// The logistic function of each.
        Sigmoid = "sigmoid",
        /// A softmax over the heads of each term.
        Softmax = "softmax",
    }
}

crate::choices! {
    /// How many tokens at once are treated.
    pub enum Path {
        /// Factors for a few tokens, and where they are cheaper; heads otherwise.
        Auto = "auto",
        /// Queries, keys and values of all heads are formed.
        Materialised = "materialised",
        /// Everything stays in factors.
        Factors = "factors",
    }
}

crate::params! {
    /// Parameters of [`TensorProduct`].
    pub struct Params {
        /// Terms of the queries.
        rank_q: usize = 6, in 1..=4096;
        /// Terms of the keys.
        rank_k: usize = 2, in 1..=4096;
        /// Terms of the values.
        rank_v: usize = 2, in 1..=4096;
        /// Which factors depend on the token.
        contextual: Contextual = Contextual::Both;
        /// Queries come from a plain projection q instead of factors.
        kv_only: bool = false;
        /// Factors of an outer product: 2 (heads and features) or 3 (features split once more).
        order: usize = 2, in 2..=3;
        /// Width of the rotated feature factor in order 3; divides d, even with rotary positions.
        d_b: Option<usize> = None, in 1..=1 << 20;
        /// Values use the feature factors of keys, which are cached unrotated and rotated when read; order 2 only.
        share_b: bool = false;
        /// Layout of rotated pairs, or none.
        rope: Pairs = Pairs::Half;
        /// Base of the rotation frequencies.
        rope_base: f64 = 10_000.0, in 1.0..=1e12;
        /// Leading features that are rotated; all of them where it is auto.
        rope_dim: Option<usize> = None, in 2..=1 << 20;
        /// What is done to head factors.
        head_act: HeadAct = HeadAct::None;
        /// How many tokens at once are treated; decoding always works on factors unless materialised is asked for.
        path: Path = Path::Auto;
    }
}

/// Ranks and widths that follow from shape and parameters.
#[derive(Clone, Debug)]
struct Plan {
    s: LayerShape,
    p: Params,
    /// Widths of the second and third factor: of queries and keys, and of values. The third is 1 in order 2.
    width: (usize, usize),
    width_v: (usize, usize),
}

impl Plan {
    fn new(s: &LayerShape, p: Params) -> Result<Self> {
        p.validate()?;
        check_shape(s)?;
        if s.n_kv_heads != s.n_heads {
            return Err(Error::shape(
                "key heads",
                "as many as query heads: ranks take the place of groups",
                s.n_kv_heads,
            ));
        }
        let split = |d: usize| match (p.order, p.d_b) {
            (2, None) => Ok((d, 1)),
            (3, Some(b)) if d.is_multiple_of(b) => Ok((b, d / b)),
            (2, Some(b)) => Err(Error::param("d_b", b, "auto in order 2")),
            (_, b) => Err(Error::param(
                "d_b",
                b.map_or("auto".into(), |b| b.to_string()),
                format!("a divisor of {d} in order 3"),
            )),
        };
        let (width, width_v) = (split(s.d)?, split(s.d_v)?);
        let mut reasons = Vec::new();
        if p.share_b && (p.order == 3 || p.contextual == Contextual::AOnly) {
            reasons.push("share_b needs order = 2 and feature factors that depend on the token".to_string());
        }
        if p.share_b && (s.d != s.d_v || p.rank_k != p.rank_v) {
            reasons.push("share_b needs keys and values of the same width and rank".to_string());
        }
        if let Some(dim) = p.rope_dim
            && (dim > width.0 || !dim.is_multiple_of(2))
        {
            reasons.push(format!("rope_dim = {dim} must be even and at most {}", width.0));
        }
        if reasons.is_empty() {
            return Ok(Self { s: *s, p, width, width_v });
        }
        Err(Error::Unsupported { method: LAYER.id.into(), reasons })
    }

    fn rotated(&self) -> usize {
        self.p.rope_dim.unwrap_or(self.width.0)
    }

    fn weight_specs(&self) -> Vec<WeightSpec> {
        let (s, p) = (&self.s, &self.p);
        let mut list = vec![needed("o", s.d_model, s.n_heads * s.d_v)];
        if p.kv_only {
            list.push(needed("q", s.n_heads * s.d, s.d_model));
        }
        let (a_in, b_in) = match p.contextual {
            Contextual::Both => (s.d_model, s.d_model),
            Contextual::BOnly => (1, s.d_model),
            Contextual::AOnly => (s.d_model, 1),
        };
        let names = [["a_q", "b_q", "c_q"], ["a_k", "b_k", "c_k"], ["a_v", "b_v", "c_v"]];
        let sides = [(p.rank_q, self.width), (p.rank_k, self.width), (p.rank_v, self.width_v)];
        for (side, (names, (rank, (b, c)))) in names.into_iter().zip(sides).enumerate() {
            if side == 0 && p.kv_only {
                continue;
            }
            list.push(needed(names[0], rank * s.n_heads, a_in));
            if side < 2 || !p.share_b {
                list.push(needed(names[1], rank * b, b_in));
            }
            if p.order == 3 {
                list.push(needed(names[2], rank * c, b_in));
            }
        }
        list
    }

    /// Numbers a token adds to the cache.
    fn cache_elements(&self) -> usize {
        let (s, p) = (&self.s, &self.p);
        let a = if p.contextual == Contextual::BOnly { 0 } else { s.n_heads };
        let feature = |(b, c): (usize, usize)| match (p.contextual, p.order) {
            (Contextual::AOnly, _) => 0,
            (_, 2) => b,
            _ => b + c,
        };
        let values = if p.share_b { 0 } else { feature(self.width_v) };
        p.rank_k * (a + feature(self.width)) + p.rank_v * (a + values)
    }

    /// Whether this many new tokens are treated on the factors.
    fn on_factors(&self, tokens: usize) -> bool {
        let (s, p) = (&self.s, &self.p);
        let (h, d) = (s.n_heads, s.d);
        match p.path {
            Path::Factors => true,
            Path::Materialised => false,
            Path::Auto => {
                tokens < 8 || (!p.kv_only && p.rank_q * p.rank_k * (d + h) + h * p.rank_v * s.d_v < 2 * h * d)
            }
        }
    }
}

/// A factor that depends on the token, or does not.
#[derive(Debug)]
enum Map {
    Contextual(Box<dyn Linear>),
    Fixed(Vec<f32>, usize),
}

impl Map {
    fn new(w: Box<dyn Linear>, contextual: bool) -> Self {
        if contextual { Self::Contextual(w) } else { Self::Fixed(constant(&*w), w.parameters()) }
    }

    fn parameters(&self) -> usize {
        match self {
            Self::Contextual(w) => w.parameters(),
            Self::Fixed(_, n) => *n,
        }
    }

    /// Rows of the new tokens; nothing where it is fixed.
    fn rows(&self, x: MatRef<'_, f32>, cx: Context<'_>) -> Vec<f32> {
        match self {
            Self::Contextual(w) => project(&**w, x, cx),
            Self::Fixed(..) => Vec::new(),
        }
    }

    /// The rows of a range of tokens, or the fixed one.
    fn of<'a>(&'a self, rows: &'a [f32], tokens: Range<usize>, width: usize) -> (&'a [f32], bool) {
        match self {
            Self::Contextual(_) => (&rows[tokens.start * width..tokens.end * width], false),
            Self::Fixed(x, _) => (x, true),
        }
    }
}

/// The factors of queries, keys or values.
#[derive(Debug)]
struct Maps {
    rank: usize,
    a: Map,
    /// `None` where values use the factors of keys.
    b: Option<Map>,
    c: Option<Map>,
    act: HeadAct,
}

impl Maps {
    fn parameters(&self) -> usize {
        let more = self.b.iter().chain(&self.c).map(Map::parameters).sum::<usize>();
        self.a.parameters() + more
    }

    fn project(&self, x: MatRef<'_, f32>, heads: usize, cx: Context<'_>) -> Rows {
        let mut a = self.a.rows(x, cx);
        activate(self.act, &mut a, heads);
        let of = |m: &Option<Map>| m.as_ref().map_or(Vec::new(), |m| m.rows(x, cx));
        Rows { a, b: of(&self.b), c: of(&self.c) }
    }
}

fn activate(act: HeadAct, a: &mut [f32], heads: usize) {
    match act {
        HeadAct::None => {}
        HeadAct::Sigmoid => a.iter_mut().for_each(|x| *x = 1.0 / (1.0 + (-*x).exp())),
        HeadAct::Softmax => a.chunks_exact_mut(heads.max(1)).for_each(|row| {
            attlas_num::kernels::softmax_in_place(row);
        }),
    }
}

/// Factors of a number of tokens, each `[token, rank, width]`; empty where they are fixed.
#[derive(Clone, Debug, Default)]
struct Rows {
    a: Vec<f32>,
    b: Vec<f32>,
    c: Vec<f32>,
}

impl Rows {
    fn extend(&mut self, other: &Rows) {
        self.a.extend_from_slice(&other.a);
        self.b.extend_from_slice(&other.b);
        self.c.extend_from_slice(&other.c);
    }
}

/// The layer.
#[derive(Debug)]
pub struct TensorProduct {
    plan: Plan,
    /// A plain projection of queries, or their factors.
    q: std::result::Result<Box<dyn Linear>, Maps>,
    k: Maps,
    v: Maps,
    o: Box<dyn Linear>,
    rotary: Option<Rotary>,
}

impl TensorProduct {
    /// The layer with its weights, named as in the registry entry's list.
    pub fn new(shape: LayerShape, params: Params, mut weights: Weights) -> Result<Self> {
        let plan = Plan::new(&shape, params)?;
        let p = &plan.p;
        let rotary = Rotary::new(p.rope, plan.rotated(), p.rope_base)?;
        let mut maps = |names: [&str; 3], rank: usize, b: bool| -> Result<Maps> {
            let mut a = Map::new(take(&mut weights, names[0])?, p.contextual != Contextual::BOnly);
            if let Map::Fixed(a, _) = &mut a {
                activate(p.head_act, a, shape.n_heads);
            }
            let feature = p.contextual != Contextual::AOnly;
            let b = if b { Some(Map::new(take(&mut weights, names[1])?, feature)) } else { None };
            let c = if p.order == 3 { Some(Map::new(take(&mut weights, names[2])?, feature)) } else { None };
            Ok(Maps { rank, a, b, c, act: p.head_act })
        };
        let k = maps(["a_k", "b_k", "c_k"], p.rank_k, true)?;
        let v = maps(["a_v", "b_v", "c_v"], p.rank_v, !p.share_b)?;
        let q = if p.kv_only { None } else { Some(maps(["a_q", "b_q", "c_q"], p.rank_q, true)?) };
        let q = match q {
            Some(maps) => Err(maps),
            None => Ok(take(&mut weights, "q")?),
        };
        Ok(Self { q, k, v, o: take(&mut weights, "o")?, rotary, plan })
    }

    /// Feature factors of a range of tokens as `(token, rank) × width`, built where they are not stored so.
    /// `rotate` gives the position of the first of them.
    fn features<'a>(
        &'a self,
        maps: &'a Maps,
        rows: &'a Rows,
        tokens: Range<usize>,
        (w_b, w_c): (usize, usize),
        rotate: Option<usize>,
    ) -> Cow<'a, [f32]> {
        let n = tokens.len();
        let Some(b_map) = &maps.b else { return Cow::Borrowed(&[]) };
        let (b, fixed) = b_map.of(&rows.b, tokens.clone(), maps.rank * w_b);
        let mut b = if fixed { Cow::Owned(b.repeat(n)) } else { Cow::Borrowed(b) };
        if let (Some(first), Some(rotary)) = (rotate, &self.rotary) {
            rotary.rotate(first, b.to_mut(), maps.rank, w_b);
        }
        let Some(c_map) = &maps.c else { return b };
        let (c, fixed) = c_map.of(&rows.c, tokens, maps.rank * w_c);
        let mut out = Vec::with_capacity(n * maps.rank * w_b * w_c);
        for (row, b) in b.chunks_exact(w_b).enumerate() {
            let row = if fixed { row % maps.rank } else { row };
            for &c in &c[row * w_c..(row + 1) * w_c] {
                out.extend(b.iter().map(|&b| b * c));
            }
        }
        Cow::Owned(out)
    }

    fn keys<'a>(&'a self, cache: &'a Cache, tokens: Range<usize>) -> Side<'a, f32> {
        let (h, p) = (self.plan.s.n_heads, &self.plan.p);
        let (a, a_fixed) = self.k.a.of(&cache.k.a, tokens.clone(), p.rank_k * h);
        let late = p.share_b || matches!(self.k.b, Some(Map::Fixed(..)));
        let b =
            self.features(&self.k, &cache.k, tokens.clone(), self.plan.width, late.then_some(tokens.start));
        Side { rank: p.rank_k, a, a_fixed, b }
    }

    fn values<'a>(&'a self, cache: &'a Cache, tokens: Range<usize>) -> Side<'a, f32> {
        let (h, p) = (self.plan.s.n_heads, &self.plan.p);
        let (a, a_fixed) = self.v.a.of(&cache.v.a, tokens.clone(), p.rank_v * h);
        let b = if p.share_b {
            self.features(&self.k, &cache.k, tokens, self.plan.width, None)
        } else {
            self.features(&self.v, &cache.v, tokens, self.plan.width_v, None)
        };
        Side { rank: p.rank_v, a, a_fixed, b }
    }

    /// Attention outputs `[tokens, heads, d_v]` of the last `tokens` of the cache.
    fn attend(
        &self,
        cache: &Cache,
        q: &Queries,
        mask: Mask,
        tokens: usize,
        ws: &mut Workspace,
    ) -> Result<(Vec<f32>, RunInfo)> {
        let s = self.plan.s;
        let (h, total) = (s.n_heads, cache.len);
        let first = total - tokens;
        let scale = (1.0 / (s.d as f64).sqrt()) as f32;
        let problem = Problem { d_v: s.d_v, mask, ..Problem::new(h, 1, s.d) }.with_lens(tokens, total);
        if mask == Mask::Causal && self.plan.on_factors(tokens) {
            let sizes = Sizes { heads: h, d: s.d, d_v: s.d_v, scale };
            let rows: Vec<Vec<f32>> = ws.install(|cx| {
                (0..tokens)
                    .into_par_iter()
                    .map(|t| {
                        let load = |range: Range<usize>| {
                            (self.keys(cache, range.clone()), self.values(cache, range))
                        };
                        attend_factors(&sizes, &q.token(t, h, s.d), first + t + 1, &load, cx)
                    })
                    .collect()
            });
            return Ok((rows.concat(), RunInfo::visited(problem.visible_pairs())));
        }
        let exact = registry::method("exact")?.plan(&problem, &Options::new())?;
        let (q, k, v) = ws.install(|_| {
            let combine = |side: Side<'_, f32>, width| combine(&side, h, width);
            (
                q.heads(h, s.d),
                combine(self.keys(cache, 0..total), s.d),
                combine(self.values(cache, 0..total), s.d_v),
            )
        });
        let mut out = vec![0.0; tokens * h * s.d_v];
        let inputs = Qkv::new(
            TensorRef::bnhd(&q, [1, h, tokens, s.d])?,
            TensorRef::bnhd(&k, [1, h, total, s.d])?,
            TensorRef::bnhd(&v, [1, h, total, s.d_v])?,
        );
        let output = Out::new(TensorMut::bnhd(&mut out, [1, h, tokens, s.d_v])?);
        let info = exact.execute(&inputs.into(), &mut output.into(), ws)?;
        Ok((out, info))
    }
}

/// Queries of the new tokens.
struct Queries {
    /// `[token, rank, heads]`, or one token's worth where fixed.
    a: Vec<f32>,
    a_fixed: bool,
    /// `[token, rank, d]`, rotated.
    b: Vec<f32>,
    rank: usize,
    /// `[token, heads, d]` where queries do not come in factors.
    plain: Option<Vec<f32>>,
}

impl Queries {
    fn side(&self) -> Side<'_, f32> {
        Side { rank: self.rank, a: &self.a, a_fixed: self.a_fixed, b: Cow::Borrowed(&self.b) }
    }

    fn heads(&self, heads: usize, d: usize) -> Vec<f32> {
        self.plain.clone().unwrap_or_else(|| combine(&self.side(), heads, d))
    }

    fn token(&self, t: usize, heads: usize, d: usize) -> Query<'_, f32> {
        match &self.plain {
            Some(q) => Query::Formed(Cow::Borrowed(&q[t * heads * d..(t + 1) * heads * d])),
            None => {
                let at = if self.a_fixed { 0 } else { t * self.rank * heads };
                Query::Factors {
                    a: &self.a[at..at + self.rank * heads],
                    b: &self.b[t * self.rank * d..(t + 1) * self.rank * d],
                    rank: self.rank,
                }
            }
        }
    }
}

impl Layer for TensorProduct {
    fn shape(&self) -> LayerShape {
        self.plan.s
    }

    fn parameters(&self) -> usize {
        let q = match &self.q {
            Ok(w) => w.parameters(),
            Err(maps) => maps.parameters(),
        };
        q + self.k.parameters() + self.v.parameters() + self.o.parameters()
    }

    fn cache_elements(&self) -> usize {
        self.plan.cache_elements()
    }

    fn new_cache(&self) -> Box<dyn LayerCache> {
        let (s, p) = (&self.plan.s, &self.plan.p);
        let side = |rank: usize, (b, c): (usize, usize)| [rank * s.n_heads, rank * b, rank * c];
        Box::new(Cache {
            k: Rows::default(),
            v: Rows::default(),
            len: 0,
            widths: [side(p.rank_k, self.plan.width), side(p.rank_v, self.plan.width_v)],
        })
    }

    fn forward(
        &self,
        x: MatRef<'_, f32>,
        cache: &mut dyn LayerCache,
        out: &mut [f32],
        ws: &mut Workspace,
    ) -> Result<RunInfo> {
        check_io(x, out, self.plan.s.d_model)?;
        self.append_and_attend(x, own(cache, LAYER.id)?, Mask::Causal, out, ws)
    }

    fn forward_all(&self, x: MatRef<'_, f32>, out: &mut [f32], ws: &mut Workspace) -> Result<RunInfo> {
        check_io(x, out, self.plan.s.d_model)?;
        let mut cache = self.new_cache();
        self.append_and_attend(x, own(&mut *cache, LAYER.id)?, Mask::None, out, ws)
    }

    fn cost(&self, mask: Mask, cached: usize, tokens: usize) -> Option<Cost> {
        let (s, p) = (&self.plan.s, &self.plan.p);
        let (h, d, d_v) = (s.n_heads as u64, s.d as u64, s.d_v as u64);
        let [rq, rk, rv] = [p.rank_q, p.rank_k, p.rank_v].map(|r| r as u64);
        let problem = Problem { mask, ..Problem::new(1, 1, 1) }.with_lens(tokens, cached + tokens);
        let pairs = problem.visible_pairs();
        let projections = 2 * (tokens * self.parameters()) as u64;
        let work = if mask == Mask::Causal && self.plan.on_factors(tokens) {
            let score = if p.kv_only { h * d } else { (rq * (d + h)).min(h * d) };
            2 * pairs * (rk * score + h * rk + h * rv * d_v)
        } else {
            let form = (cached + tokens) as u64 * h * (rk * d + rv * d_v) + tokens as u64 * h * rq * d;
            2 * (pairs * h * (d + d_v) + form)
        };
        let bytes = 4 * ((cached + tokens) * self.cache_elements() + 2 * tokens * s.d_model) as u64;
        Some(Cost { setup_flops: 0, run_flops: projections + work, bytes })
    }
}

impl TensorProduct {
    fn append_and_attend(
        &self,
        x: MatRef<'_, f32>,
        cache: &mut Cache,
        mask: Mask,
        out: &mut [f32],
        ws: &mut Workspace,
    ) -> Result<RunInfo> {
        let s = &self.plan.s;
        let (first, tokens) = (cache.len, x.rows());
        let queries = ws.install(|cx| {
            let mut k = self.k.project(x, s.n_heads, cx);
            if let (false, Some(rotary)) = (self.plan.p.share_b || k.b.is_empty(), &self.rotary) {
                rotary.rotate(first, &mut k.b, self.k.rank, self.plan.width.0);
            }
            cache.k.extend(&k);
            cache.v.extend(&self.v.project(x, s.n_heads, cx));
            cache.len += tokens;
            match &self.q {
                Ok(w) => {
                    let mut q = project(&**w, x, cx);
                    if let Some(rotary) = &self.rotary {
                        // In order 3 every block of d_b features is a rotated factor times one number.
                        let width = self.plan.width.0;
                        rotary.rotate(first, &mut q, s.n_heads * s.d / width, width);
                    }
                    Queries { a: Vec::new(), a_fixed: false, b: Vec::new(), rank: 1, plain: Some(q) }
                }
                Err(maps) => {
                    let rows = maps.project(x, s.n_heads, cx);
                    let b = self.features(maps, &rows, 0..tokens, self.plan.width, Some(first)).into_owned();
                    let (a, a_fixed) = maps.a.of(&rows.a, 0..tokens, maps.rank * s.n_heads);
                    Queries { a: a.to_vec(), a_fixed, b, rank: maps.rank, plain: None }
                }
            }
        });
        let (heads, info) = self.attend(cache, &queries, mask, tokens, ws)?;
        ws.install(|cx| self.o.apply(MatRef::new(&heads, tokens, s.n_heads * s.d_v), out, cx));
        Ok(info)
    }
}

/// Factors of keys (feature factors rotated, unless values share them) and values.
#[derive(Debug)]
struct Cache {
    k: Rows,
    v: Rows,
    len: usize,
    /// Numbers of one token in each factor.
    widths: [[usize; 3]; 2],
}

impl LayerCache for Cache {
    fn len(&self) -> usize {
        self.len
    }

    fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
        for (rows, widths) in [&mut self.k, &mut self.v].into_iter().zip(self.widths) {
            for (x, width) in [&mut rows.a, &mut rows.b, &mut rows.c].into_iter().zip(widths) {
                x.truncate(self.len * width);
            }
        }
    }

    fn bytes(&self) -> usize {
        [&self.k, &self.v].iter().map(|r| 4 * (r.a.len() + r.b.len() + r.c.len())).sum()
    }

    fn as_any_mut(&mut self) -> &mut dyn std::any::Any {
        self
    }
}

#[cfg(test)]
mod tests;
