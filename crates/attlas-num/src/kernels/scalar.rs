//! The readable definition of every kernel: plain Rust, one element at a time. The other instruction
//! sets compute the same values up to rounding.

use super::attend::{AttendChosen, Job};
use super::{Op, Precision};
use crate::mat::{DType, MatRef, Real};
use crate::scratch::Scratch;

pub(super) fn dot<T: Real>(a: &[T], b: &[T]) -> T {
    a.iter().zip(b).fold(T::ZERO, |s, (&x, &y)| x.mul_add(y, s))
}

pub(super) fn sq_dist<T: Real>(a: &[T], b: &[T]) -> T {
    a.iter().zip(b).fold(T::ZERO, |s, (&x, &y)| (x - y).mul_add(x - y, s))
}

pub(super) fn axpy<T: Real>(a: T, x: &[T], y: &mut [T]) {
    y.iter_mut().zip(x).for_each(|(y, &x)| *y = a.mul_add(x, *y));
}

pub(super) fn scale<T: Real>(a: T, x: &mut [T]) {
    x.iter_mut().for_each(|x| *x *= a);
}

pub(super) fn sum<T: Real>(x: &[T]) -> T {
    x.iter().copied().sum::<T>() + T::ZERO
}

pub(super) fn max<T: Real>(x: &[T]) -> T {
    x.iter().fold(T::NEG_INFINITY, |m, &x| if x > m { x } else { m })
}

pub(super) fn exp_in_place<T: Real>(x: &mut [T]) {
    x.iter_mut().for_each(|x| *x = x.exp());
}

/// Replaces `x` by `exp(x - shift)` and returns the sum.
pub(super) fn exp_sum<T: Real>(x: &mut [T], shift: T) -> T {
    x.iter_mut().for_each(|x| *x = (*x - shift).exp());
    sum(x)
}

pub(super) fn matvec<T: Real>(a: MatRef<'_, T>, x: &[T], out: &mut [T]) {
    out.iter_mut().zip(a.iter_rows()).for_each(|(o, row)| *o = dot(row, x));
}

pub(super) fn matvec_each<T: Real>(a: MatRef<'_, T>, x: MatRef<'_, T>, out: &mut [T]) {
    let each = out.chunks_exact_mut(a.rows().max(1)).zip(x.iter_rows());
    each.for_each(|(out, x)| matvec(a, x, out));
}

pub(super) fn gemm<T: Real>(
    alpha: T,
    a: Op<MatRef<'_, T>>,
    b: Op<MatRef<'_, T>>,
    beta: T,
    c: &mut [T],
    c_stride: usize,
) {
    let (m, depth, n) = (a.rows(), a.cols(), b.cols());
    for i in 0..m {
        for (j, c) in c[i * c_stride..i * c_stride + n].iter_mut().enumerate() {
            let product = (0..depth).fold(T::ZERO, |s, l| a.at(i, l).mul_add(b.at(l, j), s));
            *c = if beta == T::ZERO { alpha * product } else { beta.mul_add(*c, alpha * product) };
        }
    }
}

/// Packs the columns of a right operand, one after the other.
pub(super) fn pack<T: Real>(b: Op<MatRef<'_, T>>, dst: &mut [T]) {
    for (j, dst) in dst.chunks_exact_mut(b.rows().max(1)).enumerate() {
        dst.iter_mut().enumerate().for_each(|(l, x)| *x = b.at(l, j));
    }
}

/// Returns the value nearest to `x` with eight significant bits.
pub(super) fn round_bf16<T: Real>(x: T) -> T {
    T::from_f64(f64::from(half::bf16::from_f32(x.to_f64() as f32).to_f32()))
}

/// Tiled attention, one row at a time, the steps of [`Attend`](super::Attend) spelled out.
pub(super) fn attend<T: Real>(job: &Job<'_, T>, scratch: &Scratch, out: &mut [T], lse: &mut [T]) {
    let rounded = job.precision == Precision::Bf16 && T::DTYPE == DType::F32;
    let round = |x: T| if rounded { round_bf16(x) } else { x };
    let tile = if job.tile_k == 0 { 128 } else { job.tile_k };
    let mut weights = scratch.take::<T>(tile.min(job.k.rows()));
    let mut query = scratch.take::<T>(job.q.cols());
    let mut key = scratch.take::<T>(job.q.cols());
    let is_hidden = |j: usize| job.bias.is_some_and(|b| b[j] == T::NEG_INFINITY);

    let d_v = job.v.cols();
    for (i, lse) in lse.iter_mut().enumerate() {
        let acc = &mut out[i * d_v..(i + 1) * d_v];
        acc.fill(T::ZERO);
        query.iter_mut().zip(job.q.row(i)).for_each(|(x, &q)| *x = round(q * job.scale));
        let (mut m, mut l) = (T::NEG_INFINITY, T::ZERO);
        let seen = job.band.range(i, job.k.rows());
        let mut first = seen.start;
        while first < seen.end {
            // Tiles start at multiples of the tile length, wherever the row's keys begin.
            let end = ((first / tile + 1) * tile).min(seen.end);
            let s = &mut weights[..end - first];
            for (s, j) in s.iter_mut().zip(first..) {
                key.iter_mut().zip(job.k.row(j)).for_each(|(x, &k)| *x = round(k));
                let product = dot(&query, &key);
                let capped = job
                    .softcap
                    .map_or(product, |c| T::from_f64(c.to_f64() * libm::tanh(product.to_f64() / c.to_f64())));
                *s = capped + job.bias.map_or(T::ZERO, |b| b[j]);
                if is_hidden(j) {
                    *s = T::NEG_INFINITY;
                }
            }
            let (m_old, s_max) = (m, max(s));
            m = if s_max > m { s_max } else { m };
            if m == T::NEG_INFINITY {
                // All logits are −∞ or NaN; a NaN must reach the sum.
                l += s.iter().copied().filter(|s| s.is_nan()).sum::<T>() + T::ZERO;
            } else {
                if m != m_old {
                    let a = (m_old - m).exp();
                    l *= a;
                    scale(a, acc);
                }
                l += exp_sum(s, m);
                for (&p, j) in s.iter().zip(first..).filter(|(_, j)| !is_hidden(*j)) {
                    acc.iter_mut().zip(job.v.row(j)).for_each(|(o, &v)| *o = round(p).mul_add(round(v), *o));
                }
            }
            first = end;
        }
        *lse = if l == T::ZERO { T::NEG_INFINITY } else { m + l.ln() };
        if l != T::ZERO {
            acc.iter_mut().for_each(|o| *o /= l);
        }
    }
}

/// Computes attention to the chosen keys, with the softmax of their logits in two passes.
pub(super) fn attend_chosen<T: Real>(
    job: &AttendChosen<'_, T>,
    scratch: &Scratch,
    out: &mut [T],
    lse: &mut [T],
) {
    let d_v = job.v.cols();
    let mut weights = scratch.take::<T>(job.chosen.len());
    let is_hidden = |n: usize| job.bias.is_some_and(|b| b[n] == T::NEG_INFINITY);
    for (i, lse) in lse.iter_mut().enumerate() {
        let acc = &mut out[i * d_v..(i + 1) * d_v];
        acc.fill(T::ZERO);
        for (n, (s, &j)) in weights.iter_mut().zip(job.chosen).enumerate() {
            let bias = job.bias.map_or(T::ZERO, |b| b[n]);
            let logit = job.scale * dot(job.q.row(i), job.k.row(j as usize)) + bias;
            *s = if is_hidden(n) { bias } else { logit };
        }
        let m = max(&weights);
        // All logits are −∞ or NaN; a NaN must reach the sum.
        let l = match m == T::NEG_INFINITY {
            true => weights.iter().copied().filter(|s| s.is_nan()).sum::<T>() + T::ZERO,
            false => exp_sum(&mut weights, m),
        };
        *lse = if l == T::ZERO { T::NEG_INFINITY } else { m + l.ln() };
        if l != T::ZERO {
            for (_, (&p, &j)) in weights.iter().zip(job.chosen).enumerate().filter(|(n, _)| !is_hidden(*n)) {
                axpy(p / l, job.v.row(j as usize), acc);
            }
        }
    }
}

pub(super) fn fma_burn<T: Real>(iterations: u64) -> (u64, T) {
    const CHAINS: usize = 16;
    let (a, b) = (T::from_f64(0.75), T::from_f64(0.3));
    let mut x: [T; CHAINS] = std::array::from_fn(T::from_usize);
    for _ in 0..iterations {
        x.iter_mut().for_each(|x| *x = x.mul_add(a, b));
    }
    (2 * CHAINS as u64 * iterations, sum(&x))
}
