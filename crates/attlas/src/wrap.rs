//! Plans made of plans: each takes planned parts and learns nothing more about them.
//!
//! - [`block_causal`] makes any unmasked method causal: exact attention near each query (its own block, the
//!   `window` before it, the first `sinks` keys) and the method's plans on everything before, merged by
//!   log-sum-exp. With `window` and `sinks` it is the sink + window + inner pattern. Strictly causal, because
//!   a plan for a block of queries is only ever given keys that all of them see.
//! - [`chunked_prefill`] runs a causal method chunk after chunk of queries, which bounds its scratch memory.

use crate::method::{Cost, Method, Plan, RunInfo};
use crate::{Error, Inputs, Mask, Options, Out, Output, Problem, Qkv, Real, Result, Workspace};
use crate::{TensorMut, merge_lse};
use std::ops::Range;

/// What is kept exact around each query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Near {
    /// Queries that share one far part.
    pub block: usize,
    /// Keys at the start that every query sees exactly.
    pub sinks: usize,
    /// Keys before each block that its queries see exactly.
    pub window: usize,
}

/// A causal plan from an unmasked method. The method must give a log-sum-exp.
pub fn block_causal(
    method: &Method,
    problem: &Problem,
    options: &Options,
    near: Near,
) -> Result<Box<dyn Plan>> {
    problem.validate()?;
    let mut reasons = Vec::new();
    if near.block == 0 {
        return Err(Error::param("block", 0, "at least 1"));
    }
    if !method.claims.lse {
        reasons.push(format!("{} gives no log-sum-exp, so its parts cannot be merged", method.id));
    }
    if problem.mask != Mask::Causal {
        reasons.push("the block-causal wrapper is for causal problems".into());
    }
    if !reasons.is_empty() {
        return Err(Error::Unsupported { method: method.id.into(), reasons });
    }
    let exact = crate::registry::method("exact")?;
    let parts: Result<Vec<Part>> = blocks(problem.n_q, near.block)
        .map(|rows| {
            // The first query of the block stands at this position; everything before is seen by all.
            let seen = (problem.n_k + rows.start).saturating_sub(problem.n_q);
            let end = (problem.n_k + rows.end).saturating_sub(problem.n_q).min(problem.n_k);
            let sinks = near.sinks.min(seen);
            let start = seen.saturating_sub(near.window).max(sinks);
            let unmasked = Problem { mask: Mask::None, n_q: rows.len(), ..*problem };
            let far = (start > sinks)
                .then(|| method.plan(&Problem { n_k: start - sinks, ..unmasked }, options))
                .transpose()?;
            let sink = (sinks > 0)
                .then(|| exact.plan(&Problem { n_k: sinks, ..unmasked }, &Options::new()))
                .transpose()?;
            let near =
                exact.plan(&Problem { n_q: rows.len(), n_k: end - start, ..*problem }, &Options::new())?;
            let mut pieces = vec![Piece { keys: start..end, plan: near }];
            pieces.extend(far.map(|plan| Piece { keys: sinks..start, plan }));
            pieces.extend(sink.map(|plan| Piece { keys: 0..sinks, plan }));
            Ok(Part { rows, pieces })
        })
        .collect();
    Ok(Box::new(Joined { problem: *problem, parts: parts? }))
}

/// A causal plan that runs `method` on `chunk` queries at a time.
pub fn chunked_prefill(
    method: &Method,
    problem: &Problem,
    options: &Options,
    chunk: usize,
) -> Result<Box<dyn Plan>> {
    problem.validate()?;
    if chunk == 0 {
        return Err(Error::param("chunk", 0, "at least 1"));
    }
    let parts: Result<Vec<Part>> = blocks(problem.n_q, chunk)
        .map(|rows| {
            let end = match problem.mask {
                Mask::None => problem.n_k,
                Mask::Causal => (problem.n_k + rows.end).saturating_sub(problem.n_q).min(problem.n_k),
            };
            let plan = method.plan(&problem.with_lens(rows.len(), end), options)?;
            Ok(Part { rows, pieces: vec![Piece { keys: 0..end, plan }] })
        })
        .collect();
    Ok(Box::new(Joined { problem: *problem, parts: parts? }))
}

fn blocks(n: usize, block: usize) -> impl Iterator<Item = Range<usize>> {
    (0..n).step_by(block).map(move |start| start..(start + block).min(n))
}

/// Some queries, and the plans whose results are merged for them.
#[derive(Debug)]
struct Part {
    rows: Range<usize>,
    pieces: Vec<Piece>,
}

/// A plan over some of the keys.
#[derive(Debug)]
struct Piece {
    keys: Range<usize>,
    plan: Box<dyn Plan>,
}

/// Parts over disjoint queries, each merged from pieces over disjoint keys.
#[derive(Debug)]
struct Joined {
    problem: Problem,
    parts: Vec<Part>,
}

impl Plan for Joined {
    fn problem(&self) -> &Problem {
        &self.problem
    }

    fn cost(&self) -> Cost {
        let plans = self.parts.iter().flat_map(|p| &p.pieces).map(|p| p.plan.cost());
        plans.fold(Cost::default(), |a, b| Cost {
            setup_flops: a.setup_flops + b.setup_flops,
            run_flops: a.run_flops + b.run_flops,
            bytes: a.bytes + b.bytes,
        })
    }

    fn workspace_bytes(&self, threads: usize) -> usize {
        let inner = self.parts.iter().flat_map(|p| &p.pieces).map(|p| p.plan.workspace_bytes(threads)).max();
        let p = &self.problem;
        let rows = self.parts.iter().map(|part| part.rows.len()).max().unwrap_or(0);
        inner.unwrap_or(0) + 2 * (p.batch * p.n_heads * rows * (p.d_v + 1) * size_of::<f64>() + 128)
    }

    fn execute(&self, inputs: &Inputs<'_>, out: &mut Output<'_>, ws: &mut Workspace) -> Result<RunInfo> {
        match (inputs, out) {
            (Inputs::F32(x), Output::F32(o)) => self.execute_typed(x, o, ws),
            (Inputs::F64(x), Output::F64(o)) => self.execute_typed(x, o, ws),
            (x, _) => Err(Error::shape("output element type", format!("{:?}", x.dtype()), "the other one")),
        }
    }
}

impl Joined {
    fn execute_typed<T: Real>(
        &self,
        x: &Qkv<'_, T>,
        out: &mut Out<'_, T>,
        ws: &mut Workspace,
    ) -> Result<RunInfo>
    where
        for<'a> Qkv<'a, T>: Into<Inputs<'a>>,
        for<'a> Out<'a, T>: Into<Output<'a>>,
    {
        let p = &self.problem;
        x.validate(p)?;
        out.validate(p)?;
        if x.key_lens.is_some() {
            let reasons = vec!["wrapped plans take no padded keys: give each sequence alone".into()];
            return Err(Error::Unsupported { method: "this plan".into(), reasons });
        }
        let mut info = RunInfo::default();
        let heads = p.batch * p.n_heads;
        for part in &self.parts {
            let rows = part.rows.len();
            let dims = [p.batch, p.n_heads, rows, p.d_v];
            let mut total: Option<(Vec<T>, Vec<T>)> = None;
            for piece in &part.pieces {
                let mut o = vec![T::ZERO; heads * rows * p.d_v];
                let mut lse = vec![T::NEG_INFINITY; heads * rows];
                let part_x = Qkv::new(
                    x.q.rows(part.rows.clone()),
                    x.k.rows(piece.keys.clone()),
                    x.v.rows(piece.keys.clone()),
                );
                let wants_lse = part.pieces.len() > 1 || out.lse.is_some();
                let tensor = TensorMut::bhnd(&mut o, dims)?;
                let part_out = if wants_lse { Out::with_lse(tensor, &mut lse) } else { Out::new(tensor) };
                info = info.merge(piece.plan.execute(&part_x.into(), &mut part_out.into(), ws)?);
                match &mut total {
                    None => total = Some((o, lse)),
                    Some((sum, sum_lse)) => {
                        for r in 0..heads * rows {
                            let cols = r * p.d_v..(r + 1) * p.d_v;
                            merge_lse(&mut sum[cols.clone()], &mut sum_lse[r], &o[cols], lse[r]);
                        }
                    }
                }
            }
            let Some((o, lse)) = total else { continue };
            for (r, row) in o.chunks_exact(p.d_v).enumerate() {
                let (bh, i) = (r / rows, part.rows.start + r % rows);
                out.o.row_mut(bh / p.n_heads, bh % p.n_heads, i).copy_from_slice(row);
                if let Some(all) = &mut out.lse {
                    all[bh * p.n_q + i] = lse[r];
                }
            }
        }
        Ok(info)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry;
    use crate::testkit::{Case, How, assert_rows_close, assert_same_bits, reference, run_with};

    #[test]
    fn wrapped_exact_attention_is_exact_attention() {
        let exact = registry::method("exact").unwrap();
        for (n_q, n_k) in [(97, 97), (40, 97), (97, 40), (1, 50)] {
            let p = Problem {
                batch: 2,
                d_v: 3,
                ..Problem::new(4, 1, 8).with_lens(n_q, n_k).with_kv_heads(2).causal()
            };
            let case = Case::gaussian(p, 1);
            let (want, want_lse) = reference(&case);
            for (block, sinks, window) in [(1, 0, 0), (16, 0, 0), (16, 4, 8), (33, 100, 5), (200, 2, 0)] {
                let plan = block_causal(exact, &p, &Options::new(), Near { block, sinks, window }).unwrap();
                let ran = run_with(&*plan, &case, How::default()).unwrap();
                let what = format!("{n_q}×{n_k}, block {block}, sinks {sinks}, window {window}");
                assert_rows_close(&ran.o, &want, 1e-12, &what);
                assert_rows_close(&ran.lse, &want_lse, 1e-12, &what);
            }
            for chunk in [1, 7, 64, 500] {
                let plan = chunked_prefill(exact, &p, &Options::new(), chunk).unwrap();
                let ran = run_with(&*plan, &case, How { token_major: true, ..How::default() }).unwrap();
                assert_rows_close(&ran.o, &want, 1e-12, &format!("{n_q}×{n_k}, chunks of {chunk}"));
            }
        }
    }

    #[test]
    fn an_unmasked_method_becomes_strictly_causal() {
        let top = registry::method("top_k").unwrap();
        let p = Problem::new(1, 80, 8).causal();
        let options = Options::new().with("keys", 5);
        let plan = block_causal(top, &p, &options, Near { block: 16, sinks: 2, window: 8 }).unwrap();
        let case = Case::gaussian(p, 2);
        let first = run_with(&*plan, &case, How::default()).unwrap();
        for t in [0, 15, 16, 50, 79] {
            let mut changed = case.clone();
            changed.k[t * 8..].iter_mut().for_each(|x| *x = f64::NAN);
            changed.v[t * 8..].iter_mut().for_each(|x| *x = f64::NAN);
            let ran = run_with(&*plan, &changed, How::default()).unwrap();
            assert_same_bits(&ran.o[..t * 8], &first.o[..t * 8], &format!("token {t}"));
        }
    }

    #[test]
    fn what_cannot_be_wrapped_is_refused() {
        let exact = registry::method("exact").unwrap();
        let near = Near { block: 8, sinks: 0, window: 0 };
        assert!(block_causal(exact, &Problem::new(1, 8, 4), &Options::new(), near).is_err());
        let causal = Problem::new(1, 8, 4).causal();
        assert!(block_causal(exact, &causal, &Options::new(), Near { block: 0, ..near }).is_err());
        assert!(chunked_prefill(exact, &causal, &Options::new(), 0).is_err());
    }
}
