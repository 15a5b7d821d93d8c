//! Hashing, clustering and importance sampling.

pub mod anna;
pub mod hyper;
pub mod smyrf;
