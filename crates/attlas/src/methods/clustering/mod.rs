//! Hashing, clustering and importance sampling.

pub mod anna;
pub mod smyrf;
