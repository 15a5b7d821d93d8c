//! Key compression: few weighted keys that stand for many, and everything a method needs around them.
//!
//! A [`Coreset`] of keys $k_1, \dots, k_n$ with values $v_j$ holds keys $k_s$ with rows $[V_s \mid w_s]$ so that
//! $\sum_s e^{\beta q^\top k_s} [V_s \mid w_s] \approx \sum_j e^{\beta q^\top k_j} [v_j \mid 1]$ for every query. The
//! weights may be negative, so they cannot be logit biases. Instead they travel as further columns of the values:
//! the exact kernel gives softmax averages of $[V \mid w \mid |w|]$, such averages over disjoint keys merge by
//! log-sum-exp like any others, and at the end the first columns are divided by that of $w$. Exact tokens carry
//! $[v \mid 1 \mid 1]$. The last column is the size of the sum before cancellation: a denominator far below it is noise,
//! and the row is answered by a [`Fallback`].
//!
//! [`BlockCausal`] makes a causal method of any [`CompressKeys`]: queries see the keys of their own block exactly
//! and the coresets of all earlier, complete blocks, each compressed once. With `tree`, coresets of equally many
//! blocks are joined and compressed again, so that a query sees logarithmically many of them. Strictly causal by
//! construction: what is compressed lies before every query that sees it, and nothing is shared between blocks.
//! [`CoresetStream`] is the same token by token, or compresses the first tokens it is given once.
//!
//! | file | what it holds |
//! | --- | --- |
//! | `weighted` | keys with weights, and values before and after compression |
//! | `attend` | rows over a coreset: averages, their division, rows whose denominator cancelled |
//! | `blocks` | the causal form: coresets of complete blocks, the own block exactly |
//! | `stand_ins` | coresets as plain numbers, for keys on several processes |
//! | `stream` | the same token by token, or a prefix compressed once |

mod attend;
mod blocks;
mod stand_ins;
mod stream;
mod weighted;

pub use attend::{Fallback, Finish, ValueRange, attend_coreset};
pub use blocks::BlockCausal;
pub use stand_ins::{attend_stand_ins, stand_ins};
pub use stream::{Cache, CacheMode, CoresetStream, Prefix};
pub use weighted::{Coreset, Values};

use crate::Real;
use crate::workspace::Context;
use attlas_num::MatRef;
use attlas_num::rng::StreamKey;
use std::fmt::Debug;

/// How far to compress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Keys to keep in all.
    pub rank: usize,
    /// Contiguous parts to compress apart from each other.
    pub bins: usize,
}

/// A way to compress keys.
pub trait CompressKeys: Clone + Debug + Send + Sync + 'static {
    /// Compresses keys for attention with the logits `scale · qᵀk`. Whatever goes wrong, an answer is given, if
    /// need be all the keys as they are.
    fn compress<T: Real>(
        &self,
        keys: MatRef<'_, T>,
        values: Values<'_, T>,
        size: Size,
        scale: f64,
        stream: StreamKey,
        cx: Context<'_>,
    ) -> Coreset<T>;

    /// How far `n` keys are compressed by default.
    fn size(&self, n: usize) -> Size;
}
