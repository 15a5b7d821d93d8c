//! A decomposition and its report: order and signs of its terms, and cancelling pairs of terms.
//!
//! The cosine of the angle between terms $r$ and $s$ is $\prod_n \langle a^{(n)}_r, a^{(n)}_s\rangle$. A cosine near −1
//! between terms that are both larger than the tensor marks a border-rank approximation, which no finite terms attain.

use super::Cp;
use super::sweep::{Run, hadamard_all};
use crate::Mat;
use crate::linalg::matmul_tn;
use crate::tensor::small::column_sign;

/// Outcome of the iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Status {
    /// The error stopped changing, or vanished.
    Converged,
    /// The sweeps were used up.
    MaxIters,
    /// Two terms grow and cancel; see [`Fit::degeneracy`].
    Degenerate,
}

/// Two terms that nearly cancel and are each much larger than the tensor: probably no best approximation of
/// this rank exists.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Degeneracy {
    /// The two terms.
    pub pair: (usize, usize),
    /// Cosine of the angle between them; near −1.
    pub cosine: f64,
    /// Geometric mean of their weights, relative to the norm of the tensor.
    pub weight: f64,
}

impl std::fmt::Display for Degeneracy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "terms {} and {} cancel (cosine {:.3}) at {:.2} times the norm of the tensor: a best approximation \
             of this rank probably does not exist; lower the rank or set ridge = 1e-4",
            self.pair.0, self.pair.1, self.cosine, self.weight
        )
    }
}

/// Decomposition, with the course of its iteration.
#[derive(Clone, Debug)]
pub struct Fit<T> {
    /// Weights at least 0, largest first; unit columns whose largest entry is positive in every mode but the
    /// last. A term of weight 0 may have zero columns.
    pub cp: Cp<T>,
    /// `‖T − T̂‖ / ‖T‖`, of the terms in f64; 0 for a zero tensor.
    pub rel_error: f64,
    /// Relative error after each sweep of the winning start.
    pub history: Vec<f64>,
    /// Outcome of the winning start.
    pub status: Status,
    /// Worst cancelling pair, if there is one.
    pub degeneracy: Option<Degeneracy>,
    /// Terms that vanished during the iteration.
    pub zero_terms: Vec<usize>,
    /// Number of the winning start, from 0.
    pub start: usize,
}

impl Run {
    pub(super) fn into_fit(self, norm_squared: f64) -> Fit<f64> {
        let cp = canonical(self.weights, &self.factors);
        let degeneracy = degeneracy(&cp, norm_squared.sqrt());
        let status = match (degeneracy, self.converged) {
            (Some(_), _) => Status::Degenerate,
            (None, true) => Status::Converged,
            (None, false) => Status::MaxIters,
        };
        let zero_terms = (0..cp.rank()).filter(|&r| cp.weights[r] == 0.0).collect();
        Fit {
            cp,
            rel_error: self.error,
            history: self.history,
            status,
            degeneracy,
            zero_terms,
            start: self.start,
        }
    }
}

/// Sorts the weights, largest first, and makes the largest entry of each column positive in every mode but the last.
fn canonical(weights: Vec<f64>, factors: &[Mat<f64>]) -> Cp<f64> {
    let rank = weights.len();
    let mut order: Vec<usize> = (0..rank).collect();
    order.sort_by(|&a, &b| weights[b].total_cmp(&weights[a]));
    let mut flips = vec![1.0; rank];
    let last = factors.len() - 1;
    let mut sorted = Vec::with_capacity(factors.len());
    for (m, f) in factors.iter().enumerate() {
        let signs: Vec<f64> = order
            .iter()
            .zip(&mut flips)
            .map(|(&r, flip)| {
                if m == last {
                    return *flip;
                }
                let sign = column_sign(f, r);
                *flip *= sign;
                sign
            })
            .collect();
        // Adding 0 turns −0 into 0.
        sorted.push(Mat::from_fn(f.rows(), rank, |i, r| f[(i, order[r])] * signs[r] + 0.0));
    }
    Cp { weights: order.iter().map(|&r| weights[r]).collect(), factors: sorted }
}

/// Returns the most strongly cancelling pair of terms that are larger than twice the tensor.
fn degeneracy(cp: &Cp<f64>, norm: f64) -> Option<Degeneracy> {
    let grams: Vec<Mat<f64>> = cp.factors.iter().map(|f| matmul_tn(f.as_ref(), f.as_ref())).collect();
    let cosines = hadamard_all(&grams, cp.rank(), None);
    let pairs = (0..cp.rank()).flat_map(|r| (r + 1..cp.rank()).map(move |s| (r, s)));
    pairs
        .map(|(r, s)| Degeneracy {
            pair: (r, s),
            cosine: cosines[(r, s)],
            weight: (cp.weights[r].sqrt() * cp.weights[s].sqrt()) / norm,
        })
        .filter(|d| d.cosine < -0.9 && d.weight > 2.0)
        .min_by(|a, b| a.cosine.total_cmp(&b.cosine))
}
