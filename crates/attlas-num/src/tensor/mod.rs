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
//! Kolda and Bader (2009) and MATLAB order columns the other way round, $T_{(1)} = A(C * B)^\top$; data in that order
//! is converted on entry, nowhere else. Modes are counted from 0 in code.
//!
//! Tensors hold `f32` or `f64`; decompositions work in `f64` and round their result once. They accept orders 1 to 8 and
//! dimensions of 1 or 0: an empty tensor has norm 0 and is decomposed exactly. Entries that are not finite are refused
//! with [`Error::NotFinite`].
//!
//! ```
//! use attlas_num::tensor::{Tensor, tucker};
//!
//! // T[i, j, k] = (i + 1)(j + 1)(k + 1) has multilinear rank (1, 1, 1).
//! let entry = |flat: usize| ((flat / 6 + 1) * (flat / 2 % 3 + 1) * (flat % 2 + 1)) as f64;
//! let t = Tensor::from_flat_fn(&[4, 3, 2], entry)?;
//! let fit = tucker::decompose(&t, &tucker::Ranks::RelError(1e-8), &tucker::Options::default())?;
//! assert_eq!(fit.tucker.ranks(), [1, 1, 1]);
//! # Ok::<(), attlas_num::tensor::Error>(())
//! ```

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

pub use dense::{MAX_ORDER, Tensor};
pub use error::{Error, Result};
pub use mttkrp::mttkrp;
pub use products::{hadamard, khatri_rao, kronecker, outer};

#[cfg(test)]
mod laws {
    use super::{Tensor, block_terms, cp, known, tucker};
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

        /// Small, empty, flat, sparse and repeated tensors: a finite answer whose error is the stated one, or
        /// an error for parameters out of range.
        #[test]
        fn every_shape_and_rank_gets_a_true_answer_or_an_error(
            shape in prop::collection::vec(0usize..4, 1..5),
            rank in 0usize..4,
            kind in 0u8..3,
            seed in 0u64..1000,
        ) {
            let t = Tensor::from_flat_fn(&shape, |k| match kind {
                0 => known::entry(k, seed),
                1 => f64::from(known::entry(k, seed) > 0.8),
                _ => 2.0,
            }).unwrap();
            let norm = t.norm();
            let check = |model: Tensor<f64>, stated: f64| {
                let squared: f64 = t.data().iter().zip(model.data()).map(|(x, y)| (x - y).powi(2)).sum();
                let found = if norm > 0.0 { squared.sqrt() / norm } else { squared.sqrt() };
                // The stated error comes from a difference of squares down to 1e-6.
                prop_assert!((found - stated).abs() < 1e-9, "{found} against {stated}");
                prop_assert!(stated <= 1.0 + 1e-9);
                Ok(())
            };
            let polyadic = cp::Options { iters: 20, seed, line_search: seed % 2 == 0, ..Default::default() };
            match cp::decompose(&t, rank, &polyadic) {
                Ok(fit) => check(fit.cp.reconstruct().unwrap(), fit.rel_error)?,
                Err(_) => prop_assert!(rank == 0 || !shape.contains(&0)),
            }
            let ranks: Vec<usize> = shape.iter().map(|&n| rank.min(n.max(1))).collect();
            for method in [tucker::Method::Hosvd, tucker::Method::StHosvd, tucker::Method::Hooi] {
                let options = tucker::Options { method, ..Default::default() };
                match tucker::decompose(&t, &tucker::Ranks::Given(ranks.clone()), &options) {
                    Ok(fit) => check(fit.tucker.reconstruct().unwrap(), fit.rel_error)?,
                    Err(_) => prop_assert!(rank == 0),
                }
            }
            let options = block_terms::Options { iters: 10, restarts: 2, seed, ..Default::default() };
            match block_terms::decompose(&t, 2, &ranks, &options) {
                Ok(fit) => check(fit.terms.reconstruct().unwrap(), fit.rel_error)?,
                Err(_) => prop_assert!(rank == 0),
            }
        }
    }
}
