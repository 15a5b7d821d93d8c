//! Fast orthogonal transforms: Walsh–Hadamard and the real Fourier transform.
//!
//! Both are applied to one row at a time and allocate nothing once built.

mod fft;
mod hadamard;

pub use fft::RealFft;
pub use hadamard::walsh_hadamard_in_place;
