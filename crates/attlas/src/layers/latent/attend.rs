//! Attention in both forms: over rebuilt keys and values, and over the latents themselves.

use super::{Latent, Queries};
use crate::layer::Linear;
use crate::layers::common::project;
use crate::methods::exact::exact::METHOD as EXACT;
use crate::workspace::Context;
use crate::{
    Mask, Mat, MatRef, Options, Out, Problem, Qkv, Result, RunInfo, TensorMut, TensorRef, Workspace,
};
use attlas_num::kernels::{Op, gemm};
use attlas_num::par::*;

impl Latent {
    /// Returns rows of `kv_b` of one head: the first `nope` rebuild keys, the others values.
    pub(super) fn up(&self, head: usize, rows: std::ops::Range<usize>) -> Mat<f32> {
        self.up_rows(head, rows).to_mat()
    }

    fn up_rows(&self, head: usize, rows: std::ops::Range<usize>) -> MatRef<'_, f32> {
        let first = head * (self.sizes.nope + self.sizes.d_v);
        self.kv_b.weight.as_ref().sub_rows(first + rows.start..first + rows.end)
    }

    /// Returns the input of the last map of the queries.
    fn query_inputs(&self, x: MatRef<'_, f32>, cx: Context<'_>) -> Vec<f32> {
        match &self.q {
            Queries::Plain(_) => (0..x.rows()).flat_map(|i| x.row(i).iter().copied()).collect(),
            Queries::Latent { a, norm, .. } => {
                let mut latent = project(&**a, x, cx);
                if let Some(weight) = norm {
                    let rows = latent.chunks_exact_mut(weight.len());
                    rows.for_each(|row| rms_norm(row, weight, self.params.norm_eps));
                }
                latent
            }
        }
    }

    /// Rotates the last `rope` of `width` features of every head of consecutive tokens.
    fn rotate(&self, first: usize, x: &mut [f32], heads: usize, width: usize) {
        let Some(rotary) = &self.rotary else { return };
        let tokens = x.len() / (heads * width).max(1);
        let table = rotary.table(first + tokens);
        for (t, token) in x.chunks_exact_mut((heads * width).max(1)).enumerate() {
            for head in token.chunks_exact_mut(width) {
                table.rotate_in_place(first + t, &mut head[width - self.sizes.rope..]);
            }
        }
    }

    /// Computes the rows of the cache for new tokens: normalised latents and rotated keys.
    pub(super) fn cache_rows(&self, x: MatRef<'_, f32>, first: usize, cx: Context<'_>) -> Vec<f32> {
        let row = self.sizes.row();
        let mut rows = project(&*self.kv_a, x, cx);
        if let Some(weight) = &self.kv_norm {
            let latents = rows.chunks_exact_mut(row).map(|r| &mut r[..weight.len()]);
            latents.for_each(|latent| rms_norm(latent, weight, self.params.norm_eps));
        }
        self.rotate(first, &mut rows, 1, row);
        rows
    }

    /// Computes the outputs of the tokens of `x`. These are the last ones of `rows`, unless `rows` are of another
    /// sequence and nothing is rotated.
    pub(super) fn attend(
        &self,
        x: MatRef<'_, f32>,
        rows: &[f32],
        mask: Mask,
        out: &mut [f32],
        ws: &mut Workspace,
    ) -> Result<RunInfo> {
        let s = self.sizes;
        let (tokens, total) = (x.rows(), rows.len() / s.row());
        let scale = self.params.scale_factor / (s.d() as f64).sqrt();
        let base = Problem { mask, scale, ..Problem::new(s.heads, 1, s.d()) }.with_lens(tokens, total);
        if self.absorbs(tokens, total) {
            let problem = Problem { n_kv_heads: 1, d: s.row(), d_v: s.rank, ..base };
            self.attend_absorbed(x, rows, &problem, out, ws)
        } else {
            self.attend_expanded(x, rows, &Problem { d_v: s.d_v, ..base }, out, ws)
        }
    }

    fn attend_expanded(
        &self,
        x: MatRef<'_, f32>,
        rows: &[f32],
        problem: &Problem,
        out: &mut [f32],
        ws: &mut Workspace,
    ) -> Result<RunInfo> {
        let s = self.sizes;
        let (tokens, total) = (problem.n_q, problem.n_k);
        let plan = EXACT.plan(problem, &Options::new())?;
        let width = s.heads * (s.nope + s.d_v);
        let mut up = vec![0.0f32; total * width];
        let mut k = vec![0.0f32; total * s.heads * s.d()];
        let q = ws.install(|cx| {
            let latents = MatRef::with_stride(rows, total, s.rank, s.row());
            self.kv_b.apply(latents.unwrap_or_else(|| unreachable!("whole rows")), &mut up, cx);
            k.par_chunks_mut(s.heads * s.d()).enumerate().for_each(|(n, k)| {
                let shared = &rows[n * s.row() + s.rank..(n + 1) * s.row()];
                for (h, k) in k.chunks_exact_mut(s.d()).enumerate() {
                    let own = &up[n * width + h * (s.nope + s.d_v)..][..s.nope];
                    k[..s.nope].copy_from_slice(own);
                    k[s.nope..].copy_from_slice(shared);
                }
            });
            self.queries(x, total.saturating_sub(tokens), cx)
        });
        let mut heads = vec![0.0f32; tokens * s.heads * s.d_v];
        // Values are read where they were rebuilt, behind the keys of their head.
        let values = TensorRef::new(
            &up[s.nope..],
            [1, s.heads, total, s.d_v],
            [total * width, s.nope + s.d_v, width],
        )?;
        let inputs = Qkv::new(
            TensorRef::bnhd(&q, [1, s.heads, tokens, s.d()])?,
            TensorRef::bnhd(&k, [1, s.heads, total, s.d()])?,
            values,
        );
        let output = Out::new(TensorMut::bnhd(&mut heads, [1, s.heads, tokens, s.d_v])?);
        let info = plan.execute(&inputs.into(), &mut output.into(), ws)?;
        ws.install(|cx| self.o.apply(MatRef::new(&heads, tokens, s.heads * s.d_v), out, cx));
        Ok(info)
    }

    fn queries(&self, x: MatRef<'_, f32>, first: usize, cx: Context<'_>) -> Vec<f32> {
        let s = self.sizes;
        let mut q = match &self.q {
            Queries::Plain(q) => project(&**q, x, cx),
            Queries::Latent { a, b, .. } => {
                let latent = self.query_inputs(x, cx);
                project(&**b, MatRef::new(&latent, x.rows(), a.n_out()), cx)
            }
        };
        self.rotate(first, &mut q, s.heads, s.d());
        q
    }

    fn attend_absorbed(
        &self,
        x: MatRef<'_, f32>,
        rows: &[f32],
        problem: &Problem,
        out: &mut [f32],
        ws: &mut Workspace,
    ) -> Result<RunInfo> {
        let s = self.sizes;
        let (tokens, total, row) = (problem.n_q, problem.n_k, s.row());
        let plan = EXACT.plan(problem, &Options::new())?;
        let first = total.saturating_sub(tokens);
        // Laid out head by head if absorbed here, token by token if the weights are merged.
        let merged = self.merged_qk.is_some();
        let mut q = vec![0.0f32; tokens * s.heads * row];
        ws.install(|cx| {
            if let Some(map) = &self.merged_qk {
                let inputs = self.query_inputs(x, cx);
                map.apply(MatRef::new(&inputs, tokens, map.n_in()), &mut q, cx);
                self.rotate(first, &mut q, s.heads, row);
                return;
            }
            let plain = self.queries(x, first, cx);
            q.par_chunks_mut(tokens * row).enumerate().for_each(|(h, q)| {
                if s.nope > 0 {
                    let own = MatRef::with_stride(&plain[h * s.d()..], tokens, s.nope, s.heads * s.d());
                    let own = Op::N(own.unwrap_or_else(|| unreachable!("whole rows")));
                    let up = Op::N(self.up_rows(h, 0..s.nope));
                    gemm(cx.schedule.isa, 1.0, own, up, 0.0, q, row, cx.scratch);
                }
                for (t, q) in q.chunks_exact_mut(row).enumerate() {
                    let rotated = (t * s.heads + h) * s.d() + s.nope;
                    q[s.rank..].copy_from_slice(&plain[rotated..rotated + s.rope]);
                }
            });
        });
        let dims = [1, s.heads, tokens, row];
        let queries = if merged { TensorRef::bnhd(&q, dims)? } else { TensorRef::bhnd(&q, dims)? };
        let keys = TensorRef::bhnd(rows, [1, 1, total, row])?;
        // The latent stands first in a row of the cache, so that values are a prefix of the keys.
        let values = TensorRef::new(rows, [1, 1, total, s.rank], [total * row, total * row, row])?;
        let inputs = Qkv::new(queries, keys, values);
        let mut latents = vec![0.0f32; s.heads * tokens * s.rank];
        let dims = [1, s.heads, tokens, s.rank];
        let target = if self.merged_vo.is_some() {
            TensorMut::bnhd(&mut latents, dims)?
        } else {
            TensorMut::bhnd(&mut latents, dims)?
        };
        let info = plan.execute(&inputs.into(), &mut Out::new(target).into(), ws)?;
        ws.install(|cx| {
            if let Some(map) = &self.merged_vo {
                map.apply(MatRef::new(&latents, tokens, s.heads * s.rank), out, cx);
                return;
            }
            let mut by_head = vec![0.0f32; s.heads * tokens * s.d_v];
            by_head.par_chunks_mut(tokens * s.d_v).enumerate().for_each(|(h, o)| {
                let z = MatRef::new(&latents[h * tokens * s.rank..(h + 1) * tokens * s.rank], tokens, s.rank);
                let up = Op::T(self.up_rows(h, s.nope..s.nope + s.d_v));
                gemm(cx.schedule.isa, 1.0, Op::N(z), up, 0.0, o, s.d_v, cx.scratch);
            });
            let mut heads = vec![0.0f32; by_head.len()];
            for (i, chunk) in by_head.chunks_exact(s.d_v).enumerate() {
                let (h, t) = (i / tokens, i % tokens);
                heads[(t * s.heads + h) * s.d_v..][..s.d_v].copy_from_slice(chunk);
            }
            self.o.apply(MatRef::new(&heads, tokens, s.heads * s.d_v), out, cx);
        });
        Ok(info)
    }
}

/// Computes $w \odot x / \sqrt{\operatorname{mean}(x^2) + \epsilon}$.
fn rms_norm(x: &mut [f32], weight: &[f32], eps: f64) {
    let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / x.len().max(1) as f64;
    let factor = (mean + eps).sqrt();
    // A row of zeros without epsilon stays zero.
    let inverse = if factor == 0.0 { 0.0 } else { (1.0 / factor) as f32 };
    x.iter_mut().zip(weight).for_each(|(x, w)| *x = *x * inverse * w);
}
