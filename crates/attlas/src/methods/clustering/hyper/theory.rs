//! The variant that the paper analyses: a capped and floored normaliser, columns drawn by the norms of values.
//!
//! Every quantity is a value with the logarithm of its scale, so no exponential overflows.

use super::Params;
use crate::engine::{Columns, SortedBlocks, UniformSamples, divide_by, exact_rows, places, relative_squares};
use crate::group::Group;
use crate::{MatRef, Real, Result, RunInfo};
use attlas_num::kernels::{Band, Op, gemm};
use attlas_num::par::*;
use attlas_num::rng::StreamKey;

/// Computes a part without a mask, with queries and keys sorted into `blocks`.
pub(super) fn run<T: Real>(
    params: &Params,
    group: &mut Group<'_, T>,
    blocks: &SortedBlocks,
    key: StreamKey,
) -> Result<RunInfo> {
    let (q, k, v, scale, cx) = (group.q, group.k, group.v, group.scale, group.cx);
    let (n, d, d_v, m) = (k.rows(), k.cols(), v.cols(), params.samples);
    // ln(r/κ) of each head.
    let floor: Vec<T> = largest_residuals(group, blocks, m, key.named("rows"))
        .into_iter()
        .map(|r| r - T::from_f64(params.kappa.ln()))
        .collect();
    let factor = params.cap * params.tol * params.tol * m as f64 / (n as f64 * (n as f64).ln());
    let log_factor = T::from_f64(factor.ln());
    let uniform = UniformSamples::new(n, m, true, key.named("samples"));
    let columns = Columns::draw(&relative_squares(v), m, key.named("columns"));

    let chosen = columns.index.len();
    let mut k_v = cx.scratch.take::<T>(chosen * d);
    let mut v_v = cx.scratch.take::<T>(chosen * d_v);
    k.gather_into(columns.index.iter().copied(), &mut k_v);
    v.gather_into(columns.index.iter().copied(), &mut v_v);
    let (k_v, v_v) = (MatRef::new(&k_v, chosen, d), MatRef::new(&v_v, chosen, d_v));
    let bias: Vec<T> = columns.bias.iter().map(|&b| T::from_f64(b)).collect();
    let log_weights = T::from_f64(columns.log_total);

    let visited = blocks.par_blocks(places(group.out, group.lse, d_v), |piece| {
        let (near, rows) = (blocks.block_keys(piece.block), piece.rows.len());
        let far = uniform.outside::<T>(blocks, piece.block);
        let mut queries = cx.scratch.take::<T>(rows * d);
        piece.gather_queries(q, &mut queries);
        let queries = MatRef::new(&queries, rows, d);

        let mut keys = cx.scratch.take::<T>(near.len().max(far.len()) * d);
        let near_keys = &mut keys[..near.len() * d];
        k.gather_into(near.iter().map(|&j| j as usize), near_keys);
        let mut block_sums = cx.scratch.take::<T>(rows);
        log_sums(queries, MatRef::new(near_keys, near.len(), d), scale, cx, &mut block_sums);

        let far_keys = &mut keys[..far.len() * d];
        k.gather_into(far.iter().map(|e| e.0 as usize), far_keys);
        let mut logits = cx.scratch.take::<T>(rows * far.len());
        let far_keys = MatRef::new(far_keys, far.len(), d);
        let isa = cx.schedule.isa;
        gemm(isa, scale, Op::N(queries), Op::T(far_keys), T::ZERO, &mut logits, far.len(), cx.scratch);

        let mut out = cx.scratch.take::<T>(rows * d_v);
        let mut lse = cx.scratch.take::<T>(rows);
        exact_rows(queries, k_v, v_v, Some(&bias), scale, Band::ALL, cx, &mut out, &mut lse);
        for (r, place) in piece.places.iter_mut().enumerate() {
            let floor = floor[piece.rows[r].head as usize];
            let near = block_sums[r];
            let cap = log_factor + log_add(near, floor);
            let weight = far.first().map_or(T::ZERO, |e| e.1);
            let rest = weight + capped_log_sum(&logits[r * far.len()..(r + 1) * far.len()], cap);
            let rest = if rest < floor { floor } else { rest };
            place.out.copy_from_slice(&out[r * d_v..(r + 1) * d_v]);
            *place.lse = divide_by(place.out, lse[r], log_add(near, rest), log_weights);
        }
        Ok((rows * (near.len() + far.len() + chosen)) as u64)
    })?;
    let residual_rows = m.min(q.n_q()) * q.heads();
    Ok(RunInfo::visited(visited.into_iter().sum::<u64>() + (residual_rows * n) as u64))
}

/// Returns, for each head, the logarithm of the largest sum of exponentials outside a row's own block, over `m` rows.
fn largest_residuals<T: Real>(
    group: &Group<'_, T>,
    blocks: &SortedBlocks,
    m: usize,
    key: StreamKey,
) -> Vec<T> {
    let (q, k, scale, cx) = (group.q, group.k, group.scale, group.cx);
    let (heads, n_q, d) = (q.heads(), q.n_q(), k.cols());
    let mut block_of = vec![0usize; heads * n_q];
    for c in 0..blocks.blocks() {
        for r in blocks.block_rows(c) {
            block_of[r.head as usize * n_q + r.row as usize] = c;
        }
    }
    // One set of rows for all heads, so that a head computed alone gives the same result.
    let chosen = key.rng().subset(n_q, m);
    let rows = heads * chosen.len();
    let mut queries = cx.scratch.take::<T>(rows * d);
    for (h, out) in queries.chunks_exact_mut((chosen.len() * d).max(1)).enumerate() {
        q.head(h).gather_into(chosen.iter().copied(), out);
    }
    let queries = MatRef::new(&queries, rows, d);
    // Block by block, so that each row can leave out its own: blocks × rows.
    let mut sums = cx.scratch.take::<T>(blocks.blocks() * rows);
    sums.par_chunks_mut(rows.max(1)).enumerate().with_max_len(1).for_each(|(c, sums)| {
        let near = blocks.block_keys(c);
        let mut keys = cx.scratch.take::<T>(near.len() * d);
        k.gather_into(near.iter().map(|&j| j as usize), &mut keys);
        log_sums(queries, MatRef::new(&keys, near.len(), d), scale, cx, sums);
    });
    let residual = |r: usize| {
        let own = block_of[r / chosen.len() * n_q + chosen[r % chosen.len()]];
        (0..blocks.blocks())
            .filter(|&c| c != own)
            .fold(T::NEG_INFINITY, |total, c| log_add(total, sums[c * rows + r]))
    };
    (0..heads)
        .map(|h| (h * chosen.len()..(h + 1) * chosen.len()).map(residual).fold(T::NEG_INFINITY, T::max))
        .collect()
}

/// $\ln \sum_j e^{s_{ij}}$ of every row.
fn log_sums<T: Real>(
    q: MatRef<'_, T>,
    k: MatRef<'_, T>,
    scale: T,
    cx: crate::workspace::Context<'_>,
    out: &mut [T],
) {
    let ones = cx.scratch.take_zeroed::<T>(k.rows());
    let mut unused = cx.scratch.take::<T>(q.rows());
    exact_rows(q, k, MatRef::new(&ones, k.rows(), 1), None, scale, Band::ALL, cx, &mut unused, out);
}

/// $\ln(e^a + e^b)$.
fn log_add<T: Real>(a: T, b: T) -> T {
    let (low, high) = if a < b { (a, b) } else { (b, a) };
    if low == T::NEG_INFINITY { high } else { high + ((low - high).exp() + T::ONE).ln() }
}

/// $\ln \sum_j \min(e^{s_j}, e^c)$.
fn capped_log_sum<T: Real>(logits: &[T], cap: T) -> T {
    let capped = |s: T| if s > cap { cap } else { s };
    let top = logits.iter().fold(T::NEG_INFINITY, |top, &s| if capped(s) > top { capped(s) } else { top });
    if top == T::NEG_INFINITY {
        return top;
    }
    top + logits.iter().map(|&s| (capped(s) - top).exp()).sum::<T>().ln()
}
