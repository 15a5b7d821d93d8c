//! Products of rows with directions, $X \Omega^\top$, the one hot loop of all random features.

use crate::mat::{DType, Mat, MatRef, Real};

/// Whether a row of this squared norm needs [`dot_wide`].
///
/// In single precision from 64 on: the rounding error of a log-feature is a relative error of the feature,
/// and log-features grow like half the squared norm. In double precision where partial sums may overflow.
pub(super) fn needs_wide<T: Real>(norm2: f64) -> bool {
    // Written so that NaN is not wide.
    norm2 > if T::DTYPE == DType::F32 { 64.0 } else { 1e280 }
}

/// `⟨x, y⟩` in eight partial sums.
pub(super) fn dot<T: Real>(x: &[T], y: &[T]) -> T {
    let mut acc = [T::ZERO; 8];
    let (xs, ys) = (x.chunks_exact(8), y.chunks_exact(8));
    let tail: T = xs.remainder().iter().zip(ys.remainder()).map(|(a, b)| *a * *b).sum();
    for (a, b) in xs.zip(ys) {
        for i in 0..8 {
            acc[i] += a[i] * b[i];
        }
    }
    ((acc[0] + acc[4]) + (acc[1] + acc[5])) + ((acc[2] + acc[6]) + (acc[3] + acc[7])) + tail
}

/// `⟨x, y⟩` in double precision; an overflow of finite numbers gives ±∞, never NaN.
pub(super) fn dot_wide<T: Real>(x: &[T], y: &[T]) -> f64 {
    let mut acc = [0.0; 4];
    let (xs, ys) = (x.chunks_exact(4), y.chunks_exact(4));
    let tail: f64 = xs.remainder().iter().zip(ys.remainder()).map(|(a, b)| a.to_f64() * b.to_f64()).sum();
    for (a, b) in xs.zip(ys) {
        for i in 0..4 {
            acc[i] += a[i].to_f64() * b[i].to_f64();
        }
    }
    let sum = ((acc[0] + acc[2]) + (acc[1] + acc[3])) + tail;
    if sum.is_nan() { dot_rescued(x, y) } else { sum }
}

/// The inner product of vectors so large that partial sums overflow with both signs.
#[cold]
fn dot_rescued<T: Real>(x: &[T], y: &[T]) -> f64 {
    // 2⁻⁵²⁰: the product of the two largest finite numbers, so scaled, is far from overflow.
    const DOWN: f64 = f64::from_bits((1023 - 520) << 52);
    let sum: f64 = x.iter().zip(y).map(|(a, b)| (a.to_f64() * DOWN) * (b.to_f64() * DOWN)).sum();
    sum / DOWN / DOWN
}

/// `‖x‖²` in double precision.
pub(super) fn norm2_wide<T: Real>(x: &[T]) -> f64 {
    dot_wide(x, x)
}

/// Writes `x · omegaᵀ`, row `i` at `out[i·stride ..][..omega.rows()]`.
pub(super) fn project<T: Real>(x: MatRef<'_, T>, omega: &Mat<T>, out: &mut [T], stride: usize) {
    debug_assert!(stride >= omega.rows() && x.cols() == omega.cols());
    for (i, row) in x.iter_rows().enumerate() {
        for (l, o) in out[i * stride..][..omega.rows()].iter_mut().enumerate() {
            *o = dot(row, omega.row(l));
        }
    }
}

/// Like [`project`], then hands every row of projections to `finish(row index, projections, out row)` in
/// double precision where `wide(row index)` asks for it, and otherwise as computed by [`project`].
///
/// `finish` receives the projections in a buffer of its own, so that it may write all of the output row.
pub(super) fn project_rows<T: Real>(
    x: MatRef<'_, T>,
    omega: &Mat<T>,
    out: &mut [T],
    stride: usize,
    wide: impl Fn(usize) -> bool,
    mut finish: impl FnMut(usize, &[f64], &mut [T]),
) {
    let m = omega.rows();
    let mut buffer = vec![0.0; m];
    let mut start = 0;
    while start < x.rows() {
        let is_wide = wide(start);
        let mut end = start + 1;
        while end < x.rows() && wide(end) == is_wide {
            end += 1;
        }
        if !is_wide {
            project(x.sub_rows(start..end), omega, &mut out[start * stride..], stride);
        }
        for i in start..end {
            let row = &mut out[i * stride..(i + 1) * stride];
            if is_wide {
                buffer.iter_mut().enumerate().for_each(|(l, b)| *b = dot_wide(x.row(i), omega.row(l)));
            } else {
                buffer.iter_mut().zip(row.iter()).for_each(|(b, o)| *b = o.to_f64());
            }
            finish(i, &buffer, row);
        }
        start = end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn projections_are_inner_products_for_every_length() {
        for d in 0..20 {
            let x = Mat::from_fn(3, d, |i, j| (i * 3 + j) as f64 - 7.0);
            let omega = Mat::from_fn(5, d, |i, j| (i as f64 - 2.0) * (j % 3) as f64);
            let mut out = vec![f64::NAN; 3 * 6];
            project(x.as_ref(), &omega, &mut out, 6);
            for i in 0..3 {
                for l in 0..5 {
                    let direct: f64 = x.row(i).iter().zip(omega.row(l)).map(|(a, b)| a * b).sum();
                    assert_eq!(out[i * 6 + l], direct);
                }
                assert!(out[i * 6 + 5].is_nan());
            }
        }
    }

    #[test]
    fn overflowing_products_of_both_signs_are_not_nan() {
        let big = [1e300, 1e300, 1e300];
        assert_eq!(dot_wide(&big, &[1e300, -1e300, 1e300]), f64::INFINITY);
        assert_eq!(dot_wide(&[1e200, 1e200], &[1e200, -1e200]), 0.0);
        assert!(dot_wide(&[f64::NAN], &[1.0]).is_nan());
    }
}
