//! Widths that follow from shape and parameters: weights, cache rows and work.

use super::Params;
use crate::layer::{LayerShape, WeightSpec};
use crate::layers::common::{check_own_keys, check_shape, needed, optional};
use crate::{Error, Result};

/// Widths that follow from shape and parameters.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) d_model: usize,
    pub(super) heads: usize,
    pub(super) rank: usize,
    pub(super) rank_q: Option<usize>,
    /// Unrotated and rotated features of a head, and the width of its values.
    pub(super) nope: usize,
    pub(super) rope: usize,
    pub(super) d_v: usize,
}

impl Sizes {
    pub(super) fn new(s: &LayerShape, p: &Params) -> Result<Self> {
        p.validate()?;
        check_shape(s)?;
        check_own_keys(s, ": the latent takes the place of groups")?;
        let Some(nope) = s.d.checked_sub(p.rope_dim) else {
            return Err(Error::param("rope_dim", p.rope_dim, format!("at most the head width {}", s.d)));
        };
        Ok(Self {
            d_model: s.d_model,
            heads: s.n_heads,
            rank: p.rank,
            rank_q: p.rank_q,
            nope,
            rope: p.rope_dim,
            d_v: s.d_v,
        })
    }

    /// Returns the width of queries and keys of a head.
    pub(super) fn d(&self) -> usize {
        self.nope + self.rope
    }

    /// Returns how many numbers are cached per token.
    pub(super) fn row(&self) -> usize {
        self.rank + self.rope
    }

    pub(super) fn weight_specs(&self) -> Vec<WeightSpec> {
        let queries = self.heads * self.d();
        let mut list = match self.rank_q {
            Some(r) => {
                vec![needed("q_a", r, self.d_model), optional("q_a_norm", r, 1), needed("q_b", queries, r)]
            }
            None => vec![needed("q", queries, self.d_model)],
        };
        list.extend([
            needed("kv_a", self.row(), self.d_model),
            optional("kv_a_norm", self.rank, 1),
            needed("kv_b", self.heads * (self.nope + self.d_v), self.rank),
            needed("o", self.d_model, self.heads * self.d_v),
        ]);
        list
    }

    /// Counts multiply-adds of a head: expanded, absorbed; `pairs` counts the pairs of a query and a visible key.
    pub(super) fn work(&self, n_q: u64, n_k: u64, pairs: u64) -> (u64, u64) {
        let rebuild = (self.rank * (self.nope + self.d_v)) as u64;
        let expanded = n_k * rebuild + pairs * (self.d() + self.d_v) as u64;
        (expanded, n_q * rebuild + pairs * (2 * self.rank + self.rope) as u64)
    }
}
