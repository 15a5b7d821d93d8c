//! Gaussian matrices and uniformly distributed orthogonal matrices.

use crate::linalg::householder_qr_portable;
use crate::mat::{Mat, Real};
use crate::rng::Rng;

/// Independent standard normal entries, drawn row by row.
pub fn gaussian_matrix<T: Real>(rng: &mut Rng, rows: usize, cols: usize) -> Mat<T> {
    let mut g = Mat::zeros(rows, cols);
    rng.fill_normal(g.data_mut());
    g
}

/// An orthogonal `d × d` matrix from the uniform (Haar) distribution.
///
/// `Q` of the QR factorisation of a Gaussian matrix, with the signs that make the diagonal of `R` positive;
/// without them $Q_{11}$ would always be negative and the distribution not uniform (Mezzadri 2007). The same
/// bits on every machine.
pub fn haar_orthogonal(rng: &mut Rng, d: usize) -> Mat<f64> {
    householder_qr_portable(&gaussian_matrix(rng, d, d))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linalg::testing::{departure_from_orthonormal, distance};
    use crate::rng::StreamKey;

    #[test]
    fn the_matrix_is_orthogonal() {
        for d in [0, 1, 2, 3, 17, 64, 129] {
            let q = haar_orthogonal(&mut StreamKey::new(1).rng(), d);
            assert!(departure_from_orthonormal(&q) <= 1e-15 * (1.0 + 10.0 * d as f64));
        }
    }

    #[test]
    fn the_factorised_matrix_is_the_drawn_one_with_a_positive_diagonal() {
        let q = haar_orthogonal(&mut StreamKey::new(4).rng(), 9);
        let g = gaussian_matrix::<f64>(&mut StreamKey::new(4).rng(), 9, 9);
        let r = crate::linalg::matmul_tn(q.as_ref(), g.as_ref());
        assert!((0..9).all(|i| r[(i, i)] > 0.0 && (0..i).all(|j| r[(i, j)].abs() < 1e-14)));
        assert!(distance(&crate::linalg::matmul(q.as_ref(), r.as_ref()), &g) < 1e-13);
    }

    #[test]
    fn entries_have_the_moments_of_a_uniform_direction() {
        // For every entry of a Haar matrix: mean 0, second moment 1/d, fourth 3/(d(d+2)).
        let (d, runs) = (5usize, 8000usize);
        let mut rng = StreamKey::new(2).rng();
        let mut moments = vec![[0.0f64; 3]; d * d];
        let mut determinants = 0.0;
        for _ in 0..runs {
            let q = haar_orthogonal(&mut rng, d);
            for (m, x) in moments.iter_mut().zip(q.data()) {
                *m = [m[0] + x, m[1] + x * x, m[2] + x.powi(4)];
            }
            let two = haar_orthogonal(&mut rng, 2);
            determinants += two[(0, 0)] * two[(1, 1)] - two[(0, 1)] * two[(1, 0)];
        }
        let (n, df) = (runs as f64, d as f64);
        let fourth = 3.0 / (df * (df + 2.0));
        // 25 entries, so five standard errors.
        let (se1, se2) = ((1.0 / df / n).sqrt(), ((fourth - 1.0 / (df * df)) / n).sqrt());
        for m in moments {
            assert!((m[0] / n).abs() < 5.0 * se1, "{m:?}");
            assert!((m[1] / n - 1.0 / df).abs() < 5.0 * se2, "{m:?}");
            assert!((m[2] / n - fourth).abs() < 0.1 * fourth, "{m:?}");
        }
        // Rotations and reflections are equally likely.
        assert!(determinants.abs() / n < 5.0 / n.sqrt());
    }
}
