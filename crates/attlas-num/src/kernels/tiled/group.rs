//! One group of rows over one tile of keys: logits, weights, outputs.

use super::super::attend::Job;
use super::super::block::{Block, accumulate};
use super::super::simd::{Exponential, Kernel, Simd, softcap};
use super::near::Rows;
use super::{OnlineSoftmax, Plan, load, store};
use crate::mat::Real;
use std::ops::Range;

/// One tile of keys, from `first` to `end`, paired with a group of `live` rows from `row` on.
pub(super) struct Tile<'t, 'j, T> {
    pub(super) job: &'t Job<'j, T>,
    pub(super) plan: Plan,
    pub(super) first: usize,
    pub(super) end: usize,
    pub(super) row: usize,
    pub(super) live: usize,
    pub(super) keys: Rows<'t, T>,
    pub(super) values: Rows<'t, T>,
    /// In base 2.
    pub(super) bias: Option<&'t [T]>,
    pub(super) rounded: bool,
}

impl<T: Real> Tile<'_, '_, T> {
    /// Adds the tile to the state of a group.
    #[inline(always)]
    pub(super) fn update<S: Simd<T = T>, const MR: usize, const NV: usize>(
        &self,
        s: S,
        queries: &[T],
        logits: &mut [T],
        mut state: OnlineSoftmax<'_, T>,
    ) {
        // Keys that at least one row sees, and keys that all rows see: neither end of a row's key range decreases from
        // row to row.
        let of_row = |i: usize| {
            let Range { start, end } = self.job.band.range(i, self.job.k.rows());
            (start.clamp(self.first, self.end) - self.first, end.clamp(self.first, self.end) - self.first)
        };
        let ((lo, common_hi), (common_lo, hi)) = (of_row(self.row), of_row(self.row + self.live - 1));
        if lo >= hi {
            return;
        }
        let (seen, common) = (lo..hi, common_lo..common_hi.max(common_lo));
        let mut top = [s.splat(T::NEG_INFINITY); NV];
        s.call(Logits::<S, MR, NV> {
            tile: self,
            seen: seen.clone(),
            common: common.clone(),
            queries,
            logits: &mut *logits,
            top: &mut top,
        });
        let rounded = self.rounded;
        s.call(Weights { rounded, seen: seen.clone(), top: &top, weights: &mut *logits, state: &mut state });
        s.call(Outputs::<T, MR, NV> { tile: self, seen, common, weights: logits, acc: state.acc });
    }

    /// Returns the rows of the group that see key `j` of the tile.
    #[inline(always)]
    fn lanes(&self, j: usize) -> Range<usize> {
        let j = self.first + j;
        if j >= self.end {
            return 0..0;
        }
        let rows = self.job.band.rows(j);
        rows.start.saturating_sub(self.row)..rows.end.saturating_sub(self.row)
    }
}

/// Selects `new` in the rows `rows` of a group and `old` in the others, for register `v`.
#[inline(always)]
fn only<S: Simd>(s: S, rows: &Range<usize>, v: usize, new: S::V, old: S::V) -> S::V {
    let at = v * S::LANES;
    s.inside(new, old, rows.start.saturating_sub(at), rows.end.saturating_sub(at))
}

/// Fills `logits` (`[key][rows of the group]`) for the keys `seen`, with −∞ where a row does not see the key, and
/// collects the greatest logit of each row in `top`. The range is widened to whole register blocks; the added keys
/// count as unseen.
struct Logits<'t, 'j, S: Simd, const MR: usize, const NV: usize> {
    tile: &'t Tile<'t, 'j, S::T>,
    seen: Range<usize>,
    common: Range<usize>,
    queries: &'t [S::T],
    logits: &'t mut [S::T],
    top: &'t mut [S::V; NV],
}

impl<S: Simd, const MR: usize, const NV: usize> Kernel<S> for Logits<'_, '_, S, MR, NV> {
    #[inline(always)]
    fn run(self, s: S) {
        let Self { tile, seen, common, queries, logits, top } = self;
        let width = NV * S::LANES;
        let d = queries.len() / width;
        let depth = if S::PAIRS { d.div_ceil(2) } else { d };
        let (stride, blocks) = (tile.keys.stride, seen.start / MR..seen.end.div_ceil(MR));
        assert!(stride >= depth && tile.keys.data.len() >= blocks.end * MR * stride);
        assert!(logits.len() >= blocks.end * MR * width);
        let bias = tile.bias.map(|b| &b[..blocks.end * MR]);
        let mut tops = *top;
        for p in blocks {
            let mut acc: Block<S, MR, NV> = [[s.splat(S::T::ZERO); NV]; MR];
            // SAFETY: `MR` rows of `stride` elements lie at block `p`, `depth` steps of `width` in the queries.
            unsafe {
                let keys = tile.keys.data.as_ptr().add(p * MR * stride);
                accumulate::<S, MR, NV>(s, depth, keys, (stride, 1), queries.as_ptr(), &mut acc);
            }
            if let Some(cap) = tile.job.softcap {
                for r in 0..MR {
                    for v in 0..NV {
                        acc[r][v] = softcap(s, acc[r][v], cap);
                    }
                }
            }
            if let Some(bias) = bias {
                for r in 0..MR {
                    let bias = s.splat(bias[p * MR + r]);
                    for v in 0..NV {
                        acc[r][v] = s.add(acc[r][v], bias);
                    }
                }
            }
            let block = &mut logits[p * MR * width..(p + 1) * MR * width];
            for r in 0..MR {
                for v in 0..NV {
                    // SAFETY: the block holds `MR` rows of `NV` registers.
                    unsafe { s.store(block.as_mut_ptr().add(r * width + v * S::LANES), acc[r][v]) };
                }
            }
            if common.start <= p * MR && (p + 1) * MR <= common.end {
                for r in 0..MR {
                    for v in 0..NV {
                        tops[v] = s.max(acc[r][v], tops[v]);
                    }
                }
            } else {
                // Masks in memory, so that the sums above stay in registers.
                for (r, row) in block.chunks_exact_mut(width).enumerate() {
                    let rows = tile.lanes(p * MR + r);
                    for v in 0..NV {
                        let x = load(s, row, v * S::LANES);
                        let x = only(s, &rows, v, x, s.splat(S::T::NEG_INFINITY));
                        store(s, row, v * S::LANES, x);
                        tops[v] = s.max(x, tops[v]);
                    }
                }
            }
        }
        *top = tops;
    }
}

/// Turns logits into weights, in pairs of keys where the instruction set multiplies pairs; updates the running maxima
/// and sums, and rescales the outputs to the new maxima.
struct Weights<'t, 's, S: Simd, const NV: usize> {
    rounded: bool,
    seen: Range<usize>,
    top: &'t [S::V; NV],
    weights: &'t mut [S::T],
    state: &'t mut OnlineSoftmax<'s, S::T>,
}

impl<S: Simd, const NV: usize> Kernel<S> for Weights<'_, '_, S, NV> {
    #[inline(always)]
    fn run(self, s: S) {
        let Self { rounded, seen, top, weights, state } = self;
        let width = NV * S::LANES;
        let mut shift = [s.splat(S::T::ZERO); NV];
        for v in 0..NV {
            let at = v * S::LANES;
            let old = load(s, state.max, at);
            let new = s.max(top[v], old);
            // The maximum of a row without a visible key so far stays −∞; shifting by it would compute −∞ − (−∞).
            shift[v] = s.clamp_below(new, S::T::LOWEST);
            let rise = s.sub(s.clamp_above(shift[v], -S::T::LOWEST), s.clamp_below(old, S::T::LOWEST));
            if s.reduce_max(rise) > S::T::ZERO {
                let shrink = s.exp2(s.sub(old, shift[v]));
                store(s, state.max, at, new);
                store(s, state.sum, at, s.mul(load(s, state.sum, at), shrink));
                for column in state.acc.chunks_exact_mut(width) {
                    store(s, column, at, s.mul(load(s, column, at), shrink));
                }
            }
        }
        let mut sums = [s.splat(S::T::ZERO); NV];
        if S::PAIRS {
            for t in seen.start / 2..seen.end.div_ceil(2) {
                for v in 0..NV {
                    let at = v * S::LANES;
                    let low = s.exp2(s.sub(load(s, weights, 2 * t * width + at), shift[v]));
                    let high = s.exp2(s.sub(load(s, weights, (2 * t + 1) * width + at), shift[v]));
                    sums[v] = s.add(s.add(sums[v], low), high);
                    store(s, weights, t * width + at, s.pair(low, high));
                }
            }
        } else {
            for weights in weights[seen.start * width..seen.end * width].chunks_exact_mut(width) {
                for v in 0..NV {
                    let weight = s.exp2(s.sub(load(s, weights, v * S::LANES), shift[v]));
                    sums[v] = s.add(sums[v], weight);
                    store(s, weights, v * S::LANES, if rounded { s.round_bf16(weight) } else { weight });
                }
            }
        }
        for v in 0..NV {
            let at = v * S::LANES;
            store(s, state.sum, at, s.add(load(s, state.sum, at), sums[v]));
        }
    }
}

/// Adds the weighted values: to whole registers of rows for the keys that all rows see, and for the keys before and
/// after only to the rows that see them.
struct Outputs<'t, 'j, T, const MR: usize, const NV: usize> {
    tile: &'t Tile<'t, 'j, T>,
    seen: Range<usize>,
    common: Range<usize>,
    weights: &'t [T],
    acc: &'t mut [T],
}

impl<S: Simd, const MR: usize, const NV: usize> Kernel<S> for Outputs<'_, '_, S::T, MR, NV> {
    #[inline(always)]
    fn run(self, s: S) {
        let Self { tile, seen, common, weights, acc } = self;
        let (width, Rows { data, stride }) = (NV * S::LANES, tile.values);
        // A step of the sums is a key or a pair of keys; `from..to` are the steps that all rows see in full.
        let unit = if S::PAIRS { 2 } else { 1 };
        let steps = seen.start / unit..seen.end.div_ceil(unit);
        let from = common.start.div_ceil(unit);
        let to = (common.end / unit).max(from);
        assert!(weights.len() >= steps.end * width && data.len() >= steps.end * stride);
        assert!(stride >= tile.plan.d_v && from >= steps.start && to <= steps.end.max(from));
        if steps.start < from {
            let steps = steps.start..from;
            s.call(Partial::<S::T, MR, NV> { tile, steps, weights, acc: &mut *acc });
        }
        if from < to {
            for (c, acc) in acc.chunks_exact_mut(MR * width).enumerate() {
                // SAFETY: weights and values hold all steps, values `MR` columns from `c · MR` on; `acc` holds `MR` rows of
                // `NV` registers.
                unsafe {
                    let mut block: Block<S, MR, NV> = [[s.splat(S::T::ZERO); NV]; MR];
                    for r in 0..MR {
                        for v in 0..NV {
                            block[r][v] = s.load(acc.as_ptr().add(r * width + v * S::LANES));
                        }
                    }
                    let left = data.as_ptr().add(from * stride + c * MR);
                    let right = weights.as_ptr().add(from * width);
                    accumulate::<S, MR, NV>(s, to - from, left, (1, stride), right, &mut block);
                    for r in 0..MR {
                        for v in 0..NV {
                            s.store(acc.as_mut_ptr().add(r * width + v * S::LANES), block[r][v]);
                        }
                    }
                }
            }
        }
        if to < steps.end {
            let steps = to..steps.end;
            s.call(Partial::<S::T, MR, NV> { tile, steps, weights, acc });
        }
    }
}

/// Steps of the sums in which only some rows take part.
struct Partial<'t, 'j, T, const MR: usize, const NV: usize> {
    tile: &'t Tile<'t, 'j, T>,
    steps: Range<usize>,
    weights: &'t [T],
    acc: &'t mut [T],
}

impl<S: Simd, const MR: usize, const NV: usize> Kernel<S> for Partial<'_, '_, S::T, MR, NV> {
    #[inline(always)]
    fn run(self, s: S) {
        let (width, Rows { data, stride }) = (NV * S::LANES, self.tile.values);
        for (c, acc) in self.acc.chunks_exact_mut(MR * width).enumerate() {
            let mut block: Block<S, MR, NV> = [[s.splat(S::T::ZERO); NV]; MR];
            for r in 0..MR {
                for v in 0..NV {
                    block[r][v] = load(s, acc, r * width + v * S::LANES);
                }
            }
            for t in self.steps.clone() {
                let (weights, values) =
                    (&self.weights[t * width..(t + 1) * width], &data[t * stride + c * MR..][..MR]);
                partial_step(s, self.tile, t, weights, values, &mut block);
            }
            for r in 0..MR {
                for v in 0..NV {
                    store(s, acc, r * width + v * S::LANES, block[r][v]);
                }
            }
        }
    }
}

/// Adds one step of the sums for the rows that see its key, or the keys of its pair.
#[inline(always)]
fn partial_step<S: Simd, const MR: usize, const NV: usize>(
    s: S,
    tile: &Tile<'_, '_, S::T>,
    t: usize,
    weights: &[S::T],
    values: &[S::T],
    acc: &mut Block<S, MR, NV>,
) {
    if !S::PAIRS {
        add_to(s, tile.lanes(t), (true, true), weights, values, acc);
        return;
    }
    // The keys of a row are contiguous, so the rows that see only one key of a pair lie before or after those that see
    // both.
    let (one, two) = (tile.lanes(2 * t), tile.lanes(2 * t + 1));
    for (rows, other, halves) in [(&one, &two, (true, false)), (&two, &one, (false, true))] {
        if rows.is_empty() || other.is_empty() {
            add_to(s, rows.clone(), halves, weights, values, acc);
        } else {
            add_to(s, rows.start..rows.end.min(other.start), halves, weights, values, acc);
            add_to(s, rows.start.max(other.end)..rows.end, halves, weights, values, acc);
        }
    }
    let both = one.start.max(two.start)..one.end.min(two.end);
    add_to(s, both, (true, true), weights, values, acc);
}

/// Adds one step of the sums for the rows `rows`, with the selected halves of a pair.
#[inline(always)]
fn add_to<S: Simd, const MR: usize, const NV: usize>(
    s: S,
    rows: Range<usize>,
    (low, high): (bool, bool),
    weights: &[S::T],
    values: &[S::T],
    acc: &mut Block<S, MR, NV>,
) {
    if rows.is_empty() {
        return;
    }
    for v in 0..NV {
        let right = load(s, weights, v * S::LANES);
        for r in 0..MR {
            let left = s.keep(s.splat(values[r]), low, high);
            acc[r][v] = only(s, &rows, v, s.mac(left, right, acc[r][v]), acc[r][v]);
        }
    }
}
