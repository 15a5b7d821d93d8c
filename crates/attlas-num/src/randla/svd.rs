//! Randomised range finder and SVD (Halko, Martinsson and Tropp 2011).

use super::{LinearOperator, gaussian_matrix};
use crate::Mat;
use crate::linalg::{Result, Svd, matmul, svd, thin_qr};
use crate::rng::StreamKey;

/// Computes an orthonormal basis of `cols` columns for nearly the range of `a`.
///
/// $Q = \operatorname{orth}(A \Omega)$ for a Gaussian $\Omega$, improved by `power` steps with
/// $A A^\top$, orthonormalised at each half step.
///
/// Without power steps and with `cols = k + p`, $p \ge 2$:
/// $\mathbb E \|A - QQ^\top A\|_F^2 \le \bigl(1 + \tfrac{k}{p-1}\bigr) \sum_{j > k} \sigma_j^2$.
pub fn range_finder<A: LinearOperator + ?Sized>(
    a: &A,
    cols: usize,
    power: usize,
    key: StreamKey,
) -> Result<Mat<f64>> {
    let omega = gaussian_matrix::<f64>(&mut key.named("range finder").rng(), a.cols(), cols);
    let mut q = thin_qr(a.apply(omega.as_ref()).as_ref())?.q;
    for _ in 0..power {
        let z = thin_qr(a.apply_t(q.as_ref()).as_ref())?.q;
        q = thin_qr(a.apply(z.as_ref()).as_ref())?.q;
    }
    Ok(q)
}

/// Parameters of [`randomized_svd`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RandomizedSvd {
    /// Number of triples.
    pub rank: usize,
    /// Number of additional random vectors.
    pub oversampling: usize,
    /// Number of power steps.
    pub power: usize,
}

impl RandomizedSvd {
    /// Returns the usual choice: ten more vectors, two power steps.
    pub fn rank(rank: usize) -> Self {
        Self { rank, oversampling: 10, power: 2 }
    }
}

/// Computes the leading `rank` singular triples, approximately; by the dense SVD if the sketch would not be smaller
/// than the matrix.
///
/// Singular values are never overestimated beyond rounding. Cost: $2q + 2$ products of `a` or its transpose
/// with a block of `rank + oversampling` columns.
pub fn randomized_svd<A: LinearOperator + ?Sized>(
    a: &A,
    params: RandomizedSvd,
    key: StreamKey,
) -> Result<Svd> {
    let width = params.rank.saturating_add(params.oversampling);
    if width >= a.rows().min(a.cols()) {
        return Ok(svd(a.to_dense().as_ref())?.truncated(params.rank));
    }
    let q = range_finder(a, width, params.power, key)?;
    // Qᵀ A = (A^T Q)ᵀ = Rᵀ Pᵀ with P R the QR factorisation of A^T Q.
    let p = thin_qr(a.apply_t(q.as_ref()).as_ref())?;
    let small = svd(p.r.transpose().as_ref())?;
    let full = Svd {
        u: matmul(q.as_ref(), small.u.as_ref()),
        sigma: small.sigma,
        v: matmul(p.q.as_ref(), small.v.as_ref()),
    };
    Ok(full.truncated(params.rank))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linalg::testing::*;
    use crate::linalg::{U, matmul_tn, singular_values};
    use crate::randla::Product;

    #[test]
    fn low_rank_matrices_are_recovered() {
        for (m, n, rank) in [(80, 60, 5), (60, 90, 1), (200, 40, 12)] {
            let (l, r) = (gaussian(m, rank, 1), gaussian(n, rank, 2));
            let implicit = Product { left: l.as_ref(), right: r.as_ref() };
            let dense = implicit.to_dense();
            let s = randomized_svd(&implicit, RandomizedSvd::rank(rank + 2), StreamKey::new(1)).unwrap();
            assert_eq!(s.sigma.len(), rank + 2);
            assert!(distance(&s.rebuild(), &dense) <= 1e-12 * dense.frobenius());
            assert!(departure_from_orthonormal(&s.u) < 1e-13 && departure_from_orthonormal(&s.v) < 1e-13);
        }
    }

    #[test]
    fn singular_values_are_not_overestimated() {
        for seed in 0..10 {
            let a = gaussian(120, 90, seed);
            let exact = singular_values(a.as_ref()).unwrap();
            let found = randomized_svd(&a, RandomizedSvd::rank(15), StreamKey::new(seed)).unwrap().sigma;
            for (i, (x, y)) in found.iter().zip(&exact).enumerate() {
                assert!(*x <= y * (1.0 + 10.0 * U), "value {i}: {x} over {y}");
                assert!(*x >= 0.8 * y);
            }
        }
    }

    #[test]
    fn a_sketch_as_large_as_the_matrix_is_the_dense_decomposition() {
        let a = gaussian(20, 12, 4);
        let s = randomized_svd(&a, RandomizedSvd::rank(3), StreamKey::new(0)).unwrap();
        assert_eq!(s.sigma[..], singular_values(a.as_ref()).unwrap()[..3]);
    }

    #[test]
    fn the_error_of_the_range_finder_keeps_its_bound_in_expectation() {
        let sigma: Vec<f64> = (0..40).map(|i| 1.0 / f64::from(i + 1)).collect();
        let a = with_spectrum(60, 40, &sigma, 5);
        for (k, p) in [(5usize, 2usize), (5, 6), (10, 4)] {
            let runs = 60;
            let errors: Vec<f64> = (0..runs)
                .map(|seed| {
                    let q = range_finder(&a, k + p, 0, StreamKey::new(seed)).unwrap();
                    let inside = matmul(q.as_ref(), matmul_tn(q.as_ref(), a.as_ref()).as_ref());
                    distance(&a, &inside).powi(2)
                })
                .collect();
            let mean = errors.iter().sum::<f64>() / runs as f64;
            let var = errors.iter().map(|e| (e - mean).powi(2)).sum::<f64>() / (runs - 1) as f64;
            let tail: f64 = sigma[k..].iter().map(|s| s * s).sum();
            let bound = (1.0 + k as f64 / (p as f64 - 1.0)) * tail;
            assert!(mean <= bound + 3.0 * (var / runs as f64).sqrt(), "k {k} p {p}: {mean} over {bound}");
            // The best possible with k + p columns.
            assert!(mean >= sigma[k + p..].iter().map(|s| s * s).sum::<f64>());
        }
    }

    #[test]
    fn degenerate_operators_are_decomposed() {
        for (m, n) in [(0, 0), (0, 4), (5, 0), (1, 1), (40, 30)] {
            let s = randomized_svd(&Mat::zeros(m, n), RandomizedSvd::rank(2), StreamKey::new(1)).unwrap();
            assert!(s.sigma.iter().all(|&x| x == 0.0) && s.sigma.len() == 2.min(m).min(n));
            assert!(departure_from_orthonormal(&s.u) < 1e-13);
        }
        let equal = Mat::from_fn(50, 40, |_, j| 1.0 + j as f64);
        let s = randomized_svd(&equal, RandomizedSvd::rank(4), StreamKey::new(1)).unwrap();
        assert!(distance(&s.rebuild(), &equal) <= 1e-12 * equal.frobenius());
        let nan = randomized_svd(&spoiled(40), RandomizedSvd::rank(2), StreamKey::new(1));
        assert!(nan.is_err());
    }
}
