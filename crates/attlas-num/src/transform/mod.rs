//! Fast orthogonal transforms: Walsh–Hadamard and the real Fourier transform.
//!
//! Both are applied to one row at a time and allocate nothing once built.
//!
//! ```
//! use attlas_num::transform::walsh_hadamard_in_place;
//!
//! let mut x = [1.0, 0.0, 1.0, 0.0];
//! walsh_hadamard_in_place(&mut x);
//! assert_eq!(x, [2.0, 2.0, 0.0, 0.0]);
//! ```

mod fft;
mod hadamard;

pub use fft::RealFft;
pub use hadamard::walsh_hadamard_in_place;
