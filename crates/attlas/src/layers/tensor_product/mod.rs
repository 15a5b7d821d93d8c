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
//! **Cost.** Cache $(R_K + R_V)(H + d)$ numbers per token against $2Hd$ of multi-head attention. A decoding step over
//! $M$ tokens takes $2M(R_K \min(R_Q(d + H), Hd) + H R_K + H R_V d)$ operations. Prefill forms the heads (`materialised`)
//! unless $R_Q R_K (d + H) + H R_V d_v < 2 H d$.
//!
//! **Guarantees.** With fixed head factors, multi-head, grouped-query and multi-query attention are special cases, and
//! so, as functions, is latent attention (with one more term for its rotated part); tested here. The last is a
//! statement about outputs, not memory: the cache of that form is $Hd$, not the latent width.
//!
//! **When to use.** Models trained with it. Trained heads share little along this mode, so low ranks lose much when
//! fitted afterwards.

mod attend;
pub mod factors;
mod maps;
mod plan;
#[cfg(test)]
mod tests;

use super::common::{Pairs, Rotary, check_cross, check_io, check_unrotated, layer_kind, own, take};
use crate::layer::{Layer, LayerCache, LayerShape, Linear, Weights};
use crate::{Cost, Mask, MatRef, Problem, Result, RunInfo, Workspace};
use maps::{FactorCache, Map, Maps, Rows, activate};
use plan::Plan;

layer_kind! {
    /// Registry entry.
    TensorProduct {
        id: "tensor_product",
        title: "Tensor product attention (TPA): a cache of factors",
        reference: "zhang2025tpa",
        weights: |s, p| Ok(Plan::new(s, p.clone())?.weight_specs()),
        cache_elements: |s, p| Ok(Plan::new(s, p.clone())?.cache_elements()),
    }
}

crate::choices! {
    /// Factors that depend on the token.
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
    /// Treatment of head factors.
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
    /// Computation of several tokens at once.
    pub enum Path {
        /// Factors for a few tokens or if they are cheaper; heads otherwise.
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
        /// Factors that depend on the token.
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
        /// Leading features that are rotated; auto is all of them.
        rope_dim: Option<usize> = None, in 2..=1 << 20;
        /// Treatment of head factors.
        head_act: HeadAct = HeadAct::None;
        /// Form in which several tokens are computed at once; decoding works on factors unless this is materialised.
        path: Path = Path::Auto;
    }
}

/// The tensor product attention layer.
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
    /// Makes the layer from its weights, named as in the registry entry's list.
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
        Box::new(FactorCache {
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
        self.append_and_attend(x, x, own(cache, LAYER.id)?, Mask::Causal, out, ws)
    }

    fn forward_all(&self, x: MatRef<'_, f32>, out: &mut [f32], ws: &mut Workspace) -> Result<RunInfo> {
        check_io(x, out, self.plan.s.d_model)?;
        let mut cache = self.new_cache();
        self.append_and_attend(x, x, own(&mut *cache, LAYER.id)?, Mask::None, out, ws)
    }

    fn forward_cross(
        &self,
        x: MatRef<'_, f32>,
        context: MatRef<'_, f32>,
        out: &mut [f32],
        ws: &mut Workspace,
    ) -> Result<RunInfo> {
        check_cross(x, context, out, self.plan.s.d_model)?;
        check_unrotated(LAYER.id, self.rotary.is_some())?;
        let mut cache = self.new_cache();
        self.append_and_attend(x, context, own(&mut *cache, LAYER.id)?, Mask::None, out, ws)
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
