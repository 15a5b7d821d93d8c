//! Lewis weights: the counterpart of leverage scores for every $\ell_p$ norm.
//!
//! Every step reads the matrix twice, for $A^\top A$ and for $\|L^{-1} a_j\|^2$ with $LL^\top = A^\top A$, in blocks of
//! rows that are converted to `f64` on use: no second matrix is stored. Blocks have a fixed length and their sums are
//! added in order, so the number of threads changes no bit.

use crate::kernels::{Isa, Op, gemm};
use crate::linalg::{LinalgError, Result, Triangle, axpy, cholesky, dot, solve_triangular_in_place};
use crate::par::*;
use crate::randla::leverage::leverage_scores;
use crate::scratch::Scratch;
use crate::{Mat, MatRef, Real};

/// Stopping rule of [`lewis_weights`], and the directions that count.
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

/// $\ell_p$ Lewis weights, or the last iterate without convergence.
#[derive(Clone, Debug, PartialEq)]
pub struct LewisWeights {
    /// $w_j$; 0 for rows of zeros.
    pub weights: Vec<f64>,
    /// $c = \max_j \tau_j(W^{1/2-1/p} A) / w_j$: 1 at the fixed point; $c w$ are valid upper weights in any case.
    pub certificate: f64,
    /// Iterations taken.
    pub iterations: usize,
    /// True if the tolerance was reached.
    pub converged: bool,
    /// Rows that are not finite; they count as rows of zeros.
    pub not_finite: Vec<usize>,
}

impl LewisWeights {
    /// Returns upper bounds on $\alpha_j = \sup_y |\langle a_j, y\rangle|^p / \sum_l |\langle a_l, y\rangle|^p$, at
    /// most 1.
    ///
    /// With $w' = c w$: $\alpha_j \le (\sum w')^{p/2-1} w'_j$ for $p \ge 2$, whether or not the iteration converged, and
    /// $\alpha_j \le w'_j$ for $p \le 2$ at the fixed point.
    pub fn sensitivity_bounds(&self, p: f64) -> Vec<f64> {
        let total = self.certificate * self.weights.iter().sum::<f64>();
        let factor = self.certificate * if p > 2.0 { libm::pow(total, 0.5 * p - 1.0) } else { 1.0 };
        self.weights.iter().map(|w| (factor * w).min(1.0)).collect()
    }
}

/// Computes the weights with $w_j = \tau_j(W^{1/2 - 1/p} A)$; their sum is the rank.
///
/// $w \leftarrow w^{1-\eta} (\tau_j / w_j^{1-2/p})^{\eta p/2}$ with $\eta = 4/(p+2)$ contracts at the rate $|p-2|/(p+2)$ for every
/// $p$; the undamped iteration (Cohen and Peng 2015) diverges from $p = 4$ on. The damping is a construction of this
/// project.
pub fn lewis_weights<T: Real>(
    a: MatRef<'_, T>,
    p: f64,
    options: LewisOptions,
    scratch: &Scratch,
) -> Result<LewisWeights> {
    if !(p >= 1.0 && p.is_finite()) {
        return Err(LinalgError::InvalidParam { name: "p", value: p, expected: "finite, at least 1" });
    }
    let Leverage { scores: start, not_finite } =
        Rows { a, factors: None }.leverage(options.rank_tol, scratch)?;
    if p == 2.0 {
        let done =
            LewisWeights { weights: start, certificate: 1.0, iterations: 1, converged: true, not_finite };
        return Ok(done);
    }
    // Rows without leverage are zero, or lie in dropped directions: they have no weight.
    let live = start.iter().filter(|s| **s > 0.0).count();
    if live == 0 {
        let none =
            LewisWeights { weights: start, certificate: 1.0, iterations: 0, converged: true, not_finite };
        return Ok(none);
    }
    let even = start.iter().sum::<f64>() / live as f64;
    let mut weights: Vec<f64> = start.iter().map(|s| if *s > 0.0 { even } else { 0.0 }).collect();
    let mut factors = vec![0.0; a.rows()];
    let mut iterations = 0;
    let (certificate, converged) = loop {
        factors.par_chunks_mut(BLOCK).zip(weights.par_chunks(BLOCK)).for_each(|(factors, weights)| {
            for (f, w) in factors.iter_mut().zip(weights) {
                *f = if *w > 0.0 { libm::pow(*w, 0.5 - 1.0 / p) } else { 0.0 };
            }
        });
        let tau = Rows { a, factors: Some(&factors) }.leverage(options.rank_tol, scratch)?.scores;
        let (certificate, gap) = tau
            .par_chunks(BLOCK)
            .zip(weights.par_chunks(BLOCK))
            .map(|(tau, weights)| distance(tau, weights))
            .reduce(|| (0.0, 0.0), |a, b| (a.0.max(b.0), a.1.max(b.1)));
        if gap < options.tol || iterations == options.iters {
            break (certificate, gap < options.tol);
        }
        weights.par_chunks_mut(BLOCK).zip(tau.par_chunks(BLOCK)).for_each(|(weights, tau)| {
            weights
                .iter_mut()
                .zip(tau)
                .filter(|(w, _)| **w > 0.0)
                .for_each(|(w, tau)| *w = damped(*w, *tau, p));
        });
        iterations += 1;
    };
    Ok(LewisWeights { weights, certificate, iterations, converged, not_finite })
}

/// Returns the largest $\tau_j / w_j$ and the largest $|\ln(\tau_j / w_j)|$ of rows with a weight.
fn distance(tau: &[f64], weights: &[f64]) -> (f64, f64) {
    let ratios = tau.iter().zip(weights).filter(|(_, w)| **w > 0.0).map(|(t, w)| t / w);
    ratios.fold((0.0, 0.0), |(largest, gap), r| {
        (f64::max(largest, r), f64::max(gap, libm::log(r.max(f64::MIN_POSITIVE)).abs()))
    })
}

/// Takes one step of the iteration for one weight.
fn damped(w: f64, tau: f64, p: f64) -> f64 {
    let eta = 4.0 / (p + 2.0);
    let target = libm::pow(tau / libm::pow(w, 1.0 - 2.0 / p), 0.5 * p);
    (libm::pow(w, 1.0 - eta) * libm::pow(target, eta)).max(1e-200)
}

/// Rows converted at one time.
const BLOCK: usize = 256;

/// Rows whose Gram matrix one task sums, block by block.
const SUM_ROWS: usize = 4 * BLOCK;

/// Rows of a matrix in `f64`, each times its factor; rows that are not finite are zeros.
#[derive(Clone, Copy)]
struct Rows<'a, T> {
    a: MatRef<'a, T>,
    factors: Option<&'a [f64]>,
}

struct Leverage {
    scores: Vec<f64>,
    not_finite: Vec<usize>,
}

impl<T: Real> Rows<'_, T> {
    /// Fills `out` with rows from `first` on; calls `spoiled` for those that are not finite.
    fn write(&self, first: usize, out: &mut [f64], mut spoiled: impl FnMut(usize)) {
        for (j, out) in (first..).zip(out.chunks_exact_mut(self.a.cols().max(1))) {
            let (row, factor) = (self.a.row(j), self.factors.map_or(1.0, |f| f[j]));
            // An early exit would keep this loop from being vectorised.
            if row.iter().fold(true, |finite, x| finite & x.is_finite()) {
                out.iter_mut().zip(row).for_each(|(o, x)| *o = factor * x.to_f64());
            } else {
                out.fill(0.0);
                spoiled(j);
            }
        }
    }

    fn leverage(&self, rank_tol: f64, scratch: &Scratch) -> Result<Leverage> {
        let (n, d) = (self.a.rows(), self.a.cols());
        if n >= 2 * d && d > 0 {
            let (gram, not_finite) = self.gram(scratch);
            if let Some(inverse) = inverse_factor(&gram) {
                return Ok(Leverage { scores: self.scores(&inverse, scratch), not_finite });
            }
        }
        let mut not_finite = Vec::new();
        let mut dense = Mat::<f64>::zeros(n, d);
        self.write(0, dense.data_mut(), |j| not_finite.push(j));
        Ok(Leverage { scores: leverage_scores(dense.as_ref(), rank_tol)?, not_finite })
    }

    /// Computes $A^\top A$, and lists the rows that are not finite.
    fn gram(&self, scratch: &Scratch) -> (Mat<f64>, Vec<usize>) {
        let (n, d) = (self.a.rows(), self.a.cols());
        let piece = |s: usize| {
            let (mut sum, mut spoiled) = (Mat::<f64>::zeros(d, d), Vec::new());
            let mut rows = scratch.take::<f64>(BLOCK * d);
            for first in (s * SUM_ROWS..((s + 1) * SUM_ROWS).min(n)).step_by(BLOCK) {
                let len = BLOCK.min(n - first);
                let rows = &mut rows[..len * d];
                self.write(first, rows, |j| spoiled.push(j));
                let rows = MatRef::new(rows, len, d);
                gemm(Isa::best(), 1.0, Op::T(rows), Op::N(rows), 1.0, sum.data_mut(), d, scratch);
            }
            (sum, spoiled)
        };
        let count = n.div_ceil(SUM_ROWS);
        let pieces: Vec<(Mat<f64>, Vec<usize>)> =
            (0..count).into_par_iter().with_max_len(1).map(piece).collect();
        let (mut gram, mut spoiled) = (Mat::zeros(d, d), Vec::new());
        for (sum, own) in pieces {
            axpy(1.0, sum.data(), gram.data_mut());
            spoiled.extend(own);
        }
        (gram, spoiled)
    }

    /// Computes $\|L^{-1} a_j\|^2$.
    fn scores(&self, inverse: &Mat<f64>, scratch: &Scratch) -> Vec<f64> {
        let d = self.a.cols();
        let mut scores = vec![0.0; self.a.rows()];
        scores.par_chunks_mut(BLOCK).with_max_len(1).enumerate().for_each(|(t, scores)| {
            let mut rows = scratch.take::<f64>(scores.len() * d);
            let mut solved = scratch.take::<f64>(scores.len() * d);
            self.write(t * BLOCK, &mut rows, |_| ());
            let rows = MatRef::new(&rows, scores.len(), d);
            gemm(Isa::best(), 1.0, Op::N(rows), Op::T(inverse.as_ref()), 0.0, &mut solved, d, scratch);
            scores.iter_mut().zip(solved.chunks_exact(d)).for_each(|(s, r)| *s = dot(r, r).clamp(0.0, 1.0));
        });
        scores
    }
}

/// Returns $L^{-1}$ for $LL^\top$ the Gram matrix; `None` if it is not well conditioned.
fn inverse_factor(gram: &Mat<f64>) -> Option<Mat<f64>> {
    // Errors grow with the square of the condition number: beyond this, QR.
    const WELL_CONDITIONED: f64 = 1e-3;
    let factor = cholesky(gram.as_ref()).ok()?;
    let d = factor.rows();
    let diagonal = (0..d).map(|i| factor[(i, i)]);
    let (low, high) = diagonal.fold((f64::INFINITY, 0.0f64), |(a, b), x| (a.min(x), b.max(x)));
    if low < WELL_CONDITIONED * high || !high.is_finite() {
        return None;
    }
    let mut inverse = Mat::<f64>::identity(d);
    solve_triangular_in_place(Triangle::Lower, factor.as_ref(), inverse.data_mut(), d);
    Some(inverse)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linalg::matmul;
    use crate::linalg::testing::gaussian;
    use std::sync::LazyLock;

    static SCRATCH: LazyLock<Scratch> = LazyLock::new(Scratch::poisoned);

    fn lewis(a: &Mat<f64>, p: f64, options: LewisOptions) -> LewisWeights {
        lewis_weights(a.as_ref(), p, options, &SCRATCH).unwrap()
    }

    fn leverage(a: &Mat<f64>) -> Vec<f64> {
        Rows { a: a.as_ref(), factors: None }.leverage(1e-10, &SCRATCH).unwrap().scores
    }

    fn sensitivity_at(a: &Mat<f64>, y: &[f64], p: f64) -> Vec<f64> {
        let powers: Vec<f64> = (0..a.rows()).map(|j| dot(a.row(j), y).abs().powf(p)).collect();
        let total: f64 = powers.iter().sum();
        powers.iter().map(|x| x / total).collect()
    }

    #[test]
    fn both_ways_to_leverage_agree() {
        for (n, d) in [(3, 2), (40, 6), (700, 9)] {
            let a = gaussian(n, d, 1);
            let (fast, slow) = (leverage(&a), leverage_scores(a.as_ref(), 1e-10).unwrap());
            assert!(fast.iter().zip(&slow).all(|(x, y)| (x - y).abs() < 1e-11));
        }
        // Two equal columns: the Gram matrix is singular.
        let twin = Mat::from_fn(30, 4, |i, j| gaussian(30, 3, 2)[(i, j.min(2))]);
        assert!((leverage(&twin).iter().sum::<f64>() - 3.0).abs() < 1e-10);
    }

    #[test]
    fn known_weights() {
        let a = Mat::from_vec(vec![1.0, 0.0, 0.0, 1.0, 1.0, 1.0], 3, 2);
        let tau = leverage(&a);
        assert!(tau.iter().all(|t| (t - 2.0 / 3.0).abs() < 1e-14));
        let b = Mat::from_vec(vec![1.0, 0.0, 1.0, 0.0, 0.0, 2.0], 3, 2);
        for p in [1.0, 1.5, 2.0, 3.0, 4.0, 8.0] {
            let options = LewisOptions { iters: 100, tol: 1e-12, ..LewisOptions::default() };
            let w = lewis(&b, p, options);
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
                let w = lewis(&a, p, options);
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
                let bounds = lewis(&a, p, options).sensitivity_bounds(p);
                for t in 0..300 {
                    let y = gaussian(1, 4, 100 + t);
                    let at = sensitivity_at(&a, y.row(0), p);
                    assert!(at.iter().zip(&bounds).all(|(s, b)| *s <= b + 1e-12), "p = {p}, {iters}");
                }
            }
        }
        let bounds = lewis(&a, 1.0, LewisOptions::default()).sensitivity_bounds(1.0);
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
        let weights = |m: &Mat<f64>| lewis(m, 4.0, options).weights;
        let (x, y) = (weights(&a), weights(&b));
        assert!(x.iter().zip(&y).all(|(a, b)| (a - b).abs() < 1e-9));
        assert_eq!(x[7], 0.0);
        let empty = lewis(&Mat::zeros(4, 2), 4.0, options);
        assert_eq!((empty.weights, empty.converged), (vec![0.0; 4], true));
        assert!(lewis_weights(a.as_ref(), 0.5, options, &SCRATCH).is_err());
    }

    #[test]
    fn rows_that_are_not_finite_count_as_zeros_and_are_named() {
        for n in [5, 900] {
            let mut a = gaussian(n, 4, 7);
            let mut zeroed = a.clone();
            for (j, spoil) in [(1, f64::NAN), (3, f64::INFINITY), (n - 1, f64::NEG_INFINITY)] {
                a.row_mut(j)[j % 4] = spoil;
                zeroed.row_mut(j).fill(0.0);
            }
            for p in [2.0, 3.0] {
                let (got, want) =
                    (lewis(&a, p, LewisOptions::default()), lewis(&zeroed, p, LewisOptions::default()));
                assert_eq!((&got.weights, got.not_finite), (&want.weights, vec![1, 3, n - 1]));
                assert!(want.not_finite.is_empty());
            }
        }
    }

    #[test]
    fn threads_change_no_bit_and_single_precision_is_widened() {
        let a = gaussian(2600, 6, 8).cast::<f32>();
        let run = |threads: usize, p: f64| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| lewis_weights(a.as_ref(), p, LewisOptions::default(), &SCRATCH).unwrap())
        };
        for p in [1.0, 2.0, 4.0] {
            assert_eq!(run(1, p), run(3, p));
            assert_eq!(run(1, p), lewis(&a.cast(), p, LewisOptions::default()));
        }
    }
}
