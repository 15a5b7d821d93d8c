//! The causal form: every query sees the keys of its own block exactly and the coresets of all complete blocks before it.
//!
//! Block $b$ is compressed once. With `tree`, level $l$ holds coresets of $2^l$ blocks, each compressed from the two of
//! level $l - 1$ that it covers; one coreset for each set binary digit of $b$ then covers the first $b$ blocks. Without
//! it, $b$ of them do.

use super::attend::{ROWS, attend_exactly, merge_coreset, widen_into};
use super::{CompressKeys, Coreset, Fallback, Finish, ValueRange, Values};
use crate::engine::exact_rows;
use crate::group::{Group, RowBlock};
use crate::workspace::Context;
use crate::{Problem, Real, Result, RunInfo};
use attlas_num::MatRef;
use attlas_num::kernels::Band;
use attlas_num::par::*;
use attlas_num::rng::StreamKey;
use std::ops::Range;

/// Causal attention by key compression.
#[derive(Clone, Debug)]
pub struct BlockCausal<C> {
    /// Compresses the keys of a block.
    pub compressor: C,
    /// Keys of a block; its own queries see them uncompressed.
    pub block: usize,
    /// Joins coresets of equally many blocks and compresses them again.
    pub tree: bool,
    /// Conversion of averages into outputs.
    pub finish: Finish,
}

impl<C: CompressKeys> BlockCausal<C> {
    /// Computes attention of a whole group with a causal mask.
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
                // The keys that a row sees, its own included; rows of one key block are processed together.
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
                let near = BlockStart { start: b * self.block, seen };
                let part = BlockInputs { k, v, scale, pieces: pieces(&levels, b), cx };
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

    /// Returns the coresets of all complete blocks, then of pairs, and so on. Without a tree there is only the first
    /// level: the coreset of a prefix is its leaves one after another.
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
    pub(super) fn node<T: Real>(
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

    /// Returns the range of the values before each block.
    fn ranges<T: Real>(&self, v: MatRef<'_, T>, complete: usize) -> Vec<ValueRange<T>> {
        let mut ranges = vec![ValueRange::empty(v.cols())];
        for b in 0..complete {
            let mut range = ranges[b].clone();
            v.sub_rows(b * self.block..(b + 1) * self.block).iter_rows().for_each(|row| range.include(row));
            ranges.push(range);
        }
        ranges
    }

    /// Computes rows `here` of `block`, all in one key block. Returns the pairs visited.
    fn rows<T: Real>(
        &self,
        part: &BlockInputs<'_, T>,
        near: BlockStart,
        block: &mut RowBlock<'_, T>,
        here: Range<usize>,
        before: &ValueRange<T>,
        failed: &mut Vec<(usize, usize)>,
    ) -> u64 {
        let &BlockInputs { k, v, scale, ref pieces, cx } = part;
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
        widen_into(out, d_v, &mut average);
        for piece in pieces {
            visited += (rows * piece.len()) as u64;
            merge_coreset(q, piece, scale, cx, &mut average, lse);
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

    /// Counts the operations of the rows, a multiply-add as two; compression is not included.
    pub fn run_flops(&self, p: &Problem) -> u64 {
        let blocks = p.n_k.div_ceil(self.block).max(1) as u64;
        let kept = self.compressor.size(self.block).rank.min(self.block) as u64;
        let far = if self.tree { kept * u64::from(blocks.ilog2()) } else { kept * blocks / 2 };
        let rows = (p.batch * p.n_heads * p.n_q) as u64;
        2 * rows * (self.block.min(p.n_k) as u64 / 2 + far) * (p.d + p.d_v + 2) as u64
    }
}

/// Data shared by the rows of one key block.
struct BlockInputs<'a, T> {
    k: MatRef<'a, T>,
    v: MatRef<'a, T>,
    scale: T,
    pieces: Vec<&'a Coreset<T>>,
    cx: Context<'a>,
}

/// Position of rows: their block begins at `start`, and the first of them sees `seen` keys.
#[derive(Clone, Copy)]
struct BlockStart {
    start: usize,
    seen: usize,
}

/// Returns the coresets that cover the first `b` blocks: with a tree the largest that fit, one after another.
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
