//! Factorisations of small dense matrices in f64: random rotations and the singular value decomposition.

use crate::mat::Mat;
use crate::rng::Rng;

/// A rotation or reflection drawn from the Haar measure.
///
/// QR of a Gaussian matrix by Householder reflections, column `j` of Q then multiplied by the sign of
/// $R_{jj}$: without that, $Q_{11} < 0$ always, and estimators that are not even in the directions are biased
/// (Mezzadri 2007).
pub(super) fn haar(d: usize, rng: &mut Rng) -> Mat<f64> {
    let gaussian = Mat::from_fn(d, d, |_, _| rng.normal());
    // Row j of `cols` is column j of the matrix.
    let mut cols = gaussian.transpose();
    let mut reflectors: Vec<Vec<f64>> = Vec::with_capacity(d);
    let mut signs = vec![1.0; d];
    for (j, sign) in signs.iter_mut().enumerate() {
        let mut u = cols.row(j)[j..].to_vec();
        let norm = u.iter().map(|x| x * x).sum::<f64>().sqrt();
        // R_jj is −sign(u_0)·‖u‖.
        let head = if u[0] < 0.0 { -norm } else { norm };
        *sign = if head > 0.0 { -1.0 } else { 1.0 };
        u[0] += head;
        let length = u.iter().map(|x| x * x).sum::<f64>().sqrt();
        if length > 0.0 {
            u.iter_mut().for_each(|x| *x /= length);
        }
        for c in j..d {
            reflect(&u, &mut cols.row_mut(c)[j..]);
        }
        reflectors.push(u);
    }
    // Row j of `q` is column j of Q = H_0 H_1 … applied to e_j.
    let mut q = Mat::identity(d);
    for (c, &sign) in signs.iter().enumerate() {
        let column = q.row_mut(c);
        for (j, u) in reflectors.iter().enumerate().rev() {
            reflect(u, &mut column[j..]);
        }
        column.iter_mut().for_each(|x| *x *= sign);
    }
    q.transpose()
}

/// `x ← x − 2u⟨u, x⟩`.
fn reflect(u: &[f64], x: &mut [f64]) {
    let twice = 2.0 * u.iter().zip(x.iter()).map(|(a, b)| a * b).sum::<f64>();
    u.iter().zip(x).for_each(|(a, b)| *b -= twice * a);
}

/// Singular value decomposition $A = U \Sigma V^\top$ of a square matrix.
pub(super) struct Svd {
    /// Left vectors as rows; a row is zero where its singular value is.
    pub(super) ut: Mat<f64>,
    /// Singular values, in no particular order.
    pub(super) values: Vec<f64>,
    /// Right vectors as rows.
    pub(super) vt: Mat<f64>,
}

/// One-sided Jacobi: rotates pairs of columns until all are orthogonal. Always converges, and finds small
/// singular values to high relative accuracy; for a positive semi-definite matrix `vt` and `values` are its
/// eigenvectors and eigenvalues.
pub(super) fn jacobi_svd(a: &Mat<f64>) -> Svd {
    let n = a.rows();
    debug_assert_eq!(n, a.cols());
    let mut cols = a.transpose();
    let mut vt = Mat::identity(n);
    // Far more sweeps than the six to ten that convergence takes; the bound only guards against NaN.
    for _ in 0..60 {
        let mut rotated = false;
        for p in 0..n {
            for q in p + 1..n {
                let dot = |i: usize, j: usize| -> f64 {
                    cols.row(i).iter().zip(cols.row(j)).map(|(x, y)| x * y).sum()
                };
                let (alpha, beta, gamma) = (dot(p, p), dot(q, q), dot(p, q));
                if gamma.abs() <= f64::EPSILON * alpha.sqrt() * beta.sqrt() || gamma == 0.0 {
                    continue;
                }
                rotated = true;
                let zeta = (beta - alpha) / (2.0 * gamma);
                let t = zeta.signum() / (zeta.abs() + (1.0 + zeta * zeta).sqrt());
                let c = 1.0 / (1.0 + t * t).sqrt();
                rotate(&mut cols, p, q, c, c * t);
                rotate(&mut vt, p, q, c, c * t);
            }
        }
        if !rotated {
            break;
        }
    }
    let values: Vec<f64> = (0..n).map(|j| cols.row(j).iter().map(|x| x * x).sum::<f64>().sqrt()).collect();
    for (j, &s) in values.iter().enumerate() {
        if s > 0.0 {
            cols.row_mut(j).iter_mut().for_each(|x| *x /= s);
        }
    }
    Svd { ut: cols, values, vt }
}

/// Rotates rows `p < q` by the angle with cosine `c` and sine `s`.
fn rotate(m: &mut Mat<f64>, p: usize, q: usize, c: f64, s: f64) {
    let n = m.cols();
    let (head, tail) = m.data_mut().split_at_mut(q * n);
    for (x, y) in head[p * n..(p + 1) * n].iter_mut().zip(&mut tail[..n]) {
        (*x, *y) = (c * *x - s * *y, s * *x + c * *y);
    }
}

/// `a · b`.
pub(super) fn matmul(a: &Mat<f64>, b: &Mat<f64>) -> Mat<f64> {
    let mut out = Mat::zeros(a.rows(), b.cols());
    for i in 0..a.rows() {
        for (k, &x) in a.row(i).iter().enumerate() {
            out.row_mut(i).iter_mut().zip(b.row(k)).for_each(|(o, y)| *o += x * y);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::StreamKey;

    #[test]
    fn haar_matrices_are_orthogonal() {
        for d in [1, 2, 3, 17, 64] {
            let q = haar(d, &mut StreamKey::new(5).with(d as u64).rng());
            let gram = matmul(&q.transpose(), &q);
            let tol = 20.0 * f64::EPSILON * d as f64;
            for i in 0..d {
                for j in 0..d {
                    assert!((gram[(i, j)] - f64::from(u8::from(i == j))).abs() < tol, "{d}: {i}, {j}");
                }
            }
        }
    }

    #[test]
    fn the_diagonal_of_a_haar_matrix_has_mean_zero_and_variance_one_over_d() {
        let (d, draws) = (4, 20_000);
        let mut rng = StreamKey::new(11).rng();
        let mut sums = vec![[0.0; 2]; d];
        for _ in 0..draws {
            let q = haar(d, &mut rng);
            for (j, s) in sums.iter_mut().enumerate() {
                s[0] += q[(j, j)];
                s[1] += q[(j, j)] * q[(j, j)];
            }
        }
        let n = f64::from(draws);
        for [first, second] in sums {
            assert!((first / n).abs() < 5.0 / n.sqrt() / 2.0);
            // Var(Q²) = 3/(d(d+2)) − 1/d² = 1/16.
            assert!((second / n - 0.25).abs() < 5.0 * 0.25 / n.sqrt());
        }
    }

    #[test]
    fn the_factors_multiply_back_and_are_orthogonal() {
        let mut rng = StreamKey::new(2).rng();
        for n in [1, 2, 5, 12] {
            let a = Mat::from_fn(n, n, |_, _| rng.normal());
            let Svd { ut, values, vt } = jacobi_svd(&a);
            let scaled = Mat::from_fn(n, n, |i, j| values[i] * vt[(i, j)]);
            let back = matmul(&ut.transpose(), &scaled);
            let tol = 100.0 * f64::EPSILON * n as f64;
            assert!(a.data().iter().zip(back.data()).all(|(x, y)| (x - y).abs() < tol));
            let gram = matmul(&ut, &ut.transpose());
            assert!((0..n).all(|i| (0..n).all(|j| (gram[(i, j)] - f64::from(u8::from(i == j))).abs() < tol)));
        }
    }

    #[test]
    fn a_matrix_of_rank_one_is_decomposed_without_nan() {
        let a = Mat::from_fn(4, 4, |i, j| (i * j) as f64);
        let svd = jacobi_svd(&a);
        let mut values = svd.values.clone();
        values.sort_by(f64::total_cmp);
        assert!((values[3] - 14.0).abs() < 1e-13 && values[2] < 1e-13);
        assert!(svd.ut.data().iter().all(|x| x.is_finite()));
    }
}
