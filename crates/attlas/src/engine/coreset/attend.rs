//! Rows over a coreset: averages of $[V \mid w \mid |w|]$, their division, and rows whose denominator cancelled.
//!
//! With $z = \sum_s e^{\beta q^\top k_s}$, a softmax average over the coreset is $[N \mid D \mid D^+] / z$; the output
//! is $N/D$, its log-sum-exp $\ln z + \ln (D/z)$. Where $D \le \epsilon D^+$, $\epsilon = 10^{-12}$ (single:
//! $10^{-6}$), $D$ is mere noise, and a [`Fallback`] gives the output.

use super::Coreset;
use crate::engine::exact_rows;
use crate::group::{Group, RowBlock};
use crate::workspace::Context;
use crate::{Real, Result, RunInfo};
use attlas_num::MatRef;
use attlas_num::kernels::{Band, merge_lse};
use attlas_num::par::*;

crate::choices! {
    /// Output of a row whose denominator has cancelled.
    pub enum Fallback {
        /// Exact attention. A stream no longer has its older keys, so there it is exact attention to the uncompressed
        /// keys of the cache.
        Exact = "exact_row",
        /// Zero, clipped to the range of the values, with no weight in a merge.
        Zero = "zero_clip",
    }
}

/// Conversion of averages of $[V \mid w \mid |w|]$ into outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finish {
    /// Clip every column to the range of the values seen.
    pub clip: bool,
    /// Treatment of rows whose denominator has cancelled.
    pub fallback: Fallback,
}

impl Finish {
    /// Divides one row; the log-sum-exp becomes that of the weighted sum. Returns `false` if the denominator cancelled:
    /// the row is then zero, clipped.
    pub(super) fn row<T: Real>(
        &self,
        average: &[T],
        range: &ValueRange<T>,
        out: &mut [T],
        lse: &mut T,
    ) -> bool {
        let d_v = out.len();
        let (den, size) = (average[d_v], average[d_v + 1]);
        let noise = T::from_f64(if T::ROUNDOFF < 1e-10 { 1e-12 } else { 1e-6 });
        // NaN passes as sound: it belongs in the output.
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
    /// Makes the range of no rows.
    pub fn empty(d_v: usize) -> Self {
        Self { low: vec![T::INFINITY; d_v], high: vec![T::NEG_INFINITY; d_v] }
    }

    /// Computes the range of all rows, in parallel.
    pub fn of(v: MatRef<'_, T>) -> Self {
        let pieces: Vec<Self> = (0..v.rows().div_ceil(RANGE_ROWS))
            .into_par_iter()
            .with_max_len(1)
            .map(|p| {
                let rows = v.sub_rows(p * RANGE_ROWS..((p + 1) * RANGE_ROWS).min(v.rows()));
                let mut range = Self::empty(v.cols());
                rows.iter_rows().for_each(|row| range.include(row));
                range
            })
            .collect();
        pieces.iter().fold(Self::empty(v.cols()), |mut range, piece| {
            range.low.iter_mut().zip(&piece.low).for_each(|(a, &b)| *a = if b < *a { b } else { *a });
            range.high.iter_mut().zip(&piece.high).for_each(|(a, &b)| *a = if b > *a { b } else { *a });
            range
        })
    }

    /// Widens the range to include one more row.
    pub fn include(&mut self, row: &[T]) {
        for ((low, high), &x) in self.low.iter_mut().zip(&mut self.high).zip(row) {
            *low = if x < *low { x } else { *low };
            *high = if x > *high { x } else { *high };
        }
    }

    /// Width of the values.
    pub(super) fn d_v(&self) -> usize {
        self.low.len()
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

/// Rows of one task that computes a range.
const RANGE_ROWS: usize = 2048;

/// Query rows of one task.
pub(super) const ROWS: usize = 192;

/// Computes attention of a whole group without a mask over a coreset of its keys.
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

/// Computes exact attention of the given rows, each over its first keys.
pub(super) fn attend_exactly<T: Real>(
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

/// Writes rows `[o | 1 | 1]`: averages over uncompressed keys.
pub(super) fn widen_into<T: Real>(out: &[T], d_v: usize, averages: &mut [T]) {
    for (average, out) in averages.chunks_exact_mut(d_v + 2).zip(out.chunks_exact(d_v)) {
        average[..d_v].copy_from_slice(out);
        average[d_v..].fill(T::ONE);
    }
}

/// Merges the averages of rows over a coreset into those over other keys.
pub(super) fn merge_coreset<T: Real>(
    q: MatRef<'_, T>,
    coreset: &Coreset<T>,
    scale: T,
    cx: Context<'_>,
    averages: &mut [T],
    lse: &mut [T],
) {
    let (keys, values) = (coreset.keys(), coreset.values());
    let mut far = cx.scratch.take::<T>(q.rows() * values.cols());
    let mut far_lse = cx.scratch.take::<T>(q.rows());
    exact_rows(q, keys, values, None, scale, Band::ALL, cx, &mut far, &mut far_lse);
    let rows = averages.chunks_exact_mut(values.cols()).zip(lse);
    for ((average, lse), (far, far_lse)) in rows.zip(far.chunks_exact(values.cols()).zip(far_lse.iter())) {
        merge_lse(average, lse, far, *far_lse);
    }
}
