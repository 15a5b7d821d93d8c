//! Hashing, clustering and importance sampling.

pub mod anna;
pub mod block_sparse;
pub mod h2o;
pub mod hyper;
pub mod kdeformer;
pub mod multipole;
pub mod prescored_hyper;
pub mod quest;
pub mod reformer;
pub mod routing;
pub mod sampled_columns;
pub mod smyrf;
pub mod snap;
