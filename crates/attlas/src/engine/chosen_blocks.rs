//! Attention of blocks of rows to a near field, to keys chosen once per block, and to means of the other keys.

use super::far_field::{Gathered, RunMeans};
use super::token_blocks::par_token_blocks;
use crate::group::{Group, Queries};
use crate::workspace::Context;
use crate::{Mask, MatRef, Real, Result, RunInfo};
use attlas_num::kernels::{Band, Op, Precision, exp_sum, gemm, gemm_packed, max, pack_right, packed_len};
use attlas_num::par::*;
use attlas_num::scratch::Buf;
use std::ops::Range;

/// Rows that share a choice of keys, and keys that they see exactly in any case.
#[derive(Clone, Copy, Debug)]
pub struct NearField {
    /// Rows that share a choice.
    pub block: usize,
    /// Keys at the start that every row sees.
    pub sinks: usize,
    /// Keys before the first row of a block (without a mask also after the last) that its rows see.
    pub window: usize,
}

/// Position of a block of rows among the keys.
#[derive(Clone, Debug)]
pub struct QueryBlock {
    /// First row of the block.
    pub first: usize,
    /// Its position among the keys.
    pub position: isize,
    /// Rows of the block.
    pub rows: usize,
    /// Keys at the start that are exact.
    pub sinks: usize,
    /// Keys that are exact because they are near the block.
    pub near: Range<usize>,
    /// End of the keys that some row of the block sees.
    pub end: usize,
    mask: Mask,
}

impl NearField {
    /// Returns the position of the block that begins at row `first`, among `n_q` rows and `n_k` keys.
    pub fn query_block(&self, mask: Mask, first: usize, n_q: usize, n_k: usize) -> QueryBlock {
        let rows = self.block.min(n_q - first);
        let position = first as isize + n_k as isize - n_q as isize;
        let clip = |j: isize| j.clamp(0, n_k as isize) as usize;
        let start = clip(position.saturating_sub_unsigned(self.window));
        let last = position + rows as isize;
        let (near, end) = match mask {
            Mask::Causal => (start..clip(last), clip(last)),
            Mask::None => (start..clip(last.saturating_add_unsigned(self.window)).max(start), n_k),
        };
        QueryBlock { first, position, rows, sinks: self.sinks.min(near.start), near, end, mask }
    }

    /// Returns the largest number of far keys of a block.
    pub fn most_far(&self, mask: Mask, n_q: usize, n_k: usize) -> usize {
        let far = |first| self.query_block(mask, first, n_q, n_k).far_len();
        match mask {
            _ if n_q == 0 => 0,
            Mask::Causal => far((n_q - 1) / self.block * self.block),
            Mask::None => (0..n_q).step_by(self.block).map(far).max().unwrap_or(0),
        }
    }

    /// Returns the largest number of keys near a block.
    pub fn most_near(&self) -> usize {
        self.sinks.saturating_add(self.window.saturating_mul(2)).saturating_add(self.block)
    }
}

impl QueryBlock {
    /// Returns the keys that are neither sinks nor near, before and after the near ones.
    pub fn far(&self) -> [Range<usize>; 2] {
        [self.sinks..self.near.start, self.near.end..self.end]
    }

    /// Returns the number of far keys.
    pub fn far_len(&self) -> usize {
        self.far().iter().map(Range::len).sum()
    }

    /// Returns the number of keys that row `r` sees.
    pub fn sees(&self, r: usize) -> usize {
        match self.mask {
            Mask::None => self.end,
            Mask::Causal => (r as isize + self.position - self.first as isize + 1).max(0) as usize,
        }
    }

    /// Returns `count` scout rows. With a causal mask these are the first row and others spread over the block before,
    /// so none is later than the first row; without a mask they are spread over the block.
    pub fn scouts(&self, count: usize, block: usize) -> Vec<usize> {
        let mut rows: Vec<usize> = match self.mask {
            Mask::None => (0..count).map(|s| self.first + self.rows * s / count).collect(),
            Mask::Causal => {
                let before = self.first.saturating_sub(block);
                let others = (1..count).map(|s| before + (block * s / count).saturating_sub(1));
                others.filter(|&r| r < self.first).chain([self.first]).collect()
            }
        };
        rows.sort_unstable();
        rows.dedup();
        rows
    }
}

/// Elements of a cache line; rows of scores begin on different lines.
const LINE: usize = 16;
/// Keys scored at a time, such that the scores of all scouts stay in the second-level cache.
const CHUNK: usize = 2048;

/// Returns the elements between the rows of a chunk, among `n` keys.
fn chunk_stride(n: usize) -> usize {
    n.min(CHUNK).next_multiple_of(LINE) + LINE
}

/// The keys of a group as the right operand of products, packed once for all blocks that score them.
#[derive(Debug)]
pub struct PackedKeys<'p, T> {
    data: Buf<'p, T>,
    d: usize,
}

impl<'p, T: Real> PackedKeys<'p, T> {
    /// Packs the keys, on all threads.
    pub fn new(k: MatRef<'_, T>, cx: Context<'p>) -> Self {
        let (n, d, isa) = (k.rows(), k.cols(), cx.schedule.isa);
        let mut data = cx.scratch.take::<T>(packed_len::<T>(isa, d, n));
        data.par_chunks_mut((CHUNK * d).max(1)).with_max_len(1).enumerate().for_each(|(c, chunk)| {
            pack_right(isa, Op::T(k.sub_rows(c * CHUNK..n.min((c + 1) * CHUNK))), chunk);
        });
        Self { data, d }
    }

    /// Returns chunk `c` and the following ones.
    fn chunk_onwards(&self, c: usize) -> &[T] {
        &self.data[c * CHUNK * self.d..]
    }
}

/// Input of a choice of blocks.
#[derive(Clone, Copy, Debug)]
pub struct Scored<'a, T> {
    /// Queries of the group.
    pub q: Queries<'a, T>,
    /// Keys of the group.
    pub k: MatRef<'a, T>,
    /// The packed keys, if they are scored many times.
    pub packed: Option<&'a PackedKeys<'a, T>>,
    /// Factor on the inner products.
    pub scale: T,
    /// Schedule and scratch memory.
    pub cx: Context<'a>,
}

impl<T: Real> Scored<'_, T> {
    /// Computes the exact weights of some rows of all heads over all keys they see. Calls `visit(row, first, weights,
    /// share)` for stretches of keys from `first` on; weights times share sum to one over all stretches of a row.
    /// Returns the number of scores computed.
    pub fn weights(
        &self,
        query_block: &QueryBlock,
        rows: &[usize],
        mut visit: impl FnMut(usize, usize, &[T], T),
    ) -> u64 {
        let Self { q, k, packed, scale, cx } = *self;
        let (heads, d) = (q.heads(), k.cols());
        let end = rows.iter().map(|&r| query_block.sees(r)).max().unwrap_or(0);
        let (count, stride) = (rows.len() * heads, chunk_stride(end));
        let mut queries = cx.scratch.take::<T>(count * d);
        let places = rows.iter().flat_map(|&r| (0..heads).map(move |h| (r, h)));
        for (row, (r, h)) in queries.chunks_exact_mut(d).zip(places.clone()) {
            row.copy_from_slice(q.head(h).row(r));
        }
        let chunks = end.div_ceil(CHUNK);
        let mut logits = cx.scratch.take::<T>(chunks * count * stride);
        // For each chunk and row: the largest logit, and the sum of weights relative to it.
        let mut tops = cx.scratch.take::<T>(chunks * count);
        let mut sums = cx.scratch.take::<T>(chunks * count);
        let left = Op::N(MatRef::new(&queries, count, d));
        for (c, logits) in logits.chunks_exact_mut((count * stride).max(1)).enumerate() {
            let (first, last) = (c * CHUNK, end.min((c + 1) * CHUNK));
            let isa = cx.schedule.isa;
            match packed {
                Some(packed) => {
                    let right = packed.chunk_onwards(c);
                    gemm_packed(isa, scale, left, right, last - first, logits, stride, cx.scratch);
                }
                None => {
                    let right = Op::T(k.sub_rows(first..last));
                    gemm(isa, scale, left, right, T::ZERO, logits, stride, cx.scratch);
                }
            }
            for (i, (row, (r, _))) in logits.chunks_exact_mut(stride).zip(places.clone()).enumerate() {
                let weights = &mut row[..query_block.sees(r).clamp(first, last) - first];
                let top = max(weights);
                tops[c * count + i] = top;
                sums[c * count + i] = if top == T::NEG_INFINITY { T::ZERO } else { exp_sum(weights, top) };
            }
        }
        for (i, (r, _)) in places.enumerate() {
            let of_row = || (0..chunks).map(|c| (tops[c * count + i], sums[c * count + i]));
            let top = of_row().fold(T::NEG_INFINITY, |m, (top, _)| m.max(top));
            let from_top = |t: T| if t == T::NEG_INFINITY { T::ZERO } else { (t - top).exp() };
            let total = of_row().fold(T::ZERO, |total, (t, sum)| total + from_top(t) * sum);
            if total == T::ZERO {
                continue;
            }
            for (c, (t, sum)) in of_row().enumerate() {
                let (first, last) = (c * CHUNK, end.min((c + 1) * CHUNK));
                let seen = query_block.sees(r).clamp(first, last) - first;
                if sum != T::ZERO {
                    let row = &logits[(c * count + i) * stride..][..seen];
                    visit(r, first, row, from_top(t) / total);
                }
            }
        }
        (count * end) as u64
    }
}

/// Attends block by block to sinks, near keys, the keys that `choose` returns in increasing order, and the means of the
/// other far keys, if any. `choose` also returns the number of scores it computed.
pub fn attend_chosen_blocks<T: Real>(
    g: &mut Group<'_, T>,
    field: NearField,
    means: Option<&RunMeans<T>>,
    precision: Precision,
    choose: impl Fn(&QueryBlock) -> (Vec<u32>, u64) + Sync + Send,
) -> Result<RunInfo> {
    let (n_q, n_k, mask, k, v, scale, cx) = (g.n_q(), g.n_k(), g.mask, g.k, g.v, g.scale, g.cx);
    let visited = par_token_blocks(g, field.block, |block| {
        let query_block = field.query_block(mask, block.first, n_q, n_k);
        let (chosen, scored) = if query_block.far_len() > 0 { choose(&query_block) } else { (Vec::new(), 0) };
        let pseudo = means.map_or(0, |means| means.most(query_block.far_len()));
        let capacity = query_block.sinks + chosen.len() + pseudo + query_block.near.len();
        let mut all = Gathered::new(capacity, k.cols(), v.cols(), cx);
        all.append(k, v, 0..query_block.sinks);
        all.append(k, v, chosen.iter().map(|&j| j as usize));
        if let Some(means) = means {
            query_block.far().into_iter().for_each(|far| means.append(k, v, far, &chosen, &mut all));
        }
        let shared = all.len();
        all.append(k, v, query_block.near.clone());
        // The near keys follow those that every row sees.
        let upper = shared as isize + query_block.position - query_block.near.start as isize;
        let band = if mask == Mask::Causal { Band::causal(upper) } else { Band::ALL };
        let mut visited = scored;
        for (h, (out, lse)) in block.heads.into_iter().enumerate() {
            all.attend(block.q.head(h), scale, band, precision, cx, out, lse);
            visited += (0..query_block.rows).map(|r| band.range(r, all.len()).len() as u64).sum::<u64>();
        }
        Ok(visited)
    })?;
    let empty = g.lse.iter().filter(|l| **l == T::NEG_INFINITY).count() as u64;
    Ok(RunInfo { keys_visited: visited.into_iter().sum(), empty_rows: empty, ..RunInfo::default() })
}
