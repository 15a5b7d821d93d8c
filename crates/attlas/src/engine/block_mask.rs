//! Blocks of queries that attend to lists of keys: the common core of the methods that sort, hash or route.
//!
//! [`Buckets`] put queries into blocks; a [`BlockMask`] gives the keys of a block and the part of them that each row
//! sees. Blocks run in parallel, each on keys and queries gathered into contiguous scratch, and write their rows in
//! bucket order; then every query merges its rows into its previous result. A query may be in several blocks, or in
//! none.

use super::{attend_tile, exact_rows};
use crate::workspace::Context;
use attlas_num::kernels::{Band, ROWS_AHEAD, merge_lse, prefetch};
use attlas_num::par::*;
use attlas_num::{Buf, MatRef, Real};
use std::ops::Range;

/// Queries merged by one task.
const MERGE_ROWS: usize = 512;
/// Consecutive blocks of one task: keys that two neighbours share are gathered once.
const TASK_BLOCKS: usize = 4;

/// Queries in the order of their blocks.
#[derive(Clone, Debug)]
pub struct Buckets {
    order: Vec<u32>,
    starts: Vec<usize>,
}

impl Buckets {
    /// Makes buckets in which block `b` holds the queries `order[starts[b]..starts[b + 1]]`.
    pub fn new(order: Vec<u32>, starts: Vec<usize>) -> Self {
        debug_assert_eq!(starts.last(), Some(&order.len()));
        Self { order, starts }
    }

    /// Makes buckets in which query `i` is in block `blocks[i]`, or in none if that is not below `count`.
    pub fn from_blocks(blocks: &[u32], count: usize) -> Self {
        let mut starts = vec![0; count + 1];
        let inside = || blocks.iter().zip(0u32..).filter(|(b, _)| (**b as usize) < count);
        inside().for_each(|(&b, _)| starts[b as usize + 1] += 1);
        (0..count).for_each(|b| starts[b + 1] += starts[b]);
        let (mut next, mut order) = (starts.clone(), vec![0; starts[count]]);
        for (&b, i) in inside() {
            order[next[b as usize]] = i;
            next[b as usize] += 1;
        }
        Self { order, starts }
    }

    /// Number of blocks.
    pub fn blocks(&self) -> usize {
        self.starts.len() - 1
    }

    /// The queries of a block.
    pub fn block(&self, b: usize) -> &[u32] {
        &self.order[self.range(b)]
    }

    fn range(&self, b: usize) -> Range<usize> {
        self.starts[b]..self.starts[b + 1]
    }

    /// Returns the places of every query in the order: those of query `i` are `places[starts[i]..starts[i + 1]]`.
    fn places(&self, n_q: usize) -> (Vec<usize>, Vec<u32>) {
        let mut starts = vec![0; n_q + 1];
        self.order.iter().for_each(|&i| starts[i as usize + 1] += 1);
        (0..n_q).for_each(|i| starts[i + 1] += starts[i]);
        let (mut next, mut places) = (starts.clone(), vec![0; self.order.len()]);
        for (&i, place) in self.order.iter().zip(0..) {
            places[next[i as usize]] = place;
            next[i as usize] += 1;
        }
        (starts, places)
    }
}

/// A row of a block.
#[derive(Clone, Copy, Debug)]
pub struct BlockRow {
    /// Its place in the block.
    pub place: usize,
    /// Its query.
    pub query: usize,
}

/// The keys that each row of a block sees.
pub trait BlockMask<T>: Sync {
    /// Data prepared once for all rows of a block.
    type Block;

    /// Returns the keys that some row of block `b` may see, in the order in which they are gathered.
    fn keys(&self, b: usize) -> Vec<u32>;

    /// Prepares block `b` with its `queries` and `keys`; `None` if every row sees every key.
    fn enter(&self, b: usize, queries: &[u32], keys: &[u32]) -> Option<Self::Block>;

    /// Returns the range of `keys` that a row of the block sees; may set logits inside it to −∞.
    fn see(&self, block: &Self::Block, row: BlockRow, keys: &[u32], logits: &mut [T]) -> Range<usize>;
}

/// Rule for joining the rows of a query that is in several blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Join {
    /// By log-sum-exp, with each other and with the previous output.
    LogSumExp,
    /// Outputs are averaged and replace the previous output; log-sum-exps are joined.
    Mean,
}

/// Runs all blocks over the rows `q` and joins the results into `out` (`n_q × d_v`) and `lse`. Returns the number of
/// pairs of a query and a key whose logit was computed.
#[allow(clippy::too_many_arguments)]
pub fn attend_buckets<T: Real, M: BlockMask<T>>(
    block_mask: &M,
    buckets: &Buckets,
    q: MatRef<'_, T>,
    k: MatRef<'_, T>,
    v: MatRef<'_, T>,
    scale: T,
    join: Join,
    cx: Context<'_>,
    out: &mut [T],
    lse: &mut [T],
) -> u64 {
    let (d, d_v, n) = (q.cols(), v.cols(), buckets.order.len());
    let mut rows = cx.scratch.take::<T>(n * d_v);
    let mut logs = cx.scratch.take::<T>(n);
    let mut blocks = Vec::with_capacity(buckets.blocks());
    let (mut rest_rows, mut rest_logs) = (&mut rows[..], &mut logs[..]);
    for b in 0..buckets.blocks() {
        let len = buckets.range(b).len();
        let (own_rows, tail_rows) = rest_rows.split_at_mut(len * d_v);
        let (own_logs, tail_logs) = rest_logs.split_at_mut(len);
        (rest_rows, rest_logs) = (tail_rows, tail_logs);
        if len > 0 {
            blocks.push((b, own_rows, own_logs));
        }
    }
    let visited: u64 = blocks
        .par_chunks_mut(TASK_BLOCKS)
        .with_max_len(1)
        .map(|blocks| {
            let mut visited = 0;
            let mut met: Option<Gathered<'_, T>> = None;
            for (b, out, lse) in blocks {
                let queries = buckets.block(*b);
                let mut own_q = cx.scratch.take::<T>(queries.len() * d);
                q.gather_into(queries.iter().map(|&i| i as usize), &mut own_q);
                let met = met.insert(Gathered::new(block_mask.keys(*b), met.as_ref(), k, v, cx));
                let keys = &met.keys[..];
                let own_q = MatRef::new(&own_q, queries.len(), d);
                let own_k = MatRef::new(&met.k, keys.len(), d);
                let own_v = MatRef::new(&met.v, keys.len(), d_v);
                match block_mask.enter(*b, queries, keys) {
                    None => exact_rows(own_q, own_k, own_v, None, scale, Band::ALL, cx, out, lse),
                    Some(block) => {
                        let see = |place: usize, logits: &mut [T]| {
                            let row = BlockRow { place, query: queries[place] as usize };
                            block_mask.see(&block, row, keys, logits)
                        };
                        attend_tile(own_q, own_k, own_v, scale, cx, see, out, lse);
                    }
                }
                visited += (queries.len() * keys.len()) as u64;
            }
            visited
        })
        .sum();
    let (starts, places) = buckets.places(q.rows());
    out.par_chunks_mut(MERGE_ROWS * d_v).zip(lse.par_chunks_mut(MERGE_ROWS)).enumerate().for_each(
        |(t, (out, lse))| {
            for ((i, out), lse) in (t * MERGE_ROWS..).zip(out.chunks_exact_mut(d_v)).zip(lse) {
                // Rows in bucket order are scattered: those of later queries are prefetched.
                if let Some(&later) = places.get(starts[i] + ROWS_AHEAD) {
                    prefetch(&rows[later as usize * d_v..(later as usize + 1) * d_v]);
                }
                let places = &places[starts[i]..starts[i + 1]];
                let part = |p: u32| (&rows[p as usize * d_v..(p as usize + 1) * d_v], logs[p as usize]);
                match join {
                    Join::LogSumExp => places.iter().for_each(|&p| {
                        let (o, l) = part(p);
                        merge_lse(out, lse, o, l);
                    }),
                    Join::Mean => mean_into(places.iter().map(|&p| part(p)), out, lse),
                }
            }
        },
    );
    visited
}

/// The keys of a block, gathered with their values.
struct Gathered<'a, T> {
    keys: Vec<u32>,
    k: Buf<'a, T>,
    v: Buf<'a, T>,
}

impl<'a, T: Real> Gathered<'a, T> {
    /// Gathers `keys`. A beginning that is also the end of `before` is copied from there, which is close in memory.
    fn new(
        keys: Vec<u32>,
        before: Option<&Self>,
        k: MatRef<'_, T>,
        v: MatRef<'_, T>,
        cx: Context<'a>,
    ) -> Self {
        let known = before.map_or(0, |before| overlap(&before.keys, &keys));
        let gather = |x: MatRef<'_, T>, before: Option<&[T]>| {
            let mut rows = cx.scratch.take::<T>(keys.len() * x.cols());
            let (old, new) = rows.split_at_mut(known * x.cols());
            if let Some(before) = before {
                old.copy_from_slice(&before[before.len() - old.len()..]);
            }
            x.gather_into(keys[known..].iter().map(|&j| j as usize), new);
            rows
        };
        let (k, v) = (gather(k, before.map(|m| &m.k[..])), gather(v, before.map(|m| &m.v[..])));
        Self { keys, k, v }
    }
}

/// Returns how many keys are both the end of `before` and the beginning of `keys`.
fn overlap(before: &[u32], keys: &[u32]) -> usize {
    let start = before.iter().position(|j| keys.first() == Some(j)).unwrap_or(before.len());
    let shared = &before[start..];
    if keys.starts_with(shared) { shared.len() } else { 0 }
}

/// Computes the average of the outputs that saw a key, and the joined log-sum-exp.
fn mean_into<'a, T: Real>(parts: impl Iterator<Item = (&'a [T], T)>, out: &mut [T], lse: &mut T) {
    out.fill(T::ZERO);
    *lse = T::NEG_INFINITY;
    let mut count = T::ZERO;
    for (o, l) in parts.filter(|(_, l)| *l != T::NEG_INFINITY) {
        out.iter_mut().zip(o).for_each(|(a, &b)| *a += b);
        merge_lse(&mut [], lse, &[], l);
        count += T::ONE;
    }
    if count > T::ZERO {
        out.iter_mut().for_each(|x| *x /= count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_find_their_places_again() {
        let buckets = Buckets::from_blocks(&[2, 0, 9, 2, 1, 0], 3);
        assert_eq!(
            (buckets.block(0), buckets.block(1), buckets.block(2)),
            (&[1, 5][..], &[4][..], &[0, 3][..])
        );
        let (starts, places) = buckets.places(6);
        assert_eq!(starts, [0, 1, 2, 2, 3, 4, 5]);
        assert_eq!(places, [3, 0, 4, 2, 1]);
        let twice = Buckets::new(vec![1, 0, 1], vec![0, 2, 3]);
        assert_eq!(twice.places(2), (vec![0, 1, 3], vec![1, 0, 2]));
    }

    #[test]
    fn keys_of_the_block_before_are_recognised() {
        assert_eq!(overlap(&[4, 1, 7, 2], &[7, 2, 9]), 2);
        assert_eq!(overlap(&[4, 1], &[4, 1]), 2);
        assert_eq!(overlap(&[4, 1, 7], &[1, 9]), 0);
        assert_eq!(overlap(&[4, 1, 7], &[1]), 0);
        assert_eq!(overlap(&[3, 5, 3], &[3, 8]), 0);
        assert_eq!((overlap(&[], &[1]), overlap(&[1], &[])), (0, 0));
    }

    #[test]
    fn a_mean_leaves_out_parts_that_saw_nothing() {
        let parts = [([2.0, 4.0], 0.0f64), ([0.0, 0.0], f64::NEG_INFINITY), ([4.0, 0.0], 3f64.ln())];
        let (mut out, mut lse) = ([f64::NAN; 2], f64::NAN);
        mean_into(parts.iter().map(|(o, l)| (&o[..], *l)), &mut out, &mut lse);
        assert_eq!(out, [3.0, 2.0]);
        assert!((lse - 4f64.ln()).abs() < 1e-15);
    }
}
