//! Grouping: balanced blocks of sorted items, who shared a block with whom, the best within a budget, and k-means.

pub mod best;
pub mod buckets;
pub mod kmeans;

pub use best::{Counts, Cut};
pub use buckets::{Balanced, Membership, RoundTable, SortKey, inverse_order, order_by};
pub use kmeans::{Clustering, Init, Metric, Options, kmeans};
