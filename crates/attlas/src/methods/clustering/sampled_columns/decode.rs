//! Decoding: a choice of keys renewed at intervals, the means of all other runs, and the window.

use super::choose::{VOTE, voters};
use super::{Params, SampledColumns};
use crate::engine::{CachedRows, RunMeans, Slots};
use crate::group::GroupStream;
use crate::method::RunInfo;
use crate::workspace::Context;
use crate::{MatRef, Problem, Real, Result};
use attlas_num::cluster::select_top;
use attlas_num::kernels::{
    Attend, Band, Precision, axpy, exp_sum, matvec_each, max, merge_lse, pages, scale as scale_by,
};
use attlas_num::par::*;
use std::ops::Range;

/// Keys whose logits a task computes, and gathered keys that a task attends to; fixed, so that results do not depend on
/// the number of threads.
const SCORED: usize = 2048;
const PIECE: usize = 1024;

/// Pieces of scored keys whose weights a task adds up, and far keys of which a task gathers the chosen ones.
const ADDED: usize = 4;
const GATHERED: usize = 4096;

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

impl<T: Real> FarKeys<T> {
    /// Makes place for `len` keys; what was there before stays.
    fn resize(&mut self, len: usize, d: usize, d_v: usize) {
        for (x, len) in [(&mut self.k, len * d), (&mut self.v, len * d_v), (&mut self.bias, len)] {
            if x.capacity() < len {
                // The next choice is larger, and so are the means after the next run.
                pages::reserve(x, len + len / 4 - x.len());
            }
            x.resize(len, T::ZERO);
        }
    }
}

/// Takes the first `len` elements off a slice.
fn take_front<'a, T>(rest: &mut &'a mut [T], len: usize) -> &'a mut [T] {
    let (front, behind) = std::mem::take(rest).split_at_mut(len);
    *rest = behind;
    front
}

/// Keys among which one task gathers the chosen ones, and its part of the far keys.
struct Part<'a, T> {
    keys: Range<usize>,
    chosen: &'a [u32],
    rows: Slots<'a, T>,
    /// Room for the means of all runs.
    means: Slots<'a, T>,
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
            matvec_each(keys, q, logits);
            scale_by(scale, logits);
            for (logits, found) in logits.chunks_exact_mut(keys.rows()).zip(found.chunks_exact_mut(2)) {
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
        let half = T::from_f64(0.5);
        let far = self.plan.params.sinks.min(edge)..edge;
        let diagonals = self.plan.params.diagonals > 0;
        self.mass.resize(n, T::ZERO);
        let each = weights.par_chunks_mut(SCORED * heads).zip(shares.par_chunks(heads));
        let each = each.zip(self.mass.par_chunks_mut(SCORED)).enumerate().with_min_len(ADDED);
        let votes: Vec<Vec<Vote>> = each
            .map(|(t, ((weights, shares), mass))| {
                // The sum over all heads overwrites the first head's weights.
                let (first, others) = weights.split_at_mut(mass.len());
                scale_by(shares[0], first);
                let others = others.chunks_exact(mass.len()).zip(&shares[1..]);
                others.for_each(|(weights, &share)| axpy(share, weights, first));
                let (mut votes, start) = (Vec::new(), t * SCORED);
                if diagonals {
                    voters(first, T::ONE, start, &far, |j, weight| {
                        votes.push(Vote { key: j, weight, known: mass[j - start].to_f64() });
                    });
                }
                mass.iter_mut().zip(first).for_each(|(m, w)| *m = half * *m + *w);
                votes
            })
            .collect();
        self.choose(n, edge, &votes.concat());
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
        // A stable sort merges what is in order already.
        self.chosen.sort();
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
    fn gather(&mut self, edge: usize) {
        let (k, v, (d, d_v)) = (self.cached.keys(), self.cached.values(), self.cached.widths());
        let Params { sinks, far_block, .. } = self.plan.params;
        let (sinks, parts) = (sinks.min(edge), self.plan.parts());
        // Tasks end with a run.
        let step = (GATHERED / far_block).max(1) * far_block;
        let tasks = || {
            let first = sinks / step * step;
            let ends = (first..edge).step_by(step).map(|start| (start + step).min(edge));
            ends.scan(sinks, |start, end| Some(std::mem::replace(start, end)..end))
        };
        let room = |keys: &Range<usize>| (keys.end.div_ceil(far_block) - keys.start / far_block) * parts;
        let exact = sinks + self.chosen.len();
        self.far.resize(exact + tasks().map(|keys| room(&keys)).sum::<usize>(), d, d_v);
        let FarKeys { k: far_k, v: far_v, bias } = &mut self.far;
        let (mut rows_k, mut means_k) = far_k.split_at_mut(exact * d);
        let (mut rows_v, mut means_v) = far_v.split_at_mut(exact * d_v);
        let (mut rows_bias, mut means_bias) = bias.split_at_mut(exact);
        k.gather_into(0..sinks, take_front(&mut rows_k, sinks * d));
        v.gather_into(0..sinks, take_front(&mut rows_v, sinks * d_v));
        take_front(&mut rows_bias, sinks).fill(T::ZERO);
        let mut chosen = &self.chosen[..];
        let split = |keys: Range<usize>| {
            let (own, rest) = chosen.split_at(chosen.partition_point(|&j| (j as usize) < keys.end));
            chosen = rest;
            let (count, room) = (own.len(), room(&keys));
            let rows = Slots {
                k: take_front(&mut rows_k, count * d),
                v: take_front(&mut rows_v, count * d_v),
                bias: take_front(&mut rows_bias, count),
            };
            let means = Slots {
                k: take_front(&mut means_k, room * d),
                v: take_front(&mut means_v, room * d_v),
                bias: take_front(&mut means_bias, room),
            };
            Part { keys, chosen: own, rows, means }
        };
        let split: Vec<Part<'_, T>> = tasks().map(split).collect();
        let means = &self.means;
        let gather = |Part { keys, chosen, rows, means: room }: Part<'_, T>| {
            let index = || chosen.iter().map(|&j| j as usize);
            k.gather_into(index(), rows.k);
            v.gather_into(index(), rows.v);
            rows.bias.fill(T::ZERO);
            if parts > 0 { means.write(k, v, keys, chosen, (rows.k, rows.v), room) } else { 0 }
        };
        let counts: Vec<usize> = split.into_par_iter().with_max_len(1).map(gather).collect();
        // Parts of runs that were chosen whole have no mean.
        let (mut from, mut len) = (exact, exact);
        for (count, keys) in counts.into_iter().zip(tasks()) {
            if from > len {
                far_k.copy_within(from * d..(from + count) * d, len * d);
                far_v.copy_within(from * d_v..(from + count) * d_v, len * d_v);
                bias.copy_within(from..from + count, len);
            }
            (from, len) = (from + room(&keys), len + count);
        }
        self.far.resize(len, d, d_v);
        self.edge = edge;
    }

    /// Appends the means of the keys that the window has left since the last call; none of them is chosen.
    fn append_means(&mut self, edge: usize) {
        let (k, v, (d, d_v)) = (self.cached.keys(), self.cached.values(), self.cached.widths());
        let (len, left) = (self.far.bias.len(), self.edge..edge);
        self.far.resize(len + self.means.most(left.len()), d, d_v);
        let FarKeys { k: far_k, v: far_v, bias } = &mut self.far;
        let room = Slots { k: &mut far_k[len * d..], v: &mut far_v[len * d_v..], bias: &mut bias[len..] };
        let count = self.means.write(k, v, left, &[], (&[], &[]), room);
        self.far.resize(len + count, d, d_v);
    }

    /// Brings the far keys up to date after the window has moved.
    fn advance(&mut self, edge: usize) {
        // Sinks and the run that they cut change until all sinks are far.
        if self.edge < self.plan.params.sinks {
            self.gather(edge);
        } else if self.plan.parts() > 0 {
            self.append_means(edge);
        }
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

    fn push_on_caller(&self, tokens: usize) -> bool {
        // A run that becomes whole is summed up on all threads.
        let whole = (self.cached.tokens() + tokens) / self.plan.params.far_block;
        tokens == 1 && (self.plan.parts() == 0 || whole <= self.means.runs())
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
            self.gather(edge);
        } else if edge != self.edge {
            self.advance(edge);
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

#[cfg(test)]
mod tests {
    use super::super::Far;
    use super::*;
    use crate::Workspace;
    use crate::engine::Gathered;
    use attlas_num::rng::StreamKey;

    /// Sinks, chosen keys and means, gathered one after another.
    fn check_far(stream: &ColumnStream<f64>, cx: Context<'_>, what: &str) {
        let (k, v, (d, d_v)) = (stream.cached.keys(), stream.cached.values(), stream.cached.widths());
        let far = stream.plan.params.sinks.min(stream.edge)..stream.edge;
        let most = far.start + stream.chosen.len() + stream.means.most(far.len());
        let mut all = Gathered::new(most, d, d_v, cx);
        all.append(k, v, 0..far.start);
        all.append(k, v, stream.chosen.iter().map(|&j| j as usize));
        if stream.plan.parts() > 0 {
            stream.means.append(k, v, far, &stream.chosen, &mut all);
        }
        assert!(stream.far.k == all.keys().data(), "keys, {what}");
        assert!(stream.far.v == all.values().data(), "values, {what}");
        assert!(stream.far.bias == all.biases(), "biases, {what}");
    }

    #[test]
    fn far_keys_are_those_gathered_one_after_another() {
        let (n, d, d_v, heads) = (2 * GATHERED + 900, 3, 2, 2);
        let mut rng = StreamKey::new(1).rng();
        let mut draw = |len: usize| {
            let mut x = vec![0.0f64; len];
            rng.fill_normal(&mut x);
            x
        };
        let (k, v, q) = (draw(n * d), draw(n * d_v), draw(heads * d));
        let (k, v) = (MatRef::new(&k, n, d), MatRef::new(&v, n, d_v));
        let problem = Problem { d_v, ..Problem::new(heads, n, d).with_kv_heads(1) };
        let ws = Workspace::single().unwrap();
        // With nearly all keys chosen, most short runs are chosen whole.
        for (far, far_block, far_share) in [
            (Far::Mean, 64, 0.1),
            (Far::Mean, 4, 0.95),
            (Far::Split, 16, 0.6),
            (Far::None, 64, 0.1),
            (Far::Mean, 5000, 0.1),
        ] {
            let params = Params {
                far,
                far_block,
                far_share,
                keys: 1,
                sinks: 70,
                window: 5,
                refresh: 7,
                ..Params::default()
            };
            let mut stream = ColumnStream::new(SampledColumns::new(params), &problem);
            let (mut out, mut lse) = (vec![0.0; heads * d_v], vec![0.0; heads]);
            let mut done = 0;
            while done < n {
                let next = if done == 200 { n - 200 } else { done + 1 };
                stream.push(k.sub_rows(done..next), v.sub_rows(done..next), ws.context()).unwrap();
                let q = MatRef::new(&q, heads, d);
                stream.attend(q, 1.0, &mut out, &mut lse, ws.context()).unwrap();
                check_far(&stream, ws.context(), &format!("{far:?} {far_block} {far_share}, {next} keys"));
                done = next;
            }
        }
    }
}
