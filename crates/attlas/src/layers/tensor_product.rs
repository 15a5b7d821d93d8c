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

use super::common::{Pairs, Rotary, check_io, check_shape, constant, needed, own, project, take};
use crate::layer::{Layer, LayerCache, LayerKind, LayerShape, Linear, WeightSpec, Weights};
use crate::workspace::Context;
use crate::{
    Cost, Error, Mask, MatRef, Options, Out, Problem, Qkv, Real, Result, RunInfo, TensorMut, TensorRef,
    Workspace, registry,
};
use attlas_num::kernels::{Op, exp_in_place, gemm, merge_lse};
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

/// Factors of a run of tokens.
#[derive(Clone, Debug)]
pub struct Side<'a, T: Clone> {
    /// Terms of the sum.
    pub rank: usize,
    /// Head factors, `[token, rank, heads]`.
    pub a: &'a [T],
    /// `a` holds one `[rank, heads]` for all tokens.
    pub a_fixed: bool,
    /// Feature factors, `[token, rank, width]`.
    pub b: Cow<'a, [T]>,
}

impl<T: Real> Side<'_, T> {
    fn head_factors(&self, token: usize, heads: usize) -> &[T] {
        let at = if self.a_fixed { 0 } else { token * self.rank * heads };
        &self.a[at..at + self.rank * heads]
    }
}

/// The heads of every token, $\frac1R \sum_r a_r \otimes b_r$, as `[token, heads, width]`.
pub fn combine<T: Real>(side: &Side<'_, T>, heads: usize, width: usize) -> Vec<T> {
    let one = heads * width;
    let tokens = side.b.len() / (side.rank * width).max(1);
    let mut out = vec![T::ZERO; tokens * one];
    let inverse = T::ONE / T::from_usize(side.rank);
    out.par_chunks_mut(one.max(1)).enumerate().for_each(|(t, out)| {
        let a = side.head_factors(t, heads);
        for (r, b) in side.b[t * side.rank * width..].chunks_exact(width).take(side.rank).enumerate() {
            for (h, row) in out.chunks_exact_mut(width).enumerate() {
                let weight = a[r * heads + h] * inverse;
                row.iter_mut().zip(b).for_each(|(x, &b)| *x += weight * b);
            }
        }
    });
    out
}

/// One token's queries.
#[derive(Clone, Debug)]
pub enum Query<'a, T: Clone> {
    /// Head factors `[rank, heads]` and feature factors `[rank, d]`.
    Factors {
        /// Head factors.
        a: &'a [T],
        /// Feature factors.
        b: &'a [T],
        /// Terms.
        rank: usize,
    },
    /// `[heads, d]`.
    Formed(Cow<'a, [T]>),
}

/// Sizes of [`attend_factors`].
#[derive(Clone, Copy, Debug)]
pub struct Sizes<T> {
    /// Heads.
    pub heads: usize,
    /// Width of queries and keys.
    pub d: usize,
    /// Width of values.
    pub d_v: usize,
    /// Factor of the scores.
    pub scale: T,
}

/// Tokens that are scored together.
const BLOCK: usize = 64;
/// Tokens of one task; fixed, so that results do not depend on threads.
const CHUNK: usize = 2048;

/// Attention of one token over the first `n` tokens of a cache of factors, without forming keys or values.
/// `load` gives the factors of keys and values of a range. The result is `heads × d_v`.
pub fn attend_factors<'c, T: Real>(
    sizes: &Sizes<T>,
    query: &Query<'_, T>,
    n: usize,
    load: &(dyn Fn(Range<usize>) -> (Side<'c, T>, Side<'c, T>) + Sync),
    cx: Context<'_>,
) -> Vec<T> {
    let Sizes { heads, d, d_v, .. } = *sizes;
    // The cheaper of (B_K B_Qᵀ) A_Q and B_K (A_Qᵀ B_Q)ᵀ.
    let query = match query {
        Query::Factors { a, b, rank } if rank * (d + heads) >= heads * d => {
            let side = Side { rank: *rank, a, a_fixed: true, b: Cow::Borrowed(*b) };
            Query::Formed(Cow::Owned(combine(&side, heads, d)))
        }
        other => other.clone(),
    };
    let starts: Vec<usize> = (0..n).step_by(CHUNK).collect();
    let parts: Vec<(Vec<T>, Vec<T>)> = starts
        .into_par_iter()
        .map(|start| chunk(sizes, &query, start..(start + CHUNK).min(n), load, cx))
        .collect();
    let mut parts = parts.into_iter();
    let (mut out, mut lse) =
        parts.next().unwrap_or_else(|| (vec![T::ZERO; heads * d_v], vec![T::NEG_INFINITY; heads]));
    for (o2, lse2) in parts {
        for ((o, lse), (o2, lse2)) in
            out.chunks_exact_mut(d_v).zip(&mut lse).zip(o2.chunks_exact(d_v).zip(lse2))
        {
            merge_lse(o, lse, o2, lse2);
        }
    }
    out
}

fn chunk<'c, T: Real>(
    sizes: &Sizes<T>,
    query: &Query<'_, T>,
    tokens: Range<usize>,
    load: &(dyn Fn(Range<usize>) -> (Side<'c, T>, Side<'c, T>) + Sync),
    cx: Context<'_>,
) -> (Vec<T>, Vec<T>) {
    let Sizes { heads, d, d_v, scale } = *sizes;
    let isa = cx.schedule.isa;
    let mut acc = vec![T::ZERO; heads * d_v];
    let (mut m, mut l) = (vec![T::NEG_INFINITY; heads], vec![T::ZERO; heads]);
    let mut logits = vec![T::ZERO; BLOCK * heads];
    let (mut scores, mut shared, mut weights) = (Vec::new(), Vec::new(), Vec::new());
    let mut rank_v = 1;
    for start in tokens.clone().step_by(BLOCK) {
        let range = start..(start + BLOCK).min(tokens.end);
        let n = range.len();
        let (keys, values) = load(range);
        rank_v = values.rank;
        let rows = n * keys.rank;
        let b_k = MatRef::new(&keys.b, rows, d);
        scores.resize(rows * heads, T::ZERO);
        let norm = match query {
            Query::Formed(q) => {
                let q = Op::T(MatRef::new(q, heads, d));
                gemm(isa, T::ONE, Op::N(b_k), q, T::ZERO, &mut scores, heads, cx.scratch);
                T::ONE
            }
            Query::Factors { a, b, rank } => {
                shared.resize(rows * rank, T::ZERO);
                let b = Op::T(MatRef::new(b, *rank, d));
                gemm(isa, T::ONE, Op::N(b_k), b, T::ZERO, &mut shared, *rank, cx.scratch);
                let p = Op::N(MatRef::new(&shared[..], rows, *rank));
                gemm(
                    isa,
                    T::ONE,
                    p,
                    Op::N(MatRef::new(a, *rank, heads)),
                    T::ZERO,
                    &mut scores,
                    heads,
                    cx.scratch,
                );
                T::from_usize(*rank)
            }
        };
        let factor = scale / (norm * T::from_usize(keys.rank));
        let logits = &mut logits[..n * heads];
        logits.fill(T::ZERO);
        let mut top = m.clone();
        for (t, row) in logits.chunks_exact_mut(heads).enumerate() {
            let a = keys.head_factors(t, heads).chunks_exact(heads);
            for (a, s) in a.zip(scores[t * keys.rank * heads..].chunks_exact(heads)) {
                row.iter_mut().zip(a.iter().zip(s)).for_each(|(x, (&a, &s))| *x += a * s);
            }
            for (x, top) in row.iter_mut().zip(&mut top) {
                *x *= factor;
                *top = if *x > *top { *x } else { *top };
            }
        }
        // A head whose logits are all −∞ or NaN so far keeps a shift of 0.
        let shift: Vec<T> = top.iter().map(|&x| if x == T::NEG_INFINITY { T::ZERO } else { x }).collect();
        for row in logits.chunks_exact_mut(heads) {
            row.iter_mut().zip(&shift).for_each(|(x, &s)| *x -= s);
        }
        exp_in_place(logits);
        for h in 0..heads {
            let c = (m[h] - shift[h]).exp();
            l[h] *= c;
            acc[h * d_v..(h + 1) * d_v].iter_mut().for_each(|x| *x *= c);
        }
        m = top;
        weights.clear();
        for (t, p) in logits.chunks_exact(heads).enumerate() {
            l.iter_mut().zip(p).for_each(|(l, &p)| *l += p);
            for a in values.head_factors(t, heads).chunks_exact(heads) {
                weights.extend(a.iter().zip(p).map(|(&a, &p)| a * p));
            }
        }
        let w = MatRef::new(&weights[..], n * values.rank, heads);
        let b_v = MatRef::new(&values.b, n * values.rank, d_v);
        gemm(isa, T::ONE, Op::T(w), Op::N(b_v), T::ONE, &mut acc, d_v, cx.scratch);
    }
    for (o, &l) in acc.chunks_exact_mut(d_v).zip(&l) {
        let total = T::from_usize(rank_v) * l;
        o.iter_mut().for_each(|x| *x = if l == T::ZERO { T::ZERO } else { *x / total });
    }
    let lse =
        m.iter().zip(&l).map(|(&m, &l)| if l == T::ZERO { T::NEG_INFINITY } else { m + l.ln() }).collect();
    (acc, lse)
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
mod tests {
    use super::super::common::fold::attend;
    use super::super::common::third::tests::{assert_known, fill};
    use super::super::grouped_query;
    use super::super::testing::{
        assert_close, check_causal, forward, forward_all, random, random_layer, weights_from,
    };
    use super::*;
    use crate::Mat;
    use attlas_num::kernels::Band;
    use attlas_num::linalg::{matmul, matmul_nt};
    use attlas_num::rope::{Angles, Layout, Rope, Scaling, Table};

    const SHAPE: LayerShape = LayerShape { d_model: 20, n_heads: 6, n_kv_heads: 6, d: 8, d_v: 4 };

    #[test]
    fn keeps_what_every_causal_layer_keeps() {
        let none = Options::new();
        check_causal(&LAYER, &SHAPE, &none, 33);
        check_causal(&LAYER, &SHAPE, &none.clone().with("path", "factors"), 20);
        check_causal(
            &LAYER,
            &SHAPE,
            &none.clone().with("path", "materialised").with("head_act", "softmax"),
            20,
        );
        check_causal(
            &LAYER,
            &SHAPE,
            &none.clone().with("contextual", "b_only").with("rope", "interleaved"),
            20,
        );
        check_causal(
            &LAYER,
            &SHAPE,
            &none.clone().with("contextual", "a_only").with("head_act", "sigmoid"),
            20,
        );
        check_causal(&LAYER, &SHAPE, &none.clone().with("kv_only", true).with("rope_dim", 4), 20);
        check_causal(&LAYER, &LayerShape { d_v: 8, ..SHAPE }, &none.clone().with("share_b", true), 20);
        for path in ["factors", "materialised"] {
            let order = none.clone().with("order", 3).with("d_b", 2).with("path", path);
            check_causal(&LAYER, &SHAPE, &order, 20);
            check_causal(&LAYER, &SHAPE, &order.clone().with("kv_only", true), 20);
            check_causal(&LAYER, &SHAPE, &order.clone().with("contextual", "a_only"), 20);
        }
    }

    #[test]
    fn factors_and_formed_heads_give_the_same_rows() {
        let x = random("x", 30, 20);
        let variants = [
            Options::new(),
            Options::new().with("rank_q", 1).with("rank_k", 3),
            Options::new().with("order", 3).with("d_b", 4).with("kv_only", true),
            Options::new().with("order", 3).with("d_b", 4),
            Options::new().with("contextual", "a_only"),
        ];
        for options in variants {
            let on = |path: &str| random_layer(&LAYER, &SHAPE, &options.clone().with("path", path));
            let formed = forward(&*on("materialised"), &x, &[30]);
            assert_close(&forward(&*on("factors"), &x, &[30]), &formed);
            assert_close(&forward(&*on("factors"), &x, &[1; 30]), &formed);
        }
    }

    #[test]
    fn shared_feature_factors_equal_equal_weights() {
        let s = LayerShape { d_v: 8, ..SHAPE };
        let x = random("x", 25, 20);
        let shared = random_layer(&LAYER, &s, &Options::new().with("share_b", true));
        let specs = (LAYER.weights)(&s, &Options::new()).unwrap();
        let weights = specs
            .iter()
            .map(|w| (w.name, random(if w.name == "b_v" { "b_k" } else { w.name }, w.n_out, w.n_in)));
        let full = LAYER.layer(&s, &Options::new(), weights_from(weights)).unwrap();
        assert_close(&forward(&*shared, &x, &[25]), &forward(&*full, &x, &[25]));
        assert_close(&forward(&*shared, &x, &[1; 25]), &forward(&*full, &x, &[25]));
        assert_eq!((shared.cache_elements(), full.cache_elements()), (2 * (6 + 8) + 2 * 6, 4 * (6 + 8)));
    }

    /// `rank × heads` fixed head factors as a weight.
    fn fixed(rank: usize, heads: usize, f: impl Fn(usize, usize) -> f32) -> Mat<f32> {
        Mat::from_fn(rank * heads, 1, |i, _| f(i / heads, i % heads))
    }

    #[test]
    fn multi_head_grouped_and_multi_query_attention_are_special_cases() {
        let x = random("x", 21, 20);
        for groups in [6, 2, 1] {
            let grouped_shape = LayerShape { n_kv_heads: groups, ..SHAPE };
            for rope in ["half", "interleaved"] {
                let options = Options::new().with("rope", rope);
                let plain = random_layer(&grouped_query::LAYER, &grouped_shape, &options);
                let one_hot = |r: usize, h: usize, n: usize| if h * n / 6 == r { n as f32 } else { 0.0 };
                let weights = weights_from([
                    ("a_q", fixed(6, 6, |r, h| one_hot(r, h, 6))),
                    ("b_q", random("q", 48, 20)),
                    ("a_k", fixed(groups, 6, |r, h| one_hot(r, h, groups))),
                    ("b_k", random("k", 8 * groups, 20)),
                    ("a_v", fixed(groups, 6, |r, h| one_hot(r, h, groups))),
                    ("b_v", random("v", 4 * groups, 20)),
                    ("o", random("o", 20, 24)),
                ]);
                let options = options
                    .with("contextual", "b_only")
                    .with("rank_q", 6)
                    .with("rank_k", groups)
                    .with("rank_v", groups);
                let layer = LAYER.layer(&SHAPE, &options, weights).unwrap();
                let want = forward(&*plain, &x, &[21]);
                assert_close(&forward(&*layer, &x, &[21]), &want);
                assert_close(&forward(&*layer, &x, &[1; 21]), &want);
                assert_eq!(layer.cache_elements(), plain.cache_elements());
            }
        }
    }

    #[test]
    fn latent_attention_with_its_rotated_part_is_a_special_case() {
        // Heads of 4 rotated and 4 plain features, latent width 5, the rotated key shared by all heads.
        let (h, latent) = (6, 5);
        let x = random("x", 19, 20);
        let (down, up, rotated) =
            (random("down", latent, 20), random("up", h * 4, latent), random("rotated", 4, 20));
        let w_q = random("q", h * 8, 20);
        let up_down = matmul(up.as_ref(), down.as_ref());
        let mut b_k = Mat::zeros((h + 1) * 8, 20);
        for i in 0..h {
            for e in 0..4 {
                b_k.row_mut(i * 8 + 4 + e).copy_from_slice(up_down.row(i * 4 + e));
            }
        }
        (0..4).for_each(|e| b_k.row_mut(h * 8 + e).copy_from_slice(rotated.row(e)));
        let r = (h + 1) as f32;
        let weights = weights_from([
            ("q", w_q.clone()),
            ("a_k", fixed(h + 1, h, |t, head| if t == head || t == h { r } else { 0.0 })),
            ("b_k", b_k),
            ("a_v", fixed(h, h, |t, head| if t == head { h as f32 } else { 0.0 })),
            ("b_v", up_down.clone()),
            ("o", random("o", 20, 24)),
        ]);
        let options = Options::new()
            .with("contextual", "b_only")
            .with("kv_only", true)
            .with("rank_k", h + 1)
            .with("rank_v", h)
            .with("rope_dim", 4);
        let layer = LAYER.layer(&SHAPE, &options, weights).unwrap();
        // Latent attention as it is written: c = down·x, keys [rope(rotated·x), up·c], values up·c.
        let ws = Workspace::single().unwrap();
        let table = Table::<f32>::new(
            &Rope { dim: 4, base: 1e4, layout: Layout::Half, scaling: Scaling::None },
            19,
            Angles::Single,
        );
        let c = matmul_nt(x.as_ref(), down.as_ref());
        let (uc, kr, mut q) = (
            matmul_nt(c.as_ref(), up.as_ref()),
            matmul_nt(x.as_ref(), rotated.as_ref()),
            matmul_nt(x.as_ref(), w_q.as_ref()),
        );
        table.rotate_tokens_in_place(0, q.data_mut(), h, 8);
        let mut heads = Mat::zeros(19, h * 4);
        for i in 0..h {
            let mut k = Mat::from_fn(19, 8, |n, e| if e < 4 { kr[(n, e)] } else { uc[(n, i * 4 + e - 4)] });
            table.rotate_tokens_in_place(0, k.data_mut(), 1, 8);
            let v = Mat::from_fn(19, 4, |n, e| uc[(n, i * 4 + e)]);
            let q = Mat::from_fn(19, 8, |n, e| q[(n, i * 8 + e)]);
            let o = attend(
                q.as_ref(),
                k.as_ref(),
                v.as_ref(),
                1.0 / 8f32.sqrt(),
                None,
                Band::causal(0),
                ws.context(),
            )
            .0;
            o.chunks_exact(4)
                .enumerate()
                .for_each(|(n, o)| heads.row_mut(n)[i * 4..i * 4 + 4].copy_from_slice(o));
        }
        let want = matmul_nt(heads.as_ref(), random("o", 20, 24).as_ref());
        assert_close(&forward(&*layer, &x, &[19]), want.data());
        // A statement about functions: the cache is that of all heads, not the latent one.
        assert_eq!(layer.cache_elements(), (h + 1) * 8 + h * 4);
    }

    #[test]
    fn scaling_one_factor_up_and_the_other_down_changes_nothing() {
        let x = random("x", 15, 20);
        let specs = (LAYER.weights)(&SHAPE, &Options::new()).unwrap();
        let scaled = specs.iter().map(|w| {
            let c = if w.name.starts_with('a') {
                4.0
            } else if w.name.starts_with('b') {
                0.25
            } else {
                1.0
            };
            let m = random(w.name, w.n_out, w.n_in);
            (w.name, Mat::from_fn(w.n_out, w.n_in, |i, j| c * m[(i, j)]))
        });
        let other = LAYER.layer(&SHAPE, &Options::new(), weights_from(scaled)).unwrap();
        let layer = random_layer(&LAYER, &SHAPE, &Options::new());
        assert_close(&forward(&*other, &x, &[15]), &forward(&*layer, &x, &[15]));
    }

    #[test]
    fn without_a_mask_the_last_row_is_the_causal_one() {
        let x = random("x", 15, 20);
        let layer = random_layer(&LAYER, &SHAPE, &Options::new());
        let (all, causal) = (forward_all(&*layer, &x), forward(&*layer, &x, &[15]));
        assert_close(&all[14 * 20..], &causal[14 * 20..]);
        assert!((all[0] - causal[0]).abs() > 1e-4);
    }

    #[test]
    fn the_known_answer_in_double_precision() {
        let x = fill(5, 8, 10, 1.0);
        let (h, d, ranks) = (3, 4, [3, 2, 2]);
        let rope = Rope { dim: 4, base: 1e4, layout: Layout::Interleaved, scaling: Scaling::None };
        let table = Table::<f64>::new(&rope, 5, Angles::Double);
        let side = |n: usize, rotate: bool| {
            let a = matmul_nt(x.as_ref(), fill(ranks[n] * h, 8, 20 + n as u64, 1.0).as_ref());
            let mut b = matmul_nt(x.as_ref(), fill(ranks[n] * d, 8, 23 + n as u64, 1.0).as_ref());
            if rotate {
                table.rotate_tokens_in_place(0, b.data_mut(), ranks[n], d);
            }
            (a.into_vec(), b.into_vec())
        };
        let (q, k, v) = (side(0, true), side(1, true), side(2, false));
        let of = |(a, b): &(Vec<f64>, Vec<f64>), n: usize, t: Range<usize>| -> (Vec<f64>, Vec<f64>) {
            let (wa, wb) = (ranks[n] * h, ranks[n] * d);
            (a[t.start * wa..t.end * wa].to_vec(), b[t.start * wb..t.end * wb].to_vec())
        };
        let view = |x: &'static (Vec<f64>, Vec<f64>), n: usize| Side {
            rank: ranks[n],
            a: &x.0,
            a_fixed: false,
            b: Cow::Borrowed(&x.1[..]),
        };
        let leak = |x: (Vec<f64>, Vec<f64>)| -> &'static (Vec<f64>, Vec<f64>) { Box::leak(Box::new(x)) };
        let heads = |x: &(Vec<f64>, Vec<f64>), n: usize| combine(&view(leak(x.clone()), n), h, d);
        let (qh, kh, vh) = (heads(&q, 0), heads(&k, 1), heads(&v, 2));
        let problem = Problem::new(h, 5, d).causal();
        let dims = [1, h, 5, d];
        let mut o = vec![0.0; 5 * h * d];
        let plan = registry::method("exact").unwrap().plan(&problem, &Options::new()).unwrap();
        let tensor = |x| TensorRef::bnhd(x, dims).unwrap();
        let inputs = Qkv::new(tensor(&qh), tensor(&kh), tensor(&vh));
        let mut ws = Workspace::single().unwrap();
        let output = Out::new(TensorMut::bnhd(&mut o, dims).unwrap());
        plan.execute(&inputs.into(), &mut output.into(), &mut ws).unwrap();
        let out = matmul(MatRef::new(&o, 5, 12), fill(12, 8, 26, 1.0).as_ref());
        let first = [-0.250010619934, -0.705302304800, -0.863920937623, -1.142264101497];
        let last = [0.392826295170, 0.174333440257, -0.283631433681, -0.888242724666];
        assert_known(&out, &first, &last, -12.502438480972);
        // The same rows from the factors alone.
        let sizes = Sizes { heads: h, d, d_v: d, scale: 0.5 };
        for t in 0..5 {
            let (a, b) = of(&q, 0, t..t + 1);
            let load = |r: Range<usize>| (view(leak(of(&k, 1, r.clone())), 1), view(leak(of(&v, 2, r)), 2));
            let got =
                attend_factors(&sizes, &Query::Factors { a: &a, b: &b, rank: 3 }, t + 1, &load, ws.context());
            let want = &o[t * 12..(t + 1) * 12];
            assert!(got.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-13), "{got:?} {want:?}");
        }
    }

    #[test]
    fn long_caches_are_cut_and_merged() {
        let s = LayerShape { d_model: 6, n_heads: 3, n_kv_heads: 3, d: 4, d_v: 4 };
        let n = CHUNK + BLOCK + 5;
        let x = random("x", n, 6);
        let layer = random_layer(&LAYER, &s, &Options::new());
        let want = forward(&*layer, &x, &[n]);
        assert_close(&forward(&*layer, &x, &[n - 3, 1, 2]), &want);
    }

    #[test]
    fn counts_are_those_of_the_page() {
        let s = LayerShape { d_model: 2048, n_heads: 32, n_kv_heads: 32, d: 128, d_v: 128 };
        let count = |options: Options| {
            let specs = (LAYER.weights)(&s, &options).unwrap();
            let parameters: usize = specs.iter().map(|w| w.n_out * w.n_in).sum();
            (parameters, (LAYER.cache_elements)(&s, &options).unwrap())
        };
        let ranks = |q: usize, k: usize, v: usize| {
            Options::new().with("rank_q", q).with("rank_k", k).with("rank_v", v)
        };
        let (d, h, dh) = (2048, 32, 128);
        assert_eq!(count(ranks(6, 1, 1)), (d * 8 * (h + dh) + d * h * dh, 320));
        assert_eq!(count(ranks(6, 2, 2)), (d * 10 * (h + dh) + d * h * dh, 640));
        assert_eq!((2 * h * dh) as f64 / 320.0, 25.6);
        assert_eq!(count(ranks(6, 2, 2).with("kv_only", true)), (d * 4 * (h + dh) + 2 * d * h * dh, 640));
        assert_eq!(
            count(ranks(6, 2, 2).with("contextual", "b_only")),
            (10 * (d * dh + h) + d * h * dh, 4 * dh)
        );
        assert_eq!(
            count(ranks(6, 2, 2).with("contextual", "a_only")),
            (10 * (d * h + dh) + d * h * dh, 4 * h)
        );
        let third = ranks(6, 2, 2).with("order", 3).with("d_b", 16);
        assert_eq!(count(third).1, 4 * (h + 16 + 8));
        // T6 medium: 47 heads of 64 at rank 2, against 16 heads of equal parameter count.
        let t6 = LayerShape { d_model: 1024, n_heads: 47, n_kv_heads: 47, d: 64, d_v: 64 };
        assert_eq!((LAYER.cache_elements)(&t6, &ranks(6, 2, 2)).unwrap(), 444);
    }

    #[test]
    fn decoding_work_is_that_of_the_paper() {
        // Multiply-adds for each cached token at d 2048, 32 heads of 64, without the head factors' own.
        let s = LayerShape { d_model: 64, n_heads: 32, n_kv_heads: 32, d: 64, d_v: 64 };
        let work = |q: usize, k: usize, v: usize| {
            let layer = random_layer(
                &LAYER,
                &s,
                &Options::new().with("rank_q", q).with("rank_k", k).with("rank_v", v),
            );
            let at = |m| layer.cost(Mask::Causal, m, 1).unwrap().run_flops;
            (at(1001) - at(1000)) / 2 - 32 * k as u64
        };
        assert_eq!([work(16, 1, 1), work(8, 1, 1), work(16, 2, 2)], [3584, 2816, 7168]);
    }

    #[test]
    fn what_does_not_fit_together_is_refused() {
        let refused = |shape: &LayerShape, options: Options| (LAYER.weights)(shape, &options).is_err();
        assert!(refused(&SHAPE, Options::new().with("share_b", true)));
        assert!(refused(&SHAPE, Options::new().with("order", 3)));
        assert!(refused(&SHAPE, Options::new().with("order", 3).with("d_b", 3)));
        assert!(refused(&SHAPE, Options::new().with("rope_dim", 10)));
        assert!(refused(&LayerShape { n_kv_heads: 3, ..SHAPE }, Options::new()));
    }
}
