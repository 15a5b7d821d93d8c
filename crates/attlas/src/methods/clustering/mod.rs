//! Hashing, clustering and importance sampling.

pub mod anna;
pub mod hyper;
pub mod multipole;
pub mod reformer;
pub mod routing;
pub mod smyrf;
