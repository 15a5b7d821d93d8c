//! Products of rows with directions, $X \Omega^\top$, the one hot loop of all random features.

use crate::kernels::{self, Isa, Op, gemm};
use crate::mat::{DType, Mat, MatRef, Real};
use crate::scratch::Scratch;

/// Returns true if a row of this squared norm needs [`dot_wide`].
///
/// In single precision from 64 on: the rounding error of a log-feature is a relative error of the feature,
/// and log-features grow like half the squared norm. In double precision where partial sums may overflow.
pub(super) fn needs_wide<T: Real>(norm2: f64) -> bool {
    // This comparison makes NaN not wide.
    norm2 > if T::DTYPE == DType::F32 { 64.0 } else { 1e280 }
}

/// Computes `⟨x, y⟩` in double precision; an overflow of finite numbers gives ±∞, never NaN.
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

/// Computes the inner product of vectors so large that partial sums overflow with both signs.
#[cold]
fn dot_rescued<T: Real>(x: &[T], y: &[T]) -> f64 {
    // 2⁻⁵²⁰: the product of the two largest finite numbers, so scaled, is far from overflow.
    const DOWN: f64 = f64::from_bits((1023 - 520) << 52);
    let sum: f64 = x.iter().zip(y).map(|(a, b)| (a.to_f64() * DOWN) * (b.to_f64() * DOWN)).sum();
    sum / DOWN / DOWN
}

/// Computes `‖x‖²` in double precision.
pub(super) fn norm2_wide<T: Real>(x: &[T]) -> f64 {
    dot_wide(x, x)
}

/// Computes `‖x‖²`: in the element type where that is accurate enough, in double precision above.
pub(super) fn norm2<T: Real>(x: &[T]) -> f64 {
    let fast = kernels::dot(x, x).to_f64();
    // Only rows that need wide sums anyway exceed 64; NaN takes the slow path too, and stays.
    if fast <= 64.0 { fast } else { norm2_wide(x) }
}

/// Writes `x · omegaᵀ`, row `i` at `out[i·stride ..][..omega.rows()]`.
pub(super) fn project<T: Real>(x: MatRef<'_, T>, omega: &Mat<T>, out: &mut [T], stride: usize) {
    project_with(x, omega, out, stride, &Scratch::new());
}

fn project_with<T: Real>(x: MatRef<'_, T>, omega: &Mat<T>, out: &mut [T], stride: usize, scratch: &Scratch) {
    debug_assert!(stride >= omega.rows() && x.cols() == omega.cols());
    gemm(Isa::best(), T::ONE, Op::N(x), Op::T(omega.as_ref()), T::ZERO, out, stride, scratch);
}

/// Directions to multiply with, and the buffers of the product, kept from call to call.
#[derive(Debug)]
pub(super) struct Projection<T> {
    omega: Mat<T>,
    scratch: Scratch,
}

impl<T: Clone> Clone for Projection<T> {
    fn clone(&self) -> Self {
        Self { omega: self.omega.clone(), scratch: Scratch::new() }
    }
}

impl<T: Real> Projection<T> {
    /// Prepares the rows of `omega`.
    pub(super) fn new(omega: Mat<T>) -> Self {
        Self { omega, scratch: Scratch::new() }
    }

    /// Number of directions.
    pub(super) fn len(&self) -> usize {
        self.omega.rows()
    }

    /// The directions, one per row.
    pub(super) fn directions(&self) -> &Mat<T> {
        &self.omega
    }

    /// Length of a direction.
    pub(super) fn dim(&self) -> usize {
        self.omega.cols()
    }

    /// Projects every row and calls `finish(row index, projections, out row)`. If `wide(row index)` is true,
    /// `projections` are in double precision; otherwise `None`, and they are at the front of the output row.
    ///
    /// A row's result does not depend on the rows beside it.
    pub(super) fn rows(
        &self,
        x: MatRef<'_, T>,
        out: &mut [T],
        stride: usize,
        wide: impl Fn(usize) -> bool,
        mut finish: impl FnMut(usize, Option<&[f64]>, &mut [T]),
    ) {
        project_with(x, &self.omega, out, stride, &self.scratch);
        let mut late = Vec::new();
        for (i, row) in out.chunks_exact_mut(stride.max(1)).enumerate().take(x.rows()) {
            if wide(i) {
                late.push(i);
            } else {
                finish(i, None, row);
            }
        }
        if late.is_empty() {
            return;
        }
        let m = self.len();
        let mut projections = self.scratch.take::<f64>(late.len() * m);
        if T::DTYPE == DType::F32 {
            let widened: Vec<f64> = late.iter().flat_map(|&i| x.row(i).iter().map(|x| x.to_f64())).collect();
            let rows = MatRef::new(&widened, late.len(), x.cols());
            project_with(rows, &self.omega.cast::<f64>(), &mut projections, m, &self.scratch);
        } else {
            for (&i, p) in late.iter().zip(projections.chunks_exact_mut(m.max(1))) {
                p.iter_mut().enumerate().for_each(|(l, p)| *p = dot_wide(x.row(i), self.omega.row(l)));
            }
        }
        for (&i, p) in late.iter().zip(projections.chunks_exact(m.max(1))) {
            finish(i, Some(p), &mut out[i * stride..(i + 1) * stride]);
        }
    }

    /// As [`rows`](Self::rows), with all projections passed in double precision, in a separate buffer.
    pub(super) fn rows_in_f64(
        &self,
        x: MatRef<'_, T>,
        out: &mut [T],
        stride: usize,
        wide: impl Fn(usize) -> bool,
        mut finish: impl FnMut(usize, &[f64], &mut [T]),
    ) {
        let mut buffer = vec![0.0; self.len()];
        self.rows(x, out, stride, wide, |i, p, row| match p {
            Some(p) => finish(i, p, row),
            None => {
                buffer.iter_mut().zip(row.iter()).for_each(|(b, o)| *b = o.to_f64());
                finish(i, &buffer, row);
            }
        });
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
