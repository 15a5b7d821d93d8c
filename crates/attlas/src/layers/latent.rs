//! Multi-head latent attention (MLA): one cached vector a token, from which all heads' keys and values are rebuilt.
//!
//! **Idea.** Cache a latent $c \in \mathbb{R}^r$ and one rotated key $k^R \in \mathbb{R}^{d_R}$ that all heads share. To
//! decode, the maps that rebuild keys and values are moved to the query and to the output, so that attention runs on
//! the cache itself as multi-query attention with keys of width $r + d_R$ and values of width $r$.
//!
//! **Math.** $c = \operatorname{norm}(W^{KV}_a x)$, $k^R = R_n W^{KR} x$, $[k_h; v_h] = [U^K_h; U^V_h]\,c$;
//! $q = W_q x$, or $W^Q_b \operatorname{norm}(W^Q_a x)$ where queries have a latent too, each head split in $q^N_h$ and
//! $R_n q^R_h$; $s_h = \tau (q^N_h \cdot k_h + q^R_h \cdot k^R)$ with $\tau = 1/\sqrt{d_N + d_R}$ times `scale_factor`.
//! *Expanded*: form $k_h$ and $v_h$. *Absorbed*: $\tilde q_h = U_h^{K\top} q^N_h$, $s_h = \tau(\tilde q_h \cdot c + q^R_h
//! \cdot k^R)$ with the same $\tau$, $o_h = U^V_h \sum_n p_n c_n$. Norms are those of whichever norm weights are given.
//!
//! **Reference.** deepseek2024 (V2), deepseek2024v3; survey, Section 6, with $d_L$ split in two ranks and rotations of
//! column vectors.
//!
//! **Cost.** Cache $r + d_R$ numbers a token. Multiply-adds a head for $n_q$ new tokens over $n_k$: expanded
//! $n_k r(d_N + d_v) + n_q n_k(d_N + d_R + d_v)$, absorbed $n_q r(d_N + d_v) + n_q n_k(2r + d_R)$; `form = auto` takes
//! the smaller. `merge` multiplies out the two factors on the query or output side of the absorbed form, which pays
//! only for $d_N > r_q r/(r_q + r)$.
//!
//! **Guarantees.** Both forms, all merges, any chunking and token-by-token decoding agree to rounding; any orthogonal
//! change of the latent's basis changes nothing where there is no norm; tested here. Every grouped-query layer is such
//! a layer without rotations (tested with the conversion `mla`).
//!
//! **When to use.** It is the layer of DeepSeek-V2, V3 and R1, and of models converted by `mla`. It saves bytes, not
//! operations: a decoded token costs $2r + d_R$ multiply-adds a head and key, against $2d$ of multi-head attention.

use super::common::{
    Pairs, Rotary, check_io, check_shape, constant, matrix, needed, optional, own, project, refuse, take,
};
use crate::layer::{Dense, Layer, LayerCache, LayerKind, LayerShape, Linear, WeightSpec, Weights};
use crate::workspace::Context;
use crate::{
    Cost, Error, Mask, Mat, MatRef, Options, Out, Problem, Qkv, Result, RunInfo, TensorMut, TensorRef,
    Workspace, registry,
};
use attlas_num::kernels::{Op, gemm};
use attlas_num::linalg::{matmul, matmul_tn};
use attlas_num::rope::Rope;
use rayon::prelude::*;

/// Registry entry.
pub static LAYER: LayerKind = LayerKind {
    id: "latent",
    title: "Multi-head latent attention (MLA): a cache of one latent a token",
    reference: "deepseek2024, deepseek2024v3",
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
    /// Whether keys and values of the heads are formed.
    pub enum Form {
        /// Whichever takes fewer operations for the tokens at hand.
        Auto = "auto",
        /// They are formed.
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
        /// Whether keys and values of the heads are formed.
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

/// Widths that follow from shape and parameters.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    d_model: usize,
    heads: usize,
    rank: usize,
    rank_q: Option<usize>,
    /// Features of a head that are not rotated, that are, and of its values.
    nope: usize,
    rope: usize,
    d_v: usize,
}

impl Sizes {
    fn new(s: &LayerShape, p: &Params) -> Result<Self> {
        p.validate()?;
        check_shape(s)?;
        if s.n_kv_heads != s.n_heads {
            return Err(Error::shape(
                "key heads",
                "as many as query heads: the latent takes the place of groups",
                s.n_kv_heads,
            ));
        }
        let Some(nope) = s.d.checked_sub(p.rope_dim) else {
            return Err(Error::param("rope_dim", p.rope_dim, format!("at most the head width {}", s.d)));
        };
        Ok(Self {
            d_model: s.d_model,
            heads: s.n_heads,
            rank: p.rank,
            rank_q: p.rank_q,
            nope,
            rope: p.rope_dim,
            d_v: s.d_v,
        })
    }

    /// Width of queries and keys of a head.
    fn d(&self) -> usize {
        self.nope + self.rope
    }

    /// Numbers cached for a token.
    fn row(&self) -> usize {
        self.rank + self.rope
    }

    fn weight_specs(&self) -> Vec<WeightSpec> {
        let queries = self.heads * self.d();
        let mut list = match self.rank_q {
            Some(r) => {
                vec![needed("q_a", r, self.d_model), optional("q_a_norm", r, 1), needed("q_b", queries, r)]
            }
            None => vec![needed("q", queries, self.d_model)],
        };
        list.extend([
            needed("kv_a", self.row(), self.d_model),
            optional("kv_a_norm", self.rank, 1),
            needed("kv_b", self.heads * (self.nope + self.d_v), self.rank),
            needed("o", self.d_model, self.heads * self.d_v),
        ]);
        list
    }

    /// Multiply-adds of a head: expanded, absorbed; `pairs` are those of a query and a visible key.
    fn work(&self, n_q: u64, n_k: u64, pairs: u64) -> (u64, u64) {
        let rebuild = (self.rank * (self.nope + self.d_v)) as u64;
        let expanded = n_k * rebuild + pairs * (self.d() + self.d_v) as u64;
        (expanded, n_q * rebuild + pairs * (2 * self.rank + self.rope) as u64)
    }
}

/// How queries are made from hidden states.
#[derive(Debug)]
enum Queries {
    Plain(Box<dyn Linear>),
    Latent { a: Box<dyn Linear>, norm: Option<Vec<f32>>, b: Box<dyn Linear> },
}

/// The layer.
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
    /// From what the queries' last map takes to `heads · (rank + rope)` numbers.
    merged_qk: Option<Dense>,
    /// From `heads · rank` numbers to the output.
    merged_vo: Option<Dense>,
}

impl Latent {
    /// The layer with any rotation, such as one with a context extension; its width is `params.rope_dim`, and the
    /// parameters about frequencies are not read. Weights are named as in the registry entry's list.
    pub fn new(shape: LayerShape, params: Params, rope: Option<Rope>, weights: Weights) -> Result<Self> {
        let width = rope.as_ref().map_or(0, |r| r.dim);
        if width != params.rope_dim || !width.is_multiple_of(2) {
            return Err(Error::shape("rotated width", format!("{}, even", params.rope_dim), width));
        }
        for spec in Sizes::new(&shape, &params)?.weight_specs() {
            if let Some(w) = weights.get(spec.name)
                && (w.n_out(), w.n_in()) != (spec.n_out, spec.n_in)
            {
                let words = |o: usize, i: usize| format!("{} with {o} outputs and {i} inputs", spec.name);
                return Err(Error::shape("weight", words(spec.n_out, spec.n_in), words(w.n_out(), w.n_in())));
            }
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

    /// Multiplies out what `merge` asks for, in double precision.
    fn merge(&mut self) {
        let s = self.sizes;
        if matches!(self.params.merge, Merge::Qk | Merge::Both) {
            let last = match &self.q {
                Queries::Plain(q) => q,
                Queries::Latent { b, .. } => b,
            };
            let (w, bias) = (matrix(&**last), bias_of(&**last));
            let n_in = w.cols();
            let mut rows = Vec::with_capacity(s.heads * s.row() * n_in);
            let mut biases = Vec::with_capacity(s.heads * s.row());
            for h in 0..s.heads {
                // The bias rides along as one more column.
                let head = Mat::from_fn(s.d(), n_in + 1, |i, j| {
                    f64::from(if j < n_in { w[(h * s.d() + i, j)] } else { bias[h * s.d() + i] })
                });
                let up = self.up(h, 0..s.nope).cast::<f64>();
                let product = matmul_tn(up.as_ref(), head.as_ref().sub_rows(0..s.nope));
                for row in (0..s.rank).map(|i| product.row(i)).chain((s.nope..s.d()).map(|i| head.row(i))) {
                    rows.extend(row[..n_in].iter().map(|&x| x as f32));
                    biases.push(row[n_in] as f32);
                }
            }
            let bias = biases.iter().any(|&b| b != 0.0).then_some(biases);
            self.merged_qk = Some(Dense { weight: Mat::from_vec(rows, s.heads * s.row(), n_in), bias });
        }
        if matches!(self.params.merge, Merge::Vo | Merge::Both) {
            let (o, bias) = (matrix(&*self.o).cast::<f64>(), bias_of(&*self.o));
            let mut weight = Mat::zeros(s.d_model, s.heads * s.rank);
            for h in 0..s.heads {
                let columns = Mat::from_fn(s.d_model, s.d_v, |i, j| o[(i, h * s.d_v + j)]);
                let up = self.up(h, s.nope..s.nope + s.d_v).cast::<f64>();
                let product = matmul(columns.as_ref(), up.as_ref());
                for i in 0..s.d_model {
                    let row = weight.row_mut(i)[h * s.rank..(h + 1) * s.rank].iter_mut();
                    row.zip(product.row(i)).for_each(|(w, &p)| *w = p as f32);
                }
            }
            let bias = bias.iter().any(|&b| b != 0.0).then_some(bias);
            self.merged_vo = Some(Dense { weight, bias });
        }
    }

    /// Rows of `kv_b` of one head: the first `nope` rebuild keys, the others values.
    fn up(&self, head: usize, rows: std::ops::Range<usize>) -> Mat<f32> {
        self.up_rows(head, rows).to_mat()
    }

    fn up_rows(&self, head: usize, rows: std::ops::Range<usize>) -> MatRef<'_, f32> {
        let first = head * (self.sizes.nope + self.sizes.d_v);
        self.kv_b.weight.as_ref().sub_rows(first + rows.start..first + rows.end)
    }

    /// Whether `n_q` new tokens over `n_k` in all are treated on the latents.
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

    /// What the last map of the queries takes.
    fn query_inputs(&self, x: MatRef<'_, f32>, cx: Context<'_>) -> Vec<f32> {
        match &self.q {
            Queries::Plain(_) => (0..x.rows()).flat_map(|i| x.row(i).iter().copied()).collect(),
            Queries::Latent { a, norm, .. } => {
                let mut latent = project(&**a, x, cx);
                if let Some(weight) = norm {
                    let rows = latent.chunks_exact_mut(weight.len());
                    rows.for_each(|row| rms_norm(row, weight, self.params.norm_eps));
                }
                latent
            }
        }
    }

    /// Rotates the last `rope` of `width` features of every head of consecutive tokens.
    fn rotate(&self, first: usize, x: &mut [f32], heads: usize, width: usize) {
        let Some(rotary) = &self.rotary else { return };
        let tokens = x.len() / (heads * width).max(1);
        let table = rotary.table(first + tokens);
        for (t, token) in x.chunks_exact_mut((heads * width).max(1)).enumerate() {
            for head in token.chunks_exact_mut(width) {
                table.rotate_in_place(first + t, &mut head[width - self.sizes.rope..]);
            }
        }
    }

    /// Rows of the cache for new tokens: normalised latents and rotated keys.
    fn cache_rows(&self, x: MatRef<'_, f32>, first: usize, cx: Context<'_>) -> Vec<f32> {
        let row = self.sizes.row();
        let mut rows = project(&*self.kv_a, x, cx);
        if let Some(weight) = &self.kv_norm {
            let latents = rows.chunks_exact_mut(row).map(|r| &mut r[..weight.len()]);
            latents.for_each(|latent| rms_norm(latent, weight, self.params.norm_eps));
        }
        self.rotate(first, &mut rows, 1, row);
        rows
    }

    /// Outputs of the tokens of `x`, the last ones of `rows`.
    fn attend(
        &self,
        x: MatRef<'_, f32>,
        rows: &[f32],
        mask: Mask,
        out: &mut [f32],
        ws: &mut Workspace,
    ) -> Result<RunInfo> {
        let s = self.sizes;
        let (tokens, total) = (x.rows(), rows.len() / s.row());
        let scale = self.params.scale_factor / (s.d() as f64).sqrt();
        let base = Problem { mask, scale, ..Problem::new(s.heads, 1, s.d()) }.with_lens(tokens, total);
        if self.absorbs(tokens, total) {
            let problem = Problem { n_kv_heads: 1, d: s.row(), d_v: s.rank, ..base };
            self.attend_absorbed(x, rows, &problem, out, ws)
        } else {
            self.attend_expanded(x, rows, &Problem { d_v: s.d_v, ..base }, out, ws)
        }
    }

    fn attend_expanded(
        &self,
        x: MatRef<'_, f32>,
        rows: &[f32],
        problem: &Problem,
        out: &mut [f32],
        ws: &mut Workspace,
    ) -> Result<RunInfo> {
        let s = self.sizes;
        let (tokens, total) = (problem.n_q, problem.n_k);
        let plan = registry::baseline().plan(problem, &Options::new())?;
        let width = s.heads * (s.nope + s.d_v);
        let mut up = vec![0.0f32; total * width];
        let mut k = vec![0.0f32; total * s.heads * s.d()];
        let q = ws.install(|cx| {
            let latents = MatRef::with_stride(rows, total, s.rank, s.row());
            self.kv_b.apply(latents.unwrap_or_else(|| unreachable!("whole rows")), &mut up, cx);
            k.par_chunks_mut(s.heads * s.d()).enumerate().for_each(|(n, k)| {
                let shared = &rows[n * s.row() + s.rank..(n + 1) * s.row()];
                for (h, k) in k.chunks_exact_mut(s.d()).enumerate() {
                    let own = &up[n * width + h * (s.nope + s.d_v)..][..s.nope];
                    k[..s.nope].copy_from_slice(own);
                    k[s.nope..].copy_from_slice(shared);
                }
            });
            self.queries(x, total - tokens, cx)
        });
        let mut heads = vec![0.0f32; tokens * s.heads * s.d_v];
        // Values are read where they were rebuilt, behind the keys of their head.
        let values = TensorRef::new(
            &up[s.nope..],
            [1, s.heads, total, s.d_v],
            [total * width, s.nope + s.d_v, width],
        )?;
        let inputs = Qkv::new(
            TensorRef::bnhd(&q, [1, s.heads, tokens, s.d()])?,
            TensorRef::bnhd(&k, [1, s.heads, total, s.d()])?,
            values,
        );
        let output = Out::new(TensorMut::bnhd(&mut heads, [1, s.heads, tokens, s.d_v])?);
        let info = plan.execute(&inputs.into(), &mut output.into(), ws)?;
        ws.install(|cx| self.o.apply(MatRef::new(&heads, tokens, s.heads * s.d_v), out, cx));
        Ok(info)
    }

    fn queries(&self, x: MatRef<'_, f32>, first: usize, cx: Context<'_>) -> Vec<f32> {
        let s = self.sizes;
        let mut q = match &self.q {
            Queries::Plain(q) => project(&**q, x, cx),
            Queries::Latent { a, b, .. } => {
                let latent = self.query_inputs(x, cx);
                project(&**b, MatRef::new(&latent, x.rows(), a.n_out()), cx)
            }
        };
        self.rotate(first, &mut q, s.heads, s.d());
        q
    }

    fn attend_absorbed(
        &self,
        x: MatRef<'_, f32>,
        rows: &[f32],
        problem: &Problem,
        out: &mut [f32],
        ws: &mut Workspace,
    ) -> Result<RunInfo> {
        let s = self.sizes;
        let (tokens, total, row) = (problem.n_q, problem.n_k, s.row());
        let plan = registry::baseline().plan(problem, &Options::new())?;
        let first = total - tokens;
        // Head by head where they are absorbed here, token by token where the weights are merged.
        let merged = self.merged_qk.is_some();
        let mut q = vec![0.0f32; tokens * s.heads * row];
        ws.install(|cx| {
            if let Some(map) = &self.merged_qk {
                let inputs = self.query_inputs(x, cx);
                map.apply(MatRef::new(&inputs, tokens, map.n_in()), &mut q, cx);
                self.rotate(first, &mut q, s.heads, row);
                return;
            }
            let plain = self.queries(x, first, cx);
            q.par_chunks_mut(tokens * row).enumerate().for_each(|(h, q)| {
                if s.nope > 0 {
                    let own = MatRef::with_stride(&plain[h * s.d()..], tokens, s.nope, s.heads * s.d());
                    let own = Op::N(own.unwrap_or_else(|| unreachable!("whole rows")));
                    let up = Op::N(self.up_rows(h, 0..s.nope));
                    gemm(cx.schedule.isa, 1.0, own, up, 0.0, q, row, cx.scratch);
                }
                for (t, q) in q.chunks_exact_mut(row).enumerate() {
                    let rotated = (t * s.heads + h) * s.d() + s.nope;
                    q[s.rank..].copy_from_slice(&plain[rotated..rotated + s.rope]);
                }
            });
        });
        let dims = [1, s.heads, tokens, row];
        let queries = if merged { TensorRef::bnhd(&q, dims)? } else { TensorRef::bhnd(&q, dims)? };
        let keys = TensorRef::bhnd(rows, [1, 1, total, row])?;
        // The latent stands first in a row of the cache, so that values are a prefix of the keys.
        let values = TensorRef::new(rows, [1, 1, total, s.rank], [total * row, total * row, row])?;
        let inputs = Qkv::new(queries, keys, values);
        let mut latents = vec![0.0f32; s.heads * tokens * s.rank];
        let dims = [1, s.heads, tokens, s.rank];
        let target = if self.merged_vo.is_some() {
            TensorMut::bnhd(&mut latents, dims)?
        } else {
            TensorMut::bhnd(&mut latents, dims)?
        };
        let info = plan.execute(&inputs.into(), &mut Out::new(target).into(), ws)?;
        ws.install(|cx| {
            if let Some(map) = &self.merged_vo {
                map.apply(MatRef::new(&latents, tokens, s.heads * s.rank), out, cx);
                return;
            }
            let mut by_head = vec![0.0f32; s.heads * tokens * s.d_v];
            by_head.par_chunks_mut(tokens * s.d_v).enumerate().for_each(|(h, o)| {
                let z = MatRef::new(&latents[h * tokens * s.rank..(h + 1) * tokens * s.rank], tokens, s.rank);
                let up = Op::T(self.up_rows(h, s.nope..s.nope + s.d_v));
                gemm(cx.schedule.isa, 1.0, Op::N(z), up, 0.0, o, s.d_v, cx.scratch);
            });
            let mut heads = vec![0.0f32; by_head.len()];
            for (i, chunk) in by_head.chunks_exact(s.d_v).enumerate() {
                let (h, t) = (i / tokens, i % tokens);
                heads[(t * s.heads + h) * s.d_v..][..s.d_v].copy_from_slice(chunk);
            }
            self.o.apply(MatRef::new(&heads, tokens, s.heads * s.d_v), out, cx);
        });
        Ok(info)
    }
}

/// What a map adds.
fn bias_of(w: &dyn Linear) -> Vec<f32> {
    let zeros = vec![0.0; w.n_in()];
    let map = BiasOf(w, zeros);
    constant(&map)
}

/// A map seen at zero, as one from the single number 1.
#[derive(Debug)]
struct BiasOf<'a>(&'a dyn Linear, Vec<f32>);

impl Linear for BiasOf<'_> {
    fn n_out(&self) -> usize {
        self.0.n_out()
    }

    fn n_in(&self) -> usize {
        1
    }

    fn apply(&self, _: MatRef<'_, f32>, out: &mut [f32], cx: Context<'_>) {
        self.0.apply(MatRef::new(&self.1, 1, self.1.len()), out, cx);
    }
}

/// $w \odot x / \sqrt{\operatorname{mean}(x^2) + \epsilon}$.
fn rms_norm(x: &mut [f32], weight: &[f32], eps: f64) {
    let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / x.len().max(1) as f64;
    let factor = (mean + eps).sqrt();
    // A row of zeros without epsilon stays zero.
    let inverse = if factor == 0.0 { 0.0 } else { (1.0 / factor) as f32 };
    x.iter_mut().zip(weight).for_each(|(x, w)| *x = *x * inverse * w);
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
        Box::new(Cache { row: self.sizes.row(), rows: Vec::new() })
    }

    fn forward(
        &self,
        x: MatRef<'_, f32>,
        cache: &mut dyn LayerCache,
        out: &mut [f32],
        ws: &mut Workspace,
    ) -> Result<RunInfo> {
        check_io(x, out, self.shape.d_model)?;
        let cache = own::<Cache>(cache, LAYER.id)?;
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

/// A row a token: the normalised latent, then the rotated key.
#[derive(Debug)]
struct Cache {
    row: usize,
    rows: Vec<f32>,
}

impl LayerCache for Cache {
    fn len(&self) -> usize {
        self.rows.len() / self.row
    }

    fn truncate(&mut self, len: usize) {
        self.rows.truncate(len.saturating_mul(self.row));
    }

    fn bytes(&self) -> usize {
        size_of_val(self.rows.as_slice())
    }

    fn as_any_mut(&mut self) -> &mut dyn std::any::Any {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layers::testing::{
        assert_close, check_causal, dense, forward, forward_all, random, random_layer, random_weights,
    };
    use attlas_num::linalg::{matmul_nt, thin_qr};
    use attlas_num::rope::{Angles, Layout, Scaling, Table, Yarn};

    /// Heads of 5 unrotated and 4 rotated features, values of 3.
    const SHAPE: LayerShape = LayerShape { d_model: 22, n_heads: 3, n_kv_heads: 3, d: 9, d_v: 3 };

    fn options() -> Options {
        Options::new().with("rank", 7usize).with("rope_dim", 4usize)
    }

    fn layer(options: &Options) -> Box<dyn Layer> {
        random_layer(&LAYER, &SHAPE, options)
    }

    #[test]
    fn keeps_the_contract_of_layers() {
        check_causal(&LAYER, &SHAPE, &options(), 41);
        check_causal(&LAYER, &SHAPE, &options().with("rank_q", 6usize), 20);
        check_causal(&LAYER, &SHAPE, &options().with("form", "expanded").with("rope", "half"), 20);
        check_causal(&LAYER, &SHAPE, &options().with("form", "absorbed").with("rope_dim", 0usize), 20);
        check_causal(&LAYER, &SHAPE, &options().with("rope_dim", 8usize).with("rank", 1usize), 13);
        // No unrotated feature at all.
        check_causal(&LAYER, &LayerShape { d: 4, ..SHAPE }, &options(), 13);
    }

    #[test]
    fn forms_and_merges_agree() {
        let x = random("x", 33, 22);
        for base in [options(), options().with("rank_q", 6usize), options().with("rope_dim", 0usize)] {
            let of = |form: &str, merge: &str| layer(&base.clone().with("form", form).with("merge", merge));
            let want = forward(&*of("expanded", "none"), &x, &[33]);
            let all = forward_all(&*of("expanded", "none"), &x);
            for merge in ["none", "qk", "vo", "both"] {
                let layer = of("absorbed", merge);
                assert_close(&forward(&*layer, &x, &[33]), &want);
                assert_close(&forward(&*layer, &x, &[1; 33]), &want);
                assert_close(&forward_all(&*layer, &x), &all);
            }
            assert_close(&forward(&*of("auto", "both"), &x, &[20, 1, 1, 1, 10]), &want);
        }
    }

    #[test]
    fn biases_pass_through_the_merged_weights() {
        let x = random("x", 17, 22);
        let of = |merge: &str| {
            let options = options().with("form", "absorbed").with("merge", merge);
            let mut weights = random_weights(&(LAYER.weights)(&SHAPE, &options).unwrap());
            for (name, n_out, n_in) in [("q", 27, 22), ("kv_a", 11, 22), ("o", 22, 9)] {
                let bias = Some(random(&format!("{name} bias"), n_out, 1).into_vec());
                weights.insert(name.into(), Box::new(Dense { weight: random(name, n_out, n_in), bias }));
            }
            LAYER.layer(&SHAPE, &options, weights).unwrap()
        };
        let want = forward(&*of("none"), &x, &[17]);
        for merge in ["qk", "vo", "both"] {
            assert_close(&forward(&*of(merge), &x, &[17]), &want);
        }
        let mut weights = random_weights(&(LAYER.weights)(&SHAPE, &options()).unwrap());
        let kv_b = Dense { weight: random("kv_b", 24, 7), bias: Some(vec![1.0; 24]) };
        weights.insert("kv_b".into(), Box::new(kv_b));
        assert!(LAYER.layer(&SHAPE, &options(), weights).unwrap_err().to_string().contains("bias"));
    }

    /// The expanded form, in double precision and one number at a time.
    fn naive(x: &Mat<f32>, rank_q: Option<usize>, rope: &Rope, scale: f64) -> Vec<f32> {
        let (n, r, dn, dr, dv, heads) = (x.rows(), 7, 5, 4, 3, 3);
        let map = |name: &str, x: &Mat<f64>, n_out: usize| {
            matmul_nt(x.as_ref(), random(name, n_out, x.cols()).cast::<f64>().as_ref())
        };
        let norm = |m: &mut Mat<f64>, name: &str, width: usize| {
            let weight = random(name, width, 1);
            for i in 0..m.rows() {
                let row = &mut m.row_mut(i)[..width];
                let rms = (row.iter().map(|x| x * x).sum::<f64>() / width as f64 + 1e-6).sqrt();
                row.iter_mut().enumerate().for_each(|(j, x)| *x *= f64::from(weight[(j, 0)]) / rms);
            }
        };
        let x = x.cast::<f64>();
        let q = match rank_q {
            None => map("q", &x, heads * (dn + dr)),
            Some(rq) => {
                let mut latent = map("q_a", &x, rq);
                norm(&mut latent, "q_a_norm", rq);
                map("q_b", &latent, heads * (dn + dr))
            }
        };
        let mut c = map("kv_a", &x, r + dr);
        norm(&mut c, "kv_a_norm", r);
        let table = Table::<f64>::new(rope, n, Angles::Double);
        let latents = Mat::from_fn(n, r, |i, j| c[(i, j)]);
        let up = map("kv_b", &latents, heads * (dn + dv));
        let mut out = Mat::zeros(n, heads * dv);
        for h in 0..heads {
            let at = |i: usize, j: usize| up[(i, h * (dn + dv) + j)];
            for i in 0..n {
                let mut qr = q.row(i)[h * (dn + dr) + dn..][..dr].to_vec();
                table.rotate_in_place(i, &mut qr);
                let score = |j: usize| {
                    let mut kr = c.row(j)[r..].to_vec();
                    table.rotate_in_place(j, &mut kr);
                    let own: f64 = (0..dn).map(|e| q[(i, h * (dn + dr) + e)] * at(j, e)).sum();
                    let shared: f64 = qr.iter().zip(&kr).map(|(a, b)| a * b).sum();
                    (scale * (own + shared)).exp()
                };
                let weights: Vec<f64> = (0..=i).map(score).collect();
                let total: f64 = weights.iter().sum();
                for e in 0..dv {
                    out[(i, h * dv + e)] = (0..=i).map(|j| weights[j] * at(j, dn + e)).sum::<f64>() / total;
                }
            }
        }
        map("o", &out, 22).cast::<f32>().into_vec()
    }

    #[test]
    fn equals_the_definition_with_norms_and_either_layout() {
        let x = random("x", 29, 22);
        for (name, layout) in [("interleaved", Layout::Interleaved), ("half", Layout::Half)] {
            let rope = Rope { dim: 4, base: 1e4, layout, scaling: Scaling::None };
            for rank_q in [None, Some(6usize)] {
                let want = naive(&x, rank_q, &rope, 1.0 / 3.0);
                let mut options = options().with("rope", name);
                if let Some(r) = rank_q {
                    options = options.with("rank_q", r);
                }
                for form in ["expanded", "absorbed"] {
                    assert_close(&forward(&*layer(&options.clone().with("form", form)), &x, &[29]), &want);
                }
            }
        }
    }

    #[test]
    fn a_context_extension_changes_frequencies_and_scale() {
        let x = random("x", 29, 22);
        let mut yarn = Yarn::new(40.0, 16.0);
        (yarn.mscale, yarn.mscale_all_dim) = (Some(1.0), Some(1.0));
        let scale_factor = yarn.softmax_factor();
        assert!((scale_factor - 1.36889f64.powi(2)).abs() < 1e-5);
        let rope = Rope { dim: 4, base: 1e4, layout: Layout::Interleaved, scaling: Scaling::Yarn(yarn) };
        let params = Params { scale_factor, ..Params::from_options(&options()).unwrap() };
        let weights = || random_weights(&(LAYER.weights)(&SHAPE, &options()).unwrap());
        let layer = Latent::new(SHAPE, params.clone(), Some(rope.clone()), weights()).unwrap();
        assert_close(&forward(&layer, &x, &[20, 9]), &naive(&x, None, &rope, scale_factor / 3.0));
        let narrow = Rope { dim: 2, ..rope };
        assert!(Latent::new(SHAPE, params, Some(narrow), weights()).is_err());
    }

    #[test]
    fn the_basis_of_the_latent_is_free_without_a_norm() {
        let x = random("x", 25, 22);
        let options = options();
        let weights = || {
            let mut w = random_weights(&(LAYER.weights)(&SHAPE, &options).unwrap());
            w.remove("kv_a_norm");
            w
        };
        let want = forward(&*LAYER.layer(&SHAPE, &options, weights()).unwrap(), &x, &[25]);
        let turn = thin_qr(random("turn", 7, 7).as_ref()).unwrap().q;
        let kv_a = random("kv_a", 11, 22).cast::<f64>();
        let turned = matmul_tn(turn.as_ref(), kv_a.as_ref().sub_rows(0..7));
        let kv_a = Mat::from_fn(11, 22, |i, j| if i < 7 { turned[(i, j)] } else { kv_a[(i, j)] });
        let kv_b = matmul(random("kv_b", 24, 7).cast::<f64>().as_ref(), turn.as_ref());
        let mut turned = weights();
        turned.insert("kv_a".into(), dense(kv_a.cast()));
        turned.insert("kv_b".into(), dense(kv_b.cast()));
        assert_close(&forward(&*LAYER.layer(&SHAPE, &options, turned).unwrap(), &x, &[25]), &want);
        // With a norm it is not.
        let mut normed = random_weights(&(LAYER.weights)(&SHAPE, &options).unwrap());
        let want = forward(&*layer(&options), &x, &[25]);
        normed.insert("kv_b".into(), dense(kv_b.cast()));
        let other = forward(&*LAYER.layer(&SHAPE, &options, normed).unwrap(), &x, &[25]);
        assert!(other.iter().zip(&want).any(|(a, b)| (a - b).abs() > 1e-3));
    }

    #[test]
    fn the_cheaper_form_is_chosen() {
        // DeepSeek's widths: prompts are expanded, decoding is absorbed, the change is at 171 new tokens.
        let shape = LayerShape { d_model: 1, n_heads: 1, n_kv_heads: 1, d: 192, d_v: 128 };
        let rope = Rope { dim: 64, base: 1e4, layout: Layout::Interleaved, scaling: Scaling::None };
        let weights = random_weights(&(LAYER.weights)(&shape, &Options::new()).unwrap());
        let layer = Latent::new(shape, Params::default(), Some(rope), weights).unwrap();
        assert!(!layer.absorbs(1 << 20, 1 << 20) && !layer.absorbs(2, 2) && layer.absorbs(1, 4096));
        assert!(layer.absorbs(170, 1 << 24) && !layer.absorbs(171, 1 << 24));
        let one = layer.cost(Mask::Causal, 4095, 1).unwrap().run_flops;
        assert_eq!(one, 2 * (192 + 576 + 512 + 128 + 512 * 256 + 4096 * 1088));
    }

    #[test]
    fn the_cache_holds_the_latent_and_the_shared_key() {
        let layer = layer(&options());
        let mut cache = layer.new_cache();
        let (x, mut out) = (random("x", 10, 22), vec![0.0; 220]);
        layer.forward(x.as_ref(), &mut *cache, &mut out, &mut Workspace::single().unwrap()).unwrap();
        assert_eq!((layer.cache_elements(), cache.bytes()), (11, 4 * 10 * 11));
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let refused = |shape: LayerShape, options: Options, word: &str| {
            let error = (LAYER.weights)(&shape, &options).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        };
        refused(LayerShape { n_kv_heads: 1, ..SHAPE }, options(), "key heads");
        refused(SHAPE, options().with("rope_dim", 10usize), "rope_dim");
        refused(SHAPE, options().with("rank", 0usize), "rank");
        let odd = options().with("rope_dim", 3usize);
        let weights = random_weights(&(LAYER.weights)(&SHAPE, &odd).unwrap());
        assert!(LAYER.layer(&SHAPE, &odd, weights).is_err());
    }
}
