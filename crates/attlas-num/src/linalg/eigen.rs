//! Symmetric eigendecomposition.

use super::{LinalgError, Result, U, square, to_scaled};
use crate::{Mat, MatRef, Real};
use faer::Par;
use faer::dyn_stack::{MemBuffer, MemStack};

/// $A = V \operatorname{diag}(\lambda) V^\top$.
#[derive(Clone, Debug)]
pub struct SymmetricEigen {
    /// Eigenvalues, descending.
    pub values: Vec<f64>,
    /// Orthonormal eigenvectors as columns, in the order of the values.
    pub vectors: Mat<f64>,
}

/// Sweeps of the Jacobi methods before they give up.
pub(crate) const MAX_SWEEPS: usize = 30;

/// Computes the eigendecomposition of a symmetric matrix; it uses $(A + A^\top)/2$.
///
/// Tries tridiagonalisation first; if that does not converge, or its eigenvalues do not have the matrix's Frobenius
/// norm, cyclic Jacobi, which is slower and keeps the digits of small eigenvalues.
pub fn symmetric_eigen<T: Real>(a: MatRef<'_, T>) -> Result<SymmetricEigen> {
    run(a, &[tridiagonal, jacobi])
}

type Algorithm = fn(&Mat<f64>) -> Option<(Vec<f64>, Mat<f64>)>;

fn run<T: Real>(a: MatRef<'_, T>, chain: &[Algorithm]) -> Result<SymmetricEigen> {
    let n = square(a, "columns of a symmetric matrix")?;
    let (mut a, scale) = to_scaled(a, "the symmetric matrix")?;
    for i in 0..n {
        for j in 0..i {
            let mean = 0.5 * a[(i, j)] + 0.5 * a[(j, i)];
            a[(i, j)] = mean;
            a[(j, i)] = mean;
        }
    }
    let norm = a.frobenius();
    let plausible = |values: &[f64], vectors: &Mat<f64>| {
        let found = values.iter().map(|x| x * x).sum::<f64>().sqrt();
        (found - norm).abs() <= 100.0 * (n as f64 + 1.0) * U * norm
            && vectors.data().iter().all(|x| x.is_finite())
    };
    let (values, vectors) = chain
        .iter()
        .find_map(|algorithm| algorithm(&a).filter(|(values, vectors)| plausible(values, vectors)))
        .ok_or(LinalgError::NoConvergence { iters: MAX_SWEEPS })?;
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by(|&i, &j| values[j].total_cmp(&values[i]));
    let mut vectors = Mat::from_fn(n, n, |i, j| vectors[(i, order[j])]);
    for j in 0..n {
        if leading_sign(&vectors, j) < 0.0 {
            (0..n).for_each(|i| vectors[(i, j)] = -vectors[(i, j)]);
        }
    }
    Ok(SymmetricEigen { values: order.iter().map(|&j| scale * values[j]).collect(), vectors })
}

/// Returns the sign of the first entry of largest magnitude in column `j`. Magnitudes within a part in 10⁹ of each
/// other count as equal, so rounding does not decide.
pub(crate) fn leading_sign(a: &Mat<f64>, j: usize) -> f64 {
    let mut best = 0.0f64;
    for i in 0..a.rows() {
        if a[(i, j)].abs() > best.abs() * (1.0 + 1e-9) {
            best = a[(i, j)];
        }
    }
    if best < 0.0 { -1.0 } else { 1.0 }
}

fn tridiagonal(a: &Mat<f64>) -> Option<(Vec<f64>, Mat<f64>)> {
    use faer::linalg::evd::{ComputeEigenvectors, self_adjoint_evd, self_adjoint_evd_scratch};
    let n = a.rows();
    if n == 0 {
        return Some((Vec::new(), Mat::zeros(0, 0)));
    }
    let copy = faer::Mat::from_fn(n, n, |i, j| a[(i, j)]);
    let mut vectors = faer::Mat::<f64>::zeros(n, n);
    let mut values = faer::Mat::<f64>::zeros(n, 1);
    let mut memory = MemBuffer::new(self_adjoint_evd_scratch::<f64>(
        n,
        ComputeEigenvectors::Yes,
        Par::Seq,
        Default::default(),
    ));
    self_adjoint_evd(
        copy.as_ref(),
        values.as_mut().col_mut(0).as_diagonal_mut(),
        Some(vectors.as_mut()),
        Par::Seq,
        MemStack::new(&mut memory),
        Default::default(),
    )
    .ok()?;
    Some(((0..n).map(|i| values[(i, 0)]).collect(), Mat::from_fn(n, n, |i, j| vectors[(i, j)])))
}

/// Runs cyclic Jacobi by rows. The rows of the transposed eigenvector matrix are rotated, because they are contiguous.
fn jacobi(a: &Mat<f64>) -> Option<(Vec<f64>, Mat<f64>)> {
    let n = a.rows();
    let mut a = a.clone();
    let mut vt = Mat::<f64>::identity(n);
    let target = 10.0 * U * a.frobenius();
    for _ in 0..MAX_SWEEPS {
        let mut off = 0.0;
        for p in 0..n {
            for q in p + 1..n {
                let apq = a[(p, q)];
                off += 2.0 * apq * apq;
                // Relative to the two diagonal entries, so small eigenvalues keep their digits.
                let local = (a[(p, p)].abs() * a[(q, q)].abs()).sqrt();
                if apq == 0.0 || apq.abs() <= 0.1 * U * local {
                    continue;
                }
                let zeta = 0.5 * (a[(q, q)] - a[(p, p)]) / apq;
                let t = rotation_tangent(zeta);
                let c = 1.0 / t.hypot(1.0);
                let s = c * t;
                for i in 0..n {
                    let (x, y) = (a[(i, p)], a[(i, q)]);
                    a[(i, p)] = c * x - s * y;
                    a[(i, q)] = s * x + c * y;
                }
                rotate_rows(&mut a, p, q, c, s);
                rotate_rows(&mut vt, p, q, c, s);
                a[(p, q)] = 0.0;
                a[(q, p)] = 0.0;
            }
        }
        if off.sqrt() <= target {
            let values = (0..n).map(|i| a[(i, i)]).collect();
            return Some((values, vt.transpose()));
        }
    }
    None
}

/// Returns the smaller root of $t^2 + 2\zeta t - 1 = 0$, without overflow.
pub(crate) fn rotation_tangent(zeta: f64) -> f64 {
    zeta.signum() / (zeta.abs() + zeta.hypot(1.0))
}

/// Rotates rows `p < q` into `c p − s q` and `s p + c q`.
pub(crate) fn rotate_rows(a: &mut Mat<f64>, p: usize, q: usize, c: f64, s: f64) {
    let n = a.cols();
    let (head, tail) = a.data_mut().split_at_mut(q * n);
    for (x, y) in head[p * n..(p + 1) * n].iter_mut().zip(&mut tail[..n]) {
        (*x, *y) = (c * *x - s * *y, s * *x + c * *y);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linalg::testing::*;
    use crate::linalg::{matmul, matmul_nt};

    fn rebuilt(e: &SymmetricEigen) -> Mat<f64> {
        let n = e.values.len();
        let scaled = Mat::from_fn(n, n, |i, j| e.vectors[(i, j)] * e.values[j]);
        matmul_nt(scaled.as_ref(), e.vectors.as_ref())
    }

    #[test]
    fn both_algorithms_diagonalise() {
        for n in [1, 2, 3, 10, 65, 130] {
            let g = gaussian(n, n, 3);
            let a = Mat::from_fn(n, n, |i, j| g[(i, j)] + g[(j, i)]);
            let bound = 20.0 * n as f64 * U;
            let (first, second) = (symmetric_eigen(a.as_ref()).unwrap(), run(a.as_ref(), &[jacobi]).unwrap());
            for e in [&first, &second] {
                assert!(distance(&rebuilt(e), &a) <= bound * a.frobenius());
                assert!(departure_from_orthonormal(&e.vectors) <= bound);
                assert!(e.values.windows(2).all(|w| w[0] >= w[1]));
            }
            for (x, y) in first.values.iter().zip(&second.values) {
                assert!((x - y).abs() <= bound * a.frobenius());
            }
        }
    }

    #[test]
    fn a_known_spectrum_is_found() {
        // The second difference matrix: 2 − 2 cos(π k/(n+1)).
        let n = 12;
        let a = Mat::from_fn(n, n, |i, j| match i.abs_diff(j) {
            0 => 2.0,
            1 => -1.0,
            _ => 0.0,
        });
        let e = symmetric_eigen(a.as_ref()).unwrap();
        for (k, v) in e.values.iter().enumerate() {
            let want = 2.0 + 2.0 * (std::f64::consts::PI * (k + 1) as f64 / (n + 1) as f64).cos();
            assert!((v - want).abs() < 1e-14 * 4.0);
        }
    }

    #[test]
    fn jacobi_keeps_the_digits_of_small_eigenvalues() {
        // D B D with graded D: eigenvalues spread over 24 decades, each near a diagonal entry.
        let d = [1.0, 1e-4, 1e-8, 1e-12];
        let a = Mat::from_fn(4, 4, |i, j| d[i] * d[j] * if i == j { 1.0 } else { 0.2 });
        let values = run(a.as_ref(), &[jacobi]).unwrap().values;
        // Schur complements of B give the eigenvalues to relative accuracy 1e-8 here.
        let b = |k: f64| 1.0 - k * 0.04 / (1.0 + (k - 1.0) * 0.2);
        for (k, v) in values.iter().enumerate() {
            let want = d[k] * d[k] * b(k as f64);
            assert!((v / want - 1.0).abs() < 1e-7, "{k}: {v} against {want}");
        }
    }

    #[test]
    fn a_failing_first_algorithm_is_replaced() {
        let a = matmul(gaussian(6, 6, 1).as_ref(), Mat::identity(6).as_ref());
        let wrong: Algorithm = |a| Some((vec![1.0; a.rows()], Mat::identity(a.rows())));
        let e = run(a.as_ref(), &[|_| None, wrong, jacobi]).unwrap();
        assert!(departure_from_orthonormal(&e.vectors) < 1e-13);
        assert_eq!(run(a.as_ref(), &[|_| None]).unwrap_err(), LinalgError::NoConvergence { iters: 30 });
    }

    #[test]
    fn degenerate_matrices_have_answers() {
        assert!(symmetric_eigen(Mat::<f64>::zeros(0, 0).as_ref()).unwrap().values.is_empty());
        let e = symmetric_eigen(Mat::<f64>::zeros(4, 4).as_ref()).unwrap();
        assert!(e.values == [0.0; 4] && departure_from_orthonormal(&e.vectors) == 0.0);
        let ones = Mat::from_fn(5, 5, |_, _| 1.0);
        let e = symmetric_eigen(ones.as_ref()).unwrap();
        assert!((e.values[0] - 5.0).abs() < 1e-14 && e.values[1..].iter().all(|x| x.abs() < 1e-14));
        assert!(e.vectors[(0, 0)] > 0.0);
        for s in [1e305, 1e-305] {
            let e = symmetric_eigen(Mat::from_fn(3, 3, |i, j| s / (1 + i + j) as f64).as_ref()).unwrap();
            assert!((e.values[0] / s - 1.408_318_927).abs() < 1e-8);
        }
        assert!(matches!(symmetric_eigen(spoiled(4).as_ref()), Err(LinalgError::NotFinite { .. })));
        let shape = symmetric_eigen(Mat::<f64>::zeros(2, 3).as_ref()).unwrap_err();
        assert!(matches!(shape, LinalgError::Shape { expected: 2, found: 3, .. }));
    }
}
