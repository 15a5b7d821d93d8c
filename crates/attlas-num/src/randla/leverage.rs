//! Leverage scores: how much each row of a matrix matters to its row space.

use crate::linalg::{
    LinalgError, Result, Triangle, axpy, dot, matmul, matmul_tn, pivoted_qr, psd_factor,
    solve_triangular_in_place, symmetric_eigen, to_scaled,
};
use crate::randla::gaussian_matrix;
use crate::rng::StreamKey;
use crate::{Mat, MatRef, Real};
use rayon::prelude::*;

/// $\tau_i = a_i^\top (A^\top A)^+ a_i$: in $[0, 1]$, with the rank as their sum, unchanged by $A \to AM$ for
/// nonsingular $M$.
///
/// Squared row norms of $Q$ from pivoted QR; directions with $|R_{jj}| \le$ `rank_tol` $|R_{00}|$ are dropped.
pub fn leverage_scores<T: Real>(a: MatRef<'_, T>, rank_tol: f64) -> Result<Vec<f64>> {
    let q = pivoted_qr(a, rank_tol, usize::MAX)?.q;
    Ok((0..q.rows()).map(|i| dot(q.row(i), q.row(i)).clamp(0.0, 1.0)).collect())
}

/// $a_i^\top (A^\top A + \lambda I)^{-1} a_i$ by Cholesky, for $\lambda \ge 0$.
pub fn ridge_leverage_scores<T: Real>(a: MatRef<'_, T>, lambda: f64) -> Result<Vec<f64>> {
    check_ridge(lambda)?;
    let (a, scale) = to_scaled(a, "the matrix")?;
    let mut gram = gram(a.as_ref());
    (0..gram.rows()).for_each(|i| gram[(i, i)] += lambda / scale / scale);
    let factor = psd_factor(gram.as_ref())?;
    let mut scores = vec![0.0; a.rows()];
    scores.par_chunks_mut(PIECE).enumerate().try_for_each(|(t, scores)| -> Result<()> {
        let rows = a.as_ref().sub_rows(t * PIECE..t * PIECE + scores.len());
        let half =
            factor.half_solve(Mat::from_fn(rows.cols(), rows.rows(), |i, j| rows.at(j, i)).as_ref())?;
        for i in 0..half.rows() {
            scores.iter_mut().zip(half.row(i)).for_each(|(s, x)| *s += x * x);
        }
        scores.iter_mut().for_each(|s| *s = s.clamp(0.0, 1.0));
        Ok(())
    })?;
    Ok(scores)
}

/// Rows that one task takes. Fixed, so that the number of threads cannot change a bit.
const PIECE: usize = 1024;

/// $A^\top A$: pieces of rows in parallel, added in order.
fn gram(a: MatRef<'_, f64>) -> Mat<f64> {
    let piece = |t: usize| {
        let rows = a.sub_rows(t * PIECE..((t + 1) * PIECE).min(a.rows()));
        matmul_tn(rows, rows)
    };
    let parts: Vec<Mat<f64>> = (0..a.rows().div_ceil(PIECE)).into_par_iter().map(piece).collect();
    let mut sum = Mat::zeros(a.cols(), a.cols());
    parts.iter().for_each(|part| axpy(1.0, part.data(), sum.data_mut()));
    sum
}

fn check_ridge(lambda: f64) -> Result<()> {
    if lambda.is_finite() && lambda >= 0.0 {
        Ok(())
    } else {
        Err(LinalgError::InvalidParam { name: "lambda", value: lambda, expected: "finite, at least 0" })
    }
}

/// Leverage scores within a factor, in $O(\mathrm{nnz}(A) \log m)$: a CountSketch of $\max(4n, 64)$ rows gives $R$,
/// and $\|a_i R^{-1} G\|^2$ with a Gaussian $G$ of $\lceil 8 \ln m \rceil$ columns estimates $\|a_i R^{-1}\|^2$
/// (Drineas et al. 2012, Clarkson and Woodruff 2013).
///
/// Half of the scores are within 50 % of the exact ones, none is negative, and some exceed 1. Matrices with
/// no more rows than the sketch get exact scores.
pub fn fast_leverage_scores<T: Real>(a: MatRef<'_, T>, key: StreamKey) -> Result<Vec<f64>> {
    const RANK_TOL: f64 = 1e-10;
    let (m, n) = (a.rows(), a.cols());
    let sketch_rows = (4 * n).max(64);
    if sketch_rows >= m {
        return leverage_scores(a, RANK_TOL);
    }
    let (a, _) = to_scaled(a, "the matrix")?;
    let mut rng = key.named("leverage sketch").rng();
    let mut sketch = Mat::<f64>::zeros(sketch_rows, n);
    for i in 0..m {
        let (row, sign) = (rng.below(sketch_rows), rng.sign());
        axpy(sign, a.row(i), sketch.row_mut(row));
    }
    let f = pivoted_qr(sketch.as_ref(), RANK_TOL, n)?;
    let columns = (8.0 * libm::log(m as f64)).ceil() as usize;
    let mut g = gaussian_matrix::<f64>(&mut key.named("leverage projection").rng(), f.rank, columns);
    let triangle = Mat::from_fn(f.rank, f.rank, |i, j| f.r[(i, j)]);
    solve_triangular_in_place(Triangle::Upper, triangle.as_ref(), g.data_mut(), columns);
    let mut spread = Mat::zeros(n, columns);
    (0..f.rank).for_each(|i| spread.row_mut(f.perm[i]).copy_from_slice(g.row(i)));
    let projected = matmul(a.as_ref(), spread.as_ref());
    Ok((0..m).map(|i| dot(projected.row(i), projected.row(i)) / columns as f64).collect())
}

/// $\operatorname{diag}(K(K + \lambda I)^{-1})$ for a positive semidefinite $K$; their sum is the statistical
/// dimension. With $\lambda = 0$ the projection on the range of $K$.
pub fn kernel_leverage_scores<T: Real>(k: MatRef<'_, T>, lambda: f64) -> Result<Vec<f64>> {
    check_ridge(lambda)?;
    let e = symmetric_eigen(k)?;
    let n = e.values.len();
    let noise = n as f64 * T::ROUNDOFF * e.values.first().copied().unwrap_or(0.0);
    let mut scores = vec![0.0; n];
    for (j, &value) in e.values.iter().enumerate().filter(|(_, v)| **v > noise.max(0.0)) {
        let share = value / (value + lambda);
        scores.iter_mut().enumerate().for_each(|(i, s)| *s += share * e.vectors[(i, j)] * e.vectors[(i, j)]);
    }
    scores.iter_mut().for_each(|s| *s = s.clamp(0.0, 1.0));
    Ok(scores)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linalg::matmul_nt;
    use crate::linalg::testing::*;

    fn by_definition(a: &Mat<f64>) -> Vec<f64> {
        let gram = matmul_tn(a.as_ref(), a.as_ref());
        let (inverse, _) = crate::linalg::pinv(gram.as_ref(), 1e-11).unwrap();
        let b = matmul(a.as_ref(), inverse.as_ref());
        (0..a.rows()).map(|i| dot(a.row(i), b.row(i))).collect()
    }

    fn close(x: &[f64], y: &[f64], tol: f64) -> bool {
        x.len() == y.len() && x.iter().zip(y).all(|(a, b)| (a - b).abs() <= tol)
    }

    #[test]
    fn exact_scores_follow_the_definition() {
        let full = gaussian(40, 6, 1);
        let deficient = matmul(gaussian(40, 3, 1).as_ref(), gaussian(3, 6, 2).as_ref());
        for (a, rank) in [(full, 6.0), (deficient, 3.0), (gaussian(4, 9, 3), 4.0)] {
            let scores = leverage_scores(a.as_ref(), 1e-10).unwrap();
            assert!(close(&scores, &by_definition(&a), 1e-9));
            assert!((scores.iter().sum::<f64>() - rank).abs() < 1e-12);
            assert!(scores.iter().all(|s| (0.0..=1.0).contains(s)));
        }
    }

    #[test]
    fn a_change_of_basis_leaves_the_scores() {
        let (a, m) = (gaussian(50, 5, 4), gaussian(5, 5, 9));
        let before = leverage_scores(a.as_ref(), 1e-12).unwrap();
        let after = leverage_scores(matmul(a.as_ref(), m.as_ref()).as_ref(), 1e-12).unwrap();
        assert!(close(&before, &after, 1e-12));
    }

    #[test]
    fn ridge_scores_shrink_from_exact_to_nothing() {
        let a = gaussian(30, 4, 2);
        let exact = leverage_scores(a.as_ref(), 1e-12).unwrap();
        assert!(close(&ridge_leverage_scores(a.as_ref(), 0.0).unwrap(), &exact, 1e-12));
        let mut last = 4.0;
        for lambda in [1e-2, 1.0, 1e2, 1e6] {
            let ridge = ridge_leverage_scores(a.as_ref(), lambda).unwrap();
            let kernel = kernel_leverage_scores(matmul_nt(a.as_ref(), a.as_ref()).as_ref(), lambda).unwrap();
            // diag(AAᵀ(AAᵀ + λ)⁻¹) = diag(A (AᵀA + λ)⁻¹ Aᵀ).
            assert!(close(&ridge, &kernel, 1e-12), "{lambda}");
            let sum: f64 = ridge.iter().sum();
            assert!(sum < last);
            last = sum;
        }
        assert!(last < 1e-3);
    }

    #[test]
    fn kernel_scores_sum_to_the_statistical_dimension() {
        let eigenvalues = [3.0, 1.0, 0.1];
        let q = crate::linalg::thin_qr(gaussian(8, 3, 1).as_ref()).unwrap().q;
        let scaled = Mat::from_fn(8, 3, |i, j| q[(i, j)] * eigenvalues[j]);
        let k = matmul_nt(scaled.as_ref(), q.as_ref());
        let sum = |lambda: f64| kernel_leverage_scores(k.as_ref(), lambda).unwrap().iter().sum::<f64>();
        let want: f64 = eigenvalues.iter().map(|v| v / (v + 0.5)).sum();
        assert!((sum(0.5) - want).abs() < 1e-13 && (sum(0.0) - 3.0).abs() < 1e-13);
    }

    #[test]
    fn fast_scores_are_right_within_a_factor() {
        let mut a = gaussian(3000, 12, 3);
        // Rows of very different importance, one of them indispensable.
        for i in 0..3000 {
            let s = if i % 100 == 7 { 8.0 } else { 0.5 + (i % 5) as f64 * 0.3 };
            a.row_mut(i).iter_mut().for_each(|x| *x *= s);
        }
        a.row_mut(5).iter_mut().for_each(|x| *x *= 1000.0);
        let exact = leverage_scores(a.as_ref(), 1e-12).unwrap();
        for seed in 0..5 {
            let fast = fast_leverage_scores(a.as_ref(), StreamKey::new(seed)).unwrap();
            let mut errors: Vec<f64> = fast.iter().zip(&exact).map(|(f, e)| (f / e - 1.0).abs()).collect();
            errors.sort_by(f64::total_cmp);
            assert!(errors[1500] < 0.5, "median {}", errors[1500]);
            assert!(fast.iter().zip(&exact).all(|(f, e)| *f > 0.1 * e && *f < 10.0 * e));
            let top = (0..3000).max_by(|&i, &j| fast[i].total_cmp(&fast[j])).unwrap();
            assert_eq!(top, 5);
        }
        // Rank deficient: the dropped directions do not blow up.
        let thin = matmul(gaussian(500, 2, 1).as_ref(), gaussian(2, 6, 2).as_ref());
        let sum: f64 = fast_leverage_scores(thin.as_ref(), StreamKey::new(1)).unwrap().iter().sum();
        assert!((1.0..4.0).contains(&sum), "{sum}");
    }

    #[test]
    fn degenerate_matrices_have_scores() {
        for (m, n) in [(0, 0), (0, 3), (4, 0), (5, 3), (200, 2)] {
            let zero = Mat::<f64>::zeros(m, n);
            for scores in [
                leverage_scores(zero.as_ref(), 1e-12).unwrap(),
                ridge_leverage_scores(zero.as_ref(), 1.0).unwrap(),
                ridge_leverage_scores(zero.as_ref(), 0.0).unwrap(),
                fast_leverage_scores(zero.as_ref(), StreamKey::new(1)).unwrap(),
            ] {
                assert_eq!(scores, vec![0.0; m]);
            }
        }
        let equal = Mat::from_fn(10, 3, |_, j| 1.0 + j as f64);
        assert!(close(&leverage_scores(equal.as_ref(), 1e-12).unwrap(), &[0.1; 10], 1e-15));
        assert_eq!(leverage_scores(Mat::from_vec(vec![2.0f32], 1, 1).as_ref(), 0.0).unwrap(), [1.0]);
        assert!(leverage_scores(spoiled(5).as_ref(), 0.0).is_err());
        assert!(ridge_leverage_scores(spoiled(5).as_ref(), 1.0).is_err());
        assert!(kernel_leverage_scores(spoiled(5).as_ref(), 1.0).is_err());
        assert!(ridge_leverage_scores(equal.as_ref(), -1.0).is_err());
        assert!(ridge_leverage_scores(equal.as_ref(), f64::NAN).is_err());
    }
}
