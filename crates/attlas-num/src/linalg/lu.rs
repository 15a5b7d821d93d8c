//! LU factorisation with partial pivoting, and an estimate of the condition number.

use super::{
    LinalgError, Op, Result, Triangle, axpy, gemm, norm_one, solve_triangular_in_place, square, to_scaled,
};
use crate::{Mat, MatRef, Real};

/// $PA = LU$.
#[derive(Clone, Debug)]
pub struct Lu {
    /// `L` below the diagonal, `U` on and above it.
    factors: Mat<f64>,
    /// Row `perm[i]` of `A` became row `i`.
    perm: Vec<usize>,
    /// 1-norm of the factored matrix.
    norm: f64,
    /// The caller's matrix is `scale` times the factored one.
    scale: f64,
    singular: Option<usize>,
}

/// Columns factored before the rest of the matrix is updated by one product.
const PANEL: usize = 48;

/// Factors a square matrix. A singular one is factored too: [`Lu::rcond`] is then 0 and solving is an error.
pub fn lu<T: Real>(a: MatRef<'_, T>) -> Result<Lu> {
    let n = square(a, "columns of a square matrix")?;
    let (mut f, scale) = to_scaled(a, "the square matrix")?;
    let norm = norm_one(f.as_ref());
    let mut perm: Vec<usize> = (0..n).collect();
    let mut singular = None;
    for start in (0..n).step_by(PANEL) {
        let end = (start + PANEL).min(n);
        for k in start..end {
            let pivot = (k..n).fold(k, |best, i| if f[(i, k)].abs() > f[(best, k)].abs() { i } else { best });
            if f[(pivot, k)] == 0.0 {
                singular.get_or_insert(k);
                continue;
            }
            if pivot != k {
                perm.swap(k, pivot);
                let (head, tail) = f.data_mut().split_at_mut(pivot * n);
                head[k * n..(k + 1) * n].swap_with_slice(&mut tail[..n]);
            }
            let (head, tail) = f.data_mut().split_at_mut((k + 1) * n);
            let top = &head[k * n..];
            for row in tail.chunks_exact_mut(n) {
                row[k] /= top[k];
                axpy(-row[k], &top[k + 1..end], &mut row[k + 1..end]);
            }
        }
        if end == n {
            break;
        }
        // The block row of U, then one product for everything below it.
        for i in start + 1..end {
            let (head, tail) = f.data_mut().split_at_mut(i * n);
            for j in start..i {
                axpy(-tail[j], &head[j * n + end..(j + 1) * n], &mut tail[end..n]);
            }
        }
        let left = Mat::from_fn(n - end, end - start, |i, j| f[(end + i, start + j)]);
        let right = Mat::from_fn(end - start, n - end, |i, j| f[(start + i, end + j)]);
        let rest = &mut f.data_mut()[end * n + end..];
        gemm(-1.0, Op::N(left.as_ref()), Op::N(right.as_ref()), rest, n, true);
    }
    Ok(Lu { factors: f, perm, norm, scale, singular })
}

impl Lu {
    /// Computes $A^{-1} B$, or [`LinalgError::Singular`] after an exactly zero pivot.
    pub fn solve<T: Real>(&self, b: MatRef<'_, T>) -> Result<Mat<f64>> {
        let n = self.perm.len();
        if b.rows() != n {
            return Err(LinalgError::Shape { what: "rows of b", expected: n, found: b.rows() });
        }
        if let Some(pivot) = self.singular {
            return Err(LinalgError::Singular { pivot });
        }
        let mut x = Mat::from_fn(n, b.cols(), |i, j| b.at(self.perm[i], j).to_f64());
        let (cols, factors) = (x.cols(), self.factors.as_ref());
        solve_triangular_in_place(Triangle::UnitLower, factors, x.data_mut(), cols);
        solve_triangular_in_place(Triangle::Upper, factors, x.data_mut(), cols);
        x.data_mut().iter_mut().for_each(|x| *x /= self.scale);
        Ok(x)
    }

    /// Computes $A^{-1}$.
    pub fn inverse(&self) -> Result<Mat<f64>> {
        self.solve(Mat::<f64>::identity(self.perm.len()).as_ref())
    }

    /// Estimates $1 / (\|A\|_1 \|A^{-1}\|_1)$: 0 for a singular matrix, 1 for the empty one.
    ///
    /// Higham's form (1988) of Hager's ascent estimates the norm of the inverse from below, so the value is an upper
    /// bound, rarely more than three times too large.
    pub fn rcond(&self) -> f64 {
        let n = self.perm.len();
        if n == 0 {
            return 1.0;
        }
        if self.singular.is_some() {
            return 0.0;
        }
        let mut x = vec![1.0 / n as f64; n];
        let mut best = 0.0;
        for _ in 0..5 {
            let y = self.solve_scaled(x.clone());
            let norm: f64 = y.iter().map(|v| v.abs()).sum();
            if norm <= best {
                break;
            }
            best = norm;
            let signs = y.iter().map(|v| if *v < 0.0 { -1.0 } else { 1.0 }).collect();
            let z = self.solve_scaled_transposed(signs);
            let top = (0..n).fold(0, |best, i| if z[i].abs() > z[best].abs() { i } else { best });
            let reached: f64 = z.iter().zip(&x).map(|(z, x)| z * x).sum();
            if z[top].abs() <= reached {
                break;
            }
            x.fill(0.0);
            x[top] = 1.0;
        }
        let alternating = (0..n)
            .map(|i| (if i % 2 == 0 { 1.0 } else { -1.0 }) * (1.0 + i as f64 / (n as f64 - 1.0).max(1.0)))
            .collect();
        let y = self.solve_scaled(alternating);
        best = f64::max(best, 2.0 * y.iter().map(|v| v.abs()).sum::<f64>() / (3.0 * n as f64));
        let rcond = 1.0 / best / self.norm;
        // A matrix whose inverse overflows counts as singular.
        if rcond.is_finite() { rcond.min(1.0) } else { 0.0 }
    }

    fn solve_scaled(&self, b: Vec<f64>) -> Vec<f64> {
        let mut x: Vec<f64> = self.perm.iter().map(|&i| b[i]).collect();
        solve_triangular_in_place(Triangle::UnitLower, self.factors.as_ref(), &mut x, 1);
        solve_triangular_in_place(Triangle::Upper, self.factors.as_ref(), &mut x, 1);
        x
    }

    fn solve_scaled_transposed(&self, mut b: Vec<f64>) -> Vec<f64> {
        solve_triangular_in_place(Triangle::UpperTransposed, self.factors.as_ref(), &mut b, 1);
        let n = self.perm.len();
        for i in (0..n).rev() {
            for j in i + 1..n {
                b[i] -= self.factors[(j, i)] * b[j];
            }
        }
        let mut x = vec![0.0; n];
        self.perm.iter().zip(b).for_each(|(&i, v)| x[i] = v);
        x
    }
}

/// Computes $A^{-1} B$ by LU.
pub fn solve<T: Real>(a: MatRef<'_, T>, b: MatRef<'_, T>) -> Result<Mat<f64>> {
    lu(a)?.solve(b)
}

/// Computes $A^{-1}$ by LU.
pub fn inverse<T: Real>(a: MatRef<'_, T>) -> Result<Mat<f64>> {
    lu(a)?.inverse()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linalg::testing::*;
    use crate::linalg::{U, matmul};

    #[test]
    fn solutions_have_small_residuals() {
        for n in [1, 2, 5, 47, 48, 49, 97, 130] {
            let (a, b) = (gaussian(n, n, 5), gaussian(n, 3, 6));
            let x = solve(a.as_ref(), b.as_ref()).unwrap();
            let residual = distance(&matmul(a.as_ref(), x.as_ref()), &b);
            assert!(residual <= 20.0 * n as f64 * U * a.frobenius() * x.frobenius(), "n = {n}");
        }
    }

    #[test]
    fn the_condition_estimate_is_close_to_the_truth() {
        for (n, seed) in [(1, 1), (2, 2), (10, 3), (60, 4), (60, 5)] {
            let a = gaussian(n, n, seed);
            let f = lu(a.as_ref()).unwrap();
            let truth = 1.0 / (norm_one(a.as_ref()) * norm_one(f.inverse().unwrap().as_ref()));
            let ratio = f.rcond() / truth;
            assert!((1.0 - 1e-9..=3.0).contains(&ratio), "n = {n}: {ratio}");
        }
        let hilbert = Mat::from_fn(8, 8, |i, j| 1.0 / (i + j + 1) as f64);
        // cond_1 of the 8 × 8 Hilbert matrix is 3.387e10.
        let rcond = lu(hilbert.as_ref()).unwrap().rcond();
        assert!((rcond * 3.387_279e10 - 1.0).abs() < 1e-3, "{rcond}");
    }

    #[test]
    fn singular_matrices_are_named_and_not_divided_by() {
        for a in [Mat::zeros(3, 3), Mat::from_fn(4, 4, |_, j| j as f64), Mat::zeros(1, 1)] {
            let f = lu::<f64>(a.as_ref()).unwrap();
            assert_eq!(f.rcond(), 0.0);
            assert!(matches!(f.inverse(), Err(LinalgError::Singular { .. })));
        }
        assert_eq!(inverse(Mat::<f64>::zeros(0, 0).as_ref()).unwrap().rows(), 0);
        assert_eq!(lu(Mat::<f64>::zeros(0, 0).as_ref()).unwrap().rcond(), 1.0);
        assert!(matches!(lu(spoiled(5).as_ref()), Err(LinalgError::NotFinite { .. })));
        assert!(lu(gaussian(3, 4, 1).as_ref()).is_err());
        assert!(solve(gaussian(3, 3, 1).as_ref(), gaussian(4, 1, 1).as_ref()).is_err());
    }

    #[test]
    fn extreme_scales_are_undone() {
        for s in [1e305, 1e-305] {
            let a = Mat::from_fn(3, 3, |i, j| if i == j { 2.0 * s } else { s });
            let x = inverse(a.as_ref()).unwrap();
            assert!((x[(0, 0)] * s - 0.75).abs() < 1e-14 && (x[(0, 1)] * s + 0.25).abs() < 1e-14);
            assert!((lu(a.as_ref()).unwrap().rcond() - 0.2).abs() < 1e-14);
        }
    }
}
