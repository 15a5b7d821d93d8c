//! Pieces that several methods need; no method lives here.

mod exact_rows;
pub mod landmarks;
pub mod moments;
pub mod pool;
mod select;
mod subset;

pub use exact_rows::{
    exact_few_rows, exact_group, exact_group_with, exact_rows, exact_scratch_bytes, few_rows_scratch_bytes,
};
pub use select::select_top;
pub use subset::{attend_subset, top_indices};
