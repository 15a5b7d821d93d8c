//! Attention of new tokens to the cache, on the factors or with the heads formed.

use super::TensorProduct;
use super::factors::{Side, Sizes, attend_factors, combine};
use super::maps::{FactorCache, Map, Maps, Queries, Rows};
use crate::layers::common::project;
use crate::methods::exact::exact::METHOD as EXACT;
use crate::{Mask, MatRef, Options, Out, Problem, Qkv, Result, RunInfo, TensorMut, TensorRef, Workspace};
use attlas_num::par::*;
use std::borrow::Cow;
use std::ops::Range;

impl TensorProduct {
    /// Appends the tokens of `context` to the cache and writes the outputs of those of `x`.
    pub(super) fn append_and_attend(
        &self,
        x: MatRef<'_, f32>,
        context: MatRef<'_, f32>,
        cache: &mut FactorCache,
        mask: Mask,
        out: &mut [f32],
        ws: &mut Workspace,
    ) -> Result<RunInfo> {
        let s = &self.plan.s;
        let (first, tokens) = (cache.len, x.rows());
        let queries = ws.install(|cx| {
            let mut k = self.k.project(context, s.n_heads, cx);
            if let (false, Some(rotary)) = (self.plan.p.share_b || k.b.is_empty(), &self.rotary) {
                rotary.rotate(first, &mut k.b, self.k.rank, self.plan.width.0);
            }
            cache.k.extend(&k);
            cache.v.extend(&self.v.project(context, s.n_heads, cx));
            cache.len += context.rows();
            match &self.q {
                Ok(w) => {
                    let mut q = project(&**w, x, cx);
                    if let Some(rotary) = &self.rotary {
                        // In order 3 every block of d_b features is a rotated factor times one number.
                        let width = self.plan.width.0;
                        rotary.rotate(first, &mut q, s.n_heads * s.d / width, width);
                    }
                    Queries { a: Vec::new(), a_fixed: false, b: Vec::new(), rank: 1, plain: Some(q) }
                }
                Err(maps) => {
                    let rows = maps.project(x, s.n_heads, cx);
                    let b = self.features(maps, &rows, 0..tokens, self.plan.width, Some(first)).into_owned();
                    let (a, a_fixed) = maps.a.of(&rows.a, 0..tokens, maps.rank * s.n_heads);
                    Queries { a: a.to_vec(), a_fixed, b, rank: maps.rank, plain: None }
                }
            }
        });
        let (heads, info) = self.attend(cache, &queries, mask, tokens, ws)?;
        ws.install(|cx| self.o.apply(MatRef::new(&heads, tokens, s.n_heads * s.d_v), out, cx));
        Ok(info)
    }

    /// Returns the feature factors of a range of tokens as `(token, rank) × width`, built if they are not stored so.
    /// `rotate` gives the position of the first of them.
    fn features<'a>(
        &'a self,
        maps: &'a Maps,
        rows: &'a Rows,
        tokens: Range<usize>,
        (w_b, w_c): (usize, usize),
        rotate: Option<usize>,
    ) -> Cow<'a, [f32]> {
        let n = tokens.len();
        let Some(b_map) = &maps.b else { return Cow::Borrowed(&[]) };
        let (b, fixed) = b_map.of(&rows.b, tokens.clone(), maps.rank * w_b);
        let mut b = if fixed { Cow::Owned(b.repeat(n)) } else { Cow::Borrowed(b) };
        if let (Some(first), Some(rotary)) = (rotate, &self.rotary) {
            rotary.rotate(first, b.to_mut(), maps.rank, w_b);
        }
        let Some(c_map) = &maps.c else { return b };
        let (c, fixed) = c_map.of(&rows.c, tokens, maps.rank * w_c);
        let mut out = Vec::with_capacity(n * maps.rank * w_b * w_c);
        for (row, b) in b.chunks_exact(w_b).enumerate() {
            let row = if fixed { row % maps.rank } else { row };
            for &c in &c[row * w_c..(row + 1) * w_c] {
                out.extend(b.iter().map(|&b| b * c));
            }
        }
        Cow::Owned(out)
    }

    fn keys<'a>(&'a self, cache: &'a FactorCache, tokens: Range<usize>) -> Side<'a, f32> {
        let (h, p) = (self.plan.s.n_heads, &self.plan.p);
        let (a, a_fixed) = self.k.a.of(&cache.k.a, tokens.clone(), p.rank_k * h);
        let late = p.share_b || matches!(self.k.b, Some(Map::Fixed(..)));
        let b =
            self.features(&self.k, &cache.k, tokens.clone(), self.plan.width, late.then_some(tokens.start));
        Side { rank: p.rank_k, a, a_fixed, b }
    }

    fn values<'a>(&'a self, cache: &'a FactorCache, tokens: Range<usize>) -> Side<'a, f32> {
        let (h, p) = (self.plan.s.n_heads, &self.plan.p);
        let (a, a_fixed) = self.v.a.of(&cache.v.a, tokens.clone(), p.rank_v * h);
        let b = if p.share_b {
            self.features(&self.k, &cache.k, tokens, self.plan.width, None)
        } else {
            self.features(&self.v, &cache.v, tokens, self.plan.width_v, None)
        };
        Side { rank: p.rank_v, a, a_fixed, b }
    }

    /// Computes attention outputs `[tokens, heads, d_v]`; with a causal mask, for the last `tokens` of the cache.
    fn attend(
        &self,
        cache: &FactorCache,
        q: &Queries,
        mask: Mask,
        tokens: usize,
        ws: &mut Workspace,
    ) -> Result<(Vec<f32>, RunInfo)> {
        let s = self.plan.s;
        let (h, total) = (s.n_heads, cache.len);
        let scale = (1.0 / (s.d as f64).sqrt()) as f32;
        let problem = Problem { d_v: s.d_v, mask, ..Problem::new(h, 1, s.d) }.with_lens(tokens, total);
        if mask == Mask::Causal && self.plan.on_factors(tokens) {
            let first = total - tokens;
            let sizes = Sizes { heads: h, d: s.d, d_v: s.d_v, scale };
            let rows: Vec<Vec<f32>> = ws.install(|cx| {
                (0..tokens)
                    .into_par_iter()
                    .map(|t| {
                        let load = |range: Range<usize>| {
                            (self.keys(cache, range.clone()), self.values(cache, range))
                        };
                        attend_factors(&sizes, &q.token(t, h, s.d), first + t + 1, &load, cx)
                    })
                    .collect()
            });
            return Ok((rows.concat(), RunInfo::visited(problem.visible_pairs())));
        }
        let exact = EXACT.plan(&problem, &Options::new())?;
        let (q, k, v) = ws.install(|_| {
            let combine = |side: Side<'_, f32>, width| combine(&side, h, width);
            (
                q.heads(h, s.d),
                combine(self.keys(cache, 0..total), s.d),
                combine(self.values(cache, 0..total), s.d_v),
            )
        });
        let mut out = vec![0.0; tokens * h * s.d_v];
        let inputs = Qkv::new(
            TensorRef::bnhd(&q, [1, h, tokens, s.d])?,
            TensorRef::bnhd(&k, [1, h, total, s.d])?,
            TensorRef::bnhd(&v, [1, h, total, s.d_v])?,
        );
        let output = Out::new(TensorMut::bnhd(&mut out, [1, h, tokens, s.d_v])?);
        let info = exact.execute(&inputs.into(), &mut output.into(), ws)?;
        Ok((out, info))
    }
}
