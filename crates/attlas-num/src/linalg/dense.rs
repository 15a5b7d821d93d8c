//! Matrix products in the element type, and the two vector loops that the factorisations use.

use crate::kernels::Op;
use crate::{DType, Mat, MatRef, Real};
use faer::{Accum, Par};

/// Computes $AB$. Panics if the inner sizes differ.
pub fn matmul<T: Real>(a: MatRef<'_, T>, b: MatRef<'_, T>) -> Mat<T> {
    product(Op::N(a), Op::N(b))
}

/// Computes $A^\top B$. Panics if the numbers of rows differ.
pub fn matmul_tn<T: Real>(a: MatRef<'_, T>, b: MatRef<'_, T>) -> Mat<T> {
    product(Op::T(a), Op::N(b))
}

/// Computes $AB^\top$. Panics if the numbers of columns differ.
pub fn matmul_nt<T: Real>(a: MatRef<'_, T>, b: MatRef<'_, T>) -> Mat<T> {
    product(Op::N(a), Op::T(b))
}

fn product<T: Real>(a: Op<MatRef<'_, T>>, b: Op<MatRef<'_, T>>) -> Mat<T> {
    let (rows, cols) = (a.rows(), b.cols());
    let mut out = Mat::zeros(rows, cols);
    gemm(T::ONE, a, b, out.data_mut(), cols, false);
    out
}

/// Computes `dst = alpha · a · b`, or `dst += …` if `accumulate`; rows of `dst` are `stride` apart. Panics if the sizes
/// do not fit.
pub fn gemm<T: Real>(
    alpha: T,
    a: Op<MatRef<'_, T>>,
    b: Op<MatRef<'_, T>>,
    dst: &mut [T],
    stride: usize,
    accumulate: bool,
) {
    match T::DTYPE {
        DType::F32 => gemm_as::<T, f32>(alpha, a, b, dst, stride, accumulate),
        DType::F64 => gemm_as::<T, f64>(alpha, a, b, dst, stride, accumulate),
    }
}

fn gemm_as<T: Real, E: Real + faer::traits::ComplexField>(
    alpha: T,
    a: Op<MatRef<'_, T>>,
    b: Op<MatRef<'_, T>>,
    dst: &mut [T],
    stride: usize,
    accumulate: bool,
) {
    let (m, k, n) = (a.rows(), a.cols(), b.cols());
    assert_eq!(k, b.rows(), "inner sizes of a product");
    if m == 0 || n == 0 {
        return;
    }
    assert!(stride >= n && dst.len() >= (m - 1) * stride + n, "a product needs {m} rows of {n}");
    if k == 0 {
        if !accumulate {
            (0..m).for_each(|i| dst[i * stride..i * stride + n].fill(T::ZERO));
        }
        return;
    }
    let dst = bytemuck::cast_slice_mut::<T, E>(&mut dst[..(m - 1) * stride + n]);
    // Not `from_row_major_slice_with_stride_mut`: faer 0.24.4 swaps its strides and writes out of bounds.
    let dst = faer::MatMut::from_column_major_slice_with_stride_mut(dst, n, m, stride).transpose_mut();
    let accumulate = if accumulate { Accum::Add } else { Accum::Replace };
    let alpha = E::from_f64(alpha.to_f64());
    faer::linalg::matmul::matmul(dst, accumulate, faer_op::<T, E>(a), faer_op::<T, E>(b), alpha, Par::Seq);
}

/// Converts an operand to the view that `faer` works on; neither side may be empty.
fn faer_op<'a, T: Real, E: Real>(op: Op<MatRef<'a, T>>) -> faer::MatRef<'a, E> {
    let view = |a: MatRef<'a, T>| {
        let stride = a.stride().max(a.cols());
        let data = &a.data()[..(a.rows() - 1) * stride + a.cols()];
        let data = bytemuck::cast_slice::<T, E>(data);
        faer::MatRef::from_row_major_slice_with_stride(data, a.rows(), a.cols(), stride)
    };
    match op {
        Op::N(a) => view(a),
        Op::T(a) => view(a).transpose(),
    }
}

/// Computes the inner product with eight partial sums, the same on every machine, over the shorter length.
pub fn dot<T: Real>(a: &[T], b: &[T]) -> T {
    let (mut ca, mut cb) = (a.chunks_exact(8), b.chunks_exact(8));
    let mut sums = [T::ZERO; 8];
    for (x, y) in ca.by_ref().zip(cb.by_ref()) {
        for (s, (&p, &q)) in sums.iter_mut().zip(x.iter().zip(y)) {
            *s += p * q;
        }
    }
    let done = a.len().min(b.len()) / 8 * 8;
    let tail: T = a[done..].iter().zip(&b[done..]).map(|(&p, &q)| p * q).sum();
    ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7])) + tail
}

/// Computes `y += c · x`.
pub(crate) fn axpy<T: Real>(c: T, x: &[T], y: &mut [T]) {
    y.iter_mut().zip(x).for_each(|(y, &x)| *y += c * x);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linalg::testing::{distance, gaussian};

    fn by_hand(a: &Mat<f64>, b: &Mat<f64>) -> Mat<f64> {
        Mat::from_fn(a.rows(), b.cols(), |i, j| (0..a.cols()).map(|l| a[(i, l)] * b[(l, j)]).sum())
    }

    #[test]
    fn products_equal_the_sums_they_stand_for() {
        for (m, k, n) in [(1, 1, 1), (3, 5, 2), (17, 9, 33), (40, 65, 31), (4, 0, 3), (0, 2, 2)] {
            let (a, b) = (gaussian(m, k, 1), gaussian(k, n, 2));
            let want = by_hand(&a, &b);
            let tol = 4.0 * (k as f64 + 1.0) * f64::EPSILON * (1.0 + a.frobenius() * b.frobenius());
            assert!(distance(&matmul(a.as_ref(), b.as_ref()), &want) <= tol);
            assert!(distance(&matmul_tn(a.transpose().as_ref(), b.as_ref()), &want) <= tol);
            assert!(distance(&matmul_nt(a.as_ref(), b.transpose().as_ref()), &want) <= tol);
            let single = matmul(a.cast::<f32>().as_ref(), b.cast::<f32>().as_ref()).cast::<f64>();
            assert!(distance(&single, &want) <= tol * 2f64.powi(29));
        }
    }

    #[test]
    fn a_strided_destination_keeps_what_lies_between_its_rows() {
        let (a, b) = (gaussian(3, 4, 1), gaussian(4, 2, 2));
        let mut dst = vec![7.0; 3 * 5];
        gemm(2.0, Op::N(a.as_ref()), Op::N(b.as_ref()), &mut dst, 5, true);
        let want = by_hand(&a, &b);
        for i in 0..3 {
            for j in 0..5 {
                let want = if j < 2 { 7.0 + 2.0 * want[(i, j)] } else { 7.0 };
                assert!((dst[5 * i + j] - want).abs() < 1e-13);
            }
        }
    }

    #[test]
    fn strided_factors_are_read_with_their_stride() {
        let wide = gaussian(6, 8, 3);
        let view = MatRef::with_stride(wide.data(), 6, 3, 8).unwrap();
        let want = by_hand(&view.to_mat().transpose(), &view.to_mat());
        assert!(distance(&matmul_tn(view, view), &want) < 1e-13);
    }

    #[test]
    fn nan_propagates_through_products() {
        let mut a = gaussian(4, 4, 5);
        a[(1, 2)] = f64::NAN;
        let c = matmul(a.as_ref(), Mat::identity(4).as_ref());
        assert!(c.row(1).iter().all(|x| x.is_nan()) && c.row(0).iter().all(|x| x.is_finite()));
    }

    #[test]
    fn dot_handles_every_tail() {
        for n in 0..40 {
            let a: Vec<f64> = (0..n).map(f64::from).collect();
            let want: f64 = (0..n).map(|i| f64::from(i * i)).sum();
            assert_eq!(dot(&a, &a), want);
        }
    }
}
