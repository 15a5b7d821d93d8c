//! Randomised linear algebra: range finder and SVD of implicit operators, leverage scores, randomly pivoted
//! Cholesky, Nyström approximation, interpolative decompositions, random rotations.
//!
//! Everything random takes a [`StreamKey`](crate::rng::StreamKey) and is a function of it and the input alone.
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

mod interpolative;
mod leverage;
mod lewis;
mod nystrom;
mod operator;
mod rotation;
pub mod rpcholesky;
mod svd;

pub use interpolative::{ColumnId, Cur, column_id, cur};
pub use leverage::{fast_leverage_scores, kernel_leverage_scores, leverage_scores, ridge_leverage_scores};
pub use lewis::{LewisOptions, LewisWeights, gram_leverage_scores, lewis_scratch_bytes, lewis_weights};
pub use nystrom::Nystrom;
pub use operator::{FnOperator, LinearOperator, NormEstimate, Product, operator_norm};
pub use rotation::{gaussian_matrix, haar_orthogonal};
pub use rpcholesky::{GaussianKernel, PartialCholesky, PsdMatrix, cholesky_with_pivots, rp_cholesky};
pub use svd::{RandomizedSvd, randomized_svd, range_finder};
