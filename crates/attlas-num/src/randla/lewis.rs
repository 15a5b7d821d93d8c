//! Lewis weights: what leverage scores are to the Euclidean norm, for every $\ell_p$ norm.

use crate::kernels::{Isa, Op, gemm};
use crate::linalg::{LinalgError, Result, Triangle, cholesky, dot, solve_triangular_in_place};
use crate::randla::leverage::{gram, leverage_scores};
use crate::scratch::Scratch;
use crate::{Mat, MatRef};
use rayon::prelude::*;

/// When the iteration for [`lewis_weights`] stops, and which directions count.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LewisOptions {
    /// Most iterations.
    pub iters: usize,
    /// Largest $|\ln(\tau_j / w_j)|$ that counts as converged.
    pub tol: f64,
    /// Directions of the matrix below this share of the largest are dropped.
    pub rank_tol: f64,
}

impl Default for LewisOptions {
    fn default() -> Self {
        Self { iters: 30, tol: 1e-6, rank_tol: 1e-6 }
    }
}

/// $\ell_p$ Lewis weights, or what the iteration reached.
#[derive(Clone, Debug, PartialEq)]
pub struct LewisWeights {
    /// $w_j$; 0 for rows of zeros.
    pub weights: Vec<f64>,
    /// $c = \max_j \tau_j(W^{1/2-1/p} A) / w_j$: 1 at the fixed point; $c w$ are valid upper weights in any case.
    pub certificate: f64,
    /// Iterations taken.
    pub iterations: usize,
    /// Whether the tolerance was reached.
    pub converged: bool,
}

impl LewisWeights {
    /// Upper bounds on $\alpha_j = \sup_y |\langle a_j, y\rangle|^p / \sum_l |\langle a_l, y\rangle|^p$, at most 1.
    ///
    /// With $w' = c w$: $\alpha_j \le (\sum w')^{p/2-1} w'_j$ for $p \ge 2$, whether or not the iteration converged, and
    /// $\alpha_j \le w'_j$ for $p \le 2$ at the fixed point.
    pub fn sensitivity_bounds(&self, p: f64) -> Vec<f64> {
        let total = self.certificate * self.weights.iter().sum::<f64>();
        let factor = self.certificate * if p > 2.0 { libm::pow(total, 0.5 * p - 1.0) } else { 1.0 };
        self.weights.iter().map(|w| (factor * w).min(1.0)).collect()
    }
}

/// The weights with $w_j = \tau_j(W^{1/2 - 1/p} A)$; their sum is the rank.
///
/// $w \leftarrow w^{1-\eta} (\tau_j / w_j^{1-2/p})^{\eta p/2}$ with $\eta = 4/(p+2)$ contracts at the rate $|p-2|/(p+2)$ for every
/// $p$; the undamped iteration (Cohen and Peng 2015) diverges from $p = 4$ on. The damping is a construction of this
/// project.
pub fn lewis_weights(a: MatRef<'_, f64>, p: f64, options: LewisOptions) -> Result<LewisWeights> {
    if !(p >= 1.0 && p.is_finite()) {
        return Err(LinalgError::InvalidParam { name: "p", value: p, expected: "finite, at least 1" });
    }
    let start = gram_leverage_scores(a, options.rank_tol)?;
    if p == 2.0 {
        return Ok(LewisWeights { weights: start, certificate: 1.0, iterations: 1, converged: true });
    }
    // Rows without leverage are zero, or lie in dropped directions: they have no weight.
    let live: Vec<usize> = (0..a.rows()).filter(|&j| start[j] > 0.0).collect();
    if live.is_empty() {
        return Ok(LewisWeights { weights: start, certificate: 1.0, iterations: 0, converged: true });
    }
    let rank: f64 = start.iter().sum();
    let mut w = vec![rank / live.len() as f64; live.len()];
    let eta = 4.0 / (p + 2.0);
    let mut scaled = Mat::<f64>::zeros(live.len(), a.cols());
    let mut iterations = 0;
    let (certificate, converged) = loop {
        for (t, &j) in live.iter().enumerate() {
            let factor = libm::pow(w[t], 0.5 - 1.0 / p);
            scaled.row_mut(t).iter_mut().zip(a.row(j)).for_each(|(s, x)| *s = factor * x);
        }
        let tau = gram_leverage_scores(scaled.as_ref(), options.rank_tol)?;
        let ratios = tau.iter().zip(&w).map(|(t, w)| t / w);
        let certificate = ratios.clone().fold(0.0, f64::max);
        let gap = ratios.map(|r| libm::log(r.max(f64::MIN_POSITIVE)).abs()).fold(0.0, f64::max);
        if gap < options.tol || iterations == options.iters {
            break (certificate, gap < options.tol);
        }
        for (w, tau) in w.iter_mut().zip(&tau) {
            let target = libm::pow(tau / libm::pow(*w, 1.0 - 2.0 / p), 0.5 * p);
            *w = (libm::pow(*w, 1.0 - eta) * libm::pow(target, eta)).max(1e-200);
        }
        iterations += 1;
    };
    let mut weights = vec![0.0; a.rows()];
    live.iter().zip(&w).for_each(|(&j, &w)| weights[j] = w);
    Ok(LewisWeights { weights, certificate, iterations, converged })
}

/// Leverage scores through the Gram matrix where it is well conditioned, by pivoted QR otherwise.
pub fn gram_leverage_scores(a: MatRef<'_, f64>, rank_tol: f64) -> Result<Vec<f64>> {
    // Errors grow with the square of the condition number: beyond this, QR.
    const WELL_CONDITIONED: f64 = 1e-3;
    let (n, d) = (a.rows(), a.cols());
    if n < 2 * d || d == 0 {
        return leverage_scores(a, rank_tol);
    }
    let (scratch, isa) = (Scratch::new(), Isa::best());
    let Ok(factor) = cholesky(gram(a).as_ref()) else { return leverage_scores(a, rank_tol) };
    let diagonal = (0..d).map(|i| factor[(i, i)]);
    let (low, high) = diagonal.fold((f64::INFINITY, 0.0f64), |(a, b), x| (a.min(x), b.max(x)));
    if low < WELL_CONDITIONED * high || !high.is_finite() {
        return leverage_scores(a, rank_tol);
    }
    let mut inverse = Mat::<f64>::identity(d);
    solve_triangular_in_place(Triangle::Lower, factor.as_ref(), inverse.data_mut(), d);
    const ROWS: usize = 256;
    let mut scores = vec![0.0; n];
    scores.par_chunks_mut(ROWS).enumerate().for_each(|(t, scores)| {
        let mut solved = scratch.take::<f64>(scores.len() * d);
        let rows = a.sub_rows(t * ROWS..t * ROWS + scores.len());
        gemm(isa, 1.0, Op::N(rows), Op::T(inverse.as_ref()), 0.0, &mut solved, d, &scratch);
        scores.iter_mut().zip(solved.chunks_exact(d)).for_each(|(s, r)| *s = dot(r, r).clamp(0.0, 1.0));
    });
    Ok(scores)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linalg::matmul;
    use crate::linalg::testing::gaussian;

    fn sensitivity_at(a: &Mat<f64>, y: &[f64], p: f64) -> Vec<f64> {
        let powers: Vec<f64> = (0..a.rows()).map(|j| dot(a.row(j), y).abs().powf(p)).collect();
        let total: f64 = powers.iter().sum();
        powers.iter().map(|x| x / total).collect()
    }

    #[test]
    fn both_ways_to_leverage_agree() {
        for (n, d) in [(3, 2), (40, 6), (700, 9)] {
            let a = gaussian(n, d, 1);
            let (fast, slow) = (
                gram_leverage_scores(a.as_ref(), 1e-10).unwrap(),
                leverage_scores(a.as_ref(), 1e-10).unwrap(),
            );
            assert!(fast.iter().zip(&slow).all(|(x, y)| (x - y).abs() < 1e-11));
        }
        // Two equal columns: the Gram matrix is singular.
        let twin = Mat::from_fn(30, 4, |i, j| gaussian(30, 3, 2)[(i, j.min(2))]);
        assert!(
            (gram_leverage_scores(twin.as_ref(), 1e-10).unwrap().iter().sum::<f64>() - 3.0).abs() < 1e-10
        );
    }

    #[test]
    fn known_weights() {
        let a = Mat::from_vec(vec![1.0, 0.0, 0.0, 1.0, 1.0, 1.0], 3, 2);
        let tau = gram_leverage_scores(a.as_ref(), 1e-10).unwrap();
        assert!(tau.iter().all(|t| (t - 2.0 / 3.0).abs() < 1e-14));
        let b = Mat::from_vec(vec![1.0, 0.0, 1.0, 0.0, 0.0, 2.0], 3, 2);
        for p in [1.0, 1.5, 2.0, 3.0, 4.0, 8.0] {
            let options = LewisOptions { iters: 100, tol: 1e-12, ..LewisOptions::default() };
            let w = lewis_weights(b.as_ref(), p, options).unwrap();
            for (w, want) in w.weights.iter().zip([0.5, 0.5, 1.0]) {
                assert!((w - want).abs() < 1e-9, "p = {p}: {w}");
            }
        }
    }

    #[test]
    fn the_damped_iteration_converges_at_its_rate_and_sums_to_the_rank() {
        let mut a = gaussian(200, 5, 3);
        (0..200).for_each(|i| a.row_mut(i).iter_mut().for_each(|x| *x *= 1.0 + (i % 7) as f64));
        for p in [1.0, 1.5, 3.0, 4.0, 6.0, 8.0] {
            let reach = |iters: usize| {
                let options = LewisOptions { iters, tol: 0.0, ..LewisOptions::default() };
                let w = lewis_weights(a.as_ref(), p, options).unwrap();
                (w.certificate.ln(), w)
            };
            let (rate, steps) = ((p - 2.0f64).abs() / (p + 2.0), 12);
            let ((early, _), (late, w)) = (reach(4), reach(4 + steps));
            // A factor of ten for the constant in front.
            let floor = 1e-11;
            assert!(late <= 10.0 * early * rate.powi(steps as i32) + floor, "p = {p}: {early} {late}");
            let many = reach(80).1;
            assert!((many.weights.iter().sum::<f64>() - 5.0).abs() < 1e-8, "p = {p}");
            assert!((w.certificate - 1.0).abs() < 0.1);
        }
    }

    #[test]
    fn no_direction_exceeds_the_bounds_even_when_stopped_early() {
        let a = gaussian(60, 4, 5);
        for p in [2.0, 3.0, 4.0, 8.0] {
            for iters in [0, 1, 2, 60] {
                let options = LewisOptions { iters, ..LewisOptions::default() };
                let bounds = lewis_weights(a.as_ref(), p, options).unwrap().sensitivity_bounds(p);
                for t in 0..300 {
                    let y = gaussian(1, 4, 100 + t);
                    let at = sensitivity_at(&a, y.row(0), p);
                    assert!(at.iter().zip(&bounds).all(|(s, b)| *s <= b + 1e-12), "p = {p}, {iters}");
                }
            }
        }
        let bounds = lewis_weights(a.as_ref(), 1.0, LewisOptions::default()).unwrap().sensitivity_bounds(1.0);
        for t in 0..300 {
            let at = sensitivity_at(&a, gaussian(1, 4, 100 + t).row(0), 1.0);
            assert!(at.iter().zip(&bounds).all(|(s, b)| *s <= b + 1e-6));
        }
    }

    #[test]
    fn a_change_of_basis_leaves_the_weights_and_zero_rows_have_none() {
        let mut a = gaussian(50, 3, 6);
        a.row_mut(7).fill(0.0);
        let b = matmul(a.as_ref(), gaussian(3, 3, 9).as_ref());
        let options = LewisOptions { iters: 80, tol: 1e-12, ..LewisOptions::default() };
        let weights = |m: &Mat<f64>| lewis_weights(m.as_ref(), 4.0, options).unwrap().weights;
        let (x, y) = (weights(&a), weights(&b));
        assert!(x.iter().zip(&y).all(|(a, b)| (a - b).abs() < 1e-9));
        assert_eq!(x[7], 0.0);
        let empty = lewis_weights(Mat::<f64>::zeros(4, 2).as_ref(), 4.0, options).unwrap();
        assert_eq!((empty.weights, empty.converged), (vec![0.0; 4], true));
        assert!(lewis_weights(a.as_ref(), 0.5, options).is_err());
    }
}
