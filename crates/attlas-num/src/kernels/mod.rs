//! Hot loops, and the only room where `unsafe` lives.

/// What the kernels need of an element type; implemented for `f32` and `f64` only.
pub trait Element {}
impl Element for f32 {}
impl Element for f64 {}

pub mod quant;
