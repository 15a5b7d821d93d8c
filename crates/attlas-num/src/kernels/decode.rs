//! Attention of a few rows that all see the same keys, as in decoding: the query heads of a group over a whole cache or
//! over listed keys of it. Every key and value is read once, in place, and used for all rows, so the time is that of
//! reading memory.
//!
//! Dot products run along the columns, lane by lane, and their lanes are added last; otherwise the steps are those of
//! the tiled kernel. A row's result does not depend on the other rows of the call.

use super::Precision;
use super::attend::{AttendChosen, Job};
use super::packed::{AttendPacked, PackedRows, RowFormat};
use super::simd::{Exponential, Kernel, Simd, softcap};
use crate::mat::{DType, MatRef, Real};
use crate::scratch::Scratch;
use std::ops::Range;

/// Most rows processed together.
const ROWS_MAX: usize = 8;
/// Keys between two updates of the running maxima.
const CHUNK: usize = 256;
/// Keys whose values are added to one block of columns before the next block: few enough that memory is read
/// nearly in order.
const RUN: usize = 16;
/// Prefetch distance in bytes. Hardware prefetching stops at page boundaries.
pub(super) const AHEAD_BYTES: usize = 8192;
/// Prefetch distance for listed keys and values, in bytes, and its limits in rows, because rows may be wide or narrow.
const LISTED_BYTES: usize = 12 << 10;
const LISTED_ROWS: (usize, usize) = (4, 64);
/// Bytes of a cache line.
const LINE_BYTES: usize = 64;
/// Rows and registers of columns of a block of outputs.
const BLOCK: usize = 4;

/// Returns true if the call selects this path and fits it: at most eight rows, all of which see the same keys.
pub(super) fn applies<T: Real>(job: &Job<'_, T>) -> bool {
    let (rows, n_k) = (job.q.rows(), job.k.rows());
    job.decode && rows > 0 && rows <= ROWS_MAX && job.band.range(0, n_k) == job.band.range(rows - 1, n_k)
}

/// Rows of keys or values as they are stored.
trait Stored<S: Simd>: Copy {
    fn width(self) -> usize;
    /// Returns the address of a row; panics if there is none.
    fn start(self, row: usize) -> *const u8;
    /// Returns the bytes from the start of a row to column `at`.
    fn offset(at: usize) -> usize;
    /// Reads `part` numbers of a row, at most a register, from column `at` on, a multiple of a register; 0 in the other
    /// lanes.
    ///
    /// # Safety
    ///
    /// `row` is the address of a row, which has these columns.
    unsafe fn load(s: S, row: *const u8, at: usize, part: usize) -> S::V;
}

impl<S: Simd> Stored<S> for MatRef<'_, S::T> {
    #[inline(always)]
    fn width(self) -> usize {
        MatRef::cols(&self)
    }
    #[inline(always)]
    fn start(self, row: usize) -> *const u8 {
        MatRef::row(&self, row).as_ptr().cast()
    }
    #[inline(always)]
    fn offset(at: usize) -> usize {
        at * size_of::<S::T>()
    }
    #[inline(always)]
    unsafe fn load(s: S, row: *const u8, at: usize, part: usize) -> S::V {
        // SAFETY: passed on from the caller.
        unsafe {
            let p = row.cast::<S::T>().add(at);
            if part == S::LANES { s.load(p) } else { s.load_part(p, part) }
        }
    }
}

/// Packed rows: bfloat16, or 8-bit integers with each block of 32 behind its scale.
#[derive(Clone, Copy)]
struct InPlace<'a, const SCALED: bool>(PackedRows<'a>);

impl<S: Simd, const SCALED: bool> Stored<S> for InPlace<'_, SCALED> {
    #[inline(always)]
    fn width(self) -> usize {
        self.0.cols()
    }
    #[inline(always)]
    fn start(self, row: usize) -> *const u8 {
        self.0.row(row).as_ptr()
    }
    #[inline(always)]
    fn offset(at: usize) -> usize {
        if SCALED { at / 32 * 36 + at % 32 } else { 2 * at }
    }
    #[inline(always)]
    unsafe fn load(s: S, row: *const u8, at: usize, part: usize) -> S::V {
        // SAFETY: passed on from the caller. A register lies in one block, whose scale comes first.
        unsafe {
            if !SCALED {
                return s.load_bf16(row.add(2 * at), part);
            }
            let block = row.add(at / 32 * 36);
            let scale = block.cast::<f32>().read_unaligned();
            let numbers = s.load_i8(block.add(4 + at % 32), part);
            s.mul(numbers, s.splat(S::T::from_f64(f64::from(scale))))
        }
    }
}

/// Keys of a call in the order of its biases: maps a place in that order to a row and to the address to prefetch.
trait Places: Copy {
    /// True if rows are scattered in memory: then a key's value is prefetched with the key, and the values of a chunk
    /// stay in the cache until their weights are known.
    const SCATTERED: bool;
    /// Returns the row of the key at `place`.
    fn row(self, place: usize) -> usize;
    /// Returns the prefetch distance, as [`Places::ahead`] takes it.
    fn distance<S: Simd, K: Stored<S>>(k: K, v: K) -> usize;
    /// Returns the address to prefetch while the key at `place` of `x` is read.
    fn ahead<S: Simd, K: Stored<S>>(self, x: K, place: usize, distance: usize) -> *const u8;
}

/// Keys in order: key `j` is row `j`.
#[derive(Clone, Copy)]
struct InOrder;

impl Places for InOrder {
    const SCATTERED: bool = false;
    #[inline(always)]
    fn row(self, place: usize) -> usize {
        place
    }
    fn distance<S: Simd, K: Stored<S>>(_: K, _: K) -> usize {
        AHEAD_BYTES
    }
    #[inline(always)]
    fn ahead<S: Simd, K: Stored<S>>(self, x: K, place: usize, distance: usize) -> *const u8 {
        x.start(place).wrapping_add(distance)
    }
}

/// Keys given as a list of rows.
#[derive(Clone, Copy)]
struct Listed<'a>(&'a [u32]);

impl Places for Listed<'_> {
    const SCATTERED: bool = true;
    #[inline(always)]
    fn row(self, place: usize) -> usize {
        self.0[place] as usize
    }
    fn distance<S: Simd, K: Stored<S>>(k: K, v: K) -> usize {
        let (least, most) = LISTED_ROWS;
        (LISTED_BYTES / K::offset(k.width() + v.width()).max(1)).clamp(least, most)
    }
    #[inline(always)]
    fn ahead<S: Simd, K: Stored<S>>(self, x: K, place: usize, distance: usize) -> *const u8 {
        x.start(self.row((place + distance).min(self.0.len() - 1)))
    }
}

/// One decoding step, independent of where the keys lie.
#[derive(Clone, Copy)]
struct Few<'a, T, K> {
    q: MatRef<'a, T>,
    k: K,
    v: K,
    scale: T,
    softcap: Option<T>,
    /// Indexed by place.
    bias: Option<&'a [T]>,
    rounded: bool,
}

#[inline(always)]
pub(super) fn attend<S: Simd>(
    s: S,
    job: &Job<'_, S::T>,
    scratch: &Scratch,
    out: &mut [S::T],
    lse: &mut [S::T],
) {
    let rounded = job.precision == Precision::Bf16 && S::T::DTYPE == DType::F32;
    let Job { q, k, v, scale, softcap, bias, .. } = *job;
    let few = Few { q, k, v, scale, softcap, bias, rounded };
    attend_few(s, few, InOrder, job.band.range(0, job.k.rows()), scratch, out, lse);
}

#[inline(always)]
pub(super) fn attend_chosen<S: Simd>(
    s: S,
    job: &AttendChosen<'_, S::T>,
    scratch: &Scratch,
    out: &mut [S::T],
    lse: &mut [S::T],
) {
    let (rows, d_v) = (job.q.rows(), job.v.cols());
    for first in (0..rows).step_by(ROWS_MAX) {
        let some = first..(first + ROWS_MAX).min(rows);
        let q = job.q.sub_rows(some.clone());
        let (k, v, scale, bias) = (job.k, job.v, job.scale, job.bias);
        let few = Few { q, k, v, scale, softcap: None, bias, rounded: false };
        let out = &mut out[some.start * d_v..some.end * d_v];
        attend_few(s, few, Listed(job.chosen), 0..job.chosen.len(), scratch, out, &mut lse[some]);
    }
}

#[inline(always)]
pub(super) fn attend_packed<S: Simd<T = f32>>(
    s: S,
    job: &AttendPacked<'_>,
    scratch: &Scratch,
    out: &mut [f32],
    lse: &mut [f32],
) {
    let (rows, cols) = (job.q.rows(), job.v.cols());
    for first in (0..rows).step_by(ROWS_MAX) {
        let some = first..(first + ROWS_MAX).min(rows);
        let q = job.q.sub_rows(some.clone());
        let (out, lse) = (&mut out[some.start * cols..some.end * cols], &mut lse[some]);
        match job.k.format() {
            RowFormat::Bf16 => attend_in_place::<S, false>(s, job, q, scratch, out, lse),
            RowFormat::Q8 => attend_in_place::<S, true>(s, job, q, scratch, out, lse),
        }
    }
}

#[inline(always)]
fn attend_in_place<S: Simd<T = f32>, const SCALED: bool>(
    s: S,
    job: &AttendPacked<'_>,
    q: MatRef<'_, f32>,
    scratch: &Scratch,
    out: &mut [f32],
    lse: &mut [f32],
) {
    let (k, v) = (InPlace::<SCALED>(job.k), InPlace::<SCALED>(job.v));
    let few = Few { q, k, v, scale: job.scale, softcap: job.softcap, bias: None, rounded: false };
    attend_few(s, few, InOrder, 0..job.k.rows(), scratch, out, lse);
}

/// Attention of at most `ROWS_MAX` rows to the keys at the places `seen`.
#[inline(always)]
fn attend_few<S: Simd, P: Places, K: Stored<S>>(
    s: S,
    job: Few<'_, S::T, K>,
    places: P,
    seen: Range<usize>,
    scratch: &Scratch,
    out: &mut [S::T],
    lse: &mut [S::T],
) {
    let (rows, d, d_v) = (job.q.rows(), job.q.cols(), job.v.width());
    let rounded = job.rounded;
    let factor = S::T::from_f64(job.scale.to_f64() * std::f64::consts::LOG2_E);

    // Queries are padded with zeros to whole registers. One buffer: a piece of a cache is too little work for more, which
    // the threads would have to take in turns.
    let (stride, out_stride) = (d.next_multiple_of(S::LANES), d_v.next_multiple_of(S::LANES));
    let mut buffer = scratch.take::<S::T>(rows * (stride + out_stride + CHUNK));
    let (queries, rest) = buffer.split_at_mut(rows * stride);
    let (acc, logits) = rest.split_at_mut(rows * out_stride);
    queries.fill(S::T::ZERO);
    acc.fill(S::T::ZERO);
    let (mut max, mut sum) = ([S::T::NEG_INFINITY; ROWS_MAX], [s.splat(S::T::ZERO); ROWS_MAX]);
    for r in 0..rows {
        for (x, &q) in queries[r * stride..].iter_mut().zip(job.q.row(r)) {
            *x = q * factor;
        }
    }
    if rounded {
        for at in (0..queries.len()).step_by(S::LANES) {
            let x = &mut queries[at..at + S::LANES];
            // SAFETY: a register's worth of elements.
            unsafe { s.store(x.as_mut_ptr(), s.round_bf16(s.load(x.as_ptr()))) };
        }
    }

    for first in seen.clone().step_by(CHUNK) {
        let keys = first..(first + CHUNK).min(seen.end);
        let mut row = 0;
        while row < rows {
            let scores = Scores {
                queries: &queries[row * stride..],
                stride,
                k: job.k,
                v: job.v,
                places,
                keys: keys.clone(),
                logits: &mut logits[row * CHUNK..],
                rounded,
            };
            match rows - row {
                1 => s.call(Rows::<_, _, _, 1, 16>(scores)),
                2 => s.call(Rows::<_, _, _, 2, 8>(scores)),
                3 => s.call(Rows::<_, _, _, 3, 5>(scores)),
                _ => s.call(Rows::<_, _, _, 4, 4>(scores)),
            }
            row += BLOCK;
        }
        for r in 0..rows {
            let logits = &mut logits[r * CHUNK..(r + 1) * CHUNK];
            if let Some(cap) = job.softcap {
                s.call(Cap { logits: &mut *logits, cap });
            }
            if let Some(bias) = job.bias {
                for (x, &b) in logits.iter_mut().zip(&bias[keys.clone()]) {
                    *x = if b == S::T::NEG_INFINITY { b } else { *x + b * S::T::LOG2_E.0 };
                }
            }
            let acc = &mut acc[r * out_stride..(r + 1) * out_stride];
            s.call(Softmax { logits, count: keys.len(), max: &mut max[r], sum: &mut sum[r], acc, rounded });
        }
        for row in (0..rows).step_by(BLOCK) {
            let values = Values {
                weights: &logits[row * CHUNK..],
                v: job.v,
                places,
                keys: keys.clone(),
                bias: job.bias,
                acc: &mut acc[row * out_stride..],
                stride: out_stride,
                rounded,
            };
            match rows - row {
                1 => s.call(RowsOf::<_, _, _, 1>(values)),
                2 => s.call(RowsOf::<_, _, _, 2>(values)),
                3 => s.call(RowsOf::<_, _, _, 3>(values)),
                _ => s.call(RowsOf::<_, _, _, BLOCK>(values)),
            }
        }
    }

    for r in 0..rows {
        let l = s.reduce_add(sum[r]);
        let row = &mut out[r * d_v..(r + 1) * d_v];
        if l == S::T::ZERO {
            row.fill(S::T::ZERO);
            lse[r] = S::T::NEG_INFINITY;
        } else {
            row.iter_mut().zip(&acc[r * out_stride..]).for_each(|(o, &a)| *o = a / l);
            lse[r] = S::T::from_f64(max[r].to_f64() * std::f64::consts::LN_2 + l.to_f64().ln());
        }
    }
}

/// Logits of a block of rows and the keys of a chunk.
struct Scores<'t, T, P, D> {
    queries: &'t [T],
    stride: usize,
    k: D,
    v: D,
    places: P,
    keys: Range<usize>,
    /// Rows start `CHUNK` apart.
    logits: &'t mut [T],
    rounded: bool,
}

/// [`Scores`] for `R` rows, `K` keys at a time; `R · K` is at most 16.
struct Rows<'t, T, P, D, const R: usize, const K: usize>(Scores<'t, T, P, D>);

impl<S: Simd, P: Places, D: Stored<S>, const R: usize, const K: usize> Kernel<S>
    for Rows<'_, S::T, P, D, R, K>
{
    #[inline(always)]
    fn run(self, s: S) {
        let Scores { queries, stride, k, v, places, keys, logits, rounded } = self.0;
        let d = k.width();
        // Loads read whole registers, so each query row is padded to one.
        assert!(queries.len() >= R * stride && stride >= d.next_multiple_of(S::LANES));
        assert!(logits.len() >= (R - 1) * CHUNK + keys.len());
        let distance = P::distance::<S, D>(k, v);
        for j in keys.clone().step_by(K) {
            let count = (keys.end - j).min(K);
            let mut acc = [s.splat(S::T::ZERO); 16];
            for n in 0..K {
                // A missing key repeats the last one; its logits are not written.
                let place = j + n.min(count - 1);
                let (row, ahead) = (k.start(places.row(place)), places.ahead::<S, D>(k, place, distance));
                let mut dots = [s.splat(S::T::ZERO); R];
                for at in (0..d).step_by(S::LANES) {
                    let part = (d - at).min(S::LANES);
                    // SAFETY: key and query rows hold `at + part` elements, query rows a whole register.
                    unsafe {
                        s.prefetch(ahead.wrapping_add(D::offset(at)).cast());
                        let mut x = D::load(s, row, at, part);
                        if rounded {
                            x = s.round_bf16(x);
                        }
                        for r in 0..R {
                            dots[r] = s.fma(s.load(queries.as_ptr().add(r * stride + at)), x, dots[r]);
                        }
                    }
                }
                if P::SCATTERED {
                    let value = places.ahead::<S, D>(v, place, distance);
                    let lines = (0..D::offset(v.width())).step_by(LINE_BYTES);
                    lines.for_each(|at| s.prefetch(value.wrapping_add(at).cast()));
                }
                for r in 0..R {
                    acc[r * K + n] = dots[r];
                }
            }
            let mut sums = [S::T::ZERO; 16];
            // SAFETY: there are 16 places.
            unsafe { s.reduce_add_16(&acc, sums.as_mut_ptr()) };
            for r in 0..R {
                let at = r * CHUNK + j - keys.start;
                logits[at..at + count].copy_from_slice(&sums[r * K..r * K + count]);
            }
        }
    }
}

/// Caps a row's logits; entries past the last key stay undefined.
struct Cap<'t, T> {
    logits: &'t mut [T],
    cap: T,
}

impl<S: Simd> Kernel<S> for Cap<'_, S::T> {
    #[inline(always)]
    fn run(self, s: S) {
        for x in self.logits.chunks_exact_mut(S::LANES) {
            // SAFETY: chunks hold a register.
            unsafe { s.store(x.as_mut_ptr(), softcap(s, s.load(x.as_ptr()), self.cap)) };
        }
    }
}

/// Turns a row's logits into weights and brings its running maximum and sum up to date.
struct Softmax<'t, S: Simd> {
    logits: &'t mut [S::T],
    count: usize,
    max: &'t mut S::T,
    sum: &'t mut S::V,
    acc: &'t mut [S::T],
    rounded: bool,
}

impl<S: Simd> Kernel<S> for Softmax<'_, S> {
    #[inline(always)]
    fn run(self, s: S) {
        let (lanes, whole) = (S::LANES, self.count.next_multiple_of(S::LANES));
        let logits = &mut self.logits[..whole];
        logits[self.count..].fill(S::T::NEG_INFINITY);
        let mut top = s.splat(S::T::NEG_INFINITY);
        for x in logits.chunks_exact(lanes) {
            // SAFETY: chunks hold a register.
            top = s.max(unsafe { s.load(x.as_ptr()) }, top);
        }
        let (old, top) = (*self.max, s.reduce_max(top));
        let new = if top > old { top } else { old };
        if new == S::T::NEG_INFINITY {
            // All logits are −∞ or NaN; a NaN must reach the sum.
            if logits.iter().any(|x| x.is_nan()) {
                *self.sum = s.splat(S::T::NAN);
            }
            logits.fill(S::T::ZERO);
            return;
        }
        if new != old {
            let shrink = s.exp2(s.splat(old - new));
            *self.sum = s.mul(*self.sum, shrink);
            for x in self.acc.chunks_exact_mut(lanes) {
                // SAFETY: chunks hold a register.
                unsafe { s.store(x.as_mut_ptr(), s.mul(s.load(x.as_ptr()), shrink)) };
            }
            *self.max = new;
        }
        for x in logits.chunks_exact_mut(lanes) {
            // SAFETY: chunks hold a register.
            unsafe {
                let weight = s.exp2(s.sub(s.load(x.as_ptr()), s.splat(new)));
                *self.sum = s.add(*self.sum, weight);
                s.store(x.as_mut_ptr(), if self.rounded { s.round_bf16(weight) } else { weight });
            }
        }
    }
}

/// Adds the weighted values of a chunk to a block of rows.
struct Values<'t, T, P, D> {
    /// Rows start `CHUNK` apart.
    weights: &'t [T],
    v: D,
    places: P,
    keys: Range<usize>,
    bias: Option<&'t [T]>,
    acc: &'t mut [T],
    stride: usize,
    rounded: bool,
}

/// [`Values`] for `R` rows, at most `BLOCK`.
struct RowsOf<'t, T, P, D, const R: usize>(Values<'t, T, P, D>);

impl<S: Simd, P: Places, D: Stored<S>, const R: usize> Kernel<S> for RowsOf<'_, S::T, P, D, R> {
    #[inline(always)]
    fn run(self, s: S) {
        let mut values = self.0;
        let d_v = values.v.width();
        assert!(values.acc.len() >= R * values.stride && values.stride >= d_v.next_multiple_of(S::LANES));
        assert!(values.weights.len() >= (R - 1) * CHUNK + values.keys.len() && values.keys.len() <= CHUNK);
        let wide = BLOCK * S::LANES;
        for first in (0..values.keys.len()).step_by(RUN) {
            let keys = first..(first + RUN).min(values.keys.len());
            let mut col = 0;
            while col < d_v {
                if col + wide <= d_v {
                    values.columns::<S, R, BLOCK>(s, keys.clone(), col, S::LANES);
                    col += wide;
                } else {
                    values.columns::<S, R, 1>(s, keys.clone(), col, (d_v - col).min(S::LANES));
                    col += S::LANES;
                }
            }
        }
    }
}

impl<T: Real, P: Places, D: Copy> Values<'_, T, P, D> {
    /// Adds keys `keys` of the chunk to `C` registers of columns from `col` on, the last with `part` elements.
    #[inline(always)]
    fn columns<S: Simd<T = T>, const R: usize, const C: usize>(
        &mut self,
        s: S,
        keys: Range<usize>,
        col: usize,
        part: usize,
    ) where
        D: Stored<S>,
    {
        let acc = self.acc.as_mut_ptr();
        let distance = P::distance::<S, D>(self.v, self.v);
        let mut block = [[s.splat(T::ZERO); C]; R];
        for r in 0..R {
            for c in 0..C {
                // SAFETY: `run` checked that `acc` holds whole registers for all columns of the block.
                block[r][c] = unsafe { s.load(acc.add(r * self.stride + col + c * S::LANES)) };
            }
        }
        for n in keys {
            let j = self.keys.start + n;
            if self.bias.is_some_and(|b| b[j] == T::NEG_INFINITY) {
                continue;
            }
            let row = self.v.start(self.places.row(j));
            let mut x = [s.splat(T::ZERO); C];
            for c in 0..C {
                // SAFETY: the row goes on for `C − 1` whole registers and `part` elements.
                unsafe {
                    x[c] = D::load(s, row, col + c * S::LANES, part);
                }
                if !P::SCATTERED {
                    let ahead = self.places.ahead::<S, D>(self.v, j, distance);
                    s.prefetch(ahead.wrapping_add(D::offset(col + c * S::LANES)).cast());
                }
                if self.rounded {
                    x[c] = s.round_bf16(x[c]);
                }
            }
            for r in 0..R {
                let weight = s.splat(self.weights[r * CHUNK + n]);
                for c in 0..C {
                    block[r][c] = s.fma(weight, x[c], block[r][c]);
                }
            }
        }
        for r in 0..R {
            for c in 0..C {
                // SAFETY: as above.
                unsafe { s.store(acc.add(r * self.stride + col + c * S::LANES), block[r][c]) };
            }
        }
    }
}
