//! Ranks and widths that follow from shape and parameters: weights, cache, and the cheaper form.

use super::{Contextual, LAYER, Params, Path};
use crate::layer::{LayerShape, WeightSpec};
use crate::layers::common::{check_own_keys, check_shape, needed};
use crate::{Error, Result};

/// Ranks and widths that follow from shape and parameters.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) s: LayerShape,
    pub(super) p: Params,
    /// Widths of the second and third factor: of queries and keys, and of values. The third is 1 in order 2.
    pub(super) width: (usize, usize),
    pub(super) width_v: (usize, usize),
}

impl Plan {
    pub(super) fn new(s: &LayerShape, p: Params) -> Result<Self> {
        p.validate()?;
        check_shape(s)?;
        check_own_keys(s, ": ranks take the place of groups")?;
        let split = |d: usize| match (p.order, p.d_b) {
            (2, None) => Ok((d, 1)),
            (3, Some(b)) if d.is_multiple_of(b) => Ok((b, d / b)),
            (2, Some(b)) => Err(Error::param("d_b", b, "auto in order 2")),
            (_, b) => Err(Error::param(
                "d_b",
                b.map_or("auto".into(), |b| b.to_string()),
                format!("a divisor of {d} in order 3"),
            )),
        };
        let (width, width_v) = (split(s.d)?, split(s.d_v)?);
        let mut reasons = Vec::new();
        if p.share_b && (p.order == 3 || p.contextual == Contextual::AOnly) {
            reasons.push("share_b needs order = 2 and feature factors that depend on the token".to_string());
        }
        if p.share_b && (s.d != s.d_v || p.rank_k != p.rank_v) {
            reasons.push("share_b needs keys and values of the same width and rank".to_string());
        }
        if let Some(dim) = p.rope_dim
            && (dim > width.0 || !dim.is_multiple_of(2))
        {
            reasons.push(format!("rope_dim = {dim} must be even and at most {}", width.0));
        }
        if reasons.is_empty() {
            return Ok(Self { s: *s, p, width, width_v });
        }
        Err(Error::Unsupported { method: LAYER.id.into(), reasons })
    }

    pub(super) fn rotated(&self) -> usize {
        self.p.rope_dim.unwrap_or(self.width.0)
    }

    pub(super) fn weight_specs(&self) -> Vec<WeightSpec> {
        let (s, p) = (&self.s, &self.p);
        let mut list = vec![needed("o", s.d_model, s.n_heads * s.d_v)];
        if p.kv_only {
            list.push(needed("q", s.n_heads * s.d, s.d_model));
        }
        let (a_in, b_in) = match p.contextual {
            Contextual::Both => (s.d_model, s.d_model),
            Contextual::BOnly => (1, s.d_model),
            Contextual::AOnly => (s.d_model, 1),
        };
        let names = [["a_q", "b_q", "c_q"], ["a_k", "b_k", "c_k"], ["a_v", "b_v", "c_v"]];
        let sides = [(p.rank_q, self.width), (p.rank_k, self.width), (p.rank_v, self.width_v)];
        for (side, (names, (rank, (b, c)))) in names.into_iter().zip(sides).enumerate() {
            if side == 0 && p.kv_only {
                continue;
            }
            list.push(needed(names[0], rank * s.n_heads, a_in));
            if side < 2 || !p.share_b {
                list.push(needed(names[1], rank * b, b_in));
            }
            if p.order == 3 {
                list.push(needed(names[2], rank * c, b_in));
            }
        }
        list
    }

    /// Returns how many numbers a token adds to the cache.
    pub(super) fn cache_elements(&self) -> usize {
        let (s, p) = (&self.s, &self.p);
        let a = if p.contextual == Contextual::BOnly { 0 } else { s.n_heads };
        let feature = |(b, c): (usize, usize)| match (p.contextual, p.order) {
            (Contextual::AOnly, _) => 0,
            (_, 2) => b,
            _ => b + c,
        };
        let values = if p.share_b { 0 } else { feature(self.width_v) };
        p.rank_k * (a + feature(self.width)) + p.rank_v * (a + values)
    }

    /// Returns true if this many new tokens are computed on the factors.
    pub(super) fn on_factors(&self, tokens: usize) -> bool {
        let (s, p) = (&self.s, &self.p);
        let (h, d) = (s.n_heads, s.d);
        match p.path {
            Path::Factors => true,
            Path::Materialised => false,
            Path::Auto => {
                tokens < 8 || (!p.kv_only && p.rank_q * p.rank_k * (d + h) + h * p.rank_v * s.d_v < 2 * h * d)
            }
        }
    }
}
