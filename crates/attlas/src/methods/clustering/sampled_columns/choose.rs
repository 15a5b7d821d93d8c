//! Which far keys a block of rows attends to: the heaviest by scout rows or by a mean of queries, and diagonals.

use super::{Chooser, Params};
use crate::engine::{Place, Scored, select_top};
use crate::{Mask, Real};
use attlas_num::kernels::{axpy, exp_sum, matvec, max, sum};
use std::ops::Range;

/// Chooses by the parameters of a plan.
#[derive(Clone, Copy, Debug)]
pub(super) struct Choice<'a, T> {
    pub(super) params: &'a Params,
    pub(super) mask: Mask,
    pub(super) scored: Scored<'a, T>,
}

impl<T: Real> Choice<'_, T> {
    /// The chosen far keys in increasing order, and how many scores were computed.
    pub(super) fn choose(&self, place: &Place) -> (Vec<u32>, u64) {
        if place.far_len() == 0 || self.params.keys == 0 && self.params.diagonals == 0 {
            return (Vec::new(), 0);
        }
        match self.params.chooser {
            Chooser::Scouts => self.by_scouts(place),
            Chooser::MeanQuery => self.by_mean_query(place),
        }
    }

    fn by_scouts(&self, place: &Place) -> (Vec<u32>, u64) {
        let Params { scouts, block, diagonals, .. } = *self.params;
        let scouts = place.scouts(scouts, block);
        let far = place.far();
        let mut mass = self.scored.cx.scratch.take_zeroed::<T>(place.end);
        let mut votes = Votes::default();
        let visited = self.scored.weights(place, &scouts, |r, start, weights, share| {
            axpy(share, weights, &mut mass[start..start + weights.len()]);
            if diagonals > 0 {
                far.iter().for_each(|far| {
                    // A key at distance o from the scout votes for the run that begins at distance o from the first row.
                    voters(weights, share, start, far, |j, weight| {
                        let run = (j + place.first).checked_sub(r);
                        votes.list.extend(run.map(|start| Vote { start, scout: r, weight }));
                    });
                });
            }
        });
        let mut chosen = self.heaviest(place, &mut mass);
        self.add_diagonals(place, votes.counted(scouts.len()), &mut chosen);
        (chosen, visited)
    }

    /// By one score for each key: its product with the mean of the last queries up to the first row.
    fn by_mean_query(&self, place: &Place) -> (Vec<u32>, u64) {
        let Self { params, scored: Scored { q, k, scale, cx, .. }, .. } = *self;
        let from = place.first.saturating_sub(params.recent - 1);
        let rows = match self.mask {
            Mask::Causal => from..place.first + 1,
            Mask::None => from..place.first + place.rows,
        };
        let mut mean = vec![T::ZERO; k.cols()];
        let share = T::ONE / T::from_usize(rows.len() * q.heads());
        for h in 0..q.heads() {
            let head = q.head(h);
            rows.clone().for_each(|r| axpy(share, head.row(r), &mut mean));
        }
        let mut mass = cx.scratch.take::<T>(place.end);
        matvec(k.sub_rows(0..place.end), &mean, &mut mass);
        mass.iter_mut().for_each(|x| *x *= scale);
        let most = place.far().iter().fold(T::NEG_INFINITY, |m, far| m.max(max(&mass[far.clone()])));
        exp_sum(&mut mass, most);
        (self.heaviest(place, &mut mass), place.end as u64)
    }

    /// The heaviest far keys, at most `keys`, and no more than hold the share `mass` of the mass of all far keys.
    fn heaviest(&self, place: &Place, mass: &mut [T]) -> Vec<u32> {
        let Params { keys, mass: wanted, .. } = *self.params;
        let [before, behind] = place.far();
        // The far keys side by side.
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
            let mut held = 0.0;
            let enough = found.iter().take_while(|&&i| {
                let short = held < total;
                held += mass[i].to_f64();
                short
            });
            let count = enough.count();
            found.truncate(count);
            found.sort_unstable();
        }
        let key = |i: usize| if i < split { before.start + i } else { behind.start + i - split };
        found.into_iter().map(|i| key(i) as u32).collect()
    }

    /// Adds the runs of keys at the distances with most votes, those beside them included.
    fn add_diagonals(&self, place: &Place, counted: Vec<(usize, f64)>, chosen: &mut Vec<u32>) {
        let far = place.far();
        let mut taken: Vec<usize> = Vec::new();
        for (start, _) in counted {
            let beside = taken.iter().any(|t| start.abs_diff(*t) <= BESIDE);
            if !beside && taken.len() == self.params.diagonals {
                continue;
            }
            let run = start..start + self.params.block;
            let known = chosen.len();
            for far in &far {
                chosen.extend((run.start.max(far.start)..run.end.min(far.end)).map(|j| j as u32));
            }
            if !beside && chosen.len() > known {
                taken.push(start);
            }
        }
        if !taken.is_empty() {
            chosen.sort_unstable();
            chosen.dedup();
        }
    }
}

/// Share of a row's weight from which on a key votes for its distance.
pub(super) const VOTE: f64 = 1.0 / 64.0;

/// Distances that differ by no more than this count as one: heads that copy look at a key and at its neighbours.
const BESIDE: usize = 2;

/// Calls `vote` with every key of `range` that holds at least the share [`VOTE`] of a row's weight; `weights` times `share`
/// are those of the keys from `start` on.
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
        // A loop without a way out runs over many weights at a time.
        if keys.iter().fold(false, |any, w| any | (*w >= least)) {
            let heavy = keys.iter().enumerate().filter(|(_, w)| **w >= least);
            heavy.for_each(|(j, w)| vote(from + i * PIECE + j, (*w * share).to_f64()));
        }
    }
}

/// Weights that are looked through at a time.
const PIECE: usize = 64;

/// The weight that one head of a scout holds along a diagonal.
#[derive(Clone, Copy, Debug)]
struct Vote {
    /// Key at the distance of the voter from the first row.
    start: usize,
    scout: usize,
    weight: f64,
}

/// Votes of all scouts and heads.
#[derive(Debug, Default)]
struct Votes {
    list: Vec<Vote>,
}

impl Votes {
    /// Starts of runs with their votes, most votes first, ties to the smaller distance: the weight of all scouts but the one
    /// that holds most. A key that every row looks at lies at another distance from each scout, and gets none.
    fn counted(mut self, scouts: usize) -> Vec<(usize, f64)> {
        self.list.sort_by_key(|vote| (vote.start, vote.scout));
        let runs = self.list.chunk_by(|a, b| a.start == b.start);
        let counted = runs.map(|votes| {
            let of_scouts = votes.chunk_by(|a, b| a.scout == b.scout);
            let of_scouts = of_scouts.map(|votes| votes.iter().map(|vote| vote.weight).sum::<f64>());
            let (all, most) = of_scouts.fold((0.0, 0.0), |(all, most): (f64, f64), w| (all + w, most.max(w)));
            (votes[0].start, if scouts > 1 { all - most } else { all })
        });
        let mut counted: Vec<(usize, f64)> = counted.filter(|(_, votes)| *votes > 0.0).collect();
        counted.sort_by(|a, b| b.1.total_cmp(&a.1).then(b.0.cmp(&a.0)));
        counted
    }
}
