//! Gated attention unit (GAU) and its chunked form (FLASH): attention and feed-forward in one gated layer.
//!
//! **Idea.** One layer replaces attention and feed-forward: a gate multiplies the output of a single, cheap head, and
//! with the gate squared-ReLU scores suffice without a softmax.
//!
//! **Math.** With $X_n = \mathrm{norm}(X)$, $U = \mathrm{SiLU}(X_n W_u)$, $V = \mathrm{SiLU}(X_n W_v) \in \mathbb{R}^{N \times e}$,
//! $Z = \mathrm{SiLU}(X_n W_z) \in \mathbb{R}^{N \times s}$ and affine views $\gamma \odot Z + \beta$ of $Z$ as queries and keys,
//! $O = (U \odot A V) W_o$ with the attention $A$ of [`gated_linear`](crate::methods::kernel::gated_linear): squared ReLU inside
//! chunks of `block` tokens and, with `far`, a linear far field through two more views (FLASH). Here $s$ is the width `d` of a
//! head and $e$ the number of heads times `d_v`; the paper has $s = 128$ and $e = 2 d_{model}$. The residual is left to the
//! caller, as for every layer here.
//!
//! **Reference.** hua2022. Its learned relative bias is a constant here (`bias`), and rotary positions are left out.
//!
//! **Cost.** Projections $2 N d_{model} (3e + s)$, chunks $N C (s + e)$ causally and twice that without a mask, far field $4 N s e$.
//! The cache is a state of fixed size: $s e$ numbers and one chunk.
//!
//! **Guarantees.** Causally, a chunk of all tokens has no far field, so FLASH is GAU; where every score is negative and there is
//! no far field the output is zero; scaling the gain of the queries by $t > 0$ scales the output by $t^2$ without shifts;
//! tested here.
//!
//! **When to use.** Models trained with it.

use super::common::{
    check_io, check_shape, constant, layer_kind, layer_norm, needed, optional, own, project, refuse, take,
};
use crate::layer::{Layer, LayerCache, LayerShape, Linear, WeightSpec, Weights};
use crate::method::Spec;
use crate::methods::kernel::gated_linear::{Params as Core, Scaling, Views};
use crate::workspace::Context;
use crate::{
    Cost, DType, Mask, MatRef, Out, Plan, Problem, Qkv, Result, RunInfo, Stream, TensorMut, TensorRef,
    Workspace,
};

layer_kind! {
    /// Registry entry.
    Gau {
        id: "gau",
        title: "Gated attention unit, whole (GAU) or in chunks with a linear far field (FLASH)",
        reference: "hua2022",
        weights: weight_specs,
        cache_elements: |_, _| Ok(0),
    }
}

crate::choices! {
    /// Normalisation of the hidden states.
    pub enum Norm {
        /// Nothing.
        None = "none",
        /// Mean and variance of a token, then the gain and shift `norm`.
        Layer = "layer",
        /// The length of a token, then the gain `norm`.
        Scale = "scale",
    }
}

crate::params! {
    /// Parameters of [`Gau`].
    pub struct Params {
        /// Tokens of a chunk; a GAU is one chunk that holds all tokens.
        block: usize = 256, in 1..=1 << 30;
        /// Linear far field between chunks.
        far: bool = true;
        /// Conversion of scores into weights.
        scaling: Scaling = Scaling::PaperCode;
        /// Length that divides the scores with `paper_code`; auto is the chunk.
        length: Option<usize> = None, in 1..=1 << 30;
        /// Added to scores before the rectifier.
        bias: f64 = 0.0, in -1e6..=1e6;
        /// Normalisation of the hidden states.
        norm: Norm = Norm::Layer;
    }
}

impl Params {
    /// Returns the number of views of the shared features: quadratic queries and keys, then linear ones.
    fn views(&self) -> usize {
        if self.far { 4 } else { 2 }
    }
}

fn weight_specs(s: &LayerShape, p: &Params) -> Result<Vec<WeightSpec>> {
    check_shape(s)?;
    let e = s.n_heads * s.d_v;
    let mut list = vec![
        needed("u", e, s.d_model),
        needed("v", e, s.d_model),
        needed("z", s.d, s.d_model),
        needed("gain", p.views() * s.d, 1),
        optional("shift", p.views() * s.d, 1),
        needed("o", s.d_model, e),
    ];
    match p.norm {
        Norm::None => {}
        Norm::Layer => list.push(optional("norm", 2 * s.d_model, 1)),
        Norm::Scale => list.push(optional("norm", 1, 1)),
    }
    Ok(list)
}

/// The gated attention unit.
#[derive(Debug)]
pub struct Gau {
    shape: LayerShape,
    params: Params,
    u: Box<dyn Linear>,
    v: Box<dyn Linear>,
    z: Box<dyn Linear>,
    o: Box<dyn Linear>,
    gain: Vec<f32>,
    shift: Option<Vec<f32>>,
    norm: Option<Vec<f32>>,
    constants: usize,
}

impl Gau {
    /// Makes the layer from its weights `u`, `v`, `z`, `gain`, `o`, and `shift` and `norm` if given.
    pub fn new(shape: LayerShape, params: Params, mut weights: Weights) -> Result<Self> {
        params.validate()?;
        weight_specs(&shape, &params)?;
        let (shift, norm) = (weights.remove("shift"), weights.remove("norm"));
        let mut take = |name| take(&mut weights, name);
        let gain = take("gain")?;
        let constants =
            gain.parameters() + [&shift, &norm].into_iter().flatten().map(|w| w.parameters()).sum::<usize>();
        Ok(Self {
            shape,
            params,
            u: take("u")?,
            v: take("v")?,
            z: take("z")?,
            o: take("o")?,
            gain: constant(&*gain),
            shift: shift.map(|w| constant(&*w)),
            norm: norm.map(|w| constant(&*w)),
            constants,
        })
    }

    /// Returns the width of the gate.
    fn width(&self) -> usize {
        self.shape.n_heads * self.shape.d_v
    }

    /// Returns the problem of one head's attention over the views.
    fn problem(&self, tokens: usize, mask: Mask) -> Problem {
        let d = self.params.views() / 2 * self.shape.d;
        Problem { d_v: self.width(), scale: 1.0, mask, ..Problem::new(1, tokens, d) }
    }

    fn plan(&self, tokens: usize, mask: Mask) -> Result<Box<dyn Plan>> {
        let p = &self.params;
        let core = Core {
            block: p.block,
            scaling: p.scaling,
            length: p.length,
            bias: p.bias,
            views: if p.far { Views::Split } else { Views::Shared },
            far: p.far,
        };
        core.plan(&self.problem(tokens, mask))
    }

    /// Computes gate, values, and the views as queries and keys.
    fn inputs(&self, x: MatRef<'_, f32>, cx: Context<'_>) -> [Vec<f32>; 4] {
        let (s, n) = (&self.shape, x.rows());
        let mut normed = Vec::with_capacity(n * s.d_model);
        x.iter_rows().for_each(|row| normed.extend_from_slice(row));
        for row in normed.chunks_exact_mut(s.d_model) {
            match self.params.norm {
                Norm::None => {}
                Norm::Layer => layer_norm(row, self.norm.as_deref()),
                Norm::Scale => {
                    let length = row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
                    let gain = self.norm.as_ref().map_or((s.d_model as f64).sqrt(), |g| f64::from(g[0]));
                    row.iter_mut().for_each(|x| *x = (f64::from(*x) * gain / (length + 1e-5)) as f32);
                }
            }
        }
        let normed = MatRef::new(&normed, n, s.d_model);
        let [u, v, z] = [&self.u, &self.v, &self.z].map(|w| {
            let mut y = project(&**w, normed, cx);
            y.iter_mut().for_each(|y| *y = silu(*y));
            y
        });
        // Views 0 and 1 are the quadratic query and key, 2 and 3 the linear ones.
        let side = |first: usize| {
            let views: Vec<usize> = (first..self.params.views()).step_by(2).collect();
            let mut out = Vec::with_capacity(n * views.len() * s.d);
            for z in z.chunks_exact(s.d) {
                for &view in &views {
                    let shift = self.shift.as_ref().map(|b| &b[view * s.d..]);
                    let gain = &self.gain[view * s.d..];
                    out.extend((0..s.d).map(|c| gain[c] * z[c] + shift.map_or(0.0, |b| b[c])));
                }
            }
            out
        };
        let (q, k) = (side(0), side(1));
        [u, v, q, k]
    }

    /// Gates the attention output and projects it.
    fn finish(&self, mut attended: Vec<f32>, gate: &[f32], out: &mut [f32], cx: Context<'_>) {
        attended.iter_mut().zip(gate).for_each(|(a, u)| *a *= u);
        self.o.apply(MatRef::new(&attended, attended.len() / self.width(), self.width()), out, cx);
    }
}

fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

impl Layer for Gau {
    fn shape(&self) -> LayerShape {
        self.shape
    }

    fn parameters(&self) -> usize {
        self.constants
            + [&self.u, &self.v, &self.z, &self.o].into_iter().map(|w| w.parameters()).sum::<usize>()
    }

    fn cache_elements(&self) -> usize {
        0
    }

    fn new_cache(&self) -> Box<dyn LayerCache> {
        Box::new(GatedCache { stream: None, len: 0, lost: false })
    }

    fn forward(
        &self,
        x: MatRef<'_, f32>,
        cache: &mut dyn LayerCache,
        out: &mut [f32],
        ws: &mut Workspace,
    ) -> Result<RunInfo> {
        check_io(x, out, self.shape.d_model)?;
        let cache: &mut GatedCache = own(cache, LAYER.id)?;
        if cache.lost {
            return refuse(
                LAYER.id,
                "tokens cannot be taken back from the state: empty the cache and start again",
            );
        }
        let (n, e) = (x.rows(), self.width());
        if n == 0 {
            return Ok(RunInfo::default());
        }
        let [u, v, q, k] = ws.install(|cx| self.inputs(x, cx));
        let plan = self.plan(n, Mask::Causal)?;
        let d = plan.problem().d;
        let qkv = Qkv::new(
            TensorRef::bhnd(&q, [1, 1, n, d])?,
            TensorRef::bhnd(&k, [1, 1, n, d])?,
            TensorRef::bhnd(&v, [1, 1, n, e])?,
        );
        let mut attended = vec![0.0f32; n * e];
        let mut output = Out::new(TensorMut::bhnd(&mut attended, [1, 1, n, e])?).into();
        let fresh = cache.stream.is_none();
        let stream = match &mut cache.stream {
            Some(stream) => stream,
            none => match plan.stream(DType::F32) {
                Some(stream) => none.insert(stream),
                None => return refuse(LAYER.id, "the attention inside has no decoding form"),
            },
        };
        // The plan computes a whole prompt faster than token by token.
        let info = if fresh {
            let info = plan.execute(&qkv.into(), &mut output, ws)?;
            stream.push(qkv.k.into(), qkv.v.into(), ws)?;
            info
        } else {
            stream.extend(&qkv.into(), &mut output, ws)?
        };
        cache.len += n;
        ws.install(|cx| self.finish(attended, &u, out, cx));
        Ok(info)
    }

    fn forward_all(&self, x: MatRef<'_, f32>, out: &mut [f32], ws: &mut Workspace) -> Result<RunInfo> {
        check_io(x, out, self.shape.d_model)?;
        let (n, e) = (x.rows(), self.width());
        if n == 0 {
            return Ok(RunInfo::default());
        }
        let [u, v, q, k] = ws.install(|cx| self.inputs(x, cx));
        let plan = self.plan(n, Mask::None)?;
        let d = plan.problem().d;
        let qkv = Qkv::new(
            TensorRef::bhnd(&q, [1, 1, n, d])?,
            TensorRef::bhnd(&k, [1, 1, n, d])?,
            TensorRef::bhnd(&v, [1, 1, n, e])?,
        );
        let mut attended = vec![0.0f32; n * e];
        let output = Out::new(TensorMut::bhnd(&mut attended, [1, 1, n, e])?);
        let info = plan.execute(&qkv.into(), &mut output.into(), ws)?;
        ws.install(|cx| self.finish(attended, &u, out, cx));
        Ok(info)
    }

    fn cost(&self, mask: Mask, cached: usize, tokens: usize) -> Option<Cost> {
        let attention = self.plan(tokens.max(1), mask).ok()?.cost();
        let projections = 2 * (tokens * (self.parameters() - self.constants)) as u64;
        let _ = cached;
        Some(Cost { run_flops: attention.run_flops + projections, ..attention })
    }
}

/// The state of the attention, which does not keep single tokens.
#[derive(Debug)]
struct GatedCache {
    stream: Option<Box<dyn Stream>>,
    len: usize,
    lost: bool,
}

impl LayerCache for GatedCache {
    fn len(&self) -> usize {
        self.len
    }

    fn truncate(&mut self, len: usize) {
        if len == 0 {
            *self = GatedCache { stream: None, len: 0, lost: false };
        } else if len < self.len {
            (self.len, self.lost) = (len, true);
        }
    }

    fn bytes(&self) -> usize {
        self.stream.as_ref().map_or(0, |s| s.state_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{
        assert_close, check_causal, forward, forward_all, random, random_layer, random_weights,
    };
    use super::*;
    use crate::layer::Dense;
    use crate::{Mat, Options};

    const SHAPE: LayerShape = LayerShape { d_model: 20, n_heads: 2, n_kv_heads: 2, d: 8, d_v: 12 };

    #[test]
    fn keeps_what_every_causal_layer_keeps() {
        check_causal(&LAYER, &SHAPE, &Options::new().with("block", 8), 33);
        check_causal(&LAYER, &SHAPE, &Options::new().with("far", false).with("norm", "scale"), 14);
        check_causal(&LAYER, &SHAPE, &Options::new().with("norm", "none").with("scaling", "per_length"), 14);
    }

    /// The definition for one chunk without a mask.
    #[test]
    fn one_chunk_is_the_gated_attention_unit_of_the_paper() {
        let (n, s, e) = (7, SHAPE, 24);
        let x = random("x", n, s.d_model);
        let options = Options::new().with("far", false).with("norm", "none").with("length", n);
        let act = |name: &str, width: usize| {
            let w = random(name, width, s.d_model);
            Mat::from_fn(n, width, |i, o| silu((0..s.d_model).map(|c| w[(o, c)] * x[(i, c)]).sum::<f32>()))
        };
        let (u, v, z) = (act("u", e), act("v", e), act("z", s.d));
        let (gain, shift) = (random("gain", 2 * s.d, 1), random("shift", 2 * s.d, 1));
        let view =
            |t: usize, i: usize, c: usize| gain[(t * s.d + c, 0)] * z[(i, c)] + shift[(t * s.d + c, 0)];
        let gated = Mat::from_fn(n, e, |i, l| {
            let weight = |j: usize| {
                let score: f32 = (0..s.d).map(|c| view(0, i, c) * view(1, j, c)).sum();
                (score / n as f32).max(0.0).powi(2)
            };
            u[(i, l)] * (0..n).map(|j| weight(j) * v[(j, l)]).sum::<f32>()
        });
        let o = random("o", s.d_model, e);
        let want: Vec<f32> = (0..n * s.d_model)
            .map(|t| (0..e).map(|l| o[(t % s.d_model, l)] * gated[(t / s.d_model, l)]).sum())
            .collect();
        let layer = random_layer(&LAYER, &s, &options);
        assert_close(&forward_all(&*layer, &x), &want);
    }

    #[test]
    fn a_chunk_of_all_tokens_has_no_far_field() {
        let x = random("x", 19, SHAPE.d_model);
        let flash = random_layer(&LAYER, &SHAPE, &Options::new().with("block", 32));
        let options = Options::new().with("block", 32).with("far", false);
        let mut weights = random_weights(&(LAYER.weights)(&SHAPE, &options).unwrap());
        for name in ["gain", "shift"] {
            let four = random(name, 4 * SHAPE.d, 1);
            let quadratic = Mat::from_fn(2 * SHAPE.d, 1, |i, _| four[(i, 0)]);
            weights.insert(name.into(), Box::new(Dense::new(quadratic)));
        }
        let gau = LAYER.layer(&SHAPE, &options, weights).unwrap();
        assert_close(&forward(&*flash, &x, &[19]), &forward(&*gau, &x, &[19]));
    }

    #[test]
    fn the_gain_of_queries_enters_squared_and_negative_scores_give_zero() {
        let x = random("x", 11, SHAPE.d_model);
        let options = Options::new().with("far", false);
        let with_gain = |factor: f32| {
            let mut weights = random_weights(&(LAYER.weights)(&SHAPE, &options).unwrap());
            weights.remove("shift");
            let gain = random("gain", 2 * SHAPE.d, 1);
            let gain =
                Mat::from_fn(2 * SHAPE.d, 1, |i, _| gain[(i, 0)] * if i < SHAPE.d { factor } else { 1.0 });
            weights.insert("gain".into(), Box::new(Dense::new(gain)));
            forward_all(&*LAYER.layer(&SHAPE, &options, weights).unwrap(), &x)
        };
        let once: Vec<f32> = with_gain(1.0).iter().map(|y| 9.0 * y).collect();
        assert_close(&with_gain(3.0), &once);
        let low = random_layer(&LAYER, &SHAPE, &options.clone().with("bias", -1e6));
        assert!(forward_all(&*low, &x).iter().all(|&y| y == 0.0));
    }
}
