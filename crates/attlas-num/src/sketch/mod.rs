//! Sketches, random directions and feature maps: finite vectors whose inner products are, or estimate, a
//! kernel.
//!
//! A *feature map* $\varphi$ turns a row $x \in \mathbb{R}^d$ into $m$ numbers with
//! $\langle \varphi(x), \varphi(y) \rangle \approx \kappa(x, y)$. Positive features are returned as logarithms
//! ([`LogFeatures`]), others as values with one logarithmic scale per row ([`SignedFeatures`]). Neither form overflows
//! for large rows.
//!
//! * [`directions`]: the random directions behind most maps, independent or coupled.
//! * [`features`]: maps for the exponential kernel $e^{\langle x, y\rangle}$ and elementwise maps.
//! * [`polynomial`]: exact and sketched features of $\langle x, y\rangle^p$.
//! * [`variance`]: closed forms of the variance of every estimator here, and what follows from them: the
//!   predicted error and the number of features that an error needs.
//!
//! Everything random is drawn in f64 from a [`StreamKey`](crate::rng::StreamKey) and rounded once.
//!
//! ```
//! use attlas_num::sketch::features::{ExpFeatures, Exponent};
//! use attlas_num::sketch::{Coupling, LogFeatures, MapOptions, Side, draw_directions};
//! use attlas_num::{MatRef, rng::StreamKey};
//!
//! // Positive random features: their products estimate exp(⟨x, y⟩).
//! let directions = draw_directions(Coupling::Orthogonal, 512, 2, StreamKey::new(1))?;
//! let map = ExpFeatures::<f64>::new(&Exponent::favor(2), &directions, true, MapOptions::default())?;
//! let mut log = [vec![0.0; map.num_features()], vec![0.0; map.num_features()]];
//! map.log_features(MatRef::new(&[0.5, 0.0], 1, 2), Side::Query, &mut log[0]);
//! map.log_features(MatRef::new(&[0.3, 0.4], 1, 2), Side::Key, &mut log[1]);
//! let kernel: f64 = log[0].iter().zip(&log[1]).map(|(a, b)| (a + b).exp()).sum();
//! assert!((kernel / 0.15f64.exp() - 1.0).abs() < 0.1);
//! # Ok::<(), attlas_num::sketch::SketchError>(())
//! ```

pub mod directions;
pub mod features;
mod haar;
pub mod polynomial;
mod project;
#[cfg(test)]
mod testing;
pub mod variance;

pub use directions::{Coupling, draw_directions};
pub use features::{Constants, LogFeatures, MapOptions, Side, SignedFeatures};

/// Reason why a sketch or a feature map could not be built.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SketchError {
    /// A parameter is outside its range.
    #[error("{name} = {value}; expected {expected}")]
    InvalidParam {
        /// The parameter.
        name: &'static str,
        /// The value given.
        value: f64,
        /// Accepted values.
        expected: &'static str,
    },
    /// Two sizes that must agree do not.
    #[error("{what}: expected {expected}, found {found}")]
    Shape {
        /// The size in question.
        what: &'static str,
        /// The expected size.
        expected: usize,
        /// The size found.
        found: usize,
    },
}

/// Checks a parameter.
fn ensure(ok: bool, name: &'static str, value: f64, expected: &'static str) -> Result<(), SketchError> {
    if ok { Ok(()) } else { Err(SketchError::InvalidParam { name, value, expected }) }
}

/// Checks a size.
fn ensure_size(what: &'static str, expected: usize, found: usize) -> Result<(), SketchError> {
    if expected == found { Ok(()) } else { Err(SketchError::Shape { what, expected, found }) }
}
