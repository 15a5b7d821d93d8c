//! Feature maps of rows, in the two forms that do not overflow.
//!
//! A positive map returns $\log \varphi_l(x)$, where $-\infty$ is an exact zero. A signed map returns values
//! $f_l$ and one number $e$ per row with $\varphi_l(x) = e^{e} f_l$. The two sides of a kernel may have
//! different maps, $\kappa(x, y) = \langle \varphi_q(x), \varphi_k(y) \rangle$.
//!
//! Factors that all features of one row share, such as $m^{-1/2}$ or $e^{-\|x\|^2/2}$ of a query, cancel where a row of
//! kernel values is normalised to sum one. [`Constants::Drop`] leaves those out; it is wrong wherever kernel values of
//! different maps are combined. The factor of a *key* re-weights keys and is never dropped.

mod elementwise;
mod exponential;
mod hybrid;
mod pola;
mod trig;

pub use elementwise::{Elementwise, ElementwiseFeatures, Identity};
pub use exponential::{ExpFeatures, ExpParts, Exponent, Moments, SideMoments, optimal_a};
pub use hybrid::{ClusterFeatures, HybridFeatures, HybridWeight};
pub use pola::Pola;
pub use trig::{RandomRelu, Trig};

use super::{SketchError, ensure};
use crate::mat::{MatRef, Real};

/// Argument of the kernel that a row is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// The first argument; rows are normalised over the other one.
    Query,
    /// The second argument.
    Key,
}

/// Treatment of factors that cancel in normalised rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Constants {
    /// Keep them: the features give the kernel itself.
    #[default]
    Keep,
    /// Drop them: the features give the kernel up to a factor per query.
    Drop,
}

/// Options of every map.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MapOptions {
    /// The map sees $\sqrt{\mathrm{scale}}$ times its input on both sides, so that
    /// $\langle x, y \rangle = \mathrm{scale}\,\langle q, k \rangle$.
    pub scale: f64,
    /// Treatment of cancelling factors.
    pub constants: Constants,
}

impl Default for MapOptions {
    fn default() -> Self {
        Self { scale: 1.0, constants: Constants::Keep }
    }
}

impl MapOptions {
    fn validate(&self) -> Result<(), SketchError> {
        ensure(self.scale > 0.0 && self.scale.is_finite(), "scale", self.scale, "positive and finite")
    }

    /// Returns true if factors of a whole row on this side are left out.
    fn drops(&self, side: Side) -> bool {
        self.constants == Constants::Drop && side == Side::Query
    }
}

/// A map to positive features.
pub trait LogFeatures<T: Real>: std::fmt::Debug + Send + Sync {
    /// Returns the length of the rows it takes.
    fn input_dim(&self) -> usize;

    /// Returns the number of features per row.
    fn num_features(&self) -> usize;

    /// Writes the logarithms of the features of every row of `x`, `rows × num_features`. Panics on wrong
    /// shapes.
    fn log_features(&self, x: MatRef<'_, T>, side: Side, out: &mut [T]);

    /// Returns true if [`pull_back`](Self::pull_back) is implemented.
    fn has_gradient(&self) -> bool {
        false
    }

    /// Writes the gradient of $\sum_{il} g_{il} \log \varphi_l(x_i)$ with respect to the rows of `x`, for given $g$,
    /// `rows × num_features`. An exact zero has the gradient 0. Panics on wrong shapes, and if
    /// [`has_gradient`](Self::has_gradient) returns false.
    fn pull_back(&self, x: MatRef<'_, T>, side: Side, g: &[T], dx: &mut [T]) {
        let _ = (x, side, g, dx);
        panic!("{self:?} has no gradient");
    }
}

/// A map to features of either sign.
pub trait SignedFeatures<T: Real>: std::fmt::Debug + Send + Sync {
    /// Returns the length of the rows it takes.
    fn input_dim(&self) -> usize;

    /// Returns the number of features per row.
    fn num_features(&self) -> usize;

    /// Writes the features of every row of `x`, `rows × num_features`, and the logarithm of the factor that multiplies
    /// each row of them. Panics on wrong shapes.
    fn signed_features(&self, x: MatRef<'_, T>, side: Side, out: &mut [T], log_scale: &mut [T]);
}

/// Returns the customary number of random features for rows of length `d`: $d \ln d$, at least 8, rounded up to a
/// multiple of 8.
pub fn default_num_features(d: usize) -> usize {
    let d = d as f64;
    ((d * d.max(1.0).ln() / 8.0).ceil() as usize).max(1) * 8
}

/// Checks the shapes of a call.
fn check_call<T: Real>(x: MatRef<'_, T>, input_dim: usize, out: &[T], num_features: usize) {
    assert_eq!(x.cols(), input_dim, "row length");
    assert_eq!(out.len(), x.rows() * num_features, "rows × features");
}

/// Checks the shapes of a call with scales.
pub(super) fn check_signed_call<T: Real>(
    x: MatRef<'_, T>,
    input_dim: usize,
    out: &[T],
    num_features: usize,
    log_scale: &[T],
) {
    check_call(x, input_dim, out, num_features);
    assert_eq!(log_scale.len(), x.rows(), "one scale per row");
}

/// Returns a finite number as close to `x` as the type allows; NaN stays.
pub(super) fn saturate<T: Real>(x: f64) -> T {
    let largest = match T::DTYPE {
        crate::mat::DType::F32 => f64::from(f32::MAX),
        crate::mat::DType::F64 => f64::MAX,
    };
    if x.is_nan() { T::NAN } else { T::from_f64(x.clamp(-largest, largest)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_number_of_features_is_the_known_one() {
        assert_eq!([1, 2, 64].map(default_num_features), [8, 8, 272]);
    }

    #[test]
    fn saturation_keeps_infinities_out() {
        assert_eq!(saturate::<f32>(1e300), f32::MAX);
        assert_eq!(saturate::<f64>(f64::NEG_INFINITY), f64::MIN);
        assert!(saturate::<f32>(f64::NAN).is_nan());
    }
}
