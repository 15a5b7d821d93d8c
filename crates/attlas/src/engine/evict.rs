//! A cache of bounded size: keys accumulate scores from the rows that attend to them, and the lowest-scored are
//! evicted.

use crate::group::{Group, GroupStream};
use crate::method::RunInfo;
use crate::workspace::Context;
use crate::{MatRef, Problem, Real, Result};
use attlas_num::cluster::select_top;
use attlas_num::kernels::{Attend, Band, Op, Precision, axpy, exp_sum, gemm, max};
use attlas_num::par::*;

/// Rule that selects the keys to keep.
#[derive(Clone, Copy, Debug)]
pub struct Eviction {
    /// Number of keys kept for their high scores.
    pub keys: usize,
    /// Number of last keys kept whatever their scores.
    pub recent: usize,
    /// Rows between two evictions.
    pub interval: usize,
    /// Rows before an eviction whose weights are counted; all rows so far if `None`.
    pub observed: Option<usize>,
    /// Width of the max pooling: a key counts with the best score among this number of neighbours, itself in the
    /// middle.
    pub pool: usize,
}

impl Eviction {
    /// Returns the largest number of keys in a stream without a prompt.
    pub fn most(&self) -> usize {
        self.keys.saturating_add(self.recent).saturating_add(self.interval)
    }

    /// Attends with all rows of a causal group, in blocks between evictions.
    pub fn run<T: Real>(&self, g: &mut Group<'_, T>) -> Result<RunInfo> {
        let (n_q, n_k, d_v, cx, scale) = (g.n_q(), g.n_k(), g.d_v(), g.cx, g.scale);
        let mut kept = EvictingCache::new(*self, g.k.cols(), d_v);
        let mut info = RunInfo::default();
        let unseen = n_q.saturating_sub(n_k);
        info.empty_rows = (unseen * g.q.heads()) as u64;
        for (out, lse) in g.out.chunks_mut(n_q * d_v).zip(g.lse.chunks_mut(n_q)) {
            out[..unseen * d_v].fill(T::ZERO);
            lse[..unseen].fill(T::NEG_INFINITY);
        }
        // The keys before the first row are the prompt, whose queries are unknown.
        let prompt = n_k.saturating_sub(n_q);
        kept.push(g.k.sub_rows(0..prompt), g.v.sub_rows(0..prompt));
        for first in (unseen..n_q).step_by(self.interval) {
            let rows = first..(first + self.interval).min(n_q);
            let keys = rows.start + n_k - n_q..rows.end + n_k - n_q;
            kept.push(g.k.sub_rows(keys.clone()), g.v.sub_rows(keys));
            let before = kept.len() - rows.len();
            let band = Band::causal(before as isize);
            let counted = self.counted(0, rows.len());
            let q = g.q.rows(rows.clone());
            let work =
                g.out.par_chunks_mut(n_q * d_v).zip(g.lse.par_chunks_mut(n_q)).with_max_len(1).enumerate();
            let scores: Vec<Vec<T>> = work
                .map(|(h, (out, lse))| {
                    let q = q.head(h);
                    let out = &mut out[rows.start * d_v..rows.end * d_v];
                    kept.attend(q, scale, band, false, cx, out, &mut lse[rows.clone()]);
                    kept.weights(q.sub_rows(counted.clone()), scale, band.from_row(counted.start), cx)
                })
                .collect();
            scores.iter().for_each(|scores| kept.count(scores));
            let heads = g.q.heads() as u64;
            info.keys_visited += heads * (0..rows.len()).map(|r| (before + r + 1) as u64).sum::<u64>();
            if rows.len() == self.interval {
                kept.evict();
            }
        }
        info.figures.insert("decode_bytes", kept.most_bytes() as f64);
        Ok(info)
    }

    /// Returns which of `rows` rows are counted, after `done` others since the last eviction.
    fn counted(&self, done: usize, rows: usize) -> std::ops::Range<usize> {
        let first = self.observed.map_or(0, |observed| self.interval.saturating_sub(observed));
        first.saturating_sub(done).min(rows)..rows
    }

    /// Makes a stream with eviction.
    pub fn stream<T: Real>(&self, p: &Problem) -> Box<dyn GroupStream<T>> {
        Box::new(EvictingStream { kept: EvictingCache::new(*self, p.d, p.d_v), done: 0 })
    }
}

/// The kept keys and values, in the order of their tokens, and their scores.
#[derive(Debug)]
struct EvictingCache<T> {
    rule: Eviction,
    d: usize,
    d_v: usize,
    k: Vec<T>,
    v: Vec<T>,
    scores: Vec<T>,
}

impl<T: Real> EvictingCache<T> {
    fn new(rule: Eviction, d: usize, d_v: usize) -> Self {
        Self { rule, d, d_v, k: Vec::new(), v: Vec::new(), scores: Vec::new() }
    }

    fn len(&self) -> usize {
        self.scores.len()
    }

    fn bytes(&self) -> usize {
        (self.k.len() + self.v.len() + self.scores.len()) * size_of::<T>()
    }

    /// Returns the bytes of a full cache just before an eviction.
    fn most_bytes(&self) -> usize {
        self.rule.most().saturating_mul((self.d + self.d_v + 1) * size_of::<T>())
    }

    fn keys(&self) -> MatRef<'_, T> {
        MatRef::new(&self.k, self.len(), self.d)
    }

    fn push(&mut self, k: MatRef<'_, T>, v: MatRef<'_, T>) {
        k.iter_rows().for_each(|row| self.k.extend_from_slice(row));
        v.iter_rows().for_each(|row| self.v.extend_from_slice(row));
        self.scores.resize(self.scores.len() + k.rows(), T::ZERO);
    }

    #[allow(clippy::too_many_arguments)]
    fn attend(
        &self,
        q: MatRef<'_, T>,
        scale: T,
        band: Band,
        decode: bool,
        cx: Context<'_>,
        out: &mut [T],
        lse: &mut [T],
    ) {
        let job = Attend {
            q,
            k: self.keys(),
            v: MatRef::new(&self.v, self.len(), self.d_v),
            scale,
            bias: None,
            band,
            tile_k: cx.schedule.tile_k,
            isa: cx.schedule.isa,
            precision: Precision::Full,
            decode,
            softcap: None,
        };
        job.run(cx.scratch, out, lse);
    }

    /// Sums the weights of each key over the rows.
    fn weights(&self, q: MatRef<'_, T>, scale: T, band: Band, cx: Context<'_>) -> Vec<T> {
        let n = self.len();
        let mut total = vec![T::ZERO; n];
        let mut logits = cx.scratch.take::<T>(q.rows() * n);
        gemm(cx.schedule.isa, scale, Op::N(q), Op::T(self.keys()), T::ZERO, &mut logits, n, cx.scratch);
        for (r, row) in logits.chunks_exact_mut(n.max(1)).enumerate() {
            let seen = band.range(r, n);
            let row = &mut row[seen.clone()];
            let top = max(row);
            let sum = exp_sum(row, top);
            if sum > T::ZERO {
                axpy(T::ONE / sum, row, &mut total[seen]);
            }
        }
        total
    }

    fn count(&mut self, weights: &[T]) {
        self.scores.iter_mut().zip(weights).for_each(|(s, &w)| *s += w);
    }

    /// Evicts the keys with the lowest scores.
    fn evict(&mut self) {
        let Eviction { keys, recent, observed, pool, .. } = self.rule;
        let old = self.len().saturating_sub(recent);
        if old > keys {
            let side = pool / 2;
            let best = |j: usize| {
                let around = j.saturating_sub(side)..(j + side + 1).min(old);
                self.scores[around].iter().copied().fold(T::NEG_INFINITY, T::max)
            };
            let pooled: Vec<T> = (0..old).map(best).collect();
            let mut chosen = Vec::new();
            select_top(&pooled, keys, &mut chosen);
            chosen.extend(old..self.len());
            for (to, from) in chosen.into_iter().enumerate() {
                self.k.copy_within(from * self.d..(from + 1) * self.d, to * self.d);
                self.v.copy_within(from * self.d_v..(from + 1) * self.d_v, to * self.d_v);
                self.scores[to] = self.scores[from];
            }
            let len = keys + self.len() - old;
            self.k.truncate(len * self.d);
            self.v.truncate(len * self.d_v);
            self.scores.truncate(len);
        }
        if observed.is_some() {
            self.scores.fill(T::ZERO);
        }
    }
}

/// Decoding with a cache of bounded size.
#[derive(Debug)]
struct EvictingStream<T> {
    kept: EvictingCache<T>,
    /// Rows since the last eviction.
    done: usize,
}

impl<T: Real> GroupStream<T> for EvictingStream<T> {
    fn push(&mut self, k: MatRef<'_, T>, v: MatRef<'_, T>, _: Context<'_>) -> Result<()> {
        self.kept.push(k, v);
        Ok(())
    }

    fn attend(
        &mut self,
        q: MatRef<'_, T>,
        scale: T,
        out: &mut [T],
        lse: &mut [T],
        cx: Context<'_>,
    ) -> Result<RunInfo> {
        let kept = &mut self.kept;
        kept.attend(q, scale, Band::ALL, true, cx, out, lse);
        if !kept.rule.counted(self.done, 1).is_empty() {
            let weights = kept.weights(q, scale, Band::ALL, cx);
            kept.count(&weights);
        }
        let visited = (q.rows() * kept.len()) as u64;
        self.done += 1;
        if self.done == kept.rule.interval {
            kept.evict();
            self.done = 0;
        }
        Ok(RunInfo::visited(visited))
    }

    fn state_bytes(&self) -> usize {
        self.kept.bytes()
    }
}
