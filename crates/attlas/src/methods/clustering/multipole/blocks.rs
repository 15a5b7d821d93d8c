//! Whole causal sequences in blocks of rows: clusters of consecutive chunks of keys, chosen once per block.

use super::state::share;
use super::{Far, Multipole, Params};
use crate::engine::{Gathered, NearField};
use crate::group::Group;
use crate::method::RunInfo;
use crate::{MatRef, Real, Result};
use attlas_num::cluster::kmeans::label_means;
use attlas_num::cluster::{Cut, Init, Metric, Options, kmeans, order_by};
use attlas_num::kernels::{Band, Op, Precision, axpy, exp_in_place, gemm, softmax_in_place};
use attlas_num::par::*;
use attlas_num::rng::StreamKey;

/// Rows that share a choice, and the number of rows, none later than the block's first, that make it.
const BLOCK: usize = 64;
const SCOUTS: usize = 4;
/// Maximum number of Lloyd iterations over a chunk.
const ITERS: usize = 5;

/// The clusters of all whole chunks of keys after the sinks, chunk by chunk.
#[derive(Debug)]
struct Chunks<T> {
    /// Means, one row for each cluster.
    k: Vec<T>,
    v: Vec<T>,
    log_counts: Vec<T>,
    /// Members of cluster `c` are `members[starts[c]..starts[c + 1]]`.
    members: Vec<u32>,
    starts: Vec<usize>,
    /// Number of clusters before each chunk.
    of_chunk: Vec<usize>,
}

impl<T: Real> Chunks<T> {
    fn new(k: MatRef<'_, T>, v: MatRef<'_, T>, params: &Params, key: StreamKey) -> Self {
        let Params { sinks, chunk, ratio, iters, .. } = *params;
        let count = k.rows().saturating_sub(sinks) / chunk;
        let clusters = share(chunk, ratio);
        let options = Options { clusters, iters: iters.min(ITERS), metric: Metric::Euclidean };
        let labels: Vec<Vec<u32>> = (0..count)
            .into_par_iter()
            .with_max_len(1)
            .map(|c| {
                let rows = k.sub_rows(sinks + c * chunk..sinks + (c + 1) * chunk);
                kmeans(rows, None, options, Init::Rows, key.with(c as u64)).labels
            })
            .collect();
        let (mut all, d, d_v) = (Self::empty(), k.cols(), v.cols());
        for (c, labels) in labels.iter().enumerate() {
            let first = sinks + c * chunk;
            let used = labels.iter().max().map_or(0, |&l| l as usize + 1);
            let rows = first..first + chunk;
            all.k.extend_from_slice(
                &label_means(k.sub_rows(rows.clone()), None, labels, used).0.data()[..used * d],
            );
            all.v
                .extend_from_slice(&label_means(v.sub_rows(rows), None, labels, used).0.data()[..used * d_v]);
            let mut counts = vec![0usize; used];
            labels.iter().for_each(|&l| counts[l as usize] += 1);
            let mut end = all.members.len();
            for count in counts {
                end += count;
                all.starts.push(end);
                all.log_counts.push(T::from_usize(count).ln());
            }
            all.members.extend(order_by(labels).iter().map(|&i| (first + i as usize) as u32));
            all.of_chunk.push(all.log_counts.len());
        }
        all
    }

    fn empty() -> Self {
        let (k, v, log_counts, members) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Self { k, v, log_counts, members, starts: vec![0], of_chunk: vec![0] }
    }

    fn members(&self, c: usize) -> &[u32] {
        &self.members[self.starts[c]..self.starts[c + 1]]
    }
}

impl Multipole {
    /// Number of whole chunks, without the last `interval` keys, visible to a block whose first row is at `position`.
    fn chunked(&self, position: usize) -> usize {
        let Params { sinks, chunk, interval, .. } = self.params;
        position.saturating_sub(sinks + interval) / chunk
    }

    /// Computes a causal group in blocks of rows.
    pub(super) fn run_blocks<T: Real>(&self, g: &mut Group<'_, T>) -> Result<RunInfo> {
        let Params { sinks, chunk, budget, far, .. } = self.params;
        let (n_q, n_k, mask, q, k, v, scale, cx) = (g.n_q(), g.n_k(), g.mask, g.q, g.k, g.v, g.scale, g.cx);
        let (d, d_v, heads) = (k.cols(), v.cols(), q.heads());
        let key = g.index.stream_key(self.params.seed).named("multipole blocks");
        let chunks = Chunks::new(k, v, &self.params, key);
        let field = NearField { block: BLOCK, sinks: 0, window: 0 };
        let visited = crate::engine::par_token_blocks(g, BLOCK, |block| {
            let query_block = field.query_block(mask, block.first, n_q, n_k);
            let count = self.chunked(query_block.position.max(0) as usize).min(chunks.of_chunk.len() - 1);
            let m = chunks.of_chunk[count];
            let near = if m > 0 { sinks + count * chunk } else { 0 };
            let means = MatRef::new(&chunks.k[..m * d], m, d);

            // Scouts score the clusters: the sum over rows and heads of the weight per key.
            let scouts = query_block.scouts(SCOUTS, BLOCK);
            let rows = scouts.len() * heads;
            let mut queries = cx.scratch.take::<T>(rows * d);
            let places = scouts.iter().flat_map(|&r| (0..heads).map(move |h| (r, h)));
            for (row, (r, h)) in queries.chunks_exact_mut(d).zip(places) {
                row.copy_from_slice(q.head(h).row(r));
            }
            let mut logits = cx.scratch.take::<T>(rows * m);
            let left = Op::N(MatRef::new(&queries, rows, d));
            gemm(cx.schedule.isa, scale, left, Op::T(means), T::ZERO, &mut logits, m.max(1), cx.scratch);
            let (mut scores, mut weights) = (cx.scratch.take_zeroed::<T>(m), cx.scratch.take::<T>(m));
            for logits in logits.chunks_exact_mut(m.max(1)) {
                let counted = logits.iter().zip(&chunks.log_counts);
                weights.iter_mut().zip(counted).for_each(|(w, (&s, &n))| *w = s + n);
                let total = softmax_in_place(&mut weights);
                logits.iter_mut().for_each(|s| *s -= total);
                exp_in_place(logits);
                axpy(T::ONE, logits, &mut scores);
            }
            let mut taken = vec![0u32; m + 1];
            let len = match m {
                0 => 0,
                _ if budget == 0 => 0,
                _ => Cut::within(&scores, |c| chunks.members(c).len(), budget).places(&scores, 0, &mut taken),
            };
            taken.truncate(len);

            let first = if m > 0 { sinks } else { 0 };
            let exact: usize = taken.iter().map(|&c| chunks.members(c as usize).len()).sum();
            let mut all =
                Gathered::new(first + exact + m + query_block.end - near.min(query_block.end), d, d_v, cx);
            all.append(k, v, 0..first);
            for &c in &taken {
                all.append(k, v, chunks.members(c as usize).iter().map(|&j| j as usize));
            }
            if far == Far::Monopole {
                let mut taken = taken.iter().peekable();
                for c in (0..m).filter(|&c| taken.next_if(|&&t| t as usize == c).is_none()) {
                    let (key, value) = (&chunks.k[c * d..(c + 1) * d], &chunks.v[c * d_v..(c + 1) * d_v]);
                    all.append_pseudo(key, value, chunks.log_counts[c]);
                }
            }
            let shared = all.len();
            all.append(k, v, near.min(query_block.end)..query_block.end);
            let band = Band::causal(shared as isize + query_block.position - near as isize);
            let mut visited = (rows * m) as u64;
            for (h, (out, lse)) in block.heads.into_iter().enumerate() {
                all.attend(block.q.head(h), scale, band, Precision::Full, cx, out, lse);
                visited += (0..query_block.rows).map(|r| band.range(r, all.len()).len() as u64).sum::<u64>();
            }
            Ok(visited)
        })?;
        let empty_rows = g.lse.iter().filter(|l| **l == T::NEG_INFINITY).count() as u64;
        let (keys_visited, rank) = (visited.into_iter().sum(), Some(chunks.log_counts.len()));
        Ok(RunInfo { keys_visited, empty_rows, rank, ..RunInfo::default() })
    }
}
