//! Grouping: balanced blocks of sorted items, pairs that share a block, the best within a budget, and k-means.
//!
//! ```
//! use attlas_num::cluster::{Init, Options, kmeans};
//! use attlas_num::{Mat, rng::StreamKey};
//!
//! // Two groups of points on a line.
//! let x = Mat::from_vec(vec![0.0, 0.1, 0.2, 9.0, 9.1], 5, 1);
//! let found = kmeans(x.as_ref(), None, Options::new(2), Init::PlusPlus, StreamKey::new(1));
//! assert_eq!(found.labels[0], found.labels[2]);
//! assert_ne!(found.labels[0], found.labels[4]);
//! ```

pub mod best;
pub mod buckets;
pub mod kmeans;

pub use best::{Counts, Cut, select_top};
pub use buckets::{Balanced, Membership, RoundTable, SortKey, inverse_order, order_by};
pub use kmeans::{Clustering, Init, Metric, Options, kmeans};
