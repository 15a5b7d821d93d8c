//! Widths that follow from a layer and the parameters, and checks that the layer can be converted.

use super::{CONVERSION, Calibration, Params, Source, Stage, Widths};
use crate::conversions::common::refused;
use crate::layer::{LayerShape, Linear};
use crate::{Error, Result};
use attlas_num::rope::{Layout, Rope, Scaling};

/// Sizes that follow from the source layer and the parameters.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) widths: Widths,
    /// Width of the latent.
    pub(super) rank: usize,
}

impl Params {
    /// Fills in every width left open; an error if a layer of this shape and rotation cannot be converted this way,
    /// which is cheap to check before calibration.
    pub fn resolved(&self, shape: &LayerShape, rope: Option<&Rope>) -> Result<Self> {
        self.validate()?;
        let plan = Plan::sizes(shape, rope, self)?;
        let Widths { d, fold, collapse, .. } = plan.widths;
        rope.map_or(Ok(()), |rope| narrow_rope(rope, collapse).map(|_| ()))?;
        let rotated = rope.map(|_| (d / collapse, fold));
        Ok(Self {
            rope_dim: rotated.map(|r| r.0),
            fold: rotated.map(|r| r.1),
            rank: Some(plan.rank),
            ..self.clone()
        })
    }
}

impl Plan {
    pub(super) fn new(source: &Source<'_>, p: &Params) -> Result<Self> {
        let s = source.shape;
        let maps = [
            ("q", source.q, s.n_heads * s.d, s.d_model),
            ("k", source.k, s.n_kv_heads * s.d, s.d_model),
            ("v", source.v, s.n_kv_heads * s.d_v, s.d_model),
            ("o", source.o, s.d_model, s.n_heads * s.d_v),
        ];
        for (name, map, n_out, n_in) in maps {
            if (map.n_out(), map.n_in()) != (n_out, n_in) {
                let found = format!("{} × {}", map.n_out(), map.n_in());
                return Err(Error::shape("weight", format!("{name} of {n_out} × {n_in}"), found));
            }
        }
        Self::sizes(&s, source.rope, p)
    }

    fn sizes(s: &LayerShape, rope: Option<&Rope>, p: &Params) -> Result<Self> {
        crate::layers::common::check_shape(s)?;
        let rotated = match rope {
            None => 0,
            Some(rope) if rope.dim != s.d => {
                return Err(refused(
                    CONVERSION.id,
                    format!("{} of {} features of a head are rotated; all must be", rope.dim, s.d),
                ));
            }
            Some(_) => p.rope_dim.unwrap_or(64.min(s.d)),
        };
        let (collapse, fold) = if rotated == 0 {
            (1, 1)
        } else {
            if rotated > s.d || !s.d.is_multiple_of(rotated) || !rotated.is_multiple_of(2) {
                return Err(Error::param("rope_dim", rotated, format!("an even divisor of {}", s.d)));
            }
            let collapse = s.d / rotated;
            let fold = p.fold.unwrap_or(2.min(s.d / 2).max(collapse));
            if !fold.is_multiple_of(collapse) || !(s.d / 2).is_multiple_of(fold) {
                let expected = format!("a multiple of {collapse} that divides {}", s.d / 2);
                return Err(Error::param("fold", fold, expected));
            }
            (collapse, fold)
        };
        let cache = s.n_kv_heads * (s.d + s.d_v);
        let full = cache - rotated;
        // Checkpoints with normalised latents cache one number more.
        let rank = p.rank.unwrap_or((3 * cache / 4).saturating_sub(rotated + 1).max(1));
        if rank > full {
            return Err(Error::param("rank", rank, format!("at most {full}, which is all there is")));
        }
        let widest = (s.n_heads * s.d).min(s.d_model);
        if let Some(r) = p.rank_q.filter(|&r| r > widest) {
            return Err(Error::param("rank_q", r, format!("at most {widest}, the rank of the queries")));
        }
        Ok(Self { widths: Widths { groups: s.n_kv_heads, d: s.d, fold, collapse }, rank })
    }

    pub(super) fn check(&self, source: &Source<'_>, c: &Calibration, stage: Stage) -> Result<()> {
        if c.shape != source.shape {
            return Err(Error::shape(
                "calibration",
                format!("of a layer with {:?}", source.shape),
                format!("{:?}", c.shape),
            ));
        }
        let features = c.kv.rows();
        if stage > Stage::Merged && c.tokens < features {
            return Err(refused(
                CONVERSION.id,
                format!(
                    "{} calibration tokens are too few for {features} features of keys and values",
                    c.tokens
                ),
            ));
        }
        Ok(())
    }
}

/// Returns the rotation of the kept pairs, every `collapse`-th of the source's: the same kind with a narrower width.
pub(super) fn narrow_rope(rope: &Rope, collapse: usize) -> Result<Rope> {
    let scaling = match &rope.scaling {
        same @ (Scaling::None | Scaling::Linear { .. } | Scaling::Llama3 { .. }) => same.clone(),
        Scaling::Divisors(d) => Scaling::Divisors(d.iter().copied().step_by(collapse).collect()),
        Scaling::Dynamic { .. } | Scaling::Yarn(_) | Scaling::LongRope(_) => {
            return Err(refused(
                CONVERSION.id,
                "context extension by dynamic, yarn or longrope scaling has no equal of another width",
            ));
        }
    };
    Ok(Rope { dim: rope.dim / collapse, base: rope.base, layout: Layout::Interleaved, scaling })
}
