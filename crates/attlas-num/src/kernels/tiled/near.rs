//! Operands of a block of rows: its queries transposed, and the keys and values of a tile, in place or copied.

use super::super::attend::Job;
use super::super::block::pack_transposed;
use super::super::simd::{Kernel, Simd};
use super::{Plan, load, load_some, store, store_some};
use crate::mat::{MatRef, Real};
use std::ops::Range;

/// Transposes rows `row..row + width` of the queries, times `factor`, to `[d][width]`; missing rows are 0.
pub(super) struct PackQueries<'t, 'q, T> {
    pub(super) q: MatRef<'q, T>,
    pub(super) row: usize,
    pub(super) width: usize,
    pub(super) factor: T,
    pub(super) rounded: bool,
    pub(super) dst: &'t mut [T],
}

impl<S: Simd> Kernel<S> for PackQueries<'_, '_, S::T> {
    #[inline(always)]
    fn run(self, s: S) {
        let Self { q, row, width, factor, rounded, dst } = self;
        pack_transposed(s, q, row, (q.rows() - row).min(width), width, dst);
        let factor = s.splat(factor);
        for at in (0..dst.len()).step_by(S::LANES) {
            let x = s.mul(load(s, dst, at), factor);
            store(s, dst, at, if rounded && !S::PAIRS { s.round_bf16(x) } else { x });
        }
        if S::PAIRS {
            // Columns `2l` and `2l + 1` become row `l` of pairs; an odd last column is paired with zeros.
            for l in 0..(dst.len() / width).div_ceil(2) {
                for at in (0..width).step_by(S::LANES) {
                    let (low, high) = (2 * l * width + at, (2 * l + 1) * width + at);
                    let pair = s.pair(load(s, dst, low), load_some(s, dst, high));
                    store(s, dst, l * width + at, pair);
                }
            }
        }
    }
}

/// Rows of a tile: one per key, or, for values in pairs, one per two keys.
#[derive(Clone, Copy)]
pub(super) struct Rows<'t, T> {
    pub(super) data: &'t [T],
    pub(super) stride: usize,
}

/// Returns the keys and values of the tile `tile`, of which only `needed` is read: in place if they are contiguous and
/// need no change, otherwise as copies.
#[inline(always)]
pub(super) fn near<'t, S: Simd, const MR: usize>(
    s: S,
    job: &'t Job<'_, S::T>,
    plan: Plan,
    rounded: bool,
    tile: Range<usize>,
    needed: Range<usize>,
    keys: &'t mut [S::T],
    values: &'t mut [S::T],
) -> (Rows<'t, S::T>, Rows<'t, S::T>) {
    let (d, d_v) = (job.k.cols(), job.v.cols());
    // Keys and values hidden by a bias must not be read; any other bias leaves them unchanged.
    let hides = |b: &[S::T]| b[needed.clone()].contains(&S::T::NEG_INFINITY);
    let as_it_is = !rounded && !job.bias.is_some_and(hides);
    let keys = if as_it_is && job.k.stride() == d && tile.len().is_multiple_of(MR) {
        Rows { data: &job.k.data()[tile.start * d..tile.end * d], stride: d }
    } else {
        let stride = if S::PAIRS { d.div_ceil(2) } else { d };
        s.call(CopyKeys { job, rounded, first: tile.start, needed: needed.clone(), stride, dst: &mut *keys });
        Rows { data: keys, stride }
    };
    let values = if as_it_is && job.v.stride() == d_v && plan.d_v == d_v {
        Rows { data: &job.v.data()[tile.start * d_v..tile.end * d_v], stride: d_v }
    } else {
        s.call(CopyValues { job, rounded, first: tile.start, needed, stride: plan.d_v, dst: &mut *values });
        Rows { data: values, stride: plan.d_v }
    };
    (keys, values)
}

/// Returns row `j` of `a`, or an empty slice if the key is not needed or its bias hides it: no element of such a key
/// may reach a sum.
#[inline(always)]
fn row_if_seen<'a, T: Real>(job: &Job<'a, T>, a: MatRef<'a, T>, needed: &Range<usize>, j: usize) -> &'a [T] {
    let seen = needed.contains(&j) && job.bias.is_none_or(|b| b[j] != T::NEG_INFINITY);
    if seen { a.row(j) } else { &[] }
}

/// Copies keys; their columns in pairs where the instruction set multiplies pairs.
struct CopyKeys<'t, 'j, T> {
    job: &'t Job<'j, T>,
    rounded: bool,
    first: usize,
    needed: Range<usize>,
    stride: usize,
    dst: &'t mut [T],
}

impl<S: Simd> Kernel<S> for CopyKeys<'_, '_, S::T> {
    #[inline(always)]
    fn run(self, s: S) {
        for j in self.needed.clone() {
            let src = row_if_seen(self.job, self.job.k, &self.needed, j);
            let dst = &mut self.dst[(j - self.first) * self.stride..][..self.stride];
            for at in (0..self.stride).step_by(S::LANES) {
                let x = if S::PAIRS {
                    s.narrow(load_some(s, src, 2 * at), load_some(s, src, 2 * at + S::LANES))
                } else {
                    let x = load_some(s, src, at);
                    if self.rounded { s.round_bf16(x) } else { x }
                };
                store_some(s, dst, at, x);
            }
        }
    }
}

/// Copies values, with zeros in the columns after the last; two keys to a row where the instruction set multiplies
/// pairs.
struct CopyValues<'t, 'j, T> {
    job: &'t Job<'j, T>,
    rounded: bool,
    first: usize,
    needed: Range<usize>,
    stride: usize,
    dst: &'t mut [T],
}

impl<S: Simd> Kernel<S> for CopyValues<'_, '_, S::T> {
    #[inline(always)]
    fn run(self, s: S) {
        let unit = if S::PAIRS { 2 } else { 1 };
        let (from, to) = (self.needed.start - self.first, self.needed.end - self.first);
        for t in from / unit..to.div_ceil(unit) {
            let row = |j: usize| row_if_seen(self.job, self.job.v, &self.needed, self.first + j);
            let dst = &mut self.dst[t * self.stride..(t + 1) * self.stride];
            for at in (0..self.stride).step_by(S::LANES) {
                let x = if S::PAIRS {
                    s.pair(load_some(s, row(2 * t), at), load_some(s, row(2 * t + 1), at))
                } else {
                    let x = load_some(s, row(t), at);
                    if self.rounded { s.round_bf16(x) } else { x }
                };
                store_some(s, dst, at, x);
            }
        }
    }
}
