//! Pieces that several methods need; no method lives here.

mod exact_rows;
pub mod linear;
mod subset;

pub use exact_rows::{exact_group, exact_group_with, exact_rows, exact_scratch_bytes};
pub use subset::{attend_subset, top_indices};
