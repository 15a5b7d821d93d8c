//! Decoding: a choice of keys renewed at intervals, the means of all other runs, and the window.

use super::choose::{VOTE, voters};
use super::{Params, SampledColumns};
use crate::engine::{CachedRows, Gathered, RunMeans};
use crate::group::GroupStream;
use crate::method::RunInfo;
use crate::workspace::Context;
use crate::{MatRef, Problem, Real, Result};
use attlas_num::cluster::select_top;
use attlas_num::kernels::{Attend, Band, Precision, axpy, exp_sum, matvec, max, merge_lse};
use attlas_num::par::*;
use std::ops::Range;

/// Keys whose logits a task computes, and gathered keys that a task attends to; fixed, so that results do not depend on
/// the number of threads.
const SCORED: usize = 2048;
const PIECE: usize = 1024;

/// Votes below this are dropped: the weakest vote decays to it in three refreshes.
const FORGOTTEN: f64 = VOTE / 8.0;

/// A key with a large share of a token's weight.
#[derive(Clone, Copy, Debug)]
struct Vote {
    key: usize,
    /// Mass that all heads of the token give to the key, plus its earlier mass, decayed.
    weight: f64,
    known: f64,
}

/// The cache, the masses of its keys, and the keys that the next tokens attend to beside the window.
#[derive(Debug)]
pub(super) struct ColumnStream<T> {
    plan: SampledColumns,
    cached: CachedRows<T>,
    means: RunMeans<T>,
    /// Decayed mass of each key.
    mass: Vec<T>,
    /// Decayed votes for distances, in order of distance.
    votes: Vec<(usize, f64)>,
    /// Keys chosen at the last refresh, in increasing order.
    chosen: Vec<u32>,
    /// True after the first refresh, and the tokens attended since the last one.
    refreshed: bool,
    since: usize,
    /// Start of the window when `far` was gathered.
    edge: usize,
    far: FarKeys<T>,
}

/// Sinks, chosen keys and means, contiguously.
#[derive(Debug, Default)]
struct FarKeys<T> {
    k: Vec<T>,
    v: Vec<T>,
    bias: Vec<T>,
}

impl<T: Real> ColumnStream<T> {
    pub(super) fn new(plan: SampledColumns, p: &Problem) -> Self {
        let means = RunMeans::new(plan.params.far_block, plan.parts(), p.d, p.d_v);
        Self {
            plan,
            cached: CachedRows::new(p.d, p.d_v),
            means,
            mass: Vec::new(),
            votes: Vec::new(),
            chosen: Vec::new(),
            refreshed: false,
            since: 0,
            edge: 0,
            far: FarKeys { k: Vec::new(), v: Vec::new(), bias: Vec::new() },
        }
    }

    /// Adds the exact weights of a token over all keys to half the masses so far, and renews the choice.
    fn refresh(&mut self, q: MatRef<'_, T>, scale: T, edge: usize, cx: Context<'_>) -> u64 {
        let (n, heads) = (self.cached.tokens(), q.rows());
        let k = self.cached.keys();
        let pieces = n.div_ceil(SCORED);
        let mut weights = cx.scratch.take::<T>(n * heads);
        // For each piece and head: the largest logit, and the sum of weights relative to it.
        let mut found = cx.scratch.take::<T>(2 * pieces * heads);
        let each = weights.par_chunks_mut(SCORED * heads).zip(found.par_chunks_mut(2 * heads));
        // One piece of the keys at a time, so that each key is read once for all heads.
        each.with_max_len(1).enumerate().for_each(|(t, (logits, found))| {
            let keys = k.sub_rows(t * SCORED..t * SCORED + logits.len() / heads);
            let rows = q.iter_rows().zip(logits.chunks_exact_mut(keys.rows()));
            for ((q, logits), found) in rows.zip(found.chunks_exact_mut(2)) {
                matvec(keys, q, logits);
                logits.iter_mut().for_each(|x| *x *= scale);
                let top = max(logits);
                found[0] = top;
                found[1] = exp_sum(logits, if top == T::NEG_INFINITY { T::ZERO } else { top });
            }
        });
        // Factors that turn the weights of a piece and head into shares of the whole.
        let mut shares = vec![T::ZERO; pieces * heads];
        for h in 0..heads {
            let of_head =
                || (0..pieces).map(|t| (found[2 * (t * heads + h)], found[2 * (t * heads + h) + 1]));
            let top = of_head().fold(T::NEG_INFINITY, |m, (top, _)| m.max(top));
            let total = of_head().fold(T::ZERO, |total, (t, sum)| total + (t - top).exp() * sum);
            for (t, (piece, _)) in of_head().enumerate() {
                shares[t * heads + h] = (piece - top).exp() / total;
            }
        }
        // The sum over all heads overwrites the first head's weights.
        let each = weights.par_chunks_mut(SCORED * heads).zip(shares.par_chunks(heads));
        each.with_max_len(1).for_each(|(weights, shares)| {
            let (first, others) = weights.split_at_mut(weights.len() / heads);
            first.iter_mut().for_each(|w| *w *= shares[0]);
            let others = others.chunks_exact(first.len()).zip(&shares[1..]);
            others.for_each(|(weights, &share)| axpy(share, weights, first));
        });
        let half = T::from_f64(0.5);
        self.mass.resize(n, T::ZERO);
        let far = self.plan.params.sinks.min(edge)..edge;
        let mut votes = Vec::new();
        for (t, weights) in weights.chunks(SCORED * heads).enumerate() {
            let keys = t * SCORED..t * SCORED + weights.len() / heads;
            let weights = &weights[..keys.len()];
            if self.plan.params.diagonals > 0 {
                voters(weights, T::ONE, keys.start, &far, |j, weight| {
                    votes.push(Vote { key: j, weight, known: self.mass[j].to_f64() });
                });
            }
            self.mass[keys].iter_mut().zip(weights).for_each(|(m, &w)| *m = half * *m + w);
        }
        self.choose(n, edge, &votes);
        (n * heads) as u64
    }

    /// Chooses the heaviest keys between sinks and `edge`, and the runs at the distances with most votes.
    fn choose(&mut self, n: usize, edge: usize, votes: &[Vote]) {
        let Params { mass: wanted, diagonals, refresh, sinks, .. } = self.plan.params;
        let far = sinks.min(edge)..edge;
        let keys = self.plan.params.chosen_of(far.len());
        let mass = &self.mass[far.clone()];
        let mut found = Vec::new();
        select_top(mass, keys, &mut found);
        if wanted < 1.0 {
            let total = wanted * mass.iter().map(|m| m.to_f64()).sum::<f64>();
            found.sort_by(|&a, &b| mass[b].partial_cmp(&mass[a]).unwrap_or(std::cmp::Ordering::Equal));
            let mut covered = 0.0;
            let enough = found.iter().take_while(|&&i| {
                let short = covered < total;
                covered += mass[i].to_f64();
                short
            });
            let count = enough.count();
            found.truncate(count);
        }
        self.chosen.clear();
        self.chosen.extend(found.iter().map(|&i| (far.start + i) as u32));
        let run = refresh.min(n);
        for distance in self.count(n, votes).into_iter().take(diagonals) {
            let start = n - 1 - distance;
            self.chosen.extend((start.max(far.start)..(start + run).min(edge)).map(|j| j as u32));
        }
        self.chosen.sort_unstable();
        self.chosen.dedup();
    }

    /// Ranks distances by their votes: the weight that earlier tokens also had at this distance, or that is new to the
    /// key. A key with weight from every token has neither.
    fn count(&mut self, n: usize, votes: &[Vote]) -> Vec<usize> {
        let earlier = |distance| match self.votes.binary_search_by_key(&distance, |v| v.0) {
            Ok(i) => self.votes[i].1,
            Err(_) => 0.0,
        };
        let counted = votes.iter().map(|vote| {
            let distance = n - 1 - vote.key;
            (distance, earlier(distance).min(vote.weight).max(vote.weight - vote.known))
        });
        let mut counted: Vec<(usize, f64)> = counted.filter(|(_, votes)| *votes > 0.0).collect();
        counted.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        let mut all: Vec<(usize, f64)> = self.votes.iter().map(|(o, weight)| (*o, 0.5 * weight)).collect();
        all.extend(votes.iter().map(|vote| (n - 1 - vote.key, vote.weight)));
        all.sort_by_key(|(distance, _)| *distance);
        let sums = all.chunk_by(|a, b| a.0 == b.0);
        let sums = sums.map(|votes| (votes[0].0, votes.iter().map(|(_, weight)| weight).sum()));
        self.votes = sums.filter(|(_, weight)| *weight >= FORGOTTEN).collect();
        counted.into_iter().map(|(distance, _)| distance).collect()
    }

    /// Gathers sinks, chosen keys and means again.
    fn gather(&mut self, edge: usize, cx: Context<'_>) {
        let (k, v, (d, d_v)) = (self.cached.keys(), self.cached.values(), self.cached.widths());
        let far = self.plan.params.sinks.min(edge)..edge;
        let parts = self.plan.parts();
        let pseudo = if parts > 0 { self.means.most(far.len()) } else { 0 };
        let mut all = Gathered::new(far.start + self.chosen.len() + pseudo, d, d_v, cx);
        all.append(k, v, 0..far.start);
        all.append(k, v, self.chosen.iter().map(|&j| j as usize));
        if parts > 0 {
            self.means.append(k, v, far, &self.chosen, &mut all);
        }
        let FarKeys { k, v, bias } = &mut self.far;
        k.clear();
        k.extend_from_slice(all.keys().data());
        v.clear();
        v.extend_from_slice(all.values().data());
        bias.clear();
        bias.extend_from_slice(all.biases());
        self.edge = edge;
    }
}

impl<T: Real> GroupStream<T> for ColumnStream<T> {
    fn push(&mut self, k: MatRef<'_, T>, v: MatRef<'_, T>, _: Context<'_>) -> Result<()> {
        self.cached.append(k, v);
        // On arrival of the keys, not when they become far: a prompt brings many at once.
        if self.plan.parts() > 0 {
            self.means.extend(self.cached.keys(), self.cached.values());
        }
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
        let Params { window, far_block, refresh, .. } = self.plan.params;
        let (n, heads) = (self.cached.tokens(), q.rows());
        // The token itself is always near.
        let edge = n.saturating_sub(window.max(1)) / far_block * far_block;
        let mut visited = 0;
        if edge > 0 && (!self.refreshed || self.since >= refresh) {
            visited += self.refresh(q, scale, edge, cx);
            (self.refreshed, self.since) = (true, 0);
            self.gather(edge, cx);
        } else if edge != self.edge {
            self.gather(edge, cx);
        }
        self.since += 1;
        let near = edge..n;
        let (d, d_v) = self.cached.widths();
        let far = &self.far;
        let rows = far.bias.len();
        let attend =
            |k: MatRef<'_, T>, v: MatRef<'_, T>, bias: Option<&[T]>, out: &mut [T], lse: &mut [T]| {
                let job = Attend {
                    q,
                    k,
                    v,
                    scale,
                    bias,
                    band: Band::ALL,
                    tile_k: 0,
                    isa: cx.schedule.isa,
                    precision: Precision::Full,
                    decode: true,
                    softcap: None,
                };
                job.run(cx.scratch, out, lse);
            };
        let part = |rows: Range<usize>, out: &mut [T], lse: &mut [T]| {
            let (k, v) = (MatRef::new(&far.k, far.bias.len(), d), MatRef::new(&far.v, far.bias.len(), d_v));
            attend(k.sub_rows(rows.clone()), v.sub_rows(rows.clone()), Some(&far.bias[rows]), out, lse);
        };
        let k = self.cached.keys().sub_rows(near.clone());
        let v = self.cached.values().sub_rows(near.clone());
        attend(k, v, None, out, lse);
        let pieces = rows.div_ceil(PIECE);
        let mut parts = cx.scratch.take::<T>(pieces * heads * d_v);
        let mut part_lse = cx.scratch.take::<T>(pieces * heads);
        let each = parts.par_chunks_mut((heads * d_v).max(1)).zip(part_lse.par_chunks_mut(heads.max(1)));
        each.with_max_len(1).enumerate().for_each(|(t, (out, lse))| {
            part(t * PIECE..rows.min((t + 1) * PIECE), out, lse);
        });
        for (part, part_lse) in parts.chunks_exact(heads * d_v).zip(part_lse.chunks_exact(heads)) {
            for (h, (lse, &lse2)) in lse.iter_mut().zip(part_lse).enumerate() {
                let row = h * d_v..(h + 1) * d_v;
                merge_lse(&mut out[row.clone()], lse, &part[row], lse2);
            }
        }
        visited += ((near.len() + rows) * heads) as u64;
        Ok(RunInfo::visited(visited))
    }

    fn state_bytes(&self) -> usize {
        let far = self.far.k.len() + self.far.v.len() + self.far.bias.len();
        let own = self.cached.bytes() + (self.mass.len() + far) * size_of::<T>();
        own + self.means.bytes() + 4 * self.chosen.len() + size_of_val(&self.votes[..])
    }
}
