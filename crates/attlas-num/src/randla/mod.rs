//! Randomised linear algebra: range finder and SVD of implicit operators, Lewis weights, randomly pivoted
//! Cholesky.
//!
//! Every random routine takes a [`StreamKey`](crate::rng::StreamKey) and depends only on it and the input.
//!
//! ```
//! use attlas_num::randla::{RandomizedSvd, randomized_svd};
//! use attlas_num::{Mat, rng::StreamKey};
//!
//! // A matrix of rank one.
//! let a = Mat::from_fn(40, 30, |i, j| (i as f64 + 1.0) * (j as f64 + 1.0));
//! let f = randomized_svd(&a, RandomizedSvd::rank(2), StreamKey::new(1))?;
//! assert!(f.sigma[1] < 1e-10 * f.sigma[0]);
//! # Ok::<(), attlas_num::linalg::LinalgError>(())
//! ```

use crate::rng::Rng;
use crate::{Mat, Real};

mod leverage;
mod lewis;
mod operator;
pub mod rpcholesky;
mod svd;

pub use lewis::{LewisOptions, LewisWeights, lewis_weights};
pub use operator::{FnOperator, LinearOperator, NormEstimate, Product, operator_norm};
pub use rpcholesky::{GaussianKernel, PartialCholesky, PsdMatrix, cholesky_with_pivots, rp_cholesky};
pub use svd::{RandomizedSvd, randomized_svd, range_finder};

/// Draws independent standard normal entries row by row.
fn gaussian_matrix<T: Real>(rng: &mut Rng, rows: usize, cols: usize) -> Mat<T> {
    let mut g = Mat::zeros(rows, cols);
    rng.fill_normal(g.data_mut());
    g
}
