//! Decoding token by token: coresets of older keys, and recent keys uncompressed.
//!
//! Either every complete block is compressed, as in the causal form, with the coresets of a tree kept like the digits
//! of a binary counter; or the first tokens are compressed once, except some at their beginning and end.

use super::attend::{merge_coreset, widen_into};
use super::{BlockCausal, CompressKeys, Coreset, Fallback, Size, ValueRange, Values};
use crate::engine::exact_group;
use crate::group::{Group, GroupIndex, GroupStream};
use crate::workspace::Context;
use crate::{Problem, Real, Result, RunInfo};
use attlas_num::MatRef;
use attlas_num::rng::StreamKey;
use std::ops::Range;

crate::choices! {
    /// Keys that a stream compresses, as a parameter.
    pub enum CacheMode {
        /// Every complete block, as in the causal plan.
        Blocks = "blocks",
        /// The first tokens pushed, once; later ones stay uncompressed.
        Prefix = "prefix",
    }
}

/// The part of the past that a stream compresses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Cache {
    /// Every block once it is complete, as in the causal plan.
    Blocks,
    /// The first tokens pushed, once, except some at their beginning and end.
    Prefix(Prefix),
}

/// Compression of a prefix.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prefix {
    /// First tokens that stay uncompressed.
    pub sinks: usize,
    /// Last tokens that stay uncompressed.
    pub window: usize,
    /// Share of the tokens between these that is kept.
    pub ratio: f64,
    /// Keys kept of each bin.
    pub bin_rank: usize,
}

impl Prefix {
    /// Returns the tokens of a prefix of `n` to compress, and their target size; `None` if there are too few. Tokens
    /// that do not fill a bin join the window.
    pub fn split(&self, n: usize) -> Option<(Range<usize>, Size)> {
        let middle = n.checked_sub(self.sinks.saturating_add(self.window))?;
        let bins = (middle as f64 * self.ratio) as usize / self.bin_rank;
        let bin_len = middle.checked_div(bins)?;
        Some((self.sinks..self.sinks + bins * bin_len, Size { rank: bins * self.bin_rank, bins }))
    }
}

/// A coreset of the blocks `index · 2^level ..`, `2^level` of them.
#[derive(Debug)]
struct Node<T> {
    level: u32,
    index: usize,
    coreset: Coreset<T>,
}

/// Token-by-token attention over coresets of older keys and uncompressed recent keys.
#[derive(Debug)]
pub struct CoresetStream<T, C> {
    plan: BlockCausal<C>,
    cache: Cache,
    stream: StreamKey,
    scale: f64,
    index: GroupIndex,
    /// Compressed keys, oldest first; with a tree at most one of each level.
    nodes: Vec<Node<T>>,
    blocks: usize,
    k: Vec<T>,
    v: Vec<T>,
    d: usize,
    range: ValueRange<T>,
}

impl<T: Real, C: CompressKeys> CoresetStream<T, C> {
    /// Makes an empty stream for one group.
    pub fn new(plan: BlockCausal<C>, cache: Cache, p: &Problem, index: GroupIndex, seed: u64) -> Self {
        Self {
            plan,
            cache,
            stream: index.stream_key(seed),
            scale: T::from_f64(p.scale).to_f64(),
            index,
            nodes: Vec::new(),
            blocks: 0,
            k: Vec::new(),
            v: Vec::new(),
            d: p.d,
            range: ValueRange::empty(p.d_v),
        }
    }

    fn d_v(&self) -> usize {
        self.range.d_v()
    }

    /// Returns the number of uncompressed tokens.
    fn recent(&self) -> usize {
        self.k.len() / self.d
    }

    fn add(&mut self, level: u32, index: usize, coreset: Coreset<T>) {
        match self.nodes.last_mut() {
            // Without a tree all coresets are read together, so they are kept together.
            Some(node) if !self.plan.tree => node.coreset.append(&coreset),
            _ => self.nodes.push(Node { level, index, coreset }),
        }
    }

    fn compress_block(&mut self, cx: Context<'_>) {
        let n = self.plan.block;
        let (k, v) = (MatRef::new(&self.k, n, self.d), MatRef::new(&self.v, n, self.d_v()));
        let (scale, stream) = (self.scale, self.stream);
        let leaf = self.plan.node(k, Values::Plain(v), 0, self.blocks, scale, stream, cx);
        self.add(0, self.blocks, leaf);
        self.blocks += 1;
        self.k.clear();
        self.v.clear();
        while self.plan.tree
            && let [.., left, right] = &self.nodes[..]
            && left.level == right.level
        {
            let (level, index) = (left.level + 1, left.index / 2);
            let mut pair = left.coreset.clone();
            pair.append(&right.coreset);
            let values = Values::Weighted(pair.values());
            let coreset = self.plan.node(pair.keys(), values, level, index, scale, stream, cx);
            self.nodes.truncate(self.nodes.len() - 2);
            self.nodes.push(Node { level, index, coreset });
        }
    }

    fn compress_prefix(
        &mut self,
        prefix: Prefix,
        k: MatRef<'_, T>,
        v: MatRef<'_, T>,
        cx: Context<'_>,
    ) -> usize {
        let Some((middle, size)) = prefix.split(k.rows()) else { return 0 };
        let first = 0..middle.start;
        let sinks = Coreset::verbatim(k.sub_rows(first.clone()), Values::Plain(v.sub_rows(first)));
        let (k, v) = (k.sub_rows(middle.clone()), v.sub_rows(middle.clone()));
        let stream = self.stream.named("prefix");
        let far = self.plan.compressor.compress(k, Values::Plain(v), size, self.scale, stream, cx);
        self.nodes.push(Node { level: 0, index: 0, coreset: sinks });
        self.nodes.push(Node { level: 0, index: 1, coreset: far });
        middle.end
    }
}

impl<T: Real, C: CompressKeys> GroupStream<T> for CoresetStream<T, C> {
    fn push(&mut self, k: MatRef<'_, T>, v: MatRef<'_, T>, cx: Context<'_>) -> Result<()> {
        let empty = self.nodes.is_empty() && self.k.is_empty();
        let done = match self.cache {
            Cache::Prefix(prefix) if empty => self.compress_prefix(prefix, k, v, cx),
            _ => 0,
        };
        for (j, (k, v)) in k.iter_rows().zip(v.iter_rows()).enumerate() {
            self.range.include(v);
            if j < done {
                continue;
            }
            if self.cache == Cache::Blocks && self.recent() == self.plan.block {
                self.compress_block(cx);
            }
            self.k.extend_from_slice(k);
            self.v.extend_from_slice(v);
        }
        Ok(())
    }

    fn attend(
        &mut self,
        q: MatRef<'_, T>,
        scale: T,
        out: &mut [T],
        lse: &mut [T],
        cx: Context<'_>,
    ) -> Result<RunInfo> {
        let (d_v, n) = (self.d_v(), self.recent());
        let (k, v) = (MatRef::new(&self.k, n, self.d), MatRef::new(&self.v, n, d_v));
        let mut info = exact_group(&mut Group::decode(q, k, v, scale, out, lse, self.index, cx)?)?;
        if self.nodes.is_empty() {
            return Ok(info);
        }
        let mut average = cx.scratch.take::<T>(q.rows() * (d_v + 2));
        let mut total = cx.scratch.take_copy::<T>(lse);
        widen_into(out, d_v, &mut average);
        for node in self.nodes.iter().filter(|node| !node.coreset.is_empty()) {
            info.keys_visited += (q.rows() * node.coreset.len()) as u64;
            merge_coreset(q, &node.coreset, scale, cx, &mut average, &mut total);
        }
        let mut finished = cx.scratch.take::<T>(d_v);
        for (i, average) in average.chunks_exact(d_v + 2).enumerate() {
            let sound = self.plan.finish.row(average, &self.range, &mut finished, &mut total[i]);
            // The keys of a coreset are gone, so exact attention can only use the recent ones.
            if sound || self.plan.finish.fallback == Fallback::Zero {
                out[i * d_v..(i + 1) * d_v].copy_from_slice(&finished);
                lse[i] = total[i];
            }
            info.fallback_rows += u64::from(!sound);
        }
        Ok(info)
    }

    fn state_bytes(&self) -> usize {
        let cached: usize = self.nodes.iter().map(|n| n.coreset.bytes()).sum();
        cached + (self.k.len() + self.v.len()) * size_of::<T>()
    }
}
