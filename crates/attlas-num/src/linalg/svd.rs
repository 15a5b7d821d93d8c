//! Singular value decomposition.
//!
//! Small matrices go through one-sided Jacobi on a doubly QR-reduced factor (Drmač and Veselić 2008), which
//! finds small singular values to high *relative* accuracy; larger ones through bidiagonalisation, accurate
//! relative to the largest singular value. Each stands in for the other when it fails.

use super::eigen::{MAX_SWEEPS, leading_sign, rotate_rows, rotation_tangent};
use super::qr::orthonormal_complement;
use super::{LinalgError, Result, U, dot, leading_cols, matmul, matmul_nt, pivoted_qr, thin_qr, to_scaled};
use crate::{Mat, MatRef, Real};
use faer::Par;
use faer::dyn_stack::{MemBuffer, MemStack};

/// $A = U \operatorname{diag}(\sigma) V^\top$.
#[derive(Clone, Debug)]
pub struct Svd {
    /// Left singular vectors as orthonormal columns, $m \times k$.
    pub u: Mat<f64>,
    /// Singular values, descending.
    pub sigma: Vec<f64>,
    /// Right singular vectors as orthonormal columns, $n \times k$.
    pub v: Mat<f64>,
}

impl Svd {
    /// Returns the leading `k` triples.
    #[must_use]
    pub fn truncated(&self, k: usize) -> Self {
        let k = k.min(self.sigma.len());
        Self { u: leading_cols(&self.u, k), sigma: self.sigma[..k].to_vec(), v: leading_cols(&self.v, k) }
    }

    /// Computes $U \operatorname{diag}(\sigma) V^\top$.
    pub fn rebuild(&self) -> Mat<f64> {
        let us = Mat::from_fn(self.u.rows(), self.sigma.len(), |i, j| self.u[(i, j)] * self.sigma[j]);
        matmul_nt(us.as_ref(), self.v.as_ref())
    }

    /// Computes $V \Sigma^+ U^\top$, dropping $\sigma_i \le \mathrm{rcond}\,\sigma_1$; also returns the number kept.
    pub fn pinv(&self, rcond: f64) -> (Mat<f64>, usize) {
        let cut = rcond * self.sigma.first().copied().unwrap_or(0.0);
        let rank = self.sigma.iter().take_while(|&&s| s > cut && s > 0.0).count();
        let vs = Mat::from_fn(self.v.rows(), rank, |i, j| self.v[(i, j)] / self.sigma[j]);
        (matmul_nt(vs.as_ref(), leading_cols(&self.u, rank).as_ref()), rank)
    }
}

/// Smaller side up to which Jacobi is tried first, with and without vectors.
const JACOBI_SIZE: (usize, usize) = (64, 128);

type Algorithm = fn(&Mat<f64>, bool) -> Option<Svd>;

/// Computes the thin SVD: $k = \min(m, n)$ triples, by Jacobi up to $k = 64$.
pub fn svd<T: Real>(a: MatRef<'_, T>) -> Result<Svd> {
    run(a, true, order(a, JACOBI_SIZE.0))
}

/// Computes the thin SVD by bidiagonalisation where it converges, for callers that drop small singular values anyway.
pub(crate) fn svd_fast<T: Real>(a: MatRef<'_, T>) -> Result<Svd> {
    run(a, true, &[bidiagonal, jacobi])
}

/// Computes the singular values, descending, without the vectors; by Jacobi up to $\min(m, n) = 128$.
pub fn singular_values<T: Real>(a: MatRef<'_, T>) -> Result<Vec<f64>> {
    Ok(run(a, false, order(a, JACOBI_SIZE.1))?.sigma)
}

/// Computes the singular values of $A B^\top$ for tall `a` and `b` with equally many columns, never forming the
/// product: those of $R_A R_B^\top$.
pub fn singular_values_of_product<T: Real>(a: MatRef<'_, T>, b: MatRef<'_, T>) -> Result<Vec<f64>> {
    if a.cols() != b.cols() {
        return Err(LinalgError::Shape { what: "columns of b", expected: a.cols(), found: b.cols() });
    }
    let core = matmul_nt(thin_qr(a)?.r.as_ref(), thin_qr(b)?.r.as_ref());
    singular_values(core.as_ref())
}

fn order<T>(a: MatRef<'_, T>, jacobi_size: usize) -> &'static [Algorithm] {
    if a.rows().min(a.cols()) <= jacobi_size { &[jacobi, bidiagonal] } else { &[bidiagonal, jacobi] }
}

/// Returns the first answer of the chain whose singular values have the matrix's Frobenius norm.
fn run<T: Real>(a: MatRef<'_, T>, vectors: bool, chain: &[Algorithm]) -> Result<Svd> {
    let (a, scale) = to_scaled(a, "the matrix to decompose")?;
    let (m, n) = (a.rows(), a.cols());
    let norm = a.frobenius();
    let plausible = |s: &Svd| {
        let found = s.sigma.iter().map(|x| x * x).sum::<f64>().sqrt();
        (found - norm).abs() <= 100.0 * (m + n) as f64 * U * norm
            && s.u.data().iter().chain(s.v.data()).all(|x| x.is_finite())
    };
    let mut found = chain
        .iter()
        .find_map(|algorithm| algorithm(&a, vectors).filter(plausible))
        .ok_or(LinalgError::NoConvergence { iters: MAX_SWEEPS })?;
    found.sigma.iter_mut().for_each(|s| *s *= scale);
    for j in 0..found.u.cols() {
        if leading_sign(&found.u, j) < 0.0 {
            (0..m).for_each(|i| found.u[(i, j)] = -found.u[(i, j)]);
            (0..n).for_each(|i| found.v[(i, j)] = -found.v[(i, j)]);
        }
    }
    Ok(found)
}

fn bidiagonal(a: &Mat<f64>, vectors: bool) -> Option<Svd> {
    use faer::linalg::svd::{ComputeSvdVectors, svd, svd_scratch};
    let (m, n) = (a.rows(), a.cols());
    let k = m.min(n);
    if k == 0 {
        return Some(Svd { u: Mat::zeros(m, 0), sigma: Vec::new(), v: Mat::zeros(n, 0) });
    }
    let copy = faer::Mat::from_fn(m, n, |i, j| a[(i, j)]);
    let compute = if vectors { ComputeSvdVectors::Thin } else { ComputeSvdVectors::No };
    let width = if vectors { k } else { 0 };
    let mut u = faer::Mat::<f64>::zeros(m, width);
    let mut v = faer::Mat::<f64>::zeros(n, width);
    let mut sigma = faer::Mat::<f64>::zeros(k, 1);
    let mut memory = MemBuffer::new(svd_scratch::<f64>(m, n, compute, compute, Par::Seq, Default::default()));
    svd(
        copy.as_ref(),
        sigma.as_mut().col_mut(0).as_diagonal_mut(),
        vectors.then(|| u.as_mut()),
        vectors.then(|| v.as_mut()),
        Par::Seq,
        MemStack::new(&mut memory),
        Default::default(),
    )
    .ok()?;
    // Values lost in rounding may come in any order: a zero before the last of the others.
    let mut order: Vec<usize> = (0..k).collect();
    order.sort_by(|&i, &j| sigma[(j, 0)].total_cmp(&sigma[(i, 0)]));
    Some(Svd {
        u: Mat::from_fn(m, width, |i, j| u[(i, order[j])]),
        sigma: order.iter().map(|&i| sigma[(i, 0)]).collect(),
        v: Mat::from_fn(n, width, |i, j| v[(i, order[j])]),
    })
}

/// Runs one-sided Jacobi on $R^\top$, where $A P = Q R$ with pivoting.
///
/// Rotates the rows of `R` until they are orthogonal: $V^\top R = \Sigma W^\top$, hence
/// $A = (QV)\, \Sigma\, (PW)^\top$. Pivoting makes the rows nearly orthogonal from the start.
fn jacobi(a: &Mat<f64>, vectors: bool) -> Option<Svd> {
    let (m, n) = (a.rows(), a.cols());
    if m < n {
        let t = jacobi(&a.transpose(), vectors)?;
        return Some(Svd { u: t.v, sigma: t.sigma, v: t.u });
    }
    // A first, blocked QR takes the rows of a tall matrix out of the slow loops.
    let (outer, core) = if m > n {
        let f = thin_qr(a.as_ref()).ok()?;
        (Some(f.q), f.r)
    } else {
        (None, a.clone())
    };
    let f = pivoted_qr(core.as_ref(), 0.0, n).ok()?;
    let (mut rows, rank) = (f.r, f.rank);
    let mut rotations = Mat::<f64>::identity(if vectors { rank } else { 0 });
    let tol = U * (rank as f64).sqrt().max(10.0);
    let mut converged = rank < 2;
    for _ in 0..MAX_SWEEPS {
        if converged {
            break;
        }
        converged = true;
        let mut squares: Vec<f64> = (0..rank).map(|i| dot(rows.row(i), rows.row(i))).collect();
        for p in 0..rank {
            for q in p + 1..rank {
                let (xx, yy, xy) = (squares[p], squares[q], dot(rows.row(p), rows.row(q)));
                if xy == 0.0 || xy.abs() <= tol * xx.sqrt() * yy.sqrt() {
                    continue;
                }
                converged = false;
                let t = rotation_tangent(0.5 * (yy - xx) / xy);
                let c = 1.0 / t.hypot(1.0);
                rotate_rows(&mut rows, p, q, c, c * t);
                if vectors {
                    rotate_rows(&mut rotations, p, q, c, c * t);
                }
                // The squares move by ±t·xy; where that cancels they are recomputed.
                for (i, was, now) in [(p, xx, xx - t * xy), (q, yy, yy + t * xy)] {
                    squares[i] = if now > 0.1 * was { now } else { dot(rows.row(i), rows.row(i)) };
                }
            }
        }
    }
    if !converged {
        return None;
    }
    let norms: Vec<f64> = (0..rank).map(|i| dot(rows.row(i), rows.row(i)).sqrt()).collect();
    let mut order: Vec<usize> = (0..rank).filter(|&i| norms[i] > 0.0).collect();
    order.sort_by(|&i, &j| norms[j].total_cmp(&norms[i]));
    let mut sigma: Vec<f64> = order.iter().map(|&i| norms[i]).collect();
    let kept = sigma.len();
    sigma.resize(n, 0.0);
    if !vectors {
        return Some(Svd { u: Mat::zeros(m, 0), sigma, v: Mat::zeros(n, 0) });
    }
    // Row order[j] of `rotations` is column j of V transposed.
    let small = Mat::from_fn(rank, kept, |i, j| rotations[(order[j], i)]);
    let mut u = matmul(f.q.as_ref(), small.as_ref());
    if let Some(q) = outer {
        u = matmul(q.as_ref(), u.as_ref());
    }
    let mut v = Mat::zeros(n, kept);
    for (j, &i) in order.iter().enumerate() {
        for (l, &x) in rows.row(i).iter().enumerate() {
            v[(f.perm[l], j)] = x / norms[i];
        }
    }
    Some(Svd { u: widened(u, n), sigma, v: widened(v, n) })
}

/// Extends `q` by orthonormal columns up to `cols` columns.
fn widened(q: Mat<f64>, cols: usize) -> Mat<f64> {
    let have = q.cols();
    if have == cols {
        return q;
    }
    let more = orthonormal_complement(&q, cols - have);
    Mat::from_fn(q.rows(), cols, |i, j| if j < have { q[(i, j)] } else { more[(i, j - have)] })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linalg::testing::*;

    fn check(a: &Mat<f64>, s: &Svd) {
        let bound = 20.0 * (a.rows().max(a.cols()) as f64 + 1.0) * U;
        assert!(distance(&s.rebuild(), a) <= bound * a.frobenius().max(f64::MIN_POSITIVE));
        assert!(departure_from_orthonormal(&s.u) <= bound && departure_from_orthonormal(&s.v) <= bound);
        assert!(s.sigma.windows(2).all(|w| w[0] >= w[1]) && s.sigma.iter().all(|&x| x >= 0.0));
        assert_eq!(s.sigma.len(), a.rows().min(a.cols()));
    }

    #[test]
    fn every_algorithm_decomposes() {
        for (m, n) in [(1, 1), (4, 1), (1, 5), (9, 9), (50, 12), (12, 50), (150, 140)] {
            let a = gaussian(m, n, 7);
            let one = svd(a.as_ref()).unwrap();
            let two = run(a.as_ref(), true, &[bidiagonal]).unwrap();
            let three = run(a.as_ref(), true, &[jacobi]).unwrap();
            let values = singular_values(a.as_ref()).unwrap();
            for s in [&one, &two, &three] {
                check(&a, s);
                for (x, y) in s.sigma.iter().zip(&values) {
                    assert!((x - y).abs() <= 40.0 * m.max(n) as f64 * U * values[0]);
                }
            }
            // Signs are fixed, so the factors agree and not only the products.
            assert!(distance(&one.u, &two.u) < 1e-9 && distance(&two.v, &three.v) < 1e-9, "{m} × {n}");
        }
    }

    #[test]
    fn small_singular_values_keep_their_digits() {
        // Orthogonal rows with norms over 40 decades, hidden by row and column permutations.
        let n = 24;
        let hadamard = |i: usize, j: usize| if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
        let a = Mat::from_fn(n, 32, |i, j| {
            let i = (i * 7) % n;
            10f64.powf(-40.0 * i as f64 / n as f64) * hadamard(i, (5 * j + 3) % 32)
        });
        let values = singular_values(a.as_ref()).unwrap();
        for (i, s) in values.iter().enumerate() {
            let want = 10f64.powf(-40.0 * i as f64 / n as f64) * 32f64.sqrt();
            assert!((s / want - 1.0).abs() < 1e-13, "{i}: {s} against {want}");
        }
    }

    #[test]
    fn a_prescribed_spectrum_is_found() {
        let sigma: Vec<f64> = (0..20).map(|i| 0.5f64.powi(i)).collect();
        for (m, n) in [(60, 20), (25, 200)] {
            let a = with_spectrum(m, n, &sigma, 3);
            let found = singular_values(a.as_ref()).unwrap();
            for (x, y) in found.iter().zip(&sigma) {
                assert!((x - y).abs() <= 1e-14);
            }
        }
    }

    #[test]
    fn the_spectrum_of_a_product_needs_no_product() {
        let (q, k) = (gaussian(90, 7, 1), gaussian(70, 7, 2));
        let product = matmul_nt(q.as_ref(), k.as_ref());
        let found = singular_values_of_product(q.as_ref(), k.as_ref()).unwrap();
        for (x, y) in found.iter().zip(singular_values(product.as_ref()).unwrap()) {
            assert!((x - y).abs() <= 1e-12 * found[0]);
        }
        let energy: f64 = found.iter().map(|s| s * s).sum();
        assert!((energy.sqrt() / product.frobenius() - 1.0).abs() < 1e-13);
        assert!(singular_values_of_product(q.as_ref(), gaussian(3, 4, 1).as_ref()).is_err());
    }

    #[test]
    fn failing_algorithms_are_replaced() {
        let a = gaussian(8, 5, 1);
        let wrong: Algorithm = |a, _| Some(Svd { u: a.clone(), sigma: vec![0.0; 5], v: Mat::zeros(5, 5) });
        let nan: Algorithm = |a, _| Some(Svd { u: a.clone(), sigma: vec![f64::NAN; 5], v: Mat::zeros(5, 5) });
        check(&a, &run(a.as_ref(), true, &[|_, _| None, wrong, nan, bidiagonal]).unwrap());
        assert!(matches!(run(a.as_ref(), true, &[wrong]), Err(LinalgError::NoConvergence { .. })));
    }

    #[test]
    fn degenerate_matrices_have_answers() {
        for (m, n) in [(0, 0), (0, 3), (4, 0), (3, 3), (6, 2), (140, 133)] {
            let zero = Mat::<f64>::zeros(m, n);
            check(&zero, &svd(zero.as_ref()).unwrap());
            check(&zero, &run(zero.as_ref(), true, &[bidiagonal]).unwrap());
        }
        for (m, n) in [(9, 6), (6, 9), (150, 140)] {
            let equal = Mat::from_fn(m, n, |_, j| 1.0 + j as f64);
            let s = svd(equal.as_ref()).unwrap();
            check(&equal, &s);
            assert!(s.sigma[1] <= 1e-13 * s.sigma[0]);
        }
        for scale in [1e304, 1e-304, 1e-320] {
            let a = Mat::from_fn(5, 4, |i, j| scale * f64::from((i * j + i) as u32 % 3 + 1));
            let s = svd(a.as_ref()).unwrap();
            assert!(s.sigma[0] > scale && s.sigma.iter().all(|x| x.is_finite()));
            assert!(departure_from_orthonormal(&s.u) < 1e-13);
        }
        assert!(matches!(svd(spoiled(6).as_ref()), Err(LinalgError::NotFinite { .. })));
        assert!(matches!(svd(spoiled(140).as_ref()), Err(LinalgError::NotFinite { .. })));
    }
}
