//! Dense factorisations: QR, Cholesky, LU, symmetric eigendecomposition, SVD, pseudo-inverses.
//!
//! Every factorisation takes a view of `f32` or `f64`, and computes and returns `f64`: the matrices are small, and
//! later work with the factors usually squares their condition number. Matrix products ([`matmul`] and [`gemm`]) stay
//! in the element type.
//!
//! Four rules hold throughout.
//!
//! * Factors are unique: `R` has a non-negative diagonal, singular values and eigenvalues descend, and each
//!   singular or eigenvector has its entry of largest magnitude positive.
//! * Input that is not finite is [`LinalgError::NotFinite`]; finite input never gives NaN. Matrices whose
//!   entries are so large or small that squares leave the range are scaled by a power of two first.
//! * Nothing depends on threads: the blocked routines of `faer` run sequentially.
//! * An iterative routine that does not converge is replaced by a slower one that does; only when the last
//!   one fails does the caller see [`LinalgError::NoConvergence`].
//!
//! Products and blocked factorisations come from `faer`. Pivoted QR, LU, both Jacobi methods and the
//! triangular solves are written here, because zero pivots, relative accuracy and stopping rules matter to
//! the callers more than the last factor of speed.
//!
//! ```
//! use attlas_num::Mat;
//! use attlas_num::linalg::{matmul, svd};
//!
//! let a = Mat::from_vec(vec![3.0, 0.0, 0.0, 4.0, 0.0, 0.0], 3, 2);
//! let f = svd(a.as_ref())?;
//! assert!((f.sigma[0] - 4.0).abs() < 1e-14 && (f.sigma[1] - 3.0).abs() < 1e-14);
//! let gram = matmul(f.v.transpose().as_ref(), f.v.as_ref());
//! assert!((gram[(0, 0)] - 1.0).abs() < 1e-14 && gram[(0, 1)].abs() < 1e-14);
//! # Ok::<(), attlas_num::linalg::LinalgError>(())
//! ```

mod cholesky;
mod dense;
mod eigen;
mod lambert;
mod lu;
mod norms;
mod pinv;
mod qr;
mod svd;
mod triangular;

pub use crate::kernels::Op;
pub use cholesky::{PsdFactor, cholesky, psd_factor};
pub use dense::{dot, gemm, matmul, matmul_nt, matmul_tn};
pub use eigen::{SymmetricEigen, symmetric_eigen};
pub use lambert::lambert_w0_exp;
pub use lu::{Lu, inverse, lu, solve};
pub use norms::{entropy_rank, eps_rank, norm_inf, norm_one, stable_rank, variance_rank};
pub use pinv::{Iteration, PinvReport, PinvStart, iterative_pinv, pinv};
pub use qr::{PivotedQr, ThinQr, pivoted_qr, thin_qr};
pub use svd::{Svd, singular_values, singular_values_of_product, svd};
pub use triangular::{Triangle, solve_triangular_in_place};

pub(crate) use dense::axpy;

use crate::{Mat, MatRef, Real};

/// Reason why a factorisation has no answer.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LinalgError {
    /// An entry is infinite or NaN.
    #[error("{what} has an entry that is not finite")]
    NotFinite {
        /// The argument.
        what: &'static str,
    },
    /// A size does not fit.
    #[error("{what} must be {expected}, found {found}")]
    Shape {
        /// The size in question.
        what: &'static str,
        /// The expected size.
        expected: usize,
        /// The size found.
        found: usize,
    },
    /// A zero pivot.
    #[error("the matrix is singular: pivot {pivot} is zero")]
    Singular {
        /// Position of the first zero pivot.
        pivot: usize,
    },
    /// A pivot or a diagonal entry that a positive (semi)definite matrix cannot have.
    #[error("the matrix is not positive definite: pivot {pivot}")]
    NotPositiveDefinite {
        /// Position of the first such pivot.
        pivot: usize,
    },
    /// Every algorithm of the chain stopped before convergence.
    #[error("no convergence after {iters} iterations")]
    NoConvergence {
        /// Iterations (sweeps) of the last algorithm.
        iters: usize,
    },
    /// A parameter outside its range.
    #[error("parameter {name} is {value}, expected {expected}")]
    InvalidParam {
        /// Its name.
        name: &'static str,
        /// Its value.
        value: f64,
        /// The range.
        expected: &'static str,
    },
}

/// Result of this module.
pub type Result<T> = std::result::Result<T, LinalgError>;

/// Unit roundoff of `f64`.
pub(crate) const U: f64 = f64::EPSILON / 2.0;

/// Returns a copy in `f64` and a power of two `s`, with `a = s · copy`: the copy's entries can be squared and summed
/// without leaving the range. `s` is 1 unless the entries are extreme.
pub(crate) fn to_scaled<T: Real>(a: MatRef<'_, T>, what: &'static str) -> Result<(Mat<f64>, f64)> {
    let mut copy = to_f64(a);
    let mut max = 0.0f64;
    for &x in copy.data() {
        if !x.is_finite() {
            return Err(LinalgError::NotFinite { what });
        }
        max = max.max(x.abs());
    }
    let scale = range_scale(max);
    if scale != 1.0 {
        copy.data_mut().iter_mut().for_each(|x| *x /= scale);
    }
    Ok((copy, scale))
}

/// Returns a power of two near `max` if `max` is extreme, else 1.
fn range_scale(max: f64) -> f64 {
    if max == 0.0 || (1e-100..1e100).contains(&max) {
        return 1.0;
    }
    libm::exp2(libm::log2(max).round().clamp(-1000.0, 1000.0))
}

/// Returns a contiguous copy in `f64`.
pub(crate) fn to_f64<T: Real>(a: MatRef<'_, T>) -> Mat<f64> {
    let data = a.iter_rows().flatten().map(|x| x.to_f64()).collect();
    Mat::from_vec(data, a.rows(), a.cols())
}

/// Checks that a matrix is square and returns its size.
pub(crate) fn square<T>(a: MatRef<'_, T>, what: &'static str) -> Result<usize> {
    if a.rows() == a.cols() {
        Ok(a.rows())
    } else {
        Err(LinalgError::Shape { what, expected: a.rows(), found: a.cols() })
    }
}

/// Copies the columns `0..k` of `a`.
pub(crate) fn leading_cols(a: &Mat<f64>, k: usize) -> Mat<f64> {
    Mat::from_fn(a.rows(), k, |i, j| a[(i, j)])
}

#[cfg(test)]
pub(crate) mod testing {
    //! Matrices and comparisons shared by the tests of this module.
    use super::*;
    use crate::rng::StreamKey;

    /// Independent standard normal entries.
    pub(crate) fn gaussian(rows: usize, cols: usize, seed: u64) -> Mat<f64> {
        let mut rng = StreamKey::new(seed).named("test matrix").rng();
        Mat::from_fn(rows, cols, |_, _| rng.normal())
    }

    /// Returns `left · diag(sigma) · rightᵀ` with orthonormal factors.
    pub(crate) fn with_spectrum(rows: usize, cols: usize, sigma: &[f64], seed: u64) -> Mat<f64> {
        let k = sigma.len();
        let left = thin_qr(gaussian(rows, k, seed).as_ref()).unwrap().q;
        let right = thin_qr(gaussian(cols, k, seed + 1).as_ref()).unwrap().q;
        let scaled = Mat::from_fn(rows, k, |i, j| left[(i, j)] * sigma[j]);
        matmul_nt(scaled.as_ref(), right.as_ref())
    }

    /// Frobenius norm of a difference.
    pub(crate) fn distance(a: &Mat<f64>, b: &Mat<f64>) -> f64 {
        assert_eq!((a.rows(), a.cols()), (b.rows(), b.cols()));
        a.data().iter().zip(b.data()).map(|(x, y)| (x - y) * (x - y)).sum::<f64>().sqrt()
    }

    /// Returns the Frobenius distance of $Q^\top Q$ from the identity.
    pub(crate) fn departure_from_orthonormal(q: &Mat<f64>) -> f64 {
        distance(&matmul_tn(q.as_ref(), q.as_ref()), &Mat::identity(q.cols()))
    }

    /// `a` with one entry replaced by NaN.
    pub(crate) fn spoiled(n: usize) -> Mat<f64> {
        let mut a = gaussian(n, n, 99);
        a[(n / 2, n / 3)] = f64::NAN;
        a
    }
}
