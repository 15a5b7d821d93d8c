//! Causal form: means of complete segments, and the query's own segment exactly.
//!
//! Segments have $c$ tokens. A query at position $i$ sees the mean key and value of each segment that ends before
//! its own, with $\ln c$ added to the logit, and the keys $\lfloor i/c \rfloor c, \dots, i$ as they are; the two parts merge by
//! log-sum-exp. No mean that it sees contains a later token.

use super::{BLOCK_ROWS, Linformer};
use crate::engine::exact_rows;
use crate::engine::pool::{Segments, pool_rows};
use crate::group::{Group, GroupStream, RowBlock};
use crate::workspace::Context;
use crate::{MatRef, Real, Result, RunInfo};
use attlas_num::kernels::{Band, merge_lse};
use std::ops::Range;

impl Linformer {
    /// Attends to the means of earlier segments, and to the own segment exactly.
    pub(super) fn run_causal<T: Real>(&self, g: &mut Group<'_, T>) -> Result<RunInfo> {
        let (k, v, scale, cx) = (g.k, g.v, g.scale, g.cx);
        let len = k.rows().div_ceil(self.params.rank).max(1);
        // Only complete segments are ever seen as a mean.
        let count = k.rows() / len;
        let whole = Segments::new(count * len, count);
        let mut k_mean = cx.scratch.take::<T>(count * k.cols());
        let mut v_mean = cx.scratch.take::<T>(count * v.cols());
        pool_rows(k, &whole, cx, &mut k_mean);
        pool_rows(v, &whole, cx, &mut v_mean);
        let means = Means {
            k: MatRef::new(&k_mean, count, k.cols()),
            v: MatRef::new(&v_mean, count, v.cols()),
            bias: &vec![T::from_f64((len as f64).ln()); count],
        };
        let offset = k.rows() as isize - g.n_q() as isize;
        let parts = g.par_row_blocks(BLOCK_ROWS, |block| {
            Ok(causal_block(block, k, v, &means, len, offset, scale, cx))
        })?;
        let (visited, empty) = parts.into_iter().fold((0, 0), |(a, b), (x, y)| (a + x, b + y));
        Ok(RunInfo { rank: Some(count), empty_rows: empty, ..RunInfo::visited(visited) })
    }
}

/// Means of complete segments; the bias of each is the logarithm of its number of tokens.
#[derive(Clone, Copy, Debug)]
struct Means<'a, T> {
    k: MatRef<'a, T>,
    v: MatRef<'a, T>,
    bias: &'a [T],
}

impl<T: Real> Means<'_, T> {
    /// Attends with rows to the means in `range`.
    fn attend(
        &self,
        q: MatRef<'_, T>,
        range: Range<usize>,
        scale: T,
        cx: Context<'_>,
        out: &mut [T],
        lse: &mut [T],
    ) {
        let (k, v) = (self.k.sub_rows(range.clone()), self.v.sub_rows(range.clone()));
        exact_rows(q, k, v, Some(&self.bias[range]), scale, Band::ALL, cx, out, lse);
    }
}

/// Computes one block of rows in the causal form; returns the scores computed and the rows that see nothing.
#[allow(clippy::too_many_arguments)]
fn causal_block<T: Real>(
    block: RowBlock<'_, T>,
    k: MatRef<'_, T>,
    v: MatRef<'_, T>,
    means: &Means<'_, T>,
    len: usize,
    offset: isize,
    scale: T,
    cx: Context<'_>,
) -> (u64, u64) {
    let (rows, d_v) = (block.lse.len(), v.cols());
    // Rows before `unseen_rows` come before the first key.
    let unseen_rows = usize::try_from(-(block.first as isize + offset)).unwrap_or(0).min(rows);
    block.out[..unseen_rows * d_v].fill(T::ZERO);
    block.lse[..unseen_rows].fill(T::NEG_INFINITY);
    if unseen_rows == rows {
        return (0, rows as u64);
    }
    let position = |row: usize| ((block.first + row) as isize + offset) as usize;
    // All rows see the means before the first row's segment.
    let common = position(unseen_rows) / len;
    let seeing = block.q.sub_rows(unseen_rows..rows);
    means.attend(
        seeing,
        0..common,
        scale,
        cx,
        &mut block.out[unseen_rows * d_v..],
        &mut block.lse[unseen_rows..],
    );
    let mut visited = ((rows - unseen_rows) * common) as u64;
    let mut part = cx.scratch.take::<T>(rows.min(len) * d_v);
    let mut part_lse = cx.scratch.take::<T>(rows.min(len));
    let mut row = unseen_rows;
    while row < rows {
        let segment = position(row) / len;
        let first_key = segment * len;
        let end = rows.min(row + first_key + len - position(row));
        let (part, part_lse) = (&mut part[..(end - row) * d_v], &mut part_lse[..end - row]);
        let q = block.q.sub_rows(row..end);
        let mut merge = |part: &[T], part_lse: &[T]| {
            let out = block.out[row * d_v..end * d_v].chunks_exact_mut(d_v).zip(&mut block.lse[row..end]);
            for ((o, l), (o2, &l2)) in out.zip(part.chunks_exact(d_v).zip(part_lse)) {
                merge_lse(o, l, o2, l2);
            }
        };
        if segment > common {
            means.attend(q, common..segment, scale, cx, part, part_lse);
            merge(part, part_lse);
        }
        let keys = first_key..position(end - 1) + 1;
        let band = Band::causal((position(row) - first_key) as isize);
        let (k, v) = (k.sub_rows(keys.clone()), v.sub_rows(keys));
        exact_rows(q, k, v, None, scale, band, cx, part, part_lse);
        merge(part, part_lse);
        visited += (row..end).map(|r| segment - common + position(r) - first_key + 1).sum::<usize>() as u64;
        row = end;
    }
    (visited, unseen_rows as u64)
}

/// Means of complete segments and the raw tokens of the current one.
#[derive(Debug)]
pub(super) struct Pooled<T> {
    len: usize,
    d: usize,
    d_v: usize,
    k_mean: Vec<T>,
    v_mean: Vec<T>,
    bias: Vec<T>,
    k: Vec<T>,
    v: Vec<T>,
}

impl<T: Real> Pooled<T> {
    pub(super) fn new(len: usize, d: usize, d_v: usize) -> Self {
        let empty = Vec::new;
        Self { len, d, d_v, k_mean: empty(), v_mean: empty(), bias: empty(), k: empty(), v: empty() }
    }

    /// Replaces the full current segment by its mean.
    fn close_segment(&mut self, cx: Context<'_>) {
        for (raw, means, width) in
            [(&mut self.k, &mut self.k_mean, self.d), (&mut self.v, &mut self.v_mean, self.d_v)]
        {
            let start = means.len();
            means.resize(start + width, T::ZERO);
            let rows = MatRef::new(raw, self.len, width);
            pool_rows(rows, &Segments::new(self.len, 1), cx, &mut means[start..]);
            raw.clear();
        }
        self.bias.push(T::from_f64((self.len as f64).ln()));
    }
}

impl<T: Real> GroupStream<T> for Pooled<T> {
    fn push(&mut self, k: MatRef<'_, T>, v: MatRef<'_, T>, cx: Context<'_>) -> Result<()> {
        for (k, v) in k.iter_rows().zip(v.iter_rows()) {
            // Only at the next token: the last token of a segment still sees the raw keys.
            if self.k.len() == self.len * self.d {
                self.close_segment(cx);
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
        let (count, raw) = (self.bias.len(), self.k.len() / self.d);
        let means = Means {
            k: MatRef::new(&self.k_mean, count, self.d),
            v: MatRef::new(&self.v_mean, count, self.d_v),
            bias: &self.bias,
        };
        means.attend(q, 0..count, scale, cx, out, lse);
        let mut part = cx.scratch.take::<T>(out.len());
        let mut part_lse = cx.scratch.take::<T>(lse.len());
        let (k, v) = (MatRef::new(&self.k, raw, self.d), MatRef::new(&self.v, raw, self.d_v));
        exact_rows(q, k, v, None, scale, Band::ALL, cx, &mut part, &mut part_lse);
        for ((o, l), (o2, &l2)) in
            out.chunks_exact_mut(self.d_v).zip(lse).zip(part.chunks_exact(self.d_v).zip(part_lse.iter()))
        {
            merge_lse(o, l, o2, l2);
        }
        Ok(RunInfo::visited((q.rows() * (count + raw)) as u64))
    }

    fn state_bytes(&self) -> usize {
        (self.k_mean.len() + self.v_mean.len() + self.bias.len() + self.k.len() + self.v.len())
            * size_of::<T>()
    }
}
