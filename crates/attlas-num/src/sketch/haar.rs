//! Random rotations.

use crate::mat::Mat;
use crate::rng::Rng;

/// Draws a rotation or reflection from the Haar measure.
///
/// Factors a Gaussian matrix by Householder reflections and multiplies column `j` of Q by the sign of $R_{jj}$: without
/// that, $Q_{11} < 0$ always, and estimators that are not even in the directions are biased (Mezzadri 2007).
pub(super) fn haar(d: usize, rng: &mut Rng) -> Mat<f64> {
    let gaussian = Mat::from_fn(d, d, |_, _| rng.normal());
    // Row j of `cols` is column j of the matrix.
    let mut cols = gaussian.transpose();
    let mut reflectors: Vec<Vec<f64>> = Vec::with_capacity(d);
    let mut signs = vec![1.0; d];
    for (j, sign) in signs.iter_mut().enumerate() {
        let mut u = cols.row(j)[j..].to_vec();
        let norm = u.iter().map(|x| x * x).sum::<f64>().sqrt();
        // R_jj is −sign(u_0)·‖u‖.
        let head = if u[0] < 0.0 { -norm } else { norm };
        *sign = if head > 0.0 { -1.0 } else { 1.0 };
        u[0] += head;
        let length = u.iter().map(|x| x * x).sum::<f64>().sqrt();
        if length > 0.0 {
            u.iter_mut().for_each(|x| *x /= length);
        }
        for c in j..d {
            reflect(&u, &mut cols.row_mut(c)[j..]);
        }
        reflectors.push(u);
    }
    // Row j of `q` is column j of Q = H_0 H_1 … applied to e_j.
    let mut q = Mat::identity(d);
    for (c, &sign) in signs.iter().enumerate() {
        let column = q.row_mut(c);
        for (j, u) in reflectors.iter().enumerate().rev() {
            reflect(u, &mut column[j..]);
        }
        column.iter_mut().for_each(|x| *x *= sign);
    }
    q.transpose()
}

/// `x ← x − 2u⟨u, x⟩`.
fn reflect(u: &[f64], x: &mut [f64]) {
    let twice = 2.0 * u.iter().zip(x.iter()).map(|(a, b)| a * b).sum::<f64>();
    u.iter().zip(x).for_each(|(a, b)| *b -= twice * a);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linalg::matmul_tn;
    use crate::rng::StreamKey;

    #[test]
    fn haar_matrices_are_orthogonal() {
        for d in [1, 2, 3, 17, 64] {
            let q = haar(d, &mut StreamKey::new(5).with(d as u64).rng());
            let gram = matmul_tn(q.as_ref(), q.as_ref());
            let tol = 20.0 * f64::EPSILON * d as f64;
            for i in 0..d {
                for j in 0..d {
                    assert!((gram[(i, j)] - f64::from(u8::from(i == j))).abs() < tol, "{d}: {i}, {j}");
                }
            }
        }
    }

    #[test]
    fn the_diagonal_of_a_haar_matrix_has_mean_zero_and_variance_one_over_d() {
        let (d, draws) = (4, 20_000);
        let mut rng = StreamKey::new(11).rng();
        let mut sums = vec![[0.0; 2]; d];
        for _ in 0..draws {
            let q = haar(d, &mut rng);
            for (j, s) in sums.iter_mut().enumerate() {
                s[0] += q[(j, j)];
                s[1] += q[(j, j)] * q[(j, j)];
            }
        }
        let n = f64::from(draws);
        for [first, second] in sums {
            assert!((first / n).abs() < 5.0 / n.sqrt() / 2.0);
            // Var(Q²) = 3/(d(d+2)) − 1/d² = 1/16.
            assert!((second / n - 0.25).abs() < 5.0 * 0.25 / n.sqrt());
        }
    }
}
