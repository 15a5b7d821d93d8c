//! Key compression: a few weighted keys that represent many, and everything a method needs around them.
//!
//! A [`Coreset`] of keys $k_1, \dots, k_n$ with values $v_j$ holds keys $k_s$ with rows $[V_s \mid w_s]$ so that
//! $\sum_s e^{\beta q^\top k_s} [V_s \mid w_s] \approx \sum_j e^{\beta q^\top k_j} [v_j \mid 1]$ for every query. The
//! weights may be negative, so they cannot be logit biases. Instead they become additional columns of the values: the
//! exact kernel gives softmax averages of $[V \mid w \mid |w|]$, these averages over disjoint keys merge by log-sum-exp
//! as usual, and at the end the first columns are divided by that of $w$. Uncompressed tokens have $[v \mid 1 \mid 1]$.
//! The last column is the size of the sum before cancellation: a denominator far below it is noise, and a [`Fallback`]
//! gives the row.
//!
//! [`BlockCausal`] makes a causal method of any [`CompressKeys`]: queries see the keys of their own block exactly and
//! the coresets of all earlier, complete blocks, each compressed once. With `tree`, coresets of equally many blocks are
//! joined and compressed again, so a query sees logarithmically many of them. The form is strictly causal by
//! construction: all compressed keys lie before every query that sees them, and blocks share nothing. [`CoresetStream`]
//! does the same token by token, or compresses the first tokens once.
//!
//! | file | contents |
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

/// Target size of a compression.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Keys to keep in all.
    pub rank: usize,
    /// Contiguous parts that are compressed separately.
    pub bins: usize,
}

/// A way to compress keys.
pub trait CompressKeys: Clone + Debug + Send + Sync + 'static {
    /// Compresses keys for attention with the logits `scale · qᵀk`. Never fails: if compression does, it returns all
    /// keys unchanged.
    fn compress<T: Real>(
        &self,
        keys: MatRef<'_, T>,
        values: Values<'_, T>,
        size: Size,
        scale: f64,
        stream: StreamKey,
        cx: Context<'_>,
    ) -> Coreset<T>;

    /// Returns the default size for `n` keys.
    fn size(&self, n: usize) -> Size;
}
