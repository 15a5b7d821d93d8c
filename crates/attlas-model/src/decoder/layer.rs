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
    /// Packed keys and values, if they are packed; the cache has those unpacked that the current call needs.
    pub(super) packed: Option<Packed>,
    /// True if exact attention of the current call reads packed keys where they lie.
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
    /// True once the method for new tokens turned out to have no stream.
    streamless: bool,
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
    /// Packed keys, if exact attention reads them where they lie; the cache then has the new token alone.
    packed: Option<&'a Packed>,
    streamed: bool,
    ahead: usize,
    decode_from: usize,
    /// Queries of the last `n` tokens, `[n, heads, head_dim]`.
    q: &'a [f32],
    n: usize,
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

    /// Returns true if `n` tokens attend without unpacking earlier keys: one, if each head attends exactly or has a
    /// stream that knows all earlier tokens.
    pub(super) fn reads_packed(&self, n: usize) -> bool {
        // Products of packed keys are computed in single precision, whatever the options of exact attention say.
        let earlier = self.packed.as_ref().map_or(0, Packed::len);
        let ready = |p: &Part| {
            p.decodes_exactly(earlier + 1, self.decode_from)
                || p.stream.as_ref().is_some_and(|s| s.len() == earlier)
        };
        // Other methods are refused where a window leaves out keys.
        let whole = self.window.is_none_or(|w| earlier < w);
        let fits = |p: &Part| whole || p.run.attending(true).is_baseline();
        n == 1 && earlier > 0 && !self.streamed && self.parts.iter().all(|p| ready(p) && fits(p))
    }

    /// Takes the storage shared by all layers if the current call needs numbers and the layer stores none.
    pub(super) fn begin(&mut self, spare: &mut Option<KvCache<f32>>) {
        if !self.keeps_numbers() {
            if let Some(storage) = spare.take() {
                self.cache = storage;
            }
            self.cache.truncate(0);
        }
    }

    /// Unpacks the keys and values that the current call reads as numbers: all, or the new token's for streams.
    pub(super) fn unpack(&mut self) {
        let Some(packed) = self.packed.as_ref().filter(|_| !self.streamed) else { return };
        if !self.direct {
            packed.unpack_into(0, &mut self.cache);
        } else if self.streams().next().is_some() {
            packed.unpack_into(packed.len() - 1, &mut self.cache);
        }
    }

    /// Returns the shared storage.
    pub(super) fn end(&mut self, spare: &mut Option<KvCache<f32>>) {
        self.direct = false;
        if !self.keeps_numbers() {
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

    /// Attends with queries `[n, heads, head_dim]` of the last tokens. For a new token the parts run in parallel, each
    /// with its own workspace: one head's choice of keys is too little work for several threads.
    pub(super) fn attend(
        &mut self,
        c: &ModelConfig,
        q: &[f32],
        sinks: Option<&[f32]>,
        out: &mut [f32],
        workspaces: &mut Vec<Workspace>,
    ) -> Result<RunInfo> {
        let Self { index: layer, window, parts, cache, packed, direct, streamed, ahead, decode_from, .. } =
            self;
        let (layer, window, streamed, ahead) = (*layer, *window, *streamed, *ahead);
        let (decode_from, packed) = (*decode_from, packed.as_ref().filter(|_| *direct));
        let n = q.len() / (c.n_heads * c.head_dim);
        let call = Call { c, layer, window, cache, packed, streamed, ahead, decode_from, q, n, sinks };
        let mut info = RunInfo::default();
        if parts.len() == 1 || n > 1 {
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
        let (lse, rows) = (Vec::new(), Vec::new());
        Self { run, stream: None, streamless: false, plans: [None, None], lse, rows, done: None }
    }

    /// Returns true if the newest of `n_k` tokens attends exactly.
    fn decodes_exactly(&self, n_k: usize, decode_from: usize) -> bool {
        self.run.attending(true).is_baseline() || n_k < decode_from || self.streamless
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
        let (heads, n) = (self.run.heads.clone(), call.n);
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
        if let Some(packed) = call.packed {
            return self.attend_packed(call, packed, lse, out, ws);
        }
        let (c, run) = (call.c, &self.run);
        let (n, n_k, dh) = (call.n, call.cache.len(), c.head_dim);
        let problem = Problem::new(run.heads.len(), n, dh).with_kv_heads(run.groups.len()).causal();
        let problem = problem.with_softcap(c.attention_softcap);
        let q = call.queries(&run.heads)?;
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
        if decodes && !self.decodes_exactly(n_k, call.decode_from) {
            if self.stream.is_none() {
                // Planned as the prompt would be.
                let plan = choice.plan(&problem.with_lens(n_k, n_k))?;
                self.stream = plan.stream(DType::F32);
                self.streamless = self.stream.is_none();
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

    /// Attends with one token, exactly to packed keys where they lie, or by a stream that knows the earlier tokens.
    fn attend_packed(
        &mut self,
        call: &Call<'_>,
        packed: &Packed,
        lse: Option<&mut [f32]>,
        out: &mut [f32],
        ws: &mut Workspace,
    ) -> Result<RunInfo> {
        let (c, heads, groups) = (call.c, self.run.heads.clone(), self.run.groups.clone());
        let (n_k, dh) = (packed.len(), c.head_dim);
        let out = &mut out[..heads.len() * dh];
        if !self.decodes_exactly(n_k, call.decode_from) {
            let Some(stream) = &mut self.stream else { unreachable!("seen by `reads_packed`") };
            let out = TensorMut::new(out, [1, heads.len(), 1, dh], [0, dh, dh])?;
            let (keys, values) =
                (call.cache.keys()?.heads(groups.clone()), call.cache.values()?.heads(groups));
            stream.push(keys.into(), values.into(), ws)?;
            return Ok(stream.attend(call.queries(&heads)?.into(), &mut Out { o: out, lse }.into(), ws)?);
        }
        let oldest = call.window.map_or(0, |w| n_k.saturating_sub(w));
        let q = &call.q[heads.start * dh..heads.end * dh];
        let on = (ws.schedule(), ws.scratch());
        let mut own = ws.scratch().take::<f32>(if lse.is_some() { 0 } else { heads.len() });
        let lse = lse.unwrap_or(&mut own);
        packed.attend(q, (groups, oldest..n_k), c.attention_softcap, on, out, lse);
        Ok(RunInfo::visited((heads.len() * (n_k - oldest)) as u64))
    }
}

impl<'a> Call<'a> {
    /// Returns the queries of `heads`.
    fn queries(&self, heads: &Range<usize>) -> Result<TensorRef<'a, f32>> {
        let all = TensorRef::bnhd(self.q, [1, self.c.n_heads, self.n, self.c.head_dim])?;
        Ok(all.heads(heads.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kept::CacheFormat;
    use crate::{Model, Recipe};
    use attlas::Schedule;
    use std::path::Path;

    /// Outputs of the tokens after a prompt, each of which reads packed keys in place where it can or never does.
    fn outputs(recipe: &str, format: CacheFormat, in_place: bool, threads: usize) -> Vec<f32> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens/model/families/granite");
        let c = Model::open(&folder).unwrap().config;
        let parts = Recipe::from_toml(recipe).unwrap().resolve(&c).unwrap().swap_remove(0);
        assert!(parts.len() > 1, "the layer is mixed");
        let mut layer = LayerState::new(0, parts, &c);
        layer.decode_from = Recipe::from_toml(recipe).unwrap().decode_from;
        layer.packed = Packed::new(format, c.n_kv_heads, c.head_dim);
        let mut workspaces = vec![Workspace::new(Schedule { threads, ..Schedule::default() }).unwrap()];
        let (mut spare, mut all, mut unpacked) = (None, Vec::new(), 0usize);
        let number = |i: usize| ((i * 7919 % 2003) as f32 - 1000.0) / 400.0;
        let mut seed = 0;
        for n in [530usize, 1, 1, 1, 1, 1, 1] {
            let mut rows = |heads: usize| {
                seed += 1;
                (0..n * heads * c.head_dim).map(|i| number(i + seed * 101)).collect::<Vec<f32>>()
            };
            let (q, k, v) = (rows(c.n_heads), rows(c.n_kv_heads), rows(c.n_kv_heads));
            layer.direct = in_place && layer.reads_packed(n);
            layer.begin(&mut spare);
            layer.packed.as_mut().unwrap().take(&k, &v);
            layer.unpack();
            unpacked += usize::from(layer.cache.len() >= 530);
            let mut out = vec![f32::NAN; q.len()];
            layer.attend(&c, &q, None, &mut out, &mut workspaces).unwrap();
            layer.end(&mut spare);
            assert!(layer.cache.is_empty() && out.iter().all(|x| x.is_finite()));
            all.extend(out);
        }
        // The prompt, and the first token that looks for a stream.
        assert_eq!(unpacked, if in_place { 2 } else { 7 });
        all
    }

    #[test]
    fn heads_of_a_mixed_layer_read_packed_keys_in_place_to_the_same_bits() {
        let rule = "[[rule]]\nheads = '0'\nmethod = ";
        let window = "'sink_window'\nparams = { sinks = 4, window = 64 }\n";
        // A method with a stream, one without, and a stream that begins later.
        for recipe in [
            format!("version = 1\n{rule}{window}"),
            format!("version = 1\n{rule}'smyrf'\n"),
            format!("version = 1\ndecode_from = 534\n{rule}{window}"),
        ] {
            for format in [CacheFormat::Bf16, CacheFormat::Q8] {
                let want = outputs(&recipe, format, false, 2);
                for threads in [1, 2] {
                    let got = outputs(&recipe, format, true, threads);
                    assert!(got.iter().map(|x| x.to_bits()).eq(want.iter().map(|x| x.to_bits())), "{recipe}");
                }
            }
        }
    }
}
