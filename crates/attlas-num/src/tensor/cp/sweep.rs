//! Sweeps of alternating least squares from one start, and extrapolation between them.
//!
//! The update of mode $n$ solves $A_n \Gamma = Y_n$ and divides the columns by their lengths, which become the weights
//! $\lambda$. After the last mode $N$ the error follows from the results of the sweep: $\|T - \hat T\|^2 = \|T\|^2 +
//! \lambda^\top (\bigodot_n A_n^\top A_n) \lambda - 2 \sum_{i,r} \lambda_r (Y_N)_{ir} (A_N)_{ir}$.

use super::{Init, Options, Target};
use crate::linalg::matmul_tn;
use crate::rng::StreamKey;
use crate::tensor::small::{eigh, leading_columns, solve_gram};
use crate::tensor::{Error, Result, hadamard};
use crate::{DType, Mat};

/// Returns the factors at the beginning of a start, with unit columns.
pub(super) fn initial(
    target: &mut dyn Target,
    shape: &[usize],
    rank: usize,
    start: usize,
    options: &Options,
) -> Vec<Mat<f64>> {
    let key = StreamKey::new(options.seed).named("cp start").with(start as u64);
    let mut factors: Vec<Mat<f64>> = match (&options.init, start) {
        (Init::Given(cp), 0) => cp.factors.clone(),
        (init, _) => (0..shape.len())
            .map(|mode| {
                let mut rng = key.with(mode as u64).rng();
                let mut factor = Mat::zeros(shape[mode], rank);
                rng.fill_normal(factor.data_mut());
                let gram = if *init == Init::Hosvd && start == 0 { target.gram(mode) } else { None };
                if let Some(gram) = gram {
                    let basis = leading_columns(&eigh(&gram).1, rank);
                    for i in 0..shape[mode] {
                        factor.row_mut(i)[..basis.cols()].copy_from_slice(basis.row(i));
                    }
                    factor.data_mut().iter_mut().for_each(|x| *x += 0.01 * rng.normal());
                }
                factor
            })
            .collect(),
    };
    factors.iter_mut().for_each(|f| {
        normalise_columns(f);
    });
    factors
}

/// Divides every column by its norm and returns the norms; a column without a usable norm becomes zero.
fn normalise_columns(a: &mut Mat<f64>) -> Vec<f64> {
    (0..a.cols())
        .map(|r| {
            let norm = (0..a.rows()).map(|i| a[(i, r)] * a[(i, r)]).sum::<f64>().sqrt();
            let norm = if norm.is_normal() { norm } else { 0.0 };
            for i in 0..a.rows() {
                a[(i, r)] = if norm > 0.0 { a[(i, r)] / norm } else { 0.0 };
            }
            norm
        })
        .collect()
}

/// Result of one start.
pub(super) struct Run {
    pub(super) weights: Vec<f64>,
    pub(super) factors: Vec<Mat<f64>>,
    pub(super) error: f64,
    pub(super) history: Vec<f64>,
    pub(super) converged: bool,
    pub(super) start: usize,
}

/// Computes the Hadamard product of all matrices but that of `skip`.
pub(super) fn hadamard_all(grams: &[Mat<f64>], rank: usize, skip: Option<usize>) -> Mat<f64> {
    let ones = Mat::from_vec(vec![1.0; rank * rank], rank, rank);
    let kept = grams.iter().enumerate().filter(|(m, _)| Some(*m) != skip);
    kept.fold(ones, |acc, (_, g)| hadamard(&acc, g).expect("Gram matrices of one rank"))
}

/// Computes the relative error of `weights` and `factors`, given `y`, the product of the last mode.
fn relative_error(
    target: &mut dyn Target,
    norm_squared: f64,
    weights: &[f64],
    factors: &[Mat<f64>],
    grams: &[Mat<f64>],
    y: &Mat<f64>,
) -> f64 {
    let rank = weights.len();
    let all = hadamard_all(grams, rank, None);
    let model: f64 =
        (0..rank).map(|r| weights[r] * all.row(r).iter().zip(weights).map(|(g, w)| g * w).sum::<f64>()).sum();
    let last = &factors[factors.len() - 1];
    let cross: f64 =
        (0..last.rows()).map(|i| (0..rank).map(|r| weights[r] * y[(i, r)] * last[(i, r)]).sum::<f64>()).sum();
    let squared = norm_squared + model - 2.0 * cross;
    // The three terms cancel: what is left is rounding below ε times the largest of them, and an error of
    // 1e-7 has lost all digits but one or two.
    let size = norm_squared + weights.iter().map(|w| w * w).sum::<f64>();
    let squared = if squared < 1e-13 * size {
        target.residual_squared(weights, factors).unwrap_or(squared)
    } else {
        squared
    };
    (squared.max(0.0) / norm_squared).sqrt()
}

pub(super) fn iterate(
    target: &mut dyn Target,
    norm_squared: f64,
    mut factors: Vec<Mat<f64>>,
    start: usize,
    options: &Options,
) -> Result<Run> {
    let (order, rank) = (factors.len(), factors[0].cols());
    let (tol, floor) = match target.dtype() {
        DType::F64 => (options.tol.unwrap_or(1e-8), 1e-12),
        DType::F32 => (options.tol.unwrap_or(1e-5), 1e-7),
    };
    let mut grams: Vec<Mat<f64>> = factors.iter().map(|f| matmul_tn(f.as_ref(), f.as_ref())).collect();
    let mut weights = vec![1.0; rank];
    let mut history = Vec::new();
    let mut previous: Option<(Vec<f64>, Vec<Mat<f64>>)> = None;
    let mut extrapolation = Extrapolation::default();
    let mut error = f64::INFINITY;
    let mut converged = false;
    for sweep in 1..=options.iters {
        let mut y = Mat::zeros(0, 0);
        for mode in 0..order {
            let gamma = hadamard_all(&grams, rank, Some(mode));
            y = target.mttkrp_in_sweep(&factors, mode);
            if (y.rows(), y.cols()) != (factors[mode].rows(), rank) {
                return Err(Error::shape(
                    "product of a target",
                    format!("{} × {rank}", factors[mode].rows()),
                    format!("{} × {}", y.rows(), y.cols()),
                ));
            }
            factors[mode] = solve_gram(&gamma, &y, options.ridge, floor);
            weights = normalise_columns(&mut factors[mode]);
            grams[mode] = matmul_tn(factors[mode].as_ref(), factors[mode].as_ref());
        }
        let mut now = relative_error(target, norm_squared, &weights, &factors, &grams, &y);
        if let Some((w, f)) = previous.as_ref().filter(|_| sweep > 6 && sweep % 2 == 0) {
            let (w, f) = extrapolation.step(sweep, (w, f), (&weights, &factors));
            let g: Vec<Mat<f64>> = f.iter().map(|f| matmul_tn(f.as_ref(), f.as_ref())).collect();
            let y = target.mttkrp(&f, order - 1);
            let tried = relative_error(target, norm_squared, &w, &f, &g, &y);
            extrapolation.note(tried < now);
            if tried < now {
                (weights, factors, grams, now) = (w, f, g, tried);
            }
        }
        previous = options.line_search.then(|| (weights.clone(), factors.clone()));
        history.push(now);
        let change = (error - now).abs();
        error = now;
        if change < tol || error < 10.0 * f64::EPSILON {
            converged = true;
            break;
        }
    }
    Ok(Run { weights, factors, error, history, converged, start })
}

/// Bro's extrapolation: $A + (t^{1/p} - 1)(A - A^{\text{prev}})$ after sweep $t$; the power $p$ grows when four tries
/// in a row were rejected.
struct Extrapolation {
    power: f64,
    refused: usize,
}

impl Default for Extrapolation {
    fn default() -> Self {
        Self { power: 2.0, refused: 0 }
    }
}

impl Extrapolation {
    /// Returns the extrapolated terms; weights travel with the last factor.
    fn step(
        &self,
        sweep: usize,
        (old_weights, old): (&[f64], &[Mat<f64>]),
        (new_weights, new): (&[f64], &[Mat<f64>]),
    ) -> (Vec<f64>, Vec<Mat<f64>>) {
        let stride = libm::pow(sweep as f64, 1.0 / self.power) - 1.0;
        let mut weights = vec![1.0; new_weights.len()];
        let mut factors = Vec::with_capacity(new.len());
        for (m, (a, b)) in old.iter().zip(new).enumerate() {
            let last = m + 1 == new.len();
            let mut moved = Mat::from_fn(b.rows(), b.cols(), |i, r| {
                let (wa, wb) = if last { (old_weights[r], new_weights[r]) } else { (1.0, 1.0) };
                let (a, b) = (wa * a[(i, r)], wb * b[(i, r)]);
                b + stride * (b - a)
            });
            let norms = normalise_columns(&mut moved);
            weights.iter_mut().zip(norms).for_each(|(w, n)| *w *= n);
            factors.push(moved);
        }
        (weights, factors)
    }

    fn note(&mut self, accepted: bool) {
        self.refused = if accepted { 0 } else { self.refused + 1 };
        if self.refused == 4 {
            self.power += 1.0;
            self.refused = 0;
        }
    }
}
