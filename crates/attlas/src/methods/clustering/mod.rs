//! Hashing, clustering and importance sampling.

pub mod anna;
pub mod hyper;
pub mod kdeformer;
pub mod prescored_hyper;
pub mod smyrf;
