//! Cholesky factorisation, also of matrices that are positive definite only up to rounding.

use super::{
    LinalgError, Result, Triangle, leading_cols, matmul, matmul_tn, solve_triangular_in_place, square,
    symmetric_eigen, to_scaled,
};
use crate::{Mat, MatRef, Real};
use faer::Par;
use faer::dyn_stack::{MemBuffer, MemStack};

/// Computes the lower factor of $A = LL^\top$; only the lower triangle of `a` is read.
pub fn cholesky<T: Real>(a: MatRef<'_, T>) -> Result<Mat<f64>> {
    square(a, "columns of a symmetric matrix")?;
    let (a, scale) = to_scaled(a, "the symmetric matrix")?;
    let mut l = factor(&a)?;
    l.data_mut().iter_mut().for_each(|x| *x *= scale.sqrt());
    Ok(l)
}

fn factor(a: &Mat<f64>) -> Result<Mat<f64>> {
    use faer::linalg::cholesky::llt::factor::{LltError, cholesky_in_place, cholesky_in_place_scratch};
    let n = a.rows();
    if n == 0 {
        return Ok(Mat::zeros(0, 0));
    }
    let mut l = faer::Mat::from_fn(n, n, |i, j| if j <= i { a[(i, j)] } else { 0.0 });
    let mut memory = MemBuffer::new(cholesky_in_place_scratch::<f64>(n, Par::Seq, Default::default()));
    cholesky_in_place(
        l.as_mut(),
        Default::default(),
        Par::Seq,
        MemStack::new(&mut memory),
        Default::default(),
    )
    .map_err(|LltError::NonPositivePivot { index }| LinalgError::NotPositiveDefinite { pivot: index })?;
    Ok(Mat::from_fn(n, n, |i, j| if j <= i { l[(i, j)] } else { 0.0 }))
}

/// Factor of a symmetric positive semidefinite matrix, usable for solves at any rank.
#[derive(Clone, Debug)]
pub struct PsdFactor {
    kind: Kind,
    n: usize,
    scale: f64,
    jitter: f64,
}

#[derive(Clone, Debug)]
enum Kind {
    Cholesky(Mat<f64>),
    /// Eigenvectors that are kept, $n \times r$, and square roots of their eigenvalues.
    Eigen(Mat<f64>, Vec<f64>),
}

/// Largest relative jitter tried.
const MAX_JITTER: f64 = 1e-4;

/// Factors a positive semidefinite matrix, adding to its diagonal only as much as needed.
///
/// Tries Cholesky first; if it fails, Cholesky with $\delta \cdot \mathrm{mean}(\operatorname{diag} M)\, I$ added,
/// where $\delta = 8un, 80un, \dots$ up to $10^{-4}$ and $u$ is the unit roundoff of `T`; finally the
/// eigendecomposition, dropping eigenvalues below $n u \lambda_{\max}$. A pivot below $n u M_{jj}$ is noise and counts
/// as a failure: solving with it would amplify rounding errors without bound.
pub fn psd_factor<T: Real>(m: MatRef<'_, T>) -> Result<PsdFactor> {
    let n = square(m, "columns of a symmetric matrix")?;
    let (m, scale) = to_scaled(m, "the symmetric matrix")?;
    let noise = n as f64 * T::ROUNDOFF;
    let mean = (0..n).map(|i| m[(i, i)]).sum::<f64>() / n.max(1) as f64;
    let attempt = |jitter: f64| {
        let mut shifted = m.clone();
        (0..n).for_each(|i| shifted[(i, i)] += jitter * mean);
        let l = factor(&shifted).ok()?;
        let sound = (0..n).all(|i| l[(i, i)] * l[(i, i)] > noise * shifted[(i, i)]);
        sound.then_some(PsdFactor { kind: Kind::Cholesky(l), n, scale, jitter })
    };
    let mut jitter = 0.0;
    while jitter <= MAX_JITTER && (jitter == 0.0 || mean > 0.0) {
        if let Some(found) = attempt(jitter) {
            return Ok(found);
        }
        jitter = if jitter == 0.0 { 8.0 * noise } else { 10.0 * jitter };
    }
    let eigen = symmetric_eigen(m.as_ref())?;
    let cut = noise * eigen.values.first().copied().unwrap_or(0.0);
    let rank = eigen.values.iter().take_while(|&&v| v > cut.max(0.0)).count();
    let roots = eigen.values[..rank].iter().map(|v| v.sqrt()).collect();
    Ok(PsdFactor { kind: Kind::Eigen(leading_cols(&eigen.vectors, rank), roots), n, scale, jitter: 0.0 })
}

impl PsdFactor {
    /// Returns the shift added to the diagonal, relative to its mean; 0 without a shift or if eigenvalues were used.
    pub fn jitter(&self) -> f64 {
        self.jitter
    }

    /// Returns the number of directions kept: all of them unless eigenvalues were used.
    pub fn rank(&self) -> usize {
        match &self.kind {
            Kind::Cholesky(_) => self.n,
            Kind::Eigen(_, roots) => roots.len(),
        }
    }

    /// Computes $M^{-1} B$, with the pseudo-inverse if directions were dropped.
    pub fn solve<T: Real>(&self, b: MatRef<'_, T>) -> Result<Mat<f64>> {
        let mut x = self.half_solve(b)?;
        let root = self.scale.sqrt();
        match &self.kind {
            Kind::Cholesky(l) => {
                let cols = x.cols();
                solve_triangular_in_place(Triangle::LowerTransposed, l.as_ref(), x.data_mut(), cols);
            }
            Kind::Eigen(vectors, roots) => {
                roots.iter().enumerate().for_each(|(i, r)| x.row_mut(i).iter_mut().for_each(|x| *x /= r));
                x = matmul(vectors.as_ref(), x.as_ref());
            }
        }
        x.data_mut().iter_mut().for_each(|x| *x /= root);
        Ok(x)
    }

    /// Computes $H B$ with $H^\top H = M^{-1}$ (or the pseudo-inverse): inner products of columns of the result are
    /// inner products of columns of $B$ in the metric $M^{-1}$.
    pub fn half_solve<T: Real>(&self, b: MatRef<'_, T>) -> Result<Mat<f64>> {
        if b.rows() != self.n {
            return Err(LinalgError::Shape { what: "rows of b", expected: self.n, found: b.rows() });
        }
        let mut x = super::to_f64(b);
        let root = self.scale.sqrt();
        match &self.kind {
            Kind::Cholesky(l) => {
                let cols = x.cols();
                solve_triangular_in_place(Triangle::Lower, l.as_ref(), x.data_mut(), cols);
            }
            Kind::Eigen(vectors, roots) => {
                x = matmul_tn(vectors.as_ref(), x.as_ref());
                roots.iter().enumerate().for_each(|(i, r)| x.row_mut(i).iter_mut().for_each(|x| *x /= r));
            }
        }
        x.data_mut().iter_mut().for_each(|x| *x /= root);
        Ok(x)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linalg::testing::*;
    use crate::linalg::{U, matmul_nt};

    fn gram(n: usize, rank: usize, seed: u64) -> Mat<f64> {
        let g = gaussian(n, rank, seed);
        matmul_nt(g.as_ref(), g.as_ref())
    }

    #[test]
    fn the_factor_squares_to_the_matrix() {
        for n in [1, 2, 7, 64, 101] {
            let a = gram(n, n + 5, 3);
            let l = cholesky(a.as_ref()).unwrap();
            assert!(distance(&matmul_nt(l.as_ref(), l.as_ref()), &a) <= 10.0 * n as f64 * U * a.frobenius());
            assert!((0..n).all(|i| l[(i, i)] > 0.0 && (i + 1..n).all(|j| l[(i, j)] == 0.0)));
        }
        assert_eq!(cholesky(Mat::<f64>::zeros(0, 0).as_ref()).unwrap().rows(), 0);
    }

    #[test]
    fn indefinite_matrices_are_refused_by_the_plain_factorisation() {
        let a = Mat::from_vec(vec![1.0, 2.0, 2.0, 1.0], 2, 2);
        assert_eq!(cholesky(a.as_ref()).unwrap_err(), LinalgError::NotPositiveDefinite { pivot: 1 });
        assert!(cholesky(Mat::<f64>::zeros(2, 2).as_ref()).is_err());
        assert!(matches!(cholesky(spoiled(4).as_ref()), Err(LinalgError::NotFinite { .. })));
        let l = cholesky(Mat::from_vec(vec![4e304], 1, 1).as_ref()).unwrap();
        assert!((l[(0, 0)] / 2e152 - 1.0).abs() < 1e-15);
    }

    #[test]
    fn a_definite_matrix_needs_no_jitter() {
        let a = gram(20, 40, 1);
        let f = psd_factor(a.as_ref()).unwrap();
        assert!(f.jitter() == 0.0 && matches!(f.kind, Kind::Cholesky(_)) && f.rank() == 20);
        let b = gaussian(20, 4, 2);
        let x = f.solve(b.as_ref()).unwrap();
        assert!(distance(&matmul(a.as_ref(), x.as_ref()), &b) < 1e-11);
        let h = f.half_solve(b.as_ref()).unwrap();
        let energy = matmul_tn(b.as_ref(), x.as_ref());
        assert!(distance(&matmul_tn(h.as_ref(), h.as_ref()), &energy) < 1e-12);
    }

    #[test]
    fn duplicated_rows_get_the_smallest_jitter_and_a_faithful_solution() {
        // Rows and columns 0..6 twice: M = P G Pᵀ is singular, but M x = M c has solutions.
        let g = gram(6, 9, 4);
        let m = Mat::from_fn(12, 12, |i, j| g[(i % 6, j % 6)]);
        let f = psd_factor(m.as_ref()).unwrap();
        assert!(matches!(f.kind, Kind::Cholesky(_)) && f.jitter() == 8.0 * 12.0 * U, "{}", f.jitter());
        let rhs = matmul(m.as_ref(), gaussian(12, 2, 5).as_ref());
        let x = f.solve(rhs.as_ref()).unwrap();
        assert!(distance(&matmul(m.as_ref(), x.as_ref()), &rhs) <= 1e-10 * rhs.frobenius());
    }

    #[test]
    fn what_jitter_cannot_mend_goes_to_the_eigenvalues() {
        // An indefinite matrix: the negative direction is dropped.
        let a = Mat::from_vec(vec![3.0, 0.0, 0.0, -1.0], 2, 2);
        let f = psd_factor(a.as_ref()).unwrap();
        assert!(matches!(f.kind, Kind::Eigen(..)) && f.rank() == 1 && f.jitter() == 0.0);
        let x = f.solve(Mat::from_vec(vec![6.0, 5.0], 2, 1).as_ref()).unwrap();
        assert!((x[(0, 0)] - 2.0).abs() < 1e-15 && x[(1, 0)] == 0.0);
        let h = f.half_solve(Mat::from_vec(vec![3f64.sqrt(), 5.0], 2, 1).as_ref()).unwrap();
        assert!(h.rows() == 1 && (h[(0, 0)] - 1.0).abs() < 1e-15);
    }

    #[test]
    fn the_zero_matrix_has_rank_zero_and_solves_to_zero() {
        for n in [0, 1, 5] {
            let f = psd_factor(Mat::<f64>::zeros(n, n).as_ref()).unwrap();
            assert_eq!(f.rank(), 0);
            let x = f.solve(gaussian(n, 3, 1).as_ref()).unwrap();
            assert!(x.rows() == n && x.data().iter().all(|&v| v == 0.0));
        }
        assert!(matches!(psd_factor(spoiled(4).as_ref()), Err(LinalgError::NotFinite { .. })));
        let one = psd_factor(Mat::from_vec(vec![4.0f32], 1, 1).as_ref()).unwrap();
        assert_eq!(one.solve(Mat::from_vec(vec![2.0f32], 1, 1).as_ref()).unwrap()[(0, 0)], 0.5);
    }

    #[test]
    fn extreme_scales_are_undone() {
        for s in [1e304, 1e-304] {
            let m = Mat::from_fn(3, 3, |i, j| if i == j { 2.0 * s } else { s });
            let b = Mat::from_fn(3, 1, |_, _| 4.0 * s);
            let x = psd_factor(m.as_ref()).unwrap().solve(b.as_ref()).unwrap();
            assert!(x.data().iter().all(|v| (v - 1.0).abs() < 1e-14), "{x:?}");
        }
    }
}
