//! Randomly pivoted Cholesky: a low-rank approximation of a positive semidefinite matrix from few of its rows.
//!
//! **Math.** Partial Cholesky $\hat A = G^\top G$, $G$ being $k \times n$, whose pivots are drawn with probability
//! proportional to the diagonal of the residual $A - \hat A$. $\hat A$ is the Nyström approximation with
//! the pivots as landmarks: it reproduces their rows, and the residual is positive semidefinite.
//!
//! **Reference.** Chen, Epperly, Tropp and Webber (2024); the accelerated variant is Epperly, Tropp and
//! Webber (2024). The `block` variant differs from public code in keeping the first distinct draws in draw
//! order, where a sorted list would favour low indices.
//!
//! **Cost.** $(k + 1) n$ entries of $A$ and $k^2 n$ multiply-adds; `simple` in matrix–vector products,
//! the others in matrix–matrix products.
//!
//! **Guarantee.** $\mathbb E \operatorname{tr}(A - \hat A) \le (1 + \varepsilon) \operatorname{tr}(A - A_r)$ once
//! $k \ge r/\varepsilon + r \ln(1/(\varepsilon\eta))$ with $\eta = \operatorname{tr}(A - A_r) / \operatorname{tr} A$;
//! for `simple` and `accelerated`, whose pivots have the same distribution.

mod draw;
mod factor;
mod matrix;
mod state;
#[cfg(test)]
mod tests;

pub use factor::PartialCholesky;
pub use matrix::{GaussianKernel, PsdMatrix};

use crate::linalg::{LinalgError, Result};
use crate::rng::StreamKey;
use crate::{Real, Scratch};
use state::Factorisation;

/// Method of drawing pivots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    /// One at a time.
    Simple,
    /// Drawn in blocks and thinned by rejection to the distribution of `Simple`.
    Accelerated,
    /// Drawn in blocks and all kept: cheapest, and worse on clustered data.
    Block,
}

/// Parameters of [`rp_cholesky`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// Most pivots.
    pub rank: usize,
    /// `None`: accelerated from rank 64 on, and for finite `power`; else simple.
    pub variant: Option<Variant>,
    /// Draws per round. `None`: a tenth of the rank, between 10 and 128.
    pub block: Option<usize>,
    /// Relative residual trace at which to stop. `None`: $10^{-13}$ in `f64`, $10^{-6}$ in `f32`.
    pub stop_tol: Option<f64>,
    /// Probabilities are proportional to the residual to this power; infinity always takes the largest.
    pub power: f64,
}

impl Options {
    /// Returns the defaults, for at most `rank` pivots.
    pub fn rank(rank: usize) -> Self {
        Self { rank, variant: None, block: None, stop_tol: None, power: 1.0 }
    }

    /// Draws per round.
    fn block_len(&self) -> usize {
        self.block.unwrap_or(self.rank.div_ceil(10).clamp(10, 128)).max(1)
    }
}

/// Computes a randomly pivoted Cholesky of `matrix`, or of $D K_0 D$ with `matrix` $= K_0$ if `log_scale` $= \ln D$ is
/// given.
///
/// With log-scales the factor is still that of $K_0$, in which nothing overflows; only the pivots follow $D K_0 D$. The
/// result has fewer pivots than `rank` if the residual is exhausted. Residuals below eight roundoffs of their diagonal
/// entry are noise and count as zero. Columns are processed in parallel.
pub fn rp_cholesky<'s, T: Real, M: PsdMatrix<T> + ?Sized>(
    matrix: &M,
    log_scale: Option<&[f64]>,
    options: Options,
    key: StreamKey,
    scratch: &'s Scratch,
) -> Result<PartialCholesky<'s, T>> {
    let power = options.power;
    if power.is_nan() || power <= 0.0 {
        return Err(LinalgError::InvalidParam { name: "power", value: power, expected: "above 0" });
    }
    let rank = options.rank.min(matrix.size());
    let mut state = Factorisation::new(matrix, log_scale, rank, scratch)?;
    let block = options.block_len();
    let stop = options.stop_tol.unwrap_or(if T::ROUNDOFF < 1e-10 { 1e-13 } else { 1e-6 });
    let variant = match options.variant {
        _ if power.is_infinite() => Variant::Simple,
        Some(variant) => variant,
        None if options.rank >= 64 => Variant::Accelerated,
        None => Variant::Simple,
    };
    let mut rounds = 0;
    while state.pivots.len() < rank && state.relative_residual() > stop {
        let round = key.with(rounds as u64);
        rounds += 1;
        let wanted = rank - state.pivots.len();
        match variant {
            Variant::Simple => state.simple_step(matrix, power, round)?,
            Variant::Accelerated => state.accelerated_round(matrix, power, block, wanted, round)?,
            Variant::Block => state.block_round(matrix, power, block, wanted, round)?,
        }
    }
    Ok(state.finish(rounds))
}

/// Computes the partial Cholesky with the given pivots, in their order. A pivot whose residual is gone (a repeated one,
/// for instance) is an error.
pub fn cholesky_with_pivots<'s, T: Real, M: PsdMatrix<T> + ?Sized>(
    matrix: &M,
    pivots: &[usize],
    scratch: &'s Scratch,
) -> Result<PartialCholesky<'s, T>> {
    let mut state = Factorisation::new(matrix, None, pivots.len(), scratch)?;
    for &s in pivots {
        if s >= state.n {
            return Err(LinalgError::Shape { what: "a pivot", expected: state.n, found: s });
        }
        if state.residual[s] <= 0.0 {
            return Err(LinalgError::NotPositiveDefinite { pivot: s });
        }
        state.take_pivot(matrix, s)?;
    }
    Ok(state.finish(pivots.len()))
}
