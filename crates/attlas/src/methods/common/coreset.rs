//! Key compression: few weighted keys that stand for many, and everything a method needs around them.
//!
//! A [`Coreset`] of keys $k_1, \dots, k_n$ with values $v_j$ holds keys $k_s$ with rows $[V_s \mid w_s]$ so that
//! $\sum_s e^{\beta q^\top k_s} [V_s \mid w_s] \approx \sum_j e^{\beta q^\top k_j} [v_j \mid 1]$ for every query. The
//! weights may be negative, so they cannot be logit biases. Instead they travel as further columns of the values:
//! the exact kernel gives softmax averages of $[V \mid w \mid |w|]$, such averages over disjoint keys merge by
//! log-sum-exp like any others, and at the end the first columns are divided by that of $w$. Exact tokens carry
//! $[v \mid 1 \mid 1]$. The last column is the size of the sum before cancellation: a denominator far below it is noise,
//! and the row is answered by a [`Fallback`].
//!
//! [`BlockCausal`] makes a causal method of any [`CompressKeys`]: queries see the keys of their own block exactly
//! and the coresets of all earlier, complete blocks, each compressed once. With `tree`, coresets of equally many
//! blocks are joined and compressed again, so that a query sees logarithmically many of them. Strictly causal by
//! construction: what is compressed lies before every query that sees it, and nothing is shared between blocks.
//! [`CoresetStream`] is the same token by token, or compresses the first tokens it is given once.

use super::{exact_group, exact_rows, exact_scratch_bytes};
use crate::group::{Group, GroupIndex, GroupStream, RowBlock};
use crate::workspace::Context;
use crate::{Problem, Real, Result, RunInfo};
use attlas_num::MatRef;
use attlas_num::kernels::{Band, merge_lse};
use attlas_num::rng::StreamKey;
use rayon::prelude::*;
use std::fmt::Debug;
use std::ops::Range;

/// Values of keys that are to be compressed.
#[derive(Clone, Copy, Debug)]
pub enum Values<'a, T> {
    /// One row per key, of weight one.
    Plain(MatRef<'a, T>),
    /// The rows $[V \mid w \mid |w|]$ of a coreset.
    Weighted(MatRef<'a, T>),
}

impl<'a, T: Real> Values<'a, T> {
    /// Width of the values proper.
    pub fn d_v(&self) -> usize {
        match self {
            Values::Plain(v) => v.cols(),
            Values::Weighted(v) => v.cols() - 2,
        }
    }

    /// The rows `range`.
    #[must_use]
    pub fn rows(&self, range: Range<usize>) -> Self {
        match self {
            Values::Plain(v) => Values::Plain(v.sub_rows(range)),
            Values::Weighted(v) => Values::Weighted(v.sub_rows(range)),
        }
    }

    /// The values proper and the weight of row `j`.
    pub fn row(&self, j: usize) -> (&'a [T], T) {
        match self {
            Values::Plain(v) => (v.row(j), T::ONE),
            Values::Weighted(v) => {
                let row = v.row(j);
                (&row[..row.len() - 2], row[row.len() - 2])
            }
        }
    }

    /// Writes `factor` times $[v_j \mid w_j]$.
    pub fn scaled_into(&self, j: usize, factor: T, out: &mut [T]) {
        let (v, w) = self.row(j);
        out.iter_mut().zip(v).for_each(|(o, &v)| *o = factor * v);
        out[v.len()] = factor * w;
    }
}

/// Weighted keys that stand for many.
#[derive(Clone, Debug)]
pub struct Coreset<T> {
    keys: Vec<T>,
    values: Vec<T>,
    len: usize,
    d: usize,
    d_v: usize,
}

impl<T: Real> Coreset<T> {
    /// No key yet.
    pub fn empty(d: usize, d_v: usize) -> Self {
        Self { keys: Vec::new(), values: Vec::new(), len: 0, d, d_v }
    }

    /// All the keys with their values as they are.
    pub fn verbatim(keys: MatRef<'_, T>, values: Values<'_, T>) -> Self {
        let mut all = Self::empty(keys.cols(), values.d_v());
        for j in 0..keys.rows() {
            let (v, w) = values.row(j);
            all.push(keys.row(j), v, w);
        }
        all
    }

    /// Adds a key with its values and its weight.
    pub fn push(&mut self, key: &[T], values: &[T], weight: T) {
        self.keys.extend_from_slice(key);
        self.values.extend_from_slice(values);
        self.values.extend_from_slice(&[weight, weight.abs()]);
        self.len += 1;
    }

    /// Adds all keys of another one.
    pub fn append(&mut self, other: &Self) {
        self.keys.extend_from_slice(&other.keys);
        self.values.extend_from_slice(&other.values);
        self.len += other.len;
    }

    /// Number of keys.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Holds no key.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The keys, one per row.
    pub fn keys(&self) -> MatRef<'_, T> {
        MatRef::new(&self.keys, self.len, self.d)
    }

    /// The rows $[V \mid w \mid |w|]$.
    pub fn values(&self) -> MatRef<'_, T> {
        MatRef::new(&self.values, self.len, self.d_v + 2)
    }

    /// Every number is finite.
    pub fn is_finite(&self) -> bool {
        self.keys.iter().chain(&self.values).all(|x| x.is_finite())
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        (self.keys.len() + self.values.len()) * size_of::<T>()
    }
}

/// How far to compress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Keys to keep in all.
    pub rank: usize,
    /// Contiguous parts to compress apart from each other.
    pub bins: usize,
}

/// A way to compress keys.
pub trait CompressKeys: Clone + Debug + Send + Sync + 'static {
    /// Compresses keys for attention with the logits `scale · qᵀk`. Whatever goes wrong, an answer is given, if
    /// need be all the keys as they are.
    fn compress<T: Real>(
        &self,
        keys: MatRef<'_, T>,
        values: Values<'_, T>,
        size: Size,
        scale: f64,
        stream: StreamKey,
        cx: Context<'_>,
    ) -> Coreset<T>;

    /// How far `n` keys are compressed if nothing else is asked for.
    fn size(&self, n: usize) -> Size;

    /// Upper bound on the scratch bytes to compress `n` keys to `size`, for elements of `bytes` bytes.
    fn scratch_bytes(&self, p: &Problem, n: usize, size: Size, threads: usize, bytes: usize) -> usize;
}

crate::choices! {
    /// What a row gets whose denominator has cancelled.
    pub enum Fallback {
        /// Exact attention; in a stream, whose older keys are gone, exact attention to the keys that are held as
        /// they are.
        Exact = "exact_row",
        /// Zero, clipped to the range of the values, with no weight in a merge.
        Zero = "zero_clip",
    }
}

crate::choices! {
    /// What a stream compresses, as a parameter.
    pub enum CacheMode {
        /// Every complete block, as the causal plan does.
        Blocks = "blocks",
        /// The first tokens it is given, once; later ones are kept as they are.
        Prefix = "prefix",
    }
}

/// How averages of $[V \mid w \mid |w|]$ become outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finish {
    /// Clip every column to the range of the values seen.
    pub clip: bool,
    /// What to do where the denominator has cancelled.
    pub fallback: Fallback,
}

impl Finish {
    /// Divides one row; the log-sum-exp becomes that of the weighted sum. `false` if the denominator cancelled:
    /// then the row is zero, clipped.
    fn row<T: Real>(&self, average: &[T], range: &ValueRange<T>, out: &mut [T], lse: &mut T) -> bool {
        let d_v = out.len();
        let (den, size) = (average[d_v], average[d_v + 1]);
        let noise = T::from_f64(if T::ROUNDOFF < 1e-10 { 1e-12 } else { 1e-6 });
        // NaN is sound here: it belongs in the output.
        let sound = den.is_nan() || size.is_nan() || den > noise * size;
        if sound {
            out.iter_mut().zip(average).for_each(|(o, &a)| *o = a / den);
            *lse += den.ln();
        } else {
            out.fill(T::ZERO);
            *lse = T::NEG_INFINITY;
        }
        if self.clip {
            range.clip(out);
        }
        sound
    }
}

/// Least and greatest value of each column.
#[derive(Clone, Debug)]
pub struct ValueRange<T> {
    low: Vec<T>,
    high: Vec<T>,
}

impl<T: Real> ValueRange<T> {
    /// Of no row at all.
    pub fn empty(d_v: usize) -> Self {
        Self { low: vec![T::INFINITY; d_v], high: vec![T::NEG_INFINITY; d_v] }
    }

    /// Of all rows.
    pub fn of(v: MatRef<'_, T>) -> Self {
        let mut range = Self::empty(v.cols());
        v.iter_rows().for_each(|row| range.include(row));
        range
    }

    /// Widens to hold one more row.
    pub fn include(&mut self, row: &[T]) {
        for ((low, high), &x) in self.low.iter_mut().zip(&mut self.high).zip(row) {
            *low = if x < *low { x } else { *low };
            *high = if x > *high { x } else { *high };
        }
    }

    fn clip(&self, row: &mut [T]) {
        // NaN compares as neither and stays.
        for (x, (&low, &high)) in row.iter_mut().zip(self.low.iter().zip(&self.high)) {
            if *x < low {
                *x = low;
            }
            if *x > high {
                *x = high;
            }
        }
    }
}

/// Query rows of one task.
const ROWS: usize = 192;

/// Attention of a whole group without a mask over a coreset of its keys.
pub fn attend_coreset<T: Real>(
    g: &mut Group<'_, T>,
    coreset: &Coreset<T>,
    finish: Finish,
) -> Result<RunInfo> {
    let (k, v, scale, cx) = (g.k, g.v, g.scale, g.cx);
    let (keys, values, rows, n_k) = (coreset.keys(), coreset.values(), g.lse.len(), g.n_k());
    let range = ValueRange::of(v);
    let failed = g.par_row_blocks(ROWS, |mut block| {
        let rows = block.lse.len();
        let mut average = cx.scratch.take::<T>(rows * values.cols());
        exact_rows(block.q, keys, values, None, scale, Band::ALL, cx, &mut average, block.lse);
        let mut failed = Vec::new();
        let outputs = block.out.chunks_exact_mut(v.cols()).zip(block.lse.iter_mut());
        for (i, (average, (out, lse))) in average.chunks_exact(values.cols()).zip(outputs).enumerate() {
            if !finish.row(average, &range, out, lse) {
                failed.push((i, n_k));
            }
        }
        if finish.fallback == Fallback::Exact {
            attend_exactly(&mut block, &failed, k, v, scale, cx);
        }
        Ok(failed.len())
    })?;
    let failed: usize = failed.into_iter().sum();
    let exact = if finish.fallback == Fallback::Exact { failed * n_k } else { 0 };
    Ok(RunInfo {
        keys_visited: (rows * coreset.len() + exact) as u64,
        fallback_rows: failed as u64,
        ..RunInfo::default()
    })
}

/// Upper bound on the scratch of [`attend_coreset`] for elements of `bytes` bytes.
pub fn attend_scratch_bytes(p: &Problem, threads: usize, bytes: usize) -> usize {
    let rows = ROWS.min(p.n_q);
    exact_scratch_bytes(p, threads, bytes) + 2 * threads * (rows * (2 * p.d_v + p.d + 5) * bytes + 512)
}

/// Exact attention of the rows named, each over its first keys.
fn attend_exactly<T: Real>(
    block: &mut RowBlock<'_, T>,
    rows: &[(usize, usize)],
    k: MatRef<'_, T>,
    v: MatRef<'_, T>,
    scale: T,
    cx: Context<'_>,
) {
    let (d, d_v) = (k.cols(), v.cols());
    // Rows that see the same keys share one pass over them.
    for same in rows.chunk_by(|a, b| a.1 == b.1) {
        let n = same[0].1;
        let mut q = cx.scratch.take::<T>(same.len() * d);
        let mut out = cx.scratch.take::<T>(same.len() * d_v);
        let mut lse = cx.scratch.take::<T>(same.len());
        block.q.gather_into(same.iter().map(|r| r.0), &mut q);
        let q = MatRef::new(&q, same.len(), d);
        let (k, v) = (k.sub_rows(0..n), v.sub_rows(0..n));
        exact_rows(q, k, v, None, scale, Band::ALL, cx, &mut out, &mut lse);
        for (&(i, _), (out, &lse)) in same.iter().zip(out.chunks_exact(d_v).zip(lse.iter())) {
            block.out[i * d_v..(i + 1) * d_v].copy_from_slice(out);
            block.lse[i] = lse;
        }
    }
}

/// Causal attention by key compression.
#[derive(Clone, Debug)]
pub struct BlockCausal<C> {
    /// Compresses the keys of a block.
    pub compressor: C,
    /// Keys of a block; its own queries see them as they are.
    pub block: usize,
    /// Join coresets of equally many blocks and compress again.
    pub tree: bool,
    /// How rows end.
    pub finish: Finish,
}

/// A coreset of the blocks `index · 2^level ..`, `2^level` of them.
#[derive(Debug)]
struct Node<T> {
    level: u32,
    index: usize,
    coreset: Coreset<T>,
}

impl<C: CompressKeys> BlockCausal<C> {
    /// Attention of a whole group with a causal mask.
    pub fn run<T: Real>(&self, g: &mut Group<'_, T>, stream: StreamKey) -> Result<RunInfo> {
        let (k, v, scale, cx) = (g.k, g.v, g.scale, g.cx);
        let (n_q, n_k, d_v) = (g.n_q(), g.n_k(), g.d_v());
        let complete = n_k.saturating_sub(1) / self.block;
        let levels = self.levels(k, v, complete, scale.to_f64(), stream, cx);
        let ranges = self.ranges(v, complete);
        let infos = g.par_row_blocks(ROWS, |mut block| {
            let mut info = RunInfo::default();
            let mut failed = Vec::new();
            let mut from = 0;
            while from < block.lse.len() {
                // The keys that a row sees, its own included; rows of one key block are taken together.
                let seen = (n_k + block.first + from + 1).saturating_sub(n_q);
                if seen == 0 {
                    block.out[from * d_v..(from + 1) * d_v].fill(T::ZERO);
                    block.lse[from] = T::NEG_INFINITY;
                    info.empty_rows += 1;
                    from += 1;
                    continue;
                }
                let b = (seen - 1) / self.block;
                let rows = ((b + 1) * self.block - seen + 1).min(block.lse.len() - from);
                let near = Near { start: b * self.block, seen };
                let part = Part { k, v, scale, pieces: pieces(&levels, b), cx };
                let here = from..from + rows;
                info.keys_visited += self.rows(&part, near, &mut block, here, &ranges[b], &mut failed);
                from += rows;
            }
            if self.finish.fallback == Fallback::Exact {
                attend_exactly(&mut block, &failed, k, v, scale, cx);
                info.keys_visited += failed.iter().map(|f| f.1 as u64).sum::<u64>();
            }
            info.fallback_rows = failed.len() as u64;
            Ok(info)
        })?;
        let rank = levels.iter().flatten().map(Coreset::len).max();
        Ok(infos.into_iter().fold(RunInfo { rank, ..RunInfo::default() }, RunInfo::merge))
    }

    /// Coresets of all complete blocks, then of pairs, and so on. Without a tree, one coreset per prefix is what
    /// is wanted, and that is the leaves one after another.
    fn levels<T: Real>(
        &self,
        k: MatRef<'_, T>,
        v: MatRef<'_, T>,
        complete: usize,
        scale: f64,
        stream: StreamKey,
        cx: Context<'_>,
    ) -> Vec<Vec<Coreset<T>>> {
        let leaf = |b: usize| {
            let range = b * self.block..(b + 1) * self.block;
            let values = Values::Plain(v.sub_rows(range.clone()));
            self.node(k.sub_rows(range), values, 0, b, scale, stream, cx)
        };
        let leaves: Vec<Coreset<T>> = (0..complete).into_par_iter().with_max_len(1).map(leaf).collect();
        let mut levels = vec![leaves];
        while self.tree && levels[levels.len() - 1].len() > 1 {
            let (level, below) = (levels.len() as u32, &levels[levels.len() - 1]);
            let join = |i: usize| {
                let mut pair = below[2 * i].clone();
                pair.append(&below[2 * i + 1]);
                self.node(pair.keys(), Values::Weighted(pair.values()), level, i, scale, stream, cx)
            };
            let next = (0..below.len() / 2).into_par_iter().with_max_len(1).map(join).collect();
            levels.push(next);
        }
        levels
    }

    #[allow(clippy::too_many_arguments)]
    fn node<T: Real>(
        &self,
        keys: MatRef<'_, T>,
        values: Values<'_, T>,
        level: u32,
        index: usize,
        scale: f64,
        stream: StreamKey,
        cx: Context<'_>,
    ) -> Coreset<T> {
        let size = self.compressor.size(self.block);
        let stream = stream.named("block").with(u64::from(level)).with(index as u64);
        self.compressor.compress(keys, values, size, scale, stream, cx)
    }

    /// Range of the values before each block.
    fn ranges<T: Real>(&self, v: MatRef<'_, T>, complete: usize) -> Vec<ValueRange<T>> {
        let mut ranges = vec![ValueRange::empty(v.cols())];
        for b in 0..complete {
            let mut range = ranges[b].clone();
            v.sub_rows(b * self.block..(b + 1) * self.block).iter_rows().for_each(|row| range.include(row));
            ranges.push(range);
        }
        ranges
    }

    /// Rows `here` of `block`, all in one key block. Returns the pairs visited.
    fn rows<T: Real>(
        &self,
        part: &Part<'_, T>,
        near: Near,
        block: &mut RowBlock<'_, T>,
        here: Range<usize>,
        before: &ValueRange<T>,
        failed: &mut Vec<(usize, usize)>,
    ) -> u64 {
        let &Part { k, v, scale, ref pieces, cx } = part;
        let (rows, d_v) = (here.len(), v.cols());
        let q = block.q.sub_rows(here.clone());
        let out = &mut block.out[here.start * d_v..here.end * d_v];
        let lse = &mut block.lse[here.clone()];
        let end = near.seen + rows - 1;
        let own = near.start..end;
        let band = Band::causal((near.seen - near.start) as isize - 1);
        exact_rows(q, k.sub_rows(own.clone()), v.sub_rows(own.clone()), None, scale, band, cx, out, lse);
        let first = near.seen - near.start;
        let mut visited = (rows * first + rows * (rows - 1) / 2) as u64;
        if pieces.is_empty() {
            return visited;
        }
        let mut average = cx.scratch.take::<T>(rows * (d_v + 2));
        for (average, out) in average.chunks_exact_mut(d_v + 2).zip(out.chunks_exact(d_v)) {
            average[..d_v].copy_from_slice(out);
            average[d_v..].fill(T::ONE);
        }
        let mut far = cx.scratch.take::<T>(rows * (d_v + 2));
        let mut far_lse = cx.scratch.take::<T>(rows);
        for piece in pieces {
            visited += (rows * piece.len()) as u64;
            exact_rows(q, piece.keys(), piece.values(), None, scale, Band::ALL, cx, &mut far, &mut far_lse);
            for (i, lse) in lse.iter_mut().enumerate() {
                let cols = i * (d_v + 2)..(i + 1) * (d_v + 2);
                merge_lse(&mut average[cols.clone()], lse, &far[cols], far_lse[i]);
            }
        }
        let mut range = before.clone();
        v.sub_rows(near.start..near.seen - 1).iter_rows().for_each(|row| range.include(row));
        let rows = average.chunks_exact(d_v + 2).zip(out.chunks_exact_mut(d_v).zip(lse));
        for (i, (average, (out, lse))) in rows.enumerate() {
            range.include(v.row(near.seen - 1 + i));
            if !self.finish.row(average, &range, out, lse) {
                failed.push((here.start + i, near.seen + i));
            }
        }
        visited
    }

    /// Multiply-adds, doubled: of compressing `n` keys block by block without the compressor's own, and of the rows.
    pub fn run_flops(&self, p: &Problem) -> u64 {
        let blocks = p.n_k.div_ceil(self.block).max(1) as u64;
        let kept = self.compressor.size(self.block).rank.min(self.block) as u64;
        let far = if self.tree { kept * u64::from(blocks.ilog2()) } else { kept * blocks / 2 };
        let rows = (p.batch * p.n_heads * p.n_q) as u64;
        2 * rows * (self.block.min(p.n_k) as u64 / 2 + far) * (p.d + p.d_v + 2) as u64
    }

    /// Upper bound on scratch and on the coresets held, for elements of `bytes` bytes.
    pub fn scratch_bytes(&self, p: &Problem, threads: usize, bytes: usize) -> usize {
        let blocks = p.n_k / self.block;
        let size = self.compressor.size(self.block);
        let one = |n| self.compressor.scratch_bytes(p, n, size, 1, bytes);
        // A coreset of the parts may be as large as its part where nothing could be saved.
        let held = blocks * self.block * (p.d + p.d_v + 2) * bytes * if self.tree { 2 } else { 1 };
        let joined = if self.tree { one(2 * size.rank.max(self.block)) } else { 0 };
        attend_scratch_bytes(p, threads, bytes)
            + 2 * threads * (2 * ROWS.min(p.n_q) * (p.d_v + 3) * bytes + 512)
            + threads * one(self.block).max(joined)
            + held
    }
}

/// What rows of one key block have in common.
struct Part<'a, T> {
    k: MatRef<'a, T>,
    v: MatRef<'a, T>,
    scale: T,
    pieces: Vec<&'a Coreset<T>>,
    cx: Context<'a>,
}

/// Where rows stand: their block begins at `start`, and the first of them sees `seen` keys.
#[derive(Clone, Copy)]
struct Near {
    start: usize,
    seen: usize,
}

/// The coresets that cover the first `b` blocks: with a tree the largest that fit, one after another.
fn pieces<T>(levels: &[Vec<Coreset<T>>], b: usize) -> Vec<&Coreset<T>> {
    if levels.len() == 1 {
        return levels[0][..b].iter().collect();
    }
    let mut done = 0;
    let mut found = Vec::new();
    for level in (0..levels.len()).rev() {
        while b - done >= 1 << level {
            found.push(&levels[level][done >> level]);
            done += 1 << level;
        }
    }
    found
}

/// What a stream compresses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Cache {
    /// Every block once it is complete, as the causal plan does.
    Blocks,
    /// The first tokens pushed, once: all but some at their beginning and end.
    Prefix(Prefix),
}

/// How a prefix is compressed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prefix {
    /// First tokens that are kept as they are.
    pub sinks: usize,
    /// Last tokens that are kept as they are.
    pub window: usize,
    /// Share of the tokens between that is kept.
    pub ratio: f64,
    /// Keys kept of each bin.
    pub bin_rank: usize,
}

impl Prefix {
    /// The tokens of a prefix of `n` that are compressed, and how far; `None` if there are too few. Tokens that do
    /// not fill a bin join the window.
    pub fn split(&self, n: usize) -> Option<(Range<usize>, Size)> {
        let middle = n.checked_sub(self.sinks.saturating_add(self.window))?;
        let bins = (middle as f64 * self.ratio) as usize / self.bin_rank;
        let bin_len = middle.checked_div(bins)?;
        Some((self.sinks..self.sinks + bins * bin_len, Size { rank: bins * self.bin_rank, bins }))
    }
}

/// Token by token attention over coresets of older keys and recent keys as they are.
#[derive(Debug)]
pub struct CoresetStream<T, C> {
    plan: BlockCausal<C>,
    cache: Cache,
    stream: StreamKey,
    scale: f64,
    index: GroupIndex,
    /// Compressed keys, older ones first; with a tree at most one of each level.
    nodes: Vec<Node<T>>,
    blocks: usize,
    k: Vec<T>,
    v: Vec<T>,
    d: usize,
    range: ValueRange<T>,
}

impl<T: Real, C: CompressKeys> CoresetStream<T, C> {
    /// An empty stream for one group.
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
        self.range.low.len()
    }

    /// Tokens held as they are.
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
        let mut far = cx.scratch.take::<T>(q.rows() * (d_v + 2));
        let mut far_lse = cx.scratch.take::<T>(q.rows());
        let mut average = cx.scratch.take::<T>(q.rows() * (d_v + 2));
        let mut total = cx.scratch.take_copy::<T>(lse);
        for (average, out) in average.chunks_exact_mut(d_v + 2).zip(out.chunks_exact(d_v)) {
            average[..d_v].copy_from_slice(out);
            average[d_v..].fill(T::ONE);
        }
        for node in self.nodes.iter().filter(|node| !node.coreset.is_empty()) {
            let (keys, values) = (node.coreset.keys(), node.coreset.values());
            exact_rows(q, keys, values, None, scale, Band::ALL, cx, &mut far, &mut far_lse);
            info.keys_visited += (q.rows() * keys.rows()) as u64;
            for (i, lse) in total.iter_mut().enumerate() {
                let cols = i * (d_v + 2)..(i + 1) * (d_v + 2);
                merge_lse(&mut average[cols.clone()], lse, &far[cols], far_lse[i]);
            }
        }
        if self.nodes.is_empty() {
            return Ok(info);
        }
        let mut finished = cx.scratch.take::<T>(d_v);
        for (i, average) in average.chunks_exact(d_v + 2).enumerate() {
            let sound = self.plan.finish.row(average, &self.range, &mut finished, &mut total[i]);
            // Keys behind a coreset are gone, so what is left of exact attention is that to the recent ones.
            if sound || self.plan.finish.fallback == Fallback::Zero {
                out[i * d_v..(i + 1) * d_v].copy_from_slice(&finished);
                lse[i] = total[i];
            }
            info.fallback_rows += u64::from(!sound);
        }
        Ok(info)
    }

    fn state_bytes(&self) -> usize {
        let held: usize = self.nodes.iter().map(|n| n.coreset.bytes()).sum();
        held + (self.k.len() + self.v.len()) * size_of::<T>()
    }
}
