//! Locality-sensitive hashing, weighted sampling, and sums of exponentials estimated with both.
//!
//! A hash family draws random functions $h$ such that $\Pr[h(x) = h(y)]$ falls with the distance of $x$ and $y$. This
//! module has three families, each with its collision law in closed form where one exists:
//!
//! | type | distance | collision probability |
//! |---|---|---|
//! | [`CrossPolytope`] | angle $\theta$ | decreasing; $1 - \theta/\pi$ with two buckets |
//! | [`SignHash`] | angle $\theta$ | $(1 - \theta/\pi)^r$ for $r$ bits |
//! | [`PStable`] | Euclidean $c$ | [`stable::collision_probability`]$^t$ for $t$ functions |
//!
//! [`lift`] turns inner products into distances for projections on a line, [`sample`] draws by weight, and
//! [`kde`] estimates $\ln \sum_j x_j e^{\langle q, k_j\rangle}$.
//!
//! All families draw the functions of round $r$ from `key.with(r)`: a hash with more rounds begins with the
//! rounds of one with fewer. Directions are drawn in f64 and rounded once, so f32 and f64 codes differ only
//! for points within rounding of a boundary.
//!
//! ```
//! use attlas_num::hash::SignHash;
//! use attlas_num::{Mat, rng::StreamKey};
//!
//! let hash = SignHash::<f64>::new(StreamKey::new(1), 3, 8, 1).unwrap(); // 8 bits, one round
//! let x = Mat::from_vec(vec![1.0, 2.0, 3.0, 2.0, 4.0, 6.0], 2, 3);
//! let ranks = hash.gray_ranks(x.as_ref(), 0);
//! assert_eq!(ranks[0], ranks[1], "the code depends on the direction alone");
//! ```

pub mod kde;
pub mod lift;
mod polytope;
mod project;
pub mod sample;
pub mod sign;
pub mod stable;

pub use polytope::{CrossPolytope, factor_buckets};
pub(crate) use project::{directions, project_columns, project_tiles, squared_distance, squared_norm};
pub use sign::SignHash;
pub use stable::PStable;

use crate::{MatRef, Real};

/// A family of hash functions drawn for a fixed number of rounds.
///
/// Rows with a NaN get the code that the family documents, never a panic.
pub trait Lsh<T: Real> {
    /// Code of a row; equal codes are a collision.
    type Code: Copy + Ord + Default + std::fmt::Debug;

    /// Length of the rows that are hashed.
    fn dim(&self) -> usize;

    /// Number of independent functions.
    fn rounds(&self) -> usize;

    /// Codes of all rows of `x` under the function of `round`.
    ///
    /// # Panics
    /// If `x` is not `out.len() × dim`, or `round` is not below [`rounds`](Self::rounds).
    fn codes_into(&self, x: MatRef<'_, T>, round: usize, out: &mut [Self::Code]);

    /// As [`codes_into`](Self::codes_into), in a new vector.
    fn codes(&self, x: MatRef<'_, T>, round: usize) -> Vec<Self::Code> {
        let mut out = vec![Self::Code::default(); x.rows()];
        self.codes_into(x, round, &mut out);
        out
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use crate::rng::StreamKey;
    use crate::{Mat, Real};

    /// Standard normal rows.
    pub(crate) fn gaussian<T: Real>(seed: u64, rows: usize, cols: usize) -> Mat<T> {
        let mut m = Mat::zeros(rows, cols);
        StreamKey::new(seed).named("test rows").rng().fill_normal(m.data_mut());
        m
    }

    /// Two vectors of `d ≥ 2` entries, of lengths 1 and `length`, at the angle `theta`.
    pub(crate) fn pair_at_angle(d: usize, theta: f64, length: f64) -> Mat<f64> {
        let mut m = Mat::zeros(2, d);
        m[(0, 0)] = 1.0;
        m[(1, 0)] = length * theta.cos();
        m[(1, d - 1)] = length * theta.sin();
        m
    }

    /// Asserts that `hits` of `trials` agrees with the probability `p` to five standard errors.
    #[track_caller]
    pub(crate) fn assert_frequency(hits: usize, trials: usize, p: f64) {
        let se = (p * (1.0 - p) / trials as f64).sqrt();
        let seen = hits as f64 / trials as f64;
        assert!((seen - p).abs() <= 5.0 * se, "{seen} instead of {p}, standard error {se}");
    }

    /// Asserts that the mean of `values` is `truth` to five of its standard errors.
    #[track_caller]
    pub(crate) fn assert_mean(values: &[f64], truth: f64) {
        let n = values.len() as f64;
        let mean = values.iter().sum::<f64>() / n;
        let var = values.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / (n - 1.0);
        let se = (var / n).sqrt();
        assert!((mean - truth).abs() <= 5.0 * se, "mean {mean} instead of {truth}, standard error {se}");
    }
}
