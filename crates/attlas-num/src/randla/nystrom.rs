//! Nyström approximation of a positive semidefinite matrix from landmark columns.

use crate::linalg::{LinalgError, PsdFactor, Result, matmul, matmul_tn, psd_factor, to_f64};
use crate::{Mat, MatRef, Real};

/// $\hat A = C M^{+} C^\top$ with $C = A_{:,S}$ and $M = A_{S,S}$.
///
/// Rows and columns of landmarks are reproduced and $A - \hat A$ is positive semidefinite, so
/// $|A_{ij} - \hat A_{ij}| \le \sqrt{r_i r_j}$ for the residual diagonal $r$. Repeated landmarks do no harm.
#[derive(Clone, Debug)]
pub struct Nystrom {
    cross: Mat<f64>,
    core: PsdFactor,
}

impl Nystrom {
    /// From the landmark block `core` ($m \times m$) and the columns `cross` ($n \times m$).
    pub fn new<T: Real>(core: MatRef<'_, T>, cross: MatRef<'_, T>) -> Result<Self> {
        if cross.cols() != core.rows() {
            let (expected, found) = (core.rows(), cross.cols());
            return Err(LinalgError::Shape { what: "columns of cross", expected, found });
        }
        if cross.iter_rows().flatten().any(|x| !x.is_finite()) {
            return Err(LinalgError::NotFinite { what: "cross" });
        }
        Ok(Self { cross: to_f64(cross), core: psd_factor(core)? })
    }

    /// From a matrix that is there and the indices of landmarks.
    pub fn from_landmarks<T: Real>(a: MatRef<'_, T>, landmarks: &[usize]) -> Result<Self> {
        if let Some(&found) = landmarks.iter().find(|&&s| s >= a.rows().min(a.cols())) {
            return Err(LinalgError::Shape { what: "a landmark", expected: a.rows(), found });
        }
        let m = landmarks.len();
        let core = Mat::from_fn(m, m, |i, j| a.at(landmarks[i], landmarks[j]));
        let cross = Mat::from_fn(a.rows(), m, |i, j| a.at(i, landmarks[j]));
        Self::new(core.as_ref(), cross.as_ref())
    }

    /// How the landmark block was factored.
    pub fn core(&self) -> &PsdFactor {
        &self.core
    }

    /// $\hat A X$ in $O(nm)$ per column.
    pub fn apply(&self, x: MatRef<'_, f64>) -> Result<Mat<f64>> {
        if x.rows() != self.cross.rows() {
            let (expected, found) = (self.cross.rows(), x.rows());
            return Err(LinalgError::Shape { what: "rows of x", expected, found });
        }
        let inner = self.core.solve(matmul_tn(self.cross.as_ref(), x).as_ref())?;
        Ok(matmul(self.cross.as_ref(), inner.as_ref()))
    }

    /// $F$, $r \times n$, with $\hat A = F^\top F$.
    pub fn factor(&self) -> Result<Mat<f64>> {
        self.core.half_solve(self.cross.transpose().as_ref())
    }

    /// Diagonal of $A - \hat A$, given that of $A$; clipped at 0.
    pub fn residual(&self, diag: &[f64]) -> Result<Vec<f64>> {
        if diag.len() != self.cross.rows() {
            let (expected, found) = (self.cross.rows(), diag.len());
            return Err(LinalgError::Shape { what: "the diagonal", expected, found });
        }
        let f = self.factor()?;
        let mut left = diag.to_vec();
        for i in 0..f.rows() {
            left.iter_mut().zip(f.row(i)).for_each(|(r, x)| *r -= x * x);
        }
        left.iter_mut().for_each(|r| *r = r.max(0.0));
        Ok(left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Scratch;
    use crate::linalg::symmetric_eigen;
    use crate::linalg::testing::*;
    use crate::randla::{GaussianKernel, PsdMatrix, cholesky_with_pivots};

    fn kernel(n: usize) -> Mat<f64> {
        let x = gaussian(n, 3, 1);
        let mut k = Mat::zeros(n, n);
        let rows: Vec<usize> = (0..n).collect();
        GaussianKernel::new(x.as_ref()).rows_into(&rows, 0..n, k.data_mut(), &Scratch::new());
        k
    }

    fn dense(f: &Nystrom, n: usize) -> Mat<f64> {
        f.apply(Mat::identity(n).as_ref()).unwrap()
    }

    #[test]
    fn landmarks_are_interpolated_and_the_residual_bounds_every_entry() {
        let a = kernel(30);
        let landmarks = [3, 17, 8, 0, 25];
        let f = Nystrom::from_landmarks(a.as_ref(), &landmarks).unwrap();
        let approximation = dense(&f, 30);
        for &s in &landmarks {
            assert!((0..30).all(|j| (approximation[(s, j)] - a[(s, j)]).abs() < 1e-13));
        }
        let gap = Mat::from_fn(30, 30, |i, j| a[(i, j)] - approximation[(i, j)]);
        assert!(*symmetric_eigen(gap.as_ref()).unwrap().values.last().unwrap() > -1e-13);
        let r = f.residual(&[1.0; 30]).unwrap();
        for i in 0..30 {
            assert!((r[i] - gap[(i, i)]).abs() < 1e-13);
            assert!((0..30).all(|j| gap[(i, j)].abs() <= (r[i] * r[j]).sqrt() + 1e-12));
        }
        let scratch = Scratch::new();
        let partial = cholesky_with_pivots(&a.as_ref(), &landmarks, &scratch).unwrap();
        assert!(distance(&partial.approximation(), &approximation) < 1e-12);
    }

    #[test]
    fn repeated_landmarks_change_nothing() {
        let a = kernel(20);
        let once = dense(&Nystrom::from_landmarks(a.as_ref(), &[1, 5, 9]).unwrap(), 20);
        let twice = Nystrom::from_landmarks(a.as_ref(), &[1, 5, 9, 5, 1]).unwrap();
        assert!(distance(&dense(&twice, 20), &once) < 1e-12, "{:?}", twice.core());
        // All landmarks: the matrix itself.
        let all = Nystrom::from_landmarks(a.as_ref(), &(0..20).collect::<Vec<_>>()).unwrap();
        assert!(distance(&dense(&all, 20), &a) < 1e-10);
    }

    #[test]
    fn degenerate_cases_have_answers() {
        let none = Nystrom::from_landmarks(kernel(4).as_ref(), &[]).unwrap();
        assert_eq!(dense(&none, 4), Mat::zeros(4, 4));
        assert_eq!(none.residual(&[1.0; 4]).unwrap(), [1.0; 4]);
        let zero = Nystrom::from_landmarks(Mat::<f64>::zeros(3, 3).as_ref(), &[0, 2]).unwrap();
        assert_eq!(dense(&zero, 3), Mat::zeros(3, 3));
        assert!(Nystrom::from_landmarks(kernel(4).as_ref(), &[4]).is_err());
        assert!(Nystrom::from_landmarks(spoiled(4).as_ref(), &[0, 1, 2, 3]).is_err());
        assert!(Nystrom::new(kernel(2).as_ref(), kernel(3).as_ref()).is_err());
        let f = Nystrom::from_landmarks(kernel(4).as_ref(), &[0]).unwrap();
        assert!(f.apply(Mat::zeros(3, 1).as_ref()).is_err() && f.residual(&[1.0]).is_err());
    }
}
