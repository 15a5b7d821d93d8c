//! Causal language models: prompts in chunks, then token by token, with any attention method.
//!
//! For every layer, with $x$ the residual stream and $\operatorname{norm}$ the root-mean-square norm:
//! $a = \operatorname{norm}(x)$; $q, k, v$ from $a$, queries and keys rotated by position; keys and values join
//! the cache; the layer's method attends; $x \leftarrow x + W_O\,o$;
//! $x \leftarrow x + W_{down}(\operatorname{silu}(W_{gate}\,m) \odot W_{up}\,m)$ with $m = \operatorname{norm}(x)$.
//! Weights stay as they are stored; buffers are reused from call to call.
//!
//! A [`Recipe`] names the method of every head. Several new tokens are planned as one causal problem over
//! everything cached. A single new token goes through the method's stream if it has one, otherwise through exact
//! attention over the cache. If attention is exact everywhere, prompts are cut into chunks of [`CHUNK`] tokens, which
//! bounds memory; for other methods a prompt is one problem, because their result for a row may depend on the number of
//! tokens.
//!
//! With [`Decoder::forget_keys`], a layer whose heads all decode by streams stores no keys beside them: streams take in
//! a prompt while it is read, a short one as one problem, a longer one [`CHUNK`] tokens at a time. With
//! [`Decoder::pack_keys`], stored keys and values are packed ([`CacheFormat`]).
//!
//! Layers with latent attention, and those that a checkpoint replaces by another layer, compute attention as a whole,
//! exactly, over their own cache; observers see their inputs.

mod layer;
mod spread;

pub use layer::LayerDecoding;
pub use spread::{Held, SpreadAttention, SpreadCall, SpreadRows};

use self::layer::LayerState;
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::kept::{CacheFormat, Packed};
use crate::linear::{Linear, apply_all_in};
use crate::model::Model;
use crate::ops;
use crate::recipe::Recipe;
use crate::weights::{DecoderLayer, DecoderWeights, Weights};
use attlas::cache::KvCache;
use attlas::layer::Layer;
use attlas::{MatRef, RunInfo, Schedule, TensorRef, Workspace};
use attlas_num::Scratch;
use attlas_num::kernels::pages;
use attlas_num::kernels::quant::{Compute, Format};
use attlas_num::rope::{Angles, Rope, Scaling, Table};
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Tokens that pass through the linear layers together.
pub const CHUNK: usize = 512;
/// Most tokens for which threads stay awake between the products of a pass.
const FEW_TOKENS: usize = 16;

/// Rows whose logits are computed together.
pub const LOGIT_ROWS: usize = 64;

/// Most tokens of a prompt that is one problem for methods whose layers store no keys.
pub const ONE_PROBLEM: usize = 2048;

/// The new tokens whose final hidden states are returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// All tokens.
    All,
    /// The last token.
    Last,
    /// No token: nothing after the last observed layer is computed.
    None,
}

/// Observer of a model's intermediate values.
pub trait Observer: Send {
    /// Returns the first layer not observed; from there on layers are not run if no hidden states are returned.
    fn layers(&self) -> usize {
        usize::MAX
    }

    /// Called before every layer; if true, the pass ends with [`Error::Interrupted`].
    fn interrupted(&self) -> bool {
        false
    }

    /// Receives the residual stream that enters a layer, for the tokens from `first` on.
    fn residual(&mut self, layer: usize, first: usize, x: &[f32]) {
        let _ = (layer, first, x);
    }

    /// Receives the normalised hidden states that enter a layer's attention, for the tokens from `first` on.
    fn entering(&mut self, layer: usize, first: usize, x: &[f32]) {
        let _ = (layer, first, x);
    }

    /// Receives queries and keys of a layer before rotation, `[tokens, heads, head_dim]`, for the tokens from `first`
    /// on.
    fn before_rotation(&mut self, layer: usize, first: usize, q: &[f32], k: &[f32]) {
        let _ = (layer, first, q, k);
    }

    /// Receives queries, keys and values as used in attention, for the tokens from `first` on.
    fn projected(&mut self, layer: usize, first: usize, q: &[f32], k: &[f32], v: &[f32]) {
        let _ = (layer, first, q, k, v);
    }

    /// May change the outputs of the heads, `[tokens, heads, head_dim]`, before the output projection.
    fn change(&mut self, layer: usize, first: usize, o: &mut [f32]) {
        let _ = (layer, first, o);
    }

    /// Receives the outputs of the heads, before the output projection.
    fn attended(&mut self, layer: usize, first: usize, o: &[f32]) {
        let _ = (layer, first, o);
    }

    /// Receives the normalised hidden states that enter a feed-forward layer, for the tokens from `first` on.
    fn entering_ffn(&mut self, layer: usize, first: usize, x: &[f32]) {
        let _ = (layer, first, x);
    }

    /// Receives the gated hidden units of a feed-forward layer, before the projection out of it; not of experts.
    fn gated(&mut self, layer: usize, first: usize, x: &[f32]) {
        let _ = (layer, first, x);
    }
}

/// Observer that ignores everything.
#[derive(Clone, Copy, Debug)]
pub struct Blind;

impl Observer for Blind {}

/// A causal language model with its cache.
#[derive(Debug)]
pub struct Decoder {
    model: Arc<Model>,
    /// Threads for all work.
    threads: Workspace,
    state: DecoderState,
}

impl Decoder {
    /// Creates a decoder with an empty cache and the methods of `recipe`. Fails if the model is an encoder or a method
    /// has no causal form.
    pub fn new(model: Arc<Model>, recipe: &Recipe, schedule: Schedule) -> Result<Self> {
        Self::on(model, recipe, &Workspace::new(schedule)?)
    }

    /// Creates a decoder on the threads of a workspace.
    pub fn on(model: Arc<Model>, recipe: &Recipe, threads: &Workspace) -> Result<Self> {
        let c = &model.config;
        if !matches!(model.weights, Weights::Decoder(_)) {
            let what =
                format!("predicting tokens with a {} model, which is an encoder,", c.architecture.name());
            return Err(Error::Unsupported { what });
        }
        let parts = recipe.resolve(c)?;
        if model.weights.has_other_attention()
            && let Some(part) = parts.iter().flatten().find(|p| !p.is_baseline())
        {
            let reasons = vec!["the model's attention layers attend exactly, as a whole".to_owned()];
            return Err(attlas::Error::Unsupported { method: part.method.id.into(), reasons }.into());
        }
        let mut layers: Vec<LayerState> =
            parts.into_iter().enumerate().map(|(i, parts)| LayerState::new(i, parts, c)).collect();
        layers.iter_mut().for_each(|l| l.decode_from = recipe.decode_from);
        if let Weights::Decoder(weights) = &model.weights {
            for (state, layer) in layers.iter_mut().zip(&weights.layers) {
                state.latents = layer.whole().map(|l| l.new_cache());
            }
        }
        let state = DecoderState {
            layers,
            len: 0,
            table: None,
            local_table: None,
            spare: None,
            inner: vec![threads.sibling()],
            scratch: Scratch::new(),
            buffers: Buffers::default(),
            info: RunInfo::default(),
            compute: Compute::F32,
        };
        Ok(Self { model, threads: threads.sibling(), state })
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Tokens cached.
    pub fn len(&self) -> usize {
        self.state.len
    }

    /// Returns true if no token is cached.
    pub fn is_empty(&self) -> bool {
        self.state.len == 0
    }

    /// Returns the bytes of cached keys and values and of the states of streams.
    pub fn cache_bytes(&self) -> usize {
        self.state.layers.iter().map(LayerState::bytes).sum()
    }

    /// Counts of attention since the last [`reset`](Self::reset).
    pub fn info(&self) -> &RunInfo {
        &self.state.info
    }

    /// Makes layers whose heads all decode by streams store no keys. Their streams cannot go back: if the decoder is
    /// truncated, or a call fails halfway, all tokens are dropped. Fails if tokens are cached.
    pub fn forget_keys(&mut self) -> Result<()> {
        self.check_empty()?;
        let c = &self.model.config;
        for layer in &mut self.state.layers {
            layer.streamed = layer.can_stream(c)?;
            if layer.streamed {
                layer.packed = None;
            }
        }
        Ok(())
    }

    /// Stores keys and values in this format; latents are unaffected. Fails if tokens are cached.
    pub fn pack_keys(&mut self, format: CacheFormat) -> Result<()> {
        self.check_empty()?;
        let c = &self.model.config;
        for layer in self.state.layers.iter_mut().filter(|l| l.latents.is_none() && !l.streamed) {
            layer.packed = Packed::new(format, c.n_kv_heads, c.head_dim);
        }
        Ok(())
    }

    /// Sets the rounding of the operands of linear layers, for weights stored in a format that supports it. Layers that
    /// attend as a whole keep single precision.
    pub fn compute_in(&mut self, compute: Compute) {
        self.state.compute = compute;
    }

    /// Type to which operands of linear layers are rounded.
    pub fn compute(&self) -> Compute {
        self.state.compute
    }

    /// The formats of matrices that are multiplied in single precision although [`compute`](Self::compute) says
    /// otherwise, and how many matrices each has.
    pub fn in_single(&self) -> BTreeMap<&'static str, usize> {
        let mut found = BTreeMap::new();
        let Weights::Decoder(weights) = &self.model.weights else { return found };
        let compute = self.state.compute;
        let mut count = |format: Format, kept: bool| {
            if compute != Compute::F32 && (kept || compute.of(format) == Compute::F32) {
                *found.entry(format.name()).or_insert(0) += 1;
            }
        };
        for layer in &weights.layers {
            let whole = layer.whole().is_some();
            let attention = [&layer.q, &layer.k, &layer.v, &layer.o].into_iter().map(|l| (l, whole));
            let dense = [&layer.gate, &layer.up, &layer.down].into_iter().map(|l| (l, false));
            let experts = layer.experts.iter().flat_map(|e| {
                let of_experts = e.experts.iter().flat_map(|m| [&m.gate, &m.up, &m.down]);
                of_experts.chain([&e.router]).chain(e.shared_gate.as_ref())
            });
            let maps = attention.chain(dense).chain(experts.map(|l| (l, false)));
            for (map, kept) in maps.filter(|(l, _)| l.outputs() > 0 && l.inputs() > 0) {
                map.matrices().for_each(|m| count(m.format(), kept));
            }
        }
        weights.output.matrices().for_each(|m| count(m.format(), false));
        found
    }

    fn check_empty(&self) -> Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        let found = format!("one with {} tokens", self.len());
        Err(Error::invalid("the decoder", found, "one without tokens, as reset makes it"))
    }

    /// Returns the number of tokens including these; an error if there are too many or if an id is not in the
    /// vocabulary.
    fn check_tokens(&self, tokens: &[u32]) -> Result<usize> {
        let c = &self.model.config;
        let total = self.state.len.saturating_add(tokens.len());
        if total > c.longest_context() {
            return Err(Error::ContextTooShort { tokens: total, context: c.longest_context() });
        }
        match tokens.iter().find(|id| **id as usize >= c.vocab) {
            Some(id) => Err(Error::invalid("a token id", id, format!("below {}", c.vocab))),
            None => Ok(total),
        }
    }

    /// Returns for each layer how its heads decode.
    pub fn decoding(&self) -> Vec<LayerDecoding> {
        let c = &self.model.config;
        self.state.layers.iter().map(|l| l.decoding(c)).collect()
    }

    /// Layers with heads whose method for new tokens has no stream: exact attention decodes there.
    pub fn decodes_exactly(&self) -> Vec<usize> {
        self.decoding().into_iter().filter(|l| l.falls_back).map(|l| l.layer).collect()
    }

    /// Reserves memory for `tokens` tokens in all, at most for the longest context; taking them then moves no data.
    pub fn reserve(&mut self, tokens: usize) {
        let tokens = tokens.min(self.model.config.longest_context());
        for layer in self.state.layers.iter_mut().filter(|l| !l.streamed) {
            match &mut layer.packed {
                Some(packed) => packed.reserve(tokens),
                None => layer.cache.reserve(tokens),
            }
        }
    }

    /// Drops every token.
    pub fn reset(&mut self) {
        self.truncate(0);
        self.state.info = RunInfo::default();
    }

    /// Drops all but the first `len` tokens; does nothing if there are fewer. If layers store no keys, drops all
    /// tokens.
    pub fn truncate(&mut self, len: usize) {
        self.state.truncate(len);
    }

    /// Takes new tokens. `hidden` becomes the normalised final hidden states of the selected `rows`. On an error no
    /// token has been taken.
    pub fn forward(&mut self, tokens: &[u32], rows: Rows, hidden: &mut Vec<f32>) -> Result<()> {
        self.forward_observed(tokens, rows, hidden, &mut Blind)
    }

    /// Takes new tokens under an observer. If the observer ends before the last layer and no rows are returned, the
    /// tokens are not kept.
    pub fn forward_observed(
        &mut self,
        tokens: &[u32],
        rows: Rows,
        hidden: &mut Vec<f32>,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        self.pass(tokens, rows, hidden, None, observer)
    }

    /// Takes new tokens and computes the logits of `hidden` while the threads are awake.
    fn pass(
        &mut self,
        tokens: &[u32],
        rows: Rows,
        hidden: &mut Vec<f32>,
        logits: Option<&mut Vec<f32>>,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        hidden.clear();
        let c = &self.model.config;
        let Weights::Decoder(weights) = &self.model.weights else {
            unreachable!("checked when the decoder was made")
        };
        let first = self.state.len;
        let total = self.check_tokens(tokens)?;
        let state = &mut self.state;
        let chunks = |l: &LayerState| l.chunks(tokens.len());
        let chunk = if state.layers.iter().all(chunks) { CHUNK } else { tokens.len().max(1) };
        state.layers.iter_mut().for_each(|l| l.ahead = total);
        let work = || {
            lengthen(&mut state.table, c.rope.as_ref(), c, total);
            lengthen(&mut state.local_table, c.local_rope.as_ref(), c, total);
            if tokens.len() > 1 {
                state.reserve(c, total);
            }
            let parts = tokens.chunks(chunk);
            let last = parts.len().saturating_sub(1);
            for (i, part) in parts.enumerate() {
                let rows = if rows == Rows::Last && i < last { Rows::None } else { rows };
                state.run(c, weights, Begin::Tokens(part), rows, hidden, observer)?;
            }
            if let Some(logits) = logits {
                logits.resize(hidden.len() / c.hidden * c.vocab, 0.0);
                logits_of(c, weights, state.compute, hidden, logits, &state.scratch);
            }
            Ok(())
        };
        let result = if tokens.len() <= FEW_TOKENS {
            self.threads.install_awake(|_| work())
        } else {
            self.threads.install(|_| work())
        };
        let partial = rows == Rows::None && observer.layers() < c.n_layers;
        if result.is_err() || partial {
            state.truncate(first);
        }
        if result.is_err() {
            hidden.clear();
        }
        result
    }

    /// Runs the layers from `layer` on for tokens after the cached ones, given their residual stream `x` at that layer,
    /// as from [`Observer::residual`]. The tokens are not kept. `hidden` becomes the normalised final hidden states.
    /// Panics if `x` is not whole rows of the model's width.
    pub fn forward_from(
        &mut self,
        layer: usize,
        x: &[f32],
        hidden: &mut Vec<f32>,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        hidden.clear();
        let c = &self.model.config;
        let Weights::Decoder(weights) = &self.model.weights else {
            unreachable!("checked when the decoder was made")
        };
        assert!(x.len().is_multiple_of(c.hidden));
        let first = self.state.len;
        let total = first + x.len() / c.hidden.max(1);
        if total > c.longest_context() {
            return Err(Error::ContextTooShort { tokens: total, context: c.longest_context() });
        }
        let state = &mut self.state;
        let result = self.threads.install(|_| {
            lengthen(&mut state.table, c.rope.as_ref(), c, total);
            lengthen(&mut state.local_table, c.local_rope.as_ref(), c, total);
            state.layers.iter_mut().for_each(|l| l.ahead = total);
            state.run(c, weights, Begin::Layer(layer, x), Rows::All, hidden, observer)
        });
        state.truncate(first);
        result
    }

    /// Computes the logits of normalised hidden states: one row of the vocabulary's size per row of the model's width.
    /// Panics if the lengths do not match.
    pub fn logits_into(&self, hidden: &[f32], logits: &mut [f32]) {
        let c = &self.model.config;
        let Weights::Decoder(weights) = &self.model.weights else {
            unreachable!("checked when the decoder was made")
        };
        let compute = self.state.compute;
        self.threads.install(|cx| logits_of(c, weights, compute, hidden, logits, cx.scratch));
    }

    /// Takes `tokens` and computes the logits after the last one.
    pub fn next_logits(&mut self, tokens: &[u32], logits: &mut Vec<f32>) -> Result<()> {
        let mut hidden = std::mem::take(&mut self.state.buffers.last);
        let result = self.pass(tokens, Rows::Last, &mut hidden, Some(logits), &mut Blind);
        self.state.buffers.last = hidden;
        result
    }
}

/// State that changes from token to token.
#[derive(Debug)]
struct DecoderState {
    layers: Vec<LayerState>,
    len: usize,
    table: Option<Table<f32>>,
    /// Table of layers with a window, if their frequencies differ.
    local_table: Option<Table<f32>>,
    /// Shared storage for the keys and values of one layer that stores none itself.
    spare: Option<KvCache<f32>>,
    /// Workspaces of plans on the current threads: one for each part of a layer that runs beside others.
    inner: Vec<Workspace>,
    scratch: Scratch,
    buffers: Buffers,
    info: RunInfo,
    /// Type to which operands of linear layers are rounded.
    compute: Compute,
}

/// Buffers reused from call to call and resized as needed.
#[derive(Debug, Default)]
struct Buffers {
    x: Vec<f32>,
    q: Vec<f32>,
    heads: Vec<f32>,
    normed: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    sum: Vec<f32>,
    last: Vec<f32>,
}

/// Returns the first `len` elements, growing the buffer if needed.
fn sized(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if buffer.len() < len {
        pages::reserve(buffer, len - buffer.len());
        buffer.resize(len, 0.0);
    }
    &mut buffer[..len]
}

/// Runs `work` on blocks of rows of `width`, in parallel if there are many.
fn by_rows(x: &mut [f32], width: usize, work: impl Fn(usize, &mut [f32]) + Sync + Send) {
    const ROWS: usize = 32;
    if x.len() <= ROWS * width {
        work(0, x);
    } else {
        x.par_chunks_mut(ROWS * width).enumerate().for_each(|(i, rows)| work(i * ROWS, rows));
    }
}

fn matrix(x: &[f32], width: usize) -> MatRef<'_, f32> {
    MatRef::new(x, x.len() / width.max(1), width)
}

/// Extends the table of sines and cosines to `n` positions, by doubling. If frequencies follow the length (dynamic NTK,
/// LongRoPE), they become those of `n` tokens; keys rotated earlier stay unchanged.
fn lengthen(table: &mut Option<Table<f32>>, rope: Option<&Rope>, c: &ModelConfig, n: usize) {
    let Some(rope) = rope else { return };
    let dynamic = matches!(rope.scaling, Scaling::Dynamic { .. });
    let stretched = |n: usize| rope.is_stretched(n);
    let fits = |table: &Table<f32>| match table.positions() {
        have if dynamic && stretched(n) => have == n,
        have => have >= n && stretched(have) == stretched(n),
    };
    if !table.as_ref().is_some_and(fits) {
        let most = if n > c.max_positions { c.longest_context() } else { c.max_positions };
        let most = match &rope.scaling {
            Scaling::LongRope(long) if !stretched(n) => most.min(long.original as usize),
            _ => most,
        };
        let exact = dynamic && stretched(n);
        let positions = if exact { n } else { n.next_power_of_two().max(1024).min(most) };
        *table = Some(Table::new(rope, positions, Angles::Single));
    }
}

impl DecoderState {
    /// Reserves memory for prompts of `tokens` tokens in all.
    fn reserve(&mut self, c: &ModelConfig, tokens: usize) {
        let mut unpacks = false;
        for layer in self.layers.iter_mut().filter(|l| l.latents.is_none() && !l.streamed) {
            match &mut layer.packed {
                Some(packed) => {
                    packed.reserve(tokens);
                    unpacks = true;
                }
                None => layer.cache.reserve(tokens),
            }
        }
        if unpacks {
            let empty = || KvCache::new(1, c.n_kv_heads, c.head_dim, c.head_dim, 0);
            self.spare.get_or_insert_with(empty).reserve(tokens);
        }
    }

    fn truncate(&mut self, len: usize) {
        let back = |l: &LayerState| l.streamed && l.streams().any(|s| s.len() > len);
        let len = if self.layers.iter().any(back) { 0 } else { len };
        self.len = self.len.min(len);
        self.layers.iter_mut().for_each(|l| l.truncate(len));
    }

    fn run(
        &mut self,
        c: &ModelConfig,
        weights: &DecoderWeights,
        begin: Begin<'_>,
        rows: Rows,
        hidden: &mut Vec<f32>,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let (d, q_width) = (c.hidden, c.n_heads * c.head_dim);
        let (n, from) = match begin {
            Begin::Tokens(tokens) => (tokens.len(), 0),
            Begin::Layer(layer, x) => (x.len() / d.max(1), layer),
        };
        let mut buffers = std::mem::take(&mut self.buffers);
        let mut residual = std::mem::take(&mut buffers.x);
        let x = sized(&mut residual, n * d);
        let result = (|| {
            match begin {
                Begin::Tokens(tokens) => {
                    ops::embed_into(&weights.embedding, tokens, x)?;
                    ops::scale_in_place(x, c.multipliers.embedding);
                }
                Begin::Layer(_, given) => x.copy_from_slice(given),
            }
            let wanted = if rows == Rows::None { observer.layers() } else { usize::MAX };
            for (l, layer) in weights.layers.iter().enumerate().take(wanted).skip(from) {
                if observer.interrupted() {
                    return Err(Error::Interrupted);
                }
                observer.residual(l, self.len, x);
                if layer.whole().is_none() {
                    let own = self.len..self.len + n;
                    self.layers[l].direct = self.layers[l].reads_packed(n);
                    self.enter_layer(c, layer, l, std::slice::from_ref(&own), x, &mut buffers, observer)?;
                    let heads = sized(&mut buffers.heads, n * q_width);
                    let q = &buffers.q[..n * q_width];
                    let attended = self.attend_layer(c, l, q, layer.sinks.as_deref(), heads);
                    self.layers[l].end(&mut self.spare);
                    attended?;
                    observer.change(l, self.len, heads);
                    observer.attended(l, self.len, heads);
                    if rows == Rows::None && l + 1 == wanted.min(weights.layers.len()) {
                        break;
                    }
                }
                self.leave_layer(c, layer, l, x, &mut buffers, observer)?;
            }
            let start = match rows {
                Rows::All => 0,
                Rows::Last => n.saturating_sub(1),
                Rows::None => n,
            };
            final_states(c, weights, &x[start * d..], hidden);
            self.len += n;
            Ok(())
        })();
        buffers.x = residual;
        self.buffers = buffers;
        result
    }

    /// Computes the queries of all tokens of `x`, at the positions of `pieces`, and adds their keys and values to the
    /// layer's cache.
    fn enter_layer(
        &mut self,
        c: &ModelConfig,
        layer: &DecoderLayer,
        l: usize,
        pieces: &[Range<usize>],
        x: &[f32],
        buffers: &mut Buffers,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let (d, q_width) = (c.hidden, c.n_heads * c.head_dim);
        self.layers[l].begin(&mut self.spare);
        let q = sized(&mut buffers.q, x.len() / d * q_width);
        let mut at = 0;
        for piece in pieces {
            for first in piece.clone().step_by(CHUNK) {
                let len = CHUNK.min(piece.end - first);
                let (x, q) = (&x[at * d..][..len * d], &mut q[at * q_width..][..len * q_width]);
                at += len;
                let rest = Projections {
                    normed: sized(&mut buffers.normed, len * d),
                    k: sized(&mut buffers.k, len * c.n_kv_heads * c.head_dim),
                    v: sized(&mut buffers.v, len * c.n_kv_heads * c.head_dim),
                };
                if let Err(error) = self.project(c, layer, l, first, x, q, rest, observer) {
                    self.layers[l].end(&mut self.spare);
                    return Err(error);
                }
            }
        }
        self.layers[l].unpack();
        Ok(())
    }

    /// Runs the rest of a layer after attention: the output projection, or a layer that attends as a whole, and the
    /// feed-forward layer.
    fn leave_layer(
        &mut self,
        c: &ModelConfig,
        layer: &DecoderLayer,
        l: usize,
        x: &mut [f32],
        buffers: &mut Buffers,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let (d, q_width) = (c.hidden, c.n_heads * c.head_dim);
        for (i, x) in x.chunks_mut(CHUNK * d).enumerate() {
            let len = x.len() / d;
            let sum = sized(&mut buffers.sum, len * d);
            let normed = sized(&mut buffers.normed, len * d);
            if let Some(whole) = layer.whole() {
                by_rows(normed, d, |first, rows| {
                    let x = &x[first * d..][..rows.len()];
                    ops::maybe_norm_into(x, layer.attention_norm.as_deref(), c.norm_eps, rows);
                });
                observer.entering(l, self.len + i * CHUNK, normed);
                self.attend_whole(l, whole, matrix(normed, d), sum)?;
            } else {
                let heads = &buffers.heads[i * CHUNK * q_width..][..len * q_width];
                layer.o.apply_in(self.compute, matrix(heads, q_width), sum, &self.scratch);
            }
            adjust(c, sum, layer.attention_post_norm.as_deref());
            add_and_norm(x, sum, layer.ffn_norm.as_deref(), c, normed);
            observer.entering_ffn(l, self.len + i * CHUNK, normed);
            // Zero if experts do everything.
            let width = layer.gate.outputs();
            let gate = sized(&mut buffers.gate, len * width);
            let up = sized(&mut buffers.up, len * width);
            if width == 0 {
                sum.fill(0.0);
            } else {
                let mut jobs = [(&layer.gate, &mut *gate), (&layer.up, &mut *up)];
                apply_all_in(self.compute, &mut jobs, matrix(normed, d), &self.scratch);
                by_rows(gate, width, |first, rows| {
                    ops::gate_in_place(c.activation, rows, &up[first * width..][..rows.len()]);
                });
                observer.gated(l, self.len + i * CHUNK, gate);
                layer.down.apply_in(self.compute, matrix(gate, width), sum, &self.scratch);
            }
            if let (Some(experts), Some(e)) = (&layer.experts, &c.experts) {
                experts.add_into(e, c.activation, matrix(normed, d), sum, self.compute, &self.scratch);
            }
            adjust(c, sum, layer.ffn_post_norm.as_deref());
            by_rows(x, d, |first, rows| ops::add_in_place(rows, &sum[first * d..][..rows.len()]));
        }
        Ok(())
    }

    /// Computes queries, keys and values of consecutive tokens and adds keys and values to the cache.
    fn project(
        &mut self,
        c: &ModelConfig,
        layer: &DecoderLayer,
        l: usize,
        first: usize,
        x: &[f32],
        q: &mut [f32],
        buffers: Projections<'_>,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let (d, dh, n) = (c.hidden, c.head_dim, x.len() / c.hidden);
        let Projections { normed, k, v } = buffers;
        by_rows(normed, d, |first, rows| {
            let x = &x[first * d..][..rows.len()];
            ops::maybe_norm_into(x, layer.attention_norm.as_deref(), c.norm_eps, rows);
        });
        observer.entering(l, first, normed);
        let mut jobs: [(&Linear, &mut [f32]); 3] =
            [(&layer.q, &mut *q), (&layer.k, &mut *k), (&layer.v, &mut *v)];
        apply_all_in(self.compute, &mut jobs, matrix(normed, d), &self.scratch);
        for (x, norm, heads) in [(&mut *q, &layer.q_norm, c.n_heads), (&mut *k, &layer.k_norm, c.n_kv_heads)]
        {
            if let Some(norm) = norm {
                by_rows(x, heads * dh, |_, rows| ops::rms_norm_in_place(rows, norm, c.norm_eps));
            }
        }
        ops::scale_in_place(q, c.multipliers.query);
        observer.before_rotation(l, first, q, k);
        let local = self.local_table.as_ref().filter(|_| self.layers[l].window.is_some());
        if let Some(table) = local.or(self.table.as_ref()).filter(|_| !c.unrotated.contains(&l)) {
            for (x, heads) in [(&mut *q, c.n_heads), (&mut *k, c.n_kv_heads)] {
                by_rows(x, heads * dh, |i, rows| table.rotate_tokens_in_place(first + i, rows, heads, dh));
            }
        }
        observer.projected(l, first, q, k, v);
        let dims = [1, c.n_kv_heads, n, dh];
        let LayerState { cache, packed, streamed, .. } = &mut self.layers[l];
        match packed {
            Some(packed) if !*streamed => packed.take(k, v),
            _ => cache.append(TensorRef::bnhd(k, dims)?, TensorRef::bnhd(v, dims)?)?,
        }
        Ok(())
    }

    /// Attends in layer `l` with the queries of the last tokens.
    fn attend_layer(
        &mut self,
        c: &ModelConfig,
        l: usize,
        q: &[f32],
        sinks: Option<&[f32]>,
        out: &mut [f32],
    ) -> Result<()> {
        let info = self.layers[l].attend(c, q, sinks, out, &mut self.inner)?;
        self.info = std::mem::take(&mut self.info).merge(info);
        Ok(())
    }

    /// Computes the output of layer `l`, which attends as a whole and adds the tokens of `x` to its cache.
    fn attend_whole(
        &mut self,
        l: usize,
        whole: &dyn Layer,
        x: MatRef<'_, f32>,
        out: &mut [f32],
    ) -> Result<()> {
        let Some(cache) = &mut self.layers[l].latents else { unreachable!("made with the layer") };
        let info = whole.forward(x, &mut **cache, out, &mut self.inner[0])?;
        self.info = std::mem::take(&mut self.info).merge(info);
        Ok(())
    }
}

/// Start of a pass.
#[derive(Clone, Copy)]
enum Begin<'a> {
    Tokens(&'a [u32]),
    /// A layer, with the residual stream there.
    Layer(usize, &'a [f32]),
}

/// Computes the logits of normalised hidden states.
fn logits_of(
    c: &ModelConfig,
    weights: &DecoderWeights,
    compute: Compute,
    hidden: &[f32],
    logits: &mut [f32],
    scratch: &Scratch,
) {
    weights.output.apply_in(compute, matrix(hidden, c.hidden), logits, scratch);
    ops::scale_in_place(logits, c.multipliers.logit);
    if let Some(cap) = c.logit_softcap {
        ops::softcap_in_place(logits, cap);
    }
}

/// Appends the normalised final hidden states of the residual stream `x` to `hidden`.
fn final_states(c: &ModelConfig, weights: &DecoderWeights, x: &[f32], hidden: &mut Vec<f32>) {
    let before = hidden.len();
    hidden.extend_from_slice(x);
    by_rows(&mut hidden[before..], c.hidden, |_, rows| {
        ops::rms_norm_in_place(rows, &weights.final_norm, c.norm_eps);
    });
}

struct Projections<'a> {
    normed: &'a mut [f32],
    k: &'a mut [f32],
    v: &'a mut [f32],
}

/// Normalises and scales the output of a layer before the residual sum, as its family does.
fn adjust(c: &ModelConfig, sum: &mut [f32], norm: Option<&[f32]>) {
    if let Some(norm) = norm {
        by_rows(sum, c.hidden, |_, rows| ops::rms_norm_in_place(rows, norm, c.norm_eps));
    }
    ops::scale_in_place(sum, c.multipliers.residual);
}

/// `x ← x + y`; `normed` becomes the normalised result, or the result itself without a norm.
fn add_and_norm(x: &mut [f32], y: &[f32], weight: Option<&[f32]>, c: &ModelConfig, normed: &mut [f32]) {
    let block = |x: &mut [f32], y: &[f32], normed: &mut [f32]| {
        ops::add_in_place(x, y);
        ops::maybe_norm_into(x, weight, c.norm_eps, normed);
    };
    let size = 32 * c.hidden;
    if x.len() <= size {
        block(x, y, normed);
    } else {
        x.par_chunks_mut(size)
            .zip(y.par_chunks(size).zip(normed.par_chunks_mut(size)))
            .for_each(|(x, (y, normed))| block(x, y, normed));
    }
}
