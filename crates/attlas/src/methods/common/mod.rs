//! Pieces that several methods need; no method lives here.

mod exact_rows;
mod fallback;
mod meeting;
mod subset;
mod tile;
#[cfg(test)]
pub mod workloads;

pub use exact_rows::{exact_group, exact_group_with, exact_rows, exact_scratch_bytes};
pub use fallback::Fallback;
pub use meeting::{Join, Meeting, Round, attend_round, round_scratch_len};
pub use subset::{attend_subset, top_indices};
pub use tile::{CodeIndex, attend_tile, tile_logits_len};
