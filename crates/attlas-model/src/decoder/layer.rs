//! Running state of a layer: its cache, the methods of its heads, and their streams and plans.

use super::ONE_PROBLEM;
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::kept::Packed;
use crate::ops;
use crate::recipe::HeadRun;
use attlas::cache::KvCache;
use attlas::layer::LayerCache;
use attlas::method::Law;
use attlas::{
    DType, Method, Options, Out, Plan, Problem, Qkv, RunInfo, Stream, TensorMut, TensorRef, Workspace,
    registry,
};
use attlas_num::par::*;
use std::ops::Range;

/// Decoding of a layer's heads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerDecoding {
    /// The layer.
    pub layer: usize,
    /// Heads, their method for prompts, and the one that decodes: exact attention if a method has no stream.
    pub methods: Vec<(Range<usize>, &'static str, &'static str)>,
    /// True if a head's method for new tokens has no stream and exact attention decodes instead.
    pub falls_back: bool,
    /// True if keys and values are stored.
    pub keeps_keys: bool,
}

/// Creates the error for a method that cannot include a logit without a key.
pub(super) fn without_lse(method: &Method) -> Error {
    let reasons = vec!["heads have a logit beside those of the keys, and it has no log-sum-exp".to_owned()];
    attlas::Error::Unsupported { method: method.id.into(), reasons }.into()
}

/// Creates the error for a method that cannot run in a layer with a window.
pub(super) fn windowed(method: &Method, layer: usize, window: usize, tokens: usize) -> Error {
    let reasons = vec![format!("layer {layer} sees the last {window} tokens only, and {tokens} are cached")];
    attlas::Error::Unsupported { method: method.id.into(), reasons }.into()
}

/// Adds one logit per head to the softmax of every row; it has no value. Rows of `out` begin with the first of these
/// heads and are `stride` apart.
pub(super) fn weigh_sinks(sinks: &[f32], lse: &[f32], d: usize, stride: usize, out: &mut [f32]) {
    let n = lse.len() / sinks.len().max(1);
    for (h, (lse, sink)) in lse.chunks_exact(n.max(1)).zip(sinks).enumerate() {
        for (i, lse) in lse.iter().enumerate() {
            let row = &mut out[i * stride + h * d..][..d];
            ops::scale_in_place(row, 1.0 / (1.0 + (sink - lse).exp()));
        }
    }
}

/// Tokens for which the first plan of a layer has room.
const ROOM: usize = 256;

/// Cache and methods of one layer.
#[derive(Debug)]
pub(super) struct LayerState {
    index: usize,
    pub(super) window: Option<usize>,
    pub(super) parts: Vec<Part>,
    pub(super) cache: KvCache<f32>,
    /// True if it stores no keys: everything is in the streams, and the cache has only the tokens of one call.
    pub(super) streamed: bool,
    /// Tokens in the cache after the call.
    pub(super) ahead: usize,
    /// Number of tokens below which new tokens attend exactly.
    pub(super) decode_from: usize,
    /// Packed keys and values, if they are packed; the cache has them unpacked while the layer attends.
    pub(super) packed: Option<Packed>,
    /// True if the current call attends to packed keys where they lie.
    pub(super) direct: bool,
    /// The cache of a layer that attends as a whole, which uses none of the other fields.
    pub(super) latents: Option<Box<dyn LayerCache>>,
}

/// Heads of a layer that share one method.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) run: HeadRun,
    /// The stream of heads that decode by one, created on first use.
    stream: Option<Box<dyn Stream>>,
    /// Plans of exact attention, for prompts and for decoding, with room for more tokens than there are.
    plans: [Option<Box<dyn Plan>>; 2],
    /// Log-sum-exps of a call, if an extra logit needs them.
    lse: Vec<f32>,
    /// Output for a new token, computed in parallel with the other parts.
    rows: Vec<f32>,
    done: Option<Result<RunInfo>>,
}

/// Inputs of a call that all parts of a layer share.
#[derive(Clone, Copy)]
struct Call<'a> {
    c: &'a ModelConfig,
    layer: usize,
    window: Option<usize>,
    cache: &'a KvCache<f32>,
    streamed: bool,
    ahead: usize,
    decode_from: usize,
    /// Queries of the last tokens, `[1, heads, n, head_dim]`.
    q: TensorRef<'a, f32>,
    sinks: Option<&'a [f32]>,
}

impl LayerState {
    pub(super) fn new(index: usize, parts: Vec<HeadRun>, c: &ModelConfig) -> Self {
        Self {
            index,
            window: c.windows.get(index).copied().flatten(),
            parts: parts.into_iter().map(Part::new).collect(),
            cache: KvCache::new(1, c.n_kv_heads, c.head_dim, c.head_dim, 0),
            streamed: false,
            ahead: 0,
            decode_from: 0,
            packed: None,
            direct: false,
            latents: None,
        }
    }

    pub(super) fn bytes(&self) -> usize {
        let latents = self.latents.as_ref().map_or(0, |c| c.bytes());
        let packed = self.packed.as_ref().map_or(0, Packed::bytes);
        latents + packed + self.cache.bytes() + self.streams().map(|s| s.state_bytes()).sum::<usize>()
    }

    pub(super) fn streams(&self) -> impl Iterator<Item = &dyn Stream> {
        self.parts.iter().filter_map(|p| p.stream.as_deref())
    }

    /// Returns true if a call with this number of tokens may be split.
    pub(super) fn chunks(&self, tokens: usize) -> bool {
        let alike = |p: &Part| {
            let (reads, decodes) = (p.run.attending(false), p.run.attending(true));
            let same = std::ptr::eq(reads.method, decodes.method) && reads.options == decodes.options;
            same && reads.method.keeps_with(&reads.options, Law::DecodeIsPrefill)
        };
        let read = || tokens > ONE_PROBLEM && self.parts.iter().all(alike);
        let begun = || self.streams().next().is_some();
        self.parts.iter().all(|p| p.run.is_baseline()) || self.streamed && (begun() || read())
    }

    /// Returns true if keys and values stay in the cache as numbers.
    pub(super) fn keeps_numbers(&self) -> bool {
        !self.streamed && self.packed.is_none()
    }

    /// Returns true if all heads decode by streams.
    pub(super) fn can_stream(&self, c: &ModelConfig) -> Result<bool> {
        // Exact attention of the first new tokens needs the keys.
        let whole = self.latents.is_some() || self.window.is_some() || self.parts.is_empty();
        if whole || self.decode_from > 0 {
            return Ok(false);
        }
        for part in &self.parts {
            if part.run.attending(true).is_baseline() || part.new_stream(c, ROOM)?.is_none() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    pub(super) fn decoding(&self, c: &ModelConfig) -> LayerDecoding {
        let kind = |part: &Part| {
            let streams = || part.new_stream(c, ROOM).is_ok_and(|s| s.is_some());
            let choice = part.run.attending(true);
            if choice.is_baseline() || streams() { choice.method.id } else { registry::baseline().id }
        };
        let whole = self.latents.is_some();
        LayerDecoding {
            layer: self.index,
            methods: self.parts.iter().map(|p| (p.run.heads.clone(), p.run.method.id, kind(p))).collect(),
            falls_back: self.parts.iter().any(|p| p.run.attending(true).method.id != kind(p)),
            keeps_keys: !self.streamed || whole,
        }
    }

    /// Returns true if `n` tokens can attend to packed keys where they lie: one, in a layer that decodes exactly.
    pub(super) fn reads_packed(&self, n: usize) -> bool {
        // Products of packed keys are computed in single precision, whatever the options of exact attention say.
        let exact = |p: &Part| p.run.attending(true).is_baseline();
        let some = self.packed.as_ref().is_some_and(|packed| packed.len() > 0);
        n == 1 && some && !self.streamed && self.parts.iter().all(exact)
    }

    /// Attends with the queries `[heads, head_dim]` of one token to packed keys.
    pub(super) fn attend_packed(
        &mut self,
        c: &ModelConfig,
        q: &[f32],
        sinks: Option<&[f32]>,
        out: &mut [f32],
        ws: &Workspace,
    ) -> RunInfo {
        let Some(packed) = &self.packed else { unreachable!("seen by `reads_packed`") };
        let (n_k, d) = (packed.len(), c.head_dim);
        let oldest = self.window.map_or(0, |w| n_k.saturating_sub(w));
        let mut lse = ws.scratch().take::<f32>(c.n_heads);
        let on = (ws.schedule(), ws.scratch());
        packed.attend(q, oldest..n_k, c.attention_softcap, on, out, &mut lse);
        if let Some(sinks) = sinks {
            weigh_sinks(sinks, &lse, d, c.n_heads * d, out);
        }
        RunInfo::visited((c.n_heads * (n_k - oldest)) as u64)
    }

    /// Prepares the cache of a layer that stores no numbers in it, in storage shared by all layers.
    pub(super) fn begin(&mut self, spare: &mut Option<KvCache<f32>>) -> Result<()> {
        if self.keeps_numbers() || self.direct {
            return Ok(());
        }
        if let Some(storage) = spare.take() {
            self.cache = storage;
        }
        self.cache.truncate(0);
        match &self.packed {
            Some(packed) if !self.streamed => packed.unpack_into(&mut self.cache),
            _ => Ok(()),
        }
    }

    /// Returns the shared storage.
    pub(super) fn end(&mut self, spare: &mut Option<KvCache<f32>>) {
        if !std::mem::take(&mut self.direct) && !self.keeps_numbers() {
            let (_, heads, d) = self.cache.sizes();
            let mut storage = std::mem::replace(&mut self.cache, KvCache::new(1, heads, d, d, 0));
            storage.truncate(0);
            *spare = Some(storage);
        }
    }

    pub(super) fn truncate(&mut self, len: usize) {
        self.latents.iter_mut().for_each(|c| c.truncate(len));
        if let Some(packed) = &mut self.packed {
            packed.truncate(len);
            self.forget_streams();
        }
        if self.streamed && len == 0 {
            self.forget_streams();
        }
        if len < self.cache.len() {
            self.cache.truncate(len);
            // Streams cannot go back; they are refilled from the cache.
            self.forget_streams();
        }
    }

    fn forget_streams(&mut self) {
        self.parts.iter_mut().for_each(|p| p.stream = None);
    }

    /// Attends with queries `[1, heads, n, head_dim]` of the last tokens. For a new token the parts run in parallel,
    /// each with its own workspace: one head's choice of keys is too little work for several threads.
    pub(super) fn attend(
        &mut self,
        c: &ModelConfig,
        q: TensorRef<'_, f32>,
        sinks: Option<&[f32]>,
        out: &mut [f32],
        workspaces: &mut Vec<Workspace>,
    ) -> Result<RunInfo> {
        let Self { index: layer, window, parts, cache, streamed, ahead, decode_from, .. } = self;
        let (layer, window, streamed, ahead) = (*layer, *window, *streamed, *ahead);
        let decode_from = *decode_from;
        let call = Call { c, layer, window, cache, streamed, ahead, decode_from, q, sinks };
        let mut info = RunInfo::default();
        if parts.len() == 1 || q.dims()[2] > 1 {
            for part in parts {
                let out = &mut out[part.run.heads.start * c.head_dim..];
                info = info.merge(part.attend(&call, out, &mut workspaces[0])?);
            }
            return Ok(info);
        }
        while workspaces.len() < parts.len() {
            workspaces.push(workspaces[0].sibling());
        }
        parts.par_iter_mut().zip(workspaces.par_iter_mut()).with_max_len(1).for_each(|(part, ws)| {
            let mut rows = std::mem::take(&mut part.rows);
            rows.resize(part.run.heads.len() * c.head_dim, 0.0);
            part.done = Some(part.attend(&call, &mut rows, ws));
            part.rows = rows;
        });
        for part in parts {
            info = info.merge(part.done.take().unwrap_or_else(|| Ok(RunInfo::default()))?);
            out[part.run.heads.start * c.head_dim..][..part.rows.len()].copy_from_slice(&part.rows);
        }
        Ok(info)
    }
}

impl Part {
    fn new(run: HeadRun) -> Self {
        Self { run, stream: None, plans: [None, None], lse: Vec::new(), rows: Vec::new(), done: None }
    }

    /// Creates an empty stream, planned as for a prompt of `tokens` tokens.
    fn new_stream(&self, c: &ModelConfig, tokens: usize) -> Result<Option<Box<dyn Stream>>> {
        let run = &self.run;
        let problem = Problem::new(run.heads.len(), tokens, c.head_dim).with_kv_heads(run.groups.len());
        let problem = problem.causal().with_softcap(c.attention_softcap);
        Ok(run.attending(true).plan(&problem)?.stream(DType::F32))
    }

    /// Computes the attention of the part; rows of `out` begin with its first head.
    fn attend(&mut self, call: &Call<'_>, out: &mut [f32], ws: &mut Workspace) -> Result<RunInfo> {
        let Some(sinks) = call.sinks else { return self.attend_keys(call, None, out, ws) };
        let of_run = |decodes: bool| self.run.attending(decodes).method;
        if let Some(method) = [of_run(false), of_run(true)].into_iter().find(|m| !m.claims.lse) {
            return Err(without_lse(method));
        }
        let (heads, n) = (self.run.heads.clone(), call.q.dims()[2]);
        let mut lse = std::mem::take(&mut self.lse);
        lse.clear();
        lse.resize(heads.len() * n, 0.0);
        let result = self.attend_keys(call, Some(&mut lse), out, ws);
        if result.is_ok() {
            let d = call.c.head_dim;
            weigh_sinks(&sinks[heads], &lse, d, call.c.n_heads * d, out);
        }
        self.lse = lse;
        result
    }

    /// Computes attention over the keys alone, with the log-sum-exp of every row, head by head, if it is needed.
    fn attend_keys(
        &mut self,
        call: &Call<'_>,
        lse: Option<&mut [f32]>,
        out: &mut [f32],
        ws: &mut Workspace,
    ) -> Result<RunInfo> {
        let (c, run) = (call.c, &self.run);
        let (n, n_k, dh) = (call.q.dims()[2], call.cache.len(), c.head_dim);
        let problem = Problem::new(run.heads.len(), n, dh).with_kv_heads(run.groups.len()).causal();
        let problem = problem.with_softcap(c.attention_softcap);
        let q = call.q.heads(run.heads.clone());
        let strides = [0, dh, c.n_heads * dh];
        let out = TensorMut::new(out, [1, run.heads.len(), n, dh], strides)?;
        let mut out = Out { o: out, lse }.into();
        let keys = call.cache.keys()?.heads(run.groups.clone());
        let values = call.cache.values()?.heads(run.groups.clone());

        // Keys outside the window of the first query are left out.
        let window = call.window.filter(|&w| n_k > w);
        let decodes = n == 1 && n_k > 1;
        let choice = run.attending(decodes);
        if let Some(window) = window.filter(|_| !choice.is_baseline()) {
            return Err(windowed(choice.method, call.layer, window, n_k));
        }
        let oldest = window.map_or(0, |w| (n_k - n + 1).saturating_sub(w));
        let (keys, values) = (keys.rows(oldest..n_k), values.rows(oldest..n_k));
        let problem = problem.with_lens(n, n_k - oldest);
        let inputs = Qkv::new(q, keys, values).into();

        if call.streamed {
            if self.stream.is_none() {
                self.stream = self.new_stream(c, call.ahead.max(2))?;
            }
            let Some(stream) = &mut self.stream else { unreachable!("seen when keys were forgotten") };
            if stream.is_empty() && n > 1 && n == call.ahead {
                let info = self.run.attending(false).plan(&problem)?.execute(&inputs, &mut out, ws)?;
                stream.push(keys.into(), values.into(), ws)?;
                return Ok(info);
            }
            return Ok(stream.extend(&inputs, &mut out, ws)?);
        }
        if decodes && !choice.is_baseline() && n_k >= call.decode_from {
            if self.stream.is_none() {
                // Planned as the prompt would be.
                let plan = choice.plan(&problem.with_lens(n_k, n_k))?;
                self.stream = plan.stream(DType::F32);
            }
            if let Some(stream) = &mut self.stream {
                let missing = stream.len()..n_k;
                stream.push(keys.rows(missing.clone()).into(), values.rows(missing).into(), ws)?;
                return Ok(stream.attend(q.into(), &mut out, ws)?);
            }
        }
        let windowed = window.filter(|_| n > 1);
        if windowed.is_none() && (decodes || choice.is_baseline()) {
            // A plan of exact attention does not depend on the lengths: one serves all tokens that fit.
            let fits = |p: &Problem| n <= p.n_q && problem.n_k <= p.n_k;
            let kept = &mut self.plans[usize::from(decodes)];
            if !kept.as_ref().is_some_and(|plan| fits(plan.problem())) {
                let room = problem.n_k.max(n).max(ROOM).next_power_of_two();
                let options = if choice.is_baseline() { choice.options.clone() } else { Options::new() };
                *kept = Some(registry::baseline().plan(&problem.with_lens(room, room), &options)?);
            }
            if let Some(plan) = kept {
                return Ok(plan.execute(&inputs, &mut out, ws)?);
            }
        }
        let plan = match windowed {
            Some(w) => {
                let (method, options) = registry::sliding_window(w);
                method.plan(&problem, &options)?
            }
            None => choice.plan(&problem)?,
        };
        Ok(plan.execute(&inputs, &mut out, ws)?)
    }
}
