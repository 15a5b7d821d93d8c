//! Grouped-query layers as latent attention: one cached latent for all key heads, one shared rotated key.
//!
//! **Idea.** All keys and values of a token together form a latent, from which fixed matrices select those of each
//! head. A change of basis that commutes with rotary positions concentrates the keys' energy in one narrow rotated key;
//! the rest loses its rotation and is projected to the few dimensions that hold the energy of calibration text.
//!
//! **Math.** With $T$ the orthogonal basis of [`Rotation`], $k' = T^\top k$: the first $d_R$ features stay rotated, the
//! others, $k'_N$, are not. $y = [P_K k'_N/\alpha;\ P_V v]$ has second moments $R \Lambda R^\top$ over calibration
//! tokens; the latent is $R_r^\top y$, keys are rebuilt by $\alpha T_h^N P_K^{-1} R_{K}$ and values by $P_V^{-1} R_V$.
//! `pca = functional` takes $P_K^2 = \sum_h T_h^{N\top} (\sum q_h q_h^\top) T_h^N$, which measures errors of keys as errors
//! of scores, and $P_V^2 = \sum_h W_{O,h}^\top W_{O,h}$ by groups, which measures those of values after the output
//! projection; `activation` takes the identity. $\alpha$ is the ratio of the mean column norms of the two parts.
//! Queries of head $h$ become $\gamma[q_h; T_h^{R\top} q_h]$, $\gamma = \sqrt{(d + d_R)/d}$, because the latent layer
//! divides scores by $\sqrt{d + d_R}$; their latent compresses $q - b$, and the bias $b$ stays uncompressed.
//!
//! **Reference.** meng2025transmla; the complex basis and the functional metric are this project's. Errata of the
//! survey's appendix are followed: rotations of column vectors, mixtures over folded frequencies with their cross terms,
//! balanced weights on both sides.
//!
//! **Cost.** Eigenproblems of $GF$ (twice that for the complex basis) for each group of frequencies and of
//! $G(d + d_v) - d_R$ once, all in double precision. The new layer caches $r + d_R$ numbers instead of $G(d + d_v)$.
//!
//! **Guarantees.** Every [`Stage`] is available separately. Exact up to rounding: `merged`, `rotated` with `fold = 1`,
//! and going from `partial_rope` to `balanced`; tested here. [`Figures`] report every other loss.
//!
//! **When to use.** To shrink the cache of a trained model slightly without training: quality falls quickly.

mod assemble;
mod calibration;
mod converted;
mod cut;
mod plan;
mod rotation;
#[cfg(test)]
mod tests;

pub use calibration::Calibration;
pub use converted::Converted;
pub use rotation::{Rotation, Widths};

use crate::conversions::{Conversion, Run};
use crate::layer::{Dense, LayerShape};
use crate::{Mat, Result};
use assemble::assemble;
use attlas_num::rope::{Layout, Rope, Scaling};
use cut::Cut;
use plan::{Plan, narrow_rope};

/// Registry entry.
pub static CONVERSION: Conversion = Conversion {
    id: "mla",
    title: "Grouped-query attention as latent attention (TransMLA)",
    reference: "meng2025transmla",
    params: Params::SPECS,
    from: "grouped_query",
    to: "latent",
    reads_text: true,
    run: Run::Latents,
};

crate::choices! {
    /// Basis in which part of the keys loses its rotation.
    pub enum Rotate {
        /// Unitary mixtures of key heads, which concentrate the most energy.
        Complex = "complex",
        /// Orthogonal mixtures of key heads, as published.
        Real = "real",
        /// The unchanged features of key head 0.
        None = "none",
    }
}

crate::choices! {
    /// Metric of the low-rank error.
    pub enum Metric {
        /// Keys by their effect on scores, values by their effect on outputs.
        Functional = "functional",
        /// Keys and values as vectors, as published.
        Activation = "activation",
        /// Weights alone, without calibration tokens.
        Weight = "weight",
    }
}

crate::params! {
    /// Parameters of [`convert`].
    pub struct Params {
        /// Width of the shared rotated key; divides the head width. Auto is 64, or the head width if that is less.
        rope_dim: Option<usize> = None, in 2..=1 << 20;
        /// Number of neighbouring frequencies that are mixed: a multiple of head width / rope_dim that divides half the
        /// head width. Auto is 2, or the smallest allowed value if that is more.
        fold: Option<usize> = None, in 1..=1 << 20;
        /// Width of the latent, at most n_kv_heads · (d + d_v) − rope_dim. Auto leaves three quarters of the cache.
        rank: Option<usize> = None, in 1..=1 << 20;
        /// Width of a latent of queries; auto is none.
        rank_q: Option<usize> = None, in 1..=1 << 20;
        /// Weight of keys against values in the low rank: below 1 favours values, 0 turns balancing off.
        balance: f64 = 1.0, in 0.0..=1e6;
        /// Basis in which part of the keys loses its rotation.
        rotate: Rotate = Rotate::Complex;
        /// Metric of the low-rank error.
        pca: Metric = Metric::Functional;
    }
}

/// Stage of a conversion; each stage includes the earlier ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// One latent for all key heads, everything rotated as before: exact, without savings.
    Merged,
    /// The new basis, with everything still rotated: exact without folding.
    Rotated,
    /// Rotation of the shared key only; nothing is cut.
    PartialRope,
    /// Keys and values in the full basis of the low rank: the same function as before.
    Balanced,
    /// The latent cut to its rank.
    LowRank,
    /// A latent for queries as well.
    LowRankQueries,
}

impl Stage {
    /// All stages, in order.
    pub const ALL: [Stage; 6] =
        [Self::Merged, Self::Rotated, Self::PartialRope, Self::Balanced, Self::LowRank, Self::LowRankQueries];

    /// Returns its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Merged => "merged",
            Self::Rotated => "rotated",
            Self::PartialRope => "partial_rope",
            Self::Balanced => "balanced",
            Self::LowRank => "low_rank",
            Self::LowRankQueries => "low_rank_queries",
        }
    }
}

/// A grouped-query layer: projections without norms between them and the rotation.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    /// Its sizes.
    pub shape: LayerShape,
    /// Queries.
    pub q: &'a Dense,
    /// Keys.
    pub k: &'a Dense,
    /// Values.
    pub v: &'a Dense,
    /// Output.
    pub o: &'a Dense,
    /// Rotary positions over the whole head, if there are any.
    pub rope: Option<&'a Rope>,
}

/// Energy kept and lost by a conversion.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Figures {
    /// Share of the keys' energy that is still rotated.
    pub kept_energy: f64,
    /// Divisor of keys before the low rank.
    pub alpha: f64,
    /// Relative error of keys and values in the metric of the low rank, $\sqrt{1 - \sum_{j<r} \lambda_j / \sum \lambda_j}$.
    pub rel_error: f64,
    /// The same error for queries.
    pub query_error: f64,
}

/// Converts a layer to latent form, up to `stage`. The low rank comes from `calibration` or, if given, from `again`:
/// moments of the same projections on the hidden states of the model at [`Stage::PartialRope`], as its authors take
/// them.
pub fn convert(
    source: &Source<'_>,
    params: &Params,
    stage: Stage,
    calibration: &Calibration,
    again: Option<&Calibration>,
) -> Result<Converted> {
    params.validate()?;
    let plan = Plan::new(source, params)?;
    let second = again.unwrap_or(calibration);
    for c in [calibration, second] {
        plan.check(source, c, stage)?;
    }
    let s = source.shape;
    let (wk, wv) = (s.n_kv_heads * s.d, s.n_kv_heads * s.d_v);
    let Some(rope) = source.rope else {
        // Without rotation, every stage up to the low rank is the same.
        let all = Mat::identity(wk);
        let none = Mat::zeros(wk, 0);
        let cut = if stage < Stage::Balanced {
            Cut::whole(&all, wv)
        } else {
            Cut::new(source, &plan, params, stage, &all, second)?
        };
        return assemble(source, &plan, params, stage, &none, Some(cut), None, 1.0, second);
    };
    let how = if stage == Stage::Merged { Rotate::None } else { params.rotate };
    let rotation = Rotation::new(plan.widths, how, rope.layout, &calibration.kv)?;
    let columns = |range: std::ops::Range<usize>| {
        Mat::from_fn(wk, range.len(), |i, j| rotation.basis[(i, range.start + j)])
    };
    if stage <= Stage::Rotated {
        let theta = rope.frequencies(1);
        let wide = Rope { dim: wk, base: rope.base, layout: Layout::Interleaved, scaling: Scaling::None };
        // Frequencies repeat from group to group, which no base produces.
        let own = wide.frequencies(1);
        let divisors = own.iter().zip(&rotation.frequency).map(|(own, &l)| own / theta[l]).collect();
        let wide = Rope { scaling: Scaling::Divisors(divisors), ..wide };
        return assemble(source, &plan, params, stage, &rotation.basis, None, Some(wide), 1.0, second);
    }
    let (kept, rest) = (columns(0..rotation.kept), columns(rotation.kept..wk));
    let cut = if stage == Stage::PartialRope {
        Cut::whole(&rest, wv)
    } else {
        Cut::new(source, &plan, params, stage, &rest, second)?
    };
    let narrow = narrow_rope(rope, plan.widths.collapse)?;
    assemble(source, &plan, params, stage, &kept, Some(cut), Some(narrow), rotation.energy, second)
}
