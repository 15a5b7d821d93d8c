//! Tiled attention for many rows, generic over the instruction set.
//!
//! Queries are taken in blocks, keys in tiles; a tile of keys is packed once per block of queries. Inside,
//! `MR` rows at a time go through logits, exponentials and weighted values while their logits lie in the
//! first-level cache. Logits are in base 2: $\log_2 e$ is folded into the queries and the biases.
//!
//! The bits of a row depend on its own query and on what it sees, tile by tile, and on nothing else: each
//! logit is summed over the columns in order, each output over the keys in order, sums of weights lane by
//! lane; keys that a row does not see are left out of its products, not multiplied by zero.

use super::Precision;
use super::attend::Job;
use super::block::{Block, NV, accumulate, pack_row, pack_rows, pack_transposed};
use super::simd::{Exponential, Kernel, Simd};
use crate::mat::{DType, MatRef, Real};
use crate::scratch::Scratch;
use std::ops::Range;

/// Most keys in a tile.
const TILE_MAX: usize = 512;
/// Distance between rows of logits: odd in cache lines, so that rows do not compete for the same ones.
const STRIDE: usize = TILE_MAX + 16;
/// Bytes of packed keys and values per tile, and of packed queries and outputs per block: together they stay in a
/// second-level cache of 1 MiB.
const TILE_BYTES: usize = 256 << 10;
const BLOCK_BYTES: usize = 576 << 10;
/// Most rows in a block: more of them repay the packing of a tile no further.
const ROWS_MAX: usize = 576;

/// Sizes of tiles and blocks.
#[derive(Clone, Copy)]
struct Plan {
    tile: usize,
    rows: usize,
    /// Value columns, rounded up to whole register blocks.
    d_v: usize,
}

impl Plan {
    #[inline(always)]
    fn new<S: Simd, const MR: usize>(job: &Job<'_, S::T>) -> Self {
        let width = NV * S::LANES;
        let d_v = job.v.cols().next_multiple_of(width);
        let row_bytes = (job.k.cols() + d_v).max(1) * size_of::<S::T>();
        let fitting = (TILE_BYTES / row_bytes / width * width).max(width);
        let wanted = if job.tile_k == 0 { TILE_MAX / 2 } else { job.tile_k.min(TILE_MAX) };
        let tile = wanted.next_multiple_of(width).min(TILE_MAX).min(fitting);
        let rows = (BLOCK_BYTES / row_bytes).min(ROWS_MAX).min(job.q.rows().next_multiple_of(MR));
        Self { tile, rows: (rows / MR * MR).max(MR), d_v }
    }
}

/// What is kept per row of a block: the running maximum, the sum of weights lane by lane.
struct State<'s, T> {
    max: &'s mut [T],
    sum: &'s mut [T],
    /// `rows × d_v`, not yet divided by the sum.
    acc: &'s mut [T],
}

#[inline(always)]
pub(super) fn attend<S: Simd, const MR: usize>(
    s: S,
    job: &Job<'_, S::T>,
    scratch: &Scratch,
    out: &mut [S::T],
    lse: &mut [S::T],
) {
    let rounded = job.precision == Precision::Bf16 && S::T::DTYPE == DType::F32;
    if rounded && !S::PAIRS && s.attend_pairs(job, scratch, out, lse) {
        return;
    }
    let plan = Plan::new::<S, MR>(job);
    let d = job.q.cols();
    let (rows, n_k, d_v) = (job.q.rows(), job.k.rows(), job.v.cols());
    let factor = S::T::from_f64(job.scale.to_f64() * std::f64::consts::LOG2_E);

    let mut queries = scratch.take::<S::T>(plan.rows * d);
    let mut keys = scratch.take::<S::T>(plan.tile * d);
    let mut values = scratch.take::<S::T>(plan.tile * plan.d_v);
    let mut bias = scratch.take::<S::T>(plan.tile);
    let mut logits = scratch.take::<S::T>(MR * STRIDE);
    let mut max = scratch.take::<S::T>(plan.rows);
    let mut sum = scratch.take::<S::T>(plan.rows * S::LANES);
    let mut acc = scratch.take::<S::T>(plan.rows * plan.d_v);

    for i0 in (0..rows).step_by(plan.rows) {
        let live = (rows - i0).min(plan.rows);
        for (g, dst) in queries.chunks_exact_mut((d * MR).max(1)).take(live.div_ceil(MR)).enumerate() {
            let first = i0 + g * MR;
            pack_rows::<S, MR>(s, job.q, first, (rows - first).min(MR), factor, dst);
            if rounded {
                round_rows(s, dst, MR);
            }
        }
        max.fill(S::T::NEG_INFINITY);
        sum.fill(S::T::ZERO);
        acc.fill(S::T::ZERO);
        let mut state = State { max: &mut max, sum: &mut sum, acc: &mut acc };

        // Ranges begin and end in the order of the rows.
        let seen = job.band.range(i0, n_k).start..job.band.range(i0 + live - 1, n_k).end;
        let mut j0 = seen.start / plan.tile * plan.tile;
        while j0 < seen.end {
            let j1 = (j0 + plan.tile).min(n_k);
            let needed = seen.start.max(j0) - j0..seen.end.min(j1) - j0;
            s.call(Pack {
                job,
                plan,
                first: j0,
                needed,
                rounded,
                keys: &mut keys,
                values: &mut values,
                bias: &mut bias,
            });
            let groups = live.div_ceil(MR);
            for g in 0..groups {
                // The next tile is on its way while this one is worked on.
                let next = seen.end.min(j1 + plan.tile).max(j1) - j1;
                fetch(s, job.k, j1 + next * g / groups..j1 + next * (g + 1) / groups);
                fetch(s, job.v, j1 + next * g / groups..j1 + next * (g + 1) / groups);
                let last = (live - 1).min(g * MR + MR - 1);
                let mut ranges = [(0, 0); MR];
                for (r, range) in ranges.iter_mut().enumerate() {
                    // A row past the last one follows it, so as not to cut what the others share.
                    let Range { start, end } = job.band.range(i0 + (g * MR + r).min(last), n_k);
                    let (start, end) = (start.clamp(j0, j1) - j0, end.clamp(j0, j1) - j0);
                    *range = (start, end.max(start));
                }
                let tile = Tile {
                    plan,
                    queries: &queries[g * MR * d..(g + 1) * MR * d],
                    keys: &keys,
                    values: &values,
                    bias: job.bias.map(|_| &bias[..]),
                    rounded,
                };
                tile.update::<S, MR>(s, &ranges, &mut logits, g * MR, &mut state);
            }
            j0 += plan.tile;
        }

        let rows = i0..i0 + live;
        s.call(Finish {
            state: &state,
            stride: plan.d_v,
            out: &mut out[i0 * d_v..],
            d_v,
            lse: &mut lse[rows],
        });
    }
}

/// Divides the outputs by the sums of weights and writes them out.
struct Finish<'t, 's, T> {
    state: &'t State<'s, T>,
    stride: usize,
    out: &'t mut [T],
    d_v: usize,
    lse: &'t mut [T],
}

impl<S: Simd> Kernel<S> for Finish<'_, '_, S::T> {
    #[inline(always)]
    fn run(self, s: S) {
        for (r, lse) in self.lse.iter_mut().enumerate() {
            let l = s.reduce_add(load(s, self.state.sum, r * S::LANES));
            let acc = &self.state.acc[r * self.stride..(r + 1) * self.stride];
            let out = &mut self.out[r * self.d_v..(r + 1) * self.d_v];
            if l == S::T::ZERO {
                out.fill(S::T::ZERO);
                *lse = S::T::NEG_INFINITY;
                continue;
            }
            let share = s.splat(S::T::ONE / l);
            for (n, out) in out.chunks_mut(S::LANES).enumerate() {
                let x = s.mul(load(s, acc, n * S::LANES), share);
                // SAFETY: the chunk holds as many elements as are written.
                unsafe { s.store_part(out.as_mut_ptr(), x, out.len()) };
            }
            *lse = S::T::from_f64(self.state.max[r].to_f64() * std::f64::consts::LN_2 + l.to_f64().ln());
        }
    }
}

/// Asks for rows of a matrix to be brought near.
#[inline(always)]
fn fetch<S: Simd>(s: S, a: MatRef<'_, S::T>, rows: Range<usize>) {
    for i in rows {
        for x in a.row(i).chunks(64 / size_of::<S::T>()) {
            s.prefetch(x.as_ptr());
        }
    }
}

/// Packs a tile: the keys `needed` of those from `first` on, transposed, with their values and biases.
struct Pack<'t, 'j, T> {
    job: &'t Job<'j, T>,
    plan: Plan,
    first: usize,
    needed: Range<usize>,
    rounded: bool,
    keys: &'t mut [T],
    values: &'t mut [T],
    bias: &'t mut [T],
}

impl<S: Simd> Kernel<S> for Pack<'_, '_, S::T> {
    #[inline(always)]
    fn run(self, s: S) {
        let Self { job, plan, first, needed, rounded, keys, values, bias } = self;
        let (width, d) = (NV * S::LANES, job.k.cols());
        let panels = needed.start / width..needed.end.div_ceil(width);
        let available = (job.k.rows() - first).min(plan.tile);
        for p in panels.clone() {
            let count = (available - p * width).min(width);
            pack_transposed(
                s,
                job.k,
                first + p * width,
                count,
                &mut keys[p * width * d..(p + 1) * width * d],
            );
        }
        // Where keys go in pairs, the partner of the first and last one must be there too.
        let whole =
            if S::PAIRS { needed.start / 2 * 2..needed.end.next_multiple_of(2) } else { needed.clone() };
        for j in whole.clone() {
            let row = if needed.contains(&j) { job.v.row(first + j) } else { &[] };
            for c in 0..plan.d_v / width {
                let at = (c * plan.tile + j) * width;
                let src = &row[(c * width).min(row.len())..((c + 1) * width).min(row.len())];
                pack_row(s, src, &mut values[at..at + width]);
            }
        }
        if let Some(b) = job.bias {
            for (j, &b) in b[first..first + available].iter().enumerate() {
                bias[j] = b * S::T::LOG2_E.0;
                if b == S::T::NEG_INFINITY && needed.contains(&j) {
                    // Nothing that a hidden key holds may reach a sum.
                    let panel = &mut keys[j / width * width * d..(j / width + 1) * width * d];
                    panel[j % width..].iter_mut().step_by(width).for_each(|x| *x = S::T::ZERO);
                    for c in 0..plan.d_v / width {
                        let at = (c * plan.tile + j) * width;
                        values[at..at + width].fill(S::T::ZERO);
                    }
                }
            }
        }
        if rounded {
            for p in panels {
                round_rows(s, &mut keys[p * width * d..(p + 1) * width * d], width);
            }
            for c in 0..plan.d_v / width {
                let at = c * plan.tile * width;
                let range = at + whole.start * width..at + whole.end * width;
                if S::PAIRS {
                    // Pair `t` of the tile lies at row `t`.
                    round_rows(s, &mut values[range.clone()], width);
                    let half = range.len() / 2;
                    values.copy_within(range.start..range.start + half, at + whole.start / 2 * width);
                } else {
                    round_rows(s, &mut values[range], width);
                }
            }
        }
    }
}

/// Rounds rows of `width` elements to bfloat16. Where the instruction set multiplies pairs, rows `2l` and
/// `2l + 1` become row `l`; an odd last row is paired with zeros.
#[inline(always)]
fn round_rows<S: Simd>(s: S, x: &mut [S::T], width: usize) {
    let rows = x.len() / width;
    let mut at = 0;
    while at < width {
        let count = (width - at).min(S::LANES);
        for l in 0..if S::PAIRS { rows.div_ceil(2) } else { rows } {
            // SAFETY: `count` elements from `at` on lie in each row below `rows`.
            unsafe {
                let p = x.as_mut_ptr();
                let rounded = if S::PAIRS {
                    let low = s.load_part(p.add(2 * l * width + at), count);
                    let high = if 2 * l + 1 < rows {
                        s.load_part(p.add((2 * l + 1) * width + at), count)
                    } else {
                        s.splat(S::T::ZERO)
                    };
                    s.pair(low, high)
                } else {
                    s.round_bf16(s.load_part(p.add(l * width + at), count))
                };
                s.store_part(p.add(l * width + at), rounded, count);
            }
        }
        at += S::LANES;
    }
}

#[inline(always)]
fn load<S: Simd>(s: S, x: &[S::T], at: usize) -> S::V {
    let x = &x[at..at + S::LANES];
    // SAFETY: the slice holds a register.
    unsafe { s.load(x.as_ptr()) }
}

#[inline(always)]
fn store<S: Simd>(s: S, x: &mut [S::T], at: usize, value: S::V) {
    let x = &mut x[at..at + S::LANES];
    // SAFETY: the slice holds a register.
    unsafe { s.store(x.as_mut_ptr(), value) };
}

/// One packed tile of keys as a group of `MR` rows meets it.
struct Tile<'t, T> {
    plan: Plan,
    /// `[d][MR]`
    queries: &'t [T],
    /// `[panel][d][NV · LANES]`
    keys: &'t [T],
    /// `[panel][tile][NV · LANES]`
    values: &'t [T],
    bias: Option<&'t [T]>,
    rounded: bool,
}

impl<T: Real> Tile<'_, T> {
    /// Adds the tile to the rows from `row` on; `ranges` says which of its keys each sees.
    #[inline(always)]
    fn update<S: Simd<T = T>, const MR: usize>(
        &self,
        s: S,
        ranges: &[(usize, usize); MR],
        logits: &mut [T],
        row: usize,
        state: &mut State<'_, T>,
    ) {
        let (mut lo, mut hi, mut common_lo, mut common_hi) = (usize::MAX, 0, 0, usize::MAX);
        for &(start, end) in ranges {
            if start < end {
                lo = lo.min(start);
                hi = hi.max(end);
            }
            common_lo = common_lo.max(start);
            common_hi = common_hi.min(end);
        }
        if lo >= hi {
            return;
        }
        let common = (common_lo, common_hi.max(common_lo));
        let mut top = [s.splat(T::NEG_INFINITY); MR];
        s.call(Logits { tile: self, ranges, seen: (lo, hi), common, logits: &mut *logits, top: &mut top });
        s.call(Weights { tile: self, ranges, top: &top, logits: &mut *logits, row, state: &mut *state });
        s.call(Outputs { tile: self, ranges, common, weights: logits, row, state });
    }
}

/// Fills `logits` for the keys `seen`, with −∞ for those that a row does not see, and collects the greatest
/// of each row and lane in `top`.
struct Logits<'t, S: Simd, const MR: usize> {
    tile: &'t Tile<'t, S::T>,
    ranges: &'t [(usize, usize); MR],
    seen: (usize, usize),
    common: (usize, usize),
    logits: &'t mut [S::T],
    top: &'t mut [S::V; MR],
}

impl<S: Simd, const MR: usize> Kernel<S> for Logits<'_, S, MR> {
    #[inline(always)]
    fn run(self, s: S) {
        let width = NV * S::LANES;
        let (tile, (lo, hi)) = (self.tile, self.seen);
        let d = tile.queries.len() / MR;
        assert!(
            self.logits.len() >= MR * STRIDE && hi <= tile.plan.tile && tile.keys.len() >= tile.plan.tile * d
        );
        for p in lo / width..hi.div_ceil(width) {
            let mut acc: Block<S, MR> = [[s.splat(S::T::ZERO); NV]; MR];
            // SAFETY: the group holds `d` steps of `MR`, and panel `p` of the tile `d` steps of `width`.
            unsafe {
                let keys = tile.keys.as_ptr().add(p * width * d);
                let depth = if S::PAIRS { d.div_ceil(2) } else { d };
                accumulate::<S, MR>(s, depth, tile.queries.as_ptr(), (1, MR), keys, &mut acc);
            }
            if let Some(bias) = tile.bias {
                for v in 0..NV {
                    let bias = load(s, bias, p * width + v * S::LANES);
                    for acc in &mut acc {
                        acc[v] = s.add(acc[v], bias);
                    }
                }
            }
            // SAFETY: row `r` and the keys of panel `p` lie inside `logits`.
            unsafe {
                let dst = self.logits.as_mut_ptr().add(p * width);
                for r in 0..MR {
                    for v in 0..NV {
                        s.store(dst.add(r * STRIDE + v * S::LANES), acc[r][v]);
                    }
                }
                if self.common.0 <= p * width && (p + 1) * width <= self.common.1 {
                    for r in 0..MR {
                        for v in 0..NV {
                            self.top[r] = s.max(acc[r][v], self.top[r]);
                        }
                    }
                } else {
                    for r in 0..MR {
                        for v in 0..NV {
                            let at = p * width + v * S::LANES;
                            let (start, end) = self.ranges[r];
                            let x = s.load(dst.add(r * STRIDE + v * S::LANES));
                            let x = s.hide_outside(x, start.saturating_sub(at), end.saturating_sub(at));
                            s.store(dst.add(r * STRIDE + v * S::LANES), x);
                            self.top[r] = s.max(x, self.top[r]);
                        }
                    }
                }
            }
        }
    }
}

/// Turns logits into weights and brings the running maxima and sums up to date.
struct Weights<'t, 's, S: Simd, const MR: usize> {
    tile: &'t Tile<'t, S::T>,
    ranges: &'t [(usize, usize); MR],
    top: &'t [S::V; MR],
    logits: &'t mut [S::T],
    row: usize,
    state: &'t mut State<'s, S::T>,
}

impl<S: Simd, const MR: usize> Kernel<S> for Weights<'_, '_, S, MR> {
    #[inline(always)]
    fn run(self, s: S) {
        let d_v = self.tile.plan.d_v;
        // All maxima first: they do not wait for one another.
        let mut tops = [S::T::NEG_INFINITY; MR];
        for r in 0..MR {
            tops[r] = s.reduce_max(self.top[r]);
        }
        for r in 0..MR {
            let ((start, end), row) = (self.ranges[r], self.row + r);
            if start >= end {
                continue;
            }
            let (old, top) = (self.state.max[row], tops[r]);
            let new = if top > old { top } else { old };
            let logits = &mut self.logits[r * STRIDE..(r + 1) * STRIDE];
            let step = if S::PAIRS { NV * S::LANES } else { S::LANES };
            let (start, end) = (start / step * step, end.next_multiple_of(step));
            let count = (end - start) / S::LANES;
            let whole = logits;
            let logits = &mut whole[start..end];
            let mut sum = load(s, self.state.sum, row * S::LANES);
            if new == S::T::NEG_INFINITY {
                // Nothing to see, unless what is there is not a number.
                if logits.iter().any(|x| x.is_nan()) {
                    sum = s.splat(S::T::NAN);
                }
                logits.fill(S::T::ZERO);
            } else {
                if new != old {
                    let shrink = s.exp2(s.splat(old - new));
                    sum = s.mul(sum, shrink);
                    let acc = &mut self.state.acc[row * d_v..(row + 1) * d_v];
                    for at in (0..d_v).step_by(S::LANES) {
                        store(s, acc, at, s.mul(load(s, acc, at), shrink));
                    }
                    self.state.max[row] = new;
                }
                let shift = s.splat(new);
                let p = logits.as_mut_ptr();
                for n in 0..count {
                    // SAFETY: `logits` holds `count` whole registers.
                    unsafe {
                        let p = p.add(n * S::LANES);
                        let weight = s.exp2(s.sub(s.load(p), shift));
                        sum = s.add(sum, weight);
                        s.store(p, weight);
                    }
                }
                if self.tile.rounded && !S::PAIRS {
                    round_rows(s, logits, S::LANES);
                }
            }
            if S::PAIRS {
                // Two registers of weights become one of pairs, in the lower half of the row.
                for n in 0..count / NV {
                    let (low, high) = (
                        load(s, whole, start + NV * n * S::LANES),
                        load(s, whole, start + (NV * n + 1) * S::LANES),
                    );
                    store(s, whole, start / 2 + n * S::LANES, s.narrow(low, high));
                }
            }
            store(s, self.state.sum, row * S::LANES, sum);
        }
    }
}

/// Adds the weighted values: register blocks over the keys that all rows see, one row at a time over those
/// before and after that only some see.
struct Outputs<'t, 's, T, const MR: usize> {
    tile: &'t Tile<'t, T>,
    ranges: &'t [(usize, usize); MR],
    common: (usize, usize),
    weights: &'t [T],
    row: usize,
    state: &'t mut State<'s, T>,
}

impl<S: Simd, const MR: usize> Kernel<S> for Outputs<'_, '_, S::T, MR> {
    #[inline(always)]
    fn run(self, s: S) {
        let (tile, ranges, weights, common) = (self.tile, self.ranges, self.weights, self.common);
        let (width, d_v) = (NV * S::LANES, tile.plan.d_v);
        // Steps of the sums are keys, or pairs of keys: those that all rows see whole.
        let unit = if S::PAIRS { 2 } else { 1 };
        let from = common.0.div_ceil(unit);
        let to = (common.1 / unit).max(from);
        let ragged = ranges.iter().any(|&range| range != (from * unit, to * unit));
        let acc = &mut self.state.acc[self.row * d_v..(self.row + MR) * d_v];
        assert!(
            weights.len() >= MR * STRIDE && tile.values.len() >= tile.plan.tile * d_v && to <= tile.plan.tile
        );
        for c in 0..d_v / width {
            let values = &tile.values[c * tile.plan.tile * width..(c + 1) * tile.plan.tile * width];
            if ragged {
                for r in 0..MR {
                    let head = ranges[r].0..ranges[r].1.min(from * unit);
                    one_row(s, &weights[r * STRIDE..], values, head, &mut acc[r * d_v + c * width..]);
                }
            }
            if from < to {
                // SAFETY: weights and values hold all keys of the tile, `acc` all columns of the group.
                unsafe {
                    let dst = acc.as_mut_ptr().add(c * width);
                    let mut block: Block<S, MR> = [[s.splat(S::T::ZERO); NV]; MR];
                    for r in 0..MR {
                        for v in 0..NV {
                            block[r][v] = s.load(dst.add(r * d_v + v * S::LANES));
                        }
                    }
                    let (left, right) = (weights.as_ptr().add(from), values.as_ptr().add(from * width));
                    accumulate::<S, MR>(s, to - from, left, (STRIDE, 1), right, &mut block);
                    for r in 0..MR {
                        for v in 0..NV {
                            s.store(dst.add(r * d_v + v * S::LANES), block[r][v]);
                        }
                    }
                }
            }
            if ragged {
                for r in 0..MR {
                    let tail = ranges[r].0.max(to * unit)..ranges[r].1;
                    one_row(s, &weights[r * STRIDE..], values, tail, &mut acc[r * d_v + c * width..]);
                }
            }
        }
    }
}

/// `acc += Σ_j weights[j] · values[j]` for the keys of `range`, one register block of columns.
#[inline(always)]
fn one_row<S: Simd>(s: S, weights: &[S::T], values: &[S::T], range: Range<usize>, acc: &mut [S::T]) {
    if range.is_empty() {
        return;
    }
    let width = NV * S::LANES;
    let mut sums = [load(s, acc, 0), load(s, acc, S::LANES)];
    let unit = if S::PAIRS { 2 } else { 1 };
    for t in range.start / unit..range.end.div_ceil(unit) {
        let weight = s.splat(weights[t]);
        for v in 0..NV {
            let mut x = load(s, values, t * width + v * S::LANES);
            if S::PAIRS {
                x = s.keep(x, range.contains(&(2 * t)), range.contains(&(2 * t + 1)));
            }
            sums[v] = s.mac(weight, x, sums[v]);
        }
    }
    store(s, acc, 0, sums[0]);
    store(s, acc, S::LANES, sums[1]);
}
