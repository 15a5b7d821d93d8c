//! Attention through averaged queries and keys: the common frame of the landmark methods.
//!
//! With averages $\bar Q, \bar K$ of parts of the queries and keys, $C = \operatorname{softmax}(\beta \bar Q \bar K^\top + b)$
//! and $U = \operatorname{attn}(\bar Q, K, V)$, a small solve gives $T$ from $C$ and $U$, and the rows are
//! $\operatorname{attn}(Q, \bar K, T)$ with the same bias $b$ on the averaged keys. In this order the work is linear
//! in the tokens.

use super::pool::{Parts, landmark_weights, pool_rows};
use super::{exact_few_rows, exact_rows};
use crate::group::{Group, RowBlock};
use crate::{MatRef, Problem, Real, Result, RunInfo};
use attlas_num::Mat;
use attlas_num::kernels::Band;
use attlas_num::par::*;

/// Query rows of one task.
const BLOCK_ROWS: usize = 256;

/// Runs the landmark methods' common frame on a group. `solver(C)` returns a function that turns $U$ into $T$, or into
/// `None` if $C$ has entries that are not numbers; `solver` runs while $U$ is computed. `finish(block, T)` may change
/// the rows of a block afterwards.
pub fn landmark_attention<T: Real, S: Send + FnOnce(&Mat<f64>) -> Option<Mat<f64>>>(
    g: &mut Group<'_, T>,
    q_parts: &impl Parts,
    k_parts: &impl Parts,
    bias: Option<&[T]>,
    solver: impl Fn(&Mat<f64>) -> (S, RunInfo) + Sync,
    finish: impl Fn(&mut RowBlock<'_, T>, MatRef<'_, T>) + Sync,
) -> Result<RunInfo> {
    let (q, k, v, scale, cx) = (g.q, g.k, g.v, g.scale, g.cx);
    let (heads, d, d_v) = (q.heads(), k.cols(), v.cols());
    let (m_q, m_k) = (q_parts.count(), k_parts.count());
    let mut k_bar = cx.scratch.take::<T>(m_k * d);
    pool_rows(k, k_parts, cx, &mut k_bar);
    let k_bar = MatRef::new(&k_bar, m_k, d);
    let mut t = cx.scratch.take::<T>(heads * m_k * d_v);
    let infos: Vec<RunInfo> = t
        .par_chunks_exact_mut(m_k * d_v)
        .with_max_len(1)
        .enumerate()
        .map(|(h, t)| {
            let mut q_bar = cx.scratch.take::<T>(m_q * d);
            pool_rows(q.head(h), q_parts, cx, &mut q_bar);
            let q_bar = MatRef::new(&q_bar, m_q, d);
            let mut u = cx.scratch.take::<T>(m_q * d_v);
            let mut lse = cx.scratch.take::<T>(m_q);
            let ((), (solve, info)) = join(
                || exact_few_rows(q_bar, k, v, scale, cx, &mut u, &mut lse),
                || solver(&landmark_weights(q_bar, k_bar, bias, scale)),
            );
            match solve(&Mat::from_vec(u.iter().map(|x| x.to_f64()).collect(), m_q, d_v)) {
                Some(x) => t.iter_mut().zip(x.data()).for_each(|(t, x)| *t = T::from_f64(*x)),
                None => t.fill(T::NAN),
            }
            info
        })
        .collect();
    let t = &t;
    g.par_row_blocks(BLOCK_ROWS, |mut block| {
        let t = MatRef::new(&t[block.head * m_k * d_v..(block.head + 1) * m_k * d_v], m_k, d_v);
        exact_rows(block.q, k_bar, t, bias, scale, Band::ALL, cx, block.out, block.lse);
        finish(&mut block, t);
        Ok(())
    })?;
    let pairs = heads * (m_q * k.rows() + m_q * m_k + g.n_q() * m_k);
    Ok(infos.into_iter().fold(RunInfo::visited(pairs as u64), RunInfo::merge))
}

/// Counts the operations of [`landmark_attention`] without the solve, as `(set-up, run)` of the whole problem.
pub fn landmark_flops(p: &Problem, m: usize) -> (u64, u64) {
    let heads = (p.batch * p.n_heads) as u64;
    let pooling = (p.batch * (p.n_heads * p.n_q + p.n_kv_heads * p.n_k) * p.d) as u64;
    let (m, width) = (m as u64, (p.d + p.d_v) as u64);
    let setup = pooling + heads * (2 * m * p.n_k as u64 * width + 2 * m * m * width);
    (setup, heads * 2 * p.n_q as u64 * m * width)
}
