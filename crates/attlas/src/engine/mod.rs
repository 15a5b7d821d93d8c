//! Engines: computations that several methods share, one module each; no method lives here.
//!
//! | module | computes | used by |
//! |---|---|---|
//! | [`exact_rows`](exact_rows()) | softmax attention over whole groups or given rows | nearly every method |
//! | `block_mask` | blocks of queries over gathered lists of keys | `reformer`, `routing`, `smyrf` |
//! | `sorted_blocks` | block diagonal of hash-sorted rows, with sampled columns | `hyper`, `kdeformer`, `prescored_hyper` |
//! | `hashed_stream` | decoding with old keys sorted by their hash, and samples of the others | `hyper`, `kdeformer` |
//! | `causal` | causal attention as rectangles without a mask | `hyper`, `kdeformer`, `prescored_hyper` |
//! | [`linear`] | linear attention from feature maps: sums, causal prefix, streams | `linear`, `polaformer`, `performer`, `crt`, `hybrid_features`, `scatterbrain` |
//! | [`poly_state`] | powers of inner products, exact tiles and sketched states | `polynomial`, `polysketch`, `tensor_sketch`, `lev`, `gated_linear` |
//! | [`coreset`] | a few weighted keys that represent many | `wildcat`, `lifted_nystrom` |
//! | [`landmarks`], [`pool`] | attention through averaged queries and keys | `nystromformer`, `csalr`, `linformer` |
//! | [`gaussian`] | the Gaussian kernel as an operator | `skyformer`, `lifted_nystrom` |
//! | [`near`] | exact near field around any method, merged by log-sum-exp | every method with a log-sum-exp |
//! | `columns`, `subset`, `tile` | sampled columns, chosen keys, masked tiles | sampling and top-k methods |
//! | `chosen_blocks`, `token_blocks`, `far_field`, `sampled_error` | rows of all heads that share a choice of keys, means of the other keys, the error on sampled rows | `sampled_columns`, `block_sparse`, `multipole` |
//! | `key_pages` | decoding over the best pages of keys, means of the others | `quest`, `block_sparse` |
//! | `cached_rows` | every key and value of a stream | `exact`, `routing`, `sampled_columns`, `prescored_hyper`, `hashed_stream`, `key_pages` |
//! | `evict` | a cache of bounded size | `snap`, `h2o` |
//! | `per_group` | random objects that a plan draws, one per sequence and key head | methods that hash, sketch or project |
//! | `turn` | rows moved along rotary positions | `multipole`, `sink_window` |
//! | `fallback`, [`moments`], `lanes` | rows without keys, running means and covariances, sums in f64 | several |

mod block_mask;
mod cached_rows;
mod causal;
mod chosen_blocks;
mod columns;
pub mod coreset;
mod evict;
mod exact_backward;
mod exact_rows;
mod fallback;
mod far_field;
pub mod gaussian;
mod hashed_stream;
mod key_pages;
pub mod landmarks;
mod lanes;
pub mod linear;
pub mod moments;
pub mod near;
mod per_group;
pub mod poly_state;
pub mod pool;
mod sampled_error;
mod sorted_blocks;
mod subset;
mod tile;
mod token_blocks;
mod turn;

pub use block_mask::{BlockMask, BlockRow, Buckets, Join, attend_buckets};
pub use cached_rows::CachedRows;
pub use causal::{CausalPart, Rectangle, causal_pairs, causal_parts, causal_rectangles, causalize};
pub use chosen_blocks::{NearField, PackedKeys, QueryBlock, Scored, attend_chosen_blocks};
pub use columns::{Columns, divide_by, relative_squares};
pub use evict::Eviction;
pub use exact_backward::exact_backward;
pub use exact_rows::{
    Operands, exact_few_rows, exact_group, exact_group_capped, exact_group_with, exact_on_caller, exact_rows,
    exact_rows_with,
};
pub use fallback::Fallback;
pub use far_field::{Gathered, RunMeans, Slots};
pub use hashed_stream::{HashedRule, HashedStream};
pub use key_pages::{KeyPages, PageRule, PageScore};
pub use lanes::lane_sum;
pub use per_group::PerGroup;
pub use sampled_error::add_sampled_error;
pub use sorted_blocks::{
    Assign, Piece, Ranks, Row, RowSlot, SortHashes, SortedBlocks, SortedRule, UniformSamples, attend_blocks,
    draw_sort_hashes, join_blocks, places,
};
pub use subset::{attend_subset, top_indices};
pub use tile::{CodeIndex, attend_tile};
pub use token_blocks::{TokenBlock, par_token_blocks};
pub use turn::{RopeLayout, Turn};
