//! Grouping: balanced blocks of sorted items, who shared a block with whom, and k-means.

pub mod buckets;
pub mod kmeans;

pub use buckets::{Balanced, Membership, RoundTable, SortKey, inverse_order, order_by};
pub use kmeans::{Clustering, Init, Metric, Options, kmeans};
