//! Pieces that several methods need; no method lives here.

mod always;
mod causal;
mod columns;
pub mod coreset;
mod exact_rows;
mod fallback;
pub mod gaussian;
pub mod landmarks;
mod lanes;
pub mod linear;
mod meeting;
pub mod moments;
pub mod poly_state;
pub mod pool;
mod select;
mod sinks;
mod sorted_blocks;
mod subset;
mod tile;

pub use always::{ALWAYS_LEAKS, FirstKeys, always_leaks};
pub use causal::{Joining, Part, causal_pairs, causal_parts, causal_scratch_bytes, causalize};
pub use columns::{Columns, divide_by, relative_squares};
pub use exact_rows::{
    Operands, exact_few_rows, exact_group, exact_group_with, exact_rows, exact_rows_with,
    exact_scratch_bytes, few_rows_scratch_bytes,
};
pub use fallback::Fallback;
pub use lanes::lane_sum;
pub use meeting::{BlockRow, Join, Meeting, Round, attend_round, round_scratch_len};
pub use select::{Threshold, select_top};
pub use sinks::{sinks_scratch_bytes, with_sinks};
pub use sorted_blocks::{
    Assign, Piece, Place, Ranks, Row, SortedBlocks, UniformSamples, attend_blocks, blocks_scratch_bytes,
    join_blocks, places,
};
pub use subset::{attend_subset, top_indices};
pub use tile::{CodeIndex, attend_tile, tile_logits_len};
