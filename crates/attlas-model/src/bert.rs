//! Encoders: from texts to hidden states and sentence embeddings, with any non-causal attention method.
//!
//! With $\operatorname{LN}$ the layer norm, $x = \operatorname{LN}(w_t + p_n + s_0)$ from word, position and type
//! embeddings; then in every layer $q, k, v = W x + b$, attention over all tokens except padding,
//! $x \leftarrow \operatorname{LN}(x + W_O\,o + b_O)$ and
//! $x \leftarrow \operatorname{LN}(x + W_2 \operatorname{gelu}(W_1 x + b_1) + b_2)$. The embedding of a text is the
//! mean of its last hidden states, scaled to length one.
//!
//! References: devlin2019; reimers2019 (mean pooling).

use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::linear::{Linear, apply_all};
use crate::model::Model;
use crate::ops;
use crate::weights::{EncoderLayer, EncoderWeights, LayerNorm, Weights};
use attlas::{
    Inputs, MatRef, Method, Options, Out, Plan, Problem, Qkv, RunInfo, TensorMut, TensorRef, Workspace,
};
use attlas_num::par::*;

/// Inputs of the linear maps of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Input {
    /// Input of queries, keys and values.
    Attention,
    /// Input of the output projection.
    Heads,
    /// Input of the maps into the feed-forward layer.
    Ffn,
    /// Input of the map out of it.
    Inner,
}

/// An encoder, borrowed from its model.
#[derive(Clone, Copy, Debug)]
pub struct Encoder<'a> {
    config: &'a ModelConfig,
    weights: &'a EncoderWeights,
}

/// Token ids of several texts, the shorter ones padded to the longest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    ids: Vec<u32>,
    lens: Vec<usize>,
    n: usize,
}

impl Batch {
    /// Pads `texts`, each the ids of one text. Fails if there is none, or if one is empty.
    pub fn new<T: AsRef<[u32]>>(texts: &[T]) -> Result<Self> {
        let lens: Vec<usize> = texts.iter().map(|t| t.as_ref().len()).collect();
        let n = lens.iter().copied().max().unwrap_or(0);
        if n == 0 || lens.contains(&0) {
            return Err(Error::invalid("a batch of texts", format!("{lens:?} tokens"), "at least one each"));
        }
        let mut ids = Vec::with_capacity(n.saturating_mul(lens.len()));
        for text in texts {
            ids.extend_from_slice(text.as_ref());
            ids.resize(ids.len().next_multiple_of(n), 0);
        }
        Ok(Self { ids, lens, n })
    }

    /// Number of texts.
    pub fn texts(&self) -> usize {
        self.lens.len()
    }

    /// Returns the tokens of each text, without padding.
    pub fn lens(&self) -> &[usize] {
        &self.lens
    }

    /// Tokens of the longest text.
    pub fn longest(&self) -> usize {
        self.n
    }

    /// Returns the valid keys of each text, if there is padding.
    fn key_lens(&self) -> Option<&[usize]> {
        self.lens.iter().any(|&len| len < self.n).then_some(&self.lens)
    }
}

/// The final hidden states of a batch.
#[derive(Clone, Debug)]
pub struct Hidden {
    /// `[texts, longest, width]`; rows of padding are meaningless.
    pub states: Vec<f32>,
    /// Counts of attention, over all layers.
    pub info: RunInfo,
}

impl<'a> Encoder<'a> {
    /// Returns the encoder of a model; an error if it is a decoder.
    pub fn new(model: &'a Model) -> Result<Self> {
        match &model.weights {
            Weights::Encoder(weights) => Ok(Self { config: &model.config, weights }),
            Weights::Decoder(_) => Err(Error::Unsupported {
                what: format!(
                    "encoding text with a {} model, which is a decoder,",
                    model.config.architecture.name()
                ),
            }),
        }
    }

    /// Width of a hidden state and of an embedding.
    pub fn width(&self) -> usize {
        self.config.hidden
    }

    /// Returns the attention problem of every layer for `batch`.
    pub fn problem(&self, batch: &Batch) -> Problem {
        let c = self.config;
        let problem = Problem::new(c.n_heads, batch.n, c.head_dim).with_kv_heads(c.n_kv_heads);
        Problem { batch: batch.texts(), ..problem }
    }

    /// Plans the same method in every layer.
    pub fn plans(&self, batch: &Batch, method: &Method, options: &Options) -> Result<Vec<Box<dyn Plan>>> {
        let problem = self.problem(batch);
        Ok((0..self.config.n_layers)
            .map(|_| method.plan(&problem, options))
            .collect::<attlas::Result<_>>()?)
    }

    /// Computes the final hidden states of `batch`. `plans` has one plan per layer, for [`problem`](Self::problem).
    /// `look` receives the queries, keys and values of each layer before attention. Layers with attention of another
    /// kind compute it themselves, without `look` and without their plan.
    pub fn forward(
        &self,
        batch: &Batch,
        plans: &[Box<dyn Plan>],
        ws: &mut Workspace,
        look: impl FnMut(usize, &Qkv<'_, f32>),
    ) -> Result<Hidden> {
        self.forward_seen(batch, plans, ws, look, |_, _, _| ())
    }

    /// Computes the same; `seen` receives the inputs of the linear maps of each layer, including rows of padding: those
    /// of queries, keys and values, of the output, and of the maps into and out of the feed-forward layer. Inputs
    /// inside attention of another kind are not reported.
    pub fn forward_seen(
        &self,
        batch: &Batch,
        plans: &[Box<dyn Plan>],
        ws: &mut Workspace,
        mut look: impl FnMut(usize, &Qkv<'_, f32>),
        mut seen: impl FnMut(usize, Input, &[f32]) + Send,
    ) -> Result<Hidden> {
        let c = self.config;
        self.check(batch, plans)?;
        let (rows, d, width) = (batch.ids.len(), c.hidden, c.n_heads * c.head_dim);
        let mut x = vec![0.0; rows * d];
        self.embed_tokens(batch, &mut x)?;
        let (mut q, mut k, mut v) =
            (vec![0.0; rows * width], vec![0.0; rows * width], vec![0.0; rows * width]);
        let mut heads = vec![0.0; rows * width];
        let mut inner = vec![0.0; rows * c.intermediate];
        let mut sum = vec![0.0; rows * d];
        let dims = [batch.texts(), c.n_heads, batch.n, c.head_dim];
        let mut info = RunInfo::default();
        for (l, (layer, plan)) in self.weights.layers.iter().zip(plans).enumerate() {
            if let Some(attention) = &layer.attention {
                // Texts one by one, without their padding.
                for (text, &len) in batch.lens().iter().enumerate() {
                    let rows = text * batch.n * d..(text * batch.n + len) * d;
                    let x = MatRef::new(&x[rows.clone()], len, d);
                    info = info.merge(attention.layer.forward_all(x, &mut sum[rows], ws)?);
                }
            } else {
                seen(l, Input::Attention, &x);
                ws.install(|ctx| {
                    let mut jobs: [(&Linear, &mut [f32]); 3] =
                        [(&layer.q, &mut q), (&layer.k, &mut k), (&layer.v, &mut v)];
                    apply_all(&mut jobs, MatRef::new(&x, rows, d), ctx.scratch);
                });
                let view = |data| TensorRef::bnhd(data, dims);
                let inputs = Qkv { key_lens: batch.key_lens(), ..Qkv::new(view(&q)?, view(&k)?, view(&v)?) };
                look(l, &inputs);
                let out = Out::new(TensorMut::bnhd(&mut heads, dims)?);
                info = info.merge(plan.execute(&Inputs::F32(inputs), &mut out.into(), ws)?);
                seen(l, Input::Heads, &heads);
                ws.install(|ctx| layer.o.apply(MatRef::new(&heads, rows, width), &mut sum, ctx.scratch));
            }
            ws.install(|ctx| {
                add_and_norm(&mut x, &sum, &layer.attention_norm, c.norm_eps);
                seen(l, Input::Ffn, &x);
                layer.up.apply(MatRef::new(&x, rows, d), &mut inner, ctx.scratch);
                inner.par_chunks_mut(c.intermediate).for_each(ops::gelu_in_place);
                seen(l, Input::Inner, &inner);
                layer.down.apply(MatRef::new(&inner, rows, c.intermediate), &mut sum, ctx.scratch);
                add_and_norm(&mut x, &sum, &layer.output_norm, c.norm_eps);
            });
        }
        Ok(Hidden { states: x, info })
    }

    /// Computes the embeddings of `batch`, one row of length one per text, with one method in every layer.
    pub fn embed(
        &self,
        batch: &Batch,
        method: &Method,
        options: &Options,
        ws: &mut Workspace,
    ) -> Result<Vec<Vec<f32>>> {
        let hidden = self.forward(batch, &self.plans(batch, method, options)?, ws, |_, _| ())?;
        Ok(mean_pool(&hidden.states, batch, self.width()))
    }

    fn check(&self, batch: &Batch, plans: &[Box<dyn Plan>]) -> Result<()> {
        let c = self.config;
        let tables = [self.weights.position_embedding.rows(), c.max_positions];
        let context = tables.into_iter().min().unwrap_or(0);
        if batch.n > context {
            return Err(Error::ContextTooShort { tokens: batch.n, context });
        }
        if plans.len() != c.n_layers {
            return Err(Error::invalid("the number of plans", plans.len(), format!("{}", c.n_layers)));
        }
        let problem = self.problem(batch);
        // The plan already fixes what the near field leaves to the method.
        let planned = |p: &Problem| p.with_near(problem.near);
        if let Some(plan) = plans.iter().find(|p| planned(p.problem()) != problem) {
            let found = format!("{:?}", plan.problem());
            return Err(Error::invalid("the problem of a plan", found, format!("{problem:?}")));
        }
        Ok(())
    }

    fn embed_tokens(&self, batch: &Batch, x: &mut [f32]) -> Result<()> {
        let (w, d) = (self.weights, self.config.hidden);
        ops::embed_into(&w.word_embedding, &batch.ids, x)?;
        let positions: Vec<u32> = (0..batch.n as u32).collect();
        let mut position = vec![0.0; batch.n * d];
        ops::embed_into(&w.position_embedding, &positions, &mut position)?;
        let mut kind = vec![0.0; d];
        ops::embed_into(&w.type_embedding, &[0], &mut kind)?;
        for text in x.chunks_exact_mut(batch.n * d) {
            ops::add_in_place(text, &position);
            text.chunks_exact_mut(d).for_each(|row| ops::add_in_place(row, &kind));
        }
        let LayerNorm { weight, bias } = &w.embedding_norm;
        ops::layer_norm_in_place(x, weight, bias, self.config.norm_eps);
        Ok(())
    }

    /// Returns the layers, for callers that run them directly.
    pub fn layers(&self) -> &'a [EncoderLayer] {
        &self.weights.layers
    }
}

/// `x ← LN(x + y)`, row by row.
fn add_and_norm(x: &mut [f32], y: &[f32], norm: &LayerNorm, eps: f64) {
    let block = 32 * norm.weight.len();
    x.par_chunks_mut(block).zip(y.par_chunks(block)).for_each(|(x, y)| {
        ops::add_in_place(x, y);
        ops::layer_norm_in_place(x, &norm.weight, &norm.bias, eps);
    });
}

/// Returns the mean of each text's hidden states `[texts, longest, width]` without padding, scaled to length one. A
/// mean of zero stays zero.
pub fn mean_pool(states: &[f32], batch: &Batch, width: usize) -> Vec<Vec<f32>> {
    let texts = states.chunks_exact((batch.n * width).max(1)).zip(&batch.lens);
    texts
        .map(|(text, &len)| {
            let mut mean = vec![0.0f64; width];
            for row in text.chunks_exact(width).take(len) {
                mean.iter_mut().zip(row).for_each(|(m, x)| *m += f64::from(*x));
            }
            let norm = mean.iter().map(|m| m * m).sum::<f64>().sqrt();
            let scale = if norm > 0.0 { 1.0 / norm } else { 0.0 };
            mean.iter().map(|m| (m * scale) as f32).collect()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_padded_to_the_longest_text() {
        let batch = Batch::new(&[vec![1, 2, 3], vec![4]]).unwrap();
        assert_eq!(batch.ids, [1, 2, 3, 4, 0, 0]);
        assert_eq!((batch.texts(), batch.longest(), batch.lens()), (2, 3, &[3, 1][..]));
        assert_eq!(batch.key_lens(), Some(&[3, 1][..]));
        assert_eq!(Batch::new(&[[7, 8]]).unwrap().key_lens(), None);
        assert!(Batch::new(&[vec![1], vec![]]).is_err());
        assert!(Batch::new::<Vec<u32>>(&[]).is_err());
    }

    #[test]
    fn pooling_leaves_padding_out() {
        let batch = Batch::new(&[vec![1, 2], vec![3]]).unwrap();
        let states = [3.0, 0.0, 3.0, 8.0, 0.0, -2.0, f32::NAN, f32::NAN];
        assert_eq!(mean_pool(&states, &batch, 2), [vec![0.6, 0.8], vec![0.0, -1.0]]);
        let zero = Batch::new(&[[1]]).unwrap();
        assert_eq!(mean_pool(&[0.0, 0.0], &zero, 2), [[0.0, 0.0]]);
    }
}
