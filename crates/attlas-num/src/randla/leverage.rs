//! Leverage scores: how much each row of a matrix contributes to its row space.

use crate::linalg::{Result, dot, pivoted_qr};
use crate::{MatRef, Real};

/// Computes $\tau_i = a_i^\top (A^\top A)^+ a_i$: in $[0, 1]$, with the rank as their sum, unchanged by $A \to AM$ for
/// nonsingular $M$.
///
/// Sums squares of the rows of $Q$ from pivoted QR; directions with $|R_{jj}| \le$ `rank_tol` $|R_{00}|$ are dropped.
pub(super) fn leverage_scores<T: Real>(a: MatRef<'_, T>, rank_tol: f64) -> Result<Vec<f64>> {
    let q = pivoted_qr(a, rank_tol, usize::MAX)?.q;
    Ok((0..q.rows()).map(|i| dot(q.row(i), q.row(i)).clamp(0.0, 1.0)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Mat;
    use crate::linalg::testing::*;
    use crate::linalg::{matmul, matmul_tn};

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
    fn degenerate_matrices_have_scores() {
        for (m, n) in [(0, 0), (0, 3), (4, 0), (5, 3), (200, 2)] {
            let zero = Mat::<f64>::zeros(m, n);
            assert_eq!(leverage_scores(zero.as_ref(), 1e-12).unwrap(), vec![0.0; m]);
        }
        let equal = Mat::from_fn(10, 3, |_, j| 1.0 + j as f64);
        assert!(close(&leverage_scores(equal.as_ref(), 1e-12).unwrap(), &[0.1; 10], 1e-15));
        assert_eq!(leverage_scores(Mat::from_vec(vec![2.0f32], 1, 1).as_ref(), 0.0).unwrap(), [1.0]);
        assert!(leverage_scores(spoiled(5).as_ref(), 0.0).is_err());
    }
}
