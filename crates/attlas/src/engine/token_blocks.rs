//! Blocks of consecutive rows of all query heads of a group, for methods that choose keys once per block.

use crate::group::{Group, Queries};
use crate::{Real, Result};
use attlas_num::par::*;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Some consecutive rows of every query head of a group, with slots for their results.
#[derive(Debug)]
pub struct TokenBlock<'a, T> {
    /// First row.
    pub first: usize,
    /// The queries of the rows.
    pub q: Queries<'a, T>,
    /// For each head the outputs and log-sum-exps of the rows.
    pub heads: Vec<(&'a mut [T], &'a mut [T])>,
}

impl<T: Real> TokenBlock<'_, T> {
    /// Rows of each head.
    pub fn rows(&self) -> usize {
        self.q.n_q()
    }
}

/// Runs `work` in parallel on blocks of `rows` rows of all heads, later blocks first: with a causal mask these take
/// longest. Results are in the order of the rows.
pub fn par_token_blocks<T: Real, R: Send>(
    g: &mut Group<'_, T>,
    rows: usize,
    work: impl Fn(TokenBlock<'_, T>) -> Result<R> + Sync + Send,
) -> Result<Vec<R>> {
    let (n_q, d_v, q, threads) = (g.n_q(), g.d_v(), g.q, g.cx.schedule.threads);
    if n_q == 0 || q.heads() == 0 {
        return Ok(Vec::new());
    }
    let rows = rows.clamp(1, n_q);
    let mut blocks: Vec<TokenBlock<'_, T>> = (0..n_q)
        .step_by(rows)
        .map(|first| TokenBlock {
            first,
            q: q.rows(first..(first + rows).min(n_q)),
            heads: Vec::with_capacity(q.heads()),
        })
        .collect();
    for (out, lse) in g.out.chunks_mut(n_q * d_v).zip(g.lse.chunks_mut(n_q)) {
        let places = out.chunks_mut(rows * d_v).zip(lse.chunks_mut(rows));
        blocks.iter_mut().zip(places).for_each(|(block, place)| block.heads.push(place));
    }
    let count = blocks.len();
    let blocks: Vec<Mutex<Option<TokenBlock<'_, T>>>> =
        blocks.into_iter().map(|b| Mutex::new(Some(b))).collect();
    let taken = AtomicUsize::new(0);
    let take = || {
        let at = count.checked_sub(1 + taken.fetch_add(1, Ordering::Relaxed))?;
        let block = blocks[at].lock().unwrap_or_else(PoisonError::into_inner).take()?;
        Some((at, block))
    };
    let of_thread = |_| {
        let mut results = Vec::new();
        while let Some((at, block)) = take() {
            results.push((at, work(block)?));
        }
        Ok(results)
    };
    let results: Result<Vec<Vec<(usize, R)>>> =
        (0..threads.clamp(1, count)).into_par_iter().with_max_len(1).map(of_thread).collect();
    let mut results: Vec<(usize, R)> = results?.into_iter().flatten().collect();
    results.sort_by_key(|&(at, _)| at);
    Ok(results.into_iter().map(|(_, result)| result).collect())
}
