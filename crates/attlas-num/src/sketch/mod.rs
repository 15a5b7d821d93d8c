//! Sketches, random directions and feature maps: finite vectors whose inner products are, or estimate, a
//! kernel.
//!
//! A *feature map* $\varphi$ turns a row $x \in \mathbb{R}^d$ into $m$ numbers with
//! $\langle \varphi(x), \varphi(y) \rangle \approx \kappa(x, y)$. Where the numbers are positive they are
//! returned as logarithms ([`LogFeatures`]); otherwise as values with one logarithmic scale per row
//! ([`SignedFeatures`]). Neither form overflows for large rows.
//!
//! * [`directions`]: the random directions behind most maps, independent or coupled.
//! * [`features`]: maps for the exponential kernel $e^{\langle x, y\rangle}$ and elementwise maps.
//! * [`polynomial`]: exact and sketched features of $\langle x, y\rangle^p$.
//! * [`linear`]: linear sketches $S$ with $\langle Sx, Sy \rangle \approx \langle x, y \rangle$.
//! * [`variance`]: closed forms of the variance of every estimator here, and what follows from them: the
//!   predicted error and the number of features that an error needs.
//!
//! Everything random is drawn in f64 from a [`StreamKey`](crate::rng::StreamKey) and rounded once.
//!
//! ```
//! use attlas_num::rng::StreamKey;
//! use attlas_num::sketch::linear::{GaussianSketch, LinearSketch};
//!
//! let sketch = GaussianSketch::<f64>::new(1000, 400, StreamKey::new(1))?;
//! let x = vec![1.0; 1000];
//! let mut short = vec![0.0; 400];
//! sketch.apply_into(&x, &mut short);
//! let ratio = short.iter().map(|s| s * s).sum::<f64>() / 1000.0;
//! assert!((ratio - 1.0).abs() < 0.3, "lengths are kept up to a factor near one");
//! # Ok::<(), attlas_num::sketch::SketchError>(())
//! ```

pub mod directions;
pub mod features;
pub mod linear;
pub mod polynomial;
mod project;
mod small;
#[cfg(test)]
mod testing;
pub mod variance;

pub use directions::{Coupling, draw_directions};
pub use features::{Constants, LogFeatures, MapOptions, Side, SignedFeatures};

/// Why a sketch or a feature map could not be built.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SketchError {
    /// A parameter is outside its range.
    #[error("{name} = {value}; expected {expected}")]
    InvalidParam {
        /// The parameter.
        name: &'static str,
        /// What was given.
        value: f64,
        /// What would have been accepted.
        expected: &'static str,
    },
    /// Two sizes that must agree do not.
    #[error("{what}: expected {expected}, found {found}")]
    Shape {
        /// The size in question.
        what: &'static str,
        /// What it should be.
        expected: usize,
        /// What it is.
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
