//! Triangular solves with many right-hand sides.

use super::dense::axpy;
use crate::{MatRef, Real};

/// Triangular system to solve; the other half of the matrix is not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Triangle {
    /// $L x = b$.
    Lower,
    /// $L x = b$ with ones on the diagonal of $L$.
    UnitLower,
    /// $L^\top x = b$, given $L$.
    LowerTransposed,
    /// $R x = b$.
    Upper,
    /// $R^\top x = b$, given $R$.
    UpperTransposed,
}

/// Columns solved together, few enough for the rows in use to stay in cache.
const TILE: usize = 256;

/// Overwrites the right-hand sides, a row-major `n × cols` block, with the solution.
///
/// A zero on the diagonal gives a zero row, the minimum-norm choice for that unknown; callers that must know check the
/// diagonal first. Panics if the block does not have `n` rows.
pub fn solve_triangular_in_place<T: Real>(triangle: Triangle, a: MatRef<'_, T>, rhs: &mut [T], cols: usize) {
    let n = a.rows();
    assert!(a.cols() == n && rhs.len() == n * cols, "a {n} × {n} system with {cols} right-hand sides");
    if cols == 0 {
        return;
    }
    use Triangle::{Lower, LowerTransposed, UnitLower, Upper, UpperTransposed};
    let forward = matches!(triangle, Lower | UnitLower | UpperTransposed);
    let entry = |i: usize, j: usize| match triangle {
        Lower | UnitLower | Upper => a.at(i, j),
        LowerTransposed | UpperTransposed => a.at(j, i),
    };
    for start in (0..cols).step_by(TILE) {
        let width = TILE.min(cols - start);
        for step in 0..n {
            let i = if forward { step } else { n - 1 - step };
            // Rows already solved lie before row i in memory when going forward, after it otherwise.
            let (before, rest) = rhs.split_at_mut(i * cols);
            let (current, after) = rest.split_at_mut(cols);
            let current = &mut current[start..start + width];
            if forward {
                for (j, row) in before.chunks_exact(cols).enumerate() {
                    axpy(-entry(i, j), &row[start..start + width], current);
                }
            } else {
                for (j, row) in after.chunks_exact(cols).enumerate() {
                    axpy(-entry(i, i + 1 + j), &row[start..start + width], current);
                }
            }
            if triangle != UnitLower {
                let d = entry(i, i);
                if d == T::ZERO {
                    current.fill(T::ZERO);
                } else {
                    current.iter_mut().for_each(|x| *x /= d);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Mat;
    use crate::linalg::matmul;
    use crate::linalg::testing::{distance, gaussian};

    #[test]
    fn every_form_undoes_its_product() {
        let n = 13;
        let a = Mat::from_fn(n, n, |i, j| gaussian(n, n, 4)[(i, j)] + if i == j { 6.0 } else { 0.0 });
        let keep = |f: &dyn Fn(usize, usize) -> bool| {
            Mat::from_fn(n, n, |i, j| if f(i, j) { a[(i, j)] } else { 0.0 })
        };
        let lower = keep(&|i, j| j <= i);
        let upper = keep(&|i, j| j >= i);
        let unit = Mat::from_fn(n, n, |i, j| if i == j { 1.0 } else { lower[(i, j)] * 0.1 });
        let scaled = Mat::from_fn(n, n, |i, j| a[(i, j)] * 0.1);
        for cols in [1, 3, 300] {
            let x = gaussian(n, cols, 8);
            for (form, source, full) in [
                (Triangle::Lower, &a, &lower),
                (Triangle::UnitLower, &scaled, &unit),
                (Triangle::LowerTransposed, &a, &lower.transpose()),
                (Triangle::Upper, &a, &upper),
                (Triangle::UpperTransposed, &a, &upper.transpose()),
            ] {
                let mut b = matmul(full.as_ref(), x.as_ref());
                solve_triangular_in_place(form, source.as_ref(), b.data_mut(), cols);
                assert!(distance(&b, &x) < 1e-12 * x.frobenius(), "{form:?}");
            }
        }
    }

    #[test]
    fn a_zero_pivot_gives_zero_and_not_infinity() {
        let a = Mat::from_vec(vec![2.0, 0.0, 1.0, 0.0], 2, 2);
        let mut b = vec![4.0, 5.0];
        solve_triangular_in_place(Triangle::Lower, a.as_ref(), &mut b, 1);
        assert_eq!(b, [2.0, 0.0]);
    }
}
