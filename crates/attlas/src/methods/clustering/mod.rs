//! Hashing, clustering and importance sampling.

pub mod hyper;
pub mod kdeformer;
