//! Sequences whose tokens are divided among several processes.
//!
//! Embeddings, norms, projections and feed-forward layers act on single tokens: each process runs the model on its own
//! tokens, rotated by their positions in the whole sequence. Only attention needs the keys of others: a
//! [`SpreadAttention`] attends with this process's queries to the keys of all.

use super::layer::{weigh_sinks, windowed, without_lse};
use super::{Decoder, Observer, final_states, lengthen, sized};
use crate::error::{Error, Result};
use crate::ops;
use crate::recipe::Attending;
use crate::weights::Weights;
use attlas::{Problem, Qkv, RunInfo, TensorRef, Workspace, registry};
use std::fmt::Debug;
use std::ops::Range;

/// One call of attention over all processes: causal, one sequence.
#[derive(Debug)]
pub struct SpreadCall<'a> {
    /// The method.
    pub attending: &'a Attending,
    /// The problem of the whole sequence.
    pub problem: &'a Problem,
    /// Queries, keys and values of this process's tokens.
    pub x: Qkv<'a, f32>,
}

/// Outputs `[1, heads, tokens, d]` of this process's queries, the log-sum-exp of each row if the method has one, and
/// counts of the run.
pub type SpreadRows = (Vec<f32>, Option<Vec<f32>>, RunInfo);

/// Attention over one sequence whose tokens are divided among several processes. Every process makes the same calls in
/// the same order.
pub trait SpreadAttention: Debug {
    /// Returns the positions of this process's tokens among `tokens`, as runs in increasing order, for a model that
    /// uses all methods in `attending`.
    fn pieces(&mut self, tokens: usize, attending: &[Attending]) -> Vec<Range<usize>>;

    /// Attends with this process's queries to the keys of all processes.
    fn attend(&mut self, call: &SpreadCall<'_>, ws: &mut Workspace) -> attlas::Result<SpreadRows>;
}

/// This process's part of a sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// Positions of its tokens, in the order of their hidden states.
    pub pieces: Vec<Range<usize>>,
    /// Bytes of its keys and values in all layers.
    pub cache_bytes: usize,
}

impl Held {
    /// Returns the parts of `ranges` on this process, cut to at most `most` tokens, each with the index of its first
    /// hidden state.
    pub fn inside(
        &self,
        ranges: impl Iterator<Item = Range<usize>>,
        most: usize,
    ) -> Vec<(Range<usize>, usize)> {
        let mut found = Vec::new();
        for range in ranges {
            let mut at = 0;
            for piece in &self.pieces {
                let both = range.start.max(piece.start)..range.end.min(piece.end);
                for start in both.clone().step_by(most.max(1)) {
                    found.push((start..both.end.min(start + most), at + start - piece.start));
                }
                at += piece.len();
            }
        }
        found
    }
}

impl Decoder {
    /// Runs a sequence whose tokens are divided among processes: each calls this with all tokens, and `hidden` becomes
    /// the normalised final hidden states of its own tokens. The tokens are not kept. Fails if tokens are cached, if a
    /// method cannot run with keys on several processes, or if layers attend as a whole.
    pub fn forward_spread(
        &mut self,
        tokens: &[u32],
        hidden: &mut Vec<f32>,
        spread: &mut dyn SpreadAttention,
        observer: &mut dyn Observer,
    ) -> Result<Held> {
        hidden.clear();
        self.check_empty()?;
        self.check_tokens(tokens)?;
        if self.model.weights.has_other_attention() {
            let what = "keys on several processes in a model whose attention layers attend as a whole".into();
            return Err(Error::Unsupported { what });
        }
        let attending: Vec<Attending> =
            self.state.layers.iter().flat_map(|l| &l.parts).map(|p| p.run.attending(false)).collect();
        let pieces = spread.pieces(tokens.len(), &attending);
        let result = self.run_spread(tokens, &pieces, hidden, spread, observer);
        let cache_bytes = self.cache_bytes();
        self.state.truncate(0);
        if result.is_err() {
            hidden.clear();
        }
        result.map(|()| Held { pieces, cache_bytes })
    }

    fn run_spread(
        &mut self,
        tokens: &[u32],
        pieces: &[Range<usize>],
        hidden: &mut Vec<f32>,
        spread: &mut dyn SpreadAttention,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let Self { model, threads, state } = self;
        let c = &model.config;
        let Weights::Decoder(weights) = &model.weights else {
            unreachable!("checked when the decoder was made")
        };
        let (total, d, q_width) = (tokens.len(), c.hidden, c.n_heads * c.head_dim);
        let own: Vec<u32> = pieces.iter().flat_map(|piece| &tokens[piece.clone()]).copied().collect();
        let n = own.len();
        let mut x = vec![0.0; n * d];
        threads.install(|_| {
            lengthen(&mut state.table, c.rope.as_ref(), c, total);
            lengthen(&mut state.local_table, c.local_rope.as_ref(), c, total);
            state.layers.iter_mut().filter(|l| l.keeps_numbers()).for_each(|l| l.cache.reserve(n));
            ops::embed_into(&weights.embedding, &own, &mut x)?;
            ops::scale_in_place(&mut x, c.multipliers.embedding);
            Ok::<(), Error>(())
        })?;
        let mut buffers = std::mem::take(&mut state.buffers);
        // Processes wait for each other inside the calls of attention, which only the calling thread makes.
        let result = weights.layers.iter().enumerate().try_for_each(|(l, layer)| {
            if observer.interrupted() {
                return Err(Error::Interrupted);
            }
            threads.install(|_| state.enter_layer(c, layer, l, pieces, &x, &mut buffers, observer))?;
            let q = TensorRef::bnhd(&buffers.q[..n * q_width], [1, c.n_heads, n, c.head_dim])?;
            let heads = sized(&mut buffers.heads, n * q_width);
            let attended =
                state.attend_spread(c, l, total, q, layer.sinks.as_deref(), heads, spread, threads);
            state.layers[l].end(&mut state.spare);
            attended?;
            threads.install(|_| state.leave_layer(c, layer, l, &mut x, &mut buffers, observer))
        });
        state.buffers = buffers;
        result?;
        threads.install(|_| final_states(c, weights, &x, hidden));
        Ok(())
    }
}

impl super::DecoderState {
    /// Attends in layer `l` with this process's queries to the keys of all processes.
    fn attend_spread(
        &mut self,
        c: &crate::config::ModelConfig,
        l: usize,
        total: usize,
        q: TensorRef<'_, f32>,
        sinks: Option<&[f32]>,
        out: &mut [f32],
        spread: &mut dyn SpreadAttention,
        ws: &mut Workspace,
    ) -> Result<()> {
        let layer = &self.layers[l];
        let (n, dh) = (q.dims()[2], c.head_dim);
        let window = layer.window.filter(|&w| total > w);
        for part in layer.parts.iter().map(|p| &p.run) {
            let mut attending = part.attending(false);
            if let Some(window) = window {
                if !attending.is_baseline() {
                    return Err(windowed(attending.method, l, window, total));
                }
                let (method, options) = registry::sliding_window(window);
                attending = Attending { method, options, calibration: None };
            }
            if sinks.is_some() && !attending.method.claims.lse {
                return Err(without_lse(attending.method));
            }
            let (heads, groups) = (part.heads.clone(), part.groups.clone());
            let problem = Problem::new(heads.len(), total, dh).with_kv_heads(groups.len()).causal();
            let problem = problem.with_softcap(c.attention_softcap);
            let (k, v) = (layer.cache.keys()?.heads(groups.clone()), layer.cache.values()?.heads(groups));
            let x = Qkv::new(q.heads(heads.clone()), k, v);
            let call = SpreadCall { attending: &attending, problem: &problem, x };
            let (o, lse, info) = spread.attend(&call, ws)?;
            for (o, h) in o.chunks_exact((n * dh).max(1)).zip(heads.clone()) {
                for (i, row) in o.chunks_exact(dh).enumerate() {
                    out[(i * c.n_heads + h) * dh..][..dh].copy_from_slice(row);
                }
            }
            if let (Some(sinks), Some(lse)) = (sinks, &lse) {
                let first = heads.start * dh;
                weigh_sinks(&sinks[heads], lse, dh, c.n_heads * dh, &mut out[first..]);
            }
            self.info = std::mem::take(&mut self.info).merge(info);
        }
        Ok(())
    }
}
