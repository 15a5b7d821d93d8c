//! Multi-head latent attention (MLA): one cached vector per token, from which all heads' keys and values are rebuilt.
//!
//! **Idea.** Cache a latent $c \in \mathbb{R}^r$ and one rotated key $k^R \in \mathbb{R}^{d_R}$ that all heads share. To
//! decode, the maps that rebuild keys and values are moved to the query and to the output, so that attention runs on
//! the cache itself as multi-query attention with keys of width $r + d_R$ and values of width $r$.
//!
//! **Math.** $c = \operatorname{norm}(W^{KV}_a x)$, $k^R = R_n W^{KR} x$, $[k_h; v_h] = [U^K_h; U^V_h]\,c$;
//! $q = W_q x$, or $W^Q_b \operatorname{norm}(W^Q_a x)$ where queries have a latent too, each head split in $q^N_h$ and
//! $R_n q^R_h$; $s_h = \tau (q^N_h \cdot k_h + q^R_h \cdot k^R)$ with $\tau = 1/\sqrt{d_N + d_R}$ times `scale_factor`.
//! *Expanded*: form $k_h$ and $v_h$. *Absorbed*: $\tilde q_h = U_h^{K\top} q^N_h$, $s_h = \tau(\tilde q_h \cdot c + q^R_h
//! \cdot k^R)$ with the same $\tau$, $o_h = U^V_h \sum_n p_n c_n$. A norm applies if its weights are given.
//!
//! **Reference.** deepseek2024 (V2), deepseek2024v3; survey, Section 6, with $d_L$ split in two ranks and rotations of
//! column vectors.
//!
//! **Cost.** Cache $r + d_R$ numbers per token. Multiply-adds per head for $n_q$ new tokens over $n_k$: expanded
//! $n_k r(d_N + d_v) + n_q n_k(d_N + d_R + d_v)$, absorbed $n_q r(d_N + d_v) + n_q n_k(2r + d_R)$; `form = auto` takes
//! the smaller. `merge` multiplies out the two factors on the query or output side of the absorbed form, which helps
//! only for $d_N > r_q r/(r_q + r)$.
//!
//! **Guarantees.** Both forms, all merges, any chunking and token-by-token decoding agree to rounding; any orthogonal
//! change of the latent's basis changes nothing without a norm; tested here. Without rotations, every grouped-query
//! layer is such a layer (tested with the conversion `mla`).
//!
//! **When to use.** It is the layer of DeepSeek-V2, V3 and R1, and of models converted by `mla`. It saves bytes, not
//! operations: a decoded token costs $2r + d_R$ multiply-adds per head and key, against $2d$ of multi-head attention.
//!
//! `sizes` derives widths from the shape, `attend` has the two forms, `merge` the products of weights.

mod attend;
mod merge;
mod sizes;
#[cfg(test)]
mod tests;

use super::common::{
    Pairs, Rotary, check_cross, check_io, check_unrotated, constant, matrix, own, refuse, take,
};
use crate::layer::{Dense, Layer, LayerCache, LayerKind, LayerShape, Linear, Weights};
use crate::{Cost, Error, Mask, MatRef, Problem, Result, RunInfo, Workspace};
use attlas_num::rope::Rope;
use sizes::Sizes;

/// Registry entry.
pub static LAYER: LayerKind = LayerKind {
    id: "latent",
    title: "Multi-head latent attention (MLA): a cache of one latent a token",
    reference: "deepseek2024, deepseek2024v3",
    grid: None,
    params: Params::SPECS,
    weights: |shape, options| Ok(Sizes::new(shape, &Params::from_options(options)?)?.weight_specs()),
    cache_elements: |shape, options| Ok(Sizes::new(shape, &Params::from_options(options)?)?.row()),
    build: |shape, options, weights| {
        let params = Params::from_options(options)?;
        let rotary = params.rotary()?;
        Ok(Box::new(Latent::assemble(*shape, params, rotary, weights)?))
    },
};

crate::choices! {
    /// Form of attention: with keys and values of the heads, or on the latents.
    pub enum Form {
        /// The form with fewer operations for the given tokens.
        Auto = "auto",
        /// Keys and values of the heads are formed.
        Expanded = "expanded",
        /// Attention works on the latents.
        Absorbed = "absorbed",
    }
}

crate::choices! {
    /// Products of weights that the absorbed form uses instead of their factors.
    pub enum Merge {
        /// None.
        None = "none",
        /// Query and key weights: one map from the token to the latent's side of each head.
        Qk = "qk",
        /// Value and output weights: one map from the heads' latents to the output.
        Vo = "vo",
        /// Both.
        Both = "both",
    }
}

crate::params! {
    /// Parameters of [`Latent`].
    pub struct Params {
        /// Width of the latent of keys and values.
        rank: usize = 512, in 1..=1 << 20;
        /// Width of the latent of queries; auto is none, a plain projection.
        rank_q: Option<usize> = None, in 1..=1 << 20;
        /// Width of the rotated key that heads share, the last features of a head; the others are not rotated.
        rope_dim: usize = 64, in 0..=1 << 20;
        /// Layout of rotated pairs.
        rope: Pairs = Pairs::Interleaved;
        /// Base of the rotation frequencies.
        rope_base: f64 = 10_000.0, in 1.0..=1e12;
        /// Added under the root of the latents' norms.
        norm_eps: f64 = 1e-6, in 0.0..=1.0;
        /// Factor of the softmax scale; context extension by YaRN has one.
        scale_factor: f64 = 1.0, in 1e-6..=1e6;
        /// Form of attention: with keys and values of the heads, or on the latents.
        form: Form = Form::Auto;
        /// Products of weights that the absorbed form uses.
        merge: Merge = Merge::None;
    }
}

impl Params {
    fn rotary(&self) -> Result<Option<Rotary>> {
        if self.rope_dim == 0 { Ok(None) } else { Rotary::new(self.rope, self.rope_dim, self.rope_base) }
    }
}

/// Maps from hidden states to queries.
#[derive(Debug)]
enum Queries {
    Plain(Box<dyn Linear>),
    Latent { a: Box<dyn Linear>, norm: Option<Vec<f32>>, b: Box<dyn Linear> },
}

/// The latent attention layer.
#[derive(Debug)]
pub struct Latent {
    shape: LayerShape,
    sizes: Sizes,
    params: Params,
    q: Queries,
    kv_a: Box<dyn Linear>,
    kv_norm: Option<Vec<f32>>,
    /// `heads · (nope + d_v) × rank`: the rows that rebuild keys, then values, of each head.
    kv_b: Dense,
    o: Box<dyn Linear>,
    rotary: Option<Rotary>,
    /// From the input of the queries' last map to `heads · (rank + rope)` numbers.
    merged_qk: Option<Dense>,
    /// From `heads · rank` numbers to the output.
    merged_vo: Option<Dense>,
}

impl Latent {
    /// Makes the layer with any rotation, such as one with a context extension. The width of the rotation is
    /// `params.rope_dim`, and the parameters about frequencies are not read. Weights are named as in the registry
    /// entry's list.
    pub fn new(shape: LayerShape, params: Params, rope: Option<Rope>, weights: Weights) -> Result<Self> {
        let width = rope.as_ref().map_or(0, |r| r.dim);
        if width != params.rope_dim || !width.is_multiple_of(2) {
            return Err(Error::shape("rotated width", format!("{}, even", params.rope_dim), width));
        }
        for spec in Sizes::new(&shape, &params)?.weight_specs() {
            weights.get(spec.name).map_or(Ok(()), |w| spec.check(&**w))?;
        }
        Self::assemble(shape, params, rope.map(Rotary::from_rope), weights)
    }

    fn assemble(
        shape: LayerShape,
        params: Params,
        rotary: Option<Rotary>,
        mut weights: Weights,
    ) -> Result<Self> {
        let sizes = Sizes::new(&shape, &params)?;
        let norm = |weights: &mut Weights, name: &str| weights.remove(name).map(|w| constant(&*w));
        let q = match sizes.rank_q {
            None => Queries::Plain(take(&mut weights, "q")?),
            Some(_) => Queries::Latent {
                norm: norm(&mut weights, "q_a_norm"),
                a: take(&mut weights, "q_a")?,
                b: take(&mut weights, "q_b")?,
            },
        };
        let kv_b = take(&mut weights, "kv_b")?;
        let dense = matrix(&*kv_b);
        if kv_b.parameters() > dense.data().len() {
            // It would have to pass through the absorbed products as a row of its own.
            return refuse(LAYER.id, "kv_b has a bias; it belongs to kv_a, before the latent");
        }
        let mut layer = Self {
            kv_norm: norm(&mut weights, "kv_a_norm"),
            kv_a: take(&mut weights, "kv_a")?,
            o: take(&mut weights, "o")?,
            kv_b: Dense::new(dense),
            shape,
            sizes,
            params,
            q,
            rotary,
            merged_qk: None,
            merged_vo: None,
        };
        layer.merge();
        Ok(layer)
    }

    /// Returns true if `n_q` new tokens over `n_k` in all are computed on the latents.
    pub fn absorbs(&self, n_q: usize, n_k: usize) -> bool {
        match self.params.form {
            Form::Expanded => false,
            Form::Absorbed => true,
            Form::Auto => {
                let pairs = n_q as u64 * n_k as u64;
                let (expanded, absorbed) = self.sizes.work(n_q as u64, n_k as u64, pairs);
                absorbed < expanded
            }
        }
    }
}

impl Layer for Latent {
    fn shape(&self) -> LayerShape {
        self.shape
    }

    fn parameters(&self) -> usize {
        let norm = |n: &Option<Vec<f32>>| n.as_ref().map_or(0, Vec::len);
        let dense = |d: &Option<Dense>| d.as_ref().map_or(0, Linear::parameters);
        let q = match &self.q {
            Queries::Plain(q) => q.parameters(),
            Queries::Latent { a, norm: n, b } => a.parameters() + norm(n) + b.parameters(),
        };
        q + self.kv_a.parameters()
            + norm(&self.kv_norm)
            + self.kv_b.parameters()
            + self.o.parameters()
            + dense(&self.merged_qk)
            + dense(&self.merged_vo)
    }

    fn cache_elements(&self) -> usize {
        self.sizes.row()
    }

    fn new_cache(&self) -> Box<dyn LayerCache> {
        Box::new(LatentCache { row: self.sizes.row(), rows: Vec::new() })
    }

    fn forward(
        &self,
        x: MatRef<'_, f32>,
        cache: &mut dyn LayerCache,
        out: &mut [f32],
        ws: &mut Workspace,
    ) -> Result<RunInfo> {
        check_io(x, out, self.shape.d_model)?;
        let cache = own::<LatentCache>(cache, LAYER.id)?;
        if cache.row != self.sizes.row() {
            return Err(Error::shape("cache", format!("rows of {}", self.sizes.row()), cache.row));
        }
        if x.rows() == 0 {
            return Ok(RunInfo::default());
        }
        let first = cache.len();
        let rows = ws.install(|cx| self.cache_rows(x, first, cx));
        cache.rows.extend_from_slice(&rows);
        let result = self.attend(x, &cache.rows, Mask::Causal, out, ws);
        if result.is_err() {
            cache.truncate(first);
        }
        result
    }

    fn forward_all(&self, x: MatRef<'_, f32>, out: &mut [f32], ws: &mut Workspace) -> Result<RunInfo> {
        check_io(x, out, self.shape.d_model)?;
        if x.rows() == 0 {
            return Ok(RunInfo::default());
        }
        let rows = ws.install(|cx| self.cache_rows(x, 0, cx));
        self.attend(x, &rows, Mask::None, out, ws)
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
        if x.rows() == 0 {
            return Ok(RunInfo::default());
        }
        let rows = ws.install(|cx| self.cache_rows(context, 0, cx));
        self.attend(x, &rows, Mask::None, out, ws)
    }

    fn cost(&self, mask: Mask, cached: usize, tokens: usize) -> Option<Cost> {
        let (s, total) = (self.sizes, cached + tokens);
        let p = Problem { mask, ..Problem::new(1, 1, 1) }.with_lens(tokens, total);
        let (expanded, absorbed) = s.work(tokens as u64, total as u64, p.visible_pairs());
        let attention = if self.absorbs(tokens, total) { absorbed } else { expanded };
        let merged = [&self.merged_qk, &self.merged_vo].into_iter().flatten().map(Linear::parameters);
        let projections = self.parameters() - self.kv_b.parameters() - merged.sum::<usize>();
        Some(Cost {
            setup_flops: 0,
            run_flops: 2 * (tokens * projections) as u64 + 2 * s.heads as u64 * attention,
            bytes: 4 * (total * s.row() + 2 * tokens * s.d_model) as u64,
        })
    }
}

/// One row per token: the normalised latent, then the rotated key.
#[derive(Debug)]
struct LatentCache {
    row: usize,
    rows: Vec<f32>,
}

impl LayerCache for LatentCache {
    fn len(&self) -> usize {
        self.rows.len() / self.row
    }

    fn truncate(&mut self, len: usize) {
        self.rows.truncate(len.saturating_mul(self.row));
    }

    fn bytes(&self) -> usize {
        size_of_val(self.rows.as_slice())
    }
}
