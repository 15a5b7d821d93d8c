//! Dense tensors and their decompositions: canonical polyadic ([`cp`]), Tucker ([`tucker`]) and block
//! terms ([`block_terms`]).
//!
//! **One unfolding convention.** Storage is row-major, the last index contiguous. The mode-$n$ unfolding
//! $T_{(n)}$ has index $n$ as its row; its columns run over the remaining modes in increasing order, the
//! last one fastest (the order of NumPy and TensorLy). The unfolding of the first mode is then the buffer
//! itself, and with $*$ the column-wise Kronecker (Khatri–Rao) product
//! $$T = [\![\lambda; A, B, C]\!]:\quad T_{(1)} = A\Lambda(B * C)^\top,\quad T_{(2)} = B\Lambda(A * C)^\top,
//! \quad T_{(3)} = C\Lambda(A * B)^\top,$$
//! $$T = G \times_1 A \times_2 B \times_3 C:\quad T_{(1)} = A\,G_{(1)}(B \otimes C)^\top,\quad
//! \operatorname{vec} T = (A \otimes B \otimes C)\operatorname{vec} G.$$
//! Kolda and Bader (2009) and MATLAB order columns the other way round, $T_{(1)} = A(C * B)^\top$; data in
//! that order is converted where it enters, nowhere else. Modes are counted from 0 in code.
//!
//! Tensors hold `f32` or `f64`; decompositions work in `f64` and round their answer once. Orders 1 to 8 are
//! accepted, and dimensions of 1 or 0: an empty tensor has norm 0 and is decomposed exactly. Entries that
//! are not finite are refused with [`Error::NotFinite`].

pub mod block_terms;
pub mod cp;
pub mod curve;
mod dense;
mod error;
#[cfg(test)]
mod golden;
pub mod known;
mod mttkrp;
mod products;
mod small;
pub mod tucker;

pub use dense::{MAX_ORDER, Tensor, TensorRef};
pub use error::{Error, Result};
pub use mttkrp::mttkrp;
pub use products::{hadamard, khatri_rao, kronecker, outer};
