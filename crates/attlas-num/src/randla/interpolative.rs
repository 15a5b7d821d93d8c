//! Approximations made of a matrix's own columns and rows.

use crate::linalg::{Result, Triangle, matmul, pinv, pivoted_qr, solve_triangular_in_place};
use crate::{Mat, MatRef, Real};

/// $A \approx A_{:,J} T$, the columns $J$ being reproduced.
#[derive(Clone, Debug)]
pub struct ColumnId {
    /// The columns kept.
    pub columns: Vec<usize>,
    /// $T$, $k \times n$, the identity at the kept columns.
    pub coefficients: Mat<f64>,
}

/// Interpolative decomposition by pivoted QR, with at most `rank` columns, fewer where
/// $|R_{kk}| \le$ `tol` $|R_{00}|$.
///
/// With $A_{:,\mathrm{perm}} = Q [R_1\ R_2]$ the coefficients of the other columns are $R_1^{-1} R_2$.
pub fn column_id<T: Real>(a: MatRef<'_, T>, rank: usize, tol: f64) -> Result<ColumnId> {
    let f = pivoted_qr(a, tol, rank)?;
    let (k, n) = (f.rank, a.cols());
    let left = Mat::from_fn(k, k, |i, j| f.r[(i, j)]);
    let mut right = Mat::from_fn(k, n - k, |i, j| f.r[(i, k + j)]);
    solve_triangular_in_place(Triangle::Upper, left.as_ref(), right.data_mut(), n - k);
    let mut coefficients = Mat::zeros(k, n);
    for i in 0..k {
        coefficients[(i, f.perm[i])] = 1.0;
        for j in k..n {
            coefficients[(i, f.perm[j])] = right[(i, j - k)];
        }
    }
    Ok(ColumnId { columns: f.perm[..k].to_vec(), coefficients })
}

/// $A \approx A_{:,J}\, U\, A_{I,:}$.
#[derive(Clone, Debug)]
pub struct Cur {
    /// The columns kept.
    pub columns: Vec<usize>,
    /// The rows kept.
    pub rows: Vec<usize>,
    /// $C^+ A R^+$: the best middle factor in the Frobenius norm.
    pub middle: Mat<f64>,
}

/// CUR decomposition with columns and rows from two interpolative decompositions.
pub fn cur<T: Real>(a: MatRef<'_, T>, rank: usize, tol: f64) -> Result<Cur> {
    let dense = crate::linalg::to_f64(a);
    let columns = column_id(a, rank, tol)?.columns;
    let c = Mat::from_fn(a.rows(), columns.len(), |i, j| dense[(i, columns[j])]);
    // Rows of the kept columns suffice: they span what the columns span.
    let rows = column_id(c.transpose().as_ref(), columns.len(), tol)?.columns;
    let r = Mat::from_fn(rows.len(), a.cols(), |i, j| dense[(rows[i], j)]);
    const RCOND: f64 = 1e-13;
    let left = matmul(pinv(c.as_ref(), RCOND)?.0.as_ref(), dense.as_ref());
    let middle = matmul(left.as_ref(), pinv(r.as_ref(), RCOND)?.0.as_ref());
    Ok(Cur { columns, rows, middle })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linalg::testing::*;

    fn take_columns(a: &Mat<f64>, columns: &[usize]) -> Mat<f64> {
        Mat::from_fn(a.rows(), columns.len(), |i, j| a[(i, columns[j])])
    }

    fn rebuilt(a: &Mat<f64>, f: &Cur) -> Mat<f64> {
        let rows = Mat::from_fn(f.rows.len(), a.cols(), |i, j| a[(f.rows[i], j)]);
        let left = matmul(take_columns(a, &f.columns).as_ref(), f.middle.as_ref());
        matmul(left.as_ref(), rows.as_ref())
    }

    #[test]
    fn low_rank_matrices_are_their_own_columns_and_rows() {
        let a = matmul(gaussian(30, 4, 1).as_ref(), gaussian(4, 22, 2).as_ref());
        let id = column_id(a.as_ref(), 10, 1e-12).unwrap();
        assert_eq!(id.columns.len(), 4);
        let approximation = matmul(take_columns(&a, &id.columns).as_ref(), id.coefficients.as_ref());
        assert!(distance(&approximation, &a) <= 1e-12 * a.frobenius());
        let f = cur(a.as_ref(), 10, 1e-12).unwrap();
        assert_eq!((f.columns.len(), f.rows.len()), (4, 4));
        assert!(distance(&rebuilt(&a, &f), &a) <= 1e-11 * a.frobenius());
    }

    #[test]
    fn the_error_is_near_the_best_possible() {
        let sigma: Vec<f64> = (0..20).map(|i| 0.5f64.powi(i)).collect();
        let a = with_spectrum(40, 30, &sigma, 7);
        for k in [1, 4, 8] {
            let best = sigma[k..].iter().map(|s| s * s).sum::<f64>().sqrt();
            // Pivoted QR could lose 2^k in theory and loses a small factor in practice; sqrt(1 + k(n − k))
            // is what the best choice of columns guarantees.
            let allowed = (1.0 + (k * (30 - k)) as f64).sqrt() * best;
            let id = column_id(a.as_ref(), k, 0.0).unwrap();
            let approximation = matmul(take_columns(&a, &id.columns).as_ref(), id.coefficients.as_ref());
            assert!(distance(&approximation, &a) <= allowed);
            assert!(distance(&rebuilt(&a, &cur(a.as_ref(), k, 0.0).unwrap()), &a) <= allowed);
        }
    }

    #[test]
    fn degenerate_matrices_are_decomposed() {
        for (m, n) in [(0, 0), (3, 0), (0, 3), (4, 5)] {
            let zero = Mat::<f64>::zeros(m, n);
            assert!(column_id(zero.as_ref(), 3, 0.0).unwrap().columns.is_empty());
            assert_eq!(rebuilt(&zero, &cur(zero.as_ref(), 3, 0.0).unwrap()), zero);
        }
        let equal = Mat::from_fn(5, 4, |_, j| 1.0 + j as f64);
        let f = cur(equal.as_ref(), 4, 1e-12).unwrap();
        assert!(f.columns == [3] && f.rows.len() == 1);
        assert!(distance(&rebuilt(&equal, &f), &equal) < 1e-13);
        assert!(column_id(spoiled(4).as_ref(), 2, 0.0).is_err() && cur(spoiled(4).as_ref(), 2, 0.0).is_err());
    }
}
