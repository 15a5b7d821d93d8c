//! Tiles of rows, and means that represent runs of far keys.

use crate::engine::exact_rows;
use crate::workspace::Context;
use crate::{MatRef, Real, merge_lse};
use attlas_num::kernels::Band;
use std::ops::Range;

/// Rows that share one choice, and far keys that share one mean.
pub(super) const TILE: usize = 64;

/// Some rows of one head.
#[derive(Debug)]
pub(super) struct Tile<'a, T> {
    pub(super) head: usize,
    pub(super) first: usize,
    pub(super) out: &'a mut [T],
    pub(super) lse: &'a mut [T],
}

/// Cuts `rows` of every head at positions that are multiples of [`TILE`].
pub(super) fn tiles<'a, T: Real>(
    out: &'a mut [T],
    lse: &'a mut [T],
    n_q: usize,
    d_v: usize,
    rows: &Range<usize>,
    position: impl Fn(usize) -> isize,
) -> Vec<Tile<'a, T>> {
    let mut tiles = Vec::new();
    let heads = out.chunks_exact_mut((n_q * d_v).max(1)).zip(lse.chunks_exact_mut(n_q.max(1)));
    for (head, (out, lse)) in heads.enumerate() {
        let (mut out, mut lse) = (&mut out[rows.start * d_v..rows.end * d_v], &mut lse[rows.clone()]);
        let mut first = rows.start;
        while !lse.is_empty() {
            let len = TILE - position(first).rem_euclid(TILE as isize) as usize;
            let len = len.min(lse.len());
            let (o, o_rest) = std::mem::take(&mut out).split_at_mut(len * d_v);
            let (l, l_rest) = std::mem::take(&mut lse).split_at_mut(len);
            tiles.push(Tile { head, first, out: o, lse: l });
            (out, lse) = (o_rest, l_rest);
            first += len;
        }
    }
    tiles
}

/// Merges a second part of the same rows.
pub(super) fn merge<T: Real>(out: &mut [T], lse: &mut [T], out2: &[T], lse2: &[T]) {
    let d_v = out.len() / lse.len().max(1);
    let first = out.chunks_exact_mut(d_v.max(1)).zip(lse);
    for ((o, l), (o2, &l2)) in first.zip(out2.chunks_exact(d_v.max(1)).zip(lse2)) {
        merge_lse(o, l, o2, l2);
    }
}

/// Writes the mean of some rows.
pub(super) fn mean_into<T: Real>(rows: MatRef<'_, T>, out: &mut [T]) {
    out.fill(T::ZERO);
    for row in rows.iter_rows() {
        out.iter_mut().zip(row).for_each(|(o, &x)| *o += x);
    }
    let factor = T::ONE / T::from_f64(rows.rows().max(1) as f64);
    out.iter_mut().for_each(|o| *o *= factor);
}

/// The means of whole runs of [`TILE`] keys and values, in order.
#[derive(Debug)]
pub(super) struct Means<'a, T> {
    k: MatRef<'a, T>,
    v: MatRef<'a, T>,
    runs_k: Vec<T>,
    runs_v: Vec<T>,
}

impl<'a, T: Real> Means<'a, T> {
    pub(super) fn new(k: MatRef<'a, T>, v: MatRef<'a, T>) -> Self {
        let runs = k.rows() / TILE;
        let (mut runs_k, mut runs_v) = (vec![T::ZERO; runs * k.cols()], vec![T::ZERO; runs * v.cols()]);
        for run in 0..runs {
            let rows = run * TILE..(run + 1) * TILE;
            mean_into(k.sub_rows(rows.clone()), &mut runs_k[run * k.cols()..(run + 1) * k.cols()]);
            mean_into(v.sub_rows(rows), &mut runs_v[run * v.cols()..(run + 1) * v.cols()]);
        }
        Self { k, v, runs_k, runs_v }
    }

    /// Attends to the means of the first `limit` keys, with the last run cut short there; returns the visited pairs.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn attend(
        &self,
        q: MatRef<'_, T>,
        limit: usize,
        bias: T,
        scale: T,
        cx: Context<'_>,
        out: &mut [T],
        lse: &mut [T],
    ) -> usize {
        let whole = limit / TILE;
        let (d, d_v) = (self.k.cols(), self.v.cols());
        let part = whole * TILE..limit;
        let (k, v) = (self.k.sub_rows(part.clone()), self.v.sub_rows(part));
        attend_means(
            q,
            &self.runs_k[..whole * d],
            &self.runs_v[..whole * d_v],
            k,
            v,
            bias,
            scale,
            cx,
            out,
            lse,
        )
    }
}

/// Attends to the means of whole runs and of one more run of given rows; returns the visited pairs.
#[allow(clippy::too_many_arguments)]
pub(super) fn attend_means<T: Real>(
    q: MatRef<'_, T>,
    runs_k: &[T],
    runs_v: &[T],
    k: MatRef<'_, T>,
    v: MatRef<'_, T>,
    bias: T,
    scale: T,
    cx: Context<'_>,
    out: &mut [T],
    lse: &mut [T],
) -> usize {
    let (d, d_v) = (k.cols(), v.cols());
    let runs = runs_k.len() / d.max(1);
    let count = T::from_f64((TILE as f64).ln()) + bias;
    let biases = vec![count; runs];
    let whole = (MatRef::new(runs_k, runs, d), MatRef::new(runs_v, runs, d_v));
    exact_rows(q, whole.0, whole.1, Some(&biases), scale, Band::ALL, cx, out, lse);
    if k.rows() > 0 {
        let mut mean = vec![T::ZERO; d + d_v];
        let (mean_k, mean_v) = mean.split_at_mut(d);
        mean_into(k, mean_k);
        mean_into(v, mean_v);
        let count = T::from_f64((k.rows() as f64).ln()) + bias;
        for (i, (o, l)) in out.chunks_exact_mut(d_v).zip(lse.iter_mut()).enumerate() {
            let logit = scale * attlas_num::kernels::dot(q.row(i), mean_k) + count;
            merge_lse(o, l, mean_v, logit);
        }
    }
    q.rows() * (runs + usize::from(k.rows() > 0))
}
