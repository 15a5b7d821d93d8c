//! Tiled attention for many rows, generic over the instruction set.
//!
//! Each query row occupies one lane of a register. A group is up to three registers of rows, and all its state is
//! stored with the rows side by side: the transposed queries, the logits and weights of a tile of keys, the running
//! maxima and sums, the outputs. An element of a key or a value is one number broadcast to a register and read in
//! place, so only the queries are transposed, and maxima and sums over keys run lane by lane. A block of rows goes
//! through the keys tile by tile; within a tile, one group at a time computes logits, weights and outputs while its
//! weights are in the nearest caches. Logits are in base 2: $\log_2 e$ is folded into the queries and the biases.
//!
//! The bits of a row depend only on its own query and on the keys and values it sees, tile by tile: each logit is
//! summed over the columns in order, each output and each sum of weights over the keys in order; keys that a row does
//! not see are left out of its products, not multiplied by zero.

mod group;
mod near;

use super::Precision;
use super::attend::Job;
use super::block::fetch;
use super::simd::{Exponential, Kernel, Simd};
use crate::mat::{DType, Real};
use crate::scratch::Scratch;
use group::Tile;
use near::{PackQueries, near};
use std::ops::Range;

/// Largest and default number of keys in a tile: the weights of a group stay in the first-level cache.
const TILE_MAX: usize = 512;
const TILE: usize = 128;
/// Bytes of keys and values per tile, and of transposed queries and outputs per block: together they stay in a
/// second-level cache of 1 MiB.
const TILE_BYTES: usize = 256 << 10;
const BLOCK_BYTES: usize = 576 << 10;
/// Most registers of rows in a group.
const VECTORS: usize = 3;
/// Most rows in a block: a larger block no longer gains from reading each tile for more rows.
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
        let d_v = job.v.cols().next_multiple_of(MR);
        let row_bytes = (job.k.cols() + d_v).max(1) * size_of::<S::T>();
        let fitting = (TILE_BYTES / row_bytes / MR * MR).max(MR);
        let wanted = if job.tile_k == 0 { TILE } else { job.tile_k.min(TILE_MAX) };
        let width = VECTORS * S::LANES;
        let rows = (BLOCK_BYTES / row_bytes).min(ROWS_MAX) / width * width;
        Self {
            tile: wanted.next_multiple_of(MR).min(fitting),
            rows: rows.max(width).min(job.q.rows().next_multiple_of(S::LANES)),
            d_v,
        }
    }
}

/// Rows of a block that are processed together: `vectors` registers of them from row `first` on.
#[derive(Clone, Copy)]
struct Group {
    first: usize,
    vectors: usize,
}

/// Cuts `rows` into the fewest possible groups, all of about the same size.
#[inline(always)]
fn groups(rows: usize, lanes: usize) -> impl Iterator<Item = Group> {
    let vectors = rows.div_ceil(lanes);
    let count = vectors.div_ceil(VECTORS);
    (0..count).map(move |g| {
        let (first, end) = (vectors * g / count, vectors * (g + 1) / count);
        Group { first: first * lanes, vectors: end - first }
    })
}

/// Running state of the rows of a block or a group: the maximum, the sum of weights, and the output before division by
/// the sum, as `[d_v][rows]` group by group.
struct OnlineSoftmax<'s, T> {
    max: &'s mut [T],
    sum: &'s mut [T],
    acc: &'s mut [T],
}

impl<T> OnlineSoftmax<'_, T> {
    /// Returns the state of the rows of one group.
    #[inline(always)]
    fn rows(&mut self, rows: Range<usize>, d_v: usize) -> OnlineSoftmax<'_, T> {
        OnlineSoftmax {
            max: &mut self.max[rows.clone()],
            sum: &mut self.sum[rows.clone()],
            acc: &mut self.acc[rows.start * d_v..rows.end * d_v],
        }
    }
}

#[inline(always)]
pub(super) fn attend<S: Simd, const MR: usize>(
    s: S,
    job: &Job<'_, S::T>,
    scratch: &Scratch,
    out: &mut [S::T],
    lse: &mut [S::T],
) {
    const { assert!(MR.is_multiple_of(2), "keys may go in pairs") };
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
    let mut bias = scratch.take::<S::T>(if job.bias.is_some() { plan.tile } else { 0 });
    let mut logits = scratch.take::<S::T>(plan.tile * (VECTORS * S::LANES).min(plan.rows));
    let mut max = scratch.take::<S::T>(plan.rows);
    let mut sum = scratch.take::<S::T>(plan.rows);
    let mut acc = scratch.take::<S::T>(plan.rows * plan.d_v);

    for i0 in (0..rows).step_by(plan.rows.max(1)) {
        let live = (rows - i0).min(plan.rows);
        for Group { first, vectors } in groups(live, S::LANES) {
            let width = vectors * S::LANES;
            let dst = &mut queries[first * d..(first + width) * d];
            s.call(PackQueries { q: job.q, row: i0 + first, width, factor, rounded, dst });
        }
        max.fill(S::T::NEG_INFINITY);
        sum.fill(S::T::ZERO);
        acc.fill(S::T::ZERO);
        let mut state = OnlineSoftmax { max: &mut max, sum: &mut sum, acc: &mut acc };

        // Neither end of a row's key range decreases from row to row.
        let seen = job.band.range(i0, n_k).start..job.band.range(i0 + live - 1, n_k).end;
        let mut j0 = seen.start / plan.tile * plan.tile;
        while j0 < seen.end {
            let j1 = (j0 + plan.tile).min(n_k);
            let needed = seen.start.max(j0)..seen.end.min(j1);
            let (keys, values) = near::<S, MR>(s, job, plan, rounded, j0..j1, needed, &mut keys, &mut values);
            if let Some(b) = job.bias {
                bias.fill(S::T::ZERO);
                bias.iter_mut().zip(&b[j0..j1]).for_each(|(x, &b)| *x = b * S::T::LOG2_E.0);
            }
            let ahead = seen.end.min(j1 + plan.tile).max(j1) - j1;
            for Group { first, vectors } in groups(live, S::LANES) {
                // Fetches the next tile while this one is in use.
                let width = vectors * S::LANES;
                let end = (first + width).min(live);
                let next = j1 + ahead * first / live..j1 + ahead * end / live;
                fetch(s, job.k, next.clone());
                fetch(s, job.v, next);
                let tile = Tile {
                    job,
                    plan,
                    first: j0,
                    end: j1,
                    row: i0 + first,
                    live: end - first,
                    keys,
                    values,
                    bias: job.bias.map(|_| &bias[..]),
                    rounded,
                };
                let (queries, rows) = (&queries[first * d..(first + width) * d], first..first + width);
                match vectors {
                    1 => tile.update::<S, MR, 1>(s, queries, &mut logits, state.rows(rows, plan.d_v)),
                    2 => tile.update::<S, MR, 2>(s, queries, &mut logits, state.rows(rows, plan.d_v)),
                    _ => tile.update::<S, MR, 3>(s, queries, &mut logits, state.rows(rows, plan.d_v)),
                }
            }
            j0 += plan.tile;
        }

        for Group { first, vectors } in groups(live, S::LANES) {
            let (row, width) = (i0 + first, vectors * S::LANES);
            let end = (row + width).min(rows);
            s.call(Finish {
                state: state.rows(first..first + width, plan.d_v),
                out: &mut out[row * d_v..end * d_v],
                lse: &mut lse[row..end],
            });
        }
    }
}

/// Divides the outputs of a group by the sums of weights and writes them out, row by row.
struct Finish<'t, 's, T> {
    state: OnlineSoftmax<'s, T>,
    out: &'t mut [T],
    lse: &'t mut [T],
}

impl<S: Simd> Kernel<S> for Finish<'_, '_, S::T> {
    #[inline(always)]
    fn run(self, s: S) {
        let Self { state, out, lse } = self;
        let (width, d_v) = (state.sum.len(), out.len() / lse.len());
        for (r, lse) in lse.iter_mut().enumerate() {
            let l = state.sum[r];
            if l == S::T::ZERO {
                *lse = S::T::NEG_INFINITY;
            } else {
                *lse = S::T::from_f64(state.max[r].to_f64() * std::f64::consts::LN_2 + l.to_f64().ln());
                state.sum[r] = S::T::ONE / l;
            }
        }
        let live = lse.len();
        let mut square = [S::T::ZERO; 256];
        let mut turned = [S::T::ZERO; 256];
        assert!(S::LANES * S::LANES <= square.len());
        for at in (0..live).step_by(S::LANES) {
            let share = load(s, state.sum, at);
            for c in (0..d_v).step_by(S::LANES) {
                let columns = (d_v - c).min(S::LANES);
                for l in 0..columns {
                    let x = s.mul(load(s, state.acc, (c + l) * width + at), share);
                    store(s, &mut square, l * S::LANES, x);
                }
                // SAFETY: both arrays hold a square.
                unsafe { s.transpose(square.as_ptr(), S::LANES, turned.as_mut_ptr(), S::LANES) };
                for r in at..live.min(at + S::LANES) {
                    let row = &mut out[r * d_v + c..r * d_v + c + columns];
                    store_some(s, row, 0, load(s, &turned, (r - at) * S::LANES));
                }
            }
        }
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

/// Loads up to a register of elements from `at` on, 0 past the end.
#[inline(always)]
fn load_some<S: Simd>(s: S, x: &[S::T], at: usize) -> S::V {
    let x = &x[at.min(x.len())..];
    // SAFETY: no more elements are read than the slice has.
    unsafe { if x.len() >= S::LANES { s.load(x.as_ptr()) } else { s.load_part(x.as_ptr(), x.len()) } }
}

/// Stores up to a register of elements from `at` on, as many as the slice has room for.
#[inline(always)]
fn store_some<S: Simd>(s: S, x: &mut [S::T], at: usize, value: S::V) {
    let x = &mut x[at..];
    // SAFETY: no more elements are written than the slice has room for.
    unsafe {
        if x.len() >= S::LANES {
            s.store(x.as_mut_ptr(), value);
        } else {
            s.store_part(x.as_mut_ptr(), value, x.len());
        }
    }
}
