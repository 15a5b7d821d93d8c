//! Numerical tools behind [attlas](https://docs.rs/attlas): SIMD kernels, matrix views, seeded random streams, and
//! randomised linear algebra. No tool depends on an attention method; each is useful on its own.

pub mod cluster;
pub mod hash;
pub mod kernels;
pub mod linalg;
pub mod mat;
pub mod randla;
pub mod rng;
pub mod rope;
pub mod scratch;
pub mod sketch;
pub mod tensor;
pub mod transform;

pub use kernels::par;
pub use mat::{DType, Mat, MatRef, Real};
pub use scratch::{Buf, Scratch};
