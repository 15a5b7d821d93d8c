//! Which far keys a block of rows attends to: the heaviest by scout rows or by a mean of queries, and diagonals.

use super::{Chooser, Params};
use crate::engine::{Place, Scored, select_top};
use crate::{Mask, Real};
use attlas_num::kernels::{axpy, exp_sum, matvec, max, sum};

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
        let scratch = self.scored.cx.scratch;
        let mut mass = scratch.take_zeroed::<T>(place.end);
        let mut votes = scratch.take_zeroed::<T>(if diagonals > 0 { place.end } else { 0 });
        let visited = self.scored.weights(place, &scouts, |r, start, weights, share| {
            axpy(share, weights, &mut mass[start..start + weights.len()]);
            // A key at distance o from the scout votes for the run that begins at distance o from the first row.
            let (ahead, back) = (place.first.saturating_sub(r), r.saturating_sub(place.first));
            let skipped = back.saturating_sub(start).min(weights.len());
            let (voters, to) = (&weights[skipped..], start + skipped + ahead - back.min(start + skipped));
            let len = voters.len().min(votes.len().saturating_sub(to));
            if len > 0 {
                axpy(share, &voters[..len], &mut votes[to..to + len]);
            }
        });
        let mut chosen = self.heaviest(place, &mut mass);
        self.add_diagonals(place, &mut votes, &mut chosen);
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

    /// Adds the runs of keys at the heaviest distances beyond the near field.
    fn add_diagonals(&self, place: &Place, votes: &mut [T], chosen: &mut Vec<u32>) {
        if votes.is_empty() {
            return;
        }
        let block = self.params.block;
        let [before, behind] = place.far();
        // Where a run may begin: it ends before the near field, or begins behind it.
        let starts =
            [0..(place.near.start + 1).saturating_sub(block), behind.start.min(votes.len())..votes.len()];
        for _ in 0..self.params.diagonals {
            let tops = starts.clone().map(|range| max(&votes[range]));
            let best = if tops[1] > tops[0] { 1 } else { 0 };
            if tops[best].partial_cmp(&T::ZERO).is_none_or(|order| order.is_le()) {
                break;
            }
            // Ties go to the smaller distance.
            let Some(start) = starts[best].clone().rev().find(|&t| votes[t] == tops[best]) else { break };
            votes[start] = T::ZERO;
            let run = start..start + block;
            for far in [&before, &behind] {
                chosen.extend((run.start.max(far.start)..run.end.min(far.end)).map(|j| j as u32));
            }
        }
        chosen.sort_unstable();
        chosen.dedup();
    }
}
