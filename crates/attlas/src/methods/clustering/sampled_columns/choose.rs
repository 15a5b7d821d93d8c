//! Choice of far keys for a block of rows: the heaviest by scout rows or by a mean of queries, and diagonals.

use super::{Chooser, Params};
use crate::engine::{QueryBlock, Scored};
use crate::{Mask, Real};
use attlas_num::cluster::select_top;
use attlas_num::kernels::{axpy, exp_sum, matvec, max, sum};
use std::ops::Range;

/// Chooses keys by the parameters of a plan.
#[derive(Clone, Copy, Debug)]
pub(super) struct Choice<'a, T> {
    pub(super) params: &'a Params,
    pub(super) mask: Mask,
    pub(super) scored: Scored<'a, T>,
}

/// Choice of the scouts for a block of rows.
#[derive(Debug, Default)]
pub(super) struct Scouted {
    /// The heaviest far keys, in increasing order.
    keys: Vec<u32>,
    votes: Vec<Vote>,
    /// Number of scores computed.
    pub(super) visited: u64,
}

impl<T: Real> Choice<'_, T> {
    /// Scores the far keys of a block by its chooser.
    pub(super) fn scout(&self, query_block: &QueryBlock) -> Scouted {
        let keys = self.params.chosen_of(query_block.far_len());
        if query_block.far_len() == 0 || keys == 0 && self.params.diagonals == 0 {
            return Scouted::default();
        }
        match self.params.chooser {
            Chooser::Scouts => self.by_scouts(query_block),
            Chooser::MeanQuery => self.by_mean_query(query_block),
        }
    }

    /// Returns the chosen far keys in increasing order: those found by the block's own scouts, and the diagonals voted
    /// by these and by the scouts of earlier blocks, which precede it in `scouted`.
    pub(super) fn choose(&self, query_block: &QueryBlock, scouted: &[Scouted]) -> Vec<u32> {
        let mut chosen = scouted.last().map_or_else(Vec::new, |own| own.keys.clone());
        let blocks = if self.mask == Mask::Causal { BLOCKS } else { 1 };
        let from = scouted.len().saturating_sub(blocks);
        let votes = scouted[from..].iter().flat_map(|s| &s.votes).copied().collect();
        self.add_diagonals(query_block, counted(votes, self.params.scouts), &mut chosen);
        chosen
    }

    fn by_scouts(&self, query_block: &QueryBlock) -> Scouted {
        let Params { scouts, block, diagonals, .. } = *self.params;
        let scouts = query_block.scouts(scouts, block);
        let far = query_block.far();
        let mut mass = self.scored.cx.scratch.take_zeroed::<T>(query_block.end);
        let mut votes = Vec::new();
        let visited = self.scored.weights(query_block, &scouts, |r, start, weights, share| {
            axpy(share, weights, &mut mass[start..start + weights.len()]);
            if diagonals > 0 {
                let position = r as isize + query_block.position - query_block.first as isize;
                far.iter().for_each(|far| {
                    voters(weights, share, start, far, |j, weight| {
                        votes.push(Vote { distance: position - j as isize, scout: r, weight });
                    });
                });
            }
        });
        Scouted { keys: self.heaviest(query_block, &mut mass), votes, visited }
    }

    /// Scores each key by its product with the mean of the last queries up to the first row.
    fn by_mean_query(&self, query_block: &QueryBlock) -> Scouted {
        let Self { params, scored: Scored { q, k, scale, cx, .. }, .. } = *self;
        let from = query_block.first.saturating_sub(params.recent - 1);
        let rows = match self.mask {
            Mask::Causal => from..query_block.first + 1,
            Mask::None => from..query_block.first + query_block.rows,
        };
        let mut mean = vec![T::ZERO; k.cols()];
        let share = T::ONE / T::from_usize(rows.len() * q.heads());
        for h in 0..q.heads() {
            let head = q.head(h);
            rows.clone().for_each(|r| axpy(share, head.row(r), &mut mean));
        }
        let mut mass = cx.scratch.take::<T>(query_block.end);
        matvec(k.sub_rows(0..query_block.end), &mean, &mut mass);
        mass.iter_mut().for_each(|x| *x *= scale);
        let most = query_block.far().iter().fold(T::NEG_INFINITY, |m, far| m.max(max(&mass[far.clone()])));
        exp_sum(&mut mass, most);
        let keys = self.heaviest(query_block, &mut mass);
        Scouted { keys, votes: Vec::new(), visited: query_block.end as u64 }
    }

    /// Returns the heaviest far keys: at most `keys` or `far_share` of them, and only until they hold the share `mass`
    /// of all far mass.
    fn heaviest(&self, query_block: &QueryBlock, mass: &mut [T]) -> Vec<u32> {
        let (keys, wanted) = (self.params.chosen_of(query_block.far_len()), self.params.mass);
        let [before, behind] = query_block.far();
        // The masses of the far keys, contiguously.
        let split = before.len();
        let behind = behind.start.min(mass.len())..behind.end.min(mass.len());
        mass.copy_within(before.clone(), 0);
        mass.copy_within(behind.clone(), split);
        let mass = &mass[..split + behind.len()];
        let mut found = Vec::new();
        select_top(mass, keys, &mut found);
        if wanted < 1.0 {
            let total = wanted * sum(mass).to_f64();
            found.sort_by(|&a, &b| mass[b].partial_cmp(&mass[a]).unwrap_or(std::cmp::Ordering::Equal));
            let mut covered = 0.0;
            let enough = found.iter().take_while(|&&i| {
                let short = covered < total;
                covered += mass[i].to_f64();
                short
            });
            let count = enough.count();
            found.truncate(count);
            found.sort_unstable();
        }
        let key = |i: usize| if i < split { before.start + i } else { behind.start + i - split };
        found.into_iter().map(|i| key(i) as u32).collect()
    }

    /// Adds the runs of keys at the distances with most votes and at their neighbours.
    fn add_diagonals(&self, query_block: &QueryBlock, counted: Vec<(isize, f64)>, chosen: &mut Vec<u32>) {
        let far = query_block.far();
        let mut taken: Vec<isize> = Vec::new();
        for (distance, _) in counted {
            let beside = taken.iter().any(|t| distance.abs_diff(*t) <= BESIDE);
            if !beside && taken.len() == self.params.diagonals {
                continue;
            }
            let run =
                query_block.position - distance..query_block.position - distance + self.params.block as isize;
            let known = chosen.len();
            for far in &far {
                let (start, end) = (far.start as isize, far.end as isize);
                chosen.extend((run.start.max(start)..run.end.min(end)).map(|j| j as u32));
            }
            if !beside && chosen.len() > known {
                taken.push(distance);
            }
        }
        if !taken.is_empty() {
            chosen.sort_unstable();
            chosen.dedup();
        }
    }
}

/// Least share of a row's weight with which a key votes for its distance.
pub(super) const VOTE: f64 = 1.0 / 128.0;

/// Blocks whose scouts vote: a copied passage spans many rows, and a head need not attend to it in each.
const BLOCKS: usize = 8;

/// Distances that differ by no more than this count as one: copying heads attend to a key and its neighbours.
const BESIDE: usize = 2;

/// Calls `vote` with every key of `range` that has at least the share [`VOTE`] of a row's weight; `weights` times
/// `share` are the weights of the keys from `start` on.
pub(super) fn voters<T: Real>(
    weights: &[T],
    share: T,
    start: usize,
    range: &Range<usize>,
    mut vote: impl FnMut(usize, f64),
) {
    let from = range.start.clamp(start, start + weights.len());
    let to = range.end.clamp(from, start + weights.len());
    let least = T::from_f64(VOTE) / share;
    for (i, keys) in weights[from - start..to - start].chunks(PIECE).enumerate() {
        // A loop without an early exit vectorises.
        if keys.iter().fold(false, |any, w| any | (*w >= least)) {
            let heavy = keys.iter().enumerate().filter(|(_, w)| **w >= least);
            heavy.for_each(|(j, w)| vote(from + i * PIECE + j, (*w * share).to_f64()));
        }
    }
}

/// Weights scanned at a time.
const PIECE: usize = 64;

/// Weight of one head of a scout at a distance.
#[derive(Clone, Copy, Debug)]
struct Vote {
    distance: isize,
    scout: usize,
    weight: f64,
}

/// Returns distances with their votes, most votes first, ties to the smaller distance: the weight of all scouts except
/// the largest one. A key with weight in every row is at a different distance from each scout, and gets no votes.
fn counted(mut votes: Vec<Vote>, scouts: usize) -> Vec<(isize, f64)> {
    votes.sort_by_key(|vote| (vote.distance, vote.scout));
    let distances = votes.chunk_by(|a, b| a.distance == b.distance);
    let counted = distances.map(|votes| {
        let of_scouts = votes.chunk_by(|a, b| a.scout == b.scout);
        let of_scouts = of_scouts.map(|votes| votes.iter().map(|vote| vote.weight).sum::<f64>());
        let (all, most) = of_scouts.fold((0.0, 0.0), |(all, most): (f64, f64), w| (all + w, most.max(w)));
        (votes[0].distance, if scouts > 1 { all - most } else { all })
    });
    let mut counted: Vec<(isize, f64)> = counted.filter(|(_, votes)| *votes > 0.0).collect();
    counted.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    counted
}
