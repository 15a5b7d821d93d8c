//! Kernels on vectors, generic over the instruction set. Sums run in four independent registers, which are
//! added in a fixed order at the end; the last incomplete register is read with the missing lanes 0.

use super::decode::AHEAD_BYTES;
use super::simd::{Kernel, Simd};
use crate::mat::{MatRef, Real};

/// Calls `$full` for blocks of four registers and then `$part` for the rest, register by register: with the offset, the
/// number of elements there, and the index of the sum out of four.
macro_rules! sweep {
    ($lanes:expr, $len:expr, |$at:ident, $count:ident, $slot:ident| $body:block) => {
        let (lanes, len): (usize, usize) = ($lanes, $len);
        let mut start = 0;
        while start + 4 * lanes <= len {
            for $slot in 0..4 {
                let $at = start + $slot * lanes;
                let $count = lanes;
                $body
            }
            start += 4 * lanes;
        }
        let mut slot = 0;
        while start < len {
            let ($at, $slot) = (start, slot);
            let $count = lanes.min(len - start);
            $body
            slot += 1;
            start += lanes;
        }
    };
}

/// Reads `count` elements at `at`, a whole register where possible.
///
/// # Safety
///
/// `at + count` must not pass the end of `x`.
#[inline(always)]
unsafe fn get<S: Simd>(s: S, x: &[S::T], at: usize, count: usize) -> S::V {
    debug_assert!(at + count <= x.len());
    // SAFETY: the caller keeps the range inside the slice.
    unsafe {
        if count == S::LANES { s.load(x.as_ptr().add(at)) } else { s.load_part(x.as_ptr().add(at), count) }
    }
}

/// Writes `count` elements at `at`.
///
/// # Safety
///
/// `at + count` must not pass the end of `x`.
#[inline(always)]
unsafe fn put<S: Simd>(s: S, x: &mut [S::T], at: usize, count: usize, value: S::V) {
    debug_assert!(at + count <= x.len());
    // SAFETY: the caller keeps the range inside the slice.
    unsafe {
        if count == S::LANES {
            s.store(x.as_mut_ptr().add(at), value);
        } else {
            s.store_part(x.as_mut_ptr().add(at), value, count);
        }
    }
}

#[inline(always)]
fn total<S: Simd>(s: S, acc: [S::V; 4]) -> S::T {
    s.reduce_add(s.add(s.add(acc[0], acc[1]), s.add(acc[2], acc[3])))
}

#[inline(always)]
pub(super) fn dot<S: Simd>(s: S, a: &[S::T], b: &[S::T]) -> S::T {
    assert_eq!(a.len(), b.len());
    let mut acc = [s.splat(S::T::ZERO); 4];
    sweep!(S::LANES, a.len(), |at, count, slot| {
        // SAFETY: `sweep!` stays inside the common length.
        let (x, y) = unsafe { (get(s, a, at, count), get(s, b, at, count)) };
        acc[slot] = s.fma(x, y, acc[slot]);
    });
    total(s, acc)
}

#[inline(always)]
pub(super) fn sq_dist<S: Simd>(s: S, a: &[S::T], b: &[S::T]) -> S::T {
    assert_eq!(a.len(), b.len());
    let mut acc = [s.splat(S::T::ZERO); 4];
    sweep!(S::LANES, a.len(), |at, count, slot| {
        // SAFETY: `sweep!` stays inside the common length.
        let (x, y) = unsafe { (get(s, a, at, count), get(s, b, at, count)) };
        let gap = s.sub(x, y);
        acc[slot] = s.fma(gap, gap, acc[slot]);
    });
    total(s, acc)
}

#[inline(always)]
pub(super) fn sum<S: Simd>(s: S, x: &[S::T]) -> S::T {
    let mut acc = [s.splat(S::T::ZERO); 4];
    sweep!(S::LANES, x.len(), |at, count, slot| {
        // SAFETY: `sweep!` stays inside the slice.
        acc[slot] = s.add(acc[slot], unsafe { get(s, x, at, count) });
    });
    total(s, acc)
}

#[inline(always)]
pub(super) fn max<S: Simd>(s: S, x: &[S::T]) -> S::T {
    let mut acc = [s.splat(S::T::NEG_INFINITY); 4];
    sweep!(S::LANES, x.len(), |at, count, slot| {
        // SAFETY: `sweep!` stays inside the slice.
        let value = s.inside(unsafe { get(s, x, at, count) }, s.splat(S::T::NEG_INFINITY), 0, count);
        acc[slot] = s.max(value, acc[slot]);
    });
    s.reduce_max(s.max(s.max(acc[0], acc[1]), s.max(acc[2], acc[3])))
}

#[inline(always)]
pub(super) fn axpy<S: Simd>(s: S, a: S::T, x: &[S::T], y: &mut [S::T]) {
    assert_eq!(x.len(), y.len());
    let a = s.splat(a);
    sweep!(S::LANES, x.len(), |at, count, _slot| {
        // SAFETY: `sweep!` stays inside the common length.
        unsafe { put(s, y, at, count, s.fma(a, get(s, x, at, count), get(s, y, at, count))) };
    });
}

#[inline(always)]
pub(super) fn scale<S: Simd>(s: S, a: S::T, x: &mut [S::T]) {
    let a = s.splat(a);
    sweep!(S::LANES, x.len(), |at, count, _slot| {
        // SAFETY: `sweep!` stays inside the slice.
        unsafe { put(s, x, at, count, s.mul(a, get(s, x, at, count))) };
    });
}

#[inline(always)]
pub(super) fn exp_in_place<S: Simd>(s: S, x: &mut [S::T]) {
    sweep!(S::LANES, x.len(), |at, count, _slot| {
        // SAFETY: `sweep!` stays inside the slice.
        unsafe { put(s, x, at, count, s.exp(get(s, x, at, count))) };
    });
}

/// Replaces `x` by `exp(x − shift)` and returns the sum.
#[inline(always)]
pub(super) fn exp_sum<S: Simd>(s: S, x: &mut [S::T], shift: S::T) -> S::T {
    let shift = s.splat(shift);
    let mut acc = [s.splat(S::T::ZERO); 4];
    sweep!(S::LANES, x.len(), |at, count, slot| {
        // SAFETY: `sweep!` stays inside the slice.
        let value = unsafe { get(s, x, at, count) };
        let value = s.exp(s.inside(s.sub(value, shift), s.splat(S::T::NEG_INFINITY), 0, count));
        acc[slot] = s.add(acc[slot], value);
        // SAFETY: as above.
        unsafe { put(s, x, at, count, value) };
    });
    total(s, acc)
}

/// Processes four rows at a time, with prefetching: four streams are read at once.
#[inline(always)]
pub(super) fn matvec<S: Simd>(s: S, a: MatRef<'_, S::T>, x: &[S::T], out: &mut [S::T]) {
    assert!(a.cols() == x.len() && a.rows() == out.len());
    let ahead = AHEAD_BYTES / size_of::<S::T>();
    let mut i = 0;
    while i < a.rows() {
        let rows = (a.rows() - i).min(4);
        // A missing row repeats the last one; its result is not written.
        let row = [0, 1, 2, 3].map(|r: usize| a.row(i + r.min(rows - 1)));
        let mut acc = [s.splat(S::T::ZERO); 4];
        let mut at = 0;
        while at < x.len() {
            let count = S::LANES.min(x.len() - at);
            // SAFETY: every row is as long as `x`.
            let v = unsafe { get(s, x, at, count) };
            for r in 0..4 {
                s.prefetch(row[r].as_ptr().wrapping_add(at + ahead));
                // SAFETY: as above.
                acc[r] = s.fma(unsafe { get(s, row[r], at, count) }, v, acc[r]);
            }
            at += S::LANES;
        }
        for r in 0..rows {
            out[i + r] = s.reduce_add(acc[r]);
        }
        i += rows;
    }
}

/// [`matvec`] for each row of `x`. The columns are added in the same order, and so are the lanes.
#[inline(always)]
pub(super) fn matvec_each<S: Simd>(s: S, a: MatRef<'_, S::T>, x: MatRef<'_, S::T>, out: &mut [S::T]) {
    assert!(a.cols() == x.cols() && a.rows() * x.rows() == out.len());
    let mut first = 0;
    while first < x.rows() {
        let rows = (x.rows() - first).min(4);
        let (x, out) =
            (x.sub_rows(first..first + rows), &mut out[first * a.rows()..(first + rows) * a.rows()]);
        match rows {
            1 => s.call(Each::<_, 1, 16> { a, x, out }),
            2 => s.call(Each::<_, 2, 8> { a, x, out }),
            3 => s.call(Each::<_, 3, 5> { a, x, out }),
            _ => s.call(Each::<_, 4, 4> { a, x, out }),
        }
        first += rows;
    }
}

/// Products of the rows of `a`, `K` at a time, with the `R` rows of `x`; `R · K` is at most 16.
struct Each<'a, T, const R: usize, const K: usize> {
    a: MatRef<'a, T>,
    x: MatRef<'a, T>,
    out: &'a mut [T],
}

impl<S: Simd, const R: usize, const K: usize> Kernel<S> for Each<'_, S::T, R, K> {
    #[inline(always)]
    fn run(self, s: S) {
        let Self { a, x, out } = self;
        let (n, len) = (a.rows(), a.cols());
        assert!(x.rows() == R && x.cols() == len && out.len() == n * R && R * K <= 16);
        let ahead = AHEAD_BYTES / size_of::<S::T>();
        let mut i = 0;
        while i < n {
            let rows = (n - i).min(K);
            let mut acc = [s.splat(S::T::ZERO); 16];
            for k in 0..K {
                // A missing row repeats the last one; its results are not written.
                let row = a.row(i + k.min(rows - 1));
                let mut dots = [s.splat(S::T::ZERO); R];
                let mut at = 0;
                while at < len {
                    let count = S::LANES.min(len - at);
                    s.prefetch(row.as_ptr().wrapping_add(at + ahead));
                    // SAFETY: the rows of `a` and of `x` are equally long.
                    unsafe {
                        let y = get(s, row, at, count);
                        for r in 0..R {
                            dots[r] = s.fma(y, get(s, x.row(r), at, count), dots[r]);
                        }
                    }
                    at += S::LANES;
                }
                for r in 0..R {
                    acc[r * K + k] = dots[r];
                }
            }
            let mut sums = [S::T::ZERO; 16];
            // SAFETY: there are 16 places.
            unsafe { s.reduce_each(&acc, sums.as_mut_ptr()) };
            for r in 0..R {
                out[r * n + i..r * n + i + rows].copy_from_slice(&sums[r * K..r * K + rows]);
            }
            i += rows;
        }
    }
}

#[inline(always)]
pub(super) fn fma_burn<S: Simd, const ROWS: usize>(s: S, iterations: u64) -> (u64, S::T) {
    // The chains start from different values, or the compiler would merge them into one.
    let (a, b) = (s.splat(S::T::from_f64(0.75)), s.splat(S::T::from_f64(0.3)));
    let mut x = [b; ROWS];
    for (r, x) in x.iter_mut().enumerate() {
        *x = s.splat(S::T::from_usize(r));
    }
    for _ in 0..iterations {
        for x in &mut x {
            *x = s.fma(*x, a, b);
        }
    }
    let mut sink = x[0];
    for x in &x[1..] {
        sink = s.add(sink, *x);
    }
    (2 * (S::LANES * ROWS) as u64 * iterations, s.reduce_add(sink))
}
