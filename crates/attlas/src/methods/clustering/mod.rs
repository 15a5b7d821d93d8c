//! Hashing, clustering and importance sampling.

pub mod anna;
pub mod hyper;
pub mod kdeformer;
pub mod multipole;
pub mod prescored_hyper;
pub mod reformer;
pub mod routing;
pub mod smyrf;
